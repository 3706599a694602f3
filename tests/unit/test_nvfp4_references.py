"""References of the NVFP4 experts' products against loops over routes and tables, and the layout bit by bit."""

import dataclasses
import math

import pytest

torch = pytest.importorskip("torch")

from grouped_gemm_calls import called, expert_of_route  # noqa: E402

from jitspark.checking.arguments import reference_function  # noqa: E402
from jitspark.checking.check import check_case  # noqa: E402
from jitspark.errors import SpecError  # noqa: E402
from jitspark.registry import load_spec  # noqa: E402
from kernel_specs.nvfp4_grouped_gemm_partial.layout import repack_down, unpack_down  # noqa: E402
from kernel_specs.nvfp4_grouped_gemm_swiglu import drawing  # noqa: E402
from kernel_specs.nvfp4_grouped_gemm_swiglu.layout import repack_gate_up, unpack_gate_up  # noqa: E402
from kernel_specs.primitives.nvfp4_tiling import split_columns  # noqa: E402
from kernel_specs.sigmoid_bias_topk_routing.reference import _schedule as routed  # noqa: E402

SWIGLU, PARTIAL = "nvfp4_grouped_gemm_swiglu", "nvfp4_grouped_gemm_partial"
MOST_BYTES = 2**19  # of an expert's codes: what a CPU multiplies in no time
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
SIXTH = torch.tensor(1 / 6, dtype=torch.float32)
TWO_28 = 2.0**28


def e4m3(byte):
    """By the format's definition."""
    exponent, mantissa = (byte >> 3) & 15, byte & 7
    if byte & 127 == 127:
        return math.nan
    size = mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)
    return -size if byte & 128 else size


def value(codes, scales, *at):
    """One number of codes [..., n / 2] and scales [..., n / 16], by tables."""
    *row, column = at
    byte = int(codes[(*row, column // 2)])
    return E2M1[byte >> 4 if column % 2 else byte & 15] * e4m3(int(scales[(*row, column // 16)]))


def small_cases(name):
    spec = load_spec(name)
    for i, case in enumerate(spec.cases):
        if case.axes["expert_code_bytes"] * case.axes["num_local_experts"] <= MOST_BYTES:
            yield pytest.param(spec.specialize_case(case), case, id=f"{name}-{i}")


def random_bytes(shape, seed, top=256):
    return torch.randint(0, top, shape, generator=torch.Generator().manual_seed(seed)).to(torch.uint8)


def test_every_number_of_both_formats_is_dequantized_by_its_definition():
    codes = torch.arange(256, dtype=torch.uint8).view(16, 16)[:, :8].repeat(1, 2)  # 16 rows of two blocks
    for first in range(0, 256, 2):
        scales = torch.tensor([first, first + 1], dtype=torch.uint8).repeat(16, 1)
        got = drawing.dequantize(codes, scales)
        wanted = torch.tensor([[value(codes, scales, r, c) for c in range(32)] for r in range(16)], dtype=torch.float64)
        torch.testing.assert_close(got, wanted, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(("rows", "columns"), [(16, 128), (32, 256), (48, 384), (16, 512), (32, 1024), (16, 4096)])
def test_repacking_loses_nothing_and_moves_every_bit(rows, columns):
    codes, scales = random_bytes((3, rows, columns // 2), 1), random_bytes((3, rows, columns // 16), 2)

    packed, packed_scales = repack_down(codes, scales)

    assert packed.shape == (3, rows * columns // 2) and packed_scales.shape == (3, rows * columns // 16)
    assert [
        each.equal(want)
        for each, want in zip(unpack_down(packed, packed_scales, columns), (codes, scales), strict=True)
    ] == [
        True,
        True,
    ]
    both = (torch.cat((codes, codes ^ 255), dim=1), torch.cat((scales, scales ^ 255), dim=1))
    packed, packed_scales = repack_gate_up(*both)
    assert all(a.equal(b) for a, b in zip(unpack_gate_up(packed, packed_scales, columns), both, strict=True))


def test_slices_of_experts_are_repacked_like_whole_ones():
    codes, scales = random_bytes((2, 64, 128), 3), random_bytes((2, 64, 16), 4)
    gate_up = (torch.cat((codes[:, :16], codes[:, 32:48]), 1), torch.cat((scales[:, :16], scales[:, 32:48]), 1))
    whole = [each.view(2, 4, -1) for each in repack_gate_up(codes, scales)]

    for packed, of_whole in zip(repack_gate_up(*gate_up), whole, strict=True):
        assert packed.equal(of_whole[:, :2].flatten(1))


# --- what a warp does with the packed bytes, lane by lane -------------------------------------------------------------


def lane_words(packed, at, count):
    return [int.from_bytes(bytes(packed[at + 4 * i : at + 4 * i + 4].tolist()), "little") for i in range(count)]


def halves(register):
    """The two FP16 numbers of a register."""
    pair = torch.tensor([register & 0xFFFF, register >> 16], dtype=torch.int32).to(torch.int16)
    return pair.view(torch.float16).double().tolist()


def unpack_weights(word):
    """The kernel's `unpack_interleaved`, shift by shift."""
    shifts = ((0, 0), (3, 3), (6, 1), (9, 2))
    return [((word << m) & 0x0E000E00) | ((word << s) & 0x80008000) for m, s in shifts]


def unpack_tokens(word):
    """The kernel's `unpack`."""
    magnitudes = [
        (word << 9) & 0x0E000E00,
        (word << 5) & 0x0E000E00,
        (word << 1) & 0x0E000E00,
        (word >> 3) & 0x0E000E00,
    ]
    return [m | ((word << (12 - 4 * j)) & 0x80008000) for j, m in enumerate(magnitudes)]


def exact_product(pair, scale):
    """FP16 times FP16 in FP16: must lose nothing."""
    made = torch.tensor(halves(pair), dtype=torch.float16) * torch.tensor(scale, dtype=torch.float16)
    assert (made.double() == torch.tensor(halves(pair)).double() * scale).all()
    return made.double().tolist()


def warp_tile(packed, packed_scales, token_codes, token_scales, groups):
    """16 x 8 sums of one range of one tile with the tokens' parts of that range, by the MMA's fragment layout."""
    sums = torch.zeros((16, 8), dtype=torch.float64)
    for group in range(groups):
        for step in range(4):
            a = torch.zeros((16, 16), dtype=torch.float64)
            b = torch.zeros((16, 8), dtype=torch.float64)
            for lane in range(32):
                row, quad = divmod(lane, 4)
                word = lane_words(packed, group * 512 + lane * 16, 4)[step]
                both = [e4m3(int(packed_scales[lane * 2 * groups + 2 * group + i])) for i in range(2)]
                for i, register in enumerate(unpack_weights(word)):
                    for half, number in enumerate(exact_product(register, both[i % 2])):
                        a[row + 8 * (i % 2), 2 * quad + half + 8 * (i // 2)] = number
                block = quad * groups + group
                registers = [r for w in lane_words(token_codes[row], block * 8, 2) for r in unpack_tokens(w)]
                scale = e4m3(int(token_scales[row][block]))
                for i in range(2):
                    for half, number in enumerate(exact_product(registers[2 * step + i], scale)):
                        b[2 * quad + half + 8 * i, row] = number
            sums += a @ b
    return sums * TWO_28


@pytest.mark.parametrize("columns", [128, 256, 384, 512])
def test_packed_bytes_are_the_operands_of_tensor_cores(columns):
    """Bytes, loads, shifts, FP16 products and fragments of the kernels, in plain Python, give the plain product."""
    codes, scales = random_bytes((1, 16, columns // 2), 5), random_bytes((1, 16, columns // 16), 6, top=127)
    tokens, token_scales = random_bytes((8, columns // 2), 7), random_bytes((8, columns // 16), 8, top=127)
    packed, packed_scales = (each[0] for each in repack_down(codes, scales))
    split = split_columns(columns)
    groups, ranges = split["groups"], split["ranges"]

    total = torch.zeros((16, 8), dtype=torch.float64)
    for part in range(ranges):
        own, own_scales = packed[part * groups * 512 :], packed_scales[part * groups * 64 :]
        theirs, their_scales = tokens[:, part * groups * 32 :], token_scales[:, part * groups * 4 :]
        total += warp_tile(own, own_scales, theirs, their_scales, groups)

    wanted = drawing.dequantize(codes, scales)[0] @ drawing.dequantize(tokens, token_scales).T
    torch.testing.assert_close(total, wanted, rtol=1e-12, atol=1e-6)


# --- the references ---------------------------------------------------------------------------------------------------


def row_of(weights, scales, expert):
    return drawing.dequantize(weights[expert], scales[expert])


@pytest.mark.parametrize(("specialization", "case"), list(small_cases(PARTIAL)))
def test_partial_rows_are_products_per_route(specialization, case):
    draw, got = called(specialization, case, seed=1)
    plain = unpack_down(got["weight"], got["weight_scales"], case.axes["packed_width"] * 2)
    k = case.axes["num_experts_per_tok"]
    for route, expert in enumerate(expert_of_route(got)):
        token, slot = divmod(route, k)
        if expert is None:
            assert got["rows"][token, slot].equal(draw["rows"][token, slot])
            continue
        hidden = drawing.dequantize(got["codes"][token, slot], got["scales"][token, slot])
        wanted = torch.mv(row_of(*plain, expert), hidden) * got["down_scales"][expert].double()
        rtol = 1e-7 if got["rows"].dtype == torch.float32 else 2**-8
        torch.testing.assert_close(got["rows"][token, slot].double(), wanted, rtol=rtol, atol=1e-12)


def nearest(number, table):
    """The index of the entry next to `number`; there are no ties."""
    return min(range(len(table)), key=lambda i: abs(table[i] - number))


@pytest.mark.parametrize(("specialization", "case"), list(small_cases(SWIGLU)))
def test_hidden_codes_are_nearest_table_entries(specialization, case):
    _, got = called(specialization, case, seed=2)
    plain = unpack_gate_up(got["weight"], got["weight_scales"], case.axes["moe_hidden_size"])
    k, width = case.axes["num_experts_per_tok"], case.axes["packed_width"] * 2
    scale_table = [e4m3(byte) for byte in range(127)]
    g = got["global_scale"].double().item()
    for route, expert in enumerate(expert_of_route(got)):
        token, slot = divmod(route, k)
        codes, scales = got["out_codes"][token, slot], got["out_scales"][token, slot]
        if expert is None:
            assert (codes == 0x7F).all() and (scales == 0x7F).all()  # as poisoned
            continue
        products = torch.mv(row_of(*plain, expert), drawing.dequantize(got["codes"][token], got["scales"][token]))
        gate, up = (products.view(2, width) * got["gate_up_scales"][expert].double()[:, None]).unbind(0)
        hidden = torch.nn.functional.silu(gate.clamp(min=-700)) * up
        for block in range(width // 16):
            values = hidden[16 * block : 16 * block + 16].tolist()
            assert int(scales[block]) == nearest(min(max(map(abs, values)) * g / 6, 448.0), scale_table)
            scale = scale_table[int(scales[block])]
            for i, number in enumerate(values):
                code = int(codes[8 * block + i // 2]) >> 4 * (i % 2) & 15
                wanted = nearest(min(abs(number) * g / scale, 6.0), E2M1[:8]) if scale else 0
                assert code & 7 == wanted, (route, block, i, number)
                assert code >> 3 == (math.copysign(1.0, number) < 0), (route, block, i, number)


def test_random_schedules_are_what_the_routing_kernel_writes():
    for seed, (tokens, k, experts, local) in enumerate(((8, 2, 8, 8), (64, 8, 16, 4), (40, 2, 8, 4), (8, 2, 16, 16))):
        axes = {"num_tokens": tokens, "num_experts_per_tok": k, "num_experts": experts, "num_local_experts": local}
        drawn = drawing.draw_schedule(axes, torch.Generator().manual_seed(seed))
        ids = torch.full((tokens * k,), -1)
        offsets = drawn["route_offsets"].tolist()
        for i, expert in enumerate(drawn["expert_ids"].tolist()):
            ids[drawn["routes"].flatten()[offsets[i] : offsets[i + 1]].long()] = expert
        made = [torch.empty_like(drawn[name]) for name in ("expert_ids", "route_offsets", "routes")]
        routed(ids, *made, torch.empty(1, dtype=torch.int32))

        assert [
            each.equal(drawn[name]) for each, name in zip(made, ("expert_ids", "route_offsets", "routes"), strict=True)
        ]
        assert drawn["expert_ids"].max() >= 0


def test_random_arguments_reach_their_corners():
    spec, seen = load_spec(SWIGLU), set()
    for seed in range(12):
        case = next(c for c in spec.cases if c.axes["num_tokens"] == 64 and c.axes["num_local_experts"] == 4)
        _, got = called(spec.specialize_case(case), case, seed)
        routes = expert_of_route(got)
        written = torch.tensor([expert is not None for expert in routes])
        scales = got["out_scales"].flatten(0, 1)[written]
        seen |= {"saturated scale"} if (scales == 0x7E).any() else set()
        seen |= {"vanishing scale"} if (scales == 0).any() else set()
        seen |= {"padding or another rank's"} if None in routes else set()
        seen |= {"more than a tile"} if max(routes.count(e) for e in range(4)) > 8 else set()
        seen |= {"unused NaN expert"} if got["gate_up_scales"].isnan().any() else set()
        seen |= {"a zero weight scale"} if (got["weight_scales"] == 0).any() else set()

    assert seen >= {"saturated scale", "vanishing scale", "padding or another rank's", "more than a tile"}
    assert "a zero weight scale" in seen


@pytest.mark.parametrize("name", [SWIGLU, PARTIAL])
@pytest.mark.parametrize(("argument", "message"), [("weight", "beyond bounds"), ("routes", "beyond bounds")])
def test_a_kernel_that_reads_the_wrong_bytes_is_found(name, argument, message):
    spec = load_spec(name)
    case = next(c for c in spec.cases if c.axes["num_tokens"] == 8 and c.axes["num_experts"] == 8)
    specialization = spec.specialize_case(case)
    at = [arg.name for arg in specialization.args].index(argument)

    def wrong(*values):
        changed = list(values)
        changed[at] = values[at].flip(0)
        reference_function(specialization)(*changed, **specialization.statics)

    outcome = check_case(specialization, case, wrong, torch.Generator().manual_seed(3))

    assert any(message in problem for problem in outcome.problems)


@pytest.mark.parametrize("name", [SWIGLU, PARTIAL])
def test_sizes_that_the_kernels_do_not_serve_are_refused(name):
    spec = load_spec(name)
    case = spec.cases[0]
    for axis, size in (("num_tokens", 65), ("moe_hidden_size", 200), ("packed_width", 36)):
        with pytest.raises(SpecError, match=r"is more than|is not divisible"):
            spec.specialize_case(dataclasses.replace(case, axes={**case.axes, axis: size}))
