"""``PPOModule``: proximal policy optimisation with a critic (Schulman et al., 2017; Ouyang et al., 2022)."""

import dataclasses
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn

from rlhfkit.data.types import Experience
from rlhfkit.losses import LossOutput, RewardMoments, gae, normalize_rewards, value_loss, weighted_metric, whiten
from rlhfkit.models import PolicyOutput, ScalarModel, policy_output, unwrap
from rlhfkit.models.forward import VALUE_HEAD, has_router
from rlhfkit.models.heads import add_value_head, load_scalar_model, scalar_forward
from rlhfkit.models.load import base_model_name
from rlhfkit.modules.on_policy.base import OnPolicyModule
from rlhfkit.modules.on_policy.kl_control import skip_update
from rlhfkit.modules.router_loss import with_router_loss
from rlhfkit.validation import check_integer, check_number


class PPOModule(OnPolicyModule):
    """A policy and a critic that learn from the policy's samples; one sample per prompt is enough.

    The KL penalty to the model it started from is part of the reward of each token, advantages come from generalised
    advantage estimation and are whitened over the whole iteration, and policy and critic take one optimizer step
    together: under ``RLHFDeepSpeedStrategy`` each has an engine, a learning rate and a gradient norm of its own. With a
    ``shared_backbone`` the critic is one more head of the policy: one model, one forward pass, one engine.

    What tokens earned (``Sample.token_rewards``) is credited to them, the rest of the reward to the last action.

    Args:
        model: Folder or hub name of the policy.
        critic: Folder or hub name of what the critic starts from: a reward model, whose head and calibration (mean and
            deviation of its rewards) it keeps, or a causal language model, which gets a new head; ``None``: the policy.
        shared_backbone: Put a value head on the policy's own trunk instead of a second model. The values of a sample
            then move with the policy, and the two losses compete: choose ``value_coef`` (0.1 in TRL, 0.5 in the PPO
            paper's Atari runs).
        critic_lr: Peak learning rate of the critic (9e-6: OpenRLHF's default), or of the value head alone.
        value_coef: Weight of the value loss; of no effect under Adam, except with a shared backbone.
        value_clip: The value loss looks no further than this from the old value (0.5: OpenRLHF's); ``None``: no clip.
        gamma: Discount, in [0, 1] (1: everywhere).
        lam: GAE's lambda for the policy, in [0, 1] (0.95: Schulman et al., 2016; OpenRLHF has 1).
        critic_lam: GAE's lambda for the critic's targets; ``None``: ``lam`` (VAPO, 2025, arXiv:2504.05118, takes 1).
        normalize_values: The critic predicts returns that are shifted and scaled by the mean and deviation of all
            returns so far; saved in checkpoints. ``value_clip`` is in these units then. As MAPPO's value normalisation
            (Yu et al., 2021, arXiv:2103.01955); its head is not rescaled as in PopArt (arXiv:1602.07714).
        whiten_advantages: Make the advantages of all tokens of the iteration mean 0 and deviation 1.
        critic_warmup_steps: Optimizer steps in which only the critic learns; the policy and its optimizer state stay
            bitwise as they are.
        kl_coef: As in :class:`OnPolicyModule` (0.01: OpenRLHF's default), in the reward of each token unless
            ``kl_in_reward`` says otherwise.
        **kwargs: See :class:`OnPolicyModule`, :class:`RewardedModule` and :class:`PolicyModule`.

    Raises:
        ValueError: If an argument is out of range.
    """

    critic: nn.Module
    kl_usually_in_reward: ClassVar[bool] = True

    def __init__(
        self,
        model: str,
        *,
        critic: str | None = None,
        shared_backbone: bool = False,
        critic_lr: float = 9e-6,
        value_coef: float = 1.0,
        value_clip: float | None = 0.5,
        gamma: float = 1.0,
        lam: float = 0.95,
        critic_lam: float | None = None,
        normalize_values: bool = False,
        whiten_advantages: bool = True,
        critic_warmup_steps: int = 0,
        kl_coef: float = 0.01,
        **kwargs: Any,
    ) -> None:
        super().__init__(model, kl_coef=kl_coef, **kwargs)
        check_number("critic_lr", critic_lr, above=0)
        check_number("value_coef", value_coef, above=0)
        check_number("value_clip", value_clip, above=0, optional=True)
        check_number("gamma", gamma, minimum=0, maximum=1)
        check_number("lam", lam, minimum=0, maximum=1)
        check_number("critic_lam", critic_lam, minimum=0, maximum=1, optional=True)
        check_integer("critic_warmup_steps", critic_warmup_steps, minimum=0)
        if shared_backbone and (critic is not None or critic_warmup_steps):
            raise ValueError(
                "with shared_backbone the critic is a head of the policy: it starts as nothing else, and cannot learn "
                "while the policy stands still; leave critic and critic_warmup_steps out"
            )
        self.return_moments = RewardMoments.zero()
        self._critic_router_loss: Tensor | None = None  # of the last forward pass
        """Count, mean and squared deviations of the returns so far; moves with ``normalize_values`` only."""
        # One token shows a bad discount or clip here, not after the first samples.
        one = torch.zeros(1, 1)
        for each in (lam, critic_lam if critic_lam is not None else lam):
            gae(one, one, one == 0, gamma=gamma, lam=each)
        value_loss(one, None, one, one == 0, clip=value_clip)

    # ------------------------------------------------------------------ building

    def configure_model(self) -> None:
        """Build policy and critic, and what else is needed."""
        super().configure_model()
        if self.hparams["shared_backbone"]:
            if not hasattr(unwrap(self.policy), VALUE_HEAD):
                add_value_head(self.policy)
        elif not hasattr(self, "critic"):
            self.critic = self.build_critic()

    def build_critic(self) -> nn.Module:
        """Load the critic; override to wrap or change it."""
        return load_scalar_model(
            self.hparams["critic"] or base_model_name(self.hparams["model"]),
            dtype=self.model_dtype,
            attention=self.hparams["attention"],
            gradient_checkpointing=self.hparams["gradient_checkpointing"],
            lora=self.lora,
            quantization=self.hparams["quantization"],
            trust_remote_code=self.hparams["trust_remote_code"],
        )

    def parameter_groups(self) -> list[dict[str, Any]]:
        """Policy and critic, each with its learning rate."""
        groups = super().parameter_groups()
        if not self.hparams["shared_backbone"]:
            rate = {"lr": self.hparams["critic_lr"]}
            return [group | rate if group["name"] == "critic" else group for group in groups]
        head = list(getattr(unwrap(self.policy), VALUE_HEAD).parameters())
        ours = {id(parameter) for parameter in head}
        trunk = [parameter for parameter in groups[0]["params"] if id(parameter) not in ours]
        groups[0] = groups[0] | {"params": trunk}
        return [*groups, {"params": head, "name": VALUE_HEAD, "lr": self.hparams["critic_lr"]}]

    # ------------------------------------------------------------------ one iteration

    def compute_advantages(self, experience: Experience) -> Experience:
        """Values, log-probs, advantages and returns.

        Args:
            experience: The whole iteration, with the rewards that are learned from.

        Returns:
            A copy whose values and returns are in the critic's own units.
        """
        if self.hparams["shared_backbone"]:
            old_logprobs, predicted = self.sharded(self.policy, self._both, experience, columns=2).unbind(-1)
            experience = dataclasses.replace(experience, old_logprobs=old_logprobs.contiguous())
        else:
            predicted = self.sharded(self.critic, self.value_output, experience)
        mask, values = experience.action_mask, predicted
        if self.hparams["normalize_values"]:
            values = (predicted * self.return_moments.std + self.return_moments.mean).to(predicted.dtype) * mask
        experience = super().compute_advantages(dataclasses.replace(experience, values=values))
        lam = self.hparams["lam"] if self.hparams["critic_lam"] is None else self.hparams["critic_lam"]
        returns = self._gae(experience, lam)[1]
        if self.hparams["normalize_values"]:
            self.return_moments = self.return_moments.update(returns[mask])
            returns = normalize_rewards(returns, self.return_moments.mean, self.return_moments.std) * mask
        return dataclasses.replace(experience, values=predicted.contiguous(), returns=returns)

    def _both(self, batch: Experience) -> Tensor:
        """(b, t-1, 2): log-probs and values in one forward pass."""
        out = policy_output(self.policy, batch, batch.action_mask, temperature=batch.temperature, values=True)
        return torch.stack([out.logprobs, self._values_of(out)], -1)

    def advantages(self, experience: Experience) -> Tensor:
        """Advantage of each token: generalised advantage estimation, whitened.

        Args:
            experience: The whole iteration, with values, and log-probs where the KL penalty needs them.

        Returns:
            (B, T-1); 0 outside the mask.
        """
        advantages, _ = self._gae(experience, self.hparams["lam"])
        return whiten(advantages, experience.action_mask) if self.hparams["whiten_advantages"] else advantages

    def _gae(self, experience: Experience, lam: float) -> tuple[Tensor, Tensor]:
        assert experience.values is not None
        rewards = self.token_rewards(experience, self.sample_rewards(experience), earned=experience.token_rewards)
        return gae(rewards, experience.values, experience.action_mask, gamma=self.hparams["gamma"], lam=lam)

    def value_output(self, batch: Experience) -> Tensor:
        """The critic's value of the state in which each token was chosen.

        A critic that starts as a calibrated reward model is shifted and scaled as its rewards are, by the mean and
        deviation in its configuration.

        Args:
            batch: B sequences.

        Returns:
            (B, T-1) float32; 0 outside the mask.
        """
        chosen_next = nn.functional.pad(batch.action_mask, (0, 1))
        balance = self.balances_routers and has_router(self.critic)
        out = scalar_forward(self.critic, batch, chosen_next, router_aux_loss=balance)
        self._critic_router_loss = out.router_aux_loss
        values, critic = out.values[:, :-1], unwrap(self.critic)
        return critic.normalize(values).where(batch.action_mask, 0.0) if isinstance(critic, ScalarModel) else values

    def value_loss(self, batch: Experience, values: Tensor) -> LossOutput:
        """The critic's objective; override for another.

        Args:
            batch: B sequences of one update.
            values: (B, T-1) from :meth:`value_output`.
        """
        return value_loss(
            values,
            batch.values,
            cast(Tensor, batch.returns),
            batch.action_mask,
            clip=self.hparams["value_clip"],
            denominator=batch.token_denominator,
        )

    def policy_output(self, batch: Experience) -> PolicyOutput:
        """What the policy says about a batch; with a shared backbone, the values too."""
        if not self.hparams["shared_backbone"]:
            return super().policy_output(batch)
        return policy_output(
            self.policy,
            batch,
            batch.action_mask,
            temperature=batch.temperature,
            entropy=self.needs_entropy,
            router_aux_loss=self.balances_routers,
            values=True,
        )

    @staticmethod
    def _values_of(out: PolicyOutput) -> Tensor:
        assert out.values is not None
        return out.values

    def objective(self, batch: Experience, out: PolicyOutput) -> LossOutput:
        """The policy's loss plus the critic's.

        Args:
            batch: B sequences of one update.
            out: What the current policy says about them.
        """
        policy = super().objective(batch, out)
        shared = self.hparams["shared_backbone"]
        value = self.value_loss(batch, self._values_of(out) if shared else self.value_output(batch))
        # Shares of the step's means, as losses are: micro-batches count alike.
        metrics = {"policy/loss": weighted_metric(policy.loss, 1.0), "value/loss": weighted_metric(value.loss, 1.0)}
        loss = policy.loss + self.hparams["value_coef"] * value.loss
        result = LossOutput(loss, {**policy.metrics, **value.metrics, **metrics})
        if shared or self._critic_router_loss is None:
            return result
        coef = self.hparams["router_aux_loss_coef"]
        return with_router_loss(result, self._critic_router_loss, batch.action_mask, coef, name="value/aux_loss")

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        """Let the step pass by the policy while the critic warms up; see :class:`OnPolicyModule`."""
        super().on_before_optimizer_step(optimizer)
        if self.global_step < self.hparams["critic_warmup_steps"]:
            skip_update(self, "policy")

    # ------------------------------------------------------------------ saving

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Remember the moments of the returns."""
        super().on_save_checkpoint(checkpoint)
        checkpoint["return_moments"] = self.return_moments.plain()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Continue with the moments of the returns."""
        super().on_load_checkpoint(checkpoint)
        if "return_moments" in checkpoint:
            self.return_moments = RewardMoments.of(checkpoint["return_moments"])
