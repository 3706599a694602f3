"""Words of kernels that waited in vain, on a CPU: who tells of them, in which order, and for how long."""

import gc

import pytest

torch = pytest.importorskip("torch")

from jitspark.errors import RankError  # noqa: E402
from jitspark.geometry import deployment  # noqa: E402
from jitspark.plans.markov import markov_plan  # noqa: E402
from jitspark.runtime.markov_launches import SamplingWatch, progress_watch  # noqa: E402
from jitspark.runtime.silence import WordWatch, require_all_heard  # noqa: E402
from jitspark.runtime.symmetric_memory import FAILURE, ExchangeMemory, digest_of, simulated_world  # noqa: E402
from kernel_specs.markov_gumbel_sampling.tiling import HEADER, LAUNCHES, STUCK  # noqa: E402


def words():
    return {name: torch.zeros(1, dtype=torch.int32) for name in ("a", "b")}


def problem(word):
    return RankError(where="here", found=f"nothing from rank {word - 1}", needed="it", remedy="Look.")


def test_a_word_counts_once_it_was_copied():
    found = words()
    watch = WordWatch(found, problem)
    found["b"].fill_(3)

    watch.note("a")
    watch.note("no word of this watch")
    watch.require_heard()
    watch.note("b")

    for _ in range(2):  # there is no way back
        with pytest.raises(RankError, match="nothing from rank 2"):
            watch.require_heard()


def test_a_watch_without_words_has_nothing_to_tell():
    watch = WordWatch({}, problem)

    watch.note("a")
    watch.require_heard()


def test_all_watches_of_the_process_are_asked_the_oldest_first():
    older, newer = words(), words()
    watches = [WordWatch(found, problem) for found in (older, newer)]
    newer["a"].fill_(2)
    require_all_heard()
    watches[1].note("a")
    with pytest.raises(RankError, match="nothing from rank 1"):
        require_all_heard()

    older["a"].fill_(1)
    watches[0].note("a")
    with pytest.raises(RankError, match="nothing from rank 0"):
        require_all_heard()


def test_a_watch_that_nobody_holds_is_not_asked():
    found = words()
    watch = WordWatch(found, problem)
    found["a"].fill_(1)
    watch.note("a")

    del watch
    gc.collect()

    require_all_heard()


def test_a_sampling_launch_that_gave_up_is_told_of():
    memories = {requests: torch.zeros(HEADER, dtype=torch.int64) for requests in (1, 2)}
    watch = progress_watch(memories, 1, 2)
    for memory in memories.values():
        memory[LAUNCHES] = 41
    for requests in memories:
        watch.note(requests)
    require_all_heard()
    memories[2][STUCK] = 41

    watch.note(2)

    with pytest.raises(RankError, match=r"rank 1 of 2, the draft's sampling loop: found launch 41 gave up"):
        require_all_heard()


def test_the_gather_behind_the_sampling_loop_names_the_rank_that_the_loop_cannot():
    plan = markov_plan(deployment("tiny", 2), 2, "sm_90a", multiplier=1.0, soft_cap=None)
    memory, _ = simulated_world(plan.symmetric_bytes, 2, "cpu")
    loop = torch.zeros(HEADER, dtype=torch.int64)
    watch = SamplingWatch({2: plan}, ExchangeMemory(0, 2, {digest_of(plan): memory}), {2: loop})
    watch.note(2)
    require_all_heard()
    loop[STUCK] = 41
    (word,) = [each for each in plan.buffers if each.name.endswith(FAILURE)]
    memory.local[word.offset] = 2  # 1 + the rank

    watch.note(2)

    with pytest.raises(RankError, match="nothing from rank 1 in time"):
        require_all_heard()
