"""``rlhfkit parts`` lists every part with what it reads, writes and does."""

import ast
from pathlib import Path

import pytest

import rlhfkit
from rlhfkit.cli.main import main

PACKAGE = Path(rlhfkit.__file__).parent


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
