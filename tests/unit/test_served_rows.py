"""Capture sizes: which decode steps they come to, and one line for those that run stock."""

from types import SimpleNamespace

import pytest

from jitspark.errors import UsageError
from jitspark.plans.served_rows import served_rows


@pytest.mark.parametrize(
    ("sizes", "rows"),
    [
        ((8, 16, 32, 64), (8, 16, 32, 64)),
        ((1, 2, 4, 8, 16, 24), (8, 16, 24)),
        (tuple(range(1, 65)), (8, 16, 24, 32, 40, 48, 56, 64)),
        ((64, 8, 8), (8, 64)),
        ((5, 11, 64), (8, 16, 64)),
        ((), ()),
    ],
)
def test_sizes_are_rounded_up_to_whole_requests(sizes, rows):
    found = served_rows(sizes, 8, 64)

    assert found.rows == rows
    assert found.line() is None


def test_sizes_that_no_plan_serves_are_one_line_with_the_reasons():
    found = served_rows((8, 16, 72, 128, 256, 512), 8, 256)

    assert found.rows == (8, 16)
    assert found.line() == "capture sizes that run stock: 72, 128, 256, 512 (more than 8 requests of 8 tokens)"


def test_each_reason_is_told_with_its_sizes():
    found = served_rows((8, 20, 40, 72, 75), 8, 4)

    assert found.rows == (8, 24)
    assert found.line() == (
        "capture sizes that run stock: 40, 72 (more than the 4 requests of max_num_seqs); "
        "75 (80 rows are more than the largest size: vLLM captures no such decode graph)"
    )


def test_a_long_list_is_cut():
    line = served_rows(range(8, 513, 8), 8, 64).line()

    assert line == (
        "capture sizes that run stock: 72, 80, 88, 96, 104, 112, ... 512 (56 sizes) (more than 8 requests of 8 tokens)"
    )


def test_a_size_below_a_request_that_is_the_largest_serves_nothing():
    found = served_rows((4,), 8, 64)

    assert found.rows == ()
    assert "8 rows are more than the largest size" in found.line()


@pytest.mark.parametrize(
    ("sizes", "found"), [((128, 256), "128, 256 (more than 8 requests"), ((4,), "no such decode graph"), ((), "no ")]
)
def test_a_worker_whose_every_size_runs_stock_is_refused_before_anything_is_made(sizes, found):
    pytest.importorskip("torch")
    from jitspark.runtime import DecodeConfig
    from jitspark.runtime.prepared import prepare

    deployment = SimpleNamespace(additional_config={}, scheduler_config=SimpleNamespace(max_num_seqs=64))
    with pytest.raises(UsageError) as caught:
        prepare(deployment, DecodeConfig(8, 8, 1024, sizes), "sm_90a", print)

    assert caught.value.where == "cudagraph_capture_sizes"
    assert found in caught.value.found
    assert "8 to 64 rows" in caught.value.needed
