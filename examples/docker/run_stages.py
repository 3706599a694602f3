#!/usr/bin/env python3
"""Runs a Dockerfile's stages step by step in clean roots, where there is no Docker engine; needs root and util-linux.

    run_stages.py --base ROOT [--arg NAME=VALUE] [--bind HOST:PLACE] [--env NAME=VALUE] --work DIR [Dockerfile]

Every stage starts from a copy of the root file system ROOT (made by debootstrap, say), which stands for every image
that a FROM line names. RUN lines run in a chroot with processes and mounts of their own; COPY lines read the checkout,
or an earlier stage. At last the last stage's CMD runs as its USER, on a read-only root, without network. An
instruction that is not known is an error.
"""

import argparse
import json
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

KNOWN = ("ARG", "CMD", "COPY", "ENV", "FROM", "RUN", "USER")
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
VARIABLE = re.compile(r"\$\{(\w+)\}|\$(\w+)")
# Inside the new root: a process list of its own, and the devices that programs expect.
MOUNTS = """
mount -t proc proc "$root/proc"
mount -t tmpfs -o mode=755 tmpfs "$root/dev"
for name in null zero full random urandom tty; do
    touch "$root/dev/$name"
    mount --bind "/dev/$name" "$root/dev/$name"
done
mkdir "$root/dev/shm"
mount -t tmpfs -o mode=1777 tmpfs "$root/dev/shm"
ln -s /proc/self/fd "$root/dev/fd"
"""


@dataclass(frozen=True, slots=True)
class Step:
    """One instruction, its continued lines joined."""

    instruction: str
    text: str


@dataclass(slots=True)
class _Stage:
    """A stage being built: where its root is, and what its instructions have said so far."""

    name: str
    root: Path
    variables: dict[str, str] = field(default_factory=dict)
    arguments: dict[str, str] = field(default_factory=dict)
    user: str = "0:0"
    command: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Options:
    """What the command line says. `given` are values for ARG lines, `binds` what RUN steps see of this machine."""

    base: Path
    context: Path
    work: Path
    given: Mapping[str, str]
    binds: Sequence[tuple[Path, str]]
    passed: Mapping[str, str]


def steps(text: str) -> Iterator[Step]:
    """The instructions of a Dockerfile. Exits for one that this program does not know."""
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    for line in re.sub(r"\\\n\s*", "", "\n".join(lines)).splitlines():
        instruction, _, rest = line.strip().partition(" ")
        if instruction and instruction.upper() not in KNOWN:
            sys.exit(f"run_stages: {instruction} is not known here; {', '.join(KNOWN)} are")
        if instruction:
            yield Step(instruction.upper(), rest.strip())


def expanded(text: str, values: Mapping[str, str]) -> str:
    return VARIABLE.sub(lambda found: values.get(found[1] or found[2], ""), text)


def run(dockerfile: Path, options: Options) -> int:
    """Build every stage, run the last one's command, and return its exit status."""
    stages: dict[str, _Stage] = {}
    stage, arguments = None, {}
    for step in steps(dockerfile.read_text(encoding="utf-8")):
        started = time.perf_counter()
        if step.instruction == "FROM":
            stage = _new_stage(step.text, len(stages), options)
            stages[stage.name] = stage
        elif stage is None:
            arguments |= _argument(step.text, options.given)
        else:
            _apply(step, stage, stages, options)
        name = stage.name if stage else "before any stage"
        print(f"{time.perf_counter() - started:7.1f} s  {name}: {step.instruction} {step.text[:100]}", flush=True)
    if stage is None:
        sys.exit("run_stages: no FROM")
    started = time.perf_counter()
    status = _run_command(stage)
    print(f"{time.perf_counter() - started:7.1f} s  {stage.name}: CMD ended with status {status}", flush=True)
    return status


def _new_stage(text: str, number: int, options: Options) -> _Stage:
    words = text.split()
    name = words[2] if len(words) == 3 and words[1].upper() == "AS" else str(number)
    root = options.work / name
    subprocess.run(["cp", "-a", "--reflink=auto", f"{options.base}/.", str(root)], check=True)
    return _Stage(name, root, {"PATH": PATH})


def _apply(step: Step, stage: _Stage, stages: Mapping[str, _Stage], options: Options) -> None:
    values = {**stage.arguments, **stage.variables}
    if step.instruction == "ARG":
        stage.arguments |= _argument(step.text, options.given)
    elif step.instruction == "ENV":
        stage.variables |= dict(word.split("=", 1) for word in shlex.split(expanded(step.text, values)))
    elif step.instruction == "USER":
        stage.user = expanded(step.text, values)
    elif step.instruction == "CMD":
        stage.command = json.loads(step.text)
    elif step.instruction == "COPY":
        _copy(shlex.split(expanded(step.text, values)), stage, stages, options)
    else:
        status = _in_root(stage, ["/bin/sh", "-c", step.text], options, values)
        if status:
            sys.exit(f"run_stages: {stage.name}: RUN {step.text}: status {status}")


def _argument(text: str, given: Mapping[str, str]) -> dict[str, str]:
    name, _, default = text.partition("=")
    return {name: given.get(name, default)}


def _copy(words: list[str], stage: _Stage, stages: Mapping[str, _Stage], options: Options) -> None:
    """As Docker does: a folder's contents, or a file, go into the target; a file's may also be its new name."""
    source_root = options.context
    if words[0].startswith("--from="):
        source_root = stages[words.pop(0).removeprefix("--from=")].root
    *sources, target = words
    place = stage.root / target.lstrip("/")
    for source in (source_root / name.lstrip("/") for name in sources):
        into = place if source.is_dir() or not target.endswith("/") else place / source.name
        into.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            into.mkdir(parents=True, exist_ok=True)
            shutil.copytree(source, into, symlinks=True, dirs_exist_ok=True, ignore=_not_source)
        else:
            shutil.copy2(source, into)


def _not_source(_: str, names: list[str]) -> list[str]:
    return [name for name in names if name == "__pycache__"]


def _in_root(stage: _Stage, command: Sequence[str], options: Options, values: Mapping[str, str]) -> int:
    """Run a RUN line, with this machine's network and what `--bind` names."""
    binds = [("/etc/resolv.conf", "/etc/resolv.conf"), *((str(host), place) for host, place in options.binds)]
    mounts = MOUNTS
    for host, place in binds:
        if Path(host).exists():
            make = "mkdir -p" if Path(host).is_dir() else 'mkdir -p $(dirname "$place"); touch'
            mounts += (
                f'place="$root"{shlex.quote(place)}; {make} "$place"; mount --bind -o ro {shlex.quote(host)} "$place"\n'
            )
    return _chroot(stage, "0:0", command, {**values, **options.passed, "HOME": "/root"}, mounts, [])


def _run_command(stage: _Stage) -> int:
    """Run the stage's CMD as Kubernetes would with a read-only root: no network, no new rights, no HOME."""
    mounts = 'mount --bind "$root" "$root"\nmount -o remount,bind,ro "$root"\n' + MOUNTS
    return _chroot(stage, stage.user, stage.command, stage.variables, mounts, ["--net"])


def _chroot(
    stage: _Stage, user: str, command: Sequence[str], values: Mapping[str, str], mounts: str, more: Sequence[str]
) -> int:
    enter = f'exec chroot --userspec={user} "$root" /usr/bin/env -i "$@"'
    script = f"set -e\nroot={shlex.quote(str(stage.root))}\n{mounts}{enter}\n"
    variables = [f"{name}={value}" for name, value in values.items()]
    whole = ["unshare", "--mount", "--pid", "--fork", "--kill-child", *more, "sh", "-c", script, "sh", *variables]
    return subprocess.run([*whole, *command], check=False).returncode


def main() -> int:
    parser = argparse.ArgumentParser(prog="run_stages.py", description=__doc__.partition("\n")[0])
    parser.add_argument("dockerfile", type=Path, nargs="?", default=Path(__file__).with_name("Dockerfile"))
    parser.add_argument("--base", type=Path, required=True, help="the root file system that stands for every image")
    parser.add_argument("--work", type=Path, required=True, help="a new directory for the stages' roots")
    parser.add_argument("--context", type=Path, default=Path(__file__).resolve().parents[2], help="what COPY reads")
    parser.add_argument("--arg", action="append", default=[], metavar="NAME=VALUE", help="a value for an ARG line")
    parser.add_argument("--bind", action="append", default=[], metavar="HOST:PLACE", help="for RUN lines, read-only")
    parser.add_argument("--env", action="append", default=[], metavar="NAME=VALUE", help="for RUN lines only")
    options = parser.parse_args()
    options.work.mkdir(parents=True)
    binds = [(Path(host), place) for host, _, place in (each.partition(":") for each in options.bind)]
    given, passed = (dict(each.split("=", 1) for each in found) for found in (options.arg, options.env))
    found = Options(options.base, options.context.absolute(), options.work.absolute(), given, binds, passed)
    return run(options.dockerfile, found)


if __name__ == "__main__":
    sys.exit(main())
