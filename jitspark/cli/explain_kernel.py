"""`explain KERNEL`: its keys for a deployment, each a hit or a miss, and why."""

from cache_tools.command_line import answer, answer_json, say
from cache_tools.roots import readable_layers
from jitspark.cli.selection import Selection, parse_targets, parse_tp, wanted_by
from jitspark.errors import UsageError
from jitspark.explain import explain, explanation_json, explanation_lines
from jitspark.geometry import load_geometry
from jitspark.registry import kernel_names
from jitspark.settings import Settings


def explain_kernel(kernel: str, tp: str, target: str, geometry: str, settings: Settings, *, as_json: bool) -> None:
    """Print one explanation a key; without `tp` for every TP size of the geometry."""
    if kernel not in kernel_names():
        raise UsageError(
            where="KEY|KERNEL",
            found=repr(kernel),
            needed=f"a key's digest, an entry's path, or one of {', '.join(kernel_names())}",
            remedy="`jitspark ls --entries` lists the keys.",
        )
    sizes = parse_tp(tp) if tp else load_geometry(geometry).tp_sizes
    selection = Selection(sizes, parse_targets(target, say), geometry, (kernel,))
    explanations = explain(wanted_by(selection), readable_layers(settings))
    if as_json:
        answer_json(explanation_json(explanations))
        return
    for line in explanation_lines(explanations):
        answer(line)
