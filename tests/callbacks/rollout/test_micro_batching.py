"""Micro-batches with a cap of tokens: their number follows from the samples, and the updates stay the same.

Covers ``callbacks/rollout/micro_batching.py`` and ``IterationLength`` of ``datamodules/prompts/datamodule.py``.
"""

import logging
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from plain_sgd import PlainSGD
from rl_runs import weights
from strategies import ranks

from callbacks.rollout import capped_runs
from callbacks.rollout.capped_runs import Watch, capped
from rlhfkit import PPOModule, SFTDataModule
from rlhfkit.callbacks.rollout.micro_batching import plan_iteration
from rlhfkit.data import Experience, Prompt, Sample
from rlhfkit.data.packing import IterationShape
from rlhfkit.modules.parts.pretraining_loss import PretrainingLoss


class PlainPPO(PlainSGD, PPOModule):
    """PPO with SGD."""


def fit(folder: Path, **arguments: Any) -> tuple[L.Trainer, Any, Watch]:
    watch, resume = arguments.pop("watch", None) or Watch(), arguments.pop("resume", None)
    trainer, module, data, _ = capped_runs.run(folder, callbacks=[watch], **arguments)
    trainer.fit(module, data, ckpt_path=resume)
    return trainer, module, watch


PPO = {"module": PlainPPO, "module_arguments": {"critic_lr": 0.05, "kl_coef": 0.01}}
CASES: dict[str, dict[str, Any]] = {
    "GRPO": {"module_arguments": {"optimization": {"lr_schedule": "linear"}}},
    "PPO": PPO,
}


@pytest.mark.parametrize("case", [pytest.param(each, marks=[pytest.mark.long] * (each != "GRPO")) for each in CASES])
def test_weights_updates_and_rates_are_those_of_the_run_without_a_cap(tmp_path: Path, case: str) -> None:
    trainer, module, without = fit(tmp_path, **CASES[case])
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items() if not name.startswith("time/")}
    expected, updates = weights(module), without.steps
    assert without.accumulated == [2, 2, 2]
    for tokens in (30, 70, 1000) if case == "GRPO" else (30,):
        trainer, module, watch = fit(tmp_path, **CASES[case] | capped(tokens))
        for name, value in metrics.items():
            if name == "value/clip_fraction":
                continue  # rounding decides for values that are not clipped, whose two losses are equal
            assert float(trainer.callback_metrics[name]) == pytest.approx(value, rel=1e-4, abs=2e-6), name
        assert max(map(max, watch.tokens)) <= tokens
        assert watch.steps[-1] == updates[-1] == 6
        for accumulated, length, sizes in zip(watch.accumulated, watch.lengths, watch.tokens, strict=True):
            assert len(sizes) == length == 2 * accumulated
        ends = [number for number, step in enumerate(watch.steps) if step > [0, *watch.steps][number]]
        assert [watch.rates[end] for end in ends] == without.rates[1::2]
        for name, tensor in weights(module).items():
            torch.testing.assert_close(tensor, expected[name], rtol=1e-5, atol=1e-6)
    if case == "GRPO":
        assert watch.accumulated == [1, 1, 1]  # all of an update fits into 1000 tokens


def test_the_number_of_micro_batches_follows_from_the_samples_of_each_iteration(tmp_path: Path) -> None:
    """Also that on the progress bar, validation after a share of each, and a loader that Lightning makes anew."""
    arguments = capped(30)
    arguments["data_arguments"] |= {"validation_data": [{"prompt": "1+1=", "answer": "2"}], "validation_split": "train"}
    arguments |= {"enable_progress_bar": True, "reload_dataloaders_every_n_epochs": 1}
    trainer, _, watch = fit(tmp_path, **arguments, val_check_interval=0.5, num_sanity_val_steps=0)
    assert watch.accumulated == sorted(watch.accumulated)
    assert watch.accumulated[0] < watch.accumulated[-1]
    assert watch.bars == watch.lengths == [2 * each for each in watch.accumulated]
    assert watch.validated_after == [(epoch, 2 * epoch + update) for epoch in range(3) for update in (1, 2)]
    first = 0
    for accumulated, sizes in zip(watch.accumulated, watch.tokens, strict=True):
        counts = watch.counts[first : first + len(sizes)]
        assert [averaged for _, averaged in counts] == [accumulated] * len(sizes)
        assert len({total for total, _ in counts[:accumulated]}) == 1  # the count of the whole update
        assert sum(sizes) > 0.5 * 30 * len(sizes)
        first += len(sizes)
    assert trainer.accumulate_grad_batches == 1  # as it was given, for the next run


def test_a_run_resumed_inside_an_update_is_bitwise_the_straight_one(tmp_path: Path) -> None:
    decaying = capped(30) | {"module_arguments": {"optimization": {"lr_schedule": "linear"}}}
    path, (one, two, _) = tmp_path / "saved.ckpt", fit(tmp_path, **decaying)[2].accumulated
    trained = 2 * one + two
    _, module, straight = fit(tmp_path, **decaying, watch=Watch(path, trained + 2))
    _, resumed, rest = fit(tmp_path, **decaying, resume=str(path))
    assert rest.rows == straight.rows[trained:]
    assert rest.steps == straight.steps[trained:]
    assert rest.rates == straight.rates[trained:]
    for name, tensor in weights(resumed).items():
        assert torch.equal(tensor, weights(module)[name]), name


def test_a_checkpoint_inside_an_iteration_of_other_updates_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "saved.ckpt"
    fit(tmp_path, **capped(30), watch=Watch(path, 2), max_epochs=1)
    with pytest.raises(
        ValueError, match=r"inside an iteration of \d+ micro-batches per rank, this run has 4, or a mul"
    ):
        fit(tmp_path, **capped(30, updates=4), resume=str(path))


def test_a_quick_trial_makes_its_updates_and_adapts_too(tmp_path: Path) -> None:
    trainer, _, watch = fit(tmp_path, **capped(12, updates=4), fast_dev_run=2)
    assert trainer.global_step == 2
    assert watch.lengths == [2 * watch.accumulated[0]]
    assert watch.accumulated[0] > 1


def test_a_longer_sequence_is_trained_alone_with_one_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        _, module, watch = fit(tmp_path, **capped(10))
    assert sum("is longer than max_tokens_per_micro_batch=10" in record.message for record in caplog.records) == 1
    alone = [len(rows) == 1 for rows in watch.rows]
    sizes = [size for iteration in watch.tokens for size in iteration]
    assert all(size <= 10 or single for size, single in zip(sizes, alone, strict=True))
    assert max(sizes) > 10
    _, without, _ = fit(tmp_path)
    for name, tensor in weights(module).items():
        torch.testing.assert_close(tensor, weights(without)[name], rtol=1e-5, atol=1e-6)


class Texts(L.Callback):
    """The totals of the pretraining text beside each micro-batch."""

    def __init__(self) -> None:
        self.seen: list[tuple[list[list[int]], float | None, int, int]] = []

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        text = trainer.datamodule.pretraining_batch(trainer.fit_loop.total_batch_idx)
        targets = int(text.loss_mask.sum())
        self.seen.append((text.input_ids.tolist(), text.step_tokens, text.step_micro_batches, targets))


def test_pretraining_text_is_numbered_over_the_run_and_counted_per_update(tmp_path: Path) -> None:
    words = [{"text": "ab " * (1 + i % 4) + str(i)} for i in range(21)]

    def trained(after: int = 0, resume: str | None = None) -> tuple[Any, Watch, Texts]:
        arguments, watch, texts = capped(30), Watch(tmp_path / "text.ckpt", after), Texts()
        arguments["data_arguments"]["pretraining_data"] = SFTDataModule(words, text="text", micro_batch_size=2)
        arguments["module_arguments"] = {"parts": [PretrainingLoss(0.2)]}
        trainer, module, data, _ = capped_runs.run(tmp_path, callbacks=[texts, watch], **arguments)
        trainer.fit(module, data, ckpt_path=resume)
        return module, watch, texts

    module, watch, texts = trained(after=10)
    first = 0
    for accumulated in watch.accumulated:
        for _ in range(2):
            window = texts.seen[first : first + accumulated]
            assert {averaged for _, _, averaged, _ in window} == {accumulated}
            assert {total for _, total, _, _ in window} == {float(sum(targets for *_, targets in window))}
            first += accumulated
    assert first == len(texts.seen)
    assert len({str(ids) for ids, *_ in texts.seen[:10]}) == 10  # 20 of 21 texts in a pass, two at a time
    resumed, _, rest = trained(resume=str(tmp_path / "text.ckpt"))
    assert rest.seen == texts.seen[-len(rest.seen) :]
    for name, tensor in weights(resumed).items():
        assert torch.equal(tensor, weights(module)[name]), name


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"accumulate_grad_batches": 2}, r"(?s)accumulate_grad_batches=2: .*updates_per_iteration=\.\.\."),
        ({"val_check_interval": 1}, r"val_check_interval=1 counts micro-batches"),
        (capped(30, updates=3), r"8 \* group_size 4 = 32 sequences, which updates_per_iteration 3 does not divide"),
    ],
)
def test_arguments_that_do_not_fit_a_cap_are_refused(tmp_path: Path, changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        fit(tmp_path, **capped(30) | changed)


def test_after_an_error_the_trainer_has_its_own_accumulation_back(tmp_path: Path) -> None:
    class Failing(L.Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            if trainer.accumulate_grad_batches > 1:
                raise ArithmeticError

    trainer, module, data, _ = capped_runs.run(tmp_path, callbacks=[Failing()], **capped(30))
    with pytest.raises(ArithmeticError):
        trainer.fit(module, data)
    assert trainer.accumulate_grad_batches == 1


def test_a_plan_is_made_of_a_summary_and_changes_nothing() -> None:
    samples = [
        Sample(Prompt(prompt, [1] * 5), index, [2] * count, [-1.0] * count, [0] * count, "stop", reward=1.0)
        for prompt in range(4)
        for index, count in enumerate([1, 2, 3, 4])
    ]
    summary = Experience.from_samples(samples).summary
    plan = plan_iteration(summary, IterationShape(16, 4, 2), 2)
    assert plan.update.tolist() == [0] * 8 + [1] * 8
    assert summary.update.tolist() == [0] * 16
    assert plan.accumulate == 2
    capped_plan = plan_iteration(summary, IterationShape(16, 2, 2), 2, max_tokens=15)
    assert torch.equal(capped_plan.update, plan.update)
    assert capped_plan.accumulate == 1  # 5 + 1 + 2 + 3 + 4 = 15 tokens of a group: one for each rank
    assert plan_iteration(summary, IterationShape(16, 2, 2), 2, max_tokens=16, packed=False).accumulate == 3


@pytest.mark.distributed
def test_a_sample_that_a_rank_repeats_has_no_effect(tmp_path: Path) -> None:
    """Ranks that have enough of them are in ``test_epochs.py``."""
    sharded = ["rlhf_zero2", "rlhf_zero3"]
    both = ranks.run("callbacks.rollout.capped_runs:scattered", 2, tmp_path / "two", strategies=sharded)
    alone = capped_runs.scattered(tmp_path / "one", ["auto"])["auto"]
    assert alone["accumulated"] == [9, 9]
    for name in sharded:
        first = both[0][name]
        assert first["accumulated"] == [5, 5]  # of 2 ranks: 10 for 9 samples
        assert first["weights"] == pytest.approx(alone["weights"], rel=1e-5), name
        for metric, value in alone["metrics"].items():
            if not metric.startswith("time/"):
                assert first["metrics"][metric] == pytest.approx(value, rel=1e-4, abs=2e-6), (name, metric)
