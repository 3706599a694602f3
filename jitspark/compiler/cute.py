"""From a specialization to an object file, through the CuTe DSL.

Importing this module imports the DSL. It must come first in its process: tvm_ffi imports torch when torch is
installed, which costs a second and 180 MB and changes no byte of the result.
"""

import importlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jitspark.errors import ToolchainError
from jitspark.spec import VAR, Divisible, Scalar, Specialization, Tensor
from jitspark.target import CUDA_FLAVOUR
from jitspark.toolchain import extension_module

_EXTENSION = "cutlass._mlir._mlir_libs._cutlass_ir"


def import_dsl() -> None:
    """Import the DSL with its CUDA flavour pinned: left alone, it picks cu12 or cu13 by the installed driver."""
    if "cutlass" in sys.modules:
        return
    sys.modules.setdefault("torch", None)  # type: ignore[arg-type]
    path = extension_module()
    if path is None:
        raise ToolchainError(
            where="compiler",
            found=f"no nvidia-cutlass-dsl {CUDA_FLAVOUR} libraries",
            needed=f"nvidia-cutlass-dsl[{CUDA_FLAVOUR}]",
            remedy="Install jitspark[compile], or use a cache that holds the entries.",
        )
    found = importlib.util.spec_from_file_location(_EXTENSION, path)
    assert found is not None and found.loader is not None
    module = importlib.util.module_from_spec(found)
    sys.modules[_EXTENSION] = module
    found.loader.exec_module(module)
    importlib.import_module("cutlass")
    sys.modules["cutlass._mlir._mlir_libs"]._cutlass_ir = module  # type: ignore[attr-defined]


def write_object(specialization: Specialization, options: tuple[str, ...], path: Path) -> None:
    """Compile `specialization` and write the object file; its function is named after the kernel."""
    from cutlass import cute
    from cutlass.cute.runtime import make_fake_stream

    host = _factory(specialization)(**specialization.factory_arguments())
    stream = make_fake_stream(use_tvm_ffi_env_stream=True)
    compiled = cute.compile(host, *fake_arguments(specialization), stream, options=" ".join(options))
    compiled.export_to_c(str(path), function_name=specialization.name)


def _factory(specialization: Specialization) -> Callable[..., Any]:
    module, _, function = specialization.spec.kernel.partition(":")
    factory: Callable[..., Any] = getattr(
        importlib.import_module(f"kernel_specs.{specialization.name}.{module}"), function
    )
    return factory


def fake_arguments(specialization: Specialization) -> list[Any]:
    """One placeholder per argument, with the shapes, strides and alignments that the spec promises."""
    import cutlass
    from cutlass import cute
    from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_tensor

    symbols: dict[str, Any] = {}

    def extent(axis: str | int) -> Any:
        if isinstance(axis, int):
            return axis
        if specialization.spec.axes[axis] is not VAR:
            return specialization.axes[axis]
        if axis not in symbols:
            symbols[axis] = cute.sym_int32(divisibility=_divisor(specialization, axis))
        return symbols[axis]

    def stride(item: str | int, divisor: int) -> Any:
        if isinstance(item, str) and item not in symbols:
            symbols[item] = cute.sym_int64(divisibility=divisor)
        return symbols[item] if isinstance(item, str) else item

    def tensor(arg: Tensor) -> Any:
        dtype = getattr(cutlass, _DTYPES[specialization.dtype_of(arg)])
        shape = tuple(extent(axis) for axis in arg.axes)
        if arg.strides is None:
            order = tuple(reversed(range(len(shape))))
            return make_fake_compact_tensor(dtype, shape, stride_order=order, assumed_align=arg.align)
        strides = tuple(stride(item, arg.stride_divisor) for item in arg.strides)
        return make_fake_tensor(dtype, shape, strides, assumed_align=arg.align)

    def scalar(arg: Scalar) -> Any:
        return getattr(cutlass, _DTYPES[specialization.dtype_of(arg)])(0)

    return [tensor(arg) if isinstance(arg, Tensor) else scalar(arg) for arg in specialization.args]


def _divisor(specialization: Specialization, axis: str) -> int:
    """What the spec's constraints promise about a run-time extent."""
    declared = specialization.spec.constraints
    rules = [c.by for c in declared if isinstance(c, Divisible) and c.name == axis and c.when is None]
    return max((by for by in rules if isinstance(by, int)), default=1)


_DTYPES = {
    "bfloat16": "BFloat16",
    "float16": "Float16",
    "float32": "Float32",
    "int32": "Int32",
    "int64": "Int64",
    "uint8": "Uint8",
    "float8_e4m3fn": "Float8E4M3FN",
    "bool": "Boolean",
}
