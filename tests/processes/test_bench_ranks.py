"""The steps that bin/bench-decode-ranks times beside ours are the same step: whole experts, and collectives."""

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("msgspec")

from bench_ranks import run, run_ranks  # noqa: E402

# As in test_decode_ranks: partial sums are rounded on each rank, and a token may take another expert. NVFP4 doubles the
# first: codes that nearly tie fall the other way.
OF_SIZE = {"whole": 0.03, "nccl": 0.01}
FLIPPED, OF_A_FLIP = 2, 0.3


@pytest.fixture(scope="module", params=OF_SIZE)
def kind(request):
    return request.param


@pytest.fixture(scope="module")
def alone(kind):
    return run(kind, 0, 1)


@pytest.mark.parametrize("size", [2, 4])
def test_ranks_end_alike_and_as_a_rank_alone(tmp_path, alone, kind, size):
    first, *others = run_ranks(tmp_path, size, kind)

    for other in others:
        assert all(torch.equal(first[name].view(torch.uint8), other[name].view(torch.uint8)) for name in alone)
    for name, wanted in alone.items():
        error = (first[name].double() - wanted.double()).square().mean(dim=1).sqrt()
        error = (error / wanted.double().square().mean(dim=1).sqrt()).sort().values
        assert 0 < error[-1] < OF_A_FLIP, name
        assert error[-1 - FLIPPED] < OF_SIZE[kind], f"{name}: {error.tolist()}"
