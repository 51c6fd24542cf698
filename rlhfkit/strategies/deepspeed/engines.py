"""DeepSpeed engines for the children of a LightningModule: configuration, creation, backward, optimizer facade."""

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import fields, is_dataclass
from typing import TYPE_CHECKING, Any

from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.optim import Optimizer

from rlhfkit.strategies.deepspeed.gradients import plain_loss_scale

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine

# Keys that Lightning's Trainer owns; an engine gets its own values.
_OWNED_BY_TRAINER = ("gradient_accumulation_steps", "train_batch_size", "gradient_clipping", "scheduler", "optimizer")
_ENGINE_TAG = "rlhfkit_engine"


def require_unmanaged_accumulation() -> None:
    """Check that the installed DeepSpeed lets the caller own the accumulation window.

    Raises:
        ImportError: When DeepSpeed is too old: it would ignore the key silently and drop the last partial window.
    """
    import deepspeed
    from deepspeed.runtime import constants

    if not hasattr(constants, "MANAGED_GRADIENT_ACCUMULATION"):
        raise ImportError(
            f"DeepSpeed {deepspeed.__version__} does not know 'managed_gradient_accumulation', which lets the Trainer"
            " decide when to step. Install deepspeed>=0.19.8: pip install -U 'rlhfkit[deepspeed]'."
        )


def engine_config(base: Mapping[str, Any], overrides: Mapping[str, Any], *, trainable: bool) -> dict[str, Any]:
    """The DeepSpeed configuration of one child.

    Args:
        base: The strategy's configuration.
        overrides: This child's entries; a nested dictionary is merged into the base's, anything else replaces it.
        trainable: Whether the child has an optimizer. A frozen child keeps ZeRO only at stage 3, the one stage at which
            there is something to shard without an optimizer.

    Returns:
        A configuration that is safe to hand to ``deepspeed.initialize``, sharing nothing with ``base``.
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
    # Otherwise offloading refuses every optimizer but DeepSpeedCPUAdam, which is compiled at start-up.
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


def tag_outputs(engine: nn.Module, name: str) -> None:
    """Mark every output of ``engine`` in the autograd graph, so that a loss can be traced back to its engines."""

    def mark(_module: nn.Module, _inputs: Any, output: Any) -> None:
        for tensor in tensors_in(output):
            if tensor.grad_fn is not None:
                # torch 2.13 types the metadata of a node as a method; on a real node it is a dict.
                tensor.grad_fn.metadata[_ENGINE_TAG] = name  # type: ignore[index]

    engine.register_forward_hook(mark)


def tensors_in(value: Any) -> Iterator[Tensor]:
    """All tensors in nested mappings, sequences and dataclasses."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        yield from (t for item in value.values() for t in tensors_in(item))
    elif isinstance(value, list | tuple):
        yield from (t for item in value for t in tensors_in(item))
    elif is_dataclass(value):
        yield from (t for field in fields(value) for t in tensors_in(getattr(value, field.name)))


def engines_behind(loss: Tensor) -> set[str]:
    """Names of the engines that ``loss`` depends on. Stops at engine outputs, so it walks the loss's own graph only."""
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
    """Back-propagate ``loss`` through the engine or engines that it depends on.

    Args:
        engines: All training engines by child name.
        loss: Scalar.
        **kwargs: Passed on to ``backward`` (for example ``retain_graph=True``).

    Returns:
        Names of the engines that took part.

    Raises:
        RuntimeError: When the loss depends on no engine's output.
        MisconfigurationException: When a loss spans several engines under fp16, where each has a loss scale of its own.
    """
    names = sorted(engines_behind(loss) & set(engines))
    if not names:
        raise RuntimeError(
            "The loss does not depend on the output of a trainable engine"
            f" ({', '.join(sorted(engines)) or 'there is none'}). Call the child itself, as in self.policy(...), not"
            " its inner module, and return a loss that requires gradients."
        )
    if len(names) == 1:
        engine = engines[names[0]]
        engine.backward(loss * (plain_loss_scale(engine) or 1.0), **kwargs)
        return names
    taking_part = [engines[name] for name in names]
    if any(engine.fp16_enabled() for engine in taking_part):
        raise MisconfigurationException(
            f"One loss spans the engines {names}, but with fp16 each engine has its own loss scale. Use bf16 or fp32,"
            " or manual optimization with one manual_backward per engine."
        )
    # DeepSpeed 0.19.8 supports a plain `loss.backward()` from ZeRO 1 on, but refuses it at stage 0. This is what its
    # own `engine.backward` does around autograd, for several engines at once and at every stage.
    with ExitStack() as stack:
        for engine in taking_part:
            stack.enter_context(_running_backward(engine))
        loss.backward(**kwargs)
        for engine in taking_part:
            engine._backward_epilogue()
    return names


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
    """What Lightning, schedulers and users see of one torch optimizer whose parameters live in DeepSpeed engines.

    Its ``param_groups`` are the very dictionaries that the engines use, so learning-rate schedulers and
    ``LearningRateMonitor`` work unchanged. Stepping and clearing gradients belong to the engines.

    Args:
        base: The optimizer that ``configure_optimizers`` returned.
        engines: The engines that own its parameters, by child name.
        discard: Called with an engine's name when its accumulated gradients must be dropped.
    """

    def __init__(self, base: Optimizer, engines: Mapping[str, "DeepSpeedEngine"], discard: Callable[[str], None]):
        # No super().__init__: it would validate parameters that DeepSpeed has replaced by shards.
        self.__dict__.update({key: value for key, value in vars(base).items() if key != "step"})
        self.base = base
        self.engines = dict(engines)
        self._discard = discard
        self._groups = [(name, list(engine.basic_optimizer.param_groups)) for name, engine in self.engines.items()]

    # torch types step by overloads that return the closure's loss; this one only refuses.
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Not for direct use: Lightning steps the engines through the strategy."""
        raise RuntimeError("Step through Lightning: optimizer.step() on self.optimizers(), or automatic optimization.")

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop gradients that were accumulated since the last step."""
        for name in self.engines:
            self._discard(name)

    def state_dict(self) -> dict[str, Any]:
        """Empty: optimizer state is sharded and saved by the engines."""
        return {}

    def share_groups(self) -> None:
        """Make the engines use this optimizer's group dictionaries again after loading, which replaces them."""
        for name, originals in self._groups:
            optimizer = self.engines[name].basic_optimizer
            for original, loaded in zip(originals, optimizer.param_groups, strict=True):
                if original is not loaded:
                    original.clear()
                    original.update(loaded)
            optimizer.param_groups[:] = originals

    def mark_stepped(self) -> None:
        """Tell a scheduler on the original optimizer that a step happened; else it warns about a wrong call order."""
        self.base._opt_called = True  # type: ignore[attr-defined]  # torch's schedulers read it, its class lacks it
