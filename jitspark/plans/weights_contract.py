"""The weights contract of plans: which tensors they need, from where, in which layout, and how many bytes that holds.

tap      `loaded`: vLLM still holds it after its post-processing. `checkpoint`: post-processing destroys its order,
so it is taken while weights are loaded
shared   the kernels read vLLM's own memory. Otherwise the bytes are held twice, as long as stock needs its own
layout   what is done to it once, at binding (`backbone_weights` lists them)
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jitspark.errors import PlanError, WeightsError
from jitspark.plans.plan import Buffer, Kind, Plan, Size, WeightSource
from jitspark.spec import DTYPE_BYTES


@dataclass(frozen=True, slots=True)
class Need:
    """One weight: its name in plans, where it comes from, and what is needed there."""

    name: str
    source: WeightSource
    shape: tuple[Size, ...]
    dtype: str

    @property
    def nbytes(self) -> int:
        """Without what only binding tells: the positions of a RoPE table."""
        return DTYPE_BYTES[self.dtype] * math.prod(size for size in self.shape if isinstance(size, int))


@dataclass(frozen=True, slots=True)
class Held:
    """Bytes of one rank: of vLLM's own memory that kernels read, and of copies beside it."""

    shared: int
    twice: int


def contract(plans: Iterable[Plan]) -> tuple[Need, ...]:
    """What these plans need, each weight once, in the order of first use.

    Raises PlanError for plans that disagree about one: they were not made for one deployment.
    """
    needs: dict[str, Need] = {}
    for plan in plans:
        for buffer in plan.buffers:
            if buffer.kind is Kind.WEIGHT:
                need = _need(buffer)
                if needs.setdefault(buffer.name, need) != need:
                    raise _disagreement(needs[buffer.name], need)
    return tuple(needs.values())


def held(needs: Iterable[Need]) -> Held:
    """How many bytes the needs come to."""
    every = list(needs)
    shared = sum(need.nbytes for need in every if need.source.shared)
    return Held(shared, sum(need.nbytes for need in every) - shared)


def check(needs: Sequence[Need], weights: Mapping[str, Any]) -> None:
    """Raise WeightsError for the first weight that is missing, or of another shape, dtype or order of memory.

    `weights` are torch tensors, or whatever has shape, dtype and is_contiguous(), by the weights' names.
    """
    for need in needs:
        problem = next(_problems(need, weights.get(need.name)), None)
        if problem is not None:
            raise WeightsError(
                where=f"weight {need.name} ({need.source.tensor}, {need.source.layout})",
                found=problem,
                needed=f"shape {list(need.shape)} of {need.dtype}, row-major",
                remedy="Use the checkpoint that the geometry describes, or the geometry of this checkpoint.",
            )


def _need(buffer: Buffer) -> Need:
    return Need(buffer.name, buffer.source or WeightSource(buffer.name), buffer.shape, buffer.dtype)


def _problems(need: Need, found: Any) -> Iterator[str]:
    if found is None:
        yield "no tensor"
        return
    shape, dtype = list(found.shape), str(found.dtype).removeprefix("torch.")
    fits = len(shape) == len(need.shape) and all(
        isinstance(wanted, str) or wanted == size for wanted, size in zip(need.shape, shape, strict=True)
    )
    if not fits or dtype != need.dtype:
        yield f"shape {shape} of {dtype}"
    elif not found.is_contiguous():
        yield f"shape {shape} of {dtype}, not row-major"


def _disagreement(one: Need, other: Need) -> PlanError:
    return PlanError(
        where=f"weight {one.name}",
        found=f"shape {list(other.shape)} of {other.dtype} from {other.source.tensor} in one plan",
        needed=f"shape {list(one.shape)} of {one.dtype} from {one.source.tensor}, as in another",
        remedy="Load plans of one deployment.",
    )
