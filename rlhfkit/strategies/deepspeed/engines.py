"""DeepSpeed engines for the children of a LightningModule: configuration, creation, backward pass, optimizer facade."""

import argparse
import copy
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import fields, is_dataclass
from typing import TYPE_CHECKING, Any, Protocol, cast

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.core.optimizer import _MockOptimizer
from torch import Tensor, nn
from torch.optim import Optimizer

from rlhfkit.distributed import tensor_part
from rlhfkit.protocols import TakesFlatLayouts
from rlhfkit.strategies.deepspeed import tensor_parallel
from rlhfkit.strategies.deepspeed.gradients import set_clipping, undo_initial_step
from rlhfkit.strategies.deepspeed.param_groups import flat_layouts, groups_by_child
from rlhfkit.strategies.deepspeed.precision import scaled_for_autograd, scaled_for_engine

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine

# Settings of the Trainer; engine_config replaces or removes them.
_OWNED_BY_TRAINER = ("gradient_accumulation_steps", "train_batch_size", "gradient_clipping", "scheduler", "optimizer")
_ENGINE_TAG = "rlhfkit_engine"


def require_unmanaged_accumulation() -> None:
    """Raise ImportError if DeepSpeed would ignore ``managed_gradient_accumulation`` and drop partial windows."""
    import deepspeed
    from deepspeed.runtime import constants

    if not hasattr(constants, "MANAGED_GRADIENT_ACCUMULATION"):
        raise ImportError(
            f"DeepSpeed {deepspeed.__version__} does not know 'managed_gradient_accumulation', which lets the Trainer"
            " decide when to step. Install deepspeed>=0.19.8: pip install -U 'rlhfkit[deepspeed]'."
        )


def engine_config(base: Mapping[str, Any], overrides: Mapping[str, Any], *, trainable: bool) -> dict[str, Any]:
    """Return the DeepSpeed configuration of one child, a deep copy.

    Nested dictionaries in ``overrides`` are merged into those of ``base``, other values replace them. A child that is
    not ``trainable`` keeps ZeRO at stage 3 only, where parameters are sharded.
    """
    config: dict[str, Any] = copy.deepcopy(dict(base))
    for key, value in overrides.items():
        if isinstance(value, Mapping) and isinstance(config.get(key), Mapping):
            config[key] = {**config[key], **copy.deepcopy(dict(value))}
        else:
            config[key] = copy.deepcopy(value)
    for key in _OWNED_BY_TRAINER:
        config.pop(key, None)
    if not isinstance(config.get("train_micro_batch_size_per_gpu"), int):
        config["train_micro_batch_size_per_gpu"] = 1  # only DeepSpeed's throughput log reads it
    config["gradient_accumulation_steps"] = 1
    config["gradient_clipping"] = 0.0  # deepspeed 0.19.8 clips to 1.0 when the key is missing
    config.setdefault("steps_per_print", 2**31 - 1)
    config.setdefault("zero_allow_untested_optimizer", True)
    # Otherwise offloading works with DeepSpeedCPUAdam only, which is compiled at start-up.
    config.setdefault("zero_force_ds_cpu_optimizer", False)
    zero = config.setdefault("zero_optimization", {})
    if trainable:
        config["managed_gradient_accumulation"] = False
        if zero.get("stage", 0) < 2:
            zero["overlap_comm"] = False  # DeepSpeed allows overlap with unmanaged accumulation from stage 2 on
        if "bf16" in config:
            # ZeRO 1 and 2 check bf16 gradients for NaN and infinity only when asked to.
            config["bf16"] = {**config["bf16"], "check_grad_overflow": True}
    else:
        zero.pop("offload_optimizer", None)
        if zero.get("stage") != 3:
            config.pop("zero_optimization")
    return config


class ConfigOf(Protocol):
    """Returns the complete DeepSpeed configuration of a child."""

    def __call__(self, child: str, *, trainable: bool) -> dict[str, Any]:
        """Return the configuration; ``trainable``: for a child with an optimizer."""


def require_known_children(module: nn.Module, engine_configs: Mapping[str, Any]) -> None:
    """Raise MisconfigurationException if there are configuration entries for children that do not exist."""
    children = [name for name, _ in module.named_children()]
    unknown = sorted(set(engine_configs) - set(children))
    if unknown:
        raise MisconfigurationException(
            f"engine_configs names {unknown}, but the children of {type(module).__name__} are {children}."
        )


def create_training_engines(
    module: nn.Module, optimizers: Sequence[Optimizer], config_of: ConfigOf, device: torch.device, tensor_group: Any
) -> tuple[dict[str, "DeepSpeedEngine"], list[tuple[Optimizer, dict[str, "DeepSpeedEngine"]]]]:
    """Create one engine for each child that an optimizer updates.

    Returns all engines by child name, and pairs of each optimizer and its engines. Raises MisconfigurationException,
    before any engine is created, if it is ambiguous which child owns a parameter.
    """
    owned: list[dict[str, list[dict[str, Any]]]] = []
    for optimizer in optimizers:
        if isinstance(optimizer, _MockOptimizer):
            raise MisconfigurationException(
                f"{type(module).__name__}.configure_optimizers returned no optimizer; there is nothing to train."
            )
        children = groups_by_child(module, optimizer)
        taken = {name for earlier in owned for name in earlier} & set(children)
        if taken:
            raise MisconfigurationException(
                f"Two optimizers update the child '{min(taken)}'; one DeepSpeed engine has one optimizer."
            )
        owned.append(children)
    made: list[tuple[Optimizer, dict[str, DeepSpeedEngine]]] = []
    for optimizer, children in zip(optimizers, owned, strict=True):
        engines = {}
        for name, groups in children.items():
            part = split_optimizer(optimizer, groups)
            child, config = module.get_submodule(name), config_of(name, trainable=True)
            tensor_parallel.require_known_norm(name, config)
            engines[name] = create_engine(child, config, part, device, tensor_group)
            tag_outputs(engines[name], name)
        made.append((optimizer, engines))
    return {name: engine for _, engines in made for name, engine in engines.items()}, made


def place_frozen_children(
    module: nn.Module,
    names: Collection[str],
    config_of: ConfigOf,
    device: torch.device,
    dtype: torch.dtype | None,
    tensor_group: Any,
) -> tuple[set[str], dict[str, "DeepSpeedEngine"]]:
    """Move the named, untrained children into ZeRO-3 inference engines or directly to the device.

    Returns the names of those with parameters, and the engines among them.
    """
    frozen: set[str] = set()
    engines = {}
    for name, child in module.named_children():
        if name not in names:
            continue
        if next(child.parameters(), None) is None:  # for example metrics
            child.to(device)
            continue
        frozen.add(name)
        config = config_of(name, trainable=False)
        if "zero_optimization" in config:
            engines[name] = create_engine(child, config, None, device, tensor_group)
        else:
            move_frozen_child(child, device, dtype)
            if "tensor_parallel" in config:
                tensor_parallel.divide_plain_child(child, config["tensor_parallel"], tensor_group)
    return frozen, engines


def split_optimizer(optimizer: Optimizer, groups: list[dict[str, Any]]) -> Optimizer:
    """Copy an optimizer with only some of its groups, whose dictionaries are shared.

    The constructor is not called: it may take other arguments than ``optimizer.defaults`` holds.
    """
    if len(groups) == len(optimizer.param_groups):
        return optimizer
    part = object.__new__(type(optimizer))
    # `step` is left out: a learning-rate scheduler binds a counting wrapper of it to the original instance.
    part.__dict__.update({key: value for key, value in vars(optimizer).items() if key != "step"})
    part.param_groups = groups
    part.state = defaultdict(dict)
    return part


def create_engine(
    child: nn.Module, config: dict[str, Any], optimizer: Optimizer | None, device: torch.device, tensor_group: Any
) -> "DeepSpeedEngine":
    """Wrap a child module in a DeepSpeed engine: for training with an optimizer, else for inference.

    ``tensor_group``: process group that its weights are divided over if ``config`` says so.
    """
    import deepspeed

    arguments: dict[str, Any] = {}
    if optimizer is not None:
        arguments = {
            "optimizer": optimizer,
            "model_parameters": [p for group in optimizer.param_groups for p in group["params"]],
        }
    if device.type != "cpu":
        arguments["args"] = argparse.Namespace(device_rank=device.index)
    training = child.training
    with tensor_parallel.adapters_open(child) if "tensor_parallel" in config else nullcontext():
        engine, *_ = deepspeed.initialize(model=child, config=config, dist_init_required=False, **arguments)
    if optimizer is not None:
        undo_initial_step(engine)
        set_clipping(engine, 0.0)
        if isinstance(engine.basic_optimizer, TakesFlatLayouts):
            engine.basic_optimizer.set_flat_layouts(dict(flat_layouts(engine, device)))
    if "tensor_parallel" in config:
        tensor_parallel.remove_first_batch_check(engine)
        tensor_parallel.mark_parts(engine.module, tensor_group)
    engine.train(training)
    return engine


def move_frozen_child(child: nn.Module, device: torch.device, dtype: torch.dtype | None) -> None:
    """Move a frozen child without an engine to the device, cast its parameters to ``dtype``, broadcast it from rank 0.

    Buffers (for example rotary frequencies) keep their precision, as in DeepSpeed, so a reference agrees exactly with
    the policy before the first update. ``dtype=None``: no cast. A collective.
    """
    if dtype is not None:
        for parameter in child.parameters():
            if parameter.is_floating_point():
                parameter.data = parameter.data.to(dtype)
    child.to(device)
    if torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1:
        for tensor in (*child.parameters(), *child.buffers()):
            if tensor_part(tensor) is None:  # an earlier run has divided it
                torch.distributed.broadcast(tensor.data, src=0)


def tag_outputs(engine: nn.Module, name: str) -> None:
    """Mark every output of ``engine`` in the autograd graph, for :func:`engines_of`."""

    def mark(_module: nn.Module, _inputs: Any, output: Any) -> None:
        for tensor in tensors_in(output):
            if tensor.grad_fn is not None:
                # torch 2.13 types the metadata of a node as a method; on a real node it is a dict.
                tensor.grad_fn.metadata[_ENGINE_TAG] = name  # type: ignore[index]

    engine.register_forward_hook(mark)


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield all tensors in nested mappings, sequences and dataclasses."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        yield from (t for item in value.values() for t in tensors_in(item))
    elif isinstance(value, list | tuple):
        yield from (t for item in value for t in tensors_in(item))
    elif is_dataclass(value):
        yield from (t for field in fields(value) for t in tensors_in(getattr(value, field.name)))


def engines_of(loss: Tensor) -> set[str]:
    """Return the names of the engines that ``loss`` depends on, by walking its graph back to the outputs of engines."""
    names: set[str] = set()
    seen: set[Any] = set()
    stack: list[Any] = [loss.grad_fn]
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if _ENGINE_TAG in node.metadata:
            names.add(node.metadata[_ENGINE_TAG])
        else:
            stack.extend(parent for parent, _ in node.next_functions)
    return names


def backward_through(engines: Mapping[str, "DeepSpeedEngine"], loss: Tensor, **kwargs: Any) -> list[str]:
    """Back-propagate a scalar loss through all engines that it depends on; return their names.

    In fp16 each engine has a loss scale of its own. A loss that depends on several engines then takes one backward pass
    for each, with the loss multiplied by its scale, through what lies between its parameters and the loss only.

    Raises:
        RuntimeError: If the loss does not depend on an engine.
    """
    names = sorted(engines_of(loss) & set(engines))
    if not names:
        raise RuntimeError(
            "The loss does not depend on the output of a trainable engine"
            f" ({', '.join(sorted(engines)) or 'there is none'}). Call the child itself, as in self.policy(...), not"
            " its inner module, and return a loss that requires gradients."
        )
    if len(names) == 1:
        engine = engines[names[0]]
        engine.backward(scaled_for_engine(engine, loss), **kwargs)
        return names
    taking_part = [engines[name] for name in names]
    if any(engine.fp16_enabled() for engine in taking_part):
        _backward_one_by_one(taking_part, loss, **kwargs)
        return names
    # DeepSpeed 0.19.8 supports a plain `loss.backward()` from ZeRO 1 on, but not at stage 0. This does what its
    # `engine.backward` does around autograd, for several engines at once and at every stage.
    with ExitStack() as stack:
        for engine in taking_part:
            stack.enter_context(_running_backward(engine))
        cast(Any, loss).backward(**kwargs)  # torch 2.13 does not type it
        for engine in taking_part:
            engine._backward_epilogue()
    return names


def _backward_one_by_one(
    engines: Sequence["DeepSpeedEngine"], loss: Tensor, *, retain_graph: bool = False, **kwargs: Any
) -> None:
    """Back-propagate a loss through one engine after the other, each time multiplied by the engine's loss scale."""
    for engine in engines:
        own = [parameter for parameter in engine.module.parameters() if parameter.requires_grad]
        keep = retain_graph or engine is not engines[-1]
        with _running_backward(engine):
            scaled = cast(Any, scaled_for_autograd(engine, loss))  # torch 2.13 does not type backward
            scaled.backward(inputs=own, retain_graph=keep, **kwargs)
            engine._backward_epilogue()


@contextmanager
def _running_backward(engine: "DeepSpeedEngine") -> Iterator[None]:
    engine._unmanaged_backward_count += 1
    engine._running_engine_backward_count += 1
    engine._running_engine_backward = True
    try:
        yield
    finally:
        engine._running_engine_backward_count -= 1
        engine._running_engine_backward = engine._running_engine_backward_count > 0


class EngineOptimizer(Optimizer):
    """A facade for the optimizer ``base``, whose parameters live in DeepSpeed engines.

    Its ``param_groups`` are the dictionaries that the engines use, so learning-rate schedulers and
    ``LearningRateMonitor`` work unchanged. Lightning steps the engines through the strategy; ``discard`` drops the
    gradients of the named engine.
    """

    def __init__(self, base: Optimizer, engines: Mapping[str, "DeepSpeedEngine"], discard: Callable[[str], None]):
        # No super().__init__: it would validate parameters that DeepSpeed has replaced by shards.
        self.__dict__.update({key: value for key, value in vars(base).items() if key != "step"})
        self.base = base
        self.engines = dict(engines)
        self._discard = discard
        self._groups = [(name, list(engine.basic_optimizer.param_groups)) for name, engine in self.engines.items()]

    # torch types step by overloads that return the closure's loss; this one always raises.
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Raise RuntimeError: Lightning steps the engines through the strategy."""
        raise RuntimeError("Step through Lightning: optimizer.step() on self.optimizers(), or automatic optimization.")

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients accumulated since the last step."""
        for name in self.engines:
            self._discard(name)

    def state_dict(self) -> dict[str, Any]:
        """Return an empty dictionary: the engines shard and save optimizer state."""
        return {}

    def share_groups(self) -> None:
        """Make the engines share this optimizer's group dictionaries again; loading replaces them."""
        for name, originals in self._groups:
            optimizer = self.engines[name].basic_optimizer
            for original, loaded in zip(originals, optimizer.param_groups, strict=True):
                if original is not loaded:
                    original.clear()
                    original.update(loaded)
            optimizer.param_groups[:] = originals

    def mark_stepped(self) -> None:
        """Mark the original optimizer as stepped; otherwise its scheduler warns about a wrong call order."""
        self.base._opt_called = True  # type: ignore[attr-defined]  # torch's schedulers read it, its class lacks it
