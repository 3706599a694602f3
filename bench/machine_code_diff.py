"""Whether a change left machine code alone: `python -m bench.machine_code_diff BEFORE AFTER [--kernel NAME]...`.

BEFORE and AFTER are two caches, warmed alike by the sources before and after the change. Entries are paired by what
was compiled (kernel, axes, dtypes, statics, target), since any edit of a source changes their keys. A pair is equal
when its device code is (instructions, constants, relocations, what the driver reads about them) and its host code,
which decides how it is launched. Host code holds the device function's name, cut into words; where an edit has changed
the name, host code is not compared. Exit status 1 when a pair differs or only one cache has a specialization.
"""

import argparse
import io
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from jitspark.cache.record import Record
from jitspark.cache.store import Entry, Layer, keys_in, read_entry
from jitspark.key import canonical
from jitspark.machine_code import device_image

# Behind these comes the function's name. Others hold names, or describe the file.
DEVICE = re.compile(r"(\.rela)?\.(text|nv\.constant\d+|nv\.info|nv\.shared)\b")
HOST = re.compile(r"\.(l?text|rodata)\b")


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    before, after = (entries_in(root, options.kernel) for root in (options.before, options.after))
    status = 0
    for name in sorted(before.keys() | after.keys()):
        if name not in before or name not in after:
            found = f"only in {options.before if name in before else options.after}"
        else:
            found = ", ".join(difference(before[name], after[name]))
        if found:
            status = 1
            print(f"{name}: {found}")
    both = before.keys() & after.keys()
    same = sum(before[name].record.sha256 == after[name].record.sha256 for name in both)
    renamed = sum(function_name(before[name]) != function_name(after[name]) for name in both)
    print(f"{len(both)} specializations in both: {same} are the same files, {renamed} have a function of another name")
    return status


def entries_in(root: Path, kernels: Sequence[str] = ()) -> dict[str, Entry]:
    """The entries of a cache by what was compiled; of these kernels only, or of all."""
    layer = Layer(root, writable=False, trusted=True)
    found: dict[str, Entry] = {}
    for key, toolchain in keys_in(layer):
        entry = read_entry(layer, key, toolchain) if not kernels or key.kernel in kernels else None
        if entry is None:
            continue
        name = _specialization(entry.record)
        if name in found:
            raise SystemExit(f"{root} has two entries of {name}: warm an empty cache")
        found[name] = entry
    return found


def _specialization(record: Record) -> str:
    recipe = record.recipe
    chosen: dict[str, object] = {**recipe["axes"], **recipe["dtypes"], **recipe["statics"]}
    sizes = ", ".join(f"{name}={canonical(chosen[name]).decode()}" for name in sorted(chosen))
    return f"{record.kernel}({sizes}) for {recipe['target']}"


def difference(before: Entry, after: Entry) -> list[str]:
    """The sections that differ, such as `device .text`; none for entries whose files are the same."""
    if before.record.sha256 == after.record.sha256:
        return []
    renamed = function_name(before) != function_name(after)
    one, other = (dict(_sections(entry, with_host=not renamed)) for entry in (before, after))
    return sorted(name for name in one.keys() | other.keys() if one.get(name) != other.get(name))


def function_name(entry: Entry) -> str:
    """The device function's, which the compiler makes from its Python name and its arguments' types."""
    from elftools.elf.elffile import ELFFile

    image = device_image(entry.read_artifact(), entry.where)
    names: Iterator[str] = (section.name for section in ELFFile(io.BytesIO(image)).iter_sections())
    return next(name.removeprefix(".text.") for name in names if name.startswith(".text."))


def _sections(entry: Entry, *, with_host: bool) -> Iterator[tuple[str, list[bytes]]]:
    artifact = entry.read_artifact()
    sides = (("device", device_image(artifact, entry.where), DEVICE), ("host", artifact, HOST))
    for side, content, wanted in sides if with_host else sides[:1]:
        yield from ((f"{side} {name}", parts) for name, parts in sections(content, wanted).items())


def sections(elf: bytes, wanted: re.Pattern[str]) -> Mapping[str, list[bytes]]:
    """The sections whose names begin like `wanted`, by that beginning, in their order: size, then content."""
    from elftools.elf.elffile import ELFFile

    found: dict[str, list[bytes]] = {}
    for section in ELFFile(io.BytesIO(elf)).iter_sections():
        match = wanted.match(section.name)
        if match:
            found.setdefault(match.group(), []).append(b"%d:" % section["sh_size"] + section.data())
    return found


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench.machine_code_diff", description=__doc__.partition("\n")[0])
    parser.add_argument("before", metavar="BEFORE", type=Path, help="a cache directory")
    parser.add_argument("after", metavar="AFTER", type=Path)
    parser.add_argument("--kernel", metavar="NAME", action="append", default=[], help="only this one; repeatable")
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
