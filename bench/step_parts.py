"""The parts of a step that take several launches, or inputs that no random draw gives; aims for TP 8 and M = 8.

Runs where geometries can be read; the GPU machine gets the result as JSON and `bench.scenes` builds it.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from bench.parts import Launch
from jitspark.geometry import Deployment
from jitspark.key import recipe_of
from jitspark.registry import specializations
from jitspark.spec import VAR, Specialization
from kernel_specs.paged_gqa_verify_attention.spec import num_splits
from kernel_specs.router_pooler_gemm import spec as router_pooler_gemm
from kernel_specs.skinny_gemm_bf16.spec import projections

WINDOW_CONTEXT = 32768
DISTINCT = {8: (24, 40, 57), 16: (102,), 32: (163,), 64: (222,)}  # of 256 experts; uniform routing has the last one


@dataclass(frozen=True, slots=True)
class StepPart:
    """One measured part: the launches that make it up, in order, by their role; sizes that no launch knows."""

    part: str
    kind: str
    geometry: str
    tp: int
    num_tokens: int
    launches: Mapping[str, Mapping[str, Any]]
    sizes: Mapping[str, int]
    aim_us: float | None = None
    aim_ratio: float | None = None


@dataclass(frozen=True, slots=True)
class _Place:
    geometry: str
    deployment: Deployment
    target: str
    num_tokens: int

    def part(
        self, part: str, kind: str, roles: Mapping[str, Specialization], sizes: Mapping[str, int], **aim: float
    ) -> dict[str, Any]:
        made = {role: self.launch(each) for role, each in roles.items()}
        return asdict(
            StepPart(part, kind, self.geometry, self.deployment.tp, self.num_tokens, made, sizes, **self.aims(aim))
        )

    def aims(self, aim: Mapping[str, float]) -> Mapping[str, float]:
        """The issue's aims are for TP 8 and 8 tokens."""
        return aim if (self.deployment.tp, self.num_tokens) == (8, 8) else {}

    def launch(self, each: Specialization) -> dict[str, Any]:
        tokens = {"num_tokens": self.num_tokens} if each.spec.axes.get("num_tokens") is VAR else {}
        return asdict(
            Launch(
                part=each.title(),
                geometry=self.geometry,
                tp=self.deployment.tp,
                kernel=each.name,
                recipe=recipe_of(each, self.target).digest,
                axes={**each.axes, **tokens},
                dtypes=dict(each.dtypes),
                statics=dict(each.statics),
            )
        )

    def only(self, kernel: str, **wanted: Any) -> Specialization:
        """The deployment's specialization of a kernel with these axes, dtypes and statics."""
        found = [each for each in specializations(self.deployment, [kernel]) if _agrees(each, wanted)]
        assert found, f"no {kernel} with {wanted}"
        return found[0]


def _agrees(each: Specialization, wanted: Mapping[str, Any]) -> bool:
    chosen = {**each.axes, **each.dtypes, **each.statics}
    return all(chosen[name] == value for name, value in wanted.items())


def step_parts(
    geometry: str, deployment: Deployment, target: str, token_counts: Sequence[int]
) -> Iterator[dict[str, Any]]:
    """Every part of the backbone's step that is measured as a whole, for each token count."""
    for num_tokens in token_counts:
        place = _Place(geometry, deployment, target, num_tokens)
        yield from _attention(place)
        yield from _experts(place)
        yield from _bf16_experts(place)
        yield _router_and_pooler(place)
        yield _logits(place)


def _attention(place: _Place) -> Iterator[dict[str, Any]]:
    backbone, tp = place.deployment.backbone, place.deployment.tp
    query, key_value = backbone.attention.query_heads(tp), backbone.attention.key_value_heads(tp)
    combine = place.only("splitkv_combine_rmsnorm_sigmoid_gate", num_heads=query)
    length = place.deployment.query_length
    requests = place.num_tokens // length
    for context, window, aim in (
        (32768, 0, 8.0),
        (131072, 0, 19.0),
        (WINDOW_CONTEXT, backbone.attention.sliding_window, 3.5),
    ):
        attention = place.only(
            "paged_gqa_verify_attention", query_length=length, num_heads=query, sliding_window=window
        )
        sizes = {
            "context": context,
            "num_requests": requests,
            "num_splits": num_splits(requests, key_value, length, window),
        }
        name = f"attention, window {window}" if window else f"attention, context {context}"
        yield place.part(name, "attention", {"attention": attention, "combine": combine}, sizes, aim_us=aim)


def _experts(place: _Place) -> Iterator[dict[str, Any]]:
    experts = place.deployment.backbone.experts
    if experts.weight_dtype == "bfloat16":
        return
    width = experts.intermediate_width(place.deployment.tp) // 2
    first = place.only("nvfp4_grouped_gemm_swiglu", packed_width=width)
    second = place.only("nvfp4_grouped_gemm_partial", packed_width=width, rows_dtype="float32")
    for distinct in DISTINCT[place.num_tokens]:
        sizes = {"distinct": distinct, "num_experts": experts.num_local_experts}
        roles = {"first": first, "second": second}
        name = f"NVFP4 experts, {distinct} distinct"
        yield place.part(name, "nvfp4_experts", roles, sizes, aim_ratio=1.25)
        for role, each in roles.items():
            yield place.part(f"{name}, {role} GEMM", "nvfp4_experts", {role: each}, sizes)


def _bf16_experts(place: _Place) -> Iterator[dict[str, Any]]:
    experts = place.deployment.backbone.experts
    if experts.weight_dtype != "bfloat16" and not experts.bf16_layers:
        return
    width = experts.intermediate_width(place.deployment.tp)
    pass_rows = 8 if place.num_tokens == 8 else 16
    first = place.only("bf16_grouped_gemm_swiglu", intermediate_width=width, pass_rows=pass_rows)
    second = place.only(
        "bf16_grouped_gemm_partial", intermediate_width=width, pass_rows=pass_rows, rows_dtype="float32"
    )
    for distinct in DISTINCT[place.num_tokens]:
        sizes = {"distinct": distinct, "num_experts": experts.num_local_experts}
        roles = {"first": first, "second": second}
        yield place.part(f"BF16 experts, {distinct} distinct", "bf16_experts", roles, sizes)


def _router_and_pooler(place: _Place) -> dict[str, Any]:
    name = "router and pooler shard"
    if router_pooler_gemm.serves(place.deployment, place.num_tokens):
        both = place.only("router_pooler_gemm", max_tokens=place.num_tokens)
        return place.part(name, "router", {"router_pooler": both}, {}, aim_us=5.5)
    router = place.only("router_gemm", max_tokens=place.num_tokens)
    pooler = projections(place.deployment)["pooler_shard"].specialize(place.num_tokens)
    return place.part(name, "router", {"router": router, "pooler": pooler}, {}, aim_us=5.5)


def _logits(place: _Place) -> dict[str, Any]:
    lm_head = projections(place.deployment)["lm_head"].specialize(place.num_tokens)
    (soft_cap,) = specializations(place.deployment, ["logits_softcap"])[:1]
    return place.part("lm_head and soft cap", "logits", {"lm_head": lm_head, "soft_cap": soft_cap}, {}, aim_ratio=1.08)
