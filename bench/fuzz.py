"""A million hostile records, keys, geometry files, plans and failures: `python bench/fuzz.py [INPUTS] [SEED]`.

Mutates good inputs at random, bytes and JSON values alike. Prints one JSON object; whatever escapes a reader is printed
with the input that did it, and is exit status 1. A crash of the interpreter is no result at all.
"""

import argparse
import json
import random
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

import fuzz_targets

WORDS = (
    b"..",
    b"../../x",
    b"\x1b[2J",
    b"\0",
    b'"',
    b"{",
    b"}",
    b"[",
    b"]",
    b",",
    b":",
    b"NaN",
    b"1e999",
    b"-1",
    b"null",
)
VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1.5, 2**31, 2**63, 2**200, "", "x", "..", "../x", "\ud800", "\0", "0" * 64, "sm_100a"),
    *([], {}, [[]], [1], ["x"], {"a": 1}, [[[[[[]]]]]], "x" * 5000, [0] * 2000),
)


def mutate_bytes(content: bytes, choice: random.Random) -> bytes:
    """A few slices cut, doubled, flipped or overwritten."""
    result = bytearray(content)
    for _ in range(choice.randint(1, 5)):
        start, length = choice.randrange(len(result) + 1), choice.randrange(1, 30)
        kind = choice.randrange(5)
        if kind == 0:
            del result[start : start + length]
        elif kind == 1:
            result[start:start] = result[start : start + length] * choice.randint(1, 50)
        elif kind == 2 and start < len(result):
            result[start] ^= 1 << choice.randrange(8)
        elif kind == 3:
            result[start : start + choice.randrange(8)] = choice.choice(WORDS)
        else:
            result[start : start + length] = choice.randbytes(choice.randrange(8))
    return bytes(result)


def mutate_value(value: Any, choice: random.Random) -> Any:
    """One place in a JSON value replaced, dropped or doubled."""
    if not isinstance(value, (dict, list)) or not value or choice.random() < 0.15:
        return choice.choice(VALUES)
    copy = value.copy()
    name = choice.choice(list(copy)) if isinstance(copy, dict) else choice.randrange(len(copy))
    if choice.random() < 0.1:
        del copy[name]
    else:
        copy[name] = mutate_value(copy[name], choice)
    if isinstance(copy, dict) and choice.random() < 0.05:
        copy[str(choice.choice(VALUES))[:50]] = choice.choice(VALUES)
    return copy


def mutated(content: bytes, choice: random.Random) -> bytes:
    """Half of the inputs that are JSON stay JSON."""
    if choice.random() < 0.5:
        try:
            value = json.loads(content)
        except ValueError:
            return mutate_bytes(content, choice)
        for _ in range(choice.randint(1, 3)):
            value = mutate_value(value, choice)
        return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()
    return mutate_bytes(content, choice)


def run(inputs: int, seed: int) -> tuple[Counter[str], list[str]]:
    choice, counts, problems = random.Random(seed), Counter[str](), []
    seeds: list[tuple[Callable[[bytes], None], list[bytes]]] = list(fuzz_targets.seeds().items())
    for _ in range(inputs):
        target, good = choice.choice(seeds)
        content = mutated(choice.choice(good), choice)
        counts[target.__name__] += 1
        try:
            target(content)
        except Exception:  # noqa: BLE001 - whatever escapes is what we look for
            problems.append(f"{target.__name__} {content[:2000]!r}\n{traceback.format_exc()}")
    return counts, problems


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("inputs", metavar="INPUTS", type=int, nargs="?", default=1_000_000)
    parser.add_argument("seed", metavar="SEED", type=int, nargs="?", default=1)
    options = parser.parse_args()
    inputs, seed = options.inputs, options.seed
    started = time.monotonic()
    counts, problems = run(inputs, seed)
    seconds = round(time.monotonic() - started, 1)
    print(json.dumps({"inputs": inputs, "seed": seed, "seconds": seconds, **counts, "problems": len(problems)}))
    for problem in problems[:20]:
        print(problem, file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
