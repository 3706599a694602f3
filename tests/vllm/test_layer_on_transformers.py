"""Norms, residual gate, attention and soft cap against transformers' Muse Spark modules, one module at a time.

Which reference is held to which module: `rmsnorm`, `gated_residual_rmsnorm` here; `qk_rmsnorm_rope_paged_kv_append`,
`paged_gqa_verify_attention`, `splitkv_combine_rmsnorm_sigmoid_gate` here as one attention layer; `logits_softcap` here;
`router_gemm`, `sigmoid_bias_topk_routing`, `expert_combine_rmsnorm` in test_experts_on_transformers; the BF16 grouped
GEMMs in test_grouped_gemms_on_transformers; `skinny_gemm_bf16` here; what computes in NVFP4 in test_nvfp4_on_vllm.
Whole steps are held to the whole text model in test_plans_on_transformers, on two ranks with the exchanges. The draft's
kernels are held to vLLM's own classes in test_dspark_forward and test_dspark_ranks, the sampling loop's noise and
tokens to vLLM's functions in test_markov_noise_on_vllm.
"""

import pytest

torch = pytest.importorskip("torch")
modeling = pytest.importorskip("transformers.models.muse_spark.modeling_muse_spark")
configuration = pytest.importorskip("transformers.models.muse_spark.configuration_muse_spark")

from kernel_specs.gated_residual_rmsnorm.reference import gated_residual_rmsnorm  # noqa: E402
from kernel_specs.logits_softcap.reference import logits_softcap  # noqa: E402
from kernel_specs.paged_gqa_verify_attention.reference import paged_gqa_verify_attention  # noqa: E402
from kernel_specs.qk_rmsnorm_rope_paged_kv_append.reference import qk_rmsnorm_rope_paged_kv_append  # noqa: E402
from kernel_specs.rmsnorm.reference import rmsnorm  # noqa: E402
from kernel_specs.skinny_gemm_bf16.reference import skinny_gemm_bf16  # noqa: E402
from kernel_specs.splitkv_combine_rmsnorm_sigmoid_gate.reference import (  # noqa: E402
    splitkv_combine_rmsnorm_sigmoid_gate,
)

HIDDEN, HEADS, KV_HEADS, HEAD = 512, 8, 2, 64
LENGTH, BLOCK, TOKENS, WINDOW = 8, 16, 150, 64
EPS, POST_EPS = 1e-5, 1e-8
SOFTMAX_SCALE_FACTOR = 1.3


@pytest.fixture(scope="module")
def config():
    made = configuration.MuseSparkTextConfig(
        hidden_size=HIDDEN, num_attention_heads=HEADS, num_key_value_heads=KV_HEADS, head_dim=HEAD,
        num_hidden_layers=2, layer_types=["sliding_attention", "full_attention"], sliding_window=WINDOW,
        moe_hidden_size=64, moe_intermediate_size=64, num_local_experts=4, num_experts_per_tok=2,
        rms_norm_eps=EPS, post_norm_eps=POST_EPS, qk_scale_factor=SOFTMAX_SCALE_FACTOR,
        rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
    )  # fmt: skip
    made._attn_implementation = "eager"
    return made


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_a_norm_with_a_centered_gain_is_transformers():
    module = modeling.MuseSparkTextCenteredRMSNorm(HIDDEN, eps=EPS)
    weight = (0.2 * normal(HIDDEN, seed=1)).bfloat16()
    module.weight.data = weight.float()
    x = normal(12, HIDDEN, seed=2)
    out = torch.empty(12, HIDDEN, dtype=torch.bfloat16)
    rmsnorm(x, weight, out, EPS, weighted=True, gain_center=1.0, round_input=False)

    assert out.equal(module(x).bfloat16())


@pytest.mark.parametrize("post_norm", ["weightless", "input_scale"])
def test_a_boundary_is_transformers_post_norm_gate_and_next_norm(config, post_norm):
    torch.manual_seed(3)
    gate = modeling.MuseSparkResidualGate(config)
    torch.nn.init.normal_(gate.gate)
    following = modeling.MuseSparkTextCenteredRMSNorm(HIDDEN, eps=EPS)
    following.weight.data = (0.2 * normal(HIDDEN, seed=4)).bfloat16().float()
    post = modeling.MuseSparkRMSNorm(HIDDEN, eps=POST_EPS, with_scale=False)
    weights = ()
    if post_norm == "input_scale":
        post = modeling.MuseSparkTextInputScaledRMSNorm(HIDDEN, eps=POST_EPS)
        post.weight.data = (0.2 * normal(HIDDEN, seed=5)).bfloat16().float()
        weights = (post.weight.data.bfloat16(),)
    branch, stream = normal(12, HIDDEN, seed=6).bfloat16(), normal(12, HIDDEN, seed=7)
    blended = gate(stream, post(branch.float())).detach()
    want = following(blended).detach()

    weight = gate.gate.detach() / gate.temperature
    beta = torch.sigmoid(weight)
    alpha = torch.sqrt((torch.sigmoid(-weight) * (1 + beta)).clamp(min=gate.eps))
    got, activation = stream.clone(), torch.empty(12, HIDDEN, dtype=torch.bfloat16)
    gated_residual_rmsnorm(
        branch, got, *weights, alpha, beta, following.weight.data.bfloat16(), activation, POST_EPS, EPS,
        mode="backbone", post_norm=post_norm, gain_center=1.0, write_tap=False, write_router_input=False,
    )  # fmt: skip

    torch.testing.assert_close(got, blended, rtol=2e-6, atol=2e-6)
    torch.testing.assert_close(activation.float(), want, rtol=2**-8, atol=1e-6)


def interleaved(rows):
    """A head's halves, which transformers rotates, as the neighbouring pairs that vLLM and we rotate."""
    return rows.unflatten(-1, (-1, 2, HEAD // 2)).transpose(-1, -2).flatten(-3)


def additive_mask(window):
    """[1, 1, tokens, tokens]: causal, the window counting the token itself."""
    position = torch.arange(TOKENS)
    seen = position[None] <= position[:, None]
    if window:
        seen &= position[None] > position[:, None] - window
    return torch.zeros(TOKENS, TOKENS).masked_fill(~seen, -torch.inf)[None, None]


def attention_of_transformers(config, hidden, layer):
    """The module, and its output for all tokens before o_proj, in FP32."""
    torch.manual_seed(8)
    module = modeling.MuseSparkTextAttention(config, layer).float().eval()
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=HIDDEN**-0.5)
    module.o_proj.weight.data = torch.eye(HIDDEN)
    rotary = modeling.MuseSparkTextRotaryEmbedding(config)
    positions = rotary(hidden, torch.arange(TOKENS)[None]) if layer == 0 else None
    with torch.no_grad():
        return module, module(hidden, positions, additive_mask(WINDOW if layer == 0 else 0))[0][0]


def attention_of_references(module, hidden, *, window, rope, splits):
    """The last eight tokens' outputs, through a cache whose blocks are out of order."""
    parts = [module.q_proj(hidden), module.k_proj(hidden), module.v_proj(hidden), module.gate_proj(hidden)]
    parts[:2] = [interleaved(part) for part in parts[:2]]
    qkvg = torch.cat(parts, dim=-1)[0].bfloat16()
    blocks = -(-TOKENS // BLOCK)
    order = 1 + torch.randperm(blocks, generator=torch.Generator().manual_seed(9))
    cache = torch.full((blocks + 1, KV_HEADS, BLOCK, 2 * HEAD), torch.nan, dtype=torch.bfloat16)
    position = torch.arange(TOKENS)
    slots = order[position // BLOCK] * BLOCK + position % BLOCK
    angles = position[:, None] / 500000.0 ** (torch.arange(0, HEAD, 2) / HEAD)
    table = [position, torch.cat((angles.cos(), angles.sin()), dim=-1)] if rope else []
    qk_rmsnorm_rope_paged_kv_append(qkvg, *table, slots, cache, EPS, rope=rope)

    last = qkvg[-LENGTH:]
    maxima, sums = torch.empty(2, LENGTH, HEADS, splits)
    rows, out = torch.empty(LENGTH, HEADS, splits, HEAD), torch.empty(LENGTH, HIDDEN, dtype=torch.bfloat16)
    lengths = torch.tensor([TOKENS], dtype=torch.int32)
    paged_gqa_verify_attention(
        last, cache, order[None].int(), lengths, maxima, sums, rows, SOFTMAX_SCALE_FACTOR * HEAD**-0.5,
        sliding_window=window, tile_blocks=2,
    )  # fmt: skip
    splitkv_combine_rmsnorm_sigmoid_gate(maxima, sums, rows, last, out, EPS)
    return out


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("layer", [0, 1])
def test_append_attention_and_combine_are_transformers_attention(config, layer, splits):
    hidden = normal(1, TOKENS, HIDDEN, seed=10)
    module, wanted = attention_of_transformers(config, hidden, layer)
    with torch.no_grad():
        got = attention_of_references(
            module, hidden, window=WINDOW if layer == 0 else 0, rope=layer == 0, splits=splits
        )

    error = (got.float() - wanted[-LENGTH:]).norm() / wanted[-LENGTH:].norm()
    assert error < 0.012, "BF16 rounds q, k, v, gate, the weights and the output"


def test_a_window_one_key_off_is_noticed(config):
    hidden = normal(1, TOKENS, HIDDEN, seed=10)
    module, wanted = attention_of_transformers(config, hidden, 0)
    with torch.no_grad():
        got = attention_of_references(module, hidden, window=WINDOW + 1, rope=True, splits=1)

    assert (got.float() - wanted[-LENGTH:]).norm() / wanted[-LENGTH:].norm() > 0.05  # 0.012 passes


@torch.no_grad()
@pytest.mark.parametrize("name", ["q_proj", "o_proj", "pre_expert_proj", "post_expert_proj"])
def test_a_projection_is_transformers(config, name):
    torch.manual_seed(9)
    attention = name in ("q_proj", "o_proj")
    owner = modeling.MuseSparkTextAttention(config, 0) if attention else modeling.MuseSparkMoE(config)
    linear = getattr(owner, name)
    linear.weight.data = (linear.in_features**-0.5 * torch.randn(linear.weight.shape)).bfloat16().float()
    rows = normal(12, linear.in_features, seed=10).bfloat16()
    out = torch.empty(12, linear.out_features, dtype=torch.bfloat16)
    skinny_gemm_bf16(rows, linear.weight.bfloat16(), out, epilogue="store")

    torch.testing.assert_close(out.float(), linear(rows.float()), rtol=2**-8, atol=1e-6)


@torch.no_grad()
def test_gate_and_up_rows_with_their_product_are_transformers_mlp(config):
    torch.manual_seed(11)
    module = modeling.MuseSparkTextMLP(config).eval()
    for parameter in module.parameters():
        parameter.copy_((HIDDEN**-0.5 * torch.randn(parameter.shape)).bfloat16())
    rows = normal(12, HIDDEN, seed=12).bfloat16()
    both = torch.cat((module.gate_proj.weight, module.up_proj.weight)).bfloat16()
    inner = torch.empty(12, len(both) // 2, dtype=torch.bfloat16)
    out = torch.empty(12, HIDDEN, dtype=torch.bfloat16)
    skinny_gemm_bf16(rows, both, inner, epilogue="silu_mul")
    skinny_gemm_bf16(inner, module.down_proj.weight.bfloat16(), out, epilogue="store")

    wanted = module(rows.float())
    assert (out.float() - wanted).norm() <= 2**-7 * wanted.norm()  # the product's factors are rounded to BF16


def test_the_soft_cap_is_transformers_last_lines(config):
    logits = (30 * normal(5, 64, seed=11)).bfloat16()
    multiplier, cap = 2**-2.5, config.final_logit_softcapping
    out = torch.empty(5, 64)
    logits_softcap(logits, out, multiplier, cap)

    scaled = logits.float() * multiplier / cap
    torch.testing.assert_close(out, torch.tanh(scaled) * cap, rtol=2e-6, atol=1e-7)
