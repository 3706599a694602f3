"""The support check: why a deployment cannot run the specialized decode, read from its config alone.

Every rank has the same config, so only another GPU or environment makes one come to another answer: they compare theirs
when the model is built. What a config cannot show is checked when the plans are bound. vLLM and torch are imported when
a check runs, not before.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from jitspark.errors import UsageError
from jitspark.runtime.text_config import differences

BLACKWELL = 100  # the compute capability family of the deployments that need no opt-in: SM100 and SM103
NUM_SPECULATIVE_TOKENS = 7
BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True)
class Served:
    """What a deployment is compared with.

    text_config: the fields that its text config must hold, with their values.
    tp_sizes: the TP sizes that have kernels.
    targets: the GPU architectures opted in to; empty means SM100/103.
    geometry: the geometry opted in to; None means Muse Spark Open.
    """

    text_config: Mapping[str, Any]
    tp_sizes: tuple[int, ...]
    targets: tuple[str, ...] = ()
    geometry: str | None = None


def reasons(vllm_config: Any, served: Served) -> Iterator[str]:
    """What stands in the way, most basic first; each completes "the specialized decode does not support".

    Lazy: a config is read only as far as its reasons are asked for. Raises UsageError where vLLM is missing.
    """
    vllm = _import_vllm()
    yield from _gpu(vllm, served)
    yield from _text_config(vllm_config.model_config.hf_text_config, served)
    yield from _parallelism(vllm_config.parallel_config, served)
    yield from _engine(vllm_config)
    yield from _graphs(vllm_config.compilation_config, vllm)
    yield from _speculation(vllm_config.speculative_config, vllm_config.model_config, vllm)
    yield from _draft(vllm_config)
    yield from _kv_cache(vllm_config, vllm)
    if vllm.envs.VLLM_BATCH_INVARIANT:
        yield "batch-invariant mode"


@dataclass(frozen=True, slots=True)
class _Vllm:
    """What the check needs of vLLM and torch beside the config. Read at each check: tests and plugins replace them."""

    platform: Any
    envs: Any
    no_compilation: Any
    full_graphs: Any
    bfloat16: Any


def _import_vllm() -> _Vllm:
    try:
        import torch
        from vllm import envs
        from vllm.config import CompilationMode, CUDAGraphMode
        from vllm.platforms import current_platform
    except ImportError as error:
        raise UsageError(
            where='additional_config["decode_backend"]',
            found=f"no usable vLLM in this environment ({error})",
            needed="vllm 0.33.0 with its torch",
            remedy="Install jitspark[vllm] where the engine runs; the other commands of jitspark need no vLLM.",
        ) from error
    return _Vllm(current_platform, envs, CompilationMode.NONE, CUDAGraphMode.FULL, torch.bfloat16)


def _gpu(vllm: _Vllm, served: Served) -> Iterator[str]:
    # code for sm_90a runs on 9.0 only, whereas the built-in deployments may be any member of their family
    if not served.targets:
        known = vllm.platform.is_device_capability_family(BLACKWELL)
    else:
        known = any(vllm.platform.is_device_capability(_capability(target)) for target in served.targets)
    if not known:
        names = "/".join(str(_capability(target)) for target in served.targets) or "100/103"
        yield f"this GPU (SM{names})"


def _capability(target: str) -> int:
    """90 for sm_90a: major and minor version as vLLM writes them in one number."""
    return int(target.removeprefix("sm_").rstrip("a"))


def _text_config(text_config: Any, served: Served) -> Iterator[str]:
    difference = next(differences(text_config, served.text_config), None)
    if difference is not None:
        yield (
            f"text configs but the geometry {served.geometry}'s ({difference})"
            if served.geometry
            else "text configs but Muse Spark Open's"
        )


def _parallelism(parallel: Any, served: Served) -> Iterator[str]:
    tp = parallel.tensor_parallel_size
    if tp not in served.tp_sizes:
        yield f"TP other than {'/'.join(map(str, served.tp_sizes))}"
    if parallel.pipeline_parallel_size != 1:
        yield "pipeline parallelism"
    # the experts of a layer are spread over exactly the ranks that share its other weights
    if not parallel.enable_expert_parallel or parallel.data_parallel_size != 1:
        yield "expert parallelism other than EP = TP"
    if parallel.use_ubatching:
        yield "DBO"
    if parallel.decode_context_parallel_size != 1:
        yield "decode context parallel"
    # the sampling loop keeps the draft's logits whole on every rank
    if parallel.enable_batch_sharded_sampling:
        yield "batch-sharded sampling"


def _engine(vllm_config: Any) -> Iterator[str]:
    if vllm_config.model_config.enable_sleep_mode:
        yield "sleep mode"  # it would move weights whose addresses the plans hold
    if vllm_config.lora_config is not None:
        yield "LoRA"
    if vllm_config.kernel_config.moe_backend == "deep_gemm_mega_moe":
        yield "the MegaMoE backend"
    # the executor is built and bound from hooks that only the second runner has
    if not vllm_config.use_v2_model_runner:
        yield "the V1 model runner"


def _graphs(compilation: Any, vllm: _Vllm) -> Iterator[str]:
    """Plans run inside full graphs of the decode step, captured from a forward that nothing has traced."""
    if compilation.mode != vllm.no_compilation:
        yield "torch.compile (compilation modes but NONE)"
    graphs = compilation.cudagraph_mode
    if graphs is None or graphs.decode_mode() != vllm.full_graphs:
        yield "deployments without FULL decode CUDA graphs (e.g. enforce-eager)"


def _speculation(spec: Any, model: Any, vllm: _Vllm) -> Iterator[str]:
    if spec is None or spec.method != "dspark":
        yield "speculative methods but DSpark"
    if spec is None:
        return
    if spec.enable_adaptive_verification:
        yield "adaptive verification"
    if spec.num_speculative_tokens != NUM_SPECULATIVE_TOKENS:
        yield f"speculative token counts but {NUM_SPECULATIVE_TOKENS}"
    if spec.draft_sample_method != "probabilistic":
        yield "draft sampling methods but probabilistic"
    if model.head_dtype != vllm.bfloat16:
        yield "draft logits but BF16 (head_dtype)"
    if model.use_fp64_gumbel:
        yield "FP64 Gumbel sampling"


def _draft(vllm_config: Any) -> Iterator[str]:
    """The draft's own config may lack each of these fields: their absence is the supported case."""
    if getattr(vllm_config, "watermark_config", None) is not None:
        yield "watermarking"
    draft = _draft_text_config(vllm_config.speculative_config)
    if getattr(draft, "dspark_draft_topk", None) is not None:
        yield "a DSpark draft top-k"
    if not getattr(draft, "sample_from_anchor", True):
        yield "DSpark drafts without sample_from_anchor"
    proposed = getattr(draft, "draft_vocab_size", None)
    if proposed is not None and proposed != getattr(draft, "vocab_size", None):
        yield "a reduced DSpark draft vocabulary"


def _draft_text_config(spec: Any) -> Any:
    model = None if spec is None else spec.draft_model_config
    return None if model is None else model.hf_config


def _kv_cache(vllm_config: Any, vllm: _Vllm) -> Iterator[str]:
    cache = vllm_config.cache_config
    dtype = vllm_config.model_config.dtype if cache.cache_dtype == "auto" else cache.cache_dtype
    if dtype not in ("bfloat16", vllm.bfloat16):
        yield "KV cache dtypes but BF16"
    if cache.block_size != BLOCK_SIZE:
        yield f"KV cache block sizes but {BLOCK_SIZE}"
    if vllm_config.kv_transfer_config is not None:
        yield "KV transfer"
