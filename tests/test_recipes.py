"""Functions of tutorials/research/recipes.py by hand-written examples."""

import logging
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "tutorials" / "research"))

from recipes import (
    best_and_worst_pairs,
    best_of_n,
    bin_rewards,
    condition_prompts,
    normalize_rewards,
    returns_to_go,
)


def line(index: int, completion: str, reward: float | None, **more: Any) -> dict[str, Any]:
    return {"prompt": f"p{index}", "index": index, "completion": completion, "reward": reward, **more}


LINES = [
    line(3, "a", 0.5),
    line(1, "b", None),
    line(3, "c", 2.0),
    line(2, "d", -1.0),
    line(3, "e", 2.0),
    line(2, "f", -1.0),
    line(3, "g", 0.5),
]


def test_best_of_n_keeps_the_first_of_the_best_in_the_order_of_the_prompts(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "recipes")
    assert best_of_n(LINES) == [LINES[2], LINES[3]]
    assert "1 lines have no reward" in caplog.text
    assert "1 of 3 prompts have no completion to keep" in caplog.text
    assert best_of_n(LINES, minimum=2.0) == [LINES[2]]
    assert best_of_n([]) == []


def test_pairs_are_the_first_best_and_the_first_worst_and_never_a_text_with_itself(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "recipes")
    pair = {"prompt": "p3", "chosen": "c", "rejected": "a", "chosen_reward": 2.0, "rejected_reward": 0.5}
    assert best_and_worst_pairs(LINES) == [pair]
    assert "2 of 3 prompts give no pair" in caplog.text
    assert best_and_worst_pairs(LINES, minimum_margin=1.5) == []
    with pytest.raises(ValueError, match="minimum_margin must be 0 or more, got -1"):
        best_and_worst_pairs(LINES, minimum_margin=-1)


def test_normalised_rewards_have_mean_0_and_unbiased_deviation_1() -> None:
    lines = normalize_rewards([line(0, "", reward) for reward in (1.0, 2.0, None, 6.0)])
    # mean 3, squares 4 + 1 + 9 over n - 1 = 2: deviation the root of 7
    assert [one["reward"] for one in lines] == pytest.approx([-2 / 7**0.5, -1 / 7**0.5, None, 3 / 7**0.5])
    with pytest.raises(ValueError, match=r"two different rewards, got \[1.0\]"):
        normalize_rewards([line(0, "", 1.0)] * 3)


def test_levels_count_the_edges_that_are_reached(caplog: pytest.LogCaptureFixture) -> None:
    rows = [line(0, "", reward) for reward in (-5.0, 0.0, 0.1, None, 1.0, 9.0)]
    assert [row["level"] for row in bin_rewards(rows, [0.0, 1.0])] == [0, 1, 1, 2, 2]
    assert "1 of 6 lines have no reward" in caplog.text
    parts = [line(0, "", 1.0, reward_parts={"length": 3.0})]
    assert bin_rewards(parts, [1, 2], reward="length", level="long")[0]["long"] == 2
    with pytest.raises(ValueError, match=r"rising order, got \[1, 0\]"):
        bin_rewards(rows, [1, 0])


@pytest.mark.parametrize("discount", [1.0, 0.5])
def test_returns_to_go_are_the_sums_of_what_follows(discount: float) -> None:
    rewards = [1.0, 0.0, -2.0, 4.0]
    by_hand = [sum(discount ** (k - t) * rewards[k] for k in range(t, 4)) for t in range(4)]
    assert returns_to_go(rewards, discount) == pytest.approx(by_hand)
    assert returns_to_go([]) == []


def test_prompts_say_the_reward_they_got_or_the_wanted_one(caplog: pytest.LogCaptureFixture) -> None:
    rows = [line(0, "x", 1.234), line(1, "y", None)]
    assert [row["prompt"] for row in condition_prompts(rows)] == ["p0 <rm_score>: 1.23 "]  # OpenRLHF's format
    assert "1 lines have no value for the template" in caplog.text
    asked = condition_prompts([{"question": "2+2="}], prompt="question", reward=9)
    assert asked == [{"question": "2+2= <rm_score>: 9.00 "}]
    assert rows[0]["prompt"] == "p0"  # the given lines stay as they are


def test_several_attributes_and_chat_prompts() -> None:
    chat = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    row = {"prompt": chat, "reward": 0.0, "reward_parts": {"quality": 4, "toxicity": 0}}
    (made,) = condition_prompts([row], "{prompt}\nquality:{quality},toxicity:{toxicity}", toxicity=1)
    assert made["prompt"] == [chat[0], {"role": "user", "content": "u\nquality:4,toxicity:1"}]
    assert chat[1]["content"] == "u"


def test_templates_that_cannot_work_are_refused() -> None:
    with pytest.raises(ValueError, match=r"must hold \{prompt\}, got 'reward \{reward\}'"):
        condition_prompts([line(0, "", 1.0)], "reward {reward}")
    with pytest.raises(ValueError, match="names level; there are prompt, index, completion, reward"):
        condition_prompts([line(0, "", 1.0)], "{level} {prompt}")
