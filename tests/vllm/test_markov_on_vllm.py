"""The Markov head and sampler on vLLM 0.33.0's classes: what is refused, how weights load, what the hook fills."""

from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from interpreted_draws import DRAWS, interpreted  # noqa: E402
from markov_draws import STEPS, inputs  # noqa: E402

from jitspark.errors import TargetError, UsageError  # noqa: E402

VOCAB, RANK, HIDDEN, MAX_REQS = 256, 32, 64, 20
FINE = {
    "draft_topk": None,
    "watermarked": False,
    "use_fp64_gumbel": False,
    "sample_from_anchor": True,
    "max_num_reqs": MAX_REQS,
    "num_steps": STEPS,
}


@pytest.fixture
def markov():
    from jitspark.runtime import markov

    return markov


def head_of(markov, monkeypatch, *, rank=0, size=1, vocab=VOCAB):
    """The head as one rank of several builds it."""
    from vllm.model_executor.layers import vocab_parallel_embedding

    monkeypatch.setattr(vocab_parallel_embedding, "get_tensor_model_parallel_rank", lambda: rank)
    monkeypatch.setattr(vocab_parallel_embedding, "get_tensor_model_parallel_world_size", lambda: size)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        return markov.VocabParallelMarkovHead(vocab, vocab, RANK, prefix="model.markov_head")
    finally:
        torch.set_default_dtype(before)


@pytest.fixture
def model(markov, monkeypatch):
    """What the sampler reads of a draft model, with vLLM's own layers as its weights."""
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    given = inputs(1, 1, VOCAB, RANK, hidden=HIDDEN)
    head = head_of(markov, monkeypatch)
    lm_head = ParallelLMHead(VOCAB, HIDDEN, params_dtype=torch.bfloat16)
    for layer, weight in ((head.markov_w2, given.markov_w2), (lm_head, given.lm_head)):
        layer.weight.data.copy_(weight)
    head.markov_w1.weight.data.copy_(given.markov_w1)
    monkeypatch.setattr(markov, "get_tp_group", lambda: SimpleNamespace(
        rank_in_group=0, world_size=1, cpu_group=None, device_group=None
    ))  # fmt: skip
    return SimpleNamespace(
        config=SimpleNamespace(vocab_size=VOCAB, draft_vocab_size=VOCAB, markov_rank=RANK, hidden_size=HIDDEN),
        model=SimpleNamespace(markov_head=head),
        lm_head=lm_head,
        target_vocab_size=VOCAB,
        draft_id_to_target_id=torch.zeros(VOCAB, dtype=torch.long),
        output_logit_transform_params=lambda: (0.5, 30.0),
    )


def cache(dtype=torch.bfloat16, vocab=VOCAB):
    return torch.full((MAX_REQS, STEPS, vocab), -3.0).to(dtype)


def refusal(markov, model, **changed):
    with pytest.raises(ValueError) as raised:
        markov.build_markov_sampler(model, **{"draft_logits": cache(), **FINE, **changed})
    sentence, _, reason = str(raised.value).partition(": ")
    assert sentence == "The Muse Spark specialized decode runs the fused DSpark Markov loop, which does not run here"
    return reason


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"draft_topk": 40}, "dspark_draft_topk is set"),
        ({"watermarked": True}, "the draft's samples are watermarked"),
        ({"use_fp64_gumbel": True}, "FP64 Gumbel sampling is asked for (use_fp64_gumbel)"),
        ({"sample_from_anchor": False}, "the draft does not sample from its anchor (sample_from_anchor)"),
        ({"draft_logits": None}, "there are no draft logits to keep (draft_sample_method is not probabilistic)"),
        ({"draft_logits": cache(torch.float32)}, "the draft logits are torch.float32, not BF16"),
        ({"draft_logits": cache(vocab=128)}, "the draft logits are [20, 7, 128], not whole rows of [20, 7, 256]"),
    ],
)
def test_ways_of_sampling_without_the_loop_are_refused(markov, model, changed, reason):
    assert refusal(markov, model, **changed) == reason


def test_a_draft_vocabulary_of_its_own_is_refused(markov, model):
    model.draft_id_to_target_id[3] = 5
    assert "reduced vocabulary" in refusal(markov, model)

    model.draft_id_to_target_id.zero_()
    model.config.draft_vocab_size = 128
    assert "reduced vocabulary" in refusal(markov, model)


def test_sizes_that_no_kernel_serves_are_refused_by_the_fields_name(markov, model):
    model.config.markov_rank = 48
    with pytest.raises(UsageError, match=r"config.json: markov_rank: found 48; needed a multiple of 32"):
        markov.build_markov_sampler(model, draft_logits=cache(), **FINE)


@pytest.mark.parametrize("soft_cap", [0.0, -30.0, float("nan"), float("inf")])
def test_a_soft_cap_that_bounds_nothing_is_refused(markov, model, soft_cap):
    model.output_logit_transform_params = lambda: (0.5, soft_cap)
    with pytest.raises(
        UsageError, match=r"config.json: output_soft_cap_temp: found .*; needed a positive number, or none"
    ):
        markov.build_markov_sampler(model, draft_logits=cache(), **FINE)


def test_the_samplers_own_parts_come_after_that_in_which_it_is_refused(markov, model, monkeypatch):
    made = markov._reference_loop

    def in_a_part(model, ranks):
        with ranks.together("of the sampler"):
            return made(model, ranks)

    monkeypatch.setattr(markov, "_reference_loop", in_a_part)

    markov.build_markov_sampler(model, draft_logits=cache(), **FINE)


@pytest.mark.parametrize("on_error", ["raise", "stock"])
def test_plans_that_cannot_be_bound_leave_the_loop_to_vllm_where_that_is_chosen(markov, monkeypatch, caplog, on_error):
    from jitspark.runtime.ranks import RankGroup

    def refuse(*_):
        raise TargetError(where="this GPU", found="4 multiprocessors", needed="144", remedy="Use another.")

    monkeypatch.setattr(markov, "bound_plans", refuse)
    config = SimpleNamespace(additional_config={"jitspark": {"on_error": on_error}})
    weight = SimpleNamespace(dtype=torch.bfloat16, device=SimpleNamespace(type="cuda"))
    on_gpu = SimpleNamespace(lm_head=SimpleNamespace(weight=weight), model=SimpleNamespace(vllm_config=config))

    if on_error == "raise":
        with pytest.raises(TargetError):
            markov.MarkovSampler(on_gpu, STEPS, 8, RankGroup(0, 1))
        return
    sampler = markov.MarkovSampler(on_gpu, STEPS, 8, RankGroup(0, 1))

    names = ("sample_indices", "sample_idx_mapping", "sample_pos", "input_ids", "anchor_idx", "seeds", "temperature")
    assert sampler.sample(1, None, **dict.fromkeys((*names, "draft_tokens", "draft_logits"))) is False
    assert "runs vLLM's own sampling loop (on_error): rank 0: this GPU: found 4 multiprocessors" in caplog.text


def test_a_head_for_gathered_candidates_is_refused(markov):
    with pytest.raises(ValueError, match="dspark_draft_topk is set"):
        markov.VocabParallelMarkovHead(VOCAB, VOCAB, RANK, prefix="", retain_weight_for_gather=True)


@pytest.mark.parametrize("rank", [0, 1, 3])
def test_the_head_loads_its_shard_of_the_checkpoint(markov, monkeypatch, rank):
    given = inputs(1, 1, VOCAB, RANK)
    head = head_of(markov, monkeypatch, rank=rank, size=4)

    head.markov_w2.weight.weight_loader(head.markov_w2.weight, given.markov_w2)

    assert head.markov_w1.weight.shape == (VOCAB, RANK)
    assert torch.equal(head.markov_w2.weight.data, given.markov_w2[rank * 64 : (rank + 1) * 64])


@pytest.mark.parametrize("requests", [1, 3, 8, 11])
def test_the_hook_fills_what_vllm_would_sample_from_the_same_rows(markov, model, tmp_path, requests):
    given = inputs(requests, MAX_REQS, VOCAB, RANK, hidden=HIDDEN, seed=requests)
    steps, draft_logits = given.step, cache()
    sampler = markov.build_markov_sampler(model, draft_logits=draft_logits, **FINE)
    order = torch.randperm(len(given.hidden), generator=torch.Generator().manual_seed(1))
    draft_tokens = torch.full((MAX_REQS, STEPS), -7)

    sampler.sample(
        requests,
        given.hidden[order],
        sample_indices=torch.cat([order.argsort(), torch.zeros(50, dtype=torch.int64)]),
        sample_idx_mapping=steps["sample_idx_mapping"].reshape(-1),
        sample_pos=steps["sample_pos"].reshape(-1),
        input_ids=steps["input_ids"],
        anchor_idx=steps["anchor_idx"],
        seeds=steps["seeds"],
        temperature=steps["temperature"],
        draft_tokens=draft_tokens,
        draft_logits=draft_logits,
    )

    live = steps["sample_idx_mapping"][:, 0] >= 0
    states = steps["sample_idx_mapping"][live, 0]
    assert (draft_tokens[requests:] == -7).all()
    assert (draft_logits[[state for state in range(MAX_REQS) if state not in states]] == -3.0).all()
    calls = [
        {
            "of": DRAWS,
            "step": step,
            "logits": draft_logits[states, step],
            "seeds": steps["seeds"][states],
            "positions": steps["sample_pos"][live, step] - 1,
            "temperature": steps["temperature"][states],
        }
        for step in range(STEPS)
    ]
    assert torch.equal(draft_tokens[:requests][live], torch.stack(interpreted(tmp_path, calls), dim=1))
    assert torch.equal(draft_logits[states], rows_of_vllm(model, given, live, draft_tokens))


def rows_of_vllm(model, given, live, draft_tokens):
    """The rows that vLLM's operations make, led along these tokens; products in float64, whose order does not show."""
    head = model.model.markov_head
    base = (given.hidden.double() @ model.lm_head.weight.double().T).bfloat16().view(len(live), STEPS, VOCAB)
    previous = torch.cat([given.step["input_ids"][given.step["anchor_idx"], None], draft_tokens[: len(live), :-1]], 1)
    bias = (head.markov_w1(previous).double() @ head.markov_w2.weight.double().T).bfloat16()
    logits = (base + bias).float() * 0.5
    return (30.0 * torch.tanh(logits / 30.0)).bfloat16()[live]


def test_a_loop_that_gave_up_is_told_of_behind_its_launch(markov, model):
    from jitspark.errors import RankError
    from jitspark.runtime.markov_launches import progress_watch
    from jitspark.runtime.silence import require_all_heard
    from kernel_specs.markov_gumbel_sampling.tiling import HEADER, STUCK

    sampler = markov.build_markov_sampler(model, draft_logits=cache(), **FINE)
    memories = {requests: torch.zeros(HEADER, dtype=torch.int64) for requests in range(1, 9)}
    sampler._watch = progress_watch(memories, 0, 1)
    # in the place of kernels: 11 requests are a group of 8 and one of 3, the second of which gives up
    sampler._loops = dict.fromkeys(range(1, 9), lambda **_: memories[3][STUCK].fill_(1))
    zeros = torch.zeros(MAX_REQS * STEPS, dtype=torch.int64)
    names = ("sample_indices", "sample_idx_mapping", "sample_pos", "input_ids", "anchor_idx", "seeds", "temperature")
    state = dict.fromkeys((*names, "draft_tokens", "draft_logits"), zeros)

    sampler.sample(8, torch.zeros(MAX_REQS * STEPS, HIDDEN), **state)
    require_all_heard()
    sampler.sample(11, torch.zeros(MAX_REQS * STEPS, HIDDEN), **state)

    with pytest.raises(RankError, match="launch 1 gave up"):
        require_all_heard()
