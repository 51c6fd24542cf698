"""Modules learn from rows with images: the pictures, not only the texts, decide what is learned."""

import json
import random
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import PIL.Image
import pytest
import torch
from lightning.pytorch.callbacks import LambdaCallback
from models.vision_families import SIDE, save_vision_model
from transformers import AutoModelForImageTextToText, AutoProcessor

from rlhfkit import (
    Ahead,
    DPOModule,
    DynamicSampling,
    GRPOModule,
    LocalEngine,
    Optimization,
    Oversampling,
    PPOModule,
    PreferenceDataModule,
    PromptDataModule,
    ReplayBuffer,
    RolloutCallback,
    SamplingSpec,
    SFTDataModule,
    SFTModule,
)
from rlhfkit.models.lora import vision_parameters

from .data_runs import trainer, write

COLOURS = {"r": (255, 0, 0), "g": (0, 255, 0), "b": (0, 0, 255)}
SEEING = {"train_vision": True}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_vision_model("idefics3", tmp_path_factory.mktemp("vision") / "model")


def rows(folder: Path, count: int = 48) -> str:
    """A question with one text, whose answer is the colour of the picture."""
    chance, made = random.Random(0), []
    for index in range(count):
        colour = chance.choice(list(COLOURS))
        noise = np.random.default_rng(index).integers(0, 60, (SIDE, SIDE, 3))
        pixels = (np.array(COLOURS[colour]) * 3 // 4 + noise).clip(0, 255).astype(np.uint8)
        path = folder / f"{index}.png"
        PIL.Image.fromarray(pixels).save(path)
        wrong = chance.choice([each for each in COLOURS if each != colour])
        answers = {"completion": colour, "chosen": colour, "rejected": wrong, "answer": colour}
        made.append({"prompt": "colour?", "images": [str(path)], **answers})
    write(folder / "rows.jsonl", made)
    return str(folder / "rows.jsonl")


def trained(module: Any, data: Any, folder: Path, **arguments: Any) -> L.Trainer:
    run = trainer(folder, **{"max_epochs": 1} | arguments)
    run.fit(module, data)
    return run


@pytest.mark.parametrize(
    ("kind", "kind_of_data"),
    [
        (SFTModule, partial(SFTDataModule, completion="completion")),
        (DPOModule, PreferenceDataModule),
    ],
)
def test_modules_learn_what_is_seen(folder: Path, tmp_path: Path, kind: Any, kind_of_data: Any) -> None:
    """From texts alone the loss would stay above 0.5: the answers are drawn."""
    torch.manual_seed(0)
    data = kind_of_data(rows(tmp_path), micro_batch_size=16)
    run = trained(kind(str(folder), lr=2e-3, loading=SEEING), data, tmp_path, max_epochs=5)
    assert float(run.callback_metrics["loss"]) < 0.2


@pytest.fixture(scope="module")
def begun(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[SFTModule, Path]:
    """A module that answers nearly at random, and its export."""
    place = tmp_path_factory.mktemp("begun")
    torch.manual_seed(0)
    module = SFTModule(str(folder), lr=2e-3, loading=SEEING)
    trained(module, SFTDataModule(rows(place), completion="completion", micro_batch_size=16), place, max_epochs=2)
    return module, module.save_pretrained(place / "export")


def test_an_export_has_the_processor_and_is_the_model_in_transformers(begun: tuple[SFTModule, Path]) -> None:
    module, export = begun
    processor = AutoProcessor.from_pretrained(export)
    model = AutoModelForImageTextToText.from_pretrained(export, dtype=torch.float32).eval()
    inputs = processor(text=["<image>colour?"], images=[[PIL.Image.new("RGB", (SIDE, SIDE))]], return_tensors="pt")
    with torch.no_grad():
        assert torch.equal(model(**inputs).logits, module.policy.eval()(**inputs).logits)


def test_vision_has_a_learning_rate_of_its_own_or_none(folder: Path) -> None:
    own = Optimization(parameter_options={"vision": {"lr": 1e-5}})
    module = SFTModule(str(folder), lr=1e-3, loading=SEEING, optimization=own)
    module.configure_model()
    groups = {group["name"]: group for group in module.configure_optimizers().param_groups}
    assert {name: group["lr"] for name, group in groups.items()} == {"policy": 1e-3, "policy.vision": 1e-5}
    vision = {id(parameter) for _, parameter in vision_parameters(module.policy)}
    assert {id(parameter) for parameter in groups["policy.vision"]["params"]} == vision
    frozen = SFTModule(str(folder))
    frozen.configure_model()
    assert not any(parameter.requires_grad for _, parameter in vision_parameters(frozen.policy))


def test_policy_and_critic_learn_by_reward_what_they_see(begun: tuple[SFTModule, Path], tmp_path: Path) -> None:
    """Two updates an iteration. One colour is worth more, whatever is answered: only a critic that sees knows that."""
    data = PromptDataModule(rows(tmp_path), answer="answer", rollout_batch_size=24, micro_batch_size=96)
    rewards: list[float] = []
    mismatch: list[float] = []

    def right(samples: list[Any]) -> list[float]:
        given = [float(sample.text == sample.prompt.answer) for sample in samples]
        rewards.append(sum(given) / len(given))
        return [one + 2.0 * (sample.prompt.answer == "r") for one, sample in zip(given, samples, strict=True)]

    asked: list[int] = []

    class Probed(LocalEngine):
        def score(self, sequences: Any, images: Any = ()) -> list[list[float]]:
            asked.extend(len(one) for one in images)
            return super().score(sequences, images)

    rollouts = RolloutCallback(
        right, engine=Probed(), sampling=SamplingSpec(group_size=8, max_new_tokens=1, stop_token_ids=(69,))
    )
    module = PPOModule(str(begun[1]), lr=1e-3, critic_lr=3e-3, kl_coef=0.0, loading=SEEING)
    name = "rollout_corr/logprob_abs_diff_max"
    watch = LambdaCallback(on_train_epoch_end=lambda run, _: mismatch.append(float(run.callback_metrics[name])))
    run = trained(module, data, tmp_path, max_epochs=10, callbacks=[rollouts, watch])
    assert sum(rewards[-3:]) / 3 > sum(rewards[:2]) / 2 + 0.25, rewards
    assert len(mismatch) == 10
    assert max(mismatch) < 1e-5
    assert asked == [1] * 11  # after each sync the probe has a picture
    assert float(run.callback_metrics["value/explained_variance"]) > 0.7


@pytest.mark.parametrize(
    "parts",
    [[Oversampling(0.5, continued=True), DynamicSampling()], [Ahead(2), ReplayBuffer()]],
    ids=["continued", "replayed"],
)
def test_samples_keep_their_images_wherever_they_wait(folder: Path, tmp_path: Path, parts: list[Any]) -> None:
    """Continued, queued, kept or left out: their log-probs are those of their own pictures, as nothing is learned.

    Groups of every second prompt have no signal. Texts are equal.
    """
    pictures = [row["images"] for row in map(json.loads, Path(rows(tmp_path, 12)).read_text().splitlines())]
    replayed, continued, mismatch = [], [], []

    def every_second(samples: list[Any]) -> list[float]:
        for sample in samples:
            assert [str(image.source) for image in sample.prompt.attachments] == pictures[sample.prompt.index]
        return [float(sample.sample_index * (sample.prompt.index % 2)) for sample in samples]

    class Checked(GRPOModule):
        def loss(self, batch: Any, out: Any) -> Any:
            for prompt, images in zip(batch.group.tolist(), batch.attachments, strict=True):
                assert [str(image.source) for image in images] == pictures[prompt]
            newest, oldest = batch.versions.amax(-1), batch.versions.masked_fill(~batch.action_mask, 99).amin(-1)
            replayed.append(bool(batch.replayed.any()))
            continued.append(bool((newest > oldest).any()))
            difference = (out.logprobs - batch.rollout_logprobs)[batch.action_mask].abs()
            mismatch.append(float(difference.detach().max()))
            return super().loss(batch, out)

    rollouts = RolloutCallback(
        every_second,
        engine=LocalEngine(max_sequences=4),
        sampling=SamplingSpec(group_size=2, max_new_tokens=6, stop_token_ids=tuple(range(64, 128))),
        parts=parts,
    )
    data = PromptDataModule(rows(tmp_path, 12), answer="answer", rollout_batch_size=4, micro_batch_size=4)
    trained(Checked(str(folder), lr=1e-9), data, tmp_path, max_epochs=5, callbacks=[rollouts])
    assert max(mismatch) < 1e-5
    assert (any(continued), any(replayed)) == (isinstance(parts[0], Oversampling), isinstance(parts[1], ReplayBuffer))
