"""``AdvantageFunction``: the one hook for advantages, a function of an iteration or of its rewards and groups."""

import dataclasses
import inspect
from collections.abc import Callable
from typing import cast

from torch import Tensor

from rlhfkit.data.types import Experience
from rlhfkit.modules.functions import function_name, resolve_function


class AdvantageFunction:
    """Advantages from a function that a user wrote, or one of :mod:`rlhfkit.losses`.

    Two forms are told apart by the number of arguments that have no default:

    ================================  ===================================================  ===========
    form                              is given                                             returns
    ================================  ===================================================  ===========
    ``(experience)``                  the whole :class:`~rlhfkit.data.Experience`          (B,) or (B, T-1)
    ``(rewards, group)``              rewards (B,), NaN where missing, and group ids (B,)  (B,)
    ``(rewards, group, lengths)``     and the number of actions of each sample (B,)        (B,)
    ================================  ===================================================  ===========

    Args:
        function: Its name in :mod:`rlhfkit.losses`, its dotted name, or itself.

    Raises:
        ValueError: If there is no such function, or it has another form.
    """

    def __init__(self, function: str | Callable[..., Tensor]) -> None:
        self.function = resolve_function(function, "advantages", home="rlhfkit.losses")
        self.name = function_name(self.function)
        """Dotted name, for checkpoints."""
        parameters = inspect.signature(self.function).parameters.values()
        needed = [each.name for each in parameters if each.default is each.empty and each.kind < each.VAR_POSITIONAL]
        missing = [each.name for each in parameters if each.default is each.empty and each.kind is each.KEYWORD_ONLY]
        if missing:
            raise ValueError(
                f"advantages={self.name} needs {', '.join(missing)}: give functools.partial(function, {missing[0]}=...)"
            )
        forms = len(needed) == 1 or (len(needed) == 2 and needed[1] != "mask") or needed[2:] == ["lengths"]
        if not forms:
            raise ValueError(
                f"advantages={self.name} takes ({', '.join(needed)}); needed is a function of (experience), of "
                "(rewards, group) or of (rewards, group, lengths): write one of the experience that calls it"
            )
        self.of_rewards = len(needed) > 1
        """Whether it sees rewards and groups, and not the whole iteration."""
        self._with_lengths = len(needed) == 3

    def estimate(self, rewards: Tensor, group: Tensor, lengths: Tensor) -> Tensor:
        """(B,) by a function of rewards and groups.

        Args:
            rewards: (B,), NaN where missing.
            group: (B,) int64, equal for samples of one prompt.
            lengths: (B,) actions of each sample.
        """
        return cast(Tensor, self.function(rewards, group, *([lengths] if self._with_lengths else [])))

    def __call__(self, experience: Experience, rewards: Tensor) -> Tensor:
        """(B,) or (B, T-1) of an iteration.

        Args:
            experience: B sequences.
            rewards: (B,) that are learned from, in place of the experience's.
        """
        if self.of_rewards:
            return self.estimate(rewards, experience.group, experience.action_mask.sum(-1))
        return cast(Tensor, self.function(dataclasses.replace(experience, rewards=rewards)))
