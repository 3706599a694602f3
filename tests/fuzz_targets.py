"""What hostile files may do to their readers: be refused by the one typed error, or be understood; nothing else.

Each target takes bytes and raises AssertionError, or whatever escaped, if the reader does anything else. Used by
hypothesis in tests/processes/test_fuzz.py and by the mutations of bench/fuzz.py.
"""

import functools
import hashlib
import json
import os
import tempfile
import time
from pathlib import Path

from stub_cache import other_toolchain, record_of, wanted

from cache_tools.pins import keys_of_plan
from jitspark.cache.failures import FAILURES, failure_path, remembered_failure
from jitspark.cache.record import record_from_bytes
from jitspark.cache.store import Layer
from jitspark.errors import EntryError, GeometryError, JitsparkError
from jitspark.geometry import GEOMETRY_DIR, load_geometry
from jitspark.key import Key, toolchain_digest

ITEM = wanted(1)[0]


@functools.cache
def _toolchain():
    return toolchain_digest(other_toolchain())


@functools.cache
def _folder():
    """A place for files that readers take by path; it goes with the process. In memory: disks flush at each rewrite."""
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    folder = tempfile.TemporaryDirectory(prefix="jitspark-fuzz-", dir=memory)
    (Path(folder.name) / FAILURES).mkdir()
    return folder


@functools.cache
def good_record():
    return record_of(ITEM, b"artifact", other_toolchain()).to_bytes()


def good_body():
    return json.loads(good_record())["body"]


def sealed(body):
    """A record file with this body and a correct digest, so that the fuzzer gets past it."""
    return b'{"body":' + body + b',"digest":"' + hashlib.sha256(body).hexdigest().encode() + b'"}\n'


def record(content):
    """A record file as it is."""
    try:
        found = record_from_bytes(content, "here", ITEM.key, _toolchain())
    except EntryError:
        return
    assert found.to_bytes() == content, "a record that is not canonical was taken"


def record_body(body):
    """A record file whose own digest is right."""
    record(sealed(body))


def named_record(body):
    """A record whose folders are named after it, as whoever writes into a cache can have it."""
    try:
        value = json.loads(body)
        recipe = json.dumps(value["recipe"], sort_keys=True, separators=(",", ":")).encode()
        toolchain = json.dumps(value["toolchain"], sort_keys=True, separators=(",", ":")).encode()
        names = [value["recipe"][name] for name in ("target", "host", "kernel")]
        key = Key(*names, hashlib.sha256(recipe).hexdigest())
    except (ValueError, TypeError, KeyError, RecursionError):
        return
    try:
        found = record_from_bytes(sealed(body), "here", key, hashlib.sha256(toolchain).hexdigest())
    except EntryError:
        return
    assert found.to_bytes() == sealed(body)


def key(content):
    """A path of a key, as a listing meets it."""
    parts = content.decode(errors="surrogateescape").split("/")
    target, _, host = parts[0].partition("-")
    try:
        found = Key(target, host, "/".join(parts[1:-1]), parts[-1])
    except ValueError:
        return
    assert found.path == content.decode(), "a name that is no plain path was taken"
    assert all(part not in ("", ".", "..") for part in found.path.split("/"))


def geometry(content):
    """A geometry file."""
    path = Path(_folder().name) / "geometry.toml"
    path.write_bytes(content)
    try:
        load_geometry(path)
    except GeometryError as problem:
        str(problem).encode()  # what is shown to people must be text


def plan(content):
    """A stored plan, as prune reads it."""
    try:
        found = keys_of_plan(content)
    except ValueError:
        return
    assert all(isinstance(each, Key) for each in found)


def failure(content):
    """A remembered failure."""
    root = Path(_folder().name)
    failure_path(root, ITEM.key, "0" * 64).write_bytes(content)
    found = remembered_failure(Layer(root, writable=True), ITEM.key, "0" * 64)
    assert found is None or isinstance(found, JitsparkError)


def seeds():
    """Good inputs of every target, to start from."""
    body = good_record()[8:-78]
    named = {"keys": [ITEM.key.path], "launches": [{"key": ITEM.key.path, "slots": [0, 1]}]}
    known = {"key": ITEM.key.path, "toolchain": "0" * 64, "expires": int(time.time()) + 500, "error": "CompileError"}
    known |= {"where": "a", "found": "b", "needed": "c", "remedy": "d", "log": "e"}
    return {
        record: [good_record()],
        record_body: [body],
        named_record: [body],
        key: [ITEM.key.path.encode()],
        geometry: [path.read_bytes() for path in sorted(GEOMETRY_DIR.glob("*.toml"))],
        plan: [json.dumps(named).encode()],
        failure: [json.dumps(known).encode()],
    }
