"""Batches of padded sequences, and token examples with their collation for supervised training.

Tensor fields of a :class:`PaddedBatch` subclass name their axis (:func:`token_field`, :func:`step_field`,
:func:`row_field`, and dictionaries of them :func:`steps_field`, :func:`rows_field`); select, trim, pad, concat, to and
state_dict then work on all of them.
On the **next-token axis** of length T - 1, entry ``t`` belongs to token ``t + 1``.
Shapes: B sequences, T tokens (longest sequence of the batch; the rest is padded on the right).
"""

import dataclasses
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.utils.weak import WeakIdKeyDictionary


def token_field(default: Any = dataclasses.MISSING) -> Any:
    """A (B, T) tensor; padding is 0 or false."""
    return field(default=default, metadata={"axis": "token"})


def step_field(default: Any = dataclasses.MISSING, *, fill: int = 0) -> Any:
    """A (B, T-1) or (B, T-1, C) tensor on the next-token axis; padding is ``fill``."""
    return field(default=default, metadata={"axis": "step", "fill": fill})


def row_field(default: Any = dataclasses.MISSING) -> Any:
    """A (B,) tensor."""
    return field(default=default, metadata={"axis": "row"})


def rows_field() -> Any:
    """A dictionary of (B,) tensors; empty by default."""
    return field(default_factory=dict, metadata={"axis": "row", "by_name": True})


def steps_field() -> Any:
    """A dictionary of (B, T-1) or (B, T-1, C) tensors on the next-token axis, padded with 0; empty by default."""
    return field(default_factory=dict, metadata={"axis": "step", "by_name": True})


class _HostCopy(NamedTuple):
    """What a tensor on a GPU holds, on the CPU."""

    tensor: Tensor
    versions: tuple[int, int]
    """How often both had been changed in place."""


# A forward pass needs the lengths of its sequences on the host. To read them from the GPU it would have to wait until
# the GPU has done all that it was asked to do before; from the batch's tensors on the CPU it does not.
_copies: MutableMapping[Tensor, _HostCopy] = WeakIdKeyDictionary()


def remember_host_copy(tensor: Tensor, source: Tensor) -> Tensor:
    """Remember that ``tensor`` has been copied from ``source`` on the CPU, as long as it exists; return it."""
    tracked = not (tensor.is_inference() or source.is_inference())  # others have no version
    if source.device.type == "cpu" and tensor.device.type != "cpu" and tracked:
        _copies[tensor] = _HostCopy(source, (tensor._version, source._version))
    return tensor


def host_copy(tensor: Tensor) -> Tensor | None:
    """A tensor on the CPU with the same values, itself if it is there; ``None`` if they would have to be copied."""
    if tensor.device.type == "cpu":
        return tensor
    known = _copies.get(tensor)
    if known is None or known.versions != (tensor._version, known.tensor._version):
        return None
    return known.tensor


def on_both(compute: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
    """``compute(*tensors)``, computed on the host too where all tensors are known there."""
    result, known = compute(*tensors), [host_copy(tensor) for tensor in tensors]
    copies = [copy for copy in known if copy is not None]
    if len(copies) < len(tensors) or result.device.type == "cpu":
        return result
    return remember_host_copy(result, compute(*copies))


def moved(tensor: Tensor, device: torch.device | str, **kwargs: Any) -> Tensor:
    """:meth:`torch.Tensor.to` that does not wait for a GPU to which it copies; see :func:`host_copy` too.

    Lightning asks for that with plain tensors only. A copy to the CPU has to wait for the values.
    """
    target = torch.device(device)
    options = {"non_blocking": target.type not in ("cpu", "mps")} | kwargs
    pinned = target.type == "cuda" and tensor.device.type == "cpu"  # a copy from pageable memory waits all the same
    return remember_host_copy((tensor.pin_memory() if pinned else tensor).to(target, **options), tensor)


@dataclass(kw_only=True)
class PaddedBatch:
    """Sequences padded on the right, and the size of the optimizer step that the batch is part of.

    Attributes:
        input_ids: (B, T) int64, padded with 0 on the right.
        attention_mask: (B, T) bool, true on real tokens.
        attachments: What each of the B rows has beside tokens: its images, :class:`~rlhfkit.data.images.Image`, in the
            order of their tokens; ``None``: no row has any.
        step_tokens: Selected tokens of the whole optimizer step, all micro-batches and ranks.
        step_sequences: Sequences with a selected token of the whole optimizer step, all micro-batches and ranks.
        step_micro_batches: Micro-batches (times ranks) whose losses are averaged in one optimizer step.
    """

    input_ids: Tensor = token_field()
    attention_mask: Tensor = token_field()

    attachments: tuple[tuple[Any, ...], ...] | None = None
    step_tokens: float | None = None
    step_sequences: float | None = None
    step_micro_batches: int = 1

    def __len__(self) -> int:
        """Number of sequences B."""
        return self.input_ids.shape[0]

    @property
    def lengths(self) -> Tensor:
        """(B,) int64, real tokens per sequence."""
        return self.attention_mask.sum(-1)

    @property
    def token_denominator(self) -> float | None:
        """Denominator of an exact token mean: the step's tokens per averaged micro-batch; ``None`` if unknown."""
        return None if self.step_tokens is None else max(self.step_tokens, 1.0) / self.step_micro_batches

    @property
    def sequence_denominator(self) -> float | None:
        """Denominator of an exact sequence mean: the step's sequences per averaged micro-batch; ``None`` if unknown."""
        return None if self.step_sequences is None else max(self.step_sequences, 1.0) / self.step_micro_batches

    def tensors(self) -> dict[str, tuple[Tensor, Mapping[str, Any]]]:
        """Every tensor and the metadata of its field, by ``field``, or ``field.name`` in a dictionary."""
        found: dict[str, tuple[Tensor, Mapping[str, Any]]] = {}
        for entry in dataclasses.fields(self):
            value = getattr(self, entry.name)
            if entry.metadata.get("by_name"):
                found |= {f"{entry.name}.{name}": (tensor, entry.metadata) for name, tensor in value.items()}
            elif "axis" in entry.metadata and value is not None:
                found[entry.name] = value, entry.metadata
        return found

    def with_tensors(self, tensors: Mapping[str, Tensor]) -> Self:
        """Copy with some tensors replaced or added, by name as in :meth:`tensors`."""
        updates: dict[str, Any] = {}
        for name, tensor in tensors.items():
            owner, _, key = name.partition(".")
            if key:
                updates[owner] = {**updates.get(owner, getattr(self, owner)), key: tensor}
            else:
                updates[owner] = tensor
        return dataclasses.replace(self, **updates)

    def map_tensors(self, change: Callable[[Tensor, Mapping[str, Any]], Tensor]) -> Self:
        """Copy with every tensor replaced by ``change(tensor, metadata of the field)``."""
        return self.with_tensors(
            {name: change(tensor, metadata) for name, (tensor, metadata) in self.tensors().items()}
        )

    def select(self, rows: Tensor | Sequence[int]) -> Self:
        """Select rows by their (N,) indices, in the given order, trimmed to the longest of them."""
        index = torch.as_tensor(rows, dtype=torch.int64, device=self.input_ids.device)
        return self.with_rows(index).trim()

    def with_rows(self, index: Tensor) -> Self:
        """Rows by their (N,) int64 indices, as long as they are."""
        chosen = self.map_tensors(lambda tensor, _: tensor[index])
        if self.attachments is not None:
            chosen.attachments = tuple(self.attachments[row] for row in index.tolist())
        return chosen

    def trim(self) -> Self:
        """Cut padding that all rows share."""
        return self.first_tokens(max(int(self.lengths.max()), 1) if len(self) else 1)

    def first_tokens(self, length: int) -> Self:
        """Cut rows after ``length`` tokens, at least 1."""
        ends = {"token": length, "step": length - 1}
        return self.map_tensors(
            lambda tensor, metadata: tensor if metadata["axis"] == "row" else tensor[:, : ends[metadata["axis"]]]
        )

    def placeholder(self) -> Self:
        """One sequence of two tokens, of which none is selected, with this batch's fields, all 0 or their fill.

        The least that a model can run, for a rank that only takes part in a forward pass of others.
        """
        shapes = {"token": (1, 2), "step": (1, 1), "row": (1,)}
        blank = self.map_tensors(
            lambda tensor, metadata: tensor.new_full(
                (*shapes[metadata["axis"]], *tensor.shape[2:]), metadata.get("fill", 0)
            )
        )
        return dataclasses.replace(blank, attention_mask=blank.input_ids == 0, attachments=None)

    def pad(self, length: int) -> Self:
        """Pad on the right to ``length`` tokens.

        Raises:
            ValueError: If the batch is longer already.
        """
        extra = length - self.input_ids.shape[1]
        if extra < 0:
            raise ValueError(f"cannot pad to {length} tokens: the batch has {self.input_ids.shape[1]} already")

        def padded(tensor: Tensor, metadata: Mapping[str, Any]) -> Tensor:
            if metadata["axis"] == "row":
                return tensor
            columns = (0, 0) * (tensor.dim() - 2)  # pad() begins with the last axis
            return pad(tensor, (*columns, 0, extra), value=metadata.get("fill", 0))

        return self.map_tensors(padded)

    def to(self, device: torch.device | str, **kwargs: Any) -> Self:
        """Move every tensor, keeping dtypes; ``kwargs`` go to :meth:`torch.Tensor.to`.

        Copies to a GPU do not wait, and what they hold can be read on the host; see :func:`host_copy`.
        """
        return self.map_tensors(lambda tensor, _: moved(tensor, device, **kwargs))

    def state_dict(self) -> dict[str, Any]:
        """Tensors and plain values, loadable with ``torch.load(weights_only=True)``."""
        state = {entry.name: getattr(self, entry.name) for entry in dataclasses.fields(self)}
        if self.attachments is not None:
            state["attachments"] = [[one.plain() for one in row] for row in self.attachments]
        return state

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any]) -> Self:
        """Inverse of :meth:`state_dict`."""
        batch = cls(**state)
        if batch.attachments is not None:
            batch.attachments = tuple(map(read_attachments, batch.attachments))
        return batch


def read_attachments(given: Sequence[Any]) -> tuple[Any, ...]:
    """The attachments of a prompt or a row, of which some may be what their ``plain()`` returned."""
    if not any(isinstance(one, str) for one in given):
        return tuple(given)
    from rlhfkit.data.images import Image

    return tuple(Image.of_plain(one) if isinstance(one, str) else one for one in given)


class StepTotals(NamedTuple):
    """Size of a whole optimizer step, over all micro-batches and ranks."""

    tokens: float
    """Trained tokens."""
    sequences: float
    """Sequences with at least one trained token."""
    micro_batches: int
    """Micro-batches times ranks whose losses are averaged."""


@dataclass(slots=True)
class TokenExample:
    """One tokenised sequence and the mask of its trained tokens."""

    input_ids: list[int]
    """Token ids, at least one."""
    loss_mask: list[bool]
    """As long as ``input_ids``: true where the token is trained. The first never is: nothing predicts it."""
    attachments: tuple[Any, ...] = ()
    """What there is beside tokens: images, in the order of their tokens."""
    numbers: Mapping[str, float] = field(default_factory=dict)
    """Numbers of its row of the data, by column."""

    def __post_init__(self) -> None:
        """Check that both lists have one length."""
        if len(self.input_ids) != len(self.loss_mask) or not self.input_ids:
            raise ValueError(
                f"a TokenExample needs at least one token and a mask of the same length, got {len(self.input_ids)} "
                f"tokens and a mask of {len(self.loss_mask)}"
            )

    @property
    def num_tokens(self) -> int:
        """Number of tokens."""
        return len(self.input_ids)

    @property
    def targets(self) -> int:
        """Number of trained tokens."""
        return sum(self.loss_mask[1:])


@dataclass(kw_only=True)
class TokenBatch(PaddedBatch):
    """A batch for supervised training."""

    loss_mask: Tensor = step_field()
    """(B, T-1) bool on the next-token axis, true where token t+1 is trained."""
    numbers: dict[str, Tensor] = rows_field()
    """(B,) float32 each: the columns of the data that ``SFTDataModule(numbers=[...])`` names."""

    @property
    def action_mask(self) -> Tensor:
        """``loss_mask``, under its name in :class:`~rlhfkit.data.Experience`."""
        return self.loss_mask

    def without_targets(self) -> Self:
        """The same sequences without trained tokens: loss and gradient are exactly 0."""
        return dataclasses.replace(self, loss_mask=torch.zeros_like(self.loss_mask))


def collate_tokens(examples: Sequence[TokenExample], totals: StepTotals | None = None) -> TokenBatch:
    """Stack examples, padding on the right.

    Args:
        examples: At least one.
        totals: Size of their optimizer step; ``None``: unknown, the batch normalises by itself.

    Raises:
        ValueError: If there is no example.
    """
    if not examples:
        raise ValueError("a TokenBatch needs at least one example, got none")
    length = max(len(example.input_ids) for example in examples)
    input_ids = torch.zeros(len(examples), length, dtype=torch.int64)
    attention_mask = torch.zeros(len(examples), length, dtype=torch.bool)
    loss_mask = torch.zeros(len(examples), length, dtype=torch.bool)
    for row, example in enumerate(examples):
        end = len(example.input_ids)
        input_ids[row, :end] = torch.tensor(example.input_ids)
        attention_mask[row, :end] = True
        loss_mask[row, :end] = torch.tensor(example.loss_mask)
    numbers = {
        name: torch.tensor([float(example.numbers[name]) for example in examples]) for name in examples[0].numbers
    }
    batch = TokenBatch(input_ids=input_ids, attention_mask=attention_mask, loss_mask=loss_mask[:, 1:], numbers=numbers)
    if any(example.attachments for example in examples):
        batch.attachments = tuple(example.attachments for example in examples)
    if totals is None:
        return batch
    return dataclasses.replace(
        batch,
        step_tokens=float(totals.tokens),
        step_sequences=float(totals.sequences),
        step_micro_batches=totals.micro_batches,
    )
