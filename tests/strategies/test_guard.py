"""A number that is not finite on one rank stops the update of all engines on all ranks, at every ZeRO stage.

Covers strategies/deepspeed/synchronized_steps.py.
"""

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rlhfkit.callbacks import NonFiniteGuard
from rlhfkit.callbacks.guard import NonFiniteError
from rlhfkit.data.batch import PaddedBatch
from rlhfkit.strategies import RLHFDeepSpeedStrategy
from strategies import toys
from strategies.parity_cases import RANK, RANKS, fit, full_weights, same, weight_difference
from strategies.ranks import on_two_ranks

POISON = {3: "loss", 6: "critic gradient"}
"""Of 10 micro-batches in windows of 2: the second and the fourth of five updates."""


class Poisoned(toys.Toy):
    """On the last rank, the losses of some micro-batches, or only the gradients, are not finite."""

    poison = POISON

    def training_step(self, batch: PaddedBatch, index: int) -> Tensor:
        tokens = batch.input_ids
        loss = super().training_step(tokens, index)
        kind, last = self.poison.get(index, ""), self.global_rank == self.trainer.world_size - 1
        if kind.endswith("gradient"):  # on all ranks: at stage 3 a forward pass is a collective
            output = self.critic(tokens) if kind.startswith("critic") else self.policy(input_ids=tokens).logits
            nothing = output * 0
            # Adds 0; the root's slope at 0 is infinite, times 0: a gradient of NaN.
            loss = loss + (nothing.abs().sqrt() if last else nothing).sum()
        return loss * float("nan") if kind == "loss" and last else loss


class Batches(toys.ShareLoader):
    """The share of each global batch, as a batch of ours."""

    def __iter__(self) -> Any:
        for tokens in super().__iter__():
            yield PaddedBatch(input_ids=tokens, attention_mask=torch.ones_like(tokens).bool())


class Watch(toys.pl.Callback):
    """Weights, and everything an optimizer keeps, after every update."""

    def __init__(self) -> None:
        self.weights: list[dict[str, Tensor]] = []
        self.states: list[list[Tensor]] = []
        self.logged: list[float] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, index: int) -> None:
        if index % 2:
            self.weights.append(full_weights(module, trainer.strategy, ["policy", "critic"]))
            engines = getattr(trainer.strategy, "engines", {})
            optimizers = [e.basic_optimizer for e in engines.values()] or trainer.optimizers
            states = [v for o in optimizers for state in o.state.values() for v in state.values()]
            for engine in engines.values():
                states += getattr(engine.optimizer, "fp32_partitioned_groups_flat", [])
                states += [p for group in engine.basic_optimizer.param_groups for p in group["params"]]
            self.states.append([value.detach().clone() for value in states if isinstance(value, Tensor)])
            self.logged.append(float(trainer.callback_metrics["skipped_updates"]))


def guarded(strategy: Any, model: str, **options: Any) -> dict[str, Tensor]:
    """Five updates, of which the two that are poisoned change no weight and no optimizer state of any engine.

    The second has a loss of NaN in its last micro-batch, the fourth a finite loss and a NaN in the critic's gradient in
    its first: the policy stands still too. Both on the last rank only. Returns the last weights.
    """
    module, watch, guard = Poisoned(model, critic=True), Watch(), NonFiniteGuard(max_skipped_updates=2)
    options |= {"loader": Batches, "callbacks": [guard, watch], "accumulate_grad_batches": 2}
    fit(module, strategy, toys.global_batches(10), **options)
    what, still = f"{strategy}, {options}", [True, False, True, False]
    assert [same(a, b) for a, b in pairwise(watch.states)] == still, what
    if RANK == 0 or strategy == "auto":
        assert [weight_difference(a, b) == 0 for a, b in pairwise(watch.weights)] == still, what
    assert watch.logged == [0, 1, 1, 2, 2], what
    assert guard.skipped_updates == 2, what
    return watch.weights[-1]


@on_two_ranks
def test_a_skipped_update_changes_nothing_and_training_goes_on_as_if_its_window_had_not_been_there(
    folder: Path, model: str
) -> None:
    """Against plain Lightning on one rank, where the callback drops the gradients of the same windows."""
    plain = guarded("auto", model)
    offloading = [f"rlhf_zero{stage}_offload" for stage in (2, 3)]
    for strategy in (*(f"rlhf_zero{stage}" for stage in range(4)), *offloading, "ddp"):
        found = guarded(strategy, model)
        assert RANK > 0 or weight_difference(found, plain) <= 1e-6, strategy
    for stage in (0, 2, 3):
        guarded(f"rlhf_zero{stage}", model, precision="bf16-true", gradient_clip_val=1.0)


@on_two_ranks
def test_too_many_in_a_row_stop_all_ranks_with_the_batches_on_disk(folder: Path, model: str) -> None:
    """Updates 2, 3 and 4 are bad; on the disk are the last one's two micro-batches, and which rank was bad."""
    for strategy in ("rlhf_zero2", "ddp"):
        module, place = Poisoned(model), folder / strategy
        module.poison = dict.fromkeys(range(3, 12), "loss")
        guard, data = NonFiniteGuard(max_skipped_updates=3, folder=place), toys.global_batches(12)
        with pytest.raises(NonFiniteError, match="3 updates in a row were skipped") as caught:
            fit(module, strategy, data, loader=Batches, callbacks=[guard], accumulate_grad_batches=2)
        (file,) = place.glob(f"*/rank_{RANK:05d}.pt")
        assert str(file.parent) in str(caught.value)
        dumped = torch.load(file, weights_only=True)["batches"]
        assert [entry["batch_index"] for entry in dumped] == [6, 7]
        assert [bool(entry["finite_loss"]) for entry in dumped] == [RANK == 0] * 2, "the dump names the bad rank"
        batches = [PaddedBatch.from_state_dict(entry["batch"]).input_ids for entry in dumped]
        assert same(batches, [batch[RANK::RANKS] for batch in data[6:8]]), strategy


@on_two_ranks
def test_fp16_overflows_are_errors_only_where_the_loss_scale_cannot_fall(folder: Path, model: str) -> None:
    """The scales are 4, 2 and 1, then twice in a row at the minimum."""
    toys.compute_in_fp16()
    for stage in range(4):
        strategy = RLHFDeepSpeedStrategy(stage=stage, initial_scale_power=2, min_loss_scale=1, hysteresis=1)
        module, guard = Poisoned(model), NonFiniteGuard(2, folder=folder / f"half-{stage}")
        module.poison = dict.fromkeys(range(2, 12), "policy gradient")
        with pytest.raises(NonFiniteError, match="2 updates in a row"):
            fit(module, strategy, toys.global_batches(12), loader=Batches, callbacks=[guard], precision="16-true")
        counts = (strategy.rescaled_updates, strategy.skipped_updates, len(module.losses))
        assert counts == (2, 2, 6), (stage, counts)
