"""The machine code inside an artifact: cut out, told apart by target, disassembled. For tests, bench and people.

An artifact carries its device code as an ELF image of its own (machine 190) in a container under the symbol
`kernels_binary`, where cuobjdump does not look. Needs pyelftools; disassembling needs NVIDIA's nvdisasm and cuobjdump.
"""

import collections
import importlib.metadata
import io
import re
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from jitspark.errors import EntryError, ToolchainError

EM_CUDA = 190
SYMBOL = "kernels_binary"

_INSTRUCTION = re.compile(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)", re.MULTILINE)
_TARGET = re.compile(r"^\s*\.target\s+(sm_\w+)", re.MULTILINE)
_USAGE = re.compile(r"REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)")


@dataclass(frozen=True, slots=True)
class MachineCode:
    """One kernel's device code: how often each instruction occurs, and what a thread or block takes.

    `registers` per thread, `stack` and `local` bytes per thread (spills show here), `shared` static bytes per block.
    """

    target: str
    instructions: dict[str, int]
    registers: int
    stack: int
    shared: int
    local: int

    def holds(self, name: str) -> bool:
        """Whether the instruction occurs; `LDG` stands for every LDG, `LDG.E.128` for those of 16 bytes."""
        return any(found == name or found.startswith(f"{name}.") for found in self.instructions)


def device_image(artifact: bytes, where: str = "artifact") -> bytes:
    """The device ELF inside a linked artifact. Raises EntryError when there is none."""
    from elftools.common.exceptions import ELFError
    from elftools.elf.elffile import ELFFile

    try:
        elf = ELFFile(io.BytesIO(artifact))
        symbol = elf.get_section_by_name(".symtab").get_symbol_by_name(SYMBOL)[0]
        section = elf.get_section(symbol["st_shndx"])
        start = symbol["st_value"] - section["sh_addr"]
        container = section.data()[start : start + symbol["st_size"]]
        image: bytes = container[container.index(b"\x7fELF") :]
        machine = ELFFile(io.BytesIO(image)).header["e_machine"]
    except (ELFError, AttributeError, TypeError, IndexError, KeyError, ValueError) as problem:
        raise EntryError(
            where=where,
            found=f"no device code ({problem})",
            needed=f"an artifact with the symbol {SYMBOL}",
            remedy="Rebuild the entry with `jitspark warm`.",
        ) from None
    assert machine in ("EM_CUDA", EM_CUDA), "another machine's code under the device code's symbol"
    return image


def disassemble(artifact: bytes, where: str = "artifact") -> MachineCode:
    """Disassemble an artifact. Raises ToolchainError when NVIDIA's tools are absent."""
    image = device_image(artifact, where)
    with tempfile.TemporaryDirectory(prefix="jitspark-") as folder:
        cubin = Path(folder) / "kernel.cubin"
        cubin.write_bytes(image)
        listing = _run("nvdisasm", "-c", str(cubin))
        usage = _USAGE.search(_run("cuobjdump", "-res-usage", str(cubin)))
    target = _TARGET.search(listing)
    assert usage is not None and target is not None, "the disassembler's output has another form"
    registers, stack, shared, local = map(int, usage.groups())
    counts = collections.Counter(_INSTRUCTION.findall(listing))
    return MachineCode(target.group(1), dict(counts), registers, stack, shared, local)


def disassembler() -> str | None:
    """The path of nvdisasm, from its package or PATH; None without it."""
    return _tool("nvdisasm")


def _tool(name: str) -> str | None:
    try:
        files = importlib.metadata.files(f"nvidia-cuda-{name}") or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    packaged = next((str(f.locate()) for f in files if f.name == name), None)
    return packaged or shutil.which(name)


def _run(name: str, *arguments: str) -> str:
    path = _tool(name)
    if path is None:
        raise ToolchainError(
            where="disassembler",
            found=f"no {name}",
            needed=f"the package nvidia-cuda-{name}",
            remedy="Install jitspark[dev].",
        )
    return subprocess.run([path, *arguments], capture_output=True, text=True, check=True, timeout=120).stdout
