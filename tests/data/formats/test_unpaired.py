"""Mismatched pairs: never a prompt with its own answers, the same for every split into micro-batches and ranks."""

from collections import Counter
from typing import Any

import pytest

from data.examples import Table
from rlhfkit.data.batch import TokenExample
from rlhfkit.data.formats import (
    UnpairedExample,
    UnpairedLoader,
    add_mismatched,
    collate_unpaired,
    rows_of_other_prompts,
)
from rlhfkit.data.loaders.steps import ExampleTable


def answers(prompts: list[int]) -> Table:
    """Prompt ``[p]``, completion ``[100 + row] * n``."""
    lengths = [row % 3 + 1 for row in range(len(prompts))]
    return Table(
        TokenExample([prompt] + [100 + row] * length, [False] + [True] * length)
        for row, (prompt, length) in enumerate(zip(prompts, lengths, strict=True))
    )


def paired(prompts: list[int], **options: Any) -> ExampleTable[UnpairedExample]:
    table = ExampleTable(answers(prompts), UnpairedExample, desirable=[prompt % 2 == 0 for prompt in prompts])
    add_mismatched(table, **options)
    return table


PROMPTS = [1, 2, 1, 3, 4, 1, 5, 2, 6, 7, 1]


@pytest.mark.parametrize("prompts", [PROMPTS, [0] * 30 + [1], [0, 1]])
def test_partners_are_uniform_over_the_rows_of_other_prompts_and_never_of_the_same(prompts: list[int]) -> None:
    counts = Counter(
        (row, p) for seed in range(3000) for row, p in enumerate(rows_of_other_prompts(prompts, seed=seed))
    )
    for row, prompt in enumerate(prompts):
        others = [other for other in range(len(prompts)) if prompts[other] != prompt]
        expected = 3000 / len(others)
        # Five standard deviations of a binomial count.
        assert all(abs(counts[row, other] - expected) < 5 * expected**0.5 for other in others)
        assert sum(counts[row, other] for other in others) == 3000


def test_one_prompt_has_no_mismatched_pairs() -> None:
    assert rows_of_other_prompts([7, 7, 7], seed=0) is None
    assert paired([7, 7])[0].mismatched is None


def test_a_mismatched_pair_is_the_prompt_with_the_other_completion_cut_to_the_limit() -> None:
    examples = paired(PROMPTS, max_length=3)
    for row, partner in enumerate(examples.values["mismatched"].partners):
        completion = [100 + partner] * (partner % 3 + 1)
        wanted = ([PROMPTS[row], *completion])[:3]
        assert examples[row].mismatched == TokenExample(wanted, [False] + [True] * (len(wanted) - 1))


class Stream:
    """Labelled answers one after another, without mismatched pairs."""

    fingerprint = ""

    def __init__(self, prompts: list[int]) -> None:
        self.examples = [UnpairedExample(answer, answer.input_ids[0] % 2 == 0) for answer in answers(prompts)]

    def open(self, place: Any = None) -> Any:
        return enumerate(self.examples[place or 0 :], 1 + (place or 0))


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize(
    ("size", "accumulate", "ranks", "together"),
    [(6, 1, 1, 1), (2, 3, 1, 1), (1, 3, 2, 1), (2, 1, 3, 1), (1, 6, 1, 1), (2, 3, 2, 2), (1, 3, 4, 2)],
)
def test_a_step_brings_the_mismatched_pairs_of_its_answers_first_and_once(
    size: int, accumulate: int, ranks: int, together: int, streamed: bool
) -> None:
    """Steps of six answers: of a table two, the second of five; of a stream three, the last of one prompt alone."""
    prompts = [*PROMPTS, 8, *[9] * 6] if streamed else PROMPTS
    data = Stream(prompts) if streamed else paired(prompts)
    options = {"steps_per_epoch": 3, "seed": 5} if streamed else {}
    found: list[Counter[tuple[int, ...]]] = [Counter(), Counter(), Counter()]
    for rank in range(ranks):
        loader = UnpairedLoader(
            data,
            collate_unpaired,
            micro_batch_size=size,
            accumulate=accumulate,
            rank=rank,
            world_size=ranks,
            ranks_per_forward=together,
            **options,
        )
        for number, batch in enumerate(loader):
            step = number // accumulate
            assert bool(batch.mismatched) == (number % accumulate == 0 and step < 2)
            for part in batch.mismatched:
                kept = part.loss_mask.any(-1)
                assert kept.any() or together == 1 or part.input_ids.shape == (1, 2)
                found[step].update(tuple(row[row > 0].tolist()) for row in part.input_ids[kept])
            if batch.mismatched:  # equally many forward passes on every rank
                assert len(batch.mismatched) == min(accumulate, len(loader) - number)
            labels = [prompts[row] % 2 == 0 for row in (batch.input_ids[:, 1] - 100).tolist()]
            assert batch.desirable.tolist() == labels
    order = range(18) if streamed else UnpairedLoader(data, collate_unpaired, micro_batch_size=6).schedule.order(0)
    for step, rows in enumerate((order[:6], order[6:12])):
        if streamed:
            partners = rows_of_other_prompts([prompts[row] for row in rows], seed=5)
            pairs = [
                (prompts[row], *data.examples[rows[other]].answer.input_ids[1:])
                for row, other in zip(rows, partners, strict=True)
            ]
        else:
            pairs = [tuple(data[row].mismatched.input_ids) for row in rows]
        assert found[step] == Counter(pairs)


def test_moving_a_batch_moves_its_mismatched_pairs() -> None:
    loader = UnpairedLoader(paired(PROMPTS), collate_unpaired, micro_batch_size=4)
    moved = next(iter(loader)).to("meta")
    assert {tensor.device.type for tensor in (moved.desirable, moved.mismatched[0].loss_mask)} == {"meta"}
