"""The Markov loop's reference: what it draws is softmax(logits / T), and odd inputs give what torch.argmax gives."""

import math

import pytest

torch = pytest.importorskip("torch")

from markov_draws import STEPS, inputs  # noqa: E402

from jitspark.checking.arguments import reference_function  # noqa: E402
from jitspark.runtime.markov_reference import ReferenceLoop  # noqa: E402
from jitspark.runtime.ranks import RankGroup  # noqa: E402
from kernel_specs.markov_gumbel_sampling import reference  # noqa: E402
from kernel_specs.markov_gumbel_sampling.spec import SPEC, specialize  # noqa: E402

DRAWS = 100_000
VOCAB = 64
# A chi-square of 63 degrees of freedom is above this once in a million times.
BOUND = 131.0


def loop_of(given, multiplier=1.0, soft_cap=None):
    weights = (given.lm_head, given.markov_w1, given.markov_w2)
    return ReferenceLoop(*weights, 0, multiplier, soft_cap, RankGroup(rank=0, size=1))


def run(given, **options):
    loop_of(given, **options).run(given.hidden, given.draft_tokens, given.draft_logits, **given.step)


def chi_square(tokens, logits, temperature):
    expected = torch.softmax(logits.double() / temperature, dim=-1) * len(tokens)
    counts = torch.bincount(tokens, minlength=VOCAB).double()
    return float(((counts - expected) ** 2 / expected).sum())


def drawn(logits, temperature, sample_pos=None, seeds=None):
    positions = torch.arange(1, DRAWS + 1) if sample_pos is None else sample_pos
    seeds = torch.full((DRAWS,), 12345) if seeds is None else seeds
    noised = reference.noised_logits(
        logits.expand(DRAWS, -1), torch.full((DRAWS,), temperature), seeds, positions, 2, torch.arange(VOCAB)
    )
    return noised.argmax(dim=-1)


@pytest.fixture(scope="module")
def logits():
    return (1.5 * torch.randn(VOCAB, generator=torch.Generator().manual_seed(1))).bfloat16()


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.6])
def test_tokens_follow_the_softmax(logits, temperature):
    assert chi_square(drawn(logits, temperature), logits, temperature) < BOUND


def test_tokens_of_other_seeds_follow_it_too(logits):
    tokens = drawn(logits, 1.0, sample_pos=torch.ones(DRAWS, dtype=torch.int64), seeds=torch.arange(DRAWS))

    assert chi_square(tokens, logits, 1.0) < BOUND


def test_the_bound_catches_a_temperature_that_is_five_percent_off(logits):
    assert chi_square(drawn(logits, 1.05), logits, 1.0) > 2 * BOUND


def test_steps_positions_and_seeds_draw_differently(logits):
    given = {"temperature": torch.ones(1), "token_ids": torch.arange(VOCAB)}
    draws = {
        (seed, position, step): reference.noised_logits(
            logits[None], seeds=torch.tensor([seed]), sample_pos=torch.tensor([position]), step=step, **given
        )
        for seed in (3, 4)
        for position in (8, 9)
        for step in (0, 1)
    }

    assert len({tuple(values[0].tolist()) for values in draws.values()}) == 8


def test_a_steps_token_leads_the_next_one():
    given = inputs(3, 5, 300, 32)
    run(given)
    first = given.draft_tokens.clone()

    given.step["input_ids"] = (given.step["input_ids"] + 1) % 300
    run(given)

    assert (first[:, 0] != given.draft_tokens[:, 0]).any()
    for step in range(STEPS):
        previous = given.draft_tokens[0, step - 1] if step else given.step["input_ids"][0]
        bias = (given.markov_w2.double() @ given.markov_w1[previous].double()).bfloat16()
        base = (given.lm_head.double() @ given.hidden[step].double()).bfloat16()
        assert torch.equal(given.draft_logits[given.step["sample_idx_mapping"][0, 0], step], base + bias)


def test_an_inert_request_is_greedy_and_stores_nothing():
    given = inputs(3, 5, 300, 32)
    states = given.step["sample_idx_mapping"][:2, 0]

    run(given)

    untouched = [state for state in range(5) if state not in states]
    assert (given.draft_logits[untouched] == -3.0).all()
    bias = (given.markov_w2.double() @ given.markov_w1[given.step["input_ids"][14].long()].double()).bfloat16()
    base = (given.lm_head.double() @ given.hidden[14].double()).bfloat16()
    assert given.draft_tokens[2, 0] == (base + bias).argmax()


ODD_ROWS = {
    "NaN": [1.0, math.nan, 3.0, math.nan],
    "NaN and infinity": [1.0, math.inf, math.nan, 0.0],
    "two infinities": [0.0, math.inf, math.inf, 1.0],
    "all -inf": [-math.inf] * 4,
    "all NaN": [math.nan] * 4,
    "equal": [2.0, 5.0, 5.0, 5.0],
    "zeros of both signs": [-1.0, -0.0, 0.0, 0.0],
}


@pytest.mark.parametrize("temperature", [0.0, 0.8], ids=["greedy", "sampled"])
@pytest.mark.parametrize("row", ODD_ROWS.values(), ids=ODD_ROWS)
def test_odd_rows_give_what_torch_argmax_gives_of_vllms_formula(row, temperature):
    """vLLM takes the argmax of FP32 logits / T + noise; torch.argmax says what its block maxima make of NaN."""
    given = inputs(1, 1, 4, 32)
    given.step["temperature"][:] = temperature
    given.markov_w2.zero_()
    given.lm_head.zero_()
    given.lm_head[:, 0] = torch.tensor(row).bfloat16()
    given.hidden.zero_()
    given.hidden[:, 0] = 1.0
    # 0 * NaN is NaN: what is multiplied by the other columns is finite
    run(given)

    for step in range(STEPS):
        uniform = reference.uniform(
            given.step["seeds"] ^ (step << 32), given.step["sample_pos"][:, step] - 1 + (1 << 30), torch.arange(4)
        )
        values = torch.tensor([row])
        noised = values / temperature + reference.gumbel(uniform).float() if temperature else values
        assert given.draft_tokens[0, step] == noised.argmax()


@pytest.mark.parametrize("soft_cap", [None, 20.0])
def test_the_kernels_reference_is_the_same_loop(soft_cap):
    given = inputs(4, 6, 300, 32)
    run(given, multiplier=0.25, soft_cap=soft_cap)
    specialization = specialize(300, 300, 32, STEPS, capped=soft_cap is not None)
    base_logits = reference.rounded_product(given.hidden, given.lm_head).view(4, STEPS, 300)
    tokens, logits = torch.zeros_like(given.draft_tokens), torch.full_like(given.draft_logits, -3.0)
    scalars = (0, 0.25) if soft_cap is None else (0, 0.25, soft_cap)

    reference_function(specialization)(
        base_logits, given.markov_w1, given.markov_w2, *given.step.values(), tokens, logits,
        torch.zeros(1, dtype=torch.int64), *scalars, **specialization.statics,
    )  # fmt: skip

    assert torch.equal(tokens, given.draft_tokens)
    assert torch.equal(logits, given.draft_logits)


@pytest.mark.parametrize(("vocab_rows", "ctas"), [(25256, 132), (12628, 132), (50512, 132), (2048, 32), (7, 1)])
def test_no_shard_takes_more_ctas_than_an_h200_runs_at_once(vocab_rows, ctas):
    axes = specialize(202048, vocab_rows, 512, STEPS, capped=True).axes

    assert axes["exchange_words"] == 16 + STEPS * 8 * ctas


def test_cases_hold_each_number_of_requests_and_both_transforms():
    assert {case.axes["num_requests"] for case in SPEC.cases} == set(range(1, 9))
    assert {case.statics["capped"] for case in SPEC.cases} == {True, False}
    assert {case.statics["warp_blocks"] > case.statics["resident_blocks"] for case in SPEC.cases} == {True, False}
