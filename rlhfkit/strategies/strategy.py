"""``RLHFDeepSpeedStrategy``: a DeepSpeed engine for each trained child of a LightningModule, under one Trainer."""

import importlib.util
import math
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.core.optimizer import LightningOptimizer, _init_optimizers_and_lr_schedulers
from lightning.pytorch.plugins.precision import DeepSpeedPrecision, Precision
from lightning.pytorch.strategies import DeepSpeedStrategy, StrategyRegistry
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import GradClipAlgorithmType, rank_zero_warn
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor
from torch.optim import Optimizer

from rlhfkit.checkpoints.resume import attach_exact_resume
from rlhfkit.distributed import is_sharded
from rlhfkit.gpus import warn_if_cuda_is_missing
from rlhfkit.mesh import SequenceParallel
from rlhfkit.strategies.checkpoint.engine_files import require_plain_writers
from rlhfkit.strategies.checkpoint.io import EngineCheckpointMixin
from rlhfkit.strategies.deepspeed import tensor_parallel
from rlhfkit.strategies.deepspeed.engines import (
    EngineOptimizer,
    backward_through,
    create_training_engines,
    engine_config,
    place_frozen_children,
    require_known_children,
    require_unmanaged_accumulation,
)
from rlhfkit.strategies.deepspeed.gradients import discard_gradients, gradient_norm, set_clipping
from rlhfkit.strategies.deepspeed.precision import EnginePrecision, loss_scale
from rlhfkit.strategies.deepspeed.process_group import ProcessGroupMixin
from rlhfkit.strategies.deepspeed.synchronized_steps import StepOutcome, SynchronizedSteps
from rlhfkit.strategies.deepspeed.zero3 import full_state_dict, hugging_face_sharding, unshard
from rlhfkit.strategies.forward_groups import ForwardGroupMixin
from rlhfkit.strategies.ray.launcher import RayLaunchMixin, RayOptions
from rlhfkit.training_states import TrainingStates
from rlhfkit.validation import check_integer, check_number

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine


class RLHFDeepSpeedStrategy(
    ForwardGroupMixin, RayLaunchMixin, EngineCheckpointMixin, ProcessGroupMixin, DeepSpeedStrategy
):
    """Trains several child modules of one LightningModule with a DeepSpeed engine each.

    ``configure_optimizers`` returns one ordinary torch optimizer. Each direct child that owns parameter groups of it is
    replaced by its own engine while the Trainer runs. ``self.policy(...)`` and ``self.critic(...)`` keep working; the
    inner model is ``getattr(self.policy, "module", self.policy)``. Children without an optimizer are frozen and never
    saved: sharded inference engines at ZeRO stage 3, plain modules otherwise. The LightningModule itself is not
    wrapped.

    Lightning owns the accumulation window: losses are divided by ``accumulate_grad_batches`` once, and the last partial
    window of an epoch is stepped. ``gradient_clip_val`` clips each engine by its own norm, which is in
    :attr:`gradient_norms` and logged as ``grad_norm/<child>``. Batches keep their dtypes.

    Works on CPUs (gloo) and GPUs (NCCL), on one or many ranks, in fp32, bf16 and fp16.

    Args:
        stage: ZeRO stage, 0 to 3 (Rajbhandari et al. 2020, arXiv 1910.02054): shard nothing, optimizer state, also
            gradients, also parameters.
        engine_configs: Additional DeepSpeed configuration per child, for example
            ``{"critic": {"zero_optimization": {"stage": 2}}, "reference": {"zero_optimization": {"offload_param":
            {"device": "cpu"}}}}``. ``{"zero_optimization": {"stage": 0}}`` keeps a frozen child plain.
        sequence_parallel_size: Ranks, neighbours, that divide the tokens of each forward pass among themselves, so that
            rows fit that are that many times as long. They bring their micro-batches together and each keeps losses
            and metrics of its own rows, so gradients are those of as many ranks without (:mod:`rlhfkit.mesh`). Needs
            models with our packed attention.
        sequence_parallel: How attention sees all tokens: ``"ulysses"``, each rank some heads, which the ranks must
            divide (Jacobs et al. 2023, arXiv 2309.14509), or ``"ring"``, keys and values go around (Liu et al. 2023,
            arXiv 2310.01889).
        tensor_parallel_size: Ranks over which the weights of each layer are divided, neighbours with fast links; they
            compute their forward passes together (:mod:`rlhfkit.mesh`). It divides the attention heads and the number
            of ranks. Embedding and output layer stay whole; the vocabulary's logits are divided. Not for mixtures of
            experts and quantised weights.
        init_timeout: Seconds that a rank waits for all others to join; the error names the missing ones.
        launcher: Who starts the ranks: ``"ray"`` (:class:`~rlhfkit.strategies.ray.launcher.RayLauncher`) or
            ``"subprocess"``, where Lightning runs the script again. ``None``: Ray in a notebook with several devices,
            else ``"subprocess"``, or what has started them already (torchrun, SLURM, ...).
        num_nodes: With Ray: machines, each with ``Trainer(devices=...)`` ranks; ``None``: ``Trainer(num_nodes=...)``.
        resources_per_rank: With Ray: resources of a rank; default ``{"CPU": 1}``, on GPUs with ``"GPU": 1``. If only
            machines other than the driver's have GPUs, ask for them here and leave ``Trainer(accelerator=...)`` out.
        return_weights: With Ray: whether the driver's module gets the trained weights, which must fit into its memory
            and rank 0's. ``None``: if they have at most 8 GB; otherwise a log line says what to use instead.
        async_save: Whether checkpoints are written in the background: training stops only while each rank copies its
            part (weights, optimizer state, its own file) into CPU memory, which it holds until the files are on disk.
            The next save waits for the one before.
        **kwargs: Arguments of Lightning's ``DeepSpeedStrategy`` (``config``, ``offload_optimizer``,
            ``offload_parameters``, ``timeout``, ...). A ``config`` replaces all defaults, ``stage`` included.

    Raises:
        ModuleNotFoundError: If DeepSpeed is not installed.
        ImportError: If DeepSpeed is too old to leave the accumulation window to the caller.

    Example::

        trainer = L.Trainer(strategy=RLHFDeepSpeedStrategy(stage=2), devices=4, precision="bf16-true")
        trainer = L.Trainer(strategy="rlhf_zero2", devices=4, precision="bf16-true")  # the same by name
    """

    strategy_name = "rlhf_deepspeed"

    def __init__(
        self,
        stage: int = 2,
        *,
        engine_configs: Mapping[str, Mapping[str, Any]] | None = None,
        sequence_parallel_size: int = 1,
        sequence_parallel: SequenceParallel = "ulysses",
        tensor_parallel_size: int = 1,
        init_timeout: float = 600.0,
        launcher: Literal["ray", "subprocess"] | None = None,
        num_nodes: int | None = None,
        resources_per_rank: Mapping[str, float] | None = None,
        return_weights: bool | None = None,
        async_save: bool = False,
        **kwargs: Any,
    ) -> None:
        if importlib.util.find_spec("deepspeed") is None:
            raise ModuleNotFoundError(
                "RLHFDeepSpeedStrategy needs DeepSpeed, which is not installed: pip install 'rlhfkit[deepspeed]'."
            )
        check_integer("stage", stage, minimum=0, maximum=3)
        self.divide_sequences(sequence_parallel_size, sequence_parallel)
        if not isinstance(async_save, bool):
            raise TypeError(f"async_save must be True or False, got {async_save!r}.")
        check_integer("tensor_parallel_size", tensor_parallel_size, minimum=1)
        check_number("init_timeout", init_timeout, above=0, why="it is in seconds")
        self._ray_options = RayOptions(launcher, num_nodes, resources_per_rank, return_weights)
        kwargs.setdefault("accelerator", self._ray_options.accelerator)
        if kwargs.get("cluster_environment") is None:  # configuration files write Lightning's default, None
            kwargs["cluster_environment"] = self._ray_options.cluster_environment
        if not torch.cuda.is_available():
            os.environ.setdefault("DS_ACCELERATOR", "cpu")  # read once, when DeepSpeed is first imported
            warn_if_cuda_is_missing()
        require_unmanaged_accumulation()
        kwargs.setdefault("exclude_frozen_parameters", True)
        kwargs.setdefault("logging_batch_size_per_gpu", 1)  # "auto" would ask the dataloader for a batch size
        super().__init__(stage=stage, **kwargs)
        self.tensor_parallel_size = tensor_parallel_size
        self._tensor_plans: dict[str, dict[str, Any]] = {}  # sections of the configurations of children
        self.engine_configs = {name: dict(config) for name, config in (engine_configs or {}).items()}
        self.init_timeout = init_timeout
        self.async_save = async_save
        self.engines: dict[str, DeepSpeedEngine] = {}
        """Training engines by child name, while the Trainer runs."""
        self.frozen_engines: dict[str, DeepSpeedEngine] = {}
        """Sharded inference engines of frozen children by name, while the Trainer runs."""
        self.gradient_norms: dict[str, float] = {}
        """Norm of each engine's last gradient over all ranks, before clipping; infinite if the update was skipped."""
        self.skipped_updates = 0
        """Optimizer steps of this run that were skipped because a loss or gradient was not finite on some rank."""
        self.rescaled_updates = 0
        """Optimizer steps of this run that were skipped to lower the dynamic loss scale of fp16, which is normal."""
        self.frozen_children: set[str] = set()
        """Names of the children that are not trained, while the Trainer runs."""
        self._accumulating: set[str] = set()
        self.training_states: TrainingStates | None = None
        """Weights, gradients and optimizer states, which can wait in CPU memory, while the Trainer runs."""

    # ----------------------------------------------------------------------------------------------------- start-up

    @property
    def precision_plugin(self) -> Precision:
        """Always an :class:`EnginePrecision`."""
        return super().precision_plugin

    @precision_plugin.setter
    def precision_plugin(self, plugin: Precision | None) -> None:
        if plugin is not None and not isinstance(plugin, EnginePrecision):
            if not isinstance(plugin, DeepSpeedPrecision):
                raise MisconfigurationException(
                    f"{type(self).__name__} sets precision through DeepSpeed; use Trainer(precision='bf16-true') or"
                    f" another precision string instead of the plugin {type(plugin).__name__}."
                )
            plugin = EnginePrecision(plugin.precision, self._set_clipping)
        self._precision_plugin = plugin

    def setup(self, trainer: pl.Trainer) -> None:
        """Create optimizers and engines, and replace the children of the module by their engines."""
        self._init_config_if_needed()
        assert self.accelerator is not None
        assert self.lightning_module is not None
        self.accelerator.setup(trainer)
        module = self.lightning_module
        self._refuse_unsupported(module)
        for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
            tensor.data = tensor.data.to(self.root_device)

        self.attach_forward_group(module)
        tensor_group = self._divide_weights(module)
        for name, child in module.named_children():
            if self._stage_of(name) != 3:
                unshard(child)  # if it was built sharded, or left sharded by an earlier run

        self.optimizers, self.lr_scheduler_configs = [], []
        if trainer.state.fn == TrainerFn.FITTING:
            optimizers, self.lr_scheduler_configs = _init_optimizers_and_lr_schedulers(module)
            require_known_children(module, self.engine_configs)
            self.engines, made = create_training_engines(
                module, optimizers, self.config_of, self.root_device, tensor_group
            )
            self.optimizers = [EngineOptimizer(base, engines, self.discard_gradients) for base, engines in made]
            self._steps = SynchronizedSteps(self.engines, self.root_device)
            if self.async_save:
                require_plain_writers(self.engines)
        rest = {name for name, _ in module.named_children() if name not in self.engines}
        self.frozen_children, self.frozen_engines = place_frozen_children(
            module, rest, self.config_of, self.root_device, self._training_dtype, tensor_group
        )
        for name, engine in {**self.engines, **self.frozen_engines}.items():
            module._modules[name] = engine
        self._set_deepspeed_activation_checkpointing()
        self.training_states = TrainingStates(module, self._state_holders, self.root_device)
        attach_exact_resume(trainer, module)
        self.barrier()

    def _divide_weights(self, module: pl.LightningModule) -> Any:
        """Plan how tensor parallelism divides each child; returns the process group of this rank's parts, or None."""
        group = self.forward_group
        self._tensor_plans = tensor_parallel.plan_children(module, self.mesh, group, self.root_device)
        return None if group is None else group.tensor

    def config_of(self, child: str, *, trainable: bool) -> dict[str, Any]:
        """Return the complete DeepSpeed configuration of a child, after the Trainer has set the precision."""
        assert isinstance(self.config, dict)
        config = engine_config(self.config, self.engine_configs.get(child, {}), trainable=trainable)
        if child in self._tensor_plans:
            config["tensor_parallel"] = self._tensor_plans[child]
        return config

    def _stage_of(self, child: str) -> int:
        return int(self.config_of(child, trainable=True)["zero_optimization"].get("stage", 0))

    def _format_batch_size_and_grad_accum_config(self) -> None:
        """Raise MisconfigurationException for settings of the Trainer, which Lightning's version would add."""
        assert isinstance(self.config, dict)
        for key in ("gradient_accumulation_steps", "gradient_clipping", "optimizer", "scheduler"):
            if key in self.config:
                raise MisconfigurationException(
                    f"Remove '{key}' from the DeepSpeed config: use Trainer(accumulate_grad_batches=...,"
                    " gradient_clip_val=...) and configure_optimizers instead."
                )

    def _refuse_unsupported(self, module: pl.LightningModule) -> None:
        if module.trainer.gradient_clip_algorithm == GradClipAlgorithmType.VALUE:
            raise MisconfigurationException("DeepSpeed clips by norm only; use gradient_clip_algorithm='norm'.")
        if is_overridden("backward", module, pl.LightningModule):
            rank_zero_warn(f"{type(module).__name__}.backward is not called: DeepSpeed engines run the backward pass.")

    # ----------------------------------------------------------------------------------------------- building models

    @property
    def stage(self) -> int:
        """ZeRO stage of children that :attr:`engine_configs` does not override."""
        assert isinstance(self.config, dict)
        return int((self.config.get("zero_optimization") or {}).get("stage", 0))

    @property
    def zero_stage_3(self) -> bool:
        """Whether every parameter is sharded; Lightning's model summary for ZeRO 3 fails otherwise."""
        if self.stage != 3 or self.lightning_module is None:
            return self.stage == 3
        return all(map(is_sharded, self.lightning_module.parameters()))

    @contextmanager
    def model_sharded_context(self) -> Iterator[None]:
        """Shard Hugging Face models at stage 3 while ``configure_model`` builds or loads them.

        With tensor parallelism each rank builds them whole, in CPU memory: DeepSpeed 0.19.8 would shard over all ranks
        what must be sharded over those with the same part only.
        """
        self._init_config_if_needed()
        early = self.stage == 3 and self.tensor_parallel_size == 1
        with hugging_face_sharding(self.config_of("", trainable=True) if early else None):
            yield

    @contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Iterator[None]:
        """Do nothing: models are built on the CPU or sharded, and moved by their engines."""
        yield

    def consolidated_state_dict(self, child: str) -> dict[str, Tensor]:
        """Return the full weights of one child on the CPU of rank 0, gathered module by module. A collective.

        Other ranks get an empty dictionary. Tied weights share one tensor.

        Args:
            child: Name of a direct child of the LightningModule.
        """
        if self.training_states is not None:
            self.training_states.reload_states()
        return full_state_dict(self.unwrapped_child(child), keep=self.is_global_zero)

    # ---------------------------------------------------------------------------------------------------- optimizing

    @property
    def handles_gradient_accumulation(self) -> bool:
        """False: Lightning owns the accumulation window."""
        return False

    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        """Back-propagate through all engines that the loss depends on."""
        assert self.lightning_module is not None
        closure_loss = self.precision_plugin.pre_backward(closure_loss, self.lightning_module)
        names = backward_through(self.engines, closure_loss, **kwargs)
        self._steps.after_backward(names, closure_loss)
        self._accumulating.update(names)
        return self.precision_plugin.post_backward(closure_loss, self.lightning_module)

    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        """Run the closure (forward and backward), then step all engines of ``optimizer``.

        If a loss or gradient is not finite on some rank, no engine is stepped: weights and optimizer states stay
        bitwise the same, while learning-rate schedules and ``global_step`` advance.
        """
        module = self.lightning_module
        assert module is not None
        assert isinstance(optimizer, EngineOptimizer)
        result = closure()
        # Runs the module's hooks and clips. It never calls step(), whose type EngineOptimizer narrows.
        self.precision_plugin._after_closure(module, optimizer)  # type: ignore[arg-type]
        if result is None and module.automatic_optimization:
            raise MisconfigurationException(
                "training_step returned None: ranks that skip a step would leave the others waiting. Return a loss of"
                " zero that depends on the output instead."
            )
        outcome = self._steps.step(optimizer.engines)
        self.skipped_updates += outcome is StepOutcome.SKIPPED
        self.rescaled_updates += outcome is StepOutcome.RESCALED
        for name, engine in optimizer.engines.items():
            self._accumulating.discard(name)
            self.gradient_norms[name] = gradient_norm(engine) if outcome is StepOutcome.STEPPED else math.inf
            if self._steps.was_skipped(name):
                self.gradient_norms[name] = 0.0
            set_clipping(engine, 0.0)
            if not module.trainer.barebones:
                module.log(f"grad_norm/{name}", self.gradient_norms[name])
        if not module.trainer.barebones:
            module.log("skipped_updates", float(self.skipped_updates))
            half = {name: engine for name, engine in optimizer.engines.items() if engine.fp16_enabled()}
            if half:
                module.log("rescaled_updates", float(self.rescaled_updates))
            for name, engine in half.items():
                module.log(f"loss_scale/{name}", loss_scale(engine))
        optimizer.mark_stepped()
        return result

    def discard_gradients(self, child: str) -> None:
        """Drop the gradients accumulated for one child since its last step."""
        if child in self._accumulating:
            discard_gradients(self.engines[child])
            self._steps.reset(child)
            self._accumulating.discard(child)

    def skip_update(self, child: str) -> None:
        """Leave one child out of the coming optimizer step; call it in ``on_before_optimizer_step`` on all ranks.

        The child's gradients are dropped, its weights and optimizer state stay bitwise the same, and its gradient norm
        is reported as 0.

        Args:
            child: Name of a child with an engine.
        """
        self.discard_gradients(child)
        self._steps.skip_update(child)

    def _set_clipping(self, optimizer: Optimizer, norm: float) -> None:
        if isinstance(optimizer, LightningOptimizer):
            optimizer = optimizer.optimizer
        assert isinstance(optimizer, EngineOptimizer)
        for engine in optimizer.engines.values():
            set_clipping(engine, norm)

    def _state_holders(self) -> Iterator[object]:
        engines = self.engines.values()
        return (holder for engine in engines for holder in (engine.optimizer, engine.basic_optimizer))

    # ------------------------------------------------------------------------------------------------------- the end

    @property
    def deepspeed_engine(self) -> "DeepSpeedEngine":
        """The only training engine; with several, use :attr:`engines`."""
        if len(self.engines) != 1:
            raise AttributeError(f"There are {len(self.engines)} training engines ({sorted(self.engines)}).")
        return next(iter(self.engines.values()))

    def teardown(self) -> None:
        """Put the children back. At stage 3 on several ranks their parameters stay sharded: they may not fit."""
        self._finish_saves()  # first: if it fails, hooks for errors may save once more
        module = self.lightning_module
        if self.training_states is not None:
            self.training_states.reload_states()
        self.training_states = None
        if self.engines:
            self._steps.remove()
        for name, engine in {**self.engines, **self.frozen_engines}.items():
            if module is not None and module._modules.get(name) is engine:
                module._modules[name] = engine.__dict__["module"]  # the raw child
            engine.destroy()
            if self.world_size == 1:
                unshard(engine.module)
        if module is not None and self.tensor_parallel_size == 1:  # else the weights stay divided
            self.detach_forward_group(module)
        self.engines, self.frozen_engines = {}, {}
        self._accumulating = set()
        self.optimizers = []  # otherwise Lightning would move their state, which belongs to the engines
        super().teardown()


# ---------------------------------------------------------------- names

_NAMES: dict[str, dict[str, Any]] = {
    "rlhf_zero0": {"stage": 0},
    "rlhf_zero1": {"stage": 1},
    "rlhf_zero2": {"stage": 2},
    "rlhf_zero3": {"stage": 3},
    "rlhf_zero1_offload": {"stage": 1, "offload_optimizer": True},
    "rlhf_zero2_offload": {"stage": 2, "offload_optimizer": True},
    "rlhf_zero3_offload": {"stage": 3, "offload_optimizer": True, "offload_parameters": True},
}


def register() -> None:
    """Add the names to Lightning's strategy registry; DeepSpeed is imported only when a Trainer uses one of them."""
    for name, arguments in _NAMES.items():
        where = " with the optimizer" if "offload_optimizer" in arguments else ""
        where += " and the parameters" if "offload_parameters" in arguments else ""
        StrategyRegistry.register(
            name,
            RLHFDeepSpeedStrategy,
            description=f"One DeepSpeed engine per child module, ZeRO stage {arguments['stage']}"
            + (f"{where} in CPU memory" if where else ""),
            override=True,
            **arguments,
        )
