"""Router, schedule and combine against transformers' Muse Spark modules, in FP32 at a tiny geometry."""

import pytest

torch = pytest.importorskip("torch")
modeling = pytest.importorskip("transformers.models.muse_spark.modeling_muse_spark")
configuration = pytest.importorskip("transformers.models.muse_spark.configuration_muse_spark")

from kernel_specs.expert_combine_rmsnorm.reference import expert_combine_rmsnorm  # noqa: E402
from kernel_specs.router_gemm.reference import router_gemm  # noqa: E402
from kernel_specs.sigmoid_bias_topk_routing.reference import sigmoid_bias_topk_routing  # noqa: E402

TOKENS, HIDDEN, WIDTH, EXPERTS, K = 24, 64, 32, 16, 4
MULTIPLIER, EPS = 0.5, 1e-6


@pytest.fixture(scope="module")
def block():
    torch.manual_seed(1)
    config = configuration.MuseSparkTextConfig(
        hidden_size=HIDDEN, moe_hidden_size=WIDTH, moe_intermediate_size=48, num_local_experts=EXPERTS,
        num_experts_per_tok=K, output_multiplier=MULTIPLIER, post_norm_eps=EPS,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16,
    )  # fmt: skip
    made = modeling.MuseSparkMoE(config)
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    torch.nn.init.normal_(made.gate.e_score_correction_bias, std=0.2)
    return made.float().eval()


@pytest.fixture(scope="module")
def routed(block):
    """What the references make of random tokens: logits, ids, weights and the schedule."""
    tokens = torch.randn(TOKENS, HIDDEN, generator=torch.Generator().manual_seed(2)).bfloat16()
    logits = torch.empty(TOKENS, EXPERTS)
    router_gemm(tokens, block.gate.weight.detach() * MULTIPLIER, logits)
    ids, routes = torch.empty(TOKENS, K, dtype=torch.int32), torch.empty(TOKENS, K, dtype=torch.int32)
    experts, offsets = torch.empty(EXPERTS, dtype=torch.int32), torch.empty(EXPERTS + 1, dtype=torch.int32)
    weights, distinct = torch.empty(TOKENS, K), torch.empty(1, dtype=torch.int32)
    bias = block.gate.e_score_correction_bias
    sigmoid_bias_topk_routing(logits, bias, ids, weights, experts, offsets, routes, distinct, padded=False)
    return tokens, logits, ids, weights, experts, offsets, routes, distinct


def test_router_is_transformers(block, routed):
    tokens, logits, ids, weights, *_ = routed
    with torch.no_grad():
        wanted_logits, wanted_weights, wanted_ids = block.gate(tokens.float())

    torch.testing.assert_close(logits, wanted_logits, rtol=1e-5, atol=1e-6)
    order = wanted_ids.sort(dim=-1)
    own_order = ids.sort(dim=-1)
    assert own_order.values.equal(order.values.int())
    torch.testing.assert_close(
        weights.gather(1, own_order.indices), wanted_weights.gather(1, order.indices), rtol=1e-5, atol=0.0
    )


def test_experts_run_by_the_schedule_and_combined_are_transformers(block, routed):
    _, _, ids, weights, experts, offsets, routes, distinct = routed
    inputs = torch.randn(TOKENS, WIDTH, generator=torch.Generator().manual_seed(3))
    rows = torch.full((TOKENS * K, WIDTH), torch.nan)
    module = block.experts
    with torch.no_grad():
        for i in range(int(distinct)):
            mine = routes.flatten()[offsets[i] : offsets[i + 1]].long()
            gate, up = (inputs[mine // K] @ module.gate_up_proj[experts[i]].T).chunk(2, dim=-1)
            rows[mine] = (module.act_fn(gate) * up) @ module.down_proj[experts[i]].T
        wanted = module(inputs, ids.long(), weights)
    out = torch.empty(TOKENS, WIDTH)
    weight = module.post_expert_norm.weight.detach()
    expert_combine_rmsnorm(rows.view(1, TOKENS, K, WIDTH), ids, weights, weight, out, EPS)

    torch.testing.assert_close(out, wanted, rtol=1e-4, atol=1e-5)
