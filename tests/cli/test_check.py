"""What is wrong in a configuration is said in five lines, without loading what the run needs."""

import resource
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from rlhfkit.cli.check import Configuration, ConfigurationError, check_words

ROOT = Path(__file__).parents[2]
CONFIG = "--config rlhfkit/cli/demo/grpo_arithmetic.yaml"

WRONG = {
    # arguments that there are not
    f"{CONFIG} --model.init_args.learning_rate 1": ("model.init_args.learning_rate: 1", "did you mean lr?"),
    f"{CONFIG} --model.learning_rate 1": ("GRPOModule takes no argument learning_rate", "did you mean lr?"),
    f"{CONFIG} --model.learning_rate=1": ("(--model.learning_rate)", "did you mean lr?"),
    f"{CONFIG} --model.beta 0.1": ("beta is kl_coef here",),
    f"{CONFIG} --model.clip_hgh 0.3": ("did you mean clip_high?",),
    f"{CONFIG} --model.num_generations 8": ("did you mean SamplingSpec(group_size=)?",),
    f"{CONFIG} --model.lora.r 8": ("LoRA takes no argument r", "did you mean rank?"),
    f"{CONFIG} --model.completely_wrong 1": ("GRPOModule takes no argument completely_wrong", "see: rlhfkit fit"),
    f"{CONFIG} --trainer.max_epoch 1": ("Trainer takes no argument max_epoch", "did you mean max_epochs?"),
    f"{CONFIG} --trainer.gradient_accumulation_steps 4": ("did you mean accumulate_grad_batches?",),
    f"{CONFIG} --data.rollout_batchsize 4": ("did you mean rollout_batch_size?",),
    f"{CONFIG} --data.num_iterations 2": ("did you mean epochs_per_iteration?",),
    f"{CONFIG} --trainer.callbacks+=EMA --trainer.callbacks.decy 0.9": ("EMA takes no argument decy", "decay"),
    f"{CONFIG} --trainer.logger CSVLogger --trainer.logger.save_dirr x": ("did you mean save_dir?",),
    # at the wrong place
    f"{CONFIG} --lr 1e-6": ("did you mean model.init_args.lr?",),
    f"{CONFIG} --max_epochs 1": ("did you mean trainer.max_epochs?",),
    f"{CONFIG} --rollout_batch_size 1": ("did you mean data.init_args.rollout_batch_size?",),
    f"{CONFIG} --modle x": ("modle: x", "did you mean model?"),
    f"{CONFIG} --traner.max_epochs 1": ("did you mean trainer?",),
    # values
    f"{CONFIG} --model.lr fast": ("model.init_args.lr: fast", "must be a number"),
    f"{CONFIG} --model.lr null": ("must be a number",),
    f"{CONFIG} --model.optimization.warmup_steps 1.5": ("must be an integer",),
    f"{CONFIG} --model.loading.gradient_checkpointing maybe": ("must be true or false",),
    f"{CONFIG} --model.optimization.lr_schedule cosinus": ("must be one of constant", "did you mean cosine?"),
    f"{CONFIG} --model.gamma 2": ("at most 1", "got 2"),
    f"{CONFIG} --model.gamma -1": ("at least 0", "got -1"),
    f"{CONFIG} --data.rollout_batch_size [4]": ("must be an integer",),
    f"{CONFIG} --trainer.max_epochs many": ("must be an integer or null",),
    f"{CONFIG} --trainer.precision bf16true": ("did you mean bf16-true?",),
    f"{CONFIG} --trainer.check_val_every_n_epoch often": ("must be an integer or null",),
    # classes and functions that there are not
    "--model rlhfkit.GRPOModul": ("rlhfkit has no GRPOModul", "did you mean rlhfkit.GRPOModule?"),
    "--model GRPOModul": ("did you mean rlhfkit.GRPOModule?",),
    "--model rlhfkt.GRPOModule": ("there is no module rlhfkt",),
    "--model my_file_that_is_not.Module": ("there is no module my_file_that_is_not, neither installed nor in",),
    f"{CONFIG} --trainer.callbacks+=rlhfkit.EMAA": ("did you mean rlhfkit.EMA?",),
    f"{CONFIG} --trainer.callbacks+=RolloutCallback --trainer.callbacks.reward rlhfkit.rewards.exact_mach": (
        "rlhfkit.rewards has no exact_mach",
        "did you mean rlhfkit.rewards.exact_match?",
    ),
    f"{CONFIG} --trainer.callbacks+=RolloutCallback --trainer.callbacks.engine rlhfkit.LocalEngin": ("LocalEngine?",),
    # missing
    "--trainer.max_epochs 1": ("model", "is missing"),
    "--model GRPOModule": ("model.init_args.model", "GRPOModule needs it"),
    "--model.lr 1e-6": ("model.class_path", "is missing"),
    # files and words
    "--config no_such_file.yaml": ("no_such_file.yaml", "No such file"),
    "--config rlhfkit/cli/demo/grpo_arithmetic.yml": ("did you mean", "grpo_arithmetic.yaml?"),
    "--config rlhfkit/cli/demo/arithmetic.py": ("no YAML",),
    "run.yaml": ("options begin with --",),
    "--config": ("a value is missing",),
}


@pytest.fixture(autouse=True)
def at_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


@pytest.mark.parametrize("line", WRONG)
def test_what_is_wrong_is_named_in_five_lines(line: str) -> None:
    with pytest.raises(ConfigurationError) as refused:
        check_words(["fit", *shlex.split(line)])
    text = str(refused.value)
    assert all(part in text for part in WRONG[line]), text
    assert len(text.splitlines()) <= 5
    assert max(map(len, text.splitlines())) < 300


RIGHT = [
    CONFIG,
    f"{CONFIG} --config rlhfkit/cli/demo/grpo_arithmetic_vllm.yaml",
    f"{CONFIG} --model.init_args.lr 1e-6 --trainer.max_epochs 10 --trainer.devices auto --seed_everything false",
    f"{CONFIG} --trainer.strategy rlhf_zero2 --trainer.precision bf16-true --trainer.gradient_clip_val null",
    f"{CONFIG} --model PPOModule --model.critic_lr 1e-5 --model.lora.rank 8 --model.clip_high=0.3",
    f"{CONFIG} --model DPOModule --data PreferenceDataModule --ckpt_path last",
    f"{CONFIG} --trainer.callbacks+=EMA --trainer.callbacks.decay 0.99",
    f"{CONFIG} --model.advantages rloo_advantages --model.policy_loss gspo_loss --model.kl_coef 0.1",
    f"{CONFIG} --model.loading.attention null --trainer.logger false --trainer.limit_train_batches 0.5",
    "--model rlhfkit.GRPOModule --print_config",
    "--help",
]


@pytest.mark.parametrize("line", RIGHT)
def test_what_is_right_passes(line: str) -> None:
    check_words(["fit", *shlex.split(line)])


def test_functions_of_the_current_folder_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "rules_of_mine.py").write_text("def short(samples): return [1.0 for _ in samples]\n")
    words = ["fit", *CONFIG.split(), "--trainer.callbacks+=RolloutCallback", "--trainer.callbacks.reward"]
    check_words([*words, "rules_of_mine.short"])
    with pytest.raises(ConfigurationError, match=r"rules_of_mine has no shrt: did you mean rules_of_mine\.short\?"):
        check_words([*words, "rules_of_mine.shrt"])


def test_all_places_that_are_wrong_are_listed(tmp_path: Path) -> None:
    settings = yaml.safe_load((ROOT / "rlhfkit/cli/demo/grpo_arithmetic.yaml").read_text())
    settings["model"]["init_args"]["learning_rate"] = 1
    settings["trainer"]["max_epoch"] = 1
    settings["trainer"]["callbacks"][0]["init_args"]["sampling"]["max_tokens"] = 5
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(settings))
    with pytest.raises(ConfigurationError) as refused:
        check_words(["fit", "--config", str(path)])
    text = str(refused.value)
    assert str(path) in text
    for place in ("max_epoch", "model.init_args.learning_rate", "callbacks.0.init_args.sampling.max_tokens"):
        assert place in text


def test_later_words_go_over_earlier_ones(tmp_path: Path) -> None:
    first, second = tmp_path / "first.yaml", tmp_path / "second.yaml"
    first.write_text("model: {class_path: rlhfkit.GRPOModule, init_args: {model: a, lr: 1.0, clip_low: 0.1}}\n")
    second.write_text("model: {class_path: rlhfkit.RewardModule, init_args: {head_std: 5}}\n")
    files = ["--config", str(first), "--config", str(second)]
    read = Configuration([*files, "--model.lr", "2", "--trainer.callbacks+=EMA", "--trainer.callbacks.decay=0.5"]).tree
    assert read["model"]["class_path"] == "rlhfkit.RewardModule"
    # reward models have no clipping: LightningCLI drops it too
    assert read["model"]["init_args"] == {"model": "a", "lr": 2, "head_std": 5}
    assert read["trainer"]["callbacks"] == [{"class_path": "EMA", "init_args": {"decay": 0.5}}]


def test_a_wrong_run_ends_in_two_seconds_of_cpu_time() -> None:
    """As the user sees it: the exit code, five lines, no traceback; nothing that computes is loaded."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [sys.executable, "-m", "rlhfkit.cli.main", "fit", *CONFIG.split(), "--model.learning_rate", "1"],
        capture_output=True,
        text=True,
        check=False,
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 1
    assert done.stderr.startswith("rlhfkit fit: error: model.init_args.learning_rate: 1")
    assert "did you mean lr?" in done.stderr
    assert len(done.stderr.splitlines()) <= 5
    assert done.stdout == ""
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 2.0


def test_the_check_loads_no_library() -> None:
    code = (
        "import sys\n"
        "from rlhfkit.cli.check import check_words\n"
        f"check_words(['fit', *{CONFIG.split()!r}])\n"
        "print(*sorted({'torch', 'lightning', 'transformers', 'jsonargparse'} & {*sys.modules}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""
