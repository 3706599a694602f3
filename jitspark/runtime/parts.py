"""The parts of the decode step and who may be asked to serve them: the words of `providers` and of the options."""

from collections.abc import Mapping
from types import MappingProxyType

# In the order of the step, which is also the order in which unmet requirements are reported.
PARTS = (
    "boundary_norm",  # post-norm, gated residual and the next pre-norm, where no collective is fused in
    "projection",  # qkv + gate, o_proj, pooler, unpooler and the draft's dense layers
    "attention",  # QK-norm, RoPE and KV append, paged attention, output norm and gate
    "router",  # router logits and top-k routing
    "experts",  # the routed experts, their combine included
    "all_reduce",  # all collectives of the step, with the boundary norms fused into them
    "logits",  # lm_head and soft cap, outside the graph
    "markov_sampling",  # the draft's sampling loop
)

CUTE = "cute"  # our kernels
FLASHINFER = "flashinfer"  # FlashInfer's, through flashinfer_ops
STOCK = "stock"  # what vLLM runs without us

FLASHINFER_PARTS = ("attention",)  # what it serves
# It has kernels for these too, but for other contracts than a plan's: choosing it is answered with what it lacks.
FLASHINFER_REFUSED = ("experts", "all_reduce")
CHOICES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        part: (CUTE, FLASHINFER, STOCK) if part in (*FLASHINFER_PARTS, *FLASHINFER_REFUSED) else (CUTE, STOCK)
        for part in PARTS
    }
)
