"""``OnPolicyModule``: what all modules that learn from their own samples share.

Its constructor makes parts of its arguments; :meth:`OnPolicyModule.prepare` lets them complete an iteration's samples
before its first update; :meth:`OnPolicyModule.training_step` learns from one micro-batch of these.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, cast

from torch import Tensor

from rlhfkit.data.types import Experience
from rlhfkit.losses import Aggregation, LossOutput, mean_metric, weighted_metric
from rlhfkit.losses.aggregation import check_loss_output
from rlhfkit.models import LoRA, ModelLoading, PolicyOutput, policy_output
from rlhfkit.modules.base import PolicyModule
from rlhfkit.modules.on_policy.forward_passes import ForwardPasses
from rlhfkit.modules.on_policy.functions import AdvantageFunction, PolicyLoss, check_advantages
from rlhfkit.modules.on_policy.placed_models import PlacedModels
from rlhfkit.modules.on_policy.ranks import Ranks, local_rows
from rlhfkit.modules.optim import Optimization
from rlhfkit.parts import GivenPart, Part, Stage, arrange, describe, overriding, part_name, plain_value
from rlhfkit.validation import GivenFunction


class OnPolicyModule(PolicyModule):
    """A policy that learns from its own samples.

    A subclass overrides :meth:`advantages`, or a function is passed in. The loss is a policy loss (PPO's by default)
    and what parts add; a subclass overrides :meth:`loss` for another one.

    Args:
        model: Folder or hub name of the policy.
        lr: Peak learning rate (1e-6: TRL's and OpenRLHF's default).
        advantages: Function used in place of :meth:`advantages`, or its name (``"rloo_advantages"``,
            ``"my_package.my_function"``): of the iteration's :class:`~rlhfkit.data.Experience`, or of rewards (N,) and
            group ids (N,), see :class:`~rlhfkit.modules.on_policy.functions.AdvantageFunction`. Its rewards are those
            after parts of ``Stage.SHAPE`` and ``Stage.PENALIZE``.
        policy_loss: A function of :mod:`rlhfkit.losses`, your own of the same form
            ``(logprobs, old_logprobs, advantages, mask, *, weights, aggregation, denominator, max_length, ...)``, or
            its name: ``"gspo_loss"``, ``"my_package.my_loss"``. It gets the arguments that its signature names, also
            ``rollout_logprobs``, and keeps its own defaults unless another argument differs.
        policy_loss_arguments: More keyword arguments of the policy loss, such as the ``max_length`` (tokens) of the
            ``constant-length`` aggregation.
        clip_low: The ratio is clipped at 1 - clip_low from below; ``None``: the default of the policy loss.
        clip_high: The ratio is clipped at 1 + clip_high from above; ``None``: the default of the policy loss.
        aggregation: How token losses become one number, see :func:`~rlhfkit.losses.aggregate`; ``None``: the default of
            the policy loss.
        optimization: Optimizer and schedule of the learning rate, see :class:`~rlhfkit.Optimization`.
        lora: Train adapters, not the model's own weights, see :class:`~rlhfkit.LoRA`.
        loading: Technical options of the model, see :class:`~rlhfkit.ModelLoading`.
        parts: More features, each a :class:`~rlhfkit.Part`, or a function of an iteration's rows
            (:class:`~rlhfkit.data.Experience`) that is called before the updates and changes them; also their dotted
            names and, as in a configuration file, ``{"class_path": ..., "init_args": {...}}``. ``print(module)`` shows
            what they do when.

    Raises:
        ValueError: If an argument is out of range, or has no effect beside the others.
    """

    batch_types = (Experience,)
    without_dropout = True
    credit: Sequence[Part]
    """Parts that compute advantages, in order; a subclass may set them before this constructor is called. An overridden
    :meth:`advantages`, or a part among ``parts`` that writes advantages, takes their place."""

    def __init__(
        self,
        model: str,
        *,
        lr: float = 1e-6,
        advantages: GivenFunction | None = None,
        policy_loss: GivenFunction = "ppo_loss",
        policy_loss_arguments: Mapping[str, Any] | None = None,
        clip_low: float | None = None,
        clip_high: float | None = None,
        aggregation: Aggregation | None = None,
        optimization: Optimization | None = None,
        lora: LoRA | None = None,
        loading: ModelLoading | None = None,
        parts: Sequence[GivenPart] = (),
    ) -> None:
        super().__init__(model, lr=lr, optimization=optimization, lora=lora, loading=loading, parts=parts)
        self.ranks = Ranks(self)
        """Rows and sums of all ranks."""
        self.passes = ForwardPasses(self, self.loading.max_tokens_per_forward)
        """Forward passes over iterations."""
        self.placed = PlacedModels(self)
        """Models on machines of their own."""
        self.policy_loss = PolicyLoss(
            policy_loss, policy_loss_arguments, clip_low=clip_low, clip_high=clip_high, aggregation=aggregation
        )
        self.advantage_function = None if advantages is None else AdvantageFunction(advantages)
        """The function that was given as ``advantages``."""
        self.keep_plain(
            policy_loss=plain_value(self.policy_loss.function, "policy_loss"),
            advantages=plain_value(self.advantage_function, "advantages"),
        )
        self.attach_parts()

    # ------------------------------------------------------------------ parts

    def attach_parts(self) -> None:
        """Attach the parts, with those that any module that learns from its own samples has."""
        from rlhfkit.modules.parts.defaults import credit_parts, default_parts

        self.credit = credit_parts(self)
        self.own_parts = [*self.credit, *default_parts(self), *self.own_parts]
        super().attach_parts()

    def _assemble(self) -> None:
        """Attach the parts, and sort them into what is called when."""
        super()._assemble()
        self.outputs |= {"entropy"}  # which is logged
        self.policy_loss.check_parts(self.parts)
        inside = self.credit if self.overrides_advantages else ()  # called by super().advantages(), if at all
        order = arrange(part for part in self.parts if part not in inside)
        self.order = [part for part in order if overriding([part], "prepare")]
        """The parts that prepare an iteration, in order."""

    def extra_repr(self) -> str:
        """What prepares an iteration, in order, and what the loss consists of."""
        return describe(self.order, self.parts, self.policy_loss.name)

    # ------------------------------------------------------------------ before the updates of an iteration

    def prepare(self, experience: Experience) -> Experience:
        """Complete an iteration before its first update: rewards, log-probs, values, advantages. A collective.

        ``experience`` has this rank's rows of the iteration (``experience.own_rows``) and a summary of all rows
        (``experience.summary``); a group's samples may be on several ranks. There is at least one row, except on ranks
        that share micro-batches with others (``sequence_parallel_size``, ``tensor_parallel_size``). In one process, or
        without a summary, its rows are the whole iteration. The rewards of the returned copy are those before
        parts of ``Stage.SHAPE`` changed them, for the log.
        """
        scored = experience
        for begin in self.hooks["begin"]:
            begin(experience)
        for part in self.order:
            experience = part.prepare(experience)
            if not isinstance(experience, Experience):
                gave = type(experience).__name__
                raise TypeError(
                    f"{part_name(part)}.prepare returned {gave}: return rows, as dataclasses.replace makes them"
                )
            if part.stage == Stage.SCORE:
                scored = experience
        check_advantages(experience, self.policy_loss, self.order)
        return dataclasses.replace(
            experience,
            rewards=scored.rewards,
            token_rewards=scored.token_rewards,
            iteration=scored.iteration,
        ).with_columns(**{name: None for part in self.order for name in part.temporary})

    @local_rows
    def advantages(self, experience: Experience) -> Tensor:
        """Compute (B,) advantages, or (B, T-1) when tokens differ; 0 where the reward is missing. May be overridden.

        These are what the parts :attr:`credit` compute. ``experience`` has shaped and penalized rewards, and log-probs
        and values where they are needed. With several ranks an override is given the whole iteration, the same on every
        rank, which is gathered for it; one that is marked with :func:`~rlhfkit.local_rows` is given this rank's rows
        and the summary of all. ``super().advantages(experience)`` works with both.
        """
        for part in self.credit:
            experience = part.prepare(experience)
        if experience.advantages is None:
            raise NotImplementedError(f"{type(self).__name__} must override advantages(), or be given advantages=...")
        alike = all(part.of_samples for part in self.credit)
        return experience.advantages[:, 0] if alike else experience.advantages

    @property
    def overrides_advantages(self) -> bool:
        """Whether a subclass has :meth:`advantages` of its own, which are used in place of :attr:`credit`."""
        return type(self).advantages is not OnPolicyModule.advantages

    # ------------------------------------------------------------------ one micro-batch

    def training_step(self, batch: Experience, batch_idx: int) -> Tensor:
        """Compute the loss of one micro-batch of an iteration."""
        out = self.policy_output(batch)
        result = self.loss(batch, out)
        check_loss_output(f"{type(self).__name__}.loss", result)
        loss, metrics = result.loss, dict(result.metrics)
        for observe in self.observers:
            metrics |= observe(batch, out, self.old_logprobs(batch, out))
        for auxiliary_loss in self.hooks["auxiliary_loss"]:
            added = auxiliary_loss(batch, out)
            loss = loss + added.loss
            metrics |= {**added.metrics, "policy/loss": weighted_metric(result.loss, 1.0)}
        if out.entropy is not None:
            metrics["policy/entropy"] = mean_metric(out.entropy.detach(), batch.action_mask)
        self.log_means({"loss": loss.detach()})
        self.log_metrics(metrics, batch.action_mask.sum())
        return loss

    def policy_output(self, batch: Experience) -> PolicyOutput:
        """Run the policy: log-probs of the chosen tokens, and what parts need beside them."""
        for run in self.hooks["policy_output"]:
            return cast(PolicyOutput, run(batch))
        return policy_output(
            self.policy,
            batch,
            batch.action_mask,
            temperature=batch.temperature,
            entropy="entropy" in self.outputs,
            router_aux_loss=self.balances_routers,
            routing=batch.columns.get("routing"),
            values="values" in self.outputs,
        )

    def loss(self, batch: Experience, out: PolicyOutput) -> LossOutput:
        """Compute the policy's loss on one micro-batch of B sequences; override it for another objective."""
        if batch.advantages is None:
            raise NotImplementedError(f"{type(self).__name__} must override advantages(), or be given advantages=...")
        old, weights, metrics = self.old_logprobs(batch, out), None, dict[str, Any]()
        for weigh in self.hooks["weigh"]:
            factor, measured = weigh(batch, out, old)
            weights = factor if weights is None else factor * weights
            metrics |= measured
        result = self.with_terms(self.policy_loss(batch, out.logprobs, old, weights), batch, out, old)
        return result._replace(metrics={**result.metrics, **metrics})

    def old_logprobs(self, batch: Experience, out: PolicyOutput) -> Tensor:
        """(B, T-1) log-probs before the iteration, which are the policy's own in its first update."""
        if batch.old_logprobs is not None:
            return batch.old_logprobs
        for approximate in self.hooks["old_logprobs"]:
            return cast(Tensor, approximate(batch, out))
        return out.logprobs.detach()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Do nothing: ``RolloutCallback`` generates, scores and logs."""

    # ------------------------------------------------------------------ what RolloutCallback asks

    @property
    def uses_rollout_logprobs(self) -> bool:
        """Whether the loss needs the engine's log-probs; ``RolloutCallback`` checks that they can be compared."""
        reading = any("rollout_logprobs" in part.reads for part in self.parts)
        return reading or self.policy_loss.takes("rollout_logprobs")

    def correct_off_policy(self) -> bool:
        """Have samples of another policy corrected for, such as those of a quantized engine; returns whether it was."""
        from rlhfkit.modules.parts.defaults import add_correction

        return add_correction(self)

    @property
    def needs_reward(self) -> bool:
        """Whether ``RolloutCallback`` must have a reward: where a part reads it, and none of the module makes it."""
        made = self.scorer is not None or any("rewards" in part.creates for part in self.parts)
        return not made and any("rewards" in part.reads for part in self.parts)

    def check_group_size(self, group_size: int) -> None:
        """Raise ValueError if groups of this size teach nothing, as the parts say that compute advantages."""
        for part in self.parts:
            part.check_group_size(group_size)
