"""``placement:`` in a configuration of ``fit``: the roles start where it says."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from tiny_models import tiny_model

from rlhfkit.cli.main import run

WITH = "with trainer"


def settings(folder: Path, placement: dict[str, Any]) -> Path:
    """A configuration of one iteration of PPO."""
    prompts = folder / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"{number} + 1 ="}) + "\n" for number in range(4)))
    written = {
        "placement": placement | {"trainer": 1, "device": "cpu"},
        "model": {
            "class_path": "rlhfkit.PPOModule",
            "init_args": {"model": str(tiny_model(folder / "model")), "kl_coef": 0.1},
        },
        "data": {
            "class_path": "rlhfkit.PromptDataModule",
            "init_args": {"data": str(prompts), "rollout_batch_size": 4, "micro_batch_size": 8},
        },
        "trainer": {
            "max_epochs": 1,
            "enable_progress_bar": False,
            "enable_checkpointing": False,
            "default_root_dir": str(folder),
            "logger": {"class_path": "lightning.pytorch.loggers.CSVLogger", "init_args": {"save_dir": str(folder)}},
            "callbacks": [
                {
                    "class_path": "rlhfkit.RolloutCallback",
                    "init_args": {
                        "reward": {"class_path": "rlhfkit.rewards.FormatReward", "init_args": {"pattern": "[0-9]+"}},
                        "sampling": {"group_size": 4, "max_new_tokens": 4},
                    },
                }
            ],
        },
    }
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(written))
    return path


def saved(folder: Path) -> dict[str, Any]:
    """The configuration that the run has written."""
    (path,) = folder.rglob("config.yaml")
    found: dict[str, Any] = yaml.safe_load(path.read_text())
    return found


def test_a_plan_without_machines_of_its_own_trains_and_is_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delattr("ray.init")
    cli = run(["fit", "--config", str(settings(tmp_path, {"reference": WITH, "critic": WITH}))])
    assert cli.trainer.global_step == 2
    assert cli.trainer.num_devices == 1
    assert isinstance(cli.model.critic, torch.nn.Module)
    assert "with trainer: in the ranks" in capsys.readouterr().out
    assert saved(tmp_path)["placement"]["init_args"]["critic"] == WITH


@pytest.mark.ray
def test_models_start_where_the_plan_says_and_the_saved_file_names_them_as_given(
    tmp_path: Path, ray_session: None
) -> None:
    part = {"processes": 1, "resources": {"CPU": 0.25}}
    cli = run(["fit", "--config", str(settings(tmp_path, {"reference": part, "critic": part}))])
    assert cli.trainer.global_step == 2
    assert cli.model.reference_pool.resources.bundles == (0,)
    assert cli.model.remote_critic.pool.weights
    kept = saved(tmp_path)
    assert kept["placement"]["init_args"]["critic"]["resources"] == {"CPU": 0.25}
    assert kept["model"]["init_args"]["reference"] is None
