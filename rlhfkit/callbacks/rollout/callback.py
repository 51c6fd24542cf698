"""``RolloutCallback``: the loop of reinforcement learning, as hooks of Lightning's loop.

One iteration is one Lightning epoch: :meth:`RolloutCallback.collect` syncs weights, collects groups (draw, generate,
score, select), lets the module prepare them, and splits them into micro-batches; Lightning's loop learns from these.
"""

import dataclasses
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import lightning as L
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor

from rlhfkit.argument_names import refuse_arguments
from rlhfkit.callbacks.alarms import ROLLOUT_ALARMS, Alarm, Alarms
from rlhfkit.callbacks.rollout.checks import (
    check_learner,
    check_prompts,
    check_reward,
    check_sizes,
    check_whole_iterations,
)
from rlhfkit.callbacks.rollout.group_collector import GroupCollector, ScoresSamples
from rlhfkit.callbacks.rollout.metrics import iteration_metrics
from rlhfkit.callbacks.rollout.micro_batching import IterationPlanner, MicroBatches, check_whole_groups, shape_of
from rlhfkit.callbacks.rollout.sharing import SharedIteration, share_copies, share_iteration
from rlhfkit.callbacks.rollout.source import Ask, RolloutPart, SeparateDevices, Source
from rlhfkit.callbacks.rollout.timing import Timing, slowest
from rlhfkit.callbacks.rollout.validation import ValidationRuns, log_validation
from rlhfkit.callbacks.rollout.weight_sync import WeightSynchronizer
from rlhfkit.data.exchange import gather_columns
from rlhfkit.data.types import Experience, Sample
from rlhfkit.distributed import cpu_group, gather_objects, run_on_all_ranks, true_on_all_ranks
from rlhfkit.mesh import mesh_of
from rlhfkit.protocols import STATES_OF_RANKS, AsksWhileSampling, HasChatTemplate
from rlhfkit.rewards.base import Reward, answer_reader, mean_metrics, reward_metrics
from rlhfkit.rollout.collector import CollectedGroups
from rlhfkit.rollout.dynamic_sampling import DynamicSampling
from rlhfkit.rollout.engine import RolloutEngine, SamplingSpec
from rlhfkit.rollout.errors import WeightsNeededError
from rlhfkit.rollout.replay_buffer import ReplayBuffer
from rlhfkit.trainer_parts import (
    callbacks_of,
    compares_groups,
    datamodule_of,
    learner_of,
    needs_greedy_rewards,
    policy_of,
    profiler_of,
    prompts_of,
)
from rlhfkit.validation import check_integer, check_number

if TYPE_CHECKING:
    from rlhfkit.rollout.groups import AnyGroupFunction, GroupRunner

T = TypeVar("T")

log = logging.getLogger(__name__)


class RolloutCallback(Callback):
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
            ``docs/rollout.md``. ``None``: they are ``group_size`` completions.
        sampling: How to sample in training.
        validation_sampling: How to sample in validation; ``None``: one greedy completion of the same length per prompt.
            A mapping gives several settings by name, with metrics ``val/<name>/reward`` and so on.
        success_threshold: A validation sample with at least this reward counts as correct in ``val/pass@k``, logged if
            ``validation_sampling`` takes several samples per prompt, beside ``val/avg@n``, ``val/best@k`` and, for
            rewards that read answers (``math_match``, ``exact_match``), ``val/maj@k``.
        dynamic_sampling: Replace groups without a learning signal by those of further prompts (DAPO); ``None``: train
            on every group.
        replay_buffer: Keep groups with a learning signal, and train on them again in place of later groups without one,
            with importance weights; ``None``: none are kept.
        max_staleness: Iterations by which sampling may be ahead of learning. 0: they alternate. 1 or more: they overlap
            in a thread, and samples may be that many iterations old; give the module a ``correction`` for it.
        in_flight: With ``max_staleness``: sync weights while the engine generates; later tokens use the new ones, and
            each token records its version.
        rollout_timeout: Seconds that one iteration's samples may take, on several ranks or with ``max_staleness``.
        offload_training: Whether weights, gradients and optimizer states are in CPU memory while the engine generates.
            ``None``: if it shares the GPUs of the training ranks (``VLLMPool(colocate=True)``). The numbers are the
            same bit for bit. See ``docs/rollout.md`` for the order, ``memory/...`` for what it frees.
        alarms: Bounds on metrics, each with advice that is logged when a run first crosses it. ``None``:
            ``ROLLOUT_ALARMS``; an empty list: none.
        probe_tolerance: Largest difference between the engine's and the trainer's log-probs after a sync; in 16-bit
            types (and TF32) their mean difference. ``None``: 1e-3 in float32, 0.3 in bfloat16 (a warning from 0.1 on),
            0.1 in float16 (0.02), 1 for quantized engines (0.3); ``inf`` switches the probe off.
        parts: Features of your own, around those of the other arguments; see
            :class:`~rlhfkit.callbacks.rollout.source.RolloutPart`.

    Raises:
        TypeError: If ``reward`` cannot be called, ``engine`` is not a :class:`~rlhfkit.rollout.RolloutEngine`, or
            ``group`` is not async.
        ValueError: If a number is out of range, or the engine cannot do what ``in_flight`` or a part needs.
    """

    def __init__(
        self,
        reward: Reward | Callable[[Sequence[Sample]], Any] | None = None,
        *,
        engine: RolloutEngine | None = None,
        group: "AnyGroupFunction | None" = None,
        sampling: SamplingSpec | None = None,
        validation_sampling: SamplingSpec | Mapping[str, SamplingSpec] | None = None,
        success_threshold: float = 1.0,
        dynamic_sampling: DynamicSampling | None = None,
        replay_buffer: ReplayBuffer | None = None,
        max_staleness: int = 0,
        in_flight: bool = False,
        rollout_timeout: float = 7200.0,
        offload_training: bool | None = None,
        alarms: Sequence[Alarm] | None = None,
        probe_tolerance: float | None = None,
        parts: Sequence[RolloutPart] = (),
        **unknown: Any,
    ) -> None:
        refuse_arguments(type(self), unknown)
        if reward is not None and not callable(reward):
            raise TypeError(f"reward must be callable on a list of samples, got {type(reward).__name__}")
        if engine is None:
            from rlhfkit.rollout.local.engine import LocalEngine

            engine = LocalEngine()
        if not isinstance(engine, RolloutEngine):
            raise TypeError(f"engine must implement rlhfkit.rollout.RolloutEngine, got {type(engine).__name__}")
        self.reward = reward
        self.engine = engine
        self.sampling = sampling or SamplingSpec()
        greedy = dataclasses.replace(self.sampling, group_size=1, temperature=0.0, top_p=1.0, top_k=0, min_p=0.0)
        self.validation_sampling = validation_sampling or greedy
        self.validation = ValidationRuns(self.validation_sampling, success_threshold)
        check_integer("max_staleness", max_staleness, minimum=0, why="0 takes turns")
        check_number("rollout_timeout", rollout_timeout, above=0, why="it is in seconds")
        check_number("probe_tolerance", probe_tolerance, above=0, optional=True, infinite=True, why="inf is no probe")
        if in_flight and not max_staleness:
            raise ValueError("in_flight=True syncs weights while the engine generates: give max_staleness=1 or more")
        if offload_training and max_staleness:
            raise ValueError(
                "offload_training=True takes the training states off the device while the engine generates, and with "
                f"max_staleness={max_staleness} it generates while the policy learns: use one"
            )
        self.timing = Timing()
        """How long each part of each iteration took on this rank; ``timing.write_trace(path)`` writes a trace of it."""
        self.max_staleness = max_staleness
        self.groups = _group_runner(engine, group)
        """Makes groups by ``group``; ``None``: the engine does."""
        self.collector = GroupCollector(engine, reward, self.timing, rollout_timeout, self.groups)
        self.phases = self._devices(offload_training)
        """Who has the memory of shared devices; documents the order."""
        self.parts: list[RolloutPart] = []
        """What this run has besides drawing, generating, scoring and learning, in the order of wrapping."""
        if max_staleness:
            from rlhfkit.callbacks.rollout.parts.ahead import Ahead

            shared = self.phases.colocate
            self.parts.append(
                Ahead(self.collector, max_staleness, rollout_timeout, in_flight=in_flight, shared_devices=shared)
            )
        if dynamic_sampling is not None:
            from rlhfkit.callbacks.rollout.parts.dynamic_sampling import Selection

            self.parts.append(Selection(self.collector, dynamic_sampling))
        if replay_buffer is not None:
            from rlhfkit.callbacks.rollout.parts.replay import Replay

            size = None if group is not None else self.sampling.group_size
            self.parts.append(Replay(replay_buffer, size, collector=self.collector, sampling=self.sampling))
        self.alarms = Alarms(ROLLOUT_ALARMS if alarms is None else alarms)
        if alarms is None or alarms:
            self.parts.append(self.alarms)
        for part in parts:
            if not isinstance(part, RolloutPart):
                raise TypeError(
                    f"parts must be rlhfkit.callbacks.rollout.source.RolloutPart, got {type(part).__name__}"
                )
            part.attach(self)
            self.parts.append(part)
        self.replay_buffer = replay_buffer
        self._of_module: list[RolloutPart] = []  # what the module of the run asks for
        self._scores: ScoresSamples | None = None  # by models of the module
        self.source: Source = self.collector
        """Where the groups of an iteration come from: the collector, and around it what the parts of a run make of it;
        complete after ``setup``."""
        self._sampling_source: Source = self.collector
        self.weight_synchronizer = WeightSynchronizer(
            engine,
            self.phases,
            probe_tolerance,
            overlaps=any(part.overlaps for part in self.parts),
            start=None if self.groups is None else self.groups.function.start,
        )
        self.planner = IterationPlanner()
        self.iteration = 0
        self.samples: list[Sample] = []
        """The samples of the current iteration that this rank generated, now or for an earlier one, with rewards."""
        self.sample_rows: list[int] = []
        """Which row of the iteration each of :attr:`samples` is."""
        self.mean_advantages: Tensor | None = None
        """(N,) float64, mean advantage of each row of the current iteration, of all ranks; ``None``: there is none."""
        self._trainer: L.Trainer | None = None
        self._micro_batches: MicroBatches | None = None
        self._inside_iteration = False  # an iteration was collected and training on it is not finished
        self._after: dict[str, Any] | None = None  # where the prompts of the next iteration begin
        self._metrics: dict[str, float] = {}
        self._tokens = 0.0  # of the iteration's samples, of all ranks
        self._began = 0.0  # the iteration, on the clock of this process
        self._saved_states: list[Mapping[str, Any]] | None = None  # of other ranks, in a checkpoint of another number

    @classmethod
    def of(cls, trainer: L.Trainer) -> "RolloutCallback":
        """Return the callback of a Trainer; raises TypeError if it has none."""
        for callback in callbacks_of(trainer):
            if isinstance(callback, cls):
                return callback
        raise TypeError("this callback reads the samples of a RolloutCallback: add one to Trainer(callbacks=[...])")

    # ------------------------------------------------------------------ one iteration, from top to bottom

    def collect(self) -> Sequence[Experience]:
        """Return this rank's micro-batches of one new iteration, in order; the loader calls it on every rank."""
        trainer = self._attached()
        self.samples, self._micro_batches = [], None  # frees the last iteration
        self.sync_weights()
        policy_version = trainer.global_step
        self.collector.begin_asking(trainer, self.iteration)
        collected = self.collect_groups()
        shared = self.share(collected)
        with profiler_of(trainer).profile("rollout.prepare"), self.timing.record("prepare", self.iteration):
            experience = learner_of(trainer).prepare(shared.experience)
        self.collector.note_asked_seconds(trainer, self.iteration)
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
            for part in self.parts:
                allowed.enter_context(part.updating_weights(trainer))
            with self.timing.record("weight_sync", self.iteration):
                self.weight_synchronizer.sync(trainer)

    def collect_groups(self) -> CollectedGroups:
        """Draw prompts, generate, score and select, this rank its share. Called on every rank."""
        trainer, sampling = self._attached(), self._training_sampling()
        wanted = shape_of(trainer, self.group_size).sequences // sampling.group_size
        with profiler_of(trainer).profile("rollout.collect_groups"):
            return self.source.collect(Ask(trainer, self.iteration, wanted, sampling))

    def share(self, collected: CollectedGroups) -> SharedIteration:
        """Share numbers of all samples with all ranks, and move rows to the ranks that train on them. A collective."""
        trainer = self._attached()
        with self.timing.record("share", self.iteration):
            shared = share_iteration(
                collected,
                lambda summary: self.planner.plan(trainer, summary, self.group_size, self.iteration),
                group_size=self.group_size,
                temperature=self._training_sampling().temperature or 1.0,
                rank=trainer.global_rank,
                world_size=trainer.world_size,
                group=cpu_group(),
            )
        if shared.other_sizes:
            check_sizes(learner_of(trainer), shared.other_sizes, self.group_size, len(collected.prompts))
        self.samples, self.sample_rows = shared.samples, shared.rows
        self.weight_synchronizer.remember(shared.samples)
        return shared

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Measure how long the iteration takes."""
        self._tokens, self._began = 0.0, time.perf_counter()

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
            for part in self.parts:
                part.end_iteration(self.iteration)

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Log the iteration and sync the new weights."""
        finished = self.iteration - 1
        # The numbers are the same on every rank; sync_dist only tells Lightning so.
        pl_module.log_dict(self._metrics, sync_dist=True)
        pl_module.log_dict(slowest(run_on_all_ranks(lambda: self.timing.metrics(finished))), sync_dist=True)
        for part in self.parts:
            part.logged(trainer, finished)
        if "rollout/reward" in self._metrics:
            pl_module.log("reward", self._metrics["rollout/reward"], prog_bar=True, logger=False, sync_dist=True)
        bar = trainer.progress_bar_callback is not None
        if bar and self._tokens:  # after a resume inside an iteration they were sampled by another run
            speed = self._tokens / (time.perf_counter() - self._began)
            pl_module.log("tokens/s", speed, prog_bar=True, logger=False, sync_dist=True)
        if not self.phases.offloads(trainer):  # else when samples are asked for, after a checkpoint of this epoch
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
    def validation_samples(self) -> list[Sample]:
        """The samples of the last validation that this rank generated."""
        return self.validation.samples

    @property
    def group_size(self) -> int:
        """Samples per prompt in training."""
        return self._training_sampling().group_size

    def batches_per_iteration(self) -> int:
        """Micro-batches that :meth:`collect` gives this rank, or the smallest number with a cap of tokens."""
        return shape_of(self._attached(), self.group_size).micro_batches_per_rank

    def _training_sampling(self) -> SamplingSpec:
        """The sampling of training; at most 8 tokens under ``fast_dev_run``."""
        trainer = self._trainer
        if trainer is not None and trainer.fast_dev_run:  # type: ignore[attr-defined]  # set outside its class
            return dataclasses.replace(
                self.sampling, max_new_tokens=min(self.sampling.max_new_tokens, 8), min_new_tokens=0
            )
        return self.sampling

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
        self._tokens = float(shared.numbers["completion_length"].sum())
        reward, scored = self.reward, bool(shared.summary.reward_parts)
        silent = self._share_advantages(experience, len(shared.summary))
        metrics = iteration_metrics(shared, silent=silent, rewarded=reward is not None or scored)
        if reward is not None and bool(shared.summary.rewards.isnan().all()) and self._attached().is_global_zero:
            log.warning(
                "iteration %d: the reward returned None for all %d samples, so nothing is learned from them; check "
                "what it cannot score",
                *(self.iteration, len(shared.summary)),
            )
        metrics["rollout/probe_difference"] = self.weight_synchronizer.difference
        metrics |= self.weight_synchronizer.metrics
        if reward is not None:
            metrics |= mean_metrics(run_on_all_ranks(lambda: reward_metrics(reward)))
        metrics |= self.phases.metrics()
        for part in self.parts:
            metrics |= part.metrics(shared, policy_version)
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
        """Generate and score the prompts of a validation batch with the current policy."""
        if batch_idx == 0 and dataloader_idx == 0:
            self.validation.begin()
        self.sync_weights()
        prompts = [prompt for share in gather_objects(list(batch)) for prompt in share]
        with ExitStack() as paused:
            for part in self.parts:
                paused.enter_context(part.paused(trainer))
            sampled = self._with_weights(
                lambda: self.validation.generate(
                    lambda sampling: self.collector.sample(trainer, prompts, sampling, iteration=-1)
                )
            )
        scores_samples = policy_of(trainer).scores_samples
        if scores_samples:
            for samples in sampled.values():
                assert self._scores is not None  # made in setup
                self._scores.add(trainer, samples, iteration=-1)
        rewarded = scores_samples or self.reward is not None
        log_validation(pl_module, self.validation.metrics(sampled, rewarded=rewarded, read=answer_reader(self.reward)))

    def on_validation_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Log the metrics of each source of prompts."""
        log_validation(pl_module, self.validation.source_metrics())

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Let engines on the ranks' GPUs make room for training."""
        if not self.weight_synchronizer.overlaps:
            self.phases.learn(trainer, self.iteration)

    # ------------------------------------------------------------------ start and end

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Check that module, data and sampling fit together, before anything is loaded."""
        if trainer is not self._trainer:
            for part in self.parts:
                part.clear()
        self._trainer = trainer
        self.planner = IterationPlanner()
        if stage not in ("fit", "validate"):
            return
        self._inside_iteration = False
        self.engine.version = None  # equal steps of two runs, or of two checkpoints, are not equal weights
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
        for sampling in self.validation.ways.values():
            check_prompts(trainer, policy_of(trainer), self.collector.policy_source, sampling, validation=True)
        self._of_module = self._parts_of_module(trainer)
        if stage == "fit":
            self._check_fit(trainer)

    def _check_fit(self, trainer: L.Trainer) -> None:
        check_prompts(trainer, policy_of(trainer), self.collector.source, self._training_sampling())
        module = learner_of(trainer)
        for part in [*self.parts, *self._of_module]:
            part.check(trainer)
        check_learner(
            module, self.engine, self.sampling, rewarded=self.reward is not None, source=self.collector.source
        )
        shape, mesh = shape_of(trainer, self.group_size), mesh_of(trainer)
        if compares_groups(module):
            check_whole_groups(shape, self.group_size, mesh.world_size, mesh.forward_group_size)
        check_whole_iterations(trainer)
        self._join_sources()

    def _parts_of_module(self, trainer: L.Trainer) -> list[RolloutPart]:
        """What the module asks of its samples: scores of models of its own, greedy answers."""
        found: list[RolloutPart] = []
        self.collector.scores_early = self.collector.greedy_answers = None  # of another module
        if policy_of(trainer).scores_samples:
            from rlhfkit.callbacks.rollout.parts.model_scores import ModelScores

            self._scores = ModelScores(self.collector, in_thread=self.weight_synchronizer.overlaps)
            found.append(self._scores)
        if needs_greedy_rewards(trainer):
            from rlhfkit.callbacks.rollout.parts.greedy_answers import GreedyAnswers

            found.append(GreedyAnswers(self.collector))
        return found

    def _join_sources(self) -> None:
        """Put the parts around the collector: first those that sample, then those that use what was sampled."""
        parts = [*self._of_module, *self.parts]
        self._sampling_source = self.collector
        for part in parts:
            self._sampling_source = part.wrap_sampling(self._sampling_source)
        self.source = _Sampled(self)
        for part in parts:
            self.source = part.wrap(self.source)

    def _devices(self, offload_training: bool | None) -> SeparateDevices:
        """Return who makes room on devices that engines and training share, if they do."""
        more = () if self.groups is None else tuple(self.groups.function.engines)
        if offload_training not in (None, True, False):
            raise TypeError(f"offload_training must be None, True or False, got {offload_training!r}")
        if not offload_training and not any(engine.colocate for engine in (self.engine, *more)):
            return SeparateDevices((self.engine, *more), offload_training)
        from rlhfkit.callbacks.rollout.parts.shared_devices import SharedDevices

        return SharedDevices(self.engine, offload_training, self.timing, more)

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Free the engine when training ends; ``trainer.validate`` leaves it running."""
        if stage == "fit":
            self._close()
        self.phases.recover()

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        """Free the engine, and models elsewhere, after an error or interrupt; Lightning calls no ``teardown`` then."""
        self._close()
        self.phases.recover()
        if isinstance(pl_module, AsksWhileSampling):
            pl_module.placed.close()

    def _close(self) -> None:
        if self.groups is not None:
            self.groups.close()
        self.engine.close()
        for part in self.parts:
            part.close()

    def state_dict(self) -> dict[str, Any]:
        """The iteration and its metrics; the DataModule saves the prompt cursor, the module the weights."""
        state = {"iteration": self.iteration, "metrics": self._metrics, "after": self._after}
        if self._inside_iteration and self._trainer is not None:
            state["inside"] = [self._trainer.global_rank, self._trainer.world_size]
        state |= {
            part.name: part.state_dict(self.iteration + self._inside_iteration) for part in self.parts if part.name
        }
        return state

    def on_load_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        """Divide kept and dropped groups anew if another number of ranks has saved the checkpoint."""
        states, self._saved_states = checkpoint.get(STATES_OF_RANKS), None
        if states is not None and any(part.name for part in self.parts):
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
        for part in self.parts:
            if part.name:
                taken = [one for each in states for one in each.get(part.name, ())]
                part.load_state_dict(state_dict.get(part.name, ()), taken, rank=rank, world_size=world_size)
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


class _Sampled:
    """The groups that were generated: with the weights of the run, and with the devices of training given back."""

    def __init__(self, rollouts: RolloutCallback) -> None:
        self._rollouts = rollouts

    def collect(self, ask: Ask) -> CollectedGroups:
        rollouts = self._rollouts
        collected = rollouts._with_weights(lambda: rollouts._sampling_source.collect(ask))
        if not rollouts.weight_synchronizer.overlaps:
            rollouts.phases.learn(ask.trainer, ask.iteration)  # until the next sync
        return collected
