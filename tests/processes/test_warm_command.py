"""`jitspark warm` with the real compiler: what is compiled, by whom, and what is left after any end."""

import contextlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from stub_cache import LIMIT, record_of, wait_until

from jitspark.cache.store import Layer, keys_in, put, read_entry
from jitspark.cli.selection import Selection, wanted_by

ROOT = Path(__file__).resolve().parents[2]
SELECTION = ("--tp", "1", "--geometry", "tiny", "--target", "sm_90a", "--kernel", "rmsnorm")
SLOTS = 2


def start(folder, *options, root=ROOT, under=(), stderr=subprocess.PIPE, **environment):
    """A warm of its own; its cache, locks and temporary files lie in `folder`."""
    (folder / "tmp").mkdir(exist_ok=True)
    own = {
        "JITSPARK_CACHE_DIR": str(folder / "cache"),
        "XDG_RUNTIME_DIR": str(folder),
        "JITSPARK_COMPILE_SLOTS": str(SLOTS),
        "TMPDIR": str(folder / "tmp"),
        "PYTHONPATH": str(root),
    }
    return subprocess.Popen(
        [*under, sys.executable, "-P", "-m", "jitspark", "warm", *(options or SELECTION), "--json"],
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
        env={**os.environ, **own, **environment},
    )


def finish(process, code=0):
    """The object on the last line, and standard error; the process ended with `code`."""
    out, err = process.communicate(timeout=LIMIT)
    assert process.returncode == code, err
    assert "Traceback" not in err
    return (json.loads(out.splitlines()[-1]) if out else None), err


def warm(folder, *options, code=0, **more):
    return finish(start(folder, *options, **more), code)


def children_of(pids):
    """Compiler children of these processes, by process id."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
            command = (stat.parent / "cmdline").read_bytes()
        except (OSError, ValueError, IndexError):
            continue
        if parent in pids and b"jitspark.compiler" in command:
            found.append(int(stat.parent.name))
    return found


def compilers_started_by(pid):
    """Compiler children that say that `pid` is their parent, whoever it is now."""
    suffix = f"jitspark.compiler\0{pid}\0".encode()
    found = []
    for command in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if command.read_bytes().endswith(suffix):
                found.append(int(command.parent.name))
        except OSError:
            continue
    return found


def wait_for_compilers(process, count=1):
    """The ids of `count` compiler children of this warm, which is at work."""

    def found():
        assert process.poll() is None, "it ended before it was disturbed"
        children = compilers_started_by(process.pid)
        return children if len(children) >= count else None

    return wait_until(found)


def wait_gone(pid):
    """Wait until every compiler child of `pid` has ended."""
    wait_until(lambda: not compilers_started_by(pid))


def whole_entries(folder):
    """How many entries the cache has; each is read, and checked against its record."""
    layer = Layer(folder / "cache", writable=True)
    entries = [read_entry(layer, key, toolchain) for key, toolchain in keys_in(layer)]
    assert all(entry.read_artifact() for entry in entries)
    return len(entries)


def test_a_second_warm_compiles_nothing(tmp_path):
    first, _ = warm(tmp_path)
    second, _ = warm(tmp_path)

    assert first["compiled"] == first["entries"] == whole_entries(tmp_path) > 3
    assert (second["compiled"], second["hits"], second["failed"]) == (0, first["entries"], 0)
    assert second["target"] == ["sm_90a"] and second["tp"] == [1]
    assert second["cache_dir"] == str(tmp_path / "cache")


def test_a_second_warm_of_everything_compiles_nothing_and_imports_no_compiler(memory_path, templates):
    """A warm that finds everything reads and hashes artifacts and maps none, so any library stands in for them.

    What it takes, some second, is measured.
    """
    content = (templates / "stub.so").read_bytes() + bytes(27_000)
    everything = wanted_by(Selection((8,), ("sm_100a",), "muse_spark_open"))
    (memory_path / "cache").mkdir()
    for item in everything:
        put(Layer(memory_path / "cache", writable=True), item.key, record_of(item, content), content)
    own = {"JITSPARK_CACHE_DIR": str(memory_path / "cache"), "XDG_RUNTIME_DIR": str(memory_path)}
    import_less = "import runpy, sys; sys.modules.update(dict.fromkeys(('cutlass', 'torch', 'jitspark.compiler')))"
    run_it = "runpy.run_module('jitspark', run_name='__main__', alter_sys=True)"
    command = [
        sys.executable,
        "-P",
        "-c",
        f"{import_less}; {run_it}",
        "warm",
        "--tp",
        "8",
        "--target",
        "sm_100a",
        "--json",
    ]
    environment = {**os.environ, **own, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, check=True, capture_output=True)
    report = json.loads(done.stdout.splitlines()[-1])

    assert (report["compiled"], report["hits"]) == (0, len(everything))


def test_on_a_terminal_a_bar_counts_and_estimates(tmp_path):
    ours, theirs = os.openpty()
    process = start(tmp_path, stderr=theirs)
    os.close(theirs)
    shown = b""
    with contextlib.suppress(OSError):  # the other end is closed
        while piece := os.read(ours, 65536):
            shown += piece
    os.close(ours)
    report = json.loads(process.communicate(timeout=LIMIT)[0].splitlines()[-1])
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown.decode())

    assert report["compiled"] == report["entries"]
    assert f"{report['entries']}/{report['entries']}" in text
    assert "compiled rmsnorm(" in text and " s left" in text
    assert "\x1b[" in shown.decode() and "\r" in text


def test_tp_sizes_that_share_keys_count_them_once(tmp_path):
    one, _ = warm(tmp_path, *SELECTION, "--dry-run")
    both, _ = warm(tmp_path, "--tp", "1,2", *SELECTION[2:], "--dry-run")

    assert both["entries"] == one["entries"] == len(set(both["missing"]))
    assert not (tmp_path / "cache").exists()


def test_where_compiling_is_forbidden_one_error_names_what_misses_and_the_command(tmp_path):
    error, text = warm(tmp_path, code=7, JITSPARK_COMPILE="never")
    command = text.partition("`jitspark warm ")[2].partition("`")[0].split()
    made, _ = warm(tmp_path, *command)
    there, _ = warm(tmp_path, JITSPARK_COMPILE="never")

    assert error["error"] == "MissingEntriesError" and len(error["keys"]) == made["compiled"]
    assert all(key in text for key in error["keys"])
    assert there["hits"] == made["entries"]


def test_eight_warms_of_an_empty_cache_compile_each_key_once(tmp_path):
    running = [start(tmp_path) for _ in range(8)]
    most = 0
    while any(process.poll() is None for process in running):
        most = max(most, len(children_of({process.pid for process in running})))
        time.sleep(0.02)
    reports = [finish(process)[0] for process in running]

    entries = reports[0]["entries"]
    assert sum(report["compiled"] for report in reports) == entries
    assert all(report["compiled"] + report["hits"] == entries for report in reports)
    assert 1 <= most <= SLOTS
    assert whole_entries(tmp_path) == entries


@pytest.mark.parametrize("seed", range(3))
def test_a_killed_warm_leaves_whole_entries_and_no_child(tmp_path, seed):
    """Wherever it is just then: the moment is drawn, and counts for nothing."""
    process = start(tmp_path)
    wait_until(lambda: process.poll() is not None or whole_entries(tmp_path) >= 2 * seed)
    time.sleep(random.Random(seed).uniform(0.0, 1.0))
    process.kill()
    process.communicate()

    wait_gone(process.pid)
    done = whole_entries(tmp_path)
    report, _ = warm(tmp_path)
    assert (report["hits"], report["compiled"]) == (done, report["entries"] - done)
    assert not any((tmp_path / "cache" / "staging").glob("*"))


@pytest.mark.parametrize("seed", range(2))
def test_a_killed_compiler_child_costs_nothing_but_its_compile(tmp_path, seed):
    """Two children, each at a moment that is drawn: a second one in the same compile would fail it."""
    process = start(tmp_path)
    children = wait_for_compilers(process, SLOTS)
    moments = random.Random(seed)
    for child in children:
        time.sleep(moments.uniform(0.0, 1.5))
        kill_quietly(child)
    report, _ = finish(process)

    assert report["compiled"] == report["entries"] == whole_entries(tmp_path)
    wait_gone(process.pid)


def kill_quietly(pid):
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


@pytest.fixture
def interruptible():
    """SIGINT ends what is started meanwhile, though tests that run in the background ignore it, and so do children."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupted_warm_ends_its_children_and_frees_its_locks(tmp_path, number, code):
    process = start(tmp_path)
    wait_for_compilers(process)
    process.send_signal(number)
    finish(process, code)

    wait_gone(process.pid)
    assert not any((tmp_path / "tmp").iterdir())
    done = whole_entries(tmp_path)
    report, _ = warm(tmp_path)
    assert report["compiled"] == report["entries"] - done


@pytest.fixture
def broken_checkout(tmp_path):
    """A checkout in which one of two kernels does not compile."""
    checkout = tmp_path / "checkout"
    for package in ("jitspark", "kernel_specs", "cache_tools"):
        shutil.copytree(ROOT / package, checkout / package, ignore=shutil.ignore_patterns("__pycache__"))
    kernel = checkout / "kernel_specs/gated_residual_rmsnorm/kernel.py"
    kernel.write_text(f"{kernel.read_text()}\nraise ValueError('the kernel is\\nout of order')\n")
    return checkout


def test_when_a_kernel_fails_the_others_are_built_and_it_is_named(tmp_path, broken_checkout):
    selection = (*SELECTION, "--kernel", "gated_residual_rmsnorm")
    report, text = warm(tmp_path, *selection, root=broken_checkout, code=6)
    again, _ = warm(tmp_path, *selection, root=broken_checkout, code=6)
    retried, retried_text = warm(tmp_path, *selection, "--retry", root=broken_checkout, code=6)

    assert report["compiled"] == whole_entries(tmp_path) > 3
    assert report["failed"] > 0 and report["compiled"] + report["failed"] == report["entries"]
    assert "out of order" in text and text.count("gated_residual_rmsnorm(") >= report["failed"]
    assert re.search(r"raised at kernel_specs/gated_residual_rmsnorm/kernel\.py:\d+", text)
    assert (again["hits"], again["failed"]) == (report["compiled"], report["failed"])
    assert retried["failed"] == report["failed"]
    assert str(broken_checkout) not in retried_text


def test_a_kernel_that_is_no_python_fails_alone(tmp_path, broken_checkout):
    (broken_checkout / "kernel_specs/gated_residual_rmsnorm/kernel.py").write_text("def kernel(:\n")

    report, text = warm(tmp_path, *SELECTION, "--kernel", "gated_residual_rmsnorm", root=broken_checkout, code=6)

    assert report["compiled"] > 3
    assert report["failed"] > 0 and report["compiled"] + report["failed"] == report["entries"]
    assert "SyntaxError" in text and "Traceback" not in text


def test_a_full_cache_directory_is_one_error(tmp_path):
    (tmp_path / "cache").mkdir()
    mount = f"mount -t tmpfs -o size=100k,mode=755 none {tmp_path}/cache"
    inside = ["unshare", "--mount", "sh", "-c"]
    if os.geteuid() != 0 or subprocess.run([*inside, mount], capture_output=True, check=False).returncode != 0:
        pytest.skip("mounting a small file system needs root")
    process = start(tmp_path, under=(*inside, f'{mount} && exec "$@"', "sh"))
    error, text = finish(process, 4)

    assert error["error"] == "CacheDirectoryError"
    assert "No space left on device" in text


def test_a_cache_directory_that_cannot_be_made_is_refused_before_compiling(tmp_path):
    (tmp_path / "file").touch()
    error, text = warm(tmp_path, code=4, JITSPARK_CACHE_DIR=str(tmp_path / "file" / "cache"))

    assert error["error"] == "CacheDirectoryError"
    assert "compiled" not in text


def test_without_a_linker_one_error_says_so(tmp_path):
    error, text = warm(tmp_path, code=5, PATH=str(tmp_path))

    assert (error["error"], error["where"]) == ("ToolchainError", "linker")
    assert "binutils" in text


def test_without_a_compiler_one_error_says_so_and_hits_are_hits(tmp_path):
    made, _ = warm(tmp_path)
    hidden = tmp_path / "without_compiler"
    hidden.mkdir()
    (hidden / "sitecustomize.py").write_text(
        "import importlib.metadata as m\n"
        "find = m.distribution\n"
        "def distribution(name):\n"
        "    if name.startswith('nvidia-cutlass'):\n"
        "        raise m.PackageNotFoundError(name)\n"
        "    return find(name)\n"
        "m.distribution = distribution\n"
    )
    path = f"{hidden}:{ROOT}"
    runtime = os.environ.get("JITSPARK_RUNTIME_LIBRARY") or str(runtime_library())
    there, _ = warm(tmp_path, PYTHONPATH=path, JITSPARK_RUNTIME_LIBRARY=runtime)
    error, text = warm(
        tmp_path, *SELECTION[:-1], "gated_residual_rmsnorm", code=5, PYTHONPATH=path, JITSPARK_RUNTIME_LIBRARY=runtime
    )

    assert there["hits"] == made["entries"]
    assert (error["error"], error["where"]) == ("ToolchainError", "compiler")
    assert "nvidia-cutlass-dsl" in text


def runtime_library():
    from jitspark.toolchain import runtime_library as installed

    return installed()[0]
