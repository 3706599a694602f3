"""Both BF16 products of the experts against transformers' Muse Spark experts, in FP32 at a tiny geometry."""

import pytest

torch = pytest.importorskip("torch")
modeling = pytest.importorskip("transformers.models.muse_spark.modeling_muse_spark")
configuration = pytest.importorskip("transformers.models.muse_spark.configuration_muse_spark")

from kernel_specs.bf16_grouped_gemm_partial.reference import bf16_grouped_gemm_partial  # noqa: E402
from kernel_specs.bf16_grouped_gemm_swiglu.reference import bf16_grouped_gemm_swiglu  # noqa: E402
from kernel_specs.sigmoid_bias_topk_routing.reference import sigmoid_bias_topk_routing  # noqa: E402


def test_both_products_are_transformers_experts():
    tokens, width, inner, experts, k = 24, 32, 48, 16, 4
    config = configuration.MuseSparkTextConfig(
        hidden_size=64, moe_hidden_size=width, moe_intermediate_size=inner, num_local_experts=experts,
        num_experts_per_tok=k, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
    )  # fmt: skip
    torch.manual_seed(6)
    module = modeling.MuseSparkMoE(config).experts.float().eval()
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    inputs, logits = torch.randn(tokens, width), torch.randn(tokens, experts)
    ids, weights = torch.empty(tokens, k, dtype=torch.int32), torch.empty(tokens, k)
    expert_ids, offsets = torch.empty(experts, dtype=torch.int32), torch.empty(experts + 1, dtype=torch.int32)
    routes, distinct = torch.empty_like(ids), torch.empty(1, dtype=torch.int32)
    sigmoid_bias_topk_routing(
        logits, torch.zeros(experts), ids, weights, expert_ids, offsets, routes, distinct, padded=False
    )
    h, rows = torch.empty(tokens, k, inner), torch.empty(tokens, k, width)
    schedule = (expert_ids, offsets, routes)
    with torch.no_grad():
        bf16_grouped_gemm_swiglu(inputs, module.gate_up_proj, *schedule, h, 0)
        bf16_grouped_gemm_partial(h, module.down_proj, *schedule, rows, 0)
        normed = module.post_expert_norm(rows)
        wanted = module(inputs, ids.long(), weights)

    torch.testing.assert_close((weights[..., None] * normed).sum(dim=1), wanted, rtol=1e-4, atol=1e-5)
