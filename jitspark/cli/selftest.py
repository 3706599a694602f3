"""`jitspark doctor --selftest`: a decode step of a small model on this GPU, launch by launch beside its references."""

from jitspark.cli.compare_runs import judged
from jitspark.doctor.check import Check, FailedError, run
from jitspark.gpus import find_gpus, targets_of
from jitspark.plans.planning import Served
from jitspark.settings import Settings

GEOMETRY, ROWS, CONTEXT = "tiny_swa", 16, 200


def selftest(settings: Settings) -> Check:
    """PASS with the worst error over what is allowed; FAIL with the first launch that leaves its tolerance."""
    return run("self-test", _step, settings)


def _step(settings: Settings) -> str:
    targets = targets_of(find_gpus().gpus)
    if not targets:
        raise FailedError("no GPU that kernels exist for", "Run it where the model is to run.", needed=False)
    served = Served(GEOMETRY, 1, targets[0], {})
    found = judged(served, ROWS, CONTEXT, settings)
    wrong = next((each for each in found if each.problems), None)
    if wrong is not None:
        raise FailedError(
            f"launch {wrong.launch.name} ({wrong.launch.operation}): {wrong.problems[0]}",
            f"Run `jitspark compare --geometry {GEOMETRY} --tp 1 --m {ROWS}` for more, and report it.",
        )
    worst = max((one.margin for each in found for one in each.comparisons), default=0.0)
    return f"{len(found)} launches on {targets[0]} as their references, worst error {worst:.2f} of what is allowed"
