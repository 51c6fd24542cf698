"""The records of reinforcement learning: ``Prompt`` -> ``Sample`` -> ``Experience``.

Tokenised input, one completion of it from the engine (no padding), and a batch of samples as tensors, to which modules
add old log-probs and advantages. What prompts and samples know of each token are **read-only NumPy arrays**; lists and
tensors that are given or set become arrays, and copies of a record share them:

========================  ==================================================================  ===============
Field                     Type                                                                Bytes per token
========================  ==================================================================  ===============
token ids, versions       int32; int64 if one does not fit                                    4
log-probs, rewards        float32 if that holds every number exactly, else float64            4 or 8
masks                     bool                                                                1
========================  ==================================================================  ===============

Join them with :func:`numpy.concatenate`: ``+`` of arrays adds numbers.

Per-token fields of an ``Experience`` are on the **next-token axis** of length T - 1, where entry ``t`` belongs to token
``t + 1``; it includes prompt tokens, masks select.
Shapes: B sequences, T tokens (longest sequence of the batch; the rest is padded on the right).
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, Self, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rlhfkit.data.batch import PaddedBatch, read_attachments, row_field, rows_field, step_field, steps_field

PerToken: TypeAlias = NDArray[Any] | Any
"""A number for each token: read as a read-only array, set as an array, a list, or a tensor."""
FinishReason = Literal["stop", "length", "abort"]
GREEDY_REWARD = "greedy"
"""Name among the ``reward_parts`` of a sample of the reward of the greedy answer to its prompt (ReMax)."""


OTHER_MODEL = -1
"""Version of tokens that another model than the policy sampled (``engine=`` of ``GroupSampler.sample``)."""

DECODED_TOKENS = 65_536
"""Tokens whose texts are decoded in one call, about: tokenizers take lists, which are large."""


def _integers(values: NDArray[Any]) -> NDArray[Any]:
    """Copy as int32, or as int64 if one does not fit."""
    if len(values) and not np.can_cast(values.dtype, np.int64):
        raise TypeError(f"whole numbers are wanted, got {values.dtype}")
    bounds = np.iinfo(np.int32)
    narrow = not len(values) or bool(bounds.min <= values.min() and values.max() <= bounds.max)
    return values.astype(np.int32 if narrow else np.int64)


def _floats(values: NDArray[Any]) -> NDArray[Any]:
    """Copy as float32 if that holds each number exactly, or as float64."""
    if not np.can_cast(values.dtype, np.float64):
        raise TypeError(f"numbers are wanted, got {values.dtype}")
    with np.errstate(over="ignore"):
        narrow = values.astype(np.float32)
    return narrow if bool(((narrow == values) | np.isnan(narrow)).all()) else values.astype(np.float64)


def _booleans(values: NDArray[Any]) -> NDArray[Any]:
    """Copy as booleans; numbers other than 0 are true."""
    return values.astype(np.bool_)


_PER_TOKEN: dict[str, tuple[Callable[[NDArray[Any]], NDArray[Any]], tuple[type, ...]]] = {
    "token_ids": (_integers, (np.int32, np.int64)),
    "versions": (_integers, (np.int32, np.int64)),
    "logprobs": (_floats, (np.float32, np.float64)),
    "token_rewards": (_floats, (np.float32, np.float64)),
    "action_mask": (_booleans, (np.bool_,)),
}
"""How fields per token are copied, and the types that they have then."""


def _per_token(name: str, values: Any) -> NDArray[Any]:
    """Return one number per token as a read-only array of the field's type, a copy unless it is one already."""
    compact, types = _PER_TOKEN[name]
    if isinstance(values, Tensor):
        values = values.detach().cpu()
        values = (values.float() if values.dtype == torch.bfloat16 else values).numpy()
    array: NDArray[Any] = np.asarray(values)
    if array.ndim != 1:
        raise ValueError(f"one number per token is wanted, got shape {array.shape}")
    # A view would keep what it is a view of, such as memory of Ray's.
    kept = array is values and array.flags.owndata and not array.flags.writeable and array.dtype.type in types
    array = array if kept else compact(array)
    array.flags.writeable = False
    return array


class Record:
    """What prompts and samples share: fields per token become arrays, whenever they are set."""

    __slots__ = ()

    def __setattr__(self, name: str, value: Any) -> None:
        """Set a field; raises TypeError or ValueError if it has a number per token, and the value has not."""
        if name in _PER_TOKEN and value is not None:
            try:
                value = _per_token(name, value)
            except (TypeError, ValueError) as error:
                raise type(error)(f"{type(self).__name__}.{name}: {error}") from error
        elif name == "attachments":
            value = read_attachments(value)
        object.__setattr__(self, name, value)

    def __eq__(self, other: object) -> bool:
        """Whether all fields are equal; NaN equals NaN in arrays."""
        if type(other) is not type(self):
            return NotImplemented
        pairs = ((getattr(self, each.name), getattr(other, each.name)) for each in fields(self))  # type: ignore[arg-type]  # a dataclass
        return all(
            np.array_equal(one, two, equal_nan=True)
            if isinstance(one, np.ndarray) and isinstance(two, np.ndarray)
            else bool(one == two)
            for one, two in pairs
        )

    def plain(self) -> dict[str, Any]:
        """All fields by name, with lists in place of arrays, and records as dictionaries too.

        Attachments are texts (:func:`~rlhfkit.data.batch.read_attachments`), and left out where there are none.
        """
        values = {each.name: getattr(self, each.name) for each in fields(self)}  # type: ignore[arg-type]  # a dataclass
        attached = [one.plain() for one in values.pop("attachments", ())]
        return {
            name: value.tolist()
            if isinstance(value, np.ndarray)
            else value.plain()
            if isinstance(value, Record)
            else value
            for name, value in values.items()
        } | ({"attachments": attached} if attached else {})


@dataclass(slots=True, eq=False)
class Prompt(Record):
    """A tokenised prompt.

    Example::

        Prompt(index=7, token_ids=[15, 3, 22], text="2+3=", answer="5")

    Attributes:
        index: Row in the data set; unique, and part of the seed of each of its samples.
        token_ids: (T,) int32, input of the engine. Text is never tokenised a second time.
        text: The prompt as text, for rewards and logs.
        answer: The reference answer, if the data has one.
        metadata: All other columns of the row, by name.
        attachments: Its images, :class:`~rlhfkit.data.images.Image`, in the order of their tokens, which are among
            ``token_ids``. In the sample of an episode those of its observations come behind them.
    """

    index: int
    token_ids: PerToken
    text: str = ""
    answer: Any = None
    metadata: dict[str, Any] = field(default_factory=dict)
    attachments: tuple[Any, ...] = ()

    @property
    def num_tokens(self) -> int:
        """Number of tokens."""
        return len(self.token_ids)


@dataclass(slots=True, eq=False)
class Sample(Record):
    """One completion of a prompt, exactly as sampled, and its reward.

    Attributes:
        prompt: What was completed; of an episode whose environment began the conversation, with the tokens of that.
        sample_index: Position in the group of the prompt, 0 .. group_size - 1.
        token_ids: (T,) int32, tokens after the prompt, including the end-of-sequence token when it was sampled.
        logprobs: (T,) float32, log-prob of each token under the policy at the sampling temperature, before truncation
            (top-p and the like); NaN where the engine gives none.
        versions: (T,) int32, policy version (optimizer updates so far) that sampled each token; :data:`OTHER_MODEL`:
            another model did.
        finish_reason: ``stop``: the model ended it; ``length``: a limit did; ``abort``: an error or a time limit.
        action_mask: (T,) bool, true where the policy chose the token, false where an environment wrote it; ``None``:
            the policy chose all.
        text: The completion as text, without special tokens, see :func:`decode_texts`.
        reward: Total reward; ``None``: could not be scored, the sample is not trained on.
        reward_parts: Components of the reward by name, before weighting.
        token_rewards: (T,) float32, the part of ``reward`` earned at each token (turns of an episode, steps of a
            solution); the remainder belongs to the last action. ``None``: all of it does.
        info: Further facts about the sample (turns of an episode, why it ended); numbers are logged as means.
        replayed: Whether it was sampled for an earlier iteration, see :class:`~rlhfkit.ReplayBuffer`.
    """

    prompt: Prompt
    sample_index: int
    token_ids: PerToken
    logprobs: PerToken
    versions: PerToken
    finish_reason: FinishReason
    action_mask: PerToken | None = None
    text: str = ""
    reward: float | None = None
    reward_parts: dict[str, float] = field(default_factory=dict)
    token_rewards: PerToken | None = None
    info: dict[str, Any] = field(default_factory=dict)
    replayed: bool = False

    def __post_init__(self) -> None:
        """Check what was given."""
        self.check_lengths()

    def check_lengths(self) -> None:
        """Raise ValueError unless what there is per token has one length."""
        found = {name: getattr(self, name) for name in _PER_TOKEN}
        lengths = {name: len(values) for name, values in found.items() if values is not None}
        if len(set(lengths.values())) > 1:
            raise ValueError(f"what a Sample has per token must have one length, got {lengths}")

    @property
    def num_tokens(self) -> int:
        """Number of tokens after the prompt."""
        return len(self.token_ids)

    @property
    def num_action_tokens(self) -> int:
        """Number of tokens that the policy chose."""
        return self.num_tokens if self.action_mask is None else int(self.action_mask.sum())

    @property
    def all_token_ids(self) -> NDArray[Any]:
        """(P + T,) tokens of the prompt and after it, a new array."""
        return np.concatenate([self.prompt.token_ids, self.token_ids])

    @property
    def chosen(self) -> NDArray[Any]:
        """(T,) bool, the action mask, also where it is ``None``."""
        return np.ones(self.num_tokens, np.bool_) if self.action_mask is None else self.action_mask

    @property
    def version_runs(self) -> list[tuple[int, int]]:
        """``versions`` as ``(version, number of tokens)`` of each run of equal ones, in order."""
        begins = np.flatnonzero(np.diff(self.versions)) + 1
        return [(int(run[0]), len(run)) for run in np.split(self.versions, begins) if len(run)]


def decode_texts(samples: Sequence[Sample], decode: Callable[[list[list[int]]], Sequence[str]]) -> None:
    """Set the ``text`` of samples from their tokens, many in one call.

    Args:
        samples: Whose texts to set; texts that they have are replaced.
        decode: Writes token ids of several sequences as texts, such as a tokenizer's ``batch_decode``.
    """
    waiting: list[Sample] = []
    tokens = 0
    for place, sample in enumerate(samples):
        waiting.append(sample)
        tokens += sample.num_tokens
        if tokens >= DECODED_TOKENS or place == len(samples) - 1:
            texts = decode([each.token_ids.tolist() for each in waiting])
            for each, text in zip(waiting, texts, strict=True):
                each.text = text
            waiting, tokens = [], 0


@dataclass(kw_only=True, eq=False)
class IterationSummary:
    """Numbers of N sequences, of all ranks, in the order in which their prompts were drawn; the same on every rank.

    Row n of the iteration is row n here; :attr:`~rlhfkit.data.Experience.rows` has the n of a rank's own rows.

    Attributes:
        rewards: (N,) float32, NaN where the sample could not be scored.
        group: (N,) int64, equal for samples of one prompt.
        sample_index: (N,) int64, position in the group.
        truncated: (N,) bool, true when generation stopped at the length limit.
        lengths: (N,) int64, tokens of prompt and completion.
        prompt_lengths: (N,) int64, tokens before the first that is trained on; 0 where none is.
        trained_tokens: (N,) int64, tokens in the action mask.
        oldest_version: (N,) int64, smallest policy version of a trained token; -1 where there is none.
        newest_version: (N,) int64, largest policy version of a trained token; -1 where there is none.
        update: (N,) int64, the optimizer update of this iteration that trains on the row.
        replayed: (N,) bool, true where the sample was made for an earlier iteration.
        reward_parts: (N,) float32 each.
    """

    rewards: Tensor
    group: Tensor
    sample_index: Tensor
    truncated: Tensor
    lengths: Tensor
    prompt_lengths: Tensor
    trained_tokens: Tensor
    oldest_version: Tensor
    newest_version: Tensor
    update: Tensor
    replayed: Tensor
    reward_parts: dict[str, Tensor] = field(default_factory=dict)

    def __len__(self) -> int:
        """Number of sequences N."""
        return len(self.group)

    def select(self, rows: Tensor | Sequence[int]) -> Self:
        """Select rows by their indices, in the given order."""
        index = torch.as_tensor(rows, dtype=torch.int64)
        columns = {name: value[index] for name, value in self.columns().items()}
        parts = {name: value[index] for name, value in self.reward_parts.items()}
        return type(self)(**columns, reward_parts=parts)

    def columns(self) -> dict[str, Tensor]:
        """Return all columns but the parts of the reward, by name."""
        return {each.name: getattr(self, each.name) for each in fields(self) if each.name != "reward_parts"}


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
            sample.check_lengths()  # fields may have been set since
            if not sample.prompt.num_tokens:
                raise ValueError(f"prompt {sample.prompt.index} has no tokens; every prompt needs at least one")
        prompts = torch.tensor([sample.prompt.num_tokens for sample in samples])[:, None]
        ends = prompts + torch.tensor([sample.num_tokens for sample in samples])[:, None]
        batch, length = len(samples), int(ends.max())
        attention_mask = torch.arange(length) < ends
        texts = [tokens for sample in samples for tokens in (sample.prompt.token_ids, sample.token_ids)]
        input_ids = torch.zeros(batch, length, dtype=torch.int64)
        input_ids.masked_scatter_(attention_mask, torch.from_numpy(np.concatenate(texts)).long())
        completed = (torch.arange(1, length) >= prompts) & attention_mask[:, 1:]

        def placed(columns: Iterable[PerToken], dtype: torch.dtype) -> Tensor:
            values = torch.from_numpy(np.concatenate(list(columns))).to(dtype)
            return torch.zeros(completed.shape, dtype=dtype).masked_scatter_(completed, values)

        chosen = placed((sample.chosen for sample in samples), torch.bool)
        logprobs = placed((sample.logprobs for sample in samples), torch.float32)
        versions = placed((sample.versions for sample in samples), torch.int64)
        earned = [sample.token_rewards for sample in samples]
        known = [
            np.zeros(sample.num_tokens, np.float32) if values is None else values
            for sample, values in zip(samples, earned, strict=True)
        ]
        scored = torch.tensor([sample.reward is not None for sample in samples])[:, None]
        names = sorted({name for sample in samples for name in sample.reward_parts})
        rewards = [math.nan if sample.reward is None else float(sample.reward) for sample in samples]
        parts = {name: [sample.reward_parts.get(name, math.nan) for sample in samples] for name in names}
        attachments = tuple(sample.prompt.attachments for sample in samples)
        return cls(
            input_ids=input_ids,
            attention_mask=attention_mask,
            action_mask=chosen & (scored | before_rewards),
            rollout_logprobs=torch.where(chosen, logprobs, 0.0),
            versions=torch.where(chosen, versions, -1),
            rewards=torch.tensor(rewards, dtype=torch.float32),
            group=torch.tensor([sample.prompt.index for sample in samples]),
            sample_index=torch.tensor([sample.sample_index for sample in samples]),
            truncated=torch.tensor([sample.finish_reason == "length" for sample in samples]),
            update=torch.zeros(batch, dtype=torch.int64),
            replayed=torch.tensor([sample.replayed for sample in samples]),
            reward_parts={name: torch.tensor(column, dtype=torch.float32) for name, column in parts.items()},
            token_rewards=placed(known, torch.float32) if any(values is not None for values in earned) else None,
            temperature=temperature,
            attachments=attachments if any(attachments) else None,
        )
