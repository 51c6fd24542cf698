"""Supervised records beyond plain examples: preference pairs, labelled answers, judged steps, a teacher's tokens.

Each kind has an example, a batch and a function that makes a batch of examples; data sets of them are
:class:`~rlhfkit.data.loaders.steps.ExampleTable`.
Shapes: B sequences, T tokens (longest of the batch; the rest is padded on the right), M trained tokens of the batch in
row-major order, K likeliest tokens of the teacher.
"""

import dataclasses
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Self, TypeVar

import torch
from torch import Tensor

from rlhfkit.data.batch import (
    StepTotals,
    TokenBatch,
    TokenExample,
    collate_tokens,
    moved,
    on_both,
    row_field,
    step_field,
)
from rlhfkit.data.loaders.steps import ExampleTable, Step, StepLoader, TokenizedDataset
from rlhfkit.validation import check_integer

T = TypeVar("T")


# --------------------------------------------------------------------------------------------------- preference pairs
#
# A batch of B pairs has 2B rows: the chosen answer of pair i, with its prompt, is row 2i, the other row 2i + 1. A
# packed forward pass (rlhfkit.models.policy_output) computes a prefix that neighbours share, the prompt, once.


@dataclass(slots=True)
class PreferenceExample:
    """Two tokenised answers to one prompt; ``ExampleTable(answers, PreferenceExample, each=2)`` has many."""

    chosen: TokenExample
    """Prompt and preferred answer; the tokens of the answer are selected."""
    rejected: TokenExample
    """The same prompt and the other answer."""
    margin: float | None = None
    """By how much the chosen answer is better, if known."""
    ref_logprobs: Sequence[float] | None = None
    """Summed log-probs of the chosen and of the rejected answer under the reference model, if computed already."""

    @property
    def num_tokens(self) -> int:
        """Tokens of both answers."""
        return self.chosen.num_tokens + self.rejected.num_tokens

    @property
    def targets(self) -> int:
        """Tokens of the chosen answer."""
        return self.chosen.targets


@dataclass(kw_only=True)
class PreferenceBatch(TokenBatch):
    """B pairs in 2B rows, chosen and rejected in turn; ``loss_mask`` selects the tokens of the answers.

    For pair losses ``step_sequences`` counts pairs and ``step_tokens`` tokens of chosen answers.
    """

    margins: Tensor | None = row_field(None)
    """(2B,) float32, by how much the chosen answer is better: the same number on both rows of a pair."""
    ref_logprobs: Tensor | None = row_field(None)
    """(2B,) float32, summed log-probs of the answers under the reference model."""

    def __post_init__(self) -> None:
        """Check that the rows make whole pairs."""
        if len(self) % 2:
            raise ValueError(f"a PreferenceBatch holds pairs, two rows each, got {len(self)} rows")

    @property
    def pairs(self) -> int:
        """Number of pairs B."""
        return len(self) // 2

    @staticmethod
    def chosen(values: Tensor) -> Tensor:
        """Rows of the chosen answers: (2B, ...) to (B, ...)."""
        return values[0::2]

    @staticmethod
    def rejected(values: Tensor) -> Tensor:
        """Rows of the rejected answers: (2B, ...) to (B, ...)."""
        return values[1::2]

    @property
    def pair_mask(self) -> Tensor:
        """(B,) bool, pairs of which both answers have a selected token."""
        answered = self.loss_mask.any(-1)
        return self.chosen(answered) & self.rejected(answered)

    @property
    def pair_denominator(self) -> float | None:
        """Denominator of an exact mean over the pairs of the step, see :attr:`sequence_denominator`."""
        return self.sequence_denominator

    @property
    def mean_chosen_length(self) -> float | None:
        """Mean tokens of a chosen answer over the optimizer step; ``None``: its size is not known."""
        if self.step_tokens is None or self.step_sequences is None:
            return None
        return max(self.step_tokens, 1.0) / max(self.step_sequences, 1.0)


def collate_preferences(examples: Sequence[PreferenceExample], totals: StepTotals | None = None) -> PreferenceBatch:
    """Stack pairs, padding on the right.

    Args:
        examples: At least one.
        totals: Pairs and tokens of chosen answers of their step; ``None``: unknown, the batch normalises by itself.

    Raises:
        ValueError: If there is no pair, or only some have a margin or reference log-probs.
    """
    rows = [answer for example in examples for answer in (example.chosen, example.rejected)]
    margins = _all_or_none("margin", [example.margin for example in examples])
    reference = _all_or_none("ref_logprobs", [example.ref_logprobs for example in examples])
    return PreferenceBatch(
        **vars(collate_tokens(rows, totals)),
        margins=None if margins is None else torch.tensor(margins, dtype=torch.float32).repeat_interleave(2),
        ref_logprobs=None if reference is None else torch.tensor(reference, dtype=torch.float32).flatten(),
    )


def _all_or_none(name: str, values: list[T | None]) -> list[T] | None:
    given = [value for value in values if value is not None]
    if given and len(given) < len(values):
        raise ValueError(f"{name} is set in {len(given)} of {len(values)} pairs of a batch: set it in all or in none")
    return given or None


# --------------------------------------------------------------------------------------------------- labelled answers
#
# Each has a mismatched pair: the same prompt with the answer to another one, on which KTO measures how far the policy
# is from its reference. They are drawn once over all data, in a stream over the answers of each optimizer step, so they
# do not depend on micro-batches or ranks; TRL and OpenRLHF rotate the answers within a micro-batch of more than one.


@dataclass(slots=True)
class UnpairedExample:
    """One labelled answer."""

    answer: TokenExample
    """Prompt and completion; the tokens of the completion are trained."""
    desirable: bool
    """Whether the completion is wanted."""
    mismatched: TokenExample | None = None
    """The same prompt with the completion of another; ``None``: there is no other, or none was drawn yet."""
    ref_logprobs: Sequence[float] | None = None
    """Summed log-probs of both completions under the reference model, if computed already."""
    weight: float | None = None
    """Weight of the answer in the loss, if computed already."""

    @property
    def num_tokens(self) -> int:
        """Tokens of prompt and completion."""
        return self.answer.num_tokens

    @property
    def targets(self) -> int:
        """Trained tokens."""
        return self.answer.targets


class Mismatched:
    """The mismatched pair of each answer, made when it is used."""

    def __init__(self, answers: TokenizedDataset, partners: Sequence[int], max_length: int | None) -> None:
        """``partners``: Row whose completion makes the pair; ``max_length``: Tokens to which it is cut."""
        self.answers = answers
        self.partners = partners
        self.max_length = max_length

    def __len__(self) -> int:
        """Number of answers."""
        return len(self.partners)

    def __getitem__(self, index: int) -> TokenExample:
        """The pair of one answer."""
        return _exchanged(self.answers[index], self.answers[self.partners[index]], self.max_length)


def add_mismatched(examples: ExampleTable[UnpairedExample], *, seed: int = 0, max_length: int | None = None) -> None:
    """Give each answer of a data set a mismatched pair, unless all have one prompt.

    Args:
        examples: Labelled answers.
        seed: Of the draw.
        max_length: Tokens to which a mismatched pair is cut.
    """
    answers = examples.answers
    partners = rows_of_other_prompts([_prompt(answers[index]) for index in range(len(examples))], seed=seed)
    if partners is not None:
        examples.values["mismatched"] = Mismatched(answers, partners, max_length)


def _prompt(example: TokenExample) -> tuple[Any, ...]:
    """Its tokens and what is attached: prompts that differ in their images alone are two."""
    return (*prompt_tokens(example), *example.attachments)


def prompt_tokens(example: TokenExample) -> list[int]:
    """Token ids of the prompt of an answer."""
    return example.input_ids[: _prompt_length(example)]


def _prompt_length(example: TokenExample) -> int:
    return example.loss_mask.index(True)


def _exchanged(answer: TokenExample, other: TokenExample, max_length: int | None) -> TokenExample:
    """The prompt of ``answer`` with the completion of ``other``."""
    end, start = _prompt_length(answer), _prompt_length(other)
    token_ids = answer.input_ids[:end] + other.input_ids[start:]
    mask = answer.loss_mask[:end] + other.loss_mask[start:]
    return TokenExample(token_ids[:max_length], mask[:max_length], answer.attachments)


def rows_of_other_prompts(prompts: Sequence[Hashable], *, seed: int) -> list[int] | None:
    """Draw for each of N rows a row with another prompt, uniformly; ``None`` if there is only one prompt."""
    numbers: dict[Hashable, int] = {}
    groups = torch.tensor([numbers.setdefault(prompt, len(numbers)) for prompt in prompts])
    if len(numbers) < 2:
        return None
    count, sizes = len(prompts), torch.bincount(groups)
    order = torch.argsort(groups, stable=True)
    ends = torch.tensor(list(accumulate(sizes.tolist())))
    draws = torch.rand(count, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    behind = (draws * (count - sizes[groups])).long()  # position after the prompt's own rows, cyclically
    return order[(ends[groups] + behind) % count].tolist()


@dataclass(kw_only=True)
class ReferencedBatch(TokenBatch):
    """Prompts with completions, and their reference log-probs if known."""

    ref_logprobs: Tensor | None = row_field(None)
    """(B,) float32, summed over the completion; ``None``: not known."""


@dataclass(kw_only=True)
class UnpairedBatch(ReferencedBatch):
    """Labelled answers; the first micro-batch of a step also carries the mismatched pairs of the whole step."""

    desirable: Tensor = row_field()
    """(B,) bool."""
    weights: Tensor | None = row_field(None)
    """(B,) float32, weights of the answers in the loss; ``None``: 1."""
    mismatched: tuple[ReferencedBatch, ...] = ()
    """Mismatched pairs of each micro-batch of the step on this rank; empty in all but the first."""

    def to(self, device: torch.device | str, **kwargs: Any) -> Self:
        """Move every tensor; see :meth:`PaddedBatch.to`."""
        mismatched = tuple(batch.to(device, **kwargs) for batch in self.mismatched)
        return dataclasses.replace(super().to(device, **kwargs), mismatched=mismatched)


def collate_unpaired(examples: Sequence[UnpairedExample], totals: StepTotals | None = None) -> UnpairedBatch:
    """Stack answers without their mismatched pairs, padding on the right.

    Args:
        examples: At least one.
        totals: Size of their optimizer step; ``None``: unknown, the batch normalises by itself.

    Raises:
        ValueError: If there is no example.
    """
    answers = collate_tokens([example.answer for example in examples], totals)
    weights = [example.weight for example in examples]
    return UnpairedBatch(
        **vars(answers),
        ref_logprobs=_ref_logprobs(examples, 0),
        desirable=torch.tensor([example.desirable for example in examples], dtype=torch.bool),
        weights=None if None in weights else torch.tensor(weights, dtype=torch.float32),
    )


def collate_mismatched(examples: Sequence[UnpairedExample]) -> ReferencedBatch:
    """Stack the mismatched pairs of at least one answer; answers without are left out."""
    found = [example.mismatched for example in examples if example.mismatched is not None]
    return ReferencedBatch(**vars(collate_tokens(found)), ref_logprobs=_ref_logprobs(examples, 1))


def _ref_logprobs(examples: Sequence[UnpairedExample], which: int) -> Tensor | None:
    known = [example.ref_logprobs[which] for example in examples if example.ref_logprobs is not None]
    return torch.tensor(known) if len(known) == len(examples) else None


class UnpairedLoader(StepLoader[UnpairedBatch]):
    """A :class:`StepLoader` that yields the mismatched pairs of each step with its first batch.

    The examples of a table have theirs. In a stream a completion is paired with the prompt of another answer of its
    step, on any rank; in a step whose answers all have one prompt there are no pairs.
    """

    def __init__(self, *args: Any, max_length: int | None = None, **kwargs: Any) -> None:
        """Plan the steps; no example is read yet.

        Args:
            *args: Arguments of :class:`StepLoader`, with data of :class:`UnpairedExample`.
            max_length: Tokens to which a mismatched pair of a stream is cut.
            **kwargs: Further arguments of :class:`StepLoader`.

        Raises:
            ValueError: If a size is out of range, or the ranks do not divide.
        """
        super().__init__(*args, **kwargs)
        check_integer("max_length", max_length, minimum=2, optional=True)
        self.max_length = max_length

    def complete(self, examples: list[Any]) -> list[Any]:
        """Draw the mismatched pairs of the answers of a step of a stream."""
        answers = [example.answer for example in examples]
        partners = rows_of_other_prompts([_prompt(answer) for answer in answers], seed=self.seed)
        if partners is None:
            return examples
        return [
            dataclasses.replace(example, mismatched=_exchanged(example.answer, answers[partner], self.max_length))
            for example, partner in zip(examples, partners, strict=True)
        ]

    def batch_of(self, step: Step, number: int) -> UnpairedBatch:
        """This rank's micro-batch ``number`` of a step; the first one has the mismatched pairs of all."""
        batch = super().batch_of(step, number)
        return batch if number else dataclasses.replace(batch, mismatched=self._mismatched(step))

    def _mismatched(self, step: Step) -> tuple[ReferencedBatch, ...]:
        """One batch for each of this rank's micro-batches, so that all ranks run equally many forward passes."""
        if step.examples[step.shortest].mismatched is None:  # no answer has one
            return ()
        count = len(step.micro_batches) // self.sizes.world_size
        return tuple(self.joined(step, number, collate_mismatched) for number in range(count))


# ------------------------------------------------------------------------------------------------------- judged steps
#
# For process reward models. A step is judged at its last token, which ``loss_mask`` marks, as TRL and OpenRLHF do.


@dataclass(slots=True)
class StepwiseExample:
    """A prompt with an answer in steps."""

    answer: TokenExample
    """Prompt and answer; ``loss_mask`` is true on the last token of each step."""
    labels: Sequence[float]
    """For each step, the probability that it is good: 1 and 0 are hard labels, values between are soft ones."""

    def __post_init__(self) -> None:
        """Check that there is one label in [0, 1] for each step."""
        if len(self.labels) != self.answer.targets:
            raise ValueError(
                f"a StepwiseExample needs a label for each step, got {self.answer.targets} steps and "
                f"{len(self.labels)} labels"
            )
        wrong = [label for label in self.labels if not 0.0 <= label <= 1.0]
        if wrong:
            raise ValueError(f"the label of a step must be in [0, 1], got {wrong[0]}")

    @property
    def num_tokens(self) -> int:
        """Tokens of prompt and answer."""
        return self.answer.num_tokens

    @property
    def targets(self) -> int:
        """Number of steps."""
        return self.answer.targets


@dataclass(kw_only=True)
class StepwiseBatch(TokenBatch):
    """Answers in steps; ``step_tokens`` counts the reasoning steps of the optimizer step."""

    labels: Tensor = step_field()
    """(B, T-1) float32 on the next-token axis: label of the step that ends at token t+1; 0 where none ends."""

    @property
    def step_ends(self) -> Tensor:
        """(B, T) bool, true on the last token of each step."""
        return on_both(lambda mask: torch.nn.functional.pad(mask, (1, 0)), self.loss_mask)


def collate_stepwise(examples: Sequence[StepwiseExample], totals: StepTotals | None = None) -> StepwiseBatch:
    """Stack answers, padding on the right.

    Args:
        examples: At least one.
        totals: Size of their optimizer step; ``None``: unknown, the batch normalises by itself.

    Raises:
        ValueError: If there is no example.
    """
    answers = collate_tokens([example.answer for example in examples], totals)
    labels = torch.zeros(answers.loss_mask.shape, dtype=torch.float32)
    labels[answers.loss_mask] = torch.tensor([label for example in examples for label in example.labels])
    return StepwiseBatch(**vars(answers), labels=labels)


# --------------------------------------------------------------------------------------- a teacher's likeliest tokens


@dataclass(slots=True)
class DistilledExample:
    """A tokenised sequence and the teacher's likeliest tokens at each trained one: 8 K bytes per trained token."""

    tokens: TokenExample
    """The sequence."""
    logprobs: Tensor
    """(targets, K) float32."""
    ids: Tensor
    """(targets, K) int32."""


class ValuesOfTargets:
    """Values of the trained tokens of each example, out of those of all examples."""

    def __init__(self, values: Tensor, targets: Sequence[int]) -> None:
        """Divide (all targets, K) values among examples with these numbers of trained tokens.

        Raises:
            ValueError: If the numbers of tokens differ.
        """
        if sum(targets) != len(values):
            raise ValueError(f"the examples have {sum(targets)} trained tokens, and there are {len(values)} values")
        self._values = values
        self._ends = [0, *accumulate(targets)]

    def __len__(self) -> int:
        """Number of examples."""
        return len(self._ends) - 1

    def __getitem__(self, index: int) -> Tensor:
        """(targets, K) values of one example."""
        return self._values[self._ends[index] : self._ends[index + 1]]


def distilled_examples(examples: TokenizedDataset, logprobs: Tensor, ids: Tensor) -> ExampleTable[DistilledExample]:
    """Combine examples with the teacher's log-probs and token ids, (all targets, K) each, example after example.

    Raises:
        ValueError: If the numbers of tokens differ.
    """
    of_targets = [ValuesOfTargets(values, examples.targets) for values in (logprobs, ids)]
    return ExampleTable(examples, DistilledExample, logprobs=of_targets[0], ids=of_targets[1])


@dataclass(kw_only=True)
class DistilledBatch(TokenBatch):
    """A batch for supervised training with the teacher's likeliest tokens."""

    teacher_logprobs: Tensor
    """(M, K) float32."""
    teacher_ids: Tensor
    """(M, K) int64."""

    def to(self, device: torch.device | str, **kwargs: Any) -> Self:
        """Move every tensor; see :meth:`PaddedBatch.to`."""
        names = ("teacher_logprobs", "teacher_ids")
        teacher: dict[str, Any] = {name: moved(getattr(self, name), device, **kwargs) for name in names}
        return dataclasses.replace(super().to(device, **kwargs), **teacher)

    def without_targets(self) -> Self:
        """The same sequences without trained tokens: loss and gradient are exactly 0."""
        return dataclasses.replace(
            super().without_targets(), teacher_logprobs=self.teacher_logprobs[:0], teacher_ids=self.teacher_ids[:0]
        )


def collate_distilled(examples: Sequence[DistilledExample], totals: StepTotals | None = None) -> DistilledBatch:
    """Stack examples, padding on the right.

    Args:
        examples: At least one.
        totals: Size of their optimizer step; ``None``: unknown, the batch normalises by itself.

    Raises:
        ValueError: If there is no example.
    """
    tokens = collate_tokens([example.tokens for example in examples], totals)
    return DistilledBatch(
        **vars(tokens),
        teacher_logprobs=torch.cat([example.logprobs for example in examples]),
        teacher_ids=torch.cat([example.ids for example in examples]).long(),
    )
