"""What a model's family can do, found out on a tiny copy when a model is loaded, not looked up in a list of names.

A packed row is right only if every layer that mixes tokens keeps its sequences apart. Nothing that a class declares
says so: attention may ignore the layout that it is handed, build a window, a soft cap or learned sinks in code of its
own, count positions by itself, or stand beside recurrent layers. So each class is tried, once a process for each
configuration: a copy of a few layers with hidden sizes of a few hundred numbers and random weights in float32 on the
CPU (``tiny_config.py``), whose packed rows must say what the model's own code says of one sequence at a
time. It takes a tenth of a second. It was chosen over a check of the loaded model on its first batch because it runs
before anything is sharded (ZeRO 3 would need every rank in it), is exact where weights of 16 bits would hide a small
leak behind their rounding, finds the same on every rank, and makes windows shorter than its sequences, where a batch of
short sequences would never reach a window of 4096 tokens.

What cannot be tried is taken for not possible. :class:`~rlhfkit.Invariants` checks real rows for the same property.
"""

import copy
import json
import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from rlhfkit.models.attention.packed import PACKED_ATTENTION, PackedLayout, register_packed_attention
from rlhfkit.models.attention.tiny_config import tiny_config

log = logging.getLogger(__name__)

TOLERANCE = 1e-3
"""Nats, or units of the hidden state, both of which are about 1 in the tiny copy. float32 gives 1e-4 at most over all
families of Transformers; the smallest real difference seen, a soft cap of 50 on scores of about 2, gives 6e-3."""

SEQUENCES = ((5, 9, 20, 33, 7, 11, 13, 29), (5, 9, 20, 8, 41, 50, 10, 21, 6), (40, 30, 22, 19, 17))
"""Tokens of the trial. The first two begin alike, so a shared prompt is tried too; all are longer than a window is."""

_MOST_PARAMETERS = 10**8


def packing_problem(model: nn.Module) -> str | None:
    """Why sequences of this model's family cannot lie in one row, apart from one another; ``None``: they can.

    Args:
        model: A Hugging Face model; only its class and its configuration are looked at.
    """
    return _packing_problem(FamilyKey.of(model))


def exact_attention(model: nn.Module) -> str | None:
    """Transformers' attention for batches with padding: ``None`` for the one that a class takes unless told.

    That is ``sdpa`` for most, which leaves soft caps of Gemma 2's attention out; then it is ``eager``.

    Args:
        model: A Hugging Face model; only its class and its configuration are looked at.
    """
    return _exact_attention(FamilyKey.of(model))


@dataclass(frozen=True)
class FamilyKey:
    """What models of a family with one configuration have in common."""

    kind: Any
    """The class."""
    said: str
    """The configuration as text."""
    config: Any = field(compare=False)
    """The configuration of the first that asked."""

    @classmethod
    def of(cls, model: nn.Module) -> "FamilyKey":
        """The family of a model."""
        config: Any = model.config
        said = {name: value for name, value in config.to_dict().items() if name not in ("_name_or_path", "dtype")}
        return cls(type(model), json.dumps(said, sort_keys=True, default=repr), config)

    @property
    def has_interface(self) -> bool:
        """Whether the class says that its attention goes through Transformers' attention interface."""
        return bool(getattr(self.kind, "_supports_attention_backend", False))


@cache
def _packing_problem(family: FamilyKey) -> str | None:
    if not family.has_interface:
        return "its attention does not go through Transformers' attention interface"
    return tried(lambda: _packed(TinyCopies(family)))


@cache
def _exact_attention(family: FamilyKey) -> str | None:
    if not family.has_interface:
        return None  # what the class takes is in its own code, whose author knows what it can do
    if tried(lambda: _padded(TinyCopies(family), None)) is None:
        return None
    return "eager" if tried(lambda: _padded(TinyCopies(family), "eager")) is None else None


def tried(trial: Callable[[], str | None]) -> str | None:
    """What a trial finds, or the error in which it ends, as one line.

    Args:
        trial: Gives the reason why something does not work, or ``None``.
    """
    try:
        return trial()
    except Exception as error:  # a family that nobody has seen may fail in any way
        first = next(iter(str(error).strip().splitlines()), "")[:160]
        return f"a tiny copy of it raises {type(error).__name__}: {first}"


def _packed(copies: "TinyCopies") -> str | None:
    register_packed_attention()
    ids, real = copies.batch
    layout, tokens = PackedLayout.from_batch(ids, real)
    model = copies.build(PACKED_ATTENTION)
    row = copies.run(model, input_ids=tokens, position_ids=layout.position_ids, packed_layout=layout)[0]
    if not layout.readers:
        return "none of its layers reads where the sequences of a packed row begin and end"
    return copies.difference(
        [row[places[: len(ids)]] for places, ids in zip(layout.places, SEQUENCES, strict=True)], "packed"
    )


def _padded(copies: "TinyCopies", attention: str | None) -> str | None:
    ids, real = copies.batch
    rows = copies.run(copies.build(attention), input_ids=ids, attention_mask=real.long())
    return copies.difference([row[: len(ids)] for row, ids in zip(rows, SEQUENCES, strict=True)], "padded")


class TinyCopies:
    """Tiny models of a class, all with the same random weights.

    Args:
        family: Class and configuration; shrunk here.

    Raises:
        ValueError: If the configuration cannot be shrunk enough.
    """

    def __init__(self, family: FamilyKey) -> None:
        self.kind = family.kind
        self.config = tiny_config(family.config)
        with torch.device("meta"):
            parameters = sum(weight.numel() for weight in self._empty("eager").parameters())
        if parameters > _MOST_PARAMETERS:
            raise ValueError(f"{parameters:.2g} parameters are left, which is no tiny copy")
        self._weights: dict[str, Tensor] | None = None

    @cached_property
    def alone(self) -> list[Tensor]:
        """What the model's own code says of each of :data:`SEQUENCES` by itself, (T, V) or (T, H) each."""
        plain = self.build("eager")
        return [self.run(plain, input_ids=torch.tensor([row]))[0] for row in SEQUENCES]

    @cached_property
    def batch(self) -> tuple[Tensor, Tensor]:
        """:data:`SEQUENCES` padded on the right, (B, T) int64, and (B, T) bool, true on their tokens."""
        ids = pad_sequence([torch.tensor(row) for row in SEQUENCES], batch_first=True)
        return ids, pad_sequence([torch.ones(len(row)) for row in SEQUENCES], batch_first=True).bool()

    def difference(self, rows: Sequence[Tensor], how: str, last: int = 0) -> str | None:
        """Say how far results are from those of each sequence alone, if they are.

        Args:
            rows: Of each of :data:`SEQUENCES`, like :attr:`alone`.
            how: They were made.
            last: Tokens that they are of; 0: all.
        """
        far = max(float((row - other[-last:]).abs().max()) for row, other in zip(rows, self.alone, strict=True))
        return (
            None if far <= TOLERANCE else f"{how} sequences of a tiny copy are {far:.2g} away from what they are alone"
        )

    def build(self, attention: str | None) -> nn.Module:
        """A model in eval mode.

        Args:
            attention: Transformers' ``attn_implementation``; ``None``: the one that it takes unless told.
        """
        with torch.random.fork_rng(devices=[]), torch.device("cpu"):
            torch.manual_seed(0)
            model = self._empty(attention)
        if self._weights is None:
            _randomize(model)
            self._weights = model.state_dict()
        else:
            model.load_state_dict(self._weights)
        return model.eval()

    def _empty(self, attention: str | None) -> nn.Module:
        """In float32, whatever the default type is now."""
        config, before = copy.deepcopy(self.config), torch.get_default_dtype()
        config._attn_implementation = "eager" if attention == PACKED_ATTENTION else attention
        if attention == PACKED_ATTENTION:
            config.get_text_config()._attn_implementation = attention
        torch.set_default_dtype(torch.float32)
        try:
            with _unsharded():
                return cast(nn.Module, self.kind(config).float())
        finally:
            torch.set_default_dtype(before)

    @torch.no_grad()
    def run(self, model: Any, **inputs: Any) -> Tensor:
        """(B, T, V) log-probs of a language model, (B, T, H) hidden states of another.

        Args:
            model: From :meth:`build`.
            **inputs: Of its forward pass.
        """
        with torch.autocast("cpu", enabled=False):
            if model.get_output_embeddings() is not None:
                return cast(Tensor, model(**inputs, use_cache=False).logits.float().log_softmax(-1))
            return cast(Tensor, model.base_model(**inputs, use_cache=False).last_hidden_state)


@contextmanager
def _unsharded() -> Iterator[None]:
    """Outside ``deepspeed.zero.Init``, in which Lightning's own strategies for ZeRO 3 build models."""
    if "deepspeed" not in sys.modules:
        yield
        return
    from deepspeed.runtime.zero.partition_parameters import restore_init_context, shutdown_init_context

    shutdown_init_context()
    try:
        yield
    finally:
        restore_init_context()


@torch.no_grad()
def _randomize(model: nn.Module) -> None:
    """Weights that keep activations at about 1 and leave none at zero, where it would not show."""
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if parameter.dim() < 2:
            parameter.add_(0.1 * noise)
        else:
            parameter.copy_(1.5 * parameter.shape[-1] ** -0.5 * noise)


def use_packed_attention(model: nn.Module, *, required: bool = False) -> None:
    """Switch a model to our packed attention if its family can be packed; else to an exact one, and say so in the log.

    Of a model with other parts (a vision tower) only the text part is switched.

    Args:
        model: A Hugging Face model, changed in place.
        required: Raise instead of leaving the model unpacked.

    Raises:
        ValueError: If ``required`` and the family cannot be packed.
    """
    register_packed_attention()
    name, why = type(model).__name__, packing_problem(model)
    text = cast(Any, model).config.get_text_config()
    if why is None:
        text._attn_implementation = PACKED_ATTENTION
    elif required:
        raise ValueError(f"attention={PACKED_ATTENTION!r} would be wrong for {name}: {why}; leave attention out")
    else:
        exact = exact_attention(model)
        if exact is not None:
            text._attn_implementation = exact
        _warn_once(
            f"{name} is not packed: {why}. Its batches are padded and run with Transformers' own attention "
            f"({text._attn_implementation}), which is slower"
        )


def use_transformers_attention(model: nn.Module) -> None:
    """Switch a model to Transformers' attention that is exact for its family, for use with a cache of keys and values.

    Args:
        model: A Hugging Face model, changed in place.
    """
    hugging_face: Any = model
    own = exact_attention(model) or hugging_face.get_correct_attn_implementation(None)
    hugging_face.config.get_text_config()._attn_implementation = own


@cache
def _warn_once(message: str) -> None:
    log.warning(message)
