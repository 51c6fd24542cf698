"""Parameter groups of embeddings, heads, matrices and vectors, with settings of their own."""

from collections.abc import Mapping
from typing import Any, Literal, get_args

from torch import nn

from rlhfkit.distributed import full_shape
from rlhfkit.models.attention.families import sees_images
from rlhfkit.models.forward import unwrap
from rlhfkit.models.lora import vision_parameters
from rlhfkit.validation import check_number

Kind = Literal["embeddings", "heads", "matrices", "vectors", "stacks", "vision"]
"""Of parameters: embedding tables (an output layer tied to one is one too); output layers: of logits, scores, values;
other parameters of two dimensions, of fewer (norms, biases), and of more (stacked experts, convolutions). All of the
vision part of a model that sees images are ``vision``, if ``parameter_options`` name it."""
KINDS: tuple[str, ...] = get_args(Kind)
SETTINGS = ("lr", "weight_decay")
HEADS = ("lm_head", "score", "value_head", "classifier")
"""Names of layers that are heads, beside what a model's ``get_output_embeddings`` returns."""


def check_parameter_options(options: Mapping[str, Mapping[str, float]] | None) -> dict[str, dict[str, float]]:
    """Check the settings of kinds and children, and return a plain copy.

    Raises:
        TypeError: If they are not mappings.
        ValueError: If a setting is unknown or out of range, or a kind is unknown.
    """
    if options is None:
        return {}
    example = "for example parameter_options={'embeddings': {'lr': 1e-5}, 'critic.heads': {'weight_decay': 0.0}}"
    if not isinstance(options, Mapping) or not all(isinstance(one, Mapping) for one in options.values()):
        raise TypeError(f"parameter_options must hold settings by kind or child, {example}, got {options!r}")
    for name, settings in options.items():
        unknown = sorted({*settings} - {*SETTINGS})
        if unknown or not settings:
            raise ValueError(f"parameter_options[{name!r}] may set {' and '.join(SETTINGS)}, got {dict(settings)}")
        if "." in name and name.partition(".")[2] not in KINDS:
            raise ValueError(f"parameter_options[{name!r}] must be child.kind with a kind of {', '.join(KINDS)}")
        check_number(f"parameter_options[{name!r}]['lr']", settings.get("lr"), above=0, optional=True)
        decay = settings.get("weight_decay")
        check_number(f"parameter_options[{name!r}]['weight_decay']", decay, minimum=0, optional=True)
    return {name: dict(settings) for name, settings in options.items()}


def kinds_of(child: nn.Module) -> dict[int, str]:
    """The kind of each parameter of a network, by ``id``."""
    kinds: dict[int, str] = {}
    for parameter in child.parameters():
        dimensions = len(full_shape(parameter))
        kinds[id(parameter)] = "vectors" if dimensions < 2 else "matrices" if dimensions == 2 else "stacks"
    heads, embeddings = [], []
    for name, layer in child.named_modules():
        output = getattr(layer, "get_output_embeddings", None)
        found = output() if callable(output) else None
        if isinstance(found, nn.Module):
            heads.append(found)
        if name.rpartition(".")[2] in HEADS:
            heads.append(layer)
        if isinstance(layer, nn.Embedding):
            embeddings.append(layer)
    for kind, layers in (("heads", heads), ("embeddings", embeddings)):  # a tied layer is an embedding
        for layer in layers:
            kinds |= {id(parameter): kind for parameter in layer.parameters() if id(parameter) in kinds}
    return kinds


def vision_of(child: nn.Module) -> set[int]:
    """``id`` of each parameter of the vision part of a network; none if it has no such part."""
    layer: Any = unwrap(child)
    if not hasattr(layer, "get_decoder") or not sees_images(layer.config):
        return set()
    return {id(parameter) for _, parameter in vision_parameters(layer)}


def divide_groups(
    module: nn.Module, groups: list[dict[str, Any]], options: Mapping[str, Mapping[str, float]], *, by_kind: bool
) -> list[dict[str, Any]]:
    """Divide parameter groups where parts of them have settings of their own.

    ``options`` are by kind, child, or ``child.kind``; of several the later in this list wins. Without options for a
    part of it a group stays whole, unless ``by_kind``: then each group has one ``"kind"``.

    Raises:
        ValueError: If a name of ``options`` is none of a child and of no trained parameter.
    """
    children = {name: kinds_of(child) for name, child in module.named_children()}
    if any(name.rpartition(".")[2] == "vision" for name in options):
        for owner, network in module.named_children():
            children[owner] |= dict.fromkeys(vision_of(network), "vision")
    owners = {parameter: name for name, kinds in children.items() for parameter in kinds}
    used: set[str] = set()
    divided: list[dict[str, Any]] = []
    for group in groups:
        parts: dict[tuple[Any, ...], dict[str, Any]] = {}
        for parameter in group["params"]:
            child = owners.get(id(parameter), "")
            kind = children.get(child, {}).get(id(parameter), "matrices")
            names = [name for name in (kind, child, f"{child}.{kind}") if name in options]
            used.update(names)
            settings = {key: value for name in names for key, value in options[name].items()}
            apart = kind if by_kind or any(name != child for name in names) else None
            extra = {} if apart is None else {"kind": kind, "name": f"{group.get('name', child)}.{kind}"}
            part = parts.setdefault((apart, *settings.items()), {**group, **settings, **extra, "params": []})
            part["params"].append(parameter)
        divided += parts.values()
    unused = sorted({*options} - used)
    if unused:
        raise ValueError(
            f"parameter_options names {', '.join(unused)}, of which no parameter is trained: give a kind "
            f"({', '.join(KINDS)}), a child of {type(module).__name__} ({', '.join(children)}), or child.kind"
        )
    return divided
