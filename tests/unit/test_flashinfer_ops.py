"""FlashInfer's attention as a plan's operations: what is called fits its signatures, and what is absent is said.

FlashInfer itself is not installed here: modules of its names stand in its place, with the arguments that its
0.7.2.post1 declares, and record what they are given.
"""

import ast
import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

torch = pytest.importorskip("torch")

from jitspark.errors import UsageError  # noqa: E402
from jitspark.geometry import deployment  # noqa: E402
from jitspark.plans.backbone import decode_plan  # noqa: E402
from jitspark.plans.draft import draft_plan  # noqa: E402
from jitspark.runtime import flashinfer_ops  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]

# The parameters that 0.7.2.post1 declares: of what is called, and of what is nearest to the launches it is refused for.
RECORDED = {
    ("flashinfer.decode", "trtllm_batch_decode_with_kv_cache"): """
        query kv_cache workspace_buffer block_tables seq_lens max_seq_len bmm1_scale bmm2_scale window_left out
        out_dtype o_sf_scale o_sf_vec_size sinks kv_layout enable_pdl backend q_len_per_req o_scale mask max_q_len
        cum_seq_lens_q skip_softmax_threshold_scale_factor kv_cache_sf uses_shared_paged_kv_idx lse return_lse
        bmm1_scale_log2 multi_ctas_kv_counter_buffer enable_block_sparse_attention cp_world cp_rank
        causal_seqlens_kv_global bf16q_fp8kv_transform_mode request_order request_order_plan""",
    ("flashinfer.norm", "rmsnorm_sigmoid_gate"): "input gate eps enable_pdl",
    ("flashinfer.norm", "gated_residual_next_rmsnorm"): """
        branch residual next_weight alpha beta post_eps next_eps next_gain_center residual_out ffn_input post_weight
        post_gain_center enable_pdl""",
    ("flashinfer.comm.allreduce", "allreduce_fusion"): """
        input workspace pattern launch_with_pdl trigger_completion_at_end output residual_out norm_out quant_out
        scale_out residual_in rms_gamma rms_eps scale_factor layout_code use_oneshot fp32_acc
        moe_reduction_device_num_experts moe_reduction_scale_input moe_reduction_active_experts_token_input
        moe_reduction_token_input expanded_idx_to_permuted_idx expert_scale_factor shared_expert_output
        block_quant_group_size weight_bias moe_finalize_backend""",
    ("flashinfer.comm.mnnvl_cutedsl_ag", "all_gather_gated_residual_next_rmsnorm"): """
        branch_shard residual alpha beta next_weight workspace post_eps next_eps next_gain_center post_weight
        post_gain_center""",
    ("flashinfer.comm.mnnvl_cutedsl_ag", "all_gather_rmsnorm_fp4_quantize"): """
        shard weight global_scale workspace eps gain_center""",
    ("flashinfer.comm.tp_moe_finalize_rmsnorm", "tp_moe_finalize_rmsnorm"): """
        gemm2_permuted expert_weights expanded_idx_to_permuted_idx norm_weight output eps gain_center
        weight_before_norm""",
    ("flashinfer.comm.mnnvl_cutedsl_moe_finalize", "moe_finalize_rmsnorm_allreduce"): """
        routed_rows route_weights permuted_idx norm_weight output workspace eps gain_center weight_before_norm""",
}
COLLECTIVES = [name for name in RECORDED if name[0].startswith("flashinfer.comm.")]
ABSENT = flashinfer_ops.missing()


@pytest.fixture
def calls(monkeypatch):
    """What FlashInfer's functions are called with."""
    found = []

    def trtllm_batch_decode_with_kv_cache(  # noqa: PLR0917 - FlashInfer's signature
        query, kv_cache, workspace_buffer, block_tables, seq_lens, max_seq_len, bmm1_scale=1.0, bmm2_scale=1.0,
        window_left=-1, out=None, kv_layout="HND", enable_pdl=None, q_len_per_req=1,
    ):  # fmt: skip
        found.append(("decode", locals().copy()))

    def rmsnorm_sigmoid_gate(input, gate, eps=1e-5, *, enable_pdl=True):  # noqa: A002 - FlashInfer's name
        found.append(("gate", locals().copy()))

    for name, functions in {
        "flashinfer": (),
        "flashinfer.decode": (trtllm_batch_decode_with_kv_cache,),
        "flashinfer.norm": (rmsnorm_sigmoid_gate,),
    }.items():
        module = ModuleType(name)
        for function in functions:
            setattr(module, function.__name__, function)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(flashinfer_ops, "missing", lambda: None)
    return found


@pytest.mark.parametrize("window", [0, 64])
def test_attention_gets_queries_cache_and_window_and_is_gated_in_place(calls, window):
    operations = flashinfer_ops.flashinfer_operations("cpu")
    qkvg = torch.zeros(16, 1280, dtype=torch.bfloat16)
    cache, table = torch.zeros(9, 2, 16, 128, dtype=torch.bfloat16), torch.zeros(2, 4, dtype=torch.int32)
    lengths, partials = torch.tensor([40, 9], dtype=torch.int32), [torch.zeros(1)] * 3
    out = torch.zeros(16, 512, dtype=torch.bfloat16)

    operations["flashinfer", "paged_gqa_verify_attention"](
        qkvg, cache, table, lengths, *partials, 0.5, sliding_window=window, tile_blocks=4
    )
    operations["flashinfer", "splitkv_combine_rmsnorm_sigmoid_gate"](*partials, qkvg, out, 1e-5, threads=128)

    (_, decode), (_, gate) = calls
    assert decode["query"].shape == (16, 8, 64)
    assert [each.shape for each in decode["kv_cache"]] == [(9, 2, 16, 64)] * 2
    assert (decode["window_left"], decode["q_len_per_req"], decode["max_seq_len"]) == (window - 1, 8, 64)
    assert decode["bmm1_scale"] == 0.5
    assert gate["input"].data_ptr() == decode["out"].data_ptr() == out.data_ptr()
    assert gate["gate"].data_ptr() == qkvg[:, -512:].data_ptr()


def test_every_attention_launch_of_a_plan_has_an_operation(calls):
    plan = decode_plan(deployment("tiny_swa", 1), 8, "sm_100a", providers={"attention": "flashinfer"})
    operations = flashinfer_ops.flashinfer_operations("cpu")

    assert calls == []
    asked = {each.operation for each in plan.launches if each.provider == "flashinfer"}
    assert {("flashinfer", name) for name in asked} == operations.keys()


@pytest.mark.parametrize("name", flashinfer_ops.CALLED)
def test_what_is_called_takes_the_arguments_by_the_recorded_signatures(name):
    assert set(flashinfer_ops.CALLED[name]) <= set(RECORDED[name].split())


@pytest.mark.skipif(ABSENT is not None, reason=f"FlashInfer {flashinfer_ops.VERSION}: {ABSENT}")
def test_the_recorded_signatures_are_the_installed_ones():
    assert {name: declared(*name) for name in RECORDED} == {name: RECORDED[name].split() for name in RECORDED}


def declared(module, name):
    """The parameters in the installed source, which is not imported: that wants a GPU's libraries."""
    (package,) = importlib.util.find_spec("flashinfer").submodule_search_locations
    path = Path(package).joinpath(*module.split(".")[1:])
    source = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    tree = ast.parse(source.read_text(encoding="utf-8"))
    (found,) = (each.args for each in tree.body if isinstance(each, ast.FunctionDef) and each.name == name)
    return [each.arg for each in (*found.posonlyargs, *found.args, *found.kwonlyargs)]


def test_its_all_reduce_has_no_gates_and_no_collective_a_limit_for_a_silent_rank():
    taken = {name: RECORDED[name].split() for name in COLLECTIVES}

    assert not {"alpha", "beta", "gate"} & set(taken["flashinfer.comm.allreduce", "allreduce_fusion"])
    assert not [name for name, arguments in taken.items() if any("timeout" in each for each in arguments)]


def test_the_rows_that_a_plan_sums_over_ranks_are_fp32_which_its_finalizes_do_not_take():
    plan = decode_plan(deployment("muse_spark_open", 8), 8, "sm_100a")

    assert {each.dtype for each in plan.buffers if each.name == "expert_rows"} == {"float32"}


def test_the_documents_say_of_every_exchange_of_a_step_why_it_is_refused():
    made = deployment("muse_spark_open", 8)
    plans = [decode_plan(made, 8, "sm_100a"), draft_plan(made, 7, "sm_100a")]
    exchanges = {each.operation for plan in plans for each in plan.launches if each.part == "all_reduce"}
    text = (ROOT / "docs/vllm.md").read_text(encoding="utf-8")

    assert set(re.findall(r"^\| `flashinfer\.[\w.]+` \| `(\w+)` \|", text, re.MULTILINE)) == exchanges


def test_a_function_that_lost_an_argument_is_named(calls, monkeypatch):
    monkeypatch.setattr(sys.modules["flashinfer.norm"], "rmsnorm_sigmoid_gate", lambda **_: None)

    with pytest.raises(UsageError, match=r"flashinfer.norm.rmsnorm_sigmoid_gate without input, gate, eps"):
        flashinfer_ops.flashinfer_operations("cpu")
    assert calls == []


def test_a_machine_without_it_says_what_is_needed():
    with pytest.raises(UsageError, match=r"flashinfer-python 0\.7\.2\.post1"):
        flashinfer_ops.flashinfer_operations("cpu")
