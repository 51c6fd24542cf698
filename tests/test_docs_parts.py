"""The examples of the docs that people ask for most do what they say, alone and in a run."""

import ast
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from modules import data_runs
from rl_runs import digits, fit_run

from rlhfkit import Ahead, RewardModule, RolloutCallback, SamplingSpec
from rlhfkit.losses import group_advantages
from rlhfkit.models import reward_output
from rlhfkit.rewards import WeightedSum

PAGE = Path(__file__).parents[1] / "docs" / "parts.md"


def examples(page: Path = PAGE) -> dict[str, Any]:
    """The classes of a page, and what it imports."""
    names: dict[str, Any] = {}
    for code in re.findall(r"^```python\n(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE):
        tree = ast.parse(code)
        tree.body = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom | ast.ClassDef)]
        exec(compile(tree, str(page), "exec"), names)
    return names


def test_a_run_weighs_rewards_keeps_tokens_between_tags_and_saves_its_tokens_and_a_state_of_a_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    found = examples()
    baseline = found["RunningBaseline"](0.5)
    reward = WeightedSum({"format": digits, "right": lambda samples: [float("7" in one.text) for one in samples]})
    trainer, module, rollouts = fit_run(
        tmp_path,
        module=found["SavedTokens"],
        module_arguments={"parts": [found["FormatFirst"](8), found["BetweenTags"]("+", "="), baseline]},
        rollouts=RolloutCallback(reward, sampling=SamplingSpec(group_size=4, max_new_tokens=8)),
    )
    rows = rollouts.experience  # of the second iteration, after two updates of the eight
    mixed = 0.75 * rows.reward_parts["format"] + 0.25 * rows.reward_parts["right"]
    torch.testing.assert_close(rows.advantages[:, 0], group_advantages(mixed, rows.group))
    for tokens, kept in zip(rows.input_ids, rows.columns["between_tags"], strict=True):
        pieces = [module.tokenizer.decode(token) for token in tokens]
        between = "".join(pieces).partition("+")[2].rpartition("=")[0]
        assert "".join(pieces[t + 1] for t in kept.nonzero()) == between != ""
    files = sorted(tmp_path.glob("tokens-*-0.pt"))
    assert [file.name for file in files] == ["tokens-0-0.pt", "tokens-1-0.pt"]  # both micro-batches of step 0
    for file in files:
        saved = torch.load(file)
        assert len(saved["text"]) == 8
        assert saved["loss"].shape == saved["ratio"].shape == saved["mask"].shape
        torch.testing.assert_close(saved["ratio"], torch.ones_like(saved["ratio"]))  # of the first update
        assert not saved["loss"][~saved["mask"]].any()
    assert baseline.mean != 0.0
    assert float(trainer.callback_metrics["baseline/mean"]) == pytest.approx(baseline.mean, abs=1e-6)
    trainer.save_checkpoint(tmp_path / "run.ckpt")
    saved = torch.load(tmp_path / "run.ckpt", weights_only=False)["callbacks"]
    assert saved["RunningBaseline[0]"] == {"mean": baseline.mean}


def test_several_heads_are_trained_and_their_mean_less_deviation_is_the_reward(tmp_path: Path) -> None:
    data_runs.prepare(tmp_path)
    found = examples(PAGE.with_name("reward_models.md"))
    module = found["EnsembleModule"](str(tmp_path / "model"), lr=0.01, heads=3)
    data = data_runs.data(tmp_path, RewardModule, validated=True)
    trainer = data_runs.trainer(tmp_path)
    trainer.fit(module, data)
    losses = [float(trainer.callback_metrics[f"head_{k}/loss"]) for k in range(3)]
    assert len({*losses}) == 3
    module.save_pretrained(tmp_path / "ensemble")
    part = found["EnsembleReward"](str(tmp_path / "ensemble"))
    heads = part.build(str(tmp_path / "ensemble"))
    _, _, rollouts = fit_run(tmp_path, module_arguments={"parts": [part]})
    rows = rollouts.experience
    with torch.no_grad():
        expected = reward_output(heads, rows, normalized=True)
    torch.testing.assert_close(rows.reward_parts["model"], expected.mean(-1) - expected.std(-1))


def test_the_trainer_follows_a_temperature_that_falls(tmp_path: Path) -> None:
    cooling = examples(PAGE.with_name("engines.md"))["Cooling"](0.5, 2)
    rollouts = RolloutCallback(digits, parts=[cooling], sampling=SamplingSpec(group_size=4, max_new_tokens=8))
    trainer, _, _ = fit_run(tmp_path, rollouts=rollouts)
    assert rollouts.experience is not None
    assert rollouts.experience.temperature == 0.75
    assert float(trainer.callback_metrics["rollout_corr/logprob_abs_diff_mean"]) < 1e-5


def test_ahead_refuses_a_temperature_that_falls(tmp_path: Path) -> None:
    cooling = examples(PAGE.with_name("engines.md"))["Cooling"](0.5, 2)
    rollouts = RolloutCallback(digits, parts=[Ahead(1), cooling], sampling=SamplingSpec(group_size=4, max_new_tokens=8))
    with pytest.raises(ValueError, match="a part asks for another SamplingSpec in iteration 1"):
        fit_run(tmp_path, rollouts=rollouts)
