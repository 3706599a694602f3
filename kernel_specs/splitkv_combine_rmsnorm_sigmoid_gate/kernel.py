"""CuTe DSL kernel for `splitkv_combine_rmsnorm_sigmoid_gate`: one CTA per token and query head.

16 lanes hold the head's columns of one split, so a warp adds two splits at a time. The loads of a batch of splits are
all in flight before the first is used; every warp computes the common maximum and sum itself, from the same numbers
in the same order. Warps meet once, in shared memory, and are added in order.
"""

from collections.abc import Callable

import cutlass
from cutlass import cute

from kernel_specs.primitives.reduce import WARP, butterfly
from kernel_specs.primitives.vector import round_bfloat16

HEAD = 64
VECTOR = 4
LANES = HEAD // VECTOR  # of a split's row
PAIR = HEAD // WARP  # columns of a lane once the splits are added
ROWS_IN_FLIGHT = 8
FACTORS = 5  # of a lane: 160 splits, a CTA on every multiprocessor of any target
NOTHING = -cutlass.Float32.inf  # the maximum of a split without keys; what else it holds is never used


def splitkv_combine_rmsnorm_sigmoid_gate(
    num_heads: int, num_kv_heads: int, qkvg_size: int, attention_size: int, threads: int
) -> Callable[..., None]:
    """The host function of one specialization; its arguments are the specialization's, then the stream."""
    assert qkvg_size == 2 * HEAD * (num_heads + num_kv_heads)
    assert attention_size == num_heads * HEAD
    gate_pairs = (num_heads + 2 * num_kv_heads) * HEAD // PAIR  # pairs of columns before the gate
    groups = threads // LANES
    warps = threads // WARP

    def exp2(value: cutlass.Float32) -> cutlass.Float32:
        return cute.math.exp2(value, fastmath=True)

    def load_gates(gates: cute.Tensor) -> tuple[cutlass.Float32, cutlass.Float32]:
        """Two gates. In PTX, so that the load stays with the others: the compiler would move it down to its use."""
        word = cute.arch.inline_ptx(
            "ld.global.b32 {$w0}, [{$r0}];", write_only_types=[cutlass.Int32], read_only_args=[gates.iterator.toint()]
        )
        return (word << 16).bitcast(cutlass.Float32), (word & -65536).bitcast(cutlass.Float32)

    def sigmoid(value: cutlass.Float32) -> cutlass.Float32:
        return cute.arch.rcp_approx(1.0 + cute.math.exp(-value, fastmath=True))

    def finite_or_zero(value: cutlass.Float32) -> cutlass.Float32:
        """What exponents are relative to: -inf - -inf would be NaN."""
        return cutlass.select_(value == NOTHING, cutlass.Float32(0.0), value)

    def ordered(bits: cutlass.Int32) -> cutlass.Int32:
        """A float's bits as an integer of the same order, and back."""
        return bits ^ ((bits >> 31) & 0x7FFFFFFF)

    def warp_max(value: cutlass.Float32) -> cutlass.Float32:
        """Every target reduces integers over a warp in one instruction, but not all of them floats."""
        largest = cute.arch.inline_ptx(
            "redux.sync.max.s32 {$w0}, {$r0}, 0xffffffff;",
            write_only_types=[cutlass.Int32],
            read_only_args=[ordered(value.bitcast(cutlass.Int32))],
        )
        return ordered(largest).bitcast(cutlass.Float32)

    @cute.jit
    def common_factors(
        maxima: cute.Tensor, sums: cute.Tensor, splits: cutlass.Int32, lane: cutlass.Int32
    ) -> tuple[cutlass.Float32, cutlass.Float32]:
        """(the largest maximum, or 0 without a key; the sum of all weights relative to it), the same in all lanes."""
        found_maxima = cute.make_rmem_tensor((FACTORS,), cutlass.Float32)
        found_sums = cute.make_rmem_tensor((FACTORS,), cutlass.Float32)
        found_maxima.fill(NOTHING)
        for i in cutlass.range_constexpr(FACTORS):
            if lane + i * WARP < splits:
                found_maxima[i] = maxima[lane + i * WARP]
                found_sums[i] = sums[lane + i * WARP]
        largest = found_maxima[0]
        for i in cutlass.range_constexpr(1, FACTORS):
            largest = cute.arch.fmax(largest, found_maxima[i])
        base = finite_or_zero(warp_max(largest))
        total = cutlass.Float32(0.0)
        for i in cutlass.range_constexpr(FACTORS):
            share = found_sums[i] * exp2(found_maxima[i] - base)
            total += cutlass.select_(found_maxima[i] == NOTHING, cutlass.Float32(0.0), share)
        return base, butterfly(total, WARP)

    @cute.jit
    def load_rows(
        maxima: cute.Tensor, rows: cute.Tensor, start: cutlass.Int32, part: cutlass.Int32, splits: cutlass.Int32
    ) -> tuple[cute.Tensor, cute.Tensor]:
        """Maxima, and this lane's columns, of the splits start, start + groups, ..."""
        found_maxima = cute.make_rmem_tensor((ROWS_IN_FLIGHT,), cutlass.Float32)
        found_rows = cute.make_rmem_tensor((ROWS_IN_FLIGHT * VECTOR,), cutlass.Float32)
        found_maxima.fill(NOTHING)
        found_rows.fill(0.0)
        for i in cutlass.range_constexpr(ROWS_IN_FLIGHT):
            split = start + i * groups
            if split < splits:
                row = cute.local_tile(rows[split, None], (VECTOR,), (part,))
                cute.autovec_copy(row, cute.local_tile(found_rows, (VECTOR,), (i,)))
                found_maxima[i] = maxima[split]
        return found_maxima, found_rows

    def add_rows(acc: cute.Tensor, found_maxima: cute.Tensor, found_rows: cute.Tensor, base: cutlass.Float32) -> None:
        for i in range(ROWS_IN_FLIGHT):
            factor = exp2(found_maxima[i] - base)
            for k in range(VECTOR):
                share = found_rows[i * VECTOR + k] * factor
                acc[k] = acc[k] + cutlass.select_(found_maxima[i] == NOTHING, cutlass.Float32(0.0), share)

    @cute.kernel
    def device(
        partial_max: cute.Tensor,
        partial_sum: cute.Tensor,
        partial_out: cute.Tensor,
        qkvg: cute.Tensor,
        out: cute.Tensor,
        eps: cutlass.Float32,
    ) -> None:
        thread, _, _ = cute.arch.thread_idx()
        head, token, _ = cute.arch.block_idx()
        lane = thread & (WARP - 1)
        warp = cute.arch.make_warp_uniform(thread >> 5)
        group = thread >> 4
        part = thread & (LANES - 1)
        splits = partial_out.shape[2]
        maxima = partial_max[token, head, None]
        rows = partial_out[token, head, None, None]
        memory = cute.arch.alloc_smem(cutlass.Float32, warps * HEAD, alignment=16)
        shared = cute.make_tensor(memory, cute.make_layout((warps, HEAD), stride=(HEAD, 1)))
        cute.arch.griddepcontrol_launch_dependents()
        cute.arch.griddepcontrol_wait()

        gates = load_gates(cute.local_tile(qkvg[token, None], (PAIR,), (gate_pairs + head * WARP + lane,)))
        acc = cute.make_rmem_tensor((VECTOR,), cutlass.Float32)
        acc.fill(0.0)
        found_maxima, found_rows = load_rows(maxima, rows, group, part, splits)
        base, total = common_factors(maxima, partial_sum[token, head, None], splits, lane)
        add_rows(acc, found_maxima, found_rows, base)
        for start in cutlass.range(group + groups * ROWS_IN_FLIGHT, splits, groups * ROWS_IN_FLIGHT, unroll=1):
            found_maxima, found_rows = load_rows(maxima, rows, start, part, splits)
            add_rows(acc, found_maxima, found_rows, base)

        for k in cutlass.range_constexpr(VECTOR):
            acc[k] = acc[k] + cute.arch.shuffle_sync_bfly(acc[k], LANES)
        if lane < LANES:
            cute.autovec_copy(acc, cute.local_tile(shared[warp, None], (VECTOR,), (part,)))
        sigmoids = tuple(sigmoid(gate) for gate in gates)
        cute.arch.sync_threads()
        if warp == 0:
            finish(shared, sigmoids, out[token, None], head, lane, total, eps)

    @cute.jit
    def finish(
        shared: cute.Tensor,
        sigmoids: tuple[cutlass.Float32, ...],
        out: cute.Tensor,
        head: cutlass.Int32,
        lane: cutlass.Int32,
        total: cutlass.Float32,
        eps: cutlass.Float32,
    ) -> None:
        """One warp: add the warps' sums, normalize, gate and store two columns a lane."""
        values = cute.make_rmem_tensor((PAIR,), cutlass.Float32)
        values.fill(0.0)
        for warp in cutlass.range_constexpr(warps):
            values.store(values.load() + cute.local_tile(shared[warp, None], (PAIR,), (lane,)).load())
        nothing = total == 0.0  # then `attended` is NaN, and not used
        attended = round_bfloat16(values.load() * cute.arch.rcp_approx(total))
        square_sum = butterfly(attended[0] * attended[0] + attended[1] * attended[1], WARP)
        factor = cute.math.rsqrt(square_sum / HEAD + eps, fastmath=True)
        stored = cute.make_rmem_tensor((PAIR,), cutlass.BFloat16)
        for k in cutlass.range_constexpr(PAIR):
            value = cutlass.select_(nothing, cutlass.Float32(0.0), attended[k] * factor * sigmoids[k])
            stored[k] = cutlass.Float32(value).to(cutlass.BFloat16)
        cute.autovec_copy(stored, cute.local_tile(out, (PAIR,), (head * WARP + lane,)))

    @cute.jit
    def host(
        partial_max: cute.Tensor,
        partial_sum: cute.Tensor,
        partial_out: cute.Tensor,
        qkvg: cute.Tensor,
        out: cute.Tensor,
        eps: cutlass.Float32,
        stream: object,
    ) -> None:
        device(partial_max, partial_sum, partial_out, qkvg, out, eps).launch(
            grid=(num_heads, out.shape[0], 1),
            block=(threads, 1, 1),
            stream=stream,
            min_blocks_per_mp=1,  # registers are not scarce: all loads may be issued before the first use
            use_pdl=True,
        )

    return host
