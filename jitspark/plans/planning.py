"""The plans of a deployment: which there are, and each found in the cache, or made and stored where that is allowed.

The geometry library and the specs are imported only when a plan is made.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jitspark.cache.runtime_library import without_collecting
from jitspark.cache.store import Layer
from jitspark.errors import PlanError
from jitspark.notice import say_once
from jitspark.plans.plan import Plan, Stage
from jitspark.plans.request import PlanRequest, geometry_files
from jitspark.plans.store import PlanStore

if TYPE_CHECKING:
    from jitspark.geometry import Deployment
    from jitspark.plans.builder import Keys

MAX_REQUESTS = 8  # as in `geometry`
MAX_ROWS = 64  # of the logits, which are asked for any number of sampled rows


@dataclass(frozen=True, slots=True)
class Served:
    """A deployment as its plans are asked for: a geometry's name or path, and what was chosen."""

    geometry: str | Path
    tp: int
    target: str
    providers: Mapping[str, str]

    def request(self, stage: Stage, rows: int, **options: bool | float | None) -> PlanRequest:
        """Raises GeometryError for geometry files that cannot be read."""
        files = geometry_files(self.geometry)
        return PlanRequest(stage, files, self.tp, rows, self.target, dict(sorted(self.providers.items())), options)

    def requests(self) -> Iterator[PlanRequest]:
        """Every plan of this deployment, as long as its draft is what its geometry says.

        A worker asks for the backbone's. The draft's it makes itself, for the model that it has loaded.
        """
        files = geometry_files(self.geometry)
        context, query = files.query_length, files.num_speculative_tokens
        counts = range(1, MAX_REQUESTS + 1)
        yield from (self.request(Stage.DECODE, context * n) for n in counts)
        yield from (self.request(Stage.LOGITS, rows) for rows in self.logits_rows())
        for rope in (mode == "rope" for mode in files.position_modes):
            yield from (self.request(Stage.DRAFT, query * n, rope=rope) for n in counts)
            yield from (self.request(Stage.DRAFT_CONTEXT, context * n, rope=rope) for n in counts)
        sampling = {"multiplier": files.output_multiplier, "soft_cap": files.soft_cap}
        yield from (self.request(Stage.MARKOV, query * n, **sampling) for n in counts)

    def logits_rows(self) -> tuple[int, ...]:
        """The rows that logits have plans for: any number; those of whole requests where ranks gather them.

        Each plan that gathers has inboxes of its own, of 0.8 MB a row for 202,048 words.
        """
        step = 1 if self.tp == 1 else geometry_files(self.geometry).query_length
        return tuple(range(step, MAX_ROWS + 1, step))

    def warm_command(self) -> str:
        return f"jitspark warm --geometry {self.geometry} --tp {self.tp} --target {self.target}"


class Plans:
    """Finds plans of one deployment, and makes those that are missing unless `may_make` is False."""

    def __init__(self, served: Served, layers: Sequence[Layer], *, may_make: bool = True) -> None:
        self.served = served
        self._store, self._may_make = PlanStore(layers), may_make
        self._deployment: Deployment | None = None
        self._keys: Keys | None = None

    def get(self, request: PlanRequest) -> Plan:
        """The plan that answers `request`. One that is damaged is made anew, and said.

        Raises PlanError when it is missing or damaged and must not be made; GeometryError, SpecError when making fails.
        """
        if not self._may_make:
            return self._store.load([request], self.served.warm_command())[0]
        try:
            found = self._store.find(request)
        except PlanError as problem:
            say_once(f"Bad plan {problem.where}: {problem.found}. It is made anew.")
            found = None
        return found or self.make(request)

    def get_all(self, requests: Iterable[PlanRequest]) -> list[Plan]:
        """The plan of each request. Where none may be made, one error names all that are missing."""
        if self._may_make:
            return [self.get(request) for request in requests]
        with without_collecting():
            return self._store.load(requests, self.served.warm_command())

    def has(self, request: PlanRequest) -> bool:
        """Whether there is a file for it, which was not looked into."""
        return self._store.has(request)

    def make(self, request: PlanRequest) -> Plan:
        """Make the plan and store it where that is possible."""
        made = self._made(request)
        self._store.put(request, made)
        return made

    def _made(self, request: PlanRequest) -> Plan:
        from jitspark.geometry import deployment
        from jitspark.plans.builder import Keys

        if self._deployment is None or self._keys is None:
            self._deployment = deployment(self.served.geometry, self.served.tp)
            self._keys = Keys(self.served.target)
        chosen = {"providers": request.providers, "keys": self._keys, **request.options}
        made: Plan = _maker(request.stage)(self._deployment, request.rows, request.target, **chosen)
        return made


def _maker(stage: Stage) -> Callable[..., Plan]:
    """Imported only here: with the maker come the specs and the geometry library."""
    from jitspark.plans.backbone import decode_plan, logits_plan
    from jitspark.plans.draft import context_plan, draft_plan
    from jitspark.plans.markov import markov_plan

    def sampling(deployment: "Deployment", rows: int, target: str, **chosen: Any) -> Plan:
        return markov_plan(deployment, rows // deployment.draft.num_speculative_tokens, target, **chosen)

    return {
        Stage.DECODE: decode_plan,
        Stage.LOGITS: logits_plan,
        Stage.DRAFT: draft_plan,
        Stage.DRAFT_CONTEXT: context_plan,
        Stage.MARKOV: sampling,
    }[stage]
