"""The code of CONTRIBUTING.md: every snippet is written as its file or run, and what it makes is trained with."""

import importlib
import re
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from losses.policy_cases import policy_batch
from rl_runs import digits, fit_run, weights
from tiny_models import tiny_model

import rlhfkit.losses
from rlhfkit import GRPOModule, LocalEngine, RolloutCallback
from rlhfkit.models import load_causal_lm

PAGE = Path(__file__).parents[1] / "CONTRIBUTING.md"
SECTIONS = dict(re.findall(r"^## (Write .+?)\n(.*?)(?=^## )", PAGE.read_text(), re.DOTALL | re.MULTILINE))


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
    trainer, module, _ = fit_run(folder, module=made, rollouts=rollouts)
    assert trainer.global_step == 4
    start = load_causal_lm(str(folder / "model")).state_dict()
    assert not all(torch.equal(start[name], weight) for name, weight in weights(module).items())
    return module


def test_a_part(project: Path) -> None:
    fit(project, run(project, "Write a part")["module"])
    part = importlib.import_module("my_parts").ShortAnswersCountMore(typical=4)
    rows = types.SimpleNamespace(action_mask=torch.tensor([[True, False], [True, True]]).repeat_interleave(2, 1))
    factors, metrics = part.weigh(rows, None, None)
    assert factors.flatten().tolist() == pytest.approx([2**0.5, 1.0])
    assert metrics.keys() == {"short/factor"}


def test_a_loss(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = run(project, "Write a loss")["module"]
    fit(project, module)
    loss = importlib.import_module("my_losses").power_loss
    batch = policy_batch().leaf()
    expected = -((batch.logprobs - batch.old_logprobs).exp().sqrt() * batch.advantages)[batch.mask].mean()
    assert loss(*batch).loss.item() == pytest.approx(expected.item())
    # The steps that add it to rlhfkit: the name is all that a module needs.
    monkeypatch.setattr(rlhfkit.losses, "power_loss", loss, raising=False)
    assert GRPOModule(str(project / "model"), policy_loss="power_loss").policy_loss.function is loss


def test_a_reward(project: Path) -> None:
    rollouts = run(project, "Write a reward")["rollouts"]
    assert isinstance(rollouts.engine, LocalEngine)
    fit(project, rollouts=rollouts)
    assert {round(sample.reward % 1, 3) for sample in rollouts.samples} <= {1 - k / 1000 for k in range(9)} | {0.0}


def test_a_source(project: Path) -> None:
    rollouts = run(project, "Write a reward", "Write a source")["rollouts"]
    rollouts = RolloutCallback(digits, sampling=rollouts.sampling, parts=rollouts.parts)
    fit(project, rollouts=rollouts)
    indices = [sample.prompt.index for sample in rollouts.samples]
    assert indices == sorted(indices)
    assert len({*indices}) == 8


def test_an_engine(project: Path) -> None:
    rollouts = run(project, "Write a reward", "Write an engine")["rollouts"]
    rollouts = RolloutCallback(digits, engine=rollouts.engine, sampling=rollouts.sampling)  # random digits differ
    fit(project, rollouts=rollouts)
    assert rollouts.engine.version == 4
    assert len({tuple(sample.token_ids.tolist()) for sample in rollouts.samples}) == 32
