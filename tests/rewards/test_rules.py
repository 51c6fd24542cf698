"""Rule-based rewards."""

import pytest

from rlhfkit.data import Prompt, Sample
from rlhfkit.rewards import ExactMatch, FormatReward, LengthPenalty, exact_match


def sample(text: str, answer: object = "5", length: int = 1, action_mask: list[bool] | None = None) -> Sample:
    return Sample(
        Prompt(3, [1], answer=answer), 0, [2] * length, [0.0] * length, [0] * length, "stop", action_mask, text=text
    )


@pytest.mark.parametrize(
    ("text", "answer", "score"),
    [("5", "5", 1.0), (" 5\n", "5", 1.0), ("5", 5, 1.0), ("55", "5", 0.0), ("", "5", 0.0), ("It is 5", "5", 0.0)],
)
def test_exact_match_compares_stripped_text(text: str, answer: object, score: float) -> None:
    assert exact_match([sample(text, answer)]) == [score]


@pytest.mark.parametrize(
    ("options", "text", "answer", "score"),
    [
        ({"ignore_case": True}, "STRASSE", "straße", 1.0),
        ({}, "Paris", "paris", 0.0),
        ({"ignore_punctuation": True}, "Paris.", "Paris", 1.0),
        ({"pattern": r"#### (\S+)"}, "2 #### 4 no: #### 5", "5", 1.0),
        ({"pattern": r"#### (\S+)"}, "5", "5", 0.0),
        ({"pattern": r"\d+"}, "3 + 2 = 5.", "5", 1.0),
    ],
)
def test_exact_match_normalises_as_told(options: dict[str, object], text: str, answer: str, score: float) -> None:
    assert ExactMatch(**options)([sample(text, answer)]) == [score]


def test_missing_answer_names_prompt_and_cure() -> None:
    with pytest.raises(
        ValueError, match=r"prompt 3 has none: name the column that holds it, PromptDataModule\(answer="
    ):
        exact_match([sample("5", None)])


def test_format_reward() -> None:
    pattern = r"<think>.*?</think>\s*<answer>.*?</answer>"
    good = "<think>a\nb</think>\n<answer>5</answer>\n"
    assert FormatReward(pattern)([sample(good), sample("so " + good), sample("")]) == [1.0, 0.0, 0.0]
    assert FormatReward(pattern, whole=False)([sample("so " + good), sample("<answer>5</answer>")]) == [1.0, 0.0]


@pytest.mark.parametrize("reward", [FormatReward, lambda pattern: ExactMatch(pattern=pattern)])
def test_broken_pattern_is_rejected_when_written(reward: object) -> None:
    with pytest.raises(ValueError, match=r"'\(' is not a regular expression"):
        reward("(")


def test_length_penalty_is_dapos_equation_13() -> None:
    """Soft zone of 4 in front of 10: free up to 6, -1/4 per token behind, -1 from 10 on."""
    lengths = [0, 5, 6, 7, 8, 9, 10, 11, 100]
    scores = LengthPenalty(max_length=10, soft_zone=4)([sample("", length=length) for length in lengths])
    assert scores == [0.0, 0.0, 0.0, -0.25, -0.5, -0.75, -1.0, -1.0, -1.0]


def test_length_penalty_counts_the_policys_tokens_only() -> None:
    tool_use = sample("", length=10, action_mask=[True] * 7 + [False] * 3)
    assert LengthPenalty(10, 4)([tool_use]) == [-0.25]


@pytest.mark.parametrize("soft_zone", [0, 11])
def test_soft_zone_lies_in_front_of_the_limit(soft_zone: int) -> None:
    with pytest.raises(ValueError, match=f"soft_zone must be an integer of at least 1 and at most 10, got {soft_zone}"):
        LengthPenalty(10, soft_zone)
