"""Rows with images: the formats of TRL and of OpenAI's API, and the same tokens as the model's own processor writes."""

import base64
import dataclasses
import io
import json
import shutil
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import PIL.Image
import pytest
import torch
from models.vision_families import SIDE, save_vision_model
from tiny_models import tiny_model

from rlhfkit import (
    PreferenceDataModule,
    PromptDataModule,
    SFTDataModule,
    SFTModule,
    StepwiseDataModule,
    UnpairedPreferenceDataModule,
)
from rlhfkit.data.images import Image
from rlhfkit.data.types import Experience, Prompt, Sample
from rlhfkit.models.vision import load_processor
from rlhfkit.rollout.replay import load_samples, sample_from_state, sample_state, save_samples


def picture(seed: int) -> PIL.Image.Image:
    pixels = np.random.default_rng(seed).integers(0, 255, (SIDE, SIDE, 3), dtype=np.uint8)
    return PIL.Image.fromarray(pixels)


def encoded(seed: int) -> bytes:
    file = io.BytesIO()
    picture(seed).save(file, format="PNG")
    return file.getvalue()


def file_of(folder: Path, seed: int) -> str:
    path = folder / f"{seed}.png"
    path.write_bytes(encoded(seed))
    return str(path)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("vision")


@pytest.fixture(params=["idefics3", "qwen2_5_vl"])
def folder(request: pytest.FixtureRequest, root: Path) -> Path:
    path = root / request.param
    return path if path.exists() else save_vision_model(request.param, path)


def opened(data: Any, folder: Path) -> Any:
    """A DataModule after ``setup`` in a run of a model."""
    data.trainer = SimpleNamespace(lightning_module=SFTModule(str(folder)), strategy=None, global_rank=0, world_size=1)
    data.setup()
    return data


def expected(folder: Path, messages: list[Any], seeds: tuple[int, ...], *, generation: bool = False) -> list[int]:
    """Token ids as the model's processor writes a conversation."""
    processor = load_processor(str(folder))
    text = processor.apply_chat_template(messages, add_generation_prompt=generation)
    given: Any = {"images": [[picture(seed) for seed in seeds]]} if seeds else {}
    ids: list[int] = processor(text=[text], **given)["input_ids"][0]
    return list(ids)


def user(*parts: Any, role: str = "user") -> dict[str, Any]:
    return {"role": role, "content": [{"type": "text", "text": one} if isinstance(one, str) else one for one in parts]}


answer = partial(user, role="assistant")


IMAGE = {"type": "image"}
CONFIGS = ("processor_config.json", "preprocessor_config.json")


def test_conversations_have_the_tokens_of_the_processor(folder: Path, tmp_path: Path) -> None:
    conversation = [user(IMAGE, "colour?"), answer("red"), user("and ", IMAGE, "?"), answer("blue")]
    url = f"data:image/png;base64,{base64.b64encode(encoded(1)).decode()}"
    own = [user({"type": "image_url", "image_url": {"url": url}}, "colour?"), answer("red")]
    own += [user("and ", {"type": "image", "image": file_of(tmp_path, 2)}, "?"), answer("blue")]
    marked = {"role": "user", "content": "<image>colour? of <image>"}
    rows = [
        {"messages": conversation, "images": [file_of(tmp_path, 1), file_of(tmp_path, 2)]},
        {"messages": own, "images": None},
        {"messages": [user("no image"), answer("yes")], "images": []},
        {"messages": [user("colour?"), answer("red")], "images": [file_of(tmp_path, 3)]},  # in front, as in TRL
        {"messages": [marked, answer("red")], "images": [file_of(tmp_path, 3), file_of(tmp_path, 1)]},  # as for verl
    ]
    tables = [opened(SFTDataModule(rows, cache_dir=tmp_path / "cache"), folder) for _ in range(2)]  # made, and kept
    stream = opened(SFTDataModule(rows, streaming=True, steps_per_epoch=1, shuffle=False), folder).stream.open()
    each = [[data.examples[index] for index in range(5)] for data in tables] + [[next(stream)[1] for _ in range(5)]]
    both = expected(folder, conversation, (1, 2))
    alone = expected(folder, [user("no image"), answer("yes")], ())
    front = expected(folder, [user(IMAGE, "colour?"), answer("red")], (3,))
    places = expected(folder, [user(IMAGE, "colour? of ", IMAGE), answer("red")], (3, 1))
    images = [(1, 2), (1, 2), (), (3,), (3, 1)]
    for examples in each:
        assert [one.input_ids for one in examples] == [both, both, alone, front, places]
        for example, seeds in zip(examples, images, strict=True):
            assert [one.encoded() for one in example.attachments] == [encoded(seed) for seed in seeds]
        learned = [token for token, mark in zip(both, examples[0].loss_mask, strict=True) if mark]
        assert load_processor(str(folder)).tokenizer.decode(learned) == "red<eos>blue<eos>"


def test_a_processor_of_another_size_finds_no_cached_tokens(folder: Path, tmp_path: Path) -> None:
    rows = [{"prompt": "colour?", "completion": "red", "image": picture(1)}]
    changed = tmp_path / "changed"
    shutil.copytree(folder, changed)
    config = next(one for one in map(changed.joinpath, CONFIGS) if one.exists())
    settings = json.loads(config.read_text())
    settings.get("image_processor", settings)["image_mean"] = [0.1, 0.2, 0.3]
    config.write_text(json.dumps(settings))
    for model, files in ((folder, 1), (folder, 1), (changed, 2)):
        opened(SFTDataModule(rows, cache_dir=tmp_path / "cache"), model)
        assert len(list((tmp_path / "cache").iterdir())) == files


def test_prompts_and_texts_without_a_template(folder: Path, tmp_path: Path) -> None:
    from datasets import Dataset

    rows = [
        {"prompt": "colour?", "image": picture(5), "answer": "red"},
        {"prompt": "none", "image": None, "answer": "x"},
    ]
    Dataset.from_list(rows).to_parquet(tmp_path / "rows.parquet")
    data = opened(PromptDataModule(str(tmp_path / "rows.parquet"), answer="answer", rollout_batch_size=2), folder)
    prompts = sorted(data.prompt_queue().take(2), key=lambda one: one.index)
    assert prompts[0].token_ids.tolist() == expected(folder, [user(IMAGE, "colour?")], (5,), generation=True)
    assert [[one.open().tobytes() for one in prompt.attachments] for prompt in prompts] == [[picture(5).tobytes()], []]
    assert "image" not in prompts[0].metadata
    assert prompts[0].text == "colour?"
    processor = load_processor(str(folder))
    row = {"prompt": f"see {processor.image_token}:", "completion": " red", "image": file_of(tmp_path, 6)}
    plain = opened(SFTDataModule([row], apply_chat_template=False), folder).examples[0]
    ids = processor(text=[f"see {processor.image_token}: red"], images=[[picture(6)]])["input_ids"][0]
    assert plain.input_ids[:-1] == list(ids)
    assert sum(plain.loss_mask) == 5


def test_rows_of_token_ids_and_of_texts_with_steps_have_their_images(folder: Path, tmp_path: Path) -> None:
    processor = load_processor(str(folder))
    ids = list(processor(text=[f"see {processor.image_token}: red"], images=[[picture(6)]])["input_ids"][0])
    row = {"input_ids": ids, "image": file_of(tmp_path, 6)}
    assert [one.encoded() for one in opened(SFTDataModule([row]), folder).examples[0].attachments] == [encoded(6)]
    rows = [{"text": "see: red + blue +", "labels": [1, 0], "images": [file_of(tmp_path, 6)]}]
    data = StepwiseDataModule(rows, text="text", labels="labels", step_token="+", apply_chat_template=False)
    example = opened(data, folder).examples[0].answer
    assert [one.encoded() for one in example.attachments] == [encoded(6)]
    written = processor(text=[f"{processor.image_token}see: red + blue +"], images=[[picture(6)]])["input_ids"][0]
    assert example.input_ids == list(written)


def test_pairs_and_labelled_answers(folder: Path, tmp_path: Path) -> None:
    pair = {"prompt": [user(IMAGE, "colour?")], "chosen": [answer("red")], "rejected": [answer("blue!")]}
    rows = [pair | {"images": [file_of(tmp_path, seed)]} for seed in (1, 2)]
    pairs = opened(PreferenceDataModule(rows), folder).examples
    ids = expected(folder, [user(IMAGE, "colour?"), answer("red")], (1,))
    assert pairs[0].chosen.input_ids == ids
    batch = PreferenceDataModule.collate([pairs[0], pairs[1]])
    assert [[one.encoded() for one in row] for row in batch.attachments] == [[encoded(1)]] * 2 + [[encoded(2)]] * 2
    labelled = opened(UnpairedPreferenceDataModule(rows), folder).examples
    seen = [labelled[index] for index in range(4)]
    assert [one.answer.attachments[0].encoded() for one in seen] == [encoded(1)] * 2 + [encoded(2)] * 2
    # Prompts with one text and two images are two, so that there are mismatched pairs, with the prompt's own image.
    assert all(one.mismatched.attachments == one.answer.attachments for one in seen)
    later = [answer("?"), user({"type": "image", "image": file_of(tmp_path, 3)}), answer("red")]
    with pytest.raises(ValueError, match=r"column 'chosen' of the given rows, row 0, has images, and only"):
        opened(UnpairedPreferenceDataModule([rows[0] | {"chosen": later}]), folder)


def test_rows_are_never_cut_inside_of_an_image(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    rows = [{"prompt": "c", "completion": "red" * 20, "image": picture(1)}, {"prompt": "c", "completion": "red" * 20}]
    for overlong in ("truncate", "split"):
        data = opened(SFTDataModule(rows, max_length=40, overlong=overlong), folder)
        assert set(data.examples.rows) == {1}
        assert [data.examples[part].attachments for part in range(len(data.examples))] == [()] * len(data.examples)
        assert "1 of 2 rows were dropped" in caplog.text
        caplog.clear()


def test_errors_name_row_and_image(folder: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken.png"
    broken.write_bytes(encoded(1)[:60])
    good = file_of(tmp_path, 1)
    wrong = [
        ([good, str(broken)], r"image 1 of the given rows, row 1 \(Image.*broken.png'\)\) cannot be read as a picture"),
        ([good], "the given rows, row 1 has 1 images in its column, and its messages have 2 parts"),
    ]
    message = [user(IMAGE, IMAGE, "same?"), answer("no")]
    for images, error in wrong:
        rows = [{"messages": message, "images": [good, good]}, {"messages": message, "images": images}]
        with pytest.raises(ValueError, match=error):
            opened(SFTDataModule(rows), folder)


def test_models_of_text_and_other_media_are_refused(tmp_path: Path, root: Path) -> None:
    text = tiny_model(tmp_path / "text")
    rows = [{"prompt": "colour?", "completion": "red", "images": [file_of(tmp_path, 1)]}]
    with pytest.raises(ValueError, match="row 0 has a column 'images', and the model reads text only"):
        opened(SFTDataModule(rows, apply_chat_template=False), text)
    with pytest.raises(ValueError, match="has a column 'video', which cannot be trained on: texts and images can"):
        opened(SFTDataModule([{"prompt": "a", "completion": "b", "video": "x.mp4"}]), text)


def test_records_keep_references(tmp_path: Path) -> None:
    path = file_of(tmp_path, 1)
    images = (Image.of(path, "a"), Image.of(picture(2), "b"))
    prompt = Prompt(0, [1, 2, 3], attachments=images)
    samples = [Sample(one, 0, [4], [-1.0], [0], "stop", reward=1.0) for one in (prompt, Prompt(1, [1]))]
    save_samples(tmp_path / "samples.jsonl", samples)
    batch = Experience.from_samples(samples)
    torch.save([sample_state(samples[0]), batch.state_dict()], tmp_path / "state.pt")
    state, loaded = torch.load(tmp_path / "state.pt", weights_only=True)
    for found in (load_samples(tmp_path / "samples.jsonl")[0], sample_from_state(state)):
        assert found.prompt.attachments == images
        assert found.prompt.attachments[0].source == Path(path)
    other = dataclasses.replace(prompt, attachments=images[::-1])  # of an episode, where another picture was shown
    save_samples(tmp_path / "episodes.jsonl", [samples[0], dataclasses.replace(samples[0], prompt=other)])
    assert [one.prompt.attachments for one in load_samples(tmp_path / "episodes.jsonl")] == [images, images[::-1]]
    assert batch.attachments == (images, ())
    assert batch.select([1, 0, 0]).attachments == ((), images, images)
    assert batch.placeholder().attachments is None
    assert Experience.from_state_dict(loaded).attachments == (images, ())
    assert Experience.from_samples(samples[1:]).attachments is None
