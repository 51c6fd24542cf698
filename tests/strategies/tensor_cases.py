"""What one rank runs to show that tensor parallelism trains, saves and exports as one rank does."""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning as L
import torch
from plain_sgd import PlainSGD
from rl_runs import SaveAt, setup_run
from tiny_models import tiny_tokenizer
from transformers import Qwen3Config, Qwen3ForCausalLM

from rlhfkit import DPOModule, LoRA, PPOModule, PreferenceDataModule, SFTDataModule, SFTModule
from rlhfkit.distributed import tensor_part
from rlhfkit.rollout import ModuleWeights
from strategies import toys
from strategies.parity_cases import RANK, RANKS, full_weights, weight_difference


def write(folder: Path) -> Path:
    """Models (normed queries and keys, a vocabulary that 2 does not divide) and data, in a folder of this rank."""
    folder = folder / f"rank{RANK}"
    folder.mkdir()
    for name, seed in (("model", 1), ("reference", 2)):
        config = Qwen3Config(
            vocab_size=129,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
            max_position_embeddings=128,
            tie_word_embeddings=True,
            initializer_range=0.1,
            pad_token_id=0,
            eos_token_id=1,
            bos_token_id=None,
        )
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = Qwen3ForCausalLM(config)
            for parameter in model.parameters():
                parameter.data += 0.05 * torch.randn(parameter.shape)
            model.save_pretrained(folder / name)
        tiny_tokenizer().save_pretrained(folder / name)
    rows = [{"prompt": f"{i}+{i}=", "completion": "x" * (i % 5 + 1) + str(2 * i)} for i in range(16)]
    (folder / "sft.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    pairs = [
        {"prompt": r["prompt"], "chosen": r["completion"], "rejected": "y" * (i % 3 + 1)} for i, r in enumerate(rows)
    ]
    (folder / "dpo.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    return folder


class Spy(L.Callback):
    """Losses over all ranks, gradient norms, and the full weights at the end."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.norms: list[float] = []
        self.weights: dict[str, torch.Tensor] = {}
        self.divided: dict[str, int] = {}

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, index: int) -> None:
        self.losses.append(float(trainer.strategy.reduce(outputs["loss"].detach().clone(), reduce_op="mean")))
        if (index + 1) % trainer.accumulate_grad_batches == 0:
            self.norms += list(trainer.strategy.gradient_norms.values())

    def on_train_end(self, trainer: Any, module: Any) -> None:
        children = ["policy", "critic"] if hasattr(module, "critic") else ["policy"]
        self.weights = full_weights(module, trainer.strategy, children)
        models = {name: list(child.parameters()) for name, child in module.named_children()}
        self.divided = {
            name: sum(tensor_part(parameter) is not None for parameter in own) for name, own in models.items() if own
        }
        if any("lora_" in name for name, _ in module.named_parameters()):  # engines get W + scale B A
            sent = {name: weight.detach().clone() for name, weight in ModuleWeights(module.policy)}
            self.weights |= {f"merged {name}": weight for name, weight in sent.items() if RANK == 0}

    def updates(self) -> list[float]:
        """The loss of each update: which rows are in which of its micro-batches depends on the number of ranks."""
        return [first + second for first, second in zip(self.losses[::2], self.losses[1::2], strict=True)]


class PlainSFT(PlainSGD, SFTModule):
    """SFT with SGD."""


class PlainAdam(SFTModule):
    """SFT with Adam, the optimizer whose state DeepSpeed converts."""

    def configure_optimizers(self: Any) -> Any:
        return torch.optim.AdamW(self.parameter_groups(), lr=self.lr)


class PlainDPO(PlainSGD, DPOModule):
    """DPO with SGD."""


class PlainPPO(PlainSGD, PPOModule):
    """PPO with SGD."""


def run(
    kind: str, folder: Path, strategy: Any, groups: int, callbacks: Sequence[L.Callback] = (), **options: Any
) -> Spy:
    """Two updates of two micro-batches of four rows; or, of PPO, an iteration of 32 samples in two updates.

    ``groups`` of ranks compute forward passes together.
    """
    spy, model, path = Spy(), str(folder / "model"), options.pop("ckpt_path", None)
    options = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.5, "max_epochs": 1, **options}
    options |= {"callbacks": [spy, *callbacks], "strategy": strategy}
    if kind == "ppo":
        os.environ["WORLD_SIZE"] = str(RANKS)  # Lightning deletes it when a fit ends
        trainer, module, data, _ = setup_run(
            folder,
            module=PlainPPO,
            module_arguments={"lr": 0.02, "critic_lr": 0.02},
            data_arguments={"micro_batch_size": 8 // groups},
            devices=RANKS,
            use_distributed_sampler=False,
            **options,
        )
        trainer.fit(module, data, ckpt_path=path)
        return spy
    micro: dict[str, Any] = {"micro_batch_size": 4 // groups}
    if kind == "dpo":
        module = PlainDPO(model, lr=0.05, ref_model=str(folder / "reference"))
        data = PreferenceDataModule(str(folder / "dpo.jsonl"), **micro)
    else:
        lora = LoRA(rank=3, init="gaussian") if kind == "lora" else None
        sgd = PlainSFT(model, lr=1.0 if lora else 0.05, lora=lora)
        module = PlainAdam(model, lr=1e-3) if kind == "adam" else sgd
        data = SFTDataModule(str(folder / "sft.jsonl"), **micro)
    toys.trainer(ranks=RANKS, **options).fit(module, data, ckpt_path=path)
    return spy


def train(folder: Path, cases: dict[str, dict[str, Any]], place: str) -> dict[str, Any]:
    """Run each case; rank 0 writes full weights to ``place``.

    ``cases`` are arguments of the strategy, precision and options of the Trainer, by names such as ``"sft, stage 2"``.
    """
    from rlhfkit import RLHFDeepSpeedStrategy

    own = write(folder)
    report = {}
    for name, arguments in cases.items():
        precision, options = arguments.pop("precision", "32-true"), arguments.pop("options", {})
        strategy = RLHFDeepSpeedStrategy(**arguments)
        together = arguments.get("tensor_parallel_size", 1) * arguments.get("sequence_parallel_size", 1)
        spy = run(name.partition(",")[0], own, strategy, RANKS // together, precision=precision, **options)
        report[name] = {"losses": spy.updates(), "norms": spy.norms, "divided": spy.divided}
        if RANK == 0:
            torch.save(spy.weights, Path(place) / f"{name}, {RANKS} ranks.pt")
    return report


class Offload(L.Callback):
    """Moves weights and optimizer states away and back before each batch."""

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, index: int) -> None:
        trainer.strategy.training_states.offload_states()
        trainer.strategy.training_states.reload_states()


def resume(folder: Path, place: str) -> dict[str, Any]:
    """Straight runs, which resumed ones equal, with an average of the weights, exported; states are moved around."""
    from rlhfkit import EMA, HFExport, RLHFDeepSpeedStrategy

    own, report = write(folder), {}

    def fit(name: str, stage: int, *more: L.Callback, **options: Any) -> Spy:
        average = EMA(0.5, export=HFExport(Path(place) / f"{name} average", every_n_epochs=None), validate=False)
        last = HFExport(Path(place) / name, every_n_epochs=None)
        strategy = RLHFDeepSpeedStrategy(stage, tensor_parallel_size=2, async_save=bool(stage % 2))
        return run("sft", own, strategy, RANKS // 2, [average, last, *more], **options)

    for stage in range(4):
        path = Path(place) / f"{stage}.ckpt"
        straight = fit(f"straight {stage}", stage, SaveAt(path, 2))
        resumed = fit(f"resumed {stage}", stage, Offload(), ckpt_path=path)
        assert resumed.norms == straight.norms[1:], stage
        assert RANK > 0 or weight_difference(straight.weights, resumed.weights) == 0, stage
        report[str(stage)] = {"losses": straight.updates(), "divided": straight.divided, "norms": straight.norms}
    return report


class SaveEpoch(L.Callback):
    """Saves a checkpoint at the end of each epoch."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        trainer.save_checkpoint(self.path)


def epochs(folder: Path, place: str) -> dict[str, Any]:
    """A run of three epochs; and the first one alone at ZeRO 1 and 3 with divided weights, which is saved."""
    from rlhfkit import RLHFDeepSpeedStrategy

    own = write(folder)

    def fit(epochs: int, stage: int, size: int, *more: L.Callback) -> Spy:
        strategy = RLHFDeepSpeedStrategy(stage, tensor_parallel_size=size)
        return run("adam", own, strategy, RANKS // size, more, max_epochs=epochs)

    straight = fit(3, 0, 1)
    if RANK == 0:
        torch.save(straight.weights, Path(place) / "straight.pt")
    for stage in (1, 3):
        fit(1, stage, 2, SaveEpoch(Path(place) / f"stage {stage}.ckpt"))
    return {"norms": straight.norms, "losses": straight.updates()}
