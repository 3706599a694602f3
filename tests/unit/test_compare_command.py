"""`jitspark compare` on a machine without a GPU: plain torch against the references, and what it refuses."""

import json

import pytest

torch = pytest.importorskip("torch")

from typer.testing import CliRunner  # noqa: E402

from jitspark.checking import torch_kernels  # noqa: E402
from jitspark.cli.app import app  # noqa: E402
from jitspark.errors import DeviceMemoryError, UsageError  # noqa: E402

TINY = ["compare", "--geometry", "tiny_swa", "--tp", "1", "--target", "sm_90a", "--subject", "torch"]


def answered(*arguments):
    return CliRunner().invoke(app, [*TINY, *arguments])


def test_plain_torch_stays_within_the_tolerances_of_a_step():
    result = answered("--m", "16", "--json")

    found = json.loads(result.stdout.splitlines()[-1])
    assert result.exit_code == 0, result.output
    assert found["diverged"] == []
    assert {each["operation"] for each in found["operations"]} >= {"skinny_gemm_bf16", "paged_gqa_verify_attention"}


def test_logits_are_compared_too():
    result = answered("--stage", "logits")

    assert result.exit_code == 0, result.output
    assert "all 2 launches are within their tolerances" in result.stdout


def test_the_first_launch_that_leaves_its_tolerance_is_named(monkeypatch):
    def wrong(*arguments, **_):
        arguments[-2].fill_(1.0)

    monkeypatch.setitem(torch_kernels.TORCH_KERNELS, "rmsnorm", wrong)

    result = answered()

    assert result.exit_code == 1
    assert "first divergence: layers.0.pre_qkv_norm (rmsnorm)" in result.stdout


def test_weights_that_the_machine_cannot_hold_are_one_error_before_any_is_made(monkeypatch):
    monkeypatch.setattr("jitspark.runtime.device_memory.free_bytes", lambda _: 1 << 20)

    result = answered()

    assert isinstance(result.exception, DeviceMemoryError)
    assert "decode plan of tiny_swa" in result.exception.where
    assert "--geometry" in result.exception.remedy


@pytest.mark.parametrize(
    ("arguments", "found"),
    [
        (["--subject", "nobody"], "nobody"),
        (["--stage", "draft", "--m", "7"], "draft"),
        (["--m", "9"], "9 rows"),
        (["--subject", "kernels"], "no GPU"),
    ],
)
def test_what_cannot_be_compared_is_one_error(arguments, found, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    result = answered(*arguments)

    assert isinstance(result.exception, UsageError)
    assert found in result.exception.found
