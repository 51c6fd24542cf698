"""The records of reinforcement learning: ``Prompt`` -> ``Sample`` -> ``Experience``.

Tokenised input, one completion of it from the engine (no padding), and a batch of samples as tensors, to which modules
add old log-probs and advantages. Prompts and samples keep what they have per token in arrays
(:mod:`rlhfkit.data.token_arrays`): reading such a field makes a **new list**, so change it by setting it.

Per-token fields of an ``Experience`` are on the **next-token axis** of length T - 1, where entry ``t`` belongs to token
``t + 1``; it includes prompt tokens, masks select.
Shapes: B sequences, T tokens (longest sequence of the batch; the rest is padded on the right).
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, Self, cast

import torch
from torch import Tensor

from rlhfkit.data.batch import PaddedBatch, row_field, rows_field, step_field, steps_field
from rlhfkit.data.iteration import IterationSummary
from rlhfkit.data.sample_texts import Decode, TextDecoder, decode_when_read
from rlhfkit.data.token_arrays import (
    BOOLEANS,
    FLOATS,
    INTEGERS,
    RUNS,
    Runs,
    concatenate,
    ones,
    restore_state,
    store_as_arrays,
    stored,
    stored_state,
    zeros,
)

if TYPE_CHECKING:
    from rlhfkit.data.token_arrays import Booleans, Floats, Integers

FinishReason = Literal["stop", "length", "abort"]
GREEDY_REWARD = "greedy"
"""Name among the ``reward_parts`` of a sample of the reward of the greedy answer to its prompt (ReMax)."""


OTHER_MODEL = -1
"""Version of tokens that another model than the policy sampled (:class:`~rlhfkit.rollout.ReferenceSamples`)."""


@dataclass(slots=True)
class Prompt:
    """A tokenised prompt.

    Example::

        Prompt(index=7, token_ids=[15, 3, 22], text="2+3=", answer="5")

    Attributes:
        index: Row in the data set; unique, and part of the seed of each of its samples.
        token_ids: Input of the engine. Text is never tokenised a second time. Each read makes a new list.
        text: The prompt as text, for rewards and logs.
        answer: The reference answer, if the data has one.
        metadata: All other columns of the row, by name.
    """

    index: int
    token_ids: list[int]
    text: str = ""
    answer: Any = None
    metadata: dict[str, Any] = field(default_factory=dict)

    @property
    def num_tokens(self) -> int:
        """Number of tokens, without making a list."""
        return len(stored(self, "token_ids"))

    def __getstate__(self) -> dict[str, Any]:
        """Return what is stored, for pickle and copies."""
        return stored_state(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a pickled or copied prompt."""
        restore_state(self, state)


@dataclass(slots=True)
class Sample:
    """One completion of a prompt, exactly as sampled, and its reward.

    Fields per token can be set as lists, arrays, or tensors, and are read as lists, a **new one** each time:
    ``sample.token_ids.append(9)`` changes nothing. :attr:`num_tokens` and :attr:`version_runs` make none.

    Attributes:
        prompt: What was completed; of an episode whose environment began the conversation, with the tokens of that.
        sample_index: Position in the group of the prompt, 0 .. group_size - 1.
        token_ids: Tokens after the prompt, including the end-of-sequence token when it was sampled.
        logprobs: Log-prob of each token under the policy at the sampling temperature, before truncation (top-p and the
            like); NaN where the engine gives none.
        versions: Policy version (optimizer updates so far) that sampled each token; :data:`OTHER_MODEL`: another model
            did.
        finish_reason: ``stop``: the model ended it; ``length``: a limit did; ``abort``: an error or a time limit.
        action_mask: True where the policy chose the token, false where an environment wrote it; ``None``: the policy
            chose all.
        text: The completion as text, without special tokens; decoded when it is read, after :meth:`decode_with`.
        reward: Total reward; ``None``: could not be scored, the sample is not trained on.
        reward_parts: Components of the reward by name, before weighting.
        token_rewards: The part of ``reward`` earned at each token (turns of an episode, steps of a solution); the
            remainder belongs to the last action. ``None``: all of it does.
        info: Further facts about the sample (turns of an episode, why it ended); numbers are logged as means.
        replayed: Whether it was sampled for an earlier iteration, see :class:`~rlhfkit.ReplayBuffer`.
    """

    prompt: Prompt
    sample_index: int
    token_ids: list[int]
    logprobs: list[float]
    versions: list[int]
    finish_reason: FinishReason
    action_mask: list[bool] | None = None
    text: str = ""
    reward: float | None = None
    reward_parts: dict[str, float] = field(default_factory=dict)
    token_rewards: list[float] | None = None
    info: dict[str, Any] = field(default_factory=dict)
    replayed: bool = False

    def __post_init__(self) -> None:
        """Check that the per-token fields have one length."""
        found = {name: stored(self, name) for name in _SAMPLE_ENCODINGS}
        lengths = {name: len(values) for name, values in found.items() if values is not None}
        if len(set(lengths.values())) > 1:
            raise ValueError(f"the per-token lists of a Sample must have one length, got {lengths}")

    @classmethod
    def from_arrays(
        cls,
        prompt: Prompt,
        sample_index: int,
        *,
        token_ids: "Integers",
        logprobs: "Floats",
        finish_reason: FinishReason,
        versions: "Integers | None" = None,
        version_runs: Iterable[tuple[int, int]] = (),
        action_mask: "Booleans | None" = None,
        token_rewards: "Floats | None" = None,
        **fields: Any,
    ) -> Self:
        """Make a sample of arrays or tensors, which are copied without making lists.

        Args:
            prompt: What was completed.
            sample_index: Position in the group.
            token_ids: (T,) integers.
            logprobs: (T,) numbers.
            finish_reason: Why the completion ended.
            versions: (T,) integers; or give ``version_runs``.
            version_runs: The same as ``(version, number of tokens)`` in order.
            action_mask: (T,) booleans; ``None``: the policy chose all.
            token_rewards: (T,) numbers; ``None``: the last action earned all.
            **fields: Other fields.

        Raises:
            ValueError: If the lengths differ.
        """
        fields |= {
            "token_ids": token_ids,
            "logprobs": logprobs,
            "versions": Runs.of(version_runs) if versions is None else versions,
            "action_mask": action_mask,
            "token_rewards": token_rewards,
        }
        return cls(prompt, sample_index, finish_reason=finish_reason, **fields)

    @property
    def num_tokens(self) -> int:
        """Number of tokens after the prompt."""
        return len(stored(self, "token_ids"))

    @property
    def num_action_tokens(self) -> int:
        """Number of tokens that the policy chose."""
        mask = stored(self, "action_mask")
        return self.num_tokens if mask is None else sum(mask)

    @property
    def version_runs(self) -> list[tuple[int, int]]:
        """``versions`` as ``(version, number of tokens)`` of each run of equal ones, in order."""
        runs: Runs = stored(self, "versions")
        return runs.pairs

    def decode_with(self, decode: Decode) -> None:
        """Let ``text`` be decoded whenever it is read, by a tokenizer's ``batch_decode`` or the like; nothing is kept.

        Pickled samples have their text. :func:`~rlhfkit.data.sample_texts.decode_together` decodes many at once.
        """
        self.text = cast(str, TextDecoder(decode))

    def __getstate__(self) -> dict[str, Any]:
        """Return what is stored, with the text, for pickle and copies."""
        return stored_state(self) | {"text": self.text}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a pickled or copied sample."""
        restore_state(self, state)


_SAMPLE_ENCODINGS = {
    "token_ids": INTEGERS,
    "logprobs": FLOATS,
    "versions": RUNS,
    "action_mask": BOOLEANS,
    "token_rewards": FLOATS,
}
store_as_arrays(Prompt, {"token_ids": INTEGERS})
store_as_arrays(Sample, _SAMPLE_ENCODINGS)
decode_when_read(Sample, "text")


@dataclass(kw_only=True)
class Experience(PaddedBatch):
    """A batch of samples as tensors. Fields that a module has not computed yet are ``None``.

    Attributes:
        action_mask: (B, T-1) bool, true where token t+1 was chosen by the policy and is trained on.
        rollout_logprobs: (B, T-1) float32, the engine's before truncation, NaN where it gives none; 0 outside the
            action mask.
        versions: (B, T-1) int64, policy version per token; -1 (:data:`OTHER_MODEL`) outside the action mask, and where
            another model sampled it.
        rewards: (B,) float32; NaN where the sample could not be scored (its action mask is all false).
        group: (B,) int64, equal for samples of one prompt.
        sample_index: (B,) int64, position in the group.
        truncated: (B,) bool, true when generation stopped at the length limit.
        update: (B,) int64, the optimizer update of this iteration that trains on the row; 0 is on-policy.
        token_rewards: (B, T-1) float32, the part of ``rewards`` that each token earned; ``None``: no sample has it. Not
            masked: rewards of tokens of an environment count too.
        old_logprobs: (B, T-1) float32, the trainer's before the iteration; ``None`` in the first update: equal to the
            current ones.
        advantages: (B, T-1) float32.
        columns: What single features know of each token, by name, (B, T-1) or (B, T-1, C), padded with 0 or false:
            ``ref_logprobs`` under the reference policy, ``values`` of a critic before the iteration and ``returns``
            that it learns, ``teacher_logprobs``, and whatever parts write (:attr:`rlhfkit.Part.writes`).
        reward_parts: (B,) float32 each.
        replayed: (B,) bool, true where the sample was made for an earlier iteration; ``None``: nowhere.
        rows: (B,) int64, which row of the iteration each one is; ``None``: the rows are the iteration, in order.
        iteration: What every rank knows of all rows of the iteration; ``None``: these rows are all, or a micro-batch of
            them.
        step_rows: Rows of the whole optimizer step, also those without a trained token, all micro-batches and ranks.
        temperature: Sampling temperature; the trainer divides its logits by it so that its log-probs are those of the
            sampler.
    """

    action_mask: Tensor = step_field()
    rollout_logprobs: Tensor = step_field()
    versions: Tensor = step_field(fill=-1)
    rewards: Tensor = row_field()
    group: Tensor = row_field()
    sample_index: Tensor = row_field()
    truncated: Tensor = row_field()
    update: Tensor = row_field()

    token_rewards: Tensor | None = step_field(None)
    old_logprobs: Tensor | None = step_field(None)
    advantages: Tensor | None = step_field(None)

    columns: dict[str, Tensor] = steps_field()
    reward_parts: dict[str, Tensor] = rows_field()
    replayed: Tensor | None = row_field(None)
    rows: Tensor | None = row_field(None)
    iteration: IterationSummary | None = None
    step_rows: float | None = None
    temperature: float = 1.0

    def with_columns(self, **columns: Tensor | None) -> Self:
        """Copy with more or other :attr:`columns`; ``None`` takes one out."""
        every = self.columns | columns
        return replace(self, columns={name: values for name, values in every.items() if values is not None})

    @property
    def row_denominator(self) -> float | None:
        """Denominator of an exact mean over all rows, the step's rows per averaged micro-batch; ``None`` if unknown."""
        return None if self.step_rows is None else max(self.step_rows, 1.0) / self.step_micro_batches

    @property
    def prompt_lengths(self) -> Tensor:
        """(B,) int64, tokens before the first that is trained on; 0 in a row without any."""
        return torch.where(self.action_mask.any(-1), self.action_mask.long().argmax(-1) + 1, 0)

    @property
    def by_policy(self) -> Tensor:
        """(B,) bool, true where the policy sampled a token that is trained on, and not another model."""
        return (self.action_mask & (self.versions != OTHER_MODEL)).any(-1)

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
            replayed=torch.zeros_like(self.truncated) if self.replayed is None else self.replayed,
            reward_parts=dict(self.reward_parts),
        )

    @property
    def own_rows(self) -> Tensor:
        """(B,) int64, which row of the iteration each one is."""
        return torch.arange(len(self)) if self.rows is None else self.rows

    @classmethod
    def from_samples(cls, samples: Sequence[Sample], *, temperature: float = 1.0, before_rewards: bool = False) -> Self:
        """Stack samples, padding on the right.

        Args:
            samples: At least one. A sample without a reward keeps its tokens but none is trained on.
            temperature: Sampling temperature of the samples.
            before_rewards: The samples have not been scored yet: the mask has their tokens without a reward too.

        Raises:
            ValueError: If there is no sample, or a prompt without tokens.
        """
        if not samples:
            raise ValueError("an Experience needs at least one sample, got none")
        for sample in samples:
            if not sample.prompt.num_tokens:
                raise ValueError(f"prompt {sample.prompt.index} has no tokens; every prompt needs at least one")
        prompts = torch.tensor([sample.prompt.num_tokens for sample in samples])[:, None]
        ends = prompts + torch.tensor([sample.num_tokens for sample in samples])[:, None]
        batch, length = len(samples), int(ends.max())
        attention_mask = torch.arange(length) < ends
        texts = [stored(part, "token_ids") for sample in samples for part in (sample.prompt, sample)]
        input_ids = torch.zeros(batch, length, dtype=torch.int64)
        input_ids.masked_scatter_(attention_mask, concatenate(texts, torch.int64))
        steps = (torch.arange(1, length) >= prompts) & attention_mask[:, 1:]  # of completions
        chosen, logprobs, versions, token_rewards = _joined(samples)
        scored = torch.tensor([sample.reward is not None for sample in samples])[:, None]
        names = sorted({name for sample in samples for name in sample.reward_parts})
        rewards = [math.nan if sample.reward is None else float(sample.reward) for sample in samples]
        parts = {name: [sample.reward_parts.get(name, math.nan) for sample in samples] for name in names}
        return cls(
            input_ids=input_ids,
            attention_mask=attention_mask,
            action_mask=_placed(chosen, steps) & (scored | before_rewards),
            rollout_logprobs=_placed(torch.where(chosen, logprobs, 0.0), steps),
            versions=_placed(torch.where(chosen, versions, -1), steps, fill=-1),
            rewards=torch.tensor(rewards, dtype=torch.float32),
            group=torch.tensor([sample.prompt.index for sample in samples]),
            sample_index=torch.tensor([sample.sample_index for sample in samples]),
            truncated=torch.tensor([sample.finish_reason == "length" for sample in samples]),
            update=torch.zeros(batch, dtype=torch.int64),
            replayed=torch.tensor([sample.replayed for sample in samples]),
            reward_parts={name: torch.tensor(column, dtype=torch.float32) for name, column in parts.items()},
            token_rewards=None if token_rewards is None else _placed(token_rewards, steps),
            temperature=temperature,
        )


def _joined(samples: Sequence[Sample]) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Action mask, log-probs, versions and rewards of the tokens of all completions in order, (sum of T,) each."""
    masks = [stored(sample, "action_mask") for sample in samples]
    chosen = [ones(sample.num_tokens) if mask is None else mask for sample, mask in zip(samples, masks, strict=True)]
    runs: list[Runs] = [stored(sample, "versions") for sample in samples]
    versions = concatenate([each.values for each in runs], torch.int64)
    lengths = concatenate([each.lengths for each in runs], torch.int64)
    earned = [stored(sample, "token_rewards") for sample in samples]
    given = [zeros(sample.num_tokens) if each is None else each for sample, each in zip(samples, earned, strict=True)]
    return (
        concatenate(chosen, torch.bool),
        concatenate([stored(sample, "logprobs") for sample in samples], torch.float32),
        versions.repeat_interleave(lengths),
        concatenate(given, torch.float32) if any(each is not None for each in earned) else None,
    )


def _placed(values: Tensor, steps: Tensor, fill: float = 0) -> Tensor:
    """(B, T-1) tensor with values, in order, where ``steps`` is true, and ``fill`` elsewhere."""
    return torch.full(steps.shape, fill, dtype=values.dtype).masked_scatter_(steps, values)
