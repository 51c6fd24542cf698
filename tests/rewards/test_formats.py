"""Rewards for reasoning formats, against the patterns of TRL and Open R1."""

import re

import pytest

from rlhfkit.data import Prompt, Sample
from rlhfkit.rewards import ReasoningFormat, TagCount

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


def sample(text: str) -> Sample:
    return Sample(Prompt(3, [1]), 0, [1], [0.0], [0], "stop", text=text)


def test_the_format_is_trls_with_an_answer_and_each_tag_once() -> None:
    scores = ReasoningFormat()([sample(text) for text in TEXTS])
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
    assert ReasoningFormat(answer=("<answer>", "</answer>"))([sample(text)]) == [score]


def test_a_template_may_have_opened_the_reasoning() -> None:
    reward = ReasoningFormat(opened=True)
    assert reward([sample("a</think>b"), sample("<think>a</think>b"), sample("a")]) == [1.0, 0.0, 0.0]


def test_tags_are_counted_as_open_r1_counts_them() -> None:
    whole = "<think>\na\n</think>\n\n<answer>\nb\n</answer>"
    assert TagCount()([sample(whole), sample(whole + "\n</answer>"), sample("<think>\n"), sample("")]) == [
        1.0, 0.75, 0.25, 0.0
    ]  # fmt: skip
    assert TagCount(["<a>", "</a>"])([sample("<a>x</a>"), sample("<a><a></a>")]) == [1.0, 0.5]


def test_tags_that_cannot_be_are_refused() -> None:
    with pytest.raises(ValueError, match="tags must be texts that are not empty"):
        ReasoningFormat("")
    with pytest.raises(ValueError, match="tags must be a list of texts"):
        TagCount("<a>")
