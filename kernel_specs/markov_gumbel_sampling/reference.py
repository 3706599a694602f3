"""What the kernel computes, in float64 with the documented rounding points; the hash in integers, bit for bit.

`sample_steps` also serves as the sampling loop where there is no GPU: `exchange` then finds the winner over all ranks.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from jitspark.spec import Specialization
from kernel_specs.markov_gumbel_sampling.spec import STEP_INPUTS

MASK = 0xFFFFFFFF
DRAFT_SALT = 1 << 30
SERIES_BELOW = 0.25  # vLLM's switch from the series for log(1 - u) to the logarithm
SMALLEST = 2.0**-24
ROWS_AT_ONCE = 8192  # float64 copies of a whole shard would take hundreds of megabytes

INPUTS = ("base_logits", "markov_w1", "markov_w2", *STEP_INPUTS)
Keep = Callable[[int, torch.Tensor], None]
Exchange = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def markov_gumbel_sampling(*arguments: Any, exchanged: bool, capped: bool, **tiling: object) -> None:
    """Fill draft_tokens [num_requests, num_steps] and the logits, as the spec says.

    `exchanged` ranks all find what this one finds: its table of peers holds nothing but its own address.
    """
    inputs: dict[str, Any] = dict(zip(INPUTS, arguments, strict=False))
    draft_tokens, logits = arguments[len(INPUTS) :][:2]
    first_token, multiplier = arguments[14:17:2] if exchanged else arguments[12:14]
    sample_steps(
        **inputs,
        draft_tokens=draft_tokens,
        first_token=first_token,
        multiplier=multiplier,
        soft_cap=arguments[-1] if capped else None,
        keep=logits_of_steps(logits)
        if exchanged
        else cache_of_states(logits, inputs["sample_idx_mapping"], first_token),
        exchange=_alone,
    )


def _alone(_: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    return tokens


def logits_of_steps(shard_logits: torch.Tensor) -> Keep:
    """Keeps every request's logits in shard_logits [num_requests, num_steps, vocab_rows]."""

    def keep(step: int, logits: torch.Tensor) -> None:
        shard_logits[:, step] = logits

    return keep


def cache_of_states(draft_logits: torch.Tensor, sample_idx_mapping: torch.Tensor, first_token: int) -> Keep:
    """Keeps live requests' logits in their states' rows of draft_logits [num_states, num_steps, vocab_size]."""

    def keep(step: int, logits: torch.Tensor) -> None:
        states = sample_idx_mapping[:, step]
        live = states >= 0
        draft_logits[states[live], step, first_token : first_token + logits.shape[-1]] = logits[live]

    return keep


def sample_steps(  # noqa: PLR0917 - as the kernel
    base_logits: torch.Tensor,
    markov_w1: torch.Tensor,
    markov_w2: torch.Tensor,
    input_ids: torch.Tensor,
    anchor_idx: torch.Tensor,
    sample_idx_mapping: torch.Tensor,
    sample_pos: torch.Tensor,
    seeds: torch.Tensor,
    temperature: torch.Tensor,
    draft_tokens: torch.Tensor,
    first_token: int,
    multiplier: float,
    soft_cap: float | None,
    keep: Keep,
    exchange: Exchange,
) -> None:
    """All steps. `keep(step, logits)` gets the shard's logits, rounded, of all requests.

    `exchange(values, tokens)` gets each request's best value (float64) and token of this shard, and returns the tokens
    that win over all shards.
    """
    previous = input_ids[anchor_idx].long()
    token_ids = first_token + torch.arange(base_logits.shape[-1], device=base_logits.device)
    for step in range(base_logits.shape[1]):
        states = sample_idx_mapping[:, step]
        live, rows = states >= 0, states.clamp(min=0)
        bias = rounded_product(markov_w1[previous], markov_w2)
        logits = transform(base_logits[:, step] + bias, multiplier, soft_cap)
        keep(step, logits)
        heat = torch.where(live, temperature[rows], 0.0)
        noised = noised_logits(logits, heat, torch.where(live, seeds[rows], 0), sample_pos[:, step], step, token_ids)
        best = noised.argmax(dim=-1)  # the first of equal values, and NaN before all
        previous = exchange(noised.gather(-1, best[:, None])[:, 0], token_ids[best])
        draft_tokens[:, step] = previous


def wire(tensors: Mapping[str, torch.Tensor], **_: float) -> tuple[dict[str, torch.Tensor], Sequence[torch.Tensor]]:
    """A table of peers that all are this rank itself, where there is one."""
    if "peers" not in tensors:
        return {}, ()
    peers = torch.full_like(tensors["peers"], tensors["winners"].data_ptr())
    return {"peers": peers}, (peers,)


def transform(logits: torch.Tensor, multiplier: float, soft_cap: float | None) -> torch.Tensor:
    """BF16 sums of base logits and bias to what is cached and sampled from."""
    scaled = logits.double() * multiplier
    if soft_cap is not None:
        scaled = soft_cap * torch.tanh(scaled / soft_cap)
    return scaled.to(torch.bfloat16)


def noised_logits(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    seeds: torch.Tensor,
    sample_pos: torch.Tensor,
    step: int,
    token_ids: torch.Tensor,
) -> torch.Tensor:
    """What the argmax is taken of, float64 [num_requests, tokens]; temperature, seeds and positions are per request."""
    values = logits.double()
    uniforms = uniform(seeds ^ (step << 32), sample_pos - 1 + DRAFT_SALT, token_ids)
    heat = temperature.double()[:, None]
    return torch.where(heat == 0, values, values / heat + gumbel(uniforms))


def gumbel(uniforms: torch.Tensor) -> torch.Tensor:
    """-log(-log(1 - u)) in float64, log(1 - u) being vLLM's: a series of eight terms where u is small."""
    u = uniforms.double()
    series = torch.full_like(u, 1 / 8)
    for terms in range(7, 0, -1):
        series = 1 / terms + u * series
    direct = -torch.log((1 - u).clamp(min=SMALLEST))
    return -torch.log(torch.where(u < SERIES_BELOW, u * series, direct))


def uniform(seeds: torch.Tensor, positions: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """FP32 [draws, tokens]: (hash + 0.5) * 2^-32, correctly rounded."""
    bits = murmur_hash(seeds, positions, token_ids).double()
    return ((bits + 0.5) * 2.0**-32).float()


def murmur_hash(seeds: torch.Tensor, positions: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """murmur3's 32-bit hash of each draw's seed (64 bits) and position (its low 32 bits) with each token id.

    int64 in and out, [draws] and [tokens] to [draws, tokens].
    """
    state = torch.zeros_like(seeds)
    for key in (seeds, seeds >> 32, positions):
        state = _mix(state, key & MASK)
    state = _mix(state[:, None], token_ids[None, :] & MASK) ^ 16
    state = ((state ^ (state >> 16)) * 0x85EBCA6B) & MASK
    state = ((state ^ (state >> 13)) * 0xC2B2AE35) & MASK
    return state ^ (state >> 16)


def _mix(state: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    key = (key * 0xCC9E2D51) & MASK
    key = (_rotate(key, 15) * 0x1B873593) & MASK
    return (_rotate(state ^ key, 13) * 5 + 0xE6546B64) & MASK


def _rotate(word: torch.Tensor, places: int) -> torch.Tensor:
    return ((word << places) | (word >> (32 - places))) & MASK


def rounded_product(embeddings: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    rows = embeddings.double()
    parts = [(rows @ part.double().T).to(torch.bfloat16) for part in weight.split(ROWS_AT_ONCE)]
    return torch.cat(parts, dim=-1)


def random_arguments(
    specialization: Specialization, axes: Mapping[str, int], generator: torch.Generator
) -> dict[str, torch.Tensor | float | int]:
    """Requests in any states, one of them inert if there are several, a third of them greedy.

    A greedy request's best token is clear in every step: a last bit that rounds the other way must not decide.
    """
    device = generator.device
    requests, steps, states = axes["num_requests"], axes["num_steps"], axes["num_states"]
    rows, rank = axes["vocab_rows"], axes["markov_rank"]

    def integers(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=generator, device=device)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device)

    mapping = torch.randperm(states, generator=generator, device=device)[:requests]
    mapping = mapping[:, None].repeat(1, steps)
    if requests > 1:
        mapping[-1] = -1
    temperature = 0.5 + torch.rand(states, generator=generator, device=device)
    temperature[::3] = 0.0
    greedy = (mapping < 0) | (temperature[mapping.clamp(min=0)] == 0)
    base_logits = 8 * normal(requests, steps, rows)
    best = integers(0, rows, requests, steps, 1)
    lift = torch.where(greedy, 90.0, 0.0)[..., None].expand(requests, steps, 1)
    base_logits.scatter_add_(-1, best, lift)
    arguments: dict[str, torch.Tensor | float | int] = {
        "base_logits": base_logits.to(torch.bfloat16),
        "markov_w1": normal(axes["vocab_size"], rank).to(torch.bfloat16),
        "markov_w2": (normal(rows, rank) * rank**-0.5).to(torch.bfloat16),
        "input_ids": integers(0, axes["vocab_size"], axes["num_tokens"]).int(),
        "anchor_idx": torch.randperm(axes["num_tokens"], generator=generator, device=device)[:requests],
        "sample_idx_mapping": mapping,
        "sample_pos": integers(1, 1 << 20, requests, steps),
        "seeds": integers(-(2**63), 2**63 - 1, states),
        "temperature": temperature,
        "draft_logits": normal(states, steps, axes["vocab_size"]).to(torch.bfloat16),
        "first_token": min(rows, axes["vocab_size"] - rows),  # the second rank's, or the first's
        "multiplier": 0.1767766952966369,
    }
    if specialization.statics["exchanged"]:
        del arguments["draft_logits"]
        arguments |= {"peers": integers(0, 1, axes["world_size"]), "rank": axes["world_size"] - 1}
    return arguments | ({"soft_cap": 20.0} if specialization.statics["capped"] else {})
