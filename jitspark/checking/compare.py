"""Whether what a kernel wrote is what its reference wrote, within a case's bounds."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from jitspark.checking.guarded import bits


@dataclass(frozen=True, slots=True)
class Comparison:
    """One written argument. `margin` is the largest error over what is allowed there: up to 1 passes.

    `max_error` is the largest |got - want|. Both are infinite where a value is NaN or may not differ at all.
    """

    argument: str
    max_error: float
    margin: float
    problem: str | None


def compare(name: str, got: Tensor, want: Tensor, rtol: float, atol: float) -> Comparison:
    """Element by element: |got - want| <= atol + rtol * |want|; integers are equal; NaN never passes."""
    if not got.dtype.is_floating_point:
        return _equal_integers(name, got, want)
    exact, value = want.double(), got.double()
    difference = (value - exact).abs()
    share = difference / (atol + rtol * exact.abs())
    # also 0 / 0 where no error is allowed, and inf - inf; what is not finite must be equal, and NaN is equal to nothing
    share = torch.where(value == exact, 0.0, share)
    share = torch.where((value == exact) | (exact.isfinite() & value.isfinite()), share, math.inf)
    share = share.nan_to_num(nan=math.inf, posinf=math.inf)
    margin = float(share.max())
    finite = torch.where(share.isinf(), math.inf, torch.where(value == exact, 0.0, difference))
    return Comparison(name, float(finite.max()), margin, _describe(name, got, want, share) if margin > 1 else None)


def kept(name: str, got: Tensor, before: Tensor, unwritten: Tensor) -> str | None:
    """What is wrong if elements that the reference does not write are not bit for bit what they were before."""
    changed = unwritten & (bits(got) != bits(before))
    if not bool(changed.any()):
        return None
    where = _first(changed)
    return f"{name}: {int(changed.sum())} elements that must stay were written, first {where}: {_text(got, where)}"


def differing(first: Tensor, second: Tensor) -> str | None:
    """How two tensors differ in their bits, or None."""
    wrong = bits(first) != bits(second)
    if not bool(wrong.any()):
        return None
    where = _first(wrong)
    return f"{int(wrong.sum())} elements, first {where}: {_text(first, where)} and {_text(second, where)}"


def _equal_integers(name: str, got: Tensor, want: Tensor) -> Comparison:
    wrong = bits(got) != bits(want)
    if not bool(wrong.any()):
        return Comparison(name, 0.0, 0.0, None)
    return Comparison(name, math.inf, math.inf, _describe(name, got, want, torch.where(wrong, math.inf, 0.0)))


def _describe(name: str, got: Tensor, want: Tensor, share: Tensor) -> str:
    where = tuple(int(i) for i in torch.unravel_index(share.argmax(), share.shape))
    beyond = int((share > 1).sum())
    found, needed = _text(got, where), _text(want, where)
    return f"{name}: {beyond} of {got.numel()} elements beyond bounds, worst {where}: {found} instead of {needed}"


def _first(wrong: Tensor) -> tuple[int, ...]:
    return tuple(int(i) for i in wrong.nonzero()[0])


def _text(tensor: Tensor, where: tuple[int, ...]) -> str:
    return f"{tensor[where].item():.9g}"
