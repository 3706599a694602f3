"""What a plan is bound to is held against its buffers and its kernels' signatures, before anything is launched."""

import functools
from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")

from jitspark.cache.record import Record  # noqa: E402
from jitspark.checking.plan_arguments import random_step, random_weights  # noqa: E402
from jitspark.errors import BindingError  # noqa: E402
from jitspark.geometry import deployment  # noqa: E402
from jitspark.key import recipe_of  # noqa: E402
from jitspark.plans.backbone import decode_plan  # noqa: E402
from jitspark.plans.binding import Binding, SymmetricMemory, local_memory  # noqa: E402
from jitspark.plans.launch_signature import Signature  # noqa: E402
from jitspark.plans.plan import Kind  # noqa: E402
from jitspark.registry import specializations  # noqa: E402

TARGET = "sm_90a"


@functools.cache
def plan_of(name="tiny_swa", tp=1, rows=16):
    return decode_plan(deployment(name, tp), rows, TARGET)


@functools.cache
def signatures_of(name="tiny_swa", tp=1, rows=16):
    recipes = {(found := recipe_of(each, TARGET)).key: found for each in specializations(deployment(name, tp))}
    keys = plan_of(name, tp, rows).keys()
    records = {key: Record.of(recipes[key], {}, b"artifact", "signature", (), "cu13") for key in keys}
    signatures = {key: Signature.of(record) for key, record in records.items()}
    return {each.name: signatures[each.key] for each in plan_of(name, tp, rows).launches if each.key is not None}


@pytest.fixture(scope="module")
def drawn():
    plan, generator = plan_of(), torch.Generator().manual_seed(3)
    step = random_step(plan, (40, 0), generator)
    return {**random_weights(plan, generator), **step.inputs, **step.kv_caches}


def binding(plan=None, **options):
    return Binding(plan or plan_of(), "cpu", signatures=signatures_of(), **options)


def refused(tensors, **options):
    """The error of binding these tensors."""
    with pytest.raises(BindingError) as caught:
        binding(**options).bind(tensors)
    return caught.value


def test_what_the_plan_asks_for_is_taken(drawn):
    bound = binding()

    bound.bind(drawn)

    bound.require_complete()
    assert bound.tensors.keys() == {buffer.name for buffer in plan_of().buffers}


@pytest.mark.parametrize(
    ("name", "change", "found", "needed"),
    [
        ("layers.1.o_proj", lambda t: t[:-1].contiguous(), "shape [511, 512]", "shape [512, 512]"),
        ("layers.1.o_proj", lambda t: t.float(), "dtype float32", "dtype bfloat16"),
        ("layers.1.o_proj", lambda t: t.t(), "strides [1, 512]", "compact"),
        ("layers.0.slot_mapping", lambda t: t.int(), "dtype int32", "dtype int64"),
        ("inputs_embeds", lambda t: t[:8].contiguous(), "shape [8, 512]", "shape [16, 512]"),
        ("final_norm", lambda t: t.to("meta"), "on meta", "on cpu"),
    ],
)
def test_a_tensor_that_is_not_the_buffer_s_names_a_launch_and_both_sides(drawn, name, change, found, needed):
    error = refused({**drawn, name: change(drawn[name])})

    assert name in error.where
    assert "launch layers." in error.where or "launch stream" in error.where
    assert found in error.found
    assert needed in error.needed


def test_an_address_that_a_kernel_cannot_read_is_refused_with_launch_and_argument(drawn):
    wide = torch.zeros(drawn["layers.0.qkv_gate"].numel() + 1, dtype=torch.bfloat16)
    shifted = wide[1:].view_as(drawn["layers.0.qkv_gate"])

    error = refused({**drawn, "layers.0.qkv_gate": shifted})

    assert "launch layers.0.qkv_gate, argument weight (layers.0.qkv_gate)" in error.where
    assert error.needed == "a multiple of 16"


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (lambda _: None, "the NoneType None"),
        (lambda tensor: tensor.tolist(), "the list ["),
        (lambda tensor: tensor.to_sparse(), "a tensor of layout torch.sparse_coo"),
        (torch._neg_view, "a view that negates what it reads"),
    ],
)
def test_what_has_no_values_at_its_address_is_refused(drawn, change, found):
    error = refused({**drawn, "layers.0.pre_qkv_norm": change(drawn["layers.0.pre_qkv_norm"])})

    assert "layers.0.pre_qkv_norm" in error.where
    assert error.found.startswith(found)


def test_strides_that_a_kernel_cannot_take_are_refused(drawn):
    cache = drawn["layers.0.kv_cache"]
    odd = torch.zeros((*cache.shape[:-1], cache.shape[-1] + 1), dtype=cache.dtype)[..., :-1]

    error = refused({**drawn, "layers.0.kv_cache": odd})

    assert "argument kv_cache (layers.0.kv_cache)" in error.where
    assert error.needed.endswith("that is a multiple of 8")


def test_a_cache_whose_blocks_are_one_place_is_refused(drawn):
    cache = drawn["layers.0.kv_cache"]

    error = refused({**drawn, "layers.0.kv_cache": cache[:1].expand(cache.shape)})

    assert "argument kv_cache (layers.0.kv_cache)" in error.where
    assert error.needed == "a place of its own for each element that is written"


def test_sizes_that_a_launch_sees_in_two_places_must_agree(drawn):
    plan = plan_of()
    other = tuple(replace(b, shape=("requests",)) if b.name == "seq_lens" else b for b in plan.buffers)

    error = refused({**drawn, "seq_lens": torch.zeros(3, dtype=torch.int32)}, plan=replace(plan, buffers=other))

    assert "argument seq_lens" in error.where
    assert error.needed.startswith("num_requests = 2")


@pytest.mark.parametrize("field", ["statics", "arguments", "role"])
def test_a_plan_that_disagrees_with_its_entry_is_refused(drawn, field):
    plan = plan_of()
    launch = next(each for each in plan.launches if each.operation == "router_pooler_gemm")
    changed = {
        "statics": lambda: replace(launch, statics={**launch.statics, "split": 8}),
        "arguments": lambda: replace(launch, arguments=launch.arguments[:-1]),
        "role": lambda: replace(launch, arguments=(*launch.arguments[:4], replace(launch.arguments[4], role="inout"))),
    }[field]()
    launches = tuple(changed if each is launch else each for each in plan.launches)

    error = refused(drawn, plan=replace(plan, launches=launches))

    assert launch.name in error.where
    assert {"statics": "split", "arguments": "4 arguments", "role": "role inout"}[field] in error.found


def test_more_rows_than_a_kernel_serves_break_its_constraint():
    small, large = plan_of(rows=8), plan_of(rows=16)
    served = {each.name: each for each in small.launches}
    launch = next(each for each in large.launches if each.operation == "router_pooler_gemm")
    signature = signatures_of(rows=8)[served[launch.name].name]
    activation, router, logits = torch.zeros(16, 512, dtype=torch.bfloat16), torch.zeros(8, 512), torch.zeros(16, 8)
    pooler, pooled = torch.zeros(256, 512, dtype=torch.bfloat16), torch.zeros(16, 256, dtype=torch.bfloat16)
    rows = [activation, router, pooler, logits, pooled]

    problem = signature.problem(rows)

    assert "num_tokens=16 is more than max_tokens = 8" in problem.found


@pytest.mark.parametrize("missing", ["layers.2.router", "layers.3.kv_cache", "is_padding"])
def test_a_tensor_that_is_missing_is_named(drawn, missing):
    bound = binding()
    bound.bind({name: tensor for name, tensor in drawn.items() if name != missing})

    with pytest.raises(BindingError) as caught:
        bound.require_complete()

    assert missing in caught.value.where


@pytest.mark.parametrize("name", ["no_such_buffer", "stream"])
def test_a_tensor_for_what_is_not_the_caller_s_is_refused(drawn, name):
    assert name in refused({**drawn, name: torch.zeros(1)}).where


def test_a_binding_that_is_refused_changes_nothing(drawn):
    bound = binding()
    bound.bind(drawn)
    before = dict(bound.tensors)

    with pytest.raises(BindingError):
        bound.bind({"layers.0.router": drawn["layers.0.router"].clone(), "final_norm": torch.zeros(3)})

    assert all(bound.tensors[name] is tensor for name, tensor in before.items())


def test_kv_caches_are_bound_again_with_other_sizes_and_strides(drawn):
    bound = binding()
    bound.bind(drawn)
    shape = drawn["layers.0.kv_cache"].shape
    token_major = torch.zeros((shape[0] + 9, shape[2], shape[1], shape[3]), dtype=torch.bfloat16).transpose(1, 2)

    touched = bound.bind({"layers.0.kv_cache": token_major})

    assert {each.name for each in touched} == {"layers.0.append", "layers.0.attention"}
    assert bound.arguments(touched[0])[-2] is token_major


WRONG_MEMORY = {
    "small": lambda: torch.zeros(10, dtype=torch.uint8),
    "float": lambda: torch.zeros(10**7),
    "elsewhere": lambda: torch.zeros(10**7, dtype=torch.uint8, device="meta"),
    "two axes": lambda: torch.zeros(2, 10**7, dtype=torch.uint8),
    "with gaps": lambda: torch.zeros(2 * 10**7, dtype=torch.uint8)[::2],
    "off alignment": lambda: torch.zeros(10**7, dtype=torch.uint8)[1:],
}


@pytest.mark.parametrize("name", WRONG_MEMORY)
def test_memory_that_buffers_cannot_lie_in_is_refused(drawn, name):
    memory = WRONG_MEMORY[name]()
    assert "uint8" in refused(drawn, arena=memory).needed

    plan = plan_of(tp=2)
    symmetric = SymmetricMemory(memory, (0, 0))
    with pytest.raises(BindingError, match="symmetric memory"):
        Binding(plan, "cpu", symmetric=symmetric, numbers={"rank": 0, "timeout_us": 1}).bind(drawn_for_two_ranks())


def test_buffers_lie_in_the_arena_where_the_plan_says(drawn):
    arena = torch.zeros(plan_of().workspace_bytes + 64, dtype=torch.uint8)
    bound = binding(arena=arena)
    bound.bind(drawn)

    for buffer in plan_of().buffers:
        if buffer.kind == Kind.WORKSPACE:
            assert bound.tensors[buffer.name].data_ptr() == arena.data_ptr() + buffer.offset


@functools.cache
def drawn_for_two_ranks():
    plan, generator = plan_of(tp=2), torch.Generator().manual_seed(1)
    step = random_step(plan, (40, 9), generator)
    return {**random_weights(plan, generator), **step.inputs, **step.kv_caches}


def test_a_number_that_nobody_gives_is_missed_before_anything_changes():
    plan, tensors = plan_of(tp=2), drawn_for_two_ranks()
    bound = Binding(plan, "cpu", symmetric=local_memory(plan, "cpu"))  # no signatures, as references have none

    with pytest.raises(BindingError, match="no value for this number"):
        bound.bind(tensors)

    assert not bound.tensors


@pytest.mark.parametrize("rank", [-1, 2, 0.5])
def test_a_rank_that_the_plan_has_not_is_refused(rank):
    plan = plan_of(tp=2)

    with pytest.raises(BindingError, match=r"rank: found .*; needed one from 0 to 1"):
        Binding(plan, "cpu", symmetric=local_memory(plan, "cpu"), numbers={"rank": rank, "timeout_us": 1})


def test_what_ranks_exchange_needs_memory_that_they_map_and_numbers():
    plan, tensors = plan_of(tp=2), drawn_for_two_ranks()
    options = {"signatures": signatures_of(tp=2), "numbers": {"rank": 1, "timeout_us": 5}}

    with pytest.raises(BindingError, match="symmetric memory"):
        Binding(plan, "cpu", **options).bind(tensors)
    with pytest.raises(BindingError, match="no value for this number"):
        Binding(plan, "cpu", **{**options, "numbers": {"rank": 1}}, symmetric=local_memory(plan, "cpu")).bind(tensors)

    memory = local_memory(plan, "cpu")
    bound = Binding(plan, "cpu", **options, symmetric=memory)
    bound.bind(tensors)
    inbox = plan.buffer_named()["post_attention.inbox"]
    assert bound.tensors["post_attention.peers"].tolist() == [memory.local.data_ptr() + inbox.offset] * 2
