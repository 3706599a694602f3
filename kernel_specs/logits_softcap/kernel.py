"""CuTe DSL kernel for `logits_softcap`: a vector of neighbouring logits per thread, whatever row it lies in."""

from collections.abc import Callable

import cutlass
from cutlass import cute

THREADS = 256


def logits_softcap(vector: int) -> Callable[..., None]:
    """The host function of one specialization; its arguments are the specialization's, then the stream."""

    @cute.kernel
    def device(
        logits: cute.Tensor, out: cute.Tensor, ratio: cutlass.Float32, cap: cutlass.Float32, count: cutlass.Int64
    ) -> None:
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        index = cutlass.Int64(block) * THREADS + thread
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        if index < count:
            offset = cute.assume(index * vector, vector)
            loaded = cute.make_rmem_tensor((vector,), cutlass.BFloat16)
            cute.autovec_copy(cute.make_tensor(logits.iterator + offset, cute.make_layout(vector)), loaded)
            scaled = loaded.load().to(cutlass.Float32) * ratio
            capped = cute.make_rmem_tensor((vector,), cutlass.Float32)
            for i in cutlass.range_constexpr(vector):
                capped[i] = cap * cute.math.tanh(scaled[i])
            cute.autovec_copy(capped, cute.make_tensor(out.iterator + offset, cute.make_layout(vector)))

    @cute.jit
    def host(
        logits: cute.Tensor,
        out: cute.Tensor,
        multiplier: cutlass.Float32,
        cap: cutlass.Float32,
        cuda_stream: object,
    ) -> None:
        count = cutlass.Int64(logits.shape[0]) * logits.shape[1] // vector
        device(logits, out, multiplier / cap, cap, count).launch(
            grid=(cutlass.Int32((count + (THREADS - 1)) // THREADS), 1, 1),
            block=(THREADS, 1, 1),
            stream=cuda_stream,
            use_pdl=True,
        )

    return host
