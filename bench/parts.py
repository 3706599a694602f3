"""Which launches of a deployment are measured, and what each one is called in the model.

Runs where geometries can be read; the GPU machine gets the result as JSON.
"""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from jitspark.errors import SpecError
from jitspark.geometry import Deployment
from jitspark.key import recipe_of
from jitspark.registry import specializations
from jitspark.spec import VAR, AtMost, Specialization
from kernel_specs.primitives.row_split import row_split

SIZES = {"max_position": 131072, "num_blocks": 4096}
ROW_SPLIT = {"threads", "cluster"}
ALL_TILING = {"grouped_skinny_gemm_bf16", "router_pooler_gemm"}  # all of its statics
TILING = ROW_SPLIT | {"max_tokens", "split"}


@dataclass(frozen=True, slots=True)
class Launch:
    """A kernel at one place of a deployment's step. `axes` holds VAR axes too."""

    part: str
    geometry: str
    tp: int
    kernel: str
    recipe: str
    axes: dict[str, int]
    dtypes: dict[str, str]
    statics: dict[str, Any]


def launches(
    geometry: str, deployment: Deployment, target: str, token_counts: Sequence[int], names: Sequence[str] | None
) -> Iterator[dict[str, Any]]:
    """Every specialization of the deployment, each with every token count that it is the one to serve."""
    asked = [each for each in specializations(deployment, names) if target in each.spec.targets and measured(each)]
    for each in asked:
        for num_tokens in token_counts:
            if each is _serving(num_tokens, [other for other in asked if _same_work(each, other)]):
                yield asdict(_launch(geometry, deployment, target, each, num_tokens))


def _launch(geometry: str, deployment: Deployment, target: str, each: Specialization, num_tokens: int) -> Launch:
    sizes = {**SIZES, "num_tokens": num_tokens}
    return Launch(
        part=part_name(each, deployment),
        geometry=geometry,
        tp=deployment.tp,
        kernel=each.name,
        recipe=recipe_of(each, target).digest,
        axes={**each.axes, **{name: size for name, size in sizes.items() if each.spec.axes.get(name) is VAR}},
        dtypes=dict(each.dtypes),
        statics=dict(each.statics),
    )


def measured(specialization: Specialization) -> bool:
    """Whether it can be timed alone: with sizes for all run-time axes, and without other ranks. What cannot is said."""
    spec = specialization.spec
    if any(arg.name == "peers" for arg in spec.args):
        print(f"not measured alone: {specialization.title()}: bin/bench-collectives has its peers", file=sys.stderr)
        return False
    unknown = sorted({name for name, kind in spec.axes.items() if kind is VAR} - SIZES.keys() - {"num_tokens"})
    if unknown:
        print(f"not measured alone: {specialization.title()}: no size for {', '.join(unknown)}", file=sys.stderr)
    return not unknown


def part_name(specialization: Specialization, deployment: Deployment) -> str:
    """What the model calls this: a projection by its shape, other kernels by their choices."""
    if specialization.name == "skinny_gemm_bf16":
        return _projection_name(specialization, deployment)
    named = {
        "gated_residual_rmsnorm": _boundary_name,
        "rmsnorm": _norm_name,
        "expert_combine_rmsnorm": _combine_name,
        "qk_rmsnorm_rope_paged_kv_append": lambda each: f"qk append, {_rope(each)}",
        "sigmoid_bias_topk_routing": lambda each: "routing" + (", padding" if each.statics["padded"] else ""),
        "router_gemm": lambda _: "router",
        "router_pooler_gemm": lambda _: "router and pooler",
        "rmsnorm_nvfp4_quantize": lambda _: "norm and quantize",
        "context_rmsnorm": lambda _: "draft context norm",
        "grouped_skinny_gemm_bf16": lambda _: "draft context keys and values",
        "context_kv_precompute_append": lambda each: f"draft context append, {_rope(each)}",
    }
    return named.get(specialization.name, Specialization.title)(specialization)


def _rope(specialization: Specialization) -> str:
    return "RoPE" if specialization.statics["rope"] else "NoPE"


def _combine_name(specialization: Specialization) -> str:
    partials = specialization.axes["num_partials"]
    ranks = f", of {partials} ranks" if partials > 1 else ""
    return f"combine, {specialization.dtypes['rows_dtype']} rows{ranks}"


def _projection_name(specialization: Specialization, deployment: Deployment) -> str:
    from kernel_specs.skinny_gemm_bf16.spec import projections

    chosen = {**specialization.axes, **specialization.statics}
    names = [
        name
        for name, projection in projections(deployment).items()
        if all(chosen[field] == value for field, value in asdict(projection).items())
    ]
    return " / ".join(names)


def _boundary_name(specialization: Specialization) -> str:
    statics = specialization.statics
    # the norm over what attention put out has no weight, the one over experts scales its input
    place = "attention to FFN" if statics["post_norm"] == "weightless" else "FFN to next layer"
    if statics["gain_center"] == 0.0:
        place = "last FFN to final norm"
    extras = [text for name, text in (("write_tap", "tap"), ("write_router_input", "router input")) if statics[name]]
    return f"{statics['mode']} {place}" + "".join(f" + {text}" for text in extras)


def _norm_name(specialization: Specialization) -> str:
    statics, dtype = specialization.statics, specialization.dtypes["input_dtype"]
    gain = f"weight + {statics['gain_center']:g}" if statics["weighted"] else "no weight"
    rounded = ", rounded input" if statics["round_input"] else ""
    return f"rmsnorm {specialization.axes['hidden_size']}, {dtype}, {gain}{rounded}"


def _same_work(one: Specialization, other: Specialization) -> bool:
    """Whether two specializations differ at most in tiling, which changes nothing in the result."""
    return (one.name, one.axes, one.dtypes, _meaning(one)) == (other.name, other.axes, other.dtypes, _meaning(other))


def _meaning(specialization: Specialization) -> dict[str, Any]:
    """Statics that a result depends on. What a GEMM chooses beside its epilogue is tiling."""
    statics = specialization.statics
    if specialization.name in ALL_TILING:
        return {}
    if "epilogue" in statics:
        return {"epilogue": statics["epilogue"]}
    return {name: value for name, value in statics.items() if name not in TILING}


def _serving(num_tokens: int, candidates: Sequence[Specialization]) -> Specialization | None:
    """Of specializations for the same work, the one with the tightest bound that still holds `num_tokens`."""
    fitting = [each for each in candidates if _fits(each, num_tokens) and _splits_rows_for(each, num_tokens)]
    return min(fitting, key=_bound, default=None)


def _splits_rows_for(specialization: Specialization, num_tokens: int) -> bool:
    """Whether it splits its rows as the specs choose for so many tokens; true of kernels that split none."""
    hidden_size = specialization.axes.get("hidden_size")
    if hidden_size is None or not specialization.statics.keys() >= ROW_SPLIT:
        return True
    wanted = row_split(hidden_size, num_tokens)
    return all(specialization.statics[name] == value for name, value in wanted.items())


def _fits(specialization: Specialization, num_tokens: int) -> bool:
    try:
        specialization.check({"num_tokens": num_tokens})
    except SpecError:
        return False
    return True


def _bound(specialization: Specialization) -> int:
    """The most tokens that its constraints allow."""
    bounds = [c.bound for c in specialization.spec.constraints if isinstance(c, AtMost) and c.name == "num_tokens"]
    values = [specialization.statics[bound] if isinstance(bound, str) else bound for bound in bounds]
    return min((int(value) for value in values), default=2**31)
