"""Kernels by location: a folder of `kernel_specs` with a `spec.py` is a kernel of that name. Imports specs only."""

import importlib
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import kernel_specs
from jitspark.errors import SpecError
from jitspark.spec import KernelSpec, Specialization

if TYPE_CHECKING:  # a machine that only loads kernels has no geometry library
    from jitspark.geometry import Deployment

KERNELS_DIR = Path(kernel_specs.__file__).resolve().parent


def kernel_names() -> tuple[str, ...]:
    """Every kernel, sorted."""
    return tuple(sorted(path.parent.name for path in KERNELS_DIR.glob("*/spec.py")))


def load_spec(name: str) -> KernelSpec:
    """The spec of a kernel. Raises SpecError for an unknown name or a spec module that breaks the contract."""
    spec = _declared(name, "SPEC")
    if not isinstance(spec, KernelSpec) or spec.name != name:
        raise _broken(name, f"SPEC = {getattr(spec, 'name', spec)!r}", f"a KernelSpec named {name!r}, as its folder is")
    return spec


def specializations(deployment: "Deployment", names: Iterable[str] | None = None) -> tuple[Specialization, ...]:
    """Everything a worker of this deployment can ask of these kernels (all by default), each once, in a fixed order."""
    chosen = kernel_names() if names is None else names
    found = (each for name in chosen for each in _declared(name, "specializations")(deployment))
    # told apart by repr, as 1, 1.0 and True are equal but compile to different kernels
    return tuple({(each.name, repr((each.axes, each.dtypes, each.statics))): each for each in found}.values())


def resolve(name: str, location: str) -> tuple[str, str]:
    """Module and function that a spec's `"kernel:function"` or `"reference:function"` stands for; imports nothing."""
    module, _, function = location.partition(":")
    if not (function.isidentifier() and module.isidentifier() and (KERNELS_DIR / name / f"{module}.py").is_file()):
        raise _broken(name, repr(location), "'<module of the kernel folder>:<function>'")
    return f"kernel_specs.{name}.{module}", function


def _declared(name: str, attribute: str) -> Any:
    if name not in kernel_names():
        known = ", ".join(kernel_names())
        raise SpecError(where="kernel", found=f"unknown {name!r}", needed=f"one of {known}", remedy="Correct the name.")
    try:
        return getattr(importlib.import_module(f"kernel_specs.{name}.spec"), attribute)
    except (ImportError, SyntaxError, AttributeError, NameError, TypeError, ValueError, LookupError) as error:
        raise _broken(name, f"{type(error).__name__}: {error}", "a module with SPEC and specializations") from error


def _broken(name: str, found: str, needed: str) -> SpecError:
    return SpecError(where=name, found=found, needed=needed, remedy=f"Mend kernel_specs/{name}/spec.py.")
