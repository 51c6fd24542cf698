"""The records that travel through reinforcement learning: ``Prompt`` -> ``Sample`` -> ``Experience``.

A :class:`Prompt` is what the policy is asked, a :class:`Sample` one answer to it as the engine gave it (lists, no
padding), and an :class:`Experience` a batch of samples as tensors, which modules fill in (old log-probs, advantages) and
train on.

The one axis convention: per-token fields live on the **next-token axis** of length T - 1, where entry ``t`` belongs to
token ``t + 1``, the token that is predicted from position ``t``. Prompt tokens are never dropped from it; masks select.

Shapes: B sequences, T tokens (longest sequence of the batch; the rest is padded on the right).
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Self

import torch
from torch import Tensor
from torch.nn.functional import pad

FinishReason = Literal["stop", "length", "abort"]


@dataclass(slots=True)
class Prompt:
    """One question, tokenised.

    Example::

        Prompt(index=7, token_ids=[15, 3, 22], text="2+3=", answer="5")
    """

    index: int
    """Row in the data set; unique, and part of the seed of each of its samples."""
    token_ids: list[int]
    """What the engine is given. Text is never tokenised a second time."""
    text: str = ""
    """The prompt as text, for rewards and for people."""
    answer: Any = None
    """The reference answer, if the data has one."""
    metadata: dict[str, Any] = field(default_factory=dict)
    """Every other column of the row, by name."""


@dataclass(slots=True)
class Sample:
    """One completion of a prompt, exactly as sampled, and what it was worth."""

    prompt: Prompt
    sample_index: int
    """Position in the prompt's group, 0 .. group_size - 1."""
    token_ids: list[int]
    """Tokens after the prompt, the end-of-sequence token included when it was sampled."""
    logprobs: list[float]
    """Log-probability of each token under the distribution it was sampled from (temperature and truncation applied)."""
    versions: list[int]
    """Policy version (optimizer updates so far) that made each token."""
    finish_reason: FinishReason
    action_mask: list[bool] | None = None
    """True where the policy chose the token, false where an environment wrote it; ``None``: the policy chose all."""
    text: str = ""
    """The completion as text, special tokens left out."""
    reward: float | None = None
    """Total reward; ``None``: could not be scored, the sample is not trained on."""
    reward_parts: dict[str, float] = field(default_factory=dict)
    """The parts the reward is made of, by name, before weighting."""

    def __post_init__(self) -> None:
        """Reject a sample whose per-token lists disagree."""
        lengths = {"token_ids": len(self.token_ids), "logprobs": len(self.logprobs), "versions": len(self.versions)}
        if self.action_mask is not None:
            lengths["action_mask"] = len(self.action_mask)
        if len(set(lengths.values())) > 1:
            raise ValueError(f"the per-token lists of a Sample must have one length, got {lengths}")


def _token(default: Any = dataclasses.MISSING) -> Any:
    return field(default=default, metadata={"axis": "token"})


def _step(default: Any = dataclasses.MISSING) -> Any:
    return field(default=default, metadata={"axis": "step"})


def _row(default: Any = dataclasses.MISSING) -> Any:
    return field(default=default, metadata={"axis": "row"})


@dataclass(kw_only=True)
class Experience:
    """A batch of samples as tensors. Fields that a module has not computed yet are ``None``."""

    input_ids: Tensor = _token()
    """(B, T) int64, prompt and completion, padded with 0 on the right."""
    attention_mask: Tensor = _token()
    """(B, T) bool, true on real tokens."""
    action_mask: Tensor = _step()
    """(B, T-1) bool, true where token t+1 was chosen by the policy and is to be trained on."""
    rollout_logprobs: Tensor = _step()
    """(B, T-1) float32, from the engine; 0 outside the action mask."""
    versions: Tensor = _step()
    """(B, T-1) int64, policy version per token; -1 outside the action mask."""
    rewards: Tensor = _row()
    """(B,) float32; NaN where the sample could not be scored (its action mask is all false)."""
    group: Tensor = _row()
    """(B,) int64, equal for samples of one prompt."""
    sample_index: Tensor = _row()
    """(B,) int64, position in the group."""
    truncated: Tensor = _row()
    """(B,) bool, true when generation stopped at the length limit."""
    update: Tensor = _row()
    """(B,) int64, the optimizer update of this iteration that trains on the row; 0 is on-policy."""

    old_logprobs: Tensor | None = _step(None)
    """(B, T-1) float32, the trainer's before the iteration; ``None`` in the first update: equal to the current ones."""
    ref_logprobs: Tensor | None = _step(None)
    """(B, T-1) float32, under the reference policy."""
    values: Tensor | None = _step(None)
    """(B, T-1) float32, critic's estimate before the iteration."""
    advantages: Tensor | None = _step(None)
    """(B, T-1) float32."""
    returns: Tensor | None = _step(None)
    """(B, T-1) float32, the critic's targets."""

    reward_parts: dict[str, Tensor] = field(default_factory=dict, metadata={"axis": "rows"})
    """(B,) float32 each."""
    temperature: float = 1.0
    """Sampling temperature; the trainer divides its logits by it so that log-probs are those of the sampler."""
    step_tokens: float | None = None
    """Selected tokens of the whole optimizer step, all micro-batches and ranks."""
    step_sequences: float | None = None
    """Sequences with a selected token of the whole optimizer step, all micro-batches and ranks."""
    step_micro_batches: int = 1
    """Micro-batches (times ranks) whose losses are averaged in one optimizer step."""

    def __len__(self) -> int:
        """Number of sequences B."""
        return self.input_ids.shape[0]

    @property
    def lengths(self) -> Tensor:
        """(B,) int64, real tokens per sequence."""
        return self.attention_mask.sum(-1)

    @property
    def token_denominator(self) -> float | None:
        """Denominator of an exact token mean: selected tokens per averaged micro-batch; ``None``: the batch's own count."""
        return None if self.step_tokens is None else max(self.step_tokens, 1.0) / self.step_micro_batches

    @property
    def sequence_denominator(self) -> float | None:
        """Denominator of an exact sequence mean: sequences per averaged micro-batch; ``None``: the batch's own count."""
        return None if self.step_sequences is None else max(self.step_sequences, 1.0) / self.step_micro_batches

    @classmethod
    def from_samples(cls, samples: Sequence[Sample], *, temperature: float = 1.0) -> Self:
        """Stack samples, padding on the right.

        Args:
            samples: At least one. A sample without a reward keeps its tokens but none is trained on.
            temperature: What they were sampled at.

        Raises:
            ValueError: If there is no sample.
        """
        if not samples:
            raise ValueError("an Experience needs at least one sample, got none")
        batch = len(samples)
        length = max(len(sample.prompt.token_ids) + len(sample.token_ids) for sample in samples)
        input_ids = torch.zeros(batch, length, dtype=torch.int64)
        attention_mask = torch.zeros(batch, length, dtype=torch.bool)
        action_mask = torch.zeros(batch, length - 1, dtype=torch.bool)
        logprobs = torch.zeros(batch, length - 1)
        versions = torch.full((batch, length - 1), -1, dtype=torch.int64)
        for row, sample in enumerate(samples):
            tokens = sample.prompt.token_ids + sample.token_ids
            input_ids[row, : len(tokens)] = torch.tensor(tokens)
            attention_mask[row, : len(tokens)] = True
            steps = slice(len(sample.prompt.token_ids) - 1, len(tokens) - 1)
            chosen = torch.ones(len(sample.token_ids), dtype=torch.bool)
            if sample.action_mask is not None:
                chosen = torch.tensor(sample.action_mask, dtype=torch.bool)
            logprobs[row, steps] = torch.where(chosen, torch.tensor(sample.logprobs), 0.0)
            versions[row, steps] = torch.where(chosen, torch.tensor(sample.versions, dtype=torch.int64), -1)
            action_mask[row, steps] = chosen if sample.reward is not None else False
        names = sorted({name for sample in samples for name in sample.reward_parts})
        return cls(
            input_ids=input_ids,
            attention_mask=attention_mask,
            action_mask=action_mask,
            rollout_logprobs=logprobs,
            versions=versions,
            rewards=torch.tensor([math.nan if sample.reward is None else float(sample.reward) for sample in samples]),
            group=torch.tensor([sample.prompt.index for sample in samples]),
            sample_index=torch.tensor([sample.sample_index for sample in samples]),
            truncated=torch.tensor([sample.finish_reason == "length" for sample in samples]),
            update=torch.zeros(batch, dtype=torch.int64),
            reward_parts={
                name: torch.tensor([sample.reward_parts.get(name, math.nan) for sample in samples]) for name in names
            },
            temperature=temperature,
        )

    def _map(self, change: Any) -> Self:
        """A copy whose tensors are ``change(tensor, axis)``."""
        updates: dict[str, Any] = {}
        for entry in dataclasses.fields(self):
            value, axis = getattr(self, entry.name), entry.metadata.get("axis")
            if axis == "rows":
                updates[entry.name] = {name: change(tensor, "row") for name, tensor in value.items()}
            elif axis is not None and value is not None:
                updates[entry.name] = change(value, axis)
        return dataclasses.replace(self, **updates)

    def select(self, rows: Tensor | Sequence[int]) -> Self:
        """The given rows, in the given order, trimmed to their longest sequence.

        Args:
            rows: (N,) indices into the batch.
        """
        index = torch.as_tensor(rows, dtype=torch.int64, device=self.input_ids.device)
        return self._map(lambda tensor, _axis: tensor[index]).trim()

    def trim(self) -> Self:
        """Cut padding that every row shares."""
        length = max(int(self.lengths.max()), 1) if len(self) else 1
        ends = {"token": length, "step": length - 1}
        return self._map(lambda tensor, axis: tensor if axis == "row" else tensor[:, : ends[axis]])

    def pad(self, length: int) -> Self:
        """Pad on the right to ``length`` tokens; padding is 0 and false everywhere (-1 for versions).

        Args:
            length: Tokens; at least the current T.

        Raises:
            ValueError: If the batch is longer already.
        """
        extra = length - self.input_ids.shape[1]
        if extra < 0:
            raise ValueError(f"cannot pad to {length} tokens: the batch has {self.input_ids.shape[1]} already")
        padded = self._map(lambda tensor, axis: tensor if axis == "row" else pad(tensor, (0, extra)))
        if extra:
            padded.versions[:, -extra:] = -1
        return padded

    @classmethod
    def concat(cls, batches: Sequence["Experience"]) -> "Experience":
        """Stack batches, padding each to the longest.

        Args:
            batches: At least one; an optional field must be set in all of them or in none.

        Raises:
            ValueError: If there is none, or optional fields differ.
        """
        if not batches:
            raise ValueError("concat needs at least one Experience, got none")
        longest = max(batch.input_ids.shape[1] for batch in batches)
        padded = [batch.pad(longest) for batch in batches]
        updates: dict[str, Any] = {}
        for entry in dataclasses.fields(cls):
            axis, values = entry.metadata.get("axis"), [getattr(batch, entry.name) for batch in padded]
            if axis == "rows":
                if len({frozenset(value) for value in values}) > 1:
                    raise ValueError(f"{entry.name} has different names in different batches: {[*map(sorted, values)]}")
                updates[entry.name] = {name: torch.cat([value[name] for value in values]) for name in values[0]}
            elif axis is not None:
                if len({value is None for value in values}) > 1:
                    raise ValueError(f"{entry.name} is set in some of the batches and None in others")
                updates[entry.name] = None if values[0] is None else torch.cat(values)
        return dataclasses.replace(padded[0], **updates)

    def to(self, device: torch.device | str, **kwargs: Any) -> Self:
        """Move every tensor; floats keep their type.

        Args:
            device: Where to.
            **kwargs: Passed to :meth:`torch.Tensor.to`, e.g. ``non_blocking``.
        """
        return self._map(lambda tensor, _axis: tensor.to(device, **kwargs))

    def state_dict(self) -> dict[str, Any]:
        """Tensors and plain numbers only, loadable with ``torch.load(weights_only=True)``."""
        return {entry.name: getattr(self, entry.name) for entry in dataclasses.fields(self)}

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any]) -> Self:
        """Inverse of :meth:`state_dict`."""
        return cls(**state)
