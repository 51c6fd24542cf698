"""Two ranks train and validate as one, whatever frozen model the loss compares with: before, beside or behind.

Covers ``answer_reference.py``, ``moving_reference.py`` and ``precomputed_teacher.py`` of ``parts``.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from rl_runs import RANKS
from strategies import ranks

from modules.data_runs import ROWS, Steps, computed, data, fit, folder_of, plain_module, trainer
from rlhfkit import DistillationModule, DPOModule, RewardModule
from rlhfkit.models import load_causal_lm
from rlhfkit.modules.parts.moving_reference import MovingReference
from rlhfkit.modules.parts.precomputed_teacher import PrecomputedTeacher

folder = folder_of()


def following(steps: int, alpha: float) -> dict[str, Any]:
    """Arguments of a module whose reference follows the policy."""
    return {"ref_model": None, "parts": [MovingReference(steps, alpha=alpha).plain()]}


def on_disk(cache: Path) -> dict[str, Any]:
    """Arguments of a module that asks its teacher before training."""
    return {"parts": [PrecomputedTeacher(cache=str(cache)).plain()]}


TAUGHT = {"divergence": "reverse_kl", "top_k": 5}
CASES: dict[str, tuple[type, str, int, dict[str, Any], Callable[[Path], dict[str, Any]] | None]] = {
    "zero3, computed before": (DPOModule, "rlhf_zero3", 1, {"ref_model": None}, computed),
    "zero3, following": (DPOModule, "rlhf_zero3", 2, following(2, 0.75), None),
    "ddp, following": (DPOModule, "ddp", 1, following(2, 0.75), None),
    "ddp, computed before": (DPOModule, "ddp", 1, {"ref_model": None}, computed),
    # In 16 bits the reference moves in float32, which rank 0 keeps of shards, and every rank of whole weights.
    "zero3, half": (DPOModule, "rlhf_zero3", 1, following(1, 0.3) | {"lr": 0.1}, None),
    "ddp, half": (DPOModule, "ddp", 1, following(1, 0.3) | {"lr": 0.1}, None),
    "zero3, teacher": (DistillationModule, "rlhf_zero3", 2, TAUGHT, None),
    "zero2, teacher on disk": (DistillationModule, "rlhf_zero2", 2, TAUGHT, on_disk),
}
"""Module, strategy, micro-batches per step and rank, arguments of the module, and more of them with a cache on ranks.

References of ranks that share forward passes follow in test_mesh.py.
"""


def on_ranks(folder: Path, model: str) -> dict[str, Any]:
    """All cases in one process group, those that follow resumed too; rank 0 also writes weights and references."""
    report: dict[str, Any] = {}
    for name, (kind, strategy, accumulate, knobs, more) in CASES.items():
        saver = ModelCheckpoint(folder / name, filename="{epoch}", save_top_k=-1)
        options: dict[str, Any] = {"ranks": RANKS, "strategy": strategy, "num_nodes": 1}
        options |= {"precision": "bf16-true"} if "half" in name else {}
        resumed = name != "ddp, following" and "parts" in knobs
        options |= {"callbacks": [saver], "enable_checkpointing": True} if resumed else {}
        options["knobs"] = knobs if more is None else knobs | more(folder / name)
        whole = fit(Path(model), kind, accumulate, **options)
        report[name] = whole.totals
        if resumed:
            rest = fit(Path(model), kind, accumulate, resume=str(folder / name / "epoch=0.ckpt"), **options)
            assert rest.totals == whole.totals[len(whole.totals) // 2 :], "it goes on with the reference where it was"
            for key, tensor in whole.reference.items():
                assert torch.equal(tensor, rest.reference[key]), key
        if whole.weights:
            torch.save([whole.weights, whole.reference], folder / f"{name}.pt")
    report["validation"] = validated(Path(model), 3, devices=RANKS, strategy="ddp", num_nodes=1)
    return report


def validated(folder: Path, size: int, **arguments: Any) -> dict[str, float]:
    """What a reward model's validation measures, and the constants that it leaves."""
    module = plain_module(folder, RewardModule)
    source = data(folder, RewardModule, size, validated=True)
    (found,) = trainer(folder, **arguments).validate(module, source, verbose=False)
    return found | dict(zip(("mean", "deviation"), module.constants, strict=True))


@pytest.mark.distributed
def test_two_ranks_train_and_validate_as_one(folder: Path, tmp_path: Path) -> None:
    reports = ranks.run("modules.test_data_ranks:on_ranks", 2, tmp_path, model=str(folder))
    expected = validated(folder, ROWS)
    for report in reports:
        assert report["validation"] == pytest.approx(expected, rel=1e-5)
    start = load_causal_lm(str(folder / "model"), dtype=torch.bfloat16).state_dict()
    for name, (kind, _, _, knobs, _) in CASES.items():
        weights, reference = torch.load(tmp_path / f"{name}.pt")
        if "half" in name:
            assert not all(torch.equal(tensor, start[key]) for key, tensor in reference.items())
            continue
        alone: Steps = fit(folder, kind, knobs=knobs)
        both = [sum(pair) / 2 for pair in zip(*(report[name] for report in reports), strict=True)]
        assert both == pytest.approx(alone.losses, rel=1e-4)
        for found, wanted in ((weights, alone.weights), (reference, alone.reference if "parts" in knobs else {})):
            assert found.keys() == wanted.keys()
            for key, tensor in found.items():
                torch.testing.assert_close(tensor, wanted[key], rtol=1e-4, atol=2e-6)
