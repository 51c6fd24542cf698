"""``AdvantageModule``: advantages of an iteration's samples, by a method of the module or a function that was given."""

import dataclasses
from collections.abc import Callable
from typing import Any

from torch import Tensor

from rlhfkit.data.types import Experience
from rlhfkit.distributed import run_on_all_ranks
from rlhfkit.modules.on_policy.functions import AdvantageFunction, GivenAdvantages
from rlhfkit.modules.on_policy.preparation.local_rows import (
    function_label,
    is_spread,
    local_rows,
    own_part,
    takes_local_rows,
    warn_of_gathering,
)
from rlhfkit.modules.on_policy.preparation.placed_models import PlacedModule
from rlhfkit.parts import Part, part_name


class AdvantageModule(PlacedModule):
    """A policy whose rewarded samples get advantages.

    Args:
        model: Folder or hub name of the policy.
        advantages: Function used in place of :meth:`advantages`, or its name (``"rloo_advantages"``,
            ``"my_package.my_function"``): of the iteration's :class:`~rlhfkit.data.Experience`, or of rewards (N,) and
            group ids (N,), see :class:`~rlhfkit.modules.on_policy.functions.AdvantageFunction`. Its rewards are those
            after parts of ``Stage.SHAPE`` and ``Stage.PENALIZE``.
        **kwargs: See :class:`~rlhfkit.modules.on_policy.preparation.iteration.IterationModule`.

    Raises:
        ValueError: If the function has another form.
    """

    def __init__(self, model: str, *, advantages: GivenAdvantages | None = None, **kwargs: Any) -> None:
        super().__init__(model, **kwargs)
        self.advantage_function = None if advantages is None else AdvantageFunction(advantages)
        """The function that was given as ``advantages``."""
        self.hparams.update(advantages=None if self.advantage_function is None else self.advantage_function.plain())
        self._warned_of_gathering: set[str] = set()
        if not hasattr(self, "credit"):
            self.credit: list[Part] = []
            """Parts that compute advantages, in order; a subclass sets them before this constructor is called."""
            if advantages is not None:
                from rlhfkit.modules.parts.advantages import AdvantagesBy

                self.credit.append(AdvantagesBy(advantages))

    @property
    def needs_greedy_rewards(self) -> bool:
        """Whether samples are compared with the greedy answer to their prompt (ReMax), which is generated too."""
        return any(part.estimator.takes_greedy_rewards for part in self.parts if hasattr(part, "estimator"))

    @property
    def overrides_advantages(self) -> bool:
        """Whether a subclass has :meth:`advantages` of its own, which are used in place of :attr:`credit`."""
        return type(self).advantages is not AdvantageModule.advantages

    def compute_advantages(self, experience: Experience) -> Experience:
        """Add those of :meth:`advantages`, which a subclass may have overridden."""
        advantages = self.advantages_by(self.advantages, experience)
        if advantages.dim() == 1:
            advantages = advantages[:, None].expand_as(experience.action_mask)
        return dataclasses.replace(experience, advantages=advantages)

    def check_advantages(self, experience: Experience) -> None:
        """Check what the loss multiplies trained tokens by, before the first update of an iteration. A collective.

        One value that is not finite makes all weights NaN, which is seen one iteration later.

        Raises:
            ValueError: If an advantage, or a log-prob that importance weights are computed from, is not finite at a
                token that is trained on (names what it was computed from that is not finite there either), or if the
                policy loss takes other advantages.
        """
        run_on_all_ranks(lambda: self._check_own_advantages(experience), error_type=ValueError)

    def _check_own_advantages(self, experience: Experience) -> None:
        """Raise the error of :meth:`check_advantages` for the rows of this rank."""
        function = self.advantage_function
        given = [
            part_name(part) for part in self.parts if "advantages" in part.writes and "advantages" not in part.reads
        ]
        of_method = not given or self.overrides_advantages
        source = f"{type(self).__name__}.advantages()" if of_method else given[0]
        source = source if function is None else f"advantages={function.name}"
        _check_finite(experience, source)

    def over_iteration(
        self, estimate: Callable[[Tensor, Tensor, Tensor], Tensor], experience: Experience, rewards: Tensor
    ) -> Tensor:
        """Estimate advantages (B,) of own rows by comparing those of all ranks. A collective.

        ``estimate`` is called with rewards, group ids and lengths in tokens, (N,) each, of the whole iteration in its
        order, and returns (N,). ``rewards`` are those of own rows, (B,).
        """
        columns = (rewards, experience.group, experience.action_mask.sum(-1))
        advantages = estimate(*(self.gather_rows(experience, column) for column in columns))
        return advantages if experience.iteration is None else advantages[experience.own_rows]

    def advantages_by(self, function: Callable[[Experience], Tensor], experience: Experience) -> Tensor:
        """(B,) or (B, T-1) advantages by a function of own rows or, unless it is marked so, of the whole iteration."""
        if experience.iteration is not None:  # so that its rewards are the processed ones too
            summary = dataclasses.replace(
                experience.iteration, rewards=self.gather_rows(experience, experience.rewards)
            )
            experience = dataclasses.replace(experience, iteration=summary)
        given = self.visible_rows(function, experience)
        advantages = function(given)
        if len(advantages) != len(given):
            raise ValueError(
                f"{function_label(function)} returned advantages of {len(advantages)} sequences and was given "
                f"{len(given)}; results for all ranks' sequences are indexed with experience.own_rows"
            )
        if given is not experience:
            advantages = advantages[experience.own_rows]
            advantages = advantages if advantages.dim() == 1 else advantages[:, : experience.action_mask.shape[1]]
        return advantages

    def visible_rows(self, function: Callable[..., Any], experience: Experience) -> Experience:
        """What a function of an experience is given: own rows if it is marked so, else the gathered iteration."""
        if takes_local_rows(function) or not is_spread(experience):
            return experience
        gathered, name = self.gather_experience(experience), function_label(function)
        if name not in self._warned_of_gathering:
            warn_of_gathering(name, gathered)
        self._warned_of_gathering.add(name)
        return gathered

    def over_visible_rows(
        self, function: Callable[[Experience], Experience], experience: Experience, *, mark: Callable[..., Any]
    ) -> Experience:
        """Own rows of the result of a function of rows, which is given those that ``mark`` asks for. A collective."""
        given = self.visible_rows(mark, experience)
        found = function(given)
        return found if given is experience else own_part(found, experience)

    @property
    def replaces_advantages(self) -> bool:
        """Whether a function of the whole experience was given, whose result is used as it is."""
        return self.advantage_function is not None and not self.advantage_function.takes_rewards

    @local_rows
    def advantages(self, experience: Experience) -> Tensor:
        """Compute (B,) advantages, or (B, T-1) when tokens differ; 0 where the reward is missing. May be overridden.

        These are what the parts :attr:`credit` compute. ``experience`` has shaped and penalized rewards, and
        log-probs and values where they are needed. With several ranks an override is given the whole iteration, the
        same on every rank, which is gathered for it; one that is marked with :func:`~rlhfkit.local_rows` is given this
        rank's rows and the summary of all. ``super().advantages(experience)`` works with both.
        """
        if not self.credit:
            raise NotImplementedError(f"{type(self).__name__} must override advantages(), or be given advantages=...")
        for part in self.credit:
            experience = part.prepare(experience)
        assert experience.advantages is not None
        alike = all(getattr(part, "of_samples", False) for part in self.credit)
        return experience.advantages[:, 0] if alike else experience.advantages


_INPUTS = {
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
    """Raise ValueError for the rows of this rank, see :meth:`AdvantageModule.check_advantages`."""
    mask, advantages = experience.action_mask, experience.advantages
    if advantages is not None and bool((wrong := mask & ~advantages.isfinite()).any()):
        causes = [f"{name} ({origin})" for name, origin in _INPUTS.items() if _is_wrong(experience, name, wrong)]
        raise ValueError(
            f"{source}: {_places(experience, wrong)} are not finite. "
            + (f"Neither are there: {'; '.join(causes)}" if causes else "What they are computed from is finite there")
        )
    given = experience.rollout_logprobs
    wrong = mask & given.isinf()  # NaN is a log-prob that is not known, whose weight is 1
    if bool(wrong.any()):
        places = _places(experience, wrong, "log-probs")
        raise ValueError(f"rollout_logprobs: {places} are infinite, from {_INPUTS['rollout_logprobs']}")


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
