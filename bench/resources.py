"""What a kernel takes of a multiprocessor, out of its machine code: registers and spills, for result files."""

from collections.abc import Mapping, Sequence
from typing import Any

from jitspark.machine_code import disassemble, disassembler
from jitspark.store import Entry


def resources(entries: Sequence[Entry]) -> dict[str, Mapping[str, Any]]:
    """By recipe: registers a thread, stack and local bytes a thread (spills show there), static shared bytes.

    Empty where NVIDIA's disassembler is not installed.
    """
    if disassembler() is None:
        return {}
    found: dict[str, Mapping[str, Any]] = {}
    for entry in entries:
        code = disassemble(entry.read_artifact(), str(entry.key))
        found[entry.key.recipe] = {
            "registers": code.registers,
            "stack_bytes": code.stack,
            "local_bytes": code.local,
            "static_shared_bytes": code.shared,
        }
    return found
