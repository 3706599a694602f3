"""The DSpark draft in vLLM 0.33.0's place: its classes, with the specialized decode where a deployment asks for it.

Each class is vLLM's own, extended; without the specialized decode they do what vLLM's do. vLLM's constructors name
the classes of their parts, so ours are bound to those names while they run: building a stock draft first would
register its attention layers, and a second one of the same name is refused.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from vllm.config import VllmConfig
from vllm.distributed import get_tensor_model_parallel_world_size
from vllm.logger import init_logger
from vllm.model_executor.layers.linear import ColumnParallelLinear, ReplicatedLinear, UnquantizedLinearMethod
from vllm.models.muse_spark.common import dspark as stock
from vllm.models.muse_spark.common.dspark import MuseSparkDSparkDecoderLayer  # already causal, gated, one position mode
from vllm.models.muse_spark.common.layers import materialize_residual_path_constants
from vllm.platforms import current_platform

from jitspark.geometry import DEFAULT_GEOMETRY, deployment
from jitspark.runtime import LATENCY_SPECIALIZED, decode_backend, draft_config, options, unsupported
from jitspark.runtime.parts import CUTE

if TYPE_CHECKING:
    from vllm.v1.worker.gpu.spec_decode.dspark.speculator import DSparkSpeculator

    from jitspark.runtime.draft import DraftDecode
    from jitspark.runtime.markov import MarkovSampler

__all__ = ["MuseSparkDSparkDecoderLayer", "MuseSparkDSparkForCausalLM", "MuseSparkDSparkModel"]

logger = init_logger(__name__)

# of vLLM's speculator, under the names that the sampler has for them
SAMPLING_STATE = ("sample_indices", "sample_idx_mapping", "sample_pos", "seeds", "temperature", "draft_tokens")


class MuseSparkDSparkModel(stock.MuseSparkDSparkModel):  # type: ignore[misc] # vLLM is seen as Any
    """The draft's layers and its keys and values of context rows.

    specialized_decode: whether the deployment runs the specialized decode; fixed when the model is built.
    specialized_draft: the fused forward, once the weights are loaded; None while (or where) the stock layers run.
    """

    def __init__(self, *, vllm_config: VllmConfig, start_layer_id: int = 0, prefix: str = "") -> None:
        specialized = _uses_specialized_decode(vllm_config)
        parts: dict[str, Any] = {"ReplicatedLinear": _fc_class(specialized=specialized)}
        if specialized:
            from jitspark.runtime.markov import VocabParallelMarkovHead

            _check_sizes(vllm_config)
            if _samples(vllm_config):
                parts["DSparkMarkovHead"] = VocabParallelMarkovHead
        with _bound(stock, parts):
            super().__init__(vllm_config=vllm_config, start_layer_id=start_layer_id, prefix=prefix)
        self.specialized_decode = specialized
        self.specialized_draft: DraftDecode | None = None
        self._compilation_mode = vllm_config.compilation_config.mode

    def precompute_and_store_context_kv(
        self,
        context_states: torch.Tensor,
        context_positions: torch.Tensor,
        context_slot_mapping: torch.Tensor | list[torch.Tensor | None] | None = None,
    ) -> None:
        """Keys and values of `context_states` [rows, hidden] to the slots of each layer, or of all layers alike.

        A slot of -1, and a layer without slots, is skipped. The fused chain serves what it can, stock the rest.
        """
        draft = self.specialized_draft
        if draft is not None and draft.store_context_kv(context_states, context_positions, context_slot_mapping):
            return
        super().precompute_and_store_context_kv(context_states, context_positions, context_slot_mapping)

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        input_embeds: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Hidden states [rows, hidden], after the final norm, of the draft's query rows."""
        if input_embeds is None:
            input_embeds = self.embed_input_ids(input_ids)
        draft = self.specialized_draft
        fused = None if draft is None else draft.run(positions, input_embeds)
        return super().forward(input_ids, positions, input_embeds) if fused is None else fused


class MuseSparkDSparkForCausalLM(stock.MuseSparkDSparkForCausalLM):  # type: ignore[misc] # as above
    """The draft with its head: the backbone's output transform, and the fused sampling loop."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        with _bound(stock, {"MuseSparkDSparkModel": MuseSparkDSparkModel}):
            super().__init__(vllm_config=vllm_config, prefix=prefix)
        # Built by the first call of the loop: only then are lm_head shared and the sampling state known.
        self._markov_sampler: MarkovSampler | None = None
        if not self.model.specialized_decode or not _samples(vllm_config):
            return
        if getattr(self.config, "dspark_draft_topk", None) is not None:
            raise ValueError(
                "The Muse Spark specialized decode runs the fused DSpark Markov loop, which does not run here: "
                "dspark_draft_topk is set"
            )
        # On the instance, because the speculator asks whether the hook exists: a stock draft must not have it.
        self.sample_sequential = self._sample_sequential_fused

    def output_logit_transform_params(self) -> tuple[float, float | None]:
        """What logits are multiplied by, and the bound that tanh then keeps them within (None: no bound).

        The fused loop applies both by itself. A class with another `apply_output_logit_transform`, which is what stock
        calls, has to answer for it here.
        """
        return self.output_multiplier, self.output_soft_cap_temp

    def combine_hidden_states(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Context states [rows, hidden] of the tapped streams side by side, whole on every rank."""
        draft = self.model.specialized_draft
        fused = None if draft is None else draft.combine(hidden_states)
        if fused is not None:
            return fused
        combined = super().combine_hidden_states(hidden_states)
        if not isinstance(self.model.fc, ColumnParallelLinear):
            return combined
        from vllm.models.muse_spark.nvidia.model import gather_columns

        shard = combined.reshape(-1, combined.shape[-1])
        return gather_columns(shard).view(*combined.shape[:-1], -1)

    def process_weights_after_loading(self) -> None:
        """Build the fused forward from the loaded weights; nothing without the specialized decode.

        Raises RuntimeError when it, or the sampling loop, is already built: their graphs read the old weights.
        """
        built = (self.model.specialized_draft, self._markov_sampler)
        if any(each is not None for each in built):
            raise RuntimeError(
                "The Muse Spark specialized decode does not support reloading the DSpark draft's weights"
            )
        if not self.model.specialized_decode:
            return
        from jitspark.models.worker import ranks
        from jitspark.runtime.draft import build_draft_decode
        from jitspark.runtime.fallback import attempted

        model = self.model
        with ranks().telling("the draft's weights"):
            # load_weights has done both, dummy weights have had neither
            model._build_fused_kv_buffers()  # noqa: SLF001 - vLLM's own step between weights and context rows
            materialize_residual_path_constants(model)
        model.specialized_draft = attempted(
            lambda: build_draft_decode(model, model._compilation_mode),  # noqa: SLF001
            ranks(),
            "the draft's plans",
            "draft layers",
            may_give_up=options.may_give_up(model.vllm_config),
        )

    def _sample_sequential_fused(
        self, speculator: "DSparkSpeculator", num_reqs: int, head_hidden: torch.Tensor
    ) -> bool:
        """The speculator's `sample_sequential` hook: all proposals of `num_reqs` requests. False: not mine."""
        sampler = self._markov_sampler
        if sampler is None:
            sampler = self._markov_sampler = self._build_markov_sampler(speculator)
        cache = _draft_logits_values(speculator)
        assert cache is not None, "the sampler is not built without a cache of draft logits"
        state = {name: getattr(speculator, name) for name in SAMPLING_STATE}
        anchors = speculator._anchor_idx  # noqa: SLF001 - the hook's contract in 0.33.0
        ids = speculator.input_buffers.input_ids
        return sampler.sample(num_reqs, head_hidden, input_ids=ids, anchor_idx=anchors, draft_logits=cache, **state)

    def _build_markov_sampler(self, speculator: "DSparkSpeculator") -> "MarkovSampler":
        adaptive = speculator.use_confidence_head, speculator.use_acceptance_estimator
        if any(adaptive):
            raise ValueError(
                "The Muse Spark specialized decode's fused DSpark Markov loop computes neither the confidence head's "
                "outputs nor the acceptance estimates: it does not run with adaptive verification."
            )
        from jitspark.runtime.markov import build_markov_sampler

        return build_markov_sampler(
            self,
            draft_logits=_draft_logits_values(speculator),
            draft_topk=speculator._draft_topk,  # noqa: SLF001 - as above
            watermarked=speculator.draft_watermarker is not None,
            use_fp64_gumbel=speculator.use_fp64_gumbel,
            sample_from_anchor=speculator.sample_from_anchor,
            max_num_reqs=speculator.max_num_reqs,
            num_steps=speculator.num_speculative_steps,
        )


EntryClass = MuseSparkDSparkForCausalLM


def _check_sizes(vllm_config: VllmConfig) -> None:
    """Raises UsageError for a size in the draft's config.json that is not the geometry's."""
    config = vllm_config.speculative_config.draft_model_config.hf_config
    if isinstance(config, stock.MuseSparkDSparkConfig):  # vLLM's constructor refuses any other class
        name = options.from_vllm_config(vllm_config).geometry or DEFAULT_GEOMETRY
        draft_config.check_sizes(config, deployment(name, get_tensor_model_parallel_world_size()).draft)


def _uses_specialized_decode(vllm_config: VllmConfig) -> bool:
    """Whether this deployment's draft runs the specialized decode: asked for, and not fallen back to stock.

    ROCm has no kernels: one warning, then stock. A deployment that is refused (and not told to run stock instead)
    never comes here, since the backbone raises first.
    """
    if decode_backend(vllm_config) != LATENCY_SPECIALIZED:
        return False
    if current_platform.is_rocm():
        logger.warning_once(
            "The Muse Spark specialized decode is not supported on ROCm; the DSpark draft keeps its stock layers and "
            "Markov loop."
        )
        return False
    fallen_back = options.may_give_up(vllm_config) and unsupported(vllm_config)
    return not fallen_back


def _samples(vllm_config: VllmConfig) -> bool:
    """Whether a draft of the specialized decode has our sampling loop: unless that part is left to stock."""
    return options.from_vllm_config(vllm_config).provider("markov_sampling") == CUTE


def _use_column_parallel_fc(enabled: bool, hidden_size: int, tp_size: int) -> bool:  # noqa: FBT001 - called by place
    """Whether to shard fc's output columns over the ranks: `enabled`, and they divide evenly among several ranks."""
    if not enabled:
        return False
    if tp_size > 1 and hidden_size % tp_size == 0:
        return True
    logger.warning_once(
        "The column-parallel DSpark draft fc needs a tensor parallel size above 1 that divides the draft hidden size "
        "%d (got %d); using the replicated DSpark draft fc.",
        hidden_size,
        tp_size,
    )
    return False


def _keep_column_parallel_fc(fc: ColumnParallelLinear) -> bool:
    """Whether this fc may stay sharded: only an unquantized one is known to work."""
    if isinstance(fc.quant_method, UnquantizedLinearMethod):
        logger.info_once("Using the column-parallel DSpark draft fc.", scope="process")
        return True
    logger.warning_once(
        "The column-parallel DSpark draft fc supports only an unquantized draft fc (got %s); using the replicated "
        "DSpark draft fc.",
        type(fc.quant_method).__name__,
    )
    return False


def _draft_logits_values(speculator: "DSparkSpeculator") -> torch.Tensor | None:
    """The cache of draft logits [max_num_reqs, steps, vocab], whole on every rank; None for greedy drafts."""
    return speculator.draft_logits


def _fc_class(*, specialized: bool) -> Callable[..., ReplicatedLinear | ColumnParallelLinear]:
    """What stands for ReplicatedLinear while the draft is built, which uses it for its fc alone."""

    def fc(*, output_size: int, **rest: Any) -> ReplicatedLinear | ColumnParallelLinear:
        tp_size = get_tensor_model_parallel_world_size()
        if _use_column_parallel_fc(specialized, output_size, tp_size):
            sharded = ColumnParallelLinear(output_size=output_size, gather_output=False, **rest)
            if _keep_column_parallel_fc(sharded):
                return sharded
        return ReplicatedLinear(output_size=output_size, **rest)

    return fc


@contextmanager
def _bound(module: Any, names: dict[str, Any]) -> Iterator[None]:
    """Have `names` of a module mean these objects for a while."""
    before = {name: getattr(module, name) for name in names}
    try:
        for name, value in names.items():
            setattr(module, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(module, name, value)
