"""Models outside of the module, as rewards or on Ray actors, see the images of samples."""

import dataclasses
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from models.vision_families import picture, prompts, save_vision_model
from tiny_models import tiny_model, tiny_tokenizer

from rlhfkit import Experience, Sample, SamplingSpec
from rlhfkit.cli.generate import generate
from rlhfkit.cli.jsonl import read_lines
from rlhfkit.cli.score import score
from rlhfkit.data.batch import TokenExample, collate_tokens
from rlhfkit.data.images import Image
from rlhfkit.models import load_causal_lm, load_scalar_model, load_tokenizer, policy_output, reward_output
from rlhfkit.models.vision import load_processor
from rlhfkit.rewards import ModelReward
from rlhfkit.roles.frozen_model import row_keys
from rlhfkit.roles.replica import ReplicaOptions, TokenRows, compute_rows


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A policy, and a reward model made of it."""
    folder = tmp_path_factory.mktemp("seeing")
    save_vision_model("idefics3", folder / "policy")
    load_scalar_model(str(folder / "policy"), head_std=1.0).save_pretrained(folder / "reward")
    load_processor(str(folder / "policy")).save_pretrained(folder / "reward")
    return folder


def samples(folder: Path, answers: tuple[str, ...] = ("red", "blue")) -> list[Sample]:
    """Two answers to each of one text with one picture, the text with another picture, and a text with two."""
    tokenizer, made = load_tokenizer(str(folder / "policy")), []
    for prompt in prompts(folder / "policy", several=True):
        for index, text in enumerate(answers):
            ids = [*tokenizer(text)["input_ids"], tokenizer.eos_token_id]
            made.append(Sample(prompt, index, ids, [0.0] * len(ids), [0] * len(ids), "stop", text=text))
    return made


@pytest.mark.parametrize("role", ["logprobs", "reward"])
def test_a_replica_is_sent_the_images(folder: Path, role: Any) -> None:
    name = str(folder / ("policy" if role == "logprobs" else "reward"))
    batch = Experience.from_samples(samples(folder), before_rewards=True)
    options = ReplicaOptions(name, role, torch.float32, torch.float32, None, False)
    model = (load_causal_lm if role == "logprobs" else load_scalar_model)(name).eval()
    sent = pickle.loads(pickle.dumps(TokenRows.of(batch, [5, 0, 3])))
    found = compute_rows(model, sent, options, None, torch.device("cpu"))
    with torch.no_grad():
        if role == "logprobs":
            expected = policy_output(model, batch, batch.action_mask).logprobs[[5, 0, 3], : found.shape[1]]
        else:
            expected = reward_output(model, batch, normalized=True)[[5, 0, 3], None]
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=0)


def test_numbers_that_were_asked_for_early_are_those_of_the_same_images(folder: Path) -> None:
    """An environment may show another picture with the same text when the prompt comes again."""
    batch = Experience.from_samples(samples(folder), before_rewards=True)
    other = dataclasses.replace(batch, attachments=(batch.attachments[2], *batch.attachments[1:]))
    assert [one == two for one, two in zip(row_keys(batch), row_keys(other), strict=True)] == [False, *[True] * 7]


def test_completions_are_generated_and_scored_from_the_command_line(folder: Path, tmp_path: Path) -> None:
    paths = [tmp_path / f"{seed}.png" for seed in (0, 1)]
    for path, seed in zip(paths, (0, 1), strict=True):
        path.write_bytes(picture(seed).encoded())
    rows = [{"prompt": "which?", "image": str(paths[0])}, {"prompt": "which?", "image": picture(1).plain()}]
    sampling = SamplingSpec(group_size=2, max_new_tokens=4)
    made = generate(str(folder / "policy"), rows, tmp_path / "made.jsonl", sampling=sampling, progress=False)
    scored = score(made, tmp_path / "scored.jsonl", reward_model=str(folder / "reward"), progress=False)
    lines = read_lines(scored)
    assert [line["image"][:21] for line in lines[1:3]] == [str(paths[0])[:21], "data:image/png;base64"]
    images = [(Image.of(line["image"], "a line"),) for line in lines]
    examples = [
        TokenExample(
            [*line["prompt_ids"], *line["completion_ids"]],
            [False] * (len(line["prompt_ids"]) + len(line["completion_ids"])),
            image,
        )
        for line, image in zip(lines, images, strict=True)
    ]
    with torch.no_grad():
        expected = reward_output(
            load_scalar_model(str(folder / "reward")).eval(), collate_tokens(examples), normalized=True
        )
    assert [line["reward"] for line in lines] == pytest.approx(expected.tolist(), abs=2e-5)


def test_a_reward_model_sees_and_one_of_text_says_that_it_does_not(folder: Path, tmp_path: Path) -> None:
    given = samples(folder)
    reward = ModelReward(str(folder / "reward"), device="cpu")
    found = torch.tensor(reward(given))
    model = load_scalar_model(str(folder / "reward")).eval()
    with torch.no_grad():
        batch = Experience.from_samples(given, before_rewards=True)
        torch.testing.assert_close(found, reward_output(model, batch, normalized=True), atol=2e-5, rtol=0)
    assert float((found[:2] - found[2:4]).abs().min()) > 1e-3  # one text, two pictures
    load_scalar_model(str(tiny_model(tmp_path / "text")), head_std=1.0).save_pretrained(tmp_path / "reward")
    tiny_tokenizer().save_pretrained(tmp_path / "reward")
    shown = Sample(given[0].prompt, 0, [5, 6], [0.0] * 2, [0] * 2, "stop", text=tiny_tokenizer().decode([5, 6]))
    shown.prompt.token_ids, shown.prompt.attachments = [4, 5], (picture(0),)
    with pytest.raises(ValueError, match=r"1 sequences of a batch have images, .*it reads text only"):
        ModelReward(str(tmp_path / "reward"), device="cpu")([shown])
