"""Parts that ranks do together, as one of them sees it: they do not nest, and each is told of."""

from types import SimpleNamespace
from typing import ClassVar

import pytest

torch = pytest.importorskip("torch")

from jitspark.geometry import deployment  # noqa: E402
from jitspark.runtime import markov_launches  # noqa: E402
from jitspark.runtime.ranks import RankGroup  # noqa: E402
from jitspark.runtime.reasons import Kind, Reason  # noqa: E402

STEPS = 7


class Noting(RankGroup):
    """A rank alone that keeps what it says."""

    said: ClassVar = []

    def _words(self, step, digest, reason, listening=None):
        self.said.append((step, reason))
        return super()._words(step, digest, reason, listening)


@pytest.fixture
def alone(monkeypatch):
    monkeypatch.setattr(Noting, "said", [])
    return Noting(0, 1)


@pytest.mark.parametrize("outer", ["together", "telling"])
@pytest.mark.parametrize("inner", ["together", "telling", "failures"])
def test_a_part_within_a_part_is_a_mistake(alone, outer, inner):
    def part():
        if inner == "failures":
            alone.failures("inner", "", None)
            return
        with getattr(alone, inner)("inner"):
            raise KeyError

    with pytest.raises(AssertionError, match="inner within outer"), getattr(alone, outer)("outer"):
        part()

    assert [step for step, _ in alone.said] == ["outer"], "who told the inner one's failure waits for nobody's word"
    with alone.together("the next"):
        pass


@pytest.fixture
def model(monkeypatch):
    """What the sampling loop's plans read of a draft model, on a GPU that a CPU stands for."""
    monkeypatch.setattr(markov_launches, "own_target", lambda _: "sm_90a")
    monkeypatch.setattr(markov_launches, "_require_multiprocessors", lambda *_: None)
    monkeypatch.setattr(markov_launches, "Executor", lambda *_, **__: None)
    monkeypatch.setattr(markov_launches, "load_kernels", lambda *_: {})
    draft = deployment("tiny", 1).draft
    options = {"decode_backend": "latency_specialized", "jitspark": {"geometry": "tiny"}}
    weight = torch.zeros(1)
    head = SimpleNamespace(markov_w1=SimpleNamespace(weight=weight), markov_w2=SimpleNamespace(weight=weight))
    return SimpleNamespace(
        lm_head=SimpleNamespace(weight=weight, shard_indices=SimpleNamespace(org_vocab_start_index=0)),
        config=SimpleNamespace(
            vocab_size=draft.vocab_size, hidden_size=draft.hidden_size, markov_rank=draft.markov_rank
        ),
        model=SimpleNamespace(markov_head=head, vllm_config=SimpleNamespace(additional_config=options)),
        output_logit_transform_params=lambda: (0.5, 30.0),
    )


def test_each_part_of_the_sampling_loop_is_told_of_once(alone, model):
    plans, watch = markov_launches.bound_plans(model, STEPS, 2, alone)

    assert list(plans) == [1, 2] and watch is not None
    assert len(alone.said) == len({step for step, _ in alone.said}) + 2, "memory is told of in three parts"
    assert {failure for _, failure in alone.said} == {None}


@pytest.mark.parametrize(
    ("broken", "step"),
    [("own_target", "the sampling loop's plans"), ("load_kernels", "binding the sampling loop's plans")],
)
def test_what_fails_there_is_told_in_the_part_that_the_others_are_in(alone, model, monkeypatch, broken, step):
    def fail(*_):
        raise RuntimeError("not here")

    monkeypatch.setattr(markov_launches, broken, fail)

    with pytest.raises(RuntimeError, match="not here"):
        markov_launches.bound_plans(model, STEPS, 2, alone)

    assert alone.said[-1] == (step, Reason(Kind.UNFORESEEN, "RuntimeError: not here"))
    assert [failure for _, failure in alone.said[:-1]] == [None] * (len(alone.said) - 1)
