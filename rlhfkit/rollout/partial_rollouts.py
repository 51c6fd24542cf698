"""``PartialRollouts``: what was sampled of groups that an iteration has dropped, for a later iteration to continue."""

import dataclasses
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from rlhfkit.data.types import Prompt, Sample
from rlhfkit.rollout.engine import SamplingSpec
from rlhfkit.rollout.sample_state import sample_from_state, sample_state

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
class _Dropped:
    """What an iteration has dropped."""

    ranks: dict[int, int]
    """Which rank has what was made, by the index of the prompt; the same on every rank."""
    groups: dict[int, list[Sample]] = field(default_factory=dict)
    """What this rank has, by the index of the prompt."""


class PartialRollouts:
    """Groups that oversampling has dropped before they were finished (partial rollouts).

    Their prompts come first in the next iteration, where their samples are continued instead of sampled anew, by the
    rank that has them (Kimi k1.5, Kimi Team, 2025, arXiv:2501.12599, section 2.6.2). Every token keeps the
    log-prob and the version of the weights that have sampled it. What was dropped is kept until the iteration that
    continues it was trained on, so that a run that is resumed continues the same. May be used from several threads.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._dropped: dict[int, _Dropped] = {}  # by the iteration that continues it

    def __getstate__(self) -> dict[str, Any]:
        """Pickle without the lock, for ranks in other processes (on Ray)."""
        with self._lock:
            return {"_dropped": self._dropped}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore what was pickled."""
        self._lock, self._dropped = threading.Lock(), state["_dropped"]

    def of(self, iteration: int) -> "IterationPartials":
        """Return those of one iteration."""
        return IterationPartials(self, iteration)

    def found(self, iteration: int) -> tuple[dict[int, int], dict[int, list[Sample]]]:
        """What an iteration continues: the rank of each prompt's group, and the groups that this rank has."""
        with self._lock:
            dropped = self._dropped.get(iteration)
        return ({}, {}) if dropped is None else (dropped.ranks, dropped.groups)

    def keep(self, iteration: int, ranks: dict[int, int], groups: Iterable[list[Sample]]) -> None:
        """Keep what an iteration drops, in place of what it has dropped before, when it was sampled another time."""
        made = {group[0].prompt.index: group for group in groups}
        with self._lock:
            self._dropped[iteration + 1] = _Dropped(ranks, made)

    def clear(self) -> None:
        """Forget everything."""
        with self._lock:
            self._dropped = {}

    def forget(self, iteration: int) -> None:
        """Forget what iterations before this one have continued."""
        with self._lock:
            self._dropped = {number: each for number, each in self._dropped.items() if number >= iteration}

    def state_dict(self, iteration: int) -> list[dict[str, Any]]:
        """What this rank needs in a run that is resumed at an iteration, as tensors and plain values."""
        with self._lock:
            dropped = self._dropped.get(iteration)  # what later ones continue is dropped again
        if dropped is None:
            return []
        samples = [[sample_state(sample) for sample in group] for group in dropped.groups.values()]
        return [{"iteration": iteration, "ranks": dict(dropped.ranks), "samples": samples}]

    def load_state_dict(self, states: Iterable[Mapping[str, Any]], *, rank: int, world_size: int) -> None:
        """Take what this rank has saved, or, of another number of ranks, what all have: each then takes a part."""
        dropped: dict[int, _Dropped] = {}
        for state in states:
            ranks = {index: saved_by % world_size for index, saved_by in state["ranks"].items()}
            each = dropped.setdefault(state["iteration"], _Dropped(ranks))
            for saved in state["samples"]:
                group = [sample_from_state(sample) for sample in saved]
                if ranks[group[0].prompt.index] == rank:
                    each.groups[group[0].prompt.index] = group
        with self._lock:
            self._dropped = dropped


class IterationPartials:
    """What one iteration continues, and what it drops."""

    def __init__(self, partials: PartialRollouts, iteration: int) -> None:
        self._partials = partials
        self._iteration = iteration

    def rank_of(self, prompt: Prompt) -> int | None:
        """The rank that has what was made of a prompt's group; ``None``: nothing was made. The same on every rank."""
        ranks, _ = self._partials.found(self._iteration)
        return ranks.get(prompt.index)

    def begun(self, prompts: Iterable[Prompt]) -> list[list[Sample]]:
        """What this rank has of these prompts' groups; nothing of prompts that are others in data that has changed."""
        _, groups = self._partials.found(self._iteration)
        return [
            [dataclasses.replace(sample, prompt=prompt) for sample in groups[prompt.index]]
            for prompt in prompts
            if prompt.index in groups and np.array_equal(groups[prompt.index][0].prompt.token_ids, prompt.token_ids)
        ]

    def keep(self, ranks: dict[int, int], groups: Iterable[list[Sample]]) -> None:
        """Keep dropped groups.

        Args:
            ranks: The rank of each of them, by the index of the prompt.
            groups: What this rank has made of its own ones; what scoring has added is removed.
        """
        made = [[_unscored(sample) for sample in group] for group in groups if group]
        self._partials.keep(self._iteration, ranks, made)


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
