"""``PPOModule``: proximal policy optimization with a critic (Schulman et al., 2017; Ouyang et al., 2022)."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn

from rlhfkit.data.types import Experience
from rlhfkit.losses import (
    LossOutput,
    RewardMoments,
    gae,
    length_adaptive_lambda,
    normalize_rewards,
    ppo_loss,
    value_loss,
    weighted_metric,
)
from rlhfkit.models import LoRA, PolicyOutput, policy_output, unwrap
from rlhfkit.models.forward import VALUE_HEAD
from rlhfkit.models.heads import add_value_head, critic_values, load_scalar_model
from rlhfkit.models.load import base_model_name
from rlhfkit.modules.arguments import refuse_without_effect
from rlhfkit.modules.on_policy.base import ModuleStep, OnPolicyModule
from rlhfkit.modules.on_policy.final_states import with_final_states
from rlhfkit.modules.on_policy.preparation.frozen_critic import FrozenCritic, check_frozen_settings, value_metrics
from rlhfkit.modules.on_policy.preparation.local_rows import local_rows
from rlhfkit.modules.on_policy.preparation.rewards import KLPlace
from rlhfkit.modules.on_policy.remote_critic import RemoteCritic, check_overrides
from rlhfkit.modules.optim import skip_update
from rlhfkit.modules.optimizers.schedules import Schedule
from rlhfkit.parts import Part, Stage
from rlhfkit.roles import CriticPool, FrozenModel, ModelPool
from rlhfkit.roles.replica import Role
from rlhfkit.validation import check_integer, check_number


class PPOModule(OnPolicyModule):
    """A policy and a critic that learn from the policy's samples; one sample per prompt is enough.

    The KL penalty is part of the reward of each token, advantages come from generalized advantage estimation and are
    whitened over the whole iteration, and policy and critic take one optimizer step together: under
    ``RLHFDeepSpeedStrategy`` each has an engine, a learning rate and a gradient norm of its own. With a
    ``shared_backbone`` the critic is one more head of the policy: one model, one forward pass, one engine.
    ``Sample.token_rewards`` are credited to their tokens, the rest of the reward to the last one.

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
            returns so far; saved in checkpoints. ``value_clip`` is in these units then. As MAPPO's value normalization
            (Yu et al., 2021, arXiv:2103.01955), without PopArt's rescaling of the head (arXiv:1602.07714).
        gamma: Discount, in [0, 1].
        lam: GAE's lambda for the policy, in [0, 1] (0.95: Schulman et al., 2016; OpenRLHF has 1).
        critic_lam: GAE's lambda for the critic's targets; ``None``: ``lam`` (VAPO, 2025, arXiv:2504.05118, takes 1).
        length_adaptive_alpha: The policy's lambda is 1 - 1 / (alpha * tokens) of each answer, in place of ``lam``, see
            :func:`~rlhfkit.losses.length_adaptive_lambda` (0.05 in VAPO); the critic's stays ``critic_lam``.
        bootstrap_truncated: Where the length limit cut an answer off, count the critic's value of the state after its
            last token as the rewards that would have come (Pardo et al., 2018, arXiv:1712.00378), which takes a forward
            pass of the critic over these answers. Off in OpenRLHF and TRL: such answers end there.
        whiten_advantages: Make the advantages of all tokens of the iteration mean 0 and deviation 1; those of a
            function given as ``advantages`` are used as they are.
        policy_loss: A function of :mod:`rlhfkit.losses`, its name (``"gspo_loss"``), or your own, see
            :class:`OnPolicyModule`.
        policy_loss_arguments: More keyword arguments of the policy loss.
        clip_low: The ratio is clipped at 1 - clip_low from below; ``None``: the default of the policy loss (0.2).
        clip_high: The ratio is clipped at 1 + clip_high from above; ``None``: the default of the policy loss (0.2).
        kl_coef: Weight of the KL penalty towards the reference (0.01: OpenRLHF's default); 0 loads no reference model.
        kl_in_reward: ``None``, true or ``"token"``: the penalty is subtracted from the reward of each token;
            ``"sequence"``: its sum from the reward of the sample; false: it is in the loss.
        correction: Importance correction for differences between engine and trainer: ``"tis"``, ``"icepop"``, ``"mis"``
            and others of :data:`~rlhfkit.losses.CORRECTION_PRESETS`, or arguments of
            :func:`~rlhfkit.losses.importance_weights`.
        weight_decay: Decoupled weight decay; ``sgd`` adds it to the gradient.
        warmup_steps: Optimizer steps of linear warm-up.
        lr_schedule: After warm-up: ``constant``; ``linear`` or ``cosine`` decay to the end of training; ``wsd``:
            constant, then decay in the last part; ``inverse_sqrt``: as 1 / sqrt(step). See :class:`PolicyModule`.
        attention: ``None`` or ``auto``: packed with the first kernel that can run, where the model can be packed;
            ``varlen``, ``flash_attention_2``, ``flash_attention_3``, ``buckets``: packed with this one; else
            Transformers' ``attn_implementation`` (``sdpa``, ``eager``, ...), padded. See :class:`PolicyModule`.
        gradient_checkpointing: Recompute activations in the backward pass.
        lora: Train adapters, not the model's own weights, which are then the reference; ``None``: all weights, or the
            adapter that ``model`` holds.
        parts: More features, each a :class:`~rlhfkit.Part` or a function of an iteration's rows, see
            :class:`OnPolicyModule`.
        **kwargs: Loss: see :class:`OnPolicyModule`; rewards and KL: see
            :class:`~rlhfkit.modules.on_policy.preparation.rewards.RewardedModule`; model: see :class:`PolicyModule`.

    Raises:
        ValueError: If an argument is out of range.
    """

    critic: nn.Module
    kl_in_reward_by_default: ClassVar[bool] = True

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
        policy_loss: str | Callable[..., LossOutput] = ppo_loss,
        policy_loss_arguments: Mapping[str, Any] | None = None,
        clip_low: float | None = None,
        clip_high: float | None = None,
        kl_coef: float = 0.01,
        kl_in_reward: bool | KLPlace | None = None,
        correction: str | Mapping[str, Any] | None = None,
        weight_decay: float = 0.0,
        warmup_steps: int = 0,
        lr_schedule: Schedule = "constant",
        attention: str | None = None,
        gradient_checkpointing: bool = False,
        lora: LoRA | None = None,
        parts: Sequence[Part | Mapping[str, Any] | Callable[[Experience], Experience] | str] = (),
        **kwargs: Any,
    ) -> None:
        super().__init__(
            model,
            lr=lr,
            policy_loss=policy_loss,
            policy_loss_arguments=policy_loss_arguments,
            clip_low=clip_low,
            clip_high=clip_high,
            kl_coef=kl_coef,
            kl_in_reward=kl_in_reward,
            correction=correction,
            weight_decay=weight_decay,
            warmup_steps=warmup_steps,
            lr_schedule=lr_schedule,
            attention=attention,
            gradient_checkpointing=gradient_checkpointing,
            lora=lora,
            parts=parts,
            **kwargs,
        )
        check_number("critic_lr", critic_lr, above=0)
        check_number("value_coef", value_coef, above=0)
        check_number("value_clip", value_clip, above=0, optional=True)
        check_number("gamma", gamma, minimum=0, maximum=1)
        check_number("lam", lam, minimum=0, maximum=1)
        check_number("critic_lam", critic_lam, minimum=0, maximum=1, optional=True)
        check_number("length_adaptive_alpha", length_adaptive_alpha, above=0, optional=True)
        check_integer("critic_warmup_steps", critic_warmup_steps, minimum=0)
        if shared_backbone and (critic is not None or critic_warmup_steps):
            raise ValueError(
                "with shared_backbone the critic is a head of the policy: it starts from no model of its own and "
                "cannot learn while the policy is not updated; leave critic and critic_warmup_steps out"
            )
        if isinstance(critic, Mapping) and "num_replicas" in critic:
            critic = ModelPool.of(critic)
        pool = None if isinstance(critic, ModelPool) else CriticPool.of(critic)
        self.remote_critic: RemoteCritic | None = None
        """The critic if ranks of its own train it; ``None``: it is in the module, or frozen."""
        self.frozen_critic: FrozenCritic | None = None
        """The critic if it is frozen, in a pool; ``None``: it is trained."""
        self.critic_name: str | None = critic if isinstance(critic, str) else None
        if pool is not None:
            check_overrides(type(self), PPOModule)
            self.remote_critic = RemoteCritic(pool, lr=critic_lr, value_clip=value_clip, value_coef=value_coef)
            self.hparams.update(critic=pool.plain())
        if isinstance(critic, ModelPool):
            check_overrides(type(self), PPOModule)
            check_frozen_settings(
                PPOModule,
                critic_lr=critic_lr,
                critic_warmup_steps=critic_warmup_steps,
                value_coef=value_coef,
                value_clip=value_clip,
                critic_lam=critic_lam,
                normalize_values=normalize_values,
            )
            self.frozen_critic = FrozenCritic(critic)
            self.hparams.update(critic=critic.plain())
        self.critic_lr = critic_lr
        self.critic_warmup_steps = critic_warmup_steps
        self.shared_backbone = shared_backbone
        self.value_coef = value_coef
        self.value_clip = value_clip
        self.normalize_values = normalize_values
        self.gamma = gamma
        self.lam = lam
        self.critic_lam = lam if critic_lam is None else critic_lam
        self.length_adaptive_alpha = length_adaptive_alpha
        self.bootstrap_truncated = bootstrap_truncated
        self._final_values: Tensor | None = None  # (B,), while advantages are computed
        self.whiten_advantages = whiten_advantages
        self.return_moments = RewardMoments.zero()
        """Count, mean and squared deviations of the returns so far, with ``normalize_values``."""
        self._critic_router_loss: Tensor | None = None  # of the last forward pass
        self._check_effects(other_lam=lam != 0.95 and critic_lam is not None)

    def _check_effects(self, *, other_lam: bool) -> None:
        """Refuse arguments without effect beside others; ``other_lam``: ``lam`` is for the policy's advantages only."""
        adapts, function = self.length_adaptive_alpha is not None, self.advantage_function
        if function is not None:
            of_gae = {"length_adaptive_alpha": adapts, "lam": other_lam}
            refuse_without_effect(of_gae, f"advantages={function.name}")
        elif adapts:
            refuse_without_effect({"lam": other_lam}, "length_adaptive_alpha and critic_lam, which take its place")
        if self.mask_truncated:
            bootstraps = {"bootstrap_truncated": self.bootstrap_truncated}
            refuse_without_effect(bootstraps, "mask_truncated, which learns nothing from answers that were cut off")
        if self.shared_backbone:
            passes = {"proximal": self.proximal != "recompute", "router_replay": self.router_replay}
            refuse_without_effect(passes, "shared_backbone, whose forward pass for values gives old log-probs too")

    # ------------------------------------------------------------------ building

    def configure_model(self) -> None:
        """Build policy, critic, and reference and reward model if needed."""
        super().configure_model()
        if self.shared_backbone:
            if not hasattr(unwrap(self.policy), VALUE_HEAD):
                add_value_head(self.policy)
        elif self.critic_elsewhere is None and not hasattr(self, "critic"):
            self.critic = self.build_critic()

    @property
    def critic_elsewhere(self) -> RemoteCritic | FrozenCritic | None:
        """The critic, if it is on machines of its own."""
        return self.remote_critic or self.frozen_critic

    def placed_models(self) -> dict[str, tuple[FrozenModel, Role]]:
        """The models on machines of their own, by the name of the role, and what they are asked for."""
        placed = super().placed_models()
        return placed if self.frozen_critic is None else placed | {"critic": (self.frozen_critic.pool, "values")}

    def build_critic(self) -> nn.Module:
        """Load the critic; override to wrap or change it."""
        return load_scalar_model(
            self.critic_name or base_model_name(self.model_name),
            dtype=self.model_dtype,
            attention=self.attention,
            gradient_checkpointing=self.gradient_checkpointing,
            offload_activations=self.offload_activations,
            tiled_mlp=self.tiled_mlp,
            liger_kernels=self.liger_kernels,
            lora=self.lora,
            quantization=self.quantization,
            trust_remote_code=self.trust_remote_code,
        )

    def parameter_groups(self) -> list[dict[str, Any]]:
        """Policy and critic, each with its learning rate."""
        groups = super().parameter_groups()
        if not self.shared_backbone:
            return [group | {"lr": self.critic_lr} if group["name"] == "critic" else group for group in groups]
        head = list(unwrap(self.policy).get_submodule(VALUE_HEAD).parameters())
        of_head = {id(parameter) for parameter in head}
        trunk = [parameter for parameter in groups[0]["params"] if id(parameter) not in of_head]
        groups[0] = groups[0] | {"params": trunk}
        return [*groups, {"params": head, "name": VALUE_HEAD, "lr": self.critic_lr}]

    # ------------------------------------------------------------------ before the updates of an iteration

    def add_logprobs(self, experience: Experience) -> Experience:
        """Add old and reference log-probs; with a shared backbone the same forward pass gives the values.

        A critic elsewhere is asked for values meanwhile.
        """
        if self.critic_elsewhere is not None:
            self.critic_elsewhere.ask_values(self, experience)
        if self.shared_backbone:
            both = self.distributed_forward(self.policy, self._logprobs_and_values, experience, columns=2)
            old_logprobs, values = (column.contiguous() for column in both.unbind(-1))
            experience = dataclasses.replace(experience, old_logprobs=old_logprobs).with_columns(values=values)
        return super().add_logprobs(experience)

    def _logprobs_and_values(self, batch: Experience) -> Tensor:
        """(b, t-1, 2) log-probs and values in one forward pass."""
        out = policy_output(self.policy, batch, batch.action_mask, temperature=batch.temperature, values=True)
        return torch.stack([out.logprobs, cast(Tensor, out.values)], -1)

    columns_of_credit = ("advantages", "returns")

    def steps(self) -> list[Part]:
        """The steps of :class:`OnPolicyModule`, and the critic's values."""
        return [*super().steps(), ModuleStep(self.add_values, Stage.MODELS, writes=("values",))]

    def add_values(self, experience: Experience) -> Experience:
        """Add the critic's values, in its own units."""
        if self.shared_backbone:
            return experience
        if self.critic_elsewhere is not None:
            return experience.with_columns(values=self.critic_elsewhere.values(experience))
        return experience.with_columns(values=self.distributed_forward(self.critic, self.value_output, experience))

    def compute_advantages(self, experience: Experience) -> Experience:
        """Add advantages, and returns in the units of the critic's values."""
        mask, predicted = experience.action_mask, experience.columns["values"]
        if self.normalize_values:
            values = predicted * self.return_moments.std + self.return_moments.mean
            experience = experience.with_columns(values=values.to(predicted.dtype) * mask)
        self._final_values = self.final_values(experience) if self.bootstrap_truncated else None
        experience = super().compute_advantages(experience)
        _, returns = self._gae(experience, self.critic_lam)
        if self.normalize_values:
            self.return_moments = self.updated_moments(self.return_moments, experience, returns[mask])
            returns = normalize_rewards(returns, self.return_moments.mean, self.return_moments.std) * mask
        return experience.with_columns(values=predicted, returns=returns)

    @local_rows
    def advantages(self, experience: Experience) -> Tensor:
        """(B, T-1) advantages by generalized advantage estimation, whitened; 0 outside the mask."""
        alpha, lam = self.length_adaptive_alpha, self.lam
        lengths = experience.action_mask.sum(-1)
        advantages, _ = self._gae(experience, lam if alpha is None else length_adaptive_lambda(lengths, alpha=alpha))
        return self.whiten(experience, advantages) if self.whiten_advantages else advantages

    def final_values(self, experience: Experience) -> Tensor:
        """(B,) values of the states after answers that were cut off, in units of the reward; 0 for others."""
        cut_off = experience.truncated & experience.action_mask.any(-1)
        longer, final = with_final_states(experience, cut_off)
        if self.shared_backbone:
            both = self.distributed_forward(self.policy, self._logprobs_and_values, longer, cut_off, columns=2)
            values = both[..., 1]
        elif self.critic_elsewhere is not None:
            self.critic_elsewhere.ask_values(self, longer, cut_off)
            values = self.critic_elsewhere.values(longer)
        else:
            values = self.distributed_forward(self.critic, self.value_output, longer, cut_off)
        if self.normalize_values:
            values = values * self.return_moments.std + self.return_moments.mean
        return values.where(final, 0.0).sum(-1)

    def _gae(self, experience: Experience, lam: float | Tensor) -> tuple[Tensor, Tensor]:
        rewards = self.token_rewards(experience, self.sample_rewards(experience), earned=experience.token_rewards)
        return gae(
            rewards,
            experience.columns["values"],
            experience.action_mask,
            gamma=self.gamma,
            lam=lam,
            last_values=self._final_values,
        )

    # ------------------------------------------------------------------ one micro-batch

    def policy_output(self, batch: Experience) -> PolicyOutput:
        """Run the policy; with a shared backbone the output also has values."""
        if not self.shared_backbone:
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

    def value_output(self, batch: Experience) -> Tensor:
        """(B, T-1) float32 values of the states in which tokens were chosen; 0 outside the mask.

        Values of a critic that starts as a calibrated reward model are shifted and scaled by the mean and deviation in
        its configuration.
        """
        values, self._critic_router_loss = critic_values(
            self.critic, batch, batch.action_mask, router_aux_loss=self.balances_routers
        )
        return values

    def training_step(self, batch: Experience, batch_idx: int) -> Tensor:
        """Compute the loss of one micro-batch of an iteration; ranks of a critic get theirs first."""
        if self.remote_critic is not None:
            self.remote_critic.pool.train(batch, self.trainer.accumulate_grad_batches)
        return super().training_step(batch, batch_idx)

    def total_loss(self, batch: Experience, out: PolicyOutput) -> LossOutput:
        """Add the critic's loss to the policy's, unless others compute it or the critic is frozen."""
        policy = super().total_loss(batch, out)
        if self.critic_elsewhere is not None:
            metrics = policy.metrics if self.frozen_critic is None else {**policy.metrics, **value_metrics(batch)}
            return LossOutput(policy.loss, {**metrics, "policy/loss": weighted_metric(policy.loss, 1.0)})
        values = cast(Tensor, out.values) if self.shared_backbone else self.value_output(batch)
        value = self.value_loss(batch, values)
        # Shares of the step's means, so all micro-batches have the weight 1.
        metrics = {"policy/loss": weighted_metric(policy.loss, 1.0), "value/loss": weighted_metric(value.loss, 1.0)}
        loss = policy.loss + self.value_coef * value.loss
        result = LossOutput(loss, {**policy.metrics, **value.metrics, **metrics})
        if self.shared_backbone or self._critic_router_loss is None:
            return result
        return self.with_router_loss(result, self._critic_router_loss, batch.action_mask, name="value/aux_loss")

    def value_loss(self, batch: Experience, values: Tensor) -> LossOutput:
        """Compute the critic's loss from its current values, (B, T-1); override for another."""
        mask, denominator = batch.action_mask, batch.token_denominator
        old, returns = batch.columns["values"], batch.columns["returns"]
        return value_loss(values, old, returns, mask, clip=self.value_clip, denominator=denominator)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        """Skip the policy's update while the critic warms up."""
        super().on_before_optimizer_step(optimizer)
        if self.global_step < self.critic_warmup_steps:
            skip_update(self, "policy")

    # ------------------------------------------------------------------ a critic with ranks of its own

    def on_train_start(self) -> None:
        """Start the critic's ranks."""
        super().on_train_start()
        if self.remote_critic is not None:
            self.remote_critic.start(self)

    def on_train_epoch_end(self) -> None:
        """Wait until the critic's ranks have trained on the iteration, and log their metrics."""
        super().on_train_epoch_end()
        if self.remote_critic is not None:
            self.log_dict(self.remote_critic.report(), sync_dist=True)  # the same on all ranks

    def on_train_end(self) -> None:
        """End the critic's ranks."""
        super().on_train_end()
        if self.remote_critic is not None:
            self.remote_critic.pool.stop()

    def teardown(self, stage: str) -> None:
        """End the critic's ranks.

        Lightning does not call it after an error, of which a checkpoint may need them: they then live until the next
        fit or the end of this process.
        """
        super().teardown(stage)
        if self.remote_critic is not None:
            self.remote_critic.pool.close()

    # ------------------------------------------------------------------ checkpoints

    def save_pretrained(
        self, folder: str | Path, *, child: str = "policy", adapter: bool = False, dtype: torch.dtype | None = None
    ) -> Path:
        """Save a child, see :class:`PolicyModule`; a critic with ranks of its own is written by these.

        Raises:
            ValueError: If a critic is asked for that is frozen.
        """
        if child == "critic" and self.frozen_critic is not None:
            raise ValueError(f"the critic is frozen: it is still that of {self.frozen_critic.pool.model}")
        if child != "critic" or self.remote_critic is None:
            return super().save_pretrained(folder, child=child, adapter=adapter, dtype=dtype)
        self.remote_critic.export(self, Path(folder), adapter=adapter, dtype=dtype)
        return Path(folder)

    def work_elsewhere(self) -> list[tuple[str, str, float, float]]:
        """When a critic's own ranks have worked lately."""
        return [] if self.remote_critic is None else self.remote_critic.pool.work()

    def save_folder(self, folder: Path) -> None:
        """Save the critic's ranks in the folder of a checkpoint, for strategies that write folders."""
        if self.remote_critic is not None:
            self.remote_critic.save_folder(folder)

    def load_folder(self, folder: Path) -> None:
        """Continue with the critic in the folder of a checkpoint."""
        if self.remote_critic is not None:
            self.remote_critic.load_folder(folder)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Save the moments of the returns."""
        super().on_save_checkpoint(checkpoint)
        if self.remote_critic is not None:
            self.remote_critic.save_file(self, checkpoint)
        checkpoint["return_moments"] = self.return_moments.plain()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Continue with the moments of the returns."""
        super().on_load_checkpoint(checkpoint)
        if self.remote_critic is not None:
            self.remote_critic.load_file(checkpoint)
        if "return_moments" in checkpoint:
            self.return_moments = RewardMoments.of(checkpoint["return_moments"])
