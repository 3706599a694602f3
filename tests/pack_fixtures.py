"""What tests of packs share: keys, small caches, and packs of them."""

import io
import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
import zstandard
from stub_cache import fill, other_toolchain, sha256, wanted

from cache_tools.compression import compressed
from cache_tools.manifest import ListedFile, Manifest, manifest_from_bytes, merkle_root
from cache_tools.pack import pack
from cache_tools.signing import ANY
from cache_tools.unpack import unpack as unpack_trusting
from jitspark.cache.store import Layer
from jitspark.errors import PackError
from jitspark.plans.format import to_bytes
from jitspark.plans.plan import CUTE, Buffer, Kind, Launch, Plan, Stage, TensorArgument
from jitspark.plans.store import put_bytes

ROOT = Path(__file__).resolve().parents[1]
RUNTIME = "runtime-v1/cu13/libcute_dsl_runtime.so"


def make_keys(folder, name="key"):
    """An Ed25519 key pair as OpenSSL writes it: the private and the public key's file."""
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    key = Ed25519PrivateKey.generate()
    encoding, plain = serialization.Encoding.PEM, serialization.NoEncryption()
    private = key.private_bytes(encoding, serialization.PrivateFormat.PKCS8, plain)
    public = key.public_key().public_bytes(encoding, serialization.PublicFormat.SubjectPublicKeyInfo)
    (folder / f"{name}.pem").write_bytes(private)
    (folder / f"{name}.pub").write_bytes(public)
    return folder / f"{name}.pem", folder / f"{name}.pub"


def filled(root, templates, *counts):
    """Entries of the stub kernels: so many of each."""
    kernels = zip(("stub", "other"), counts, strict=False)
    items = [item for kernel, count in kernels for item in wanted(count, kernel=kernel)]
    return fill(root, items, templates, other_toolchain())


def step_of(entries, rows=8, stage=Stage.DECODE, query_length=8):
    """A plan that launches these entries, one after the other."""
    key = entries[0].key
    launches = [
        Launch(f"{place}", "part", CUTE, each.key.kernel, each.key, (TensorArgument("x", "inout"),), {})
        for place, each in enumerate(entries)
    ]
    return Plan(
        stage=stage,
        geometry="stub",
        tp=1,
        query_length=query_length,
        rows=rows,
        target=key.target,
        host=key.host,
        providers={},
        buffers=(Buffer("x", Kind.INPUT, (rows, 4), "float32"),),
        launches=tuple(launches),
        workspace_bytes=0,
        symmetric_bytes=0,
    )


def store_plan(root, plan):
    """The plan among the plans of a root, under some name of its own; where."""
    name = sha256(f"{plan.stage} {plan.rows}".encode())
    return put_bytes(Layer(root, writable=True), name, to_bytes(plan))


def everything_below(root):
    """Content by path, and whether nothing else is there than files and folders."""
    return {str(path.relative_to(root)): path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file()}


def modes_below(root):
    return {(path.is_dir(), oct(path.stat().st_mode & 0o7777)) for path in root.rglob("*")}


def run_as_people_do(program, *arguments, environment):
    """One of the two programs, as a process."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("JITSPARK_")}
    command = [sys.executable, "-P", "-m", program, *map(str, arguments)]
    variables = {**inherited, "PYTHONPATH": str(ROOT), **environment}
    return subprocess.run(command, capture_output=True, text=True, check=False, env=variables)


def tar_of(file):
    """The tar in a pack, as any zstandard program gives it."""
    content = file.read_bytes()
    return zstandard.ZstdDecompressor().decompressobj().decompress(content) if content[:1] == b"\x28" else content


def members_of(file):
    with tarfile.open(fileobj=io.BytesIO(tar_of(file))) as archive:
        return [(member, archive.extractfile(member).read()) for member in archive]


def write_tar(file, members, form=tarfile.USTAR_FORMAT):
    """Without tarfile's padding to 10 KiB, which is a reason to refuse of its own."""
    padded = (member.tobuf(form) + content + bytes(-len(content) % 512) for member, content in members)
    file.write_bytes(b"".join(padded) + bytes(1024))
    return file


def compress(file, content):
    """A pack around any content, its trailer right."""
    with file.open("wb") as stream, compressed(stream) as archive:
        archive.write(content)
    return file


def write_pack(file, members):
    return compress(file, write_tar(file.with_suffix(".tar"), members).read_bytes())


def listed_as_they_are(members):
    """The members behind a manifest that lists whatever they are, as an attacker would write it."""
    manifest = manifest_from_bytes(members[0][1], "")
    found = [ListedFile(m.name, len(c), sha256(c)) for m, c in members[1:]]
    content = Manifest(1, tuple(found), manifest.needs, merkle_root(found)).to_bytes()
    head = replace_size(members[0][0], len(content))
    return [(head, content), *members[1:]]


def replace_size(member, size):
    changed = tarfile.TarInfo(member.name)
    changed.size, changed.mode = size, member.mode
    return changed


@pytest.fixture(scope="module")
def entries(tmp_path_factory, templates):
    """Three entries of two kernels."""
    return filled(tmp_path_factory.mktemp("cache") / "root", templates, 2, 1)


@pytest.fixture(scope="module")
def packed(tmp_path_factory, entries):
    file = tmp_path_factory.mktemp("pack") / "good.tar.zst"
    pack(file, entries)
    return file


@pytest.fixture(scope="module")
def plain(tmp_path_factory, packed):
    """A pack as it was before there were manifests: a plain tar of the entries."""
    return write_tar(tmp_path_factory.mktemp("plain") / "plain.tar", members_of(packed)[1:])


@pytest.fixture
def layer(tmp_path):
    (tmp_path / "root").mkdir()
    return Layer(tmp_path / "root", writable=True)


def unpack(file, layer):
    """New and kept entries of a pack that nobody signed."""
    done = unpack_trusting(file, layer, ANY)
    return done.new, done.kept


def refused(file, layer):
    """The refusal's text; the cache has been left as it was."""
    with pytest.raises(PackError) as refusal:
        unpack(file, layer)
    assert not everything_below(layer.root)
    return str(refusal.value)
