"""``SampleTable`` prints samples."""

from pathlib import Path

import pytest
from rich.console import Console
from rl_runs import setup_run

from rlhfkit import RolloutCallback, SampleTable


@pytest.fixture(scope="module")
def rollouts(tmp_path_factory: pytest.TempPathFactory) -> RolloutCallback:
    trainer, module, data, rollouts = setup_run(tmp_path_factory.mktemp("run"), max_epochs=3)
    trainer.fit(module, data)
    return rollouts


def test_the_table_shows_prompt_completion_parts_and_advantage(rollouts: RolloutCallback) -> None:
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


@pytest.mark.parametrize("arguments", [{"rows": 0}, {"every_n_iterations": 0}, {"max_characters": -1}])
def test_nonsense_is_refused(arguments: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="must be an integer of at least 1, got"):
        SampleTable(**arguments)
