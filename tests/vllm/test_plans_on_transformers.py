"""Plans, run by their references, against transformers' Muse Spark text model at tiny sizes.

The model runs in FP32, one request at a time, from its own cache; a plan runs in BF16, all requests at once, from a
paged cache. What is compared is held to what BF16's roundings make of four layers, measured as errors of whole rows; a
test shows that a window one key off is noticed.
"""

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial

import msgspec
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers.models.muse_spark.modeling_muse_spark")

from decode_steps import LENGTH, MAX_BLOCKS, PagedCache, Request, step_inputs  # noqa: E402
from muse_spark_on_transformers import contract_weights, text_model, weights_of_rank  # noqa: E402

from jitspark.geometry import deployment  # noqa: E402
from jitspark.plans.backbone import decode_plan, logits_plan  # noqa: E402
from jitspark.plans.binding import local_memory  # noqa: E402
from jitspark.plans.reference_executor import ReferenceExecutor  # noqa: E402

STEPS = 2
# tokens before the first step; the window is 64, and a step's rows see up to 71 keys
PRIORS = (0, 56, 57, 64, None, 192)
HIDDEN, TAP, LOGIT = 0.025, 0.02, 0.25


def of_geometry(name):
    """At TP 1, attention softer than a trained model's: random keys would magnify the roundings of logits of 40."""
    made = deployment("tiny_swa" if name == "mixed" else name, 1)
    kinds = {"full_attention_layers": (1, 3), "nope_layers": (2, 3)} if name == "mixed" else {}
    return msgspec.structs.replace(made, backbone=msgspec.structs.replace(made.backbone, qk_scale_factor=0.9, **kinds))


class Decoding:
    """Steps of some requests: what transformers makes of each, once, for any number of runs of the plan."""

    def __init__(self, served, priors, seed):
        self.served, self.backbone = served, served.backbone
        self.model = text_model(self.backbone, seed)
        torch.manual_seed(seed)
        self.lm_head = (torch.randn(self.backbone.vocab_size, self.backbone.hidden_size) / 16).bfloat16()
        self.weights = contract_weights(self.model, self.backbone, self.lm_head)
        taps = self.backbone.tap_layers
        self.requests = [None if prior is None else Request(self.model, taps, prior) for prior in priors]
        self.found = []
        for _ in range(STEPS):
            self.found.append([each and each.step() for each in self.requests])

    def run(self, *, permutation=None, token_major=False, window=None, rank=0, tp=1, gather=None):
        """Every step's outputs, by the plan: hidden states, taps and logits. `window`: in place of the plan's own."""
        rows = LENGTH * len(self.requests)
        served = msgspec.structs.replace(self.served, tp=tp)
        decode, logits = decode_plan(served, rows, "sm_90a"), logits_plan(served, rows, "sm_90a")
        if window is not None:
            decode = with_window(decode, window)
        order = torch.arange(len(self.requests) * MAX_BLOCKS) if permutation is None else permutation
        caches = [
            PagedCache(self.backbone, layer, self.requests, order, token_major=token_major, rank=rank, tp=tp)
            for layer in range(self.backbone.num_hidden_layers)
        ]
        known = {each.name for each in decode.buffers}
        weights = weights_of_rank(self.weights, rank, tp)
        numbers = {"rank": rank, "timeout_us": 0}
        executor = ReferenceExecutor(
            decode, {name: tensor for name, tensor in weights.items() if name in known},
            gather=gather, numbers=numbers, symmetric=local_memory(decode, "cpu"), max_context=256,
        )  # fmt: skip
        executor.bind_kv_caches({f"layers.{layer}.kv_cache": cache.tensor for layer, cache in enumerate(caches)})
        head = ReferenceExecutor(
            logits, {"lm_head": weights["lm_head"]},
            gather=gather, numbers=numbers, symmetric=local_memory(logits, "cpu"),
        )  # fmt: skip
        return [self._step(number, executor, head, caches) for number in range(STEPS)]

    def _step(self, number, executor, head, caches):
        for request in filter(None, self.requests):
            request.steps = number + 1  # equal on all ranks, which run in step
        executor.run(step_inputs(self.requests, self.found[number], caches))
        made = {name: tensor.clone() for name, tensor in executor.outputs.items()}
        head.run({"hidden": made["hidden"]})
        return made | {"logits": head.outputs["logits"].clone()}

    def wanted(self, number, name):
        """[rows of requests that are there, ...] of transformers, and which rows these are."""
        found = self.found[number]
        rows = torch.cat([torch.arange(LENGTH) + LENGTH * i for i, each in enumerate(found) if each is not None])
        if name == "logits":
            cap, hidden = self.backbone.final_logit_softcapping, self.wanted(number, "hidden")[0]
            made = hidden @ self.lm_head.float().T * self.backbone.output_multiplier
            return cap * torch.tanh(made / cap), rows
        kept = filter(None, found)
        return torch.cat([e.hidden if name == "hidden" else e.taps[int(name[5:])] for e in kept]), rows


class Ranks:
    """A group of ranks that are threads: each gets what all have brought."""

    def __init__(self, count):
        self._brought, self._barrier = [None] * count, threading.Barrier(count)

    def gather(self, rank, tensor):
        self._brought[rank] = tensor.clone()
        self._barrier.wait()
        made = torch.stack(self._brought)
        self._barrier.wait()
        return made

    def run(self, work):
        """What `work(rank, gather)` returns on each rank."""
        with ThreadPoolExecutor(len(self._brought)) as pool:
            jobs = [pool.submit(self._rank, work, rank) for rank in range(len(self._brought))]
            return [job.result() for job in jobs]

    def _rank(self, work, rank):
        try:
            return work(rank, partial(self.gather, rank))
        except BaseException:
            self._barrier.abort()  # the others would wait for this one
            raise


def with_window(plan, window):
    def changed(launch):
        statics = dict(launch.statics)
        if statics.get("sliding_window"):
            statics["sliding_window"] = window
        return replace(launch, statics=statics)

    return replace(plan, launches=tuple(map(changed, plan.launches)))


def errors(got, want):
    """Of each row, relative to its size."""
    return (got.double() - want.double()).norm(dim=-1) / want.double().norm(dim=-1)


@pytest.fixture(scope="module", params=["tiny", "tiny_swa", "mixed"])
def decoding(request):
    return Decoding(of_geometry(request.param), PRIORS, seed=4)


@pytest.fixture(scope="module")
def made(decoding):
    return decoding.run()


def test_hidden_states_and_taps_are_transformers(decoding, made):
    names = ["hidden", *(f"taps.{layer}" for layer in decoding.backbone.tap_layers)]
    for number, outputs in enumerate(made):
        for name in names:
            want, rows = decoding.wanted(number, name)
            found = errors(outputs[name][rows], want)
            assert float(found.max()) < (HIDDEN if name == "hidden" else TAP), (name, number, found)


def test_logits_are_transformers(decoding, made):
    for number, outputs in enumerate(made):
        want, rows = decoding.wanted(number, "logits")
        torch.testing.assert_close(outputs["logits"][rows], want, rtol=0.0, atol=LOGIT)


def test_any_order_of_blocks_gives_the_same_bits(decoding, made):
    order = torch.randperm(len(PRIORS) * MAX_BLOCKS, generator=torch.Generator().manual_seed(9))

    again = decoding.run(permutation=order, token_major=True)

    for first, second in zip(made, again, strict=True):
        assert all(first[name].equal(second[name]) for name in first)


def test_two_ranks_that_exchange_are_transformers_and_have_equal_bits(decoding):
    first, second = Ranks(2).run(lambda rank, gather: decoding.run(rank=rank, tp=2, gather=gather))

    for number, (one, other) in enumerate(zip(first, second, strict=True)):
        want, rows = decoding.wanted(number, "hidden")
        assert float(errors(one["hidden"][rows], want).max()) < HIDDEN
        torch.testing.assert_close(one["logits"][rows], decoding.wanted(number, "logits")[0], rtol=0.0, atol=LOGIT)
        assert all(one[name].equal(other[name]) for name in one)


@pytest.mark.parametrize("window", [63, 65])  # 65 sees keys that are NaN
def test_a_window_one_key_off_is_noticed(window):
    decoding = Decoding(of_geometry("tiny_swa"), (57, 192), seed=6)

    (first, _) = decoding.run(window=window)

    want, rows = decoding.wanted(0, "hidden")
    assert not float(errors(first["hidden"][rows], want).max()) < 2 * HIDDEN


def test_one_request_alone_and_none_of_its_past():
    decoding = Decoding(of_geometry("tiny_swa"), (0,), seed=5)

    (first, _) = decoding.run()

    want, rows = decoding.wanted(0, "hidden")
    assert float(errors(first["hidden"][rows], want).max()) < HIDDEN
