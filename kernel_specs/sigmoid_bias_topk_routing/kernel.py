"""CuTe DSL kernel for `sigmoid_bias_topk_routing`: a warp per token, then a thread per expert, in a cluster of CTAs."""

from collections.abc import Callable

from cutlass import cute

from kernel_specs.primitives.expert_schedule import THREADS
from kernel_specs.primitives.topk_routing import CLUSTER, router


def sigmoid_bias_topk_routing(
    num_experts: int, num_experts_per_tok: int, num_offsets: int, padded: bool
) -> Callable[..., None]:
    """The host function of one specialization; its arguments are the specialization's, then the stream."""
    assert num_offsets == num_experts + 1
    prepare, route = router(num_experts, num_experts_per_tok, padded=padded)

    @cute.kernel
    def device(
        logits: cute.Tensor,
        bias: cute.Tensor,
        is_padding: cute.Tensor | None,
        topk_ids: cute.Tensor,
        topk_weights: cute.Tensor,
        expert_ids: cute.Tensor,
        route_offsets: cute.Tensor,
        routes: cute.Tensor,
        num_distinct_experts: cute.Tensor,
    ) -> None:
        thread, _, _ = cute.arch.thread_idx()
        rank, _, _ = cute.arch.block_idx()
        warp, lane = cute.arch.warp_idx(), cute.arch.lane_idx()
        prepared = prepare(bias, logits.shape[0], thread, lane)
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        outputs = (topk_ids, topk_weights, expert_ids, route_offsets, routes, num_distinct_experts)
        route(prepared, logits, is_padding, outputs, rank, thread, warp, lane)

    @cute.jit
    def host(*arguments) -> None:  # `is_padding` exists only when padded
        logits, bias, *mask_and_outputs, cuda_stream = arguments
        mask_or_none = () if padded else (None,)
        device(logits, bias, *mask_or_none, *mask_and_outputs).launch(
            grid=(CLUSTER, 1, 1),
            block=(THREADS, 1, 1),
            cluster=(CLUSTER, 1, 1),
            stream=cuda_stream,
            min_blocks_per_mp=1,
            use_pdl=True,
        )

    return host
