"""Log-odds of two words against Transformers' logits, through module, data and reward of a process reward model."""

from pathlib import Path
from typing import Any

import pytest
import torch
from modules.data_runs import trainer
from tiny_models import tiny_model, tiny_tokenizer
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM

from rlhfkit import ProcessRewardModule, Prompt, Sample, StepwiseDataModule
from rlhfkit.models import ModelLoading
from rlhfkit.models.distillation import word_log_odds, word_token
from rlhfkit.rewards import ProcessModelReward, StepTokens

ROWS = [
    {"input": "1+1? a #\nbc #", "label": "1+1? a +\nbc -"},
    {"input": "2? #", "label": "2? -"},
    {"input": "3? d #\n#\ne", "label": "3? d -\n+\ne"},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return tiny_model(tmp_path_factory.mktemp("words"))


def made(size: int = 3, **arguments: Any) -> StepwiseDataModule:
    return StepwiseDataModule(
        ROWS, text="input", labels="label", step_token="#", micro_batch_size=size, max_length=32, **arguments
    )


@pytest.mark.parametrize("attention", [None, "eager"])
def test_loss_and_gradient_are_cross_entropy_of_two_words_at_the_step_tokens(
    folder: Path, attention: str | None
) -> None:
    module = ProcessRewardModule(str(folder), words=("+", "-"), loading=ModelLoading(attention=attention))
    module.configure_model()
    data = made(tokenizer=tiny_tokenizer())
    data.setup()
    from rlhfkit.data.formats import collate_stepwise

    batch = collate_stepwise([data.examples[row] for row in range(3)])
    result = module.loss(batch, module.scores(batch))
    result.loss.backward()
    plain = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    tokenizer = tiny_tokenizer()
    good, bad, step = (tokenizer(word)["input_ids"][0] for word in "+-#")
    losses = []
    for row in ROWS:
        ids = tokenizer(row["input"], return_tensors="pt")["input_ids"]
        logits = plain(input_ids=ids).logits[0, ids[0] == step][:, [good, bad]]
        labels = [word for word, token in zip(row["label"], row["input"], strict=True) if token == "#"]
        losses += [cross_entropy(one, torch.tensor("+-".index(word))) for one, word in zip(logits, labels, strict=True)]
    expected = torch.stack(losses).mean()
    expected.backward()
    assert len(losses) == 5
    assert float(result.loss.detach()) == pytest.approx(float(expected.detach()), rel=1e-5)
    gradients = dict(plain.named_parameters())
    for name, parameter in module.policy.named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[name].grad, rtol=1e-4, atol=1e-6)


def test_a_trained_one_is_a_language_model_whose_reward_is_the_least_probability(folder: Path, tmp_path: Path) -> None:
    module = ProcessRewardModule(str(folder), words=["+", "-"], lr=3e-3)
    trainer(tmp_path, max_epochs=30).fit(module, made())
    saved = module.save_pretrained(tmp_path / "saved")
    plain = AutoModelForCausalLM.from_pretrained(saved)  # a language model
    reward = ProcessModelReward(str(saved), words=("+", "-"), separator="#", text=StepTokens("#"), device="cpu")
    sample = Sample(Prompt(0, [1], text="1+1?"), 0, [1], [0.0], [0], "stop", text="a\nbc")
    assert reward.text is not None
    assert reward.text(sample) == ROWS[0]["input"]
    ids = tiny_tokenizer()(ROWS[0]["input"], return_tensors="pt")["input_ids"]
    good, bad = (word_token(tiny_tokenizer(), word) for word in "+-")
    with torch.no_grad():
        logits = plain(input_ids=ids).logits[0, ids[0] == word_token(tiny_tokenizer(), "#")]
    probabilities = logits[:, [good, bad]].softmax(-1)[:, 0]
    assert reward([sample]) == pytest.approx([float(probabilities.min())], rel=1e-4)
    assert probabilities[0] > 0.8 > 0.2 > probabilities[1]  # as it was trained


def test_wrong_words_and_labels_are_refused(folder: Path) -> None:
    for words in ("+-", ("+",), ("+", "+")):
        for kind in (ProcessRewardModule, ProcessModelReward):
            with pytest.raises(ValueError, match="two different words"):
                kind("unused", words=words)
    with pytest.raises(ValueError, match="no head for head_std"):
        ProcessRewardModule("unused", words=("+", "-"), head_std=0.1)
    with pytest.raises(ValueError, match="must be one token"):
        ProcessRewardModule(str(folder), words=("good", "bad")).configure_model()
    rows, tokenizer = [{"input": "a # b #", "label": "a + c -"}], tiny_tokenizer()
    data = StepwiseDataModule(rows, text="input", labels="label", step_token="#", tokenizer=tokenizer)
    with pytest.raises(ValueError, match="differs from that text at ' c -'"):
        data.setup()


def test_without_a_selected_token_all_are_zero(folder: Path) -> None:
    module = ProcessRewardModule(str(folder), words=("+", "-"))
    module.configure_model()
    from rlhfkit.modules.on_policy.forward_passes import two_tokens

    nothing = torch.zeros(1, 2, dtype=torch.bool)
    values = word_log_odds(module.policy, two_tokens(), nothing, (3, 4)).values
    assert values.tolist() == [[0.0, 0.0]]
    values.sum().backward()
