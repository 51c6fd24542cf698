"""Whether a model family supports packed rows, measured on a tiny copy when a model is loaded.

No attribute tells whether every layer that mixes tokens separates the sequences: attention may ignore the layout, have
windows, soft caps or sinks of its own, count positions itself, or be mixed with recurrent layers. So the packed rows of
a small random float32 copy on the CPU (``tiny_config.py``) must equal the model's own code on one sequence at a time,
tested once per process, class and configuration (0.1 s). Unlike a check on the first batch, this works before sharding,
is exact and agrees between ranks. A family that fails in any way is not packed. :class:`~rlhfkit.Invariants` checks the
same on real rows.
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

from rlhfkit.models.attention.layout import PackedLayout
from rlhfkit.models.attention.packed import (
    PACKED_ATTENTION,
    PACKED_ATTENTIONS,
    register_packed_attention,
    without_masks,
)
from rlhfkit.models.attention.tiny_config import tiny_config

log = logging.getLogger(__name__)

TOLERANCE = 1e-3
"""Nats, or units of the hidden state, both of which are about 1 in the tiny copy. float32 gives 1e-4 at most over all
families of Transformers; the smallest real difference seen, a soft cap of 50 on scores of about 2, gives 6e-3.
"""

SEQUENCES = ((5, 9, 20, 33, 7, 11, 13, 29), (5, 9, 20, 8, 41, 50, 10, 21, 6), (40, 30, 22, 19, 17))
"""Tokens of the test. The first two begin alike, to test a shared prefix; all are longer than a window."""

_MOST_PARAMETERS = 10**8


def packing_problem(model: nn.Module) -> str | None:
    """Why sequences of this model's class and configuration cannot be packed into one row; ``None`` if they can."""
    return _packing_problem(FamilyKey.of(model))


def exact_attention(model: nn.Module) -> str | None:
    """The ``attn_implementation`` that is exact for padded batches of a model's class; ``None`` if the default one is.

    ``eager`` where the default ``sdpa`` ignores soft caps (Gemma 2).
    """
    return _exact_attention(FamilyKey.of(model))


def attention_cap(config: Any) -> float | None:
    """Soft cap of the attention scores, which the small scores of a random copy may not reach; ``None``: none."""
    cap: float | None = getattr(config.get_text_config(), "attn_logit_softcapping", None)
    return cap


@dataclass(frozen=True)
class FamilyKey:
    """Class and configuration of a model, hashable."""

    kind: Any
    """The class."""
    said: str
    """The configuration as text."""
    config: Any = field(compare=False)
    """The configuration of the first model with this key."""

    @classmethod
    def of(cls, model: nn.Module) -> "FamilyKey":
        """The family of a model."""
        config: Any = model.config
        said = {name: value for name, value in config.to_dict().items() if name not in ("_name_or_path", "dtype")}
        return cls(type(model), json.dumps(said, sort_keys=True, default=repr), config)

    @property
    def has_interface(self) -> bool:
        """Whether the class declares that it uses Transformers' attention interface."""
        return bool(getattr(self.kind, "_supports_attention_backend", False))


@cache
def _packing_problem(family: FamilyKey) -> str | None:
    if not family.has_interface:
        return "its attention does not go through Transformers' attention interface"
    cap = attention_cap(family.config)
    if cap is not None:
        return f"its attention scores have a soft cap ({cap:g}), which packed attention does not compute"
    return find_problem(lambda: _packed(TinyCopies(family)))


@cache
def _exact_attention(family: FamilyKey) -> str | None:
    if not family.has_interface:
        return None  # the class implements its own attention, which is taken as exact
    if attention_cap(family.config) is not None:
        return "eager"
    if find_problem(lambda: _padded(TinyCopies(family), None)) is None:
        return None
    return "eager" if find_problem(lambda: _padded(TinyCopies(family), "eager")) is None else None


def find_problem(trial: Callable[[], str | None]) -> str | None:
    """Run a test that returns a problem or ``None``; an error in it is a problem too, as one line."""
    try:
        with torch.device("cpu"):  # Lightning builds models with the GPU as the default device
            return trial()
    except Exception as error:  # an unknown family may fail in any way
        first = next(iter(str(error).strip().splitlines()), "")[:160]
        return f"a tiny copy of it raises {type(error).__name__}: {first}"


def _packed(copies: "TinyCopies") -> str | None:
    register_packed_attention()
    ids, real = copies.batch
    layout, tokens = PackedLayout.from_batch(ids, real)
    model = copies.build(PACKED_ATTENTION)
    with without_masks(model):
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
    """Tiny models of one class, all with the same random weights.

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
        """Results of the model's own code for each of :data:`SEQUENCES` alone, (T, V) or (T, H) each."""
        plain = self.build("eager")
        return [self.run(plain, input_ids=torch.tensor([row]))[0] for row in SEQUENCES]

    @cached_property
    def batch(self) -> tuple[Tensor, Tensor]:
        """:data:`SEQUENCES` padded on the right, (B, T) int64, and (B, T) bool, true on their tokens."""
        ids = pad_sequence([torch.tensor(row) for row in SEQUENCES], batch_first=True)
        return ids, pad_sequence([torch.ones(len(row)) for row in SEQUENCES], batch_first=True).bool()

    def difference(self, rows: Sequence[Tensor], how: str, last: int = 0) -> str | None:
        """Describe how far ``rows`` are from :attr:`alone`; ``None`` if within :data:`TOLERANCE`.

        ``rows`` are results for :data:`SEQUENCES`, ``how`` names them in the message; only ``last`` tokens are
        compared, all if 0.
        """
        far = max(float((row - other[-last:]).abs().max()) for row, other in zip(rows, self.alone, strict=True))
        return (
            None if far <= TOLERANCE else f"{how} sequences of a tiny copy are {far:.2g} away from what they are alone"
        )

    def build(self, attention: str | None) -> nn.Module:
        """Build a model in eval mode, with Transformers' ``attn_implementation`` or, for ``None``, the default one."""
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
        """Build it in float32, whatever the default dtype is."""
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
        """(B, T, V) log-probs of a language model, (B, T, H) hidden states of another model."""
        with torch.autocast("cpu", enabled=False):
            if model.get_output_embeddings() is not None:
                return cast(Tensor, model(**inputs, use_cache=False).logits.float().log_softmax(-1))
            return cast(Tensor, model.base_model(**inputs, use_cache=False).last_hidden_state)


@contextmanager
def _unsharded() -> Iterator[None]:
    """Leave ``deepspeed.zero.Init``, in which Lightning's own ZeRO-3 strategies build models, and Transformers' mode.

    In its ZeRO-3 mode Transformers 5.19 fills the weights of classifiers while they are made, also of ones on "meta".
    """
    if "deepspeed" not in sys.modules:
        yield
        return
    from deepspeed.runtime.zero.partition_parameters import restore_init_context, shutdown_init_context
    from transformers.integrations import deepspeed as integration

    mode: Any = integration
    sharding = mode._hf_deepspeed_config_weak_ref
    shutdown_init_context()
    mode.unset_hf_deepspeed_config()
    try:
        yield
    finally:
        mode._hf_deepspeed_config_weak_ref = sharding
        restore_init_context()


@torch.no_grad()
def _randomize(model: nn.Module) -> None:
    """Random weights that keep activations at about 1, none of them zero."""
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if parameter.dim() < 2:
            parameter.add_(0.1 * noise)
        else:
            parameter.copy_(1.5 * parameter.shape[-1] ** -0.5 * noise)


def use_packed_attention(model: nn.Module, attention: str | None = None) -> None:
    """Switch a model's text part in place to packed attention if supported, else, with a log message, to an exact one.

    ``attention`` is a key of ``PACKED_ATTENTIONS``, :data:`PACKED_ATTENTION`, or ``None``, which is ``auto``. A family
    that cannot be packed keeps the flash attention that it was loaded with.

    Raises:
        ValueError: If ``varlen``, ``buckets`` or :data:`PACKED_ATTENTION` is asked for and the family cannot be packed.
    """
    register_packed_attention()
    name, why = type(model).__name__, packing_problem(model)
    text = cast(Any, model).config.get_text_config()
    if why is None:
        text._attn_implementation = PACKED_ATTENTIONS.get(attention or "auto", PACKED_ATTENTION)
    elif attention in ("varlen", "buckets", PACKED_ATTENTION):
        raise ValueError(f"attention={attention!r} would be wrong for {name}: {why}; leave attention out")
    else:
        exact = exact_attention(model) if attention in (None, "auto") else None
        if exact is not None:
            text._attn_implementation = exact
        _warn_once(
            f"{name} is not packed: {why}. Its batches are padded and run with Transformers' own attention "
            f"({text._attn_implementation}), which is slower"
        )


def use_transformers_attention(model: nn.Module) -> None:
    """Switch a model to the Transformers attention that is exact for its family, for use with a key-value cache."""
    hugging_face: Any = model
    own = exact_attention(model) or hugging_face.get_correct_attn_implementation(None)
    hugging_face.config.get_text_config()._attn_implementation = own


@cache
def _warn_once(message: str) -> None:
    log.warning(message)
