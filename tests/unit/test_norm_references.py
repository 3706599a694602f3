"""The norm kernels' references against independent torch expressions, on every case of every spec."""

from dataclasses import dataclass

import pytest

torch = pytest.importorskip("torch")

from torch.nn.functional import rms_norm  # noqa: E402

from jitspark.registry import load_spec  # noqa: E402
from jitspark.spec import VAR, Case, KernelSpec, Specialization, Tensor  # noqa: E402
from kernel_specs.gated_residual_rmsnorm import reference as gated_residual  # noqa: E402
from kernel_specs.primitives import head_rows_reference as head_rows  # noqa: E402
from kernel_specs.primitives.row_split import TOKEN_CLASSES, row_split, thread_vectors  # noqa: E402
from kernel_specs.qk_rmsnorm_rope_paged_kv_append import reference as qk_append  # noqa: E402
from kernel_specs.rmsnorm import reference as plain  # noqa: E402

POISON = float("nan")


@dataclass(frozen=True, slots=True)
class Call:
    """The arguments of one call, by name, before and after the reference ran."""

    before: dict[str, object]
    after: dict[str, object]


def call_reference(module, case: Case, specialization: Specialization, seed: int) -> Call:
    generator = torch.Generator().manual_seed(seed)
    given = module.random_arguments(specialization, case.axes, generator)
    before = {
        arg.name: given[arg.name] if arg.name in given else poisoned(arg, case, specialization)
        for arg in specialization.args
    }
    after = {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in before.items()}
    function = getattr(module, specialization.name)
    function(*after.values(), **specialization.statics)
    return Call(before, after)


def poisoned(arg: Tensor, case: Case, specialization: Specialization):
    assert arg.role == "out", f"{arg.name} is an input that random_arguments leaves out"
    shape = tuple(case.axes.get(axis, axis) for axis in arg.axes)
    return torch.full(shape, POISON, dtype=getattr(torch, specialization.dtype_of(arg)))


def cases(name: str) -> list:
    spec: KernelSpec = load_spec(name)
    return [
        pytest.param(case, spec.specialize_case(case), id=f"{i}-{case.note[:20]}") for i, case in enumerate(spec.cases)
    ]


def normed(x, weight, eps):
    return rms_norm(x, x.shape[-1:], weight=weight, eps=eps)


def assert_one_rounding(got, exact):
    """`got` is `exact` rounded once to got's dtype, up to float64 noise at ties."""
    torch.testing.assert_close(got.double(), exact, rtol=torch.finfo(got.dtype).eps / 2 * (1 + 1e-6), atol=1e-38)


@pytest.mark.parametrize(("case", "specialization"), cases("rmsnorm"))
def test_rmsnorm_is_torchs(case, specialization):
    call = call_reference(plain, case, specialization, seed=1)
    x = call.before["x"]
    if specialization.statics["round_input"]:
        x = x.to(torch.bfloat16)
    weight = call.before["weight"].double() + specialization.statics["gain_center"] if "weight" in call.before else None

    assert_one_rounding(call.after["out"], normed(x.double(), weight, call.before["eps"]))


@pytest.mark.parametrize(("case", "specialization"), cases("gated_residual_rmsnorm"))
def test_gated_residual_is_norm_blend_norm(case, specialization):
    call = call_reference(gated_residual, case, specialization, seed=2)
    before, after, draft = call.before, call.after, specialization.statics["mode"] == "draft"
    branch = before["branch"].double()
    y = normed(
        branch * (1 + before["post_weight"].double()) if "post_weight" in before else branch, None, before["post_eps"]
    )
    y = y.to(torch.bfloat16).double() if draft else y
    stream = torch.addcmul(before["alpha"].double() * before["stream"].double(), before["beta"].double(), y)
    x = stream.to(torch.bfloat16).double() if draft else stream
    exact = normed(x, before["weight"].double() + specialization.statics["gain_center"], before["eps"])

    assert_one_rounding(after["stream"], stream)
    assert_one_rounding(after["activation"], exact)
    for name, want in (("tap", stream), ("router_input", exact)):
        if name in after:
            assert after[name].dtype == torch.float32
            assert_one_rounding(after[name], want)


@pytest.mark.parametrize(("case", "specialization"), cases("qk_rmsnorm_rope_paged_kv_append"))
def test_qk_append_rotates_complex_numbers_and_fills_slots(case, specialization):
    call = call_reference(qk_append, case, specialization, seed=3)
    before, after = call.before, call.after
    q, kv = case.axes["num_heads"], case.axes["num_kv_heads"]
    split = [q, kv, kv, q]
    queries, keys, values, gate = before["qkvg"].view(case.axes["num_tokens"], -1, 64).split(split, dim=1)
    got_queries, got_keys, got_values, got_gate = (
        after["qkvg"].view(case.axes["num_tokens"], -1, 64).split(split, dim=1)
    )

    for got, heads in ((got_queries, queries), (got_keys, keys)):
        assert_one_rounding(got, turned(normed(heads.double(), None, before["eps"]), before))
    assert torch.equal(got_values, values)
    assert torch.equal(got_gate, gate)
    wanted_cache = before["kv_cache"].clone()
    for token, slot in enumerate(before["slot_mapping"].tolist()):
        if slot >= 0:
            wanted_cache[slot // 16, :, slot % 16, :64] = got_keys[token]
            wanted_cache[slot // 16, :, slot % 16, 64:] = values[token]
    assert torch.equal(after["kv_cache"], wanted_cache)
    assert after["kv_cache"].stride() == before["kv_cache"].stride()


def turned(heads, arguments):
    if "positions" not in arguments:
        return heads
    rows = arguments["cos_sin"].double()[arguments["positions"]][:, None]
    turn = torch.complex(rows[..., :32], rows[..., 32:])
    pairs = torch.view_as_complex(heads.unflatten(-1, (32, 2)).contiguous())
    return torch.view_as_real(pairs * turn).flatten(-2)


def test_rope_table_is_the_textbooks():
    table = head_rows.rope_table(1000, "cpu").double()
    angle = 999 * 500000.0 ** (-2 * 5 / 64)

    assert torch.equal(table[0], torch.tensor([1.0] * 32 + [0.0] * 32, dtype=torch.float64))
    wanted = torch.tensor([angle, angle - torch.pi / 2], dtype=torch.float64).cos()
    torch.testing.assert_close(table[999, [5, 37]], wanted, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("name", ["rmsnorm", "gated_residual_rmsnorm", "qk_rmsnorm_rope_paged_kv_append"])
def test_random_arguments_are_fresh_and_reach_the_adversarial_corners(name):
    module = {"rmsnorm": plain, "gated_residual_rmsnorm": gated_residual}.get(name, qk_append)
    spec = load_spec(name)
    case = max(spec.cases, key=lambda each: each.axes["num_tokens"])
    generator = torch.Generator().manual_seed(4)
    first, second = (module.random_arguments(spec.specialize_case(case), case.axes, generator) for _ in range(2))

    for arg in first:
        fixed = arg == "cos_sin" or not isinstance(first[arg], torch.Tensor)
        assert fixed or not torch.equal(first[arg], second[arg]), f"{arg} is the same on every call"
    rows = first[next(iter(first))]
    assert (rows == 0).all(dim=-1).any(), "no row of zeros"
    assert all(spec.axes[axis] is VAR or axis in spec.specialize_case(case).axes for axis in case.axes)
    if name == "qk_rmsnorm_rope_paged_kv_append":
        assert (first["slot_mapping"] < 0).any() and (first["slot_mapping"] >= 0).any()
        layouts = {
            module.random_arguments(spec.specialize_case(c), c.axes, generator)["kv_cache"].is_contiguous()
            for c in spec.cases[:2]
        }
        assert layouts == {True, False}


@pytest.mark.parametrize("hidden_size", [256, 512, 4096, 8192])
@pytest.mark.parametrize("num_tokens", [1, 8, 9, 64])
@pytest.mark.parametrize("width", [4, 8])
def test_threads_of_a_row_own_each_channel_once(hidden_size, num_tokens, width):
    split = row_split(hidden_size, num_tokens)
    owned = [
        vector * width + offset
        for part in range(split["cluster"])
        for thread in range(split["threads"])
        for vector in thread_vectors(part, thread, split["threads"], width)
        for offset in range(width)
    ]

    assert sorted(owned) == list(range(hidden_size))


def test_every_number_of_tokens_is_in_a_class_that_is_compiled():
    for hidden_size in (256, 512, 4096, 8192):
        compiled = [row_split(hidden_size, num_tokens) for num_tokens in TOKEN_CLASSES]
        assert all(row_split(hidden_size, num_tokens) in compiled for num_tokens in range(1, 65))
