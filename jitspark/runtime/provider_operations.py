"""The operations that plans ask of providers beside our kernels, as an executor is bound with them.

Refuses what no operation can do in a served model: stock NVFP4 experts read weights that vLLM has put into another
order than a plan's, stock exchanges are copies of a rank's own memory, and FlashInfer has no operations for some parts.
"""

from collections.abc import Iterable
from typing import Any

from jitspark.errors import UsageError
from jitspark.plans.bound_plan import Operations
from jitspark.plans.plan import Plan
from jitspark.runtime.parts import FLASHINFER, STOCK


def provider_operations(plans: Iterable[Plan], device: Any) -> Operations:
    """What these plans' launches by `stock` and `flashinfer` call; nothing where all are ours.

    For executors that never run at the same time. Raises UsageError for a part that its provider cannot serve here.
    """
    plans = tuple(plans)
    asked = {(each.provider, each.operation) for plan in plans for each in plan.launches}
    providers = {provider for provider, _ in asked}
    found: dict[tuple[str, str], Any] = {}
    if STOCK in providers:
        if (STOCK, "nvfp4_grouped_gemm_swiglu") in asked:
            raise _refused("experts", STOCK, "cute, for NVFP4 experts")
        if any(_exchanged_by_stock(plan) for plan in plans):
            raise _refused("all_reduce", STOCK, "cute, above TP 1")
        from jitspark.runtime.stock_ops import stock_operations

        found |= stock_operations()
    if FLASHINFER in providers:
        from jitspark.runtime.flashinfer_ops import LACKING, flashinfer_operations

        parts = {each.part for plan in plans for each in plan.launches if each.provider == FLASHINFER}
        if refused := sorted(parts & LACKING.keys()):
            raise _refused(refused[0], f"{FLASHINFER} ({LACKING[refused[0]]})", "cute")
        found |= flashinfer_operations(device)
    return found


def _exchanged_by_stock(plan: Plan) -> bool:
    return plan.tp > 1 and any(each.part == "all_reduce" and each.provider == STOCK for each in plan.launches)


def _refused(part: str, found: str, needed: str) -> UsageError:
    return UsageError(
        where=f'additional_config["jitspark"]["providers"]["{part}"]',
        found=found,
        needed=needed,
        remedy=f"Leave {part} to our kernels, or run all of the decode step stock.",
    )
