"""What the support check refuses, in its order, and a plain deployment that it accepts.

The same table is applied to plain objects (tests/unit) and to real vLLM configs (tests/vllm). A change is a path from
the deployment, whose parts are `config`, `platform` and `envs`, and the value to put there.
"""

import enum
import functools
from dataclasses import dataclass
from types import SimpleNamespace

from jitspark.runtime import MUSE_SPARK_CONFIG

# vLLM's classes and torch's dtypes as far as the check looks at them; tests/vllm puts the real ones in their place
BFLOAT16, FLOAT32 = "torch.bfloat16", "torch.float32"


class CompilationMode(enum.IntEnum):
    NONE = 0
    VLLM_COMPILE = 3


class CUDAGraphMode(enum.Enum):
    NONE = 0
    PIECEWISE = 1
    FULL = 2
    FULL_DECODE_ONLY = (2, 0)
    FULL_AND_PIECEWISE = (2, 1)

    def decode_mode(self):
        return CUDAGraphMode(self.value[0]) if isinstance(self.value, tuple) else self


@dataclass(frozen=True, slots=True)
class Case:
    """One unsupported deployment: the reason, and the changes that make a supported one it."""

    reason: str
    changes: dict

    def __str__(self):
        return ",".join(f"{path.removeprefix('config.')}={value}" for path, value in self.changes.items())


EP = "expert parallelism other than EP = TP"
FULL_GRAPHS = "deployments without FULL decode CUDA graphs (e.g. enforce-eager)"
DRAFT = "config.speculative_config.draft_model_config.hf_config"
TEXT = "config.model_config.hf_text_config"

ROWS = (
    ("this GPU (SM100/103)", "platform.capability", (9, 0)),
    ("this GPU (SM100/103)", "platform.capability", (12, 0)),
    ("this GPU (SM100/103)", "platform.capability", None),
    ("text configs but Muse Spark Open's", f"{TEXT}.hidden_size", 4096),
    ("text configs but Muse Spark Open's", f"{TEXT}.layer_types", ["full_attention"] * 62),
    ("TP other than 4/8/16", "config.parallel_config.tensor_parallel_size", 1),
    ("TP other than 4/8/16", "config.parallel_config.tensor_parallel_size", 32),
    ("pipeline parallelism", "config.parallel_config.pipeline_parallel_size", 2),
    (EP, "config.parallel_config.enable_expert_parallel", False),
    (EP, "config.parallel_config.data_parallel_size", 2),
    ("DBO", "config.parallel_config.use_ubatching", True),
    ("decode context parallel", "config.parallel_config.decode_context_parallel_size", 2),
    ("batch-sharded sampling", "config.parallel_config.enable_batch_sharded_sampling", True),
    ("sleep mode", "config.model_config.enable_sleep_mode", True),
    ("LoRA", "config.lora_config", SimpleNamespace()),
    ("the MegaMoE backend", "config.kernel_config.moe_backend", "deep_gemm_mega_moe"),
    ("the V1 model runner", "config.use_v2_model_runner", False),
    (
        "torch.compile (compilation modes but NONE)",
        "config.compilation_config.mode",
        CompilationMode.VLLM_COMPILE,
    ),
    (FULL_GRAPHS, "config.compilation_config.cudagraph_mode", CUDAGraphMode.NONE),
    (FULL_GRAPHS, "config.compilation_config.cudagraph_mode", CUDAGraphMode.PIECEWISE),
    (FULL_GRAPHS, "config.compilation_config.cudagraph_mode", None),
    ("speculative methods but DSpark", "config.speculative_config", None),
    ("speculative methods but DSpark", "config.speculative_config.method", "eagle3"),
    ("adaptive verification", "config.speculative_config.enable_adaptive_verification", True),
    ("speculative token counts but 7", "config.speculative_config.num_speculative_tokens", 3),
    ("draft sampling methods but probabilistic", "config.speculative_config.draft_sample_method", "greedy"),
    ("draft logits but BF16 (head_dtype)", "config.model_config.head_dtype", FLOAT32),
    ("FP64 Gumbel sampling", "config.model_config.use_fp64_gumbel", True),
    ("watermarking", "config.watermark_config", SimpleNamespace()),
    ("a DSpark draft top-k", f"{DRAFT}.dspark_draft_topk", 64),
    ("DSpark drafts without sample_from_anchor", f"{DRAFT}.sample_from_anchor", False),
    ("a reduced DSpark draft vocabulary", f"{DRAFT}.draft_vocab_size", 32000),
    ("KV cache dtypes but BF16", "config.cache_config.cache_dtype", "fp8_e4m3"),
    ("KV cache dtypes but BF16", "config.model_config.dtype", FLOAT32),
    ("KV cache block sizes but 16", "config.cache_config.block_size", 32),
    ("KV transfer", "config.kv_transfer_config", SimpleNamespace()),
    ("batch-invariant mode", "envs.VLLM_BATCH_INVARIANT", True),
    # what the providers require
    (
        "attention backends but FLASH_ATTN/FLASHINFER (FLEX_ATTENTION)",
        "config.attention_config.backend",
        SimpleNamespace(name="FLEX_ATTENTION"),
    ),
    ("context lengths above 1048576", "config.model_config.max_model_len", 1048577),
    (
        "all-reduce backends without peer memory (disable_custom_all_reduce)",
        "config.parallel_config.disable_custom_all_reduce",
        True,
    ),
)
CASES = tuple(Case(reason, {path: value}) for reason, path, value in ROWS)


def put(patch, deployment, changes):
    """Put each value at its path with `patch` (pytest's monkeypatch, which undoes it)."""
    for path, value in changes.items():
        *owners, name = path.split(".")
        patch.setattr(functools.reduce(getattr, owners, deployment), name, value, raising=False)


def plain_deployment():
    """A deployment of Muse Spark Open that is supported, as plain objects."""
    platform = SimpleNamespace(capability=(10, 0))
    platform.is_device_capability_family = lambda family: (
        platform.capability is not None and platform.capability[0] == family // 10
    )
    platform.is_device_capability = lambda capability: platform.capability == divmod(capability, 10)
    envs = SimpleNamespace(VLLM_BATCH_INVARIANT=False)
    return SimpleNamespace(config=_plain_config(), platform=platform, envs=envs)


def _plain_config():
    return SimpleNamespace(
        additional_config={"decode_backend": "latency_specialized"},
        model_config=SimpleNamespace(
            hf_text_config=SimpleNamespace(**MUSE_SPARK_CONFIG),
            dtype=BFLOAT16,
            head_dtype=BFLOAT16,
            max_model_len=131072,
            enable_sleep_mode=False,
            use_fp64_gumbel=False,
        ),
        parallel_config=SimpleNamespace(
            tensor_parallel_size=8,
            pipeline_parallel_size=1,
            data_parallel_size=1,
            decode_context_parallel_size=1,
            enable_expert_parallel=True,
            use_ubatching=False,
            enable_batch_sharded_sampling=None,
            disable_custom_all_reduce=False,
        ),
        speculative_config=SimpleNamespace(
            method="dspark",
            num_speculative_tokens=7,
            draft_sample_method="probabilistic",
            enable_adaptive_verification=False,
            attention_backend=None,
            draft_model_config=SimpleNamespace(hf_config=SimpleNamespace(vocab_size=202048)),
        ),
        compilation_config=SimpleNamespace(
            mode=CompilationMode.NONE,
            cudagraph_mode=CUDAGraphMode.FULL_AND_PIECEWISE,
            cudagraph_capture_sizes=[1, 2, 4, 8, 16, 24],
        ),
        cache_config=SimpleNamespace(cache_dtype="auto", block_size=16),
        attention_config=SimpleNamespace(backend=None, backend_per_kind={}),
        kernel_config=SimpleNamespace(moe_backend="auto"),
        lora_config=None,
        kv_transfer_config=None,
        watermark_config=None,
        use_v2_model_runner=True,
    )


def plain_modules(deployment):
    """What stands in for vLLM and torch in `sys.modules` around a plain deployment."""
    return {
        "torch": SimpleNamespace(bfloat16=BFLOAT16),
        "vllm": SimpleNamespace(envs=deployment.envs),
        "vllm.config": SimpleNamespace(CompilationMode=CompilationMode, CUDAGraphMode=CUDAGraphMode),
        "vllm.platforms": SimpleNamespace(current_platform=deployment.platform),
    }
