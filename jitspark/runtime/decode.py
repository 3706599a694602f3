"""The specialized decode over the stock backbone, as the support check sees it: what its providers require."""

from typing import Any

from jitspark.runtime.providers import chosen


def provider_requirements(vllm_config: Any) -> str | None:
    """The first unmet requirement of the providers that serve this deployment, or None.

    Attention backend, context length, all-reduce backend, in this order; by part in the order of the step. Asked
    after the support check, whose lines it takes for granted. What a config cannot show is listed in `providers`.
    """
    unmet = (provider.requirements(vllm_config) for provider in chosen(vllm_config))
    return next((reason for reason in unmet if reason is not None), None)
