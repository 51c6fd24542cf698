"""Modules on a GPU against the CPU and against themselves: steps, precisions, training states that leave, resuming.

Numbers of steps are those of ``simulated_device/test_training.py``, with a GPU's order of sums: TF32 is off.
"""

from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from rl_runs import SaveAt, digits, setup_run, weights
from step_cases import KINDS
from tiny_models import tiny_model

from gpu.cases import ACCELERATORS, difference, texts
from gpu.comparing import Figures
from gpu.launch import launch
from rlhfkit import LocalEngine, LoRA, RolloutCallback, SamplingSpec, SFTModule
from rlhfkit.callbacks import SharedDevices

APART = 2e-4
"""Largest difference of a loss, or of a weight that SGD has moved."""
SAMPLING = SamplingSpec(group_size=4, max_new_tokens=8)


def grpo(folder: Path, device: str, *, rollouts: dict[str, Any] | None = None, **arguments: Any) -> Any:
    """Trainer, module, data and callback of two iterations."""
    callback = RolloutCallback(digits, sampling=SAMPLING, **(rollouts or {}))
    return setup_run(folder, rollouts=callback, accelerator=ACCELERATORS[device], **arguments)


@pytest.mark.parametrize("kinds", [list(KINDS)[:9], list(KINDS)[9:]], ids=["without engines", "with engines"])
def test_two_steps_of_any_module_are_those_of_the_cpu(
    device: str, kinds: list[str], tmp_path: Path, figures: Figures
) -> None:
    shown = kinds if device == "cuda" else kinds[:2]
    figures.add(launch("gpu.cases:every_module", 1, tmp_path, on=device, device=device, kinds=shown)[0], APART)


@pytest.mark.parametrize("precision", ["bf16-true", "bf16-mixed"])
def test_log_probs_of_engine_and_trainer_agree_in_16_bits(
    device: str, precision: str, tmp_path: Path, figures: Figures
) -> None:
    """Of sampled tokens, by two kernels in 8 bits: decoding with a cache, and the packed row."""
    trainer, module, data, _ = grpo(tmp_path, device, precision=precision)
    trainer.fit(module, data)
    apart = float(trainer.callback_metrics["rollout_corr/logprob_abs_diff_mean"])
    figures("mean difference in nats", apart, 0.05)


@pytest.mark.parametrize(
    "options",
    [{"parts": ([SharedDevices(False)], [SharedDevices(True)])}, {"engine": (True, False)}],
    ids=["states leave", "weights copied"],
)
def test_where_states_and_weights_are_changes_no_bit(
    device: str, options: dict[str, Any], tmp_path: Path, figures: Figures
) -> None:
    """Training states in CPU memory while the engine generates; an engine with weights of its own."""
    ((name, values),) = options.items()
    ends, samples = [], []
    for number, value in enumerate(values):
        rollouts = {name: LocalEngine(share_weights=value) if name == "engine" else value}
        trainer, module, data, callback = grpo(tmp_path / str(number), device, rollouts=rollouts)
        trainer.fit(module, data)
        ends.append(weights(module))
        samples.append([sample.token_ids.tolist() for sample in callback.samples])
    assert samples[0] == samples[1]
    figures("weights", difference(ends[1], {key: value.cpu() for key, value in ends[0].items()}), 0.0)


@pytest.mark.parametrize("kind", ["adapters with dropout", "GRPO"])
def test_a_resumed_run_is_the_straight_one(device: str, kind: str, tmp_path: Path, figures: Figures) -> None:
    """Stopped inside an epoch, and inside an iteration; no run is nearer to another than kernels to themselves."""
    tiny_model(tmp_path / "model")

    def run(callbacks: list[L.Callback], checkpoint: Path | None) -> dict[str, torch.Tensor]:
        L.seed_everything(1, verbose=False)
        if kind == "GRPO":
            arguments = {"lr": 1e-3, "kl_coef": 0.05}
            trainer, module, data, _ = grpo(tmp_path, device, callbacks=callbacks, module_arguments=arguments)
            trainer.fit(module, data, ckpt_path=checkpoint)
            return weights(module)
        module = SFTModule(str(tmp_path / "model"), lr=1e-2, lora=LoRA(rank=4, dropout=0.3))
        texts(tmp_path, module, device, callbacks, ckpt_path=checkpoint)
        return weights(module)

    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        straight = run([SaveAt(tmp_path / "saved.ckpt")], None)
        again, resumed = run([], None), run([], tmp_path / "saved.ckpt")
    finally:
        torch.use_deterministic_algorithms(False)
    on_cpu = partial(difference, expected={name: value.cpu() for name, value in straight.items()})
    figures("resumed", on_cpu(resumed), 2 * on_cpu(again))
