"""Tensors that are only described: a shape, a dtype, strides and an address on a GPU that need not exist.

They reach a kernel's own argument checks as DLPack capsules; nothing may ever read them.
"""

import ctypes
from dataclasses import dataclass

CUDA, CPU = 2, 1
CODES = {"int": 0, "uint": 1, "float": 2, "bfloat": 4}


class _Tensor(ctypes.Structure):
    """DLTensor."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class _Managed(ctypes.Structure):
    """DLManagedTensor; without a deleter, since nothing is owned."""

    _fields_ = (("tensor", _Tensor), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p))


_capsule = ctypes.pythonapi.PyCapsule_New
_capsule.restype = ctypes.py_object
_capsule.argtypes = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
_alive: list[object] = []  # capsules point into these


@dataclass(frozen=True, slots=True)
class Described:
    """What `from_dlpack` and tvm_ffi take for a tensor. `strides` in elements."""

    shape: tuple[int, ...]
    dtype: str
    strides: tuple[int, ...]
    address: int = 1 << 20
    device: int = CUDA

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.device, 0

    def __dlpack__(self, **_: object) -> object:
        kind = self.dtype.rstrip("0123456789")
        bits = int(self.dtype[len(kind) :])
        sizes = (ctypes.c_int64 * len(self.shape))(*self.shape)
        strides = (ctypes.c_int64 * len(self.shape))(*self.strides)
        tensor = _Tensor(self.address, self.device, 0, len(self.shape), CODES[kind], bits, 1, sizes, strides, 0)
        managed = _Managed(tensor, None, None)
        _alive.extend((sizes, strides, managed))
        return _capsule(ctypes.addressof(managed), b"dltensor", None)


def compact(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Row-major strides."""
    strides = [1]
    for size in reversed(shape[1:]):
        strides.insert(0, strides[0] * size)
    return tuple(strides[: len(shape)])
