"""Mismatched pairs: never a prompt with its own answers, the same for every split into micro-batches and ranks."""

from collections import Counter
from typing import Any

import pytest

from rlhfkit.data.batch import TokenExample
from rlhfkit.data.formats import (
    UnpairedExample,
    UnpairedLoader,
    add_mismatched,
    collate_unpaired,
    rows_of_other_prompts,
)
from rlhfkit.data.loaders.steps import ExampleTable


class Answers:
    """Prompt ``[p]``, completion ``[100 + row] * n``."""

    def __init__(self, prompts: list[int]) -> None:
        self.rows = [
            TokenExample([prompt] + [100 + row] * (row % 3 + 1), [False] + [True] * (row % 3 + 1))
            for row, prompt in enumerate(prompts)
        ]
        self.lengths = [len(row.input_ids) for row in self.rows]
        self.targets = [row.targets for row in self.rows]

    def __getitem__(self, index: int) -> TokenExample:
        return self.rows[index]


def paired(prompts: list[int], desirable: list[bool], **options: Any) -> ExampleTable[UnpairedExample]:
    table = ExampleTable(Answers(prompts), UnpairedExample, desirable=desirable)
    add_mismatched(table, **options)
    return table


PROMPTS = [1, 2, 1, 3, 4, 1, 5, 2, 6, 7, 1]


@pytest.mark.parametrize("prompts", [PROMPTS, [0] * 30 + [1], [0, 1], list(range(50))])
def test_no_prompt_meets_an_answer_to_itself(prompts: list[int]) -> None:
    for seed in range(20):
        partners = rows_of_other_prompts(prompts, seed=seed)
        assert all(prompts[partner] != prompts[row] for row, partner in enumerate(partners))


def test_partners_are_uniform_over_the_rows_of_other_prompts() -> None:
    counts = Counter(
        (row, p) for seed in range(3000) for row, p in enumerate(rows_of_other_prompts(PROMPTS, seed=seed))
    )
    for row, prompt in enumerate(PROMPTS):
        others = [other for other in range(len(PROMPTS)) if PROMPTS[other] != prompt]
        expected = 3000 / len(others)
        # Five standard deviations of a binomial count.
        assert all(abs(counts[row, other] - expected) < 5 * expected**0.5 for other in others)
        assert sum(counts[row, other] for other in others) == 3000


def test_one_prompt_has_no_mismatched_pairs() -> None:
    assert rows_of_other_prompts([7, 7, 7], seed=0) is None
    assert paired([7, 7], [True, False])[0].mismatched is None


def test_a_mismatched_pair_is_the_prompt_with_the_other_completion_cut_to_the_limit() -> None:
    examples = paired(PROMPTS, [True] * len(PROMPTS), max_length=3)
    for row, partner in enumerate(examples.values["mismatched"].partners):
        completion = [100 + partner] * (partner % 3 + 1)
        wanted = ([PROMPTS[row], *completion])[:3]
        assert examples[row].mismatched == TokenExample(wanted, [False] + [True] * (len(wanted) - 1))


@pytest.mark.parametrize(
    ("size", "accumulate", "ranks", "together"),
    [(6, 1, 1, 1), (2, 3, 1, 1), (1, 3, 2, 1), (2, 1, 3, 1), (1, 6, 1, 1), (2, 3, 2, 2), (1, 3, 4, 2)],
)
def test_a_step_brings_the_mismatched_pairs_of_its_answers_first_and_once(
    size: int, accumulate: int, ranks: int, together: int
) -> None:
    desirable = [prompt % 2 == 0 for prompt in PROMPTS]
    examples = paired(PROMPTS, desirable)
    steps: dict[int, list[tuple[tuple[int, ...], tuple[int, ...]]]] = {0: [], 1: []}
    for rank in range(ranks):
        loader = UnpairedLoader(
            examples,
            collate_unpaired,
            micro_batch_size=size,
            accumulate=accumulate,
            rank=rank,
            world_size=ranks,
            ranks_per_forward=together,
        )
        for number, batch in enumerate(loader):
            step = number // accumulate
            assert bool(batch.mismatched) == (number % accumulate == 0)
            for part in batch.mismatched:
                kept = part.loss_mask.any(-1)
                assert kept.any() or together == 1 or part.input_ids.shape == (1, 2)
                steps[step] += [tuple(row[row > 0].tolist()) for row in part.input_ids[kept]]
            if batch.mismatched:  # equally many forward passes on every rank
                assert len(batch.mismatched) == min(accumulate, len(loader) - number)
            labels = [PROMPTS[row] % 2 == 0 for row in (batch.input_ids[:, 1] - 100).tolist()]
            assert batch.desirable.tolist() == labels
    order = UnpairedLoader(examples, collate_unpaired, micro_batch_size=6).schedule.order(0)
    for step, rows in {0: order[:6], 1: order[6:]}.items():
        assert Counter(steps[step]) == Counter(tuple(examples[row].mismatched.input_ids) for row in rows)


@pytest.mark.parametrize(
    ("size", "accumulate", "ranks", "together"),
    [(6, 1, 1, 1), (2, 3, 1, 1), (1, 3, 2, 1), (1, 2, 3, 1), (2, 3, 2, 2), (1, 3, 4, 2)],
)
def test_a_step_of_a_stream_has_the_same_mismatched_pairs_on_any_ranks(
    size: int, accumulate: int, ranks: int, together: int
) -> None:
    """Six answers in each of two steps; the third has one prompt, and no pairs."""
    prompts = [*PROMPTS, 8, *[9] * 6]
    answers = Answers(prompts)

    class Stream:
        fingerprint = ""

        def open(self, place: Any = None) -> Any:
            return ((row + 1, UnpairedExample(answers[row], row % 2 == 0)) for row in range(place or 0, len(prompts)))

    pairs: list[list[tuple[int, ...]]] = [[], [], []]
    for rank in range(ranks):
        loader = UnpairedLoader(
            Stream(),
            collate_unpaired,
            steps_per_epoch=3,
            micro_batch_size=size,
            accumulate=accumulate,
            rank=rank,
            world_size=ranks,
            ranks_per_forward=together,
            seed=5,
        )
        for number, batch in enumerate(loader):
            step = number // accumulate
            assert len(batch.mismatched) == accumulate * (number % accumulate == 0 and step < 2)
            for part in batch.mismatched:
                kept = part.loss_mask.any(-1)
                assert kept.any() or part.input_ids.shape == (1, 2)
                pairs[step] += [tuple(row[row > 0].tolist()) for row in part.input_ids[kept]]
            rows = (batch.input_ids[batch.loss_mask.any(-1), 1] - 100).tolist()
            assert batch.desirable[batch.loss_mask.any(-1)].tolist() == [row % 2 == 0 for row in rows]
    for step in (0, 1):
        own = range(6 * step, 6 * step + 6)
        partners = rows_of_other_prompts([prompts[row] for row in own], seed=5)
        expected = [
            (prompts[row], *answers[own[other]].input_ids[1:]) for row, other in zip(own, partners, strict=True)
        ]
        assert sorted(pairs[step]) == sorted(expected)
        assert all(prompts[pair[1] - 100] != pair[0] for pair in pairs[step])


def test_moving_a_batch_moves_its_mismatched_pairs() -> None:
    examples = paired(PROMPTS, [True] * len(PROMPTS))
    loader = UnpairedLoader(examples, collate_unpaired, micro_batch_size=4)
    moved = next(iter(loader)).to("meta")
    assert {tensor.device.type for tensor in (moved.desirable, moved.mismatched[0].loss_mask)} == {"meta"}
