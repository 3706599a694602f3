"""`doctor`: one PASS, FAIL or NOTE for each thing that jitspark needs from this machine, each FAIL with what to do."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from jitspark.doctor import caches, entries, machine
from jitspark.doctor import vllm as in_vllm
from jitspark.doctor.check import Check, run
from jitspark.settings import Settings

# in the order of the parts that depend on each other
CHECKS: Mapping[str, Callable[[Settings], str]] = {
    "Python": machine.python,
    "compiler": machine.compiler,
    "CUDA flavour": machine.cuda_flavour,
    "linker": machine.linker,
    "runtime library": machine.runtime_library,
    "symbols": machine.symbols,
    "driver": machine.driver,
    "read-only roots": caches.read_only_roots,
    "cache root": caches.cache_root,
    "cached entries": entries.cached_entries,
    "memory files": machine.memory_files,
    "free space": caches.free_space,
    "locks": caches.locks,
    "rename": caches.rename,
}


def checks(settings: Settings, pack: Path | None = None, *, vllm: bool = False) -> list[Check]:
    """Every check; with `pack`, also whether what it holds could run here; with `vllm`, what vLLM needs."""
    wanted = dict(CHECKS) | (dict(in_vllm.CHECKS) if vllm else {})
    found = [run(part, check, settings) for part, check in wanted.items()]
    return (
        found if pack is None else [*found, run(f"pack {pack.name}", lambda known: entries.pack(pack, known), settings)]
    )


def checks_lines(found: Sequence[Check]) -> Iterator[str]:
    for check in found:
        yield f"{check.status}  {check.part}: {check.text}"
        if check.remedy:
            yield f"      {check.remedy}"
    failed = sum(check.status == "FAIL" for check in found)
    yield f"{len(found)} checks, {failed} failed"


def checks_json(found: Sequence[Check]) -> dict[str, Any]:
    return {"checks": [asdict(check) for check in found], "failed": sum(check.status == "FAIL" for check in found)}
