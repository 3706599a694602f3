"""Why ranks cannot go on: told whole or cut, and decided upon alike by kinds, whatever the texts say."""

import itertools
import random

import pytest

torch = pytest.importorskip("torch")

from jitspark.errors import RankError, UsageError  # noqa: E402
from jitspark.runtime.fallback import attempted  # noqa: E402
from jitspark.runtime.reasons import MAX_DIGEST, WORD_BYTES, Kind, Reason, Word, left_by, reason_of  # noqa: E402

USAGE = UsageError(where="--tp", found="three", needed="a number", remedy="Correct it.")
RANK = RankError(where="rank 1", found="no word", needed="a word", remedy="Look there.")


def refusal(rank, reason):
    return RankError(where=f"rank {rank}", found=str(reason), needed="a good one", remedy="Mend it.")


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (USAGE, Reason(Kind.OWN, "--tp: found three; needed a number. Correct it.")),
        (RANK, Reason(Kind.PASSED_ON, "rank 1: found no word; needed a word. Look there.")),
        (torch.OutOfMemoryError("none\nframes"), Reason(Kind.OWN, "OutOfMemoryError: none")),
        (KeyError("rank 1"), Reason(Kind.UNFORESEEN, "KeyError: 'rank 1'")),
        (ValueError(), Reason(Kind.UNFORESEEN, "ValueError: ValueError")),
    ],
)
def test_an_error_s_kind_is_its_class_s_and_not_its_text_s(error, reason):
    assert reason_of(error) == reason


@pytest.mark.parametrize("kind", Kind)
@pytest.mark.parametrize("text", ["", "short", "x" * 10_000, "\u00e9" * 5000, "\U0001f600 " * 900, '"\\' * 2000])
def test_a_word_has_one_size_and_loses_no_more_than_a_reason_s_end(kind, text):
    word = Word.of("a step", "d" * MAX_DIGEST, Reason(kind, text))

    message = word.encoded()
    again = Word.decoded(message)

    assert len(message) == WORD_BYTES
    assert (again.step, again.digest, again.reason.kind) == (word.step, word.digest, kind)
    assert text.startswith(again.reason.text.removesuffix(" ..."))
    assert len(text) > 100 or again == word


def test_digests_too_long_for_a_word_still_tell_each_other_apart():
    one, other = (Word.of("a step", "\u00e9" * 5000 + end, None) for end in "ab")

    assert one.digest != other.digest
    assert Word.decoded(one.encoded()) == one == Word.of("a step", "\u00e9" * 5000 + "a", None)


@pytest.mark.parametrize("kinds", list(itertools.product(Kind, repeat=3)))
def test_all_ranks_go_by_the_same_reason_and_the_first_kind_counts(kinds):
    failed = {rank: Reason(kind, f"{kind} on {rank}") for rank, kind in enumerate(kinds)}
    order = list(failed.items())
    random.Random(3).shuffle(order)

    first, reason = left_by(dict(order), tuple(Kind), refusal, rank=1)

    assert reason.kind == next(kind for kind in Kind if kind in kinds)
    assert first == kinds.index(reason.kind)


def outcome(failed, *, rank, error, leaves=()):
    try:
        return left_by(failed, leaves, refusal, rank=rank, error=error)
    except (RankError, UsageError, RuntimeError) as raised:
        return raised


def test_the_rank_that_a_reason_comes_from_raises_its_own_error_and_the_others_one_with_that_reason():
    failed = {0: reason_of(RANK), 2: reason_of(USAGE), 3: reason_of(USAGE)}

    assert outcome(failed, rank=2, error=USAGE) is USAGE
    assert outcome(failed, rank=0, error=RANK) is RANK, "it names the cause already"
    for rank, error in ((1, None), (3, USAGE)):
        assert str(outcome(failed, rank=rank, error=error)) == str(refusal(2, failed[2]))
    assert outcome(failed, rank=1, error=None, leaves=(Kind.OWN,)) == (2, failed[2])


def test_what_nobody_claims_as_his_own_ends_all():
    failed = {0: reason_of(RANK), 1: reason_of(RANK)}

    assert outcome(failed, rank=1, error=RANK, leaves=(Kind.OWN, Kind.BARRED)) is RANK
    assert isinstance(outcome(failed, rank=2, error=None, leaves=(Kind.OWN, Kind.BARRED)), RankError)


class Told:
    """A rank of three that hears the same reasons as the others."""

    rank, size, patience = 0, 3, 1.0

    def __init__(self, *others):
        self.others = dict(enumerate(others, 1))
        self.said = []

    def failures(self, _step, _digest, reason, _listening=None):
        self.said.append(reason)
        return {rank: each for rank, each in {0: reason, **self.others}.items() if each is not None}


def fails(error):
    raise error


def test_a_rank_that_ends_takes_the_others_with_it_even_where_they_could_run_stock():
    """They would wait for it in the next part."""
    bug = Reason(Kind.UNFORESEEN, "KeyError: 'x'")

    with pytest.raises(RankError, match="rank 2 could not go on: an error of no known kind, KeyError: 'x'"):
        attempted(lambda: 1, Told(reason_of(USAGE), bug), "a part", "decode", may_give_up=True)
    assert attempted(lambda: 1, Told(reason_of(USAGE), None), "a part", "decode", may_give_up=True) is None


def test_an_own_reason_may_begin_like_any_other():
    """Kinds travel beside texts."""
    odd = UsageError(where="rank 1", found="passed on: an error of no known kind, ", needed="", remedy="")
    ranks = Told(None, None)

    assert attempted(lambda: fails(odd), ranks, "a part", "decode", may_give_up=True) is None
    assert [each.kind for each in ranks.said] == [Kind.OWN]
