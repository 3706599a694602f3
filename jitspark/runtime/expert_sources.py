"""What vLLM's routed-experts layer holds before it reorders its weights, read and checked.

Refuses, with a WeightsError that names the layer, whatever is not known to be in the checkpoint's order: another
quantization, another placement of experts, shapes that were padded, and scales that no checkpoint gave. vLLM leaves
those of a checkpoint without them as uninitialised memory: `forget_scales` makes them NaN before anything is loaded.
Reads vLLM's layer by its attributes and imports nothing of it.
"""

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from jitspark.errors import WeightsError
from jitspark.runtime.expert_forms import BFLOAT16, NVFP4, W2_SCALES, W13_SCALES, Form, as_bytes, describe

# vLLM's methods that keep the checkpoint's order until they post-process, by class name
METHODS: Mapping[str, str] = {
    "MuseSparkModelOptNvFp4FusedMoE": NVFP4,
    "MuseSparkUnquantizedFusedMoE": BFLOAT16,
}
# what vLLM asks whether weights come post-processed: a module and its function
PROCESSED_FLAG = ("vllm.model_executor.utils", "is_weights_pre_processed")
WEIGHT_SCALES = ("w13_weight_scale_2", "w2_weight_scale_2")
INPUT_SCALES = ("w13_input_scale", "w2_input_scale")
E4M3_NAN = 0x7F  # and 0xFF
CHECKED_EXPERTS = 8  # at a time, so that checking needs little memory


@dataclass(frozen=True, slots=True)
class Source:
    """A layer's experts in the checkpoint's order, on one rank.

    parts: bytes by parameter, [experts here, axes of the part], views of vLLM's memory. whole: whole experts, of which
    this rank has some; otherwise it has its share of every expert already. scales: [experts here, 3], weight_scale_2 of
    gate, up and down. input_scales: [2], the largest of w13 and of w2. Both FP32, and empty for BF16.
    """

    parts: Mapping[str, Tensor]
    whole: bool
    scales: Tensor
    input_scales: Tensor


def forget_scales(layer: Any) -> None:
    """Make every scale of the layer NaN, so that those which no checkpoint brings are noticed."""
    for name in (*WEIGHT_SCALES, *INPUT_SCALES):
        if isinstance(getattr(layer, name, None), Tensor):
            getattr(layer, name).data.fill_(float("nan"))
    for name in (W13_SCALES, W2_SCALES):
        if isinstance(getattr(layer, name, None), Tensor):
            getattr(layer, name).data.view(torch.uint8).fill_(E4M3_NAN)


def read(where: str, layer: Any, weight_dtype: str, form: Form, rank: int, tp: int) -> Source:
    """The layer's experts as they were loaded. Raises WeightsError for what is not known to be what `form` says."""
    _check_method(where, layer, weight_dtype)
    _check_not_processed(where)
    whole = _check_placement(where, layer, rank, tp)
    experts = form.held["down.weight"].shape[0] // (tp if whole else 1)
    parts = {}
    for part in form.parts:
        tensor = _parameter(where, layer, part.parameter)
        shape = part.shape if whole else part.share(tp)
        _check_tensor(where, part.parameter, tensor, _vllm_shape(experts, shape, part.dtype), part.dtype)
        parts[part.parameter] = as_bytes(tensor, part)
    if weight_dtype == BFLOAT16:
        return Source(parts, whole, torch.empty(experts, 0), torch.empty(0))
    for name in (W13_SCALES, W2_SCALES):
        if any(bool((some & E4M3_NAN == E4M3_NAN).any()) for some in parts[name].split(CHECKED_EXPERTS)):
            raise _missing(where, name)
    return Source(parts, whole, _weight_scales(where, layer, experts), _input_scales(where, layer))


def _check_method(where: str, layer: Any, weight_dtype: str) -> None:
    method = layer.quant_method
    known = [METHODS[cls.__name__] for cls in type(method).__mro__ if cls.__name__ in METHODS]
    if known != [weight_dtype]:
        needed = next(name for name, dtype in METHODS.items() if dtype == weight_dtype)
        raise _unknown(where, f"the method {type(method).__name__}", f"{needed}, as the geometry says {weight_dtype}")


def _check_not_processed(where: str) -> None:
    """VLLM may load what was post-processed before (its weight cache), and then only builds kernels on it."""
    utils = sys.modules.get(PROCESSED_FLAG[0])  # imported wherever vLLM loads weights
    if utils is not None and getattr(utils, PROCESSED_FLAG[1])():
        raise _unknown(where, "weights that were post-processed before they were loaded", "the checkpoint's order")


def _check_placement(where: str, layer: Any, rank: int, tp: int) -> bool:
    """Whether this rank has whole experts. Raises WeightsError for what is neither that nor a share of all."""
    parallel = layer.moe_config.moe_parallel_config
    if parallel.enable_eplb:
        raise _unknown(where, "experts that move between ranks (enable_eplb)", "experts that stay where they are")
    if parallel.use_ep and parallel.ep_size > 1:
        if layer.expert_placement_strategy != "linear":
            raise _unknown(where, f"expert_placement_strategy {layer.expert_placement_strategy!r}", "'linear'")
        found = (parallel.ep_size, parallel.ep_rank)
    else:
        found = (parallel.tp_size, parallel.tp_rank)
    if found != (tp, rank):
        raise _unknown(
            where, f"rank {found[1]} of {found[0]} for the experts", f"rank {rank} of {tp}, as for the layer"
        )
    return bool(parallel.use_ep) or tp == 1


def _vllm_shape(experts: int, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[int, ...]:
    """From bytes by the part's axes to the shape that vLLM's parameter has: w1 and w3 rows in one axis."""
    rows = shape[:-1] if len(shape) == 2 else (shape[0] * shape[1],)
    return (experts, *rows, shape[-1] // dtype.itemsize)


def _parameter(where: str, layer: Any, name: str) -> Tensor:
    found = getattr(layer, name, None)
    if not isinstance(found, Tensor):
        raise _missing(where, name)
    return found.data


def _check_tensor(where: str, name: str, tensor: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    if tuple(tensor.shape) != shape or tensor.dtype != dtype:
        raise _unknown(where, f"{name} {describe(tensor)}", f"{shape} {str(dtype).removeprefix('torch.')}")
    if not tensor.is_contiguous():
        raise _unknown(where, f"{name} with strides {tensor.stride()}", "rows without gaps")


def _weight_scales(where: str, layer: Any, experts: int) -> Tensor:
    scales = []
    for name, shape in zip(WEIGHT_SCALES, ((experts, 2), (experts,)), strict=True):
        tensor = _parameter(where, layer, name)
        _check_tensor(where, name, tensor, shape, torch.float32)
        _check_given(where, name, tensor)
        scales.append(tensor.view(experts, -1))
    return torch.cat(scales, dim=1)


def _input_scales(where: str, layer: Any) -> Tensor:
    """The largest of each, as vLLM collapses them; they are all ranks' experts or this rank's, as the method wants."""
    largest = []
    for name in INPUT_SCALES:
        tensor = _parameter(where, layer, name)
        _check_given(where, name, tensor)
        largest.append(tensor.max().float())
    return torch.stack(largest)


def _check_given(where: str, name: str, scales: Tensor) -> None:
    if not bool(((scales > 0) & scales.isfinite()).all()):
        raise _missing(where, name)


def _missing(where: str, name: str) -> WeightsError:
    return WeightsError(
        where=where,
        found=f"no {name} from the checkpoint, or values that are no scales",
        needed="every scale, positive and finite, of an NVFP4 checkpoint",
        remedy="Look at the checkpoint's index, and make it anew.",
    )


def _unknown(where: str, found: str, needed: str) -> WeightsError:
    return WeightsError(
        where=where, found=found, needed=needed, remedy="Run this deployment with stock vLLM (decode_backend auto)."
    )
