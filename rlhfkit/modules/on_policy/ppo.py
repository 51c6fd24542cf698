"""``PPOModule``: proximal policy optimization with a critic (Schulman et al., 2017; Ouyang et al., 2022)."""

from collections.abc import Mapping, Sequence
from typing import Any

from rlhfkit.losses import Aggregation
from rlhfkit.models import LoRA, ModelLoading
from rlhfkit.modules.on_policy.base import OnPolicyModule
from rlhfkit.modules.optim import Optimization
from rlhfkit.parts import GivenPart, given_or, make_part, plain_value
from rlhfkit.roles import CriticPool, ModelPool
from rlhfkit.validation import GivenFunction, check_number


class PPOModule(OnPolicyModule):
    """A policy and a critic that learn from the policy's samples; one sample per prompt is enough.

    The KL penalty is part of the reward of each token, advantages come from generalized advantage estimation and are
    whitened over the whole iteration, and policy and critic take one optimizer step together: under
    ``RLHFDeepSpeedStrategy`` each has an engine, a learning rate and a gradient norm of its own.
    ``Sample.token_rewards`` are credited to their tokens, the rest of the reward to the last one.

    The critic is the parts of :mod:`rlhfkit.modules.parts.critic`, which the arguments below make; one of them among
    ``parts`` takes the place of the module's and has more arguments. A critic that predicts
    normalized returns and learns alone at first; one that is a head of the policy, with a smaller weight of its loss;
    VAPO's lambdas::

        PPOModule("sft", parts=[Critic("reward-model", normalize=True), CriticWarmup(20)])
        PPOModule("sft", parts=[Critic(shared=True), ValueLoss(0.1, clip=0.2)])
        PPOModule("sft", parts=[GAE(lam="length_adaptive_lambda"), Returns(lam=1.0)])

    Args:
        model: Folder or hub name of the policy.
        lr: Peak learning rate of the policy (1e-6: TRL's and OpenRLHF's default).
        critic: Folder or hub name of the critic's initial model: a reward model, whose head and calibration (mean and
            deviation of its rewards) it keeps, or a causal language model, which gets a new head; ``None``: the policy.
            A :class:`~rlhfkit.roles.CriticPool`: it is trained by ranks of its own while the policy learns, with this
            module's settings. A :class:`~rlhfkit.roles.ModelPool`: a frozen value model on machines of its own, as
            in DVPO (Huang et al., 2025, arXiv:2502.16944); there is no value loss.
        critic_lr: Peak learning rate of the critic (9e-6: OpenRLHF's default).
        kl_coef: Weight of a :class:`~rlhfkit.modules.parts.kl_penalty.KLInReward` towards the initial model, which
            subtracts it from the reward of each token (0.01: OpenRLHF's default); 0 loads no reference model. Another
            one, or a :class:`~rlhfkit.modules.parts.kl_penalty.KLPenalty` in the loss, among ``parts`` takes its place.
        gamma: Discount, in [0, 1].
        lam: GAE's lambda, of advantages and of what the critic learns, in [0, 1] (0.95: Schulman et al., 2016; OpenRLHF
            has 1).
        clip_low: The ratio is clipped at 1 - clip_low from below; ``None``: the default of the policy loss.
        clip_high: The ratio is clipped at 1 + clip_high from above; ``None``: the default of the policy loss.
        whiten_advantages: Make the advantages of all tokens of the iteration mean 0 and deviation 1; those of a
            function given as ``advantages`` are used as they are.
        advantages: Function used in place of GAE, see :class:`~rlhfkit.modules.parts.advantages.AdvantagesBy`.
        policy_loss: PPO's clipped surrogate, or another one, see :class:`OnPolicyModule`.
        policy_loss_arguments: More arguments of the policy loss, see :class:`OnPolicyModule`.
        aggregation: How token losses become one number, see :class:`OnPolicyModule`.
        optimization: Optimizer and schedule of the learning rate, see :class:`~rlhfkit.Optimization`.
        lora: Train adapters, not the model's own weights, see :class:`~rlhfkit.LoRA`.
        loading: Technical options of the model, see :class:`~rlhfkit.ModelLoading`.
        parts: More features, each a :class:`~rlhfkit.Part` or a function of an iteration's rows, see
            :class:`OnPolicyModule`.

    Raises:
        ValueError: If an argument is out of range, or has no effect beside a part.
    """

    def __init__(
        self,
        model: str,
        *,
        lr: float = 1e-6,
        critic: str | CriticPool | ModelPool | None = None,
        critic_lr: float = 9e-6,
        kl_coef: float = 0.01,
        gamma: float = 1.0,
        lam: float = 0.95,
        clip_low: float | None = None,
        clip_high: float | None = None,
        whiten_advantages: bool = True,
        advantages: GivenFunction | None = None,
        policy_loss: GivenFunction = "ppo_loss",
        policy_loss_arguments: Mapping[str, Any] | None = None,
        aggregation: Aggregation | None = None,
        optimization: Optimization | None = None,
        lora: LoRA | None = None,
        loading: ModelLoading | None = None,
        parts: Sequence[GivenPart] = (),
    ) -> None:
        from rlhfkit.modules.parts.advantages import WhitenAdvantages
        from rlhfkit.modules.parts.critic import GAE, Critic, Returns, ValueLoss
        from rlhfkit.modules.parts.kl_penalty import KLInReward, own_penalty

        check_number("critic_lr", critic_lr, above=0)  # under its name here
        given = [make_part(one) for one in parts]
        gae = given_or(GAE(gamma, lam), given, gamma=gamma != 1.0, lam=lam != 0.95)
        own_critic = Critic(critic, lr=critic_lr)
        self.critic_part: Any = given_or(own_critic, given, critic=critic is not None, critic_lr=critic_lr != 9e-6)
        """What gives values; its arguments are those of the module unless it was among ``parts``."""
        if advantages is None:
            self.credit = [gae, WhitenAdvantages()] if whiten_advantages else [gae]
        self.own_parts = own_penalty(kl_coef, given, lambda coef: KLInReward(coef, place="token"))
        self.own_parts += [self.critic_part, ValueLoss(), Returns(gae.gamma, lam if callable(gae.lam) else gae.lam)]
        self.kl_coef = kl_coef
        super().__init__(
            model,
            lr=lr,
            advantages=advantages,
            policy_loss=policy_loss,
            policy_loss_arguments=policy_loss_arguments,
            clip_low=clip_low,
            clip_high=clip_high,
            aggregation=aggregation,
            optimization=optimization,
            lora=lora,
            loading=loading,
            parts=given,
        )
        self.keep_plain(critic=plain_value(critic, "critic"))

    def on_train_end(self) -> None:
        """End the critic's ranks, after all callbacks: checkpoints need them."""
        super().on_train_end()
        if self.critic_part.trained_elsewhere:
            self.critic_part.elsewhere.pool.stop()
