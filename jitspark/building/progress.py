"""What is settled of a build so far, and the events that tell it."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Literal

from jitspark.cache.lock import Holder
from jitspark.cache.lookup import Lookup
from jitspark.cache.store import Entry
from jitspark.errors import CacheDirectoryError, JitsparkError
from jitspark.key import Key, Recipe
from jitspark.spec import Specialization

Kind = Literal["hit", "compiled", "failed", "compiling", "waiting"]


@dataclass(frozen=True, slots=True)
class Wanted:
    """A specialization that a process needs, and its recipe for one target."""

    specialization: Specialization
    recipe: Recipe
    key: Key = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "key", self.recipe.key)


@dataclass(frozen=True, slots=True)
class Event:
    """Progress, for people and for callers that must keep something alive meanwhile.

    `done` of `total` keys are settled. `seconds` is what a compile took or has taken so far, or how long we have been
    waiting; `holder` is who compiles the key that is waited for.
    """

    kind: Kind
    key: Key
    title: str
    done: int
    total: int
    seconds: float = 0.0
    holder: Holder | None = None


class Progress:
    """The settled keys of one build: found, compiled here, or failed. `missed` were not there at first."""

    def __init__(self, lookup: Lookup, on_event: Callable[[Event], None], total: int) -> None:
        self.lookup = lookup
        self.entries: dict[Key, Entry] = {}
        self.compiled: dict[Key, float] = {}
        self.failed: dict[Key, JitsparkError] = {}
        self.unpublished: dict[Key, CacheDirectoryError] = {}
        self.missed: set[Key] = set()
        self._on_event = on_event
        self._total = total

    def unsettled(self, wanted: Iterable[Wanted]) -> list[Wanted]:
        return [item for item in wanted if item.key not in self.entries and item.key not in self.failed]

    def settle_if_found(self, item: Wanted) -> bool:
        """Settle `item` if an intact entry serves it."""
        entry = self.lookup.find(item.key, whole=True)
        if entry is not None:
            self.entries[item.key] = entry
            self.tell("hit", item)
        return entry is not None

    def settle_compiled(self, item: Wanted, entry: Entry, seconds: float) -> None:
        self.entries[item.key] = entry
        self.compiled[item.key] = seconds
        self.tell("compiled", item, seconds)

    def settle_failed(self, item: Wanted, error: JitsparkError) -> None:
        self.failed[item.key] = error
        self.tell("failed", item)

    def tell(self, kind: Kind, item: Wanted, seconds: float = 0.0, holder: Holder | None = None) -> None:
        done = len(self.entries) + len(self.failed)
        self._on_event(Event(kind, item.key, item.specialization.title(), done, self._total, seconds, holder))
