"""``LocalEngine`` with images: every family's log-probs are the trainer's, and samples depend on the picture."""

from pathlib import Path

import pytest
import torch
from models.vision_families import VISION_FAMILIES, picture, prompts, save_vision_model
from tiny_models import tiny_model
from transformers.models.smolvlm import processing_smolvlm

from rlhfkit.data.types import Experience, Prompt
from rlhfkit.models import load_causal_lm, policy_output
from rlhfkit.models.vision import VISION_FAMILIES as KNOWN
from rlhfkit.models.vision import image_token_id
from rlhfkit.rollout import LocalEngine, SamplingSpec
from rlhfkit.rollout.errors import RequestError


@pytest.fixture(scope="session")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("vision")


@pytest.mark.parametrize("family", sorted(VISION_FAMILIES))
def test_sampled_logprobs_are_the_trainers(family: str, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if processing_smolvlm.num2words is None:
        monkeypatch.setattr(processing_smolvlm, "num2words", str)
    folder = root / family
    folder = folder if folder.exists() else save_vision_model(family, folder)
    engine, model = LocalEngine(), load_causal_lm(str(folder)).eval()
    engine.start(str(folder), dtype=torch.float32)
    with torch.no_grad():  # often sampled, if it could be
        forbidden = image_token_id(model.config)
        model.get_output_embeddings().weight[forbidden] *= 20
    engine.load(list(model.named_parameters()), 0)
    sampling = SamplingSpec(
        group_size=3, max_new_tokens=6, min_new_tokens=2, temperature=0.8, stop_token_ids=(*range(3, 60),)
    )
    given = prompts(folder, several=KNOWN[family].several)
    samples = engine.generate(given, sampling, iteration=0)
    assert len(samples) == 3 * len(given)
    assert all(forbidden not in sample.token_ids for sample in samples)
    assert {sample.num_tokens for sample in samples} != {6}
    batch = Experience.from_samples(samples, temperature=0.8, before_rewards=True)
    with torch.no_grad():
        found = policy_output(model, batch, batch.action_mask, temperature=0.8).logprobs
    torch.testing.assert_close(found, batch.rollout_logprobs, atol=5e-5, rtol=0)
    engine.cached = False  # as language models whose cache is of no use
    alone = engine.generate(given[1:2], sampling, iteration=0)
    assert [one.token_ids.tolist() for one in alone] == [one.token_ids.tolist() for one in samples[3:6]]


def test_a_model_of_text_refuses_images(tmp_path: Path) -> None:
    engine = LocalEngine()
    engine.start(str(tiny_model(tmp_path / "text")), dtype=torch.float32, load_weights=True)
    with pytest.raises(RequestError, match="prompt 3 has images, which this engine does not give"):
        engine.generate([Prompt(3, [4, 5], attachments=(picture(0),))], SamplingSpec(max_new_tokens=4), iteration=0)
