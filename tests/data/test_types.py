"""Properties of samples and the batches made of them."""

import io

import pytest
import torch

from data.examples import assert_same, sample
from rlhfkit.data import Experience


@pytest.fixture
def experience() -> Experience:
    return Experience.from_samples(
        [
            sample(7, 2, 3, reward_parts={"correct": 1.0}),
            sample(7, 2, 1, index=1, finish_reason="length", reward_parts={"correct": 0.0, "format": 0.5}),
            sample(9, 4, 4, action_mask=[True, False, False, True]),
        ],
        temperature=0.7,
    )


def test_a_batch_knows_whose_samples_its_rows_are_and_what_they_earned(experience: Experience) -> None:
    assert experience.lengths.tolist() == [5, 3, 8]
    assert experience.group.tolist() == [7, 7, 9]
    assert experience.sample_index.tolist() == [0, 1, 0]
    assert experience.truncated.tolist() == [False, True, False]
    assert experience.rewards.tolist() == [0.0, 1.0, 0.0]
    assert experience.temperature == 0.7
    assert experience.reward_parts.keys() == {"correct", "format"}
    assert experience.reward_parts["format"][1] == 0.5
    assert experience.reward_parts["format"].isnan().tolist() == [True, False, True]


def test_floats_stay_float32_whatever_the_default_type_is() -> None:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        batch = Experience.from_samples([sample(1, 2, 3, reward=1000.5, reward_parts={"a": 1000.5})])
    finally:
        torch.set_default_dtype(before)
    assert batch.rewards.tolist() == [1000.5]
    assert batch.reward_parts["a"].tolist() == [1000.5]
    assert batch.rollout_logprobs.dtype == torch.float32


def test_no_sample_and_empty_prompt_are_rejected() -> None:
    with pytest.raises(ValueError, match="at least one sample"):
        Experience.from_samples([])
    with pytest.raises(ValueError, match="prompt 4 has no tokens"):
        Experience.from_samples([sample(4, 0, 3)])


def filled(experience: Experience) -> Experience:
    """With every optional field set to numbers."""
    names = ("old_logprobs", "columns.ref_logprobs", "columns.values", "advantages", "columns.returns")
    return experience.with_tensors({name: torch.randn(experience.action_mask.shape) for name in names})


def test_select_takes_rows_in_order_and_trims(experience: Experience) -> None:
    experience = filled(experience)
    chosen = experience.select([1, 0])
    assert chosen.input_ids.tolist() == [[1, 2, 50, 0, 0], [1, 2, 50, 51, 52]]
    assert chosen.action_mask.shape == (2, 4)
    assert torch.equal(chosen.columns["values"], experience.columns["values"][[1, 0], :4])
    assert chosen.reward_parts["correct"].tolist() == [0.0, 1.0]
    assert_same(experience.select(torch.tensor([1, 0])), chosen)


def test_pad_marks_padding(experience: Experience) -> None:
    padded = experience.pad(10)
    assert padded.input_ids.shape == (3, 10)
    assert padded.action_mask.shape == (3, 9)
    assert padded.versions[:, -2:].tolist() == [[-1, -1]] * 3
    assert not padded.attention_mask[:, -2:].any()
    assert_same(padded.trim(), experience)
    with pytest.raises(ValueError, match="cannot pad to 4 tokens: the batch has 8"):
        experience.pad(4)


def test_state_survives_a_weights_only_checkpoint(experience: Experience) -> None:
    file = io.BytesIO()
    experience = filled(experience)
    torch.save(experience.state_dict(), file)
    file.seek(0)
    assert_same(Experience.from_state_dict(torch.load(file, weights_only=True)), experience)


def test_denominators_are_the_steps_counts_per_averaged_micro_batch(experience: Experience) -> None:
    assert experience.token_denominator is None
    assert experience.sequence_denominator is None
    experience.step_tokens, experience.step_sequences, experience.step_micro_batches = 600.0, 24.0, 8
    assert experience.token_denominator == 75.0
    assert experience.sequence_denominator == 3.0
    experience.step_tokens = 0.0
    assert experience.token_denominator == 1 / 8


def test_the_summary_of_an_iteration_has_lengths_and_versions_of_each_row(experience: Experience) -> None:
    samples = [sample(7, 2, 3, versions=[3, 3, 4]), sample(7, 2, 5, index=1, reward=None), sample(9, 2, 1)]
    summary = Experience.from_samples(samples).summary
    assert (summary.lengths.tolist(), summary.prompt_lengths.tolist()) == ([5, 7, 3], [2, 0, 2])
    assert summary.trained_tokens.tolist() == [3, 0, 1]
    assert (summary.oldest_version.tolist(), summary.newest_version.tolist()) == ([3, -1, 3], [4, -1, 3])
    chosen = summary.select([2, 0])
    assert (chosen.group.tolist(), chosen.columns()["lengths"].tolist()) == ([9, 7], [3, 5])
    assert experience.own_rows.tolist() == [0, 1, 2]  # numbered from 0 unless they are a part
