"""What plans launch is in the catalogue, with the arguments and the early reads that it has there."""

import pytest

from jitspark.errors import SpecError
from jitspark.geometry import deployment
from jitspark.plans.backbone import decode_plan, logits_plan
from jitspark.plans.plan import CUTE, TensorArgument
from jitspark.registry import kernel_names
from jitspark.runtime.cute_ops import operation, operations


def test_every_kernel_is_in_the_catalogue():
    assert tuple(each.name for each in operations()) == kernel_names()


@pytest.mark.parametrize(("name", "tp"), [("tiny", 1), ("tiny_swa", 2), ("muse_spark_open", 8)])
def test_launches_have_an_operation_s_arguments_in_its_order(name, tp):
    served = deployment(name, tp)
    launches = [launch for plan in (decode_plan, logits_plan) for launch in plan(served, 8, "sm_90a").launches]
    for launch in (each for each in launches if each.provider == CUTE):
        known = operation(launch.operation)
        arguments = known.arguments_of(launch)
        early = {
            arg.name
            for arg, given in zip(arguments, launch.arguments, strict=True)
            if isinstance(given, TensorArgument) and given.early and given.role == "in"
        }

        assert early == {arg.name for arg in arguments} & set(known.early_reads), launch.name


def test_a_name_that_is_no_kernel_is_refused():
    with pytest.raises(SpecError):
        operation("fused_everything")
