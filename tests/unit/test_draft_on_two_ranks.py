"""The draft's plans on two ranks, played by their references in one process, against the plans of a rank alone."""

import importlib

import pytest

torch = pytest.importorskip("torch")

from bench.draft_scene import context_step  # noqa: E402
from jitspark.checking.plan_arguments import Step, random_step, random_weights  # noqa: E402
from jitspark.geometry import deployment  # noqa: E402
from jitspark.plans.binding import local_memory  # noqa: E402
from jitspark.plans.builder import Keys  # noqa: E402
from jitspark.plans.draft import context_plan, draft_plan  # noqa: E402
from jitspark.plans.reference_executor import ReferenceExecutor, argument_names  # noqa: E402

TARGET, RANKS = "sm_90a", 2
KEYS = Keys(TARGET)
EXCHANGES = ("allreduce_gated_residual_rmsnorm", "allgather_columns")
ALONE, SHARED = (deployment("tiny", tp) for tp in (1, RANKS))
ATTENTION = ALONE.draft.attention


def of_rank(name, weight, rank):
    """What a rank holds of a weight of a rank alone."""
    kind = name.rsplit(".", 1)[-1]
    if kind in ("o_proj", "down"):
        return weight.chunk(RANKS, dim=1)[rank].contiguous()
    dim = 1 if kind == "context_kv_weight" else 0
    heads = ATTENTION.query_width(1), ATTENTION.key_value_width(1)
    blocks = {
        "qkv_gate": (heads[0], heads[1], heads[1], heads[0]),
        "gate_up": (weight.shape[0] // 2,) * 2,
        "context_kv_weight": (heads[1],) * 2,
        "fc": weight.shape[:1],
    }.get(kind)
    if blocks is None:
        return weight
    return torch.cat([each.chunk(RANKS, dim=dim)[rank] for each in weight.split(list(blocks), dim=dim)], dim=dim)


class World:
    """The ranks of a plan, run launch by launch; an exchange gets what all of them have sent."""

    def __init__(self, plan, weights, step):
        self.sent = None
        self.ranks = [self._executor(plan, weights, step, rank) for rank in range(RANKS)]

    def _executor(self, plan, weights, step, rank):
        mine = {name: of_rank(name, weight, rank) for name, weight in weights.items()}
        caches = {name: each.chunk(RANKS, dim=1)[rank].clone() for name, each in step.kv_caches.items()}
        return ReferenceExecutor(
            plan,
            {**mine, **step.inputs, **caches},
            numbers={"rank": rank, "timeout_us": 1},
            symmetric=local_memory(plan, "cpu"),
            gather=lambda _: self.sent,
        )

    def run(self):
        for launch in self.ranks[0].plan.launches:
            if launch.operation in EXCHANGES:
                payload = importlib.import_module(f"kernel_specs.{launch.operation}.reference").PAYLOAD
                self.sent = torch.stack([arguments(each, launch)[payload] for each in self.ranks])
            for each in self.ranks:
                each.launch(launch)


def arguments(executor, launch):
    values = next(values for each, _, values in executor.laid_out() if each is launch)
    return dict(zip(argument_names(launch), values, strict=True))


def pair_of_runs(alone, shared, seed):
    """A rank alone and both ranks behind a run of the same work, from equal weights, inputs and caches."""
    generator = torch.Generator().manual_seed(seed)
    weights = random_weights(alone, generator)
    context = alone.stage.value == "draft_context"
    lengths = [30 + 9 * request for request in range(alone.rows // alone.query_length)]
    step = context_step(alone, generator) if context else random_step(alone, lengths, generator)
    copies = Step(step.inputs, {name: each.clone() for name, each in step.kv_caches.items()})
    one = ReferenceExecutor(alone, {**weights, **step.inputs, **copies.kv_caches})
    world = World(shared, weights, step)
    one.run()
    world.run()
    return one, world.ranks


def assert_near(got, wanted):
    """Partial sums are rounded on each rank, and each rounding moves what follows."""
    got, wanted = (torch.nan_to_num(each.float()) for each in (got, wanted))
    assert (got - wanted).norm() / wanted.norm() < 3e-2


@pytest.mark.parametrize("rows", [7, 21])
def test_both_ranks_end_with_the_hidden_states_of_a_rank_alone(rows):
    plans = [draft_plan(each, rows, TARGET, keys=KEYS) for each in (ALONE, SHARED)]
    one, ranks = pair_of_runs(*plans, seed=rows)

    assert torch.equal(*(each.outputs["hidden"] for each in ranks)), "ranks must agree bit for bit"
    assert_near(ranks[0].outputs["hidden"], one.outputs["hidden"])
    for name, cache in one.tensors.items():
        if name.endswith("kv_cache"):
            assert_near(torch.cat([each.tensors[name] for each in ranks], dim=1), cache)


@pytest.mark.parametrize("rows", [8, 24])
def test_each_rank_stores_its_heads_of_the_context_rows(rows):
    plans = [context_plan(each, rows, TARGET, from_taps=True, keys=KEYS) for each in (ALONE, SHARED)]
    one, ranks = pair_of_runs(*plans, seed=rows)

    for name, cache in one.tensors.items():
        if name.endswith("kv_cache"):
            together = torch.cat([each.tensors[name] for each in ranks], dim=1)
            torch.testing.assert_close(together.float(), cache.float(), rtol=2**-7, atol=2**-7)
