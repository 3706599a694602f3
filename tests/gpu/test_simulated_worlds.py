"""Worlds of 2, 4 and 8 ranks that one GPU plays, as `python -m bench.check_exchanges` does it.

Each rank has memory and a stream of its own, and the others' addresses: kernels cannot tell. Cases are few rows, so
that all ranks fit the GPU at once; waits are bounded.
"""

import pytest

torch = pytest.importorskip("torch")

from gpu_cache import kernel_of  # noqa: E402

from bench.check_exchanges import ROUNDS, check, check_silent_rank, chosen_cases, simulated_axes  # noqa: E402
from bench.collective_cases import CHECKED  # noqa: E402
from bench.rank_world import draw_world  # noqa: E402
from jitspark.registry import load_spec  # noqa: E402

SIZES, SEED, REPLAYS = (2, 4, 8), 5, 200
CASES = [(name, case) for size in SIZES for name, case in chosen_cases(CHECKED, size)]
FIRST = list(
    {(name, case.axes["world_size"], case.statics.get("shots")): (name, case) for name, case in CASES}.values()
)


def title(value):
    return value if isinstance(value, str) else f"world{value.axes['world_size']}"


def simulated(name, case):
    specialization = load_spec(name).specialize_case(case)
    return draw_world(specialization, simulated_axes(case), SEED, ROUNDS, "cuda"), kernel_of(specialization)


@pytest.mark.parametrize(("name", "case"), CASES, ids=title)
def test_all_ranks_end_with_the_references_values_and_equal_bits_in_every_replay(name, case):
    world, kernel = simulated(name, case)

    found = check(world, case, kernel, REPLAYS)

    assert not found.problems, found


@pytest.mark.parametrize(("name", "case"), FIRST, ids=title)
def test_a_silent_rank_is_named_in_time_and_waited_for_once(name, case):
    world, kernel = simulated(name, case)

    found = check_silent_rank(world, kernel)

    assert not found.problems, found
