"""Rewards for length and repetition: the papers' values, and Open R1's formulas."""

import math
from collections.abc import Sequence

import pytest

from rlhfkit.data import Prompt, Sample
from rlhfkit.rewards import CosineLength, LastTurnReward, RepetitionPenalty, WeightedSum, exact_match
from rlhfkit.rewards.base import tell_progress


def sample(text: str = "5", tokens: Sequence[int] = (1,), answer: object = "5") -> Sample:
    count = len(tokens)
    return Sample(Prompt(3, [1], answer=answer), 0, list(tokens), [0.0] * count, [0] * count, "stop", text=text)


def test_cosine_runs_between_the_papers_values() -> None:
    """Table of hyperparameters in arXiv:2502.03373: +2 to +1 if right, -10 to 0 if wrong, -10 at the limit."""
    reward = CosineLength(exact_match, max_length=8)
    right, wrong = ([sample(text, range(n)) for n in (0, 4, 8, 9)] for text in ("5", "6"))
    assert reward(right) == pytest.approx([2.0, 1.5, -10.0, -10.0])
    assert reward(wrong) == pytest.approx([-10.0, -5.0, -10.0, -10.0])


def test_cosine_gives_open_r1s_numbers() -> None:
    """Its formula is ``min + (max - min) (1 + cos(π n / L)) / 2``, with both swapped for wrong answers."""
    values = {"correct_short": 1.0, "correct_long": 0.5, "wrong_short": -1.0, "wrong_long": -0.5}
    reward = CosineLength(exact_match, 1000, **values, at_limit=None)
    for length in (1, 250, 999, 1000):
        cosine = math.cos(length / 1000 * math.pi)
        assert reward([sample("5", range(length))])[0] == pytest.approx(0.5 + 0.5 * (1.0 - 0.5) * (1.0 + cosine))
        assert reward([sample("6", range(length))])[0] == pytest.approx(-0.5 + 0.5 * (-1.0 + 0.5) * (1.0 + cosine))


def test_a_sample_without_a_grade_has_no_reward_and_values_are_checked() -> None:
    assert CosineLength(lambda samples: [None], 8)([sample()]) == [None]
    with pytest.raises(TypeError, match="got int"):
        CosineLength(3, 8)


@pytest.mark.parametrize(
    ("tokens", "penalty"),
    [
        ([1, 2, 3, 4, 5], 0.0),
        ([1, 1, 1, 1, 1], -2 / 3),  # three n-grams, of which one is distinct
        ([1, 2, 3, 1, 2, 3], -1 / 4),
        ([1, 2], 0.0),
        ([], 0.0),
    ],
)
def test_repetition_is_the_share_of_repeated_ngrams(tokens: list[int], penalty: float) -> None:
    assert RepetitionPenalty()([sample(tokens=tokens)]) == [pytest.approx(penalty)]
    assert RepetitionPenalty(penalty=3.0)([sample(tokens=tokens)]) == [pytest.approx(3 * penalty)]
    words = sample(" ".join("Ab"[token % 2] * token for token in tokens))
    assert RepetitionPenalty(words=True)([words]) == [pytest.approx(penalty)]


def test_what_an_environment_wrote_is_no_repetition_of_the_policys() -> None:
    """Two turns, (1, 2, 3) and (1, 2, 3, 4), around 30 equal tokens of a tool: of 3 n-grams 1 is repeated."""
    tokens = [1, 2, 3, *[7] * 30, 1, 2, 3, 4]
    episode = sample("a b c " + "x " * 30 + "a a a a", tokens)
    episode.action_mask = [True] * 3 + [False] * 30 + [True] * 4
    assert RepetitionPenalty()([episode]) == [pytest.approx(-1 / 3)]
    assert RepetitionPenalty(ngram=5)([episode]) == [0.0]  # no turn is as long
    with pytest.raises(ValueError, match=r"environment wrote into the text of prompt 3: count tokens \(words"):
        RepetitionPenalty(words=True)([episode])
    episode.info["last_text"] = "a a a a"
    assert LastTurnReward(RepetitionPenalty(words=True))([episode]) == [pytest.approx(-1 / 2)]


class Growing:
    """A weight that grows with the steps of training."""

    step, epoch = 0, 0

    def set_progress(self, *, step: int, epoch: int) -> None:
        self.step, self.epoch = step, epoch

    def __call__(self, samples: Sequence[Sample]) -> list[float]:
        return [self.step / 10 + self.epoch for _ in samples]


def test_a_reward_inside_others_is_told_how_far_training_is() -> None:
    inner = Growing()
    reward = WeightedSum(length=LastTurnReward(CosineLength(inner, 8, success_threshold=5.0)), other=exact_match)
    tell_progress(reward, step=20, epoch=3)
    assert (inner.step, inner.epoch) == (20, 3)
    assert CosineLength(inner, 8, success_threshold=5.0)([sample(tokens=())]) == [2.0]
    tell_progress(exact_match, step=1, epoch=1)  # which does not want to know
