"""``Generation``: prompts shared out to the ranks, sampled, scored, and put back in order; now or ahead of time."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rlhfkit.callbacks.phases import Phases
from rlhfkit.callbacks.ranks import everywhere
from rlhfkit.data.experience import Prompt, Sample
from rlhfkit.rewards.base import Reward, score_samples
from rlhfkit.rollout.background import BackgroundRollouts
from rlhfkit.rollout.engine import RolloutEngine, SamplingSpec


class Generation:
    """Samples of prompts from one engine, the same on every rank.

    Args:
        engine: What generates.
        reward: What scores.
        phases: Told how long it takes.
    """

    def __init__(self, engine: RolloutEngine, reward: Reward, phases: Phases) -> None:
        self.engine = engine
        self.reward = reward
        self.phases = phases

    def sample(self, trainer: Any, prompts: Sequence[Prompt], sampling: SamplingSpec, iteration: int) -> list[Sample]:
        """Scored samples of the prompts. A collective.

        Args:
            trainer: Tells the ranks apart.
            prompts: The same on every rank.
            sampling: How to sample.
            iteration: Goes into each sample's seed.

        Returns:
            ``len(prompts) * group_size`` samples, group by group.
        """
        share = self.share(trainer, prompts)
        parts = everywhere(trainer, lambda: self.sample_share(trainer, share, sampling, iteration))
        return self.in_order(prompts, parts, sampling.group_size)

    def share(self, trainer: Any, prompts: Sequence[Prompt]) -> list[Prompt]:
        """What this rank has to sample."""
        if self.engine.shared:
            return list(prompts) if trainer.global_rank == 0 else []
        return list(prompts)[trainer.global_rank :: trainer.world_size]

    def sample_share(self, trainer: Any, prompts: list[Prompt], sampling: SamplingSpec, iteration: int) -> list[Sample]:
        """Sample and score this rank's prompts. No collective: it may run in a thread of its own."""
        if not prompts:
            return []
        with self.phases.record("generate", iteration):
            samples = self.engine.generate(prompts, sampling, iteration=iteration)
        if len(samples) != len(prompts) * sampling.group_size:
            raise RuntimeError(
                f"the engine was asked for {len(prompts)} x {sampling.group_size} samples and returned {len(samples)}"
            )
        tokenizer = trainer.lightning_module.tokenizer
        texts = tokenizer.batch_decode([sample.token_ids for sample in samples], skip_special_tokens=True)
        for sample, text in zip(samples, texts, strict=True):
            sample.text = text
        with self.phases.record("score", iteration):
            score_samples(self.reward, samples)
        return samples

    def in_order(self, prompts: Sequence[Prompt], parts: list[list[Sample]], group_size: int) -> list[Sample]:
        """What the ranks have sampled, in the order of the prompts."""
        if self.engine.shared:
            return parts[0]
        groups = [part[first : first + group_size] for part in parts for first in range(0, len(part), group_size)]
        position = {prompt.index: place for place, prompt in enumerate(prompts)}
        groups.sort(key=lambda group: position[group[0].prompt.index])
        return [sample for group in groups for sample in group]


class GenerationAhead:
    """Asynchronous rollouts: while the trainer learns from iteration i, a thread samples up to i + ``max_staleness``.

    Iteration j is queued when iteration ``j - max_staleness`` begins to be trained on, after its weights were
    published, so no token is older than that. New weights wait for the iteration that is being sampled, and the ones
    behind it wait for the weights. Engines and ranks are as in the synchronous case; nothing in the thread is a
    collective.

    Args:
        generation: Samples and scores.
        max_staleness: Iterations, at least 1.
        timeout: Seconds that one iteration may take.
    """

    def __init__(self, generation: Generation, max_staleness: int, timeout: float) -> None:
        self.generation = generation
        self.max_staleness = max_staleness
        self.timeout = timeout
        self._jobs: BackgroundRollouts[list[Sample]] = BackgroundRollouts()
        self._prompts: dict[int, list[Prompt]] = {}

    def sample(self, trainer: Any, count: int, sampling: SamplingSpec, iteration: int) -> list[Sample]:
        """Queue what may be sampled from the current weights, and wait for this iteration's samples. A collective.

        Args:
            trainer: With a DataModule whose cursor is at this iteration's prompts.
            count: Prompts per iteration.
            sampling: How to sample.
            iteration: The one to be trained on now.
        """
        left = trainer.max_epochs - trainer.current_epoch if trainer.max_epochs not in (None, -1) else float("inf")
        for ahead in range(self.max_staleness + 1):
            if ahead < left and iteration + ahead not in self._prompts:
                self._submit(trainer, trainer.datamodule.next_prompts(count, ahead=ahead), sampling, iteration + ahead)
        prompts = self._prompts.pop(iteration)
        with self.generation.phases.record("wait", iteration):
            parts = everywhere(trainer, lambda: self._jobs.result(iteration, self.timeout))
        return self.generation.in_order(prompts, parts, sampling.group_size)

    def _submit(self, trainer: Any, prompts: list[Prompt], sampling: SamplingSpec, iteration: int) -> None:
        share = self.generation.share(trainer, prompts)
        self._prompts[iteration] = prompts
        self._jobs.submit(iteration, lambda: self.generation.sample_share(trainer, share, sampling, iteration))

    @contextmanager
    def held(self) -> Iterator[None]:
        """Inside, the engine is the caller's: what is being sampled has ended, what is queued waits."""
        with self._jobs.held(self.timeout):
            yield

    def close(self) -> None:
        """Forget what is queued; its prompts come again in the next run, as the cursor has not passed them."""
        self._jobs.close()
