"""The GPUs of this machine, asked of the driver through NVML: no CUDA context, and no driver is no GPU."""

from collections.abc import Sequence
from dataclasses import dataclass

from jitspark.target import target_of_capability


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU; `target` is None where no kernel supports it."""

    name: str
    capability: tuple[int, int]

    @property
    def target(self) -> str | None:
        return target_of_capability(*self.capability)


@dataclass(frozen=True, slots=True)
class Machine:
    """What the driver says: its version (None without a usable one) and its GPUs."""

    driver: str | None
    gpus: tuple[Gpu, ...]


def find_gpus() -> Machine:
    """The driver's version and GPUs. A machine without driver, or whose driver does not answer, has none."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except (pynvml.NVMLError, OSError):
        return Machine(None, ())
    try:
        handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
        found = tuple(Gpu(_text(pynvml.nvmlDeviceGetName(h)), _capability(pynvml, h)) for h in handles)
        return Machine(_text(pynvml.nvmlSystemGetDriverVersion()), found)
    except pynvml.NVMLError:
        return Machine(None, ())
    finally:
        pynvml.nvmlShutdown()


def targets_of(gpus: Sequence[Gpu]) -> tuple[str, ...]:
    """The targets of these GPUs, each once, sorted."""
    return tuple(sorted({gpu.target for gpu in gpus if gpu.target is not None}))


def _capability(nvml: object, handle: object) -> tuple[int, int]:
    major, minor = nvml.nvmlDeviceGetCudaComputeCapability(handle)  # type: ignore[attr-defined]
    return int(major), int(minor)


def _text(value: str | bytes) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else value
