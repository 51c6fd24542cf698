"""SampleTable prints samples, TrainingCurves plots metrics.

Covers ``callbacks/curves.py`` and ``callbacks/samples.py``.
"""

from pathlib import Path

import lightning as L
import pytest
from lightning.pytorch.callbacks import ModelCheckpoint
from PIL import Image
from rich.console import Console
from rl_runs import setup_run

from rlhfkit import RolloutCallback, SampleTable, TrainingCurves


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[RolloutCallback, TrainingCurves, L.Trainer, Path]:
    folder = tmp_path_factory.mktemp("run")
    curves = TrainingCurves(str(folder / "curves.png"), title="a test")
    trainer, module, data, rollouts = setup_run(folder, callbacks=[curves], max_epochs=3)
    trainer.fit(module, data)
    return rollouts, curves, trainer, folder


def test_the_table_shows_prompt_completion_parts_and_advantage(
    run: tuple[RolloutCallback, TrainingCurves, L.Trainer, Path],
) -> None:
    rollouts = run[0]
    console = Console(record=True, width=200)
    console.print(SampleTable(rows=4).table(rollouts, "iteration 2"))
    text = console.export_text()
    for heading in ("iteration 2", "prompt", "completion", "digits", "reward", "advantage"):
        assert heading in text
    best = max(rollouts.samples, key=lambda sample: sample.reward or 0.0)
    assert best.prompt.text in text
    assert f"{best.reward:+.2f}" in text
    assert len([line for line in text.splitlines() if "=" in line]) == 4


def test_the_table_is_printed_every_so_many_iterations(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trainer, module, data, _ = setup_run(tmp_path, callbacks=[SampleTable(every_n_iterations=2)], max_epochs=4)
    trainer.fit(module, data)
    printed = capsys.readouterr().out
    assert "iteration 0" in printed
    assert "iteration 2" in printed
    assert "iteration 1" not in printed


def test_the_curves_are_a_picture_with_a_point_for_each_iteration(
    run: tuple[RolloutCallback, TrainingCurves, L.Trainer, Path],
) -> None:
    _, curves, trainer, folder = run
    assert curves.saved == folder / "curves.png"
    with Image.open(folder / "curves.png") as image:
        image.verify()
        assert image.width > 4 * image.height  # five panels side by side
    assert [x for x, _ in curves.history["rollout/reward"]] == [0, 1, 2]
    assert curves.history["rollout/reward"][-1][1] == pytest.approx(float(trainer.callback_metrics["rollout/reward"]))
    assert not list(folder.glob("*.partial.png"))


def test_the_curves_go_on_after_a_resume(run: tuple[RolloutCallback, TrainingCurves, L.Trainer, Path]) -> None:
    again = TrainingCurves()
    again.load_state_dict(run[1].state_dict())
    assert again.history == run[1].history


def test_a_checkpoint_of_the_end_of_an_iteration_has_its_point(tmp_path: Path) -> None:
    def fit(epochs: int, checkpoint: str | None = None) -> tuple[TrainingCurves, str]:
        curves = TrainingCurves()
        saver = ModelCheckpoint(tmp_path / "saved", save_top_k=-1, every_n_epochs=1, save_on_train_epoch_end=True)
        trainer, module, data, _ = setup_run(
            tmp_path, callbacks=[curves, saver], max_epochs=epochs, enable_checkpointing=True, default_root_dir=tmp_path
        )
        trainer.fit(module, data, ckpt_path=checkpoint, weights_only=False)
        return curves, saver.best_model_path

    first, checkpoint = fit(2)
    resumed, _ = fit(3, checkpoint)
    for name in ("rollout/reward", "policy/entropy"):
        assert [x for x, _ in resumed.history[name]] == [0, 1, 2]
        assert resumed.history[name][:2] == first.history[name]


@pytest.mark.parametrize("arguments", [{"rows": 0}, {"every_n_iterations": 0}, {"max_characters": -1}])
def test_nonsense_is_refused(arguments: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="must be an integer of at least 1, got"):
        SampleTable(**arguments)
