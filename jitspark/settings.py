"""Everything that comes from the environment, read here and nowhere else, into one frozen value."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from jitspark.errors import UsageError
from jitspark.installed_caches import installed_caches


@dataclass(frozen=True, slots=True)
class Settings:
    """The process' choices. Field by field the README's table of environment variables.

    cache_dir: the writable root, or None when no place for one exists.
    cache_path: read-only roots, searched in order before it; those that were installed as wheels come last.
    compile: "auto" builds what is missing, "never" only looks up.
    toolchain: "any" accepts entries of other compiler versions, "own" insists on this one's.
    compile_slots: compiler children on this node at one time, all processes together.
    trust_writable_roots: accept roots that others may write to.
    runtime_library: the CuTe DSL runtime library to use instead of the installed one.
    lock_dir: where node-local locks live.
    """

    cache_dir: Path | None
    cache_path: tuple[Path, ...] = ()
    compile: str = "auto"
    toolchain: str = "any"
    compile_slots: int = 1
    trust_writable_roots: bool = False
    runtime_library: Path | None = None
    lock_dir: Path = field(default_factory=lambda: Path(f"/dev/shm/jitspark-{os.geteuid()}"))


def from_environment(environment: Mapping[str, str] | None = None) -> Settings:
    """The settings that `environment` (default: the process') describes. Raises UsageError for a bad value."""
    env = os.environ if environment is None else environment
    roots = env.get("JITSPARK_CACHE_PATH", "").split(os.pathsep)
    runtime = env.get("JITSPARK_RUNTIME_LIBRARY")
    return Settings(
        cache_dir=_cache_dir(env),
        cache_path=(*(Path(root) for root in roots if root), *installed_caches()),
        compile=_choice(env, "JITSPARK_COMPILE", ("auto", "never")),
        toolchain=_choice(env, "JITSPARK_TOOLCHAIN", ("any", "own")),
        compile_slots=_count(env, "JITSPARK_COMPILE_SLOTS", default_compile_slots()),
        trust_writable_roots=_choice(env, "JITSPARK_TRUST_WRITABLE_ROOTS", ("0", "1")) == "1",
        runtime_library=Path(runtime) if runtime else None,
        lock_dir=_lock_dir(env),
    )


def allowed_vllm_plugins(environment: Mapping[str, str] | None = None) -> tuple[str, ...] | None:
    """The plugins that vLLM may load, None for all of them: its own variable, read only to explain what it does."""
    names = (os.environ if environment is None else environment).get("VLLM_PLUGINS")
    return None if names is None else tuple(name.strip() for name in names.split(",") if name.strip())


def default_compile_slots() -> int:
    """One child per core that this process may use, and 600 MB of memory each (a child takes 250 to 450 MB)."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    return max(1, min(len(os.sched_getaffinity(0)), memory // 600_000_000))


def child_environment(staging: Path) -> dict[str, str]:
    """What a compiler child sees: what it needs to start, and nothing that could change the bytes it writes.

    No CUTE_DSL_* variable passes. Home and temporary directory lie in `staging`, which is removed afterwards.
    """
    package_root = str(Path(__file__).resolve().parent.parent)
    passed = {name: os.environ[name] for name in ("PATH", "LD_LIBRARY_PATH", "SYSTEMROOT") if name in os.environ}
    own = {"HOME": str(staging), "TMPDIR": str(staging), "LC_ALL": "C.UTF-8", "PYTHONPATH": package_root}
    return {**passed, **own, "PYTHONDONTWRITEBYTECODE": "1", "USER": "jitspark"}


def _cache_dir(env: Mapping[str, str]) -> Path | None:
    if "JITSPARK_CACHE_DIR" in env:
        chosen = env["JITSPARK_CACHE_DIR"]
        return Path(chosen) if chosen else None
    if xdg := env.get("XDG_CACHE_HOME"):
        return Path(xdg) / "jitspark"
    home = env.get("HOME", "")
    if home and os.path.isdir(home) and os.access(home, os.W_OK | os.X_OK):
        return Path(home) / ".cache" / "jitspark"
    return Path(f"/tmp/jitspark-{os.geteuid()}")


def _lock_dir(env: Mapping[str, str]) -> Path:
    """Node-local memory, so that a lock never depends on what file system the cache lies on."""
    runtime = env.get("XDG_RUNTIME_DIR", "")
    if runtime and os.access(runtime, os.W_OK | os.X_OK):
        return Path(runtime) / "jitspark"
    shared_memory = "/dev/shm" if os.access("/dev/shm", os.W_OK | os.X_OK) else "/tmp"
    return Path(shared_memory) / f"jitspark-{os.geteuid()}"


def _choice(env: Mapping[str, str], name: str, choices: tuple[str, ...]) -> str:
    """The variable's value; the first choice when it is unset or empty."""
    value = env.get(name) or choices[0]
    if value not in choices:
        raise _usage(name, value, f"one of {', '.join(choices)}")
    return value


def _count(env: Mapping[str, str], name: str, default: int) -> int:
    value = env.get(name)
    if not value:
        return default
    if not value.isascii() or not value.isdigit() or not 1 <= int(value) <= 1024:
        raise _usage(name, value, "a whole number from 1 to 1024")
    return int(value)


def _usage(name: str, value: str, needed: str) -> UsageError:
    return UsageError(where=name, found=repr(value), needed=needed, remedy=f"Set {name} accordingly, or unset it.")
