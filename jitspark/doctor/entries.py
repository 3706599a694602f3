"""What `doctor` checks of entries, in the caches in use or in a pack: whether this process offers what they need."""

from pathlib import Path

from cache_tools.machine import gpu_targets
from cache_tools.manifest import Needs, needs_of
from jitspark.cache.runtime_library import find_runtime_library, load_runtime_library, offers
from jitspark.doctor.check import FailedError
from jitspark.settings import Settings
from jitspark.target import CUDA_FLAVOUR, host_name


def cached_entries(settings: Settings) -> str:
    """What the entries of the roots need, and whether this process offers it."""
    from cache_tools.entries import entries_in
    from cache_tools.roots import readable_layers

    entries = [(entry.key, entry.record) for entry in entries_in(readable_layers(settings))]
    return f"{len(entries)} entries{_offered(needs_of(entries), settings)}" if entries else "none"


def pack(pack: Path, settings: Settings) -> str:
    from cache_tools.opened import opened_pack
    from cache_tools.signing import ANY
    from cache_tools.unpack import PackedEntry, packed_items

    with opened_pack(pack, ANY) as opened:
        items = packed_items(opened, str(pack))
        found = [(item.key, item.record) for item in items if isinstance(item, PackedEntry)]
    needs = needs_of(found)
    signed = "signed, not checked here" if opened.signature else "not signed"
    return f"{len(found)} entries{_offered(needs, settings)}; {signed}"


def _offered(needs: Needs, settings: Settings) -> str:
    """What is needed, as text. Raises FailedError where it is not here: other hosts' entries alone, or a symbol."""
    told = f" for {', '.join(needs.hosts)} and {', '.join(needs.targets)}"
    if host_name() not in needs.hosts:
        raise FailedError(f"entries{told}, and this is {host_name()}", "Use a cache that was built for this host.")
    lacking = [flavour for flavour in needs.runtimes if flavour != CUDA_FLAVOUR]
    if lacking:
        raise FailedError(f"entries for the runtime library {', '.join(lacking)}", f"Build them for {CUDA_FLAVOUR}.")
    load_runtime_library(find_runtime_library(settings))
    missing = [symbol for symbol in needs.symbols if not offers(symbol)]
    if missing:
        text = f"entries{told} need symbols that nothing here offers: {', '.join(missing[:5])}"
        raise FailedError(text, "Install the apache-tvm-ffi and runtime library that they were built against.")
    return f"{told}; {len(needs.symbols)} symbols, all offered here{_gpu_note(needs)}"


def _gpu_note(needs: Needs) -> str:
    here = gpu_targets()
    fitting = ", ".join(sorted(set(here or ()) & set(needs.targets))) or "none of them"
    return "; no GPU to launch on" if here is None else f"; the GPUs here run {fitting}"
