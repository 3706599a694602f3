"""NVFP4 references against vLLM's own emulation of the format in plain torch: quantization, both expert GEMMs."""

import pytest

torch = pytest.importorskip("torch")
emulation = pytest.importorskip("vllm.model_executor.layers.quantization.utils.nvfp4_emulation_utils")

from kernel_specs.nvfp4_grouped_gemm_partial.layout import repack_down  # noqa: E402
from kernel_specs.nvfp4_grouped_gemm_partial.reference import nvfp4_grouped_gemm_partial  # noqa: E402
from kernel_specs.nvfp4_grouped_gemm_swiglu.layout import repack_gate_up  # noqa: E402
from kernel_specs.nvfp4_grouped_gemm_swiglu.reference import nvfp4_grouped_gemm_swiglu  # noqa: E402
from kernel_specs.rmsnorm_nvfp4_quantize.reference import rmsnorm_nvfp4_quantize  # noqa: E402

EXPERTS, HIDDEN, WIDTH, TOKENS, K = 6, 256, 128, 12, 2
ROUTES = TOKENS * K


def normal(*shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def packed(matrix, global_scale):
    """Codes and scales of [rows, n] as a checkpoint has them, by vLLM's rounding."""
    values, scales = emulation.ref_nvfp4_quant(matrix, torch.tensor(global_scale), 16)
    table = {value: code for code, value in enumerate((0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0))}
    codes = values.abs().apply_(table.__getitem__).to(torch.uint8) | (values < 0).to(torch.uint8) * 8
    return codes[:, 0::2] | (codes[:, 1::2] << 4), scales.to(torch.float8_e4m3fn).view(torch.uint8)


def decoded(codes, scales):
    return emulation.dequantize_to_dtype(codes, scales, torch.tensor(1.0), torch.float64, swizzle=False)


def test_norm_and_quantization_are_vllms_rounding():
    x, weight = normal(9, HIDDEN, seed=1).bfloat16(), (0.2 * normal(HIDDEN, seed=2)).bfloat16()
    codes, scales = torch.empty(9, HIDDEN // 2, dtype=torch.uint8), torch.empty(9, HIDDEN // 16, dtype=torch.uint8)
    global_scale = torch.tensor([1.37 * 64])
    rmsnorm_nvfp4_quantize(x, weight, global_scale, codes, scales, 1e-5)
    normed = x.float() * torch.rsqrt(x.float().square().mean(dim=-1, keepdim=True) + 1e-5) * (weight.float() + 1)
    values, wanted_scales = emulation.ref_nvfp4_quant(normed.bfloat16(), global_scale, 16)

    assert scales.view(torch.float8_e4m3fn).float().equal(wanted_scales)
    assert emulation.break_fp4_bytes(codes, torch.float32).abs().equal(values.abs())
    signs = emulation.break_fp4_bytes(codes, torch.float32).sign()
    assert (signs * values >= 0).all()


@pytest.fixture(scope="module")
def experts():
    """Codes and scales of w13 and w2, and a schedule in which expert 4 has no route."""
    first = [packed(normal(2 * WIDTH, HIDDEN, seed=10 + e), 8.0) for e in range(EXPERTS)]
    second = [packed(normal(HIDDEN, WIDTH, seed=20 + e), 8.0) for e in range(EXPERTS)]
    ids = torch.tensor([0, 1, 2, 3, 5]).repeat(ROUTES)[:ROUTES]
    order = ids.argsort(stable=True)
    counts = torch.tensor([(ids == e).sum() for e in (0, 1, 2, 3, 5)])
    offsets = torch.full((EXPERTS + 1,), ROUTES, dtype=torch.int32)
    offsets[0], offsets[1:6] = 0, counts.cumsum(0).int()
    schedule = (torch.tensor([0, 1, 2, 3, 5, -1], dtype=torch.int32), offsets, order.int().view(TOKENS, K))
    return first, second, ids, schedule


def stacked(pairs):
    return tuple(torch.stack(each) for each in zip(*pairs, strict=True))


def test_both_expert_products_are_vllms_emulation(experts):
    first, second, ids, schedule = experts
    codes, scales = packed(normal(TOKENS, HIDDEN, seed=30), 16.0)
    gate_up = torch.rand(EXPERTS, 2, generator=torch.Generator().manual_seed(31)) * 2e-4 + 1e-4
    global_scale = torch.tensor([24.0])
    h_codes = torch.zeros(TOKENS, K, WIDTH // 2, dtype=torch.uint8)
    h_scales = torch.zeros(TOKENS, K, WIDTH // 16, dtype=torch.uint8)
    nvfp4_grouped_gemm_swiglu(
        codes, scales, *repack_gate_up(*stacked(first)), gate_up, global_scale, *schedule, h_codes, h_scales, 0
    )
    down = torch.rand(EXPERTS, generator=torch.Generator().manual_seed(32)) + 0.5
    rows = torch.zeros(TOKENS, K, HIDDEN)
    nvfp4_grouped_gemm_partial(h_codes, h_scales, *repack_down(*stacked(second)), down, *schedule, rows, 0)

    inputs = decoded(codes, scales)
    for route, expert in enumerate(ids.tolist()):
        gate, up = (decoded(*first[expert]) @ inputs[route // K]).chunk(2)
        gate, up = gate * gate_up[expert, 0].double(), up * gate_up[expert, 1].double()
        hidden = (torch.nn.functional.silu(gate) * up).float()
        values, wanted = emulation.ref_nvfp4_quant(hidden[None], global_scale, 16)
        got = emulation.break_fp4_bytes(h_codes.view(ROUTES, -1)[route : route + 1], torch.float32)
        assert h_scales.view(ROUTES, -1)[route].view(torch.float8_e4m3fn).float().equal(wanted[0])
        assert (got != values).float().mean() <= 0.01, "a value next to a tie may fall on its other side"
        own = decoded(h_codes.view(ROUTES, -1)[route : route + 1], h_scales.view(ROUTES, -1)[route : route + 1])[0]
        wanted_row = decoded(*second[expert]) @ own * down[expert].double()
        torch.testing.assert_close(rows.view(ROUTES, -1)[route].double(), wanted_row, rtol=1e-6, atol=1e-6)
