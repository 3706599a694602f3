"""Logits of the draft's samples into the rows of the cache that their requests own.

    draft_logits[sample_idx_mapping[r, j], j, :] <- logits[r * num_steps + j, :]        nothing for -1, an inert request

Copies, as they are; what no request owns stays. For logits that were gathered from several ranks: a rank alone stores
its own as it samples.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from jitspark.spec import CONST, VAR, Case, Divisible, KernelSpec, Specialization, Tensor
from jitspark.target import TARGETS

if TYPE_CHECKING:  # cases are checked where no geometry library is installed
    from jitspark.geometry import Deployment

VECTOR = 8  # BF16 values of a load of 16 bytes


def serving(vocab_size: int, num_steps: int) -> Specialization:
    """What serves any number of requests."""
    return SPEC.specialize(axes={"vocab_size": vocab_size, "num_steps": num_steps}, statics={})


def specializations(deployment: "Deployment") -> Iterator[Specialization]:
    """The draft's vocabulary where several ranks share it."""
    if deployment.tp > 1:
        yield serving(deployment.draft.vocab_size, deployment.draft.num_speculative_tokens)


def _case(num_requests: int, vocab_size: int, num_steps: int) -> Case:
    axes = {"num_requests": num_requests, "num_tokens": num_requests * num_steps, "num_states": num_requests + 2}
    axes |= {"vocab_size": vocab_size, "num_steps": num_steps}
    return Case(axes=axes, dtypes={}, statics={}, rtol=0.0, atol=0.0, note="one request of several is inert")


SPEC = KernelSpec(
    name="draft_logits_store",
    axes={
        "num_requests": VAR,
        "num_tokens": VAR,  # num_requests * num_steps
        "num_states": VAR,
        "num_steps": CONST,
        "vocab_size": CONST,
    },
    dtypes={},
    statics={},
    args=(
        Tensor("logits", ("num_tokens", "vocab_size"), "bfloat16"),
        Tensor("sample_idx_mapping", ("num_requests", "num_steps"), "int64", align=8),
        Tensor("draft_logits", ("num_states", "num_steps", "vocab_size"), "bfloat16", role="inout"),
    ),
    constraints=(Divisible("vocab_size", by=VECTOR, because="a thread copies 16 bytes at a time"),),
    targets=TARGETS,
    kernel="kernel:draft_logits_store",
    reference="reference:draft_logits_store",
    instructions=("LDG.E.128", "STG.E.128"),
    cases=(_case(1, 2048, 7), _case(3, 2048, 7), _case(2, 1000, 3), _case(1, 202048, 7), _case(8, 202048, 7)),
    partial_outputs=("draft_logits",),
)
