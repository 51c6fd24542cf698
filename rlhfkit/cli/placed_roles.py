"""``placement:`` of a configuration: the models, engines and ranks that it places, in place of their names.

A :class:`~rlhfkit.Placement` hands out what the constructors take; here these are put into the configuration where its
module, callback and Trainer name a model, an engine and devices.
"""

import copy
import inspect
from collections.abc import Callable, Mapping
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

from rlhfkit.callbacks import RolloutCallback
from rlhfkit.roles import CriticPool, ModelPool, Placement
from rlhfkit.rollout import VLLMPool

if TYPE_CHECKING:
    from jsonargparse import Namespace

ARGUMENTS = {"reference": "reference", "reward": "reward_model", "teacher": "teacher", "critic": "critic"}
"""The argument of a module for the model of each role."""
_FROM_POLICY = ("reference", "critic")
_DECIDED = {
    ModelPool: ("num_replicas", "resources"),
    CriticPool: ("num_ranks", "resources"),
    VLLMPool: ("num_engines", "device", "colocate"),
}
"""What a plan decides."""


def place_roles(config: "Namespace", placement: Placement) -> "Namespace":
    """Return a configuration of ``fit`` with the roles of a plan where it says; holds the plan's resources.

    Raises:
        ValueError: If the plan has a role that the configuration has no model, engine or devices for, or the
            configuration itself says how many processes a role has.
        PlacementError: If the cluster has no room.
    """
    placed = copy.deepcopy(config)
    for role in placement.requests.roles:
        if role == "engines":
            _place_engine(placed, placement)
        elif role != "trainer":
            _place_model(placed.model, role, placement)
    _place_ranks(placed.trainer, placement)
    return placed


def _place_model(model: Any, role: str, placement: Placement) -> None:
    """Put a pool where the module names a model, or one with other arguments."""
    argument, arguments = ARGUMENTS[role], model.init_args
    if argument not in arguments:
        raise ValueError(f"placement.{role} is planned, and {model.class_path} has no argument {argument}")
    value = arguments[argument]
    kind = CriticPool if role == "critic" else ModelPool
    more: dict[str, Any] = {}
    if value is not None and not isinstance(value, str):
        value, more = _pool_arguments(value, kind, f"model.init_args.{argument}")
    if value is None and role in _FROM_POLICY:
        value = arguments.model
    if value is None:
        raise ValueError(f"placement.{role} is planned: name its model by model.init_args.{argument}")
    make: Callable[..., Any] = getattr(placement, role)
    found = make(value, **more)
    arguments[argument] = found


def _pool_arguments(value: Any, kind: type, name: str) -> tuple[Any, dict[str, Any]]:
    """The model and the other arguments of a pool that a configuration describes."""
    if not _is_class(value, kind):
        raise ValueError(
            f"{name} of a role that placement plans is a model's name or a {kind.__name__} without "
            f"{' and '.join(_DECIDED[kind])}, got {value}"
        )
    given = _given(value, kind, name)
    return given.pop("model", None), given


def _given(value: Any, kind: type, name: str) -> dict[str, Any]:
    """The arguments of a class that a configuration gives, those at their defaults left out.

    Raises:
        ValueError: If one of them is what the plan decides.
    """
    defaults = {one.name: one.default for one in inspect.signature(kind).parameters.values()}
    given = {key: each for key, each in vars(value.init_args).items() if each != defaults.get(key)}
    twice = [key for key in _DECIDED[kind] if key in given]
    if twice:
        raise ValueError(f"{name} gives {', '.join(twice)}, which placement decides: leave it out of one of the two")
    return {key: _plain(each) for key, each in given.items()}


def _plain(value: Any) -> Any:
    """Namespaces as dictionaries."""
    return value.as_dict() if hasattr(value, "as_dict") else value


def _is_class(value: Any, kind: type) -> bool:
    """Whether a configuration's value describes an object of a class."""
    path = getattr(value, "class_path", None)
    return isinstance(path, str) and issubclass(resolve_name(path), kind)


def _place_engine(config: Any, placement: Placement) -> None:
    """Put the plan's engines into the callback that samples."""
    callbacks = config.trainer.callbacks or []
    callbacks = callbacks if isinstance(callbacks, list) else [callbacks]
    sampling = [one for one in callbacks if _is_class(one, RolloutCallback)]
    if not sampling:
        raise ValueError("placement.engines is planned, and trainer.callbacks has no RolloutCallback")
    arguments = sampling[0].init_args
    given: Mapping[str, Any] = {}
    if arguments.engine is not None:
        if not _is_class(arguments.engine, VLLMPool):
            raise ValueError(
                f"placement.engines is planned, which are a VLLMPool, and the engine is {arguments.engine.class_path}: "
                "leave one of the two out"
            )
        given = _given(arguments.engine, VLLMPool, "the engine")
    arguments.engine = placement.engines(**given)


def _place_ranks(trainer: "Namespace", placement: Placement) -> None:
    """Give the Trainer's arguments the plan's devices, and with ``launcher="ray"`` a strategy that starts its ranks."""
    machines = 1 if placement.launcher == "ray" else trainer.num_nodes
    devices = placement.devices // machines
    if placement.devices % machines or str(trainer.devices) not in ("auto", str(devices)):
        raise ValueError(
            f"trainer.devices={trainer.devices!r} and trainer.num_nodes={trainer.num_nodes} are not the "
            f"{placement.num_ranks} rank(s) of placement.trainer: leave trainer.devices out"
        )
    trainer.devices = devices
    if placement.device == "cpu":
        trainer.accelerator = "cpu"
    started = placement.ranks()
    if not started:
        return
    trainer.num_nodes = started.pop("num_nodes")
    trainer.strategy = _strategy_on_ray(trainer.strategy, started | {"num_nodes": trainer.num_nodes})


def _strategy_on_ray(strategy: Any, started: dict[str, Any]) -> Any:
    """The strategy of a name or a description, whose ranks Ray starts."""
    from lightning.pytorch.strategies import StrategyRegistry

    from rlhfkit.strategies import RLHFDeepSpeedStrategy

    if isinstance(strategy, str) and strategy in StrategyRegistry:
        entry = StrategyRegistry[strategy]
        if issubclass(entry["strategy"], RLHFDeepSpeedStrategy):
            return entry["strategy"](**entry["init_params"] | started)
    elif _is_class(strategy, RLHFDeepSpeedStrategy):
        given = {key: each for key, each in vars(strategy.init_args).items() if key not in started}
        return resolve_name(strategy.class_path)(**{key: _plain(each) for key, each in given.items()} | started)
    raise ValueError(
        f"placement.launcher='ray' starts the ranks of an RLHFDeepSpeedStrategy, got trainer.strategy={strategy!r}: "
        "name rlhf_zero0 to rlhf_zero3"
    )
