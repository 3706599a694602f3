"""`jitspark warm`: build every entry that a deployment asks for, store its plans, and say what that took."""

import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import FrameType
from typing import Any

from cache_tools.command_line import answer, answer_json, error_text, say
from cache_tools.roots import readable_layers, writable_layer
from cache_tools.table import table
from jitspark.building.build import Report, build, note_uses
from jitspark.building.progress import Wanted
from jitspark.cache.lookup import Lookup, Roots
from jitspark.cli.progress_display import shown_progress
from jitspark.cli.selection import Selection, wanted_by
from jitspark.cli.warm_plans import warm_plans
from jitspark.errors import CacheDirectoryError, JitsparkError
from jitspark.settings import Settings


@dataclass(frozen=True, slots=True)
class Options:
    """How to build, apart from what. `jobs` is None for all of the node's compile slots."""

    jobs: int | None = None
    retry: bool = False
    as_json: bool = False


def warm(selection: Selection, options: Options, settings: Settings) -> JitsparkError | None:
    """Build, store plans and print the closing table. Returns the first error of the kernels that failed.

    All of them are said, and then there are no plans.
    With `options.as_json` the one object is on standard output, all else on standard error.
    """
    started = time.perf_counter()
    write = say if options.as_json else answer
    wanted = wanted_by(selection)
    report = _build(wanted, selection, options, settings)
    errors = [report.failed[item.key] for item in wanted if item.key in report.failed]
    for error in errors[1:]:
        say(f"failed: {error_text(error)}")
    for line in _table(wanted, report):
        write(line)
    plans = None if errors else warm_plans(selection, settings)
    if plans is not None:
        write(plans.line())
    summary = _summary(selection, wanted, report, time.perf_counter() - started, settings)
    summary |= {} if plans is None else {"plans": {"made": plans.made, "found": plans.found, "missing": plans.missing}}
    counts = ", ".join(f"{summary[name]} {name}" for name in ("entries", "compiled", "hits", "failed"))
    write(f"{counts} in {summary['seconds']:.2f} s; cache directory {summary['cache_dir'] or 'none'}")
    if options.as_json:
        answer_json(summary)
    return next(iter(errors), None)


def dry_run(selection: Selection, settings: Settings, *, as_json: bool) -> None:
    """List each key and whether the cache has it; compile nothing and write nothing."""
    from cache_tools.entries import entries_of

    layers = readable_layers(settings)
    rows = [(item, bool(entries_of(item.key, layers))) for item in wanted_by(selection)]
    write = say if as_json else answer
    for line in table(("present", "key", "what"), [_dry_row(*row) for row in rows]):
        write(line)
    present = sum(there for _, there in rows)
    write(f"{len(rows)} entries, {present} present, {len(rows) - present} to compile")
    if as_json:
        missing = [str(item.key) for item, there in rows if not there]
        answer_json(
            {
                "target": list(selection.targets),
                "tp": list(selection.tp),
                "entries": len(rows),
                "hits": present,
                "missing": missing,
                "cache_dir": _cache_dir(settings),
            }
        )


def _dry_row(item: Wanted, there: bool) -> tuple[str, str, str]:  # noqa: FBT001 - a row of two columns
    return "yes" if there else "no", str(item.key), item.specialization.title()


def _build(wanted: Sequence[Wanted], selection: Selection, options: Options, settings: Settings) -> Report:
    lookup, problem = _open(settings)
    if problem is not None and settings.compile != "never" and not all(lookup.find(item.key) for item in wanted):
        raise problem
    with _ended_by_signals(), shown_progress() as show:
        report = build(
            wanted,
            lookup,
            settings,
            jobs=options.jobs,
            retry=options.retry,
            must_publish=True,
            warm_command=selection.warm_command(),
            on_event=show,
        )
    note_uses(report, lookup)
    return report


def _open(settings: Settings) -> tuple[Lookup, CacheDirectoryError | None]:
    """A lookup, and why nothing can be written, if so: that matters only when something is missing."""
    try:
        writable_layer(settings)
    except CacheDirectoryError as problem:
        layers = tuple(replace(layer, writable=False) for layer in readable_layers(settings))
        return Lookup(settings, Roots(layers, None)), problem
    return Lookup(settings), None


@contextmanager
def _ended_by_signals() -> Iterator[None]:
    """SIGTERM ends a build like Ctrl-C does: the children are killed, and nothing is left in the staging directory."""

    def end(number: int, _: FrameType | None) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    except KeyboardInterrupt:
        say("jitspark: interrupted; what was compiled so far is in the cache")
        raise SystemExit(130) from None
    finally:
        signal.signal(signal.SIGTERM, before)


def _table(wanted: Sequence[Wanted], report: Report) -> Iterator[str]:
    header = ("kernel", "entries", "compiled", "hits", "failed", "seconds", "bytes")
    kernels = sorted({item.key.kernel for item in wanted})
    rows = [[name, *_counts([w for w in wanted if w.key.kernel == name], report)] for name in kernels]
    return table(header, [*rows, ["total", *_counts(wanted, report)]])


def _counts(wanted: Sequence[Wanted], report: Report) -> list[int | float]:
    """Entries, compiled, hits, failed, compile seconds and bytes of one kernel."""
    keys = [item.key for item in wanted]
    compiled = [key for key in keys if key in report.compiled]
    failed = [key for key in keys if key in report.failed]
    size = sum(report.entries[key].record.size for key in keys if key in report.entries)
    seconds = float(sum(report.compiled[key] for key in compiled))
    return [len(keys), len(compiled), len(keys) - len(compiled) - len(failed), len(failed), seconds, size]


def _summary(
    selection: Selection, wanted: Sequence[Wanted], report: Report, seconds: float, settings: Settings
) -> dict[str, Any]:
    return {
        "target": list(selection.targets),
        "tp": list(selection.tp),
        "entries": len(wanted),
        "compiled": len(report.compiled),
        "hits": report.hits,
        "failed": len(report.failed),
        "seconds": round(seconds, 3),
        "cache_dir": _cache_dir(settings),
    }


def _cache_dir(settings: Settings) -> str | None:
    return None if settings.cache_dir is None else str(settings.cache_dir)
