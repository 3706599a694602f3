"""The sampling loop's plan: its launches for one rank and for several, and that it does what the loop does."""

import pytest

torch = pytest.importorskip("torch")

from markov_draws import STEPS, inputs  # noqa: E402

from jitspark.errors import SpecError  # noqa: E402
from jitspark.geometry import deployment  # noqa: E402
from jitspark.plans.costs import Workload, costs  # noqa: E402
from jitspark.plans.markov import FIRST_TOKEN, markov_plan  # noqa: E402
from jitspark.plans.plan import Kind  # noqa: E402
from jitspark.plans.reference_executor import ReferenceExecutor  # noqa: E402
from jitspark.runtime.markov_reference import ReferenceLoop  # noqa: E402
from jitspark.runtime.ranks import RankGroup  # noqa: E402

TRANSFORM = {"multiplier": 0.5, "soft_cap": 30.0}


def plan_of(geometry, tp, requests=1, **transform):
    return markov_plan(deployment(geometry, tp), requests, "sm_90a", **(transform or TRANSFORM))


def test_a_rank_alone_needs_two_launches():
    plan = plan_of("tiny", 1, requests=3)

    assert [launch.operation for launch in plan.launches] == ["skinny_gemm_bf16", "markov_gumbel_sampling"]
    assert plan.symmetric_bytes == 0


@pytest.mark.parametrize(("geometry", "tp"), [("tiny", 2), ("muse_spark_open", 4), ("muse_spark_open", 16)])
def test_several_ranks_exchange_winners_and_gather_logits(geometry, tp):
    plan = plan_of(geometry, tp, requests=2)
    named = plan.buffer_named()

    assert [launch.name for launch in plan.launches] == ["base_logits", "sampling", "gather_logits", "store_logits"]
    assert named["sampling.winners"].shape == (STEPS, 8, tp)
    assert (named["sampling.winners"].kind, named["sampling.peers"].of) == (Kind.SIGNAL, "sampling.winners")
    assert named["logits"].shape == (2 * STEPS, named["draft_logits"].shape[2])


def test_a_draft_without_a_cap_has_a_kernel_of_its_own():
    capped, plain = (plan_of("tiny", 1, **{**TRANSFORM, "soft_cap": cap}).launches[1] for cap in (30.0, None))

    assert capped.key != plain.key
    assert len(capped.arguments) == len(plain.arguments) + 1


def test_more_requests_than_a_launch_serves_are_refused():
    with pytest.raises(SpecError, match="num_requests=9 is more than 8"):
        plan_of("tiny", 1, requests=9)


def test_of_the_embeddings_only_a_row_for_each_sample_costs_anything():
    plan = plan_of("muse_spark_open", 8, requests=2)

    (_, sampling, *_) = costs(plan, Workload())

    assert sampling.weights == 202048 // 8 * 512 * 2 + 2 * STEPS * 512 * 2


@pytest.mark.parametrize("requests", [1, 4])
def test_the_plan_by_its_references_is_the_loop(requests):
    plan = plan_of("tiny", 1, requests=requests)
    given = inputs(requests, 6, 2048, 32, hidden=512)
    loop = ReferenceLoop(given.lm_head, given.markov_w1, given.markov_w2, 0, 0.5, 30.0, RankGroup(rank=0, size=1))
    tokens, logits = given.draft_tokens.clone(), given.draft_logits.clone()
    loop.run(given.hidden, tokens, logits, **given.step)
    weights = {name: getattr(given, name) for name in ("lm_head", "markov_w1", "markov_w2")}
    exchange = torch.zeros(plan.buffer_named()["exchange"].shape, dtype=torch.int64)

    executor = ReferenceExecutor(plan, {**weights, "exchange": exchange}, numbers={FIRST_TOKEN: 0})
    executor.run(
        {
            "hidden": given.hidden,
            "draft_tokens": given.draft_tokens,
            "draft_logits": given.draft_logits,
            **given.step,
        }
    )

    assert torch.equal(given.draft_tokens, tokens)
    assert torch.equal(given.draft_logits, logits)
