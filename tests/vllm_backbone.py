"""Tiny backbones of vLLM's own classes on a CPU, with random weights that transformers' model has too.

vLLM's compiled operations are not there on a CPU: nothing here runs its forward. What is vLLM's own is how the model is
built, loaded and post-processed, and all that a plan takes from it.
"""

import torch
from muse_spark_on_transformers import text_model

from jitspark.geometry import deployment
from jitspark.models import muse_spark, worker
from jitspark.runtime import prepared as preparing

SEED = 11
TAPS = (0, 2, 3)


def checkpoint(served, seed=SEED):
    """transformers' model, an lm_head for it, and both as a checkpoint names them."""
    model = text_model(served.backbone, seed)
    for name, parameter in model.named_parameters():
        if "residual_gate" in name:  # BF16 in vLLM
            parameter.data.copy_(parameter.data.bfloat16())
    generator = torch.Generator().manual_seed(seed)
    shape = (served.backbone.vocab_size, served.backbone.hidden_size)
    lm_head = (torch.randn(shape, generator=generator) / 16).bfloat16()
    named = {f"model.language_model.{name}": tensor for name, tensor in model.state_dict().items()}
    return model, lm_head, {**named, "lm_head.weight": lm_head}


def no_gpu(patch):
    """Of what decides by the GPU, the answers of a Hopper machine; kernels are never loaded: references run."""
    from vllm.platforms import current_platform
    from vllm.platforms.interface import DeviceCapability

    hopper = classmethod(lambda _, device_id=0: DeviceCapability(9, 0))  # noqa: ARG005 - as it is called
    patch.setattr(type(current_platform), "get_device_capability", hopper, raising=False)
    family = classmethod(lambda _, family, device_id=0: family == 90)  # noqa: ARG005
    patch.setattr(type(current_platform), "is_device_capability_family", family, raising=False)
    patch.setattr(torch.cuda, "Event", lambda *_, **__: None)
    patch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")  # it would want Triton
    patch.setattr(preparing, "load_deployment", lambda *_: {})


def build(config, weights, cls=None):
    """The backbone, loaded and post-processed as vLLM's loader does."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.utils import process_weights_after_loading

    config.compilation_config.static_forward_context.clear()
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with set_current_vllm_config(config), torch.no_grad():
            model = (cls or muse_spark.MuseSparkForConditionalGeneration)(vllm_config=config)
            model.load_weights(iter(weights.items()))
            process_weights_after_loading(model, config.model_config, torch.device("cpu"))
            model.set_aux_hidden_state_layers(tuple(layer + 1 for layer in TAPS))  # as the runner does
    finally:
        torch.set_default_dtype(before)
    return model


def served_by(name):
    return deployment(name, 1)


__all__ = ["build", "checkpoint", "no_gpu", "served_by", "worker"]
