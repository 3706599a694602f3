"""The provider surface: who serves a part of the decode step, and what a provider requires of a deployment.

A provider's requirements are read from the config after the support check has passed, so they need not repeat it:
BF16 KV cache, blocks of 16 and no pipeline or context parallelism are given.

Providers and what they require:

* `cute`: our kernels, for every target. Attention reads whatever KV layout vLLM allocates, by its strides, but
  takes block tables and sequence lengths from the metadata of two backends only, one of which needs kernels of its own
  before vLLM captures the step. Exchanges write into the other ranks' memory, as vLLM's custom all-reduce does, unless
  the option `exchanges` says "torch_distributed".
* `flashinfer`: attention by FlashInfer at the known version, on Blackwell. Other parts are refused with what it lacks.
* `stock`: what vLLM runs anyway, so nothing; but it does not serve exchanges between the launches of several ranks.

A config cannot show these; each is checked again when a plan is bound, for backbone and draft: the attention backend
that vLLM selects when none is named, the KV cache's strides and the block size of each layer's own cache, whether
the ranks reach each other's memory, free memory for weights held twice, and the context length after vLLM has fitted
it to memory.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from jitspark.runtime import flashinfer_ops
from jitspark.runtime.options import TORCH_DISTRIBUTED, Options, from_vllm_config
from jitspark.runtime.parts import CHOICES, CUTE, FLASHINFER, PARTS, STOCK

Requirement = Callable[[Any, Options], str | None]

ATTENTION_BACKENDS = ("FLASH_ATTN", "FLASHINFER")
# the kinds of KV cache that the backbone and the draft have, as `backend_per_kind` names them
KV_CACHE_KINDS = ("full_attention", "sliding_window")


@dataclass(frozen=True, slots=True)
class Provider:
    """One provider of one part. `unmet` are its requirements, in the order in which they are reported."""

    part: str
    name: str
    unmet: tuple[Requirement, ...] = ()

    def requirements(self, vllm_config: Any) -> str | None:
        """The first requirement that this deployment does not meet, in the support check's words, or None.

        Raises UsageError for options that cannot be understood and GeometryError for a geometry that cannot be
        loaded.
        """
        options = from_vllm_config(vllm_config)
        return next((reason for each in self.unmet if (reason := each(vllm_config, options)) is not None), None)


def chosen(vllm_config: Any) -> tuple[Provider, ...]:
    """The provider of each part in this deployment, in the order of `PARTS`. Raises UsageError."""
    options = from_vllm_config(vllm_config)
    return tuple(PROVIDERS[part, options.provider(part)] for part in PARTS)


def _attention_backend(*known: str) -> Requirement:
    def unmet(vllm_config: Any, _: Options) -> str | None:
        other = next((name for name in _named_backends(vllm_config) if name not in known), None)
        return None if other is None else f"attention backends but {'/'.join(known)} ({other})"

    return unmet


def _named_backends(vllm_config: Any) -> Iterator[str]:
    """The attention backends that the config names for backbone and draft; none of them when vLLM is to select."""
    attention = getattr(vllm_config, "attention_config", None)
    by_kind = getattr(attention, "backend_per_kind", None) or {}
    yield from _names(getattr(attention, "backend", None), *(by_kind.get(kind) for kind in KV_CACHE_KINDS))
    yield from _names(getattr(vllm_config.speculative_config, "attention_backend", None))


def _names(*backends: Any) -> tuple[str, ...]:
    return tuple(str(getattr(backend, "name", backend)) for backend in backends if backend is not None)


def _trtllm_kernels(vllm_config: Any, options: Options) -> str | None:
    """FLASHINFER, which vLLM takes on Blackwell when none is named, has full graphs of such steps with them alone."""
    attention = getattr(vllm_config, "attention_config", None)
    if getattr(attention, "use_trtllm_attention", None) is not False:
        return None
    named = getattr(attention, "backend", None) or getattr(attention, "backend_per_kind", None)
    found = "FLASHINFER" in _named_backends(vllm_config) or (not named and _on_blackwell(options))
    return "FLASHINFER without trtllm-gen kernels (use_trtllm_attention false)" if found else None


def _on_blackwell(options: Options) -> bool:
    return all(target in flashinfer_ops.TARGETS for target in options.targets)


def _context_length(vllm_config: Any, options: Options) -> str | None:
    """Positions index the RoPE table, which has a row for each position that the geometry allows."""
    limit = options.backbone().max_position_embeddings
    return f"context lengths above {limit}" if vllm_config.model_config.max_model_len > limit else None


def _peer_memory(vllm_config: Any, options: Options) -> str | None:
    parallel = vllm_config.parallel_config
    needed = parallel.tensor_parallel_size > 1 and options.exchanges != TORCH_DISTRIBUTED
    refused = needed and getattr(parallel, "disable_custom_all_reduce", False)
    return "all-reduce backends without peer memory (disable_custom_all_reduce)" if refused else None


def _flashinfer_lacks(part: str) -> Requirement:
    """Refuses a part before anything else is asked: the known version does not serve it on any target."""
    reason = f"the flashinfer provider for {part} ({flashinfer_ops.LACKING[part]})"
    return lambda _, __: reason


def _one_rank(vllm_config: Any, _: Options) -> str | None:
    """Stock's exchanges are copies of this rank's own memory, made to time the rest of a step."""
    alone = vllm_config.parallel_config.tensor_parallel_size == 1
    return None if alone else "the stock provider for all_reduce above TP 1"


def _flashinfer_target(_: Any, options: Options) -> str | None:
    other = next((target for target in options.targets if target not in flashinfer_ops.TARGETS), None)
    return None if other is None else f"the flashinfer provider on {other}"


def _flashinfer_installed(_: Any, __: Options) -> str | None:
    found = flashinfer_ops.missing()
    wanted = f"{flashinfer_ops.DISTRIBUTION} {flashinfer_ops.VERSION}"
    return None if found is None else f"the flashinfer provider without {wanted} ({found})"


_REQUIREMENTS: Mapping[tuple[str, str], tuple[Requirement, ...]] = {
    ("attention", CUTE): (_attention_backend(*ATTENTION_BACKENDS), _trtllm_kernels, _context_length),
    ("attention", FLASHINFER): (_attention_backend("FLASHINFER"), _trtllm_kernels, _context_length),
    ("all_reduce", CUTE): (_peer_memory,),
    ("all_reduce", STOCK): (_one_rank,),
}


def _provider(part: str, name: str) -> Provider:
    if name == FLASHINFER and part in flashinfer_ops.LACKING:
        return Provider(part, name, (_flashinfer_lacks(part),))
    usable = (_flashinfer_target, _flashinfer_installed) if name == FLASHINFER else ()
    return Provider(part, name, usable + _REQUIREMENTS.get((part, name), ()))


PROVIDERS: Mapping[tuple[str, str], Provider] = MappingProxyType(
    {(part, name): _provider(part, name) for part in PARTS for name in CHOICES[part]}
)
