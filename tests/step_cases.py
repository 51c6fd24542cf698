"""One or two optimizer steps of any module on tiny data, split, packed and ordered as asked."""

import os
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import lightning as L
import pytest
import torch
from arguments import learning
from models.vision_families import picture
from modules import data_runs
from modules.data_runs import SOURCES, row
from rl_runs import RANK, RANKS

from rlhfkit import (
    BCOModule,
    CPOModule,
    DFTModule,
    DistillationModule,
    DPOModule,
    GRPOModule,
    KTOModule,
    LocalEngine,
    OnlineDPOModule,
    Optimization,
    ORPOModule,
    PPOModule,
    ProcessRewardModule,
    PromptDataModule,
    RewardModule,
    RolloutCallback,
    SamplingSpec,
    SFTModule,
    SimPOModule,
)
from rlhfkit.callbacks import Probe
from rlhfkit.checkpoints import CheckpointError
from rlhfkit.mesh import SequenceParallel, forward_group_of
from rlhfkit.models import ModelLoading
from rlhfkit.models.forward import unwrap
from rlhfkit.modules.parts import Critic, EntropyBonus, MaskTruncated
from rlhfkit.strategies import RLHFDeepSpeedStrategy, SequenceParallelDDPStrategy

STEP, STEPS = 8, 2
"""Rows of an optimizer step, and steps."""
KINDS: dict[str, tuple[type, str, list[dict[str, Any]]]] = {
    "sft": (SFTModule, "texts", [{}, {"loading": {"tiled_mlp": 3, "gradient_checkpointing": True}}]),
    "dft": (DFTModule, "texts", [{}]),
    "distillation": (
        DistillationModule,
        "texts",
        [{"chunk_size": 3}, {"divergence": "jsd", "distillation_coef": 0.4, "chunk_size": 5}],
    ),
    "dpo": (
        DPOModule,
        "pairs",
        [{"loss_type": name, "nll_coef": 0.3} for name in ("sigmoid", "ipo", "hinge", "sppo_hard")],
    ),
    "simpo": (SimPOModule, "pairs", [{"alpha": 0.2}]),
    "cpo": (CPOModule, "pairs", [{"label_smoothing": 0.1}]),
    "orpo": (ORPOModule, "pairs", [{}]),
    "kto": (KTOModule, "unpaired", [{}, {"loss_type": "apo_zero_unpaired"}]),
    "reward": (RewardModule, "pairs", [{"center_rewards_coefficient": 0.1}]),
    "process": (ProcessRewardModule, "steps", [{}]),
    "grpo": (
        GRPOModule,
        "prompts",
        [
            {"policy_loss": "grpo_loss", "kl_coef": 0.1, "loading": {"max_tokens_per_forward": 64}},
            {"policy_loss": "gspo_loss", "parts": [EntropyBonus(0.01).plain()]},
            {"policy_loss": "dr_grpo_loss", "policy_loss_arguments": {"max_length": 4}},
            {"policy_loss": "cispo_loss", "parts": [MaskTruncated().plain()]},
        ],
    ),
    "ppo": (PPOModule, "prompts", [{}, {"parts": [Critic(shared=True, normalize=True).plain()]}]),
    "bco": (BCOModule, "unpaired", [{}, {"match_prompts": True}]),
    "online_dpo": (OnlineDPOModule, "prompts", [{"beta": 0.3, "nll_coef": 0.2}]),
}
"""Class, data and settings. Losses that sort their batch, and the router's, depend on micro-batches and say so."""
PAIRS = {"online_dpo"}
"""Kinds that compare the samples of a prompt, so that a micro-batch has all of them."""


class Found(NamedTuple):
    """The losses of the steps; the weights, and what is logged, at the end."""

    losses: list[float]
    weights: dict[str, torch.Tensor]
    metrics: dict[str, float]


class Steps(L.Callback):
    """This rank's share of the loss of each micro-batch; all weights, and what is logged, at the end."""

    def __init__(self) -> None:
        self.parts: list[float] = []
        self.weights: dict[str, torch.Tensor] = {}
        self.metrics: dict[str, float] = {}

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        group = forward_group_of(unwrap(pl_module.policy))
        assert getattr(trainer.strategy, "sequence_parallel_size", 1) == (1 if group is None else group.mesh.sequence)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.parts.append(float(outputs["loss"]))

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        children = [name for name in ("policy", "critic") if hasattr(pl_module, name)]
        for name in children:
            if hasattr(trainer.strategy, "consolidated_state_dict"):
                weights = trainer.strategy.consolidated_state_dict(name) or {}
            else:
                weights = getattr(pl_module, name).state_dict()
            self.weights |= {f"{name}.{key}": value.detach().clone() for key, value in weights.items()}
        self.metrics = {k: float(v) for k, v in trainer.callback_metrics.items() if not k.startswith("time/")}


class Save(L.Callback):
    """A checkpoint after every micro-batch; called before the parts, as all callbacks that a user gives are."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        trainer.save_checkpoint(self.folder / f"{trainer.current_epoch}, {batch_idx}.ckpt")


def rows_of(data: str, order: int | None, *, images: bool = False) -> list[dict[str, Any]]:
    """Rows of uneven lengths; ``order`` mixes those of each step. With ``images`` two have none, two one, two two."""
    rows = [row(data, i) for i in range(STEP * STEPS)]
    for i in range(len(rows) * images):
        rows[i]["images"] = [picture(number).plain() for number in range(i, i + i // 2 % 3)]
    if order is None:
        return rows
    mixed = [rows[step * STEP : (step + 1) * STEP] for step in range(STEPS)]
    for part in mixed:
        random.Random(order).shuffle(part)
    return [row for part in mixed for row in part]


def train(
    folder: Path,
    kind: str,
    setting: int,
    *,
    size: int,
    attention: str | None,
    order: int | None,
    images: str | None = None,
    callbacks: Sequence[L.Callback] = (),
    sequence: int = 1,
    sharing: SequenceParallel = "ulysses",
    own: Mapping[str, Any] | None = None,
    resume: Path | None = None,
    **more: Any,
) -> Found:
    """Two steps in an epoch, by SGD, whose steps are as long as the gradients, or by the module's own optimizer.

    Args:
        folder: Of :func:`arguments.learning.prepare`.
        kind: Of :data:`KINDS`.
        setting: Which of its settings.
        size: Rows of a micro-batch on each rank, or on each group of ranks that divide sequences.
        attention: Packed (``None``) or padded.
        order: Mixes the rows of each step; not of prompts, whose samples are drawn by their place, nor where the
            reference point of KTO pairs neighbours.
        images: Folder of a model that sees, whose rows have images; its vision part is trained.
        callbacks: More callbacks of the Trainer.
        sequence: Ranks that divide sequences among themselves; ``strategy`` is then a ZeRO stage, ``None``: DDP.
        sharing: How attention sees the tokens of all of them.
        own: More arguments of the module, which then has its own optimizer; the rows are shuffled.
        resume: Checkpoint of a run with the same arguments.
        **more: Of the Trainer.

    Returns:
        What was seen; the losses of a resumed run are those of its own steps.
    """
    made, data, settings = KINDS[kind]

    class OneRate(made):  # type: ignore[misc, valid-type]
        def configure_optimizers(self) -> Any:
            if own is not None:
                return super().configure_optimizers()
            return torch.optim.SGD([{"params": group["params"]} for group in self.parameter_groups()], lr=0.1)

    ranks = more.get("devices", 1) // sequence
    size = max(size, 2) if kind in PAIRS else size
    chosen = dict(settings[setting])
    loading = ModelLoading(attention=attention, train_vision=images is not None, **chosen.pop("loading", {}))
    model = str(folder / (images or "model"))
    arguments: dict[str, Any] = {"model": model, "loading": loading, **chosen, **(own or {})}
    arguments |= {"teacher": str(folder / "other")} if kind == "distillation" else {}
    fixed = data == "prompts" or (kind == "kto" and setting == 0)
    rows, steps = rows_of(data, None if fixed else order, images=images is not None), Steps()
    if sequence > 1:
        stage, sizes = more.pop("strategy"), {"sequence_parallel_size": sequence, "sequence_parallel": sharing}
        more["strategy"] = (
            SequenceParallelDDPStrategy(**sizes) if stage is None else RLHFDeepSpeedStrategy(stage, **sizes)
        )
    used: list[L.Callback] = [steps, *callbacks]
    if data == "prompts":
        sampling = SamplingSpec(group_size=2, max_new_tokens=4, stop_token_ids=tuple(range(64, 128)))
        engine: Any = LocalEngine()
        used.insert(0, RolloutCallback(learning.scored, engine=engine, sampling=sampling, parts=[Probe(1e-3)]))
        source: Any = PromptDataModule(
            rows[:STEP], rollout_batch_size=STEP, micro_batch_size=size, shuffle=own is not None
        )
    else:
        source = SOURCES[data](rows, micro_batch_size=size, shuffle=own is not None)
    window = STEP // (size * ranks)
    options = {"callbacks": used, "accumulate_grad_batches": window, "use_distributed_sampler": False, "max_epochs": 1}
    trainer = data_runs.trainer(folder, **options | more)
    trainer.fit(OneRate(**arguments), source, ckpt_path=resume)
    assert trainer.global_step == STEPS * more.get("max_epochs", 1)
    # Lightning has divided each by the number of micro-batches already.
    losses = [sum(steps.parts[start : start + window]) for start in range(0, len(steps.parts), window)]
    return Found(losses, steps.weights, steps.metrics)


def on_ranks(folder: Path, place: str, cases: list[Mapping[str, Any]]) -> list[Any]:
    """Entry point of a rank: its losses and metrics of each case. Rank 0 writes the weights into ``place``.

    Args:
        folder: Of the results of ranks.
        place: See ``folder`` of :func:`train`.
        cases: Arguments of :func:`train`, of one run after the other.
    """
    found = []
    for number, case in enumerate(cases):
        os.environ["WORLD_SIZE"] = str(RANKS)  # Lightning deletes it when a fit ends
        losses, weights, metrics = train(Path(place), **case, devices=RANKS)
        if RANK == 0:
            torch.save(weights, Path(place) / f"case_{number}.pt")
        found.append((losses, metrics))
    return found


STOPPED: dict[str, Any] = {"attention": None, "order": None, "max_epochs": 2, "enable_checkpointing": True}
"""Arguments of runs that are stopped and resumed, beside :func:`own_optimizer`: two epochs of two steps."""


def own_optimizer(**more: Any) -> dict[str, Any]:
    """Arguments of a module whose optimizer and learning rates have a state."""
    return {"lr": 1e-2, "optimization": Optimization(lr_schedule="cosine", warmup_steps=1)} | more


def resumed_on_ranks(folder: Path, place: str, stages: Mapping[str, int]) -> None:
    """Entry point of a rank: each kind goes on from inside a step as a run that was not stopped.

    Args:
        folder: Of the results of ranks.
        place: See ``folder`` of :func:`train`; has the checkpoints, too.
        stages: ZeRO stage of each kind.
    """
    for kind, stage in stages.items():
        expected = _on_all_ranks(place, kind, stage, callbacks=[Save(Path(place) / kind)])
        resumed = _on_all_ranks(place, kind, stage, resume=Path(place) / kind / "0, 2.ckpt")
        assert expected.losses[0] != expected.losses[-1]
        assert resumed.losses == expected.losses[1:]
        for name, value in resumed.weights.items():
            assert torch.equal(value, expected.weights[name]), (kind, name)


def refused_on_ranks(folder: Path, place: str, refusals: Mapping[str, tuple[int, str]]) -> None:
    """Entry point of a rank: each kind says why it does not go on on another number of ranks than its checkpoint's."""
    for kind, (stage, why) in refusals.items():
        with pytest.raises((CheckpointError, ValueError), match=why):
            _on_all_ranks(place, kind, stage, resume=Path(place) / kind / "0, 2.ckpt")


def _on_all_ranks(place: str, kind: str, stage: int, **more: Any) -> Found:
    os.environ["WORLD_SIZE"] = str(RANKS)  # Lightning deletes it when a fit ends
    options = STOPPED | {"size": STEP // 2 // RANKS, "devices": RANKS, "strategy": f"rlhf_zero{stage}"}
    return train(Path(place), kind, 0, **options, own=own_optimizer(), **more)
