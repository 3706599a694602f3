"""Regions of plans in memory that all ranks map, on a CPU: what is refused, and how a silent rank is told of."""

import contextlib
from dataclasses import dataclass, replace

import pytest

torch = pytest.importorskip("torch")

from jitspark.errors import DeviceMemoryError, GeometryError, RankError, UsageError  # noqa: E402
from jitspark.geometry import deployment  # noqa: E402
from jitspark.peer_memory import peer_addresses  # noqa: E402
from jitspark.plans.backbone import decode_plan  # noqa: E402
from jitspark.plans.binding import Binding  # noqa: E402
from jitspark.plans.plan import Kind  # noqa: E402
from jitspark.runtime.distributed_exchanges import EXCHANGES, distributed_operations  # noqa: E402
from jitspark.runtime.mapped_memory import PeerMemory  # noqa: E402
from jitspark.runtime.symmetric_memory import (  # noqa: E402
    REGION_ALIGN,
    TIMEOUT_US,
    SilentRankWatch,
    exchange_memory,
    simulated_world,
)

PLANS = [decode_plan(deployment("tiny", 2), rows, "sm_90a") for rows in (8, 16)]


@dataclass(frozen=True, slots=True)
class Alone:
    """A rank of two, as far as this process sees: what others would say is not asked for."""

    rank: int = 1
    size: int = 2
    data: object = "the group"

    @contextlib.contextmanager
    def together(self, *_):
        yield

    telling = together
    patience = 120.0

    def failures(self, *said):
        return {} if said[-1] is None else {self.rank: said[-1]}


def peer_memory(found):
    """In the place of torch's: notes what is asked for."""

    def make(num_bytes, device):
        return torch.full((num_bytes,), 7, dtype=torch.uint8, device=device)

    def addresses(memory, group, _):
        found.append((len(memory), group))
        return (10**6, memory.data_ptr())

    return PeerMemory(make, addresses)


def made(plans=PLANS, group=None, found=None, addresses=None, **options):
    way = peer_memory([] if found is None else found)
    if addresses is not None:
        way = replace(way, addresses=addresses)
    return exchange_memory(plans, group or Alone(), "cpu", (1, 2), peer_memory=way, **options)


def test_all_plans_share_one_allocation_and_no_byte_of_it():
    found = []

    memory = made(found=found)

    assert len(found) == 1 and found[0][1] == "the group"
    first, second = (memory.of(plan) for plan in PLANS)
    assert first.local.untyped_storage().data_ptr() == second.local.untyped_storage().data_ptr()
    assert first.local.data_ptr() + len(first.local) == second.local.data_ptr()
    for plan, region in zip(PLANS, (first, second), strict=True):
        assert len(region.local) >= plan.symmetric_bytes > 0
        assert len(region.local) % REGION_ALIGN == 0
        assert not region.local.any(), "not zeroed"
        assert region.addresses[1] == region.local.data_ptr()
    assert second.addresses[0] - first.addresses[0] == len(first.local)


@pytest.mark.parametrize("exchanges", ["auto", "symmetric_memory"])
def test_memory_that_can_be_mapped_is_what_ranks_exchange_through(exchanges, caplog):
    found = []

    memory = made(found=found, exchanges=exchanges)

    assert len(found) == 1 and memory.gather is None
    assert not caplog.messages


def test_a_plan_binds_to_its_region():
    memory = made()
    plan = PLANS[1]
    binding = Binding(plan, "cpu", numbers=memory.numbers, symmetric=memory.of(plan))
    table = next(buffer for buffer in plan.buffers if buffer.kind is Kind.PEERS)
    inbox = next(buffer for buffer in plan.buffers if buffer.name == table.of)

    addresses = binding._addresses(table, {})

    assert addresses.tolist() == [address + inbox.offset for address in memory.of(plan).addresses]
    assert memory.numbers == {"rank": 1, "timeout_us": TIMEOUT_US}


@pytest.mark.parametrize(("size", "allowed"), [(2, (4, 8)), (4, (1, 2, 4))])
def test_a_world_of_another_size_is_refused(size, allowed):
    with pytest.raises(GeometryError) as raised:
        exchange_memory(PLANS, Alone(size=size), "cpu", allowed, peer_memory=peer_memory([]))

    assert f"{size} ranks" in raised.value.found
    assert "TP 2" in raised.value.found or "2" in raised.value.needed or size == 2


def test_peers_that_cannot_be_mapped_are_one_error_with_torchs_reason():
    def refuse(*_):
        raise RuntimeError("no peer access between 0 and 1\nC++ frames")

    with pytest.raises(UsageError) as raised:
        made(addresses=refuse)

    assert raised.value.found == "on rank 1: no peer access between 0 and 1"
    assert "vLLM's own decode" in raised.value.remedy


@pytest.mark.parametrize("problem", [RuntimeError("CUDA driver error: out of memory"), torch.OutOfMemoryError("none")])
def test_a_lack_of_memory_is_no_reason_to_exchange_another_way(problem):
    def refuse(*_):
        raise problem

    with pytest.raises(DeviceMemoryError) as raised:
        made(addresses=refuse, exchanges="auto")

    assert raised.value.found == str(problem) and raised.value.__cause__ is problem


@pytest.mark.parametrize(
    "problem", [torch.distributed.DistStoreError("no word from the store"), RuntimeError("Wait timeout")]
)
def test_nor_is_a_rank_that_was_waited_for_in_vain(problem):
    def refuse(*_):
        raise problem

    with pytest.raises(RankError, match=f"rank 1 failed: waited in vain: {problem}"):
        made(addresses=refuse, exchanges="auto")


def test_nor_is_an_error_that_came_up_with_it():
    def refuse(*_):
        raise torch.AcceleratorError("an illegal memory access was encountered")

    with pytest.raises(torch.AcceleratorError):
        made(addresses=refuse, exchanges="auto")


def test_torch_waits_for_the_other_ranks_no_longer_than_it_is_told_to(tmp_path, monkeypatch):
    from torch.distributed import _symmetric_memory as symmetric
    from torch.distributed import distributed_c10d

    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/meeting", rank=0, world_size=1)
    try:
        group = torch.distributed.group.WORLD
        store = distributed_c10d._get_process_group_store(group)
        before = store.timeout
        monkeypatch.setattr(symmetric, "rendezvous", lambda *_: store.wait(["what no rank leaves there"]))

        with pytest.raises(RuntimeError, match=r"(?i)timeout"):
            peer_addresses(torch.zeros(1), group, 0.1)

        assert store.timeout == before
    finally:
        torch.distributed.destroy_process_group()


def test_a_rank_alone_needs_no_peers():
    plan = decode_plan(deployment("tiny", 1), 8, "sm_90a")

    memory = exchange_memory([plan], Alone(rank=0, size=1), "cpu", (1, 2))

    assert memory.of(plan).local.numel() == 0 == plan.symmetric_bytes


def test_a_silent_rank_is_told_of_once_its_word_has_come():
    memory = made()
    watch = SilentRankWatch(PLANS, memory)
    (word,) = [each for each in PLANS[0].buffers if each.name.endswith("failure")]
    for plan in PLANS:
        watch.note(plan)
    watch.require_heard()
    memory.of(PLANS[0]).local[word.offset : word.offset + 4].view(torch.int32).fill_(1)

    watch.note(PLANS[1])
    watch.require_heard()
    watch.note(PLANS[0])

    with pytest.raises(RankError, match="nothing from rank 0 in time"):
        watch.require_heard()


def test_a_simulated_world_knows_its_own_ranks():
    world = simulated_world(64, 4, "cpu")

    assert len({region.local.data_ptr() for region in world}) == 4
    assert all(region.addresses == tuple(each.local.data_ptr() for each in world) for region in world)


def test_torch_distributed_serves_every_exchange_that_plans_launch():
    served = distributed_operations("stock", lambda own: own[None])
    launched = {launch.operation for plan in PLANS for launch in plan.launches if launch.part == "all_reduce"}
    with_inbox = {name for name in EXCHANGES if ("stock", name) in served}

    assert launched
    assert launched <= with_inbox
