"""What another user sees: root's tests become one, in a child."""

import os

NOBODY = 65534


def as_nobody(action):
    """What `action` returns in a child that has become another user."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.setresgid(NOBODY, NOBODY, NOBODY)
            os.setresuid(NOBODY, NOBODY, NOBODY)
            os.write(writer, repr(action()).encode())
        except BaseException as problem:  # noqa: BLE001 - told to the parent, which fails on it
            os.write(writer, f"{type(problem).__name__}: {problem}".encode())
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as stream:
        said = stream.read()
    os.waitpid(pid, 0)
    return said
