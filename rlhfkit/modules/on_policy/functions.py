"""``PolicyLoss``: a policy loss as a module calls it, with its own defaults and with the log-probs it asks for."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any, cast

from torch import Tensor

from rlhfkit.losses import Aggregation, LossOutput
from rlhfkit.modules.functions import function_name, resolve_function
from rlhfkit.validation import check_integer, check_number

_INPUTS = ("logprobs", "old_logprobs", "advantages", "mask")
_ALWAYS_GIVEN = ("weights", "aggregation", "denominator", "max_length")
"""What a loss with ``**knobs`` is given although it does not name it."""
_GIVEN_BY_THE_MODULE = {
    "weights": "they are those of the module's correction=...",
    "aggregation": "it is the module's aggregation=...",
    "max_length": "it is the module's max_length=...",
    "denominator": "it is the count of the optimizer step",
    "rollout_logprobs": "they are the engine's",
    "ref_logprobs": "they are the reference model's, which a kl_coef=... loads",
}


class PolicyLoss:
    """A function ``(logprobs, old_logprobs, advantages, mask, *, ...)`` and the arguments that were chosen for it.

    The function is given what its signature names and nothing else, so that one without a clip or a ratio needs no
    arguments it has no use for, and every knob that nobody chose keeps the function's own default.

    Args:
        function: Its name in :mod:`rlhfkit.losses`, its dotted name, or itself.
        arguments: Knobs of it.
        clip_low: ``None``: the function's default.
        clip_high: ``None``: the function's default.
        aggregation: ``None``: the function's default, ``token-mean`` where it has none.
        max_length: Tokens, for the ``constant-length`` aggregation.

    Raises:
        ValueError: If there is no such function, it has another form, or it has no knob of a given name.
    """

    def __init__(
        self,
        function: str | Callable[..., LossOutput],
        arguments: Mapping[str, Any] | None = None,
        *,
        clip_low: float | None = None,
        clip_high: float | None = None,
        aggregation: Aggregation | None = None,
        max_length: int | None = None,
    ) -> None:
        self.function = resolve_function(function, "policy_loss", home="rlhfkit.losses")
        self.name = function_name(self.function)
        """Dotted name, for checkpoints."""
        self._knobs, self._takes_more = self._signature()
        check_number("clip_low", clip_low, minimum=0, optional=True)
        check_number("clip_high", clip_high, minimum=0, optional=True)
        check_integer("max_length", max_length, minimum=1, optional=True, why="it is in tokens")
        given = {"clip_low": clip_low, "clip_high": clip_high, "aggregation": aggregation, "max_length": max_length}
        chosen = {name: value for name, value in given.items() if value is not None}
        self._check_arguments(chosen, dict(arguments or {}))
        self.arguments = {**chosen, **dict(arguments or {})}
        """All that was chosen; the rest is the function's own."""
        default = self._knobs["aggregation"].default if "aggregation" in self._knobs else inspect.Parameter.empty
        own = "token-mean" if default is inspect.Parameter.empty else default
        self.aggregation = cast(Aggregation, own if aggregation is None else aggregation)
        """How token losses become one number; says what its denominator counts."""
        if own is not default and self.takes("aggregation"):
            self.arguments["aggregation"] = self.aggregation

    def _signature(self) -> tuple[dict[str, inspect.Parameter], bool]:
        """The keyword arguments of the function, and whether it takes others too."""
        parameters = list(inspect.signature(self.function).parameters.values())
        places = [each for each in parameters if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)]
        inputs = tuple(each.name for each in places[:4])
        ours = getattr(self.function, "__module__", "").startswith("rlhfkit.losses")
        if len(inputs) < 4 or (ours and inputs != _INPUTS):
            raise ValueError(
                f"{self.name} is no policy loss: it takes ({', '.join(each.name for each in places)}), needed is "
                f"({', '.join(_INPUTS)}, *, ...) -> LossOutput"
            )
        knobs = {each.name: each for each in places[4:]}
        knobs |= {each.name: each for each in parameters if each.kind is each.KEYWORD_ONLY}
        return knobs, any(each.kind is each.VAR_KEYWORD for each in parameters)

    def _check_arguments(self, chosen: Mapping[str, Any], arguments: Mapping[str, Any]) -> None:
        own = dict(_GIVEN_BY_THE_MODULE)
        if self.penalizes_kl:
            own |= {name: f"it is the module's {name}=..." for name in ("kl_coef", "kl_estimator")}
        for name in arguments:
            if name in own:
                raise ValueError(f"policy_loss_arguments must not have {name}: {own[name]}")
            if name in chosen:
                raise ValueError(f"{name} is given twice, to the module and in policy_loss_arguments: keep one")
        unknown = [name for name in (*chosen, *arguments) if not self._takes_more and name not in self._knobs]
        if unknown:
            knobs = [name for name in self._knobs if name not in own or name in ("aggregation", "max_length")]
            raise ValueError(
                f"{self.name} does not take {', '.join(unknown)}; it takes {', '.join(knobs) or 'no knobs'} (clip_low, "
                "clip_high, aggregation and max_length as arguments of the module, others in policy_loss_arguments)"
            )

    def takes(self, name: str) -> bool:
        """Whether the function is given an argument of this name.

        Args:
            name: Of a keyword argument.
        """
        return name in self._knobs or (self._takes_more and name in _ALWAYS_GIVEN)

    @property
    def penalizes_kl(self) -> bool:
        """Whether the function adds the KL penalty to the reference itself, as :func:`~rlhfkit.losses.grpo_loss`."""
        return {"ref_logprobs", "kl_coef"} <= self._knobs.keys()

    def __call__(
        self, logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor, **offered: Any
    ) -> LossOutput:
        """Call the function.

        Args:
            logprobs: (B, T) under the policy, with gradient.
            old_logprobs: (B, T) under the policy before this iteration.
            advantages: (B, T).
            mask: (B, T), true where a token is trained on.
            **offered: ``weights``, ``denominator``, log-probs and what belongs to them; the function gets those it
                names.
        """
        given = {name: value for name, value in offered.items() if self.takes(name)}
        return cast(LossOutput, self.function(logprobs, old_logprobs, advantages, mask, **given, **self.arguments))
