"""NonFiniteGuard on one rank under plain Lightning; several ranks and engines: tests/strategies/test_guard.py."""

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from modules.data_runs import trainer
from torch import Tensor, nn

from rlhfkit.callbacks import NonFiniteGuard
from rlhfkit.callbacks.guard import NonFiniteError


class Line(L.LightningModule):
    """Fits one weight; a batch is {"x": ..., "scale": ...}, and the scale multiplies the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)
        self.history: list[Tensor] = []

    def training_step(self, batch: dict[str, Any], index: int) -> Tensor:
        self.history.append(self.layer.weight.detach().clone())
        return ((self.layer(batch["x"]) - 1) ** 2).mean() * batch["scale"]

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.1)


def fit(scales: list[float], guard: NonFiniteGuard, folder: Path = Path(), **options: Any) -> Line:
    """Train on batches with these scales."""
    torch.manual_seed(0)
    module = Line()
    batches = [{"x": torch.ones(2, 1), "scale": scale, "name": f"batch {i}"} for i, scale in enumerate(scales)]
    loader = torch.utils.data.DataLoader(batches, batch_size=None)
    trainer(folder, max_epochs=1, callbacks=[guard], **options).fit(module, loader)
    module.history.append(module.layer.weight.detach().clone())
    return module


def moved(module: Line) -> list[bool]:
    """Whether each batch changed the weight."""
    return [not torch.equal(a, b) for a, b in zip(module.history[:-1], module.history[1:], strict=True)]


def test_infinite_losses_and_gradients_are_skipped_and_the_row_starts_again() -> None:
    guard = NonFiniteGuard(max_skipped_updates=3)
    # 3e38 is finite; the gradient is about -2e38 for each of two rows, and its norm's square is not.
    module = fit([1.0, float("inf"), 3e38, 1.0, float("nan"), 1.0], guard)
    assert moved(module) == [True, False, False, True, False, True]
    assert (guard.skipped_updates, guard.in_a_row) == (3, 0)


def test_the_dump_loads_without_running_code_and_names_the_bad_micro_batch(tmp_path: Path) -> None:
    guard = NonFiniteGuard(max_skipped_updates=1)
    with pytest.raises(NonFiniteError, match="1 updates in a row") as raised:
        fit([1.0, 1.0, 1.0, float("inf"), 1.0], guard, accumulate_grad_batches=2, folder=tmp_path)
    (file,) = tmp_path.glob("non_finite/step=2/rank_00000.pt")
    assert str(file.parent) in str(raised.value)
    dump = torch.load(file, weights_only=True)
    assert [(e["batch_index"], bool(e["finite_loss"])) for e in dump["batches"]] == [(2, True), (3, False)]
    assert dump["batches"][1]["batch"]["name"] == "batch 3"
    assert torch.equal(dump["batches"][1]["batch"]["x"], torch.ones(2, 1))


def test_none_never_stops_and_a_run_starts_counting_anew() -> None:
    guard = NonFiniteGuard(max_skipped_updates=None)
    module = fit([float("nan")] * 5, guard)
    assert moved(module) == [False] * 5
    assert guard.in_a_row == 5
    fit([1.0, float("nan")], guard)
    assert (guard.skipped_updates, guard.in_a_row) == (1, 1)


def test_an_overflow_of_torchs_gradient_scaler_is_left_to_it(tmp_path: Path) -> None:
    from lightning.pytorch.plugins.precision import MixedPrecision

    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127)
    guard = NonFiniteGuard(max_skipped_updates=2)
    plugin = MixedPrecision("16-mixed", "cpu", scaler)
    module = fit([1e-3] * 6, guard, plugins=[plugin])
    assert (guard.skipped_updates, moved(module)) == (0, [False] * 6), "the scale has only begun to fall"
    assert scaler.get_scale() < 2.0**127
    plugin.scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    with pytest.raises(NonFiniteError):
        fit([3e38] * 6, guard, plugins=[plugin], folder=tmp_path)
