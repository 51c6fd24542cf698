"""A run that was stopped and resumed is bit for bit the straight one, with the device's random numbers in it."""

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu_check.check import Figure, Setting, check
from benchmarks.gpu_check.compare import distance
from benchmarks.gpu_check.models import tiny_model


def run(setting: Setting, folder: Path, kind: str, save: Any, resume: Path | None) -> Tensor:
    """The weights after a run of adapters with dropout, or of GRPO."""
    import lightning as L

    from benchmarks.gpu_check.runs import Answers, Prompts, digits, trainer, weights_of
    from rlhfkit import GRPOModule, LoRA, RolloutCallback, SamplingSpec, SFTModule

    L.seed_everything(1, verbose=False)
    callbacks: list[L.Callback] = [] if save is None else [save]
    model = str(folder / "model")
    if kind == "tokens":
        module: Any = SFTModule(model, lr=1e-2, lora=LoRA(rank=4, dropout=0.3))
        data: Any = Answers("tokens")
    else:
        module, data = GRPOModule(model, lr=1e-3, kl_coef=0.05), Prompts()
        sampling = SamplingSpec(group_size=4, max_new_tokens=8)
        callbacks.insert(0, RolloutCallback(digits, sampling=sampling))
    fit = trainer(setting, folder, max_epochs=setting.size(3, 2), accumulate_grad_batches=2, callbacks=callbacks)
    fit.fit(module, data, ckpt_path=None if resume is None else str(resume))
    return weights_of(module)


@check("resume/bitwise", seconds=90, process="deterministic")
def resumed_is_straight(setting: Setting) -> Iterator[Figure]:
    """Stopped inside an epoch, and inside an iteration of GRPO; kernels are deterministic where torch has such."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield from _resume(setting)
    finally:
        torch.use_deterministic_algorithms(False)


def _resume(setting: Setting) -> Iterator[Figure]:
    from benchmarks.gpu_check.runs import SaveAfter

    for kind, batches in (("tokens", 6), ("prompts", 6)):
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            tiny_model(folder / "model")
            save = SaveAfter(folder / "saved.ckpt", batches)
            straight = run(setting, folder, kind, save, None)
            again = run(setting, folder, kind, None, None)
            resumed = run(setting, folder, kind, None, folder / "saved.ckpt")
        name = {"tokens": "adapters with dropout", "prompts": "GRPO"}[kind]
        noise = float((straight - again).abs().max())
        yield Figure(f"{name}: largest difference of two straight runs", noise)
        # No run can be nearer to another than the device's kernels are to themselves.
        yield Figure(f"{name}: largest difference when resumed", float((straight - resumed).abs().max()), 2 * noise)
        yield Figure(f"{name}: weights that are not finite", int((~straight.isfinite()).sum()), 0)


def reloading(folder: Path, batches: int) -> Any:
    """A callback that after some batches loads the engines with what a resume on other ranks would give them."""
    import lightning as L

    from rlhfkit.strategies.checkpoint import universal
    from rlhfkit.strategies.checkpoint.directory import read_manifest

    class Reload(L.Callback):
        left = batches

        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            self.left -= 1
            if self.left:
                return
            strategy, path = trainer.strategy, folder / "saved.ckpt"
            trainer.save_checkpoint(path)
            manifest = read_manifest(path)
            names = sorted(manifest["engines"])
            with universal.converted(path, names, manifest, timeout=60) as converted:
                for name in names:
                    (tag,) = (entry.name for entry in (converted / name).iterdir() if entry.is_dir())
                    universal.load_converted(strategy.engines[name], converted / name, tag)
            for optimizer in strategy.optimizers:
                optimizer.share_groups()

    return Reload()


@check("resume/other_ranks", seconds=120, packages=("deepspeed",), process="deepspeed", simulated=False)
def resumed_on_other_ranks(setting: Setting) -> Iterator[Figure]:
    """What ranks of another number would load, on one: the fused optimizer goes on where it was."""
    from benchmarks.gpu_check.correctness.deepspeed import moved, prepare
    from benchmarks.gpu_check.runs import Answers, Published, trainer
    from rlhfkit import SFTModule

    prepare()
    for stage in (1, 2, 3):
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            tiny_model(folder / "model")
            ends = []
            for more in ([], [reloading(folder, 4)]):
                published = Published()
                options = {"max_epochs": 2, "accumulate_grad_batches": 2, "callbacks": [published, *more]}
                run = trainer(setting, folder, strategy=f"rlhf_zero{stage}", **options)
                module = SFTModule(str(folder / "model"), lr=1e-3, optimizer_arguments={"fused": True})
                run.fit(module, Answers("tokens"))
                ends.append(moved(published))
        yield Figure(f"ZeRO {stage}: what the weights have moved", distance(*ends), 1e-3)
