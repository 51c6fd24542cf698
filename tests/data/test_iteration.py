"""What all ranks know of the sequences of an iteration."""

import torch

from rlhfkit.data import Experience, Prompt, Sample


def sample(prompt: int, index: int, tokens: int, *, reward: float | None = 1.0, version: int = 3) -> Sample:
    versions = [version] * (tokens - 1) + [version + 1]
    record = Sample(Prompt(prompt, [1, 2]), index, [5] * tokens, [-0.5] * tokens, versions, "stop")
    record.reward = reward
    record.reward_parts = {} if reward is None else {"exact": reward}
    return record


class TestSummary:
    """The summary of a whole iteration in one process."""

    experience = Experience.from_samples([sample(7, 0, 3), sample(7, 1, 5, reward=None), sample(9, 0, 1)])

    def test_it_counts_tokens_of_each_row(self) -> None:
        summary = self.experience.summary
        assert summary.lengths.tolist() == [5, 7, 3]
        assert summary.prompt_lengths.tolist() == [2, 0, 2]
        assert summary.trained_tokens.tolist() == [3, 0, 1]
        assert len(summary) == 3

    def test_it_has_the_versions_of_trained_tokens(self) -> None:
        summary = self.experience.summary
        assert summary.oldest_version.tolist() == [3, -1, 4]
        assert summary.newest_version.tolist() == [4, -1, 4]

    def test_rows_can_be_selected_in_another_order(self) -> None:
        chosen = self.experience.summary.select([2, 0])
        assert chosen.group.tolist() == [9, 7]
        assert chosen.reward_parts["exact"].tolist() == [1, 1]
        assert torch.equal(chosen.columns()["lengths"], torch.tensor([3, 5]))

    def test_rows_are_numbered_from_0_unless_they_are_a_part(self) -> None:
        assert self.experience.own_rows.tolist() == [0, 1, 2]
