"""Random weights, inputs and KV caches for a plan, on any device: what a comparison or a benchmark binds.

Weights keep activations near 1, so that a step of many layers stays in the range that kernels are checked in. NVFP4
codes and scales are random in the kernels' own order: every order of random codes is as good.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Generator, Tensor

from jitspark.plans.plan import Buffer, Kind, Launch, Plan, TensorArgument
from jitspark.plans.reference_executor import argument_names
from kernel_specs.primitives.head_rows_reference import rope_table

BLOCK_SIZE = 16
CODE_SIZE = 2.93  # the size (root mean square) of a random E2M1 code
SCALES = (0x30, 0x38)  # E4M3 bytes from 0.5 to below 1
SCALE_SIZE = 0.73
BIAS_SIZE = 0.02  # of the router's, beside scores from 0 to 1: its choices stay those of the logits
INPUT_SCALE, HIDDEN_SCALE = 100.0, 200.0  # the global scales of the experts' input and of what is between their GEMMs

Tensors = dict[str, Tensor]


@dataclass(frozen=True, slots=True)
class Use:
    """The first launch that has a buffer as its argument, and what it calls it."""

    launch: Launch
    argument: str


def first_uses(plan: Plan) -> Mapping[str, Use]:
    found: dict[str, Use] = {}
    for launch in plan.launches:
        for argument, name in zip(launch.arguments, argument_names(launch), strict=True):
            if isinstance(argument, TensorArgument):
                found.setdefault(argument.buffer, Use(launch, name))
    return found


def random_weights(plan: Plan, generator: Generator, max_positions: int = 4096) -> Tensors:
    """A tensor for every weight of the plan, on the generator's device."""
    uses, buffers = first_uses(plan), plan.buffer_named()
    made = {}
    for buffer in buffers.values():
        if buffer.kind == Kind.WEIGHT:
            shape = tuple(max_positions if isinstance(size, str) else size for size in buffer.shape)
            use = uses[buffer.name]
            made[buffer.name] = _weight(buffer, use, shape, _code_columns(buffers, use.launch), generator)
    return made


def _code_columns(buffers: Mapping[str, Buffer], launch: Launch) -> int:
    """How many codes a row of the launch's NVFP4 operand has; 0 where it has none."""
    names = argument_names(launch)
    codes = launch.arguments[names.index("codes")] if "codes" in names else None
    return 2 * int(buffers[codes.buffer].shape[-1]) if isinstance(codes, TensorArgument) else 0


def _weight(buffer: Buffer, use: Use, shape: tuple[int, ...], columns: int, generator: Generator) -> Tensor:
    device = generator.device
    makers: Mapping[tuple[str, str], Callable[[], Tensor]] = {
        ("rmsnorm_nvfp4_quantize", "global_scale"): lambda: torch.full(shape, INPUT_SCALE, device=device),
        ("allgather_rmsnorm_nvfp4_quantize_routing", "global_scale"): lambda: torch.full(
            shape, INPUT_SCALE, device=device
        ),
        ("nvfp4_grouped_gemm_swiglu", "global_scale"): lambda: torch.full(shape, HIDDEN_SCALE, device=device),
        ("nvfp4_grouped_gemm_swiglu", "gate_up_scales"): lambda: _near(INPUT_SCALE, columns, shape, generator),
        ("nvfp4_grouped_gemm_partial", "down_scales"): lambda: _near(HIDDEN_SCALE, columns, shape, generator),
    }
    own = makers.get((use.launch.operation, use.argument))
    if own is not None:
        return own()
    if use.argument == "cos_sin":
        return rope_table(shape[0], device)
    if buffer.dtype == "uint8":
        low, high = SCALES if use.argument == "weight_scales" else (0, 256)
        return torch.randint(low, high, shape, dtype=torch.uint8, generator=generator, device=device)
    if use.argument in ("alpha", "beta"):
        return 0.5 + 0.4 * torch.rand(shape, generator=generator, device=device)
    size = BIAS_SIZE if use.argument == "bias" else 0.2 if len(shape) == 1 else shape[-1] ** -0.5
    return _normal(buffer, shape, size, generator)


def _near(global_scale: float, columns: int, shape: tuple[int, ...], generator: Generator) -> Tensor:
    """What turns sums of `columns` products of codes and scales into numbers of size 1, more or less."""
    value = 1.0 / (global_scale * CODE_SIZE * SCALE_SIZE * math.sqrt(columns))
    return value * (0.8 + 0.4 * torch.rand(shape, generator=generator, device=generator.device))


def _normal(buffer: Buffer, shape: tuple[int, ...], size: float, generator: Generator) -> Tensor:
    made = torch.empty(shape, dtype=getattr(torch, buffer.dtype), device=generator.device)
    return made.normal_(generator=generator).mul_(size)


@dataclass(frozen=True, slots=True)
class Step:
    """What a decode step is bound to, besides weights: by buffer name."""

    inputs: Tensors
    kv_caches: Tensors


def random_step(plan: Plan, seq_lens: Sequence[int], generator: Generator) -> Step:
    """A step of requests of these lengths, its own rows included; 0 is a padded request.

    Each layer has a cache of its own, with as many blocks as its window needs, in random order. Block 0 is nobody's,
    holds NaN, and stands in the block table wherever no query looks.
    """
    rows = plan.query_length
    assert len(seq_lens) * rows == plan.rows, seq_lens
    uses = first_uses(plan)
    lengths = torch.tensor(seq_lens, device=generator.device)
    positions = (lengths[:, None] - rows + torch.arange(rows, device=generator.device)).flatten()
    padding = (lengths == 0).repeat_interleave(rows)
    shared = {
        "positions": positions.masked_fill(padding, 0),
        "is_padding": padding.to(torch.uint8),
        "seq_lens": lengths.int(),
    }
    inputs: Tensors = {}
    caches: Tensors = {}
    for name, window in _windows(plan).items():
        layer = _Layer.draw(plan.buffer_named()[name], seq_lens, rows, window, generator)
        caches[name] = layer.cache
        prefix = name.removesuffix("kv_cache")
        inputs[f"{prefix}block_table"] = layer.block_table
        inputs[f"{prefix}slot_mapping"] = layer.slots(positions, rows).masked_fill(padding, -1)
    for buffer in plan.buffers:
        if buffer.kind == Kind.INPUT and buffer.name not in inputs:
            known = shared.get(uses[buffer.name].argument)
            shape = tuple(int(size) for size in buffer.shape)
            inputs[buffer.name] = _normal(buffer, shape, 1.0, generator) if known is None else known
    return Step({name: tensor for name, tensor in inputs.items() if name in plan.buffer_named()}, caches)


def _windows(plan: Plan) -> dict[str, int]:
    """The sliding window of each KV cache; 0 where every key is seen."""
    found: dict[str, int] = {}
    for launch in plan.launches:
        if launch.operation == "paged_gqa_verify_attention":
            names = argument_names(launch)
            cache = launch.arguments[names.index("kv_cache")]
            assert isinstance(cache, TensorArgument)
            found[cache.buffer] = int(launch.statics["sliding_window"])
    return found


@dataclass(frozen=True, slots=True)
class _Layer:
    """One layer's cache [blocks, KV heads, 16, 128] and block table [requests, columns]."""

    cache: Tensor
    block_table: Tensor

    @staticmethod
    def draw(buffer: Buffer, seq_lens: Sequence[int], rows: int, window: int, generator: Generator) -> "_Layer":
        device = generator.device
        columns = max(1, -(-max(seq_lens) // BLOCK_SIZE))
        table = torch.zeros((len(seq_lens), columns), dtype=torch.int32, device=device)
        spans = [(_first_block(length, rows, window), -(-length // BLOCK_SIZE)) for length in seq_lens]
        total = sum(end - first for first, end in spans)
        order = 1 + torch.randperm(total, generator=generator, device=device).int()
        for request, (first, end) in enumerate(spans):
            table[request, first:end], order = order[: end - first], order[end - first :]
        _, heads, block_size, width = buffer.shape
        shape = (1 + total, int(heads), int(block_size), int(width))
        cache = torch.empty(shape, dtype=torch.bfloat16, device=device).normal_(generator=generator)
        cache[0] = torch.nan
        return _Layer(cache, table)

    def slots(self, positions: Tensor, rows: int) -> Tensor:
        kept = positions.clamp(min=0)
        request = torch.arange(len(positions), device=positions.device) // rows
        return self.block_table[request, kept // BLOCK_SIZE].long() * BLOCK_SIZE + kept % BLOCK_SIZE


def _first_block(seq_len: int, rows: int, window: int) -> int:
    return max(seq_len - rows - window + 1, 0) // BLOCK_SIZE if window and seq_len else 0
