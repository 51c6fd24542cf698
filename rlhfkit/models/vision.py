"""Models that see images: their processor, their forward passes, and which of their weights are for images.

A batch has images as references (:class:`~rlhfkit.data.images.Image`); pixels exist in a forward pass only. Tokens that
stand for an image are in the text already, as many as the processor says (:meth:`VisionProcessor.read`).

Shapes: B sequences, T tokens (longest sequence), N tokens of a packed row.
"""

import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from types import FunctionType
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from rlhfkit.data.batch import moved
from rlhfkit.data.images import Image
from rlhfkit.distributed import get_world_size, is_sharded
from rlhfkit.mesh import FORWARD
from rlhfkit.models.attention.layout import PackedLayout, on_cpu
from rlhfkit.models.attention.packed import has_packed_attention
from rlhfkit.models.forward import (
    ForwardPass,
    ModelInputs,
    PackedForward,
    PaddedForward,
    TokenizedBatch,
    UnpaddedBatch,
    forward_of,
    unwrap,
)
from rlhfkit.models.lora import vision_parameters

CACHED_BYTES = 2**28
"""Bytes of processed images that are kept: the forward passes of an iteration need the same ones."""


@dataclass(frozen=True)
class VisionFamily:
    """What is particular about a family's inputs."""

    token_types: str | None = None
    """Argument (B, T), 1 at the tokens of images; without it the model's results are silently wrong."""
    row_axis: bool = False
    """Whether the first axis of images is that of rows, each with several."""
    positions: bool = False
    """Whether tokens of an image have positions of their own, from the model's ``get_rope_index``."""
    both_ways: bool = False
    """Whether tokens of an image see later ones of it, so that sequences with images cannot be packed."""
    several: bool = True
    """Whether a row with several images is made of each of them alone."""


VISION_FAMILIES = {
    "gemma3": VisionFamily(token_types="token_type_ids", both_ways=True),
    "idefics3": VisionFamily(row_axis=True),
    "llava": VisionFamily(),
    "llava_onevision": VisionFamily(several=False),
    "qwen2_5_vl": VisionFamily(token_types="mm_token_type_ids", positions=True),
    "qwen3_vl": VisionFamily(token_types="mm_token_type_ids", positions=True),
    "smolvlm": VisionFamily(row_axis=True),
}
"""By ``model_type`` of the configuration; ``tests/models/test_vision.py`` compares each with Transformers."""


class ReadImage(NamedTuple):
    """An image as a model's processor reads it."""

    text: str
    """What takes the place of the processor's ``image_token`` in a text."""
    tokens: int
    """Tokens of the model's ``image_token_id`` in it."""
    inputs: dict[str, Tensor]
    """Arguments of the model."""


class VisionProcessor:
    """The processor of a model (Transformers' ``AutoProcessor``), for images alone.

    Args:
        name: Folder or hub name of the model.
        family: Of the model.
        token_id: The model's ``image_token_id``.
        trust_remote_code: Run Python code that comes with the processor.
    """

    def __init__(self, name: str, family: VisionFamily, token_id: int, *, trust_remote_code: bool = False) -> None:
        self.name = name
        self.family = family
        self.token_id = token_id
        self.trust_remote_code = trust_remote_code
        self._read: OrderedDict[str, ReadImage] = OrderedDict()
        self._bytes = 0

    @cached_property
    def processor(self) -> Any:
        """Transformers' processor, loaded when the first image is read."""
        return load_processor(self.name, trust_remote_code=self.trust_remote_code)

    @property
    def image_token(self) -> str:
        """What chat templates write for an image."""
        return cast(str, self.processor.image_token)

    def read(self, image: Image) -> ReadImage:
        """Process an image; the last ones are kept, up to :data:`CACHED_BYTES`.

        Raises:
            ValueError: With its place, if it cannot be read.
        """
        with _CACHE:
            found = self._read.get(image.key)
            if found is not None:
                self._read.move_to_end(image.key)
                return found
        picture = image.open()
        try:
            out = self.processor(
                text=[self.image_token], images=[[picture]], return_tensors="pt", return_text_replacement_offsets=True
            )
        except Exception as error:
            size = f"{picture.width} x {picture.height}"
            raise ValueError(f"{image.where} ({image}, {size} pixels) is refused by the processor: {error}") from error
        text = out.pop("text_replacement_offsets")[0][0]["replacement"]
        count = int((out["input_ids"] == self.token_id).sum())
        inputs = {name: torch.as_tensor(value) for name, value in out.items() if name not in _TEXT_INPUTS}
        if self.family.row_axis:
            inputs = {name: value[0] for name, value in inputs.items()}
        found = ReadImage(text, count, inputs)
        with _CACHE:
            if image.key not in self._read:  # another thread may have read it meanwhile
                self._read[image.key] = found
                self._bytes += _size(found)
            while self._bytes > CACHED_BYTES and len(self._read) > 1:
                self._bytes -= _size(self._read.popitem(last=False)[1])
        return found

    def probe(self, tokens: list[int], tokenizer: Any, model: nn.Module | None) -> tuple[list[int], tuple[Image, ...]]:
        """Tokens to compare a model and an engine on: these, without tokens of images, and a picture among them.

        There is none if the model was not loaded for images, or is ``None``.
        """
        texts = [token - (token == self.token_id) for token in tokens]
        if model is None or not isinstance(forward_of(unwrap(model)), _VisionForward):
            return texts, ()
        image = probe_image()
        seen: list[int] = tokenizer(self.read(image).text, add_special_tokens=False).input_ids
        return [*texts[:1], *seen, *texts[1:]], (image,)

    def prompts(self, images: Sequence[tuple[Image, ...]]) -> "VisionPrompts":
        """The prompts of a batch with these images, which the model continues from a cache."""
        return VisionPrompts(self, images)

    def arguments(self, images: Sequence[Image], device: torch.device) -> dict[str, Any]:
        """The model's arguments for some images in the order of their tokens; empty for none."""
        if not images:
            return {}
        each = [self.read(image).inputs for image in images]
        joined = {name: _joined([one[name] for one in each]) for name in each[0]}
        if self.family.row_axis:
            joined = {name: value[None] for name, value in joined.items()}
        return {name: moved(value, device) for name, value in joined.items()}


@cache
def probe_image() -> Image:
    """A picture of 64 x 64 pixels that stands for any."""
    import PIL.Image

    return Image.of(PIL.Image.linear_gradient("L").resize((64, 64)).convert("RGB"), "the image of a probe")


_CACHE = threading.Lock()
"""Held while the images that a processor keeps change: training, engines and episodes read them in several threads."""
_TEXT_INPUTS = ("input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids")


def _size(read: ReadImage) -> int:
    return sum(value.numel() * value.element_size() for value in read.inputs.values())


def _joined(values: list[Tensor]) -> Tensor:
    """Tensors one after another, with zeros behind where other axes differ."""
    longest = [max(sizes) for sizes in zip(*(value.shape[1:] for value in values), strict=True)]
    padded = []
    for value in values:
        missing = [longest[axis] - value.shape[axis + 1] for axis in reversed(range(len(longest)))]
        padded.append(pad(value, [each for size in missing for each in (0, size)]) if any(missing) else value)
    return torch.cat(padded)


def load_processor(name: str, *, trust_remote_code: bool = False) -> Any:
    """Load the processor of a model.

    Some families' are made with one for videos, which needs torchvision; without torchvision it is left out.

    Raises:
        ImportError: If it needs another package that is missing.
        ValueError: If there is none in the folder.
    """
    from importlib.util import find_spec

    import transformers
    from transformers import AutoConfig, AutoProcessor
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES

    try:
        config = AutoConfig.from_pretrained(name, trust_remote_code=trust_remote_code)
        known = PROCESSOR_MAPPING_NAMES.get(config.model_type)
        if known is not None and find_spec("torchvision") is None:
            return _without_video(getattr(transformers, known)).from_pretrained(name)
        found = AutoProcessor.from_pretrained(name, trust_remote_code=trust_remote_code)
        problem: Any = None if hasattr(found, "image_processor") else "there is a tokenizer alone"
    except OSError as error:
        found, problem = None, error
    if problem is not None:
        raise ValueError(
            f"{name} has no processor for images (preprocessor_config.json or processor_config.json): save the "
            f"model's AutoProcessor there ({problem})"
        )
    return found


@cache
def _without_video(kind: Any) -> Any:
    """The class of a processor that has none for videos."""
    if "video_processor" not in kind.get_attributes():
        return kind
    attributes = [name for name in kind.get_attributes() if name != "video_processor"]

    given = kind.__init__  # Transformers reads arguments from its code, so a function around it would hide them
    optional = len(given.__defaults__ or ())
    first = given.__code__.co_varnames[: given.__code__.co_argcount][-optional - 1]
    defaults = ((None,) if first == "video_processor" else ()) + (given.__defaults__ or ())
    made = FunctionType(given.__code__, given.__globals__, given.__name__, defaults, given.__closure__)
    members = {"__init__": made, "get_attributes": staticmethod(lambda: attributes), "__module__": kind.__module__}
    return type(kind.__name__, (kind,), members)


# --------------------------------------------------------------------------------------------------- forward passes


class _Places:
    """The images of a batch, and where their tokens are.

    Raises:
        ValueError: If a row has not as many tokens of images as its images have.
    """

    def __init__(self, batch: TokenizedBatch, processor: VisionProcessor) -> None:
        ids, mask = on_cpu(batch.input_ids), on_cpu(batch.attention_mask)
        given = cast(Any, batch).attachments
        self.rows: list[list[Image]] = [list(row) for row in given]
        self.types = ((ids == processor.token_id) & mask.bool()).long()
        """(B, T) int64, 1 at tokens of images, on the CPU."""
        self.starts: list[list[int]] = []
        """The first token of each image of each row."""
        if len(self.rows) != len(ids):
            raise ValueError(f"a batch of {len(ids)} sequences has attachments of {len(self.rows)}")
        for row, images in enumerate(self.rows):
            places = self.types[row].nonzero()[:, 0].tolist()
            counts = [processor.read(image).tokens for image in images]
            if sum(counts) != len(places):
                raise ValueError(
                    f"sequence {row} of the batch has {len(places)} tokens of images, and its {len(images)} images "
                    f"have {sum(counts)} ({', '.join(image.where for image in images[:3])}): it was cut inside of an "
                    "image, another processor wrote it, or such a token was sampled"
                )
            if len(images) > 1 and not processor.family.several:
                raise ValueError(
                    f"{images[1].where}: this family computes several images of a row otherwise than one, which is not "
                    "supported; give one image a row"
                )
            firsts = [sum(counts[:index]) for index in range(len(counts))]
            starts = [places[first] for first in firsts]
            if processor.family.positions and any(start - 1 in places for start in starts):
                raise ValueError(
                    f"sequence {row} of the batch has images side by side, which this family cannot tell apart: write "
                    "its tokens for begin and end around each, as its chat template does"
                )
            self.starts.append(starts)


class _Seeing:
    """What all ways to compute a model that sees share.

    Args:
        processor: The model's.
    """

    def __init__(self, processor: VisionProcessor) -> None:
        self.processor = processor

    def check_texts(self, batch: TokenizedBatch) -> None:
        """Raise ValueError if a batch without images has tokens of images, which the model would read as text."""
        rows = (on_cpu(batch.input_ids) == self.processor.token_id) & on_cpu(batch.attention_mask).bool()
        if bool(rows.any()):
            raise ValueError(
                f"sequence {int(rows.any(-1).nonzero()[0])} of a batch without images has tokens of images: what made "
                "the batch has dropped the images, or such a token was sampled"
            )

    def token_types(self, batch: TokenizedBatch, places: _Places | None) -> dict[str, Any]:
        """The argument that marks tokens of images, for families that have one."""
        name = self.processor.family.token_types
        if name is None:
            return {}
        return {
            name: torch.zeros_like(batch.input_ids) if places is None else moved(places.types, batch.input_ids.device)
        }


class _VisionForward(_Seeing):
    """Batches of which some have images and some have none, of ranks that may compute the vision part together.

    Args:
        processor: The model's.
        model: The bare model.
    """

    def __init__(self, processor: VisionProcessor, model: nn.Module) -> None:
        super().__init__(processor)
        self.model: Any = model

    def inputs(self, batch: TokenizedBatch, wanted: Tensor | None = None, request: tuple[Any, ...] = ()) -> ModelInputs:
        """The batch with its images; without any, but in :attr:`needs_image`, with one of which nothing is wanted."""
        forward = cast(ForwardPass, super())
        if has_attachments(batch):
            return forward.inputs(batch, wanted, request)
        self.check_texts(batch)
        if not self.needs_image:
            return forward.inputs(batch, wanted, request)
        image, (rows, width) = probe_image(), batch.input_ids.shape
        tokens = self.processor.read(image).tokens
        more = (0, max(tokens - width, 0), 0, 1)
        longer: Any = UnpaddedBatch(pad(batch.input_ids, more), [*[()] * rows, (image,)])
        longer.attention_mask = pad(batch.attention_mask.bool(), more)
        longer.input_ids[-1, :tokens], longer.attention_mask[-1, :tokens] = self.processor.token_id, True
        wanted = batch.attention_mask.bool() if wanted is None else wanted.bool()
        found = forward.inputs(longer, pad(wanted, more), request)
        row = found.wanted.div(longer.input_ids.shape[1], rounding_mode="floor")
        return found._replace(wanted=found.wanted - row * (longer.input_ids.shape[1] - width))

    @property
    def needs_image(self) -> bool:
        """Whether ranks would wait for one that computes no image.

        They add up gradients of a vision part that is trained, and gather the weights of one that ZeRO stage 3 divides.
        """
        trained = torch.is_grad_enabled()
        return get_world_size() > 1 and any(
            is_sharded(each) or (trained and each.requires_grad) for _, each in vision_parameters(self.model)
        )


class PaddedVision(_VisionForward, PaddedForward):
    """Padded rows with their images."""

    def attached(self, batch: TokenizedBatch, layout: PackedLayout | None) -> dict[str, Any]:
        """The images of all rows."""
        if not has_attachments(batch):
            return self.token_types(batch, None)
        places = _Places(batch, self.processor)
        images = [image for row in places.rows for image in row]
        return self.token_types(batch, places) | self.processor.arguments(images, batch.input_ids.device)


class PackedVision(_VisionForward, PackedForward):
    """A packed row with the images of its sequences; an image of a shared prefix goes through the tower once."""

    def shared(self, batch: TokenizedBatch, prefixes: Tensor) -> Tensor:
        """Prefixes end before the first image that differs: its tokens are the same, what they mean is not."""
        if not has_attachments(batch):
            return prefixes
        places = _Places(batch, self.processor)
        shortened = prefixes.clone()
        for row in range(1, len(places.rows)):
            before, images = places.rows[row - 1], places.rows[row]
            for index, (image, start) in enumerate(zip(images, places.starts[row], strict=True)):
                if index >= len(before) or before[index] != image:
                    shortened[row] = min(int(shortened[row]), start)
                    break
        return shortened

    def attached(self, batch: TokenizedBatch, layout: PackedLayout | None) -> dict[str, Any]:
        """Images whose tokens are in the row, and the positions of families that have their own."""
        if not has_attachments(batch) or layout is None:
            return {}
        places, device = _Places(batch, self.processor), batch.input_ids.device
        images = [
            image
            for row, prefix in enumerate(layout.prefixes)
            for image, start in zip(places.rows[row], places.starts[row], strict=True)
            if start >= prefix
        ]
        found = self.processor.arguments(images, device)
        if self.processor.family.positions:
            grids = [self.processor.read(image).inputs["image_grid_thw"] for row in places.rows for image in row]
            positions, _ = self.model.base_model.get_rope_index(
                on_cpu(batch.input_ids),
                mm_token_type_ids=places.types,
                image_grid_thw=torch.cat(grids),
                attention_mask=on_cpu(batch.attention_mask).long(),
            )
            found["position_ids"] = moved(positions, device).flatten(1)[:, layout.tokens][:, None]
        return found


class VisionPrompts(_Seeing):
    """Prompts of a batch with their images; padding may be on either side."""

    def __init__(self, processor: VisionProcessor, images: Sequence[tuple[Image, ...]]) -> None:
        super().__init__(processor)
        self.attachments = images
        self.shift: Tensor | None = None
        """(B, 1) int64, what positions behind images have beside the number of tokens; ``None``: nothing."""

    def arguments(self, model: Any, ids: Tensor, mask: Tensor) -> dict[str, Any]:
        """The model's arguments for (B, T) int64 ids and mask, but for these; sets :attr:`shift`."""
        batch: Any = UnpaddedBatch(ids, self.attachments)
        batch.attention_mask = mask.bool()
        if not has_attachments(batch):
            self.check_texts(batch)
            return self.token_types(batch, None)
        places = _Places(batch, self.processor)
        images = [image for row in places.rows for image in row]
        found = self.token_types(batch, places) | self.processor.arguments(images, ids.device)
        if self.processor.family.positions:
            positions, _ = model.base_model.get_rope_index(
                ids,
                mm_token_type_ids=places.types.to(ids.device),
                image_grid_thw=found["image_grid_thw"],
                attention_mask=mask,
            )
            last = positions.masked_fill(~batch.attention_mask, 0).amax((0, 2))[:, None]
            self.shift = last + 1 - mask.sum(1, keepdim=True)
            found["position_ids"] = positions
        return found


def has_attachments(batch: Any) -> bool:
    """Whether a row of a batch has an image."""
    return any(getattr(batch, "attachments", None) or ())


# ----------------------------------------------------------------------------------------------------------- models


def choose_vision_forward(model: nn.Module, *, trust_remote_code: bool = False) -> None:
    """Choose how a bare model of a :data:`VISION_FAMILIES` computes batches, by its attention, and hold it on it.

    ``trust_remote_code``: run Python code that comes with the processor.
    """
    hugging_face = cast(Any, model)
    family = VISION_FAMILIES[hugging_face.config.model_type]
    packs = has_packed_attention(model)
    if packs and family.both_ways:
        return  # asked for by name, for texts alone: images are refused
    name = hugging_face.name_or_path
    processor = vision_processor(name, hugging_face.config, trust_remote_code=trust_remote_code)
    setattr(model, FORWARD, (PackedVision if packs else PaddedVision)(processor, model))


def vision_processor(name: str, config: Any, *, trust_remote_code: bool = False) -> VisionProcessor:
    """The processor of a model's folder, one for all that use it, so that an image is processed once."""
    return _processor(name, config.model_type, image_token_id(config), trust_remote_code)


@cache
def _processor(name: str, kind: str, token_id: int, trust_remote_code: bool) -> VisionProcessor:
    return VisionProcessor(name, VISION_FAMILIES[kind], token_id, trust_remote_code=trust_remote_code)


def image_token_id(config: Any) -> int:
    """The token at whose places the model puts images."""
    found = getattr(config, "image_token_id", None)
    return int(config.image_token_index if found is None else found)
