"""A run that was stopped and resumed is bit for bit the straight one, with the device's random numbers in it."""

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu_check.check import Figure, Setting, check
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
