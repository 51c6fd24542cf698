"""``Dropped``: what was sampled of groups that an iteration has dropped, for the next iteration to continue."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from rlhfkit.data.types import Prompt, Sample
from rlhfkit.rollout.engine import SamplingSpec
from rlhfkit.rollout.replay import sample_from_state, sample_state

CUT: str = "abort"
"""``finish_reason`` of a sample that is not finished."""


class ResumableStream(Protocol):
    """A :class:`~rlhfkit.rollout.collector.GroupStream` that can be cut, and continue what another one has begun."""

    def resume(self, groups: Sequence[list[Sample]], *, iteration: int | None = None) -> None:
        """Start groups of which something was sampled.

        Samples whose ``finish_reason`` is ``"abort"`` are prefixes: they get further tokens, with the log-probs and the
        version of the weights that sample these. Finished ones stay, and missing ones are sampled.

        Args:
            groups: Samples of one prompt each, at least one.
            iteration: As in ``submit``.
        """
        ...

    def cut(self) -> list[list[Sample]]:
        """Stop; return what was sampled of the groups that were not collected, and close the stream."""
        ...


@dataclass
class Dropped:
    """Groups that an iteration has dropped before they were finished (partial rollouts).

    Their prompts come first in the next iteration, where their samples are continued instead of sampled anew, by the
    rank that has them (Kimi k1.5, Kimi Team, 2025, arXiv:2501.12599, section 2.6.2). Every token keeps the
    log-prob and the version of the weights that have sampled it.
    """

    ranks: dict[int, int] = field(default_factory=dict)
    """Which rank has what was made, by the index of the prompt; the same on every rank."""
    groups: dict[int, list[Sample]] = field(default_factory=dict)
    """What this rank has, by the index of the prompt."""

    @classmethod
    def of(cls, ranks: dict[int, int], groups: Iterable[list[Sample]]) -> "Dropped":
        """Keep what this rank has made of its groups; what scoring has added is removed."""
        made = [[_unscored(sample) for sample in group] for group in groups if group]
        return cls(ranks, {group[0].prompt.index: group for group in made})

    def begun(self, prompts: Iterable[Prompt]) -> list[list[Sample]]:
        """What this rank has of these prompts' groups; nothing of prompts that are others in data that has changed."""
        return [
            [dataclasses.replace(sample, prompt=prompt) for sample in self.groups[prompt.index]]
            for prompt in prompts
            if prompt.index in self.groups and _are_one(self.groups[prompt.index][0].prompt, prompt)
        ]

    def state(self, iteration: int) -> dict[str, Any]:
        """What this rank has, for the checkpoint of a run that continues it in an iteration, as plain values."""
        samples = [[sample_state(sample) for sample in group] for group in self.groups.values()]
        return {"iteration": iteration, "ranks": dict(self.ranks), "samples": samples}


def dropped_from(states: Iterable[Mapping[str, Any]], *, rank: int, world_size: int) -> dict[int, Dropped]:
    """What was saved by this rank, or by all of another number of ranks, of which each takes a part; by iteration."""
    dropped: dict[int, Dropped] = {}
    for state in states:
        ranks = {index: saved_by % world_size for index, saved_by in state["ranks"].items()}
        each = dropped.setdefault(state["iteration"], Dropped(ranks))
        for saved in state["samples"]:
            group = [sample_from_state(sample) for sample in saved]
            if ranks[group[0].prompt.index] == rank:
                each.groups[group[0].prompt.index] = group
    return dropped


def _are_one(one: Prompt, other: Prompt) -> bool:
    """Whether a model reads the same in both."""
    return np.array_equal(one.token_ids, other.token_ids) and one.attachments == other.attachments


def _unscored(sample: Sample) -> Sample:
    return dataclasses.replace(sample, text="", reward=None, reward_parts={}, token_rewards=None, info={})


def continued(begun: Sample, sample: Sample) -> Sample:
    """Join a prefix and what was sampled after it."""
    return Sample(
        begun.prompt,
        begun.sample_index,
        np.concatenate([begun.token_ids, sample.token_ids]),
        np.concatenate([begun.logprobs, sample.logprobs]),
        np.concatenate([begun.versions, sample.versions]),
        sample.finish_reason,
    )


def is_usable(sample: Sample, sampling: SamplingSpec) -> bool:
    """Whether the sampling has a place for a begun sample; it may have changed since, and the sample is made anew."""
    room = sampling.max_new_tokens - (sample.finish_reason == CUT)
    return sample.sample_index < sampling.group_size and sample.num_tokens <= room
