"""transformers' Muse Spark text model at a geometry's sizes, its weights by a contract's names, and its KV cache.

The checkpoint's q and k rows are half-split (pairs i, i + 32); the contract's are interleaved (pairs 2i, 2i + 1).
"""

import torch
from transformers.models.muse_spark.configuration_muse_spark import MuseSparkTextConfig
from transformers.models.muse_spark.modeling_muse_spark import MuseSparkTextModel

from kernel_specs.primitives.head_rows_reference import rope_table


def text_config(backbone):
    attention, experts, layers = backbone.attention, backbone.experts, range(backbone.num_hidden_layers)
    full, nope = backbone.full_attention_layers, backbone.nope_layers
    config = MuseSparkTextConfig(
        hidden_size=backbone.hidden_size,
        num_hidden_layers=backbone.num_hidden_layers,
        vocab_size=backbone.vocab_size,
        max_position_embeddings=backbone.max_position_embeddings,
        layer_types=["full_attention" if layer in full else "sliding_attention" for layer in layers],
        layer_rope_theta=[0.0 if layer in nope else attention.rope_theta for layer in layers],
        num_attention_heads=attention.num_attention_heads,
        num_key_value_heads=attention.num_key_value_heads,
        head_dim=attention.head_dim,
        sliding_window=attention.sliding_window,
        qk_scale_factor=backbone.qk_scale_factor,
        num_local_experts=experts.num_local_experts,
        num_experts_per_tok=experts.num_experts_per_tok,
        moe_hidden_size=experts.moe_hidden_size,
        moe_intermediate_size=experts.moe_intermediate_size,
        rms_norm_eps=backbone.norms.rms_norm_eps,
        post_norm_eps=backbone.norms.post_norm_eps,
        residual_gate_temperature=backbone.residual_gate_temperature,
        output_multiplier=backbone.output_multiplier,
        final_logit_softcapping=backbone.final_logit_softcapping,
        pad_token_id=0,
    )
    config._attn_implementation = "eager"
    return config


def text_model(backbone, seed):
    """The model in FP32 with random weights that BF16 holds exactly, where the contract has BF16."""
    torch.manual_seed(seed)
    model = MuseSparkTextModel(text_config(backbone)).float().eval()
    for name, parameter in model.named_parameters():
        parameter.data.copy_(_drawn(name, parameter))
    for layer in model.layers:
        torch.nn.init.normal_(layer.mlp.gate.e_score_correction_bias, std=0.5)
    return model


def _drawn(name, parameter):
    values = torch.randn(parameter.shape)
    if "residual_gate" in name:
        return 0.3 * values
    if "mlp.gate.weight" in name:
        return 4.0 * values * parameter.shape[-1] ** -0.5  # so that most choices of experts are clear
    if name == "norm.weight":
        return (1.0 + 0.2 * values).bfloat16()
    if "norm" in name:
        return (0.2 * values).bfloat16()
    return (values * (1.0 if "embed" in name else parameter.shape[-1] ** -0.5)).bfloat16()


def contract_weights(model, backbone, lm_head):
    """By buffer name, as a plan at TP 1 binds them."""
    made = {"final_norm": model.norm.weight.bfloat16(), "lm_head": lm_head}
    made["rope.cos_sin"] = rope_table(backbone.max_position_embeddings, "cpu")
    for number, layer in enumerate(model.layers):
        found = {**_attention(layer.self_attn), **_feed_forward(layer.mlp), **_norms_and_gates(layer)}
        made |= {f"layers.{number}.{name}": tensor.detach().contiguous() for name, tensor in found.items()}
    return {name: tensor.detach() for name, tensor in made.items()}


def _attention(module):
    rows = (
        interleaved(module.q_proj.weight, module.head_dim),
        interleaved(module.k_proj.weight, module.head_dim),
        module.v_proj.weight,
        module.gate_proj.weight,
    )
    return {"qkv_gate": torch.cat(rows).bfloat16(), "o_proj": module.o_proj.weight.bfloat16()}


def _feed_forward(module):
    gate = module.gate
    return {
        "router": gate.weight.float() * gate.output_multiplier,
        "router_bias": gate.e_score_correction_bias.float(),
        "pooler": module.pre_expert_proj.weight.bfloat16(),
        "unpooler": module.post_expert_proj.weight.bfloat16(),
        "pre_expert_norm": module.pre_expert_norm.weight.bfloat16(),
        "post_expert_norm": module.experts.post_expert_norm.weight.bfloat16(),
        "experts.gate_up.weight": module.experts.gate_up_proj.bfloat16(),
        "experts.down.weight": module.experts.down_proj.bfloat16(),
    }


def _norms_and_gates(layer):
    made = {
        "pre_qkv_norm": layer.input_layernorm.weight.bfloat16(),
        "pre_ffn_norm": layer.pre_feedforward_layernorm.weight.bfloat16(),
        "post_ffn_norm": layer.post_feedforward_layernorm.weight.bfloat16(),
    }
    gates = {"attn": layer.post_attention_residual_gate, "ffn": layer.post_feedforward_residual_gate}
    for name, gate in gates.items():
        beta = torch.sigmoid(gate.gate / gate.temperature)
        alpha = torch.sqrt(torch.clamp(torch.sigmoid(-gate.gate / gate.temperature) * (1.0 + beta), min=gate.eps))
        made |= {f"{name}_alpha": alpha.float(), f"{name}_beta": beta.float()}
    return made


def weights_of_rank(weights, rank, tp):
    """A rank's share of what `contract_weights` made."""
    shares = {
        "qkv_gate": lambda t: torch.cat([part.chunk(tp)[rank] for part in _queries_keys_values_gate(t)]),
        "o_proj": lambda t: t.chunk(tp, dim=1)[rank],
        "pooler": lambda t: t.chunk(tp)[rank],
        "unpooler": lambda t: t.chunk(tp)[rank],
        "lm_head": lambda t: t.chunk(tp)[rank],
        "experts.gate_up.weight": lambda t: torch.cat([half.chunk(tp, dim=1)[rank] for half in t.chunk(2, dim=1)], 1),
        "experts.down.weight": lambda t: t.chunk(tp, dim=2)[rank],
    }

    def share(name, tensor):
        own = shares.get(name.split(".", 2)[-1] if name.startswith("layers.") else name)
        return tensor if own is None else own(tensor).contiguous()

    return {name: share(name, tensor) for name, tensor in weights.items()}


def _queries_keys_values_gate(rows):
    """The four parts of a whole model's projection: its hidden size is its queries' width in the tiny geometries."""
    queries = rows.shape[1]
    keys = (len(rows) - 2 * queries) // 2
    return rows.split((queries, keys, keys, queries))


def interleaved(rows, head_dim):
    """Rows (or last-axis elements given as rows) of each head from half-split to interleaved order."""
    heads = rows.reshape(-1, 2, head_dim // 2, *rows.shape[1:])
    return heads.transpose(1, 2).reshape(rows.shape)


def cached_keys_and_values(cache, layer):
    """[tokens, KV heads, 128] of what the model's cache still holds of a layer, K interleaved, K and V side by side."""
    keys, values = cache.layers[layer].keys[0], cache.layers[layer].values[0]  # [KV heads, tokens, 64]
    mixed = interleaved(keys.permute(2, 0, 1), keys.shape[-1]).permute(1, 2, 0)
    return torch.cat((mixed, values), dim=-1).transpose(0, 1)
