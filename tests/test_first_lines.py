"""What a run prints before it trains, and what its bar shows.

Covers ``first_lines.py``.
"""

import logging
import os
import subprocess
import sys
import warnings

import pytest
from modules.data_runs import write
from tiny_models import tiny_model

from rlhfkit.first_lines import TIPS, TipFilter, silence_tips, without_load_report

RUNS = """
import os, sys
import lightning as L
from rlhfkit import (
    DPOModule, GRPOModule, PreferenceDataModule, PromptDataModule, RewardModule, RolloutCallback, SamplingSpec,
    SFTDataModule, SFTModule,
)

def fit(title, module, data, **arguments):
    print("====", title, file=sys.stderr, flush=True)
    trainer = L.Trainer(accelerator="cpu", devices=1, default_root_dir="run", **arguments)
    trainer.fit(module, data)
    print("bar:", *sorted(trainer.progress_bar_metrics), file=sys.stderr, flush=True)
    return trainer

def reward(samples):
    return [float(len(sample.text)) for sample in samples]

fit("sft", SFTModule("model"), SFTDataModule("texts.jsonl", micro_batch_size=2, validation_data="texts.jsonl"),
    max_epochs=3, accumulate_grad_batches=2)
fit("dpo", DPOModule("model"), PreferenceDataModule("pairs.jsonl", micro_batch_size=2), max_epochs=1)
trainer = fit("reward", RewardModule("model", lr=1e-3), PreferenceDataModule("pairs.jsonl", micro_batch_size=5),
    max_epochs=1, logger=False, enable_checkpointing=False)
# One step with all pairs, so that the means over the epoch are those of the step.
for shown, logged in (("accuracy", "rewards/accuracies"), ("margin", "rewards/margins")):
    apart = trainer.progress_bar_metrics[shown] - float(trainer.callback_metrics[logged])
    assert abs(apart) <= 1e-6 * abs(trainer.progress_bar_metrics[shown]), shown
rollouts = RolloutCallback(reward, sampling=SamplingSpec(group_size=4, max_new_tokens=4))
fit("grpo", GRPOModule("model"), PromptDataModule("prompts.jsonl", rollout_batch_size=4, micro_batch_size=8),
    max_epochs=2, callbacks=[rollouts], logger=False, enable_checkpointing=False)
os.environ["RLHFKIT_VERBOSE"] = "1"
fit("verbose", SFTModule("model"), SFTDataModule("texts.jsonl"), max_steps=1, logger=False, enable_checkpointing=False)
"""
NOT_OURS = (
    *("GPU available", "TPU available", "Tip:", "tensorboardX", "Setting accelerator", "LeafSpec", "Loading weights"),
    *("Generating train split", "Trainable params", "Modules in train mode", "Loading `train_dataloader`"),
    "LOAD REPORT",
    "across ranks is zero",  # where there is no validation data
)


@pytest.fixture(scope="module")
def printed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """The lines of each run, both streams, of one process as importing takes long."""
    folder = tmp_path_factory.mktemp("first")
    tiny_model(folder / "model")
    write(folder / "texts.jsonl", [{"prompt": f"{i}+1=", "completion": str(i + 1)} for i in range(8)])
    pairs = [{"prompt": f"{i}+1=", "chosen": str(i + 1), "rejected": str(i)} for i in range(5)]
    write(folder / "pairs.jsonl", [*pairs, {"prompt": "1+1=", "chosen": "2", "rejected": "2"}])  # nothing to learn
    write(folder / "prompts.jsonl", [{"prompt": f"{i}+1="} for i in range(8)])
    (folder / "runs.py").write_text(RUNS)
    cache = {"HF_DATASETS_CACHE": str(folder / "cache"), "COLUMNS": "400"}  # no converted files of earlier runs
    environment = {name: value for name, value in os.environ.items() if name != "RLHFKIT_VERBOSE"} | cache
    done = subprocess.run(
        [sys.executable, "runs.py"],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    runs = [part.splitlines() for part in done.stdout.split("==== ")]
    return {"import": runs[0]} | {lines[0]: [line for line in lines[1:] if line.strip()] for lines in runs[1:]}


EXPECTED = {
    "sft": [
        "model:   model, LlamaForCausalLM of 82.2 k parameters (trained); precision 32-true; cpu",
        "data:    texts.jsonl (columns completion, prompt): 8 examples; validation on 8 examples",
        "files:   logs in run/lightning_logs/version_0 (CSVLogger); "
        "checkpoints in run/lightning_logs/version_0/checkpoints",
        "steps:   one epoch is 4 micro-batches and 2 updates; 6 updates in all in 3 epochs",
    ],
    "dpo": [
        "data:    pairs.jsonl (columns chosen, prompt, rejected): 5 examples, 1 rows left out",
        "missing: no validation data",
        "steps:   one epoch is 3 micro-batches and 3 updates; 3 updates in all in 1 epoch",
        "bar: accuracy loss margin",
    ],
    "reward": ["bar: accuracy loss margin"],
    "grpo": [
        "data:    prompts.jsonl (columns prompt): 8 prompts",
        "missing: no logger, so that metrics are kept nowhere; no checkpoints, so that the run cannot be resumed; "
        "no validation data",
        "steps:   one iteration is 4 prompts x 4 = 16 samples, in 2 micro-batches and 2 updates; "
        "4 updates in all in 2 iterations",
        "bar: reward",
    ],
}


def test_the_first_lines_describe_model_data_files_and_steps(printed: dict[str, list[str]]) -> None:
    for run, expected in EXPECTED.items():
        assert [line for line in printed[run] if line in expected] == expected
    assert len([line for line in printed["dpo"] if "1 of 6 pairs have the same tokens" in line]) == 1
    assert any(line.startswith("model:") and "reference of 82.2 k (frozen)" in line for line in printed["dpo"])
    assert any("layer 'score' is new" in line for line in printed["reward"])


def test_no_tip_of_another_library_is_printed_unless_asked_for(printed: dict[str, list[str]]) -> None:
    for run in ("import", *EXPECTED):
        assert not [line for line in printed[run] if any(tip in line for tip in NOT_OURS)]
    verbose = printed["verbose"]
    assert any(line.startswith("GPU available") for line in verbose)
    assert any("Loading weights" in line for line in verbose)
    assert any("Trainable params" in line for line in verbose)


def test_other_messages_of_these_loggers_stay(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RLHFKIT_VERBOSE", raising=False)
    silence_tips()
    silence_tips()  # once is enough
    for name, beginnings in TIPS.items():
        logger = logging.getLogger(name)
        level, propagated = logger.level, logger.propagate
        assert len([one for one in logger.filters if isinstance(one, TipFilter)]) == 1
        logger.addHandler(caplog.handler)
        try:
            logger.warning("%s and so on", beginnings[0])
            logger.warning("mine")
        finally:
            logger.removeHandler(caplog.handler)
        assert (logger.level, logger.propagate) == (level, propagated)
    assert {record.getMessage() for record in caplog.records} == {"mine"}
    with pytest.warns(UserWarning, match="mine"):
        warnings.warn("mine: tensorboardX", UserWarning, stacklevel=1)


def test_a_report_of_other_missing_weights_is_printed(caplog: pytest.LogCaptureFixture) -> None:
    logger = logging.getLogger("transformers.modeling_utils")
    logger.addHandler(caplog.handler)
    try:
        for expected in (True, False):
            with without_load_report(lambda found, answer=expected: answer) as found:  # type: ignore[misc]
                found["missing_keys"] = {"score.weight"}
                logger.warning("Llama LOAD REPORT %s", expected)
                logger.warning("something else %s", expected)
    finally:
        logger.removeHandler(caplog.handler)
    messages = {record.getMessage() for record in caplog.records}
    assert messages == {"something else True", "something else False", "Llama LOAD REPORT False"}
