"""A compiler child that speaks the real one's protocol and takes as long as it is told: races become cheap to make.

`stub_compiler.py --templates DIR [--seconds S] [--until FILE] [--starts N] [--log FILE] [--answer KIND] PARENT_PID`. A
compile takes S seconds, then lasts until FILE exists, and until N compiles have begun by the log. Its artifact is a
template whose function returns a number that says which key it was compiled for. KIND is good, or how it goes wrong:
fail, exit, nothing (no artifact), cut (half of one), odd (what no record may hold), or one of those in _SAID.
"""

import argparse
import ctypes
import hashlib
import json
import os
import signal
import sys
import time
from pathlib import Path

PLACEHOLDER = bytes.fromhex("f00dfeedf00dfe00")


def number_of(kernel, axes, target):
    """What the artifact of this key returns when it is called."""
    digest = hashlib.sha256(json.dumps([kernel, axes, target], sort_keys=True).encode()).digest()
    return int.from_bytes(digest[:7], "little")


def artifact_of(template, kernel, axes, target):
    return template.replace(PLACEHOLDER, number_of(kernel, axes, target).to_bytes(8, "little"))


def parsed():
    parser = argparse.ArgumentParser()
    parser.add_argument("--templates", type=Path)
    parser.add_argument("--seconds", type=float, default=0.0)
    parser.add_argument("--until", type=Path)
    parser.add_argument("--starts", type=int, default=0)
    parser.add_argument("--log", type=Path)
    parser.add_argument("--answer", default="good")
    parser.add_argument("parent", type=int)
    return parser.parse_args()


def note(path, text):
    """One write of a short line, so that lines of several children never mix."""
    if path is not None:
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        os.write(descriptor, f"{text}\n".encode())
        os.close(descriptor)


def begun(log):
    return sum(line.startswith("start ") for line in log.read_text().splitlines())


def compile_for_long(options):
    time.sleep(options.seconds)
    while options.until is not None and not options.until.exists():
        time.sleep(0.005)
    deadline = time.monotonic() + 60.0  # where they never begin, the test says so
    while options.starts and begun(options.log) < options.starts and time.monotonic() < deadline:
        time.sleep(0.005)


# What such a child says instead of an answer, before it hangs.
_SAID = {
    "half": '{"signature": "stub(',
    "garbage": "[jit] compiling...\n",
    "null": "null\n",
    "twice": '{"signature": "a", "needs": [], "seconds": 0}\n' * 2,
    "endless": "x" * 2_000_000,
}


def answer(request, options):
    if options.answer == "exit":
        (Path(request["directory"]) / "kernel.so").write_bytes(b"")
        sys.stderr.write("\x1b[31mld: /opt/secret/place/a.o: no such file\x1b[0m\n")
        sys.stderr.flush()
        os._exit(1)
    if options.answer == "fail":
        log = "\x1b[31merror\x1b[0m in /opt/secret/place/kernel.py:7"
        parts = {"where": request["kernel"], "found": "a bad kernel", "needed": "a good one", "remedy": "Mend it."}
        return {"error": "CompileError", **parts, "log": log}
    template = (options.templates / f"{request['kernel']}.so").read_bytes()
    content = artifact_of(template, request["kernel"], request["axes"], request["target"])
    if options.answer == "cut":
        content = content[: len(content) // 2]
    if options.answer != "nothing":
        (Path(request["directory"]) / "kernel.so").write_bytes(content)
    signature = "\x1b[2J" if options.answer == "odd" else f"{request['kernel']}()"
    return {"signature": signature, "needs": [], "seconds": options.seconds}


def main():
    options = parsed()
    ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)  # die with the parent
    if os.getppid() != options.parent:
        os._exit(1)
    for line in sys.stdin:
        request = json.loads(line)
        name = f"{request['kernel']} {request['axes']} {request['target']}"
        note(options.log, f"start {os.getpid()} {time.monotonic():.4f} {name}")
        compile_for_long(options)
        if options.answer in _SAID:
            sys.stdout.write(_SAID[options.answer])
            sys.stdout.flush()
            note(options.log, f"said {os.getpid()} {time.monotonic():.4f} {name}")
            time.sleep(3600.0)
        result = answer(request, options)
        note(options.log, f"end {os.getpid()} {time.monotonic():.4f} {name}")
        sys.stdout.write(json.dumps(result) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
