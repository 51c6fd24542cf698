"""``AdvantageFunction`` and ``PolicyLoss``: the functions that a module can be given, by name or as they are.

A function is called only with the arguments that its signature names; :func:`check_advantages` checks what the one
gives the other.
"""

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from rlhfkit.data.types import Experience
from rlhfkit.distributed import run_on_all_ranks
from rlhfkit.losses import Aggregation, LossOutput, gspo_loss, luspo_loss, rloo_loss
from rlhfkit.losses.policy.sequence import check_advantages_of_sequences
from rlhfkit.modules.on_policy.ranks import inner_function
from rlhfkit.parts import Part, arguments_of, overriding, part_name, plain_function
from rlhfkit.validation import (
    GivenFunction,
    check_integer,
    check_number,
    function_name,
    named_function,
    resolve_function,
    with_arguments,
)


def bound_arguments(function: Callable[..., Any]) -> set[str]:
    """Names of the keyword arguments that a partial has set."""
    bound: set[str] = set()
    while isinstance(function, functools.partial):
        bound |= function.keywords.keys()
        function = function.func
    return bound


class AdvantageFunction:
    """A function that computes advantages: of :mod:`rlhfkit.losses`, or a user's own, given by name or as itself.

    ``arguments`` are further ones of the function; of a class, whose objects are called, those that it is made with.

    The names of its arguments, in any order, say what it is given:

    ================================  ===================================================  ===================
    arguments                         is given                                             returns
    ================================  ===================================================  ===================
    ``(experience)``, or any other    the :class:`~rlhfkit.data.Experience`                (B,) or (B, T-1)
    single argument
    ``(rewards, group)``              rewards (N,), NaN where missing, and group ids (N,)  (N,)
    ``(rewards, group, lengths)``     the same and the tokens of each sample (N,)          (N,)
    ``(rewards, greedy_rewards)``     rewards (B,), and those of greedy answers (B,)       (B,)
    ================================  ===================================================  ===================

    N are the sequences of the iteration, those of all ranks; B are these too, or the rank's own if the function is
    marked with :func:`~rlhfkit.local_rows`.

    Raises:
        ValueError: If there is no such function, or it needs arguments of other names.
    """

    def __init__(self, function: GivenFunction, arguments: Mapping[str, Any] | None = None) -> None:
        self.named: Any
        """Function or class, without the arguments."""
        self.named, own = named_function(function, "advantages", home="rlhfkit.losses")
        self.arguments = {**(arguments or {}), **own}
        """Arguments that the function is called with, or the class is made with."""
        self.function: Callable[..., Any] = with_arguments(self.named, self.arguments)
        if not hasattr(self.named, "__name__") and not isinstance(self.named, functools.partial):  # with __call__
            self.named, self.arguments = type(self.named), arguments_of(self.named)
        self.name = function_name(self.named)
        """Dotted name."""
        parameters = inspect.signature(self.function).parameters.values()
        named = [each for each in parameters if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)]
        needed = [each.name for each in named if each.default is each.empty]
        of_rewards = {*needed} <= {"rewards", "group", "lengths"} or {*needed} == {"rewards", "greedy_rewards"}
        self.takes_rewards = bool(needed) and of_rewards
        """Whether it is given rewards and groups, not the whole experience."""
        by_name = all(each.kind is not each.POSITIONAL_ONLY for each in named)
        of_experience = len(needed) == 1 and named[0].name in needed and named[0].kind is not named[0].KEYWORD_ONLY
        if not (by_name if self.takes_rewards else of_experience):
            hint = ""
            if missing := [each.name for each in named if each.kind is each.KEYWORD_ONLY and each.name in needed]:
                hint = f"; give what it is not given by functools.partial(function, {missing[0]}=...)"
            raise ValueError(
                f"advantages={self.name} takes ({', '.join(needed)}), and a function is given what it names: (rewards, "
                "group), with or without lengths, in any order; (rewards, greedy_rewards); or (experience): name its "
                f"arguments so, or write a function of the experience that calls it{hint}"
            )
        self.takes_greedy_rewards = "greedy_rewards" in needed and self.takes_rewards
        """Whether it compares samples with the greedy answer to their prompt, and not with one another."""
        bound = bound_arguments(self.function)
        self._given = [each.name for each in named if each.name in ("rewards", "group", "lengths")]
        self._given = [name for name in self._given if name not in bound]
        self.is_ours = getattr(inner_function(self.function), "__module__", "").startswith("rlhfkit.")
        """Whether it is a function of rlhfkit, or a partial of one."""

    def plain(self) -> str | dict[str, Any]:
        """Its name, and with arguments ``{"class_path": ..., "init_args": ...}``, for checkpoints."""
        return plain_function(self.named, self.arguments, "advantages")

    def estimate(self, rewards: Tensor, group: Tensor, lengths: Tensor) -> Tensor:
        """(N,) advantages from rewards (N,), NaN where missing, group ids (N,) int64 and lengths (N,) in tokens."""
        offered = {"rewards": rewards, "group": group, "lengths": lengths}
        return cast(Tensor, self.function(**{name: offered[name] for name in self._given}))

    def compare_with_greedy(self, rewards: Tensor, greedy_rewards: Tensor) -> Tensor:
        """(B,) advantages from rewards and those of greedy answers, (B,) each, NaN where missing."""
        return cast(Tensor, self.function(rewards=rewards, greedy_rewards=greedy_rewards))


_INPUTS = ("logprobs", "old_logprobs", "advantages", "mask")
_WHERE = "(clip_low, clip_high and aggregation as arguments of the module, others in policy_loss_arguments)"
_ALWAYS_GIVEN = ("weights", "aggregation", "denominator", "max_length")
"""Keyword arguments that a loss with ``**kwargs`` is given although it does not name them."""
_GIVEN_BY_THE_MODULE = {
    "weights": "they are those of parts, such as Correction",
    "aggregation": "it is the module's aggregation=...",
    "denominator": "it is the count of the optimizer step",
    "rollout_logprobs": "they are the engine's",
    "ref_logprobs": "a KL penalty is a part, KLPenalty, that kl_coef=... makes",
}


class PolicyLoss:
    """A policy loss ``(logprobs, old_logprobs, advantages, mask, *, ...) -> LossOutput`` and its chosen arguments.

    Everything is given by name, whatever the order of the function's arguments. ``function`` is a name in
    :mod:`rlhfkit.losses`, or a function, see :data:`~rlhfkit.validation.GivenFunction`. Arguments that are ``None``
    keep its defaults; ``aggregation`` is ``token-mean`` if it has none.

    Raises:
        ValueError: If the function does not exist, has another form, or lacks one of the arguments.
    """

    def __init__(
        self,
        function: GivenFunction,
        arguments: Mapping[str, Any] | None = None,
        *,
        clip_low: float | None = None,
        clip_high: float | None = None,
        aggregation: Aggregation | None = None,
    ) -> None:
        self.function = resolve_function(function, "policy_loss", home="rlhfkit.losses")
        self.name = function_name(self.function)
        """Dotted name, for checkpoints."""
        self._keywords, self._takes_more = self._signature()
        check_number("clip_low", clip_low, minimum=0, optional=True)
        check_number("clip_high", clip_high, minimum=0, optional=True)
        max_length = dict(arguments or {}).get("max_length")
        check_integer("max_length", max_length, minimum=1, optional=True, why="it is in tokens")
        given = {"clip_low": clip_low, "clip_high": clip_high, "aggregation": aggregation}
        chosen = {name: value for name, value in given.items() if value is not None}
        self._check_arguments(chosen, dict(arguments or {}))
        self.arguments = {**chosen, **dict(arguments or {})}
        """The chosen arguments."""
        default = self._keywords["aggregation"].default if "aggregation" in self._keywords else inspect.Parameter.empty
        own = "token-mean" if default is inspect.Parameter.empty else default
        self.aggregation = cast(Aggregation, own if aggregation is None else aggregation)
        """How token losses become one number; decides what the denominator counts."""
        if own is not default and self.takes("aggregation"):
            self.arguments["aggregation"] = self.aggregation
        self._check_call()

    def _signature(self) -> tuple[dict[str, inspect.Parameter], bool]:
        """The arguments of the function besides the tensors, and whether it takes others too."""
        parameters = list(inspect.signature(self.function).parameters.values())
        named = {each.name: each for each in parameters if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)}
        takes_more = any(each.kind is each.VAR_KEYWORD for each in parameters)
        missing = [] if takes_more and "logprobs" in named else [name for name in _INPUTS if name not in named]
        if missing:
            raise ValueError(
                f"{self.name} is no policy loss: it takes ({', '.join(each.name for each in parameters)}), and is "
                f"given its tensors by name, so that {', '.join(missing)} is missing: needed is "
                f"({', '.join(_INPUTS)}, ...) -> LossOutput, in any order"
            )
        return {name: each for name, each in named.items() if name not in _INPUTS}, takes_more

    def _check_arguments(self, chosen: Mapping[str, Any], arguments: Mapping[str, Any]) -> None:
        own = dict(_GIVEN_BY_THE_MODULE)
        own |= dict.fromkeys(_INPUTS, "it is a tensor of the micro-batch")
        for name in arguments:
            if name in own:
                raise ValueError(f"policy_loss_arguments must not have {name}: {own[name]}")
            if name in chosen:
                raise ValueError(f"{name} is given twice, to the module and in policy_loss_arguments: keep one")
        unknown = [name for name in (*chosen, *arguments) if not self._takes_more and name not in self._keywords]
        if unknown:
            known = [name for name in self._keywords if name not in own or name == "aggregation"]
            takes = ", ".join(known) or "no arguments"
            raise ValueError(f"{self.name} does not take {', '.join(unknown)}; it takes {takes} {_WHERE}")

    def _check_call(self) -> None:
        """Compute the loss of one token; ValueError if one of the chosen arguments is wrong."""
        probe = torch.zeros(1, 1)
        try:
            self._call(probe, probe, probe, probe == 0, weights=None, rollout_logprobs=probe, denominator=None)
        except TypeError as error:
            raise ValueError(f"{self.name} does not take what it is given: {error}") from error
        except ValueError as error:
            raise ValueError(f"{self.name}: {error} {_WHERE}") from error

    def check_parts(self, parts: Sequence[Part]) -> None:
        """Check that what parts do for the loss, and need for it, is used.

        Raises:
            ValueError: If parts weigh tokens and the loss takes no weights, or need what the policy does not return.
        """
        unknown = sorted({name for part in parts for name in part.outputs} - {"entropy", "values", "router_loss"})
        if unknown:
            raise ValueError(f"outputs of a part are entropy, values and router_loss, got {', '.join(unknown)}")
        names = [part_name(part) for part in parts if overriding([part], "weigh")]
        if names and not self.takes("weights"):
            raise ValueError(f"{self.name} takes no weights, which {', '.join(names)} gives to tokens")

    def aggregation_arguments(self, batch: Experience) -> dict[str, Any]:
        """Arguments of the terms of the loss, exact over the optimizer step.

        ``aggregation`` (:func:`~rlhfkit.losses.aggregate` itself calls it ``mode``), ``denominator``, ``max_length``.
        """
        # As aggregate() counts: the divisor of constant-length does not depend on how many rows are trained on.
        counts = {"token-mean": batch.token_denominator, "constant-length": batch.row_denominator}
        denominator = counts.get(self.aggregation, batch.sequence_denominator)
        max_length = self.arguments.get("max_length")
        return {"aggregation": self.aggregation, "denominator": denominator, "max_length": max_length}

    def takes(self, name: str) -> bool:
        """Whether the function is given a keyword argument of this name."""
        return name in self._keywords or (self._takes_more and name in _ALWAYS_GIVEN)

    def __call__(
        self, batch: Experience, logprobs: Tensor, old_logprobs: Tensor, weights: Tensor | None = None
    ) -> LossOutput:
        """The loss of one micro-batch of B sequences with advantages.

        Args:
            batch: The sequences.
            logprobs: (B, T-1) of the policy now.
            old_logprobs: (B, T-1) before this iteration.
            weights: (B, T-1) or (B, 1) factors of tokens.
        """
        return self._call(
            logprobs,
            old_logprobs,
            cast(Tensor, batch.advantages),
            batch.action_mask,
            weights=weights,
            rollout_logprobs=batch.rollout_logprobs,
            denominator=self.aggregation_arguments(batch)["denominator"],
        )

    def _call(
        self, logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor, **offered: Any
    ) -> LossOutput:
        """Call the function with tensors and those of the offered keyword arguments that it names."""
        given = {name: value for name, value in offered.items() if self.takes(name)}
        inputs = dict(zip(_INPUTS, (logprobs, old_logprobs, advantages, mask), strict=True))
        return cast(LossOutput, self.function(**inputs, **given, **self.arguments))


# ---------------------------------------------------------------------- what the one gives the other


def check_advantages(experience: Experience, policy_loss: PolicyLoss, order: Sequence[Part]) -> None:
    """Check what the loss multiplies trained tokens by. A collective.

    One value that is not finite makes all weights NaN, which is seen one iteration later.

    Args:
        experience: This rank's rows.
        policy_loss: What they are given to.
        order: The parts that have prepared them, for the message.

    Raises:
        ValueError: If an advantage, or a log-prob that importance weights are computed from, is not finite at a token
            that is trained on (names what it was computed from that is not finite there either), or if the policy loss
            takes those of sequences and a sequence's tokens have others.
    """
    writers = [part_name(part) for part in order if "advantages" in part.writes]

    def check() -> None:
        _check_finite(experience, writers[0] if writers else "no part")
        of_sequences = policy_loss.function in (gspo_loss, luspo_loss, rloo_loss)
        if of_sequences and experience.advantages is not None:
            check_advantages_of_sequences(experience.advantages, experience.action_mask, policy_loss.name)

    run_on_all_ranks(check, error_type=ValueError)


_SOURCES = {
    "rewards": "the reward function or its processing",
    "token_rewards": "the environment",
    "rollout_logprobs": "the engine, or a wrapper around it, which gives NaN where it knows none",
    "old_logprobs": "the policy before the iteration",
    "ref_logprobs": "the reference model",
    "teacher_logprobs": "the teacher",
    "values": "the critic",
}
"""What advantages are computed from, and where it comes from."""


def _check_finite(experience: Experience, source: str) -> None:
    """Raise ValueError for the rows of this rank, see :func:`check_advantages`."""
    mask, advantages = experience.action_mask, experience.advantages
    if advantages is not None and bool((wrong := mask & ~advantages.isfinite()).any()):
        causes = [f"{name} ({origin})" for name, origin in _SOURCES.items() if _is_wrong(experience, name, wrong)]
        raise ValueError(
            f"{source}: {_places(experience, wrong)} are not finite. "
            + (f"Neither are there: {'; '.join(causes)}" if causes else "What they are computed from is finite there")
        )
    given = experience.rollout_logprobs
    wrong = mask & given.isinf()  # NaN is a log-prob that is not known, whose weight is 1
    if bool(wrong.any()):
        places = _places(experience, wrong, "log-probs")
        raise ValueError(f"rollout_logprobs: {places} are infinite, from {_SOURCES['rollout_logprobs']}")


def _is_wrong(experience: Experience, name: str, tokens: Tensor) -> bool:
    """Whether a field of rows or tokens is not finite at some of the chosen tokens, (B, T-1)."""
    values: Tensor | None = experience.columns.get(name, getattr(experience, name, None))
    if values is None:
        return False
    finite = values.isfinite() if values.dim() == 2 else values.isfinite()[:, None]
    return bool((tokens & ~finite).any())


def _places(experience: Experience, tokens: Tensor, what: str = "advantages") -> str:
    """How many trained tokens are chosen, (B, T-1), and where the first is."""
    row = int(tokens.any(-1).int().argmax())
    prompt, sample = int(experience.group[row]), int(experience.sample_index[row])
    return (
        f"{what} of {int(tokens.sum())} of {int(experience.action_mask.sum())} trained tokens "
        f"(first: sample {sample} of prompt {prompt})"
    )
