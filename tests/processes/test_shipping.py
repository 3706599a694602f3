"""A cache built twice, packed, carried to where there is nothing: equal bytes there, every entry loaded here."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from pack_fixtures import everything_below, make_keys
from shipping_fixtures import (
    UID,
    Builder,
    as_a_foreign_user,
    copy_load_path,
    make_venv,
    open_to_all,
    unprivileged,
)

from cache_tools.signing import trust_in
from cache_tools.unpack import unpack
from jitspark.cache.folders import make_root
from jitspark.cache.store import Layer

ENTRIES = 7
INTERPRETER = Path(sys._base_executable).resolve()
LOADING_USER = Path(__file__).resolve().parent / "loading_user.py"
DEPLOYMENT = ("--geometry", "tiny", "--tp", "1", "--target", "sm_90a")
WARM = ("warm", "--tp", "1", "--geometry", "tiny", "--kernel", "rmsnorm", "--target", "sm_90a")
# Everything that changes a file, a name or a lock; `write` is allowed to descriptors of memory files and of output.
CHANGING = (
    "mkdir,mkdirat,rename,renameat,renameat2,unlink,unlinkat,rmdir,link,linkat,symlink,symlinkat,chmod,fchmod,fchmodat,"
    "chown,fchown,lchown,fchownat,truncate,utime,utimes,utimensat,mknod,mknodat,setxattr,flock,fsync,fdatasync,"
    "write,pwrite64,writev,pwritev,sendfile,copy_file_range,fallocate,ftruncate,fcntl,open,openat,creat"
)
ALLOWED = re.compile(
    r"^(\[pid +\d+\] )?(write\([12]<|write\(\d+</memfd:|write\(\d+<anon_inode|(open|openat)\(.*O_RDONLY"
    r"|fcntl\(\d+<[^>]*>(\(deleted\))?, F_(GETFD|SETFD|GETFL|SETFL|ADD_SEALS|DUPFD_CLOEXEC)|\) = \d+$)"
)


@pytest.fixture(scope="module")
def keys(tmp_path_factory):
    return make_keys(tmp_path_factory.mktemp("keys"))


@pytest.fixture(scope="module")
def builders(tmp_path_factory, keys):
    """Two that share nothing but the sources and the compiler's release, each with a signed pack."""
    made = []
    for user, days, umask in (("anna", -400, 0o022), ("bo", 30, 0o077)):
        builder = Builder(tmp_path_factory.mktemp(user) / "deep" / user, user, days, umask)
        builder.run(*WARM)
        builder.run("pack", "pack.tar.zst", "--with-runtime", "--sign", keys[0])
        made.append(builder)
    return made


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = copy_load_path(tmp_path_factory.mktemp("site"))
    shutil.copy(LOADING_USER, folder)
    open_to_all(folder)
    return folder


def test_two_builders_with_nothing_in_common_make_equal_packs(builders):
    packs = [(builder.folder / "pack.tar.zst").read_bytes() for builder in builders]
    caches = [everything_below(builder.folder / "home/.cache/jitspark/artifacts-v1") for builder in builders]

    assert packs[0] == packs[1]
    assert caches[0] == caches[1]
    assert len(caches[0]) == 2 * ENTRIES


def test_two_builders_make_equal_directories_images_and_wheels(builders):
    for builder in builders:
        (builder.folder / "wheels").mkdir()
        builder.run("pack", "layer", "--format", "dir")
        builder.run("pack", "image", "--format", "oci")
        builder.run("pack", "wheels", "--format", "wheel", "--name", "tiny_sm_90a_tp1")

    for form in ("layer", "image", "wheels"):
        assert everything_below(builders[0].folder / form) == everything_below(builders[1].folder / form)


@pytest.fixture(scope="module")
def image(tmp_path_factory, builders, keys):
    """A root-owned folder into which the pack was unpacked with its signature checked; mounted read-only later."""
    root = tmp_path_factory.mktemp("image") / "jitspark"
    make_root(root)
    unpack(builders[0].folder / "pack.tar.zst", Layer(root, writable=True), trust_in([keys[1]], allow_unsigned=False))
    (root / "staging").rmdir()
    open_to_all(root)
    return root


STRICT = {"PATH": "", "JITSPARK_COMPILE": "never", "JITSPARK_CACHE_DIR": ""}


def load_as_a_foreign_user(image, site, *deployment, options="ro", under=()):
    mount = f"mount --bind {image} {image} && mount -o remount,bind,{options} {image}"
    command = [*under, INTERPRETER, "-I", "-S", "-B", site / LOADING_USER.name, site, *deployment]
    return as_a_foreign_user(command, {**STRICT, "JITSPARK_CACHE_PATH": str(image)}, mount)


@pytest.mark.skipif(unprivileged() is not None, reason=str(unprivileged()))
@pytest.mark.parametrize("options", ["ro", "ro,noexec,nosuid,nodev"])
def test_a_user_with_nothing_loads_every_entry_from_a_read_only_mount(image, site, options):
    before = everything_below(image)
    done = load_as_a_foreign_user(image, site, options=options)

    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert (report["loaded"], report["right"], report["keys"]) == (ENTRIES, ENTRIES, ENTRIES)
    assert (report["uid"], report["home"], report["compile"], report["writable"]) == (UID, None, "never", "None")
    assert report["foreign"] == []
    assert everything_below(image) == before


@pytest.fixture(scope="module")
def deployment_image(tmp_path_factory, keys):
    """As `image`, of everything that a deployment asks for: all kernels compiled, all plans made. Takes minutes."""
    builder = Builder(tmp_path_factory.mktemp("carla") / "carla", "carla", 1, 0o022)
    del builder.environment["JITSPARK_COMPILE_SLOTS"]
    builder.run("warm", *DEPLOYMENT)
    builder.run("pack", "pack.tar.zst", *DEPLOYMENT, "--with-runtime", "--sign", keys[0])
    root = tmp_path_factory.mktemp("deployed") / "jitspark"
    make_root(root)
    unpack(builder.folder / "pack.tar.zst", Layer(root, writable=True), trust_in([keys[1]], allow_unsigned=False))
    open_to_all(root)
    return root


@pytest.mark.skipif(unprivileged() is not None, reason=str(unprivileged()))
def test_a_user_with_nothing_loads_every_plan_of_a_deployment_and_what_it_names(deployment_image, site):
    before = everything_below(deployment_image)
    done = load_as_a_foreign_user(deployment_image, site, *DEPLOYMENT[1::2])

    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    found = report["deployment"]
    assert found["asked"] == found["plans"] == len([path for path in before if path.startswith("plans-v1/")])
    assert 0 < found["named"] <= report["loaded"] == report["right"] == report["keys"]
    assert found["unserved"] == 0
    assert (report["uid"], report["compile"], report["writable"], report["foreign"]) == (UID, "never", "None", [])
    assert everything_below(deployment_image) == before


@pytest.mark.skipif(unprivileged() is not None, reason=str(unprivileged()))
@pytest.mark.skipif(shutil.which("strace") is None, reason="no strace")
@pytest.mark.parametrize("deployment", [(), DEPLOYMENT[1::2]], ids=["entries", "plans too"])
def test_loading_from_a_read_only_mount_writes_nothing_and_takes_no_lock(request, site, deployment):
    image = request.getfixturevalue("deployment_image" if deployment else "image")
    trace = ["/usr/bin/strace", "-f", "-qq", "-y", "-e", f"trace={CHANGING}"]
    done = load_as_a_foreign_user(image, site, *deployment, under=trace)

    assert done.returncode == 0, done.stderr
    report, calls = json.loads(done.stdout), done.stderr.splitlines()
    assert report["right"] == report["keys"] >= ENTRIES
    assert sum("kernel.so" in call for call in calls) >= report["keys"]
    assert any("plans-v1" in call for call in calls) == bool(deployment)
    assert not [call for call in calls if not ALLOWED.match(call) or "O_CREAT" in call]


def test_a_wheel_is_installed_in_a_fresh_environment_found_and_loaded(tmp_path, builders, site, image):
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    builders[0].run("pack", wheels, "--format", "wheel", "--name", "tiny_sm_90a_tp1")
    python = make_venv(tmp_path / "venv")
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "--no-index", "--no-deps", "--quiet"]
    subprocess.run([*pip, *wheels.iterdir()], check=True)
    library = next(image.glob("runtime-v1/*/*.so"))
    environment = {**STRICT, "JITSPARK_RUNTIME_LIBRARY": str(library)}
    done = subprocess.run(
        [python, "-I", LOADING_USER, site], capture_output=True, text=True, check=False, env=environment
    )

    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert (report["loaded"], report["right"]) == (ENTRIES, ENTRIES)
    assert [Path(root).parts[-2:] for root in report["roots"]] == [("jitspark_cache", "tiny_sm_90a_tp1")]


@pytest.mark.skipif(shutil.which("skopeo") is None, reason="no skopeo")
def test_skopeo_reads_and_copies_the_image(tmp_path, builders):
    builders[0].run("pack", tmp_path / "image", "--format", "oci", "--with-runtime")
    inspected = subprocess.run(
        ["skopeo", "inspect", f"oci:{tmp_path}/image:cache"], capture_output=True, text=True, check=True
    )
    policy = tmp_path / "policy.json"
    policy.write_text('{"default": [{"type": "insecureAcceptAnything"}]}')
    copy = ["skopeo", "--policy", policy, "copy", f"oci:{tmp_path}/image:cache", f"oci:{tmp_path}/copy:cache"]
    subprocess.run(copy, check=True, capture_output=True)

    told = json.loads(inspected.stdout)
    assert (told["Os"], len(told["Layers"])) == ("linux", 1)
    blobs = [everything_below(tmp_path / name / "blobs") for name in ("image", "copy")]
    assert blobs[0] == blobs[1]


@pytest.mark.skipif(shutil.which("umoci") is None, reason="no umoci")
def test_umoci_unpacks_the_image_to_the_directory_that_pack_makes(tmp_path, builders):
    builders[0].run("pack", tmp_path / "image", "--format", "oci")
    builders[0].run("pack", tmp_path / "layer", "--format", "dir")
    unpack_image = ["umoci", "unpack", "--rootless", "--image", f"{tmp_path}/image:cache", tmp_path / "bundle"]
    subprocess.run(unpack_image, check=True)

    assert everything_below(tmp_path / "bundle/rootfs") == everything_below(tmp_path / "layer")


def test_a_sample_of_a_real_cache_compiles_again_to_the_same_bytes(builders):
    said = json.loads(builders[1].run("verify", "--rebuild", "100%", "--json"))

    assert (said["rebuilt"], said["bad"], said["skipped"]) == (ENTRIES, [], [])
