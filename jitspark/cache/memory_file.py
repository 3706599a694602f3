"""Files in memory that hold code: filled once, sealed, and fit to be mapped where the file system forbids execution."""

import fcntl
import os

_MFD_EXEC = 0x10  # Linux 6.3: an executable memory file in spite of vm.memfd_noexec; older kernels refuse the flag
_SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE


def sealed_memory_file(name: str, content: bytes) -> int:
    """The descriptor of a memory file that holds `content`, may be mapped as code, and never changes again."""
    descriptor = _memory_file(name)
    try:
        _write_all(descriptor, content)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _memory_file(name: str) -> int:
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
    try:
        return os.memfd_create(name, flags | _MFD_EXEC)
    except OSError:
        return os.memfd_create(name, flags)


def _write_all(descriptor: int, content: bytes) -> None:
    view = memoryview(content)
    while view:
        view = view[os.write(descriptor, view) :]
