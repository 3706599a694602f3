"""The build policy: find everything that a process wants, compile what is missing, load it.

Hits take no lock. When something is missing, `share` does this process' part of the compiling.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from jitspark.compiler_child import COMMAND
from jitspark.errors import CacheDirectoryError, EntryError, JitsparkError, MissingEntriesError
from jitspark.key import Key, recipe_of
from jitspark.loader import Kernel, Loader
from jitspark.lookup import Lookup
from jitspark.progress import Event, Progress, Wanted
from jitspark.settings import Settings
from jitspark.share import compile_missing
from jitspark.spec import Specialization
from jitspark.store import Entry
from jitspark.toolchain import require_toolchain


@dataclass(frozen=True, slots=True)
class Report:
    """What a build came to. `compiled` maps keys compiled by this process to seconds; the others were hits."""

    entries: Mapping[Key, Entry]
    compiled: Mapping[Key, float]
    failed: Mapping[Key, JitsparkError]
    unpublished: Mapping[Key, CacheDirectoryError]

    @property
    def hits(self) -> int:
        return len(self.entries) - len(self.compiled)


def build(
    wanted: Sequence[Wanted],
    lookup: Lookup,
    settings: Settings,
    *,
    jobs: int | None = None,
    retry: bool = False,
    must_publish: bool = False,
    on_event: Callable[[Event], None] = lambda event: None,
    command: tuple[str, ...] = COMMAND,
) -> Report:
    """Find every wanted entry, and compile what is missing unless the settings forbid it.

    `jobs` limits this process' compiler children (default: all slots of the node). `retry` forgets failures
    remembered from earlier. `must_publish`: entries that only this process would see are of no use, so the first that
    the writable root cannot take raises CacheDirectoryError. Raises MissingEntriesError when compiling is forbidden and
    something is missing, ToolchainError when something must be compiled and there is no compiler or linker. A kernel
    that fails to compile fails alone: see `Report.failed`.
    """
    progress = Progress(lookup, on_event, len(wanted))
    missing = [item for item in wanted if not progress.settle_if_found(item)]
    if missing and settings.compile == "never":
        raise missing_entries([item.key for item in missing])
    if missing:
        require_toolchain()
        slots = min(jobs or settings.compile_slots, settings.compile_slots)
        compile_missing(
            missing, progress, settings, jobs=slots, retry=retry, must_publish=must_publish, command=command
        )
    return Report(progress.entries, progress.compiled, progress.failed, progress.unpublished)


def build_and_load(
    wanted: Sequence[Wanted],
    lookup: Lookup,
    loader: Loader,
    settings: Settings,
    on_event: Callable[[Event], None] = lambda event: None,
) -> list[Kernel]:
    """Build what is missing and load everything, in order. An entry found damaged on loading is rebuilt, once.

    Raises what `build` and `Loader.load` raise, and the first error of a kernel that failed to compile.
    """
    for last in (False, True):
        report = build(wanted, lookup, settings, on_event=on_event)
        for error in report.failed.values():
            raise error
        damaged = [entry for entry in report.entries.values() if not _intact(entry, lookup)]
        if not damaged or last:
            break
    return loader.load([report.entries[item.key] for item in wanted])


def _intact(entry: Entry, lookup: Lookup) -> bool:
    try:
        entry.read_artifact()
    except EntryError as problem:
        lookup.reject(entry, problem)
        return False
    return True


def wanted_for(specializations: Sequence[Specialization], targets: Sequence[str]) -> list[Wanted]:
    """What to build so that `specializations` can run on `targets`; those that a spec does not support are left out."""
    pairs = ((s, target) for target in targets for s in specializations if target in s.spec.targets)
    return [Wanted(specialization, recipe_of(specialization, target)) for specialization, target in pairs]


def missing_entries(
    keys: Sequence[Key],
    needed: str = "an entry for every key, since compiling is forbidden (JITSPARK_COMPILE=never)",
    remedy: str = "Run `jitspark warm` for this deployment first.",
) -> MissingEntriesError:
    """The one error that names everything missing."""
    names = sorted(str(key) for key in keys)
    return MissingEntriesError(
        where="cache",
        found=f"{len(names)} missing: {', '.join(names)}",
        needed=needed,
        remedy=remedy,
        keys=tuple(names),
    )
