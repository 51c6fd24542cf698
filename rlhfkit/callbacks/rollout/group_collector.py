"""``GroupCollector``: scored groups for training and validation, the same on every rank.

:func:`~rlhfkit.rollout.collector.collect_groups` has the order of drawing, generating, scoring and selecting; this file
has the steps, and which rank does what.
"""

import logging
import math
from collections.abc import Callable, Sequence
from itertools import zip_longest
from typing import Any, cast

import lightning as L

from rlhfkit.callbacks.rollout.timing import Timing
from rlhfkit.data.sample_texts import decode_together
from rlhfkit.data.types import Experience, Prompt, Sample
from rlhfkit.distributed import run_on_all_ranks
from rlhfkit.models.load import text_decoder
from rlhfkit.protocols import policy_of, prompts_of
from rlhfkit.rewards.base import Reward, part_names, score_samples
from rlhfkit.rollout.collector import (
    BatchedGroupStream,
    CollectedGroups,
    Group,
    GroupStream,
    OneRank,
    StreamingEngine,
    collect_groups,
    flatten,
)
from rlhfkit.rollout.dynamic_sampling import DynamicSampling
from rlhfkit.rollout.engine import RolloutEngine, SamplingSpec
from rlhfkit.validation import check_number

log = logging.getLogger(__name__)


class GroupCollector:
    """Generates with one engine, scores, and selects.

    ``wanted`` is the number of groups of an iteration; ``iteration`` is part of each sample's seed.

    Args:
        engine: What generates.
        reward: Scores samples; ``None``: every sample gets 0.
        timing: Records how long generating and scoring take.
        dynamic_sampling: Which groups to train on; ``None``: all.
        oversampling: Further groups in flight, as a share of ``wanted``.

    Raises:
        ValueError: If ``oversampling`` is negative, or the engine cannot drop unfinished groups.
    """

    def __init__(
        self,
        engine: RolloutEngine,
        reward: Reward | None,
        timing: Timing,
        dynamic_sampling: DynamicSampling | None = None,
        oversampling: float = 0.0,
    ) -> None:
        check_number("oversampling", oversampling, minimum=0, why="it is a share of the iteration, 0 is off")
        if oversampling and not engine.can_stream:
            raise ValueError(
                f"oversampling={oversampling:g} drops what is not finished first, and "
                f"{type(engine).__name__} cannot (can_stream is false): use LocalEngine or VLLMPool, or "
                "oversampling=0"
            )
        self.engine = engine
        self.reward = reward
        self.timing = timing
        self.dynamic_sampling = dynamic_sampling
        self.oversampling = oversampling

    # ------------------------------------------------------------------ groups of an iteration, samples of validation

    def collect(self, trainer: L.Trainer, wanted: int, sampling: SamplingSpec, iteration: int) -> CollectedGroups:
        """Collect an iteration's groups from the DataModule's cursor on, the same on every rank. A collective."""
        if self.needs_all_ranks(trainer):
            return self.collect_here(trainer, wanted, sampling, iteration)
        parts = run_on_all_ranks(
            lambda: self.collect_here(trainer, wanted, sampling, iteration) if self.takes_part(trainer) else None,
        )
        collected = parts[0]
        assert collected is not None  # rank 0 takes part
        return collected

    def collect_here(
        self,
        trainer: L.Trainer,
        wanted: int,
        sampling: SamplingSpec,
        iteration: int,
        *,
        after: dict[str, Any] | None = None,
        group: Any = None,
    ) -> CollectedGroups:
        """Collect an iteration's groups on this rank alone, or on all ranks as a collective (:meth:`needs_all_ranks`).

        The prompts begin at ``after``, or at the DataModule's cursor; ``group`` is the ranks' process group.
        """
        together, selection = self.needs_all_ranks(trainer), self.dynamic_sampling
        early, spare = self.scores_early(trainer), math.ceil(self.oversampling * wanted)
        collected = collect_groups(
            wanted,
            prompts_of(trainer).prompt_queue(after),
            self._stream(sampling, iteration, in_batches=together),
            score=lambda samples: self._score(trainer, samples, iteration),
            score_together=(lambda samples: self.add_model_scores(trainer, samples, iteration)) if early else None,
            keep=None if selection is None else selection.accepts,
            most=None if selection is None else selection.max_rounds * wanted + spare,
            spare=spare,
            ranks=RankShares(trainer, shared=self.engine.shared, group=group) if together else OneRank(),
        )
        if collected.accepted < wanted:
            log.warning(
                "iteration %d: dynamic_sampling accepted only %d of the %d groups that are needed, of %d that were "
                "sampled; the rest is filled with rejected groups",
                *(iteration, collected.accepted, wanted, collected.sampled),
            )
        return collected

    def sample(
        self, trainer: L.Trainer, prompts: Sequence[Prompt], sampling: SamplingSpec, iteration: int
    ) -> list[Sample]:
        """Generate and score samples of given prompts, which are the same on every rank. A collective.

        Returns ``len(prompts) * group_size`` samples, group by group, the same on every rank.
        """
        ranks = RankShares(trainer, shared=self.engine.shared)
        share = ranks.share(list(prompts))

        def generate_and_score() -> list[Group]:
            if not share:
                return []
            with self.timing.record("generate", iteration):
                groups = self._generate(share, sampling, iteration)
            self._score(trainer, flatten(groups), iteration)
            return groups

        return flatten(ranks.gather(generate_and_score))

    # ------------------------------------------------------------------ generate

    def _stream(self, sampling: SamplingSpec, iteration: int, *, in_batches: bool) -> GroupStream:
        """Groups as they finish if groups are selected; otherwise all at once, as rewards are faster in batches."""
        selects = self.dynamic_sampling is not None or self.oversampling
        stream: GroupStream
        if self.engine.can_stream and selects and not in_batches:
            stream = cast(StreamingEngine, self.engine).stream(sampling, iteration=iteration)
        else:
            stream = BatchedGroupStream(lambda prompts: self._generate(prompts, sampling, iteration))
        return TimedStream(stream, self.timing, iteration)

    def _generate(self, prompts: list[Prompt], sampling: SamplingSpec, iteration: int) -> list[Group]:
        samples = self.engine.generate(prompts, sampling, iteration=iteration)
        size = sampling.group_size
        if len(samples) != len(prompts) * size:
            raise RuntimeError(f"the engine was asked for {len(prompts)} x {size} samples and returned {len(samples)}")
        return [samples[first : first + size] for first in range(0, len(samples), size)]

    # ------------------------------------------------------------------ score

    def _score(self, trainer: L.Trainer, samples: list[Sample], iteration: int) -> None:
        """Set rewards of this rank's samples, and decode their texts if they are read."""
        with decode_together(samples, text_decoder(policy_of(trainer).tokenizer)):
            if self.reward is None:
                for sample in samples:
                    sample.reward = 0.0
                return
            with self.timing.record("score", iteration):
                score_samples(self.reward, samples)

    def add_model_scores(self, trainer: L.Trainer, samples: Sequence[Sample], iteration: int) -> None:
        """Add the module's reward model scores to the rewards, and as ``model`` to the parts, in place.

        A collective, for the main thread; samples are the same on every rank. A sample without a reward keeps none.
        Raises ValueError if the callback's reward also has a part ``model``.
        """
        if not samples:
            return
        if any("model" in sample.reward_parts for sample in samples):
            raise ValueError(
                "a part of RolloutCallback(reward=...) is called 'model', as the score of the module's reward_model "
                "is: give it another name"
            )
        with self.timing.record("score", iteration):
            scores = policy_of(trainer).reward_model_scores(Experience.from_samples(samples)).tolist()
        for sample, score in zip(samples, scores, strict=True):
            sample.reward_parts["model"] = score
            if sample.reward is not None:
                sample.reward += score

    def scores_early(self, trainer: L.Trainer) -> bool:
        """Whether selection or the curriculum needs the module's scores while groups are collected."""
        if not policy_of(trainer).scores_samples:
            return False
        return self.dynamic_sampling is not None or prompts_of(trainer).curriculum_uses_rewards

    # ------------------------------------------------------------------ which ranks

    def needs_all_ranks(self, trainer: L.Trainer) -> bool:
        """Whether several ranks generate or score together, so that :meth:`collect_here` is a collective."""
        return trainer.world_size > 1 and (not self.engine.shared or self.scores_early(trainer))

    def takes_part(self, trainer: L.Trainer) -> bool:
        """Whether this rank calls :meth:`collect_here`."""
        return trainer.global_rank == 0 or self.needs_all_ranks(trainer)

    # ------------------------------------------------------------------ checks and metrics

    def check(self, trainer: L.Trainer, *, in_thread: bool = False) -> None:
        """Raise ValueError if the configuration cannot work.

        That is: dynamic sampling by an unknown reward part, a module that would score in a thread beside training
        (``in_thread``), or oversampling with an engine in every rank.
        """
        parts = part_names(self.reward)
        if self.dynamic_sampling is not None and parts is not None:
            self.dynamic_sampling.check_parts([*parts, *(["model"] if policy_of(trainer).scores_samples else [])])
        if in_thread and self.scores_early(trainer):
            raise ValueError(
                "dynamic_sampling, and an order of prompts that goes by rewards, need the scores of the module's "
                "reward_model while samples are made. With max_staleness that is in a thread beside training, which "
                "must not use the module: give the callback a ModelReward in place of reward_model, or max_staleness=0"
            )
        if self.oversampling and self.scores_early(trainer) and trainer.world_size > 1:
            raise ValueError(
                f"oversampling={self.oversampling:g} takes the groups that are finished first on rank 0, and all "
                f"{trainer.world_size} ranks together score them with the module's reward_model: give the callback a "
                "ModelReward in place of reward_model, or oversampling=0"
            )
        if self.oversampling and self.needs_all_ranks(trainer):
            raise ValueError(
                f"oversampling={self.oversampling:g} takes the groups that are finished first, and with an engine in "
                f"each of {trainer.world_size} ranks no rank sees which those are: use a VLLMPool, which all ranks "
                "share, or oversampling=0"
            )

    def metrics(self, collected: CollectedGroups) -> dict[str, float]:
        """Fractions of groups that were accepted and dropped, if groups are selected."""
        metrics = {}
        if self.dynamic_sampling is not None:
            metrics["rollout/accepted_fraction"] = collected.accepted / max(collected.sampled, 1)
            metrics["rollout/reward_before_selection"] = collected.reward
        if self.oversampling:
            metrics["rollout/dropped_fraction"] = collected.requeued / (collected.requeued + collected.sampled)
        return metrics


class RankShares:
    """Each rank generates for every n-th prompt with its own engine; for a shared engine, rank 0 generates for all."""

    def __init__(self, trainer: L.Trainer, *, shared: bool, group: Any = None) -> None:
        self._trainer = trainer
        self._shared = shared
        self._group = group

    def share(self, prompts: list[Prompt]) -> list[Prompt]:
        """The prompts that this rank generates for."""
        if self._shared:
            return prompts if self._trainer.global_rank == 0 else []
        return prompts[self._trainer.global_rank :: self._trainer.world_size]

    def gather(self, step: Callable[[], list[Group]]) -> list[Group]:
        """Run a step on every rank, and return the groups of all ranks in the order of their prompts. A collective."""
        parts = run_on_all_ranks(step, group=self._group)
        return [group for turn in zip_longest(*parts) for group in turn if group is not None]


class TimedStream:
    """A stream that records how long callers wait for it."""

    def __init__(self, stream: GroupStream, timing: Timing, iteration: int) -> None:
        self._timing = timing
        self._iteration = iteration
        self._stream = stream
        self.submit = stream.submit
        self.close = stream.close

    def collect(self, most: int, *, wait: float | None = None) -> list[Group]:
        """Wait until a group is finished."""
        with self._timing.record("generate", self._iteration):
            return self._stream.collect(most, wait=wait)
