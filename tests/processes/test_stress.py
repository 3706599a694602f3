"""Readers on a warm cache while a builder, a pruner and a republisher run: no failure, and never a wrong kernel.

`bench/stress_cache.py` does the same with a process for each of 64 readers, for a minute.
"""

from stress_run import run_stress


def test_sixty_four_readers_never_fail_while_others_build_prune_and_republish(tmp_path, templates):
    counts, problems = run_stress(tmp_path, templates, processes=8, threads=8, seconds=4.0)

    assert problems == []
    assert counts["hit"] > 1000
    assert counts["run"] >= 8 * 10
    assert min(counts[name] for name in ("compiled", "pruned", "republished")) > 5
