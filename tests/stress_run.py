"""Starts the processes of a stress run (see processes/stress_user.py) and adds up what they report."""

import json
import os
import subprocess
import sys
from collections import Counter

from stub_cache import LIMIT, PROCESSES, fill, wanted

COUNT = 40


# What each process of a role does at least, by the names under which it counts.
ENOUGH = {
    "reader": {"hit": 150, "run": 10},
    "builder": {"compiled": 6},
    "pruner": {"pruned": 6},
    "republisher": {"republished": 6},
}


def run_stress(folder, templates, *, processes, threads, seconds):
    """The counts of all processes together, and every problem that one had. It lasts `seconds`, and until all of them
    have done enough.
    """
    root = folder / "cache"
    fill(root, wanted(COUNT), templates)
    (folder / "seen_enough").mkdir()
    roles = [*["reader"] * processes, "builder", "pruner", "republisher"]
    task = {"root": str(root), "folder": str(folder), "templates": str(templates), "count": COUNT, "duration": seconds}
    task |= {"seen_enough": str(folder / "seen_enough"), "users": len(roles)}
    more = {role: {"enough": enough, "threads": threads if role == "reader" else 1} for role, enough in ENOUGH.items()}
    users = [_start(role, {**task, **more[role]}) for role in roles]
    try:
        for user in users:
            assert user.stdout.readline() == "ready\n", user.stderr.read()
        for user in users:
            user.stdin.write("go\n")
            user.stdin.flush()
        return _added(users, seconds)
    finally:
        for user in users:
            user.kill()
            user.wait()


def _start(role, task):
    return subprocess.Popen(
        [sys.executable, "-P", str(PROCESSES / "stress_user.py"), role, json.dumps(task)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(PROCESSES.parent.parent)},
    )


def _added(users, seconds):
    counts, problems = Counter(), []
    for user in users:
        out, err = user.communicate(timeout=seconds + LIMIT)
        if user.returncode:
            problems.append(f"exit status {user.returncode}: {err}")
            continue
        problems += [line for line in err.splitlines() if "Bad cache entry" in line]
        report = json.loads(out.splitlines()[-1])
        counts.update(report["counts"])
        problems += report["problems"]
    return counts, problems
