"""``rlhfkit init``, and configurations of the package by name."""

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from rlhfkit.cli.init import FOLDER, methods, with_files
from rlhfkit.cli.main import main


def test_a_configuration_is_written_and_none_is_overwritten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    main(["init", "grpo"])
    written = Path("grpo.yaml").read_text()
    assert written == (FOLDER / "grpo.yaml").read_text()
    assert "rlhfkit fit --config grpo.yaml" in capsys.readouterr().out
    Path("grpo.yaml").write_text("mine")
    with pytest.raises(SystemExit):
        main(["init", "grpo"])
    assert "grpo.yaml exists and is kept" in capsys.readouterr().err
    assert Path("grpo.yaml").read_text() == "mine"
    main(["init", "grpo", "run.yaml"])
    assert "# 1 GPU" in Path("run.yaml").read_text()
    assert "--config run.yaml" in Path("run.yaml").read_text()
    assert yaml.safe_load(Path("run.yaml").read_text()) == yaml.safe_load(written)


def test_methods_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    main(["init"])
    listed = capsys.readouterr().out
    assert all(f"{name} " in listed and title in listed for name, title in methods().items())


def test_an_unknown_method_is_told_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["init", "GRP"], ["fit", "--config", "rlhfkit://GRP"]):
        with pytest.raises(SystemExit):
            main(words)
        complaint = capsys.readouterr().err
        assert "no configuration 'GRP'" in complaint
        assert "did you mean grpo?" in complaint


def test_names_stand_for_files() -> None:
    file = str(FOLDER / "dpo.yaml")
    words = ["fit", "--config", "rlhfkit://dpo", "--config=rlhfkit://dpo.yaml", "--model.model", "x"]
    assert with_files(words) == ["fit", "--config", file, f"--config={file}", "--model.model", "x"]


def test_the_package_is_the_command() -> None:
    command = [sys.executable, "-m", "rlhfkit", "init"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "grpo" in done.stdout
