"""Each family that sees images against plain Transformers, which is given one sequence at a time."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lazy_module import LazyModule
from tiny_models import tiny_model
from torch import Tensor
from transformers import AutoModelForImageTextToText
from transformers.models.smolvlm import processing_smolvlm

from models.vision_families import VISION_FAMILIES, picture, save_vision_model
from rlhfkit import SFTModule
from rlhfkit.cli.export import merge_adapter
from rlhfkit.models import LoRA, ModelLoading, load_causal_lm, load_scalar_model, policy_output, reward_output, vision
from rlhfkit.models.attention.families import BOTH_WAYS, sees_images
from rlhfkit.models.forward import UnpaddedBatch, forward_of, packs_batches
from rlhfkit.models.heads import row_difference
from rlhfkit.models.lora import adapter_layers, vision_parameters
from rlhfkit.models.vision import VISION_FAMILIES as KNOWN
from rlhfkit.models.vision import VisionProcessor, image_token_id, load_processor

peft = LazyModule("peft")

TOLERANCE = 2e-5


@pytest.fixture(scope="session")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("vision")


COMMON = {"gemma3", "qwen2_5_vl", "qwen3_vl"}
"""Of ``make test``."""


@pytest.fixture(
    params=[pytest.param(name, marks=[pytest.mark.long] * (name not in COMMON)) for name in sorted(VISION_FAMILIES)]
)
def family(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if processing_smolvlm.num2words is None:
        monkeypatch.setattr(processing_smolvlm, "num2words", str)  # it writes times of videos
    name: str = request.param
    return name


def folder_of(name: str, root: Path) -> Path:
    folder = root / name
    return folder if folder.exists() else save_vision_model(name, folder)


QUESTION = "See IMAGE: what colour?\na:"
ROWS = (
    # image seeds, text, answer: two answers to one prompt, the same text with another image, no image, several
    ((0,), QUESTION, "red"),
    ((0,), QUESTION, "blueish"),
    ((1,), QUESTION, "green"),
    ((), "no image at all", "yes"),
    ((2, 0), "IMAGE and IMAGE: same?", "no"),
    ((2, 1), "IMAGE and IMAGE: same?", "yes it is"),
)


class Case:
    """A batch of a family, and what Transformers makes of each of its rows alone."""

    def __init__(self, folder: Path, *, rows: Any = ROWS) -> None:
        self.processor = load_processor(str(folder))
        token = self.processor.image_token
        self.alone: list[dict[str, Any]] = []
        self.ids: list[Tensor] = []
        attachments = []
        for seeds, text, answer in rows:
            attachments.append(tuple(picture(seed, wide=seed == 2) for seed in seeds))
            given: Any = {"images": [[image.open() for image in attachments[-1]]]} if seeds else {}
            inputs = dict(self.processor(text=[text.replace("IMAGE", token)], return_tensors="pt", **given))
            done = torch.tensor([[*self.processor.tokenizer(answer)["input_ids"], 1]])
            for name in ("token_type_ids", "mm_token_type_ids"):
                if name in inputs:
                    inputs[name] = torch.nn.functional.pad(inputs[name], (0, done.shape[1]))
            inputs["input_ids"] = torch.cat([inputs["input_ids"], done], 1)
            inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
            if "token_type_ids" not in inputs and "gemma3" in folder.name:
                inputs["token_type_ids"] = torch.zeros_like(inputs["input_ids"])
            self.alone.append(inputs)
            self.ids.append(inputs["input_ids"][0])
        longest = max(map(len, self.ids))
        ids, real = torch.zeros(len(rows), longest, dtype=torch.long), torch.zeros(len(rows), longest, dtype=torch.bool)
        for row, tokens in enumerate(self.ids):
            ids[row, : len(tokens)], real[row, : len(tokens)] = tokens, True
        self.batch: Any = SimpleNamespace(input_ids=ids, attention_mask=real, attachments=tuple(attachments))
        self.mask = real[:, 1:]

    def compare(self, found: Tensor, expected: list[Tensor], atol: float = TOLERANCE) -> None:
        """Log-probs of our model with those of each row alone."""
        for row, wanted in enumerate(expected):
            torch.testing.assert_close(found[row, : len(wanted)], wanted, atol=atol, rtol=0)

    def logprobs(self, model: Any) -> Tensor:
        return policy_output(model, self.batch, self.mask).logprobs

    def plain_logprobs(self, model: Any) -> list[Tensor]:
        rows = []
        for inputs, ids in zip(self.alone, self.ids, strict=True):
            logits = model(**inputs).logits[0, :-1].float().log_softmax(-1)
            rows.append(logits.gather(-1, ids[1:, None])[:, 0])
        return rows


def case_of(family: str, folder: Path) -> Case:
    several = KNOWN[family].several
    return Case(folder, rows=[row for row in ROWS if several or len(row[0]) < 2])


def plain_model(folder: Path) -> Any:
    return AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa")


@pytest.mark.parametrize("attention", [None, "sdpa"])
def test_values_and_gradients_are_those_of_transformers(family: str, attention: str | None, root: Path) -> None:
    """Packed, layers are computed again in the backward pass; ``test_step_properties.py`` packs without."""
    folder = folder_of(family, root)
    loading = ModelLoading(attention=attention, train_vision=True, gradient_checkpointing=attention is None)
    model = load_causal_lm(str(folder), loading=loading)
    case = case_of(family, folder)
    assert packs_batches(model) == (attention is None and family not in BOTH_WAYS)
    plain = plain_model(folder).train()
    found, expected = case.logprobs(model), case.plain_logprobs(plain)
    case.compare(found, expected)
    weights = torch.linspace(0.5, 1.5, found.shape[1])
    (found * weights).sum().backward()
    sum((row * weights[: len(row)]).sum() for row in expected).backward()
    theirs = dict(plain.named_parameters())
    compared = 0
    for name, parameter in model.named_parameters():
        other = theirs[name].grad
        if other is not None:
            torch.testing.assert_close(parameter.grad, other, atol=2e-3 * float(other.abs().max()) + 1e-5, rtol=0)
            compared += 1
    names = {name for name, _ in vision_parameters(model)}
    assert compared > 20
    assert any(theirs[name].grad is not None and bool(theirs[name].grad.any()) for name in names)


def test_a_reward_model_is_the_model_with_a_head_also_from_its_own_files(
    family: str, root: Path, tmp_path: Path
) -> None:
    folder = folder_of(family, root)
    case, plain = case_of(family, folder), plain_model(folder).eval()
    model = load_scalar_model(str(folder), head_std=1.0).eval()
    model.save_pretrained(tmp_path)
    load_processor(str(folder)).save_pretrained(tmp_path)
    again = load_scalar_model(str(tmp_path), new_head=False).eval()
    with torch.no_grad():
        last = torch.stack([plain.model(**inputs).last_hidden_state[0, -1] for inputs in case.alone])
        expected = (last @ model.model.score.weight.T)[:, 0]
        for each in (model, again):
            torch.testing.assert_close(reward_output(each, case.batch), expected, atol=TOLERANCE, rtol=TOLERANCE)
    assert row_difference(model, case.batch, 2) < 1e-4


@pytest.mark.parametrize("name", ["idefics3", "qwen2_5_vl"])
def test_an_image_of_a_group_goes_through_the_tower_once(name: str, root: Path) -> None:
    folder = folder_of(name, root)
    model, case = load_causal_lm(str(folder)), Case(folder, rows=ROWS[:3])
    inputs = forward_of(model).inputs(case.batch).arguments
    layout = inputs["packed_layout"]
    one = case.alone[0]["pixel_values"].numel()
    assert inputs["pixel_values"].numel() == 2 * one  # three rows, two of them with one image
    first = int((case.ids[0] == image_token_id(model.config)).nonzero()[0])
    assert layout.prefixes[1] > first >= layout.prefixes[2] > 0


def test_a_frozen_tower_has_no_gradients_and_the_rest_has_its_own(family: str, root: Path) -> None:
    folder = folder_of(family, root)
    case, gradients = case_of(family, folder), []
    for trained in (True, False):
        model = load_causal_lm(str(folder), loading=ModelLoading(train_vision=trained))
        vision = {name for name, _ in vision_parameters(model)}
        assert all(one.requires_grad == (trained or name not in vision) for name, one in model.named_parameters())
        case.logprobs(model).sum().backward()
        gradients.append({name: one.grad for name, one in model.named_parameters() if one.grad is not None})
    assert gradients[0].keys() > gradients[1].keys() == gradients[0].keys() - vision
    for name, gradient in gradients[1].items():
        torch.testing.assert_close(gradient, gradients[0][name])


@pytest.mark.parametrize("modality", ["language", "vision", "both"])
def test_adapters_are_where_they_were_asked_for(family: str, modality: Any, root: Path) -> None:
    folder = folder_of(family, root)
    model = load_causal_lm(str(folder), lora=LoRA(rank=2, modality=modality))
    vision = {name for name, _ in vision_parameters(model)}
    adapted = {any(one.startswith(f"{name}.") for one in vision) for name in adapter_layers(model)}
    assert adapted == {"language": {False}, "vision": {True}, "both": {False, True}}[modality]
    case = case_of(family, folder)
    found, expected = case.logprobs(model), case.logprobs(load_causal_lm(str(folder)))
    torch.testing.assert_close(found, expected, atol=TOLERANCE, rtol=0)  # new adapters have no effect
    found.sum().backward()
    trained = [one for one in model.parameters() if one.requires_grad]
    assert any(one.grad is not None and bool(one.grad.any()) for one in trained)


@pytest.mark.parametrize("name", ["idefics3", "qwen2_5_vl"])
def test_an_adapter_of_both_parts_is_the_same_in_every_export(name: str, root: Path, tmp_path: Path) -> None:
    folder = folder_of(name, root)
    module, case = SFTModule(str(folder), lora=LoRA(rank=2, modality="both")), Case(folder)
    module.configure_model()
    with torch.no_grad():
        for parameter in module.policy.eval().parameters():
            parameter += 0.05 * parameter.requires_grad
        expected = case.logprobs(module.policy)
        module.save_pretrained(tmp_path / "merged")
        module.save_pretrained(tmp_path / "adapter", adapter=True)
        merge_adapter(str(tmp_path / "adapter"), tmp_path / "command")
        read = case.logprobs(load_causal_lm(str(tmp_path / "adapter")).eval())
        torch.testing.assert_close(read, expected, atol=TOLERANCE, rtol=0)
        models = {each: plain_model(tmp_path / each) for each in ("merged", "command")}
        models["peft"] = peft.PeftModel.from_pretrained(plain_model(folder), tmp_path / "adapter")
        for model in models.values():
            case.compare(expected, case.plain_logprobs(model.eval()), atol=1e-4)
    assert load_processor(str(tmp_path / "command")).image_token == load_processor(str(folder)).image_token


def test_texts_alone_and_where_other_ranks_would_wait_for_a_picture(
    family: str, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of which nothing is wanted: numbers are the texts' own, and gradients of the vision part 0."""
    folder = folder_of(family, root)
    case = case_of(family, folder)
    texts = Case(folder, rows=[((), "?", "yes"), ((), "?", "no")])  # shorter than the tokens of a picture
    expected = texts.plain_logprobs(plain_model(folder))
    for ranks, trained in ((1, True), (2, True), (2, False)):
        monkeypatch.setattr(vision, "get_world_size", lambda ranks=ranks: ranks)
        model = load_causal_lm(str(folder), loading=ModelLoading(train_vision=trained))
        found = texts.logprobs(model)
        texts.compare(found, expected)
        if ranks == 1:
            assert "pixel_values" not in forward_of(model).inputs(texts.batch).arguments
            continue
        found.sum().backward()
        reached = {name: one.grad for name, one in vision_parameters(model) if one.grad is not None}
        assert not any(bool(gradient.any()) for gradient in reached.values())
        case.logprobs(model).sum().backward()
        assert reached.keys() == {name for name, one in vision_parameters(model) if one.grad is not None}
        with torch.no_grad():
            assert "pixel_values" not in forward_of(model).inputs(texts.batch).arguments
    monkeypatch.setattr(vision, "is_sharded", lambda _: True)
    with torch.no_grad():
        assert "pixel_values" in forward_of(model).inputs(texts.batch).arguments


def test_tokens_of_images_must_be_those_of_the_images(root: Path) -> None:
    folder = folder_of("idefics3", root)
    model, case = load_causal_lm(str(folder)), Case(folder)
    case.batch.input_ids[3, 2] = image_token_id(model.config)  # as if it was sampled
    with pytest.raises(ValueError, match="sequence 3 of the batch has 1 tokens of images, and its 0 images have 0"):
        case.logprobs(model)


def test_several_images_are_refused_where_they_are_another_computation_or_one_to_the_model(root: Path) -> None:
    folder = folder_of("llava_onevision", root)
    case = Case(folder, rows=[((0,), QUESTION, "red")])
    batch = UnpaddedBatch(case.batch.input_ids.repeat(1, 2), (case.batch.attachments[0] * 2,))
    with pytest.raises(ValueError, match="one image a row"):
        policy_output(load_causal_lm(str(folder)), batch, batch.attention_mask[:, 1:])
    rows = [((0, 1), "IMAGEIMAGE same?", "no")]
    folder = folder_of("qwen2_5_vl", root)
    with pytest.raises(ValueError, match="sequence 0 of the batch has images side by side"):
        Case(folder, rows=rows).logprobs(load_causal_lm(str(folder)))
    folder = folder_of("idefics3", root)
    case = Case(folder, rows=rows)
    case.compare(case.logprobs(load_causal_lm(str(folder))), case.plain_logprobs(plain_model(folder)))


def test_models_that_cannot_see_refuse_images(root: Path, tmp_path: Path) -> None:
    gemma = folder_of("gemma3", root)
    case = Case(gemma)
    with pytest.raises(ValueError, match="5 sequences of a batch have images"):
        case.logprobs(load_causal_lm(str(gemma), loading=ModelLoading(attention="buckets")))
    text = tiny_model(tmp_path / "text")
    with pytest.raises(ValueError, match="it reads text only"):
        case.logprobs(load_causal_lm(str(text)))
    with pytest.raises(ValueError, match="train_vision=True cannot be used"):
        load_causal_lm(str(text), loading=ModelLoading(train_vision=True))
    with pytest.raises(ValueError, match="no vision part"):
        load_causal_lm(str(text), lora=LoRA(modality="vision"))
    assert not sees_images(load_causal_lm(str(text)).config)
    with pytest.raises(ValueError, match="has no processor for images"):
        load_processor(str(text))


def test_processed_images_are_kept_up_to_a_size(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = folder_of("idefics3", root)
    config = load_causal_lm(str(folder)).config
    processor = VisionProcessor(str(folder), KNOWN["idefics3"], image_token_id(config))
    images = [picture(seed) for seed in range(4)]
    first = processor.read(images[0])
    assert processor.read(picture(0)) is first
    monkeypatch.setattr(vision, "CACHED_BYTES", 2 * vision._size(first))
    for image in images:
        processor.read(image)
    assert len(processor._read) == 2
    assert processor.read(images[0]) is not first
