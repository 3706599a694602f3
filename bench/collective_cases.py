"""Which exchanges are measured between GPUs, and what follows them where they are not fused. Imports no torch."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from jitspark.registry import load_spec
from jitspark.spec import Case, Specialization
from kernel_specs.primitives.row_split import row_split

NAMES = (
    "allreduce_gated_residual_rmsnorm",
    "allgather_gated_residual_rmsnorm",
    "allgather_columns",
    "expert_reduce_rmsnorm_combine",
)
# what has work of its own beside the exchange is measured where that is (bin/bench-decode), and checked with the others
CHECKED = (*NAMES, "allgather_rmsnorm_nvfp4_quantize_routing")


def cases(size: int, rows: Sequence[int], hidden_only: bool) -> Iterator[tuple[Specialization, Case]]:  # noqa: FBT001
    """Of each exchange, with each number of shots, the largest sizes of its cases in a world of `size`, by rows."""
    for name in NAMES:
        spec = load_spec(name)
        fitting = [case for case in spec.cases if case.axes["world_size"] == size and _served(case)]
        width = max(_width(case) for case in fitting)
        chosen = [case for case in fitting if _width(case) == width or not hidden_only]
        for shots in sorted({case.statics.get("shots", 1) for case in chosen}):
            alike = [case for case in chosen if case.statics.get("shots", 1) == shots]
            for num_tokens in rows:
                case = _with_rows(alike, num_tokens)
                yield spec.specialize_case(case), case


def _with_rows(alike: Sequence[Case], num_tokens: int) -> Case:
    """The case with the most similar number of rows, with this number of them."""
    least = min(alike, key=lambda case: (abs(case.axes["num_tokens"] - num_tokens), -_width(case)))
    owned = {"num_owned": -(-num_tokens // least.axes["world_size"])} if "num_owned" in least.axes else {}
    split = row_split(least.axes["hidden_size"], num_tokens) if "hidden_size" in least.axes else {}
    axes, statics = {**least.axes, "num_tokens": num_tokens, **owned}, {**least.statics, **split}
    return replace(least, axes=axes, statics=statics)


def _served(case: Case) -> bool:
    """What a decode step asks for: no gather of whole vocabularies, BF16 rows, backbone boundaries."""
    plain = case.statics.get("mode", "backbone") == "backbone" and not case.statics.get("round_sum", False)
    return plain and case.axes.get("num_chunks", 1) <= 8 and case.dtypes.get("rows_dtype", "bfloat16") == "bfloat16"


def _width(case: Case) -> int:
    return max(case.axes.get(name, 0) for name in ("hidden_size", "full_size", "moe_hidden_size"))


def unfused(specialization: Specialization) -> Specialization | None:
    """What follows the exchange, as a kernel of its own; None where nothing does."""
    if specialization.name == "expert_reduce_rmsnorm_combine":
        spec = load_spec("expert_combine_rmsnorm")
        axes = {name: size for name, size in specialization.axes.items() if name in spec.axes}
        sizes, dtypes = {**axes, "num_partials": 1}.items(), specialization.dtypes
        alike = (each for each in spec.cases if sizes <= each.axes.items() and each.dtypes == dtypes)
        case = next(each for each in alike if each.axes["num_tokens"] > 1)
        return spec.specialize_case(case)
    if specialization.name == "allgather_columns":
        return None
    spec = load_spec("gated_residual_rmsnorm")
    statics = {name: value for name, value in specialization.statics.items() if name in spec.statics}
    return spec.specialize(axes={"hidden_size": specialization.axes["hidden_size"]}, statics=statics)


def needed(specializations: Sequence[Specialization]) -> list[Specialization]:
    found = [each for specialization in specializations if (each := unfused(specialization)) is not None]
    return list({each.title(): each for each in found}.values())
