"""Runs every module for four optimizer steps on a model of one layer, and writes down all that can be seen of it."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lazy_module import LazyModule
from modules.data_runs import SOURCES, row
from tiny_models import tiny_tokenizer
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

from rlhfkit import LocalEngine, PromptDataModule, RolloutCallback, Sample, SamplingSpec
from rlhfkit.models.forward import unwrap
from rlhfkit.modules.on_policy.base import OnPolicyModule

from .table import observed, quiet_trainer

datasets = LazyModule("datasets")

SIZES: dict[str, Any] = {
    "vocab_size": 128, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 1, "max_position_embeddings": 64, "bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0,
    "initializer_range": 0.3,
}  # fmt: skip
REMOTE = """
import transformers
class RemoteLM(transformers.LlamaForCausalLM):
    pass
class RemoteSequence(transformers.LlamaForSequenceClassification):
    pass
class RemoteToken(transformers.LlamaForTokenClassification):
    pass
"""
REMOTE_CLASSES = {
    "AutoModelForCausalLM": "remote.RemoteLM",
    "AutoModelForSequenceClassification": "remote.RemoteSequence",
    "AutoModelForTokenClassification": "remote.RemoteToken",
}


def prepare(folder: Path) -> None:
    """Models: the usual one, another one, a mixture of experts, a trained reward model, one with its own code."""
    from rlhfkit.models import load_scalar_model

    for seed, name in enumerate(("model", "other", "experts", "remote")):
        torch.manual_seed(seed)
        mixture = name == "experts"
        config = MixtralConfig(**SIZES, num_local_experts=4, sliding_window=None) if mixture else LlamaConfig(**SIZES)
        model = MixtralForCausalLM(config) if mixture else LlamaForCausalLM(config)  # type: ignore[arg-type]
        if name == "remote":
            config.auto_map = REMOTE_CLASSES
        model.save_pretrained(folder / name)
        tiny_tokenizer().save_pretrained(folder / name)
    (folder / "remote" / "remote.py").write_text(REMOTE)
    scorer = load_scalar_model(str(folder / "other"), head_std=1.0)
    scorer.save_pretrained(folder / "scorer")
    tiny_tokenizer().save_pretrained(folder / "scorer")


def scored(samples: Sequence[Sample]) -> list[float]:
    """Each token earns something, and the whole answer something else."""
    for sample in samples:
        sample.token_rewards = [token % 7 / 7 for token in sample.token_ids.tolist()]
    return [
        sum([] if sample.token_rewards is None else sample.token_rewards.tolist())
        + len(set(sample.token_ids.tolist())) / 3
        for sample in samples
    ]


def data_for(kind: str) -> L.LightningDataModule:
    """Four rows in micro-batches of two, or eight prompts."""
    if kind == "prompts":
        return PromptDataModule([row(kind, i) for i in range(8)], rollout_batch_size=4, micro_batch_size=4)
    rows = [row(kind, i) for i in range(1, 5)]
    module: L.LightningDataModule = SOURCES[kind](rows, validation_data=rows[:2], micro_batch_size=2)
    return module


class Watch(L.Callback):
    """Losses, learning rates, metrics, and forward passes of the policy."""

    def __init__(self) -> None:
        self.seen: dict[str, Any] = {"losses": [], "rates": [], "passes": 0}

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        for child in pl_module.children():
            child.register_forward_pre_hook(self._count)

    def _count(self, *inputs: Any) -> None:
        self.seen["passes"] += 1

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen["losses"].append(repr(float(outputs["loss"])))
        self.seen["rates"] += [group["lr"] for group in trainer.optimizers[0].param_groups]

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        metrics = {k: repr(float(v)) for k, v in trainer.callback_metrics.items() if not k.startswith("time/")}
        self.seen |= {"metrics": metrics, "weights": look(pl_module)}


def optimizers(module: Any) -> Any:
    """Settings of the optimizer, and what the schedule makes of them in three steps."""
    made = module.configure_optimizers()
    optimizer = made["optimizer"] if isinstance(made, dict) else made
    schedule = made["lr_scheduler"]["scheduler"] if isinstance(made, dict) else None
    settings = []
    for _ in range(3):
        settings += [{**group, "params": len(group["params"])} for group in optimizer.param_groups]
        optimizer.step()
        if schedule is not None:
            schedule.step()
    return settings


def look(module: Any) -> dict[str, Any]:
    """What is there once the network is built."""
    children: Any = dict(module.named_children())
    return {
        name: (
            type(getattr(unwrap(child), "model", child)).__name__,
            type(child).__name__,
            getattr(getattr(child, "model", child), "is_gradient_checkpointing", None),
            sum("forward" in vars(module) for module in child.modules()),  # tiled MLPs
            sum(
                "_with_offloaded" in str(vars(module).get("_gradient_checkpointing_func")) for module in child.modules()
            ),
            getattr(getattr(child, "config", None), "_attn_implementation", None),
            [(n, tuple(p.shape), str(p.dtype), p.requires_grad) for n, p in child.named_parameters()],
            repr(sum(float(p.detach().double().square().sum()) for p in child.parameters())),
        )
        for name, child in children.items()
    }


def learn(
    folder: Path, data: str, kind: type, arguments: Mapping[str, Any], around: Mapping[str, Any], built: bool
) -> Any:
    """Everything that a run shows, or its error.

    Args:
        folder: Of :func:`prepare`.
        data: See :func:`data_for`.
        kind: Of module.
        arguments: Its arguments; ``@name`` stands for a folder, ``argument.field`` for a field of options.
        around: ``epochs``: other than 1.
        built: Only build it.
    """

    def run(place: Path, paths: dict[str, Any]) -> Any:
        given: dict[str, Any] = {}
        for name, value in paths.items():
            argument, _, option = name.partition(".")
            given |= {argument: given.get(argument, {}) | {option: value} if option else value}
        module: Any = kind(**given)
        if built:
            module.configure_model()
            return look(module), optimizers(module)
        watch = Watch()
        callbacks: list[L.Callback] = [watch]
        if issubclass(kind, OnPolicyModule):
            # Half of all tokens end an answer, so that some are cut off and others are not.
            sampling = SamplingSpec(group_size=2, max_new_tokens=3, stop_token_ids=tuple(range(64, 128)))
            callbacks.insert(0, RolloutCallback(scored, engine=LocalEngine(), sampling=sampling))
        with pytest.MonkeyPatch.context() as patch:
            # Log-probs that another run has computed would hide the arguments that they are computed with.
            patch.setattr(datasets.config, "HF_DATASETS_CACHE", place / "cache")
            quiet_trainer(place, max_epochs=around.get("epochs", 1), callbacks=callbacks).fit(module, data_for(data))
        files = sorted(str(file.relative_to(place).parent) for file in place.rglob("*") if file.is_file())
        return {**watch.seen, "files": files}

    return observed(folder, arguments, run)
