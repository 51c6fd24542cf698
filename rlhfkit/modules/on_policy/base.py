"""``OnPolicyModule``: what all modules that learn from their own samples share, whatever the advantage estimator."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Literal, get_args

import torch
from torch import Tensor, nn

from rlhfkit.data.types import Experience
from rlhfkit.losses import (
    CORRECTION_PRESETS,
    Aggregation,
    KLEstimator,
    LossOutput,
    entropy_bonus,
    importance_weights,
    kl_estimate,
    kl_loss,
    masked_mean,
    masked_sum,
    mean_metric,
    ppo_loss,
    select,
    sum_losses,
    token_rewards,
)
from rlhfkit.models import PolicyOutput, policy_output
from rlhfkit.models.load import disable_dropout
from rlhfkit.modules.on_policy.advantages import AdvantageFunction
from rlhfkit.modules.on_policy.kl_control import KLEarlyStopping, skip_update
from rlhfkit.modules.on_policy.mismatch import rollout_mismatch
from rlhfkit.modules.on_policy.functions import PolicyLoss
from rlhfkit.modules.on_policy.pretraining import check_pretraining_data, pretraining_loss
from rlhfkit.modules.on_policy.rewards import RewardedModule
from rlhfkit.modules.router_loss import with_router_loss
from rlhfkit.validation import check_integer, check_number

KLPlace = Literal["token", "sequence"]
"""Whose reward a KL penalty in the reward is subtracted from."""


class OnPolicyModule(RewardedModule):
    """A policy that learns from its own samples.

    A subclass says what the advantages are (:meth:`advantages`), or a function that is passed in. The loss is a policy
    loss (PPO's unless told), plus a KL penalty towards the model it started from, an entropy bonus, and the
    cross-entropy of other text, where asked for.

    Args:
        model: Folder or hub name of the policy.
        lr: Peak learning rate (1e-6: TRL's and OpenRLHF's default).
        advantages: Estimator in place of the subclass's: a function of the iteration's
            :class:`~rlhfkit.data.Experience` that returns what :meth:`advantages` does, or one of rewards (B,) and
            group ids (B,) such as those of :mod:`rlhfkit.losses`, see
            :class:`~rlhfkit.modules.on_policy.advantages.AdvantageFunction`; or its name: ``"rloo_advantages"``,
            ``"my_package.my_function"``. It sees the rewards that are learned from: after penalties, normalisation and
            clip, and minus the KL penalty of the whole answer where that is in the reward.
        policy_loss: A function of :mod:`rlhfkit.losses`, your own of the same form
            ``(logprobs, old_logprobs, advantages, mask, *, weights, aggregation, denominator, max_length, ...)``, or
            its name: ``"gspo_loss"``, ``"my_package.my_loss"``. It is given what its signature names, the engine's
            ``rollout_logprobs`` or ``ref_logprobs`` too, and its own defaults hold unless another argument says
            otherwise.
        policy_loss_arguments: More keyword arguments of it.
        clip_low: The ratio is clipped at 1 - clip_low from below; ``None``: the default of the policy loss.
        clip_high: The ratio is clipped at 1 + clip_high from above; ``None``: the default of the policy loss.
        aggregation: How token losses become one number, see :func:`~rlhfkit.losses.aggregate`; ``None``: the default of
            the policy loss.
        max_length: Tokens; the constant of the ``constant-length`` aggregation.
        kl_coef: Weight of the KL penalty; 0 (TRL's default) loads no reference model.
        kl_estimator: ``k1``, ``k2`` or ``k3``; ``None``: k1 in the reward (InstructGPT), k3 in the loss (GRPO). In the
            loss k1 has a gradient of mean 0 and is refused, except with the ratio as its weight
            (``policy_loss="grpo_loss", policy_loss_arguments={"kl_importance_weight": True}``).
        kl_target: Nats per token that the KL to the reference should have: after each iteration
            ``β *= 1 + clip(KL / target - 1, ±0.2) n / horizon`` for n samples (Ziegler et al., 2019, arXiv:1909.08593,
            section 2.2, whose KL is that of a whole answer); ``None``: ``kl_coef`` stays. ``policy/kl_coef`` is logged.
        kl_horizon: Samples in which the coefficient may change by a fifth (10000: OpenRLHF's and the paper's).
        kl_early_stop: Nats per token: once the policy has gone so far from the one that began the iteration (k3, over
            an update's tokens), that update and the later ones of the iteration leave it as it is, bitwise; the critic
            goes on, unless it shares the policy's trunk. 0.015 in Spinning Up; ``None``: never, as in OpenRLHF.
            ``policy/kl_early_stopped`` is the share of updates that were not made.
        kl_in_reward: Subtract the penalty from the reward instead of adding it to the loss: ``token``, from the reward
            of each token (InstructGPT, OpenRLHF's default for PPO), after any baseline of its sample; ``sequence``, the
            answer's total from the reward of the sample, before the baseline (RLOO; TRL's, and verl's for all that
            compare samples). ``True`` is the module's usual way, ``None`` its default: ``token`` for PPO, in the loss
            for others.
        entropy_coef: Weight of an entropy bonus.
        ptx_coef: Weight of the cross-entropy of text that ``PromptDataModule(pretraining_data=...)`` mixes into every
            update (PTX: InstructGPT, Ouyang et al., 2022, arXiv:2203.02155, section 3.5; 0.05 in OpenRLHF).
        correction: Importance correction for what engine and trainer disagree on: a name of
            :data:`~rlhfkit.losses.CORRECTION_PRESETS` or arguments of :func:`~rlhfkit.losses.importance_weights`. Not
            for policy losses that are given the engine's log-probs (``decoupled_ppo_loss``, ``dppo_loss``).
        log_entropy: Compute the policy's entropy in each step, for the log and for subclasses.
        **kwargs: See :class:`RewardedModule` and :class:`PolicyModule`.

    Raises:
        ValueError: If an argument is out of range.
    """

    kl_usually_in_reward: ClassVar[bool] = False
    """Where the KL penalty goes unless ``kl_in_reward`` says it."""
    usual_kl_place: ClassVar[KLPlace] = "token"
    """What ``kl_in_reward=True`` means."""

    def __init__(
        self,
        model: str,
        *,
        lr: float = 1e-6,
        advantages: str | Callable[..., Tensor] | None = None,
        policy_loss: str | Callable[..., LossOutput] = ppo_loss,
        policy_loss_arguments: Mapping[str, Any] | None = None,
        clip_low: float | None = None,
        clip_high: float | None = None,
        aggregation: Aggregation | None = None,
        max_length: int | None = None,
        kl_coef: float = 0.0,
        kl_estimator: KLEstimator | None = None,
        kl_target: float | None = None,
        kl_horizon: int = 10000,
        kl_early_stop: float | None = None,
        kl_in_reward: bool | KLPlace | None = None,
        entropy_coef: float = 0.0,
        ptx_coef: float = 0.0,
        correction: str | Mapping[str, Any] | None = None,
        log_entropy: bool = True,
        **kwargs: Any,
    ) -> None:
        super().__init__(model, lr=lr, **kwargs)
        check_number("kl_coef", kl_coef, minimum=0, why="0 is no reference model")
        check_number("kl_target", kl_target, above=0, optional=True)
        check_integer("kl_horizon", kl_horizon, minimum=1, why="it is in samples")
        check_number("entropy_coef", entropy_coef)
        check_number("ptx_coef", ptx_coef, minimum=0, why="0 is no text")
        # Not read from hparams: a subclass may well have a hyperparameter of that name for a bonus of its own.
        self.entropy_coef = entropy_coef
        self.advantage_function = None if advantages is None else AdvantageFunction(advantages)
        """What takes the place of :meth:`advantages`."""
        self.hparams["advantages"] = None if self.advantage_function is None else self.advantage_function.name
        self.policy_loss = PolicyLoss(
            policy_loss,
            policy_loss_arguments,
            clip_low=clip_low,
            clip_high=clip_high,
            aggregation=aggregation,
            max_length=max_length,
        )
        self.hparams["policy_loss"] = self.policy_loss.name
        self.kl_in_reward = self._kl_place(kl_coef, kl_in_reward)
        """From what the KL penalty is subtracted; ``None``: it is in the loss, or there is none."""
        self.kl_estimator: KLEstimator = kl_estimator or ("k3" if self.kl_in_reward is None else "k1")
        if kl_target is not None and not kl_coef:
            raise ValueError(f"kl_target={kl_target} needs a positive kl_coef to start from, got kl_coef={kl_coef}")
        self.kl_early_stop = KLEarlyStopping(kl_early_stop)
        self.kl_coef = kl_coef
        """Weight of the KL penalty now; moves when there is a ``kl_target``."""
        if isinstance(correction, str) and correction not in CORRECTION_PRESETS:
            raise ValueError(f"correction must be one of {', '.join(CORRECTION_PRESETS)}, got {correction!r}")
        self.correction = CORRECTION_PRESETS[correction] if isinstance(correction, str) else correction
        self._check_combinations()
        self._check_loss()

    def _kl_place(self, kl_coef: float, kl_in_reward: bool | KLPlace | None) -> KLPlace | None:
        if kl_in_reward not in (None, True, False, *get_args(KLPlace)):
            raise ValueError(
                f"kl_in_reward must be true, false, {' or '.join(map(repr, get_args(KLPlace)))}, got {kl_in_reward!r}"
            )
        if kl_in_reward and not kl_coef:
            raise ValueError(
                f"kl_in_reward={kl_in_reward!r} says where the KL penalty goes, and kl_coef=0 that there is none: give "
                "a kl_coef (0.01 in OpenRLHF's PPO, 0.05 in TRL's RLOO) or leave kl_in_reward out"
            )
        wanted = self.kl_usually_in_reward if kl_in_reward is None else kl_in_reward
        if not wanted or not kl_coef:
            return None
        return self.usual_kl_place if wanted is True else wanted

    def _check_combinations(self) -> None:
        """Refuse arguments of which one would silently have no effect, or a wrong one."""
        in_loss = bool(self.kl_coef) and self.kl_in_reward is None
        weighted = self.policy_loss.penalizes_kl and self.policy_loss.arguments.get("kl_importance_weight")
        if in_loss and self.kl_estimator == "k1" and not weighted:
            raise ValueError(
                "kl_estimator='k1' in the loss has a gradient of mean 0, which is noise and no penalty: use 'k2' or "
                "'k3', or kl_in_reward=True, or policy_loss='grpo_loss' with "
                "policy_loss_arguments={'kl_importance_weight': True}"
            )
        if self.correction is not None and self.policy_loss.takes("rollout_logprobs"):
            raise ValueError(
                f"{self.policy_loss.name} is given the engine's log-probs and accounts for them itself, so that a "
                "correction would count them twice: leave correction out, or take another policy_loss"
            )
        if self.correction is not None and not self.policy_loss.takes("weights"):
            raise ValueError(f"{self.policy_loss.name} takes no weights, which a correction consists of")

    def _check_loss(self) -> None:
        """Evaluate the loss of one token: every bad knob shows here, not an hour into the run."""
        probe = torch.zeros(1, 1)
        batch = Experience(
            input_ids=torch.zeros(1, 2, dtype=torch.int64),
            attention_mask=torch.ones(1, 2, dtype=torch.bool),
            action_mask=probe == 0,
            rollout_logprobs=probe,
            versions=torch.zeros(1, 1, dtype=torch.int64),
            rewards=probe[0],
            group=torch.zeros(1, dtype=torch.int64),
            sample_index=torch.zeros(1, dtype=torch.int64),
            truncated=torch.zeros(1, dtype=torch.bool),
            update=torch.zeros(1, dtype=torch.int64),
            ref_logprobs=probe,
            advantages=probe,
        )
        try:
            OnPolicyModule.loss(self, batch, PolicyOutput(probe, probe))
        except TypeError as error:
            raise ValueError(f"{self.policy_loss.name} does not take what it is given: {error}") from error

    def build_policy(self) -> nn.Module:
        """Load the policy without dropout: the ratio compares it with itself, which dropout would make noise."""
        policy = super().build_policy()
        disable_dropout(policy)
        return policy

    @property
    def needs_reference(self) -> bool:
        """Whether there is a KL penalty."""
        return bool(self.hparams["kl_coef"])

    @property
    def needs_old_logprobs(self) -> bool:
        """Whether :meth:`advantages` needs log-probs before the iteration of all samples, the first update's too."""
        return self.kl_in_reward is not None or self.hparams["kl_target"] is not None

    @property
    def uses_rollout_logprobs(self) -> bool:
        """Whether the loss needs the engine's log-probs; ``RolloutCallback`` checks that they can be compared."""
        return self.correction is not None or self.policy_loss.takes("rollout_logprobs")

    def check_group_size(self, group_size: int) -> None:
        """Raise ValueError if the algorithm cannot learn from groups of this many samples; every size is allowed here.

        Called by ``RolloutCallback`` before training.
        """

    # ------------------------------------------------------------------ one iteration

    def advantages(self, experience: Experience) -> Tensor:
        """What was better than expected, per sample or per token.

        Args:
            experience: The whole iteration, B sequences, the same on every rank; with the log-probs that
                :meth:`prepare` has filled in.

        Returns:
            (B,), or (B, T-1) when tokens differ; 0 where the reward is missing.
        """
        # Abstract: the estimator is what makes GRPO, PPO or a user's own module of this one.
        raise NotImplementedError(f"{type(self).__name__} has to say what its advantages() are")

    def prepare(self, experience: Experience) -> Experience:
        """Fill in what the loss needs and only the policy before the iteration's first update can tell.

        Args:
            experience: The whole iteration, the same on every rank.

        Returns:
            A copy with advantages, and, where needed, old log-probs (for all but the first update, whose own log-probs
            are the old ones) and reference log-probs. Rewards are the samples' and the reward model's, before
            penalties, normalisation and clipping, which :meth:`advantages` sees.
        """
        self.kl_early_stop.begin()
        scored = self.add_reward_model_scores(experience)
        prepared = self.compute_advantages(self.process_rewards(scored))
        if self.hparams["kl_target"] is not None:  # after everything that the coefficient of this iteration is part of
            self._adapt_kl_coef(prepared)
        prepared = self.mask_truncated_samples(prepared)
        return dataclasses.replace(prepared, rewards=scored.rewards, token_rewards=scored.token_rewards)

    def compute_advantages(self, experience: Experience) -> Experience:
        """Log-probs and advantages; override it to fill in more.

        Args:
            experience: The whole iteration, with the rewards that are learned from.
        """
        rows = experience.update >= 0 if self.needs_old_logprobs else experience.update > 0
        if experience.old_logprobs is None and bool(rows.any()):
            old_logprobs = self.sharded_logprobs(self.policy, experience, rows)
            experience = dataclasses.replace(experience, old_logprobs=old_logprobs)
        if self.needs_reference:
            experience = dataclasses.replace(experience, ref_logprobs=self.reference_logprobs(experience))
        if self.advantage_function is None:
            advantages = self.advantages(experience)
        else:
            advantages = self.advantage_function(experience, self._penalized(experience))
        if advantages.dim() == 1:
            advantages = advantages[:, None].expand_as(experience.action_mask)
        return dataclasses.replace(experience, advantages=advantages)

    def _adapt_kl_coef(self, experience: Experience) -> None:
        """Bring the KL closer to its target; every rank sees the whole iteration and computes the same."""
        error = float(masked_mean(self._kl(experience), experience.action_mask)) / self.hparams["kl_target"] - 1.0
        self.kl_coef *= 1.0 + min(max(error, -0.2), 0.2) * len(experience) / self.hparams["kl_horizon"]

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Remember the weight of the KL penalty, and whether the policy stands still."""
        super().on_save_checkpoint(checkpoint)
        checkpoint["kl_coef"] = self.kl_coef
        checkpoint["kl_early_stopped"] = self.kl_early_stop.stopped

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Continue with the weight of the KL penalty that was reached."""
        super().on_load_checkpoint(checkpoint)
        self.kl_coef = checkpoint.get("kl_coef", self.kl_coef)
        self.kl_early_stop.stopped = checkpoint.get("kl_early_stopped", False)

    def reference_logprobs(self, experience: Experience) -> Tensor:
        """Log-probs under the model that training started from. A collective.

        Args:
            experience: B sequences, the same on every rank.

        Returns:
            (B, T-1) float32 on the CPU.
        """
        with self.reference_model() as reference:
            return self.sharded_logprobs(reference, experience)

    def sample_rewards(self, experience: Experience) -> Tensor:
        """(B,) rewards, minus the KL penalty of the whole answer where that is subtracted from the sample's reward.

        Args:
            experience: B sequences.
        """
        return self._penalized(experience) if self.kl_in_reward == "sequence" else experience.rewards

    def _penalized(self, experience: Experience) -> Tensor:
        if self.kl_in_reward is None:
            return experience.rewards
        return experience.rewards - self.kl_coef * masked_sum(self._kl(experience), experience.action_mask, -1)

    def token_rewards(self, experience: Experience, rewards: Tensor, *, earned: Tensor | None = None) -> Tensor:
        """Rewards per token: the sample's on its last action, and the KL penalty on each where it is subtracted there.

        Args:
            experience: B sequences.
            rewards: (B,), NaN where missing.
            earned: (B, T-1), the part of them that each token earned, in the same units; ``None``: the last earned all.

        Returns:
            (B, T-1); 0 outside the mask.
        """
        kl, kl_coef = None, 0.0
        if self.kl_in_reward == "token":
            kl, kl_coef = self._kl(experience), self.kl_coef
        return token_rewards(rewards, experience.action_mask, kl=kl, kl_coef=kl_coef, earned=earned)

    def _kl(self, experience: Experience) -> Tensor:
        """(B, T-1) estimate of the KL of the policy before the iteration to the reference."""
        assert experience.old_logprobs is not None
        assert experience.ref_logprobs is not None
        return kl_estimate(
            experience.old_logprobs,
            experience.ref_logprobs,
            estimator=self.kl_estimator,
            mask=experience.action_mask,
        )

    @property
    def needs_entropy(self) -> bool:
        """Whether entropy is logged or rewarded."""
        return self.hparams["log_entropy"] or bool(self.entropy_coef)

    def policy_output(self, batch: Experience) -> PolicyOutput:
        """Log-probs, and entropy if it is logged or rewarded, of the tokens the policy chose."""
        return policy_output(
            self.policy,
            batch,
            batch.action_mask,
            temperature=batch.temperature,
            entropy=self.needs_entropy,
            router_aux_loss=self.balances_routers,
        )

    def loss(self, batch: Experience, out: PolicyOutput) -> LossOutput:
        """The objective of one micro-batch; the one method to override for another.

        Args:
            batch: B sequences of one update.
            out: What the current policy says about them.
        """
        assert batch.advantages is not None
        mask, old, sizes = batch.action_mask, self.old_logprobs(batch, out), self.reduction(batch)
        offered: dict[str, Any] = {
            "weights": None,
            "rollout_logprobs": batch.rollout_logprobs,
            "ref_logprobs": batch.ref_logprobs,
            "denominator": sizes["denominator"],
        }
        measured: Mapping[str, Tensor] = {}
        if self.correction is not None:
            offered["weights"], measured = self._correction_weights(batch, old)
        kl_coef = 0.0 if batch.ref_logprobs is None or self.kl_in_reward is not None else self.kl_coef
        if self.policy_loss.penalizes_kl:
            offered |= {"kl_coef": kl_coef, "kl_estimator": self.kl_estimator}
        parts = [self.policy_loss(out.logprobs, old, batch.advantages, mask, **offered)]
        if batch.ref_logprobs is not None and not self.policy_loss.penalizes_kl:
            kl = kl_loss(out.logprobs, batch.ref_logprobs, mask, coef=kl_coef, estimator=self.kl_estimator, **sizes)
            parts.append(kl)
        if self.entropy_coef:
            assert out.entropy is not None
            parts.append(entropy_bonus(out.entropy, mask, coef=self.entropy_coef, **sizes))
        result = sum_losses(*parts)
        if self.hparams["kl_target"] is not None:
            measured = {**measured, "policy/kl_coef": torch.tensor(self.kl_coef)}
        return LossOutput(result.loss, {**result.metrics, **measured})

    def reduction(self, batch: Experience) -> dict[str, Any]:
        """How the terms of the loss become one number: arguments of :func:`~rlhfkit.losses.aggregate`.

        Args:
            batch: Knows the counts of its whole optimizer step.
        """
        by_tokens = self.policy_loss.aggregation == "token-mean"
        return {
            "aggregation": self.policy_loss.aggregation,
            "denominator": batch.token_denominator if by_tokens else batch.sequence_denominator,
            "max_length": self.hparams["max_length"],
        }

    def _correction_weights(self, batch: Experience, old: Tensor) -> tuple[Tensor, Mapping[str, Tensor]]:
        """Importance weights of tokens (B, T-1), or of sequences (B, 1), and their metrics."""
        assert self.correction is not None
        mask = batch.action_mask
        weights, _, measured = importance_weights(old, batch.rollout_logprobs, mask, **self.correction)
        levels = {self.correction.get("level", "token"), self.correction.get("reject_level") or "sequence"}
        if "token" not in levels:
            # One number for each sequence, not the same one on every token: VESPO takes the product of a sequence's.
            weights = select(weights, mask, fill=-torch.inf).amax(-1, keepdim=True)
            weights = select(weights, mask.any(-1, keepdim=True), fill=1.0)
        return weights, measured

    @staticmethod
    def old_logprobs(batch: Experience, out: PolicyOutput) -> Tensor:
        """(B, T-1) log-probs before the iteration; in its first update the policy's own are that."""
        return out.logprobs.detach() if batch.old_logprobs is None else batch.old_logprobs

    def training_step(self, batch: Experience, batch_idx: int) -> Tensor:
        """One micro-batch of an iteration."""
        out = self.policy_output(batch)
        result = self.objective(batch, out)
        self.kl_early_stop.measure(batch, out.logprobs)
        loss, metrics = result.loss, {**result.metrics, **self.rollout_metrics(batch, out)}
        shares: dict[str, Tensor] = {}
        if self.hparams["ptx_coef"]:
            text = pretraining_loss(self, batch_idx)
            loss = loss + self.hparams["ptx_coef"] * text
            shares["ptx/loss"] = text.detach()
        self.log_means({"loss": loss.detach()} | shares)
        self.log_metrics(metrics, batch.action_mask.sum())
        return loss

    def objective(self, batch: Experience, out: PolicyOutput) -> LossOutput:
        """All that is learned from one micro-batch of samples: the policy's :meth:`loss`, the load-balancing loss of a
        mixture of experts, and more in subclasses.

        Args:
            batch: B sequences of one update.
            out: What the current policy says about them.
        """
        coef = self.hparams["router_aux_loss_coef"]
        return with_router_loss(self.loss(batch, out), out.router_aux_loss, batch.action_mask, coef)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        """Let the step pass by what is not to learn now."""
        super().on_before_optimizer_step(optimizer)
        stopped = self.kl_early_stop.decide(self)
        if self.kl_early_stop.limit is not None:
            self.log_means({"policy/kl_early_stopped": torch.tensor(float(stopped), device=self.device)})
        if stopped:
            skip_update(self, "policy")

    def setup(self, stage: str) -> None:
        """Check that text is there if and only if it is learned from."""
        super().setup(stage)
        if stage == "fit":
            check_pretraining_data(self, self.hparams["ptx_coef"])

    @torch.no_grad()
    def rollout_metrics(self, batch: Experience, out: PolicyOutput) -> dict[str, Tensor]:
        """Entropy, and how far the engine's log-probs are from the trainer's for the same policy.

        Args:
            batch: B sequences.
            out: What the current policy says about them.
        """
        old, mask = self.old_logprobs(batch, out), batch.action_mask
        metrics: dict[str, Tensor] = {**rollout_mismatch(old, batch.rollout_logprobs, mask)}
        if out.entropy is not None:
            metrics["policy/entropy"] = mean_metric(out.entropy, mask)
        return metrics

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Validation generates and scores; ``RolloutCallback`` does both and logs the result."""
