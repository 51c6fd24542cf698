"""Answers labelled desirable or not, each with a mismatched pair: the same prompt with the answer to another one.

KTO measures on *mismatched* pairs how far the policy is from its reference. They are drawn once over all data, in a
stream over the answers of each optimizer step, so they do not depend on micro-batches or ranks; TRL and OpenRLHF rotate
the answers within a micro-batch of more than one.
Shapes: B sequences, T tokens (longest of the batch; the rest is padded on the right).
"""

import dataclasses
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Self

import torch
from torch import Tensor

from rlhfkit.data.batch import StepTotals, TokenBatch, TokenExample, collate_tokens, row_field
from rlhfkit.data.loaders.steps import ExampleTable, Step, StepLoader, TokenizedDataset
from rlhfkit.validation import check_integer


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
