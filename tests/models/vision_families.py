"""Tiny random models of each family that sees images, with their processors; an image of 28 x 28 has 4 to 95 tokens."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import torch
import transformers
from tiny_models import tiny_tokenizer

from rlhfkit.data.images import Image
from rlhfkit.data.types import Prompt
from rlhfkit.models import vision

SIDE = 28
SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
TEXT: dict[str, Any] = SIZES | {"vocab_size": 128, "num_key_value_heads": 1, "max_position_embeddings": 512}
TEXT |= {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None}
TEXT |= {"initializer_range": 0.1, "tie_word_embeddings": True}
TOWER: dict[str, Any] = SIZES | {"image_size": SIDE, "patch_size": 7}
QWEN_TOWER: dict[str, Any] = {"depth": 2, "hidden_size": 64, "intermediate_size": 128, "num_heads": 2}
QWEN_TOWER |= {"out_hidden_size": 64, "patch_size": 4, "temporal_patch_size": 2, "spatial_merge_size": 2}
TEMPLATE = (
    "{% for m in messages %}{{ m.role[0] }}:{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for p in m.content %}{% if p.type == 'image' %}IMAGE{% else %}{{ p.text }}{% endif %}{% endfor %}{% endif %}"
    "{% if m.role == 'assistant' %}{{ '<eos>' }}{% else %}{{ '\\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}"
)


def processor_class(name: str) -> Any:
    """A class of processors that needs no torchvision."""
    return vision._without_video(getattr(transformers, name))


def qwen(three: bool) -> tuple[Any, Any]:
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    words = tiny_tokenizer(
        image_token="<|image_pad|>",
        video_token="<|video_pad|>",
        vision_start_token="<|vision_start|>",
        vision_end_token="<|vision_end|>",
    )
    ids = {f"{name}_token_id": words.convert_tokens_to_ids(f"<|{name}|>") for name in ("vision_start", "vision_end")}
    ids |= {f"{name}_token_id": words.convert_tokens_to_ids(f"<|{name}_pad|>") for name in ("image", "video")}
    images = Qwen2VLImageProcessorPil(
        patch_size=4, merge_size=2, temporal_patch_size=2, size={"shortest_edge": 64, "longest_edge": SIDE * SIDE * 4}
    )
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [8, 4, 4]}
    if three:
        config: Any = transformers.Qwen3VLConfig(
            text_config=TEXT | {"head_dim": 32, "rope_parameters": rope | {"mrope_interleaved": True}},
            vision_config=QWEN_TOWER | {"num_position_embeddings": 64, "deepstack_visual_indexes": [0]},
            tie_word_embeddings=True,
            **ids,
        )
        kinds: Any = transformers.Qwen3VLForConditionalGeneration, processor_class("Qwen3VLProcessor")
    else:
        config = transformers.Qwen2_5_VLConfig(
            text_config=TEXT | {"rope_parameters": rope},
            vision_config=QWEN_TOWER | {"window_size": 16, "fullatt_block_indexes": [1]},
            tie_word_embeddings=True,
            **ids,
        )
        kinds = transformers.Qwen2_5_VLForConditionalGeneration, processor_class("Qwen2_5_VLProcessor")
    template = TEMPLATE.replace("IMAGE", "<|vision_start|><|image_pad|><|vision_end|>")
    return kinds[0](config), kinds[1](images, words, chat_template=template)


def gemma3() -> tuple[Any, Any]:
    from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

    words = tiny_tokenizer(boi_token="<start_of_image>", image_token="<image_soft_token>", eoi_token="<end_of_image>")
    images = Gemma3ImageProcessorPil(size={"height": SIDE, "width": SIDE})
    config = transformers.Gemma3Config(
        text_config=TEXT | {"head_dim": 32, "sliding_window": 512, "query_pre_attn_scalar": 32},
        vision_config=TOWER | {"vision_use_head": False},
        mm_tokens_per_image=4,
        boi_token_index=words.convert_tokens_to_ids("<start_of_image>"),
        eoi_token_index=words.convert_tokens_to_ids("<end_of_image>"),
        image_token_index=words.convert_tokens_to_ids("<image_soft_token>"),
        initializer_range=0.1,
        tie_word_embeddings=True,
    )
    model = transformers.Gemma3ForConditionalGeneration(config)
    projection = model.model.multi_modal_projector.mm_input_projection_weight  # zero: a new model is blind
    torch.nn.init.normal_(projection, std=0.3)
    template = TEMPLATE.replace("IMAGE", "<start_of_image>")
    return model, transformers.Gemma3Processor(images, words, chat_template=template, image_seq_length=4)


def idefics3(smol: bool) -> tuple[Any, Any]:
    from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
    from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil

    words = tiny_tokenizer(
        image_token="<image>",
        fake_image_token="<fake_token_around_image>",
        global_image_token="<global-img>",
        end_of_utterance_token="<end_of_utterance>",
    )
    kind: Any = SmolVLMImageProcessorPil if smol else Idefics3ImageProcessorPil
    size = {"longest_edge": SIDE * (1 + smol)}  # SmolVLM as it is published: divided into tiles
    images = kind(size=size, max_image_size={"longest_edge": SIDE}, do_image_splitting=smol)
    config: Any = transformers.SmolVLMConfig if smol else transformers.Idefics3Config
    made = config(
        text_config=TEXT | {"model_type": "llama"},
        vision_config=TOWER | {"initializer_range": 0.1},
        image_token_id=words.convert_tokens_to_ids("<image>"),
        scale_factor=2,
        tie_word_embeddings=True,
        pad_token_id=0,
    )
    model: Any = transformers.SmolVLMForConditionalGeneration if smol else transformers.Idefics3ForConditionalGeneration
    processor = processor_class("SmolVLMProcessor") if smol else transformers.Idefics3Processor
    template = TEMPLATE.replace("IMAGE", "<image>")
    return model(made), processor(images, words, image_seq_len=4, chat_template=template)


def llava(onevision: bool) -> tuple[Any, Any]:
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
    from transformers.models.llava_onevision.image_processing_pil_llava_onevision import LlavaOnevisionImageProcessorPil

    words = tiny_tokenizer(image_token="<image>", video_token="<video>")
    token, template = words.convert_tokens_to_ids("<image>"), TEMPLATE.replace("IMAGE", "<image>")
    tower = TOWER | {"model_type": "clip_vision_model", "projection_dim": 64}
    side = {"height": SIDE, "width": SIDE}
    if not onevision:
        config: Any = transformers.LlavaConfig(
            text_config=TEXT | {"model_type": "llama"},
            vision_config=tower,
            image_token_index=token,
            image_seq_length=16,
            tie_word_embeddings=True,
        )
        processor = transformers.LlavaProcessor(
            CLIPImageProcessorPil(size={"shortest_edge": SIDE}, crop_size=side),
            words,
            patch_size=7,
            vision_feature_select_strategy="default",
            num_additional_image_tokens=1,
            chat_template=template,
        )
        return transformers.LlavaForConditionalGeneration(config), processor
    config = transformers.LlavaOnevisionConfig(
        text_config=TEXT | {"model_type": "qwen2"},
        vision_config=tower | {"model_type": "siglip_vision_model", "vision_use_head": False},
        image_token_index=token,
        video_token_index=words.convert_tokens_to_ids("<video>"),
        image_grid_pinpoints=[[SIDE, SIDE], [SIDE, 2 * SIDE]],
        tie_word_embeddings=True,
    )
    processor = processor_class("LlavaOnevisionProcessor")(
        LlavaOnevisionImageProcessorPil(size=side, image_grid_pinpoints=[[SIDE, SIDE], [SIDE, 2 * SIDE]]),
        words,
        num_image_tokens=16,
        vision_feature_select_strategy="full",
        chat_template=template,
    )
    return transformers.LlavaOnevisionForConditionalGeneration(config), processor


VISION_FAMILIES: dict[str, Callable[[], tuple[Any, Any]]] = {
    "gemma3": gemma3,
    "idefics3": lambda: idefics3(False),
    "llava": lambda: llava(False),
    "llava_onevision": lambda: llava(True),
    "qwen2_5_vl": lambda: qwen(False),
    "qwen3_vl": lambda: qwen(True),
    "smolvlm": lambda: idefics3(True),
}


def save_vision_model(name: str, folder: Path) -> Path:
    """Write the model of a family and its processor to a folder."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model, processor = VISION_FAMILIES[name]()
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = 1, 0
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return folder


def picture(seed: int, *, wide: bool = False) -> Image:
    """A picture of noise."""
    width = 3 * SIDE if wide else SIDE
    pixels = np.random.default_rng(seed).integers(0, 255, (SIDE, width, 3), dtype=np.uint8)
    return Image.of(PIL.Image.fromarray(pixels), f"image {seed}")


def prompts(folder: Path, *, several: bool) -> list[Prompt]:
    """One text with one picture and another, a text with none, and with ``several`` one with two."""
    processor = vision.load_processor(str(folder))
    made = []
    for index, seeds in enumerate([(0,), (1,), (), *([(2, 0)] if several else [])]):
        text = "which colour? " + " ".join(processor.image_token for _ in seeds)
        images = tuple(map(picture, seeds))
        given: Any = {"images": [[image.open() for image in images]]} if seeds else {}
        ids = processor(text=[text], **given)["input_ids"][0]
        made.append(Prompt(index, list(ids), attachments=images))
    return made
