"""Sort the parameter groups of one torch optimizer by the child modules that own them."""

from collections import defaultdict
from typing import Any

from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.optim import Optimizer


def groups_by_child(module: nn.Module, optimizer: Optimizer) -> dict[str, list[dict[str, Any]]]:
    """Sort the parameter groups of an optimizer by the direct child of ``module`` that owns their parameters.

    A DeepSpeed engine shards, clips and steps whole groups, so each must belong to one child; a child may have several.
    The groups are the optimizer's dictionaries, not copies: a learning-rate scheduler on it changes the engines too.

    Raises MisconfigurationException if a parameter is outside all children or shared by two, a group spans children, or
    the optimizer has only a part of the trainable parameters of a child.
    """
    children_of: dict[int, list[str]] = defaultdict(list)
    for child_name, child in module.named_children():
        for parameter in child.parameters():
            children_of[id(parameter)].append(child_name)
    names = {id(parameter): name for name, parameter in module.named_parameters()}

    owned: dict[str, list[dict[str, Any]]] = {}
    for index, group in enumerate(optimizer.param_groups):
        owners: dict[str, str] = {}
        for parameter in group["params"]:
            name = names.get(id(parameter), "<not a parameter of the module>")
            found = children_of.get(id(parameter), [])
            if len(found) != 1:
                where = f"shared by the children {found}" if found else "outside every child module"
                raise MisconfigurationException(
                    f"The optimizer updates the parameter '{name}', which is {where} of {type(module).__name__}. Every"
                    " updated parameter must belong to exactly one direct child, because each child becomes one"
                    " DeepSpeed engine. Put it into a child module (a shared backbone with two heads is one child)."
                )
            owners.setdefault(found[0], name)
        if len(owners) > 1:
            raise MisconfigurationException(
                f"Parameter group {index} of {type(optimizer).__name__} spans the children {sorted(owners)} of"
                f" {type(module).__name__}. Give every child its own group(s), for example AdamW(["
                + ", ".join(f"{{'params': self.{name}.parameters()}}" for name in owners)
                + "])."
            )
        for name in owners:
            owned.setdefault(name, []).append(group)
    for name, groups in owned.items():
        _require_complete(module, name, groups)
    return owned


def _require_complete(module: nn.Module, child_name: str, groups: list[dict[str, Any]]) -> None:
    """Raise if the optimizer lacks trainable parameters of a child, whose gradients would accumulate without end."""
    covered = {id(parameter) for group in groups for parameter in group["params"]}
    child = module.get_submodule(child_name)
    left_out = [n for n, p in child.named_parameters() if p.requires_grad and id(p) not in covered]
    if left_out:
        shown = ", ".join(left_out[:3]) + (", ..." if len(left_out) > 3 else "")
        raise MisconfigurationException(
            f"{len(left_out)} parameter(s) of '{child_name}' require gradients but are in no parameter group of the"
            f" optimizer: {shown}. Add them to the optimizer or call requires_grad_(False) on them."
        )
