"""``Part``: a feature of a module as one object that is passed in, with its arguments, state, metrics and checks.

A part is a Lightning callback that may also take part in preparing an iteration and in the loss, so that hooks of the
optimizer and state in checkpoints come from Lightning. A module holds its parts in a list and calls the methods that
they override, in order; what a run does not use is not there. Examples are the files of :mod:`rlhfkit.modules.parts`.
"""

import dataclasses
import inspect
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import Enum, IntEnum
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, cast

from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn

from rlhfkit.data.types import Experience
from rlhfkit.losses import LossOutput
from rlhfkit.models import PolicyOutput
from rlhfkit.validation import (
    check_number,
    function_name,
    named_function,
    refuse_without_effect,
    resolve_function,
)


class Stage(IntEnum):
    """When a part prepares an iteration; parts of one stage do in the order in which they were given."""

    SCORE = 10
    """Rewards of samples by models of the module."""
    SHAPE = 20
    """What becomes of rewards: penalties, scale, limits."""
    POLICY = 30
    """What the policy before the iteration makes of the rows."""
    MODELS = 40
    """What other models make of them: reference, teacher, critic."""
    PENALIZE = 50
    """What is taken from rewards because of these."""
    CREDIT = 60
    """Advantages, and what is added to them."""
    SELECT = 70
    """Which tokens are trained on."""
    ADAPT = 80
    """Coefficients of the iteration."""
    LEARN = 90
    """Parts that take part in the loss only."""


@dataclasses.dataclass(frozen=True)
class Child:
    """A model that a part brings: ``module.<name>``."""

    build: Callable[[], nn.Module]
    """Loads it; called once."""
    trained: bool = False
    """Whether it has an optimizer; else it is frozen, and in no checkpoint."""
    lr: float | None = None
    """Peak learning rate; ``None``: the module's."""


class Configured:
    """Something that is made of arguments which are attributes of the same names, with plain values or functions."""

    def plain(self) -> dict[str, Any]:
        """Class and arguments as plain values, as in YAML: ``{"class_path": ..., "init_args": {...}}``.

        Raises:
            TypeError: If an argument is no attribute of its name, or has no plain value.
        """
        return {"class_path": f"{type(self).__module__}.{type(self).__qualname__}", "init_args": arguments_of(self)}

    @classmethod
    def of(cls, value: Any) -> Any:
        """Make what :meth:`plain` has written again; anything of another form is returned as it is.

        Raises:
            TypeError: If it was written of a class that is not derived from this one.
        """
        if not (isinstance(value, Mapping) and "class_path" in value):
            return value
        kind, arguments = named_part(value)
        return of_class(kind, cls, f"{cls.__module__}.{cls.__qualname__}")(**arguments)

    def __repr__(self) -> str:
        """Class and arguments that are not the default."""
        defaults = {name: each.default for name, each in inspect.signature(type(self)).parameters.items()}
        given = {name: getattr(self, name, default) for name, default in defaults.items()}
        shown = [f"{name}={value!r}" for name, value in given.items() if _differ(value, defaults[name])]
        return f"{type(self).__name__}({', '.join(shown)})"


class Part(Configured, Callback):
    """A feature of a module. A subclass overrides what it takes part in; the rest is not called.

    Arguments of its ``__init__`` are attributes of the same names with plain values or functions, by which
    :meth:`plain` saves it. All ranks have the same parts in the same order, so that collectives may be called in
    ``prepare`` and hooks, wherever that depends on arguments and ``rows.summary`` only. Example, which is a whole
    feature::

        class ClipAdvantages(Part):
            stage, reads, writes = Stage.CREDIT, ("advantages",), ("advantages",)

            def __init__(self, limit: float = 5.0) -> None:
                self.limit = limit

            def prepare(self, rows):
                return dataclasses.replace(rows, advantages=rows.advantages.clamp(-self.limit, self.limit))

        GRPOModule("Qwen/Qwen3-0.6B", parts=[ClipAdvantages(3.0)])
    """

    stage: Stage = Stage.LEARN
    """When :meth:`prepare` is called."""
    reads: tuple[str, ...] = ()
    """Fields of the rows that it needs. What no earlier part or step writes is a ValueError when the module is made;
    ``old_logprobs`` are computed for all rows if any part reads them."""
    may_read: tuple[str, ...] = ()
    """Fields of the rows that it uses where an earlier part has written them, and does not need."""
    writes: tuple[str, ...] = ()
    """Fields of the rows that its ``prepare`` sets. Of two parts that write one field the later one must read it."""
    temporary: Mapping[str, str] = {}
    """Columns that it writes for later parts only, which are dropped once the iteration is prepared, and what reads
    them, for the ValueError where nothing does."""
    loads_reference: bool = False
    """Whether it calls ``module.reference_model()``, which is then loaded with the policy."""
    outputs: tuple[str, ...] = ()
    """What it needs of the policy's output beside log-probs: ``entropy``; for fine-tuning also ``correct``."""
    of_samples: bool = False
    """Whether the advantages that it writes are equal for all tokens of a sample."""
    label: str = ""
    """Its name in messages; empty: that of its class."""
    number: int = 0
    """Number among the module's parts of its class."""
    module: Any = None
    """The module that it is a part of; ``None`` until :meth:`attach`."""

    @property
    def creates(self) -> frozenset[str]:
        """Fields that it writes without reading them: where it is, no other part does."""
        return frozenset({*self.writes} - {*self.reads, *self.may_read})

    @property
    def state_key(self) -> str:
        """Key of its state in checkpoints: class and number, so that two parts of one class keep two states."""
        return f"{type(self).__qualname__}[{self.number}]"

    def attach(self, module: Any) -> None:
        """Become a part of a module; called once, when it is made and before anything is loaded.

        A subclass checks here that both fit, after ``super().attach(module)``; its arguments in ``__init__``.

        Raises:
            ValueError: If it is a part of another module already.
        """
        if self.module is not None and self.module is not module:
            raise ValueError(f"{type(self).__name__} is a part of another module already: make one for each module")
        self.module = module

    def brings(self) -> Sequence["Part"]:
        """Parts that it needs beside it: a module makes each unless another part writes the same fields."""
        return ()

    def children(self) -> Mapping[str, Child]:
        """Models that it brings, by their names in the module."""
        return {}

    def placed(self) -> Mapping[str, tuple[Any, Any]]:
        """Models on machines of their own that it asks, by the names of their roles, and what for.

        See :class:`~rlhfkit.roles.frozen_model.FrozenModel`.
        """
        return {}

    def parameter_groups(self, groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Groups of the optimizer, changed; as in :meth:`PolicyModule.parameter_groups`."""
        raise NotImplementedError

    def check_group_size(self, group_size: int) -> None:
        """Raise ValueError if groups of this many samples teach nothing."""

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """End its models on machines of their own."""
        for model, _ in self.placed().values():
            model.close()

    def loaded(self) -> None:
        """Called when the module has built its models, before a strategy has them; maybe more than once."""

    # ------------------------------------------------------------------ an iteration, before its first update

    def begin(self, rows: Experience) -> None:
        """Ask for what is computed elsewhere, and return at once; before any :meth:`prepare`. A collective."""
        raise NotImplementedError

    def prepare(self, rows: Experience) -> Experience:
        """Return this rank's rows of the iteration with more in them, as a copy. A collective.

        ``rows.summary`` has rewards, groups and lengths of all ranks' rows; ``self.module.ranks.gather_rows(rows,
        values)`` gathers other values of them.
        """
        raise NotImplementedError

    # ------------------------------------------------------------------ one micro-batch of B sequences

    def policy_output(self, batch: Experience) -> PolicyOutput:
        """The policy's output, in place of the module's own forward pass. One part of a module at most."""
        raise NotImplementedError

    def old_logprobs(self, batch: Experience, out: PolicyOutput) -> Tensor:
        """(B, T-1) log-probs that ratios are taken to, in place of the trainer's before the iteration.

        No forward pass is then made for those. One part of a module at most.
        """
        raise NotImplementedError

    def weigh(self, batch: Experience, out: PolicyOutput, old: Tensor) -> tuple[Tensor, Mapping[str, Any]]:
        """Factors of tokens in the policy loss, (B, T-1) or (B, 1), and metrics; may be called more than once.

        ``old``: (B, T-1) log-probs that the ratio is taken to.
        """
        raise NotImplementedError

    def term(self, batch: Experience, out: PolicyOutput, old: Tensor) -> LossOutput:
        """A term of the loss beside the policy loss, exact over the optimizer step; may be called more than once."""
        raise NotImplementedError

    def auxiliary_loss(self, batch: Experience, out: PolicyOutput) -> LossOutput:
        """A loss of its own beside the module's, for modules that learn from their own samples; called once.

        It is added whatever :meth:`loss` of the module is, after :meth:`observe`, and is no part of the policy loss,
        which is then logged as ``policy/loss``. A metric that is a share of a step's mean, such as the loss, is a
        :func:`~rlhfkit.losses.weighted_metric` with the weight 1.
        """
        raise NotImplementedError

    def observe(self, batch: Experience, out: PolicyOutput, old: Tensor) -> Mapping[str, Any]:
        """Metrics of a micro-batch, averaged over its tokens; called once, after the loss. State may change here."""
        raise NotImplementedError

    # ------------------------------------------------------------------ saving

    def export(self, child: str, folder: Path, **options: Any) -> bool:
        """Write a child that is on machines of its own, see :meth:`PolicyModule.save_pretrained`. A collective.

        Returns:
            Whether it has; else the module writes it.
        """
        return False

    def save_weights(self, checkpoint: dict[str, Any]) -> None:
        """Put weights into a checkpoint that it changes beside those that are trained. A collective.

        Other state is what ``state_dict`` returns, as of any callback.
        """

    def load_weights(self, checkpoint: Mapping[str, Any]) -> None:
        """Restore what :meth:`save_weights` has saved, after the models were built. A collective."""


def _differ(value: Any, default: Any) -> bool:
    return not (value is default or (isinstance(value, str | int | float) and value == default))


class Prepare(Part):
    """A user's function of the rows: a step of an iteration between others.

    Example::

        def keep_short(rows):
            return dataclasses.replace(rows, rewards=rows.rewards.where(rows.lengths < 100, 0.0))

        GRPOModule("Qwen/Qwen3-0.6B", parts=[keep_short])  # Stage.SHAPE: rewards, before advantages
        GRPOModule("Qwen/Qwen3-0.6B", parts=[Prepare(my_function, Stage.CREDIT, reads=("advantages",))])

    Args:
        function: From the :class:`~rlhfkit.data.Experience` of the iteration to a changed copy with the same rows, or
            its dotted name. With several ranks it is given all rows, the same on every rank, unless it is marked with
            :func:`~rlhfkit.local_rows`: then this rank's.
        stage: When; a :class:`Stage` or its name.
        reads: Fields of the rows that it needs beside those that samples come with.
        writes: Fields of the rows that it sets.

    Raises:
        ValueError: If there is no such function or stage.
    """

    may_read = ("rewards", "token_rewards")

    def __init__(
        self,
        function: Callable[[Experience], Experience] | str | Mapping[str, Any],
        stage: Stage | str = Stage.SHAPE,
        *,
        reads: Sequence[str] = (),
        writes: Sequence[str] = (),
    ) -> None:
        if isinstance(stage, str) and stage not in Stage.__members__:
            raise ValueError(f"stage must be one of {', '.join(Stage.__members__)}, got {stage!r}")
        self.function = resolve_function(function, "function")
        self.stage = Stage[stage] if isinstance(stage, str) else Stage(stage)
        self.reads, self.writes = tuple(reads), tuple(writes)

    def prepare(self, rows: Experience) -> Experience:
        """Call the function.

        Raises:
            TypeError: If it returns something else than rows.
            ValueError: If it returns another number of rows.
        """
        return cast(Experience, self.module.ranks.changed_by(self._call, rows, mark=self.function))

    def _call(self, rows: Experience) -> Experience:
        found = self.function(rows)
        name = part_name(self)
        if not isinstance(found, Experience):
            raise TypeError(
                f"{name} returned {type(found).__name__}: return the rows, changed with dataclasses.replace"
            )
        if len(found) != len(rows):
            raise ValueError(
                f"{name} was given {len(rows)} rows and returned {len(found)}: to learn nothing from a row, clear its "
                "action_mask"
            )
        return found


# ---------------------------------------------------------------------- weights that change over a run

Coefficient = float | str | Mapping[str, Any] | Callable[[int], float]
"""A weight: a number, or a function of the number of optimizer steps so far, see
:data:`~rlhfkit.validation.GivenFunction`."""


def check_coefficient(name: str, coef: Coefficient, **bounds: Any) -> float | Callable[[int], float]:
    """Check a weight, and import a function that is given by name.

    Args:
        name: For messages.
        coef: The weight.
        **bounds: Of a number, see :func:`~rlhfkit.validation.check_number`.

    Raises:
        TypeError: If it is neither a number nor a function.
        ValueError: If it is out of bounds, or there is no such function.
    """
    if isinstance(coef, str | Mapping) or callable(coef):
        return resolve_function(coef, name)
    check_number(name, coef, **bounds)
    return coef


def coefficient(coef: float | Callable[[int], float], module: Any) -> float:
    """The weight at the module's current step."""
    return float(coef(module.trainer.global_step)) if callable(coef) else coef


# ---------------------------------------------------------------------- making and ordering parts

Kind = TypeVar("Kind")

GivenPart = Part | Mapping[str, Any] | Callable[[Experience], Experience] | str
"""A part as users give it, see :func:`make_part`."""


def make_part(given: GivenPart) -> Part:
    """A part given as itself, as :meth:`Part.plain`, as a function of the rows, or by the name of a function or class.

    Raises:
        TypeError: If it is something else, or a class without its arguments.
        ValueError: If a name cannot be found.
    """
    if isinstance(given, Part):
        return given
    kind, arguments = named_part(given)
    if not isinstance(kind, type):
        return Prepare(kind, **arguments)
    return of_class(kind, Part, "rlhfkit.Part, or give a function of the rows")(**arguments)


def named_part(given: Any) -> tuple[Any, dict[str, Any]]:
    """The class or function that is meant by a dotted name, a mapping or itself, and its arguments.

    Raises:
        TypeError: If it is none of these.
        ValueError: If a name cannot be found.
    """
    if isinstance(given, str | Mapping):
        return named_function(given, "parts" if isinstance(given, str) else "class_path")
    if isinstance(given, Configured):
        where = "a Part belongs to a module, a RolloutPart to RolloutCallback(parts=[...])"
        raise TypeError(f"{given!r} is in the wrong place: {where}")
    if not callable(given):
        raise TypeError(f"a part is a Part, a function of the rows, or their dotted name, got {given!r}")
    return given, {}


def given_or(own: Kind, given: Iterable[Part], **changed: bool) -> Kind:
    """The first of the parts that were given which is of the class of a module's own and takes its place; else ``own``.

    Raises:
        ValueError: If one was given beside arguments that ``own`` was made of: those that are true.
    """
    found = next((one for one in given if isinstance(one, type(own))), None)
    if found is None:
        return own
    refuse_without_effect(changed, f"{found!r} among parts")
    return found


def of_class(kind: Any, base: type[Kind], instead: str) -> type[Kind]:
    """A class that is derived from ``base``; raises TypeError, which says what to derive it from, if it is not."""
    if not (isinstance(kind, type) and issubclass(kind, base)):
        raise TypeError(f"{getattr(kind, '__name__', kind)} is no {base.__name__}: derive it from {instead}")
    return kind


_SAMPLED = (
    *("input_ids", "attention_mask", "action_mask", "lengths", "rollout_logprobs", "versions", "rewards"),
    *("token_rewards", "reward_parts", "group", "sample_index", "truncated", "update", "replayed"),
)
"""Fields that the rows of an iteration come with."""
_PUT_BACK = dict.fromkeys(("rewards", "token_rewards"), "a part that compares them (in distillation: a reward_coef)")
"""Of these, what is put back once an iteration is prepared, and what reads it."""


def arrange(parts: Iterable[Part]) -> list[Part]:
    """The order in which all parts of a module prepare an iteration: by stage, and as they are given.

    Raises:
        ValueError: If one reads a field that is not there and nothing earlier writes, overwrites what another has
            written without reading it, or writes only what is dropped and nothing later reads.
    """
    order = sorted(parts, key=lambda part: part.stage)
    _check_reads(order)
    for place, part in enumerate(order):
        lost = {**_PUT_BACK, **part.temporary}
        read = {name for later in order[place + 1 :] for name in (*later.reads, *later.may_read)}
        if part.stage > Stage.SCORE and part.writes and lost.keys() - read >= {*part.writes}:
            cures = ", ".join(dict.fromkeys(lost[name] for name in part.writes))
            raise ValueError(
                f"{part_name(part)} would have no effect: nothing after it reads the {', '.join(part.writes)} that "
                f"{part!r} writes: leave it out, or add what does: {cures}"
            )
    return order


def _check_reads(order: Sequence[Part]) -> None:
    """Raise ValueError if a part reads what is not there, or overwrites what it does not read."""
    there, writers = set(_SAMPLED), dict[str, Part]()
    for place, part in enumerate(order):
        missing = [name for name in part.reads if name not in there]
        if missing:
            later = [part_name(one) for one in order[place + 1 :] if set(missing) & set(one.writes)]
            cure = f"give it a later stage than {later[0]}" if later else "add the part or argument that does"
            before = ", ".join(map(part_name, order[:place])) or "nothing"
            raise ValueError(
                f"{part_name(part)} ({part.stage.name}) reads {', '.join(missing)}, which nothing before it writes: "
                f"{cure}; before it: {before}"
            )
        for name in part.writes:
            other = writers.get(name)
            if other is not None and name not in (*part.reads, *part.may_read):
                raise ValueError(
                    f"{part_name(part)} writes {name}, which {part_name(other)} has written before it: leave one of "
                    f"them out, or let {part_name(part)} read {name} and change it"
                )
            writers[name] = part
        there.update(part.writes)


def attach_all(parts: Sequence[Part], module: Any) -> None:
    """Number the parts of each class and attach them to a module."""
    numbers = Counter[type]()
    for part in parts:
        part.number = numbers[type(part)]
        numbers[type(part)] += 1
        part.attach(module)


def overriding(parts: Iterable[Any], method: str, base: type = Part) -> list[Any]:
    """A method of all parts that override that of ``base``, bound."""
    empty = getattr(base, method)
    return [getattr(part, method) for part in parts if getattr(type(part), method) is not empty]


_OF_ONE = {"old_logprobs": "have the log-probs that ratios are taken to", "policy_output": "run the policy"}
"""Methods that one part of a module may override, and what they do."""


def hooks_of(parts: Sequence[Part]) -> dict[str, list[Any]]:
    """What a module calls: by the name of a method of :class:`Part`, that of all parts that override it, bound.

    Raises:
        ValueError: If several parts override a method that only one may.
    """
    for method, what in _OF_ONE.items():
        names = [part_name(part) for part in parts if overriding([part], method)]
        if len(names) > 1:
            raise ValueError(f"{' and '.join(names)} each {what}: give one")
    methods = ("begin", "weigh", "term", "auxiliary_loss", "observe", "parameter_groups", *_OF_ONE)
    return {method: overriding(parts, method) for method in methods}


def model_elsewhere(parts: Iterable[Part], role: str) -> Any:
    """The model of a role that a part has on machines of its own; ``None``: none has."""
    return next((part.placed()[role][0] for part in parts if role in part.placed()), None)


def part_name(part: Part) -> str:
    """A part in messages: its class, or the function that it calls."""
    if isinstance(part, Prepare):
        return getattr(part.function, "__qualname__", repr(part.function))
    return part.label or type(part).__name__


def describe(order: Sequence[Part], parts: Sequence[Part], policy_loss: str) -> str:
    """One line: what prepares an iteration, in order and by stage, and what the loss consists of."""
    terms = (part for method in ("term", "auxiliary_loss") for part in parts if overriding([part], method))
    loss, stages = [policy_loss.rpartition(".")[-1], *map(part_name, terms)], dict[str, list[str]]()
    for part in order:
        stages.setdefault(part.stage.name, []).append(part_name(part))
    steps = " -> ".join(f"{stage} {', '.join(names)}" for stage, names in stages.items())
    return f"{steps} | loss: {' + '.join(loss)}"


def arguments_of(made: object) -> dict[str, Any]:
    """The arguments of an object's class by name, as plain values, from its attributes of these names.

    Raises:
        TypeError: If an argument is no attribute of its name, or has no plain value.
    """
    kind = type(made)
    parameters = inspect.signature(kind).parameters.values()
    names = [each.name for each in parameters if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)]
    missing = [name for name in names if not hasattr(made, name)]
    if missing:
        raise TypeError(
            f"{kind.__name__} cannot be saved: keep {', '.join(missing)} as attributes of these names, so that "
            "checkpoints and YAML can make it again"
        )
    return {name: plain_value(getattr(made, name), f"{kind.__name__}.{name}") for name in names}


def plain_value(value: Any, name: str) -> Any:
    """A value of plain types: numbers, texts, lists and mappings; functions by dotted name, options as mappings.

    Raises:
        TypeError: If it has none; ``name`` is for the message.
    """
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, Enum):
        return value.name
    if isinstance(value, int | float):
        return value
    if isinstance(value, Mapping):
        return {str(key): plain_value(one, name) for key, one in value.items()}
    if isinstance(value, Sequence):
        return [plain_value(one, name) for one in value]
    if callable(getattr(value, "plain", None)):
        return value.plain()
    if callable(value):
        return plain_function(*named_function(value, name), name)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return plain_value(dataclasses.asdict(value), name)
    raise TypeError(f"{name} is {type(value).__name__}: arguments of parts are plain values, options or functions")


def plain_function(function: Callable[..., Any], arguments: Mapping[str, Any], name: str) -> str | dict[str, Any]:
    """Dotted name of a function or class; with arguments what YAML has, see :data:`~rlhfkit.validation.GivenFunction`.

    What cannot be made again is described in angle brackets, see :func:`~rlhfkit.validation.function_name`.
    """
    is_object = not hasattr(function, "__name__") and not isinstance(function, partial)
    try:
        if is_object:
            function, arguments = type(function), arguments_of(function)
        values = {key: plain_value(value, f"{name}.{key}") for key, value in arguments.items()}
    except TypeError as error:
        return f"<{function_name(function)} with arguments, {error}: not importable>"  # which loading it again names
    named = function_name(function)
    return {"class_path": named, "init_args": values} if values or is_object else named
