"""Stored plans as a pack carries them: whole files, each read as a plan before it counts.

A plan is named by what it was asked for, so equal names have equal bytes, or one of two builders is at fault.
"""

import logging
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from cache_tools.archive import bad_pack
from cache_tools.pins import MAX_PLAN_BYTES, plan_names
from jitspark.cache.folders import read_below
from jitspark.cache.store import PLANS, Layer
from jitspark.errors import EntryError, PlanError, UsageError
from jitspark.key import Key

if TYPE_CHECKING:  # what a plan is costs time to import, and many caches have none
    from jitspark.plans.plan import Plan

logger = logging.getLogger("jitspark")

SHORTEST_NAME = 6


@dataclass(frozen=True, slots=True)
class PlanFile:
    """A plan and its bytes; `name` is the digest of what it is asked for by."""

    name: str
    content: bytes
    plan: "Plan"

    @property
    def path(self) -> str:
        """Below a cache root."""
        return f"{PLANS}/{self.name}.json"


class PlanFiles:
    """Reads plan files; what several have in common is read once."""

    def __init__(self) -> None:
        self._reader: Any = None

    def read(self, path: str, content: bytes, where: str) -> PlanFile:
        """The plan in `content`, whose path below a root is `path`. Raises PlanError."""
        if self._reader is None:
            from jitspark.plans.reader import PlanReader

            self._reader = PlanReader()
        name = path.rpartition("/")[2].removesuffix(".json")
        return PlanFile(name, content, self._reader.read(content, where)[0])

    def packed(self, path: str, content: bytes, where: str) -> PlanFile:
        """As `read`, in a pack. Raises PackError."""
        try:
            return self.read(path, content, where)
        except PlanError as problem:
            raise bad_pack(where, problem.found, problem.needed) from None

    def stored(self, layer: Layer, name: str) -> PlanFile:
        """The plan of this file name. Raises PlanError, EntryError, or FileNotFoundError when it is gone."""
        content = read_below(layer.root, (PLANS, name), MAX_PLAN_BYTES, trusted=layer.trusted)
        return self.read(name, content, str(layer.root / PLANS / name))


def plans_in(layers: Iterable[Layer]) -> Iterator[PlanFile]:
    """Every plan of these layers, of equal names the first. A bad one is said and passed over."""
    files, seen = PlanFiles(), set()
    for layer in layers:
        for name in plan_names(layer.root):
            if name in seen:
                continue
            try:
                yield files.stored(layer, name)
                seen.add(name)
            except FileNotFoundError:
                continue
            except (EntryError, PlanError) as problem:
                logger.warning("Bad plan %s: %s.", problem.where, problem.found)


def served_by(plans: Iterable[PlanFile], keys: Collection[Key]) -> list[PlanFile]:
    """Those plans whose every entry is among `keys`, and of a target that these are for."""
    targets, known = {key.target for key in keys}, frozenset(keys)
    return [each for each in plans if each.plan.target in targets and known.issuperset(each.plan.keys())]


def chosen(plans: Sequence[PlanFile], rows: Collection[int], names: Sequence[str]) -> list[PlanFile]:
    """The plans of decode steps of so many rows, with what belongs to such a step, and those named by a digest's start.

    Raises UsageError for a choice that means no plan, or a name that means several.
    """
    found = [each for each in plans if any(belongs(each.plan, count) for count in rows)]
    missing = [count for count in rows if not any(_is_step(each.plan, count) for each in found)]
    if missing:
        raise _no_plan("--m", f"no decode plan for {', '.join(map(str, missing))} rows")
    for name in names:
        meant = [each for each in plans if each.name.startswith(name)] if len(name) >= SHORTEST_NAME else []
        if len(meant) != 1:
            raise _no_plan("--plan", f"{name!r}, which means {len(meant)} plans")
        found += [each for each in meant if each not in found]
    return found


def parse_rows(text: str) -> tuple[int, ...]:
    """The numbers in `8` or `8,16`, each once. Raises UsageError."""
    items = [item.strip() for item in text.split(",")] if text else []
    if not all(item.isascii() and item.isdigit() and 0 < int(item) < 2**31 for item in items):
        raise UsageError(where="--m", found=repr(text), needed="rows such as 8 or 8,16", remedy="Correct --m.")
    return tuple(dict.fromkeys(map(int, items)))


def belongs(plan: "Plan", rows: int) -> bool:
    """Whether a deployment with decode steps of `rows` rows asks for this plan; logits have any number up to that."""
    if plan.stage == "logits":
        return plan.rows <= rows
    requests, rest = divmod(rows, plan.query_length)
    of_draft = plan.stage in {"draft", "markov"}
    return rest == 0 and plan.rows == requests * (plan.query_length - 1 if of_draft else plan.query_length)


def _is_step(plan: "Plan", rows: int) -> bool:
    return plan.stage == "decode" and plan.rows == rows


def _no_plan(option: str, found: str) -> UsageError:
    return UsageError(
        where=option,
        found=found,
        needed="plans that the cache has",
        remedy="`jitspark warm` stores a deployment's plans; give at least six digits of a plan's name.",
    )
