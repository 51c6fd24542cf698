"""Properties of preference batches: pairs stay pairs, whatever is done to a batch."""

import pytest
import torch

from data.examples import Table
from rlhfkit.data import PreferenceBatch
from rlhfkit.data.batch import StepTotals, TokenExample
from rlhfkit.data.formats import PreferenceExample, collate_preferences
from rlhfkit.data.loaders.steps import ExampleTable


def pair(prompt: list[int], chosen: list[int], rejected: list[int], margin: float) -> PreferenceExample:
    """A pair of answers to a prompt."""
    answers = (
        TokenExample([*prompt, *answer], [False] * len(prompt) + [True] * len(answer)) for answer in (chosen, rejected)
    )
    return PreferenceExample(*answers, margin)


PAIRS = [pair([5, 6], [7, 8, 1], [9, 1], 0.5), pair([5], [7, 1], [9, 9, 9, 1], 2.0), pair([4, 4, 4], [1], [2], -1.0)]


ANSWERS = Table(answer for pair in PAIRS for answer in (pair.chosen, pair.rejected))


def test_chosen_and_rejected_are_neighbours_and_the_mask_selects_the_answers() -> None:
    batch = collate_preferences(PAIRS)
    assert (len(batch), batch.pairs) == (6, 3)
    learned = [row[mask].tolist() for row, mask in zip(batch.input_ids[:, 1:], batch.loss_mask, strict=True)]
    assert learned == [[7, 8, 1], [9, 1], [7, 1], [9, 9, 9, 1], [1], [2]]
    assert batch.chosen(batch.loss_mask.sum(-1)).tolist() == [3, 2, 1]
    assert batch.rejected(batch.loss_mask.sum(-1)).tolist() == [2, 4, 1]
    assert batch.chosen(batch.margins).tolist() == [0.5, 2.0, -1.0] == batch.rejected(batch.margins).tolist()
    assert batch.pair_mask.tolist() == [True, True, True]
    assert batch.ref_logprobs is None


def test_totals_count_pairs_and_tokens_of_chosen_answers() -> None:
    examples = ExampleTable(ANSWERS, PreferenceExample, each=2, margin=[0.5, 2.0, -1.0])
    assert examples.lengths == [9, 8, 8]
    assert examples.targets == [3, 2, 1]
    assert [examples[i] for i in range(3)] == PAIRS
    batch = collate_preferences(PAIRS[:1], StepTotals(tokens=6.0, sequences=3.0, micro_batches=3))
    assert batch.pair_denominator == 1.0
    assert batch.mean_chosen_length == 2.0
    assert collate_preferences(PAIRS).mean_chosen_length is None


def test_pairs_survive_select_moving_and_saving() -> None:
    batch = collate_preferences(PAIRS)
    turned = batch.select([4, 5, 0, 1])
    assert turned.chosen(turned.margins).tolist() == [-1.0, 0.5]
    assert turned.input_ids.shape == (4, 5)
    assert turned.rejected(turned.loss_mask.sum(-1)).tolist() == [1, 2]
    again = PreferenceBatch.from_state_dict(batch.to("cpu").state_dict())
    assert torch.equal(again.loss_mask, batch.loss_mask)
    assert torch.equal(again.margins, batch.margins)
    empty = batch.without_targets()
    assert not empty.pair_mask.any()
    with pytest.raises(ValueError, match="two rows each, got 3 rows"):
        batch.select([0, 1, 2])


def test_reference_log_probs_travel_with_the_pairs_which_have_all_or_none() -> None:
    examples = ExampleTable(ANSWERS, PreferenceExample, each=2)
    examples.values["ref_logprobs"] = torch.tensor([[-1.0, -2.0], [-3.0, -4.0], [-5.0, -6.0]])
    batch = collate_preferences([examples[2], examples[0]])
    assert batch.ref_logprobs.tolist() == [-5.0, -6.0, -1.0, -2.0]
    with pytest.raises(ValueError, match="ref_logprobs is set in 1 of 2 pairs"):
        collate_preferences([examples[0], ExampleTable(ANSWERS, PreferenceExample, each=2)[1]])
    with pytest.raises(ValueError, match=r"2 of the answers, of which there are 6, .* got 2 of margin"):
        ExampleTable(ANSWERS, PreferenceExample, each=2, margin=[1.0, 2.0])
