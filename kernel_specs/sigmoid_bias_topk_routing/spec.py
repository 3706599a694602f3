"""Routing and the experts' schedule in one launch: which experts each token goes to, and which routes each expert gets.

    s       <- sigmoid(logits), FP32; logits below -87 count as -87
    ids     <- the k experts of the largest FP32 s + bias, in that order; of equal ones the lowest id first
    weights <- s / (sum of the chosen s + 1e-15)

A padding token (`is_padding` not 0: vLLM's bool mask viewed as bytes) has ids -1 and weights 0, and no routes.

The schedule is what grouped GEMMs need, for any distribution. Route r = token * num_experts_per_tok + slot. With D
distinct chosen experts and N routes (D <= min(num_experts, N)):

    num_distinct_experts = D
    expert_ids[i]        = the i-th chosen expert by id, for i < D; -1 behind
    route_offsets[i]     = the first of expert_ids[i]'s routes in `routes`; N for every i >= D
    routes[n]            = for n < N the routes of expert_ids[0], of expert_ids[1], ..., each ascending; -1 behind

All elements are written, so a CTA may read entry i before it knows D: an entry with route_offsets[i] ==
route_offsets[i + 1] has no work. A token chooses an expert once at most, hence no expert has more routes than there
are tokens. Nothing depends on timing. The bias is a weight, and is read before `griddepcontrol.wait`.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from jitspark.spec import CONST, VAR, AtMost, Case, Equals, KernelSpec, Specialization, Tensor
from jitspark.target import TARGETS

if TYPE_CHECKING:  # cases are checked where no geometry library is installed
    from jitspark.geometry import Deployment, Experts

MAX_TOKENS = 64
MAX_EXPERTS = 256
TOKENS_BY_SLOT = ("num_tokens", "num_experts_per_tok")


def _axes(num_experts: int, num_experts_per_tok: int) -> dict[str, int]:
    return {"num_experts": num_experts, "num_experts_per_tok": num_experts_per_tok, "num_offsets": num_experts + 1}


def _case(num_tokens: int, experts: tuple[int, int], *, padded: bool) -> Case:
    return Case(
        axes={"num_tokens": num_tokens, **_axes(*experts)},
        dtypes={},
        statics={"padded": padded},
        rtol=2e-6,  # a few FP32 roundings
        atol=1e-20,
        note="exact ties, saturated and vanishing scores, every token to the same experts, each to its own",
    )


SPEC = KernelSpec(
    name="sigmoid_bias_topk_routing",
    axes={
        "num_tokens": VAR,
        "num_experts": CONST,
        "num_experts_per_tok": CONST,
        "num_offsets": CONST,  # num_experts + 1
    },
    dtypes={},
    statics={"padded": (False, True)},
    args=(
        Tensor("logits", ("num_tokens", "num_experts"), "float32"),
        Tensor("bias", ("num_experts",), "float32"),
        Tensor("is_padding", ("num_tokens",), "uint8", align=1, when=("padded", True)),
        Tensor("topk_ids", TOKENS_BY_SLOT, "int32", role="out", align=4),
        Tensor("topk_weights", TOKENS_BY_SLOT, "float32", role="out", align=4),
        Tensor("expert_ids", ("num_experts",), "int32", role="out", align=4),
        Tensor("route_offsets", ("num_offsets",), "int32", role="out", align=4),
        Tensor("routes", TOKENS_BY_SLOT, "int32", role="out", align=4),
        Tensor("num_distinct_experts", (1,), "int32", role="out", align=4),
    ),
    constraints=(
        AtMost("num_tokens", MAX_TOKENS, because="an expert's tokens are one bit each"),
        AtMost("num_experts", MAX_EXPERTS, because="a thread schedules one expert"),
        Equals("num_offsets", "num_experts + 1", because="every expert's routes begin and end somewhere"),
        AtMost("num_experts_per_tok", "num_experts", because="a token chooses different experts"),
        AtMost("num_experts_per_tok", 8, because="eight lanes add up a token's scores"),
    ),
    targets=TARGETS,
    kernel="kernel:sigmoid_bias_topk_routing",
    reference="reference:sigmoid_bias_topk_routing",
    early_reads=("bias",),
    instructions=("LDG", "VOTE", "MUFU", "STAS", "ATOMS", "STG"),
    cases=tuple(
        _case(num_tokens, experts, padded=padded)
        for experts, token_counts in (
            ((256, 8), (1, 7, 8, 9, 16, 24, 33, 56, 64)),
            ((64, 4), (5, 24)),
            ((8, 2), (8, 64)),
        )
        for num_tokens in token_counts
        for padded in (False, True)
    ),
)


def serving(experts: "Experts", *, padded: bool) -> Specialization:
    """What serves these experts, for any number of rows."""
    axes = _axes(experts.num_local_experts, experts.num_experts_per_tok)
    return SPEC.specialize(axes=axes, statics={"padded": padded})


def specializations(deployment: "Deployment") -> Iterator[Specialization]:
    """With and without padding tokens."""
    for padded in (False, True):
        yield serving(deployment.backbone.experts, padded=padded)
