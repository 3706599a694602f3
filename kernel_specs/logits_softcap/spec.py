"""Soft-capped logits: out <- cap * tanh(multiplier * logits / cap), FP32 from the rounded BF16 logits.

The tanh is accurate to a few FP32 ulp at every size of its argument, so small logits keep their relative accuracy:
`tanh.approx`, whose error is 2^-11, is not used. Rows and columns are run-time sizes: one artifact serves gathered
rows, a rank's shard, and as many rows as are sampled. No row count is refused.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from jitspark.spec import VAR, Case, Divisible, KernelSpec, Scalar, Specialization, Tensor
from jitspark.target import TARGETS

if TYPE_CHECKING:  # cases are checked where no geometry library is installed
    from jitspark.geometry import Deployment

VECTORS = (8, 4)  # logits of a thread; shards at TP 16 have no more than a factor of 4
ROWS = ("num_rows", "vocab_size")


def vector(vocab_size: int) -> int:
    """The most neighbouring logits that a row of this size is a multiple of."""
    return next((size for size in VECTORS if vocab_size % size == 0), VECTORS[-1])


SPEC = KernelSpec(
    name="logits_softcap",
    axes={"num_rows": VAR, "vocab_size": VAR},
    dtypes={},
    statics={"vector": VECTORS},
    args=(
        Tensor("logits", ROWS, "bfloat16"),
        Tensor("out", ROWS, "float32", role="out"),
        Scalar("multiplier", "float32"),
        Scalar("cap", "float32"),
    ),
    constraints=(Divisible("vocab_size", by="vector", because="a thread's logits are one aligned vector"),),
    targets=TARGETS,
    kernel="kernel:logits_softcap",
    reference="reference:logits_softcap",
    instructions=("LDG", "MUFU", "FFMA", "STG"),
    cases=tuple(
        Case(
            axes={"num_rows": num_rows, "vocab_size": vocab_size},
            dtypes={},
            statics={"vector": vector(vocab_size)},
            rtol=1e-6,
            atol=1e-36,  # results below FP32's normal range
            note="both infinities, zeros of both signs, logits from 1e-30 to 1e30",
        )
        for num_rows, vocab_size in (
            (1, 202048),
            (8, 202048),
            (72, 202048),
            (8, 50512),
            (9, 25256),
            (3, 12628),
            (64, 12628),
            (1, 4),
            (65, 2048),
        )
    ),
)


def serving(vocab_size: int) -> Specialization:
    """What serves rows of this size, for any number of them."""
    return SPEC.specialize(axes={}, statics={"vector": vector(vocab_size)})


def specializations(deployment: "Deployment") -> Iterator[Specialization]:
    """Gathered rows, and a rank's shard of them."""
    backbone = deployment.backbone
    found = (serving(size) for size in (backbone.vocab_size, backbone.vocab_rows(deployment.tp)))
    yield from {tuple(each.statics.items()): each for each in found}.values()
