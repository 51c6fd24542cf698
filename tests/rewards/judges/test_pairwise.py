"""Win rates from judges of pairs, against counts by hand."""

from collections.abc import Sequence
from typing import Any

import pytest

from rewards.samples import sampled, scored
from rlhfkit import Sample
from rlhfkit.rewards import PairwiseReward


def longer(pairs: Sequence[tuple[Sample, Sample]]) -> list[float]:
    return [0.5 + 0.5 * ((len(a.text) > len(b.text)) - (len(a.text) < len(b.text))) for a, b in pairs]


def test_rewards_are_shares_of_won_comparisons_within_a_prompt() -> None:
    texts = {0: ["a", "bbb", "cc"], 7: ["dd", "ee"], 9: ["alone"]}
    samples = [
        sampled(text, prompt=prompt, place=place) for prompt, each in texts.items() for place, text in enumerate(each)
    ]
    samples[0], samples[4] = samples[4], samples[0]  # groups need not be side by side
    reward = PairwiseReward(longer)
    scored(reward, samples)
    assert {one.text: one.reward for one in samples} == {
        "a": 0.0, "bbb": 1.0, "cc": 0.5, "dd": 0.5, "ee": 0.5, "alone": None,
    }  # fmt: skip
    assert reward.metrics() == {"longer_win_rate/order_agreement": 1.0}
    assert reward.metrics() == {}


def test_both_orders_cancel_a_preference_for_a_place() -> None:
    async def first_place(pairs: Any) -> list[float]:
        return [0.9 if len(a.text) == len(b.text) else 0.5 + 0.4 * (len(a.text) > len(b.text)) for a, b in pairs]

    samples = [sampled("x"), sampled("y", place=1)]
    biased, fair = PairwiseReward(first_place, both_orders=False), PairwiseReward(first_place)
    for reward, expected in ((biased, [0.9, 0.1]), (fair, [0.5, 0.5])):
        assert scored(reward, samples) == pytest.approx(expected)
    assert fair.metrics() == {"first_place_win_rate/order_agreement": 0.0}


def test_comparisons_that_were_not_judged_do_not_count() -> None:
    def shy(pairs: Any) -> list[float | None]:
        return [None if "?" in a.text + b.text else 1.0 * (a.text < b.text) for a, b in pairs]

    samples = [sampled("a"), sampled("b", place=1), sampled("?", place=2)]
    assert scored(PairwiseReward(shy), samples) == [1.0, 0.0, None]


def test_answers_are_compared_with_the_reference_answer() -> None:
    samples = [sampled("long text", "short"), sampled("no", "yes", prompt=1)]
    assert scored(PairwiseReward(longer, against="answer"), samples) == [1.0, 0.0]
    with pytest.raises(ValueError, match="column that holds it"):
        scored(PairwiseReward(longer, against="answer"), [sampled("x")])


def test_wrong_judges_are_errors() -> None:
    samples = [sampled("x"), sampled("y", place=1)]
    for judge, message in ((lambda pairs: [2.0, 0.0], "returned 2.0 for pair 0"), (lambda pairs: [1.0], "1 values")):
        with pytest.raises(ValueError, match=message):
            scored(PairwiseReward(judge), samples)
