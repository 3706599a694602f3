"""What a plan is asked for by, and the name under which it is stored: found without making it, or the means to.

The name covers the geometry's values and the sources that a plan is made from, so that a plan of another version of
jitspark, or of a geometry that was changed, is no answer. Reads files; imports the standard library only.
"""

import functools
import hashlib
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import kernel_specs
from jitspark.errors import GeometryError
from jitspark.key import digest_of
from jitspark.plans.plan import VERSION, Plan, Stage
from jitspark.target import host_name

PACKAGE = Path(__file__).resolve().parent.parent
SPECS = Path(kernel_specs.__file__).resolve().parent
GEOMETRIES = SPECS / "geometry"

# The modules of this package that decide what a plan holds; every source of kernel_specs does too.
MAKERS = (
    "constraints",
    "geometry",
    "plans/attention_launches",
    "plans/backbone",
    "plans/backbone_weights",
    "plans/buffer_planner",
    "plans/builder",
    "plans/draft",
    "plans/exchange_launches",
    "plans/expert_launches",
    "plans/format",
    "plans/markov",
    "plans/plan",
    "plans/reader",
    "spec",
)


@dataclass(frozen=True, slots=True)
class GeometryFiles:
    """A backbone's geometry with its draft's: a digest over their values, and what tells which plans there are.

    position_modes: the draft's, "rope" or "nope"; more than one where its checkpoint's is not known.
    """

    digest: str
    name: str
    num_speculative_tokens: int
    position_modes: tuple[str, ...]
    output_multiplier: float
    soft_cap: float

    @property
    def query_length(self) -> int:
        """Tokens of a request in a verify step."""
        return 1 + self.num_speculative_tokens


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """All that decides a plan. `rows` are those of its stage, `options` what its maker is told besides."""

    stage: Stage
    geometry: GeometryFiles
    tp: int
    rows: int
    target: str
    providers: Mapping[str, str] = field(default_factory=dict)
    options: Mapping[str, bool | float | None] = field(default_factory=dict)

    @property
    def digest(self) -> str:
        """Its name in the store."""
        return digest_of(
            {
                "version": VERSION,
                "sources": sources_digest(),
                "host": host_name(),
                "stage": self.stage.value,
                "geometry": self.geometry.digest,
                "tp": self.tp,
                "rows": self.rows,
                "target": self.target,
                "providers": self.providers,
                "options": self.options,
            }
        )

    def title(self) -> str:
        """For messages."""
        return f"{self.stage} plan of {self.geometry.name} at TP {self.tp} for {self.rows} rows on {self.target}"

    def is_answered_by(self, plan: Plan) -> bool:
        """Whether `plan` is for what is asked: a file may have been renamed."""
        asked = (self.stage, self.geometry.name, self.tp, self.rows, self.target, dict(self.providers))
        found = (plan.stage, plan.geometry, plan.tp, plan.rows, plan.target, dict(plan.providers))
        return asked == found and (self.rows_of_one, host_name()) == (plan.query_length, plan.host)

    @property
    def rows_of_one(self) -> int:
        """Rows of one request, in this stage."""
        drafted = self.stage in (Stage.DRAFT, Stage.MARKOV)
        return self.geometry.num_speculative_tokens if drafted else self.geometry.query_length


@functools.cache
def geometry_files(name_or_path: str | Path) -> GeometryFiles:
    """The files of a built-in geometry, or of the one at a path (with a `/`, or ending in `.toml`), and its draft.

    Their values are not checked: a plan is made by whoever does. Raises GeometryError for files that cannot be read.
    """
    text = str(name_or_path)
    given = "/" in text or text.endswith(".toml") or isinstance(name_or_path, Path)
    path = Path(name_or_path) if given else GEOMETRIES / f"{text}.toml"
    backbone = _values(path)
    beside = path.parent / f"{backbone.get('draft')}.toml"
    draft = _values(beside if beside.is_file() else GEOMETRIES / beside.name)
    try:
        return GeometryFiles(
            digest=digest_of([backbone, draft]),
            name=str(backbone["name"]),
            num_speculative_tokens=int(draft["num_speculative_tokens"]),
            position_modes=tuple(map(str, draft["attention"]["position_modes"])),
            output_multiplier=float(draft["output_multiplier"]),
            soft_cap=float(draft["final_logit_softcapping"]),
        )
    except (KeyError, TypeError, ValueError) as problem:
        raise _bad(path, problem) from problem


def _values(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as problem:
        raise _bad(path, problem) from problem


def _bad(path: Path, problem: Exception) -> GeometryError:
    found = f"{type(problem).__name__}: {problem}"
    return GeometryError(where=str(path), found=found, needed="a geometry in TOML", remedy="Mend the file.")


@functools.cache
def sources_digest() -> str:
    """The digest of the sources that plans are made from: those of kernels, and the makers'."""
    makers = (PACKAGE / f"{name}.py" for name in MAKERS)
    sources = [path for path in makers if path.is_file()] + sorted(SPECS.rglob("*.py"))
    made = hashlib.sha256()
    for path in sources:
        made.update(
            b"%s %s\n"
            % (
                path.relative_to(path.parents[1]).as_posix().encode(),
                hashlib.sha256(path.read_bytes()).hexdigest().encode(),
            )
        )
    return made.hexdigest()
