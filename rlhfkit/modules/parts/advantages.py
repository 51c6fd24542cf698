"""Advantages of samples and of tokens: ``GroupAdvantages``, ``AdvantagesBy``, ``TokenCredit``, ``WhitenAdvantages`` ...

One part writes advantages, the later ones change them. A part among ``parts=`` that writes ``advantages`` without
reading them takes the place of what a module would do by itself.
"""

import dataclasses
from collections.abc import Iterable, Mapping
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor

from rlhfkit.data.types import GREEDY_REWARD, Experience
from rlhfkit.losses import discounted_returns, group_advantages, masked_sum
from rlhfkit.losses.advantages.group import AdvantageScale
from rlhfkit.losses.advantages.rewards import token_rewards
from rlhfkit.modules.on_policy.functions import AdvantageFunction
from rlhfkit.parts import Part, Stage, part_name
from rlhfkit.validation import GivenFunction, check_number


class GroupAdvantages(Part):
    """Compares the reward of each sample with those of its group, see :func:`~rlhfkit.losses.group_advantages`.

    Args:
        scale: What the centred reward is divided by: the standard deviation of its ``group``, of the ``batch``, or
            ``none`` (Dr.GRPO, Liu et al., 2025, arXiv:2503.20783).

    Raises:
        ValueError: If ``scale`` is another.
    """

    stage, reads, writes = Stage.CREDIT, ("rewards", "group"), ("advantages",)
    of_samples = True

    def __init__(self, scale: AdvantageScale = "group") -> None:
        group_advantages(torch.zeros(2), torch.zeros(2, dtype=torch.int64), scale=scale)  # checks the scale
        self.scale = scale

    def estimate(self, rewards: Tensor, group: Tensor, lengths: Tensor) -> Tensor:
        """(N,) advantages from rewards (N,), NaN where missing, group ids (N,) and lengths (N,) in tokens."""
        return group_advantages(rewards, group, scale=self.scale)

    def prepare(self, rows: Experience) -> Experience:
        """Add them, by comparing the rewards of all ranks."""
        return with_advantages(rows, self.module.ranks.over_iteration(self.estimate, rows, rows.rewards))

    def check_group_size(self, group_size: int) -> None:
        """Raise ValueError if groups have one sample."""
        if group_size < 2:
            raise _no_comparison(self.module, group_size)


class AdvantagesBy(Part):
    """Computes advantages by a function of rewards and groups, or of the rows.

    Example::

        GRPOModule("Qwen/Qwen3-0.6B", parts=[AdvantagesBy("pass_at_k_advantages", {"k": 4})])

    Args:
        function: The function, or its name (``"rloo_advantages"``, ``"my_package.my_function"``), see
            :class:`~rlhfkit.modules.on_policy.functions.AdvantageFunction`; an object with ``__call__`` is one too. Its
            rewards are those after parts of ``Stage.SHAPE`` and ``Stage.PENALIZE``; penalties of tokens are subtracted
            in sum, unless a :class:`TokenCredit` subtracts them from each.
        arguments: More keyword arguments of the function; of a class, those that it is made with.

    Raises:
        ValueError: If there is no such function, it has another form, or it compares with greedy answers, whose rewards
            a part that shapes rewards does not change.
    """

    stage, writes = Stage.CREDIT, ("advantages",)
    may_read: tuple[str, ...] = ("token_penalty",)

    def __init__(self, function: GivenFunction | AdvantageFunction, arguments: Mapping[str, Any] | None = None) -> None:
        given = function if isinstance(function, AdvantageFunction) else AdvantageFunction(function, arguments)
        self.estimator = given
        self.function, self.arguments = given.named, dict(given.arguments)
        self.of_samples = given.takes_rewards
        self.reads = ("rewards",)
        self.label = f"AdvantagesBy({given.name})"
        self.needs_greedy_rewards = given.takes_greedy_rewards
        self._penalizes = True  # with penalties of tokens, which nothing after it subtracts

    def attach(self, module: Any) -> None:
        """Check that greedy answers' rewards are those of samples."""
        super().attach(module)
        self._penalizes = not any(isinstance(part, TokenCredit) for part in module.parts)
        if not self.of_samples:
            self.may_read = written_by(module.parts)
        shaping = [part_name(one) for one in module.parts if one.stage == Stage.SHAPE and "rewards" in one.writes]
        if self.estimator.takes_greedy_rewards and shaping:
            raise ValueError(
                f"advantages={self.estimator.name} compares samples with greedy answers, whose rewards "
                f"{', '.join(shaping)} does not change: leave it out"
            )

    def prepare(self, rows: Experience) -> Experience:
        """Add them. A collective."""
        module, given = self.module, self.estimator
        rewards, penalty = rows.rewards, rows.columns.get("token_penalty")
        if self._penalizes and penalty is not None:
            rewards = rewards - masked_sum(penalty, rows.action_mask, -1)
        if given.takes_greedy_rewards:
            found = given.compare_with_greedy(rewards, rows.reward_parts[GREEDY_REWARD])
        elif given.takes_rewards:
            found = module.ranks.over_iteration(given.estimate, rows, rewards)
        else:
            found = module.ranks.advantages_by(given.function, dataclasses.replace(rows, rewards=rewards))
        return with_advantages(rows, found)

    def check_group_size(self, group_size: int) -> None:
        """Raise ValueError if all advantages are 0 in groups of this size, however many of their answers are right."""
        given = self.estimator
        if not given.takes_rewards or given.takes_greedy_rewards:
            return  # a function of the whole experience may not compare samples at all
        if group_size > 1 and not given.is_ours:
            return  # a user's own may tell other rewards apart than 0 and 1
        size = torch.arange(group_size)
        right = (size <= size[:, None]).float()  # in a row each, groups with 1, 2 ... right answers
        rows = size.repeat_interleave(group_size), torch.ones(group_size**2, dtype=torch.int64)
        if bool(given.estimate(right.flatten(), *rows).any()):
            return
        if group_size > 1:
            raise ValueError(
                f"advantages={given.name}: with group_size={group_size} every advantage is 0, however many answers "
                "are right: raise SamplingSpec(group_size=...)"
            )
        raise _no_comparison(self.module, group_size)


class OverriddenAdvantages(Part):
    """Computes advantages by ``advantages()`` of a module whose class has overridden it; made by that module."""

    stage, writes = Stage.CREDIT, ("advantages",)

    def attach(self, module: Any) -> None:
        """Name it after the class, for messages."""
        super().attach(module)
        self.label = f"{type(module).__name__}.advantages()"
        self.may_read = written_by(module.parts)

    def prepare(self, rows: Experience) -> Experience:
        """Add them. A collective."""
        return with_advantages(rows, self.module.ranks.advantages_by(self.module.advantages, rows))


class TokenCredit(Part):
    """Spreads the advantage of a sample over its tokens: what is earned from each token on.

    Penalties of tokens (the column ``token_penalty``) are subtracted here.

    Args:
        gamma: Discount of later tokens' rewards, in [0, 1].
        earned: With ``Sample.token_rewards``, the advantage of a token counts only what is earned from it on; for
            advantages in units of the reward. Else all of a sample is earned by its last token.

    Raises:
        ValueError: If ``gamma`` is out of range, the advantages before it differ between tokens, or what is earned is
            in other units than they are.
    """

    stage, reads, writes = Stage.CREDIT, ("advantages",), ("advantages",)
    may_read = ("token_penalty", "token_rewards")

    def __init__(self, gamma: float = 1.0, *, earned: bool = False) -> None:
        check_number("TokenCredit.gamma", gamma, minimum=0, maximum=1)
        self.gamma, self.earned = gamma, earned

    def attach(self, module: Any) -> None:
        """Check that there are advantages of samples to spread."""
        super().attach(module)
        before = takewhile(lambda part: part is not self, module.parts)
        others = [part for part in before if "advantages" in part.writes]
        if not all(part.of_samples for part in others):
            raise ValueError(
                "TokenCredit spreads the advantage of a sample over its tokens, and those before it differ between "
                "tokens: give it before the part that tells tokens apart, leave TokenCredit and "
                "KLInReward(place='token') out, or set of_samples = True on the part that writes them if they do not"
            )
        scaled = [part for part in others if isinstance(part, GroupAdvantages) and part.scale != "none"]
        if self.earned and scaled:
            raise ValueError(
                "TokenCredit(earned=True) takes what was earned before a token from its sample's advantage, which has "
                f"to be in units of the reward, and {scaled[0]!r} has others: use advantage_scale='none' or advantages="
            )

    def prepare(self, rows: Experience) -> Experience:
        """Discount what is earned later."""
        assert rows.advantages is not None
        earned = rows.token_rewards if self.earned else None
        rewards = rewards_of_tokens(rows, rows.advantages[:, 0], earned=earned)
        return with_advantages(rows, discounted_returns(rewards, rows.action_mask, gamma=self.gamma))


class WhitenAdvantages(Part):
    """Makes the advantages of all trained tokens of the iteration mean 0 and deviation 1, over all ranks."""

    stage, reads, writes = Stage.CREDIT, ("advantages",), ("advantages",)

    def prepare(self, rows: Experience) -> Experience:
        """Whiten them."""
        assert rows.advantages is not None
        return with_advantages(rows, self.module.ranks.whiten(rows, rows.advantages))


def written_by(parts: Iterable[Part]) -> tuple[str, ...]:
    """All that parts write but advantages, which a function of the rows that computes these may use."""
    return tuple({name for part in parts for name in part.writes} - {"advantages"})


def rewards_of_tokens(rows: Experience, rewards: Tensor, *, earned: Tensor | None = None) -> Tensor:
    """(B, T-1) rewards of tokens: the sample's on its last one, minus penalties of tokens; 0 outside the mask.

    Args:
        rows: Sequences, maybe with a column ``token_penalty``.
        rewards: (B,), NaN where missing.
        earned: (B, T-1), the part that each token earned, in the same units; ``None``: the last token earned all.
    """
    return token_rewards(rewards, rows.action_mask, penalty=rows.columns.get("token_penalty"), earned=earned)


def with_advantages(rows: Experience, advantages: Tensor) -> Experience:
    """The rows with advantages, (B,) or (B, T-1)."""
    spread = advantages if advantages.dim() == 2 else advantages[:, None].expand_as(rows.action_mask)
    return dataclasses.replace(rows, advantages=spread)


def _no_comparison(module: Any, group_size: int) -> ValueError:
    return ValueError(
        f"{type(module).__name__} compares the samples of a prompt, and with group_size={group_size} every advantage "
        "is 0: use SamplingSpec(group_size=2) or more (8 is usual)"
    )
