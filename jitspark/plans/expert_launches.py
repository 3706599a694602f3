"""The routed experts' launches in a decode step: the pre-expert norm and two grouped GEMMs, NVFP4 or BF16.

Each rank has a slice of every expert, so `first_expert` is 0 and the rows that come out are partial sums.
"""

from jitspark.geometry import Experts
from jitspark.plans import backbone_weights as weights
from jitspark.plans.builder import Given, PlanBuilder, Weight
from jitspark.spec import Specialization
from kernel_specs.bf16_grouped_gemm_partial import spec as bf16_grouped_gemm_partial
from kernel_specs.bf16_grouped_gemm_swiglu import spec as bf16_grouped_gemm_swiglu
from kernel_specs.nvfp4_grouped_gemm_partial import spec as nvfp4_grouped_gemm_partial
from kernel_specs.nvfp4_grouped_gemm_swiglu import spec as nvfp4_grouped_gemm_swiglu
from kernel_specs.rmsnorm import spec as rmsnorm
from kernel_specs.rmsnorm_nvfp4_quantize import spec as rmsnorm_nvfp4_quantize

PART = "experts"
SCHEDULE = ("expert_ids", "route_offsets", "routes")
ROWS_DTYPE = "float32"  # of the partial rows: what is summed over ranks is rounded once, behind the norm


class ExpertLaunches:
    """Adds one layer's experts to a plan: `pooled` in, `expert_rows` out."""

    def __init__(self, builder: PlanBuilder, experts: Experts, tp: int, rows: int, eps: float) -> None:
        self._builder, self._experts, self._rows, self._eps = builder, experts, rows, eps
        self._width = experts.intermediate_width(tp)

    def add(self, layer: int) -> None:
        if self.are_nvfp4(layer):
            served = rmsnorm_nvfp4_quantize.serving(self._experts.moe_hidden_size, self._rows)
            given: dict[str, Given] = {"x": "pooled", **self.quantized(layer)}
            self._builder.launch(f"layers.{layer}.pre_expert_norm", PART, served, given)
            self.add_quantized(layer)
        else:
            self._bf16(layer)

    def add_quantized(self, layer: int) -> None:
        """The GEMMs of a layer whose input somebody else has normed and `quantized`."""
        self._nvfp4_gate_up(layer)
        self._nvfp4_down(layer)

    def are_nvfp4(self, layer: int) -> bool:
        return self._experts.weight_dtype == "nvfp4" and layer not in self._experts.bf16_layers

    def quantized(self, layer: int) -> dict[str, Given]:
        """The arguments of whoever norms and quantizes the layer's input."""
        return {
            "weight": weights.norm(layer, "pre_expert_norm"),
            "global_scale": weights.expert(layer, "input.global_scale", "w13_input_scale", "reciprocal_of_largest"),
            "codes": "expert_codes",
            "scales": "expert_scales",
            "eps": self._eps,
        }

    def _nvfp4_gate_up(self, layer: int) -> None:
        def weight(name: str, tensor: str, layout: str = "nvfp4_gate_up_slice") -> Weight:
            return weights.expert(layer, f"gate_up.{name}", tensor, layout)

        self._multiply(
            f"layers.{layer}.experts.gate_up",
            nvfp4_grouped_gemm_swiglu.serving(self._experts, self._width),
            {
                "codes": "expert_codes",
                "scales": "expert_scales",
                "weight": weight("weight", "w13_weight"),
                "weight_scales": weight("weight_scales", "w13_weight_scale"),
                "gate_up_scales": weight("gate_up_scales", "w13_weight_scale_2", "times_input_scale"),
                "global_scale": weight("global_scale", "w2_input_scale", "reciprocal_of_largest"),
                "out_codes": "hidden_codes",
                "out_scales": "hidden_scales",
            },
        )

    def _nvfp4_down(self, layer: int) -> None:
        def weight(name: str, tensor: str, layout: str = "nvfp4_down_slice") -> Weight:
            return weights.expert(layer, f"down.{name}", tensor, layout)

        self._multiply(
            f"layers.{layer}.experts.down",
            nvfp4_grouped_gemm_partial.serving(self._experts, self._width, ROWS_DTYPE),
            {
                "codes": "hidden_codes",
                "scales": "hidden_scales",
                "weight": weight("weight", "w2_weight"),
                "weight_scales": weight("weight_scales", "w2_weight_scale"),
                "down_scales": weight("down_scales", "w2_weight_scale_2", "times_input_scale"),
                "rows": "expert_rows",
            },
        )

    def _bf16(self, layer: int) -> None:
        self._builder.launch(
            f"layers.{layer}.pre_expert_norm",
            PART,
            rmsnorm.serving(self._experts.moe_hidden_size, self._rows, rmsnorm.PRE_NORM),
            {
                "x": "pooled",
                "weight": weights.norm(layer, "pre_expert_norm"),
                "out": "expert_input",
                "eps": self._eps,
            },
        )
        gate_up = weights.expert(layer, "gate_up.weight", "w13_weight", "gate_up_slice")
        self._multiply(
            f"layers.{layer}.experts.gate_up",
            bf16_grouped_gemm_swiglu.serving(self._experts, self._width, self._rows),
            {"activation": "expert_input", "weight": gate_up, "h": "expert_hidden"},
        )
        down = weights.expert(layer, "down.weight", "w2_weight", "down_slice")
        self._multiply(
            f"layers.{layer}.experts.down",
            bf16_grouped_gemm_partial.serving(self._experts, self._width, self._rows, ROWS_DTYPE),
            {"h": "expert_hidden", "weight": down, "rows": "expert_rows"},
        )

    def _multiply(self, name: str, specialization: Specialization, given: dict[str, Given]) -> None:
        """A grouped GEMM over the routes of the schedule."""
        schedule = {name: name for name in SCHEDULE}
        local = self._experts.num_local_experts
        self._builder.launch(
            name, PART, specialization, {**given, **schedule, "first_expert": 0}, num_local_experts=local
        )
