"""Rules, formats (against the patterns of TRL and Open R1), lengths and repetition (the papers' values, Open R1's)."""

import math
import re

import pytest

from rewards.samples import sampled
from rlhfkit.rewards import (
    CosineLength,
    ExactMatch,
    FormatReward,
    LastTurnReward,
    LengthPenalty,
    ReasoningFormat,
    RepetitionPenalty,
    TagCount,
    exact_match,
)

THINK = re.compile(r"^<think>(?!.*<think>)(.*?)</think>.*$", re.DOTALL)  # TRL's think_format_reward
TEXTS = [
    "<think>a</think>b",
    "<think>a\nb</think>\n\nc",
    "a<think>b</think>c",
    "<think>a</think>",
    "<think>a<think>b</think>c",
    "<think>a</think>b</think>c",
    "a</think>b",
    "<think>a",
    "",
]


@pytest.mark.parametrize(
    ("options", "text", "answer", "score"),
    [
        ({}, " 5\n", "5", 1.0),
        ({}, "5", 5, 1.0),
        ({}, "It is 5", "5", 0.0),
        ({}, "Paris", "paris", 0.0),
        ({"ignore_case": True}, "STRASSE", "straße", 1.0),
        ({"ignore_punctuation": True}, "Paris.", "Paris", 1.0),
        ({"pattern": r"#### (\S+)"}, "2 #### 4 no: #### 5", "5", 1.0),
        ({"pattern": r"#### (\S+)"}, "5", "5", 0.0),
        ({"pattern": r"\d+"}, "3 + 2 = 5.", "5", 1.0),
    ],
)
def test_exact_match_compares_stripped_text_normalised_as_told(
    options: dict[str, object], text: str, answer: object, score: float
) -> None:
    assert ExactMatch(**options)([sampled(text, answer)]) == [score]


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ({"ground_truth": "5"}, r"a text or a number, but the answer of prompt 3 is \{'ground_truth': '5'\}"),
        (None, r"prompt 3 has none: name the column that holds it, PromptDataModule\(answer="),
    ],
)
def test_an_answer_that_no_completion_can_be_is_refused(answer: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        exact_match([sampled("5", answer, prompt=3)])


def test_format_reward() -> None:
    pattern = r"<think>.*?</think>\s*<answer>.*?</answer>"
    good = "<think>a\nb</think>\n<answer>5</answer>\n"
    assert FormatReward(pattern)([sampled(good), sampled("so " + good), sampled("")]) == [1.0, 0.0, 0.0]
    assert FormatReward(pattern, whole=False)([sampled("so " + good), sampled("<answer>5</answer>")]) == [1.0, 0.0]


def test_length_penalty_is_dapos_equation_13_of_the_policys_tokens() -> None:
    """Soft zone of 4 in front of 10: free up to 6, -1/4 per token behind, -1 from 10 on."""
    reward = LengthPenalty(max_length=10, soft_zone=4)
    scores = reward([sampled(tokens=range(length)) for length in (0, 5, 6, 7, 8, 9, 10, 11, 100)])
    assert scores == [0.0, 0.0, 0.0, -0.25, -0.5, -0.75, -1.0, -1.0, -1.0]
    assert reward([sampled(tokens=range(10), action_mask=[True] * 7 + [False] * 3)]) == [-0.25]


def test_the_format_is_trls_with_an_answer_and_each_tag_once() -> None:
    scores = ReasoningFormat()([sampled(text) for text in TEXTS])
    assert scores == [1, 1, 0, 0, 0, 0, 0, 0, 0]
    theirs = [float(THINK.match(text) is not None) for text in TEXTS]
    assert [text for text, ours, other in zip(TEXTS, scores, theirs, strict=True) if ours != other] == [
        "<think>a</think>",  # no answer
        "<think>a</think>b</think>c",  # a tag twice
    ]


@pytest.mark.parametrize(
    ("text", "score"),
    [
        ("<think>a</think><answer>b</answer>", 1.0),
        ("<think>a</think>\n<answer>\nb\n</answer>\n", 1.0),
        ("<think>a</think><answer> </answer>", 0.0),
        ("<think>a</think>so <answer>b</answer>", 0.0),
        ("<think>a</think><answer>b</answer> and more", 0.0),
        ("<think>a</think>b", 0.0),
    ],
)
def test_the_answer_may_have_tags_of_its_own(text: str, score: float) -> None:
    assert ReasoningFormat(answer=("<answer>", "</answer>"))([sampled(text)]) == [score]


def test_a_template_may_have_opened_the_reasoning() -> None:
    reward = ReasoningFormat(opened=True)
    assert reward([sampled("a</think>b"), sampled("<think>a</think>b"), sampled("a")]) == [1.0, 0.0, 0.0]


def test_tags_are_counted_as_open_r1_counts_them() -> None:
    whole = "<think>\na\n</think>\n\n<answer>\nb\n</answer>"
    assert TagCount()([sampled(whole), sampled(whole + "\n</answer>"), sampled("<think>\n"), sampled("")]) == [
        1.0, 0.75, 0.25, 0.0
    ]  # fmt: skip
    assert TagCount(["<a>", "</a>"])([sampled("<a>x</a>"), sampled("<a><a></a>")]) == [1.0, 0.5]


def test_cosine_runs_between_the_papers_values() -> None:
    """Table of hyperparameters in arXiv:2502.03373: +2 to +1 if right, -10 to 0 if wrong, -10 at the limit."""
    reward = CosineLength(exact_match, max_length=8)
    right, wrong = ([sampled(text, "5", tokens=range(n)) for n in (0, 4, 8, 9)] for text in ("5", "6"))
    assert reward(right) == pytest.approx([2.0, 1.5, -10.0, -10.0])
    assert reward(wrong) == pytest.approx([-10.0, -5.0, -10.0, -10.0])


def test_cosine_gives_open_r1s_numbers() -> None:
    """Its formula is ``min + (max - min) (1 + cos(π n / L)) / 2``, with both swapped for wrong answers."""
    values = {"correct_short": 1.0, "correct_long": 0.5, "wrong_short": -1.0, "wrong_long": -0.5}
    reward = CosineLength(exact_match, 1000, **values, at_limit=None)
    for length in (1, 250, 999, 1000, 1500):
        cosine = math.cos(min(length / 1000, 1.0) * math.pi)
        right, wrong = reward([sampled(text, "5", tokens=range(length)) for text in ("5", "6")])
        assert right == pytest.approx(0.5 + 0.5 * (1.0 - 0.5) * (1.0 + cosine))
        assert wrong == pytest.approx(-0.5 + 0.5 * (-1.0 + 0.5) * (1.0 + cosine))


def test_a_sample_without_a_grade_has_no_reward_and_a_threshold_decides_what_is_right() -> None:
    assert CosineLength(lambda samples: [None], 8)([sampled()]) == [None]
    assert CosineLength(lambda samples: [0.5], 8, success_threshold=0.5)([sampled(tokens=())]) == [2.0]


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
    assert RepetitionPenalty()([sampled(tokens=tokens)]) == [pytest.approx(penalty)]
    assert RepetitionPenalty(penalty=3.0)([sampled(tokens=tokens)]) == [pytest.approx(3 * penalty)]
    words = sampled(" ".join("Ab"[token % 2] * token for token in tokens))
    assert RepetitionPenalty(words=True)([words]) == [pytest.approx(penalty)]


def test_what_an_environment_wrote_is_no_repetition_of_the_policys() -> None:
    """Two turns, (1, 2, 3) and (1, 2, 3, 4), around 30 equal tokens of a tool: of 3 n-grams 1 is repeated."""
    tokens = [1, 2, 3, *[7] * 30, 1, 2, 3, 4]
    episode = sampled("a b c " + "x " * 30 + "a a a a", tokens=tokens)
    episode.action_mask = [True] * 3 + [False] * 30 + [True] * 4
    assert RepetitionPenalty()([episode]) == [pytest.approx(-1 / 3)]
    assert RepetitionPenalty(ngram=5)([episode]) == [0.0]  # no turn is as long
    with pytest.raises(ValueError, match=r"environment wrote into the text of prompt 0: count tokens \(words"):
        RepetitionPenalty(words=True)([episode])
    episode.info["last_text"] = "a a a a"
    assert LastTurnReward(RepetitionPenalty(words=True))([episode]) == [pytest.approx(-1 / 2)]
