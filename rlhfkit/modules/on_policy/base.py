"""``OnPolicyModule``: what all modules that learn from their own samples share.

:meth:`OnPolicyModule.prepare` completes an iteration's samples before its first update;
:meth:`OnPolicyModule.training_step` learns from one micro-batch of them.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Literal, cast

import torch
from torch import Tensor, nn

from rlhfkit.data.types import Experience
from rlhfkit.losses import (
    CORRECTION_PRESETS,
    Aggregation,
    GradientScope,
    LossOutput,
    entropy_bonus,
    kl_loss,
    log_linear_proximal_logprobs,
    mean_metric,
    policy_tokens,
    ppo_loss,
    sum_losses,
)
from rlhfkit.models import HeadLoss, PolicyOutput, policy_output
from rlhfkit.models.forward import unwrap
from rlhfkit.models.load import disable_dropout
from rlhfkit.models.routing import attach_routing
from rlhfkit.modules.arguments import options, refuse_without_effect
from rlhfkit.modules.on_policy.advantages import AdvantageModule
from rlhfkit.modules.on_policy.functions import PolicyLoss
from rlhfkit.modules.on_policy.preparation.iteration import two_tokens
from rlhfkit.modules.on_policy.preparation.kl_control import KLEarlyStopping, skip_update
from rlhfkit.modules.on_policy.preparation.local_rows import own_part
from rlhfkit.modules.on_policy.preparation.placed_models import ask, pool_result
from rlhfkit.modules.on_policy.preparation.rewards import RewardedModule
from rlhfkit.modules.on_policy.update.engine_mismatch import correction_arguments, correction_weights, mismatch_metrics
from rlhfkit.modules.on_policy.update.entropy_control import EntropyControl, EntropyController
from rlhfkit.modules.on_policy.update.first_pass import FirstPassLogprobs
from rlhfkit.modules.on_policy.update.pretraining_text import PretrainingTextModule
from rlhfkit.modules.on_policy.update.token_filter import TokenFilter
from rlhfkit.protocols import epochs_of
from rlhfkit.validation import check_number


class OnPolicyModule(PretrainingTextModule, AdvantageModule):
    """A policy that learns from its own samples.

    A subclass overrides :meth:`advantages`, or a function is passed in. The loss is a policy loss (PPO's by default),
    optionally with a KL penalty towards the initial model, an entropy bonus, and the cross-entropy of pretraining text.

    Args:
        model: Folder or hub name of the policy.
        lr: Peak learning rate (1e-6: TRL's and OpenRLHF's default).
        advantages: Function used in place of :meth:`advantages`, or its name (``"rloo_advantages"``,
            ``"my_package.my_function"``): of the iteration's :class:`~rlhfkit.data.Experience`, or of rewards (N,) and
            group ids (N,), see :class:`~rlhfkit.modules.on_policy.functions.AdvantageFunction`. Its rewards are those
            after ``reward_processing``, minus the KL penalty of the whole answer if that is in the reward.
        policy_loss: A function of :mod:`rlhfkit.losses`, your own of the same form
            ``(logprobs, old_logprobs, advantages, mask, *, weights, aggregation, denominator, max_length, ...)``, or
            its name: ``"gspo_loss"``, ``"my_package.my_loss"``. It gets the arguments that its signature names, also
            ``rollout_logprobs`` or ``ref_logprobs``, and keeps its own defaults unless another argument differs.
        policy_loss_arguments: More keyword arguments of the policy loss.
        clip_low: The ratio is clipped at 1 - clip_low from below; ``None``: the default of the policy loss.
        clip_high: The ratio is clipped at 1 + clip_high from above; ``None``: the default of the policy loss.
        aggregation: How token losses become one number, see :func:`~rlhfkit.losses.aggregate`; ``None``: the default of
            the policy loss.
        max_length: Tokens; the constant of the ``constant-length`` aggregation.
        entropy_coef: Weight of an entropy bonus.
        correction: Importance correction for differences between engine and trainer: a name of
            :data:`~rlhfkit.losses.CORRECTION_PRESETS` or arguments of :func:`~rlhfkit.losses.importance_weights`.
            ``None``: none, but ``"tis"`` if the engine is quantized; ``"none"``: none with any engine. Not for policy
            losses that are given the engine's log-probs (``decoupled_ppo_loss``, ``dppo_loss``).
        token_filter: Tests that a token has to pass to be learned from: its entropy, or how near engine and policy are,
            see :class:`~rlhfkit.modules.on_policy.update.token_filter.TokenFilter`.
        entropy_control: An entropy bonus whose weight follows the entropy, beside ``entropy_coef``, see
            :class:`~rlhfkit.modules.on_policy.update.entropy_control.EntropyControl`.
        proximal: Which log-probs the ratio is taken to in later updates of an iteration: ``"recompute"``: those of the
            policy before it, by a forward pass; ``"log-linear"``: between the engine's and the policy's own by policy
            versions, without a pass (AReaL, Fu et al., 2025, arXiv:2505.24298; see
            :func:`~rlhfkit.losses.log_linear_proximal_logprobs`). Decoupled PPO (arXiv:2110.00641) takes either.
        kl_clamp: Limit in nats of each token's KL in the loss (10 in OpenRLHF and verl); ``None``: none.
        kl_importance_weight: Multiply each token's KL in the loss by its ratio, with its gradient (unbiased off-policy:
            DeepSeek-V3.2, 2025, arXiv:2512.02556; on in TRL).
        log_entropy: Compute the policy's entropy in each step, for the log and for subclasses.
        router_replay: In later updates of an iteration, send each token to the experts that the policy before the
            iteration chose, of which weights are computed anew (routing replay, GSPO: Zheng et al., 2025,
            arXiv:2507.18071, section 5.3). For mixtures of experts with our packed attention; takes 2 bytes for each
            choice of a token's layers, and no further forward pass.
        **kwargs: See :class:`~rlhfkit.modules.on_policy.preparation.rewards.RewardedModule`, :class:`PolicyModule`, and
            :class:`~rlhfkit.modules.on_policy.update.pretraining_text.PretrainingTextModule`.

    Raises:
        ValueError: If an argument is out of range.
    """

    between_output_and_loss: ClassVar[tuple[str, ...]] = (
        *RewardedModule.between_output_and_loss,
        "total_loss",
        "old_logprobs",
        "aggregation_arguments",
    )

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
        entropy_coef: float = 0.0,
        correction: str | Mapping[str, Any] | None = None,
        token_filter: TokenFilter | None = None,
        entropy_control: EntropyControl | None = None,
        proximal: Literal["recompute", "log-linear"] = "recompute",
        kl_clamp: float | None = None,
        kl_importance_weight: bool = False,
        log_entropy: bool = True,
        router_replay: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(model, lr=lr, advantages=advantages, **kwargs)
        check_number("entropy_coef", entropy_coef)
        self.policy_loss = PolicyLoss(
            policy_loss,
            policy_loss_arguments,
            clip_low=clip_low,
            clip_high=clip_high,
            aggregation=aggregation,
            max_length=max_length,
        )
        self.max_length = max_length
        early_stop = self.kl_control.early_stop
        self.kl_early_stopping = None if early_stop is None else KLEarlyStopping(early_stop)
        self.entropy_coef = entropy_coef
        self.correction, self._chose_correction = correction_arguments(correction), correction is not None
        self.token_filter = options(TokenFilter, token_filter)
        self.entropy_control = options(EntropyControl, entropy_control)
        self.entropy_controller = EntropyController(self.entropy_control)
        if proximal not in ("recompute", "log-linear"):
            raise ValueError(f"proximal must be recompute or log-linear, got {proximal!r}")
        if router_replay and proximal == "log-linear":
            raise ValueError(
                "router_replay records which experts are chosen in the forward pass of the old log-probs, which "
                "proximal='log-linear' leaves out: give one of them"
            )
        self.proximal = proximal
        self._iteration_version = 0  # of the policy before the iteration
        check_number("kl_clamp", kl_clamp, above=0, optional=True)
        self.kl_clamp = kl_clamp
        self.kl_importance_weight = kl_importance_weight
        self.log_entropy = log_entropy
        self.router_replay = router_replay
        self.first_pass = FirstPassLogprobs()
        """Old log-probs of later epochs over an iteration, where no forward pass is made for them."""
        self.hparams.update(
            advantages=None if self.advantage_function is None else self.advantage_function.name,
            policy_loss=self.policy_loss.name,
            token_filter=dataclasses.asdict(self.token_filter),
            entropy_control=dataclasses.asdict(self.entropy_control),
        )
        self._check_combinations()
        self._check_loss()

    def _check_combinations(self) -> None:
        """Refuse combinations in which an argument has no effect, or a wrong one."""
        in_loss = bool(self.kl_coef) and self.kl_in_reward is None
        weighted = self.kl_importance_weight or self.policy_loss.arguments.get("kl_importance_weight")
        if in_loss and self.kl_estimator == "k1" and not weighted:
            raise ValueError(
                "kl_estimator='k1' in the loss has a gradient of mean 0, which is noise and no penalty: use 'k2' or "
                "'k3', or kl_in_reward=True, or kl_importance_weight=True"
            )
        given = {"kl_clamp": self.kl_clamp is not None, "kl_importance_weight": self.kl_importance_weight}
        if not in_loss:
            refuse_without_effect(given, "a KL penalty that is not in the loss (kl_coef, kl_in_reward)")
        twice = [name for name, chosen in given.items() if chosen and name in self.policy_loss.arguments]
        if twice:
            raise ValueError(f"{', '.join(twice)} is given twice, to the module and in policy_loss_arguments: keep one")
        if self.token_filter.is_active and not self.policy_loss.takes("weights"):
            raise ValueError(f"{self.policy_loss.name} takes no weights, which a token_filter consists of")
        if self.proximal == "log-linear" and (self.needs_old_logprobs or self.kl_early_stopping is not None):
            raise ValueError(
                "proximal='log-linear' makes no forward pass for old log-probs, which a KL penalty in the reward and "
                "KLControl compare with: use proximal='recompute'"
            )
        if self.correction is not None and self.policy_loss.takes("rollout_logprobs"):
            raise ValueError(
                f"{self.policy_loss.name} is given the engine's log-probs and accounts for them itself, so that a "
                "correction would count them twice: leave correction out, or take another policy_loss"
            )
        if self.correction is not None and not self.policy_loss.takes("weights"):
            raise ValueError(f"{self.policy_loss.name} takes no weights, which a correction consists of")

    def _check_loss(self) -> None:
        """Compute the loss of one token, so that bad arguments raise before training."""
        probe = torch.zeros(1, 1)
        batch = dataclasses.replace(two_tokens(), ref_logprobs=probe, advantages=probe)
        try:
            OnPolicyModule.loss(self, batch, PolicyOutput(probe, probe))
        except TypeError as error:
            raise ValueError(f"{self.policy_loss.name} does not take what it is given: {error}") from error

    def build_policy(self) -> nn.Module:
        """Load the policy without dropout, which would make the ratio noisy."""
        policy = super().build_policy()
        disable_dropout(policy)
        return policy

    def configure_model(self) -> None:
        """Build the models, and make the policy's routers ready with ``router_replay``.

        Raises:
            ValueError: If the policy has no routers whose choice can be replayed.
        """
        super().configure_model()
        if self.router_replay:
            attach_routing(unwrap(self.policy))

    # ------------------------------------------------------------------ what RolloutCallback asks

    @property
    def uses_rollout_logprobs(self) -> bool:
        """Whether the loss needs the engine's log-probs; ``RolloutCallback`` checks that they can be compared."""
        compares = self.token_filter.uses_rollout_logprobs or self.proximal == "log-linear"
        return compares or self.correction is not None or self.policy_loss.takes("rollout_logprobs")

    def correct_quantization(self) -> bool:
        """Use truncated importance sampling for samples of a quantized engine, unless ``correction`` was given.

        Policy losses that account for the engine's log-probs themselves, or take no weights, stay as they are.

        Returns:
            Whether the correction was set.
        """
        loss = self.policy_loss
        if self._chose_correction or loss.takes("rollout_logprobs") or not loss.takes("weights"):
            return False
        self.correction, self._chose_correction = CORRECTION_PRESETS["tis"], True
        return True

    def check_group_size(self, group_size: int) -> None:
        """Raise ValueError if groups of this size teach nothing; every size is allowed here."""

    # ------------------------------------------------------------------ before the updates of an iteration

    def prepare(self, experience: Experience) -> Experience:
        """Complete an iteration before its first update: rewards, log-probs, values, advantages. A collective.

        ``experience`` has this rank's rows of the iteration (``experience.own_rows``) and a summary of all rows
        (``experience.summary``); a group's samples may be on several ranks. There is at least one row, except on ranks
        that share micro-batches with others (``sequence_parallel_size``, ``tensor_parallel_size``). In one process, or
        without a summary, its rows are the whole iteration. The rewards of the returned copy are those before
        :meth:`process_rewards`, for the log.
        """
        self.first_pass.reset()
        self._iteration_version = 0 if self._trainer is None else self.trainer.global_step
        if self.kl_early_stopping is not None:
            self.kl_early_stopping.reset()
        scored = self.add_reward_model_scores(experience)
        given = self.visible_rows(self.process_rewards, scored)
        experience = self.process_rewards(given)
        if given is not scored:
            experience = own_part(experience, scored)
        experience = self.add_logprobs(experience)
        experience = self.add_values(experience)
        experience = self.compute_advantages(experience)
        self.adapt_kl_coef(experience)
        experience = self.mask_truncated_samples(experience)
        return dataclasses.replace(
            experience, rewards=scored.rewards, token_rewards=scored.token_rewards, iteration=scored.iteration
        )

    def add_logprobs(self, experience: Experience) -> Experience:
        """Add old and reference log-probs where they are needed. A collective.

        The first update uses its own log-probs as old ones. Later epochs over the iteration need those of all rows:
        they are computed here, or :attr:`first_pass` keeps them where an epoch is one update.
        """
        pool = self.reference_pool
        asked = None if pool is None else ask(pool, "logprobs", self, experience)  # while the policy computes
        updates = experience.update if experience.iteration is None else experience.iteration.update  # of all ranks
        repeated = self._trainer is not None and epochs_of(self.trainer) > 1
        rows = experience.update >= 0 if self.needs_old_logprobs or repeated else experience.update > 0
        later = self.proximal == "recompute" and bool((updates > 0).any())
        if experience.old_logprobs is None and (self.needs_old_logprobs or later or (self.router_replay and repeated)):
            if self.router_replay:
                old_logprobs, routing = self.distributed_routing(self.policy, experience, rows)
                experience = dataclasses.replace(experience, routing=routing)
            else:
                old_logprobs = self.distributed_logprobs(self.policy, experience, rows)
            experience = dataclasses.replace(experience, old_logprobs=old_logprobs)
        if self.needs_reference:
            with self.reference_model() as reference:
                ref_logprobs = self.distributed_logprobs(reference, experience)
            experience = dataclasses.replace(experience, ref_logprobs=ref_logprobs)
        if asked is not None and pool is not None:
            experience = dataclasses.replace(experience, ref_logprobs=pool_result(asked, pool))
        return experience

    def add_values(self, experience: Experience) -> Experience:
        """Add a critic's values; none here."""
        return experience

    # ------------------------------------------------------------------ one micro-batch

    def training_step(self, batch: Experience, batch_idx: int) -> Tensor:
        """Compute the loss of one micro-batch of an iteration."""
        keeps = self._trainer is not None and self.proximal == "recompute"
        if keeps:
            batch = self.first_pass.complete(batch, self.trainer, batch_idx)
        out = self.training_output(batch)
        if keeps:
            self.first_pass.keep(batch, out.logprobs, self.trainer, batch_idx)
        result = self.total_loss(batch, out)
        if self.kl_early_stopping is not None:
            self.kl_early_stopping.measure(batch, out.logprobs)
        if self.entropy_control.target is not None:
            self.entropy_controller.measure(batch, cast(Tensor, out.entropy))
        loss, means = result.loss, {}
        if self.ptx_coef:
            text_loss = self.pretraining_loss()
            loss = loss + self.ptx_coef * text_loss
            means["ptx/loss"] = text_loss.detach()
        self.log_means({"loss": loss.detach()} | means)
        self.log_metrics({**result.metrics, **self.rollout_metrics(batch, out)}, batch.action_mask.sum())
        return loss

    def loss_gradient_scope(self, batch: Experience) -> GradientScope | None:
        """What the gradient of :meth:`loss` depends on, by the policy loss and whether this is the first update."""
        if getattr(self.loss, "__func__", None) is not OnPolicyModule.loss:
            return super().loss_gradient_scope(batch)
        scope, first_update = self.policy_loss.gradient_scope, batch.old_logprobs is None
        if scope == "ratio":  # all ratios are 1 in the first update, and other tokens' ratios count in later ones
            scope = "token" if first_update else "batch"
        if scope == "token" and first_update and self.correction is not None:
            levels = {self.correction.get("level", "token"), self.correction.get("reject_level") or "token"}
            alone = levels == {"token"} and not self.correction.get("normalize")
            scope = "token" if alone else "batch"  # weights of sequences, from the policy's log-probs
        if self.token_filter.top_entropy is not None:
            return None  # needs the entropies of all tokens first
        return "batch" if scope is not None and self.token_filter.is_active else scope

    def policy_output(self, batch: Experience, head_loss: HeadLoss | None = None) -> PolicyOutput:
        """Run the policy: log-probs of the chosen tokens, and entropy where it is logged or rewarded.

        ``head_loss`` is :meth:`head_loss` in training.
        """
        return policy_output(
            self.policy,
            batch,
            batch.action_mask,
            temperature=batch.temperature,
            entropy=self.needs_entropy,
            router_aux_loss=self.balances_routers,
            head_loss=head_loss,
            routing=batch.routing,
        )

    @property
    def needs_entropy(self) -> bool:
        """Whether entropy is logged or rewarded."""
        controlled = self.entropy_control.target is not None or self.token_filter.top_entropy is not None
        return self.log_entropy or bool(self.entropy_coef) or controlled

    def total_loss(self, batch: Experience, out: PolicyOutput) -> LossOutput:
        """Add the load-balancing loss of a mixture of experts to :meth:`loss`; subclasses add a critic's loss."""
        result = self.with_head_gradient(self.loss(batch, out), out)
        return self.with_router_loss(result, out.router_aux_loss, batch.action_mask)

    def loss(self, batch: Experience, out: PolicyOutput) -> LossOutput:
        """Compute the policy's loss on one micro-batch of B sequences; override it for another objective."""
        assert batch.advantages is not None
        mask, old, reduction = batch.action_mask, self.old_logprobs(batch, out), self.aggregation_arguments(batch)
        offered: dict[str, Any] = {
            "weights": None,
            "rollout_logprobs": batch.rollout_logprobs,
            "ref_logprobs": batch.ref_logprobs,
            "denominator": reduction["denominator"],
        }
        metrics: Mapping[str, Tensor] = {}
        if self.correction is not None:
            offered["weights"], metrics = correction_weights(self.correction, batch, old)
        if self.token_filter.is_active:
            kept = self.token_filter.kept(batch, out.logprobs, old, out.entropy)
            offered["weights"] = kept.float() * (1.0 if offered["weights"] is None else offered["weights"])
            metrics = {**metrics, "policy/kept_fraction": mean_metric(kept.float(), mask)}
        kl_coef = 0.0 if batch.ref_logprobs is None or self.kl_in_reward is not None else self.kl_coef
        if self.policy_loss.penalizes_kl:
            offered |= {"kl_coef": kl_coef, "kl_estimator": self.kl_estimator}
            offered |= {"kl_clamp": self.kl_clamp} if self.kl_clamp is not None else {}
            offered |= {"kl_importance_weight": True} if self.kl_importance_weight else {}
        parts = [self.policy_loss(out.logprobs, old, batch.advantages, mask, **offered)]
        if batch.ref_logprobs is not None and not self.policy_loss.penalizes_kl:
            reference, estimator = batch.ref_logprobs, self.kl_estimator
            more = {"clamp": self.kl_clamp} | reduction
            if self.kl_importance_weight:
                more["importance_weight"] = policy_tokens(out.logprobs, old, batch.advantages, mask).ratio
            parts.append(kl_loss(out.logprobs, reference, mask, coef=kl_coef, estimator=estimator, **more))
        if bonus := self.entropy_coef + self.entropy_controller.applied:
            assert out.entropy is not None
            parts.append(entropy_bonus(out.entropy, mask, coef=bonus, **reduction))
        result = sum_losses(*parts)
        if self.kl_control.target is not None:
            metrics = {**metrics, "policy/kl_coef": torch.tensor(self.kl_coef)}
        return LossOutput(result.loss, {**result.metrics, **metrics})

    def aggregation_arguments(self, batch: Experience) -> dict[str, Any]:
        """Arguments of :func:`~rlhfkit.losses.aggregate` for the terms of the loss, exact over the optimizer step."""
        by_tokens = self.policy_loss.aggregation == "token-mean"
        return {
            "aggregation": self.policy_loss.aggregation,
            "denominator": batch.token_denominator if by_tokens else batch.sequence_denominator,
            "max_length": self.max_length,
        }

    def old_logprobs(self, batch: Experience, out: PolicyOutput) -> Tensor:
        """(B, T-1) log-probs before the iteration, which are the policy's own in its first update."""
        if batch.old_logprobs is not None:
            return batch.old_logprobs
        version = 0 if self._trainer is None else self.trainer.global_step
        if self.proximal == "recompute" or version == self._iteration_version:
            return out.logprobs.detach()
        return log_linear_proximal_logprobs(
            out.logprobs,
            batch.rollout_logprobs,
            batch.versions,
            version=version,
            proximal_version=self._iteration_version,
        )

    @torch.no_grad()
    def rollout_metrics(self, batch: Experience, out: PolicyOutput) -> dict[str, Tensor]:
        """Entropy, and the mismatch of the log-probs of engine and trainer for the same policy and tokens.

        NaN if the engine knows no log-probs (see ``RolloutEngine.configure_logprobs``).
        """
        metrics = mismatch_metrics(self.old_logprobs(batch, out), batch)
        if out.entropy is not None:
            metrics["policy/entropy"] = mean_metric(out.entropy, batch.action_mask)
        if out.rerouted is not None:
            metrics["policy/rerouted_fraction"] = out.rerouted
        return metrics

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Do nothing: ``RolloutCallback`` generates, scores and logs."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        """Log the metrics of the step, skip the policy's update after early stopping, and adapt the entropy bonus."""
        super().on_before_optimizer_step(optimizer)
        if self.entropy_control.target is not None:
            applied = self.entropy_controller.applied
            self.log_means({"policy/entropy_coef": torch.full((), applied, device=self.device)})
            self.entropy_controller.update(self)
        if self.kl_early_stopping is not None:
            stopped = self.kl_early_stopping.should_stop(self)
            self.log_means({"policy/kl_early_stopped": torch.full((), float(stopped), device=self.device)})
            if stopped:
                skip_update(self, "policy")

    def on_train_epoch_end(self) -> None:
        """Forget the old log-probs of the iteration that was trained on."""
        super().on_train_epoch_end()
        self.first_pass.reset()

    # ------------------------------------------------------------------ checkpoints

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Save whether early stopping is in effect, and old log-probs that later epochs of the iteration need."""
        super().on_save_checkpoint(checkpoint)
        if self.kl_early_stopping is not None:
            checkpoint["kl_early_stopped"] = self.kl_early_stopping.stopped
        if kept := self.first_pass.state_dict():
            checkpoint["first_pass_logprobs"] = kept
        checkpoint["entropy_control"] = self.entropy_controller.state_dict()
        checkpoint["iteration_version"] = self._iteration_version

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Continue with early stopping, and with the iteration's old log-probs."""
        super().on_load_checkpoint(checkpoint)
        if self.kl_early_stopping is not None:
            self.kl_early_stopping.stopped = checkpoint.get("kl_early_stopped", False)
        self.first_pass.load_state_dict(checkpoint.get("first_pass_logprobs", {}))
        self.entropy_controller.load_state_dict(checkpoint.get("entropy_control", [0.0, 0.0]))
        self._iteration_version = checkpoint.get("iteration_version", 0)
