"""Weights in 4 bits, and the decoding of tokens."""

from pathlib import Path

import pytest
import torch
from tiny_models import tiny_model
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from models.test_forward import experience
from rlhfkit.models import LoRA, load_causal_lm, policy_output
from rlhfkit.models.load import text_decoder
from rlhfkit.rollout import ModuleWeights


def test_a_forward_pass_in_eval_mode_changes_neither_weights_nor_training(tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes", reason="4 bits are bitsandbytes' (extra qlora)")
    model = load_causal_lm(str(tiny_model(tmp_path)), lora=LoRA(rank=2), quantization="nf4")
    batch, merged, logprobs, gradients = experience([(3, 5), (7, 1), (1, 9)]), [], [], []
    for _ in range(2):
        out = policy_output(model.train(), batch, batch.action_mask).logprobs
        model.zero_grad()
        out.sum().backward()
        logprobs.append(out.detach())
        gradients.append({name: one.grad.clone() for name, one in model.named_parameters() if one.grad is not None})
        merged.append({name: tensor.clone() for name, tensor in ModuleWeights(model)})
        with torch.no_grad():
            evaluated = policy_output(model.eval(), batch, batch.action_mask).logprobs
        torch.testing.assert_close(evaluated, logprobs[0], rtol=0, atol=1e-5)
    torch.testing.assert_close(*logprobs, rtol=0, atol=0)
    torch.testing.assert_close(*gradients, rtol=0, atol=0)
    torch.testing.assert_close(*merged, rtol=0, atol=0)


class Shouting(PreTrainedTokenizerFast):
    """Decodes in its own way."""

    def _decode(self, *arguments: object, **options: object) -> str:
        text: str = super()._decode(*arguments, **options)
        return text.upper()


@pytest.mark.parametrize("kind", [PreTrainedTokenizerFast, Shouting])
@pytest.mark.parametrize("cleans", [False, True])
@pytest.mark.parametrize("model", [models.WordLevel, models.BPE])
def test_texts_are_those_of_batch_decode(kind: type[PreTrainedTokenizerFast], cleans: bool, model: type) -> None:
    words = ["<eos>", "<unk>", "it", "'s", "so", ",", "is", "n't", ".", "?", "Yes", "!", "I", "'m", "not"]
    vocabulary = {word: number for number, word in enumerate(words)}
    backend = Tokenizer(model(vocabulary, unk_token="<unk>", **({"merges": []} if model is models.BPE else {})))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = kind(
        tokenizer_object=backend, eos_token="<eos>", unk_token="<unk>", clean_up_tokenization_spaces=cleans
    )
    generator = torch.Generator().manual_seed(3)
    rows = [torch.randint(len(words), (length,), generator=generator).tolist() for length in (0, 1, 5, 40, 40)]
    decode = text_decoder(tokenizer)
    assert list(decode(rows)) == tokenizer.batch_decode(rows, skip_special_tokens=True)
    assert (decode.__name__ == "backend") == (kind is PreTrainedTokenizerFast and (not cleans or model is models.BPE))
