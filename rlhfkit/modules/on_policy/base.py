"""``OnPolicyModule``: what all modules that learn from their own samples share.

:meth:`OnPolicyModule.prepare` completes an iteration's samples before its first update;
:meth:`OnPolicyModule.training_step` learns from one micro-batch of them.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Literal

import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn

from rlhfkit.data.types import Experience
from rlhfkit.losses import (
    Aggregation,
    LossOutput,
    mean_metric,
    ppo_loss,
    sum_losses,
    weighted_metric,
)
from rlhfkit.models import PolicyOutput, policy_output
from rlhfkit.models.load import disable_dropout
from rlhfkit.modules.base import PolicyModule
from rlhfkit.modules.on_policy.advantages import check_advantages
from rlhfkit.modules.on_policy.forward_passes import ForwardPasses, two_tokens
from rlhfkit.modules.on_policy.functions import AdvantageFunction, GivenAdvantages, PolicyLoss
from rlhfkit.modules.on_policy.placed_models import PlacedModels
from rlhfkit.modules.on_policy.ranks import Ranks, local_rows
from rlhfkit.parts import Part, Stage, arrange, describe, overriding, part_name
from rlhfkit.roles import FrozenModel, ModelPool, ServedModel
from rlhfkit.trainer_parts import epochs_of
from rlhfkit.validation import check_number


class ModuleStep(Part):
    """What a module itself does with an iteration, in the order of the parts.

    Args:
        call: A method of the module, from rows to rows; ``None``: they are not changed.
        stage: When.
        reads: Fields of the rows that it needs.
        writes: Fields of the rows that it sets.
        temporary: Those of them that are dropped once the iteration is prepared.
    """

    def __init__(
        self,
        call: Callable[[Experience], Experience | None],
        stage: Stage,
        *,
        reads: Sequence[str] = (),
        writes: Sequence[str] = (),
        temporary: Sequence[str] = (),
    ) -> None:
        self.call, self.stage = call, stage
        self.reads, self.writes, self.temporary = tuple(reads), tuple(writes), tuple(temporary)
        self.label = call.__name__

    def prepare(self, rows: Experience) -> Experience:
        """Call the method."""
        found = self.call(rows)
        return rows if found is None else found


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
        policy_loss_arguments: More keyword arguments of the policy loss.
        clip_low: The ratio is clipped at 1 - clip_low from below; ``None``: the default of the policy loss.
        clip_high: The ratio is clipped at 1 + clip_high from above; ``None``: the default of the policy loss.
        aggregation: How token losses become one number, see :func:`~rlhfkit.losses.aggregate`; ``None``: the default of
            the policy loss.
        max_length: Tokens; the constant of the ``constant-length`` aggregation.
        entropy_coef: Weight of an :class:`~rlhfkit.modules.parts.entropy.EntropyBonus`;
            :class:`~rlhfkit.modules.parts.entropy.EntropyTarget` has one that follows the entropy.
        correction: Importance correction for differences between engine and trainer: a name of
            :data:`~rlhfkit.losses.CORRECTION_PRESETS` or arguments of :func:`~rlhfkit.losses.importance_weights`.
            ``None``: none, but ``"tis"`` if the engine is quantized or samples are replayed; ``"none"``: none with any
            engine. Not for policy losses that are given the engine's log-probs (``decoupled_ppo_loss``, ``dppo_loss``).
        proximal: Which log-probs the ratio is taken to in later updates of an iteration: ``"recompute"``: those of the
            policy before it, by a forward pass; ``"log-linear"``: an approximation without one, see
            :class:`~rlhfkit.modules.parts.old_policy.LogLinear`.
        reference: Where the reference model is, see :class:`~rlhfkit.modules.parts.reference.Reference`: ``None``: a
            frozen child, or the policy without its adapters, if a part needs one; a :class:`~rlhfkit.roles.ModelPool`:
            on machines of its own; a :class:`~rlhfkit.roles.ServedModel`: behind a running ``vllm serve``.
        reward_model: Scores samples, in addition to the callback's reward, see
            :class:`~rlhfkit.modules.parts.reward_model.RewardModel`: a folder or hub name, a
            :class:`~rlhfkit.roles.ModelPool`, or a mapping of several by name.
        reward_weights: Factors of the scores of several reward models, by name; 1 for those that are left out.
        mask_truncated: Learn nothing from answers that the length limit cut off, see
            :class:`~rlhfkit.modules.parts.rewards.MaskTruncated`; other parts of that file shape rewards.
        log_entropy: Compute the policy's entropy in each step, for the log and for subclasses.
        router_replay: Make a :class:`~rlhfkit.modules.parts.old_policy.RouterReplay`, for mixtures of experts.
        parts: More features, each a :class:`~rlhfkit.Part`, or a function of an iteration's rows
            (:class:`~rlhfkit.data.Experience`) that is called before the updates and changes them; also their dotted
            names and, as in a configuration file, ``{"class_path": ..., "init_args": {...}}``. ``print(module)`` shows
            what they do when.
        max_tokens_per_forward: Tokens that a rank computes in a forward pass over an iteration, see
            :class:`~rlhfkit.modules.on_policy.forward_passes.ForwardPasses`.
        **kwargs: See :class:`PolicyModule`.

    Raises:
        ValueError: If an argument is out of range, or has no effect beside the others.
    """

    batch_types = (Experience,)
    weighing: Sequence[Callable[..., tuple[Tensor, Mapping[str, Any]]]] = ()
    """:meth:`Part.weigh` of the parts that override it."""
    auxiliary_losses: Sequence[Callable[..., LossOutput]] = ()
    """:meth:`Part.auxiliary_loss` of the parts that override it."""
    approximations: Sequence[Callable[..., Tensor]] = ()
    """:meth:`Part.old_logprobs` of the part that overrides it."""

    provided: ClassVar[tuple[str, ...]] = (
        *("input_ids", "attention_mask", "action_mask", "lengths", "rollout_logprobs", "versions", "rewards"),
        *("token_rewards", "reward_parts", "group", "sample_index", "truncated", "update", "replayed"),
    )
    """Fields that the rows of an iteration come with, for :attr:`Part.reads`."""

    def __init__(
        self,
        model: str,
        *,
        lr: float = 1e-6,
        advantages: GivenAdvantages | None = None,
        policy_loss: str | Callable[..., LossOutput] = ppo_loss,
        policy_loss_arguments: Mapping[str, Any] | None = None,
        clip_low: float | None = None,
        clip_high: float | None = None,
        aggregation: Aggregation | None = None,
        max_length: int | None = None,
        entropy_coef: float = 0.0,
        correction: str | Mapping[str, Any] | None = None,
        proximal: Literal["recompute", "log-linear"] = "recompute",
        reference: ModelPool | ServedModel | None = None,
        reward_model: str | ModelPool | Mapping[str, str | ModelPool] | None = None,
        reward_weights: Mapping[str, float] | None = None,
        mask_truncated: bool = False,
        log_entropy: bool = True,
        router_replay: bool = False,
        max_tokens_per_forward: int = 16384,
        parts: Sequence[Part | Mapping[str, Any] | Callable[[Experience], Experience] | str] = (),
        **kwargs: Any,
    ) -> None:
        super().__init__(model, lr=lr, parts=parts, **kwargs)
        self.ranks = Ranks(self)
        """Rows and sums of all ranks."""
        self.passes = ForwardPasses(self, max_tokens_per_forward)
        """Forward passes over iterations."""
        self.placed = PlacedModels(self)
        """Models on machines of their own."""
        self.max_tokens_per_forward = max_tokens_per_forward
        self.advantage_function = None if advantages is None else AdvantageFunction(advantages)
        """The function that was given as ``advantages``."""
        self.hparams.update(advantages=None if self.advantage_function is None else self.advantage_function.plain())
        if not hasattr(self, "credit"):
            self.credit: list[Part] = []
            """Parts that compute advantages, in order; a subclass sets them before this constructor is called."""
            if advantages is not None:
                from rlhfkit.modules.parts.advantages import AdvantagesBy

                self.credit.append(AdvantagesBy(advantages))
        if reward_model is not None:
            from rlhfkit.modules.parts.reward_model import RewardModel

            scores = RewardModel(reward_model, reward_weights)
            self.own_parts.append(scores)
            self.hparams.update(reward_model=scores.plain()["init_args"]["models"])
        elif reward_weights:
            raise ValueError(
                f"reward_weights are those of reward_model={{name: ...}}, got {dict(reward_weights)} for none"
            )
        self.mask_truncated = mask_truncated
        if mask_truncated:
            from rlhfkit.modules.parts.rewards import MaskTruncated

            self.own_parts.append(MaskTruncated())
        if reference is not None:
            from rlhfkit.modules.parts.reference import Reference

            there = Reference(reference)
            self.own_parts.append(there)
            self.hparams.update(reference=there.plain()["init_args"]["pool"])
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
        self.entropy_coef = entropy_coef
        if entropy_coef:
            from rlhfkit.modules.parts.entropy import EntropyBonus

            self.own_parts.append(EntropyBonus(entropy_coef))
        self.correction = correction
        if correction not in (None, "none"):
            from rlhfkit.modules.parts.correction import Correction

            self.own_parts.append(Correction(correction))
        if proximal not in ("recompute", "log-linear"):
            raise ValueError(f"proximal must be recompute or log-linear, got {proximal!r}")
        self.proximal = proximal
        if proximal == "log-linear":
            from rlhfkit.modules.parts.old_policy import LogLinear

            self.own_parts.append(LogLinear())
        self.log_entropy = log_entropy
        self.hparams.update(policy_loss=self.policy_loss.name)
        self._check_loss()
        self.router_replay = router_replay
        if router_replay:
            from rlhfkit.modules.parts.old_policy import RouterReplay

            self.own_parts.append(RouterReplay())
        from rlhfkit.modules.parts.engine_mismatch import EngineMismatch

        self.own_parts.append(EngineMismatch())
        self.attach_parts()
        if reference is not None and not any("ref_logprobs" in step.reads for step in self._arranged()):
            raise ValueError(
                f"reference={type(self.reference_pool).__name__}(...) is a model that nothing asks: give a kl_coef "
                "(0.01 is OpenRLHF's) or KLPenalty, or leave reference out"
            )

    def _check_loss(self) -> None:
        """Compute the loss of one token, so that bad arguments raise before training."""
        probe = torch.zeros(1, 1)
        batch = dataclasses.replace(two_tokens(), advantages=probe)
        try:
            OnPolicyModule.loss(self, batch, PolicyOutput(probe, probe))
        except TypeError as error:
            raise ValueError(f"{self.policy_loss.name} does not take what it is given: {error}") from error

    def attach_parts(self) -> None:
        """Attach the parts; one that was given and writes advantages takes the place of those of :attr:`credit`."""
        if "advantages" in self.replaced:
            self.credit = []
        self.own_parts = [*self.credit, *self.own_parts]
        super().attach_parts()

    def add_part(self, part: Part) -> None:
        """Add a part after the module was made and before it is fitted; it is no hyperparameter.

        Raises:
            ValueError: If it does not fit the module.
        """
        self.parts.append(part)
        self._assemble()

    def correct_off_policy(self) -> bool:
        """Use truncated importance sampling for samples of another policy, unless ``correction`` was given.

        That of a quantized engine, or one that samples are replayed of.

        Policy losses that account for the engine's log-probs themselves, or take no weights, stay as they are.

        Returns:
            Whether the correction was set.
        """
        from rlhfkit.modules.parts.correction import Correction

        loss, there = self.policy_loss, any(isinstance(part, Correction) for part in self.parts)
        if there or self.correction is not None or loss.takes("rollout_logprobs") or not loss.takes("weights"):
            return False
        self.add_part(Correction("tis"))
        return True

    def configure_callbacks(self) -> list[Callback]:
        """The parts, with one that keeps old log-probs for later epochs over an iteration, where there are any."""
        if epochs_of(self.trainer) > 1 and self.recomputes_old_logprobs:
            from rlhfkit.modules.parts.old_policy import FirstPass

            if not any(isinstance(part, FirstPass) for part in self.parts):
                self.add_part(FirstPass())
        return super().configure_callbacks()

    def _assemble(self) -> None:
        """Attach the parts, and sort them into what is called when."""
        super()._assemble()
        self.weighing = overriding(self.parts, "weigh")
        self.auxiliary_losses = overriding(self.parts, "auxiliary_loss")
        self.approximations = overriding(self.parts, "old_logprobs")
        if len(self.approximations) > 1:
            names = [part_name(part) for part in self.parts if overriding([part], "old_logprobs")]
            raise ValueError(f"{' and '.join(names)} each have the log-probs that ratios are taken to: give one")
        in_loss = [part for part in self.parts if overriding([part], "weigh") or overriding([part], "term")]
        unknown = sorted(self.outputs - {"entropy", "values"})
        if unknown:
            raise ValueError(f"outputs of a part are entropy and values, got {', '.join(unknown)}")
        if self.weighing and not self.policy_loss.takes("weights"):
            names = [part_name(part) for part in in_loss if overriding([part], "weigh")]
            raise ValueError(f"{self.policy_loss.name} takes no weights, which {', '.join(names)} gives to tokens")
        self._begin = overriding(self.parts, "begin")
        self._arranged()

    @property
    def shaping(self) -> list[str]:
        """Names of the parts that change rewards."""
        return [part_name(part) for part in self.parts if "rewards" in part.writes and part.stage == Stage.SHAPE]

    @functools.cached_property
    def order(self) -> list[Part]:
        """The module's own steps and the parts that prepare an iteration, in order."""
        return [part for part in self._arranged() if overriding([part], "prepare")]

    def _arranged(self) -> list[Part]:
        inside = self.credit if self.overrides_advantages else ()  # called by super().advantages(), if at all
        return arrange(self.steps(), [part for part in self.parts if part not in inside], self.provided)

    def steps(self) -> list[Part]:
        """What the module itself does with an iteration, beside its parts; empty steps are left out."""
        by_method = self.overrides_advantages or not any("advantages" in part.writes for part in self.parts)
        steps = [
            ModuleStep(
                self.add_logprobs,
                Stage.POLICY,
                writes=("old_logprobs", "entropy", "routing"),
                temporary=("entropy",),
            ),
            ModuleStep(self.compute_advantages, Stage.CREDIT, writes=("advantages",)) if by_method else None,
        ]
        return [step for step in steps if step is not None]

    @property
    def needs_old_logprobs(self) -> bool:
        """Whether the old log-probs of all samples are needed before the first update."""
        return any("old_logprobs" in part.reads for part in self.parts)

    @property
    def reference_pool(self) -> FrozenModel | None:
        """The reference model, if it is on machines of its own."""
        return self.placed.by_role().get("reference", (None, None))[0]

    @property
    def has_reference(self) -> bool:
        """Whether a reference model is asked during training, here or elsewhere."""
        return any("ref_logprobs" in part.writes for part in self.parts)

    def extra_repr(self) -> str:
        """What prepares an iteration, in order, and what the loss consists of."""
        loss = [self.policy_loss.name.rpartition(".")[-1]]
        for method in ("term", "auxiliary_loss"):
            loss += [part_name(part) for part in self.parts if overriding([part], method)]
        return describe(self.order, loss)

    def build_policy(self) -> nn.Module:
        """Load the policy without dropout, which would make the ratio noisy."""
        policy = super().build_policy()
        disable_dropout(policy)
        return policy

    def parameter_groups(self) -> list[dict[str, Any]]:
        """Each trained child, with its learning rate."""
        rates = {name: {"lr": child.lr} for name, child in self._children.items() if child.lr is not None}
        return [group | rates.get(group["name"], {}) for group in super().parameter_groups()]

    def teardown(self, stage: str) -> None:
        """End the replicas of models on machines of their own."""
        super().teardown(stage)
        self.placed.close()

    # ------------------------------------------------------------------ what RolloutCallback asks

    @property
    def uses_rollout_logprobs(self) -> bool:
        """Whether the loss needs the engine's log-probs; ``RolloutCallback`` checks that they can be compared."""
        reading = any("rollout_logprobs" in part.reads for part in self.parts)
        return reading or self.policy_loss.takes("rollout_logprobs")

    @property
    def needs_entropy(self) -> bool:
        """Whether entropy is logged or rewarded."""
        return self.log_entropy or any("entropy" in part.outputs for part in self.parts)

    @property
    def needs_greedy_rewards(self) -> bool:
        """Whether samples are compared with the greedy answer to their prompt (ReMax), which is generated too."""
        return any(part.estimator.takes_greedy_rewards for part in self.parts if hasattr(part, "estimator"))

    @property
    def _scorer(self) -> Any:
        """The part that scores samples by models of the module, if there is one."""
        return next((part for part in self.parts if hasattr(part, "parts_of")), None)

    @property
    def reward_models(self) -> dict[str, str | ModelPool]:
        """The reward models, by name; a single one is called ``""``."""
        return {} if self._scorer is None else dict(self._scorer.by_name)

    @property
    def scores_samples(self) -> bool:
        """Whether there is a reward model, whose scores ``RolloutCallback`` adds to the rewards of samples."""
        return self._scorer is not None

    @property
    def needs_reward(self) -> bool:
        """Whether ``RolloutCallback`` must have a reward."""
        return self._scorer is None

    def reward_model_parts(self, experience: Experience | None) -> dict[str, Tensor]:
        """(B,) sum of weighted scores, as ``model``, and with several reward models each. A collective."""
        found: dict[str, Tensor] = self._scorer.parts_of(experience)
        return found

    def check_group_size(self, group_size: int) -> None:
        """Raise ValueError if groups of this size teach nothing, as the parts say that compute advantages."""
        for part in self.parts:
            if callable(check := getattr(part, "check_group_size", None)):
                check(group_size)

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
        for begin in self._begin:
            begin(experience)
        for part in self.order:
            experience = part.prepare(experience)
            if part.stage == Stage.SCORE:
                scored = experience
        check_advantages(experience, self.policy_loss, self._source_of_advantages())
        return dataclasses.replace(
            experience,
            rewards=scored.rewards,
            token_rewards=scored.token_rewards,
            iteration=scored.iteration,
        ).with_columns(**{name: None for part in self.order for name in part.temporary})

    def add_logprobs(self, experience: Experience) -> Experience:
        """Add what the policy before the iteration makes of its tokens, where that is needed. A collective.

        The first update uses its own log-probs as old ones. Later epochs over the iteration need those of all rows:
        they are computed here, or a part keeps them where an epoch is one update. Parts that read the
        entropy before the updates need a forward pass over all rows.
        """
        updates = experience.update if experience.iteration is None else experience.iteration.update  # of all ranks
        repeated = self._trainer is not None and epochs_of(self.trainer) > 1
        later = self.recomputes_old_logprobs and bool((updates > 0).any())
        read = {name for part in self.parts for name in part.reads}
        wanted = self.needs_old_logprobs or later or ("routing" in read and repeated)
        wanted = wanted and experience.old_logprobs is None
        everywhere = self.needs_old_logprobs or repeated or "entropy" in read
        rows = experience.update >= 0 if everywhere else experience.update > 0
        routing = "routing" in read and wanted
        if not (routing or "entropy" in read):
            if wanted:
                old_logprobs = self.passes.logprobs(self.policy, experience, rows)
                experience = dataclasses.replace(experience, old_logprobs=old_logprobs)
            return experience
        found = self.passes.statistics(self.policy, experience, rows, entropy="entropy" in read, routing=routing)
        if wanted:
            experience = dataclasses.replace(experience, old_logprobs=found.logprobs)
            experience = experience.with_columns(routing=found.routing)
        return experience.with_columns(entropy=found.entropy)

    def compute_advantages(self, experience: Experience) -> Experience:
        """Add those of :meth:`advantages`, which a subclass may have overridden."""
        advantages = self.ranks.advantages_by(self.advantages, experience)
        if advantages.dim() == 1:
            advantages = advantages[:, None].expand_as(experience.action_mask)
        return dataclasses.replace(experience, advantages=advantages)

    @local_rows
    def advantages(self, experience: Experience) -> Tensor:
        """Compute (B,) advantages, or (B, T-1) when tokens differ; 0 where the reward is missing. May be overridden.

        These are what the parts :attr:`credit` compute. ``experience`` has shaped and penalized rewards, and log-probs
        and values where they are needed. With several ranks an override is given the whole iteration, the same on every
        rank, which is gathered for it; one that is marked with :func:`~rlhfkit.local_rows` is given this rank's rows
        and the summary of all. ``super().advantages(experience)`` works with both.
        """
        if not self.credit:
            raise NotImplementedError(f"{type(self).__name__} must override advantages(), or be given advantages=...")
        for part in self.credit:
            experience = part.prepare(experience)
        assert experience.advantages is not None
        alike = all(getattr(part, "of_samples", False) for part in self.credit)
        return experience.advantages[:, 0] if alike else experience.advantages

    @property
    def overrides_advantages(self) -> bool:
        """Whether a subclass has :meth:`advantages` of its own, which are used in place of :attr:`credit`."""
        return type(self).advantages is not OnPolicyModule.advantages

    def _source_of_advantages(self) -> str:
        """What computed advantages, for messages."""
        if self.advantage_function is not None:
            return f"advantages={self.advantage_function.name}"
        given = [part for part in self.parts if "advantages" in part.writes and "advantages" not in part.reads]
        return part_name(given[0]) if given and not self.overrides_advantages else f"{type(self).__name__}.advantages()"

    # ------------------------------------------------------------------ one micro-batch

    def training_step(self, batch: Experience, batch_idx: int) -> Tensor:
        """Compute the loss of one micro-batch of an iteration."""
        out = self.policy_output(batch)
        result = self.with_router_loss(self.loss(batch, out), out.router_aux_loss, batch.action_mask)
        loss, metrics = result.loss, dict(result.metrics)
        for observe in self.observers:
            metrics |= observe(batch, out, self.old_logprobs(batch, out))
        for auxiliary_loss in self.auxiliary_losses:
            added = auxiliary_loss(batch, out)
            loss = loss + added.loss
            metrics |= {**added.metrics, "policy/loss": weighted_metric(result.loss, 1.0)}
        self.log_means({"loss": loss.detach()})
        self.log_metrics(metrics | self.policy_metrics(batch, out), batch.action_mask.sum())
        return loss

    def policy_output(self, batch: Experience) -> PolicyOutput:
        """Run the policy: log-probs of the chosen tokens, and entropy where it is logged or rewarded."""
        return policy_output(
            self.policy,
            batch,
            batch.action_mask,
            temperature=batch.temperature,
            entropy=self.needs_entropy,
            router_aux_loss=self.balances_routers,
            routing=batch.columns.get("routing"),
            values="values" in self.outputs,
        )

    def loss(self, batch: Experience, out: PolicyOutput) -> LossOutput:
        """Compute the policy's loss on one micro-batch of B sequences; override it for another objective."""
        assert batch.advantages is not None
        old = self.old_logprobs(batch, out)
        offered: dict[str, Any] = {
            "weights": None,
            "rollout_logprobs": batch.rollout_logprobs,
            "denominator": self.aggregation_arguments(batch)["denominator"],
        }
        metrics: Mapping[str, Tensor] = {}
        for weigh in self.weighing:
            factor, measured = weigh(batch, out, old)
            offered["weights"] = factor if offered["weights"] is None else factor * offered["weights"]
            metrics = {**metrics, **measured}
        policy = self.policy_loss(out.logprobs, old, batch.advantages, batch.action_mask, **offered)
        result = sum_losses(policy, *(term(batch, out, old) for term in self.terms))
        return LossOutput(result.loss, {**result.metrics, **metrics})

    def aggregation_arguments(self, batch: Experience) -> dict[str, Any]:
        """Arguments of the terms of the loss, exact over the optimizer step.

        ``aggregation`` (:func:`~rlhfkit.losses.aggregate` itself calls it ``mode``), ``denominator``, ``max_length``.
        """
        aggregation = self.policy_loss.aggregation
        # As aggregate() counts: the divisor of constant-length does not depend on how many rows are trained on.
        counts = {"token-mean": batch.token_denominator, "constant-length": batch.row_denominator}
        return {
            "aggregation": aggregation,
            "denominator": counts.get(aggregation, batch.sequence_denominator),
            "max_length": self.max_length,
        }

    def old_logprobs(self, batch: Experience, out: PolicyOutput) -> Tensor:
        """(B, T-1) log-probs before the iteration, which are the policy's own in its first update."""
        if batch.old_logprobs is not None:
            return batch.old_logprobs
        return self.approximations[0](batch, out) if self.approximations else out.logprobs.detach()

    @property
    def recomputes_old_logprobs(self) -> bool:
        """Whether a forward pass gives the old log-probs of later updates, and no part approximates them."""
        return not self.approximations

    @torch.no_grad()
    def policy_metrics(self, batch: Experience, out: PolicyOutput) -> dict[str, Tensor]:
        """The policy's entropy and, where experts are replayed, the share of choices that would be others now."""
        metrics: dict[str, Tensor] = {}
        if out.entropy is not None:
            metrics["policy/entropy"] = mean_metric(out.entropy, batch.action_mask)
        if out.rerouted is not None:
            metrics["policy/rerouted_fraction"] = out.rerouted
        return metrics

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Do nothing: ``RolloutCallback`` generates, scores and logs."""
