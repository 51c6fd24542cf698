"""Models that cap or scale their logits: the fused output layer against Transformers' own. Covers distillation.py."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor

from models.conftest import Folders
from models.families import COMMON, alone
from rlhfkit.data import TokenBatch
from rlhfkit.data.batch import TokenExample, collate_tokens
from rlhfkit.models import ModelLoading, load_causal_lm, load_scalar_model, policy_output, reward_output, scalar_output
from rlhfkit.models.distillation import compare_logits, teacher_logits
from rlhfkit.models.forward import OutputLogits, output_logits
from rlhfkit.models.heads import add_value_head

KNOWN = {
    "nanochat": OutputLogits(softcap=15.0),
    "cohere": OutputLogits(scale=0.5),
    "granite": OutputLogits(scale=1 / 2.0),
    "hyperclovax": OutputLogits(scale=2.0),
    "gptj": OutputLogits(),  # whose output layer has a bias
}
"""One of each kind; ``test_families.py`` compares all families."""


def loaded(folder: str, **arguments: Any) -> Any:
    return load_causal_lm(folder, loading=ModelLoading(attention="eager"), **arguments).eval()


def texts() -> TokenBatch:
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randint(3, 99, (length,), generator=generator).tolist() for length in (5, 9, 2)]
    return collate_tokens([TokenExample(row, [False] + [True] * (len(row) - 1)) for row in rows])


def by_transformers(model: Any, batch: TokenBatch, temperature: float = 1.0) -> Tensor:
    """Log-probs of the trained tokens from the model's own logits, one sequence at a time."""
    rows = zip(batch.input_ids, batch.attention_mask, strict=True)
    return torch.cat([alone(model, ids[real], temperature)[0] for ids, real in rows])


def widths(model: Any) -> list[int]:
    """Fills with the number of columns that the output layer gives, each time that it runs."""
    seen: list[int] = []
    model.get_output_embeddings().register_forward_hook(lambda _, inputs, out: seen.append(out.shape[-1]))
    return seen


@pytest.mark.parametrize("name", KNOWN)
def test_log_probs_are_those_of_the_models_own_logits_without_building_them_and_values_those_of_its_hidden_states(
    folders: Folders, name: str
) -> None:
    """Entropies and gradients are in ``test_families.py``."""
    model, batch = loaded(folders[name]), texts()
    add_value_head(model)
    model.value_head.weight.data *= 1000.0
    seen = widths(model)
    out = policy_output(model, batch, batch.loss_mask, temperature=0.7, entropy=True, values=True)
    assert seen == [3]  # log-probs, entropies and values; dense are 128
    assert output_logits(model) == KNOWN[name]
    hidden = model.base_model(input_ids=batch.input_ids, attention_mask=batch.attention_mask, use_cache=False)
    values = model.value_head(hidden.last_hidden_state)[:, :-1, 0]
    assert out.values is not None
    torch.testing.assert_close(out.values[batch.loss_mask], values[batch.loss_mask], rtol=1e-4, atol=1e-3)
    # Families compute norms, rotations and recurrences in float32, whose sums depend on the padding.
    expected = by_transformers(model, batch, 0.7)
    torch.testing.assert_close(out.logprobs[batch.loss_mask], expected, rtol=1e-4, atol=1e-5)


def test_float32_logprobs_lose_nothing_on_the_way_through_a_cap(folders: Folders) -> None:
    model, batch = loaded(folders["gemma2"]), texts()
    out = policy_output(model, batch, batch.loss_mask).logprobs[batch.loss_mask]
    torch.testing.assert_close(out, by_transformers(model, batch), rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("name", ["gemma2", "granite"])
def test_a_student_and_a_teacher_are_compared_by_their_own_logits(folders: Folders, name: str) -> None:
    model = loaded(folders[name])
    batch = texts()
    seen = widths(model)
    with torch.no_grad():
        teacher = teacher_logits(model, batch, batch.loss_mask)
        student, _ = compare_logits(
            model, batch, batch.loss_mask, lambda logits, *_: logits, teacher, chunk_size=3, by_token=True
        )
        assert seen == [64, 128]  # hidden states; then what the comparison gives, here all of the logits
        rows = zip(batch.input_ids, batch.attention_mask, strict=True)
        expected = torch.cat([model(input_ids=ids[real][None]).logits[0, :-1] for ids, real in rows])
    torch.testing.assert_close(teacher(slice(None))[0], expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(student, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("stepwise", [False, True])
@pytest.mark.parametrize("name", ["cohere", "granite", "gemma2"])  # Transformers has no classifier of the first two
def test_families_without_a_classifier_of_their_own_have_scalar_heads(
    folders: Folders, tmp_path: Path, name: str, stepwise: bool
) -> None:
    batch = texts()
    scalar = load_scalar_model(folders[name], stepwise=stepwise, head_std=1.0, loading=ModelLoading(attention="eager"))
    backbone = hf.AutoModel.from_pretrained(folders[name], attn_implementation="eager")
    hidden = backbone(input_ids=batch.input_ids, attention_mask=batch.attention_mask).last_hidden_state
    outputs = hidden @ scalar.model.score.weight.T  # type: ignore[operator, union-attr]
    expected = outputs[..., 1] - outputs[..., 0] if stepwise else outputs[..., 0]
    found = scalar_output(scalar, batch)
    assert found.std() > 0.1
    torch.testing.assert_close(found, expected * batch.attention_mask, rtol=1e-4, atol=1e-5)
    scalar.save_pretrained(tmp_path)
    again = load_scalar_model(str(tmp_path), stepwise=stepwise, new_head=False, loading=ModelLoading(attention="eager"))
    torch.testing.assert_close(reward_output(again, batch), reward_output(scalar, batch))


class OddLogits(hf.LlamaForCausalLM):
    """Adds a constant to one logit, which is neither a factor nor a cap."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = super().forward(*args, **kwargs)
        output.logits = output.logits + torch.arange(output.logits.shape[-1])
        return output


def test_the_logits_of_code_that_is_not_transformers_are_computed_by_it(caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    model = OddLogits(hf.LlamaConfig(**COMMON)).eval()
    batch = texts()
    with caplog.at_level("WARNING", logger="rlhfkit"):
        for _ in range(2):
            out = policy_output(model, batch, batch.loss_mask)
    assert [record.getMessage().partition(" may not be")[0] for record in caplog.records] == ["the logits of OddLogits"]
    torch.testing.assert_close(out.logprobs[batch.loss_mask], by_transformers(model, batch), rtol=1e-4, atol=1e-4)
    with pytest.raises(ValueError, match="a value head is not supported for OddLogits"):
        add_value_head(model)
