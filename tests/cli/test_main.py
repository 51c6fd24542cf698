"""The command line, and its errors: at most five lines, and a traceback where it is needed."""

import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from rl_runs import grpo_settings, prompts_file
from tiny_models import tiny_model

from rlhfkit.cli.errors import print_error, short_errors
from rlhfkit.cli.main import COMMANDS, lightning_cli, main
from rlhfkit.costs import MemoryCheck

ROOT = Path(__file__).parents[2]


def test_help_is_made_without_lightning_or_torch() -> None:
    code = (
        "from rlhfkit.cli.main import main; main(['--help']); import sys; "
        "assert not {'torch', 'lightning'} & {*sys.modules}"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert all(command in done.stdout for command in COMMANDS)


def test_an_unknown_command_is_told_all_commands(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["frobnicate"])
    complaint = capsys.readouterr().err
    assert "'frobnicate'" in complaint
    assert all(command in complaint for command in COMMANDS)


def test_an_error_of_somebody_else_keeps_its_traceback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken_reward.py").write_text("def grade(samples):\n    raise ValueError('a bug of the user')\n")
    (tmp_path / "lines.jsonl").write_text('{"prompt": "1+1=", "completion": "2"}\n')
    monkeypatch.chdir(tmp_path)  # a module of the current folder, which is on the path
    monkeypatch.setattr(sys, "path", [place for place in sys.path if place not in ("", str(tmp_path))])
    words = [str(tmp_path / "lines.jsonl"), str(tmp_path / "scored.jsonl"), "--reward", "broken_reward.grade"]
    with pytest.raises(ValueError, match="a bug of the user"):
        main(["score", *words])


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """A run of one iteration."""
    settings = grpo_settings(
        tiny_model(tmp_path / "model"),
        prompts_file(tmp_path),
        accelerator="cpu",
        max_epochs=1,
        enable_progress_bar=False,
        enable_checkpointing=False,
        default_root_dir=str(tmp_path),
        logger={"class_path": "lightning.pytorch.loggers.CSVLogger", "init_args": {"save_dir": str(tmp_path)}},
    )
    settings["data"]["init_args"] |= {"answer": "answer", "micro_batch_size": 8}
    engine = {"class_path": "rlhfkit.LocalEngine", "init_args": {"max_sequences": 5}}
    settings["trainer"]["callbacks"][0]["init_args"]["engine"] = engine
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(settings))
    return path


def test_a_configuration_file_trains(config: Path, recwarn: pytest.WarningsRecorder) -> None:
    options = {"clip_high": "0.3", "policy_loss": "gspo_loss", "advantages": "rloo_advantages"}
    part = "{class_path: rlhfkit.modules.parts.kl_control.KLTarget, init_args: {target: 0.1}}"
    options |= {"kl_coef": "0.01", "parts": f"[{part}]"}
    chosen = [word for name, value in options.items() for word in (f"--model.init_args.{name}", value)]
    cli = lightning_cli(["fit", "--config", str(config), *chosen])
    assert cli.trainer.global_step == 2
    assert cli.model.hparams["clip_high"] == 0.3
    assert cli.model.hparams["policy_loss"] == "rlhfkit.losses.policy.sequence.gspo_loss"
    assert cli.model.hparams["advantages"] == "rlhfkit.losses.advantages.group.rloo_advantages"
    assert any(repr(one).startswith("KLPenalty(coef=0.0") for one in cli.model.parts)
    assert [one.plain()["init_args"] for one in cli.model.given_parts] == [{"target": 0.1, "horizon": 10000}]
    assert cli.trainer.callbacks[0].engine.max_sequences == 5
    assert any(isinstance(callback, MemoryCheck) for callback in cli.trainer.callbacks)
    assert "rollout/reward_format" in cli.trainer.callback_metrics
    metrics = next(config.parent.glob("lightning_logs/*/metrics.csv"))
    assert "rollout/reward" in metrics.read_text().splitlines()[0]
    assert [str(warning.message) for warning in recwarn if "Unable to serialize" in str(warning.message)] == []


@pytest.mark.parametrize(
    ("option", "value", "part"),
    [
        # The parser of LightningCLI, of whose reasons the innermost one is shown.
        ("model.init_args.policy_loss_arguments", "3", "model.policy_loss_arguments: Expected a Mapping\n  got 3\n"),
        ("model.init_args.beta", "0.1", "'beta' is not accepted: did you mean kl_coef? beta is kl_coef here\n"),
        ("model.init_args.clip_hgh", "0.1", "Option 'clip_hgh' is not accepted: did you mean clip_high?\n"),
        ("trainer.callbacks.init_args.reward", "rlhfkit.rewards.exact_mach", "mean rlhfkit.rewards.exact_match?\n"),
        ("model.init_args.optimization.lr_schedule", "cosinus", "'constant', 'linear', 'cosine'"),
        ("model.init_args.lr", "-1", "lr must be a finite number above 0"),  # the module
        ("trainer.strategy", "rlhf_zero5", "rlhf_zero5"),  # Lightning
        ("model.init_args.model", "no/such/model", "no/such/model"),  # Transformers
    ],
)
def test_errors_of_libraries_have_five_lines(
    config: Path, option: str, value: str, part: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["fit", "--config", str(config), f"--{option}", value])
    complaint = capsys.readouterr().err
    assert part in complaint
    start = complaint.index("rlhfkit fit: error: ")
    assert len(complaint[start:].splitlines()) <= 5
    assert "Traceback" not in complaint


def test_debug_shows_the_traceback(config: Path) -> None:
    with pytest.raises(ValueError, match="lr must be"):
        main(["fit", "--config", str(config), "--model.init_args.lr", "-1", "--debug"])


def test_every_class_has_its_short_name() -> None:
    """Classes that are imported when first used, in a process that has used none: judged steps."""
    words = ["fit", "--model", "ProcessRewardModule", "--data", "StepwiseDataModule", "--print_config"]
    done = subprocess.run([sys.executable, "-m", "rlhfkit", *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    classes = [line.split()[1].rpartition(".")[2] for line in done.stdout.splitlines() if "  class_path: rlhf" in line]
    assert classes[:2] == ["ProcessRewardModule", "StepwiseDataModule"]
    # Of the base, with defaults.
    assert done.stdout.count("    optimization: ") == done.stdout.count("    loading: ") == 1


def test_the_tutorials_vllm_settings_go_over_the_others(capsys: pytest.CaptureFixture[str]) -> None:
    files = [str(ROOT / "rlhfkit/cli/demo" / name) for name in ("grpo_arithmetic.yaml", "grpo_arithmetic_vllm.yaml")]
    with pytest.raises(SystemExit):
        lightning_cli(["fit", "--config", files[0], "--config", files[1], "--print_config"])
    printed = yaml.safe_load(capsys.readouterr().out)
    assert printed["trainer"]["callbacks"][0]["init_args"]["engine"]["class_path"] == "rlhfkit.VLLMPool"
    assert printed["trainer"]["max_epochs"] == 150
    assert printed["model"]["init_args"]["lr"] == 5e-4


def test_a_mistake_of_ours_keeps_its_traceback() -> None:
    """``None < 0`` inside rlhfkit: a TypeError whose message says nothing to a user."""
    from rlhfkit.validation import _outside

    with pytest.raises(TypeError, match="not supported"), short_errors("fit"):
        _outside(None, 0, None, None, None)  # type: ignore[arg-type]


def test_a_long_message_is_cut(capsys: pytest.CaptureFixture[str]) -> None:
    print_error("fit", "\n".join(map(str, range(20))))
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 5
    assert "--debug" in lines[-1]
