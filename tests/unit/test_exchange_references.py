"""The exchanges' references in a world of ranks at hand: what each computes, and what it leaves in its inboxes."""

import pytest

torch = pytest.importorskip("torch")

from bench.rank_world import draw_world  # noqa: E402
from jitspark.checking.arguments import reference_module  # noqa: E402
from jitspark.geometry import deployment  # noqa: E402
from jitspark.registry import load_spec, specializations  # noqa: E402
from kernel_specs.expert_combine_rmsnorm.reference import expert_combine_rmsnorm  # noqa: E402
from kernel_specs.gated_residual_rmsnorm.reference import gated_residual_rmsnorm  # noqa: E402
from kernel_specs.primitives import exchange_reference as exchange  # noqa: E402
from kernel_specs.primitives.inbox import slot_of  # noqa: E402
from kernel_specs.rmsnorm_nvfp4_quantize.reference import rmsnorm_nvfp4_quantize  # noqa: E402
from kernel_specs.sigmoid_bias_topk_routing.reference import sigmoid_bias_topk_routing  # noqa: E402

REDUCE, GATHER = "allreduce_gated_residual_rmsnorm", "allgather_gated_residual_rmsnorm"
COLUMNS, EXPERTS = "allgather_columns", "expert_reduce_rmsnorm_combine"
INPUT = "allgather_rmsnorm_nvfp4_quantize_routing"


def small_world(name, size=2, rounds=1, **statics):
    spec = load_spec(name)
    fitting = [
        case
        for case in spec.cases
        if case.axes["world_size"] == size and all(case.statics[key] == value for key, value in statics.items())
    ]
    case = min(fitting, key=lambda case: (max(case.axes.values()), case.axes["num_tokens"] == 1))
    return draw_world(spec.specialize_case(case), case.axes, seed=5, rounds=rounds, device="cpu")


def boundary_of(world, branch):
    """The unfused boundary on a whole branch: stream and activation."""
    names = [arg.name for arg in world.specialization.args]
    exchanged = {world.payload, "rank", "timeout_us", "epochs", "failure", *world.tables, *world.tables.values()}
    values = world.values(0, 0)
    given = [values[name] for name in names if name not in exchanged]
    own = ("round_sum", "shots")
    statics = {key: value for key, value in world.specialization.statics.items() if key not in own}
    gated_residual_rmsnorm(branch, *given, **statics)
    return {name: values[name] for name in world.written}


def same_bits(one, other):
    return torch.equal(exchange.packets(one.contiguous()), exchange.packets(other.contiguous()))


@pytest.mark.parametrize("name", [REDUCE, GATHER, COLUMNS, EXPERTS, INPUT])
@pytest.mark.parametrize("size", [2, 4, 8])
def test_all_ranks_end_with_the_same_bits(name, size):
    world = small_world(name, size)

    first, *others = [world.expected(rank, 0) for rank in range(size)]

    for other in others:
        assert all(torch.equal(first[key].view(torch.uint8), other[key].view(torch.uint8)) for key in first)


@pytest.mark.parametrize("rounded", [False, True])
def test_all_reduce_is_the_boundary_of_the_sum_in_rank_order(rounded):
    world = small_world(REDUCE, 8, round_sum=rounded)
    total = torch.zeros_like(world.rounds[0][0], dtype=torch.float32)
    for part in world.rounds[0]:
        total += part.float()

    got, want = world.expected(3, 0), boundary_of(world, total.bfloat16() if rounded else total)

    assert all(torch.equal(got[name], want[name]) for name in world.written)


@pytest.mark.parametrize(("size", "rounded"), [(2, False), (4, False), (8, False), (8, True), (16, False)])
def test_two_shots_give_the_bits_of_one(size, rounded):
    world = small_world(REDUCE, size, shots=2, round_sum=rounded)
    total = exchange.sum_in_rank_order(world.rounds[0])
    want = boundary_of(world, total.bfloat16() if rounded else total)

    for rank in (0, size - 1):
        got = world.expected(rank, 0)

        assert all(torch.equal(got[name], want[name]) for name in world.written)


def test_each_column_is_summed_by_one_rank():
    columns = reference_module(small_world(REDUCE, 4, shots=2).specialization).owned_columns(1024, 4, "cpu")

    assert sorted(columns.flatten().tolist()) == list(range(1024))
    assert columns[1, :128].tolist() == list(range(128, 256))


def test_a_table_of_nothing_but_ones_own_address_brings_what_one_sends():
    """As the kernel has it: what goes to the rank `ahead` places ahead lies in that slot of one's own inbox."""
    world = small_world(REDUCE, 4, shots=2)
    module = reference_module(world.specialization)
    values = world.values(1, 0)
    columns = module.owned_columns(values["partial"].shape[-1], 4, "cpu")

    module.deliver_alone(values)

    for ahead in range(1, 4):
        sent = values["partial"][:, columns[(1 + ahead) % 4]]
        assert same_bits(values["row_inbox"][ahead, 0], sent)
        assert same_bits(values["sum_inbox"][ahead, 0], values["sum_inbox"][0, 0])


def test_all_gather_is_the_boundary_of_the_whole_branch():
    world = small_world(GATHER, 4)

    got, want = world.expected(1, 0), boundary_of(world, torch.cat(list(world.rounds[0]), dim=-1))

    assert all(torch.equal(got[name], want[name]) for name in world.written)


def test_columns_come_in_rank_order_and_keep_their_bits_but_for_zeros():
    world = small_world(COLUMNS, 2)

    got = world.expected(1, 0)["out"]

    assert same_bits(got, torch.cat(list(world.rounds[0]), dim=-1))
    assert (got[:, :4].view(torch.int16) != 0).any(), "no packet of zeros was tried"


@pytest.mark.parametrize("size", [2, 4, 8])
def test_the_experts_input_is_that_of_the_launches_that_it_stands_for(size):
    world = small_world(INPUT, size)
    apart = world.values(0, 0)
    row = exchange.packets(torch.cat(list(world.rounds[0]), dim=-1))
    given = (apart["weight"], apart["global_scale"], apart["codes"], apart["scales"], apart["eps"])
    rmsnorm_nvfp4_quantize(row, *given)
    routed = ("topk_ids", "topk_weights", "expert_ids", "route_offsets", "routes", "num_distinct_experts")
    asked = (apart["logits"], apart["bias"], apart["is_padding"])
    sigmoid_bias_topk_routing(*asked, *(apart[name] for name in routed), padded=True)

    got = world.expected(size - 1, 0)

    assert got.keys() == {"codes", "scales", *routed}
    assert all(torch.equal(value.view(torch.uint8), apart[name].view(torch.uint8)) for name, value in got.items())


@pytest.mark.parametrize("size", [2, 4, 8, 16])
def test_expert_rows_are_summed_before_the_norm_and_combined(size):
    world = small_world(EXPERTS, size)
    common = world.common
    want = torch.empty((world.axes["num_tokens"], world.axes["moe_hidden_size"]), dtype=torch.bfloat16)
    given = (common["topk_ids"], common["topk_weights"], common["weight"])
    expert_combine_rmsnorm(world.rounds[0], *given, want, common["eps"])

    got = world.expected(size - 1, 0)["out"]

    # float64 sums there, FP32 ones in rank order here: apart by an ulp of BF16 where a number lies between two values
    torch.testing.assert_close(got.double(), want.double(), rtol=2**-7, atol=4e-6)


@pytest.mark.parametrize(
    ("name", "statics"), [(REDUCE, {"shots": 1}), (REDUCE, {"shots": 2}), (GATHER, {}), (COLUMNS, {}), (EXPERTS, {})]
)
def test_halves_alternate_and_are_left_empty(name, statics):
    world = small_world(name, 2, rounds=3, **statics)
    module = reference_module(world.specialization)
    values = world.values(1, 0)
    for number, every in enumerate(world.rounds):
        values[world.payload].copy_(every[1])
        module.deliver(every, values)
        for inbox in world.tables.values():
            full = values[inbox].view(torch.int16).ne(0).flatten(2).any(dim=-1)
            assert full[1, number % 2] and not full[:, 1 - number % 2].any()
        getattr(module, name)(*values.values(), **world.specialization.statics)
        assert all((values[inbox].view(torch.int16) == 0).all() for inbox in world.tables.values())
        assert values["epochs"].max() == number + 1
    assert values["failure"] == 0


def test_no_packet_is_zero_and_no_number_changes():
    payload = torch.tensor([0.0, 0, 0, 0, -0.0, 0, 0, 0, 0, 0, 0, 1, 2, 3, 4, 5], dtype=torch.bfloat16)

    sent = exchange.packets(payload)

    assert (sent.view(torch.int64) != 0).all()
    assert torch.equal(sent, payload)
    assert torch.equal(sent[4:].view(torch.int16), payload[4:].view(torch.int16))
    assert torch.equal(exchange.packets(torch.zeros(2)), torch.zeros(2))


def test_deliver_puts_each_rank_where_its_kernel_would():
    every = torch.arange(1, 17, dtype=torch.bfloat16).view(4, 4)
    for rank in range(4):
        inbox = torch.zeros((4, 2, 4), dtype=torch.bfloat16)
        exchange.deliver(every, inbox, torch.tensor([[7]]), rank)

        for source in range(4):
            assert torch.equal(inbox[slot_of(source, rank, 4), 1], every[source])
        assert not inbox[:, 0].any()


def test_a_deployment_of_one_rank_asks_for_no_exchange_and_larger_ones_for_theirs():
    names = [REDUCE, GATHER, COLUMNS, EXPERTS, INPUT]

    assert specializations(deployment("tiny", 1), names) == ()
    for tp in (4, 8, 16):
        asked = specializations(deployment("muse_spark_open", tp), names)
        assert {each.axes["world_size"] for each in asked} == {tp}
        assert {each.name for each in asked} == set(names)
