"""``PPOModule``: proximal policy optimisation with a critic (Schulman et al., 2017; Ouyang et al., 2022)."""

import dataclasses
from typing import Any, cast

import torch
from torch import Tensor, nn

from rlhfkit.data.experience import Experience
from rlhfkit.losses import KLEstimator, LossOutput, gae, value_loss, whiten
from rlhfkit.models.heads import load_scalar_model, scalar_output
from rlhfkit.models.load import base_model_name
from rlhfkit.modules.on_policy import OnPolicyModule


class PPOModule(OnPolicyModule):
    """A policy and a critic that learn from the policy's samples; one sample per prompt is enough.

    The KL penalty to the model it started from is part of the reward of each token, advantages come from generalised
    advantage estimation and are whitened over the whole iteration, and policy and critic take one optimizer step
    together: under ``RLHFDeepSpeedStrategy`` each has an engine, a learning rate and a gradient norm of its own.

    Args:
        model: Folder or hub name of the policy.
        critic: Folder or hub name of what the critic starts from: a reward model, whose head it keeps, or a causal
            language model, which gets a new head; ``None``: the policy.
        critic_lr: Peak learning rate of the critic (9e-6: OpenRLHF's default).
        value_coef: Weight of the value loss; of no effect under Adam, except through shared gradient clipping.
        value_clip: The value loss looks no further than this from the old value (0.5: OpenRLHF's); ``None``: no clip.
        gamma: Discount, in [0, 1] (1: everywhere).
        lam: GAE's lambda for the policy, in [0, 1] (0.95: Schulman et al., 2016; OpenRLHF has 1).
        critic_lam: GAE's lambda for the critic's targets; ``None``: ``lam`` (VAPO, 2025, arXiv:2504.05118, takes 1).
        whiten_advantages: Make the advantages of all tokens of the iteration mean 0 and deviation 1.
        critic_warmup_steps: Optimizer steps in which only the critic learns.
        clip_high: As in :class:`OnPolicyModule` (PPO's 0.2).
        kl_coef: As in :class:`OnPolicyModule` (0.01: OpenRLHF's default).
        kl_estimator: As in :class:`OnPolicyModule` (k1: InstructGPT's).
        kl_in_reward: As in :class:`OnPolicyModule`.
        **kwargs: See :class:`OnPolicyModule` and :class:`PolicyModule`.

    Raises:
        ValueError: If an argument is out of range.
    """

    critic: nn.Module

    def __init__(
        self,
        model: str,
        *,
        critic: str | None = None,
        critic_lr: float = 9e-6,
        value_coef: float = 1.0,
        value_clip: float | None = 0.5,
        gamma: float = 1.0,
        lam: float = 0.95,
        critic_lam: float | None = None,
        whiten_advantages: bool = True,
        critic_warmup_steps: int = 0,
        clip_high: float | None = 0.2,
        kl_coef: float = 0.01,
        kl_estimator: KLEstimator = "k1",
        kl_in_reward: bool = True,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            model,
            clip_high=clip_high,
            kl_coef=kl_coef,
            kl_estimator=kl_estimator,
            kl_in_reward=kl_in_reward,
            **kwargs,
        )
        for name, rate in {"critic_lr": critic_lr, "value_coef": value_coef}.items():
            if rate <= 0:
                raise ValueError(f"{name} must be positive, got {rate}")
        if critic_warmup_steps < 0:
            raise ValueError(f"critic_warmup_steps must be 0 or more, got {critic_warmup_steps}")
        if critic_warmup_steps and self.hparams["weight_decay"]:
            raise ValueError(
                "critic_warmup_steps keeps the policy as it is, which weight_decay would not: set one to 0"
            )
        # One token shows a bad discount or clip here, not after the first samples.
        one = torch.zeros(1, 1)
        for each in (lam, critic_lam if critic_lam is not None else lam):
            gae(one, one, one == 0, gamma=gamma, lam=each)
        value_loss(one, None, one, one == 0, clip=value_clip)

    # ------------------------------------------------------------------ building

    def configure_model(self) -> None:
        """Build policy, critic, and the reference if the KL penalty needs one."""
        super().configure_model()
        if not hasattr(self, "critic"):
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
        return [group | {"lr": self.hparams["critic_lr"]} if group["name"] == "critic" else group for group in groups]

    # ------------------------------------------------------------------ one iteration

    def prepare(self, experience: Experience) -> Experience:
        """Fill in values, log-probs, advantages and returns; see :meth:`OnPolicyModule.prepare`."""
        values = self.sharded(self.critic, self.value_output, experience)
        experience = super().prepare(dataclasses.replace(experience, values=values))
        lam = self.hparams["lam"] if self.hparams["critic_lam"] is None else self.hparams["critic_lam"]
        return dataclasses.replace(experience, returns=self._gae(experience, lam)[1])

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
        rewards = self.token_rewards(experience, experience.rewards)
        return gae(rewards, experience.values, experience.action_mask, gamma=self.hparams["gamma"], lam=lam)

    def value_output(self, batch: Experience) -> Tensor:
        """The critic's value of the state in which each token was chosen.

        Args:
            batch: B sequences.

        Returns:
            (B, T-1) float32; 0 outside the mask.
        """
        chosen_next = nn.functional.pad(batch.action_mask, (0, 1))
        return scalar_output(self.critic, batch, chosen_next)[:, :-1]

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

    def training_step(self, batch: Experience, batch_idx: int) -> Tensor:
        """One micro-batch: the policy's loss and the critic's."""
        policy_loss = super().training_step(batch, batch_idx)
        result = self.value_loss(batch, self.value_output(batch))
        self.log_means({"value/loss": result.loss.detach(), **result.metrics})
        if self.global_step < self.hparams["critic_warmup_steps"]:
            policy_loss = 0.0 * policy_loss  # still part of the graph: every engine has to take part in every step
        return policy_loss + self.hparams["value_coef"] * result.loss
