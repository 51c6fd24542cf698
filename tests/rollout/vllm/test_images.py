"""``VLLMPool`` with images: vLLM reads the tokens and the pictures that the trainer has, after every sync."""

import asyncio
import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from models.vision_families import VISION_FAMILIES, picture, prompts, save_vision_model
from shared_pool import SMALL, SharedPool
from torch import nn
from transformers.models.smolvlm import processing_smolvlm

from rlhfkit import VLLMPool
from rlhfkit.data.types import Experience, Sample
from rlhfkit.models import LoRA, load_causal_lm, policy_output
from rlhfkit.models.forward import UnpaddedBatch
from rlhfkit.models.load import load_config, load_tokenizer
from rlhfkit.models.vision import VISION_FAMILIES as KNOWN
from rlhfkit.models.vision import image_token_id, vision_processor
from rlhfkit.rollout.engine import RolloutEngine, SamplingSpec
from rlhfkit.rollout.errors import RefusedRequest, RequestError
from rlhfkit.rollout.vllm.images import ImageRequests, ReadPrompts, SentImages
from rlhfkit.rollout.weight_sync.source import ModuleWeights

EXACT = 5e-5  # float32 on both sides; what is left is the order of summation, at logits of 50 here
SPEC = SamplingSpec(group_size=3, max_new_tokens=8, min_new_tokens=8)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Idefics3, the one family that vLLM's build for CPUs computes without torchvision."""
    return save_vision_model("idefics3", tmp_path_factory.mktemp("vision") / "model")


@pytest.mark.parametrize("family", sorted(VISION_FAMILIES))
def test_vllm_is_sent_one_token_for_each_image_and_no_tokens_of_another_processor(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    if processing_smolvlm.num2words is None:
        monkeypatch.setattr(processing_smolvlm, "num2words", str)
    path = folder if family == "idefics3" else save_vision_model(family, tmp_path)
    tokenizer, config = load_tokenizer(str(path)), load_config(str(path))
    requests = ImageRequests(vision_processor(str(path), config), tokenizer)
    for prompt in prompts(path, several=KNOWN[family].several):
        written = " ".join(requests.processor.image_token for _ in prompt.attachments)
        sent = requests.sent(prompt.token_ids.tolist(), prompt.attachments)
        assert sent.token_ids == tokenizer(f"which colour? {written}").input_ids
        assert sent.encoded == [image.encoded() for image in prompt.attachments]
    whole = prompts(path, several=False)[0]
    ids = whole.token_ids.tolist()
    ids.remove(image_token_id(config))  # as another processor may have it
    with pytest.raises(RequestError, match=r"image 0 \(.*\) has \d+ tokens, which are not where they belong"):
        requests.sent(ids, whole.attachments)


def test_a_prompt_is_read_once_for_its_group_also_if_a_sample_is_dropped() -> None:
    class Renderer:
        asked = 0

        async def render_cmpl_async(self, prompts: list[Any]) -> list[Any]:
            self.asked += 1
            await asyncio.sleep(0.01)
            return [{"prompt_token_ids": [1, 7, 7, *prompt["prompt_token_ids"][2:]]} for prompt in prompts]

    async def run() -> None:
        renderer = Renderer()
        prompts = ReadPrompts(renderer)
        file = picture(0).encoded()
        group = [asyncio.ensure_future(prompts.read([1, 7, 7, 2], SentImages([1, 7, 2], [file]))) for _ in range(4)]
        await asyncio.sleep(0)
        group[0].cancel()
        assert await asyncio.gather(*group[1:]) == [{"prompt_token_ids": [1, 7, 7, 2]}] * 3
        assert renderer.asked == 1
        with pytest.raises(RefusedRequest, match="vLLM has read 4 tokens of a prompt with images"):
            await prompts.read([1, 7, 2], SentImages([1, 7, 3], [file]))
        assert renderer.asked == 2

    asyncio.run(run())


@pytest.fixture(scope="module")
def adapted(folder: Path) -> nn.Module:
    """The model with an adapter of its language part."""
    return load_causal_lm(str(folder), lora=LoRA(rank=4)).eval()


@pytest.fixture(scope="module")
def pool(folder: Path, adapted: nn.Module, ray_session: None) -> Iterator[SharedPool]:
    """One engine that was started for the adapter; policies without one are sent whole."""
    pool = SharedPool(lora="adapter", **SMALL)
    pool.configure_weights(ModuleWeights(adapted))
    pool.configure_logprobs(SPEC)
    pool.start(str(folder), dtype=torch.float32)
    yield pool
    pool.really_close()


def check_three_syncs(engine: RolloutEngine, folder: Path) -> None:
    """Sampled and scored log-probs are the trainer's after each, and the image's token is never sampled."""
    model = load_causal_lm(str(folder)).eval()
    forbidden = image_token_id(model.config)
    given = prompts(folder, several=True)  # the same pictures each time: what the encoder keeps of them would show
    for version in (1, 2, 3):
        generator = torch.Generator().manual_seed(version)
        with torch.no_grad():  # vision and language parts alike
            for parameter in model.parameters():
                parameter += 0.02 * torch.randn(parameter.shape, generator=generator)
            model.get_output_embeddings().weight[forbidden] *= 3  # sampled, if it could be
        engine.load(ModuleWeights(model), version)
        samples = engine.generate(given, SPEC, iteration=version)
        assert all(forbidden not in sample.token_ids for sample in samples)
        batch = Experience.from_samples(samples, before_rewards=True)
        with torch.no_grad():
            found = policy_output(model, batch, batch.action_mask).logprobs
        torch.testing.assert_close(found, batch.rollout_logprobs, atol=EXACT, rtol=0)
        for sample in samples[::3]:
            ids, images = torch.tensor([sample.all_token_ids.tolist()]), [sample.prompt.attachments]
            with torch.no_grad():
                mask = torch.ones(1, ids.shape[1] - 1, dtype=torch.bool)
                expected = policy_output(model, UnpaddedBatch(ids, images), mask).logprobs[0]
            torch.testing.assert_close(
                torch.tensor(engine.score(ids.tolist(), images)[0]), expected, atol=EXACT, rtol=0
            )
    texts = [sample.token_ids.tolist() for sample in samples]
    assert texts[:3] != texts[3:6]  # one text, two pictures


def test_an_adapter_of_the_vision_part_is_merged(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """With what: ``tests/models/test_vision.py``."""
    pool = VLLMPool()
    pool.configure_weights(ModuleWeights(load_causal_lm(str(folder), lora=LoRA(rank=4, modality="both"))))
    assert pool.adapter is None
    assert "the LoRA adapter is merged at every sync: model.vision_model" in caplog.text


@pytest.mark.vllm
def test_sampled_and_scored_logprobs_are_the_trainers_after_each_of_three_syncs(pool: SharedPool, folder: Path) -> None:
    check_three_syncs(pool, folder)


def logprobs_of(model: torch.nn.Module, sample: Sample) -> torch.Tensor:
    """(T,) the trainer's log-probs of a sample's tokens."""
    batch = Experience.from_samples([sample], before_rewards=True)
    with torch.no_grad():
        return policy_output(model, batch, batch.action_mask).logprobs[batch.action_mask]


@pytest.mark.vllm
def test_an_adapter_of_the_language_part_is_sent_alone_and_applied(
    pool: SharedPool, folder: Path, adapted: nn.Module
) -> None:
    sent = []
    for version in (7, 8):
        generator = torch.Generator().manual_seed(version)
        with torch.no_grad():
            for parameter in adapted.parameters():
                if parameter.requires_grad:
                    parameter += 0.02 * torch.randn(parameter.shape, generator=generator)
        pool.load(ModuleWeights(adapted), version)
        sent.append(pool.sync_metrics()["rollout/sync_bytes"])
        for sample in pool.generate(prompts(folder, several=True), SPEC, iteration=version):
            found = torch.tensor(sample.logprobs.tolist())
            torch.testing.assert_close(found, logprobs_of(adapted, sample), atol=EXACT, rtol=0)
    assert sent[1] < 0.5 * sent[0]


@contextlib.contextmanager
def sent_as_they_are() -> Iterator[None]:
    """Tokens of images are sent in place of one for each, which vLLM's processor writes again."""
    right = ImageRequests.sent

    def written_twice(self: ImageRequests, token_ids: Sequence[int], images: Sequence[Any]) -> SentImages:
        return SentImages(list(token_ids), right(self, token_ids, images).encoded)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ImageRequests, "sent", written_twice)
        yield
