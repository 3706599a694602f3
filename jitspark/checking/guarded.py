"""Tensors that lie inside poison.

Reading past a tensor then yields NaN (or a huge integer), and writing past it, or between its rows, is found. A tensor
is aligned to what the spec promises and no better, so an over-assumed alignment faults.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

GUARD_BYTES = 64 * 1024
FLOAT_POISON = 0xFF  # NaN in every floating-point type here
INTEGER_POISON = 0x7F  # a large positive number

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, slots=True)
class Guarded:
    """A tensor of `shape` and `strides` (in elements) that starts `offset` bytes into poisoned `storage`."""

    storage: Tensor
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype

    @property
    def tensor(self) -> Tensor:
        return self._within(self.storage)

    def poison(self) -> None:
        """Fill the tensor itself with poison."""
        bits(self.tensor).fill_(_poison_word(self.dtype))

    def bytes_touched_outside(self) -> int:
        """How many bytes before, after and between the tensor's elements are no longer poison."""
        seen = self.storage.clone()
        bits(self._within(seen)).fill_(_poison_word(self.dtype))
        return int((seen != poison_byte(self.dtype)).sum())

    def _within(self, storage: Tensor) -> Tensor:
        typed = storage[self.offset :][: extent(self.shape, self.strides) * self.dtype.itemsize].view(self.dtype)
        return typed.as_strided(self.shape, self.strides)


def guarded(
    shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype, align: int, device: torch.device | str
) -> Guarded:
    """A poisoned tensor between two guard bands, whose address is an odd multiple of `align` bytes."""
    align = max(align, dtype.itemsize)
    size = extent(shape, strides) * dtype.itemsize
    storage = torch.full((2 * GUARD_BYTES + size + 2 * align,), poison_byte(dtype), dtype=torch.uint8, device=device)
    offset = GUARD_BYTES + (align - storage.data_ptr() - GUARD_BYTES) % (2 * align)
    return Guarded(storage, offset, tuple(shape), tuple(strides), dtype)


def bits(tensor: Tensor) -> Tensor:
    """The same memory as integers, for comparisons that must not round or take NaN for unequal."""
    return tensor.view(_BITS[tensor.dtype.itemsize])


def extent(shape: Sequence[int], strides: Sequence[int]) -> int:
    """Elements from the first to the last one, both included."""
    return 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))


def poison_byte(dtype: torch.dtype) -> int:
    return FLOAT_POISON if dtype.is_floating_point else INTEGER_POISON


@functools.cache
def _poison_word(dtype: torch.dtype) -> int:
    """What a tensor of `bits` holds where every byte is poison."""
    unsigned = dtype.itemsize == 1
    return int.from_bytes(bytes([poison_byte(dtype)]) * dtype.itemsize, "little", signed=not unsigned)
