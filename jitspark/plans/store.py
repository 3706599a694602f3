"""Stored plans: `<root>/plans-v1/<digest of the request>.json`, found layer by layer and checked before use.

A plan appears by one rename of a flushed file. Loading one needs neither specs nor a geometry library.
"""

import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from jitspark.cache.folders import FILE_MODE, cannot_write, make_folder, place, read_below, sync
from jitspark.cache.staging import staging
from jitspark.cache.store import PLANS, Layer
from jitspark.errors import EntryError, PlanError
from jitspark.plans.checks import PlanChecker
from jitspark.plans.format import MAX_PLAN_BYTES, plan_error, to_bytes
from jitspark.plans.plan import Plan
from jitspark.plans.reader import PlanReader
from jitspark.plans.request import PlanRequest


class PlanStore:
    """Plans in these layers, in their order. What several plans share is read and checked once."""

    def __init__(self, layers: Sequence[Layer]) -> None:
        self._layers = tuple(layers)
        self._reader, self._checker = PlanReader(), PlanChecker()

    def find(self, request: PlanRequest) -> Plan | None:
        """The stored plan that answers `request`, None when no layer has one.

        Raises PlanError for one that is damaged, from another version, or does not make sense.
        """
        name = f"{request.digest}.json"
        for layer in self._layers:
            where = place(layer.root, (PLANS, name))
            try:
                content = read_below(layer.root, (PLANS, name), MAX_PLAN_BYTES, trusted=layer.trusted)
            except FileNotFoundError:
                continue
            except EntryError as problem:
                raise plan_error(where, problem.found, problem.needed) from problem
            plan, frame = self._reader.read(content, where)
            self._checker.require(plan, where, frame)
            if not request.is_answered_by(plan):
                raise plan_error(where, "another plan", f"the {request.title()}")
            return plan
        return None

    def load(self, requests: Iterable[PlanRequest], warm_command: str = "jitspark warm") -> list[Plan]:
        """The stored plan of each request, in order. Raises PlanError that names the missing ones, or `find`'s."""
        asked = list(requests)
        found = [self.find(request) for request in asked]
        missing = [request.title() for request, plan in zip(asked, found, strict=True) if plan is None]
        if missing:
            remedy = f"Run `{warm_command}` with this version of jitspark, on this cache directory."
            raise missing_plans(missing, needed="a plan for each number of rows that is served", remedy=remedy)
        return [plan for plan in found if plan is not None]

    def has(self, request: PlanRequest) -> bool:
        """Whether some layer has a file for it, without reading it."""
        return any(os.path.isfile(_path(layer.root, request)) for layer in self._layers)

    def put(self, request: PlanRequest, plan: Plan) -> Path | None:
        """Store `plan` in the writable layer, if there is one; where.

        Raises CacheDirectoryError when it cannot be written to.
        """
        assert request.is_answered_by(plan), request.title()
        layer = next((layer for layer in self._layers if layer.writable), None)
        return None if layer is None else put_bytes(layer, request.digest, to_bytes(plan))


def missing_plans(titles: Sequence[str], needed: str, remedy: str) -> PlanError:
    """The error that names the first of these and counts the others."""
    more = f" and {len(titles) - 1} more" if len(titles) > 1 else ""
    return PlanError(where=PLANS, found=f"no {titles[0]}{more}", needed=needed, remedy=remedy)


def put_bytes(layer: Layer, digest: str, content: bytes) -> Path:
    """Make `content` the plan of this name in the writable `layer`: equal requests have equal plans, so any may win."""
    name = f"{digest}.json"
    with staging(layer.root, trusted=layer.trusted) as folder:
        try:
            (folder / name).write_bytes(content)
            sync(folder / name, FILE_MODE)
            target = make_folder(layer.root, (PLANS,), trusted=layer.trusted)
            try:
                os.replace(folder / name, name, dst_dir_fd=target)
                os.fsync(target)
            finally:
                os.close(target)
        except EntryError as problem:
            raise cannot_write(layer.root, OSError(f"{problem.where}: {problem.found}")) from problem
        except OSError as problem:
            raise cannot_write(layer.root, problem) from problem
    return layer.root / PLANS / name


def keep(layer: Layer, request: PlanRequest) -> None:
    """Note that a plan is still wanted: pruning goes by its time. Best effort."""
    try:
        os.utime(_path(layer.root, request))
    except OSError:
        return


def _path(root: Path, request: PlanRequest) -> Path:
    return root / PLANS / f"{request.digest}.json"
