"""Optimizers of modules under every strategy on two ranks, beside one rank without DeepSpeed.

Covers optim.py and strategies/deepspeed/param_groups.py.
"""

import importlib.util
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy
from rl_runs import RANK, RANKS, SaveAt
from strategies import ranks
from tiny_models import tiny_model

from modules.data_runs import Steps, trainer
from rlhfkit import Optimization, RLHFDeepSpeedStrategy, SFTDataModule, SFTModule

pytestmark = pytest.mark.distributed
EIGHT_BITS = importlib.util.find_spec("bitsandbytes") is not None
ROWS = [{"prompt": f"{i}+{i}=", "completion": str(2 * i) + "y" * (i % 5)} for i in range(24)]
"""Three optimizer steps of eight rows an epoch."""
OPTIMIZERS: dict[str, tuple[float, dict[str, Any]]] = {
    "sgd": (
        0.3,
        {
            "optimizer_arguments": {"momentum": 0.9},
            "parameter_options": {"embeddings": {"lr": 0.03}, "vectors": {"weight_decay": 0.0}},
            "weight_decay": 0.1,
            "lr_schedule": "wsd",
            "warmup_ratio": 0.2,
            "min_lr_ratio": 0.1,
        },
    ),
    "muon": (3e-3, {"weight_decay": 0.1, "lr_schedule": "cosine", "min_lr_ratio": 0.1}),
    "torch.optim.Adafactor": (3e-2, {}),
    "adamw_8bit": (3e-3, {"optimizer_arguments": {"min_8bit_size": 256}}),
    "adafactor": (3e-2, {}),
}
"""Learning rate and further arguments of `Optimization`, which imports bitsandbytes to look at those of adamw_8bit."""
CASES: list[tuple[str, str, dict[str, Any]]] = [
    *(("sgd", strategy, {}) for strategy in ("rlhf_zero3", "offload")),
    *(("adamw_8bit", strategy, {}) for strategy in ("rlhf_zero2", "offload") if EIGHT_BITS),
    *(("muon", strategy, {}) for strategy in ("ddp", "rlhf_zero1", "rlhf_zero3", "offload")),
    *(("muon", f"rlhf_zero{stage}", {"precision": "bf16-true"}) for stage in (0, 2)),
]
"""Optimizer, strategy, and arguments of the Trainer."""
RESUMED = [("adamw_8bit", "rlhf_zero2", {}), ("muon", "offload", {}), ("muon", "rlhf_zero3", {})]
# Losses are about 4, where neighbouring float32 numbers are 4.8e-7 apart. Muon's matrix iterations are in bfloat16, of
# whose 8 bits a rounding of the gradient can change the last, so that DDP is as far from one rank as ZeRO is
# (test_flat_parameters.py has the same steps bit for bit); 8-bit moments are quantised in blocks, which flat partitions
# cut elsewhere; weights in bfloat16 are rounded.
TOLERANCES = {"sgd": (2e-6, 2e-6), "muon": (1e-3, 5e-3), "adamw_8bit": (2e-3, 2e-2), "bf16-true": (2e-2, 2e-2)}


class Keep(Steps):
    """Losses are means over ranks; learning rates, and the weights that this rank owns in the end."""

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        super().on_train_start(trainer, pl_module)
        self.rates: list[list[float]] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
        self.losses[-1] = float(trainer.strategy.reduce(outputs["loss"].clone(), reduce_op="mean"))
        self.rates.append([group["lr"] for group in trainer.optimizers[0].param_groups])

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        super().on_train_end(trainer, pl_module)
        self.owned = put_together(trainer.strategy)


def put_together(strategy: Any) -> list[torch.Tensor]:
    """The weights that this rank owns, from the flat tensors of an optimizer that knows their layout."""
    found: list[torch.Tensor] = []
    for engine in getattr(strategy, "engines", {}).values():
        for flat, layout in getattr(engine.basic_optimizer, "flat_layouts", {}).items():
            layout.map_whole(lambda _, whole: found.append(whole.clone()) or whole, [flat.detach()])
    return found


def learn(folder: Path, model: str, name: str, strategy: Any, *, resume: Path | None = None, **options: Any) -> Keep:
    """A run of two epochs, saved after the first."""
    keep, devices = Keep(), 1 if strategy == "auto" else RANKS
    if strategy == "offload":
        strategy = RLHFDeepSpeedStrategy(stage=2, offload_optimizer=True)
    options |= {"gradient_clip_val": 2.0} if name == "muon" else {}
    callbacks = [keep, *([] if resume else [SaveAt(folder / "first.ckpt", 3)])]
    run = trainer(
        folder, callbacks=callbacks, devices=devices, strategy=strategy, use_distributed_sampler=False, **options
    )
    lr, arguments = OPTIMIZERS[name]
    module = SFTModule(model, lr=lr, optimization=Optimization(optimizer=name, **arguments))
    run.fit(module, SFTDataModule(ROWS, micro_batch_size=8 // devices), ckpt_path=resume)
    return keep


def check_near(one: Keep, other: Keep, loss: float, weight: float, steps: int = 6) -> None:
    """The last steps are the same; only rank 0 has the weights of all."""
    assert one.losses == pytest.approx(other.losses[-steps:], abs=loss, rel=0)
    assert one.rates == other.rates[-steps:]
    for name, value in one.weights.items():
        torch.testing.assert_close(value, other.weights[name], atol=weight, rtol=0, msg=name, check_dtype=False)


def on_ranks(folder: Path, model: str) -> None:
    """What one rank runs: each case beside one rank without DeepSpeed; some are resumed, others are refused."""
    plain: dict[str, Keep] = {}
    for case in CASES:
        name, strategy, options = case
        print(case)
        place = folder / f"{name} {strategy}{len(options)}"
        found = learn(place, model, name, strategy, **options)
        if name not in plain:
            plain[name] = learn(folder / f"plain{RANK}", model, name, "auto")
        alone = plain[name]
        assert alone.losses[0] - alone.losses[-1] > 1.0, "it must have learnt something, else equality shows nothing"
        check_near(found, alone, *TOLERANCES["bf16-true" if options else name])
        assert name != "muon" or all(values["grad_norm/policy"] > 2.0 for values in found.logged), "all are clipped"
        if name == "muon" and strategy != "ddp" and not options:  # the weights of the model are the optimizer's
            parts: list[Any] = [None] * RANKS
            torch.distributed.all_gather_object(parts, found.owned)
            wholes = [part for each in parts for part in each]
            assert len(wholes) == 20
            for whole in wholes if RANK == 0 else ():
                assert any(torch.equal(whole, weight) for weight in found.weights.values())
        if case in RESUMED:
            resumed = learn(place, model, name, strategy, resume=place / "first.ckpt")
            check_near(resumed, found, 0.0, 0.0, steps=3)
    for name in ("adafactor", "torch.optim.Adafactor"):
        with pytest.raises(ValueError, match="computes with whole parameters, and ZeRO flattens and div") as refused:
            learn(folder / name, model, name, "rlhf_zero2")
        assert "optimizer='muon' alone knows" in str(refused.value)
        assert "Trainer(strategy='ddp')" in str(refused.value)


def test_two_ranks_learn_what_one_learns_and_a_stopped_run_goes_on_bit_for_bit(tmp_path: Path) -> None:
    """Also that the flat tensors of every stage hold the weights that their layout says."""
    tiny_model(tmp_path / "model")
    ranks.run("modules.test_optim:on_ranks", 2, tmp_path, model=str(tmp_path / "model"))


@pytest.mark.parametrize(
    ("kind", "arguments", "why"),
    [
        (
            RLHFDeepSpeedStrategy,
            {"stage": 2, "offload_optimizer": True, "offload_optimizer_device": "nvme"},
            "DeepSpeed.s NVMe offload",
        ),
        (DeepSpeedStrategy, {"stage": 2}, "DeepSpeedStrategy does not say how DeepSpeed divides them"),
        (FSDPStrategy, {}, "FSDPStrategy divides them"),
    ],
)
def test_muon_is_refused_where_nothing_says_which_matrices_a_flat_tensor_has(
    kind: Any, arguments: Any, why: str
) -> None:
    module = SFTModule("not loaded", optimization=Optimization(optimizer="muon"))
    module.policy = torch.nn.Linear(2, 2)
    module._trainer = SimpleNamespace(strategy=kind(**arguments), gradient_clip_val=None, global_rank=0, world_size=1)
    with pytest.raises(ValueError, match=f"optimizer='muon' computes with whole parameters, and {why}"):
        module.configure_optimizers()
