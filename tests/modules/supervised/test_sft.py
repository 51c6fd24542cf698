"""SFTModule and DFTModule against loops written by hand."""

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from plain_sgd import PlainSGD
from tiny_models import tiny_tokenizer
from torch import Tensor

from modules.data_runs import answer_logprobs, by_sgd, exact, folder_of, texts, trainer
from rlhfkit import DFTModule, DPOModule, Optimization, PreferenceDataModule, SFTDataModule, SFTModule
from rlhfkit.modules.parts.fine_tuning import TokenMetrics

folder = folder_of(texts)


def data(folder: Path, size: int, **arguments: Any) -> SFTDataModule:
    return SFTDataModule(str(folder / "data.jsonl"), micro_batch_size=size, max_length=64, **arguments)


def by_hand(folder: Path, *, dynamic: bool = False) -> tuple[list[float], dict[str, Tensor]]:
    """Losses and weights of two epochs of full-batch SGD on the mean over completion tokens, one text at a time."""
    source, model = data(folder, 24, tokenizer=tiny_tokenizer()), exact(folder / "model")
    source.setup()

    def loss_of(rows: list[Any]) -> Tensor:
        logprobs = torch.cat([answer_logprobs(model, row) for row in rows])
        return -(logprobs * logprobs.exp().detach() if dynamic else logprobs).mean()

    return by_sgd(model, source.examples, loss_of, size=24, lr=0.1), model.state_dict()


@pytest.mark.parametrize("kind", [SFTModule, DFTModule])
def test_training_is_the_loop_by_hand(folder: Path, kind: type[SFTModule]) -> None:
    losses, expected = by_hand(folder, dynamic=kind is DFTModule)
    module = type("Plain", (PlainSGD, kind), {})(str(folder / "model"), lr=0.1)
    run = trainer(folder, accumulate_grad_batches=3)
    run.fit(module, data(folder, 8))
    assert run.global_step == 2
    assert losses[1] != losses[0]
    for name, tensor in module.policy.state_dict().items():
        torch.testing.assert_close(tensor.double(), expected[name], rtol=1e-4, atol=2e-6)


def test_a_saved_model_is_loaded_by_transformers_as_it_is(folder: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    module = SFTModule(str(folder / "model"), lr=1e-3)
    trainer(folder, max_epochs=1).fit(module, data(folder, 8))
    saved = AutoModelForCausalLM.from_pretrained(module.save_pretrained(tmp_path / "saved"))
    for name, tensor in module.policy.state_dict().items():
        assert torch.equal(tensor, saved.state_dict()[name])
    assert AutoTokenizer.from_pretrained(tmp_path / "saved")("12")["input_ids"] == tiny_tokenizer()("12")["input_ids"]


def test_learning_rate_warms_up_and_decays_per_update(folder: Path) -> None:
    seen = []

    class Keep(L.Callback):
        def on_train_batch_end(self, trainer: Any, *arguments: Any) -> None:
            seen.append(trainer.optimizers[0].param_groups[0]["lr"])

    module = SFTModule(str(folder / "model"), lr=1.0, optimization=Optimization(warmup_steps=2, lr_schedule="linear"))
    trainer(folder, callbacks=[Keep()]).fit(module, data(folder, 6))
    expected = [0.5, 1.0] + [1 - step / 6 for step in range(1, 7)]
    assert seen == pytest.approx(expected)


def test_prediction_gives_the_log_probs_of_each_completion(folder: Path) -> None:
    source = data(folder, 24, validation_data=str(folder / "data.jsonl"), validation_split="train")
    module = SFTModule(str(folder / "model"))
    trainer(folder).validate(module, source, verbose=False)
    batches = list(source.val_dataloader())
    rows = [row for batch in batches for row in module.predict_step(batch, 0)]
    together = torch.cat(rows)
    assert len(rows) == 24
    assert float(-together.mean()) == pytest.approx(by_hand(folder)[0][0], rel=1e-5)


def test_rejected_answers_are_not_imitated_and_other_mistaken_data_is_refused(folder: Path) -> None:
    pairs = PreferenceDataModule([{"prompt": "a", "chosen": "b", "rejected": "c"}] * 2, micro_batch_size=2)
    with pytest.raises(TypeError, match="SFTModule learns from TokenBatch, got PreferenceBatch"):
        trainer(folder).fit(SFTModule(str(folder / "model")), pairs)
    with pytest.raises(TypeError, match="DPOModule learns from PreferenceBatch, got TokenBatch"):
        trainer(folder).fit(DPOModule(str(folder / "model")), data(folder, 2))


def test_token_accuracy_and_entropy_are_those_of_dense_logits(folder: Path) -> None:
    """Of all trained tokens, however they are split; the loss is what it is without."""
    held_out = {"validation_data": str(folder / "data.jsonl"), "validation_split": "train"}
    found, weights = {}, {}
    for more in (True, False):
        module = SFTModule(
            str(folder / "model"), lr=0.1, optimization=Optimization(optimizer="sgd"), parts=[TokenMetrics()] * more
        )
        run = trainer(folder, max_epochs=1, accumulate_grad_batches=4)
        run.fit(module, data(folder, 6, **held_out))
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
