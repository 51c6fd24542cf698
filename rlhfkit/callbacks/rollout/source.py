"""``Source``: where the groups of an iteration come from; ``GroupCollector`` is the innermost one.

It draws prompts, generates, scores and selects; each rank has its share.
:class:`~rlhfkit.rollout.collector.GroupSelection` has the order of these, this file the steps. What a run uses besides
is around it: the parts that a ``RolloutCallback`` was given, from the inside to the outside.
"""

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Protocol, cast

import lightning as L

from rlhfkit.callbacks.rollout.timing import Timing
from rlhfkit.data.types import Prompt, Sample, decode_texts
from rlhfkit.protocols import HasModelLimits, PromptQueue
from rlhfkit.rank_store import RankLog, rank_store
from rlhfkit.rewards.base import Reward, part_names, score_samples, tell_progress
from rlhfkit.rollout.collector import (
    BatchedGroupStream,
    CollectedGroups,
    Group,
    GroupSelection,
    GroupStream,
    StreamingEngine,
    all_groups,
    flatten,
)
from rlhfkit.rollout.engine import RolloutEngine, SamplingSpec
from rlhfkit.rollout.partial_rollouts import Dropped
from rlhfkit.trainer_parts import policy_of, prompts_of

if TYPE_CHECKING:
    from rlhfkit.rollout.groups import GroupRunner
    from rlhfkit.rollout.prompt_stream import PromptStream


@dataclass(frozen=True)
class Ask:
    """What a source is asked for, the same on every rank."""

    trainer: L.Trainer
    """Its module writes samples as text, its DataModule has the prompts."""
    iteration: int
    """Number of the iteration, part of each sample's seed."""
    wanted: int
    """Groups of all ranks."""
    sampling: SamplingSpec
    """How to sample; a source may ask the next one for another temperature."""


class Source(Protocol):
    """Gives the groups of iterations, in order."""

    def collect(self, ask: Ask) -> CollectedGroups:
        """Return the scored groups of an iteration, of this rank its share. Called on every rank."""
        ...


class GroupCollector:
    """Generates with one engine, scores, and selects.

    ``wanted`` is the number of groups of an iteration, of all ranks; ``iteration`` is part of each sample's seed.

    Args:
        engine: What generates.
        reward: Scores samples; ``None``: every sample gets 0.
        timing: Records how long generating and scoring take.
        timeout: Seconds that ranks wait for each other's samples.
        runner: Makes the groups by a function, with the engine; ``None``: a group is what the engine returns.
    """

    def __init__(
        self,
        engine: RolloutEngine,
        reward: Reward | None,
        timing: Timing,
        timeout: float = 7200.0,
        runner: "GroupRunner | None" = None,
    ) -> None:
        self.engine = engine
        self.runner = runner
        self.source: RolloutEngine | GroupRunner = runner or engine
        """What gives groups in training."""
        self.policy_source: RolloutEngine | GroupRunner = engine
        """What gives groups in validation, whose scores are the policy's own."""
        if runner is not None and runner.function.in_validation:
            self.policy_source = runner
        self.reward = reward
        self.timing = timing
        self.timeout = timeout
        self.keep: Callable[[Sequence[Sample]], bool] | None = None
        """Whether to train on a group; ``None``: on every group."""
        self.max_rounds: int | None = None
        """Prompts that are sampled at most, as a multiple of ``wanted``; ``None``: no limit."""
        self.spare_share = 0.0
        """Further groups in flight, as a share of ``wanted``."""
        self.partials: dict[int, Dropped] | None = None
        """What iterations continue of dropped groups, by number; ``None``: it is lost."""
        self.forget_module()

    def forget_module(self) -> None:
        """Forget what the parts of another module have set."""
        self.more_parts: Sequence[str] = ()
        """Parts of rewards that others than the callback's reward add."""
        self.on_finished: Callable[[Ask, Sequence[Group]], None] | None = None
        """Called with groups that are finished, before they are scored; in any thread."""
        self.check_scored: Callable[[Sequence[Sample]], None] | None = None
        """Called with samples that were scored; may raise."""
        self.score_together: Callable[[L.Trainer, Sequence[Sample], int], None] | None = None
        """Adds rewards that selection or the curriculum needs while groups are collected; a collective."""
        self.complete: Callable[[Ask, CollectedGroups, RankLog], None] | None = None
        """Changes groups that were collected, in place, before ranks part."""

    # ------------------------------------------------------------------ groups of an iteration, samples of validation

    def open_log(self, keep: int = 2) -> RankLog:
        """Return a log for :meth:`collect` of one iteration. The first call is a collective.

        ``keep``: see :meth:`~rlhfkit.rank_store.RankStore.log`.
        """
        return rank_store().log("rollouts", keep=keep)

    def collect(
        self,
        ask: Ask,
        *,
        rank_log: RankLog | None = None,
        queue: PromptQueue | None = None,
        prompts: "PromptStream | None" = None,
    ) -> CollectedGroups:
        """Collect this rank's share of an iteration's groups. Called on every rank; no collective spans it.

        Args:
            ask: What is asked for.
            rank_log: From :meth:`open_log`; ``None``: opened here.
            queue: Its prompts; ``None``: from the DataModule's cursor on.
            prompts: Has groups of later iterations in flight meanwhile; ``None``: none are.
        """
        rank_log = rank_log or self.open_log()

        return rank_log.run(
            lambda: self._collect(ask, rank_log, queue or prompts_of(ask.trainer).prompt_queue(), prompts),
            timeout=self.timeout,
            waiting_for=f"the samples of iteration {ask.iteration}",
        )

    def _collect(
        self, ask: Ask, rank_log: RankLog, queue: PromptQueue, prompts: "PromptStream | None"
    ) -> CollectedGroups:
        trainer, wanted, sampling, iteration = ask.trainer, ask.wanted, ask.sampling, ask.iteration
        early, spare = self.score_together, math.ceil(self.spare_share * wanted)
        # An engine in every rank generates in batches, and a reward model scores on all ranks at a time.
        rounds = not self.takes_first_finished or (
            trainer.world_size > 1 and (not self.engine.shared or early is not None)
        )
        stream: GroupStream
        if prompts is not None:
            prompts.begin(iteration, queue, partial(self._stream, sampling, iteration))
            stream = prompts
        elif rounds and not self._streams(self.source):
            stream = BatchedGroupStream(lambda drawn: self.generate(self.source, drawn, sampling, iteration, rank_log))
        else:
            stream = self._stream(sampling, iteration)
        finished = None if self.on_finished is None else partial(self.on_finished, ask)
        selection = GroupSelection(
            wanted,
            queue if prompts is None else prompts,
            stream,
            waiting=lambda: self.timing.record("generate", iteration),
            on_finished=finished,
            score=lambda samples: self.score(trainer, samples, iteration, rank_log),
            score_together=None if early is None else lambda samples: early(trainer, samples, iteration),
            keep=self.keep,
            most=None if self.max_rounds is None else self.max_rounds * wanted + spare,
            spare=spare,
            rounds=rounds,
            begun=None if self.partials is None else self.partials.get(iteration, Dropped()),
            log=rank_log,
            position=0 if prompts is None else prompts.position,
        )
        collected = selection.run()
        if self.partials is not None and collected.dropped is not None:
            self.partials[iteration + 1] = collected.dropped
        if self.complete is not None:
            self.complete(ask, collected, rank_log)
        return replace(collected, temperature=sampling.temperature)

    def sample(
        self, trainer: L.Trainer, prompts: Sequence[Prompt], sampling: SamplingSpec, iteration: int
    ) -> list[Sample]:
        """Generate and score samples of this rank's share of some prompts. Called on every rank.

        Args:
            trainer: Its module writes the samples as text.
            prompts: Prompts of all ranks, the same on every rank.
            sampling: How to sample.
            iteration: Part of each sample's seed.

        Returns:
            ``group_size`` samples of every n-th prompt, for n ranks, group by group.
        """
        share = list(prompts)[trainer.global_rank :: trainer.world_size]
        rank_log = rank_store().log("validation")

        def generate_and_score() -> list[Sample]:
            if not share:
                return []
            with self.timing.record("generate", iteration):
                samples = flatten(self.generate(self.policy_source, share, sampling, iteration, rank_log))
            self.score(trainer, samples, iteration, rank_log)
            return samples

        return rank_log.run(generate_and_score, timeout=self.timeout, waiting_for="the samples of validation")

    # ------------------------------------------------------------------ generate

    @property
    def takes_first_finished(self) -> bool:
        """Whether groups are scored and selected as they finish; otherwise all at once, as rewards are faster so."""
        return self.source.can_stream and (self.keep is not None or bool(self.spare_share))

    def starts_ahead(self, trainer: L.Trainer) -> bool:
        """Whether groups of later iterations may be in flight beside those of one: what these draw does not depend on
        rewards, nor on what is finished first.
        """
        return (
            self.source.continuous_batching and not self.spare_share and not prompts_of(trainer).curriculum_uses_rewards
        )

    def _stream(self, sampling: SamplingSpec, iteration: int) -> GroupStream:
        return cast(StreamingEngine, self.source).stream(sampling, iteration=iteration)

    def _streams(self, source: "RolloutEngine | GroupRunner") -> bool:
        """Whether whole batches are taken from a stream too, which can stop when another rank fails."""
        return source.continuous_batching or (source is self.runner and not source.recorded)

    def generate(
        self,
        source: "RolloutEngine | GroupRunner",
        prompts: list[Prompt],
        sampling: SamplingSpec,
        iteration: int,
        rank_log: RankLog,
    ) -> list[Group]:
        """Generate groups, unless another rank fails meanwhile."""
        if self._streams(source):
            stream = cast(StreamingEngine, source).stream(sampling, iteration=iteration)
            return all_groups(stream, prompts, check=rank_log.check)
        samples = rank_log.call(lambda: source.generate(prompts, sampling, iteration=iteration))
        size = sampling.group_size
        if len(samples) != len(prompts) * size:
            raise RuntimeError(f"the engine was asked for {len(prompts)} x {size} samples and returned {len(samples)}")
        return [samples[first : first + size] for first in range(0, len(samples), size)]

    # ------------------------------------------------------------------ score

    def score(self, trainer: L.Trainer, samples: list[Sample], iteration: int, rank_log: RankLog) -> None:
        """Set texts and rewards of this rank's samples."""
        check_samples(samples, policy_of(trainer), self.engine)
        decode = partial(policy_of(trainer).tokenizer.batch_decode, skip_special_tokens=True)
        if self.runner is not None:
            samples = self.runner.unscored(samples)
        with nullcontext() if self.reward is None else self.timing.record("score", iteration):
            rank_log.call(lambda: decode_texts(samples, decode))
            rank_log.call(lambda: self.ask_reward(trainer, samples))
        if self.check_scored is not None:
            self.check_scored(samples)

    def ask_reward(self, trainer: L.Trainer, samples: list[Sample]) -> None:
        """Set rewards of samples by the callback's reward; without one they are 0."""
        if self.reward is None:
            for sample in samples:
                sample.reward = 0.0
            return
        tell_progress(self.reward, step=trainer.global_step, epoch=trainer.current_epoch)
        score_samples(self.reward, samples)

    def reward_parts(self) -> list[str] | None:
        """Names of the parts of samples' rewards; ``None``: not known before they are scored."""
        parts = part_names(self.reward)
        return None if parts is None else [*parts, *self.more_parts]


def check_samples(samples: Sequence[Sample], module: object, engine: RolloutEngine) -> None:
    """Raise RuntimeError if an engine has returned a token that the module's model does not know."""
    known = module.vocabulary_size if isinstance(module, HasModelLimits) else None
    for sample in samples if known is not None else ():
        tokens = sample.token_ids
        wrong = tokens[(tokens < 0) | (tokens >= known)]
        if len(wrong):
            raise RuntimeError(
                f"{type(engine).__name__} returned the token {int(wrong[0])} for prompt {sample.prompt.index}, and the "
                f"model that is trained knows the tokens 0 to {(known or 0) - 1}: give the engine the same model, a "
                "wrapper or environment the same tokenizer (module.tokenizer)"
            )
