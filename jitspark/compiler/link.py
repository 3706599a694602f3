"""From an object file to the artifact, and what the artifact says about itself."""

import hashlib
import re
import subprocess
from pathlib import Path

from jitspark.cache.failures import clean_log
from jitspark.cache.loader import map_artifact
from jitspark.cache.runtime_library import installed_runtime_library, load_runtime_library
from jitspark.errors import CompileError, ToolchainError
from jitspark.toolchain import linker_path

# -Bsymbolic and the version script bind every internal reference inside the library: with a plain shared object
# another kernel's `cuda_load` can be taken for this one's. No build id, so equal inputs give equal bytes.
LINK_OPTIONS = ("-shared", "-Bsymbolic", "--build-id=none", "-z", "now", "-z", "relro", "-z", "noexecstack")
VERSION_SCRIPT = "{ global: __tvm_ffi_*; local: *; };\n"


def link(kernel: str, object_file: Path, artifact: Path) -> None:
    """Link `object_file` into the shared library `artifact`."""
    linker = linker_path()
    if linker is None:
        raise ToolchainError(
            where="linker", found="no `ld` on PATH", needed="GNU ld", remedy="Install binutils on the building machine."
        )
    script = object_file.with_suffix(".map")
    script.write_text(VERSION_SCRIPT)
    command = [linker, *LINK_OPTIONS, f"--version-script={script.name}", "-o", artifact.name, object_file.name]
    answer = subprocess.run(command, cwd=artifact.parent, capture_output=True, text=True, check=False)
    if answer.returncode != 0:
        raise CompileError(
            where=kernel,
            found=f"`ld` ended with status {answer.returncode}",
            needed="a linked artifact",
            remedy="See the log; `jitspark doctor` checks the toolchain.",
            log=clean_log(answer.stderr),
        )
    object_file.unlink()
    script.unlink()


def needed_symbols(artifact: Path) -> list[str]:
    """The undefined dynamic symbols, sorted: what a process must offer before it maps the artifact."""
    from elftools.elf.elffile import ELFFile

    with artifact.open("rb") as stream:
        table = ELFFile(stream).get_section_by_name(".dynsym")
        return sorted(s.name for s in table.iter_symbols() if s.name and s["st_shndx"] == "SHN_UNDEF")


def signature(artifact: Path, kernel: str) -> str:
    """The argument list in the artifact's own words, from the refusal of a call without arguments."""
    import tvm_ffi

    load_runtime_library(installed_runtime_library())
    # from memory, as a serving process does: the directory may forbid execution
    content = artifact.read_bytes()
    address = map_artifact(content, hashlib.sha256(content).hexdigest(), f"__tvm_ffi_{kernel}")
    assert address is not None, "the version script exports it"
    try:
        tvm_ffi.Function.__from_extern_c__(address)()
    except TypeError as refusal:
        return signature_in(str(refusal))
    raise AssertionError(f"{kernel} accepted a call without arguments")


def signature_in(refusal: str) -> str:
    """The quoted signature in a refusal's text."""
    found = re.search(r"`([^`]*)`", refusal)
    return found.group(1) if found else refusal.splitlines()[-1]
