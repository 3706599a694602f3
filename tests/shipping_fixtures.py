"""What shipping tests share: builders that have nothing in common, a load path without a compiler, a foreign user."""

import functools
import importlib.metadata
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PRODUCT = ("jitspark", "cache_tools", "kernel_specs")
LOADING = ("apache-tvm-ffi", "typing_extensions")
FAKETIME = Path(f"/usr/lib/{os.uname().machine}-linux-gnu/faketime/libfaketime.so.1")
UID = 54321


@functools.cache
def unprivileged():
    """Why another user, its mounts and its network cannot be had here; None where they can."""
    if os.geteuid() != 0:
        return "only root can mount and become another user"
    for tool in ("unshare", "setpriv", "mount"):
        if shutil.which(tool) is None:
            return f"no {tool}"
    probe = ["unshare", "-m", "-n", "mount", "-t", "tmpfs", "tmpfs", "/mnt"]
    works = subprocess.run(probe, capture_output=True, check=False).returncode == 0
    return None if works else "namespaces are forbidden"


def copy_product(folder):
    """A checkout's packages, without what running them left."""
    for name in PRODUCT:
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    return folder


def copy_load_path(folder):
    """What a serving process needs: the product, the ABI library, and no compiler."""
    copy_product(folder)
    for name in LOADING:
        for file in importlib.metadata.files(name) or ():
            if ".." not in file.parts and "__pycache__" not in file.parts:
                (folder / file).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(file.locate(), folder / file)
    return folder


def make_venv(folder, *also):
    """A virtual environment of its own place, whose packages are this one's; its Python."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    (site,) = folder.glob("lib/python*/site-packages")
    # not as plain lines: the .pth files of these places count too
    (site / "more.pth").write_text("".join(f"import site; site.addsitedir({path!r})\n" for path in also))
    return folder / "bin/python"


def packages():
    """Where this environment's packages lie."""
    return str(Path(importlib.metadata.distribution("filelock").locate_file("")))


class Builder:
    """Somebody who warms and packs: own checkout, environment, home, name, clock, umask and temporary directory."""

    def __init__(self, folder, user, days, umask):
        self.folder, self.umask = folder, umask
        for name in ("home", "tmp", "locks"):
            (folder / name).mkdir(parents=True)
        copy_product(folder / "checkout")
        self.python = make_venv(folder / "venv", packages())
        self.environment = {
            "HOME": str(folder / "home"),
            "TMPDIR": str(folder / "tmp"),
            "XDG_RUNTIME_DIR": str(folder / "locks"),
            "USER": user,
            "LOGNAME": user,
            "LANG": f"{user}.UTF-8",
            "PATH": os.environ["PATH"],
            "PYTHONPATH": str(folder / "checkout"),
            "PYTHONDONTWRITEBYTECODE": "1",
            "JITSPARK_COMPILE_SLOTS": "1",
        }
        if FAKETIME.exists():
            self.environment |= {"LD_PRELOAD": str(FAKETIME), "FAKETIME": f"{days:+d}d"}

    def run(self, *arguments):
        command = [str(self.python), "-P", "-m", "jitspark", *map(str, arguments)]
        place = {"env": self.environment, "cwd": self.folder, "umask": self.umask}
        done = subprocess.run(command, capture_output=True, text=True, check=False, **place)
        assert done.returncode == 0, done.stderr
        return done.stdout


def open_to_all(path):
    """Let every user walk down to `path`."""
    for folder in (path, *path.parents):
        if str(folder) not in ("/", "/tmp"):
            folder.chmod(0o755)


def as_a_foreign_user(command, environment, before=""):
    """`command` as uid 54321, which nobody has, without network, in mounts of its own; `before` is run as root there.

    What lies above the interpreter and keeps others out is covered by an empty file system that holds just it.
    """
    prefix = Path(sys.base_prefix)
    closed = [folder for folder in reversed(prefix.parents) if not folder.stat().st_mode & 0o001]
    cover = ""
    if closed:
        cover = f"""
mkdir -p /mnt && mount -t tmpfs tmpfs /mnt && mkdir /mnt/python && mount --bind {prefix} /mnt/python
mount -t tmpfs -o mode=755 tmpfs {closed[0]} && mkdir -p {prefix} && mount --move /mnt/python {prefix} && umount /mnt"""
    script = f"""set -e
{cover}
{before}
exec "$@" """
    drop = ["setpriv", f"--reuid={UID}", f"--regid={UID}", "--clear-groups", "--no-new-privs"]
    variables = [f"{name}={value}" for name, value in environment.items()]
    whole = ["unshare", "-m", "-n", "bash", "-c", script, "bash", *drop, "env", "-i", *variables, *map(str, command)]
    return subprocess.run(whole, capture_output=True, text=True, check=False, cwd="/")
