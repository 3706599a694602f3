"""The attention kernels' references, one after the other, against torch's own attention on gathered keys and values."""

import pytest

torch = pytest.importorskip("torch")

from torch.nn.functional import rms_norm, scaled_dot_product_attention  # noqa: E402

from jitspark.registry import load_spec  # noqa: E402
from kernel_specs.paged_gqa_verify_attention import reference as attention  # noqa: E402
from kernel_specs.splitkv_combine_rmsnorm_sigmoid_gate import reference as combine  # noqa: E402

ATTENTION = load_spec("paged_gqa_verify_attention")
COMBINE = load_spec("splitkv_combine_rmsnorm_sigmoid_gate")
EPS = 1e-5


LONGEST = 2049  # blocks of a request: the mask of longer ones takes gigabytes


def cases(spec):
    small = [case for case in spec.cases if case.axes["num_tokens"] <= 64 * 8]
    return [pytest.param(c, id=str(i)) for i, c in enumerate(small) if c.axes.get("max_blocks", 0) <= LONGEST]


def partials(case, arguments):
    """The reference's partial results, from poison."""
    by_split = tuple(case.axes[name] for name in ("num_tokens", "num_heads", "num_splits"))
    found = [torch.full(shape, torch.nan) for shape in (by_split, by_split, (*by_split, 64))]
    attention.paged_gqa_verify_attention(
        *(arguments[name] for name in ("qkvg", "kv_cache", "block_table", "seq_lens")),
        *found,
        arguments["softmax_scale"],
        **case.statics,
    )
    return found


def attended(case, arguments, request):
    """torch's attention of one request [queries, heads, 64], over all keys up to its length that a mask lets pass."""
    length, window = int(arguments["seq_lens"][request]), case.statics["sliding_window"]
    rows, heads = case.axes["query_length"], case.axes["num_heads"]
    blocks = arguments["block_table"][request].long()
    packed = arguments["kv_cache"][blocks].movedim(1, 0).flatten(1, 2)[:, :length].nan_to_num(nan=0.0).double()
    queries = arguments["qkvg"][request * rows :][:rows, : heads * 64].view(rows, heads, 64).double()
    index = torch.arange(length)
    mask = torch.ones(length, length, dtype=torch.bool).tril()
    if window:
        mask &= torch.ones(length, length, dtype=torch.bool).triu(1 - window)
    mask = torch.cat((torch.zeros(rows, length, dtype=torch.bool), mask[index]))[-rows:]
    keys, values = packed.chunk(2, dim=-1)
    scale = arguments["softmax_scale"]
    got = scaled_dot_product_attention(
        queries.transpose(0, 1), keys, values, attn_mask=mask, scale=scale, enable_gqa=True
    )
    return got.transpose(0, 1).nan_to_num(nan=0.0)


@pytest.mark.parametrize("case", cases(ATTENTION))
def test_combined_partials_are_torchs_attention(case):
    specialization = ATTENTION.specialize_case(case)
    arguments = attention.random_arguments(specialization, case.axes, torch.Generator().manual_seed(1))
    width = case.axes["num_heads"] * 64
    gate = torch.randn(case.axes["num_tokens"], width, generator=torch.Generator().manual_seed(2)).bfloat16()
    out = torch.full((case.axes["num_tokens"], width), torch.nan, dtype=torch.float64)

    combine.splitkv_combine_rmsnorm_sigmoid_gate(*partials(case, arguments), gate, out, EPS)

    want = torch.cat([attended(case, arguments, request) for request in range(case.axes["num_requests"])])
    want = (rms_norm(want, (64,), eps=EPS) * torch.sigmoid(gate.double()).view(want.shape)).flatten(1)
    # weights and attended values are rounded to BF16 in between
    torch.testing.assert_close(out, want, rtol=2**-6, atol=2**-5)
    assert (out[arguments["seq_lens"].repeat_interleave(case.axes["query_length"]) == 0] == 0).all()


@pytest.mark.parametrize("case", cases(COMBINE))
def test_combine_is_a_softmax_over_splits(case):
    specialization = COMBINE.specialize_case(case)
    given = combine.random_arguments(specialization, case.axes, torch.Generator().manual_seed(3))
    out = torch.full((case.axes["num_tokens"], case.axes["attention_size"]), torch.nan, dtype=torch.float64)

    combine.splitkv_combine_rmsnorm_sigmoid_gate(*list(given.values())[:4], out, given["eps"])

    empty = given["partial_max"] == -torch.inf
    sums = given["partial_sum"].double().masked_fill(empty, 1.0)
    logits = given["partial_max"].double() * torch.log(torch.tensor(2.0, dtype=torch.float64)) + sums.log()
    rows = (given["partial_out"].double() / sums[..., None]).masked_fill(empty[..., None], 0.0)
    attended = torch.einsum("ths,thsd->thd", torch.softmax(logits, dim=-1).nan_to_num(nan=0.0), rows).bfloat16()
    gate = given["qkvg"][:, -case.axes["attention_size"] :].double().view(attended.shape)
    want = rms_norm(attended.double(), (64,), eps=given["eps"]) * torch.sigmoid(gate)
    want = want.masked_fill(empty.all(dim=-1)[..., None], 0.0)
    torch.testing.assert_close(out, want.flatten(1), rtol=2**-7, atol=1e-12)
    assert empty.all(dim=-1).any() and given["qkvg"].isnan().any()


@pytest.mark.parametrize("window", [0, 64, 2048])
def test_draws_hide_nan_behind_every_edge(window):
    case = next(c for c in ATTENTION.cases if c.statics["sliding_window"] == window and c.axes["num_requests"] > 1)
    specialization = ATTENTION.specialize_case(case)
    generator = torch.Generator().manual_seed(4)
    first, second = (attention.random_arguments(specialization, case.axes, generator) for _ in range(2))
    poisoned = first["kv_cache"].isnan()

    assert poisoned[0].all(), "block 0 is nobody's"
    assert not torch.equal(first["block_table"], second["block_table"])
    table, lengths = first["block_table"], first["seq_lens"].tolist()
    tails = [poisoned[table[i, length // 16], :, length % 16 :] for i, length in enumerate(lengths) if length % 16]
    assert tails and all(tail.all() for tail in tails)
    for partial in partials(case, first):
        assert not partial.isnan().any()


def test_cases_have_both_cache_layouts():
    generator = torch.Generator().manual_seed(5)
    chosen = [case for case in ATTENTION.cases if case.axes["num_requests"] == 1][:2]
    made = [attention.random_arguments(ATTENTION.specialize_case(case), case.axes, generator) for case in chosen]

    assert [each["kv_cache"].is_contiguous() for each in made] == [True, False]
