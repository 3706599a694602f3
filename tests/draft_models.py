"""Tiny DSpark drafts of vLLM's own classes on a CPU: configs, checkpoints, and what vLLM's kernels compute.

vLLM's compiled operations are not there on a CPU. In their place stand the same formulas in torch, with vLLM's rounding
points; everything else, and the order of it, is vLLM's own code.
"""

import contextlib
from types import SimpleNamespace

import torch
from safetensors import safe_open
from safetensors.torch import save_file

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, VOCAB, LAYERS, TAPS, RANK = 512, 8, 2, 64, 2048, 2, (0, 2, 3), 32
NUM_BLOCKS, BLOCK_SIZE = 40, 16

# What a draft's config.json says beside the sizes that conftest gives it.
CONFIG = {
    "draft_vocab_size": VOCAB,
    "norm_affine": True,
    "post_norm_affine": False,
    "norm_zero_centered_gamma": True,
    "post_norm_gain_center_type": "one",
    "output_norm_gain_center_type": "zero",
    "use_qk_norm": True,
    "use_residual_gate": True,
    "use_attn_o_gate": True,
    "use_attn_o_norm": True,
    "use_ffn_learnable_scales": True,
    "rope_theta": 500000.0,
    "metap": {"use_metap": True, "metap_mode": "mup", "base_width": 256, "router_has_one_inf_dim": True},
    "output_soft_cap_temp": 30.0,
    "enable_confidence_head": True,
    "confidence_head_with_markov": True,
    "sample_from_anchor": True,
}


def checkpoint(path, seed=0):
    """Write the weights of the tiny draft as its training writes them; returns them by name."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape, scale=None):
        return (torch.randn(shape, generator=generator) * (scale or shape[-1] ** -0.5)).bfloat16()

    width = HEADS * HEAD_DIM
    made = {
        "fc.weight": normal(HIDDEN, HIDDEN * len(TAPS)),
        "hidden_norm.weight": normal(HIDDEN, scale=0.1),
        "norm.weight": normal(HIDDEN, scale=0.1),
        "markov_head.markov_w1.weight": normal(VOCAB, RANK),
        "markov_head.markov_w2.weight": normal(VOCAB, RANK),
        "confidence_head.proj.weight": normal(1, HIDDEN + RANK).float(),
        "confidence_head.proj.bias": torch.zeros(1),
        "lm_head.weight": normal(VOCAB, HIDDEN),
        "d2t": torch.zeros(VOCAB, dtype=torch.long),
    }
    for layer in range(LAYERS):
        shapes = {
            "self_attn.q_proj": (width, HIDDEN),
            "self_attn.k_proj": (KV_HEADS * HEAD_DIM, HIDDEN),
            "self_attn.v_proj": (KV_HEADS * HEAD_DIM, HIDDEN),
            "self_attn.o_gate_proj": (width, HIDDEN),
            "self_attn.o_proj": (HIDDEN, width),
            "feed_forward.gate_proj": (2 * HIDDEN, HIDDEN),
            "feed_forward.up_proj": (2 * HIDDEN, HIDDEN),
            "feed_forward.down_proj": (HIDDEN, 2 * HIDDEN),
        }
        made |= {f"layers.{layer}.{name}.weight": normal(*shape) for name, shape in shapes.items()}
        for name in ("self_attn.pre_qkv_proj_norm.weight", "pre_ffn_norm.weight", "post_ffn_norm.weight"):
            made[f"layers.{layer}.{name}"] = normal(HIDDEN, scale=0.1)
        for name in ("add_attn.gate", "add_ffn.gate"):
            made[f"layers.{layer}.{name}"] = normal(HIDDEN, scale=0.3)
    save_file(made, str(path))
    return made


def read(path, leave_out=()):
    """(name, tensor) of every tensor of a safetensors file but those."""
    with safe_open(str(path), framework="pt") as file:
        yield from ((name, file.get_tensor(name)) for name in file.keys() if name not in leave_out)  # noqa: SIM118


@contextlib.contextmanager
def bfloat16_default():
    """Parameters are BF16 while models are built, as vLLM's loader has it."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def build(config, path=None, cls=None):
    """A draft of these weights, loaded and processed as vLLM's loader does; embeddings as if shared by the backbone."""
    from vllm.config import set_current_vllm_config

    from jitspark.models.dspark import MuseSparkDSparkForCausalLM

    config.compilation_config.static_forward_context.clear()
    with set_current_vllm_config(config), bfloat16_default(), torch.no_grad():
        model = (cls or MuseSparkDSparkForCausalLM)(vllm_config=config, prefix="")
        if path is not None:
            load(model, path)
    return model


def load(model, path):
    model.load_weights(read(path))
    generator = torch.Generator().manual_seed(99)
    table = model.model.embed_tokens.weight.data
    table.copy_(torch.randn(table.shape, generator=generator) * 0.5)
    for module in model.modules():
        if getattr(module, "quant_method", None) is not None:
            module.quant_method.process_weights_after_loading(module)
    if hasattr(model, "process_weights_after_loading"):
        model.process_weights_after_loading()


def plain_operations(patch):
    """vLLM's compiled and Triton operations as formulas, with their rounding points."""
    from vllm.model_executor.layers.activation import SiluAndMul
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding
    from vllm.models.muse_spark.common.layers import MuseSpark1xRMSNorm
    from vllm.models.muse_spark.nvidia import model as nvidia

    patch.setattr(MuseSpark1xRMSNorm, "supports_fused_kernel", lambda *_: False)
    patch.setattr(SiluAndMul, "forward", lambda _, x: _silu_and_mul(x))
    patch.setattr(RotaryEmbedding, "forward", RotaryEmbedding.forward_native)
    patch.setattr(nvidia, "rms_norm_gated", _norm_and_gate)


def float_tables(patch):
    """RoPE with vLLM's table as it is, FP32: vLLM rounds it to BF16 before it turns the keys of context rows."""
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

    def forward(rotary, positions, query, key):
        assert key is None
        return turned(query.view(len(positions), -1, HEAD_DIM), positions, rotary.cos_sin_cache).view(query.shape), None

    patch.setattr(RotaryEmbedding, "forward", forward)


def _silu_and_mul(x):
    gate, up = x.float().chunk(2, dim=-1)
    return (gate * gate.sigmoid() * up).to(x.dtype)


def _norm_and_gate(x, gate, *_, eps, **__):
    return (normed(x, eps) * gate.float().sigmoid()).to(x.dtype)


def normed(x, eps):
    values = x.float()
    return values * torch.rsqrt(values.square().mean(dim=-1, keepdim=True) + eps)


def turned(heads, positions, table):
    """Pairs of neighbours turned in FP32, rounded once."""
    cosines, sines = table.float()[positions][:, None].chunk(2, dim=-1)
    even, odd = heads.float()[..., 0::2], heads.float()[..., 1::2]
    pairs = torch.stack((even * cosines - odd * sines, even * sines + odd * cosines), dim=-1)
    return pairs.flatten(-2).bfloat16()


def with_caches(model, seed):
    """Give each layer a paged cache with random content, and stand-ins for the kernels that write and read it."""
    generator = torch.Generator().manual_seed(seed)
    for layer in model.model.layers:
        attention = layer.self_attn.attn
        shape = (NUM_BLOCKS, layer.self_attn.num_kv_heads, BLOCK_SIZE, 2 * HEAD_DIM)
        attention.kv_cache = torch.randn(shape, generator=generator).bfloat16()
        attention.impl = SimpleNamespace(do_kv_cache_update=_update_cache)
        kernels = _Kernels(layer.self_attn)
        layer.self_attn.fused_qk_norm_rope_kv_insert = True
        layer.self_attn._qk_norm_rope_kv_insert = kernels.norm_turn_and_insert
        attention.forward = kernels.attend
    return model


def _update_cache(_, keys, values, cache, slots):
    append(cache, keys, values, slots)


def append(cache, keys, values, slots):
    kept = slots >= 0
    heads = cache.shape[1]
    rows = torch.cat((keys.view(-1, heads, HEAD_DIM), values.view(-1, heads, HEAD_DIM)), dim=-1)
    cache[slots[kept] // BLOCK_SIZE, :, slots[kept] % BLOCK_SIZE] = rows[kept]


class _Kernels:
    """What vLLM's fused insert and a paged attention compute in one layer."""

    def __init__(self, owner):
        self.owner, self.attention = owner, owner.attn
        self.heads, self.kv_heads = owner.num_heads, owner.num_kv_heads

    def _metadata(self):
        from vllm.forward_context import get_forward_context

        return get_forward_context().attn_metadata[self.attention.layer_name]

    def norm_turn_and_insert(self, qkv, positions):
        """Queries and keys are rounded once, behind norm and rotation."""
        split = [self.heads, self.kv_heads, self.kv_heads, self.heads]
        query, key, value, gate = qkv.view(len(qkv), -1, HEAD_DIM).split(split, dim=1)
        table = self.owner.rotary_emb.cos_sin_cache
        query, key = (turned(normed(heads, self.owner.rms_norm_eps), positions, table) for heads in (query, key))
        append(self.attention.kv_cache, key, value.contiguous(), self._metadata().slot_mapping)
        return query.flatten(1), None, None, gate.flatten(1)

    def attend(self, query, *_, **__):
        """Request by request; weights are rounded to BF16, the result once."""
        found = self._metadata()
        rows = [self._request(query, found, request) for request in range(len(found.seq_lens))]
        return torch.cat(rows).to(query.dtype)

    def _request(self, query, found, request):
        length, seen = found.max_query_len, int(found.seq_lens[request])
        rows = query[request * length : (request + 1) * length].view(length, self.heads, HEAD_DIM).float()
        blocks = found.block_table[request, : -(-seen // BLOCK_SIZE)].long()
        cached = self.attention.kv_cache[blocks].transpose(1, 2).flatten(0, 1)[:seen].float()
        keys, values = cached.repeat_interleave(self.heads // self.kv_heads, dim=1).chunk(2, dim=-1)
        scores = torch.einsum("qhd,khd->hqk", rows, keys) * self.owner.scaling
        later = torch.arange(seen)[None] > (seen - length + torch.arange(length))[:, None]
        weights = (scores := scores.masked_fill(later, -torch.inf)).sub(scores.amax(-1, keepdim=True)).exp()
        summed = torch.einsum("hqk,khd->hqd", weights.bfloat16().float(), values) / weights.sum(-1, keepdim=True)
        return summed.transpose(0, 1).flatten(1)


def metadata(model, requests, seq_lens, generator):
    """Attention metadata of a uniform draft step, by layer: vLLM's own class of its FLASH_ATTN backend."""
    from vllm.v1.attention.backends.flash_attn import FlashAttentionMetadata

    length, rows = 7, 7 * requests
    found = {}
    for name in model.get_draft_kv_cache_layer_names():
        table = torch.randperm(NUM_BLOCKS - 1, generator=generator)[: requests * 4].view(requests, 4).int() + 1
        positions = torch.cat([torch.arange(seen - length, seen) for seen in seq_lens])
        request = torch.arange(requests).repeat_interleave(length)
        slots = table[request, positions // BLOCK_SIZE].long() * BLOCK_SIZE + positions % BLOCK_SIZE
        found[name] = FlashAttentionMetadata(
            num_actual_tokens=rows,
            max_query_len=length,
            query_start_loc=torch.arange(requests + 1, dtype=torch.int32) * length,
            max_seq_len=max(seq_lens),
            seq_lens=torch.tensor(seq_lens, dtype=torch.int32),
            block_table=table,
            slot_mapping=slots,
        )
    return found, positions
