"""The reference's noise is vLLM 0.33.0's own: its Triton functions, run by the interpreter, bit for bit where integers
and exact FP32 decide, and the same tokens.
"""

import pytest

torch = pytest.importorskip("torch")

from interpreted_draws import DRAWS, HASHES, UNIFORMS, interpreted  # noqa: E402
from markov_draws import EDGES  # noqa: E402

from kernel_specs.markov_gumbel_sampling import reference  # noqa: E402

STEPS = (0, 3, 6)
TOKENS = torch.cat([torch.arange(1000), torch.tensor([25255, 202047, 2**17, 2**31 - 1, *range(100000, 100020)])])
ROWS, VOCAB = 300, 500


def pairs():
    """Every edge as a seed with every edge as a position."""
    seeds, positions = torch.meshgrid(torch.tensor(EDGES), torch.tensor(EDGES), indexing="ij")
    return {"seeds": seeds.reshape(-1), "positions": positions.reshape(-1)}


def drawn(step):
    """Rows of logits with a seed, a sampled token's position and a temperature each."""
    generator = torch.Generator().manual_seed(step)
    seeds = torch.randint(-(2**63), 2**63 - 1, (ROWS,), generator=generator)
    sample_pos = torch.randint(1, 2**40, (ROWS,), generator=generator)
    seeds[: len(EDGES)] = sample_pos[-len(EDGES) :] = torch.tensor(EDGES)
    temperature = 0.2 + 2 * torch.rand(ROWS, generator=generator)
    temperature[::5] = 0.0
    logits = (3 * torch.randn(ROWS, VOCAB, generator=generator)).bfloat16()
    return {"logits": logits, "seeds": seeds, "temperature": temperature}, sample_pos


@pytest.fixture(scope="module")
def vllm(tmp_path_factory):
    """What vLLM's functions give, by function and step."""
    calls = [{"of": of, "step": step, "tokens": TOKENS, **pairs()} for of in (HASHES, UNIFORMS) for step in STEPS]
    for step in STEPS:
        given, sample_pos = drawn(step)
        calls.append({"of": DRAWS, "step": step, "positions": sample_pos - 1, **given})
    found = interpreted(tmp_path_factory.mktemp("draws"), calls)
    return {(call["of"], call["step"]): each for call, each in zip(calls, found, strict=True)}


@pytest.mark.parametrize("step", STEPS)
def test_hashes_are_vllms_at_the_ends_of_64_bits(vllm, step):
    given = pairs()

    own = reference.murmur_hash(given["seeds"] ^ (step << 32), given["positions"], TOKENS)

    assert len(own.unique()) > 50_000  # many different ones
    assert torch.equal(own, vllm[HASHES, step])


@pytest.mark.parametrize("step", STEPS)
def test_uniforms_are_vllms_bit_for_bit(vllm, step):
    given = pairs()

    own = reference.uniform(given["seeds"] ^ (step << 32), given["positions"], TOKENS)

    assert own.dtype == torch.float32
    assert torch.equal(own.view(torch.int32), vllm[UNIFORMS, step].view(torch.int32))


@pytest.mark.parametrize("step", STEPS)
def test_tokens_are_vllms(vllm, step):
    given, sample_pos = drawn(step)

    own = reference.noised_logits(**given, sample_pos=sample_pos, step=step, token_ids=torch.arange(VOCAB))

    assert torch.equal(own.argmax(dim=-1), vllm[DRAWS, step])
