"""The records of reinforcement learning: ``Prompt`` -> ``Sample`` -> ``Experience``.

Tokenised input, one completion of it from the engine (lists, no padding), and a batch of samples as tensors, to which
modules add old log-probs and advantages. Per-token fields are on the **next-token axis** of length T - 1, where entry
``t`` belongs to token ``t + 1``; it includes prompt tokens, masks select.
Shapes: B sequences, T tokens (longest sequence of the batch; the rest is padded on the right).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Self

import torch
from torch import Tensor

from rlhfkit.data.batch import PaddedBatch, row_field, rows_field, step_field
from rlhfkit.data.iteration import IterationSummary

FinishReason = Literal["stop", "length", "abort"]


@dataclass(slots=True)
class Prompt:
    """A tokenised prompt.

    Example::

        Prompt(index=7, token_ids=[15, 3, 22], text="2+3=", answer="5")
    """

    index: int
    """Row in the data set; unique, and part of the seed of each of its samples."""
    token_ids: list[int]
    """Input of the engine. Text is never tokenised a second time."""
    text: str = ""
    """The prompt as text, for rewards and logs."""
    answer: Any = None
    """The reference answer, if the data has one."""
    metadata: dict[str, Any] = field(default_factory=dict)
    """All other columns of the row, by name."""


@dataclass(slots=True)
class Sample:
    """One completion of a prompt, exactly as sampled, and its reward."""

    prompt: Prompt
    sample_index: int
    """Position in the group of the prompt, 0 .. group_size - 1."""
    token_ids: list[int]
    """Tokens after the prompt, including the end-of-sequence token when it was sampled."""
    logprobs: list[float]
    """Log-prob of each token under the policy at the sampling temperature, before truncation (top-p and the like); NaN
    where the engine gives none.
    """
    versions: list[int]
    """Policy version (optimizer updates so far) that sampled each token."""
    finish_reason: FinishReason
    action_mask: list[bool] | None = None
    """True where the policy chose the token, false where an environment wrote it; ``None``: the policy chose all."""
    text: str = ""
    """The completion as text, without special tokens."""
    reward: float | None = None
    """Total reward; ``None``: could not be scored, the sample is not trained on."""
    reward_parts: dict[str, float] = field(default_factory=dict)
    """Components of the reward by name, before weighting."""
    token_rewards: list[float] | None = None
    """The part of ``reward`` earned at each token (turns of an episode, steps of a solution); the remainder belongs to
    the last action. ``None``: all of it does.
    """
    info: dict[str, Any] = field(default_factory=dict)
    """Further facts about the sample (turns of an episode, why it ended); numbers are logged as means."""

    def __post_init__(self) -> None:
        """Check that the per-token lists have one length."""
        lengths = {"token_ids": len(self.token_ids), "logprobs": len(self.logprobs), "versions": len(self.versions)}
        if self.action_mask is not None:
            lengths["action_mask"] = len(self.action_mask)
        if self.token_rewards is not None:
            lengths["token_rewards"] = len(self.token_rewards)
        if len(set(lengths.values())) > 1:
            raise ValueError(f"the per-token lists of a Sample must have one length, got {lengths}")


@dataclass(kw_only=True)
class Experience(PaddedBatch):
    """A batch of samples as tensors. Fields that a module has not computed yet are ``None``."""

    action_mask: Tensor = step_field()
    """(B, T-1) bool, true where token t+1 was chosen by the policy and is trained on."""
    rollout_logprobs: Tensor = step_field()
    """(B, T-1) float32, the engine's before truncation, NaN where it gives none; 0 outside the action mask."""
    versions: Tensor = step_field(fill=-1)
    """(B, T-1) int64, policy version per token; -1 outside the action mask."""
    rewards: Tensor = row_field()
    """(B,) float32; NaN where the sample could not be scored (its action mask is all false)."""
    group: Tensor = row_field()
    """(B,) int64, equal for samples of one prompt."""
    sample_index: Tensor = row_field()
    """(B,) int64, position in the group."""
    truncated: Tensor = row_field()
    """(B,) bool, true when generation stopped at the length limit."""
    update: Tensor = row_field()
    """(B,) int64, the optimizer update of this iteration that trains on the row; 0 is on-policy."""

    token_rewards: Tensor | None = step_field(None)
    """(B, T-1) float32, the part of ``rewards`` that each token earned; ``None``: no sample has it. Not masked: rewards
    of tokens of an environment count too.
    """
    old_logprobs: Tensor | None = step_field(None)
    """(B, T-1) float32, the trainer's before the iteration; ``None`` in the first update: equal to the current ones."""
    ref_logprobs: Tensor | None = step_field(None)
    """(B, T-1) float32, under the reference policy."""
    teacher_logprobs: Tensor | None = step_field(None)
    """(B, T-1) float32, under the teacher of a distillation."""
    values: Tensor | None = step_field(None)
    """(B, T-1) float32, values of the critic before the iteration."""
    advantages: Tensor | None = step_field(None)
    """(B, T-1) float32."""
    returns: Tensor | None = step_field(None)
    """(B, T-1) float32, targets of the critic."""

    reward_parts: dict[str, Tensor] = rows_field()
    """(B,) float32 each."""
    rows: Tensor | None = row_field(None)
    """(B,) int64, which row of the iteration each one is; ``None``: the rows are the iteration, in order."""
    iteration: IterationSummary | None = None
    """What every rank knows of all rows of the iteration; ``None``: these rows are all, or a micro-batch of them."""
    temperature: float = 1.0
    """Sampling temperature; the trainer divides its logits by it so that its log-probs are those of the sampler."""

    @property
    def prompt_lengths(self) -> Tensor:
        """(B,) int64, tokens before the first that is trained on; 0 in a row without any."""
        return torch.where(self.action_mask.any(-1), self.action_mask.long().argmax(-1) + 1, 0)

    @property
    def summary(self) -> IterationSummary:
        """What is known of all rows of the iteration, on all ranks; computed from these rows if they are all."""
        return self.summarize() if self.iteration is None else self.iteration

    def summarize(self) -> IterationSummary:
        """Summarize these rows."""
        newest = torch.where(self.action_mask, self.versions, -1).amax(-1)
        oldest = torch.where(self.action_mask, self.versions, torch.iinfo(self.versions.dtype).max).amin(-1)
        return IterationSummary(
            rewards=self.rewards,
            group=self.group,
            sample_index=self.sample_index,
            truncated=self.truncated,
            lengths=self.lengths,
            prompt_lengths=self.prompt_lengths,
            trained_tokens=self.action_mask.sum(-1),
            oldest_version=torch.where(self.action_mask.any(-1), oldest, -1),
            newest_version=newest,
            update=self.update,
            reward_parts=dict(self.reward_parts),
        )

    @property
    def own_rows(self) -> Tensor:
        """(B,) int64, which row of the iteration each one is."""
        return torch.arange(len(self)) if self.rows is None else self.rows

    @classmethod
    def from_samples(cls, samples: Sequence[Sample], *, temperature: float = 1.0) -> Self:
        """Stack samples, padding on the right.

        Args:
            samples: At least one. A sample without a reward keeps its tokens but none is trained on.
            temperature: Sampling temperature of the samples.

        Raises:
            ValueError: If there is no sample, or a prompt without tokens.
        """
        if not samples:
            raise ValueError("an Experience needs at least one sample, got none")
        for sample in samples:
            if not sample.prompt.token_ids:
                raise ValueError(f"prompt {sample.prompt.index} has no tokens; every prompt needs at least one")
        batch = len(samples)
        length = max(len(sample.prompt.token_ids) + len(sample.token_ids) for sample in samples)
        input_ids = torch.zeros(batch, length, dtype=torch.int64)
        attention_mask = torch.zeros(batch, length, dtype=torch.bool)
        action_mask = torch.zeros(batch, length - 1, dtype=torch.bool)
        logprobs = torch.zeros(batch, length - 1, dtype=torch.float32)
        versions = torch.full((batch, length - 1), -1, dtype=torch.int64)
        distributed = any(sample.token_rewards is not None for sample in samples)
        token_rewards = torch.zeros(batch, length - 1) if distributed else None
        for row, sample in enumerate(samples):
            tokens = sample.prompt.token_ids + sample.token_ids
            input_ids[row, : len(tokens)] = torch.tensor(tokens)
            attention_mask[row, : len(tokens)] = True
            steps = slice(len(sample.prompt.token_ids) - 1, len(tokens) - 1)
            chosen = torch.ones(len(sample.token_ids), dtype=torch.bool)
            if sample.action_mask is not None:
                chosen = torch.tensor(sample.action_mask, dtype=torch.bool)
            logprobs[row, steps] = torch.where(chosen, torch.tensor(sample.logprobs, dtype=torch.float32), 0.0)
            versions[row, steps] = torch.where(chosen, torch.tensor(sample.versions, dtype=torch.int64), -1)
            action_mask[row, steps] = chosen if sample.reward is not None else False
            if token_rewards is not None and sample.token_rewards is not None:
                token_rewards[row, steps] = torch.tensor(sample.token_rewards, dtype=torch.float32)
        names = sorted({name for sample in samples for name in sample.reward_parts})
        rewards = [math.nan if sample.reward is None else float(sample.reward) for sample in samples]
        parts = {name: [sample.reward_parts.get(name, math.nan) for sample in samples] for name in names}
        return cls(
            input_ids=input_ids,
            attention_mask=attention_mask,
            action_mask=action_mask,
            rollout_logprobs=logprobs,
            versions=versions,
            rewards=torch.tensor(rewards, dtype=torch.float32),
            group=torch.tensor([sample.prompt.index for sample in samples]),
            sample_index=torch.tensor([sample.sample_index for sample in samples]),
            truncated=torch.tensor([sample.finish_reason == "length" for sample in samples]),
            update=torch.zeros(batch, dtype=torch.int64),
            reward_parts={name: torch.tensor(column, dtype=torch.float32) for name, column in parts.items()},
            token_rewards=token_rewards,
            temperature=temperature,
        )
