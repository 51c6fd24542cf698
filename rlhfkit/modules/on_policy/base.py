"""``OnPolicyModule``: what all modules that learn from their own samples share.

:meth:`OnPolicyModule.prepare` completes an iteration's samples before its first update;
:meth:`OnPolicyModule.training_step` learns from one micro-batch of them.
"""

import dataclasses
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn

from rlhfkit.data.types import Experience
from rlhfkit.losses import LossOutput, mean_metric
from rlhfkit.models import HeadLoss, PolicyOutput, policy_output
from rlhfkit.models.forward import unwrap
from rlhfkit.models.load import disable_dropout
from rlhfkit.models.routing import attach_routing
from rlhfkit.modules.on_policy.objective import PolicyLossModule
from rlhfkit.modules.on_policy.preparation.kl_control import KLEarlyStopping, skip_update
from rlhfkit.modules.on_policy.preparation.local_rows import own_part
from rlhfkit.modules.on_policy.preparation.placed_models import ask, pool_result
from rlhfkit.modules.on_policy.preparation.rewards import RewardedModule
from rlhfkit.modules.on_policy.preparation.token_selection import highest_entropies
from rlhfkit.modules.on_policy.update.engine_mismatch import mismatch_metrics
from rlhfkit.modules.on_policy.update.first_pass import FirstPassLogprobs
from rlhfkit.modules.on_policy.update.pretraining_text import PretrainingTextModule
from rlhfkit.protocols import epochs_of


class OnPolicyModule(PretrainingTextModule, PolicyLossModule):
    """A policy that learns from its own samples.

    A subclass overrides :meth:`advantages`, or a function is passed in. The loss is a policy loss (PPO's by default),
    optionally with a KL penalty towards the initial model, an entropy bonus, and the cross-entropy of pretraining text;
    a subclass overrides :meth:`loss` for another one.

    Args:
        model: Folder or hub name of the policy.
        lr: Peak learning rate (1e-6: TRL's and OpenRLHF's default).
        router_replay: In later updates of an iteration, send each token to the experts that the policy before the
            iteration chose, of which weights are computed anew (routing replay, GSPO: Zheng et al., 2025,
            arXiv:2507.18071, section 5.3). For mixtures of experts with our packed attention; takes 2 bytes for each
            choice of a token's layers, and no further forward pass.
        **kwargs: See :class:`~rlhfkit.modules.on_policy.objective.PolicyLossModule`,
            :class:`~rlhfkit.modules.on_policy.preparation.rewards.RewardedModule`, :class:`PolicyModule`, and
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

    def __init__(self, model: str, *, lr: float = 1e-6, router_replay: bool = False, **kwargs: Any) -> None:
        super().__init__(model, lr=lr, **kwargs)
        early_stop = self.kl_control.early_stop
        self.kl_early_stopping = None if early_stop is None else KLEarlyStopping(early_stop)
        self.router_replay = router_replay
        self.first_pass = FirstPassLogprobs()
        """Old log-probs of later epochs over an iteration, where no forward pass is made for them."""
        self._check_passes()

    def _check_passes(self) -> None:
        """Refuse options that need the forward pass of the old log-probs where there is none."""
        if self.proximal != "log-linear":
            return
        if self.router_replay:
            raise ValueError(
                "router_replay records which experts are chosen in the forward pass of the old log-probs, which "
                "proximal='log-linear' leaves out: give one of them"
            )
        if self.needs_old_logprobs or self.needs_sum_squares or self.kl_early_stopping is not None:
            raise ValueError(
                "proximal='log-linear' makes no forward pass for old log-probs, which a KL penalty in the reward, "
                "KLControl, a teacher's log-probs, and advantages with sums of squared probabilities compare with: use "
                "proximal='recompute'"
            )

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
        self.iteration_version = 0 if self._trainer is None else self.trainer.global_step
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
            experience,
            rewards=scored.rewards,
            token_rewards=scored.token_rewards,
            sum_squares=None,
            iteration=scored.iteration,
        )

    def add_logprobs(self, experience: Experience) -> Experience:
        """Add old and reference log-probs where they are needed. A collective."""
        pool = self.reference_pool
        asked = None if pool is None else ask(pool, "logprobs", self, experience)  # while the policy computes
        experience = self.add_old_logprobs(experience)
        if self.needs_reference:
            with self.reference_model() as reference:
                ref_logprobs = self.distributed_logprobs(reference, experience)
            experience = dataclasses.replace(experience, ref_logprobs=ref_logprobs)
        if asked is not None and pool is not None:
            experience = dataclasses.replace(experience, ref_logprobs=pool_result(asked, pool))
        return experience

    def add_old_logprobs(self, experience: Experience) -> Experience:
        """Add what the policy before the iteration makes of its tokens, where that is needed. A collective.

        The first update uses its own log-probs as old ones. Later epochs over the iteration need those of all rows:
        they are computed here, or :attr:`first_pass` keeps them where an epoch is one update. A choice of tokens by
        entropy, and advantages that ask for sums of squared probabilities, need a forward pass over all rows.
        """
        updates = experience.update if experience.iteration is None else experience.iteration.update  # of all ranks
        repeated = self._trainer is not None and epochs_of(self.trainer) > 1
        later = self.proximal == "recompute" and bool((updates > 0).any())
        share, squares = self.token_filter.top_entropy, self.needs_sum_squares
        wanted = self.needs_old_logprobs or later or (self.router_replay and repeated) or squares
        wanted = wanted and experience.old_logprobs is None
        everywhere = self.needs_old_logprobs or repeated or share is not None or squares
        rows = experience.update >= 0 if everywhere else experience.update > 0
        routing = self.router_replay and wanted
        if not (routing or squares or share is not None):
            if wanted:
                old_logprobs = self.distributed_logprobs(self.policy, experience, rows)
                experience = dataclasses.replace(experience, old_logprobs=old_logprobs)
            return experience
        found = self.distributed_statistics(
            self.policy, experience, rows, entropy=share is not None, sum_squares=squares, routing=routing
        )
        if wanted:
            experience = dataclasses.replace(experience, old_logprobs=found.logprobs, routing=found.routing)
        if share is not None and found.entropy is not None:
            trained = self.mask_truncated_samples(experience)
            chosen = highest_entropies(trained, found.entropy, share)
            experience = dataclasses.replace(experience, high_entropy=chosen)
        return dataclasses.replace(experience, sum_squares=found.sum_squares)

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

    def total_loss(self, batch: Experience, out: PolicyOutput) -> LossOutput:
        """Add the load-balancing loss of a mixture of experts to :meth:`loss`; subclasses add a critic's loss."""
        result = self.with_head_gradient(self.loss(batch, out), out)
        return self.with_router_loss(result, out.router_aux_loss, batch.action_mask)

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
        checkpoint["iteration_version"] = self.iteration_version

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Continue with early stopping, and with the iteration's old log-probs."""
        super().on_load_checkpoint(checkpoint)
        if self.kl_early_stopping is not None:
            self.kl_early_stopping.stopped = checkpoint.get("kl_early_stopped", False)
        self.first_pass.load_state_dict(checkpoint.get("first_pass_logprobs", {}))
        self.entropy_controller.load_state_dict(checkpoint.get("entropy_control", [0.0, 0.0]))
        self.iteration_version = checkpoint.get("iteration_version", 0)
