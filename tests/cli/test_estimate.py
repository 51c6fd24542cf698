"""``rlhfkit estimate``, also of roles that are elsewhere."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from rl_runs import grpo_settings
from tiny_models import tiny_model

from rlhfkit.cli.main import main


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A configuration of ``fit`` for GPUs that this machine lacks, and a file of prompts that does not exist."""
    model, hardware = tiny_model(tmp_path_factory.mktemp("model")), {"devices": 8, "num_nodes": 2}
    settings = grpo_settings(
        model, "prompts.jsonl", accelerator="gpu", strategy="rlhf_zero3", precision="bf16-true", **hardware
    )
    settings["model"]["init_args"]["kl_coef"] = 0.1
    settings["data"]["init_args"] |= {"rollout_batch_size": 64, "max_prompt_length": 32}
    rollouts = settings["trainer"]["callbacks"][0]["init_args"]
    rollouts["engine"] = {"class_path": "rlhfkit.VLLMPool", "init_args": {"num_engines": 4}}
    rollouts["sampling"]["max_new_tokens"] = 64
    return settings


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
    assert (found["training_gpus"], found["gpus"]) == (16, 16 + 4)
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
        (["--trainer.devices", "auto"], "trainer.devices='auto' leaves the number of GPUs open"),
    ]:
        with pytest.raises(SystemExit) as ended:
            main(["estimate", "--config", config, *words])
        assert ended.value.code == 1
        complaint = capsys.readouterr().err
        assert complaint.startswith(f"rlhfkit estimate: error: {message}")
        assert complaint.count("\n") == 1


def test_the_configuration_of_the_page_is_estimated_without_a_cluster(
    settings: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr("ray.init")
    page = (Path(__file__).parents[2] / "docs" / "reference" / "placement.md").read_text(encoding="utf-8")
    (text,) = [block.partition("```")[0] for block in page.split("```yaml\n")[1:]]
    written = yaml.safe_load(text)
    model = settings["model"]["init_args"]["model"]
    written["data"]["init_args"]["max_prompt_length"] = 100  # the small model has a short context
    arguments = written["model"]["init_args"]
    arguments["model"] = model
    for part, argument in zip(arguments["parts"], ("pool", "models"), strict=True):
        part["init_args"][argument]["init_args"]["model"] = model
    arguments["critic"] = model
    path = tmp_path / "page.yaml"
    path.write_text(yaml.safe_dump(written))
    main(["estimate", "--config", str(path), "--trainer.callbacks.init_args.sampling.max_new_tokens", "100", "--json"])
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (found["training_gpus"], found["gpus"]) == (8, 8 + 4 + 2 * 2 + 1)
    assert {"reference GPU", "reward model GPU"} <= set(found["peak"])
