"""A critic on machines of its own: ``FrozenCritic`` asks a pool that nobody trains, ``RemoteCritic`` ranks that do.

These ranks train a ``CriticModule``.
"""

import math
import os
import shutil
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import lightning as L
import numpy as np
import torch
from torch import Tensor, nn

from rlhfkit.data.types import Experience
from rlhfkit.distributed import gather_objects, get_rank, run_on_all_ranks, run_on_each_rank
from rlhfkit.losses import LossOutput, weighted_metric
from rlhfkit.models import LoRA, ModelLoading
from rlhfkit.models.heads import critic_values, load_scalar_model
from rlhfkit.models.load import base_model_name
from rlhfkit.modules.base import PolicyModule
from rlhfkit.modules.checkpointing import CheckpointMixin, write_pretrained
from rlhfkit.modules.metrics import StepMetrics, as_metrics
from rlhfkit.modules.optim import ENDLESS, Optimization
from rlhfkit.modules.parts.routers import RouterLoss, with_critic_router
from rlhfkit.parts import GivenPart, Part, make_part
from rlhfkit.protocols import RLHFStrategy
from rlhfkit.roles import CriticPool, CriticPoolError
from rlhfkit.roles.critic_pool import PendingAnswer
from rlhfkit.roles.critic_rank import CriticRun
from rlhfkit.rollout.weight_sync.source import AdapterWeights, ModuleWeights

T = TypeVar("T")
_FILES = "critic_files"
"""Key of a checkpoint that is one file: the files of the critic's own checkpoint, as bytes."""
_FOLDER = "critic"
"""Folder of the critic's own checkpoint in a checkpoint that is a folder."""


class FrozenCritic:
    """Asks the replicas of a module's frozen critic for the values of this rank's rows.

    Args:
        module: The module.
    """

    def __init__(self, module: Any) -> None:
        self._module = module
        self._rows = torch.zeros(0, dtype=torch.bool)  # (B,), those that were asked for

    def ask_values(self, experience: Experience, rows: Tensor | None = None) -> None:
        """Ask for the values of this rank's rows, (B,) bool of which may be chosen; returns at once. A collective."""
        self._rows = torch.ones(len(experience), dtype=torch.bool) if rows is None else rows
        wanted = experience if rows is None else experience.select(rows.nonzero()[:, 0])
        self._module.placed.ask("critic", wanted)

    def values(self, experience: Experience) -> Tensor:
        """(B, T-1) float32 values that were asked for, on the CPU; 0 in other rows. A collective."""
        found = self._module.placed.result("critic")
        values = torch.zeros(experience.action_mask.shape)
        values[self._rows, : found.shape[1]] = found
        return values


class RemoteCritic(Part):
    """What ``Critic(CriticPool(...))`` brings: sends the rows of this rank to the critic's ranks, which train it.

    Args:
        pool: The critic's ranks.
        lr: Peak learning rate of the critic.
    """

    def __init__(self, pool: CriticPool, *, lr: float) -> None:
        self.pool, self.lr = pool, lr
        self.value_loss: Part | None = None
        """The loss that it is trained with, which :class:`~rlhfkit.modules.parts.critic.Critic` finds."""
        self._values: PendingAnswer | None = None
        self._batches: list[Tensor] = []  # rows of each forward pass of the values that were asked for
        self._restored: Path | Mapping[str, Tensor] | None = None  # the critic's checkpoint, until it has started

    # ------------------------------------------------------------------ the run

    def on_train_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        """Start the critic's ranks, from the checkpoint that was loaded if there is one. A collective.

        Raises:
            CriticPoolError: On all ranks, if they were not ready in time.
            RuntimeError: If an earlier fit has trained the critic, and no checkpoint continues it.
        """
        module, restored = pl_module, self._restored
        if restored is None and trainer.global_step:
            raise CriticPoolError(
                "the checkpoint has no critic: it was saved by a run whose critic was in the module, or after the "
                "critic's ranks had ended. Start a new run from exported weights"
            )
        if restored is None and self.pool.trained:
            raise CriticPoolError(
                "the ranks that trained the critic have ended with the last fit: continue it with fit(ckpt_path=...),"
                " or export the critic with save_pretrained(child='critic') and start from CriticPool(folder)"
            )
        self._restored, folder, root = None, None, Path(trainer.default_root_dir)
        if isinstance(restored, Path):
            folder = restored
        elif restored is not None:
            folder = root / f".critic-{os.getpid()}"
            if get_rank() == 0:
                _write_files(folder, restored)
        steps = math.inf
        if module.optimization.lr_schedule not in ENDLESS or module.optimization.warmup_ratio:
            steps = trainer.estimated_stepping_batches
        run = CriticRun(
            make_module=self._module_maker(module),
            make_strategy=None,
            precision=trainer.precision,
            gradient_clip_val=trainer.gradient_clip_val,
            total_steps=None if math.isinf(steps) else int(steps),
            num_nodes=1,
            device="cpu",
            checkpoint=None if folder is None else str(folder),
            root=str(root),
        )
        self.pool.start(run)
        if folder is not None and folder is not restored and get_rank() == 0:
            shutil.rmtree(folder, ignore_errors=True)

    def teardown(self, trainer: L.Trainer, pl_module: Any, stage: str) -> None:
        """End the ranks.

        Lightning does not call it after an error, of which a checkpoint may need them: they then live until the next
        fit or the end of this process.
        """
        self.pool.close()

    def work_elsewhere(self) -> list[tuple[str, str, float, float]]:
        """When the ranks have worked lately."""
        return list(self.pool.work())

    def _module_maker(self, module: Any) -> Callable[[], "CriticModule"]:
        assert self.value_loss is not None
        model, build = self.pool.model, None
        if callable(model):
            model, build = None, model
        chosen = module.optimization
        if self.pool.optimizer:
            arguments = self.pool.optimizer_arguments
            chosen = replace(chosen, optimizer=self.pool.optimizer, optimizer_arguments=arguments)
        return partial(
            _make_critic,
            module.given_tokenizer,
            model or base_model_name(module.model_name),
            build=build,
            lr=self.lr,
            value_loss=self.value_loss.plain(),
            optimization=chosen,
            lora=module.lora,
            loading=module.loading,
            parts=[RouterLoss(part.coef) for part in module.parts if isinstance(part, RouterLoss)],
        )

    # ------------------------------------------------------------------ an iteration

    def ask_values(self, experience: Experience, rows: Tensor | None = None) -> None:
        """Ask for the values of this rank's rows, (B,) bool of which may be chosen; returns at once."""
        self._batches = self.module.passes.batches(experience, rows)
        self._values = self.pool.ask_values(experience, self._batches)

    def values(self, experience: Experience) -> Tensor:
        """(B, T-1) float32 values that were asked for, on the CPU; 0 in other rows. A collective."""
        asked, self._values = self._values, None
        assert asked is not None
        values = torch.zeros(experience.action_mask.shape)

        def collect() -> None:
            for share in asked.result():
                for number, found in (self.pool.fetch(share[get_rank()][0]) if get_rank() in share else {}).items():
                    values[self._batches[number], : found.shape[1]] = found

        self._on_all(collect)
        return values

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Hand the ranks their micro-batch."""
        self.pool.train(batch, trainer.accumulate_grad_batches)

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        """Wait until all micro-batches that were sent are trained on, and log their metrics. A collective."""
        answers: list[Any] = self._on_all(self.pool.report().result)
        pl_module.log_dict(dict(answers[0]), sync_dist=True)  # the same on all ranks

    def _on_all(self, step: Callable[[], T]) -> T:
        """Run a step that waits for the critic; if it fails on one rank, it ends, and all raise. A collective."""
        try:
            return run_on_each_rank(step, error_type=CriticPoolError)
        except Exception:
            self.pool.close()
            raise

    # ------------------------------------------------------------------ checkpoints and exports

    def export(self, child: str, folder: Path, **options: Any) -> bool:
        """Write the critic as a Hugging Face folder: its ranks do, or after a fit rank 0. A collective.

        Raises:
            ValueError: If the ranks have ended and their weights were not kept, or there were none.
        """
        if child != "critic":
            return False
        if self.pool.started:
            asked = self.pool.ask("export", {"folder": str(folder.absolute()), "options": options}, what="an export")
            self._on_all(asked.result)
        else:
            run_on_all_ranks(lambda: self._export_kept(folder, **options) if get_rank() == 0 else None)
        return True

    def _export_kept(self, folder: Path, *, adapter: bool, dtype: torch.dtype | None) -> None:
        """Write the weights that were kept after a fit. On rank 0 alone."""
        if self.pool.weights is None:
            raise ValueError(
                "the critic's ranks do not run, and rank 0 has no weights of theirs (it keeps those of at most 8 GB "
                "after a fit): export in a callback's on_train_epoch_end, or run rlhfkit export on the folder "
                "module/critic of a checkpoint"
            )
        trained = self._module_maker(self.module)()
        trained.configure_model()
        trained.critic.load_state_dict(self.pool.weights)
        kind = AdapterWeights if adapter else ModuleWeights
        source = kind(trained.critic, dtype=dtype, check_finite=False)  # the check is a collective
        weights = {name: tensor.clone() for name, tensor in source}
        bad = [name for name, tensor in weights.items() if not bool(tensor.isfinite().all())]
        if bad:
            raise ValueError(
                f"{len(bad)} of {len(weights)} weights of the critic are not finite (first: {bad[0]!r}): it has "
                "diverged; lower critic_lr, and resume from the last checkpoint"
            )
        write_pretrained(trained.critic, folder, weights, adapter=adapter)
        trained.tokenizer.save_pretrained(folder)

    def save_weights(self, checkpoint: dict[str, Any]) -> None:
        """Add the critic to a checkpoint that is one file, unless it is a folder. A collective."""
        trainer = self.module.trainer
        strategy = trainer.strategy
        if not self.pool.started or (isinstance(strategy, RLHFStrategy) and strategy.saves_folders):
            return
        folder = Path(trainer.default_root_dir) / f".critic-{uuid.uuid4().hex[:8]}"
        folder = Path(gather_objects(str(folder))[0])  # that of rank 0
        self._on_all(self.pool.save(folder).result)
        if get_rank() == 0:
            checkpoint[_FILES] = _read_files(folder)
            shutil.rmtree(folder, ignore_errors=True)

    def load_weights(self, checkpoint: Mapping[str, Any]) -> None:
        """Continue with the critic of a checkpoint that is one file, if it is in it."""
        if _FILES in checkpoint:
            self._restored = checkpoint[_FILES]

    def save_folder(self, folder: Path) -> None:
        """Save the critic in a folder of a checkpoint."""
        self.pool.save(folder / _FOLDER).result()

    def load_folder(self, folder: Path) -> None:
        """Continue with the critic in a folder of a checkpoint, if it is there."""
        if (folder / _FOLDER).is_dir():
            self._restored = folder / _FOLDER


class CriticModule(PolicyModule):
    """A critic, ``self.critic``, that learns returns which others have computed.

    Its batches are micro-batches of a ``PPOModule`` with values and returns, each with a factor of its loss.

    Args:
        model: Folder or hub name of the critic's initial model.
        build: Makes the critic in place of ``model``; picklable.
        value_loss: The loss, a :class:`~rlhfkit.modules.parts.critic.ValueLoss`, also as plain values.
        lr: Peak learning rate (9e-6: OpenRLHF's default).
        optimization: Optimizer and schedule of the learning rate, see :class:`~rlhfkit.Optimization`.
        lora: Train adapters, not the model's own weights, see :class:`~rlhfkit.LoRA`.
        loading: Technical options of the model, see :class:`~rlhfkit.ModelLoading`.
        parts: More features, see :class:`~rlhfkit.modules.PolicyModule`.
    """

    critic: nn.Module
    batch_types = ()

    def __init__(
        self,
        model: str,
        *,
        value_loss: Part | Mapping[str, Any],
        build: Callable[[], nn.Module] | None = None,
        lr: float = 9e-6,
        optimization: Optimization | None = None,
        lora: LoRA | None = None,
        loading: ModelLoading | None = None,
        parts: Sequence[GivenPart] = (),
    ) -> None:
        super().__init__(model, lr=lr, optimization=optimization, lora=lora, loading=loading, parts=parts)
        self.build = build
        self.value_loss: Any = make_part(value_loss)
        self.keep_plain(build=None, value_loss=self.value_loss.plain())  # a function is in no checkpoint
        self._since_report = StepMetrics()

    def setup(self, stage: str) -> None:
        """Prepare exact resume."""
        CheckpointMixin.setup(self, stage)  # PolicyModule's also measures a policy

    def configure_model(self) -> None:
        """Build the critic, once."""
        if not hasattr(self, "critic"):
            self.critic = self.build_critic()

    def build_critic(self) -> nn.Module:
        """Load the critic, or make it with ``build``."""
        if self.build is not None:
            return self.build()
        return load_scalar_model(
            self.model_name,
            dtype=self.model_dtype,
            lora=self.lora,
            loading=self.loading,
        )

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Do nothing: the training ranks check the rows of their batches."""

    def value_output(self, batch: Experience) -> Tensor:
        """(B, T-1) float32 values of the states in which tokens were chosen; 0 outside the mask."""
        return critic_values(self.critic, batch, batch.action_mask)[0]

    def training_step(self, batch: tuple[Experience, float], batch_idx: int) -> Tensor:
        """Compute the value loss of one micro-batch."""
        rows, scale = batch
        values, router_loss = critic_values(self.critic, rows, rows.action_mask, router_aux_loss=self.balances_routers)
        found = self.value_loss.loss(rows, values)
        metrics = {**found.metrics, "value/loss": weighted_metric(found.loss * scale, 1.0)}
        result = LossOutput(self.value_loss.coef * found.loss, metrics)
        if router_loss is not None:
            result = with_critic_router(self, result, router_loss, rows.action_mask)
        self._since_report.add("report", as_metrics(result.metrics, rows.action_mask.sum(), self.device))
        return result.loss * scale

    def take_metrics(self) -> Mapping[str, Tensor]:
        """The metrics of all micro-batches since the last call, over all ranks. A collective."""
        return self._since_report.take()


def _read_files(folder: Path) -> dict[str, Tensor]:
    files = (file for file in sorted(folder.rglob("*")) if file.is_file())
    return {file.relative_to(folder).as_posix(): torch.from_numpy(np.fromfile(file, dtype=np.uint8)) for file in files}


def _make_critic(tokenizer: Any, *arguments: Any, **options: Any) -> CriticModule:
    """Make the module of a critic that is saved with the run's ``tokenizer``; ``None``: with its model's."""
    made = CriticModule(*arguments, **options)
    if tokenizer is not None:
        made.tokenizer = tokenizer
    return made


def _write_files(folder: Path, files: Mapping[str, Tensor]) -> None:
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        content.numpy().tofile(folder / name)
