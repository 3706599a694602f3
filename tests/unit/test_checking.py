"""The checks themselves: a reference that stands in for a kernel passes, and each way of being wrong is caught."""

import dataclasses
import math

import pytest

torch = pytest.importorskip("torch")

from jitspark.checking import arguments as checking_arguments  # noqa: E402
from jitspark.checking.arguments import allocate, draw_arguments, reference_function  # noqa: E402
from jitspark.checking.check import check_case  # noqa: E402
from jitspark.checking.compare import compare  # noqa: E402
from jitspark.checking.guarded import GUARD_BYTES, guarded  # noqa: E402
from jitspark.errors import SpecError  # noqa: E402
from jitspark.registry import kernel_names, load_spec  # noqa: E402

NORM = load_spec("rmsnorm")
BOUNDARY = load_spec("gated_residual_rmsnorm")
APPEND = load_spec("qk_rmsnorm_rope_paged_kv_append")


def smallest(spec, **statics):
    cases = [case for case in spec.cases if all(case.statics[name] == value for name, value in statics.items())]
    return min(cases, key=lambda case: math.prod(case.axes.values()) * (1 if case.axes["num_tokens"] >= 7 else 10**9))


def check(spec, case, kernel=None, seed=0, **options):
    specialization = spec.specialize_case(case)
    stand_in = kernel or kernel_from(specialization, nothing)
    return check_case(specialization, case, stand_in, torch.Generator().manual_seed(seed), **options)


def nothing(*_values, **_statics):
    """Do nothing, as a kernel, a reference or a change."""


def kernel_from(specialization, afterwards):
    """The reference, then a change to what it wrote; `afterwards` gets the arguments by name."""
    names = [arg.name for arg in specialization.args]

    def kernel(*values):
        reference_function(specialization)(*values, **specialization.statics)
        afterwards(dict(zip(names, values, strict=True)))

    return kernel


def problems_after(spec, case, afterwards, **options):
    outcome = check(spec, case, kernel_from(spec.specialize_case(case), afterwards), **options)
    assert not outcome.passed
    return " | ".join(outcome.problems)


def small_cases():
    """Three of each kernel, so that no case takes long on a CPU; the GPU sees them all."""
    for spec in map(load_spec, kernel_names()):
        smallest_first = sorted(spec.cases, key=lambda case: math.prod(case.axes.values()))
        for i, case in enumerate(smallest_first[:3]):
            yield pytest.param(spec, case, id=f"{spec.name}-{i}")


@pytest.mark.parametrize(("spec", "case"), list(small_cases()))
def test_a_reference_in_place_of_its_kernel_passes(spec, case):
    outcome = check(spec, case)

    assert outcome.problems == ()
    assert outcome.margin == 0.0
    assert {each.argument for each in outcome.comparisons} == {
        arg.name for arg in spec.specialize_case(case).args if getattr(arg, "role", "in") in ("out", "inout")
    }


def test_a_state_is_zero_at_first_and_then_left_to_the_kernel():
    spec = load_spec("markov_gumbel_sampling")
    specialization = spec.specialize_case(spec.cases[0])
    draw = draw_arguments(specialization, spec.cases[0].axes, torch.Generator().manual_seed(0))
    arguments = allocate(specialization, spec.cases[0].axes, draw, torch.device("cpu"))
    state = arguments.tensors["exchange"].tensor
    assert not state.any()

    state.fill_(5)
    arguments.fill(draw)

    assert (state == 5).all()


def test_one_wrong_element_is_caught():
    def one_element_beyond_bounds(values):
        values["out"][0, 17] *= 1.05

    assert "(0, 17)" in problems_after(NORM, smallest(NORM, weighted=True), one_element_beyond_bounds)


def test_an_error_within_bounds_passes_and_shows_its_margin():
    case = dataclasses.replace(smallest(NORM, weighted=True), rtol=0.1)
    specialization = NORM.specialize_case(case)

    outcome = check(NORM, case, kernel_from(specialization, lambda values: values["out"].mul_(1.05)))

    assert outcome.passed
    assert 0.45 < outcome.margin < 0.55


def test_an_element_left_unwritten_is_caught():
    def poison_again(values):
        values["out"][-1, -1] = float("nan")

    assert "instead of" in problems_after(NORM, smallest(NORM), poison_again)


def test_nan_passes_no_bound_even_where_the_reference_has_it():
    nan, one = torch.full((2, 2), float("nan")), torch.ones(2, 2)

    assert all(compare("out", *pair, 1e9, 1e9).margin == math.inf for pair in ((nan, nan), (nan, one), (one, nan)))


def test_infinity_passes_only_where_it_is_wanted():
    infinity, one = torch.full((2,), float("inf")), torch.ones(2)

    assert compare("out", infinity, infinity, 0.1, 0.1).problem is None
    assert compare("out", one, infinity, 0.1, 0.1).problem is not None
    assert compare("out", infinity, one, 0.1, 0.1).problem is not None
    assert compare("out", infinity, -infinity, 0.1, 0.1).problem is not None


def test_integers_are_equal_or_wrong():
    want = torch.tensor([1, 2, 3])

    assert compare("ids", want.clone(), want, 10.0, 10.0).problem is None
    assert "instead of 2" in compare("ids", torch.tensor([1, 3, 3]), want, 10.0, 10.0).problem


@pytest.mark.parametrize("shift", [-1, 1], ids=["before", "after"])
def test_a_write_outside_a_tensor_is_caught(shift):
    def next_to_it(values):
        out = values["out"]
        start = out.storage_offset() + (out.numel() if shift > 0 else -1)
        out.as_strided((1,), (1,), start).zero_()

    assert "before, after or between" in problems_after(NORM, smallest(NORM), next_to_it)


def test_a_write_between_the_rows_of_a_strided_tensor_is_caught():
    def behind_the_last_row_of_a_block(values):
        cache = values["kv_cache"]
        heads, tokens, width = cache.shape[1:]
        last = sum((size - 1) * stride for size, stride in zip((heads, tokens, width), cache.stride()[1:], strict=True))
        cache.as_strided((1,), (1,), cache.storage_offset() + last + 1).zero_()

    problems = problems_after(APPEND, smallest(APPEND), behind_the_last_row_of_a_block)

    assert "kv_cache: 2 bytes before, after or between" in problems


def test_a_cache_slot_that_no_token_names_must_stay():
    def write_another_slot(values):
        named = {slot for slot in values["slot_mapping"].tolist() if slot >= 0}
        slot = next(slot for slot in range(values["kv_cache"].shape[0] * 16) if slot not in named)
        values["kv_cache"][slot // 16, 0, slot % 16, 5:6].view(torch.int16).bitwise_xor_(1)

    assert "that must stay" in problems_after(APPEND, smallest(APPEND), write_another_slot)


def test_a_gate_that_is_not_written_may_not_change_by_a_bit():
    def flip_the_last_bit(values):
        values["qkvg"][:, -1:].view(torch.int16).bitwise_xor_(1)

    assert "qkvg: 8 elements that must stay" in problems_after(APPEND, smallest(APPEND), flip_the_last_bit)


def test_what_is_written_may_change_within_bounds_though_it_was_the_same_before():
    case = smallest(BOUNDARY, mode="backbone", post_norm="weightless")
    case = dataclasses.replace(case, tolerances={"stream": (1e-3, 1e-3)}, rtol=1e-2)

    def keep_the_stream(values):
        values["stream"].mul_(1.0001)

    assert check(BOUNDARY, case, kernel_from(BOUNDARY.specialize_case(case), keep_the_stream)).passed


def test_a_changed_input_is_caught():
    def change_an_input(values):
        values["weight"][0] += 1.0

    assert "input weight was written" in problems_after(BOUNDARY, smallest(BOUNDARY), change_an_input)


def test_a_result_that_differs_from_run_to_run_is_caught():
    runs = iter(range(100))

    def the_last_bit_of_the_second_run(values):
        values["out"][2:3, 5:6].view(torch.int16).bitwise_xor_(next(runs) == 1)

    case = dataclasses.replace(smallest(NORM), rtol=0.1)
    assert "a second run gives other bits: out" in problems_after(NORM, case, the_last_bit_of_the_second_run)


def test_a_graph_that_does_not_read_refreshed_inputs_is_caught():
    case, outputs = smallest(NORM), []
    kernel = kernel_from(NORM.specialize_case(case), lambda values: outputs.append(values["out"]))

    def capture_as_if_inputs_were_constants(call):
        call()
        written = outputs[-1].clone()
        return lambda: outputs[-1].copy_(written)

    outcome = check(NORM, case, kernel, capture=capture_as_if_inputs_were_constants)

    assert any(text.startswith("replayed with refreshed inputs") for text in outcome.problems)
    assert any(text.startswith("a graph's replay differs from a launch") for text in outcome.problems)


def test_an_output_that_the_reference_forgets_never_passes(monkeypatch):
    monkeypatch.setattr("jitspark.checking.check.reference_function", lambda _: nothing)

    assert not check(NORM, smallest(NORM), nothing).passed


def test_a_tensor_is_aligned_to_what_is_promised_and_no_better():
    for align in (8, 16, 128):
        made = guarded((3, 8), (8, 1), torch.float32, align, "cpu")

        assert made.tensor.data_ptr() % (2 * align) == align
        assert made.offset >= GUARD_BYTES
        assert made.storage.numel() - made.offset - 3 * 8 * 4 >= GUARD_BYTES


def test_run_time_strides_keep_the_drawn_order_and_leave_gaps():
    case = next(case for case in APPEND.cases if case.axes["num_blocks"] % 2)
    specialization = APPEND.specialize_case(case)
    draw = draw_arguments(specialization, case.axes, torch.Generator().manual_seed(0))

    cache = allocate(specialization, case.axes, draw, torch.device("cpu")).tensors["kv_cache"].tensor

    block, head, token, element = cache.stride()
    assert block > token > head > element == 1, "token-major, as drawn"
    assert token > head * cache.shape[1] and block > token * cache.shape[2], "gaps between tokens and between blocks"
    assert all(stride % 8 == 0 for stride in (block, head, token))


def test_arguments_of_the_wrong_shape_are_refused(monkeypatch):
    case = smallest(NORM)
    specialization = NORM.specialize_case(case)
    module = checking_arguments.reference_module(specialization)
    monkeypatch.setattr(module, "random_arguments", lambda *_: {"x": torch.zeros(2, 2), "eps": 1e-5})

    with pytest.raises(SpecError, match="drawn for x"):
        draw_arguments(specialization, case.axes, torch.Generator())
