"""vLLM's platform as a CPU whose linear layers torch multiplies: vLLM's own kernels for CPUs are not installed."""

import sys

import torch


def take_cpu_platform():
    """Returns what gives the former one back. No config can be made meanwhile: a CPU's has another model runner."""
    import vllm.platforms
    from vllm.platforms.cpu import CpuPlatform

    before, cpu = vllm.platforms.current_platform, CpuPlatform()
    has_amx = torch.cpu._is_amx_tile_supported

    def give_back():
        torch.cpu._is_amx_tile_supported = has_amx
        _replace_platform(cpu, before)

    torch.cpu._is_amx_tile_supported = lambda: False  # else weights are packed for a kernel of vLLM's
    _replace_platform(before, cpu)
    return give_back


def _replace_platform(old, new):
    """Also where modules have taken the platform by name."""
    sys.modules["vllm.platforms"]._current_platform = new
    for module in list(sys.modules.values()):
        if module is not None and vars(module).get("current_platform") is old:
            module.current_platform = new
