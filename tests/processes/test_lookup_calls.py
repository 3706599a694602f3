"""A lookup takes no lock and writes nothing: proved by the system calls it makes, and by what Python's audit sees."""

import json
import re
import shutil
import subprocess
import sys

import pytest
from stub_cache import PROCESSES, fill, settings_for, wanted

from jitspark.cache.lookup import Lookup

COUNT = 5
# Everything that locks, or changes a file or a name. Not `openat`: its flags say whether it writes.
WRITING = (
    "flock,fcntl,mkdir,mkdirat,rename,renameat,renameat2,unlink,unlinkat,rmdir,link,linkat,symlink,symlinkat,"
    "chmod,fchmod,fchmodat,chown,fchown,lchown,fchownat,truncate,ftruncate,fallocate,utime,utimes,utimensat,"
    "write,pwrite64,writev,pwritev,fsync,fdatasync,mknod,mknodat,setxattr,sendfile,copy_file_range,openat,open"
)
LOOKUP = """
import json, os, sys
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from stub_cache import settings_for, wanted
from jitspark.cache.lookup import Lookup, open_roots
root, folder, count, absent = Path(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4]), int(sys.argv[5])
settings = settings_for(None, folder, cache_path=(root,)) if sys.argv[6] == "read-only" else settings_for(root, folder)
items = wanted(count) + wanted(absent, start=1000)
lookup = Lookup(settings)
events = []
def seen(event, args):
    if recording:
        events.append((event, [str(arg) for arg in args]))
recording = False
sys.addaudithook(seen)
os.path.exists("/begin-of-lookup")
recording = True
entries = [lookup.find(item.key, whole=True) for item in items]
contents = [entry.read_artifact() for entry in entries if entry]
recording = False
os.path.exists("/end-of-lookup")
print(json.dumps({"found": len(contents), "events": events}))
"""


@pytest.fixture(params=["read-only", "writable"])
def arguments(request, tmp_path, templates):
    fill(tmp_path / "cache", wanted(COUNT), templates)
    folder = str(PROCESSES.parent)
    return [sys.executable, "-c", LOOKUP, folder, tmp_path / "cache", tmp_path, str(COUNT), "3", request.param]


def run(command):
    environment = {"PYTHONPATH": str(PROCESSES.parent.parent), "PATH": "/usr/bin:/bin"}
    result = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    return json.loads(result.stdout)


def test_the_audit_sees_files_opened_for_reading_and_nothing_else(arguments):
    seen = run(arguments)

    assert seen["found"] == COUNT
    names = {event for event, _ in seen["events"]}
    opened = [args for event, args in seen["events"] if event == "open"]
    assert len(opened) > 10 * COUNT
    assert names <= {"open", "os.listdir"}
    write_flags = 0o1 | 0o2 | 0o100 | 0o1000  # O_WRONLY, O_RDWR, O_CREAT, O_TRUNC
    assert not [args for args in opened if int(args[2]) & write_flags]


def strace_works():
    trace = ["strace", "-qq", "-o", "/dev/null", "true"]
    return (
        shutil.which("strace") is not None and subprocess.run(trace, capture_output=True, check=False).returncode == 0
    )


@pytest.mark.skipif(not strace_works(), reason="strace is not installed or may not trace")
def test_strace_sees_no_lock_and_no_write(arguments, tmp_path):
    trace = tmp_path / "trace"
    seen = run(["strace", "-f", "-qq", "-e", f"trace={WRITING},stat,newfstatat,access", "-o", str(trace), *arguments])

    lines = trace.read_text().splitlines()
    marks = [next(i for i, line in enumerate(lines) if mark in line) for mark in ("/begin-of-lookup", "/end-of-lookup")]
    calls = lines[marks[0] + 1 : marks[1]]
    assert seen["found"] == COUNT
    assert sum("openat(" in call and "kernel.so" in call for call in calls) == 2 * COUNT
    allowed = re.compile(r"\d+ +((openat|open)\(.*O_RDONLY|(stat|newfstatat|access)\()")
    assert not [call for call in calls if not allowed.match(call) or "O_CREAT" in call]


def test_the_audit_would_see_a_write(tmp_path, templates):
    """The test above can fail: a bad entry in the writable root is moved, and that is seen."""
    entry = fill(tmp_path / "cache", wanted(1), templates)[0]
    (entry.directory / "kernel.so").chmod(0o644)
    (entry.directory / "kernel.so").write_bytes(b"damage")

    arguments = [sys.executable, "-c", LOOKUP, PROCESSES.parent, tmp_path / "cache", tmp_path, "1", "0", "writable"]
    names = {event for event, _ in run(arguments)["events"]}

    assert "os.rename" in names


def test_a_lookup_makes_no_lock_directory(tmp_path, templates):
    fill(tmp_path / "cache", wanted(1), templates)
    settings = settings_for(tmp_path / "cache", tmp_path)

    assert Lookup(settings).find(wanted(1)[0].key, whole=True) is not None
    assert not settings.lock_dir.exists()
