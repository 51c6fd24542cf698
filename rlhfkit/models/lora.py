"""LoRA: its configuration, and adapters in a model (added, loaded, disabled, saved). peft makes and runs the layers.

Adapters are put into the model in place: its class, its names of other weights and its forward pass stay the same.
"""

import json
import math
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from rlhfkit.argument_names import AnswersNames
from rlhfkit.distributed import full_shape
from rlhfkit.models.attention.families import sees_images
from rlhfkit.validation import check_integer, check_number, options

INITS: dict[str, bool | str] = {"kaiming": True, "gaussian": "gaussian", "orthogonal": "orthogonal"}
"""Our names of peft's ``init_lora_weights``."""
MODALITIES = ("language", "vision", "both")


@dataclass(frozen=True, kw_only=True)
class LoRA(metaclass=AnswersNames):
    """Train low-rank matrices instead of the model's weights: W + scale * B A (Hu et al., 2021, arXiv:2106.09685).

    Example::

        SFTModule("Qwen/Qwen3-0.6B", lr=2e-4, lora=LoRA(rank=16, alpha=32))
    """

    rank: int = 8
    """Rows of A and columns of B (peft's default)."""
    alpha: float = 16.0
    """The scale is ``alpha / rank`` (16: OpenRLHF's default)."""
    targets: str | tuple[str, ...] = "all-linear"
    """Last names of the layers that get an adapter; ``all-linear``: all of the backbone, not the output layer."""
    modality: Literal["language", "vision", "both"] = "language"
    """The part of a model that sees images whose layers get adapters: the language model, or the tower with what brings
    its results to the language model. Models of text have the first only.
    """
    experts: bool = True
    """With ``all-linear``, also the experts of a mixture, each with matrices of ``rank``. Transformers holds a layer's
    experts in one tensor, and peft adds the adapters to it before it is used: a second copy of it exists until the
    backward pass. Neither ``dropout`` nor ``dora`` is possible for them.
    """
    dropout: float = 0.0
    """On the inputs of the adapters; disabled, with a warning, where probabilities are compared."""
    rslora: bool = False
    """Scale by ``alpha / sqrt(rank)`` (Kalajdzievski, 2023, arXiv:2312.03732)."""
    dora: bool = False
    """Train the norm of each row of W too (DoRA, Liu et al., 2024, arXiv:2402.09353)."""
    init: Literal["kaiming", "gaussian", "orthogonal"] = "kaiming"
    """Initialisation of A (B starts at 0) or of both. Methods that change W itself (PiSSA, OLoRA) are not supported:
    disabling the adapter would not restore the model that training started from.
    """

    def __post_init__(self) -> None:
        """Check all fields."""
        check_integer("LoRA.rank", self.rank, minimum=1)
        check_number("LoRA.alpha", self.alpha, above=0)
        check_number("LoRA.dropout", self.dropout, minimum=0, below=1)
        rules: list[tuple[str, bool, str]] = [
            ("targets", bool(self.targets), "'all-linear' or names of layers"),
            ("init", self.init in INITS, f"one of {', '.join(INITS)}"),
            ("modality", self.modality in MODALITIES, f"one of {', '.join(MODALITIES)}"),
        ]
        for name, holds, rule in rules:
            if not holds:
                raise ValueError(f"LoRA.{name} must be {rule}, got {getattr(self, name)!r}")
        if not isinstance(self.targets, str):  # YAML gives a list
            object.__setattr__(self, "targets", tuple(self.targets))

    @classmethod
    def of(cls, value: "LoRA | Mapping[str, Any] | None") -> "LoRA | None":
        """Restore from the dictionary of :meth:`plain`; a LoRA or ``None`` is returned as it is.

        Raises:
            ValueError: If the dictionary has other names.
        """
        return None if value is None else options(cls, value)

    def plain(self) -> dict[str, Any]:
        """Dictionary of plain values, for checkpoints and logs."""
        values = asdict(self)
        return values | {"targets": self.targets if isinstance(self.targets, str) else list(self.targets)}


ADAPTER = "default"
"""peft's name of the adapter that is trained."""
_START = "start"  # a frozen copy of an adapter that was trained before
_PREFIX = "base_model.model."  # of names in peft's files, which are those of its wrapper


# ------------------------------------------------------------------------------------------------ adding and loading


def add_lora(model: nn.Module, lora: LoRA, *, base: str) -> None:
    """Add new adapters to a model in place and freeze everything else; they have no effect until they are trained.

    They are the same on every rank and in every run, and in float32 beside 16-bit weights, where small updates would be
    lost (as in peft). ``base`` is the model's name, written into the adapter's files.

    Raises:
        ValueError: If the targets are no layers of the model, or the embedding or the output layer is among them, or
            experts are and dropout or DoRA is asked for.
    """
    from peft import LoraConfig

    targets, experts = _targets(model, lora)
    if experts and (lora.dropout or lora.dora):
        raise ValueError(
            f"{type(model).__name__} holds its experts in one tensor ({experts[0]}), whose adapters can have neither "
            "dropout nor dora: leave these out, or train no experts (LoRA(experts=False))"
        )
    config = LoraConfig(
        r=lora.rank,
        lora_alpha=cast(int, lora.alpha),  # a factor; peft's annotation is too narrow
        target_modules=targets,
        target_parameters=experts or None,
        lora_dropout=lora.dropout,
        use_rslora=lora.rslora,
        use_dora=lora.dora,
        init_lora_weights=cast(Any, INITS[lora.init]),
        base_model_name_or_path=base,
    )
    if hasattr(model, "lm_head"):
        config.task_type = "CAUSAL_LM"
    _inject(model, config, ADAPTER)


def _targets(model: nn.Module, lora: LoRA) -> tuple[list[str], list[str]]:
    """Names, or ends of names, of the linear layers that get adapters, and last names of the experts' tensors."""
    every = lora.targets == "all-linear"
    given = _linear_layers(model) if every else lora.targets
    experts = _expert_weights(model) if every and lora.experts else []
    targets = [given] if isinstance(given, str) else list(given)
    return sorted(_of_modality(model, targets, lora.modality)), experts


def _of_modality(model: nn.Module, targets: list[str], modality: str) -> list[str]:
    """Whole names of the layers of one part of a model that sees images; ``targets`` for a model of text."""
    if not sees_images(cast(Any, model).config):
        if modality != "language":
            raise ValueError(f"LoRA(modality={modality!r}): {type(model).__name__} has no vision part that is known")
        return targets
    if modality == "both":
        return targets
    vision = {name.rpartition(".")[0] for name in _vision_names(model)}
    layers = [name for name, layer in model.named_modules() if isinstance(layer, nn.Linear)]
    meant = [name for name in layers if any(f".{name}".endswith(f".{target}") for target in targets)]
    return [name for name in meant if (name in vision) == (modality == "vision")]


def vision_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Parameters, with names, of the vision part of a model that sees images.

    The tower, and what brings its results to the language model.
    """
    hugging_face = cast(Any, model)
    language = {id(parameter) for parameter in hugging_face.get_decoder().parameters()}
    base = {id(parameter) for parameter in hugging_face.base_model.parameters()}
    for name, parameter in model.named_parameters():
        if id(parameter) in base and id(parameter) not in language:
            yield name, parameter


def _vision_names(model: nn.Module) -> list[str]:
    """Names of :func:`vision_parameters`; none of a model of text."""
    return [name for name, _ in vision_parameters(model)] if sees_images(cast(Any, model).config) else []


def freeze_vision(model: nn.Module) -> None:
    """Leave the vision part of a model as it is."""
    for _, parameter in vision_parameters(model):
        parameter.requires_grad_(False)


def adapter_size(model: nn.Module, lora: LoRA) -> int:
    """Numbers that :func:`add_lora` would add to a model, which may be on the meta device.

    Raises:
        ValueError: If the targets are no layers of the model.
    """
    from transformers.pytorch_utils import Conv1D

    targets, experts = _targets(model, lora)
    size = 0
    for name, layer in model.named_modules():
        if isinstance(layer, nn.Linear | Conv1D) and any(f".{name}".endswith(f".{target}") for target in targets):
            rows, columns = layer.weight.shape
            outputs = rows if isinstance(layer, nn.Linear) else columns
            size += lora.rank * (rows + columns) + (outputs if lora.dora else 0)
    for name, weight in model.named_parameters():
        if any(f".{name}".endswith(f".{expert}") for expert in experts):
            size += lora.rank * weight.shape[0] * sum(weight.shape[1:])
    if not size:
        raise ValueError(
            f"LoRA(targets={lora.targets!r}): {type(model).__name__} has no linear layers of these names; "
            "'all-linear' takes all of its backbone"
        )
    return size


def saved_adapter_size(folder: str | Path) -> int:
    """Numbers in an adapter that peft wrote, read from the head of its file."""
    from safetensors import safe_open

    with safe_open(Path(folder) / "adapter_model.safetensors", framework="pt") as file:
        return sum(math.prod(file.get_slice(name).get_shape()) for name in file.keys())  # noqa: SIM118


def load_adapter(model: nn.Module, folder: str | Path) -> None:
    """Load an adapter that peft wrote into its base model, in place, to train it further.

    Raises:
        ValueError: If it is no LoRA adapter, or its weights do not fit.
        NotImplementedError: If it holds more than adapters (``modules_to_save``, biases).
    """
    from peft import LoraConfig, PeftConfig, set_peft_model_state_dict
    from safetensors.torch import load_file

    config = PeftConfig.from_pretrained(str(folder))
    if not isinstance(config, LoraConfig):
        raise ValueError(f"{folder} holds an adapter of type {config.peft_type}; only LoRA (and DoRA) can be trained")
    extras = {"modules_to_save": None, "bias": "none", "trainable_token_indices": None}
    used = [name for name, unused in extras.items() if getattr(config, name) not in (unused, [])]
    if used:
        raise NotImplementedError(
            f"the adapter in {folder} uses {', '.join(used)}, which cannot be trained or sent to engines; merge it "
            "into its base model with peft and start from that"
        )
    config.inference_mode = False
    _inject(model, config, ADAPTER)
    saved = load_file(Path(folder) / "adapter_model.safetensors")
    result = set_peft_model_state_dict(model, {name.removeprefix(_PREFIX): value for name, value in saved.items()})
    wrong = [*result.unexpected_keys, *(name for name in result.missing_keys if "lora_" in name)]
    if wrong:
        raise ValueError(f"the adapter in {folder} does not fit {type(model).__name__}: {wrong[:4]}")


def _linear_layers(model: nn.Module) -> tuple[str, ...]:
    """The backbone's linear layers: last names, or full ones where a layer of another kind has the same last name."""
    hugging_face: Any = model
    backbone, output = hugging_face.base_model, hugging_face.get_output_embeddings()
    home = next((f"{name}." if name else "" for name, module in model.named_modules() if module is backbone), "")
    layers = {home + name: layer for name, layer in backbone.named_modules() if name}
    linear = {name for name, layer in layers.items() if layer is not output and _takes_adapter(name, layer, layers)}
    others = {name.rpartition(".")[2] for name in layers.keys() - linear}
    return tuple({name if (last := name.rpartition(".")[2]) in others else last for name in linear})


def _takes_adapter(name: str, layer: nn.Module, layers: Mapping[str, nn.Module]) -> bool:
    """Whether a layer is linear and is called as a linear layer."""
    from transformers.pytorch_utils import Conv1D

    if not isinstance(layer, nn.Linear | Conv1D) or "Router" in type(layer).__name__:
        return False  # routers of Llama 4 and Phi-MoE are linear layers that return several tensors
    home, _, last = name.rpartition(".")
    # Mamba's kernels read the weight of this layer without calling it; peft refuses it in some families.
    mamba = all(hasattr(layers.get(home), part) for part in ("A_log", "conv1d", "in_proj"))
    return not (mamba and last == "out_proj")


def _expert_weights(model: nn.Module) -> list[str]:
    """Last names of the (experts, rows, columns) tensors that hold a layer's experts, such as ``experts.down_proj``."""
    found = set()
    for name, module in model.named_modules():
        if "expert" in type(module).__name__.lower():
            whole = {key: full_shape(one) for key, one in module.named_parameters(recurse=False)}
            found |= {f"{name.rpartition('.')[2]}.{key}" for key, shape in whole.items() if len(shape) == 3}
    return sorted(found)


def _inject(model: nn.Module, config: Any, adapter: str) -> None:
    from peft import inject_adapter_in_model
    from peft.tuners.tuners_utils import BaseTunerLayer
    from transformers.integrations import is_deepspeed_zero3_enabled

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        inject_adapter_in_model(config, model, adapter)
    if not is_deepspeed_zero3_enabled():  # ZeRO 3 refuses mixed dtypes and keeps float32 copies itself
        for name, parameter in model.named_parameters():
            if ".lora_" in name and parameter.dtype in (torch.bfloat16, torch.float16):
                parameter.data = parameter.data.float()
    hugging_face = cast(Any, model)
    for layer, what in [
        (hugging_face.get_output_embeddings(), "output layer"),
        (hugging_face.get_input_embeddings(), "embedding"),
    ]:
        if isinstance(layer, BaseTunerLayer):
            raise ValueError(
                f"LoRA on the {what} is not supported: log-probs are computed from the plain weight of the output "
                "layer, which may be tied to the embedding. Leave it out of LoRA(targets=...)"
            )


# --------------------------------------------------------------------------------------------- inspecting, disabling


def adapter_layers(model: nn.Module) -> dict[str, Any]:
    """The layers that carry adapters, by name; empty for a model without."""
    if not any(".lora_" in name for name, _ in model.named_parameters()):
        return {}  # without loading peft
    from peft.tuners.lora import LoraLayer

    return {name: layer for name, layer in model.named_modules() if isinstance(layer, LoraLayer)}


def adapter_settings(model: nn.Module) -> dict[str, Any]:
    """Return what an engine needs to apply the trained adapter itself, in peft's terms; plain values.

    ``r``, ``lora_alpha``, ``use_rslora``, ``rank_pattern``, ``alpha_pattern``, and ``target_modules``: the last names
    of the layers that have matrices.

    Raises:
        ValueError: With the reason, if it is not made of two matrices for each of some linear layers of the language
            model, to which alone engines apply adapters.
    """
    layers = adapter_layers(model)
    vision = {one.rpartition(".")[0] for one in _vision_names(model)}
    for name, layer in layers.items():
        if any(one.startswith(f"{name}.") for one in vision):
            raise ValueError(f"{name} is of the vision part")
        active = [one for one in layer.active_adapters if one in layer.lora_A]
        if active != [ADAPTER]:
            raise ValueError(f"adapters {active} are active on {name}")
        if hasattr(layer, "parameter_name"):
            raise ValueError(f"{name} are experts in one tensor")
        if layer.lora_variant or ADAPTER in getattr(layer, "lora_magnitude_vector", {}):
            raise ValueError(f"{name} has more than two matrices (DoRA)")
        if layer.lora_embedding_A or layer.lora_B[ADAPTER].bias is not None:
            raise ValueError(f"{name} has an embedding's adapter or a bias")
    config = cast(Any, model).peft_config[ADAPTER]
    return {
        "r": config.r,
        "lora_alpha": config.lora_alpha,
        "use_rslora": config.use_rslora,
        "rank_pattern": dict(config.rank_pattern or {}),
        "alpha_pattern": dict(config.alpha_pattern or {}),
        "target_modules": sorted({name.rpartition(".")[2] for name in layers}),
    }


def has_adapter(model: nn.Module) -> bool:
    """Whether a model, bare or wrapped, carries LoRA adapters."""
    return bool(adapter_layers(model))


def save_initial_adapter(model: nn.Module) -> None:
    """Keep a frozen copy of adapters that were trained before, for :func:`adapter_disabled`; new ones need none.

    Call it before training and before the model is wrapped.
    """
    layers = adapter_layers(model).values()
    if not any(bool(layer.lora_B[ADAPTER].weight.any()) for layer in layers):
        return
    from peft import get_peft_model_state_dict, set_peft_model_state_dict

    hugging_face = cast(Any, model)
    config = type(hugging_face.peft_config[ADAPTER])(**hugging_face.peft_config[ADAPTER].to_dict())
    state = get_peft_model_state_dict(model, adapter_name=ADAPTER, save_embedding_layers=False)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Already found a `peft_config`")  # adding one is intended
        _inject(model, config, _START)
    set_peft_model_state_dict(model, state, adapter_name=_START)
    for layer in layers:
        layer.set_adapter([ADAPTER])  # the copy stays frozen


@contextmanager
def adapter_disabled(model: nn.Module) -> Iterator[None]:
    """Restore the model before training inside the context: its own reference model.

    The adapters are skipped, or replaced by the copy of :func:`save_initial_adapter`. Nothing is moved or gathered;
    works inside DeepSpeed engines. Not for backward passes.

    Example::

        with torch.no_grad(), adapter_disabled(self.policy):
            reference = policy_output(self.policy, batch, mask)

    Args:
        model: Bare or wrapped.

    Raises:
        ValueError: If the model has no adapters.
    """
    layers = list(adapter_layers(model).values())
    if not layers:
        raise ValueError(f"{type(model).__name__} has no adapters that could be switched off; load it with LoRA(...)")
    # Not peft's own switches: they change requires_grad, on which the hooks of DeepSpeed's engines depend.
    before = [(layer, layer._active_adapter, layer._disable_adapters) for layer in layers]
    for layer in layers:
        if _START in layer.lora_A:
            layer._active_adapter = [_START]
        else:
            layer._disable_adapters = True
    try:
        yield
    finally:
        for layer, active, disabled in before:
            layer._active_adapter, layer._disable_adapters = active, disabled


def frozen_weight_names(model: nn.Module) -> set[str]:
    """Names of the weights that adapters leave as they were loaded; empty for a model without adapters."""
    if not has_adapter(model):
        return set()
    parameters = model.named_parameters(remove_duplicate=False)  # tied weights under both names
    return {name for name, parameter in parameters if not parameter.requires_grad}


# -------------------------------------------------------------------------------------------------------------- files


def adapter_base(folder: str | Path) -> str | None:
    """The base model of the adapter in a folder; ``None`` if it holds no adapter, or ``folder`` is a hub name.

    Raises:
        ValueError: If the adapter's configuration does not name it.
    """
    file = Path(folder).expanduser() / "adapter_config.json"
    if not file.is_file():
        return None
    base = json.loads(file.read_text()).get("base_model_name_or_path")
    if not base:
        raise ValueError(f"{file} does not say which model the adapter belongs to (base_model_name_or_path)")
    return str(base)


def save_adapter(model: nn.Module, folder: str | Path, state_dict: Mapping[str, Tensor]) -> None:
    """Write the adapter alone, from a full state dict; ``PeftModel.from_pretrained(base, folder)`` loads it."""
    from peft import get_peft_model_state_dict
    from safetensors.torch import save_file

    state = get_peft_model_state_dict(model, dict(state_dict), adapter_name=ADAPTER, save_embedding_layers=False)
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    weights = {_PREFIX + name: tensor.detach().cpu().contiguous() for name, tensor in state.items()}
    save_file(weights, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    cast(Any, model).peft_config[ADAPTER].save_pretrained(str(folder))
