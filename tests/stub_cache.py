"""What cache tests share: keys of a stub kernel, an artifact for each, and processes that build and load them."""

import contextlib
import functools
import hashlib
import json
import os
import platform
import select
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

from jitspark.building.progress import Wanted
from jitspark.cache.lookup import Lookup, Roots
from jitspark.cache.record import Record
from jitspark.cache.store import Layer, put
from jitspark.key import Recipe
from jitspark.settings import Settings
from jitspark.spec import CONST, KernelSpec, Specialization
from jitspark.target import CUDA_FLAVOUR, TARGETS, host_name
from jitspark.toolchain import Distribution, Toolchain, own_toolchain

PROCESSES = Path(__file__).resolve().parent / "processes"
sys.path.insert(0, str(PROCESSES))
import stub_compiler  # noqa: E402 - a script, found beside the tests that run it

TARGET = "sm_90a"
# Seconds that a test waits for something: far less than what would otherwise end the wait (a child that compiles for an
# hour, `share.PATIENCE_SECONDS`), and more than any machine takes.
LIMIT = 600.0
# Sets the result to the integer that follows and returns 0; see TVMFFISafeCallType in tvm/ffi/c_api.h.
_CODE = {
    "x86_64": bytes.fromhex("c7010100000048b8") + stub_compiler.PLACEHOLDER + bytes.fromhex("4889410831c0c3"),
    "aarch64": b"".join(
        word.to_bytes(4, "little") for word in (0x52800028, 0xB9000068, 0x58000088, 0xF9000468, 0x52800000, 0xD65F03C0)
    )
    + stub_compiler.PLACEHOLDER,
}


def make_templates(folder, kernels=("stub", "other")):
    """Write `<kernel>.so` for each stub kernel; the linker's own tools are enough."""
    (folder / "code").write_bytes(_CODE[platform.machine()])

    def run(*command):
        subprocess.run(command, cwd=folder, check=True, capture_output=True)

    run("ld", "-r", "-b", "binary", "-o", "code.o", "code")
    for kernel in kernels:
        symbol = f"_binary_code_start=__tvm_ffi_{kernel}"
        section = ".data=.text,alloc,load,readonly,code,contents"
        run("objcopy", "--rename-section", section, "--redefine-sym", symbol, "code.o", f"{kernel}.o")
        run("ld", "-shared", "-z", "noexecstack", "--build-id=none", "-o", f"{kernel}.so", f"{kernel}.o")
    return folder


@functools.cache
def _spec(kernel):
    location = {"kernel": f"kernel:{kernel}", "reference": f"reference:{kernel}"}
    return KernelSpec(kernel, {"n": CONST}, {}, {}, (), (), TARGETS, **location)


def wanted(count, *, start=0, target=TARGET, kernel="stub"):
    """`count` keys of a stub kernel."""
    return [_wanted(n, target, kernel) for n in range(start, start + count)]


def _wanted(n, target, kernel):
    specialization = Specialization(_spec(kernel), {"n": n}, {}, {})
    recipe = Recipe(kernel, {}, {"n": n}, {}, {}, target, host_name(), {}, (), 1)
    return Wanted(specialization, recipe)


def number_of(item):
    """What the kernel of this key returns."""
    return stub_compiler.number_of(item.recipe.kernel, dict(item.recipe.axes), item.recipe.target)


def artifact_of(item, templates):
    template = (templates / f"{item.recipe.kernel}.so").read_bytes()
    return stub_compiler.artifact_of(template, item.recipe.kernel, dict(item.recipe.axes), item.recipe.target)


def record_of(item, content, toolchain=None, **changes):
    made = Record.of(item.recipe, toolchain or own_toolchain(), content, f"{item.recipe.kernel}()", (), CUDA_FLAVOUR)
    return replace(made, **changes)


def other_toolchain(name="another"):
    """A toolchain that nobody has, whose entries every process can run."""
    return Toolchain((Distribution(name, "1.0", "0" * 64),), CUDA_FLAVOUR, "GNU ld (another) 1.0")


def fill(root, items, templates, toolchain=None):
    """Publish an entry for each key, as a builder would."""
    root.mkdir(parents=True, exist_ok=True)
    layer = Layer(root, writable=True)
    pairs = [(item, artifact_of(item, templates)) for item in items]
    return [put(layer, item.key, record_of(item, content, toolchain), content) for item, content in pairs]


def settings_for(root, folder, **changes):
    """Settings whose cache and locks lie below a test's own folder."""
    return replace(Settings(cache_dir=root, compile_slots=2, lock_dir=folder / "locks"), **changes)


def lookup_in(*layers, settings=None, toolchain=None):
    """A lookup over these layers; the writable one, if any, comes last."""
    writable = next((layer.root for layer in layers if layer.writable), None)
    return Lookup(settings or Settings(cache_dir=writable), Roots(tuple(layers), writable), toolchain)


def stub_command(templates, log=None, seconds=0.0, answer="good", *, until=None, starts=0):
    """The stub compiler with these options; see there."""
    options = ["--templates", str(templates), "--seconds", str(seconds), "--answer", answer, "--starts", str(starts)]
    options += [] if until is None else ["--until", str(until)]
    options += [] if log is None else ["--log", str(log)]
    return (sys.executable, "-I", "-S", str(PROCESSES / "stub_compiler.py"), *options)


def compiles(log):
    """The keys that were compiled, in order, from a stub's log."""
    lines = log.read_text().splitlines() if log.exists() else []
    return [line.split(" ", 3)[3] for line in lines if line.startswith("start ")]


def told(events, kind):
    """The events of this kind that a process has told so far, from the file that its task names."""
    lines = events.read_text().splitlines(keepends=True) if events.exists() else []
    return [event for line in lines if line.endswith("\n") and (event := json.loads(line))[0] == kind]


class CacheUser:
    """A process of its own that builds and loads keys (see cache_user.py): started, imported, then told to go."""

    def __init__(self, **task):
        environment = {**os.environ, "PYTHONPATH": str(PROCESSES.parent.parent), **task.pop("environment", {})}
        self.process = subprocess.Popen(
            [*task.pop("under", ()), sys.executable, "-P", str(PROCESSES / "cache_user.py"), json.dumps(task)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment,
            text=True,
        )

    def wait_ready(self):
        assert self.process.stdout.readline() == "ready\n", self.process.stderr.read()

    def go(self):
        self.process.stdin.write("go\n")
        self.process.stdin.flush()

    def report(self):
        out, err = self.process.communicate(timeout=LIMIT)
        assert self.process.returncode == 0, err
        return {**json.loads(out.splitlines()[-1]), "stderr": err}

    def kill(self):
        self.process.kill()
        self.process.communicate()


@contextlib.contextmanager
def cache_users(tasks):
    """Processes for these tasks, all ready; what is left of them is killed in the end."""
    users = [CacheUser(**task) for task in tasks]
    try:
        for user in users:
            user.wait_ready()
        yield users
    finally:
        for user in users:
            if user.process.poll() is None:
                user.kill()


def run_users(tasks):
    """The reports of these processes, which all begin at one moment."""
    with cache_users(tasks) as users:
        for user in users:
            user.go()
        return [user.report() for user in users]


def wait_until(condition):
    """The first true value of `condition()`."""
    deadline = time.monotonic() + LIMIT
    while time.monotonic() < deadline:
        if value := condition():
            return value
        select.select([], [], [], 0.005)
    raise AssertionError("not in time")


def sha256(content):
    return hashlib.sha256(content).hexdigest()


def copied(source, target):
    """A copy of a root, for a test that damages it."""
    shutil.copytree(source, target, symlinks=True)
    return target
