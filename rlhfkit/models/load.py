"""Loading of Hugging Face models, configurations and tokenizers by name."""

import copy
import sys
import warnings
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from functools import wraps
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Literal, Self, cast, get_args

import torch
from torch import Tensor, nn

from rlhfkit.argument_names import AnswersNames
from rlhfkit.first_lines import without_weights_bar
from rlhfkit.hub import check_hub_model
from rlhfkit.models.activation_memory import use_gradient_checkpointing, use_tiled_mlp
from rlhfkit.models.attention.families import attention_cap, sees_images, use_packed_attention
from rlhfkit.models.attention.packed import PACKED_ATTENTION, PACKED_ATTENTIONS
from rlhfkit.models.attention.varlen import FLASH_PACKAGES
from rlhfkit.models.forward import choose_forward
from rlhfkit.models.lora import LoRA, adapter_base, add_lora, freeze_vision, load_adapter
from rlhfkit.validation import check_integer, options

Quantization = Literal["nf4"]
"""Format of quantized frozen weights: 4-bit NormalFloat."""


def quantization_config(quantization: Quantization, dtype: torch.dtype) -> Any:
    """Transformers' configuration of 4-bit weights with arithmetic in ``dtype``; scales are quantized, as in OpenRLHF.

    Raises:
        ImportError: If bitsandbytes is not installed.
    """
    if find_spec("bitsandbytes") is None:
        raise ImportError(f"quantization={quantization!r} needs bitsandbytes: pip install 'rlhfkit[qlora]'")
    from transformers import BitsAndBytesConfig

    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type=quantization,
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=dtype,
    )


def keep_4bit_layout(model: nn.Module) -> None:
    """Keep bitsandbytes from rearranging 4-bit weights in eval mode; other models are left alone.

    bitsandbytes 0.50 rearranges them in place for CPUs with AVX512-BF16 and does not undo it for training: the backward
    pass then fails at the layer, and merged weights are wrong.
    """
    for layer in model.modules():
        if hasattr(layer, "support_avx512bf16_for_cpu"):
            cast(Any, layer).support_avx512bf16_for_cpu = False


if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_DTYPES = {"32": torch.float32, "16": torch.float16, "bf16": torch.bfloat16, "64": torch.float64}


def precision_dtype(precision: str, *, compute: bool = False) -> torch.dtype:
    """Dtype of weights under a Lightning precision, or of matrix products if ``compute``, which for ``-mixed`` differs.

    Raises:
        ValueError: If the precision is none of Lightning's.
    """
    kind, _, style = str(precision).partition("-")
    if kind not in _DTYPES:
        raise ValueError(f"precision must start with one of {', '.join(_DTYPES)}, got {precision!r}")
    return _DTYPES[kind] if style != "mixed" or compute else torch.float32


def existing_name(name: str) -> str:
    """Refuse a name that looks like a path but is no folder, or that the hub would have but does not answer."""
    looks_like_path = name.startswith((".", "/", "~")) or name.count("/") > 1
    if looks_like_path and not Path(name).expanduser().is_dir():
        raise FileNotFoundError(
            f"there is no model folder {name!r}; give a folder written by save_pretrained or a hub name"
        )
    if looks_like_path:
        return str(Path(name).expanduser())
    check_hub_model(name)
    return name


def base_model_name(name: str) -> str:
    """The base model of an adapter's folder, or the name itself; engines are started with it."""
    base = adapter_base(name)
    return name if base is None else existing_name(base)


def load_config(name: str, *, trust_remote_code: bool = False) -> Any:
    """Load the configuration of a model, or of the base model of an adapter, from a folder or hub name.

    Raises:
        FileNotFoundError: If ``name`` is a path and no folder.
    """
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(base_model_name(existing_name(name)), trust_remote_code=trust_remote_code)


def context_length(config: Any) -> int | None:
    """Context length in tokens from a Transformers configuration; ``None`` without a limit, as in recurrent models."""
    text = config.get_text_config()
    named = (getattr(text, name, None) for name in ("max_position_embeddings", "max_seq_len", "context_length"))
    return next((int(length) for length in named if length), None)


TRANSFORMERS_ATTENTIONS = ("eager", "sdpa", "flex_attention", "flash_attention_4")
"""Attention of Transformers, on padded rows."""


def check_attention(attention: str | None) -> None:
    """Check the name of an attention: ours, Transformers', registered with Transformers, or a kernel's on its hub.

    Raises:
        ValueError: If it is none of these.
    """
    if attention is None or attention in (*PACKED_ATTENTIONS, PACKED_ATTENTION, *TRANSFORMERS_ATTENTIONS):
        return
    if isinstance(attention, str) and "/" in attention:
        return
    from transformers import AttentionInterface

    if attention not in AttentionInterface():
        raise ValueError(
            f"attention must be None, one of {', '.join((*PACKED_ATTENTIONS, *TRANSFORMERS_ATTENTIONS))}, a kernel on "
            f"the hub (organization/name) or registered with transformers.AttentionInterface, got {attention!r}"
        )


def language_model_class(config: Any) -> Any:
    """Transformers' Auto class of the language models of a configuration; those that see images have one of their own.

    Of families that see images and are not among those that are tested the language model alone is loaded, if it can.
    """
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    return AutoModelForImageTextToText if sees_images(config) else AutoModelForCausalLM


def empty_model(config: Any, *, trust_remote_code: bool = False) -> Any:
    """A language model of a configuration on the ``meta`` device, which holds no numbers; its weights are tied."""
    with torch.device("meta"):
        model = language_model_class(config).from_config(config, trust_remote_code=trust_remote_code)
    model.tie_weights()
    return model


def count_parameters(config: Any, *, trust_remote_code: bool = False) -> int:
    """Count the parameters of a language model of a configuration, tied ones once; builds it without memory."""
    return sum(parameter.numel() for parameter in empty_model(config, trust_remote_code=trust_remote_code).parameters())


def require_attention(attention: str | None) -> None:
    """Check that what an attention needs is installed, before Transformers says so in its own way.

    Raises:
        ImportError: If a GPU or the package of flash attention is missing.
    """
    if attention not in ("varlen", *FLASH_PACKAGES):
        return
    missing = [] if torch.cuda.is_available() else ["there is no GPU"]
    if attention in FLASH_PACKAGES:
        package, how = FLASH_PACKAGES[attention]
        missing += [] if find_spec(package) else [how]
    if missing:
        raise ImportError(
            f"attention={attention!r} cannot be used: {', and '.join(missing)}. attention='auto' takes the fastest "
            "packed attention that can run, and one can run everywhere"
        )


@dataclass(frozen=True)
class ModelLoading(metaclass=AnswersNames):
    """How models are loaded and computed, beside the type of their weights: technical options that few runs need.

    Args:
        attention: How attention is computed. ``None`` or ``auto``: packed where the model can be packed, with the first
            kernel that can run, else padded. ``varlen`` (torch's ``varlen_attn``), ``flash_attention_2``,
            ``flash_attention_3`` (packages ``flash_attn`` and ``flash_attn_interface``) and ``buckets`` (torch's
            ``scaled_dot_product_attention`` over sequences of similar length): packed with this kernel. Else
            Transformers' ``attn_implementation``, padded: ``eager``, ``sdpa`` (refused where it would leave out a soft
            cap), ``flex_attention``, ``flash_attention_4``, a kernel on the hub (``organization/name``), or one
            registered with ``transformers.AttentionInterface``.
        gradient_checkpointing: Recompute activations in the backward pass.
        offload_activations: Keep in CPU memory what ``gradient_checkpointing`` holds until the backward pass; for long
            rows on GPUs (ALST: Bekman et al., 2025, arXiv:2506.13996).
        tiled_mlp: Compute dense MLPs in tiles of this many tokens, which the backward pass recomputes: their inner
            activations exist for one tile only. ``True``: tiles of the hidden size (ALST's).
        liger_kernels: Compute norms, rotary embeddings and MLPs with Liger's Triton kernels (Hsu et al., 2024,
            arXiv:2410.10989); needs a GPU and the extra ``liger``.
        quantization: ``nf4`` holds the frozen weights in 4 bits (QLoRA: Dettmers et al., 2023, arXiv:2305.14314); needs
            bitsandbytes, and adapters to train.
        train_vision: Train the tower of a model that sees images, and what brings its results to the language model;
            they are frozen otherwise. Not with adapters, whose ``modality`` says where they are.
        max_tokens_per_forward: Tokens that a rank computes in a forward pass without gradient over an iteration or a
            data set: old log-probs, reference, critic, teacher, reward model (OpenRLHF's default is 16192). A longer
            sequence is computed alone, with ``sequence_parallel_size`` by all ranks that share it.
        trust_remote_code: Run Python code that comes with the model.

    Raises:
        ValueError: If a value is none of those above, or ``offload_activations`` is given alone.
        TypeError: If what is True or False is neither.
    """

    attention: str | None = None
    gradient_checkpointing: bool = False
    offload_activations: bool = False
    tiled_mlp: bool | int = False
    liger_kernels: bool = False
    quantization: Quantization | None = None
    train_vision: bool = False
    max_tokens_per_forward: int = 16384
    trust_remote_code: bool = False

    def __post_init__(self) -> None:
        for name in (field.name for field in fields(self) if field.type is bool):
            if not isinstance(getattr(self, name), bool):  # a text such as "false" would count as True
                raise TypeError(f"{name} must be True or False, got {getattr(self, name)!r}")
        check_attention(self.attention)
        check_integer("max_tokens_per_forward", self.max_tokens_per_forward, minimum=1)
        if self.offload_activations and not self.gradient_checkpointing:
            raise ValueError("offload_activations keeps what gradient_checkpointing saves: set both, or neither")
        if self.quantization not in (None, *get_args(Quantization)):
            raise ValueError(f"quantization must be 'nf4' (4 bits) or None, got {self.quantization!r}")
        if not isinstance(self.tiled_mlp, bool):
            check_integer("tiled_mlp", self.tiled_mlp, minimum=1, why="it is the number of tokens in a tile")

    @classmethod
    def of(cls, value: Self | Mapping[str, Any] | None) -> Self:
        """Return the options that were given: themselves, their fields by name, or ``None`` for the defaults.

        Raises:
            ValueError: If the mapping has other names.
        """
        return options(cls, value)

    def plain(self) -> dict[str, Any]:
        """Dictionary of plain values, for checkpoints and logs."""
        return asdict(self)

    def frozen(self) -> "ModelLoading":
        """What of it is for another, frozen model, too: its attention, and whether its code may run."""
        return ModelLoading(attention=self.attention, trust_remote_code=self.trust_remote_code)


def pretrained_arguments(name: str, dtype: torch.dtype, loading: ModelLoading, *, adapters: bool) -> dict[str, Any]:
    """Arguments of any ``from_pretrained`` for a model of this name; their ``config`` may be changed.

    Raises:
        ValueError: If the attention would leave out a soft cap of the model's, Liger has no kernels for it, or
            ``quantization`` is given without ``adapters`` to train.
        ImportError: If flash attention, Liger or bitsandbytes is asked for and not installed, or a GPU is missing.
    """
    from transformers import AutoConfig

    attention, quantization = loading.attention, loading.quantization
    if quantization is not None and not adapters:
        raise ValueError("weights of 4 bits cannot be trained themselves: give lora=LoRA(...) with quantization")
    require_attention(attention)
    config = AutoConfig.from_pretrained(name, trust_remote_code=loading.trust_remote_code)
    cap = attention_cap(config)
    if attention == "sdpa" and cap is not None:
        raise ValueError(
            f"attention='sdpa' would be wrong for {name}: its attention scores have a soft cap ({cap:g}), which "
            "PyTorch's scaled_dot_product_attention does not compute; leave attention out, or take 'eager'"
        )
    arguments = {
        "config": config,
        "dtype": dtype,
        "attn_implementation": None if attention in _NOT_TRANSFORMERS else attention,  # see choose_attention
        "trust_remote_code": loading.trust_remote_code,
    }
    if quantization is not None:
        arguments["quantization_config"] = quantization_config(quantization, dtype)
    if loading.liger_kernels:
        require_liger_kernels(config.model_type)
    return arguments


_NOT_TRANSFORMERS = ("auto", "varlen", "buckets", PACKED_ATTENTION)


def choose_attention(model: nn.Module, attention: str | None, *, trust_remote_code: bool = False) -> None:
    """Switch a model from :func:`pretrained_arguments` to our packed attention, if asked for or by default if possible.

    How it computes batches is chosen then, too; code that comes with its processor runs if it is trusted.

    Raises:
        ValueError: If packed attention is asked for and would be wrong.
    """
    if attention in (None, PACKED_ATTENTION, *PACKED_ATTENTIONS):
        use_packed_attention(model, attention)
    choose_forward(model)
    if sees_images(cast(Any, model).config):
        from rlhfkit.models.vision import choose_vision_forward

        choose_vision_forward(model, trust_remote_code=trust_remote_code)


def switch_layers(model: nn.Module, loading: ModelLoading) -> None:
    """Switch a model from :func:`pretrained_arguments` to its attention and kernels, before adapters are added.

    Raises:
        ValueError: If packed attention is asked for and would be wrong.
    """
    choose_attention(model, loading.attention, trust_remote_code=loading.trust_remote_code)
    keep_4bit_layout(model)
    if loading.liger_kernels:
        use_liger_kernels(model)


def save_activation_memory(model: nn.Module, loading: ModelLoading) -> None:
    """Apply the options for long rows to a model, after adapters were added."""
    if loading.tiled_mlp is not False:
        use_tiled_mlp(model, None if loading.tiled_mlp is True else loading.tiled_mlp)
    if loading.gradient_checkpointing:
        use_gradient_checkpointing(model, offload=loading.offload_activations)


def load_causal_lm(
    name: str,
    *,
    dtype: torch.dtype = torch.float32,
    lora: LoRA | None = None,
    loading: ModelLoading | None = None,
) -> "PreTrainedModel":
    """Load a causal language model for training, with its vision part if it sees images (:mod:`rlhfkit.models.vision`).

    A folder that holds an adapter is loaded onto its base model, and the adapter is trained.

    Args:
        name: Folder or hub name.
        dtype: Of the weights.
        lora: Freeze the weights and train new adapters.
        loading: Attention, gradient checkpointing, kernels, quantization and others, see :class:`ModelLoading`.

    Returns:
        The model, in training mode.

    Raises:
        FileNotFoundError: If ``name`` is a path and no folder.
        ValueError: If ``lora`` is given for a folder that holds an adapter, or ``quantization`` without adapters; if
            the attention cannot be used; if Liger has no kernels for the model; if ``train_vision`` is given with
            adapters or of a model of text.
        ImportError: If flash attention, Liger or bitsandbytes is asked for and not installed, or a GPU is missing.
    """
    name, loading = existing_name(name), loading or ModelLoading()
    base = base_model_name(name)
    if lora is not None and base != name:
        raise ValueError(f"{name} holds an adapter already, which is trained on; leave lora out, or merge it first")
    arguments = pretrained_arguments(base, dtype, loading, adapters=lora is not None or base != name)
    sees = sees_images(arguments["config"])
    if loading.train_vision and (not sees or lora is not None or base != name):
        why = "adapters are trained, LoRA(modality='both') is how" if sees else "it is of no family that sees images"
        raise ValueError(f"train_vision=True cannot be used with {name}: {why}")
    with without_weights_bar():
        model: PreTrainedModel = language_model_class(arguments["config"]).from_pretrained(base, **arguments)
    switch_layers(model, loading)
    if base != name:
        load_adapter(model, name)
    elif lora is not None:
        add_lora(model, lora, base=name)
    elif sees and not loading.train_vision:
        freeze_vision(model)
    save_activation_memory(model, loading)
    return model.train()


def disable_dropout(model: nn.Module) -> None:
    """Set ``Dropout`` layers, dropout probabilities of attention layers and routers' noise to 0, in place."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Dropout):
            if module.p and ".lora_dropout." in name:
                warnings.warn(f"the adapters' dropout of {module.p} is switched off like all others", stacklevel=2)
            module.p = 0.0
        for attribute, value in vars(module).items():  # attention_dropout, resid_dropout, layerdrop, input_jitter_noise
            # Phi-MoE's router_jitter_noise is a routing threshold, used in evaluation too.
            noise = "drop" in attribute or ("jitter" in attribute and attribute != "router_jitter_noise")
            if noise and isinstance(value, float):
                setattr(module, attribute, 0.0)
        if isinstance(getattr(vars(module).get("config"), "attention_dropout", None), float) and not hasattr(
            module, "config_class"
        ):  # Persimmon's layers read it from the configuration; the model's own, which is saved, stays unchanged
            module.config = copy.copy(module.config)
            module.config.attention_dropout = 0.0


def load_tokenizer(name: str, *, trust_remote_code: bool = False) -> "PreTrainedTokenizerBase":
    """Load a tokenizer; without a padding token it gets the end-of-sequence token, as in TRL and OpenRLHF.

    Args:
        name: Folder or hub name.
        trust_remote_code: Run Python code that comes with the tokenizer.

    Raises:
        FileNotFoundError: If ``name`` is a path and no folder.
    """
    from transformers import AutoTokenizer

    name = existing_name(name)
    if not (Path(name) / "tokenizer_config.json").exists():
        name = base_model_name(name)
    tokenizer: Any = AutoTokenizer.from_pretrained(name, trust_remote_code=trust_remote_code)
    return cast("PreTrainedTokenizerBase", with_padding_token(tokenizer))


def with_padding_token(tokenizer: Any) -> Any:
    """Return a tokenizer with a padding token: itself if it has one, else a copy that pads with the end of sequence."""
    if tokenizer.pad_token_id is not None or tokenizer.eos_token is None:
        return tokenizer
    padded = copy.deepcopy(tokenizer)
    padded.pad_token = padded.eos_token
    return padded


def tokenizer_differences(one: Any, other: Any) -> list[str]:
    """In what two tokenizers differ, so that a run would mix what they write; empty: in nothing.

    Padding tokens do not count: they are in no text.
    """
    if one is other:
        return []
    text = "Two  tokenizers: 1+1=2,\n\tĳ “no”?"
    compared: dict[str, Callable[[Any], Any]] = {
        "vocabulary": lambda each: each.get_vocab(),
        "special tokens": _special_tokens,
        "chat template": lambda each: each.chat_template,
        "way to divide a text": lambda each: each(text)["input_ids"],
    }
    return [name for name, read in compared.items() if read(one) != read(other)]


def _special_tokens(tokenizer: Any) -> Any:
    named = {name: token for name, token in tokenizer.special_tokens_map.items() if name != "pad_token"}
    others = {*tokenizer.all_special_tokens} - {tokenizer.pad_token, *map(str, named.values())}
    return named, others


def tokenizer_files(tokenizer: Any) -> dict[str, Tensor]:
    """The files of a tokenizer by name, as bytes (n,) uint8, for checkpoints that hold plain values only."""
    with TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        files = [path for path in sorted(Path(folder).rglob("*")) if path.is_file()]
        contents = {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}
    return {name: torch.frombuffer(bytearray(content), dtype=torch.uint8) for name, content in contents.items()}


def tokenizer_of_files(files: Mapping[str, Tensor], *, trust_remote_code: bool = False) -> "PreTrainedTokenizerBase":
    """Load the tokenizer of :func:`tokenizer_files`."""
    with TemporaryDirectory() as folder:
        for name, content in files.items():
            path = Path(folder, name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content.numpy().tobytes())
        return load_tokenizer(folder, trust_remote_code=trust_remote_code)


def stop_token_ids(name: str, tokenizer: Any, *, trust_remote_code: bool = False) -> tuple[int, ...]:
    """End-of-sequence tokens of the generation configuration (of folder or hub name ``name``) and of the tokenizer."""
    from transformers import AutoConfig, GenerationConfig

    found: set[int] = set()
    try:
        configured: Any = GenerationConfig.from_pretrained(name, trust_remote_code=trust_remote_code).eos_token_id
    except OSError:  # the folder has no generation_config.json
        configured = AutoConfig.from_pretrained(name, trust_remote_code=trust_remote_code).eos_token_id
    for token in [configured, tokenizer.eos_token_id]:
        found.update(token if isinstance(token, list) else [] if token is None else [token])
    return tuple(sorted(found))


# ---------------------------------------------------------------- Liger's Triton kernels

_LEFT_OUT = {"cross_entropy": False, "fused_linear_cross_entropy": False}


def require_liger_kernels(model_type: str) -> None:
    """Check that Liger's kernels can be used for a family of models, before one is loaded.

    Raises:
        ImportError: If there is no GPU, or the package is not installed.
        ValueError: If Liger has no kernels for this family.
    """
    missing = [] if torch.cuda.is_available() else ["there is no GPU"]
    missing += [] if find_spec("liger_kernel") else ["liger-kernel is not installed (pip install 'rlhfkit[liger]')"]
    if missing:
        raise ImportError(
            f"liger_kernels=True cannot be used: {', and '.join(missing)}. Without it the model computes the same with "
            "PyTorch's operators"
        )
    require_liger_family(model_type)


def require_liger_family(model_type: str) -> None:
    """Raise ValueError if the installed Liger has no kernels for this type of models, for which it does nothing."""
    from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN

    families = sorted(MODEL_TYPE_TO_APPLY_LIGER_FN)
    if model_type not in families:
        raise ValueError(
            f"liger_kernels=True: Liger has no kernels for models of the type {model_type!r}, only for "
            f"{', '.join(families)}; leave it out"
        )


def use_liger_kernels(model: nn.Module) -> None:
    """Switch a model that Transformers has loaded to Liger's kernels (Hsu et al., 2024), before adapters are added.

    Those for RMSNorm, rotary embeddings and gated MLPs, not its losses and output layer: log-probs and losses are
    computed from hidden states by :mod:`rlhfkit.losses.fused_head`, for every module the same.

    Liger switches the RMSNorm layers and MLPs of the model, and replaces classes and functions in the modules of
    Transformers too. The classes are put back: models loaded afterwards are Transformers' own, such as the small
    ones on the CPU with which packing is tested. Rotary embeddings are a function of the family: on GPUs every model of
    it in this process then uses the kernel.
    """
    from transformers.integrations.liger import apply_liger_kernel

    names = {type(layer).__module__ for layer in model.modules()}
    sources = [sys.modules[name] for name in names if name.startswith("transformers.")]
    before = [(source, dict(vars(source))) for source in sources]
    apply_liger_kernel(model, _LEFT_OUT)  # what else it replaces is Liger's choice for the family
    for source, originals in before:
        for name, original in originals.items():
            replaced = getattr(source, name)
            if replaced is not original:
                keep = isinstance(original, type) or hasattr(original, _SWITCHED)
                setattr(source, name, original if keep else _on_gpus(replaced, original))


_SWITCHED = "rlhfkit_liger_kernel"
"""Attribute of a function that uses a kernel on GPUs."""


def _on_gpus(kernel: Callable[..., Any], function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of tensors that uses a kernel on GPUs."""

    @wraps(function)
    def chosen(first: Tensor, *others: Any, **options: Any) -> Any:
        return (kernel if first.is_cuda else function)(first, *others, **options)

    setattr(chosen, _SWITCHED, kernel)
    return chosen
