"""``PPOModule``: proximal policy optimization with a critic (Schulman et al., 2017; Ouyang et al., 2022)."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from rlhfkit.modules.arguments import refuse_without_effect
from rlhfkit.modules.on_policy.base import OnPolicyModule
from rlhfkit.modules.on_policy.functions import AdvantageFunction, GivenAdvantages
from rlhfkit.parts import GivenPart, make_part
from rlhfkit.roles import CriticPool, ModelPool
from rlhfkit.validation import check_integer, check_number


class PPOModule(OnPolicyModule):
    """A policy and a critic that learn from the policy's samples; one sample per prompt is enough.

    The KL penalty is part of the reward of each token, advantages come from generalized advantage estimation and are
    whitened over the whole iteration, and policy and critic take one optimizer step together: under
    ``RLHFDeepSpeedStrategy`` each has an engine, a learning rate and a gradient norm of its own. With a
    ``shared_backbone`` the critic is one more head of the policy: one model, one forward pass, one engine.
    ``Sample.token_rewards`` are credited to their tokens, the rest of the reward to the last one. The critic is the
    parts of :mod:`rlhfkit.modules.parts.critic`; one of them among ``parts`` takes the place of the module's.

    Args:
        model: Folder or hub name of the policy.
        lr: Peak learning rate of the policy (1e-6: TRL's and OpenRLHF's default).
        critic: Folder or hub name of the critic's initial model: a reward model, whose head and calibration (mean and
            deviation of its rewards) it keeps, or a causal language model, which gets a new head; ``None``: the policy.
            A :class:`~rlhfkit.roles.CriticPool`: it is trained by ranks of its own while the policy learns, with this
            module's settings. A :class:`~rlhfkit.roles.ModelPool`: a frozen value model on machines of its own, as
            in DVPO (Huang et al., 2025, arXiv:2502.16944); there is no value loss.
        critic_lr: Peak learning rate of the critic (9e-6: OpenRLHF's default), or of the value head alone.
        critic_warmup_steps: Optimizer steps in which only the critic learns; the policy and its optimizer state stay
            bitwise the same.
        shared_backbone: Put a value head on the policy's own trunk instead of a second model. The two losses then
            compete: choose ``value_coef`` (0.1 in TRL's former PPO, 1 in the PPO paper's Atari runs).
        value_coef: Weight of the value loss; of no effect under Adam, except with a shared backbone.
        value_clip: Values are clipped to ± this around the old ones in the value loss (0.5: OpenRLHF's); ``None``: not.
        normalize_values: The critic predicts returns that are shifted and scaled by the mean and deviation of all
            returns so far, see :class:`~rlhfkit.modules.parts.critic.Critic`. ``value_clip`` is in these units then.
        gamma: Discount, in [0, 1].
        lam: GAE's lambda for the policy, in [0, 1] (0.95: Schulman et al., 2016; OpenRLHF has 1).
        critic_lam: GAE's lambda for the critic's targets; ``None``: ``lam`` (VAPO, 2025, arXiv:2504.05118, takes 1).
        length_adaptive_alpha: The policy's lambda is 1 - 1 / (alpha * tokens) of each answer, in place of ``lam``, see
            :func:`~rlhfkit.losses.length_adaptive_lambda` (0.05 in VAPO); the critic's stays ``critic_lam``.
        bootstrap_truncated: Where the length limit cut an answer off, count the critic's value of the state after its
            last token as the rewards that would have come, see :class:`~rlhfkit.modules.parts.critic.Critic`. Off in
            OpenRLHF and TRL: such answers end there.
        whiten_advantages: Make the advantages of all tokens of the iteration mean 0 and deviation 1; those of a
            function given as ``advantages`` are used as they are.
        advantages: Function used in place of GAE, see :class:`~rlhfkit.modules.parts.advantages.AdvantagesBy`.
        kl_coef: Weight of a :class:`~rlhfkit.modules.parts.kl_penalty.KLInReward` towards the initial model, which
            subtracts it from the reward of each token (0.01: OpenRLHF's default); 0 loads no reference model. Another
            one, or a :class:`~rlhfkit.modules.parts.kl_penalty.KLPenalty` in the loss, among ``parts`` takes its place.
        parts: More features, each a :class:`~rlhfkit.Part` or a function of an iteration's rows, see
            :class:`OnPolicyModule`.
        **kwargs: Loss and rewards: see :class:`OnPolicyModule`; optimizer and model: see :class:`PolicyModule`.

    Raises:
        ValueError: If an argument is out of range.
    """

    def __init__(
        self,
        model: str,
        *,
        lr: float = 1e-6,
        critic: str | CriticPool | ModelPool | None = None,
        critic_lr: float = 9e-6,
        critic_warmup_steps: int = 0,
        shared_backbone: bool = False,
        value_coef: float = 1.0,
        value_clip: float | None = 0.5,
        normalize_values: bool = False,
        gamma: float = 1.0,
        lam: float = 0.95,
        critic_lam: float | None = None,
        length_adaptive_alpha: float | None = None,
        bootstrap_truncated: bool = False,
        whiten_advantages: bool = True,
        advantages: GivenAdvantages | None = None,
        kl_coef: float = 0.01,
        parts: Sequence[GivenPart] = (),
        **kwargs: Any,
    ) -> None:
        from rlhfkit.modules.parts.advantages import AdvantagesBy, WhitenAdvantages
        from rlhfkit.modules.parts.critic import GAE, Critic, CriticWarmup, Returns, ValueLoss, check_frozen
        from rlhfkit.modules.parts.kl_penalty import KLInReward, own_penalty

        # Under the names that were given: the parts have their own.
        check_number("critic_lr", critic_lr, above=0)
        check_integer("critic_warmup_steps", critic_warmup_steps, minimum=0)
        check_number("value_coef", value_coef, above=0)
        check_number("value_clip", value_clip, above=0, optional=True)
        check_number("critic_lam", critic_lam, minimum=0, maximum=1, optional=True)
        given = [make_part(one) for one in parts]
        self.critic_part = next((part for part in given if isinstance(part, Critic)), None) or Critic(
            critic,
            lr=critic_lr,
            shared=shared_backbone,
            normalize=normalize_values,
            bootstrap_truncated=bootstrap_truncated,
        )
        """Gives values; its arguments are those of the module unless it was among ``parts``."""
        value_loss = next((part for part in given if isinstance(part, ValueLoss)), None)
        value_loss = value_loss or ValueLoss(value_coef, clip=value_clip)
        if self.critic_part.frozen:
            check_frozen(self.critic_part, value_loss, warmup_steps=critic_warmup_steps, critic_lam=critic_lam)
        adapts, other_lam = length_adaptive_alpha is not None, lam != 0.95 and critic_lam is not None
        if advantages is not None:
            of_gae = {"length_adaptive_alpha": adapts, "lam": other_lam}
            refuse_without_effect(of_gae, f"advantages={AdvantageFunction(advantages).name}")
        elif adapts:
            refuse_without_effect({"lam": other_lam}, "length_adaptive_alpha and critic_lam, which take its place")
        self.credit = [GAE(gamma, lam, length_adaptive_alpha=length_adaptive_alpha)]
        self.credit += [WhitenAdvantages()] if whiten_advantages else []
        self.credit = self.credit if advantages is None else [AdvantagesBy(advantages)]
        self.own_parts = own_penalty(kl_coef, given, lambda coef: KLInReward(coef, place="token"))
        self.own_parts += [part for part in (self.critic_part, value_loss) if part not in given]
        self.own_parts += [Returns(gamma, lam if critic_lam is None else critic_lam)]
        self.own_parts += [CriticWarmup(critic_warmup_steps)] if critic_warmup_steps else []
        self.kl_coef, self.shared_backbone = kl_coef, shared_backbone
        super().__init__(model, lr=lr, advantages=advantages, parts=given, **kwargs)
        if isinstance(self.critic_part.model, CriticPool | ModelPool):
            self.hparams.update(critic=self.critic_part.model.plain())

    @property
    def remote_critic(self) -> Any:
        """What asks the critic's ranks; ``None``: it has none of its own."""
        return self.critic_part.elsewhere if self.critic_part.trained_elsewhere else None

    def on_train_end(self) -> None:
        """End the critic's ranks, after all callbacks: checkpoints need them."""
        super().on_train_end()
        if self.remote_critic is not None:
            self.remote_critic.pool.stop()

    def save_pretrained(
        self, folder: str | Path, *, child: str = "policy", adapter: bool = False, dtype: torch.dtype | None = None
    ) -> Path:
        """Save a child, see :class:`PolicyModule`; a critic with ranks of its own is written by these.

        Raises:
            ValueError: If a critic is asked for that is frozen.
        """
        model = self.critic_part.model
        if child == "critic" and isinstance(model, ModelPool):
            raise ValueError(f"the critic is frozen: it is still that of {model.model}")
        if child != "critic" or self.remote_critic is None:
            return super().save_pretrained(folder, child=child, adapter=adapter, dtype=dtype)
        self.remote_critic.export(self, Path(folder), adapter=adapter, dtype=dtype)
        return Path(folder)
