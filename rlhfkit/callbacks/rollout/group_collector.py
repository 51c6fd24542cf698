"""``GroupCollector``: the groups of an iteration, by whichever ranks have an engine, the same on every rank."""

import logging
import math
from typing import Any

from rlhfkit.callbacks.rollout.generation import Generation, ScoredStream, grouped
from rlhfkit.callbacks.rollout.model_scores import add_model_scores, scores_samples
from rlhfkit.data.types import Prompt, Sample
from rlhfkit.distributed import run_on_all_ranks
from rlhfkit.rewards.base import part_names
from rlhfkit.rollout.collector import CollectedGroups, collect_groups
from rlhfkit.rollout.dynamic_sampling import DynamicSampling
from rlhfkit.rollout.engine import SamplingSpec
from rlhfkit.rollout.streams import BatchedGroupStream, GroupStream, StreamingEngine
from rlhfkit.validation import check_number

log = logging.getLogger(__name__)


class GroupCollector:
    """Draws prompts, samples, scores and selects.

    Args:
        generation: Samples and scores.
        dynamic_sampling: Which groups are worth training on; ``None``: all.
        oversampling: Further groups that are under way, as a share of those of the iteration.

    Raises:
        ValueError: If ``oversampling`` is negative, or the engine cannot drop what is not needed.
    """

    def __init__(self, generation: Generation, dynamic_sampling: DynamicSampling | None, oversampling: float) -> None:
        check_number("oversampling", oversampling, minimum=0, why="it is a share of the iteration, 0 is off")
        if oversampling and not generation.engine.can_stream:
            raise ValueError(
                f"oversampling={oversampling:g} drops what is not finished first, and "
                f"{type(generation.engine).__name__} cannot (can_stream is false): use LocalEngine or VLLMPool, or "
                "oversampling=0"
            )
        self.generation = generation
        self.dynamic_sampling = dynamic_sampling
        self.oversampling = oversampling

    def check(self, trainer: Any, *, ahead: bool = False) -> None:
        """Raise if this is not possible with this reward, or with so many ranks.

        Args:
            trainer: With the module and the DataModule.
            ahead: Whether it happens in a thread beside training.

        Raises:
            ValueError: If dynamic sampling goes by a part that the reward does not have; if the module would have to
                score in a thread; with oversampling, if every rank has an engine of its own.
        """
        parts = part_names(self.generation.reward)
        if self.dynamic_sampling is not None and parts is not None:
            self.dynamic_sampling.check_parts([*parts, *(["model"] if scores_samples(trainer) else [])])
        if ahead and self.scores_early(trainer):
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
        if self.oversampling and self.per_rank(trainer):
            raise ValueError(
                f"oversampling={self.oversampling:g} takes the groups that are finished first, and with an engine in "
                f"each of {trainer.world_size} ranks nobody sees which those are: use a VLLMPool, which all ranks "
                "share, or oversampling=0"
            )

    def scores_early(self, trainer: Any) -> bool:
        """Whether the module's scores are needed to choose groups, or for what the DataModule remembers of prompts."""
        order = getattr(trainer.datamodule, "order", None)
        remembers = order is not None and getattr(order, "uses_rewards", True)
        return (remembers or self.dynamic_sampling is not None) and scores_samples(trainer)

    def per_rank(self, trainer: Any) -> bool:
        """Whether several ranks generate or score together, so that :meth:`fill` is a collective."""
        return trainer.world_size > 1 and (not self.generation.engine.shared or self.scores_early(trainer))

    def takes_part(self, trainer: Any) -> bool:
        """Whether this rank calls :meth:`fill`."""
        return trainer.global_rank == 0 or self.per_rank(trainer)

    def sample(self, trainer: Any, wanted: int, sampling: SamplingSpec, iteration: int) -> CollectedGroups:
        """Fill an iteration from the DataModule's cursor on. A collective.

        Args:
            trainer: With a DataModule that has ``draws()``.
            wanted: Groups.
            sampling: How to sample.
            iteration: Goes into each sample's seed.
        """
        if self.per_rank(trainer):
            return self.fill(trainer, wanted, sampling, iteration)
        parts = run_on_all_ranks(
            lambda: self.fill(trainer, wanted, sampling, iteration) if self.takes_part(trainer) else None,
        )
        filled = parts[0]
        assert filled is not None  # rank 0 takes part
        return filled

    def fill(
        self,
        trainer: Any,
        wanted: int,
        sampling: SamplingSpec,
        iteration: int,
        *,
        after: dict[str, Any] | None = None,
        group: Any = None,
    ) -> CollectedGroups:
        """Fill an iteration on this rank, or, where each has an engine, on all ranks together.

        Args:
            trainer: With a DataModule that has ``draws()``.
            wanted: Groups.
            sampling: How to sample.
            iteration: Goes into each sample's seed.
            after: Where the draws begin; ``None``: at the DataModule's cursor.
            group: The ranks' process group; ``None``: the default one.
        """
        selection, spare = self.dynamic_sampling, math.ceil(self.oversampling * wanted)
        filled = collect_groups(
            wanted,
            trainer.datamodule.draws(after),
            self._stream(trainer, sampling, iteration, group),
            keep=None if selection is None else selection.accepts,
            most=None if selection is None else selection.max_rounds * wanted + spare,
            spare=spare,
        )
        if filled.accepted < wanted:
            log.warning(
                "iteration %d: only %d of %d groups are worth training on, of %d that were sampled; the rest is filled "
                "with groups that dynamic_sampling turned down",
                *(iteration, filled.accepted, wanted, filled.sampled),
            )
        return filled

    def _stream(self, trainer: Any, sampling: SamplingSpec, iteration: int, group: Any) -> GroupStream:
        generation, size = self.generation, sampling.group_size
        engine: Any = generation.engine
        early = self.scores_early(trainer)

        def score(samples: list[Sample]) -> None:
            if early:
                with generation.timing.record("score", iteration):
                    add_model_scores(trainer, samples)

        def sample(prompts: list[Prompt]) -> list[list[Sample]]:
            if self.per_rank(trainer):
                samples = generation.sample(trainer, prompts, sampling, iteration, group=group)
            else:
                samples = generation.sample_here(trainer, prompts, sampling, iteration)
            score(samples)
            return grouped(samples, size)

        selects = self.dynamic_sampling is not None or self.oversampling
        if engine.can_stream and selects and not self.per_rank(trainer):
            streaming: StreamingEngine = engine
            stream = streaming.stream(sampling, iteration=iteration)
            return ScoredStream(stream, generation, trainer, iteration, score)
        # All at once, and scored all at once: rewards that work in batches are faster so.
        return BatchedGroupStream(sample)

    def metrics(self, filled: CollectedGroups) -> dict[str, float]:
        """What selecting has done, as far as there was any."""
        metrics = {}
        if self.dynamic_sampling is not None:
            metrics["rollout/accepted_fraction"] = filled.accepted / max(filled.sampled, 1)
            metrics["rollout/reward_before_selection"] = filled.reward
        if self.oversampling:
            metrics["rollout/dropped_fraction"] = filled.requeue / (filled.requeue + filled.sampled)
        return metrics
