"""vLLM's own routed-experts layers on a CPU, in the place of those of `expert_ranks`: its classes, loaders and methods.

What needs a GPU is stood in for: which backend serves NVFP4 (the one of Blackwell), and its conversion of the weights,
which here only spoils them.
"""

import contextlib
from types import SimpleNamespace

import expert_checkpoint
import rank_processes
import torch
from vllm.config import DeviceConfig, VllmConfig, set_current_vllm_config
from vllm.distributed import get_tp_group
from vllm.distributed.parallel_state import init_distributed_environment, initialize_model_parallel
from vllm.model_executor.layers.fused_moe import unquantized_fused_moe_method
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.config import FusedMoEParallelConfig, RoutingMethodType
from vllm.model_executor.layers.fused_moe.expert_map_manager import ExpertMapManager
from vllm.model_executor.layers.fused_moe.oracle.nvfp4 import NvFp4MoeBackend
from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend
from vllm.model_executor.layers.quantization import modelopt
from vllm.model_executor.layers.quantization.modelopt import ModelOptNvFp4Config
from vllm.models.muse_spark.nvidia import muse_moe_runner
from vllm.models.muse_spark.nvidia.muse_moe_runner import MuseSparkMoEConfig, MuseSparkRoutedExperts

from jitspark.runtime.ranks import RankGroup

_ENTERED = contextlib.ExitStack()  # for the rest of the process


def stand_in():
    """Patches vLLM for this process, for good."""
    modelopt.select_nvfp4_moe_backend = lambda **_: (NvFp4MoeBackend.FLASHINFER_TRTLLM, None)
    unquantized_fused_moe_method.select_unquantized_moe_backend = lambda **_: (
        UnquantizedMoeBackend.FLASHINFER_TRTLLM,
        None,
    )
    muse_moe_runner.convert_to_nvfp4_moe_kernel_format = _convert
    muse_moe_runner.make_nvfp4_moe_kernel = lambda **_: SimpleNamespace(
        fused_experts=SimpleNamespace(process_weights_after_loading=lambda _: None, consumes_expert_mask=False)
    )
    muse_moe_runner.MuseSparkUnquantizedFusedMoE._setup_kernel = _spoil_unquantized
    muse_moe_runner._attach_post_expert_finalize = lambda _: None


def _convert(*, w13, w13_scale, a13_scale, w2, w2_scale, a2_scale, **_):
    spoilt = [torch.zeros_like(tensor.data) for tensor in (w13, w13_scale, w2, w2_scale)]
    return spoilt[0], spoilt[1], None, a13_scale.max().view(1), spoilt[2], spoilt[3], None, a2_scale.max().view(1)


def _spoil_unquantized(_, layer, w13, w2):  # noqa: ARG001 - as it is called
    for tensor in (w13, w2):
        tensor.data.zero_()


def parallel_config(rank, ranks, sharded):
    ep = sharded == "ep" and ranks > 1
    return FusedMoEParallelConfig(
        tp_size=1 if ep else ranks,
        tp_rank=0 if ep else rank,
        ep_size=ranks if ep else 1,
        ep_rank=rank if ep else 0,
        use_ep=ep,
        dp_size=1,
        dp_rank=0,
        pcp_size=1,
        pcp_rank=0,
        sp_size=1,
        all2all_backend="allgather_reducescatter",
        enable_eplb=False,
    )


def empty_layer(experts, index, *, rank=0, ranks=1, sharded="ep", fault=None):
    """As `expert_ranks.empty_layer`."""
    assert fault is None
    parallel, count = parallel_config(rank, ranks, sharded), experts.num_local_experts
    config = MuseSparkMoEConfig(
        num_experts=count,
        experts_per_token=8,
        hidden_dim=experts.moe_hidden_size,
        intermediate_size=experts.moe_intermediate_size,
        num_local_experts=count // parallel.ep_size,
        num_logical_experts=count,
        activation=MoEActivation.SILU,
        device="cpu",
        routing_method=RoutingMethodType.MiniMax2,
        moe_parallel_config=parallel,
        in_dtype=torch.bfloat16,
    )
    placement = ExpertMapManager(
        max_num_batched_tokens=64,
        top_k=8,
        global_num_experts=count,
        num_redundant_experts=0,
        num_expert_group=None,
        moe_parallel_config=parallel,
        placement_strategy="linear",
        enable_eplb=False,
    )
    quantization = ModelOptNvFp4Config(is_checkpoint_nvfp4_serialized=True) if experts.is_nvfp4(index) else None
    return MuseSparkRoutedExperts(
        f"model.layers.{index}.feed_forward.experts", torch.bfloat16, config, quantization, placement
    )


def load(layer, path, index, lacks=None):
    """Through vLLM's own loader, which picks this rank's part of each tensor of the file."""
    tensors = {name: tensor for name, tensor in expert_checkpoint.read(path, index).items() if name != lacks}
    assert set(layer.load_weights(tensors.items())) == set(tensors)


def join(task, rank):
    """The group that vLLM makes of its ranks, over gloo."""
    ranks = task["ranks"]
    stand_in()
    _ENTERED.enter_context(set_current_vllm_config(VllmConfig(device_config=DeviceConfig("cpu"))))
    init_distributed_environment(ranks, rank, f"file://{task['folder']}/meeting", rank, "gloo")
    initialize_model_parallel(ranks)
    return RankGroup.of_coordinator(get_tp_group(), patience=rank_processes.PATIENCE)
