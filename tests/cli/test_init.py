"""``rlhfkit init``, configurations of the package by name, and the list of ``rlhfkit parts``."""

import ast
from pathlib import Path

import pytest
import yaml

import rlhfkit
from rlhfkit.cli.init import FOLDER, methods, with_files
from rlhfkit.cli.main import main

PACKAGE = Path(rlhfkit.__file__).parent


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


def test_every_part_is_listed_once_with_its_first_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    main(["parts"])
    printed = capsys.readouterr().out
    lines = [line.strip() for line in printed.splitlines()]
    for path in [*PACKAGE.glob("modules/parts/*.py"), *PACKAGE.glob("callbacks/rollout/parts/*.py")]:
        for node in ast.parse(path.read_text()).body:
            bases = {base.id for base in getattr(node, "bases", []) if isinstance(base, ast.Name)}
            if isinstance(node, ast.ClassDef) and bases & {"Part", "RolloutPart"}:
                name = ".".join(("rlhfkit", *path.relative_to(PACKAGE).with_suffix("").parts, node.name))
                is_base = node.name in ("TokenFilter", "KLPart", "AnswerReference")
                assert lines.count(name) == (not is_base), name
    place = lines.index("rlhfkit.modules.parts.kl_control.KLTarget")
    assert lines[place + 1].startswith("Moves the weight of the KL penalty towards")
    assert lines[place + 2] == "CREDIT; reads old_logprobs, ref_logprobs; writes nothing"
    assert ":func:" not in printed
