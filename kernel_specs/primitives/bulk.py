"""Bulk copies from global to shared memory, which an mbarrier counts in bytes."""

import cutlass
from cutlass import cute

# L2 policies
EVICT_FIRST = 0x12F0000000000000  # read once
EVICT_NORMAL = 0x1000000000000000


def bulk_copy(
    target: cute.Pointer, source: cute.Pointer, num_bytes: int, full: cute.Pointer, policy: int = EVICT_FIRST
) -> None:
    """Start copying `num_bytes`, a multiple of 16, between addresses that are multiples of 16. By one thread."""
    cute.arch.inline_ptx(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
        "[{$r0}], [{$r1}], {$r2}, [{$r3}], {$r4};",
        read_only_args=[
            target.toint(), source.toint(), cutlass.Int32(num_bytes), full.toint(), cutlass.Int64(policy),
        ],
    )  # fmt: skip
