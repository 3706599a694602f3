"""The backbone's weights as its plans name them, and where each comes from in vLLM's model.

A `WeightSource` names a parameter below the text model. Layouts, which are made once when weights are bound:

    as_is                    what vLLM holds
    rows_of_rank             this rank's share of the rows, in place
    one_of_all               every layer's is equal: one is used
    stacked                  every layer's, one after another, in a tensor of their own
    gate_up_slice            of every expert this rank's gate rows, then its up rows
    down_slice               of every expert this rank's columns
    nvfp4_gate_up_slice      the same, codes or scales, in the order of the first grouped GEMM (its `layout.py`)
    nvfp4_down_slice         the same for the second
    times_input_scale        multiplied by the largest input scale of all experts
    reciprocal_of_largest    1 / the largest input scale of all experts
"""

from jitspark.plans.builder import Weight
from jitspark.plans.plan import WeightSource


def dense(layer: int, name: str, tensor: str, layout: str = "as_is") -> Weight:
    """A projection's weight, a norm's, or the router's bias."""
    return Weight(f"layers.{layer}.{name}", WeightSource(f"layers.{layer}.{tensor}", layout))


def norm(layer: int, name: str) -> Weight:
    owners = {"pre_qkv_norm": "self_attn.pre_qkv_proj_norm", "pre_ffn_norm": "pre_ffn_norm"}
    owner = owners.get(name) or (name if name == "post_ffn_norm" else f"feed_forward.{name}")
    return dense(layer, name, f"{owner}.weight")


def gate(layer: int, branch: str, coefficient: str) -> Weight:
    """`alpha` or `beta` of the residual behind the branch `attn` or `ffn`; vLLM computes them after loading."""
    return dense(layer, f"{branch}_{coefficient}", f"add_{branch}.{coefficient}")


def final_norm() -> Weight:
    return Weight("final_norm", WeightSource("norm.weight"))


def lm_head() -> Weight:
    return Weight("lm_head", WeightSource("lm_head.weight"))


def rope_table() -> Weight:
    """One table for all layers; vLLM holds one in each of them."""
    return Weight("rope.cos_sin", WeightSource("layers.*.self_attn.rotary_emb.cos_sin_cache", "one_of_all"))


def expert(layer: int, name: str, tensor: str, layout: str) -> Weight:
    """A part of the routed experts. vLLM's post-processing destroys NVFP4 experts' order, so they are tapped before."""
    source = WeightSource(f"layers.{layer}.feed_forward.experts.{tensor}", layout, "checkpoint", shared=False)
    return Weight(f"layers.{layer}.experts.{name}", source)
