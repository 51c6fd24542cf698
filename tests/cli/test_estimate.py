"""``rlhfkit estimate``."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from tiny_models import tiny_model

from rlhfkit.cli.main import main


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A configuration of ``fit`` for GPUs that this machine lacks, and a file of prompts that does not exist."""
    model = tiny_model(tmp_path_factory.mktemp("model"))
    return {
        "model": {"class_path": "rlhfkit.GRPOModule", "init_args": {"model": str(model), "kl_coef": 0.1}},
        "data": {
            "class_path": "rlhfkit.PromptDataModule",
            "init_args": {"data": "prompts.jsonl", "rollout_batch_size": 64, "max_prompt_length": 32},
        },
        "trainer": {
            "accelerator": "gpu",
            "strategy": "rlhf_zero3",
            "devices": 8,
            "num_nodes": 2,
            "precision": "bf16-true",
            "callbacks": [
                {
                    "class_path": "rlhfkit.RolloutCallback",
                    "init_args": {
                        "reward": {"class_path": "rlhfkit.rewards.FormatReward", "init_args": {"pattern": "[0-9]+"}},
                        "engine": {"class_path": "rlhfkit.VLLMPool", "init_args": {"num_engines": 4}},
                        "sampling": {"group_size": 4, "max_new_tokens": 64},
                    },
                }
            ],
        },
    }


@pytest.fixture
def config(settings: dict[str, Any], tmp_path: Path) -> str:
    """The file."""
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(settings))
    return str(path)


def test_a_configuration_of_fit_is_estimated_without_its_gpus(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    main(["estimate", "--config", config, "--gpu", "H200", "--answer-tokens", "20", "--json"])
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["gpu"] == "H200"
    assert found["ranks"] == 16
    assert found["problems"] == []
    assert {part["role"] for part in found["memory"]} >= {"policy", "reference", "engine"}
    assert found["iteration_seconds"] > found["seconds"]["generate"] > 0


def test_what_does_not_fit_is_printed_and_fails(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--config", config, "--trainer.callbacks.init_args.sampling.max_new_tokens", "2000"]
    with pytest.raises(SystemExit) as ended:
        main(["estimate", *words])
    assert ended.value.code == 1
    printed = capsys.readouterr().out
    assert "key-value cache" in printed
    assert "exceed the" in printed


def test_refusals_are_one_line(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    for words, message in [
        (["--gpu", "H1000"], "gpu must be one of A100-40GB, A100, H100"),
        (
            ["--trainer.devices", "auto"],
            "trainer.devices='auto' leaves the number of GPUs open",
        ),
    ]:
        with pytest.raises(SystemExit) as ended:
            main(["estimate", "--config", config, *words])
        assert ended.value.code == 1
        assert f"rlhfkit estimate: error: {message}" in capsys.readouterr().err
