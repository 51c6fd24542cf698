"""SFTModule: its rates, predictions and metrics; what it learns: ``test_loops_by_hand.py``."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch

from modules.data_runs import ROWS, answer_logprobs, data, fit, folder_of, trainer
from rlhfkit import DPOModule, Optimization, PreferenceDataModule, SFTModule
from rlhfkit.data.batch import TokenExample, collate_tokens
from rlhfkit.models import load_causal_lm
from rlhfkit.modules.parts.fine_tuning import NEFTune, TokenMetrics

folder = folder_of()


def test_learning_rate_warms_up_and_decays_per_update(folder: Path) -> None:
    seen = []

    class Keep(L.Callback):
        def on_train_batch_end(self, trainer: Any, *arguments: Any) -> None:
            seen.append(trainer.optimizers[0].param_groups[0]["lr"])

    module = SFTModule(str(folder / "model"), lr=1.0, optimization=Optimization(warmup_steps=2, lr_schedule="linear"))
    trainer(folder, callbacks=[Keep()]).fit(module, data(folder, SFTModule, 4))
    expected = [0.5, 1.0] + [1 - step / 6 for step in range(1, 7)]
    assert seen == pytest.approx(expected)


def test_prediction_gives_the_log_probs_of_each_completion(folder: Path) -> None:
    source, module = data(folder, SFTModule, 3), SFTModule(str(folder / "model"))
    found = [row for batch in trainer(folder).predict(module, source) for row in batch]
    assert len(found) == ROWS
    for row, logprobs in enumerate(found):
        torch.testing.assert_close(logprobs, answer_logprobs(module.policy, source.examples[row]))


def test_rejected_answers_are_not_imitated_and_other_mistaken_data_is_refused(folder: Path) -> None:
    pairs = PreferenceDataModule([{"prompt": "a", "chosen": "b", "rejected": "c"}] * 2, micro_batch_size=2)
    with pytest.raises(TypeError, match="SFTModule learns from TokenBatch, got PreferenceBatch"):
        trainer(folder).fit(SFTModule(str(folder / "model")), pairs)
    with pytest.raises(TypeError, match="DPOModule learns from PreferenceBatch, got TokenBatch"):
        trainer(folder).fit(DPOModule(str(folder / "model")), data(folder, SFTModule, 2))


def test_token_accuracy_and_entropy_are_those_of_dense_logits(folder: Path) -> None:
    """Of all trained tokens, however they are split; the loss is what it is without."""
    found, weights = {}, {}
    for more in (True, False):
        module = SFTModule(
            str(folder / "model"), lr=0.1, optimization=Optimization(optimizer="sgd"), parts=[TokenMetrics()] * more
        )
        run = trainer(folder, max_epochs=1, accumulate_grad_batches=4)
        run.fit(module, data(folder, SFTModule, 4, validated=True))
        found[more], weights[more] = dict(run.callback_metrics), module.policy.state_dict()
        if more:
            with torch.no_grad():
                batches = run.datamodule.val_dataloader()
                rows = [(module.policy(batch.input_ids, batch.attention_mask.long()), batch) for batch in batches]
    logits = torch.cat([out.logits[:, :-1][batch.loss_mask] for out, batch in rows])
    targets = torch.cat([batch.input_ids[:, 1:][batch.loss_mask] for _, batch in rows])
    entropy = torch.distributions.Categorical(logits=logits).entropy().mean()
    assert float(found[True]["val/token_accuracy"]) == pytest.approx(
        float((logits.argmax(-1) == targets).float().mean())
    )
    assert float(found[True]["val/entropy"]) == pytest.approx(float(entropy), rel=1e-5)
    assert {*found[True]} - {*found[False]} == {
        "val/token_accuracy", "val/entropy", "sft/token_accuracy", "sft/entropy"
    }  # fmt: skip
    assert 0.0 < float(found[True]["sft/token_accuracy"]) < 1.0
    for name, tensor in weights[False].items():
        # In one pass the gradients are summed in other tiles where the entropy is computed too.
        torch.testing.assert_close(tensor, weights[True][name], rtol=1e-5, atol=1e-6)


def test_noise_is_uniform_in_the_papers_range_and_only_in_training(folder: Path) -> None:
    """It is the same in a resumed run: ``test_step_properties.py``."""
    with_noise = fit(folder, SFTModule, knobs={"parts": [NEFTune(30.0).plain()]}).losses
    assert abs(with_noise[0] - fit(folder, SFTModule).losses[0]) > 1e-3
    model = load_causal_lm(str(folder / "model")).train()
    layer: Any = model.get_input_embeddings()
    token_ids = torch.zeros(1, 5000, dtype=torch.int64)
    plain = layer(token_ids)
    part, batch = NEFTune(5.0), collate_tokens([TokenExample([5] * 20, [True] * 20)])
    module: Any = SimpleNamespace(policy=model, current_epoch=0, global_rank=0)
    part.on_train_batch_start(Any, module, batch, 0)
    noise = (layer(token_ids) - plain).flatten()
    with torch.no_grad():  # of a reference
        assert torch.equal(layer(token_ids), plain)
    model.eval()  # of a check
    assert torch.equal(layer(token_ids), plain)
    model.train()
    part.on_train_batch_end(Any, module)
    bound = 5.0 / (20.0 * plain.shape[-1]) ** 0.5
    assert float(noise.abs().max()) <= bound * 1.001
    assert float(noise.abs().max()) > bound * 0.99
    assert float(noise.mean()) == pytest.approx(0.0, abs=bound / 100)
    assert float(noise.var()) == pytest.approx(bound**2 / 3, rel=0.02), "of a uniform distribution"
    assert torch.equal(layer(token_ids), plain)
