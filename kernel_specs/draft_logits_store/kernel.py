"""CuTe DSL kernel for `draft_logits_store`: a CTA per sample and piece of its row."""

from collections.abc import Callable

import cutlass
from cutlass import cute

VECTOR = 8  # values of a load of 16 bytes
THREADS = 256
VECTORS = 4  # of a thread, all in flight at once
PIECE = THREADS * VECTORS * VECTOR


def draft_logits_store(num_steps: int, vocab_size: int) -> Callable[..., None]:
    """The host function of one specialization; its arguments are the specialization's, then the stream."""

    def vector_of(row: cute.Pointer, column: cutlass.Int32) -> cute.Tensor:
        return cute.make_tensor(row + cute.assume(column, VECTOR), cute.make_layout(VECTOR))

    @cute.kernel
    def device(logits: cute.Tensor, sample_idx_mapping: cute.Tensor, draft_logits: cute.Tensor) -> None:
        thread, _, _ = cute.arch.thread_idx()
        piece, sample, _ = cute.arch.block_idx()
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        step = sample % num_steps
        state = sample_idx_mapping[sample // num_steps, step]
        if state >= 0:
            source = logits.iterator + cute.assume(cutlass.Int64(sample) * vocab_size, VECTOR)
            target = draft_logits.iterator + cute.assume((state * num_steps + step) * vocab_size, VECTOR)
            values = cute.make_rmem_tensor((VECTORS * VECTOR,), cutlass.BFloat16)
            for i in cutlass.range_constexpr(VECTORS):
                column = piece * PIECE + (i * THREADS + thread) * VECTOR
                if column < vocab_size:
                    cute.autovec_copy(vector_of(source, column), cute.local_tile(values, (VECTOR,), (i,)))
            for i in cutlass.range_constexpr(VECTORS):
                column = piece * PIECE + (i * THREADS + thread) * VECTOR
                if column < vocab_size:
                    cute.autovec_copy(cute.local_tile(values, (VECTOR,), (i,)), vector_of(target, column))

    @cute.jit
    def host(logits: cute.Tensor, sample_idx_mapping: cute.Tensor, draft_logits: cute.Tensor, stream: object) -> None:
        device(logits, sample_idx_mapping, draft_logits).launch(
            grid=(-(-vocab_size // PIECE), logits.shape[0], 1),
            block=(THREADS, 1, 1),
            stream=stream,
            use_pdl=True,
        )

    return host
