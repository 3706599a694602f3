"""The operations that plans ask of providers beside our kernels, as an executor is bound with them.

Refuses what no operation can do in a served model: stock NVFP4 experts read weights that vLLM has put into another
order than a plan's.
"""

from collections.abc import Iterable
from typing import Any

from jitspark.bound_plan import Operations
from jitspark.errors import UsageError
from jitspark.plan import Plan
from jitspark.runtime.parts import FLASHINFER, STOCK


def provider_operations(plans: Iterable[Plan], device: Any) -> Operations:
    """What these plans' launches by `stock` and `flashinfer` call; nothing where all are ours.

    For executors that never run at the same time. Raises UsageError for a part that its provider cannot serve here.
    """
    asked = {(each.provider, each.operation) for plan in plans for each in plan.launches}
    providers = {provider for provider, _ in asked}
    found: dict[tuple[str, str], Any] = {}
    if STOCK in providers:
        if (STOCK, "nvfp4_grouped_gemm_swiglu") in asked:
            raise UsageError(
                where='additional_config["jitspark"]["providers"]["experts"]',
                found=STOCK,
                needed="cute, for NVFP4 experts",
                remedy="Leave the experts to our kernels, or run all of the decode step stock.",
            )
        from jitspark.runtime.stock_ops import stock_operations

        found |= stock_operations()
    if FLASHINFER in providers:
        from jitspark.runtime.flashinfer_ops import flashinfer_operations

        found |= flashinfer_operations(device)
    return found
