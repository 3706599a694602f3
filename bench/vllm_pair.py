"""Stock vLLM and the specialized decode on one pair of checkpoints, each in its own process, compared.

    python -m bench.vllm_pair --pair DIR [--geometry NAME] [--target sm_90a] [--out DIR]

`DIR/target` and `DIR/draft` are checkpoints of a geometry. Both serve the same greedy requests: alone, eight at once,
arriving while others decode, ending in the middle of a batch. Compared are tokens, the logits of equal contexts,
acceptance, and times. Kernels come from the cache (JITSPARK_CACHE_PATH). Exit status 1 where tokens differ; with
--judge, for pairs whose stock decode is no oracle, where launches of served steps differ from their references instead.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
VARIANTS = ("stock", "specialized")


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    results = {name: _run(options, name) for name in options.variants}
    good = all("error" not in result for result in results.values())
    for name, result in results.items():
        print(name, json.dumps(_summary(result)))
    if good and len(results) == len(VARIANTS):
        stock, ours = (results[name] for name in VARIANTS)
        differing = _differing(stock, ours)
        print("tokens differ in", differing) if differing else print("tokens are equal in every batch")
        if (options.out / "stock.npz").exists():
            print("logits", json.dumps(_logits(options)))
        good = not differing or bool(options.judge)  # then the references are the oracle, not stock
    return 0 if good and not any(map(_misjudged, results.values())) else 1


def _misjudged(result: Mapping[str, Any]) -> bool:
    judged = result.get("reference")
    return judged is not None and bool(judged["problems"] or judged["unlike_the_graph"] or not judged["launches"])


def _run(options: argparse.Namespace, variant: str) -> dict[str, Any]:
    """What a variant's process wrote, or its error."""
    out = options.out / f"{variant}.json"
    out.unlink(missing_ok=True)
    log = options.out / f"{variant}.log"
    command = [sys.executable, "-P", "-m", "bench.vllm_run", str(options.pair), "--out", str(out)]
    command += ["--additional", json.dumps(_additional(options) if variant == "specialized" else {})]
    command += ["--extra", options.extra]
    if variant == "specialized":
        command += ["--judge", str(options.judge)]
    command += ["--untimed"] if options.untimed else []
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
    }
    started = time.perf_counter()
    with log.open("w") as stream:
        process = subprocess.Popen(command, stdout=stream, stderr=subprocess.STDOUT, env=environment, cwd=ROOT)
        try:
            process.wait(options.limit)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    if not out.exists():
        return {"error": log.read_text(errors="replace")[-options.tail :], "status": process.returncode}
    return {**json.loads(out.read_text()), "wall_s": time.perf_counter() - started}


def _additional(options: argparse.Namespace) -> dict[str, Any]:
    chosen = {"targets": [options.target], "geometry": options.geometry, **json.loads(options.options)}
    return {"decode_backend": "latency_specialized", "jitspark": chosen}


def _summary(result: Mapping[str, Any]) -> dict[str, Any]:
    if "error" in result:
        return dict(result)
    counted = result["acceptance"]
    timed = {
        name: {
            "median_ms": round(1e3 * statistics.median(batch["steps"][4:-2]), 3),
            "tokens_per_s": round(sum(map(len, batch["tokens"])) / sum(batch["steps"]), 1),
            "tokens_per_step": round(len(batch["tokens"][0]) / (len(batch["steps"]) - 1), 2),
        }
        for name, batch in result["served"].items()
        if name.startswith("timed")
    }
    return {
        "classes": result.get("classes"),
        "decode_input": result.get("decode_input"),
        "import_s": round(result["import_s"], 1),
        "start_s": round(result["start_s"], 1),
        "first_s": round(result.get("first_s", 0.0), 1),
        "acceptance": round(counted["accepted"] / max(1, counted["drafted"]), 4),
        "counted": counted,
        "timed": timed,
        **({"reference": result["reference"]} if "reference" in result else {}),
    }


def _differing(stock: Mapping[str, Any], ours: Mapping[str, Any]) -> list[str]:
    """Batches with other tokens; for each the request and place where they part."""
    found = []
    for name, batch in stock["served"].items():
        for index, (wanted, got) in enumerate(zip(batch["tokens"], ours["served"][name]["tokens"], strict=True)):
            if wanted != got:
                place = next(i for i, pair in enumerate(zip(wanted, got, strict=False)) if pair[0] != pair[1])
                found.append(f"{name}, request {index} from token {place}")
    return found


def _logits(options: argparse.Namespace) -> dict[str, Any]:
    """How far the logits of equal contexts are apart, beside their spread and the least margin of a greedy choice."""
    import numpy as np

    stock, ours = (np.load(options.out / f"{name}.npz") for name in VARIANTS)
    same = [
        position
        for position in stock.files
        if position in ours.files
        and position != "tokens"
        and np.array_equal(stock["tokens"][: int(position) + 1], ours["tokens"][: int(position) + 1])
    ]
    if not same:
        return {"positions": 0}
    wanted, got = (np.stack([each[position] for position in same]) for each in (stock, ours))
    top = np.sort(wanted, axis=-1)
    return {
        "positions": len(same),
        "largest_difference": float(np.abs(wanted - got).max()),
        "rms_difference": float(np.sqrt(np.mean((wanted - got) ** 2))),
        "rms": float(np.sqrt(np.mean(wanted**2))),
        "least_margin": float((top[:, -1] - top[:, -2]).min()),
    }


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="bin/check-vllm", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--pair", type=Path, required=True, metavar="DIR")
    parser.add_argument("--geometry", default="tiny")
    parser.add_argument("--target", default="sm_90a")
    parser.add_argument("--options", default="{}", metavar="JSON", help='more of additional_config["jitspark"]')
    parser.add_argument(
        "--extra", default="{}", metavar="JSON", help="attention_backend, num_gpu_blocks, tp, limit_mm_per_prompt"
    )
    parser.add_argument(
        "--judge", type=int, default=0, metavar="STEPS", help="hold so many steps of each row count against references"
    )
    parser.add_argument("--untimed", action="store_true", help="without the batches that are timed")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--out", type=Path, default=Path("vllm-pair"))
    parser.add_argument("--limit", type=float, default=600.0, metavar="SECONDS", help="of one process")
    parser.add_argument("--tail", type=int, default=4000, help="characters of a failed process' log to show")
    return parser


if __name__ == "__main__":
    sys.exit(main())
