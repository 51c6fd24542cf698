"""``RolloutCallback``: the loop of reinforcement learning, as hooks of Lightning's loop.

One iteration is one Lightning epoch: :meth:`RolloutCallback.collect` syncs weights, collects groups (draw, generate,
score, select), lets the module prepare them, and splits them into micro-batches; Lightning's loop learns from these.
"""

import dataclasses
import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import lightning as L
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor

from rlhfkit.argument_names import AnswersNames
from rlhfkit.callbacks.rollout.checks import (
    check_learner,
    check_prompts,
    check_reward,
    check_sizes,
    check_whole_iterations,
)
from rlhfkit.callbacks.rollout.micro_batching import IterationPlanner, MicroBatches
from rlhfkit.callbacks.rollout.part import RolloutPart, make_rollout_part
from rlhfkit.callbacks.rollout.parts import default_parts, parts_of
from rlhfkit.callbacks.rollout.sharing import SharedIteration, iteration_metrics, share_copies, share_iteration
from rlhfkit.callbacks.rollout.source import Ask, GroupCollector, Source
from rlhfkit.callbacks.rollout.timing import Timing, slowest
from rlhfkit.data.exchange import gather_columns
from rlhfkit.data.types import Experience, Prompt, Sample
from rlhfkit.distributed import cpu_group, run_on_all_ranks, true_on_all_ranks
from rlhfkit.models.load import base_model_name, precision_dtype
from rlhfkit.parts import overriding
from rlhfkit.protocols import STATES_OF_RANKS, HasChatTemplate
from rlhfkit.rewards.base import Reward, check_is_reward, mean_metrics, reward_metrics
from rlhfkit.rollout.collector import CollectedGroups
from rlhfkit.rollout.engine import DrainableWeights, RolloutEngine, SamplingSpec
from rlhfkit.rollout.errors import WeightsNeededError
from rlhfkit.trainer_parts import (
    callbacks_of,
    datamodule_of,
    learner_of,
    policy_of,
    profiler_of,
    prompts_of,
)
from rlhfkit.validation import check_number, options

if TYPE_CHECKING:
    from rlhfkit.rollout.groups import AnyGroupFunction, GroupRunner
    from rlhfkit.rollout.weight_sync.source import ModuleWeights

T = TypeVar("T")
P = TypeVar("P", bound=RolloutPart)

log = logging.getLogger(__name__)


class RolloutCallback(Callback, metaclass=AnswersNames):
    """Rollouts for modules that learn from their own samples.

    Put it before callbacks that save checkpoints in ``on_train_batch_end``, so that the saved prompt cursor is behind
    the iteration (Lightning moves ``ModelCheckpoint`` to the end itself).

    Example::

        RolloutCallback(reward=math_match, engine=VLLMPool(num_engines=2), sampling=SamplingSpec(group_size=8))

    Args:
        reward: Any callable that takes samples and returns one number (or ``None``: could not be scored) for each,
            sync or async; see :mod:`rlhfkit.rewards`. ``None``: for modules that need no reward (distillation).
        engine: What generates; ``None``: a :class:`~rlhfkit.rollout.local.engine.LocalEngine` in this process.
        group: Makes the samples of a prompt, ``async def group(prompt, size, sampler) -> list[Sample]`` with a
            :class:`~rlhfkit.rollout.GroupSampler`, or an object such as :class:`~rlhfkit.Episodes`; see
            ``docs/engines.md``. ``None``: they are ``group_size`` completions.
        sampling: How to sample in training.
        parts: Features, each with arguments of its own, such as :class:`~rlhfkit.DynamicSampling` or
            :class:`~rlhfkit.Ahead`; those that wrap the source of groups do so in this order, from the inside to the
            outside. A mapping is ``{"class_path": ..., "init_args": {...}}``. Without being told a run has
            :class:`~rlhfkit.callbacks.Validation`, :class:`~rlhfkit.callbacks.Probe`,
            :class:`~rlhfkit.callbacks.Alarms` and, if an engine shares the GPUs of the training ranks,
            :class:`~rlhfkit.callbacks.SharedDevices`; one that is given takes the place of the default one of its
            class. ``rlhfkit parts`` lists all.
        rollout_timeout: Seconds that one iteration's samples may take, where they are waited for: on several ranks, or
            when they are made beside training.

    Raises:
        TypeError: If ``reward`` cannot be called, ``engine`` is not a :class:`~rlhfkit.rollout.RolloutEngine`,
            ``group`` is not async, or one of ``parts`` is no part.
        ValueError: If a number is out of range, or the engine cannot do what a part needs.
    """

    def __init__(
        self,
        reward: Reward | Callable[[Sequence[Sample]], Any] | None = None,
        *,
        engine: RolloutEngine | None = None,
        group: "AnyGroupFunction | None" = None,
        sampling: SamplingSpec | None = None,
        parts: Sequence[RolloutPart | Mapping[str, Any] | str] = (),
        rollout_timeout: float = 7200.0,
    ) -> None:
        if reward is not None:
            check_is_reward("reward", reward)
        if engine is None:
            from rlhfkit.rollout.local.engine import LocalEngine

            engine = LocalEngine()
        if not isinstance(engine, RolloutEngine):
            raise TypeError(
                f"engine must implement rlhfkit.rollout.RolloutEngine, got {type(engine).__name__}: LocalEngine() and "
                "VLLMPool(num_engines=2) do"
            )
        check_number("rollout_timeout", rollout_timeout, above=0, why="it is in seconds")
        self.reward = reward
        self.engine = engine
        self.sampling = options(SamplingSpec, sampling)
        self.rollout_timeout = rollout_timeout
        self.timing = Timing()
        """How long each part of each iteration took on this rank; ``timing.write_trace(path)`` writes a trace of it."""
        self.groups = _group_runner(engine, group)
        """Makes groups by ``group``; ``None``: the engine does."""
        self.engines: Sequence[RolloutEngine] = (engine, *(() if self.groups is None else self.groups.function.engines))
        """What generates; the first is the policy's."""
        self.collector = GroupCollector(engine, reward, self.timing, rollout_timeout, self.groups)
        given = [make_rollout_part(part) for part in parts]
        kinds = [type(part) for part in given]
        self.parts = [*given, *(part for part in default_parts(self.engines) if type(part) not in kinds)]
        """What this run has besides drawing, generating, scoring and learning."""
        numbers = Counter[type]()
        for part in self.parts:
            part.number = numbers[type(part)]
            numbers[type(part)] += 1
            part.attach(self)
        self.overlaps = any(part.overlaps for part in self.parts)
        """Whether the engine generates while the policy learns."""
        self._of_module: list[RolloutPart] = []  # what the module of the run needs
        self.source: Source = self.collector
        """Where the groups of an iteration come from: the collector, and around it what the parts of a run make of it;
        complete after ``setup``."""
        self._sampling_source: Source = self.collector
        self.sync_metrics: Mapping[str, float] = {}
        """What the engine logs of the last weight sync, the same on every rank."""
        self._sent: _Sent | None = None  # to the engine, in this run
        self.planner: IterationPlanner
        """Plans micro-batches; made in ``setup``."""
        self._sampling = self.sampling  # of the run
        self.iteration = 0
        self.samples: list[Sample] = []
        """The samples of the current iteration that this rank generated, now or for an earlier one, with rewards."""
        self.sample_rows: list[int] = []
        """Which row of the iteration each of :attr:`samples` is."""
        self.validation_samples: list[Sample] = []
        """The samples of the last validation that this rank generated."""
        self.mean_advantages: Tensor | None = None
        """(N,) float64, mean advantage of each row of the current iteration, of all ranks; ``None``: there is none."""
        self._trainer: L.Trainer | None = None
        self._micro_batches: MicroBatches | None = None
        self._inside_iteration = False  # an iteration was collected and training on it is not finished
        self._after: dict[str, Any] | None = None  # where the prompts of the next iteration begin
        self._metrics: dict[str, float] = {}
        self._saved_states: list[Mapping[str, Any]] | None = None  # of other ranks, in a checkpoint of another number

    @classmethod
    def of(cls, trainer: L.Trainer) -> "RolloutCallback":
        """Return the callback of a Trainer; raises TypeError if it has none."""
        for callback in callbacks_of(trainer):
            if isinstance(callback, cls):
                return callback
        raise TypeError("this callback reads the samples of a RolloutCallback: add one to Trainer(callbacks=[...])")

    def part(self, kind: type[P]) -> P | None:
        """Return the part of a class, the first of several; ``None``: there is none."""
        return next((part for part in self.parts if isinstance(part, kind)), None)

    @property
    def max_staleness(self) -> int | None:
        """Iterations by which tokens may be older than the policy that learns from them; ``None``: any number."""
        ages = [part.staleness for part in self.parts]
        return None if None in ages else sum(age or 0 for age in ages)

    # ------------------------------------------------------------------ one iteration, from top to bottom

    def collect(self) -> Sequence[Experience]:
        """Return this rank's micro-batches of one new iteration, in order; the loader calls it on every rank."""
        trainer = self._attached()
        self.samples, self._micro_batches = [], None  # frees the last iteration
        self.sync_weights()
        policy_version = trainer.global_step
        for begin in self._hooks("before_collect"):
            begin(trainer, self.iteration)
        collected = self.collect_groups()
        shared = self.share(collected)
        with profiler_of(trainer).profile("rollout.prepare"), self.timing.record("prepare", self.iteration):
            experience = learner_of(trainer).prepare(shared.experience)
        if not isinstance(experience, Experience):
            name = type(trainer.lightning_module).__name__
            raise TypeError(
                f"{name}.prepare returned {type(experience).__name__}: return what super().prepare() returns"
            )
        for note in self._hooks("after_prepare"):
            note(trainer, self.iteration)
        self._metrics = self._iteration_metrics(shared, experience, policy_version)
        experience = share_copies(experience, shared.plan, group=cpu_group())
        planned = shared.plan.micro_batches[trainer.global_rank]
        self._micro_batches = MicroBatches(experience, planned, shared.averaged, group=cpu_group())
        self._after = collected.after
        self._inside_iteration = True
        return self._micro_batches

    def sync_weights(self) -> None:
        """Give the engine the current weights, if it has others, and probe that they arrived. A collective."""
        trainer = self._attached()
        with ExitStack() as allowed:
            for updating in self._hooks("updating_weights"):
                allowed.enter_context(updating(trainer))
            with self.timing.record("weight_sync", self.iteration):
                self._sync_weights(trainer)

    def _sync_weights(self, trainer: L.Trainer) -> None:
        """Load the weights of ``global_step`` unless the engine has them; it can generate then. A collective."""
        version = trainer.global_step
        if true_on_all_ranks(self.engine.version == version):
            self._call("before_generate", trainer)  # it may sleep during training, with its weights
            return
        with profiler_of(trainer).profile("rollout.sync_weights"):
            sent = self._sent = self._sent or self._choose(trainer)
            weights = DrainableWeights(sent.weights, why_copied=sent.why_copied)
            self.engine.configure_weights(weights)
            self._call("before_start", trainer)
            run_on_all_ranks(lambda: self._start_engines(sent))
            self._call("after_start", trainer)
            self.sync_metrics = run_on_all_ranks(lambda: self._load(weights, version))[0]
        self._call("after_load", trainer)
        self._call("before_generate", trainer)
        self._call("after_sync", trainer)

    def _choose(self, trainer: L.Trainer) -> "_Sent":
        """Decide what is sent in this run, and what the engine computes with."""
        from rlhfkit.rollout.weight_sync.source import ModuleWeights

        module, dtype = policy_of(trainer), precision_dtype(trainer.precision, compute=True)
        weights = ModuleWeights(module.policy, dtype=dtype)
        reasons = [reason(trainer) for reason in self._hooks("why_copied")]
        why_copied = next((one for one in reasons if one is not None), None) or weights.why_copied()
        how = {"dtype": dtype, "trust_remote_code": module.trust_remote_code}
        return _Sent(weights, why_copied, base_model_name(module.model_name), how)

    def _start_engines(self, sent: "_Sent") -> None:
        self.engine.start(sent.model, **sent.how)
        if self.groups is not None:
            self.groups.function.start(self.engine, sent.model, **sent.how)

    def _load(self, weights: DrainableWeights, version: int) -> Mapping[str, float]:
        try:
            self.engine.load(weights, version)
        finally:
            weights.drain()
        return dict(self.engine.sync_metrics())

    def collect_groups(self) -> CollectedGroups:
        """Draw prompts, generate, score and select, this rank its share. Called on every rank."""
        trainer, sampling = self._attached(), self._sampling
        wanted = self.planner.shape.sequences // sampling.group_size
        with profiler_of(trainer).profile("rollout.collect_groups"):
            return self.source.collect(Ask(trainer, self.iteration, wanted, sampling))

    def share(self, collected: CollectedGroups) -> SharedIteration:
        """Share numbers of all samples with all ranks, and move rows to the ranks that train on them. A collective."""
        trainer = self._attached()
        temperature = self._sampling.temperature if collected.temperature is None else collected.temperature
        with self.timing.record("share", self.iteration):
            shared = share_iteration(
                collected,
                lambda summary: self.planner.plan(summary, self.iteration),
                group_size=self.group_size,
                temperature=temperature or 1.0,
                rank=trainer.global_rank,
                world_size=trainer.world_size,
                group=cpu_group(),
            )
        if shared.other_sizes:
            check_sizes(learner_of(trainer), shared.other_sizes, self.group_size, len(collected.prompts))
        self.samples, self.sample_rows = shared.samples, shared.rows
        return shared

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Move the prompt cursor after the iteration's last micro-batch.

        Not in ``on_train_epoch_end``: a checkpoint saved between the two hooks resumes after that one.
        """
        if trainer.is_last_batch:
            assert self._after is not None
            prompts_of(trainer).set_cursor(self._after)
            self.iteration += 1
            self._inside_iteration = False
            for end in self._hooks("end_iteration"):
                end(self.iteration)

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Log the iteration and sync the new weights."""
        finished = self.iteration if self._inside_iteration else self.iteration - 1  # max_steps ends a run inside one
        # The numbers are the same on every rank; sync_dist only tells Lightning so.
        pl_module.log_dict(self._metrics, sync_dist=True)
        pl_module.log_dict(slowest(run_on_all_ranks(lambda: self.timing.metrics(finished))), sync_dist=True)
        for logged in self._hooks("logged"):
            logged(trainer, finished)
        if "rollout/reward" in self._metrics:
            pl_module.log("reward", self._metrics["rollout/reward"], prog_bar=True, logger=False, sync_dist=True)
        if not any(defers(trainer) for defers in self._hooks("defers_sync")):
            self.sync_weights()

    # ------------------------------------------------------------------ parts of an iteration

    @property
    def experience(self) -> Experience | None:
        """The rows of the current iteration that this rank trains on, as prepared by the module, padded anew at each
        read; ``None`` before the first iteration and after a resume inside one.
        """
        return None if self._micro_batches is None else self._micro_batches.rows.padded()

    @property
    def inside_collected_iteration(self) -> bool:
        """Whether :attr:`samples` are those of the iteration that is trained on: false after a resume inside one."""
        return self._micro_batches is not None

    @property
    def replaced(self) -> list[Sample]:
        """Samples of this rank in the current iteration that others have taken the place of."""
        return [sample for part in self.parts for sample in part.replaced]

    @property
    def group_size(self) -> int:
        """Samples per prompt in training."""
        return self.sampling.group_size

    def batches_per_iteration(self) -> int:
        """Micro-batches that :meth:`collect` gives this rank, or the smallest number with a cap of tokens."""
        self._attached()
        return self.planner.shape.micro_batches_per_rank

    def _with_weights(self, generate: Callable[[], T]) -> T:
        """Generate; if engines lose their weights meanwhile, sync and generate again. A collective.

        Each sample has its own seed, so samples are the same. Engines restart a limited number of times, then raise.
        """
        while True:
            try:
                return generate()
            except WeightsNeededError as error:
                log.warning(
                    "weights are synced and sampling starts again, because engines lost their weights: %s", error
                )
            self.engine.version = None
            self.sync_weights()

    def _iteration_metrics(
        self, shared: SharedIteration, experience: Experience, policy_version: int
    ) -> dict[str, float]:
        """What is logged of an iteration that was just prepared. A collective."""
        reward, scored = self.reward, bool(shared.summary.reward_parts)
        silent = self._share_advantages(experience, len(shared.summary))
        metrics = iteration_metrics(shared, silent=silent, rewarded=reward is not None or scored)
        if reward is not None and bool(shared.summary.rewards.isnan().all()) and self._attached().is_global_zero:
            log.warning(
                "iteration %d: the reward returned None for all %d samples, so nothing is learned from them; check "
                "what it cannot score",
                *(self.iteration, len(shared.summary)),
            )
        metrics |= self.sync_metrics
        if reward is not None:
            metrics |= mean_metrics(run_on_all_ranks(lambda: reward_metrics(reward)))
        for measure in self._hooks("metrics"):
            metrics |= measure(shared, policy_version)
        return metrics

    def _share_advantages(self, experience: Experience, total: int) -> Tensor | None:
        """Set :attr:`mean_advantages`; returns (N,) whether all advantages of a row are 0. A collective."""
        self.mean_advantages = None
        if experience.advantages is None:
            return None
        chosen = experience.action_mask
        own = {
            "mean": (experience.advantages * chosen).sum(-1) / chosen.sum(-1).clamp(min=1),
            "silent": ~(experience.advantages != 0).any(-1),
        }
        columns = gather_columns(own, experience.own_rows, total, group=cpu_group())
        self.mean_advantages = columns["mean"]
        return columns["silent"] != 0

    # ------------------------------------------------------------------ validation

    def on_validation_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Have parts look at the prompts of a validation batch."""
        first = batch_idx == 0 and dataloader_idx == 0
        if first:
            self.validation_samples = []
        for validate in self._hooks("validate"):
            validate(trainer, batch, first=first)

    def sample(self, prompts: Sequence[Prompt], ways: Mapping[str, SamplingSpec]) -> dict[str, list[Sample]]:
        """Generate and score samples with the current policy, not to be trained on. A collective.

        Args:
            prompts: Those of all ranks, the same on every rank.
            ways: How to sample, by name.

        Returns:
            This rank's samples by name, also in :attr:`validation_samples`.
        """
        trainer = self._attached()
        self.sync_weights()
        with ExitStack() as stack:
            for paused in self._hooks("paused"):
                stack.enter_context(paused(trainer))
            sampled = self._with_weights(
                lambda: {
                    name: self.collector.sample(trainer, prompts, sampling, iteration=-1)
                    for name, sampling in ways.items()
                }
            )
        for samples in sampled.values():
            for add in self._hooks("add_scores"):
                add(trainer, samples, -1)
            self.validation_samples += samples
        return sampled

    def on_validation_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Have parts log what they have found in all batches."""
        for end in self._hooks("end_validation"):
            end(trainer)

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Let engines on the ranks' GPUs make room for training."""
        self.end_generating(trainer)

    def end_generating(self, trainer: L.Trainer) -> None:
        """Have the engines sleep until the next sync, unless they generate while the policy learns. A collective."""
        if self.overlaps:
            return
        for engine in self.engines:
            engine.sleep()
        for end in self._hooks("after_generate"):
            end(trainer, self.iteration)

    # ------------------------------------------------------------------ start and end

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Check that module, data and sampling fit together, before anything is loaded."""
        if trainer is not self._trainer:
            for clear in self._hooks("clear"):
                clear()
        self._trainer = trainer
        if stage not in ("fit", "validate"):
            return
        self._inside_iteration = False
        self.engine.version = None  # equal steps of two runs, or of two checkpoints, are not equal weights
        self._sent, self.sync_metrics = None, {}
        prompts_of(trainer)
        check_reward(trainer, self.reward, fit=stage == "fit")
        module = policy_of(trainer)
        self.engine.check_model(module.model_name, trust_remote_code=module.trust_remote_code)
        data = datamodule_of(trainer)
        template = data.chat_template_kwargs if isinstance(data, HasChatTemplate) else None
        self.engine.configure_tokenizer(module.tokenizer, template)
        if self.groups is not None:
            self.groups.configure(
                module.tokenizer,
                template,
                module.model_name,
                trust_remote_code=module.trust_remote_code,
                score=None if self.reward is None else partial(self.collector.ask_reward, trainer),
            )
        self.collector.forget_module()
        self._of_module = parts_of(module)
        for part in self._of_module:
            part.attach(self)
        for prepare in self._hooks("setup"):
            prepare(trainer)
        if stage == "fit":
            self._check_fit(trainer)

    def _check_fit(self, trainer: L.Trainer) -> None:
        self._sampling = self.sampling
        if trainer.fast_dev_run:  # type: ignore[attr-defined]  # set outside its class
            few = min(self.sampling.max_new_tokens, 8)
            self._sampling = dataclasses.replace(self.sampling, max_new_tokens=few, min_new_tokens=0)
        check_prompts(trainer, policy_of(trainer), self.collector.source, self._sampling)
        module = learner_of(trainer)
        for check in self._hooks("check"):
            check(trainer)
        check_learner(
            module, self.engine, self.sampling, rewarded=self.reward is not None, source=self.collector.source
        )
        if self.groups is not None:
            self.groups.weighed = module.uses_rollout_logprobs
        self.planner = IterationPlanner(trainer, self.group_size)
        self.planner.check()
        check_whole_iterations(trainer)
        self._join_sources()

    def _join_sources(self) -> None:
        """Put the parts around the collector: first those that sample, then those that use what was sampled."""
        self._sampling_source = self.collector
        for wrap in self._hooks("wrap_sampling"):
            self._sampling_source = wrap(self._sampling_source)
        self.source = _Sampled(self)
        for wrap in self._hooks("wrap"):
            self.source = wrap(self.source)

    def _hooks(self, name: str) -> list[Any]:
        """A hook of all parts that have it, those of the module first."""
        return overriding([*self._of_module, *self.parts], name, RolloutPart)

    def _call(self, hook: str, trainer: L.Trainer) -> None:
        for call in self._hooks(hook):
            call(trainer)

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Free the engine when training ends; ``trainer.validate`` leaves it running."""
        if stage == "fit":
            self._close()
        self._recover()

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        """Free the engine, and what parts have, after an error or interrupt; Lightning calls no ``teardown`` then."""
        self._close()
        self._recover()

    def _recover(self) -> None:
        for recover in self._hooks("recover"):
            recover()

    def _close(self) -> None:
        if self.groups is not None:
            self.groups.close()
        self.engine.close()
        for close in self._hooks("close"):
            close()

    def state_dict(self) -> dict[str, Any]:
        """The iteration and its metrics; the DataModule saves the prompt cursor, the module the weights."""
        state = {"iteration": self.iteration, "metrics": self._metrics, "after": self._after}
        if self._inside_iteration and self._trainer is not None:
            state["inside"] = [self._trainer.global_rank, self._trainer.world_size]
        upcoming = self.iteration + self._inside_iteration
        state["parts"] = {part.state_key: part.state_dict(upcoming) for part in self._with_state()}
        return state

    def _with_state(self) -> list[RolloutPart]:
        return [part for part in self.parts if overriding([part], "state_dict", RolloutPart)]

    def on_load_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        """Divide what parts have kept anew if another number of ranks has saved the checkpoint."""
        states, self._saved_states = checkpoint.get(STATES_OF_RANKS), None
        if states is not None and self._with_state():
            ranks = range(trainer.global_rank, len(states), trainer.world_size)
            self._saved_states = [states[rank]["callbacks"][self.state_key] for rank in ranks]

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue counting; raises ValueError inside an iteration if its micro-batches belong to another rank."""
        self.iteration = state_dict["iteration"]
        self._metrics = dict(state_dict["metrics"])
        self.samples, self._micro_batches = [], None  # those of an earlier fit are not this iteration's
        self._after = state_dict["after"]
        states = [state_dict] if self._saved_states is None else self._saved_states
        trainer, inside = self._trainer, state_dict.get("inside")
        rank, world_size = (0, 1) if trainer is None else (trainer.global_rank, trainer.world_size)
        known = {part.state_key for part in self._with_state()}
        unused = sorted(name for name, saved in state_dict["parts"].items() if saved and name not in known)
        if unused:
            log.warning("the checkpoint has states of parts that this run has not: %s", ", ".join(unused))
        for part in self._with_state():
            taken = [one for each in states for one in each["parts"].get(part.state_key, ())]
            part.load_state_dict(state_dict["parts"].get(part.state_key, ()), taken, rank=rank, world_size=world_size)
        self._inside_iteration = inside is not None
        if trainer is None or inside is None or trainer.state.fn != TrainerFn.FITTING:
            return
        if not true_on_all_ranks(list(inside) == [trainer.global_rank, trainer.world_size]):
            raise ValueError(
                f"the checkpoint was saved inside an iteration and holds the micro-batches that rank {inside[0]} of "
                f"{inside[1]} had still to train on, not those of all {trainer.world_size} rank(s) of this run: resume "
                "with equally many ranks under a strategy that saves every rank (rlhf_zero0 ... rlhf_zero3), or from a "
                "checkpoint of the end of an iteration (ModelCheckpoint(every_n_epochs=...))"
            )

    def _attached(self) -> L.Trainer:
        if self._trainer is None:
            raise RuntimeError("RolloutCallback works inside a Trainer: pass it to Trainer(callbacks=[...])")
        return self._trainer


def _group_runner(engine: RolloutEngine, group: "AnyGroupFunction | None") -> "GroupRunner | None":
    if group is None:
        return None
    from rlhfkit.rollout.groups import GroupRunner

    return GroupRunner(engine, group)


class _Sent(NamedTuple):
    """What a run sends to its engine."""

    weights: "ModuleWeights"
    why_copied: str | None
    """Why an engine in this process cannot use their memory; ``None``: it can."""
    model: str
    """Folder or hub name that engines are started with."""
    how: dict[str, Any]
    """Other arguments of their start."""


class _Sampled:
    """The groups that were generated: with the weights of the run, and with the devices of training given back."""

    def __init__(self, rollouts: RolloutCallback) -> None:
        self._rollouts = rollouts

    def collect(self, ask: Ask) -> CollectedGroups:
        rollouts = self._rollouts
        collected = rollouts._with_weights(lambda: rollouts._sampling_source.collect(ask))
        rollouts.end_generating(ask.trainer)
        return collected
