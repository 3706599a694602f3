"""`bin/check-gpu`: every case of every kernel on this GPU, from a packed cache, against float64 references.

Prints a line per case with its largest error and its margin (the error over what is allowed; up to 1 passes). Exit
status 0 when every case passed.
"""

import argparse
import json
import math
import random
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from bench import machine, packed_cache
from jitspark.checking.check import Outcome, case_title, check_case
from jitspark.checking.packed import Kernels, load_kernels
from jitspark.errors import JitsparkError
from jitspark.key import recipe_of
from jitspark.registry import kernel_names, load_spec
from jitspark.spec import Case, KernelSpec, Specialization

ROWS = range(8, 65, 8)  # of a decode step


@dataclass(frozen=True, slots=True)
class Work:
    """One case to check."""

    specialization: Specialization
    case: Case


def every_case(target: str, names: Sequence[str] = ()) -> list[Work]:
    """Every case of the named kernels (all by default) that `target` supports, and those of other numbers of rows."""
    specs = [spec for name in names or kernel_names() if target in (spec := load_spec(name)).targets]
    return [Work(spec.specialize_case(case), case) for spec in specs for case in (*spec.cases, *row_cases(spec))]


def row_cases(spec: KernelSpec) -> Iterator[Case]:
    """For numbers of rows in a step that no case of the spec has: its case with the fewest more, cut to so many.

    Rows come in whole requests where a spec knows how many a request has. What counts its rows by requests alone has
    cases for each number of them.
    """
    by_request = "query_length" in spec.axes
    if "num_tokens" not in spec.axes or ("num_requests" in spec.axes and not by_request):
        return
    known = {case.axes["num_tokens"] for case in spec.cases}
    for rows in ROWS:
        larger = [case for case in spec.cases if _can_have(case, rows, by_request=by_request)]
        if rows not in known and larger:
            case = min(larger, key=lambda case: case.axes["num_tokens"])
            requests = {"num_requests": rows // case.axes["query_length"]} if by_request else {}
            yield replace(case, axes={**case.axes, "num_tokens": rows, **requests})


def _can_have(case: Case, rows: int, *, by_request: bool) -> bool:
    whole = not by_request or (rows % case.axes["query_length"] == 0 and case.axes["num_requests"] > 1)
    return whole and case.axes["num_tokens"] >= rows


def check_all(work: Sequence[Work], kernels: Kernels, target: str, seed: int) -> Iterator[Outcome]:
    """Outcomes in order; ends early when a fault took the GPU's context along."""
    generator = torch.Generator(device="cuda").manual_seed(seed)
    for item in work:
        kernel = kernels[recipe_of(item.specialization, target).key]
        try:
            yield check_case(item.specialization, item.case, kernel.function, generator)
            torch.cuda.synchronize()
        except (RuntimeError, TypeError, ValueError) as problem:
            said = f"{type(problem).__name__}: {problem}".splitlines()[0]
            yield Outcome(case_title(item.specialization, item.case.axes), (), (said,))
            if not _context_lives():
                return


def _context_lives() -> bool:
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return False
    return True


def line(outcome: Outcome) -> str:
    errors = ", ".join(f"{each.argument} {each.max_error:.2e} ({each.margin:.3f})" for each in outcome.comparisons)
    first = f"{'pass' if outcome.passed else 'FAIL'}  {outcome.title}  {errors}"
    return "\n".join([first, *(f"      {problem}" for problem in outcome.problems)])


def table(work: Sequence[Work], outcomes: Sequence[Outcome]) -> str:
    """Per kernel: cases, how many passed, and the worst margin of those."""
    rows = [f"{'kernel':<36} {'cases':>6} {'passed':>7} {'not run':>8} {'worst margin':>13}"]
    for name in dict.fromkeys(item.specialization.name for item in work):
        cases = sum(item.specialization.name == name for item in work)
        mine = [outcome for item, outcome in zip(work, outcomes, strict=False) if item.specialization.name == name]
        passed = [outcome for outcome in mine if outcome.passed]
        worst = max((outcome.margin for outcome in passed), default=math.nan)
        rows.append(f"{name:<36} {cases:>6} {len(passed):>7} {cases - len(mine):>8} {worst:>13.3f}")
    return "\n".join(rows)


def write(path: Path, about: dict[str, object], work: Sequence[Work], outcomes: Sequence[Outcome], seed: int) -> None:
    """The result as JSON: about the machine, and per case the errors, margins and problems."""
    cases = [
        {
            "case": outcome.title,
            "passed": outcome.passed,
            "arguments": {
                each.argument: {"max_error": _number(each.max_error), "margin": _number(each.margin)}
                for each in outcome.comparisons
            },
            "problems": outcome.problems,
        }
        for outcome in outcomes
    ]
    content = {"format": 1, "about": about, "seed": seed, "cases": cases, "not_run": len(work) - len(outcomes)}
    path.write_text(json.dumps(content, indent=1) + "\n")


def _number(value: float) -> float | str:
    return value if math.isfinite(value) else "inf"


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    try:
        return _run(options)
    except JitsparkError as error:
        print(f"check-gpu: {error}", file=sys.stderr)
        return error.exit_code


def _run(options: argparse.Namespace) -> int:
    target = machine.own_target()
    work = every_case(target, options.kernel)
    with packed_cache.cache_root(options) as root:
        kernels = load_kernels(root, [item.specialization for item in work], target)
    print(f"{len(work)} cases, {len(kernels)} kernels for {target}, seed {options.seed}", flush=True)
    outcomes: list[Outcome] = []
    machine.leave_on_sigterm()
    try:
        for outcome in check_all(work, kernels, target, options.seed):
            outcomes.append(outcome)
            if not (options.quiet and outcome.passed):
                print(line(outcome), flush=True)
    finally:  # a run that is cut short has a verdict on what it checked, and says what it did not
        print(table(work, outcomes))
        if options.json:
            write(options.json, machine.description(options.commit), work, outcomes, options.seed)
        green = len(outcomes) == len(work) and all(outcome.passed for outcome in outcomes)
        print("all passed" if green else "NOT all passed", flush=True)
    return 0 if green else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="bin/check-gpu", description=__doc__)
    packed_cache.add_arguments(parser)
    parser.add_argument("--kernel", action="append", default=[], help="only this kernel; may be repeated")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(2**31), help="default: a new one")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result there")
    parser.add_argument("--commit", default="", help="what the result says it was measured at")
    parser.add_argument("--quiet", action="store_true", help="a line only for cases that fail")
    return parser


if __name__ == "__main__":
    sys.exit(main())
