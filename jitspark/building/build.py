"""The build policy: find everything that a process wants, compile what is missing, load it.

Hits take no lock. When something is missing, `share` does this process' part of the compiling.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from jitspark.building.compiler_child import COMMAND
from jitspark.building.progress import Event, Progress, Wanted
from jitspark.building.share import compile_missing
from jitspark.cache.loader import Kernel, Loader
from jitspark.cache.lookup import Lookup
from jitspark.cache.runtime_library import without_collecting
from jitspark.cache.store import Entry
from jitspark.errors import CacheDirectoryError, EntryError, JitsparkError, MissingEntriesError
from jitspark.key import Key, recipe_of
from jitspark.settings import Settings
from jitspark.spec import Specialization
from jitspark.toolchain import require_toolchain

_LOAD_TRIES = 3


@dataclass(frozen=True, slots=True)
class Report:
    """What a build came to. `compiled` maps keys compiled by this process to seconds; the others were hits.

    `waited` holds the keys that were missing at first and that another process compiled meanwhile.
    """

    entries: Mapping[Key, Entry]
    compiled: Mapping[Key, float]
    failed: Mapping[Key, JitsparkError]
    unpublished: Mapping[Key, CacheDirectoryError]
    waited: frozenset[Key] = frozenset()

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
    warm_command: str | None = None,
    on_event: Callable[[Event], None] = lambda _: None,
    command: tuple[str, ...] = COMMAND,
) -> Report:
    """Find every wanted entry, and compile what is missing unless the settings forbid it.

    `jobs` limits this process' compiler children (default: all slots of the node). `retry` forgets failures
    remembered from earlier. `must_publish`: entries that only this process would see are of no use, so the first that
    the writable root cannot take raises CacheDirectoryError. `warm_command` is the command line that makes what is
    wanted, for the error that says it is missing. Raises MissingEntriesError when compiling is forbidden and
    something is missing, ToolchainError when something must be compiled and there is no compiler or linker. A kernel
    that fails to compile fails alone: see `Report.failed`.
    """
    unique = {item.key: item for item in wanted}
    progress = Progress(lookup, on_event, len(unique))
    with without_collecting():
        missing = [item for item in unique.values() if not progress.settle_if_found(item)]
    progress.missed.update(item.key for item in missing)
    if missing and settings.compile == "never":
        targets = ",".join(sorted({item.key.target for item in missing}))
        line = warm_command or f"jitspark warm --tp <TP size> --target {targets}"
        remedy = f"Run `{line}` where compiling is allowed, on this cache directory."
        raise missing_entries([item.key for item in missing], held=_held(missing, lookup), remedy=remedy)
    if missing:
        require_toolchain()
        slots = min(jobs or settings.compile_slots, settings.compile_slots)
        compile_missing(
            missing, progress, settings, jobs=slots, retry=retry, must_publish=must_publish, command=command
        )
    waited = frozenset(progress.missed - progress.compiled.keys() - progress.failed.keys())
    return Report(progress.entries, progress.compiled, progress.failed, progress.unpublished, waited)


def build_and_load(
    wanted: Sequence[Wanted],
    lookup: Lookup,
    loader: Loader,
    settings: Settings,
    *,
    warm_command: str | None = None,
    on_event: Callable[[Event], None] = lambda _: None,
    command: tuple[str, ...] = COMMAND,
) -> list[Kernel]:
    """Build what is missing and load everything, in order. An entry found damaged or gone on loading is rebuilt.

    Raises what `build` and `Loader.load` raise, and the first error of a kernel that failed to compile.
    """
    for left in reversed(range(_LOAD_TRIES)):
        report = build(wanted, lookup, settings, warm_command=warm_command, on_event=on_event, command=command)
        for error in report.failed.values():
            raise error
        entries = [report.entries[item.key] for item in wanted]
        try:
            kernels = loader.load(entries)
        except EntryError:
            damaged = [entry for entry in report.entries.values() if not _intact(entry, lookup)]
            if not damaged or not left:
                raise
        else:
            note_uses(report, lookup)
            return kernels
    raise AssertionError("the last try returns or raises")


def note_uses(report: Report, lookup: Lookup) -> None:
    """Tell the ledger what `report` used, where a writable layer exists. Best effort: nothing depends on it."""
    layer = lookup.roots.writable_layer
    if layer is not None:
        from jitspark.cache.ledger import Use, note

        uses = [
            Use(entry, key in report.waited, report.compiled.get(key))
            for key, entry in report.entries.items()
            if entry.layer is not None
        ]
        note(layer, uses)


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
    held: str = "",
    needed: str = "an entry for every key, since compiling is forbidden (JITSPARK_COMPILE=never)",
    remedy: str = "Run `jitspark warm` for this deployment first.",
) -> MissingEntriesError:
    """The one error that names everything missing; `held` says what the cache has instead."""
    names = sorted(str(key) for key in keys)
    return MissingEntriesError(
        where="cache",
        found=f"{len(names)} missing: {', '.join(names)}{held}",
        needed=needed,
        remedy=remedy,
        keys=tuple(names),
    )


def _held(missing: Sequence[Wanted], lookup: Lookup) -> str:
    """For what other targets or hosts the cache has kernels of which it has nothing for the target asked for."""
    asked = {f"{item.key.target}-{item.key.host}" for item in missing}
    held = {name for kernel in {item.key.kernel for item in missing} for name in lookup.targets_held(kernel)}
    if not held or held & asked:
        return ""
    return f"; the cache holds these kernels for {', '.join(sorted(held))} only, not for {', '.join(sorted(asked))}"
