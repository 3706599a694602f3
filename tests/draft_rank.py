"""One of two ranks with a specialized draft on a CPU: `draft_rank.py RANK MEETING CONFIG_FOLDER WEIGHTS`.

Prints as JSON what this rank has: how fc is held, and how far the combined states are from those of a whole fc.
"""

import json
import os
import sys
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")


def main(rank, meeting, weights, config_of):
    import draft_models
    import torch

    config = config_of()
    import vllm_cpu
    from vllm.config import set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel

    vllm_cpu.take_cpu_platform()
    with set_current_vllm_config(config):
        init_distributed_environment(2, rank, f"file://{meeting}", rank, "gloo")
        initialize_model_parallel(2)
    model = draft_models.build(config, weights)
    draft = type(model.model.specialized_draft).__name__
    whole = dict(draft_models.read(weights))["fc.weight"]
    taps = torch.randn(24, whole.shape[1], generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        combined = model.combine_hidden_states(taps)
        alone = model.combine_hidden_states(taps[0])
    fused, stock = both_forwards(model, config)
    wanted = torch.nn.functional.linear(taps.bfloat16(), whole)
    unbound = binding_that_fails(model.model, rank)
    sys.stdout.write(
        json.dumps(
            {
                "fc": type(model.model.fc).__name__,
                "fc_rows": list(model.model.fc.weight.shape),
                "own_rows": bool(model.model.fc.weight.equal(whole.chunk(2)[rank])),
                "shape": list(combined.shape),
                "error": (combined.float() - wanted.float()).abs().max().item(),
                "alone": (alone.float() - wanted[0].float()).abs().max().item(),
                "markov_rows": model.model.markov_head.markov_w2.weight.shape[0],
                "draft": draft,
                "forward": ((fused - stock).norm() / stock.norm()).item(),
                "sum": fused.sum().item(),
                "unbound": unbound,
            }
        )
    )


class Patch:
    """Replaces for good: this process ends soon."""

    setattr = staticmethod(setattr)


def binding_that_fails(model, rank):
    """What this rank ends with where rank 1 has no memory to bind the draft's plans in."""
    import torch

    from jitspark.errors import JitsparkError
    from jitspark.runtime import draft

    def refuse(*_):
        raise torch.OutOfMemoryError("no memory for an arena")

    if rank == 1:
        draft._bound = refuse
    try:
        draft.build_draft_decode(model, model._compilation_mode)
    except (JitsparkError, torch.OutOfMemoryError) as error:
        return f"{type(error).__name__}: {error}"
    return None


def both_forwards(model, config):
    """Hidden states of one step of two requests, by the plans and by vLLM's layers, from equal caches."""
    import draft_models
    import torch
    from vllm.config import CUDAGraphMode
    from vllm.forward_context import set_forward_context

    draft_models.plain_operations(Patch())
    found = []
    for draft in (model.model.specialized_draft, None):
        model.model.specialized_draft = draft
        draft_models.with_caches(model, seed=3)
        metadata, positions = draft_models.metadata(model, 2, [40, 15], torch.Generator().manual_seed(5))
        ids = torch.arange(14) * 37
        mode = CUDAGraphMode.NONE
        with torch.no_grad(), set_forward_context(metadata, config, cudagraph_runtime_mode=mode):
            found.append(model(ids, positions).float().clone())
    return found


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    import importlib.util

    from bench.rank_group import leave

    spec = importlib.util.spec_from_file_location("vllm_conftest", Path(__file__).parent / "vllm" / "conftest.py")
    conftest = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(conftest)
    import draft_models

    folder = Path(sys.argv[3])
    sizes = {**conftest.TINY, "tp": 2}
    main(
        int(sys.argv[1]),
        sys.argv[2],
        Path(sys.argv[4]),
        lambda: conftest.vllm_config(
            folder, conftest.tiny_text(), **sizes, options=conftest.ON_HOPPER, draft_fields=draft_models.CONFIG
        ),
    )
    leave(0)
