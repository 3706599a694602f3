"""Muse Spark in vLLM's place: its own class, with the decode step run by plans where a deployment asks for it.

Where it does not ask, what is built is vLLM's own class and nothing else. Refuses a deployment that asks and cannot
have it, with one reason, before a weight is loaded.
"""

from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.forward_context import get_forward_context, is_forward_context_available
from vllm.models.muse_spark import MuseSparkForConditionalGeneration as StockModel

from jitspark.runtime import AUTO, decode_backend


class MuseSparkForConditionalGeneration(StockModel):  # type: ignore[misc] # vLLM is seen as Any
    """The backbone.

    prepared: its plans and kernels, made first: where there are none, there is no instance of this class.
    specialized: its decode, set by `bind_decode` once the weights are final; None while (or where) everything is stock.
    """

    def __new__(cls, *, vllm_config: VllmConfig, prefix: str = "") -> Any:
        prepared = _prepared(vllm_config)
        if prepared is None:
            return StockModel(vllm_config=vllm_config, prefix=prefix)  # no instance of ours: __init__ is not called
        made = super().__new__(cls, vllm_config=vllm_config, prefix=prefix)
        made.prepared = prepared
        return made

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        from jitspark.models.worker import take_experts

        super().__init__(vllm_config=vllm_config, prefix=prefix)
        self.expert_shares = take_experts(self, self.prepared, vllm_config)
        self.specialized: Any = None
        self._asked = vllm_config.additional_config

    def process_weights_after_loading(self) -> None:
        """All experts are taken by now, on all ranks, or were given up by all of them."""
        if not self.expert_shares.finish():
            self._asked["decode_backend"] = AUTO  # the draft is built from the same config later

    def bind_decode(self, vllm_config: VllmConfig, device: torch.device) -> Any:
        """Bind the plans to the weights that were loaded, and take over from now on. Returns the decode.

        None where stock runs instead (`on_error`).
        """
        from jitspark.models.worker import bind_backbone

        self.specialized = bind_backbone(self, vllm_config, device)
        return self.specialized

    def run_stock(self) -> None:
        """From now on every forward is vLLM's own, and the memory of the plans is given back."""
        self.specialized = None
        self.expert_shares.drop()

    def get_model_state_cls(self) -> type:
        """The hook by which vLLM's runner gets our state."""
        from jitspark.models.decode_state import MuseSparkDecodeState

        return MuseSparkDecodeState

    def forward(
        self,
        input_ids: torch.Tensor | None,
        positions: torch.Tensor,
        intermediate_tensors: Any = None,
        inputs_embeds: torch.Tensor | None = None,
    ) -> Any:
        """Hidden states BF16 [rows, hidden] after the final norm, and the draft's taps FP32 [rows, hidden]."""
        if self.specialized is not None and intermediate_tensors is None:
            context = get_forward_context() if is_forward_context_available() else None
            step = self.specialized.step(context, len(positions))
            if step is not None:
                return self.specialized.run(step, input_ids, positions, inputs_embeds)
        return super().forward(input_ids, positions, intermediate_tensors, inputs_embeds)

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor | None:
        """Soft-capped FP32 logits [rows, vocab]; as many rows as one launch serves are ours, more are stock's."""
        if self.specialized is not None:
            logits: torch.Tensor | None = self.specialized.logits(hidden_states)
            if logits is not None:
                return logits
        return super().compute_logits(hidden_states)


def _prepared(vllm_config: VllmConfig) -> Any:
    """What the decode runtime has prepared, None for stock: then nothing of it is even imported."""
    if decode_backend(vllm_config) == AUTO:
        return None
    from jitspark.models.worker import asked_of_us, prepare_backbone

    return prepare_backbone(vllm_config) if asked_of_us(vllm_config) else None
