"""Configurations of TRL become ours, or say what is not the same. Covers conversion.py, trl.py and trl_on_policy.py."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from tiny_models import tiny_model

from rlhfkit.cli.conversion.command import convert_config
from rlhfkit.cli.main import lightning_cli

PAIR = {"prompt": "a", "chosen": "b", "rejected": "c"}
SHARED = {"model_name_or_path": "tiny", "dataset_name": "rows.jsonl"}


def converted(tmp_path: Path, trainer: Any, options: dict[str, Any], **arguments: Any) -> dict[str, Any]:
    source, output = tmp_path / "trl.yaml", tmp_path / "ours.yaml"
    source.write_text(yaml.safe_dump(SHARED | options))
    convert_config(source, output, trainer=trainer, **arguments)
    result: dict[str, Any] = yaml.safe_load(output.read_text())
    return result


def test_defaults_are_those_of_trl_where_ours_differ(tmp_path: Path) -> None:
    result = converted(tmp_path, "dpo", {})
    model = result["model"]["init_args"]
    assert result["model"]["class_path"] == "rlhfkit.DPOModule"
    assert {name: model[name] for name in ("lr", "betas", "lr_schedule", "gradient_checkpointing", "beta")} == {
        "lr": 1e-6,
        "betas": [0.9, 0.999],
        "lr_schedule": "linear",
        "gradient_checkpointing": True,
        "beta": 0.1,
    }
    assert result["data"]["init_args"]["max_length"] == 1024
    trainer = result["trainer"]
    assert (trainer["precision"], trainer["gradient_clip_val"], trainer["max_epochs"]) == ("bf16-mixed", 1.0, 3)


def test_a_generation_of_trl_is_an_iteration_of_as_many_prompts_and_updates(tmp_path: Path) -> None:
    options = {
        "per_device_train_batch_size": 16,
        "gradient_accumulation_steps": 4,
        "steps_per_generation": 8,
        "num_generations": 4,
        "num_iterations": 3,
        "max_steps": 100,
        "loss_type": "grpo",
        "reward_funcs": ["accuracy_reward"],
    }
    result = converted(tmp_path, "grpo", options, devices=2)
    data, trainer = result["data"]["init_args"], result["trainer"]
    # 16 x 8 x 2 completions = 64 groups of 4; an update has 4 of the 8 micro-batches.
    assert data["rollout_batch_size"] == 64
    assert (data["micro_batch_size"], data["epochs_per_iteration"]) == (16, 3)
    assert (trainer["accumulate_grad_batches"], trainer["devices"], trainer["max_steps"]) == (4, 2, 100)
    rollout = trainer["callbacks"][-1]["init_args"]
    assert (rollout["sampling"]["group_size"], rollout["sampling"]["max_new_tokens"]) == (4, 512)
    assert rollout["reward"] == "rlhfkit.rewards.math_match"


@pytest.mark.parametrize(
    ("options", "loss", "arguments"),
    [
        ({"loss_type": "grpo", "beta": 0.04, "sync_ref_model": True}, "grpo_loss", None),
        ({"loss_type": "grpo", "importance_sampling_level": "sequence"}, "gspo_loss", None),
        ({"loss_type": "cispo", "epsilon_high": 5.0}, "cispo_loss", {"ratio_max": 5.0}),
        ({"loss_type": "sapo"}, "sapo_loss", {"temperature_positive": 1.0, "temperature_negative": 1.05}),
        ({"delta": 2.0}, "dapo_loss", {"delta": 2.0}),
    ],
)
def test_policy_losses_keep_their_parameters(
    tmp_path: Path, options: dict[str, Any], loss: str, arguments: dict[str, Any] | None
) -> None:
    model = converted(tmp_path, "grpo", {"max_steps": 1} | options)["model"]["init_args"]
    assert model["policy_loss"] == loss
    assert model.get("policy_loss_arguments") == arguments
    assert model.get("kl_importance_weight", False) == ("beta" in options)  # TRL's default
    assert model.get("ref_model_sync_steps") == (512 if "sync_ref_model" in options else None)
    assert ("clip_high" in model) == (loss not in ("cispo_loss", "sapo_loss"))


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, {"every_n_train_steps": 500, "save_top_k": -1}),
        ({"save_steps": 7, "save_total_limit": 2}, {"every_n_train_steps": 7, "save_top_k": 2}),
        ({"save_strategy": "epoch"}, {"every_n_epochs": 1, "save_top_k": -1}),
        ({"save_strategy": "no"}, None),
    ],
)
def test_checkpoints_are_saved_when_trl_saves_them(
    tmp_path: Path, options: dict[str, Any], expected: dict[str, Any] | None
) -> None:
    trainer = converted(tmp_path, "dpo", options)["trainer"]
    saved = [one["init_args"] for one in trainer["callbacks"] if one["class_path"].endswith("ModelCheckpoint")]
    assert [{name: one.get(name) for name in expected or {}} for one in saved] == (
        [] if expected is None else [expected]
    )
    assert trainer.get("enable_checkpointing", True) == (expected is not None)


def test_epochs_and_best_models_of_own_samples_are_not_saved_as_something_else(tmp_path: Path) -> None:
    for strategy, trainer in (("epoch", "grpo"), ("best", "dpo")):
        with pytest.raises(ValueError, match=f"save_strategy='{strategy}'"):
            converted(tmp_path, trainer, {"max_steps": 1, "save_strategy": strategy})


def test_norms_do_not_decay_as_in_transformers(tmp_path: Path) -> None:
    model = converted(tmp_path, "dpo", {"weight_decay": 0.1, "optim": "adamw_torch"})["model"]["init_args"]
    assert model["parameter_options"] == {"vectors": {"weight_decay": 0.0}}
    adapted = {"use_peft": True, "lora_target_modules": "all-linear", "weight_decay": 0.1}  # adapters have no vectors
    assert "parameter_options" not in converted(tmp_path, "dpo", adapted)["model"]["init_args"]
    assert "parameter_options" not in converted(tmp_path, "dpo", {})["model"]["init_args"]


def test_shares_of_a_run_are_no_numbers_of_steps(tmp_path: Path) -> None:
    options = {"save_steps": 0.2, "logging_steps": 0.1, "eval_steps": 0.5}
    with pytest.raises(ValueError, match="cannot be converted exactly") as error:
        converted(tmp_path, "dpo", options)
    assert all(f"{name}={share}: a share of the run" in str(error.value) for name, share in options.items())


def test_a_run_on_one_device_does_not_take_all_of_the_machine(tmp_path: Path) -> None:
    assert converted(tmp_path, "grpo", {"max_steps": 1})["trainer"]["devices"] == 1


def test_samples_of_vllm_are_corrected_as_in_trl(tmp_path: Path) -> None:
    result = converted(tmp_path, "grpo", {"max_steps": 1, "use_vllm": True, "vllm_tensor_parallel_size": 2}, devices=4)
    assert result["model"]["init_args"]["correction"] == {"level": "sequence", "mode": "mask", "high": 3.0}
    engine = result["trainer"]["callbacks"][-1]["init_args"]["engine"]
    assert engine["class_path"] == "rlhfkit.VLLMPool"
    assert (engine["init_args"]["num_engines"], engine["init_args"]["tensor_parallel_size"]) == (2, 2)


def test_everything_that_is_not_the_same_is_listed_at_once(tmp_path: Path) -> None:
    options = {"packing": True, "optim": "adafactor", "no_such_option": 1, "warmup_steps": 0.1}
    with pytest.raises(ValueError, match="cannot be converted exactly") as error:
        converted(tmp_path, "sft", options)
    for name in ("packing", "optim='adafactor'", "no_such_option=1", "warmup_steps=0.1"):
        assert name in str(error.value)
    assert not (tmp_path / "ours.yaml").exists()
    converted(tmp_path, "sft", options, allow_differences=True)
    assert "# Differs: no_such_option=1" in (tmp_path / "ours.yaml").read_text()


def test_sizes_that_are_no_whole_groups_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not a whole number of groups of 8"):
        converted(tmp_path, "grpo", {"per_device_train_batch_size": 6, "max_steps": 1})


@pytest.mark.parametrize(
    ("trainer", "options", "row"),
    [
        ("sft", {"use_peft": True, "lora_target_modules": "all-linear", "neftune_noise_alpha": 5.0}, {"text": "a b"}),
        ("reward", {"center_rewards_coefficient": 0.01}, {"prompt": "a", "chosen": "b", "rejected": "c"}),
        (
            "dpo",
            {"loss_type": ["sigmoid", "sft"], "loss_weights": [1.0, 0.5]},
            {"prompt": "a", "chosen": "b", "rejected": "c"},
        ),
        ("kto", {"sync_ref_model": True}, {"prompt": "a", "completion": "b", "label": True}),
        ("grpo", {"max_steps": 1, "reward_funcs": ["accuracy_reward"]}, {"prompt": "a", "solution": "b"}),
        ("rloo", {"max_steps": 1, "reward_funcs": ["accuracy_reward"]}, {"prompt": "a", "solution": "b"}),
    ],
)
def test_the_result_is_accepted_by_our_command_line(
    tmp_path: Path, trainer: Any, options: dict[str, Any], row: dict[str, Any]
) -> None:
    folder, rows = tiny_model(tmp_path / "model"), tmp_path / "rows.jsonl"
    rows.write_text(json.dumps(row) + "\n")
    named = {"model_name_or_path": str(folder), "dataset_name": str(rows), "eval_strategy": "steps", "eval_steps": 10}
    result = converted(tmp_path, trainer, named | options)
    cli = lightning_cli(["fit", "--config", str(tmp_path / "ours.yaml")], start=False)
    assert type(cli.model).__name__ == result["model"]["class_path"].split(".")[-1]
    assert cli.model.lr == result["model"]["init_args"]["lr"]
