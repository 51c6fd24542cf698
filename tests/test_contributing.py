"""The code of CONTRIBUTING.md: every snippet is written as its file or run, and what it makes is trained with."""

import importlib
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from losses.policy_cases import policy_batch
from modules import sft_cases
from rl_runs import digits, setup_run, weights
from tiny_models import tiny_model

import rlhfkit.losses
from rlhfkit import GRPOModule, LocalEngine, RolloutCallback, SFTDataModule
from rlhfkit.models import load_causal_lm

PAGE = Path(__file__).parents[1] / "CONTRIBUTING.md"
SECTIONS = dict(re.findall(r"^## (Add .+?)\n(.*?)(?=^## )", PAGE.read_text(), re.DOTALL | re.MULTILINE))


@pytest.fixture(autouse=True)
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A user's project: a folder from which Python imports."""
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    for name in [name for name in sys.modules if name.startswith("my_")]:
        del sys.modules[name]


def run(project: Path, *sections: str) -> dict[str, Any]:
    """Write the files of these sections, run their other snippets, and return the names that those define."""
    names: dict[str, Any] = {"model": str(tiny_model(project / "model"))}
    for section in sections:
        for code in re.findall(r"^```python\n(.*?)^```$", SECTIONS[section], re.DOTALL | re.MULTILINE):
            if file := re.match(r"# (my_\w+\.py)\n", code):
                (project / file[1]).write_text(code)
                importlib.invalidate_caches()
            else:
                exec(compile(code, str(PAGE), "exec"), names)
    return names


def fit(folder: Path, module: GRPOModule | None = None, rollouts: RolloutCallback | None = None) -> GRPOModule:
    """Train for two iterations of two updates each; the weights must have moved."""
    made = (lambda *_, **__: module) if module else GRPOModule
    trainer, module, data, _ = setup_run(folder, module=made, rollouts=rollouts)
    trainer.fit(module, data)
    assert trainer.global_step == 4
    start = load_causal_lm(str(folder / "model")).state_dict()
    assert not all(torch.equal(start[name], weight) for name, weight in weights(module).items())
    return module


def test_every_recipe_is_tested() -> None:
    assert set(SECTIONS) == {
        "Add a loss",
        "Add an advantage estimator",
        "Add a reward",
        "Add an engine",
        "Add a module",
    }


def test_a_loss(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = run(project, "Add a loss")["module"]
    fit(project, module)
    loss = importlib.import_module("my_losses").power_loss
    batch = policy_batch().leaf()
    expected = -((batch.logprobs - batch.old_logprobs).exp().sqrt() * batch.advantages)[batch.mask].mean()
    assert loss(*batch).loss.item() == pytest.approx(expected.item())
    # The steps that add it to rlhfkit: the name is all that a module needs.
    monkeypatch.setattr(rlhfkit.losses, "power_loss", loss, raising=False)
    assert GRPOModule(str(project / "model"), policy_loss="power_loss").policy_loss.function is loss


def test_an_advantage_estimator(project: Path) -> None:
    module = run(project, "Add an advantage estimator")["module"]
    rewards, group = torch.tensor([1.0, 2.0, 6.0, float("nan"), 3.0]), torch.tensor([0, 0, 0, 1, 1])
    assert importlib.import_module("my_advantages").median_advantages(rewards, group).tolist() == [-1, 0, 4, 0, 0]
    fit(project, module)


def test_a_reward(project: Path) -> None:
    rollouts = run(project, "Add a reward")["rollouts"]
    assert isinstance(rollouts.engine, LocalEngine)
    fit(project, rollouts=rollouts)
    assert {round(sample.reward % 1, 3) for sample in rollouts.samples} <= {1 - k / 1000 for k in range(9)} | {0.0}


def test_an_engine(project: Path) -> None:
    rollouts = run(project, "Add a reward", "Add an engine")["rollouts"]
    rollouts = RolloutCallback(digits, engine=rollouts.engine, sampling=rollouts.sampling)  # random digits differ
    fit(project, rollouts=rollouts)
    assert rollouts.engine.version == 4
    assert len({tuple(sample.token_ids.tolist()) for sample in rollouts.samples}) == 32


def test_a_module(project: Path) -> None:
    module = run(project, "Add a module")["module"]
    rows = [{"prompt": f"{i}+1=", "completion": str(i + 1)} for i in range(8)]
    (project / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = SFTDataModule(str(project / "data.jsonl"), micro_batch_size=4, max_length=32, cache_dir=project / "cache")
    trainer = sft_cases.trainer(project, max_steps=20, precision="32-true")
    trainer.fit(module, data)
    assert module.gamma == 1.0
    assert trainer.callback_metrics["loss"] < 1.0
