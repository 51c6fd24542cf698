"""``RolloutCallback``: generate, score, prepare, and publish the policy's weights to the engine after each iteration.

One iteration is one Lightning epoch. The loader of the DataModule asks :meth:`RolloutCallback.collect` for the
iteration's micro-batches when the first is pulled, so Lightning's own loop does everything else: windows, clipping,
progress, logging, checkpoints.
"""

import dataclasses
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, TypeVar

import lightning as L
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.trainer.states import TrainerFn

from rlhfkit.callbacks.alarms import ROLLOUT_ALARMS, Alarm, Alarms
from rlhfkit.callbacks.rollout.async_rollouts import AsyncRollouts
from rlhfkit.callbacks.rollout.generation import Generation
from rlhfkit.callbacks.rollout.group_collector import GroupCollector
from rlhfkit.callbacks.rollout.metrics import iteration_metrics, staleness_metrics, validation_metrics
from rlhfkit.callbacks.rollout.micro_batching import deal, micro_batch, shape_of
from rlhfkit.callbacks.rollout.model_scores import add_model_scores, scores_samples
from rlhfkit.callbacks.rollout.prompt_check import check_prompts
from rlhfkit.callbacks.rollout.timing import Timing, slowest
from rlhfkit.callbacks.rollout.weight_sync import WeightSynchronizer
from rlhfkit.data.types import Experience, Prompt, Sample
from rlhfkit.distributed import gather_objects, run_on_all_ranks, true_on_all_ranks
from rlhfkit.rewards.base import Reward, mean_metrics, reward_metrics
from rlhfkit.rollout.dynamic_sampling import DynamicSampling
from rlhfkit.rollout.engine import RolloutEngine, SamplingSpec, arrange_logprobs
from rlhfkit.rollout.errors import WeightsNeededError
from rlhfkit.validation import check_integer, check_number

T = TypeVar("T")

log = logging.getLogger(__name__)


class RolloutCallback(Callback):
    """Rollouts for modules that learn from their own samples.

    Put it first among the callbacks: what comes after it in ``on_train_batch_end`` and saves a checkpoint (as
    ``ModelCheckpoint`` does, which Lightning moves to the end) saves the prompts as used.

    Example::

        RolloutCallback(reward=math_match, engine=VLLMPool(num_engines=2), sampling=SamplingSpec(group_size=8))

    Args:
        reward: Any callable that takes samples and returns one number (or ``None``: could not be scored) for each,
            sync or async; see :mod:`rlhfkit.rewards`. ``None``: nothing is scored, for modules that need no reward, as
            distillation does.
        engine: What generates; ``None``: a :class:`~rlhfkit.rollout.local.engine.LocalEngine` in this process.
        sampling: How to sample in training.
        validation_sampling: How to sample in validation; ``None``: one greedy completion of the same length per prompt.
            Several ways by name: the metrics of each are ``val/<name>/reward`` and so on.
        success_threshold: A validation sample with at least this reward is right; what ``val/pass@k`` counts where
            ``validation_sampling`` takes several samples per prompt.
        dynamic_sampling: Sample further prompts in place of those whose groups teach nothing (DAPO); ``None``: train on
            every group.
        oversampling: Share of further groups that are under way: 0.25 begins 10 groups for an iteration of 8, trains on
            the 8 that are finished first, and drops the rest, whose prompts come first in the next iteration. Saves the
            wait for the longest answers, and prefers short ones.
        max_staleness: Iterations that sampling may be ahead of learning. 0: they take turns. 1 or more: they overlap,
            in a thread, and samples may be that many iterations old when they are trained on; give the module a
            ``correction`` for it.
        in_flight: With ``max_staleness``: new weights do not wait for what is being sampled. It goes on with them from
            the next token on, and each token knows its version.
        rollout_timeout: Seconds that the samples of one iteration may take when they are made ahead.
        alarms: Bounds on metrics, each with what to do; a warning when a run first crosses one. ``None``:
            ``ROLLOUT_ALARMS``; an empty list: none.
        probe_tolerance: Largest difference between the engine's and the trainer's log-probs of a fixed sequence after
            weights were published; ``None``: 1e-3 in float32, 0.3 in 16-bit types; ``inf`` switches the probe off.

    Raises:
        TypeError: If ``reward`` cannot be called or ``engine`` is no engine.
        ValueError: If a number is out of range, or the engine cannot do what ``oversampling`` or ``in_flight`` needs.
    """

    def __init__(
        self,
        reward: Reward | Callable[[Sequence[Sample]], Any] | None = None,
        *,
        engine: RolloutEngine | None = None,
        sampling: SamplingSpec | None = None,
        validation_sampling: SamplingSpec | Mapping[str, SamplingSpec] | None = None,
        success_threshold: float = 1.0,
        dynamic_sampling: DynamicSampling | None = None,
        oversampling: float = 0.0,
        max_staleness: int = 0,
        in_flight: bool = False,
        rollout_timeout: float = 7200.0,
        alarms: Sequence[Alarm] | None = None,
        probe_tolerance: float | None = None,
    ) -> None:
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
        ways = self.validation_sampling
        self._validations = dict(ways) if isinstance(ways, Mapping) else {"": ways}
        self.success_threshold = success_threshold
        check_number("success_threshold", success_threshold)
        check_integer("max_staleness", max_staleness, minimum=0, why="0 takes turns")
        check_number("oversampling", oversampling, minimum=0, why="it is a share of the iteration, 0 is off")
        check_number("rollout_timeout", rollout_timeout, above=0, why="it is in seconds")
        check_number("probe_tolerance", probe_tolerance, above=0, optional=True, infinite=True, why="inf is no probe")
        if in_flight and not max_staleness:
            raise ValueError("in_flight=True publishes while sampling ahead: give max_staleness=1 or more")
        self.alarms = Alarms(ROLLOUT_ALARMS if alarms is None else alarms)
        self.timing = Timing()
        """How long each part of each iteration took on this rank; ``timing.write_trace(path)`` draws it."""
        self.generation = Generation(engine, reward, self.timing)
        self.collector = GroupCollector(self.generation, dynamic_sampling, oversampling)
        self.ahead: AsyncRollouts | None = None
        """What samples in a thread; ``None``: sampling and learning take turns."""
        if max_staleness:
            self.ahead = AsyncRollouts(self.collector, max_staleness, rollout_timeout, in_flight=in_flight)
        self.weight_synchronizer = WeightSynchronizer(engine, probe_tolerance)
        self.iteration = 0
        self.samples: list[Sample] = []
        """The samples of the current iteration, rewards and all, the same on every rank."""
        self.experience: Experience | None = None
        """The current iteration as prepared by the module, the same on every rank."""
        self.validation_samples: list[Sample] = []
        """The samples of the last validation."""
        self._trainer: Any | None = None
        self._inside = False  # an iteration was collected, and not all of it was trained on
        self._after: dict[str, Any] | None = None  # where the prompts of the next iteration begin
        self._metrics: dict[str, float] = {}

    # ------------------------------------------------------------------ what the loader asks

    @property
    def group_size(self) -> int:
        """Samples per prompt in training."""
        return self._training_sampling().group_size

    def _training_sampling(self) -> SamplingSpec:
        """The sampling in force: a few tokens under ``fast_dev_run``."""
        if self._trainer is not None and self._trainer.fast_dev_run:
            return dataclasses.replace(
                self.sampling, max_new_tokens=min(self.sampling.max_new_tokens, 8), min_new_tokens=0
            )
        return self.sampling

    def batches_per_iteration(self) -> int:
        """Micro-batches that :meth:`collect` will give this rank."""
        return shape_of(self._attached(), self.group_size).micro_batches_per_rank

    def collect(self) -> list[Experience]:
        """Publish if the engine is behind, generate, score, prepare, and split. A collective: all ranks call it alike.

        Returns:
            This rank's micro-batches of the iteration, in order.
        """
        trainer = self._attached()
        module = trainer.lightning_module
        shape, sampling = shape_of(trainer, self.group_size), self._training_sampling()
        self.publish()
        started = trainer.global_step
        source = self.collector if self.ahead is None else self.ahead
        with trainer.profiler.profile("rollout.generate_and_score"):
            wanted = shape.sequences // sampling.group_size
            filled = self._with_weights(lambda: source.sample(trainer, wanted, sampling, self.iteration))
        if self.ahead is None:
            self.engine.sleep()  # until the next publish: engines on the ranks' GPUs make room for training
        self.samples = [sample for group in filled.groups for sample in group]
        if scores_samples(trainer) and not self.collector.scores_early(trainer):
            with self.timing.record("score", self.iteration):
                add_model_scores(trainer, self.samples)
        experience = Experience.from_samples(self.samples, temperature=sampling.temperature or 1.0)
        plan = deal(experience, shape, trainer.world_size)
        with trainer.profiler.profile("rollout.prepare"), self.timing.record("prepare", self.iteration):
            self.experience = module.prepare(experience)
        probe = {"rollout/probe_difference": self.weight_synchronizer.difference}
        reward = self.reward
        of_reward = {} if reward is None else mean_metrics(run_on_all_ranks(lambda: reward_metrics(reward)))
        shown = iteration_metrics(
            self.samples, self.experience, rewarded=reward is not None or bool(self.experience.reward_parts)
        )
        self._metrics = shown | probe | of_reward | self.collector.metrics(filled)
        if self.ahead is not None:
            self._metrics |= staleness_metrics(self.samples, started)
        self._after = filled.after
        self._inside = True
        averaged = trainer.accumulate_grad_batches * trainer.world_size
        return [micro_batch(self.experience, one, averaged) for one in plan[trainer.global_rank]]

    # ------------------------------------------------------------------ generate and score

    def sample(self, prompts: Sequence[Prompt], sampling: SamplingSpec, iteration: int) -> list[Sample]:
        """Scored samples of the prompts, the same list on every rank. A collective.

        Args:
            prompts: The same on every rank.
            sampling: How to sample.
            iteration: Goes into each sample's seed.

        Returns:
            ``len(prompts) * group_size`` samples, group by group.
        """
        return self.generation.sample(self._attached(), prompts, sampling, iteration)

    # ------------------------------------------------------------------ publish

    def publish(self) -> None:
        """Give the engine the current weights, if it has others, and check that they arrived. A collective."""
        trainer = self._attached()
        allowed = nullcontext() if self.ahead is None else self.ahead.publishing(trainer)
        with allowed, self.timing.record("publish", self.iteration):
            self.weight_synchronizer.publish(trainer)

    def _with_weights(self, sample: Callable[[], T]) -> T:
        """Sample; engines that have lost their weights over it get them again, and it begins anew. A collective.

        Samples come out the same, as each has its own seed. There is an end: engines are started again so often and no
        more, and an error without hope is another one.
        """
        while True:
            try:
                return sample()
            except WeightsNeededError as error:
                log.warning("the engines get the current weights again, and sampling begins anew: %s", error)
            self.engine.version = None
            self.publish()

    # ------------------------------------------------------------------ hooks

    def setup(self, trainer: Any, pl_module: L.LightningModule, stage: str) -> None:
        """Check, before anything is loaded, that module, data and sampling fit together."""
        self._trainer = trainer
        if stage not in ("fit", "validate"):
            return
        self._inside = False
        self.engine.version = None  # equal steps of two runs, or of two checkpoints, are not equal weights
        if not hasattr(trainer.datamodule, "draws"):
            raise TypeError(
                "RolloutCallback takes its prompts from a DataModule with draws(): call "
                "trainer.fit(module, datamodule=PromptDataModule(...))"
            )
        for sampling in self._validations.values():
            check_prompts(trainer, pl_module, self.engine, sampling, validation=True)
        if stage == "fit":
            check_prompts(trainer, pl_module, self.engine, self._training_sampling())
            if not callable(getattr(pl_module, "prepare", None)):
                raise TypeError(
                    "RolloutCallback trains modules that prepare experience (GRPOModule ...), but "
                    f"{type(pl_module).__name__} has no prepare(); an SFTModule needs no RolloutCallback"
                )
            if self.reward is None and getattr(pl_module, "needs_reward", True):
                raise ValueError(
                    f"{type(pl_module).__name__} learns from rewards: give RolloutCallback(reward=...) any function of "
                    "samples"
                )
            check = getattr(pl_module, "check_group_size", None)
            if check is not None:
                check(self.sampling.group_size)
            if self.ahead is not None and self.engine.colocate:
                raise ValueError(
                    "VLLMPool(colocate=True) gives its memory to training while the policy learns, and with "
                    "max_staleness it would sample in that time: use one"
                )
            self._check_logprobs(pl_module)
            shape_of(trainer, self.group_size)
            self.collector.check(trainer, ahead=self.ahead is not None)
            if trainer.limit_train_batches != 1.0 and not trainer.fast_dev_run:
                raise ValueError(
                    f"limit_train_batches={trainer.limit_train_batches} would throw generated samples away: lower "
                    "PromptDataModule(rollout_batch_size=...) instead"
                )

    def _check_logprobs(self, module: L.LightningModule) -> None:
        """Refuse to compare log-probs of a truncated distribution with the trainer's, which are of the whole one."""
        comparable = arrange_logprobs(self.engine, self.sampling)
        if comparable or not getattr(module, "uses_rollout_logprobs", False):
            return
        default = SamplingSpec()
        fields = ("temperature", "top_p", "top_k", "min_p", "min_new_tokens")
        values = {name: getattr(self.sampling, name) for name in fields}
        changed = [f"{name}={value}" for name, value in values.items() if value != getattr(default, name)]
        raise ValueError(
            f"{type(module).__name__} compares the engine's log-probs with its own (a correction, or a policy loss "
            f"that asks for them), and with SamplingSpec({', '.join(changed)}) {type(self.engine).__name__} does not "
            "know them as they were before truncation, so that every weight would be wrong: do not truncate (top_p=1, "
            "top_k=0, min_p=0, min_new_tokens=0), or sample at temperature=1, where vLLM knows them too, or use "
            "LocalEngine"
        )

    def on_train_batch_end(
        self, trainer: Any, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Move on to the next prompts with the iteration's last batch.

        Not in ``on_train_epoch_end``: a checkpoint saved between the two resumes behind that hook.
        """
        if trainer.is_last_batch:
            trainer.datamodule.set_cursor(self._after)
            self.iteration += 1
            self._inside = False

    def on_train_epoch_end(self, trainer: Any, pl_module: L.LightningModule) -> None:
        """Log the iteration and publish the new policy."""
        # The numbers are the same on every rank; sync_dist only tells Lightning so.
        pl_module.log_dict(self._metrics, sync_dist=True)
        pl_module.log_dict(slowest(run_on_all_ranks(lambda: self.timing.metrics(self.iteration - 1))), sync_dist=True)
        metrics = trainer.callback_metrics  # exchanged between ranks, so every rank asks for them
        if trainer.is_global_zero:
            self.alarms.check(metrics, self.iteration - 1)
        if "rollout/reward" in self._metrics:
            pl_module.log("reward", self._metrics["rollout/reward"], prog_bar=True, logger=False, sync_dist=True)
        self.publish()

    def on_validation_batch_start(
        self, trainer: Any, pl_module: L.LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Generate and score the prompts of a validation batch with the current policy."""
        if batch_idx == 0 and dataloader_idx == 0:
            self.validation_samples = []
        self.publish()
        prompts = [prompt for share in gather_objects(list(batch)) for prompt in share]
        engine_to_itself = nullcontext() if self.ahead is None else self.ahead.held(trainer)
        with engine_to_itself:
            sampled = self._with_weights(
                lambda: {name: self.sample(prompts, way, iteration=-1) for name, way in self._validations.items()}
            )
        scored = scores_samples(trainer)
        for way, samples in sampled.items():
            if scored:
                add_model_scores(trainer, samples)
            self.validation_samples += samples
            prefix = f"val/{way}/" if way else "val/"
            metrics = validation_metrics(
                samples, success_threshold=self.success_threshold, rewarded=scored or self.reward is not None
            )
            for name, (mean, count) in metrics.items():
                pl_module.log(prefix + name, mean, prog_bar=name == "reward", batch_size=count, sync_dist=True)

    def on_validation_end(self, trainer: Any, pl_module: L.LightningModule) -> None:
        """Engines on the ranks' GPUs make room for training."""
        if self.ahead is None:
            self.engine.sleep()

    def teardown(self, trainer: Any, pl_module: L.LightningModule, stage: str) -> None:
        """Free the engine when training ends. After ``trainer.validate`` it stays, for whatever comes next."""
        if stage == "fit":
            self._close()

    def on_exception(self, trainer: Any, pl_module: L.LightningModule, exception: BaseException) -> None:
        """Free the engine after an error or an interrupt; Lightning calls no ``teardown`` then."""
        self._close()

    def _close(self) -> None:
        self.engine.close()
        if self.ahead is not None:
            self.ahead.close()
            self.ahead = self.ahead.fresh()

    def state_dict(self) -> dict[str, Any]:
        """The iteration and its metrics; prompts are the DataModule's to remember, weights the module's."""
        state = {"iteration": self.iteration, "metrics": self._metrics, "after": self._after}
        if self._inside and self._trainer is not None:
            state["inside"] = [self._trainer.global_rank, self._trainer.world_size]
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue counting where the checkpoint stopped.

        Raises:
            ValueError: If training would resume inside an iteration whose micro-batches are another rank's.
        """
        self.iteration = state_dict["iteration"]
        self._metrics = dict(state_dict["metrics"])
        self.samples, self.experience = [], None  # those of an earlier fit are not this iteration's
        self._after = state_dict["after"]
        trainer, inside = self._trainer, state_dict.get("inside")
        self._inside = inside is not None
        if trainer is None or inside is None or trainer.state.fn != TrainerFn.FITTING:
            return
        if not true_on_all_ranks(list(inside) == [trainer.global_rank, trainer.world_size]):
            raise ValueError(
                f"the checkpoint was saved inside an iteration and holds the micro-batches that rank {inside[0]} of "
                f"{inside[1]} had still to train on, not those of all {trainer.world_size} rank(s) of this run: resume "
                "with equally many ranks under a strategy that saves every rank (rlhf_zero0 ... rlhf_zero3), or from a "
                "checkpoint of the end of an iteration (ModelCheckpoint(every_n_epochs=...))"
            )

    # ------------------------------------------------------------------ inside

    def _attached(self) -> Any:
        if self._trainer is None:
            raise RuntimeError("RolloutCallback works inside a Trainer: pass it to Trainer(callbacks=[...])")
        return self._trainer
