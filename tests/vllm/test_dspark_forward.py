"""The specialized draft against the stock one on a CPU: same weights from a file, by the plans' references.

Both start from the same caches. Where both round at the same points, they differ only where a sum falls on the two
sides of a tie; vLLM's own rounding of the RoPE table for context keys is looked at by itself.
"""

import copy
import functools
import logging

import draft_models
import pytest

pytestmark = pytest.mark.usefixtures("one_rank", "plain")
OPTIONS = {"targets": ["sm_90a"], "geometry": "tiny"}
REQUESTS = (1, 2, 3, 8)


@pytest.fixture
def plain(monkeypatch):
    draft_models.plain_operations(monkeypatch)


@pytest.fixture(scope="session")
def weights(tmp_path_factory):
    path = tmp_path_factory.mktemp("draft") / "model.safetensors"
    draft_models.checkpoint(path)
    return path


@pytest.fixture
def pair(tiny_draft, weights, monkeypatch):
    """A stock and a specialized draft of the same weights, with equal caches."""

    def built(backend):
        monkeypatch.setattr(tiny_draft, "additional_config", {"decode_backend": backend, "jitspark": OPTIONS})
        return draft_models.with_caches(draft_models.build(tiny_draft, weights), seed=3)

    return built("auto"), built("latency_specialized")


@pytest.fixture
def specialized(pair):
    return pair[1]


def context_of(requests, seed=0):
    """Tapped streams of 8 rows a request, their positions, and slots by layer of which some are nobody's."""
    import torch

    rows, generator = 8 * requests, torch.Generator().manual_seed(seed)
    places = draft_models.NUM_BLOCKS * draft_models.BLOCK_SIZE
    slots = [torch.randperm(places, generator=generator)[:rows] for _ in range(draft_models.LAYERS)]
    for each in slots:
        each[2::5] = -1
    taps = torch.randn(rows, draft_models.HIDDEN * len(draft_models.TAPS), generator=generator)
    return taps, torch.randint(0, 8000, (rows,), generator=generator), slots


def caches(model):
    return [layer.self_attn.attn.kv_cache.clone() for layer in model.model.layers]


def run(model, config, requests, seed=0, **changed):
    """Hidden states of a draft step of so many requests of unlike lengths."""
    import torch
    from vllm.config import CUDAGraphMode
    from vllm.forward_context import set_forward_context

    generator = torch.Generator().manual_seed(seed)
    lengths = [7 + 8 * (request + seed) % 57 for request in range(requests)]
    metadata, positions = draft_models.metadata(model, requests, lengths, generator)
    for each in metadata.values():
        for name, value in changed.items():
            setattr(each, name, value)
    ids = torch.randint(0, draft_models.VOCAB, (7 * requests,), generator=generator)
    with torch.no_grad(), set_forward_context(metadata, config, cudagraph_runtime_mode=CUDAGraphMode.NONE):
        return model(ids, positions).clone()


@pytest.mark.parametrize("requests", REQUESTS)
def test_context_rows_get_the_keys_and_values_of_stock(pair, requests, monkeypatch):
    import torch

    draft_models.float_tables(monkeypatch)
    before = caches(pair[0])
    taps, positions, slots = context_of(requests)
    for model in pair:
        model.precompute_and_store_context_kv(model.combine_hidden_states(taps), positions, slots)

    for was, stock, fused in zip(before, *map(caches, pair), strict=True):
        written = (stock != was).any(dim=-1)
        assert written.sum() == draft_models.KV_HEADS * sum(slot >= 0 for slot in slots[0].tolist())
        assert torch.equal(written, (fused != was).any(dim=-1)), "other slots were written"
        assert (stock != fused).float().mean() < 1e-3
        torch.testing.assert_close(fused.float(), stock.float(), rtol=2**-7, atol=2**-7)


def test_keys_differ_from_stock_s_by_its_rounding_of_the_rope_table(pair):
    import torch

    for model in pair:
        taps, positions, slots = context_of(8)
        model.precompute_and_store_context_kv(model.combine_hidden_states(taps), positions, slots)

    for stock, fused in zip(*map(caches, pair), strict=True):
        keys, values = (fused.float() - stock.float()).abs().split(draft_models.HEAD_DIM, dim=-1)
        # two products with a table that is half an ulp (2^-9) off, of keys below 8
        assert 0 < keys.max() <= 8 * 2 * 2**-8
        assert (keys > 0).float().mean() > (values > 0).float().mean()
        assert values.max() <= 2**-6
    assert torch.equal(*(model.model.embed_tokens.weight for model in pair))


@pytest.mark.parametrize("requests", REQUESTS)
def test_hidden_states_logits_and_query_keys_are_stock_s(pair, tiny_draft, requests):
    import torch

    stock, fused = (run(model, tiny_draft, requests) for model in pair)

    assert fused.dtype == stock.dtype == torch.bfloat16
    # one tie that falls the other way moves what follows of its row by about an ulp
    relative = (fused.float() - stock.float()).norm() / stock.float().norm()
    assert relative < 1e-2, relative
    torch.testing.assert_close(fused.float(), stock.float(), rtol=2**-6, atol=2**-4)
    for was, got in zip(*map(caches, pair), strict=True):
        torch.testing.assert_close(got.float(), was.float(), rtol=2**-6, atol=2**-5)
    logits = [model.compute_draft_logits(hidden).float() for model, hidden in zip(pair, (stock, fused), strict=True)]
    torch.testing.assert_close(logits[1], logits[0], rtol=2**-6, atol=2**-4)


@pytest.mark.parametrize("requests", REQUESTS)
def test_the_first_layer_s_attention_is_stock_s_nearly_bit_for_bit(pair, tiny_draft, requests):
    stock, fused = pair
    seen = {}
    stock.model.layers[0].self_attn.register_forward_hook(lambda *call: seen.update(stock=call[-1].clone()))
    executor = fused.model.specialized_draft._forward[7 * requests]

    def after(launch, _):
        if launch.name == "layers.0.o_proj":
            seen["fused"] = executor.tensors["attention_branch"].clone()

    executor.run = functools.partial(type(executor).run, executor, after=after)
    for model in pair:
        run(model, tiny_draft, requests)

    assert (seen["stock"] != seen["fused"]).float().mean() < 1e-2


def test_steps_of_other_sizes_follow_one_another(pair, tiny_draft):
    """Context rows, then query rows, for changing numbers of requests over the same caches."""
    import torch

    for seed, requests in enumerate((2, 8, 1, 3)):
        for model in pair:
            taps, positions, slots = context_of(requests, seed)
            model.precompute_and_store_context_kv(model.combine_hidden_states(taps), positions, slots)
        stock, fused = (run(model, tiny_draft, requests, seed) for model in pair)
        relative = (fused.float() - stock.float()).norm() / stock.float().norm()
        assert relative < 4e-2, "stock rounds the RoPE table of context keys"
        for ours, theirs in zip(pair[1].model.layers, pair[0].model.layers, strict=True):
            ours.self_attn.attn.kv_cache.copy_(theirs.self_attn.attn.kv_cache)
        assert torch.isfinite(fused.float()).all()


@pytest.mark.parametrize("rows", [8, 24, 64])
def test_tapped_streams_are_combined_as_stock_does(pair, rows, monkeypatch):
    import torch

    calls = Calls()
    calls.count(monkeypatch, "combine_hidden_states", owner="MuseSparkDSparkForCausalLM")
    taps = context_of(8)[0][:rows].bfloat16()
    stock, fused = (model.combine_hidden_states(taps).clone() for model in pair)

    assert calls == ["combine_hidden_states"], "the specialized draft asked stock"
    torch.testing.assert_close(fused.float(), stock.float(), rtol=2**-7, atol=2**-8)
    assert (fused != stock).float().mean() < 1e-2


def test_other_tapped_streams_are_stock_s(specialized, monkeypatch):
    """Row counts of a prefill; FP32 streams, which are rounded first; a single row."""
    import torch

    calls = Calls()
    calls.count(monkeypatch, "combine_hidden_states", owner="MuseSparkDSparkForCausalLM")
    taps = context_of(2)[0]
    for each in (taps[:9].bfloat16(), taps, taps[0].bfloat16()):
        assert specialized.combine_hidden_states(each).dtype == torch.bfloat16

    assert calls == ["combine_hidden_states"] * 3


class Calls(list):
    """Stock's own methods, counted."""

    def count(self, monkeypatch, name, owner="MuseSparkDSparkModel"):
        from vllm.models.muse_spark.common import dspark

        inner = getattr(getattr(dspark, owner), name)
        monkeypatch.setattr(getattr(dspark, owner), name, lambda *a, **k: (self.append(name), inner(*a, **k))[1])


@pytest.mark.parametrize("rows", [1, 7, 9, 63, 65, 200])
def test_other_row_counts_of_context_are_stock_s(specialized, monkeypatch, rows):
    calls = Calls()
    calls.count(monkeypatch, "precompute_and_store_context_kv")
    taps, positions, slots = context_of(26)
    states = specialized.combine_hidden_states(taps[:rows])
    specialized.precompute_and_store_context_kv(states, positions[:rows], [each[:rows] for each in slots])

    assert calls == ["precompute_and_store_context_kv"]


def test_served_rows_do_not_reach_stock(specialized, tiny_draft, monkeypatch):
    calls = Calls()
    for name in ("precompute_and_store_context_kv", "forward"):
        calls.count(monkeypatch, name)
    taps, positions, slots = context_of(2)
    specialized.precompute_and_store_context_kv(specialized.combine_hidden_states(taps), positions, slots)
    run(specialized, tiny_draft, 2)

    assert calls == []


def test_profiling_and_dummy_runs_are_stock_s(specialized):
    """No slots at all: computed, not stored. A layer without slots is left out."""
    draft = specialized.model.specialized_draft
    taps, positions, slots = context_of(1)
    states, before = specialized.combine_hidden_states(taps), caches(specialized)

    assert draft.store_context_kv(states, positions, None) is False
    assert draft.store_context_kv(states, positions, [slots[0], None]) is False
    specialized.precompute_and_store_context_kv(states, positions, None)
    assert all(was.equal(now) for was, now in zip(before, caches(specialized), strict=True))
    specialized.precompute_and_store_context_kv(states, positions, [slots[0], None])
    assert [was.equal(now) for was, now in zip(before, caches(specialized), strict=True)] == [False, True]


def test_one_slot_mapping_may_serve_every_layer(pair):
    import torch

    for model in pair:
        taps, positions, slots = context_of(2)
        model.precompute_and_store_context_kv(model.combine_hidden_states(taps), positions, slots[0])

    for stock, fused in zip(*map(caches, pair), strict=True):
        torch.testing.assert_close(fused[..., 64:].float(), stock[..., 64:].float(), rtol=2**-7, atol=2**-8)


def test_nothing_is_served_before_the_caches_are_there(specialized):
    import torch

    taps, positions, slots = context_of(1)
    states = specialized.combine_hidden_states(taps)
    for cache in (torch.tensor([]), torch.zeros(8, 2, 32, 128)):  # not allocated; blocks of 32
        specialized.model.layers[1].self_attn.attn.kv_cache = cache
        assert specialized.model.specialized_draft.store_context_kv(states, positions, slots) is False


@pytest.mark.parametrize("changed", [{"max_query_len": 8}, {"num_actual_tokens": 6}, {"causal": False}])
def test_forwards_that_are_no_uniform_step_are_not_taken_over(specialized, tiny_draft, monkeypatch, changed):
    calls = Calls()
    calls.count(monkeypatch, "forward")
    monkeypatch.setattr(draft_models._Kernels, "attend", lambda _, query, *__, **___: query)
    for layer in specialized.model.layers:
        layer.self_attn.attn.forward = lambda query, *_, **__: query
    run(specialized, tiny_draft, 1, **changed)

    assert calls == ["forward"]


def test_a_forward_without_context_is_not_taken_over(specialized):
    import torch

    hidden = torch.zeros(7, draft_models.HIDDEN, dtype=torch.bfloat16)
    assert specialized.model.specialized_draft.run(torch.arange(7), hidden) is None


@pytest.mark.parametrize("part", ["boundary_norm", "projection", "attention"])
def test_a_part_left_to_stock_leaves_all_layers_to_it(tiny_draft, weights, monkeypatch, caplog, part):
    options = {**OPTIONS, "providers": {part: "stock"}}
    monkeypatch.setattr(tiny_draft, "additional_config", {"decode_backend": "latency_specialized", "jitspark": options})
    with caplog.at_level(logging.INFO):
        model = draft_models.build(tiny_draft, weights)

    assert model.model.specialized_decode is True
    assert model.model.specialized_draft is None
    assert f"The DSpark draft keeps its stock layers: {part} is left to stock" in caplog.messages


def refusing(**changed):
    return [pytest.param(name, value, id=f"{name}={value}") for name, value in changed.items()]


@pytest.mark.parametrize(
    ("field", "value"),
    refusing(
        norm_affine=False,
        post_norm_affine=True,
        norm_zero_centered_gamma=False,
        post_norm_gain_center_type="zero",
        use_ffn_learnable_scales=False,
        use_qk_norm=False,
        use_attn_o_norm=False,
        use_attn_o_gate=False,
        use_residual_gate=False,
        rope_use_fp32_in_outer_product=False,
        attn_temperature_tuning_layers="global",
        hidden_size=1024,
        num_hidden_layers=3,
        intermediate_size_mlp=2048,
        target_hidden_size=256,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        residual_dtype="torch.bfloat16",
        target_layer_ids=[0, 3],
        use_rope=False,
    ),
)
def test_a_config_that_no_kernel_serves_is_refused_by_its_field(specialized, field, value, monkeypatch):
    from vllm.config import CompilationMode

    from jitspark.errors import UsageError
    from jitspark.runtime.draft import build_draft_decode

    changed = copy.copy(specialized.model.config)
    changed.__dict__[field] = value
    monkeypatch.setattr(specialized.model, "config", changed)
    with pytest.raises(UsageError) as refused:
        build_draft_decode(specialized.model, CompilationMode.NONE)

    name = "draft_position_mode" if field == "use_rope" else field
    assert refused.value.where == f"the draft's config.json: {name}"
    assert refused.value.found == repr("nope" if field == "use_rope" else value)


def test_a_window_that_no_kernel_has_is_refused(specialized):
    from vllm.config import CompilationMode

    from jitspark.errors import UsageError
    from jitspark.runtime.draft import build_draft_decode

    specialized.model.layers[1].self_attn.attn.sliding_window = 1024
    with pytest.raises(UsageError, match=r"global_attn_cfg: found \[0, 1024\]"):
        build_draft_decode(specialized.model, CompilationMode.NONE)


def test_a_compiled_draft_is_refused(specialized):
    from vllm.config import CompilationMode

    from jitspark.errors import UsageError
    from jitspark.runtime.draft import build_draft_decode

    with pytest.raises(UsageError, match=r"compilation_config\.mode: found VLLM_COMPILE"):
        build_draft_decode(specialized.model, CompilationMode.VLLM_COMPILE)


def test_a_missing_weight_is_named(specialized):
    from vllm.config import CompilationMode

    from jitspark.errors import WeightsError
    from jitspark.runtime.draft import build_draft_decode

    del specialized.model.layers[1].add_ffn.alpha
    with pytest.raises(WeightsError, match=r"layers\.1\.add_ffn\.alpha"):
        build_draft_decode(specialized.model, CompilationMode.NONE)
