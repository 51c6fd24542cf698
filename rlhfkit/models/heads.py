"""``ScalarModel``: a language model with one number per token: critic, reward model, process reward model.

Shapes: B sequences, T tokens, M wanted tokens, H hidden size.
"""

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from rlhfkit.data.batch import on_both
from rlhfkit.distributed import full_parameters
from rlhfkit.first_lines import without_load_report, without_weights_bar
from rlhfkit.losses.aggregation import full_precision
from rlhfkit.mesh import forward_group_of
from rlhfkit.models.attention.packed import without_masks
from rlhfkit.models.forward import (
    VALUE_HEAD,
    TokenizedBatch,
    UnpaddedBatch,
    check_packing,
    forward_of,
    output_logits,
    own_results,
    policy_output,
    unwrap,
)
from rlhfkit.models.load import (
    ModelLoading,
    disable_dropout,
    existing_name,
    language_model_class,
    pretrained_arguments,
    save_activation_memory,
    switch_layers,
)
from rlhfkit.models.lora import LoRA, adapter_base, add_lora
from rlhfkit.models.parallel.joined_rows import JoinedRow
from rlhfkit.models.router_loss import backbone_router_loss, has_router
from rlhfkit.models.weights.files import save_weights


def classifier_class(config: Any, *, stepwise: bool) -> Any:
    """The class (or Auto class) of a family's sequence classifier, or token classifier if ``stepwise``.

    Families without one in Transformers (Cohere, Granite, OLMoE, Falcon-H1 ...) get a class of backbone and linear
    layer ``score``, named as in Transformers. Only this function loads what it saves, not Transformers' Auto classes.
    """
    from transformers import AutoModel, AutoModelForSequenceClassification, AutoModelForTokenClassification

    auto: Any = AutoModelForTokenClassification if stepwise else AutoModelForSequenceClassification
    if type(config) in auto._model_mapping or type(config) not in AutoModel._model_mapping:
        return auto
    language: Any = language_model_class(config)._model_mapping.get(type(config), None)
    return _made(AutoModel._model_mapping[type(config)], "" if language is None else language.__name__, stepwise)


@cache
def _made(backbone: Any, language: str, stepwise: bool) -> Any:
    """``language``: class of the language model, from whose files the backbone is read."""
    from transformers import PreTrainedModel
    from transformers.conversion_mapping import (
        get_checkpoint_conversion_mapping,
        register_checkpoint_conversion_mapping,
    )
    from transformers.modeling_layers import GenericForSequenceClassification, GenericForTokenClassification

    general: Any = GenericForTokenClassification if stepwise else GenericForSequenceClassification
    family = next(kind for kind in backbone.__mro__ if PreTrainedModel in kind.__bases__)
    task = general.__name__.removeprefix("Generic")
    name = family.__name__.removesuffix("PreTrainedModel") + task
    if (files := get_checkpoint_conversion_mapping(language)) is not None:  # Transformers finds it by the class's name
        register_checkpoint_conversion_mapping(name, files, overwrite=True)
    return type(name, (general, family), {"base_model_prefix": family.base_model_prefix, "__module__": __name__})


class ScalarHead(nn.Linear):
    """The last layer, at least in float32: bfloat16 would round a reward of 5 to multiples of 1/32."""

    def forward(self, hidden: Tensor) -> Tensor:
        """From (..., H) to (..., outputs)."""
        with torch.autocast(hidden.device.type, enabled=False):
            bias = None if self.bias is None else full_precision(self.bias)
            return nn.functional.linear(full_precision(hidden), full_precision(self.weight), bias)


class ScalarOutput(NamedTuple):
    """A number for each token: the result of :func:`scalar_forward`, or of a language model that is asked for a word.

    Attributes:
        values: (B, T) float32, raw; 0 where not wanted. (B, T, K) of a model with K heads.
        router_aux_loss: Scalar, the load-balancing loss of a mixture of experts; ``None`` unless asked for.
    """

    values: Tensor
    router_aux_loss: Tensor | None = None


class ScalarModel(nn.Module):
    """A Hugging Face classifier without its pooling: one number for every token.

    The number is the only output of a sequence classifier with one label (reward models, critics), or the log-odds
    ``z_1 - z_0`` of label 1 of a token classifier with two (process reward models).

    Args:
        model: Of a :func:`~rlhfkit.models.heads.classifier_class`. It is trained, and :meth:`save_pretrained` writes it
            in Transformers' format.

    Raises:
        ValueError: If the model has no linear layer ``score``, as decoder-only classifiers have.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        score = getattr(model, "score", None)
        if not isinstance(score, nn.Linear):
            raise ValueError(
                f"{type(model).__name__} has no linear layer 'score': only decoder-only models are supported"
            )
        head = ScalarHead(score.in_features, score.out_features, bias=score.bias is not None, device="meta")
        head.weight, head.bias = score.weight, score.bias
        cast(Any, model).score = head
        self.model = model

    @property
    def config(self) -> Any:
        """The Transformers configuration."""
        return self.model.config

    @property
    def rlhfkit_forward_group(self) -> Any:
        """The forward group of the classifier, see :mod:`rlhfkit.mesh`."""
        return forward_group_of(self.model)

    @property
    def rlhfkit_forward(self) -> Any:
        """How the classifier computes batches, see :func:`~rlhfkit.models.forward.forward_of`."""
        return forward_of(self.model)

    def forward(
        self, positions: Tensor, *, router_aux_loss: bool = False, joined: JoinedRow | None = None, **inputs: Any
    ) -> Tensor | tuple[Tensor, Tensor]:
        """(M,) float32 at ``positions`` (M,) of the flattened ``input_ids``, with the router's loss if asked for.

        ``joined``: where a forward group computes the model together.
        """
        model = cast(Any, self.model)
        more = {"output_router_logits": True} if router_aux_loss else {}
        with without_masks(model):
            output = model.base_model(**inputs, **more, use_cache=False)
        check_packing(model, inputs)
        chosen = self.numbers(model.score(output.last_hidden_state.flatten(0, 1)[positions]))
        if not router_aux_loss:
            return chosen
        logits = getattr(output, "router_logits", None)
        return chosen, backbone_router_loss(model.base_model, logits, inputs.get("attention_mask"), joined)

    def numbers(self, outputs: Tensor) -> Tensor:
        """(M,) of the head's (M, outputs); a subclass with several heads may return (M, K)."""
        return outputs[:, 0] if outputs.shape[-1] == 1 else outputs[:, 1] - outputs[:, 0]

    def normalize(self, rewards: Tensor) -> Tensor:
        """Normalise by the configuration's ``mean`` and ``std`` (OpenRLHF's names); unchanged if it has none."""
        mean, std = getattr(self.config, "mean", None), getattr(self.config, "std", None)
        return rewards if mean is None or std is None else (rewards - mean) / std

    def save_pretrained(self, folder: str | Path, *, state_dict: Mapping[str, Tensor] | None = None) -> None:
        """Write a folder that ``from_pretrained`` of the classifier's class loads.

        Args:
            folder: Created if missing.
            state_dict: Full weights under this module's names; its own when ``None``.
        """
        weights = self.state_dict() if state_dict is None else state_dict
        inner = {name.removeprefix("model."): tensor for name, tensor in weights.items()}
        save_weights(self.model, folder, inner)


def load_scalar_model(
    name: str,
    *,
    stepwise: bool = False,
    new_head: bool = True,
    head_std: float | None = None,
    dtype: torch.dtype = torch.float32,
    lora: LoRA | None = None,
    loading: ModelLoading | None = None,
) -> ScalarModel:
    """Load a critic or reward model, or make one from a causal language model. Dropout is off.

    A new head is the same on every rank and in every run, whatever the seed.

    Args:
        name: Folder or hub name of a causal language model, which gets a new head, or of a classifier with its head.
        stepwise: A token classifier with two labels instead of a sequence classifier with one.
        new_head: Accept a causal language model; false where only a trained classifier makes sense.
        head_std: Standard deviation of a new head's normally distributed weights; ``None``: 1 / (H + 1), as OpenRLHF
            and Stiennon et al. (2020, arXiv:2009.01325, appendix B.1); 0: all outputs start at 0.
        dtype: Of the weights.
        lora: Train the head and new adapters, and freeze everything else.
        loading: Attention, gradient checkpointing and others, see :class:`~rlhfkit.models.ModelLoading`;
            ``train_vision`` has no effect.

    Returns:
        The model, in training mode.

    Raises:
        FileNotFoundError: If ``name`` is a path and no folder.
        ValueError: If ``head_std`` is negative, the model is a classifier of another kind, or none although
            ``new_head`` is false, or ``quantization`` is given without ``lora``; if Liger has no kernels for the model.
        ImportError: If a package that was asked for, or a GPU for Liger's kernels, is missing.
    """
    if head_std is not None and head_std < 0:
        raise ValueError(f"head_std must not be negative, got {head_std}")
    loading = loading or ModelLoading()
    name = existing_name(name)
    if adapter_base(name) is not None:
        raise ValueError(f"{name} holds an adapter; merge it into its model first (rlhfkit merge-adapter, or peft)")
    arguments = pretrained_arguments(name, dtype, loading, adapters=lora is not None)
    config = arguments["config"]
    is_new = _needs_head(config, name, stepwise, new_head)
    config.num_labels = 2 if stepwise else 1
    loaded = _from_pretrained(classifier_class(config, stepwise=stepwise), name, is_new, arguments)
    switch_layers(loaded, loading)
    model = ScalarModel(loaded)
    if is_new:
        _initialize(cast(nn.Linear, loaded.score), head_std)
    if lora is not None:
        add_lora(loaded, lora, base=name)
        loaded.score.requires_grad_(True)
    disable_dropout(model)
    save_activation_memory(loaded, loading)
    return model.train()


def add_value_head(model: nn.Module, *, std: float | None = None) -> None:
    """Add a ``value_head`` to a causal language model in place, before it is wrapped.

    ``std`` is the standard deviation of its weights, see :func:`load_scalar_model`.
    ``policy_output(values=True)`` uses it. It is in the state dict, but saved folders and weight syncs leave it out.

    Raises:
        ValueError: If the model has a value head, or its logits cannot be computed from the output layer alone.
    """
    bare: Any = unwrap(model)
    if hasattr(bare, VALUE_HEAD):
        raise ValueError(f"this {type(bare).__name__} has a value head already")
    if output_logits(bare) is None:
        raise ValueError(
            f"a value head is not supported for {type(bare).__name__}, whose logits are not computed from the output "
            "layer alone: use a critic with its own backbone"
        )
    embedding = bare.get_input_embeddings().weight
    width = bare.config.get_text_config().hidden_size
    head = ScalarHead(width, 1, bias=False, device=embedding.device, dtype=embedding.dtype)
    _initialize(head, std)
    setattr(bare, VALUE_HEAD, head)


def _from_pretrained(kind: Any, name: str, is_new: bool, arguments: Mapping[str, Any]) -> Any:
    """Load a classifier; if its head ``is_new``, say that, in place of a report that it is missing.

    Raises:
        ValueError: If there are no weights for something else, which would be random.
    """
    with (
        without_weights_bar(),
        without_load_report(lambda found: is_new and _only_head_is_new(found)) as found,
    ):
        loaded, information = kind.from_pretrained(name, output_loading_info=True, **arguments)
        found.update(information)
    lost = sorted(one for one in information["missing_keys"] if not one.startswith("score."))
    if lost:
        raise ValueError(
            f"{name} has no weights for {len(lost)} parameters of {type(loaded).__name__}, among them {lost[0]}, which "
            "would be random: its files are not complete, or have names that Transformers does not know"
        )
    if is_new:
        from lightning.pytorch.utilities import rank_zero_info

        rank_zero_info(f"{name} has no head of numbers: its layer 'score' is new, and is trained")
    return loaded


def _only_head_is_new(found: Mapping[str, Any]) -> bool:
    """Whether weights were loaded but for the new head, which takes the place of the output layer."""
    missing = all(name.startswith("score.") for name in found["missing_keys"])
    return missing and all(name.startswith("lm_head.") for name in found["unexpected_keys"])


def _needs_head(config: Any, name: str, stepwise: bool, new_head: bool) -> bool:
    """Whether the model is not a classifier yet."""
    wanted, labels = ("ForTokenClassification", 2) if stepwise else ("ForSequenceClassification", 1)
    architecture = (getattr(config, "architectures", None) or ["model of unknown kind"])[0]
    classifier = "Classification" in architecture
    if classifier and architecture.endswith(wanted) and config.num_labels == labels:
        return False
    if classifier or not new_head:
        found = f"{architecture} with {config.num_labels} labels" if classifier else architecture
        choices = "a causal language model or " if new_head else ""
        raise ValueError(f"{name} is a {found}; needed is {choices}a ...{wanted} with {labels} labels")
    return True


def _initialize(head: nn.Linear, std: float | None) -> None:
    std = 1.0 / (head.in_features + 1) if std is None else std
    # Not in the default dtype: that is float64 in a Trainer(precision="64-true"), which draws other numbers. Not on the
    # default device: that is the GPU where Lightning builds models, which refuses the generator of the CPU.
    shape, generator = (head.out_features, head.in_features), torch.Generator().manual_seed(0)
    noise = torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu")
    with torch.no_grad(), full_parameters(head.parameters(), modifier_rank=0):
        head.weight.copy_(noise * std)
        if head.bias is not None:
            head.bias.zero_()


def scalar_output(model: nn.Module, batch: TokenizedBatch, mask: Tensor | None = None) -> Tensor:
    """The values of :func:`scalar_forward`: (B, T) float32 numbers at the tokens of a batch."""
    return scalar_forward(model, batch, mask).values


def scalar_forward(
    model: nn.Module,
    batch: TokenizedBatch,
    mask: Tensor | None = None,
    *,
    router_aux_loss: bool = False,
) -> ScalarOutput:
    """Run a :class:`ScalarModel`, bare or wrapped, over a batch in one forward pass.

    ``mask`` (B, T) bool selects tokens, all real ones when ``None``. A critic's value of the state in which token t+1
    is chosen is the number at token t.

    Raises:
        ValueError: If the router's loss is asked of a model without a router.
    """
    bare, request = unwrap(model), (router_aux_loss, torch.is_grad_enabled())
    inputs, positions, wanted, joined = forward_of(bare).inputs(batch, mask, request)
    found = model(positions=positions, router_aux_loss=router_aux_loss, joined=joined, **inputs)
    chosen, balance = found if router_aux_loss else (found, None)
    chosen = own_results(chosen, joined)
    shape, heads = batch.input_ids.shape, chosen.shape[1:]
    empty = torch.zeros(shape.numel(), *heads, dtype=chosen.dtype, device=chosen.device)
    return ScalarOutput(empty.index_copy(0, wanted, chosen).view(*shape, *heads), balance)


def last_tokens(batch: TokenizedBatch) -> Tensor:
    """(B, T) bool, true at the last token of each sequence, where a reward model is read."""
    return on_both(_last_of_rows, batch.attention_mask.bool())


def _last_of_rows(real: Tensor) -> Tensor:
    return real.sum(-1, keepdim=True) - 1 == torch.arange(real.shape[1], device=real.device)


def reward_output(model: nn.Module, batch: TokenizedBatch, *, normalized: bool = False) -> Tensor:
    """The reward of each sequence: the number of a :class:`ScalarModel` at its last token.

    Args:
        model: A :class:`ScalarModel`, bare or wrapped (DeepSpeed engine).
        batch: B sequences, padded on the right.
        normalized: Shift and scale by the mean and standard deviation in the configuration, if it has them.

    Returns:
        (B,) float32; (B, K) of a model with several numbers.
    """
    rewards = scalar_output(model, batch, last_tokens(batch)).sum(1)
    return cast(ScalarModel, unwrap(model)).normalize(rewards) if normalized else rewards


def critic_values(
    critic: nn.Module, batch: TokenizedBatch, chosen: Tensor, *, router_aux_loss: bool = False
) -> tuple[Tensor, Tensor | None]:
    """(B, T-1) float32 values of the states in which tokens were chosen, 0 elsewhere; and the router's loss.

    Values of a critic that starts as a calibrated reward model are shifted and scaled by the mean and deviation in its
    configuration.

    Args:
        critic: A :class:`ScalarModel`, bare or wrapped, or another model that :func:`scalar_forward` can run.
        batch: B sequences of T tokens.
        chosen: (B, T-1) bool, the action mask.
        router_aux_loss: Compute the load-balancing loss, if the critic is a mixture of experts.
    """
    chosen_next = on_both(lambda mask: nn.functional.pad(mask, (0, 1)), chosen)
    out = scalar_forward(critic, batch, chosen_next, router_aux_loss=router_aux_loss and has_router(critic))
    values, bare = out.values[:, :-1], unwrap(critic)
    values = bare.normalize(values).where(chosen, 0.0) if isinstance(bare, ScalarModel) else values
    return values, out.router_aux_loss


# ---------------------------------------------------------------- one row alone and among others

# models/attention/families.py knows which families are packed; this checks a model itself with real tokens.


ROW_TOLERANCES = {torch.float64: 1e-3, torch.float32: 1e-3, torch.float16: 0.2, torch.bfloat16: 0.2}
"""Allowed mean difference over the tokens of a row, in nats (for a scalar model: relative to its numbers' size, where
above 1). In float32 sums in another order give about 1e-5, in float64 too, where norms and log-probs are still float32.
bfloat16 rounds a logit of 20 to multiples of 0.1, and tokens of a mixture of experts can change experts; averaged over
a row that gives a few hundredths, while rows that see one another differ by 0.5 and more.
"""


@torch.no_grad()
def row_difference(model: nn.Module, batch: TokenizedBatch, row: int) -> float:
    """Mean difference over a row's tokens between the row in its batch and alone, by two forward passes in eval mode.

    Log-probs in nats; a :class:`~rlhfkit.models.ScalarModel`'s numbers divided by their mean size where that is above
    1. Not finite if one of the numbers is not.
    """
    real = batch.attention_mask.bool()
    attachments = getattr(batch, "attachments", None)
    single = UnpaddedBatch(
        batch.input_ids[row : row + 1, : int(real[row].sum())],
        None if attachments is None else attachments[row : row + 1],
    )
    chosen = torch.zeros_like(real)
    chosen[row] = real[row]
    if isinstance(unwrap(model), ScalarModel):
        among, alone = scalar_output(model, batch, chosen)[chosen], scalar_output(model, single)[0]
        scale = max(float(alone.abs().mean()), 1.0)
    else:
        chosen, wanted = chosen[:, 1:], single.attention_mask[:, 1:]
        among = policy_output(model, batch, chosen).logprobs[chosen]
        alone, scale = policy_output(model, single, wanted).logprobs[0], 1.0
    return float((among - alone).abs().mean()) / scale if len(among) else 0.0
