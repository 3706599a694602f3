"""One of two ranks with a specialized backbone on a CPU: `backbone_rank.py RANK MEETING CONFIG_FOLDER`.

vLLM's own classes load this rank's part of a checkpoint and of its experts; plans run by their references, and gloo
carries what the ranks exchange, as there is no memory that they could map. Prints as JSON how far the steps of some
requests are from transformers' model, and a digest of what all ranks must have alike.
"""

import hashlib
import json
import logging
import os
import sys
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")

SIZE, STEPS = 2, 2


class Patch:
    """Replaces for good: this process ends soon."""

    setattr = staticmethod(lambda owner, name, value, raising=True: setattr(owner, name, value))  # noqa: ARG005
    setenv = staticmethod(os.environ.__setitem__)


def main(rank, meeting, config_of):
    said = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logging.getLogger("jitspark").addHandler(handler)
    import torch

    config = config_of()
    import vllm_cpu
    from vllm.config import set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel

    vllm_cpu.take_cpu_platform()
    with set_current_vllm_config(config):
        init_distributed_environment(SIZE, rank, f"file://{meeting}", rank, "gloo")
        initialize_model_parallel(SIZE)
    import vllm_backbone as backbone

    backbone.no_gpu(Patch())
    served = backbone.served_by("tiny")
    transformers, lm_head, weights = backbone.checkpoint(served)
    model = backbone.build(config, weights)
    decode = model.bind_decode(config, torch.device("cpu"))
    with torch.no_grad():
        errors, digest = steps(model, decode, transformers, lm_head, served, rank)
    experts = {name: list(each.shape) for name, each in model.expert_shares.tensors(1).items()}
    found = {
        "errors": errors,
        "digest": digest,
        "experts": experts,
        "unlike": unlike_step(decode, transformers, served, rank),
        "left": left_to_stock(model, decode, config, rank),
        "warned": [text for text in said if text.startswith("The ranks exchange over torch.distributed")],
    }
    found["refused"] = refused_on_one(config, rank)
    sys.stdout.write(json.dumps(found))


def steps(model, decode, transformers, lm_head, served, rank):
    """Errors of rows, relative to the row, by what is compared: the mean and the largest over all steps."""
    import torch
    import vllm.forward_context
    from decode_steps import LENGTH, MAX_BLOCKS, PagedCache, Request
    from vllm_step import Step

    torch.manual_seed(5)
    taps = served.backbone.tap_layers
    requests = [Request(transformers, taps, 20), Request(transformers, taps, 0)]
    order = torch.arange(2 * MAX_BLOCKS).flip(0)
    caches = [PagedCache(served.backbone, layer, requests, order, rank=rank, tp=SIZE) for layer in range(4)]
    for layer, cache in zip(model.model.layers, caches, strict=True):
        layer.self_attn.attn.kv_cache = cache.tensor
    decode.bind_kv_caches()
    errors, digest = {"hidden": [], "taps": [], "logits": []}, hashlib.sha256()
    for _ in range(STEPS):
        expected = [each.step() for each in requests]
        step = Step(decode, caches, requests)
        decode.capturing(step.metadata)
        vllm.forward_context._forward_context = step.context
        hidden, tapped = model(None, step.positions, None, torch.cat([each.embeds for each in expected]))
        logits = model.compute_logits(hidden[:LENGTH].contiguous())
        for each in (hidden, *tapped, logits):
            digest.update(each.contiguous().view(torch.uint8).numpy().tobytes())
        errors["hidden"].append(apart(hidden, torch.cat([each.hidden for each in expected])))
        for tap, layer in zip(tapped, taps, strict=True):
            errors["taps"].append(apart(tap, torch.cat([each.taps[layer] for each in expected])))
        raw = expected[0].hidden @ lm_head.float().T
        errors["logits"].append(apart(logits, 30 * torch.tanh(raw * 0.5 / 30)))
    summed = {name: torch.cat(each) for name, each in errors.items()}
    return {name: {"mean": each.mean().item(), "max": each.max().item()} for name, each in summed.items()}, (
        digest.hexdigest()
    )


def unlike_step(decode, transformers, served, rank):
    """What ranks are told when the metadata of a capture is a backend's on rank 1 that nobody reads."""
    import torch
    from decode_steps import MAX_BLOCKS, PagedCache, Request
    from vllm_step import Step

    from jitspark.errors import RankError

    requests = [Request(transformers, served.backbone.tap_layers, 0) for _ in range(SIZE)]
    for each in requests:
        each.step()
    order = torch.arange(2 * MAX_BLOCKS).flip(0)
    caches = [PagedCache(served.backbone, layer, requests, order, rank=rank, tp=SIZE) for layer in range(4)]
    step = Step(decode, caches, requests)
    if rank == 1:
        for each in step.metadata.values():
            type(each).__name__ = "OtherMetadata"
    decode.capturing(step.metadata)
    try:
        decode.step(step.context, len(step.positions))
    except RankError as error:
        return str(error)
    return None


def left_to_stock(model, decode, config, rank):
    """What each rank makes of a cache that does not fit on rank 1, and of a draft that rank 0 alone has otherwise."""
    import torch

    from jitspark.errors import JitsparkError
    from jitspark.models.worker import attempt

    if rank == 1:
        model.model.layers[0].self_attn.attn.kv_cache = torch.zeros(8, 1, 32, 128, dtype=torch.bfloat16)
    found = {}
    try:
        attempt(decode.bind_kv_caches, config, "binding the KV caches")
    except JitsparkError as error:
        found["raised"] = f"{type(error).__name__}: {error}"
    config.additional_config["jitspark"]["on_error"] = "stock"
    found["bound"] = attempt(decode.bind_kv_caches, config, "binding the KV caches")
    if rank == 0:
        model.model.aux_hidden_state_layers = (1, 2)
    found["decode"] = model.bind_decode(config, torch.device("cpu"))
    found["given_up"], model.expert_shares.given_up = model.expert_shares.given_up, False
    config.additional_config["jitspark"]["exchanges"] = "symmetric_memory"
    found["mapped"] = model.bind_decode(config, torch.device("cpu"))
    return found


def refused_on_one(config, rank):
    """What each rank makes of a deployment whose support check refuses it on rank 1, for another GPU."""
    from vllm.platforms import current_platform

    from jitspark.errors import JitsparkError
    from jitspark.models.worker import prepare_backbone
    from jitspark.runtime import decode_backend

    config.additional_config["jitspark"]["on_error"] = "raise"
    if rank == 1:
        type(current_platform).is_device_capability = classmethod(lambda *_, **__: False)
    try:
        prepare_backbone(config)
    except (JitsparkError, ValueError) as error:
        raised = f"{type(error).__name__}: {error}"
    config.additional_config["jitspark"]["on_error"] = "stock"
    return {"raised": raised, "prepared": prepare_backbone(config), "then": decode_backend(config)}


def apart(found, wanted):
    return (found.float() - wanted.float()).norm(dim=-1) / wanted.float().norm(dim=-1)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    import importlib.util

    from bench.rank_group import leave

    spec = importlib.util.spec_from_file_location("vllm_conftest", Path(__file__).parent / "vllm" / "conftest.py")
    conftest = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(conftest)
    folder, sizes = Path(sys.argv[3]), {**conftest.TINY, "tp": SIZE}
    main(
        int(sys.argv[1]),
        sys.argv[2],
        lambda: conftest.vllm_config(folder, conftest.tiny_text(), **sizes, options=conftest.ON_HOPPER),
    )
    leave(0)
