"""The references of the draft's context chain against independent torch expressions, on every case of every spec."""

import importlib
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from torch.nn.functional import linear, rms_norm  # noqa: E402

from jitspark.geometry import deployment, geometry_names, load_geometry  # noqa: E402
from jitspark.registry import load_spec  # noqa: E402
from jitspark.spec import Tensor  # noqa: E402
from kernel_specs.grouped_skinny_gemm_bf16 import spec as gemm  # noqa: E402

CHAIN = ("context_rmsnorm", "grouped_skinny_gemm_bf16", "context_kv_precompute_append")
DEPLOYMENTS = [(name, tp) for name in geometry_names() for tp in load_geometry(name).tp_sizes]


def called(name, case, seed):
    """The arguments of one call of the reference by name, `before` and `after` it ran."""
    specialization = load_spec(name).specialize_case(case)
    module = importlib.import_module(f"kernel_specs.{name}.reference")
    generator = torch.Generator().manual_seed(seed)
    given = module.random_arguments(specialization, case.axes, generator)
    for arg in specialization.args:
        if isinstance(arg, Tensor) and arg.name not in given:
            shape = [case.axes.get(axis, axis) for axis in arg.axes]
            given[arg.name] = torch.randn(shape, generator=generator).bfloat16()
    before = {arg.name: given[arg.name] for arg in specialization.args}
    after = {key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in before.items()}
    getattr(module, name)(*after.values(), **specialization.statics)
    return SimpleNamespace(before=before, after=after)


def cases(name):
    return [pytest.param(case, id=f"{i}-{case.note[:20]}") for i, case in enumerate(load_spec(name).cases)]


@pytest.mark.parametrize("case", cases("context_rmsnorm"))
def test_each_layer_s_norm_is_of_the_rounded_hidden_norm(case):
    call = called("context_rmsnorm", case, seed=1)
    center, eps = case.statics["gain_center"], call.before["eps"]
    hidden = rms_norm(call.before["context"].double(), (case.axes["hidden_size"],), eps=eps)
    x = (hidden * (call.before["weight"].double() + center)).bfloat16()

    for layer, weight in enumerate(call.before["layer_weights"]):
        exact = rms_norm(x.double(), (case.axes["hidden_size"],), weight=weight.double() + center, eps=eps)
        torch.testing.assert_close(call.after["out"][layer].double(), exact, rtol=2**-8 * (1 + 1e-6), atol=1e-38)


@pytest.mark.parametrize("case", cases("grouped_skinny_gemm_bf16"))
def test_each_group_is_a_linear_layer_of_its_own_rows(case):
    call = called("grouped_skinny_gemm_bf16", case, seed=2)
    groups = zip(call.before["activation"].double(), call.before["weight"].double(), strict=True)
    exact = torch.cat([linear(activation, weight) for activation, weight in groups], dim=-1)

    torch.testing.assert_close(call.after["out"].double(), exact, rtol=2**-8 * (1 + 1e-6), atol=1e-38)


@pytest.mark.parametrize("case", cases("context_kv_precompute_append"))
def test_keys_are_normed_rounded_turned_and_stored_by_layer(case):
    call = called("context_kv_precompute_append", case, seed=3)
    heads = call.before["kv"].view(case.axes["num_tokens"], case.statics["num_layers"], 2, -1, 64)
    keys = rms_norm(heads[:, :, 0].double(), (64,), eps=call.before["eps"]).bfloat16()
    keys = turned(keys, call.before) if case.statics["rope"] else keys

    for layer in range(case.statics["num_layers"]):
        wanted = call.before[f"kv_cache_{layer}"].clone()
        for token, slot in enumerate(call.before[f"slot_mapping_{layer}"].tolist()):
            if slot >= 0:
                wanted[slot // 16, :, slot % 16] = torch.cat((keys[token, layer], heads[token, layer, 1]), dim=-1)
        assert torch.equal(call.after[f"kv_cache_{layer}"], wanted), layer


def turned(keys, arguments):
    rows = arguments["cos_sin"].double()[arguments["positions"]][:, None, None]
    pairs = torch.view_as_complex(keys.double().unflatten(-1, (32, 2)).contiguous())
    return torch.view_as_real(pairs * torch.complex(rows[..., :32], rows[..., 32:])).flatten(-2).bfloat16()


def test_layers_get_other_slots_some_of_which_are_nobody_s():
    case = load_spec("context_kv_precompute_append").cases[-1]
    drawn = called("context_kv_precompute_append", case, seed=4).before

    assert (drawn["slot_mapping_0"] < 0).any() and (drawn["slot_mapping_0"] >= 0).any()
    assert not torch.equal(drawn["slot_mapping_0"] < 0, drawn["slot_mapping_1"] < 0)


@pytest.mark.parametrize(("name", "tp"), DEPLOYMENTS)
def test_every_deployment_s_context_rows_are_served(name, tp):
    asked = deployment(name, tp)
    made = {
        kernel: list(importlib.import_module(f"kernel_specs.{kernel}.spec").specializations(asked)) for kernel in CHAIN
    }

    assert all(made.values())
    for rows in asked.draft_context_rows:
        assert gemm.serving(gemm.context_kv(asked), rows) in made["grouped_skinny_gemm_bf16"]
        tile = gemm.context_kv(asked).tiling(rows)
        assert tile.row_tiles * tile.tile_rows == tile.weight_rows
        assert tile.shared_bytes <= 227 * 1024
