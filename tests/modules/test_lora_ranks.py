"""Adapters and exports under DeepSpeed on two ranks, against plain Lightning. Covers ``checkpointing.py``."""

import functools
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from rl_runs import RANK, RANKS, PlainGRPO, SaveAt, fit_run
from safetensors.torch import load_file
from strategies import ranks
from tiny_models import tiny_model
from torch import Tensor

from modules import data_runs
from modules.data_runs import ROWS, folder_of
from rlhfkit import HFExport, SFTModule
from rlhfkit.callbacks import Probe
from rlhfkit.cli.export import export
from rlhfkit.models import LoRA, ModelLoading, load_causal_lm, policy_output

pytestmark = pytest.mark.distributed
STAGES = range(4)
QLORA: dict[str, Any] = {"lora": LoRA(rank=4), "loading": ModelLoading(quantization="nf4")}


class Anchored(SFTModule):
    """Measures how far it has moved from where it started."""

    needs_reference = True  # type: ignore[assignment]  # a property of the base class

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        with torch.no_grad(), self.reference_model() as reference:
            start = policy_output(reference, batch, batch.loss_mask).logprobs
        now = self.policy_output(batch).logprobs.detach()
        self.__dict__.setdefault("moved", []).append(float((now - start).abs().max()))
        return super().training_step(batch, batch_idx)


class Watch(L.Callback):
    """Checks that the engine's policy is the merged one, and that what sampled first is the one without its adapter."""

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        experience = trainer.callbacks[0].experience
        if trainer.current_epoch == 0:
            difference = (experience.columns["ref_logprobs"] - experience.rollout_logprobs)[experience.action_mask]
            assert float(difference.abs().max()) <= 1e-5
        assert trainer.callbacks[0].part(Probe).difference <= 1e-5

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        assert [name for name, _ in pl_module.named_children()] == ["policy"], "no reference"


def reinforce(folder: Path, strategy: str, lora: LoRA, world: int) -> None:
    """Two iterations with a KL penalty; exported merged and as adapter, and saved as a checkpoint."""
    saving = [HFExport(folder / "merged"), HFExport(folder / "adapter", adapter=True)]
    fit_run(
        folder / f"rank{RANK}",  # ranks must not write the same model
        module=PlainGRPO,
        module_arguments={"lr": 0.5, "kl_coef": 0.05, "lora": lora},
        data_arguments={"micro_batch_size": 8 // world},
        callbacks=[Watch(), SaveAt(folder / "lora.ckpt", 8), *saving],
        strategy=strategy,
        devices=world,
        use_distributed_sampler=False,
    )


def supervise(folder: Path, data: str, strategy: str, world: int, name: str, **knobs: Any) -> list[float]:
    """Three updates on data, saved as ``<name>.ckpt`` and exported to ``<name>``; distances from the start."""
    saving = [SaveAt(folder / f"{name}.ckpt", 3), HFExport(folder / name)]
    options: Any = {"devices": world, "strategy": strategy, "use_distributed_sampler": False}
    run = data_runs.trainer(folder, max_epochs=3, callbacks=saving, **options)
    module = (Anchored if name == "further" else SFTModule)(**{"model": f"{data}/model", "lr": 1e-2} | knobs)
    run.fit(module, data_runs.data(Path(data), SFTModule, ROWS // world))
    return getattr(module, "moved", [])


def everything(folder: Path, data: str) -> dict[str, list[float]]:
    """All stages in one launch, DoRA at stage 3 and 1; how far adapters that are trained further have moved."""
    moved = {}
    for stage in range(4):  # before there are ranks, of which Transformers would let only the first write
        tiny_model(folder / f"zero{stage}" / f"rank{RANK}" / "model")
    for stage in range(4):
        place = folder / f"zero{stage}"
        reinforce(place, f"rlhf_zero{stage}", LoRA(rank=4, dora=stage % 2 == 1), RANKS)
        learn = functools.partial(supervise, place, data, f"rlhf_zero{stage}", RANKS)
        learn("full")
        if stage >= 2:
            learn("qlora", **QLORA)
            moved[str(stage)] = learn("further", model=str(place / "adapter"))
    return moved


folder = folder_of()


@pytest.fixture(scope="module")
def moved(folder: Path) -> dict[str, list[float]]:
    """All stages in one launch, which checks what must hold in every iteration."""
    return ranks.run("modules.test_lora_ranks:everything", 2, folder, data=str(folder))[0]


@pytest.fixture(scope="module")
def plain(folder: Path) -> None:
    """The same runs in one process without DeepSpeed, for LoRA and DoRA."""
    for dora in (False, True):
        reinforce(folder / f"plain{dora}", "auto", LoRA(rank=4, dora=dora), world=1)


def weights(folder: Path, file: str = "model.safetensors") -> dict[str, torch.Tensor]:
    return load_file(folder / file)


def difference(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    assert one.keys() == other.keys()
    return max(float((one[name] - other[name]).abs().max()) for name in one)


@pytest.mark.parametrize("stage", STAGES)
def test_every_stage_trains_adapters_as_plain_lightning_does(moved: Any, plain: None, folder: Path, stage: int) -> None:
    trained, alone = weights(folder / f"zero{stage}" / "merged"), weights(folder / f"plain{stage % 2 == 1}" / "merged")
    assert difference(trained, alone) <= 1e-5
    assert difference(trained, weights(folder / f"zero{stage}" / "rank0" / "model")) > 1e-3


@pytest.mark.parametrize("stage", STAGES)
def test_a_checkpoint_of_any_stage_is_exported_without_ranks(
    moved: Any, folder: Path, tmp_path: Path, stage: int
) -> None:
    place = folder / f"zero{stage}"
    merged = export(place / "lora.ckpt", tmp_path / "merged")
    assert difference(weights(merged), weights(place / "merged")) == 0.0
    adapter, file = export(place / "lora.ckpt", tmp_path / "adapter", adapter=True), "adapter_model.safetensors"
    assert difference(weights(adapter, file), weights(place / "adapter", file)) == 0.0
    again = load_causal_lm(str(adapter))
    assert sum(parameter.requires_grad for parameter in again.parameters()) == 2 * 7 * (2 + stage % 2)
    full = export(place / "full.ckpt", tmp_path / "full")
    assert difference(weights(full), weights(place / "full")) == 0.0
    assert difference(weights(full), weights(folder / "model")) > 1e-3
    assert (full / "tokenizer_config.json").exists()
    assert load_causal_lm(str(full)).config.tie_word_embeddings


@pytest.mark.parametrize("stage", [2, 3])
def test_weights_of_4_bits_train_and_merge_under_ranks(moved: Any, folder: Path, stage: int) -> None:
    alone = folder / "alone"
    if not alone.exists():
        supervise(alone, str(folder), "auto", 1, "qlora", **QLORA)
    trained = weights(folder / f"zero{stage}" / "qlora")
    assert difference(trained, weights(alone / "qlora")) <= 1e-4  # AdamW's first step divides by tiny numbers
    assert difference(trained, weights(folder / "model")) > 1e-2


@pytest.mark.parametrize("stage", [2, 3])
def test_a_saved_adapter_is_trained_further_with_its_start_as_the_reference(
    moved: Any, folder: Path, tmp_path: Path, stage: int
) -> None:
    place, file = folder / f"zero{stage}", "adapter_model.safetensors"
    alone = supervise(tmp_path, str(folder), "auto", 1, "further", model=str(place / "adapter"))
    for distances in (moved[str(stage)], alone):
        assert distances[0] <= 1e-6
        assert distances[-1] > 0.1
    assert difference(weights(place / "further"), weights(tmp_path / "further")) <= 1e-4
    again = export(place / "further.ckpt", tmp_path / "again", adapter=True)
    assert weights(again, file).keys() == weights(place / "adapter", file).keys()
