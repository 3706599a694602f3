"""Recipes and keys: everything that decides an artifact's bytes, as canonical JSON and its digest.

What enters a recipe is listed in ARCHITECTURE.md. Never in it: absolute paths, times, users, the environment.
"""

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import TYPE_CHECKING, Any

from jitspark.errors import SpecError
from jitspark.target import host_name

if TYPE_CHECKING:  # a process that only loads makes no recipes: it need not import what they come from
    from jitspark.constraints import Constraint
    from jitspark.spec import Specialization
    from jitspark.toolchain import Toolchain

# Raised whenever our own way from a spec to bytes changes: fake arguments, link line, export options.
PROCEDURE = 1

_NAME = re.compile(r"[a-z0-9_]{1,64}\Z")
_HOST = re.compile(r"[a-z0-9_]{1,32}-[a-z0-9_]{1,32}\Z")
_DIGEST = re.compile(r"[0-9a-f]{64}\Z")


@dataclass(frozen=True, slots=True, order=True)
class Key:
    """Names an entry, whoever compiled it: where it lies below a store's root."""

    target: str
    host: str
    kernel: str
    recipe: str

    def __post_init__(self) -> None:
        # These become path components: a name from a file must not be able to climb out of the root.
        good = _NAME.match(self.target) and _HOST.match(self.host) and _NAME.match(self.kernel)
        if not good or not _DIGEST.match(self.recipe):
            raise ValueError(f"not a key: {(self.target, self.host, self.kernel, self.recipe)!r}")

    @property
    def path(self) -> str:
        return f"{self.target}-{self.host}/{self.kernel}/{self.recipe}"

    def __str__(self) -> str:
        return f"{self.kernel}/{self.recipe[:12]} ({self.target}, {self.host})"


@dataclass(frozen=True, slots=True)
class Recipe:
    """All that decides an artifact's bytes except the toolchain. Every value is JSON."""

    kernel: str
    spec: Mapping[str, Any]
    axes: Mapping[str, Any]
    dtypes: Mapping[str, Any]
    statics: Mapping[str, Any]
    target: str
    host: str
    sources: Mapping[str, str]
    options: tuple[str, ...]
    procedure: int

    @property
    def digest(self) -> str:
        return digest_of(self)

    @property
    def key(self) -> Key:
        return Key(self.target, self.host, self.kernel, self.digest)


def recipe_of(specialization: "Specialization", target: str) -> Recipe:
    """The recipe of `specialization` for `target` on this host.

    Raises SpecError when a source is missing or a value cannot be put into a key.
    """
    from jitspark.source_digest import kernel_sources

    module = specialization.spec.kernel.partition(":")[0]
    return Recipe(
        kernel=specialization.name,
        spec=_spec_content(specialization),
        axes=specialization.axes,
        dtypes=specialization.dtypes,
        statics=specialization.statics,
        target=target,
        host=host_name(),
        sources=dict(kernel_sources(specialization.name, module)),
        options=codegen_options(target),
        procedure=PROCEDURE,
    )


def codegen_options(target: str) -> tuple[str, ...]:
    """What `cute.compile` is told, apart from the code."""
    return ("--enable-tvm-ffi", f"--gpu-arch {target}")


def toolchain_digest(toolchain: "Toolchain") -> str:
    return digest_of(toolchain)


def _spec_content(specialization: "Specialization") -> dict[str, Any]:
    """The spec's part in the bytes. Choices not taken, supported targets, cases and the reference have none."""
    spec = specialization.spec
    return {
        "axes": {name: kind.value for name, kind in spec.axes.items()},
        "args": [{"kind": type(arg).__name__, **plain(arg, arg.name)} for arg in specialization.args],
        "constraints": [_constraint_content(c) for c in spec.constraints],
        "kernel": spec.kernel,
        "factory_arguments": specialization.factory_arguments(),
    }


def _constraint_content(constraint: "Constraint") -> dict[str, Any]:
    """The reason is for people: mending its text must not make every entry a miss."""
    content = {name: item for name, item in plain(constraint, constraint.name).items() if name != "because"}
    return {"kind": type(constraint).__name__, **content}


def canonical(value: Any) -> bytes:
    """Canonical JSON: sorted names, no spaces, floats by their exact hexadecimal value.

    Values that are no JSON, and names that are no text, raise SpecError with the path to them.
    """
    return json.dumps(plain(value), sort_keys=True, separators=(",", ":"), allow_nan=False).encode("ascii")


def digest_of(value: Any) -> str:
    return hashlib.sha256(canonical(value)).hexdigest()


def plain(value: Any, path: str = "") -> Any:
    """`value` as JSON values alone; `path` names it in errors. Its own result passes through unchanged."""
    if value is None or isinstance(value, (bool, str)) or type(value) is int:
        return value
    if type(value) is float:
        return {"float": value.hex()}
    if isinstance(value, (tuple, list)):
        return [plain(item, f"{path}[{index}]") for index, item in enumerate(value)]
    if isinstance(value, Mapping):
        return {_text(name, path): plain(item, f"{path}.{name}") for name, item in value.items()}
    if is_dataclass(value) and not isinstance(value, type):
        return {f.name: plain(getattr(value, f.name), f"{path}.{f.name}") for f in fields(value)}
    raise _not_canonical(path, value)


def _text(name: Any, path: str) -> str:
    if not isinstance(name, str):
        raise _not_canonical(f"{path}.{name!r}", name)
    return name


def _not_canonical(path: str, value: Any) -> SpecError:
    return SpecError(
        where=f"key field {path.lstrip('.') or 'value'}",
        found=f"a {type(value).__module__}.{type(value).__qualname__}",
        needed="text, a number, true, false, null, or lists and mappings of these",
        remedy="Declare the value in the spec as a plain Python value.",
    )
