"""Bad input raises one error that names the value, the rule and the cure, before a run starts."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from rl_runs import digits, setup_run

from rlhfkit import (
    GRPOModule,
    PromptDataModule,
    RolloutCallback,
    Sample,
    SamplingSpec,
    VLLMPool,
)
from rlhfkit.rewards import CodeExecution, LastTurnReward, WeightedSum, exact_match, math_match
from rlhfkit.rewards.base import needs
from rlhfkit.rollout.errors import EngineError


def fails(tmp_path: Path, error: type[Exception], match: str, **arguments: Any) -> None:
    trainer, module, data, _ = setup_run(tmp_path, **arguments)
    with pytest.raises(error, match=match):
        trainer.fit(module, data)
    assert trainer.global_step == 0


def callback(reward: Any = digits, **arguments: Any) -> RolloutCallback:
    return RolloutCallback(reward, sampling=SamplingSpec(group_size=4, max_new_tokens=8), **arguments)


CAPPED: dict[str, Any] = {
    "data_arguments": {"micro_batch_size": None, "max_tokens_per_micro_batch": 30, "updates_per_iteration": 2},
    "accumulate_grad_batches": 1,
}


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        (
            {"data_arguments": {"micro_batch_size": 5}},
            r"8 \* group_size 4 = 32 .* micro_batch_size 5 \* accumulate_grad_batches 2 \* world_size 1 = 10",
        ),
        ({"limit_train_batches": 2}, "limit_train_batches=2 would throw generated samples away"),
        (CAPPED | {"accumulate_grad_batches": 2}, r"(?s)accumulate_grad_batches=2: .*updates_per_iteration=\.\.\."),
        (CAPPED | {"val_check_interval": 1}, r"val_check_interval=1 counts micro-batches"),
    ],
)
def test_sizes_that_do_not_fit(tmp_path: Path, arguments: dict[str, Any], match: str) -> None:
    fails(tmp_path, ValueError, match, **arguments)


class NotLoaded(GRPOModule):
    """A module whose models must not be loaded."""

    def configure_model(self) -> None:
        raise AssertionError("models were loaded before the run was checked")


@needs(packages={"no_such_package": "rlhfkit[extra]"})
def needs_a_package(samples: Sequence[Sample]) -> list[float]:
    raise AssertionError("an iteration was generated before the run was checked")


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize(
    ("reward", "answer", "error", "match"),
    [
        (
            WeightedSum(right=exact_match, other=needs_a_package),
            "answer",
            ImportError,
            r"needs_a_package needs no_such_package, not installed here: pip install 'rlhfkit\[extra\]'",
        ),
        (
            LastTurnReward(math_match),
            None,
            ValueError,
            r"'math_match' .* give \w+\(answer=\.\.\.\); \S+prompts\.jsonl has the columns prompt, answer",
        ),
        (
            CodeExecution(tests="cases"),
            None,
            ValueError,
            r"'code_execution' reads the column 'cases' .*prompts\.jsonl does not have; it has answer",
        ),
        (
            CodeExecution(tests="answer"),
            "answer",
            ValueError,
            r"does not have \(answer is read as the prompt or answer\); it has none",
        ),
    ],
    ids=["package", "no answers", "no column", "column of answers"],
)
def test_what_a_reward_needs_is_checked_before_anything_is_loaded(
    tmp_path: Path, streaming: bool, reward: Any, answer: str | None, error: type[Exception], match: str
) -> None:
    fails(
        tmp_path,
        error,
        match,
        module=NotLoaded,
        rollouts=callback(reward),
        data_arguments={"streaming": streaming, "answer": answer},
    )


def test_the_columns_of_validation_data_are_checked_too(tmp_path: Path) -> None:
    rows = [{"prompt": f"{i}+1=", "answer": i + 1, "cases": "[]"} for i in range(8)]
    trainer, module, _, _ = setup_run(tmp_path, module=NotLoaded, rollouts=callback(CodeExecution("cases")))
    without = [{name: row[name] for name in ("prompt", "answer")} for row in rows]
    data = PromptDataModule(rows, validation_data=without, rollout_batch_size=8)
    for run in (trainer.fit, trainer.validate):
        with pytest.raises(ValueError, match="'cases' of the prompts' metadata, which the given rows does not have"):
            run(module, datamodule=data)
    data = PromptDataModule(without, validation_data=rows, rollout_batch_size=8)
    with pytest.raises(AssertionError, match="models were loaded"):  # training prompts are not validated
        trainer.validate(module, datamodule=data)


def test_what_an_engine_cannot_run_is_found_before_anything_is_loaded(tmp_path: Path) -> None:
    from transformers import LlamaConfig

    trainer, module, data, _ = setup_run(
        tmp_path, module=NotLoaded, rollouts=callback(engine=VLLMPool(device="cpu", num_engines=1))
    )
    config = LlamaConfig.from_pretrained(tmp_path / "model", num_attention_heads=8, num_key_value_heads=8, head_dim=8)
    config.save_pretrained(tmp_path / "model")
    with pytest.raises(EngineError, match=r"heads of 32, 64, .* those of \S+model have 8: use LocalEngine\(\)"):
        trainer.fit(module, data)
