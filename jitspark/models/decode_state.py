"""The state that vLLM's runner keeps for the specialized backbone: where its plans are bound and its captures known.

vLLM makes it once the weights of backbone and draft are final and before it profiles memory, and calls it after each
allocation of the KV caches, for each capture, and before each step, which is where a silent rank is noticed. Everything
else is vLLM's default state.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.v1.worker.gpu.model_states.default import DefaultModelState

from jitspark.models.worker import attempt


class MuseSparkDecodeState(DefaultModelState):  # type: ignore[misc] # vLLM is seen as Any
    """vLLM's default state, with the decode that `model` takes its captured steps from; None where it runs stock."""

    def __init__(self, vllm_config: VllmConfig, model: nn.Module, encoder_cache: Any, device: torch.device) -> None:
        super().__init__(vllm_config, model, encoder_cache, device)
        self.decode = model.bind_decode(vllm_config, device)

    def initialize_kv_cache(self, kv_cache_config: Any, block_tables: Any) -> None:
        """Bind the KV caches: first the small ones of memory profiling, then the real ones. Graphs are settled now."""
        super().initialize_kv_cache(kv_cache_config, block_tables)
        if self.decode is not None:
            mode = self.vllm_config.compilation_config.cudagraph_mode
            self._attempt("the graphs of the decode step", lambda: self.decode.require_graphs(mode))
        if self.decode is not None:
            self._attempt("binding the KV caches", self.decode.bind_kv_caches)

    def prepare_attn(
        self, input_batch: Any, cudagraph_mode: Any, *args: Any, for_capture: bool = False, **kwargs: Any
    ) -> dict[str, Any]:
        """Attention metadata as vLLM makes it; what is made for a capture is remembered, so that `forward` knows it."""
        metadata: dict[str, Any] = super().prepare_attn(
            input_batch, cudagraph_mode, *args, for_capture=for_capture, **kwargs
        )
        if self.decode is None:
            return metadata
        if for_capture:
            self.decode.capturing(metadata)
        else:
            rows = input_batch.num_tokens_after_padding if cudagraph_mode.name == "FULL" else None
            self.decode.stepping(rows)
        return metadata

    def capture_inner_cudagraphs(self, *args: Any, **kwargs: Any) -> None:
        """The backbone's graphs are captured by now: say which of them run plans."""
        super().capture_inner_cudagraphs(*args, **kwargs)
        if self.decode is not None:
            rows = ", ".join(map(str, self.decode.captured_rows))
            self._attempt("capturing graphs", self.decode.captured, f"graphs of {rows or 'no'} rows")

    def _attempt(self, step: str, part: Callable[[], None], digest: str = "") -> None:
        """On all ranks: raises where one cannot, or leaves the decode to stock where the deployment says so."""
        if not attempt(part, self.vllm_config, step, digest):
            self.decode = None
            self.model.run_stock()
