"""Validation: several ways of sampling, several sources, and the best checkpoint by any of their metrics."""

import json
from pathlib import Path
from typing import Any

import lightning as L
import pytest
from lightning.pytorch.callbacks import ModelCheckpoint
from rl_runs import digits, setup_run

from rlhfkit import RolloutCallback, SamplingSpec, Validation

MONITORS = ("val/greedy/reward", "val/sampled/pass@2/hard")


class Scores(L.Callback):
    """Every validation's metrics."""

    def __init__(self) -> None:
        self.seen: list[dict[str, float]] = []

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        self.seen.append({name: float(trainer.callback_metrics[name]) for name in MONITORS})


def test_the_best_checkpoint_is_the_one_with_the_best_evaluation(tmp_path: Path) -> None:
    held = [{"prompt": f"{i}+1=", "answer": "", "source": "easy" if i % 3 else "hard"} for i in range(12)]
    (tmp_path / "held.jsonl").write_text("".join(json.dumps(row) + "\n" for row in held))

    def run(*callbacks: L.Callback, **arguments: Any) -> Any:
        rollouts = RolloutCallback(
            digits,
            sampling=SamplingSpec(group_size=4, max_new_tokens=8),
            parts=[
                Validation(
                    {
                        "greedy": SamplingSpec(group_size=1, max_new_tokens=8, temperature=0.0),
                        "sampled": SamplingSpec(group_size=4, max_new_tokens=8, seed=7),
                    },
                    success_threshold=0.5,
                )
            ],
        )
        data = {"validation_data": str(tmp_path / "held.jsonl"), "validation_split": "train"}
        return *setup_run(
            tmp_path,
            module_arguments={"lr": 1e-2},  # too much: validation goes up and down
            data_arguments=data,
            rollouts=rollouts,
            callbacks=callbacks,
            num_sanity_val_steps=0,
            enable_checkpointing=bool(callbacks),
            max_epochs=6,
            **arguments,
        ), rollouts

    scores = Scores()
    savers = [
        ModelCheckpoint(tmp_path / name.replace("/", "-"), monitor=name, mode="max", filename="{epoch}")
        for name in MONITORS
    ]
    trainer, module, data, _, rollouts = run(scores, *savers)
    trainer.fit(module, data)
    assert len(scores.seen) == 6
    for name, saver in zip(MONITORS, savers, strict=True):
        values = [each[name] for each in scores.seen]
        assert len(set(values)) > 1
        assert float(saver.best_model_score) == max(values)  # type: ignore[arg-type]
        assert Path(saver.best_model_path).stem == f"epoch={values.index(max(values))}"
        trainer, module, data, _, rollouts = run()
        metrics = trainer.validate(module, data, ckpt_path=saver.best_model_path, verbose=False)[0]
        assert metrics[name] == pytest.approx(max(values))
    assert len(rollouts.validation_samples) == 12 + 12 * 4
    greedy = rollouts.validation_samples[:12]
    assert metrics["val/greedy/reward"] == pytest.approx(sum(digits(greedy)) / 12)
    hard = [sample for sample in greedy if sample.prompt.metadata["source"] == "hard"]
    assert metrics["val/greedy/reward/hard"] == pytest.approx(sum(digits(hard)) / len(hard))
