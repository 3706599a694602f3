"""The forms in which a layer's routed experts exist: as the checkpoint has them, and as the grouped GEMMs read them.

Owns shapes, what a share of an expert is, and the way from one form to the other. A share is I / tp rows of gate, the
same rows of up, and the same columns of down, each with its block scales: never half a block, since shares are whole
tiles. Sizes that cannot be shared so, and tensors that are not what a form says, are refused with WeightsError.

NVFP4, `weight_scale_2` and `input_scale` aside, as bytes: w13 [E, 2, I, H / 2] and [E, 2, I, H / 16], gate before up;
w2 [E, H, I / 2] and [E, H, I / 16]. BF16: w13 [E, 2, I, H], w2 [E, H, I]; the kernels read both as they are.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from jitspark.errors import WeightsError
from kernel_specs.nvfp4_grouped_gemm_partial.layout import repack_down
from kernel_specs.nvfp4_grouped_gemm_swiglu.layout import repack_gate_up
from kernel_specs.primitives.nvfp4_tiling import BLOCK, COLUMN_UNIT

if TYPE_CHECKING:  # a geometry is anything with these fields: the library that reads one need not be installed
    from jitspark.geometry import Experts

NVFP4, BFLOAT16 = "nvfp4", "bfloat16"
W13, W13_SCALES, W2, W2_SCALES = "w13_weight", "w13_weight_scale", "w2_weight", "w2_weight_scale"


@dataclass(frozen=True, slots=True)
class ExpertSizes:
    """Of one layer: `width` is how many of an expert's outputs (of FC1) a rank has."""

    num_experts: int
    hidden_size: int
    intermediate_size: int
    tp: int

    @classmethod
    def of(cls, experts: "Experts", tp: int) -> "ExpertSizes":
        """Raises WeightsError where `tp` does not share the experts evenly."""
        sizes = cls(experts.num_local_experts, experts.moe_hidden_size, experts.moe_intermediate_size, tp)
        for what, size in (("experts", sizes.num_experts), ("outputs of an expert", sizes.intermediate_size)):
            if size % tp:
                raise _unshareable(f"{size} {what} on {tp} ranks", "a number that the TP size divides")
        return sizes

    @property
    def width(self) -> int:
        return self.intermediate_size // self.tp


@dataclass(frozen=True, slots=True)
class Part:
    """One tensor of the experts: vLLM's parameter, an expert's bytes by axis (ranks share axis 1), vLLM's dtype."""

    parameter: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    def share(self, tp: int) -> tuple[int, ...]:
        """The shape of a rank's share of one expert."""
        return (self.shape[0], self.shape[1] // tp, *self.shape[2:])


@dataclass(frozen=True, slots=True)
class Held:
    """One tensor that the kernels read, all experts of a layer: its shape and dtype."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * int(self.dtype.itemsize)


@dataclass(frozen=True, slots=True)
class Form:
    """One weight dtype: its parts in the checkpoint's order, what the kernels read, and the way there.

    place(held, first, shares): writes experts `first`, `first + 1`, ... of `held` from shares of them, by parameter.
    """

    parts: tuple[Part, ...]
    held: Mapping[str, Held]
    place: Callable[[Mapping[str, Tensor], int, Mapping[str, Tensor]], None]

    def share_bytes(self, tp: int) -> int:
        """Of one expert, on the way from rank to rank."""
        return sum(prod(part.share(tp)) for part in self.parts)

    @property
    def held_bytes(self) -> int:
        return sum(each.nbytes for each in self.held.values())


def form_of(weight_dtype: str, sizes: ExpertSizes) -> Form:
    """The form of a geometry's `weight_dtype`. Raises WeightsError for sizes that the kernels cannot share."""
    return _nvfp4(sizes) if weight_dtype == NVFP4 else _bfloat16(sizes)


def carved(buffer: Tensor, parts: tuple[Part, ...], tp: int) -> dict[str, Tensor]:
    """Views of [experts, bytes of a share] as the parts of so many experts: each contiguous, one behind the other."""
    flat, experts, begin, views = buffer.view(-1), len(buffer), 0, {}
    for part in parts:
        end = begin + experts * prod(part.share(tp))
        views[part.parameter] = flat[begin:end].view(experts, *part.share(tp))
        begin = end
    return views


def as_bytes(tensor: Tensor, part: Part) -> Tensor:
    """The parameter as vLLM has it, [experts, ...], as bytes per expert by the part's axes; whole or shared."""
    experts, (first, _, *rest) = len(tensor), part.shape
    return tensor.view(torch.uint8).view(experts, first, -1, *rest)


def _nvfp4(sizes: ExpertSizes) -> Form:
    experts, hidden, inner, width = sizes.num_experts, sizes.hidden_size, sizes.intermediate_size, sizes.width
    for what, size in (("columns of the experts", hidden), ("outputs of an expert on a rank", width)):
        if size % COLUMN_UNIT:
            raise _unshareable(f"{size} {what}", f"a multiple of {COLUMN_UNIT}")
    byte, scale = torch.uint8, torch.float8_e4m3fn
    return Form(
        parts=(
            Part(W13, (2, inner, hidden // 2), byte),
            Part(W13_SCALES, (2, inner, hidden // BLOCK), scale),
            Part(W2, (hidden, inner // 2), byte),
            Part(W2_SCALES, (hidden, inner // BLOCK), scale),
        ),
        held={
            "gate_up.weight": Held((experts, width * hidden), byte),
            "gate_up.weight_scales": Held((experts, 2 * width * hidden // BLOCK), byte),
            "gate_up.gate_up_scales": Held((experts, 2), torch.float32),
            "down.weight": Held((experts, hidden * width // 2), byte),
            "down.weight_scales": Held((experts, hidden * width // BLOCK), byte),
            "down.down_scales": Held((experts,), torch.float32),
            "input.global_scale": Held((1,), torch.float32),
            "gate_up.global_scale": Held((1,), torch.float32),
        },
        place=_place_nvfp4,
    )


def _place_nvfp4(held: Mapping[str, Tensor], first: int, shares: Mapping[str, Tensor]) -> None:
    here = slice(first, first + len(shares[W13]))
    codes, scales = repack_gate_up(shares[W13].flatten(1, 2), shares[W13_SCALES].flatten(1, 2))
    held["gate_up.weight"][here].copy_(codes)
    held["gate_up.weight_scales"][here].copy_(scales)
    codes, scales = repack_down(shares[W2], shares[W2_SCALES])
    held["down.weight"][here].copy_(codes)
    held["down.weight_scales"][here].copy_(scales)


def _bfloat16(sizes: ExpertSizes) -> Form:
    experts, hidden, inner, width = sizes.num_experts, sizes.hidden_size, sizes.intermediate_size, sizes.width
    dtype = torch.bfloat16
    return Form(
        parts=(Part(W13, (2, inner, 2 * hidden), dtype), Part(W2, (hidden, 2 * inner), dtype)),
        held={
            "gate_up.weight": Held((experts, 2 * width, hidden), dtype),
            "down.weight": Held((experts, hidden, width), dtype),
        },
        place=_place_bfloat16,
    )


def _place_bfloat16(held: Mapping[str, Tensor], first: int, shares: Mapping[str, Tensor]) -> None:
    for name, parameter in (("gate_up.weight", W13), ("down.weight", W2)):
        share = shares[parameter]
        target = held[name][first : first + len(share)]
        target.view(torch.uint8).copy_(share.reshape(target.view(torch.uint8).shape))


def _unshareable(found: str, needed: str) -> WeightsError:
    return WeightsError(
        where="routed experts", found=found, needed=needed, remedy="Use a TP size that the model's geometry allows."
    )


def describe(tensor: Any) -> str:
    return f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"
