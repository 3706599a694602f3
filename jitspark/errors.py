"""Every error a caller may handle.

Each one says where it happened, what was found, what was needed and what to do, in that order.
Errors cross process boundaries as JSON (`to_json`, `from_json`), never as pickles.
"""

from typing import Any, ClassVar


class JitsparkError(Exception):
    """Base of all errors raised for user input, the cache or the toolchain.

    `exit_code` is what the command line returns for it (README, "Exit codes").
    """

    exit_code: ClassVar[int] = 1

    def __init__(self, *, where: str, found: str, needed: str, remedy: str) -> None:
        super().__init__(where, found, needed, remedy)
        self.where = where
        self.found = found
        self.needed = needed
        self.remedy = remedy

    def __str__(self) -> str:
        return f"{self.where}: found {self.found}; needed {self.needed}. {self.remedy}"

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self).__name__, self.fields())

    def fields(self) -> dict[str, Any]:
        """The constructor's arguments, all JSON values."""
        return {"where": self.where, "found": self.found, "needed": self.needed, "remedy": self.remedy}

    def to_json(self) -> dict[str, Any]:
        return {"error": type(self).__name__, **self.fields()}

    @staticmethod
    def from_json(value: dict[str, Any]) -> "JitsparkError":
        """The error that `to_json` wrote; an unknown class name gives the base class."""
        fields = {name: item for name, item in value.items() if name != "error"}
        return _rebuild(str(value.get("error")), fields)


def _rebuild(name: str, fields: dict[str, Any]) -> JitsparkError:
    known = {cls.__name__: cls for cls in _all_classes(JitsparkError)}
    return known.get(name, JitsparkError)(**fields)


def _all_classes(cls: type[JitsparkError]) -> list[type[JitsparkError]]:
    return [cls, *(found for child in cls.__subclasses__() for found in _all_classes(child))]


class UsageError(JitsparkError):
    """A command line or an environment variable that cannot be understood."""

    exit_code = 2


class SpecError(JitsparkError):
    """A kernel spec, or a specialization of one, breaks its own declaration."""

    exit_code = 3


class GeometryError(JitsparkError):
    """A model geometry is missing, malformed or inconsistent, or does not allow the TP size asked for."""

    exit_code = 3


class TargetError(JitsparkError):
    """A GPU architecture that no kernel supports, or an entry built for another one."""

    exit_code = 3


class CacheDirectoryError(JitsparkError):
    """The cache directory cannot be used: unwritable, full, or not safe to trust."""

    exit_code = 4


class EntryError(JitsparkError):
    """A cache entry is damaged, forged, or for another host, target or runtime."""

    exit_code = 4


class ToolchainError(JitsparkError):
    """The compiler, the linker or the runtime library is missing or unusable."""

    exit_code = 5


class CompileError(JitsparkError):
    """A kernel failed to compile or to link. `log` is the tool's own output, without colours or paths."""

    exit_code = 6

    def __init__(self, *, where: str, found: str, needed: str, remedy: str, log: str = "") -> None:
        super().__init__(where=where, found=found, needed=needed, remedy=remedy)
        self.log = log

    def fields(self) -> dict[str, Any]:
        return {**super().fields(), "log": self.log}


class MissingEntriesError(JitsparkError):
    """Entries are missing where nothing is compiled: it is forbidden, or packing. `keys` names every one of them."""

    exit_code = 7

    def __init__(self, *, where: str, found: str, needed: str, remedy: str, keys: tuple[str, ...] = ()) -> None:
        super().__init__(where=where, found=found, needed=needed, remedy=remedy)
        self.keys = tuple(keys)

    def fields(self) -> dict[str, Any]:
        return {**super().fields(), "keys": list(self.keys)}


class PackError(JitsparkError):
    """A pack file is damaged, hostile, or not for this machine."""

    exit_code = 4


class PlanError(JitsparkError):
    """A stored plan is missing, damaged, from another version, or does not agree with itself or with its entries."""

    exit_code = 4


class WeightsError(JitsparkError):
    """Weights as vLLM holds them are not what a plan needs: their layout, their dtype, or scales that are missing."""

    exit_code = 8


class DeviceMemoryError(JitsparkError):
    """A device has less free memory than is needed."""

    exit_code = 8


class RankError(JitsparkError):
    """A rank of the TP group failed, stalled, left, or has something else than the others."""

    exit_code = 8


class BindingError(JitsparkError):
    """A tensor, a number or an operation that a plan's launches cannot take."""

    exit_code = 3
