"""Every case of every kernel on this machine's GPU, as `bin/check-gpu` does it.

From the cache root that JITSPARK_GPU_CACHE names, or else from the usual cache. Entries that are missing skip.
"""

import pytest

torch = pytest.importorskip("torch")

from gpu_cache import kernel_of  # noqa: E402

from bench.check import every_case  # noqa: E402
from jitspark.checking.check import check_case  # noqa: E402
from jitspark.target import TARGETS  # noqa: E402

WORK = every_case(TARGETS[0])


@pytest.mark.parametrize("work", WORK, ids=[f"{item.specialization.name}-{i}" for i, item in enumerate(WORK)])
def test_a_kernel_does_what_its_reference_does(work):
    kernel = kernel_of(work.specialization)
    generator = torch.Generator(device="cuda")
    generator.seed()

    outcome = check_case(work.specialization, work.case, kernel, generator)

    assert outcome.passed, "\n".join([outcome.title, *outcome.problems])
