"""Fifty steps of SFT are the same however data is packed, split over ranks and resumed. Covers ``sft.py``."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from strategies import ranks

from modules import sft_cases
from rlhfkit import DFTModule, Optimization, SFTDataModule, SFTModule


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("sft")
    sft_cases.prepare(folder)
    return folder


@pytest.fixture(scope="module")
def metrics() -> dict[str, float]:
    """What the run of ``expected`` has logged in the end."""
    return {}


@pytest.fixture(scope="module")
def expected(folder: Path, metrics: dict[str, float]) -> list[float]:
    """One rank, padded, one micro-batch a step."""
    losses = sft_cases.trajectory(folder, "sdpa", 1, metrics=metrics)
    assert losses[-1] < 0.5 * losses[0], "the run must have learnt something, else equality shows nothing"
    return losses


@pytest.mark.parametrize(("attention", "accumulate"), [(None, 4), ("eager", 2)])
def test_packing_and_micro_batches_change_nothing(
    folder: Path, expected: list[float], metrics: dict[str, float], attention: str | None, accumulate: int
) -> None:
    logged: dict[str, float] = {}
    assert sft_cases.trajectory(folder, attention, accumulate, metrics=logged) == pytest.approx(expected, rel=1e-6)
    assert logged == pytest.approx(metrics, rel=1e-5)
    assert logged["loss"] == pytest.approx(expected[-1], rel=1e-6)
    assert logged["sft/perplexity_epoch"] == pytest.approx(math.exp(logged["sft/nll_epoch"]), rel=1e-6)


@pytest.mark.distributed
def test_two_ranks_change_nothing(
    folder: Path, expected: list[float], metrics: dict[str, float], tmp_path: Path
) -> None:
    """Packed in two micro-batches, padded in one, and in a token budget, in one launch."""
    budget = sft_cases.trajectory(folder, "sdpa", 4, budget=True)
    for report in ranks.run("modules.sft_cases:on_ranks", 2, tmp_path, place=str(folder)):
        assert len(report) == 4
        assert report.pop("metrics") == pytest.approx(metrics, rel=1e-5)
        assert report.pop("budget") == pytest.approx(budget, rel=1e-6)
        for losses in report.values():
            assert losses == pytest.approx(expected, rel=1e-6)


def test_a_run_that_was_stopped_inside_an_epoch_goes_on_bit_for_bit(folder: Path, tmp_path: Path) -> None:
    def run(ckpt_path: Any = None, callbacks: Any = ()) -> SFTModule:
        module = SFTModule(
            str(folder / "model"), lr=3e-3, optimization=Optimization(lr_schedule="cosine", warmup_steps=2)
        )
        options = {"precision": "32-true", "max_steps": 10, "accumulate_grad_batches": 2}
        trainer = sft_cases.trainer(
            tmp_path, **options, callbacks=list(callbacks), enable_checkpointing=bool(callbacks)
        )
        data = SFTDataModule(str(folder / "data.jsonl"), micro_batch_size=4, cache_dir=folder / "cache")
        trainer.fit(module, data, ckpt_path=ckpt_path)
        assert trainer.global_step == 10
        return module

    saver = ModelCheckpoint(tmp_path / "saved", filename="{step}", every_n_train_steps=1, save_top_k=-1)
    straight = run(callbacks=[saver]).policy.state_dict()
    for step in (4, 6, 8):  # three steps an epoch
        resumed = run(tmp_path / "saved" / f"step={step}.ckpt").policy.state_dict()
        for name, tensor in straight.items():
            assert torch.equal(tensor, resumed[name]), (step, name)


SHARE = 0.75
ENTROPY = -(SHARE * math.log(SHARE) + (1 - SHARE) * math.log(1 - SHARE))


def learned(folder: Path, kind: type[SFTModule], steps: int) -> tuple[dict[str, float], float]:
    """Validation metrics, and the probability of the answer that three of four rows give to each of four prompts."""
    rows = [
        {"prompt": prompt, "completion": "x" if i < 3 else "y"} for prompt in ("a", "b", "c", "d") for i in range(4)
    ]
    module = kind(str(folder / "model"), lr=1e-2)
    data = SFTDataModule(rows, validation_data=rows, micro_batch_size=16)
    trainer = sft_cases.trainer(folder, precision="32-true", max_steps=steps)
    trainer.fit(module, data)
    metrics = trainer.validate(module, data, verbose=False)[0]
    ids = torch.tensor([module.tokenizer("a")["input_ids"]])
    probabilities = module.policy(input_ids=ids).logits[0, -1].softmax(-1)
    return metrics, float(probabilities[module.tokenizer("x")["input_ids"][0]])


def test_cross_entropy_learns_the_distribution(folder: Path) -> None:
    """The optimum is the entropy of the answers: an answer of 0.56 nats and a certain end, over two tokens."""
    metrics, probability = learned(folder, SFTModule, 60)
    assert ENTROPY / 2 - 1e-4 < metrics["val/loss"] < ENTROPY / 2 + 5e-3
    assert metrics["val/perplexity"] == pytest.approx(math.exp(metrics["val/loss"]), rel=1e-5)
    assert probability == pytest.approx(SHARE, abs=0.05)


def test_dynamic_fine_tuning_learns_the_likeliest_answer(folder: Path) -> None:
    """Its gradient is that of the mean probability of the answers, which is largest where the likeliest has all."""
    metrics, probability = learned(folder, DFTModule, 60)
    assert probability > 0.95
    assert metrics["val/perplexity"] > math.exp(ENTROPY / 2) + 0.05  # of the data, which it no longer follows
