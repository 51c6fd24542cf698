"""One forward pass of the policy over a batch: log-probs (and entropy) of its tokens, without padding or logits.

Shapes: B sequences, T tokens, M selected tokens, V vocabulary.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple, Protocol, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from rlhfkit.data.batch import on_both
from rlhfkit.losses.fused_head.logprobs import (
    linear_logprobs,
    logits_logprobs,
)
from rlhfkit.losses.fused_head.tiles import matmul_dtype
from rlhfkit.mesh import FORWARD, ForwardGroup, forward_group_of
from rlhfkit.models.attention.families import is_known
from rlhfkit.models.attention.layout import PackedLayout, on_cpu, read_rows, send_together
from rlhfkit.models.attention.packed import has_packed_attention, without_masks
from rlhfkit.models.parallel.joined_rows import JoinedRow, OwnRow, join_rows
from rlhfkit.models.parallel.vocabulary import GroupVocabulary
from rlhfkit.models.router_loss import router_loss
from rlhfkit.models.routing import batch_routing, tell_routers

log = logging.getLogger(__name__)

VALUE_HEAD = "value_head"
"""Attribute of a language model that holds the value head of a shared backbone; not part of the Hugging Face model."""


class PolicyOutput(NamedTuple):
    """The result of :func:`policy_output`.

    Attributes:
        logprobs: (B, T-1) float32; 0 where the mask is false.
        entropy: (B, T-1) float32 in nats, with gradient; ``None`` unless asked for.
        router_aux_loss: Scalar, the load-balancing loss of a mixture of experts; ``None`` unless asked for.
        values: (B, T-1) float32, of the state before each token; 0 where the mask is false; ``None`` unless asked for.
        correct: (B, T-1) float32, 1 where the token has the largest logit; 0 where the mask is false; ``None`` unless
            asked for.
        routing: (B, T-1, C) int16, the experts that each token's routers chose; ``None`` unless asked for.
        rerouted: Scalar, share of the choices of experts that were replayed and would be others now; ``None`` without.
    """

    logprobs: Tensor
    entropy: Tensor | None
    router_aux_loss: Tensor | None = None
    values: Tensor | None = None
    correct: Tensor | None = None
    routing: Tensor | None = None
    rerouted: Tensor | None = None


class TokenizedBatch(Protocol):
    """The fields of a batch that a forward pass reads; :class:`~rlhfkit.data.Experience` has them."""

    input_ids: Tensor
    attention_mask: Tensor


class UnpaddedBatch:
    """A batch of (B, T) int64 sequences without padding; ``attachments``: the images of each, if they have some."""

    def __init__(self, input_ids: Tensor, attachments: Sequence[tuple[Any, ...]] | None = None) -> None:
        self.input_ids = input_ids
        self.attachments = attachments
        self.attention_mask = on_both(lambda ids: torch.ones_like(ids, dtype=torch.bool), input_ids)


def unwrap(model: nn.Module) -> nn.Module:
    """The Hugging Face model inside any nesting of DeepSpeed engines, DDP and peft wrappers, or the model itself."""
    while isinstance(inner := getattr(model, "module", None), nn.Module):
        model = inner
    peft_base = getattr(model, "get_base_model", None)
    return model if peft_base is None else unwrap(peft_base())


class ModelInputs(NamedTuple):
    """The result of :meth:`ForwardPass.inputs`.

    Attributes:
        arguments: Keyword arguments of the unwrapped model.
        positions: (M,) int64, index of each wanted token in their flattened ``input_ids``.
        wanted: (M,) int64, index of each wanted token in the flattened batch (B, T).
        joined: Where a forward group computes the model together: ``arguments`` and ``positions`` are then those of
            this rank's part of the tokens, and results go through :func:`own_results`. ``None``: each rank alone.
    """

    arguments: dict[str, Any]
    positions: Tensor
    wanted: Tensor
    joined: JoinedRow | None = None


class ForwardPass(Protocol):
    """How a model computes a batch; one is chosen when a model is loaded, and held on it (:func:`forward_of`)."""

    packs: bool
    """Whether it pads no rows, and computes a prompt once for the samples of it."""

    def inputs(self, batch: TokenizedBatch, wanted: Tensor | None = None, request: tuple[Any, ...] = ()) -> ModelInputs:
        """What the unwrapped model is given, and where the ``wanted`` tokens are; no wait if the host knows them.

        ``wanted`` is (B, T) bool, all real tokens when ``None``. ``request`` is what else is asked of the forward pass.
        """
        ...


def attachments_problem(batch: Any) -> str:
    """Why a model of text cannot compute a batch of which a row has something beside tokens; empty if none has."""
    attachments = getattr(batch, "attachments", None)
    if attachments is None or not any(attachments):
        return ""
    return (
        f"{sum(map(bool, attachments))} sequences of a batch have images, which this model was not loaded for: it "
        "reads text only, or its attention (varlen, buckets), sequence_parallel_size or tensor_parallel_size was asked "
        "for and cannot have them"
    )


def refuse_attachments(batch: Any) -> None:
    """Raise ValueError for the problem of :func:`attachments_problem`, which would be left out."""
    if problem := attachments_problem(batch):
        raise ValueError(problem)


class PaddedForward:
    """Rows padded to the longest, as Transformers computes them."""

    packs = False

    def inputs(self, batch: TokenizedBatch, wanted: Tensor | None = None, request: tuple[Any, ...] = ()) -> ModelInputs:
        """The batch as it is."""
        real = batch.attention_mask.bool()
        arguments = {"input_ids": batch.input_ids, "attention_mask": real.long()} | self.attached(batch, None)
        index = (real if wanted is None else wanted.bool()).flatten().nonzero()[:, 0]
        return ModelInputs(arguments, index, index)

    def attached(self, batch: TokenizedBatch, layout: PackedLayout | None) -> dict[str, Any]:
        """Arguments for what rows have beside tokens: none, and ValueError if they have something."""
        refuse_attachments(batch)
        return {}


class PackedForward:
    """Sequences in one row without padding, for models with our packed attention."""

    packs = True

    def inputs(self, batch: TokenizedBatch, wanted: Tensor | None = None, request: tuple[Any, ...] = ()) -> ModelInputs:
        """The packed row of the batch."""
        real = batch.attention_mask.bool()
        wanted = real if wanted is None else wanted.bool()
        lengths, prefixes, chosen = read_rows(batch.input_ids, real, wanted)
        prefixes = self.shared(batch, prefixes)
        layout = PackedLayout.from_lengths(lengths.tolist(), real.device, prefixes.tolist(), real.shape[1])
        index = chosen.flatten().nonzero()[:, 0]
        positions, index = send_together([layout.places.flatten()[index], index], real.device)
        arguments: dict[str, Any] = {
            "input_ids": batch.input_ids.flatten()[layout.tokens][None],
            "position_ids": layout.position_ids,
            "packed_layout": layout,
        }
        return ModelInputs(arguments | self.attached(batch, layout), positions, index)

    def shared(self, batch: TokenizedBatch, prefixes: Tensor) -> Tensor:
        """(B,) leading tokens of each row that are computed once with those of the row before it: all equal ones."""
        return prefixes

    def attached(self, batch: TokenizedBatch, layout: PackedLayout | None) -> dict[str, Any]:
        """Arguments for what rows have beside tokens: none, and ValueError if they have something."""
        refuse_attachments(batch)
        return {}


class JoinedForward:
    """The packed rows of a forward group's members as one row, of which each rank computes some tokens.

    Args:
        group: The ranks, which call :meth:`inputs` together.
        name: Of the model's class: members must be in a forward pass of the same one.
    """

    packs = True

    def __init__(self, group: ForwardGroup, name: str) -> None:
        self.group = group
        self.name = name

    def inputs(self, batch: TokenizedBatch, wanted: Tensor | None = None, request: tuple[Any, ...] = ()) -> ModelInputs:
        """This rank's part of the joined row. A collective; ``request`` must be the same for all members."""
        input_ids, real = batch.input_ids, batch.attention_mask.bool()
        lengths, prefixes, chosen = read_rows(input_ids, real, real if wanted is None else wanted.bool())
        tokens = on_cpu(input_ids).flatten()
        layout = PackedLayout.from_lengths(lengths.tolist(), tokens.device, prefixes.tolist(), real.shape[1])
        index = chosen.flatten().nonzero()[:, 0]
        following = tokens[(index + 1).clamp(max=len(tokens) - 1)]
        row = tokens[layout.tokens]
        positions = layout.places.flatten()[index]
        request = self.name, *request
        problem = attachments_problem(batch)
        own = OwnRow(layout.lengths, layout.prefixes, row, positions, following, request, problem)
        joined = join_rows(self.group, own, real.device)
        return ModelInputs(joined.arguments, joined.positions, send_together([index], real.device)[0], joined)


def choose_forward(model: nn.Module) -> ForwardPass:
    """Choose how a bare Hugging Face model computes batches, by its attention and forward group, and hold it on it.

    Called when a model is loaded, and once more when it has got a forward group, for which strategies have checked that
    it has our packed attention.
    """
    group, chosen = forward_group_of(model), cast(ForwardPass, PaddedForward())
    if group is not None:
        chosen = JoinedForward(group, type(model).__name__)
    elif has_packed_attention(model):
        chosen = PackedForward()
    setattr(model, FORWARD, chosen)
    return chosen


def forward_of(model: nn.Module) -> ForwardPass:
    """How an unwrapped model computes batches; chosen now if it was not loaded by this package."""
    held: ForwardPass | None = getattr(model, FORWARD, None)
    return choose_forward(model) if held is None else held


def packs_batches(model: nn.Module) -> bool:
    """Whether a model, bare or wrapped, is a Hugging Face model with our packed attention, and pads no batches."""
    bare = unwrap(model)
    return getattr(bare, "config", None) is not None and forward_of(bare).packs


def own_results(computed: Tensor, joined: JoinedRow | None) -> Tensor:
    """The numbers of this rank's own tokens, from those of the tokens that it computes; the same without a group."""
    return computed if joined is None else joined.to_owners(computed)


def next_token_inputs(
    model: nn.Module, batch: TokenizedBatch, mask: Tensor, request: tuple[Any, ...] = ()
) -> tuple[ModelInputs, Tensor, Tensor]:
    """:meth:`ForwardPass.inputs` of a bare model for tokens that ``mask`` (B, T-1) selects on the next-token axis.

    Returns:
        Inputs in which the wanted tokens are those before the selected ones; (M,) int64, the selected tokens, where a
        forward group computes the model those of the tokens computed here; and (M,) int64, the index of each of this
        rank's own selected tokens on the flattened (B, T-1) axis.
    """
    selected = on_both(lambda mask: pad(mask, (0, 1)), mask.bool())
    inputs = forward_of(model).inputs(batch, selected, request)
    before, joined = inputs.wanted, inputs.joined
    targets = batch.input_ids.flatten()[before + 1] if joined is None else joined.following
    return inputs, targets, before - before.div(batch.input_ids.shape[1], rounding_mode="floor")


def check_packing(model: nn.Module, inputs: Mapping[str, Any]) -> None:
    """Check after a forward pass on ``inputs`` of a :class:`ForwardPass` that attention separated packed sequences.

    Raises:
        RuntimeError: If the row was packed and no attention layer has read its layout.
    """
    layout: PackedLayout | None = inputs.get("packed_layout")
    if layout is not None and not layout.readers:
        raise RuntimeError(
            f"no attention layer of {type(unwrap(model)).__name__} has read where the sequences of a packed row begin "
            "and end, so they have seen one another: the model's forward pass must pass its keyword arguments on to "
            "its attention layers; or load it with attention='eager'"
        )


# ---------------------------------------------------------------- the output layer

_TINY = {torch.float32: 2.0**-20, torch.float64: 2.0**-40}
"""Factors that bring numbers to where a soft cap is linear up to rounding; powers of 2 are exact."""


class OutputLogits(NamedTuple):
    """``logits = cap(scale * raw)`` of the output layer's ``raw``; ``cap(z) = softcap * tanh(z / softcap)`` if set.

    Gemma 2 caps its logits, Cohere, Granite and Falcon-H1 scale them, each under its own name in its configuration.
    """

    scale: float = 1.0
    softcap: float | None = None

    @property
    def is_plain(self) -> bool:
        """Whether logits are the result of the output layer itself."""
        return self.scale == 1.0 and self.softcap is None

    def apply(self, raw: Tensor) -> Tensor:
        """Logits, of the shape and dtype of ``raw``."""
        if self.softcap is None:
            return raw if self.scale == 1.0 else raw * self.scale
        return (raw * (self.scale / self.softcap)).tanh() * self.softcap

    def encode(self, values: Tensor) -> Tensor:
        """Scale finite numbers so that the model's code after the output layer is linear on them, in at least float32.

        :meth:`decode` restores them from the model's logits.
        """
        if self.is_plain:
            return values
        values = values.to(torch.promote_types(values.dtype, torch.float32))
        return values * (_TINY[values.dtype] / self.scale)

    def decode(self, output: Tensor, dtype: torch.dtype) -> Tensor:
        """Inverse of :meth:`encode` followed by the model's own code, in the given dtype."""
        return output if self.is_plain else (output / _TINY[output.dtype]).to(dtype)


_SOFT_CAPS = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")
_FACTORS = ("logit_scale", "lm_head_multiplier")
_POWERS = {"granite": -1, "granitemoe": -1, "granitemoeshared": -1, "granitemoehybrid": -1, "hyperclovax": 1}
"""Families that divide their logits by ``logits_scaling``, or multiply; MiniCPM 3 divides hidden states by it."""


def output_logits(model: nn.Module) -> OutputLogits | None:
    """Read from an unwrapped model's configuration how it scales and caps its logits.

    ``None``, with a log message, if its output layer is no plain linear layer, or the model is of no tested family
    (:func:`~rlhfkit.models.attention.families.is_known`): its code may compute them otherwise.
    """
    text: Any = cast(Any, model).config.get_text_config()
    layer = cast(Any, model).get_output_embeddings()
    if type(layer).forward is not nn.Linear.forward or not is_known(model):
        _warn_once(type(model).__name__)
        return None
    found = {name: getattr(text, name, None) for name in (*_SOFT_CAPS, *_FACTORS, "logits_scaling")}
    scale = float(found["logits_scaling"] or 1.0) ** _POWERS.get(text.model_type, 0)
    for name in _FACTORS:
        scale *= found[name] or 1.0
    return OutputLogits(scale, next((float(cap) for cap in map(found.get, _SOFT_CAPS) if cap), None))


@cache
def _warn_once(name: str) -> None:
    log.warning(
        "the logits of %s may not be its output layer's, scaled or capped as its configuration says: they are computed "
        "for every token and the whole vocabulary at once, which takes more memory",
        name,
    )


@torch.no_grad()
def most_probable(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """(M,) int64 tokens of the largest logits for hidden states (M, H), in blocks of rows of at most 64M logits.

    Scales and caps of logits are increasing functions, so those of the output layer itself are compared.
    """
    dtype = matmul_dtype(hidden, weight)
    layer = weight.to(dtype), None if bias is None else bias.to(dtype)
    rows = max(2**26 // weight.shape[0], 1)
    blocks = [nn.functional.linear(block.to(dtype), *layer).argmax(-1) for block in torch.split(hidden, rows)]
    return torch.cat(blocks) if blocks else hidden.new_zeros(0, dtype=torch.int64)


def run_with_head(
    model: nn.Module,
    inputs: Mapping[str, Any],
    positions: Tensor,
    head: Callable[[Tensor, Any, OutputLogits], Tensor],
    dense: Callable[[Tensor], Tensor],
) -> tuple[Tensor, Any]:
    """Run a model with ``head`` in place of its output layer, whose hooks still run, and without attention masks.

    Args:
        model: Bare or wrapped.
        inputs: Keyword arguments of the unwrapped model.
        positions: (M,) int64, index of each wanted token in the flattened ``input_ids``.
        head: What is computed of the hidden states (M, H) of these tokens, the output layer, and how logits follow from
            its result; finite numbers of any shape.
        dense: The same of the logits (M, V), where :func:`output_logits` knows no more than these.

    Returns:
        The result of ``head`` or ``dense``, and the model's output.

    Raises:
        RuntimeError: As :func:`check_packing`.
    """
    bare, dtype = unwrap(model), torch.float32
    logits = output_logits(bare)
    if logits is None:
        output = model(**inputs, use_cache=False)
        check_packing(model, inputs)
        return dense(output.logits.flatten(0, 1)[positions]), output
    layer = cast(Any, bare).get_output_embeddings()

    def forward(hidden: Tensor) -> Tensor:
        nonlocal dtype
        found = head(hidden.flatten(0, 1)[positions], layer, logits)
        dtype = found.dtype
        return logits.encode(found)

    layer.forward = forward
    try:
        with without_masks(bare):
            output = model(**inputs, use_cache=False)
    finally:
        del layer.forward
    check_packing(model, inputs)
    return logits.decode(output.logits, dtype), output


def policy_output(
    model: nn.Module,
    batch: TokenizedBatch,
    mask: Tensor,
    *,
    temperature: float = 1.0,
    entropy: bool = False,
    router_aux_loss: bool = False,
    values: bool = False,
    correct: bool = False,
    routing: Tensor | bool | None = None,
) -> PolicyOutput:
    """Log-probs of the selected tokens of a batch.

    Of a model with our packed attention padding is removed, and a prefix that neighbouring rows share (the prompt of a
    preference pair or group) is computed once. Only selected tokens go through the output layer.

    Args:
        model: A Hugging Face causal language model, bare or wrapped (DeepSpeed engine).
        batch: Has ``input_ids`` (B, T) int64 and ``attention_mask`` (B, T) bool, padded on the right.
        mask: (B, T-1) bool on the next-token axis, true at the selected tokens.
        temperature: The sampling temperature, which divides the logits.
        entropy: Also return the entropy of each selected position.
        router_aux_loss: Also return the load-balancing loss of a mixture of experts, over all tokens.
        values: Also return the values of the model's value head, see :func:`~rlhfkit.models.heads.add_value_head`.
        correct: Also return whether each selected token is the most probable one; takes one more matrix product of the
            output layer.
        routing: (B, T-1, C) int16, the experts that routers shall choose, as ``output.routing`` of another forward pass
            of the same tokens; 0 where they choose themselves. ``True``: return what they chose. The model needs
            :func:`~rlhfkit.models.routing.attach_routing`.

    Raises:
        ValueError: If the router's loss or its choices are asked of a model without a router.
    """
    bare = unwrap(model)
    wanted = _Numbers(temperature, entropy, values, correct)
    request = (*wanted, router_aux_loss, torch.is_grad_enabled())
    (inputs, positions, _, joined), targets, places = next_token_inputs(bare, batch, mask, request)
    told = None if routing is None or routing is False else tell_routers(bare, inputs, routing)
    if router_aux_loss:
        inputs["output_router_logits"] = True
    chosen, output = _chosen(model, inputs, positions, targets, wanted)
    chosen = own_results(chosen, joined)
    balance = router_loss(bare, output, joined) if router_aux_loss else None
    empty = torch.zeros(mask.numel(), dtype=chosen.dtype, device=mask.device)
    columns = [empty.index_copy(0, places, column).view(mask.shape) for column in chosen.unbind(-1)]
    return PolicyOutput(
        columns[0],
        columns[1] if entropy else None,
        balance,
        columns[1 + entropy] if values else None,
        columns[-1].detach() if correct else None,
        None if told is None or routing is not True else batch_routing(told, inputs["packed_layout"].places),
        None if told is None else told.rerouted(),
    )


class _Numbers(NamedTuple):
    """What is asked of each selected token; see :func:`policy_output`."""

    temperature: float
    entropy: bool
    values: bool
    correct: bool


def _chosen(
    model: nn.Module, inputs: dict[str, Any], positions: Tensor, targets: Tensor, wanted: _Numbers
) -> tuple[Tensor, Any]:
    """(M, 1 to 4) numbers of the selected tokens, and the model's output.

    The numbers are log-probs, then, if asked for, entropy, values, and whether the token is the most probable.
    """
    bare, (temperature, entropy, values, correct) = unwrap(model), wanted
    group = forward_group_of(bare)
    division = None if group is None or group.tensor is None else GroupVocabulary(group.tensor)

    def of_logits(logits: Tensor) -> Tensor:
        out = logits_logprobs(logits, targets, temperature=temperature, entropy=entropy)
        columns = [column for column in out if column is not None]
        if correct:
            columns.append((logits.detach().argmax(-1) == targets).to(columns[0].dtype))
        return torch.stack(columns, -1)

    def of_hidden(selected: Tensor, layer: Any, known: OutputLogits) -> Tensor:
        out = linear_logprobs(
            selected,
            layer.weight,
            targets,
            bias=layer.bias,
            temperature=temperature,
            entropy=entropy,
            logit_scale=known.scale,
            logit_softcap=known.softcap,
            division=division,
        )
        columns = [column for column in out if column is not None]
        if values:  # both heads in one forward pass; the value head's own hooks gather a ZeRO-3 shard
            columns.append(getattr(bare, VALUE_HEAD)(selected)[:, 0])
        if correct:
            columns.append((most_probable(selected, layer.weight, layer.bias) == targets).to(columns[0].dtype))
        return torch.stack(columns, -1)

    return run_with_head(model, inputs, positions, of_hidden, of_logits)
