"""A critic as parts: its values, advantages and returns from them, its loss, and its warm-up.

``Critic`` has three homes, with the same numbers: in the module (a model of its own, or one more head of the policy),
in a :class:`~rlhfkit.roles.CriticPool` that trains it, or frozen in a :class:`~rlhfkit.roles.ModelPool`.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import lightning as L
import torch
from torch import Tensor, nn

from rlhfkit.data.types import Experience
from rlhfkit.losses import LossOutput, gae, value_loss, weighted_metric
from rlhfkit.losses.advantages.rewards import RewardMoments, normalize_rewards
from rlhfkit.models import PolicyOutput
from rlhfkit.models.forward import VALUE_HEAD, unwrap
from rlhfkit.models.heads import add_value_head, critic_values, load_scalar_model
from rlhfkit.models.load import base_model_name
from rlhfkit.modules.optim import skip_update
from rlhfkit.modules.parts.advantages import rewards_of_tokens, with_advantages
from rlhfkit.modules.parts.rewards import MaskTruncated
from rlhfkit.parts import Child, Configured, Part, Stage, overriding, part_name
from rlhfkit.roles import CriticPool, ModelPool
from rlhfkit.roles.frozen_model import FrozenModel
from rlhfkit.roles.replica import Role
from rlhfkit.validation import GivenFunction, check_integer, check_number, resolve_function

DEFAULT_LR = 9e-6
"""Peak learning rate of a critic: OpenRLHF's default."""
DEFAULT_CLIP = 0.5
"""Clip of values: OpenRLHF's default."""


class Critic(Part):
    """Gives the values of the states in which tokens were chosen, before the updates of an iteration.

    A subclass overrides :meth:`build` to wrap or change the model, and :meth:`values_of` for other values.

    Args:
        model: Folder or hub name of its initial model: a reward model, whose head and calibration (mean and deviation
            of its rewards) it keeps, or a causal language model, which gets a new head; ``None``: the policy. A
            :class:`~rlhfkit.roles.CriticPool` or :class:`~rlhfkit.roles.ModelPool`, also as plain values.
        lr: Peak learning rate of the critic (9e-6: OpenRLHF's), or of the value head alone.
        shared: Put a value head on the policy's own trunk in place of a second model.
        normalize: The critic predicts returns that are shifted and scaled by the mean and deviation of all returns so
            far; saved in checkpoints. As MAPPO's value normalization (Yu et al., 2021, arXiv:2103.01955), without
            PopArt's rescaling of the head (arXiv:1602.07714).
        bootstrap_truncated: Where the length limit cut an answer off, count the value of the state after its last token
            as the rewards that would have come (Pardo et al., 2018, arXiv:1712.00378), which takes a forward pass of
            the critic over these answers.

    Raises:
        ValueError: If an argument is out of range, or has no effect beside another.
    """

    stage, writes = Stage.MODELS, ("values",)

    def __init__(
        self,
        model: str | CriticPool | ModelPool | Mapping[str, Any] | None = None,
        *,
        lr: float = DEFAULT_LR,
        shared: bool = False,
        normalize: bool = False,
        bootstrap_truncated: bool = False,
    ) -> None:
        check_number("Critic.lr", lr, above=0)
        if shared and model is not None:
            raise ValueError(
                "with shared=True the critic is a head of the policy and starts from no model of its own: leave the "
                "model out"
            )
        self.model: str | CriticPool | ModelPool | None = Configured.of(model)
        self.lr, self.shared, self.normalize, self.bootstrap_truncated = lr, shared, normalize, bootstrap_truncated
        self.outputs = self.reads = ("values",) if shared else ()  # the policy's forward pass gives them
        self.moments = RewardMoments.zero()
        """Count, mean and squared deviations of the returns so far, with ``normalize``."""
        self.elsewhere: Any = None
        """What asks it for values, if it is on machines of its own."""
        self.router_loss: Tensor | None = None
        """Of a mixture of experts, in the last forward pass."""
        self._predicted: Tensor | None = None  # (B, T-1), the critic's own numbers, until the returns are known

    @property
    def trained_elsewhere(self) -> bool:
        """Whether ranks of its own train it."""
        return isinstance(self.model, CriticPool)

    @property
    def frozen(self) -> bool:
        """Whether nobody trains it."""
        return isinstance(self.model, ModelPool)

    def brings(self) -> Sequence[Part]:
        """What asks and trains a critic with ranks of its own."""
        if not isinstance(self.model, CriticPool):
            return ()
        from rlhfkit.modules.parts.critic_elsewhere import RemoteCritic

        self.elsewhere = RemoteCritic(self.model, lr=self.lr)
        return (self.elsewhere,)

    def attach(self, module: Any) -> None:
        """Check its company."""
        super().attach(module)
        if self.bootstrap_truncated and any(isinstance(part, MaskTruncated) for part in module.parts):
            raise ValueError(
                "bootstrap_truncated would have no effect beside MaskTruncated, which learns nothing from answers "
                "that were cut off: leave out the one or the other"
            )
        unused = [part_name(one) for one in module.parts if "routing" in one.reads or overriding([one], "old_logprobs")]
        if unused and self.shared:
            raise ValueError(
                f"{', '.join(unused)} would have no effect beside Critic(shared=True), whose forward pass for values "
                "gives old log-probs too: leave out the one or the other"
            )
        if self.frozen or self.trained_elsewhere:
            others = [(self, Critic), *((part, ValueLoss) for part in module.parts if isinstance(part, ValueLoss))]
            for part, base in others:
                methods = [name for name in ("build", "values_of", "loss") if hasattr(base, name)]
                changed = [name for name in methods if getattr(type(part), name) is not getattr(base, name)]
                if changed:
                    raise ValueError(
                        f"{type(part).__name__} overrides {', '.join(changed)}, and a critic elsewhere does not call "
                        "it: make the model with CriticPool(function), or leave the critic in the module"
                    )
        if self.frozen:
            self._refuse_training(module)
            from rlhfkit.modules.parts.critic_elsewhere import FrozenCritic

            self.elsewhere = FrozenCritic(module)
        elif self.trained_elsewhere:
            losses = (part for part in module.parts if isinstance(part, ValueLoss))
            self.elsewhere.value_loss = next(losses, ValueLoss())

    def _refuse_training(self, module: Any) -> None:
        """Raise ValueError if something says how a critic is trained that is not."""
        losses = [part for part in module.parts if isinstance(part, ValueLoss)]
        changed = {
            "the learning rate": self.lr != DEFAULT_LR,
            "normalize": self.normalize,
            "ValueLoss": any((part.coef, part.clip) != (1.0, DEFAULT_CLIP) for part in losses),
            "CriticWarmup": any(isinstance(part, CriticWarmup) for part in module.parts),
        }
        given = [name for name, is_given in changed.items() if is_given]
        if given:
            raise ValueError(
                f"a critic in a ModelPool is not trained, so {', '.join(given)} would have no effect: leave out what "
                "is about training it, or train it elsewhere with CriticPool(...)"
            )

    # ------------------------------------------------------------------ the model

    def children(self) -> Mapping[str, Child]:
        """``module.critic``, unless it is a head of the policy or elsewhere."""
        inside = not self.shared and self.elsewhere is None
        return {"critic": Child(self.build, trained=True, lr=self.lr)} if inside else {}

    def build(self) -> nn.Module:
        """Load the critic."""
        module = self.module
        return load_scalar_model(
            cast("str | None", self.model) or base_model_name(module.model_name),
            dtype=module.model_dtype,
            lora=module.lora,
            loading=module.loading,
        )

    def loaded(self) -> None:
        """Give the policy a value head, with ``shared``, once."""
        if self.shared and not hasattr(unwrap(self.module.policy), VALUE_HEAD):
            add_value_head(self.module.policy)

    def parameter_groups(self, groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Those of the module; a head of the policy is a group of its own, with its learning rate."""
        if not self.shared:
            return groups
        head = list(unwrap(self.module.policy).get_submodule(VALUE_HEAD).parameters())
        of_head = {id(parameter) for parameter in head}
        trunk = [parameter for parameter in groups[0]["params"] if id(parameter) not in of_head]
        return [groups[0] | {"params": trunk}, *groups[1:], {"params": head, "name": VALUE_HEAD, "lr": self.lr}]

    def placed(self) -> Mapping[str, tuple[FrozenModel, Role]]:
        """The pool of a frozen critic."""
        return {"critic": (self.model, "values")} if isinstance(self.model, ModelPool) else {}

    # ------------------------------------------------------------------ before the updates of an iteration

    def begin(self, rows: Experience) -> None:
        """Ask a critic elsewhere, which works while the policy computes."""
        if self.elsewhere is not None:
            self.elsewhere.ask_values(rows)

    def values_of(self, batch: Experience) -> Tensor:
        """(B, T-1) float32 values now; 0 outside the mask.

        Those of a critic that starts as a calibrated reward model are shifted and scaled by the mean and deviation in
        its configuration.
        """
        values, self.router_loss = critic_values(
            self.module.critic, batch, batch.action_mask, router_aux_loss=self.module.balances_routers
        )
        return values

    def prepare(self, rows: Experience) -> Experience:
        """Add the values before the iteration, in units of the reward."""
        module = self.module
        if self.elsewhere is not None:
            rows = rows.with_columns(values=self.elsewhere.values(rows))
        elif not self.shared:
            rows = rows.with_columns(values=module.passes.forward(module.critic, self.values_of, rows))
        self._predicted = rows.columns["values"]
        if self.normalize:
            values = self._predicted * self.moments.std + self.moments.mean
            rows = rows.with_columns(values=values.to(self._predicted.dtype) * rows.action_mask)
        return rows.with_columns(final_values=self._final_values(rows)) if self.bootstrap_truncated else rows

    def _final_values(self, rows: Experience) -> Tensor:
        """(B, T-1), at the last token of answers that were cut off the value of the state after it; 0 elsewhere."""
        cut_off = rows.truncated & rows.action_mask.any(-1)
        longer, final = with_final_states(rows, cut_off)
        module = self.module
        if self.shared:
            values = module.passes.statistics(module.policy, longer, cut_off, values=True).values
        elif self.elsewhere is not None:
            self.elsewhere.ask_values(longer, cut_off)
            values = self.elsewhere.values(longer)
        else:
            values = module.passes.forward(module.critic, self.values_of, longer, cut_off)
        if self.normalize:
            values = values * self.moments.std + self.moments.mean
        found: Tensor = values.where(final, 0.0)[:, 1:]  # a state later than the token
        return found

    def own_units(self, rows: Experience, returns: Tensor) -> Experience:
        """The rows with returns and values in the units that the critic predicts. A collective."""
        mask = rows.action_mask
        if self.normalize:
            self.moments = self.module.ranks.updated_moments(self.moments, rows, returns[mask])
            returns = normalize_rewards(returns, self.moments.mean, self.moments.std) * mask
        predicted, self._predicted = self._predicted, None
        return rows.with_columns(values=predicted, returns=returns, final_values=None)

    # ------------------------------------------------------------------ saving

    def export(self, child: str, folder: Path, **options: Any) -> bool:
        """Refuse to write a frozen critic.

        Raises:
            ValueError: If it is frozen.
        """
        if child == "critic" and isinstance(self.model, ModelPool):
            raise ValueError(f"the critic is frozen: it is still that of {self.model.model}")
        return False

    def state_dict(self) -> dict[str, Any]:
        """The moments of the returns."""
        return {"moments": self.moments.plain()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue with them."""
        self.moments = RewardMoments.of(state["moments"])


class GAE(Part):
    """Generalized advantage estimation, see :func:`~rlhfkit.losses.gae`.

    Args:
        gamma: Discount, in [0, 1].
        lam: Lambda, in [0, 1] (0.95: Schulman et al., 2016; OpenRLHF has 1). Or a function of the number of tokens of
            each answer, (B,), to (B,): ``"length_adaptive_lambda"`` is that of VAPO (2025, arXiv:2504.05118), see
            :func:`~rlhfkit.losses.length_adaptive_lambda`; a partial of it has another α than 0.05.

    Raises:
        ValueError: If an argument is out of range.
    """

    stage, reads, writes = Stage.CREDIT, ("rewards", "values"), ("advantages",)
    may_read = ("token_penalty", "token_rewards", "final_values")

    def __init__(self, gamma: float = 1.0, lam: float | GivenFunction = 0.95) -> None:
        check_number("GAE.gamma", gamma, minimum=0, maximum=1)
        self.gamma = gamma
        self.lam: float | Callable[[Tensor], Tensor]
        if isinstance(lam, str | Mapping) or callable(lam):
            self.lam = resolve_function(lam, "GAE.lam", home="rlhfkit.losses")
            self.lam(torch.ones(1))  # so that bad arguments raise before training
        else:
            check_number("GAE.lam", lam, minimum=0, maximum=1)
            self.lam = lam

    def prepare(self, rows: Experience) -> Experience:
        """Add advantages (B, T-1); 0 outside the mask."""
        lam = self.lam(rows.action_mask.sum(-1)) if callable(self.lam) else self.lam
        return with_advantages(rows, estimate(rows, self.gamma, lam)[0])


class Returns(Part):
    """What the critic learns: λ-returns of its values, in the units that it predicts.

    Args:
        gamma: Discount, in [0, 1].
        lam: Lambda, in [0, 1] (1 in VAPO).

    Raises:
        ValueError: If an argument is out of range, or there is no :class:`Critic`.
    """

    stage, reads, writes = Stage.CREDIT, ("rewards", "values"), ("values", "returns")
    may_read = ("token_penalty", "token_rewards", "final_values")

    def __init__(self, gamma: float = 1.0, lam: float = 0.95) -> None:
        check_number("Returns.gamma", gamma, minimum=0, maximum=1)
        check_number("Returns.lam", lam, minimum=0, maximum=1)
        self.gamma, self.lam = gamma, lam

    def attach(self, module: Any) -> None:
        """Find the critic."""
        super().attach(module)
        self._critic = critic_of(module)

    def prepare(self, rows: Experience) -> Experience:
        """Add them."""
        return self._critic.own_units(rows, estimate(rows, self.gamma, self.lam)[1])


def estimate(rows: Experience, gamma: float, lam: float | Tensor) -> tuple[Tensor, Tensor]:
    """(B, T-1) advantages and returns of the rewards of tokens."""
    rewards = rewards_of_tokens(rows, rows.rewards, earned=rows.token_rewards)
    final = rows.columns.get("final_values")
    last = None if final is None else final.sum(-1)
    return gae(rewards, rows.columns["values"], rows.action_mask, gamma=gamma, lam=lam, last_values=last)


class ValueLoss(Part):
    """The critic's loss, see :func:`~rlhfkit.losses.value_loss`; of a frozen critic, how well it predicts.

    Args:
        coef: Weight; of no effect under Adam, except with a shared backbone (0.1 in TRL's former PPO, 1 in the PPO
            paper's Atari runs).
        clip: Values are clipped to ± this around the old ones, in the critic's units (0.5: OpenRLHF's); ``None``: not.

    Raises:
        ValueError: If an argument is out of range, or there is no :class:`Critic`.
    """

    reads = ("values", "returns")

    def __init__(self, coef: float = 1.0, *, clip: float | None = DEFAULT_CLIP) -> None:
        check_number("ValueLoss.coef", coef, above=0)
        check_number("ValueLoss.clip", clip, above=0, optional=True)
        self.coef, self.clip = coef, clip

    def attach(self, module: Any) -> None:
        """Find the critic."""
        super().attach(module)
        self._critic = critic_of(module)

    def loss(self, batch: Experience, values: Tensor) -> LossOutput:
        """The loss from current values, (B, T-1); override it for another."""
        mask, denominator = batch.action_mask, batch.token_denominator
        old, returns = batch.columns["values"], batch.columns["returns"]
        return value_loss(values, old, returns, mask, clip=self.clip, denominator=denominator)

    def auxiliary_loss(self, batch: Experience, out: PolicyOutput) -> LossOutput:
        """The critic's loss, unless others compute it or nobody does."""
        critic = self._critic
        if critic.elsewhere is not None:
            return LossOutput(out.logprobs.new_zeros(()), {})
        value = self.loss(batch, cast(Tensor, out.values) if critic.shared else critic.values_of(batch))
        # A share of the step's mean, so all micro-batches have the weight 1.
        metrics = {**value.metrics, "value/loss": weighted_metric(value.loss, 1.0)}
        result = LossOutput(self.coef * value.loss, metrics)
        if critic.shared or critic.router_loss is None:
            return result
        from rlhfkit.modules.parts.routers import with_critic_router

        return with_critic_router(self.module, result, critic.router_loss, batch.action_mask)

    @torch.no_grad()
    def observe(self, batch: Experience, out: PolicyOutput, old: Tensor) -> Mapping[str, Any]:
        """How well a frozen critic predicts the returns."""
        if not self._critic.frozen:
            return {}
        found = value_loss(batch.columns["values"], None, batch.columns["returns"], batch.action_mask, clip=None)
        return {name: value for name, value in found.metrics.items() if name != "value/clip_fraction"}


class CriticWarmup(Part):
    """Lets only the critic learn at first; the policy and its optimizer state stay bitwise the same.

    Args:
        steps: Optimizer steps without an update of the policy.

    Raises:
        ValueError: If ``steps`` is out of range, or the critic shares the policy's trunk.
    """

    def __init__(self, steps: int) -> None:
        check_integer("CriticWarmup.steps", steps, minimum=0)
        self.steps = steps

    def attach(self, module: Any) -> None:
        """Check that the critic can learn alone."""
        super().attach(module)
        if critic_of(module).shared:
            raise ValueError(
                "Critic(shared=True) is a head of the policy, and cannot learn while the policy is not updated: leave "
                "CriticWarmup out"
            )

    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: Any, optimizer: Any) -> None:
        """Skip the policy's update."""
        if trainer.global_step < self.steps:
            skip_update(pl_module, "policy")


def critic_of(module: Any) -> Critic:
    """The critic of a module.

    Raises:
        ValueError: If it has none.
    """
    for part in module.parts:
        if isinstance(part, Critic):
            return part
    raise ValueError(f"{type(module).__name__} has no Critic among its parts, whose values are learned")


def with_final_states(experience: Experience, rows: Tensor) -> tuple[Experience, Tensor]:
    """Append a token to some sequences, so that a critic also gives the value of the state after their last token.

    A causal model's value of that state does not depend on the token, which is 0.

    Args:
        experience: B sequences of at most T tokens.
        rows: (B,) bool, the sequences.

    Returns:
        Sequences of at most T + 1 tokens, in whose action mask the appended tokens are too, and (B, T) bool, true at
        these.
    """
    longer, length = experience.pad(experience.input_ids.shape[1] + 1), experience.input_ids.shape[1]
    final = (torch.arange(length) == (experience.lengths - 1)[:, None]) & rows[:, None]
    attention = torch.arange(length + 1) < (experience.lengths + rows)[:, None]
    return dataclasses.replace(longer, attention_mask=attention, action_mask=longer.action_mask | final), final
