"""One deployment of bench/vllm_pair.py in a process of its own: start it, serve, and write all of it down.

Needs vLLM and a GPU. Everything is greedy and in this process, so that two runs can be compared token by token.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

ENVIRONMENT = {
    "VLLM_USE_V2_MODEL_RUNNER": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine in this process: logits are read where they are made
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
}
CAPTURE_SIZES = [1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64]
SPECULATION = {"method": "dspark", "num_speculative_tokens": 7, "draft_sample_method": "probabilistic"}
RECORDED = list(range(400, 420))  # the prompt whose logits are kept


def engine_arguments(pair: Path, additional: Mapping[str, Any], extra: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of vLLM's LLM for a pair of checkpoints, `target` and `draft`."""
    backend = extra.get("attention_backend", "FLASH_ATTN")
    return {
        "model": str(pair / "target"),
        "tokenizer": str(pair / "target"),
        "dtype": "bfloat16",
        "max_model_len": 1024,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 512,
        "block_size": 16,
        "gpu_memory_utilization": 0.3,
        "num_gpu_blocks_override": extra.get("num_gpu_blocks", 2048),
        "seed": 0,
        "enable_prefix_caching": False,
        "enable_expert_parallel": True,
        "tensor_parallel_size": extra.get("tp", 1),
        "disable_log_stats": False,
        # with all of them 0, decode steps get token ids; otherwise embeddings, as with the real model
        "limit_mm_per_prompt": extra.get("limit_mm_per_prompt", {"image": 0, "video": 0, "audio": 0}),
        "skip_mm_profiling": True,
        "compilation_config": {
            "mode": 0,
            "cudagraph_mode": "FULL_DECODE_ONLY",
            "cudagraph_capture_sizes": CAPTURE_SIZES,
        },
        "attention_config": {"backend": backend},
        "speculative_config": {**SPECULATION, "model": str(pair / "draft"), "attention_backend": backend},
        "additional_config": dict(additional),
    }


class LogitsRecorder:
    """Keeps the logits of uniform decode steps, each row under the position and the tokens that it continues."""

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self._stock = runner.model.compute_logits
        self.rows: list[tuple[list[int], list[int], Any]] = []

    def __enter__(self) -> Self:
        self._runner.model.compute_logits = self._recorded
        return self

    def __exit__(self, *_: object) -> None:
        del self._runner.model.compute_logits

    def _recorded(self, hidden_states: Any) -> Any:
        logits = self._stock(hidden_states)
        rows = len(hidden_states)
        buffers = self._runner.input_buffers
        if rows == 8:
            self.rows.append(
                (buffers.input_ids[:8].tolist(), buffers.positions[:8].tolist(), logits.float().cpu().numpy().copy())
            )
        return logits


def on_path(rows: Sequence[tuple[list[int], list[int], Any]], tokens: Sequence[int]) -> dict[int, Any]:
    """Logits by position, of rows whose tokens are all those that were finally kept."""
    found = {}
    for ids, positions, logits in rows:
        for row, (token, position) in enumerate(zip(ids, positions, strict=True)):
            if position >= len(tokens) or tokens[position] != token:
                break
            found[position] = logits[row]
    return found


def serve(
    llm: Any, prompts: Sequence[Sequence[int]], arrivals: Sequence[int], lengths: Sequence[int]
) -> dict[str, Any]:
    """Greedy tokens of requests that arrive at these engine steps and end at these lengths; seconds of each step."""
    from vllm import SamplingParams

    engine, steps, tokens = llm.llm_engine, [], {}
    waiting = sorted(range(len(prompts)), key=lambda index: arrivals[index])
    step = 0
    while waiting or engine.has_unfinished_requests():
        while waiting and arrivals[waiting[0]] <= step:
            index = waiting.pop(0)
            sampling = SamplingParams(temperature=0.0, max_tokens=lengths[index], ignore_eos=True, detokenize=False)
            engine.add_request(f"{step}-{index}", {"prompt_token_ids": [0, *prompts[index]]}, sampling)
        started = time.perf_counter()
        outputs = engine.step()
        steps.append(time.perf_counter() - started)
        for output in outputs:
            if output.finished:
                tokens[int(output.request_id.split("-")[-1])] = list(output.outputs[0].token_ids)
        step += 1
    return {"tokens": [tokens[index] for index in range(len(prompts))], "steps": steps}


def batches(*, timed: bool) -> Iterator[tuple[str, list[list[int]], list[int], list[int]]]:
    """Name, prompts, arrivals and lengths of what is served."""
    one = [[*range(400, 420)], [*range(700, 733)]]
    yield "two", one, [0, 0], [64, 64]
    mixed = [[400 + (37 * index + 11 * place) % 1500 for place in range(5 + 40 * index)] for index in range(8)]
    yield "eight, arriving one by one", mixed, [3 * index for index in range(8)], [64, 9, 40, 23, 64, 8, 31, 50]
    yield "eight at once", mixed, [0] * 8, [64, 9, 40, 23, 64, 8, 31, 50]
    for size in (1, 2, 8) if timed else ():
        same = [[400 + 7 * index + place for place in range(20)] for index in range(size)]
        yield f"timed {size}", same, [0] * size, [256] * size


def acceptance(llm: Any) -> dict[str, float]:
    """Drafted and accepted tokens and preempted requests so far, as vLLM counts them."""
    values = {metric.name: getattr(metric, "value", None) for metric in llm.get_metrics()}
    names = {"drafts": "num_drafts", "drafted": "num_draft_tokens", "accepted": "num_accepted_tokens"}
    found = {name: values.get(f"vllm:spec_decode_{field}", 0) or 0 for name, field in names.items()}
    return {**found, "preemptions": values.get("vllm:num_preemptions", 0) or 0}


def run(options: argparse.Namespace) -> dict[str, Any]:
    started = time.perf_counter()
    from vllm import LLM

    found: dict[str, Any] = {"import_s": time.perf_counter() - started}
    started = time.perf_counter()
    llm = LLM(**engine_arguments(options.pair, json.loads(options.additional), json.loads(options.extra)))
    found["start_s"] = time.perf_counter() - started
    executor = llm.llm_engine.engine_core.engine_core.model_executor
    if hasattr(executor, "driver_worker"):  # one rank, in this process
        embeds = executor.driver_worker.worker.model_runner.uses_inputs_embeds
        found["decode_input"] = "embeddings" if embeds else "token ids"
        started = time.perf_counter()
        found["classes"] = _record(llm, executor.driver_worker.worker.model_runner, options.out)
        found["first_s"] = time.perf_counter() - started  # what is compiled for a first request is in it
        if options.judge:
            found["reference"] = _judge(llm, executor.driver_worker.worker.model_runner, options)
    found["served"] = {name: serve(llm, *what) for name, *what in batches(timed=not options.untimed)}
    found["acceptance"] = acceptance(llm)
    return found


def _record(llm: Any, runner: Any, out: Path) -> list[str]:
    """Write the logits of one request's contexts, and return the modules of the backbone's and the draft's classes."""
    import numpy as np

    with LogitsRecorder(runner) as recorder:
        kept = serve(llm, [RECORDED], [0], [96])["tokens"][0]
    tokens = [0, *RECORDED, *kept]
    logits = {str(position): row for position, row in on_path(recorder.rows, tokens).items()}
    np.savez(out.with_suffix(".npz"), tokens=np.array(tokens), **logits)
    return [type(runner.model).__module__, type(runner.speculator.model).__module__]


def _judge(llm: Any, runner: Any, options: argparse.Namespace) -> dict[str, Any]:
    """Serve the batches that are not timed, with some of their steps held against the references."""
    from bench.vllm_reference import StepJudge, summary

    with StepJudge(runner, options.judge) as judge:
        for _, *what in batches(timed=False):
            serve(llm, *what)
    options.out.with_suffix(".steps.json").write_text(json.dumps(judge.found), encoding="utf-8")
    return summary(judge.found)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("pair", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--additional", default="{}")
    parser.add_argument("--extra", default="{}")
    parser.add_argument("--judge", type=int, default=0, metavar="STEPS", help="of each number of rows, by references")
    parser.add_argument("--untimed", action="store_true", help="without the batches that are timed")
    options = parser.parse_args()
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    options.out.write_text(json.dumps(run(options)), encoding="utf-8")
    sys.stdout.flush()
    os._exit(0)  # vLLM's threads would keep a process that is done


if __name__ == "__main__":
    main()
