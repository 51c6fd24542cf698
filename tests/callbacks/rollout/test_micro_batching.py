"""Micro-batches with a cap of tokens: their number follows from the samples, and the updates stay the same.

Covers ``callbacks/rollout/micro_batching.py`` and ``IterationLength`` of ``datamodules/prompts/datamodule.py``.
"""

import logging
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from rl_runs import PlainGRPO, weights

from callbacks.rollout.capped_runs import Watch, fit
from rlhfkit import PPOModule, SFTDataModule
from rlhfkit.modules.parts.pretraining_loss import PretrainingLoss


class Decaying(PlainGRPO):
    """SGD whose rate falls from step to step."""

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def test_weights_updates_and_rates_are_those_of_the_run_without_a_cap(tmp_path: Path) -> None:
    trainer, module, without = fit(tmp_path, module=Decaying)
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items() if not name.startswith("time/")}
    expected, updates = weights(module), without.steps
    assert without.accumulated == [2, 2, 2]
    for tokens in (50, 1000):
        trainer, module, watch = fit(tmp_path, module=Decaying, cap=tokens)
        for name, value in metrics.items():
            assert float(trainer.callback_metrics[name]) == pytest.approx(value, rel=1e-4, abs=2e-6), name
        assert max(map(max, watch.sizes)) <= tokens
        assert watch.steps[-1] == updates[-1] == 6
        for accumulated, length, sizes in zip(watch.accumulated, watch.lengths, watch.sizes, strict=True):
            assert len(sizes) == length == 2 * accumulated
        ends = [number for number, step in enumerate(watch.steps) if step > [0, *watch.steps][number]]
        assert [watch.rates[end] for end in ends] == without.rates[1::2]
        assert len({*watch.rates}) >= 6
        for name, tensor in weights(module).items():
            torch.testing.assert_close(tensor, expected[name], rtol=1e-5, atol=1e-6)
    assert watch.accumulated == [1, 1, 1]  # all of an update fits into 1000 tokens


def test_the_number_of_micro_batches_follows_from_the_samples_of_each_iteration(tmp_path: Path) -> None:
    """Also that on the progress bar, validation after a share of each, and a loader that Lightning makes anew."""
    validation = {"validation_data": [{"prompt": "1+1=", "answer": "2"}], "validation_split": "train"}
    trainer, _, watch = fit(
        tmp_path,
        cap=50,
        data_arguments=validation,
        enable_progress_bar=True,
        reload_dataloaders_every_n_epochs=1,
        val_check_interval=0.5,
        num_sanity_val_steps=0,
    )
    assert watch.accumulated == sorted(watch.accumulated)
    assert watch.accumulated[0] < watch.accumulated[-1]
    assert watch.bars == watch.lengths == [2 * each for each in watch.accumulated]
    assert watch.validated_after == [(epoch, 2 * epoch + update) for epoch in range(3) for update in (1, 2)]
    first = 0
    for accumulated, sizes in zip(watch.accumulated, watch.sizes, strict=True):
        counts = watch.counts[first : first + len(sizes)]
        assert [averaged for _, averaged in counts] == [accumulated] * len(sizes)
        assert len({total for total, _ in counts[:accumulated]}) == 1  # the count of the whole update
        assert sum(sizes) > 0.5 * 50 * len(sizes)
        first += len(sizes)
    assert trainer.accumulate_grad_batches == 1  # as it was given, for the next run


class Texts(L.Callback):
    """The totals of the pretraining text beside each micro-batch."""

    def __init__(self) -> None:
        self.seen: list[tuple[list[list[int]], float | None, int, int]] = []

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        text = trainer.datamodule.pretraining_batch(trainer.fit_loop.total_batch_idx)
        targets = int(text.loss_mask.sum())
        self.seen.append((text.input_ids.tolist(), text.step_tokens, text.step_micro_batches, targets))


def test_pretraining_text_is_counted_per_update_and_a_run_resumed_inside_one_is_bitwise_the_straight_one(
    tmp_path: Path,
) -> None:
    """PPO with a falling learning rate, saved inside the first update of the second epoch over an iteration."""
    words = [{"text": "ab " * (1 + i % 4) + str(i)} for i in range(21)]
    learning = {"optimization": {"lr_schedule": "linear"}, "parts": [PretrainingLoss(0.2).plain()], "critic_lr": 0.05}

    def trained(watch: Watch, **more: Any) -> tuple[Any, Texts]:
        texts, data = Texts(), {"pretraining_data": SFTDataModule(words, text="text", micro_batch_size=2)}
        arguments = {"module": PPOModule, "module_arguments": learning, "data_arguments": data, "callbacks": [texts]}
        return fit(tmp_path, epochs=2, cap=60, watch=watch, **arguments, **more)[1], texts

    straight, rest = Watch(tmp_path / "saved.ckpt"), Watch()
    module, texts = trained(straight)
    first = 0
    for accumulated in straight.accumulated:
        for _ in range(2 * 2):
            window = texts.seen[first : first + accumulated]
            assert {averaged for _, _, averaged, _ in window} == {accumulated}
            assert {total for _, total, _, _ in window} == {float(sum(targets for *_, targets in window))}
            first += accumulated
    assert first == len(texts.seen)
    assert len({str(ids) for ids, *_ in texts.seen[:10]}) == 10  # 20 of 21 texts in a pass, two at a time

    resumed, others = trained(rest, resume=str(straight.path))
    assert straight.accumulated[1] > 1
    done = straight.lengths[0] + 2 * straight.accumulated[1]
    assert rest.rows == straight.rows[done:]
    assert rest.steps == straight.steps[done:]
    assert rest.rates == straight.rates[done:]
    assert len({*straight.rates}) > 3
    assert others.seen == texts.seen[done:]
    for name, tensor in weights(resumed).items():
        assert torch.equal(tensor, weights(module)[name]), name


def test_a_checkpoint_inside_an_iteration_of_other_updates_is_refused(tmp_path: Path) -> None:
    saved = Watch(tmp_path / "saved.ckpt", iteration=0)
    fit(tmp_path, cap=30, watch=saved, max_epochs=1)
    with pytest.raises(
        ValueError, match=r"inside an iteration of \d+ micro-batches per rank, this run has 4, or a mul"
    ):
        fit(tmp_path, cap=30, updates=4, resume=str(saved.path))


def test_a_quick_trial_makes_its_updates_and_adapts_too(tmp_path: Path) -> None:
    trainer, _, watch = fit(tmp_path, cap=12, updates=4, fast_dev_run=2)
    assert trainer.global_step == 2
    assert watch.lengths == [2 * watch.accumulated[0]]
    assert watch.accumulated[0] > 1


def test_longer_sequences_are_warned_of_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Each is a micro-batch of its own: ``data/test_token_cap.py``."""
    with caplog.at_level(logging.WARNING):
        _, _, watch = fit(tmp_path, cap=10, data_arguments={"rollout_batch_size": 4})
    assert sum("is longer than max_tokens_per_micro_batch=10" in record.message for record in caplog.records) == 1
    assert sum(size > 10 for iteration in watch.sizes for size in iteration) > 1


def test_after_an_error_the_trainer_has_its_own_accumulation_back(tmp_path: Path) -> None:
    class Failing(L.Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            self.trainer = trainer
            if trainer.accumulate_grad_batches > 1:
                raise ArithmeticError

    failing = Failing()
    with pytest.raises(ArithmeticError):
        fit(tmp_path, cap=30, callbacks=[failing])
    assert failing.trainer.accumulate_grad_batches == 1
