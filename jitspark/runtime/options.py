"""The options of `additional_config["jitspark"]`: what a deployment opts in to, and its cache and compile policy.

They reach every vLLM worker unchanged, which the environment does not, so they beat it. Whatever is wrong with
them is one UsageError that names the option; nothing here imports vLLM.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from jitspark.errors import GeometryError, UsageError
from jitspark.geometry import DEFAULT_GEOMETRY, Backbone, load_geometry
from jitspark.runtime.parts import CHOICES, CUTE, PARTS
from jitspark.settings import Settings, from_environment
from jitspark.target import TARGETS

SECTION = 'additional_config["jitspark"]'
RAISE, STOCK = "raise", "stock"
VLLM, JITSPARK = "vllm", "jitspark"
AUTO_EXCHANGES, SYMMETRIC_MEMORY, TORCH_DISTRIBUTED = "auto", "symmetric_memory", "torch_distributed"


@dataclass(frozen=True, slots=True)
class Options:
    """A deployment's choices; without any, the specialized decode is the one that Muse Spark Open is served with.

    targets: the GPU architectures to accept instead of SM100/103; empty when not opted in.
    geometry: the built-in name or TOML path of a backbone to accept instead of Muse Spark Open; None likewise.
    providers: (part, provider) of the parts that are not left to `cute`.
    on_error: "raise" ends the start-up of a deployment that cannot be served, "stock" warns and runs stock.
    implementation: whose specialized decode runs where vLLM brings one too; "vllm" is vLLM's own.
    exchanges: what ranks exchange through; "auto" is memory that they map, and torch.distributed where they cannot.
    settings: (field, value) of those fields of `Settings` that the deployment fixes.
    """

    targets: tuple[str, ...] = ()
    geometry: str | None = None
    providers: tuple[tuple[str, str], ...] = ()
    on_error: str = RAISE
    implementation: str = VLLM
    exchanges: str = AUTO_EXCHANGES
    settings: tuple[tuple[str, Any], ...] = ()

    def provider(self, part: str) -> str:
        """Who serves this part of the step."""
        return dict(self.providers).get(part, CUTE)

    def backbone(self) -> Backbone:
        """The backbone that the deployment's model must be. Raises GeometryError for one that cannot be loaded."""
        try:
            return load_geometry(self.geometry or DEFAULT_GEOMETRY)
        except GeometryError as error:
            where = f"{_place('geometry')}: {error.where}".removesuffix(": --geometry")
            raise GeometryError(**{**error.fields(), "where": where}) from error

    def merged_into(self, settings: Settings) -> Settings:
        """`settings` with this deployment's own values in place of the environment's."""
        return replace(settings, **dict(self.settings))


def from_vllm_config(vllm_config: Any) -> Options:
    """The options of this deployment, the defaults when it states none. Raises UsageError."""
    extra = vllm_config.additional_config
    return parse(extra.get("jitspark", {})) if isinstance(extra, dict) else Options()


def may_give_up(vllm_config: Any) -> bool:
    """Whether stock is to run where the specialized decode cannot (`on_error`). Raises UsageError."""
    return from_vllm_config(vllm_config).on_error == STOCK


def settings_for(vllm_config: Any, environment: Mapping[str, str] | None = None) -> Settings:
    """The process' settings for this deployment: its options, then the environment. Raises UsageError."""
    return from_vllm_config(vllm_config).merged_into(from_environment(environment))


def parse(section: Any) -> Options:
    """Options from the plain values of the section. Raises UsageError naming every unknown key, or the bad value."""
    if not isinstance(section, dict):
        raise _usage("", section, "an object of options", "Write it as an object, or leave it out.")
    _refuse_unknown("", section, (*_OPTIONS, *_SETTINGS))
    own = {key: read(key, section[key]) for key, read in _OPTIONS.items() if key in section}
    settings = tuple((key, read(key, section[key])) for key, read in _SETTINGS.items() if key in section)
    return Options(**own, settings=settings)


def _refuse_unknown(key: str, found: dict[Any, Any], known: tuple[str, ...]) -> None:
    unknown = sorted(repr(name) for name in found if name not in known)
    if unknown:
        noun = "unknown option" if len(unknown) == 1 else "unknown options"
        raise UsageError(
            where=_place(key),
            found=f"{noun} {', '.join(unknown)}",
            needed=f"only {', '.join(known)}",
            remedy="Correct the spelling, or leave it out.",
        )


def _targets(key: str, value: Any) -> tuple[str, ...]:
    given = _texts(key, value)
    if not given or not set(given) <= set(TARGETS):
        raise _usage(key, value, f"a list of targets out of {', '.join(TARGETS)}")
    return given


def _providers(key: str, value: Any) -> tuple[tuple[str, str], ...]:
    if not isinstance(value, dict):
        raise _usage(key, value, f"an object from part to provider, the parts being {', '.join(PARTS)}")
    _refuse_unknown(key, value, PARTS)
    for part, provider in value.items():
        if provider not in CHOICES[part]:
            raise _usage(f"{key}.{part}", provider, f"one of {', '.join(CHOICES[part])}")
    return tuple((part, value[part]) for part in PARTS if part in value)


def _choice(*choices: str) -> Callable[[str, Any], str]:
    def read(key: str, value: Any) -> str:
        if value not in choices:
            raise _usage(key, value, f"one of {', '.join(choices)}")
        return str(value)

    return read


def _is_text(value: Any) -> bool:
    """No path holds a NUL, and no variable of the environment."""
    return isinstance(value, str) and bool(value) and "\0" not in value


def _text(key: str, value: Any) -> str:
    if not _is_text(value):
        raise _usage(key, value, "a text that is not empty")
    return str(value)


def _texts(key: str, value: Any) -> tuple[str, ...]:
    if not isinstance(value, (list, tuple)) or not all(map(_is_text, value)):
        raise _usage(key, value, "a list of texts")
    return tuple(value)


def _path(key: str, value: Any) -> Path:
    return Path(_text(key, value))


def _path_or_none(key: str, value: Any) -> Path | None:
    return None if value is None else _path(key, value)


def _paths(key: str, value: Any) -> tuple[Path, ...]:
    return tuple(Path(item) for item in _texts(key, value))


def _flag(key: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise _usage(key, value, "true or false")
    return value


def _count(key: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= 1024:
        raise _usage(key, value, "a whole number from 1 to 1024")
    return value


_OPTIONS: Mapping[str, Callable[[str, Any], Any]] = {
    "targets": _targets,
    "geometry": _text,
    "providers": _providers,
    "on_error": _choice(RAISE, STOCK),
    "implementation": _choice(VLLM, JITSPARK),
    "exchanges": _choice(AUTO_EXCHANGES, SYMMETRIC_MEMORY, TORCH_DISTRIBUTED),
}
# field by field what `Settings` holds, and what the environment variables accept
_SETTINGS: Mapping[str, Callable[[str, Any], Any]] = {
    "cache_dir": _path_or_none,
    "cache_path": _paths,
    "compile": _choice("auto", "never"),
    "toolchain": _choice("any", "own"),
    "compile_slots": _count,
    "trust_writable_roots": _flag,
    "runtime_library": _path_or_none,
    "lock_dir": _path,
}


def _place(key: str) -> str:
    return SECTION + "".join(f'["{step}"]' for step in key.split(".") if step)


def _usage(key: str, value: Any, needed: str, remedy: str = "Correct this option, or leave it out.") -> UsageError:
    return UsageError(where=_place(key), found=repr(value), needed=needed, remedy=remedy)
