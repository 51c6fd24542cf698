"""Images of prompts as vLLM 0.32 takes them, and what it has to have read.

vLLM is given one token for each image, in whose place its own processor writes the image's tokens, and the picture.
Tokens that are written already would be written again, and the log-probs be wrong without an error. So the tokens that
it says it has read are compared with the prompt's.
"""

import asyncio
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from rlhfkit.data.images import Image
from rlhfkit.models.vision import VisionProcessor
from rlhfkit.rollout.errors import RefusedRequest, RequestError
from rlhfkit.rollout.supervision.calls import Request

CACHED_IMAGES = 64
"""Encoded pictures that a rank keeps, as the samples of a group are asked for one after another."""


class SentImages(NamedTuple):
    """The images of a sequence on their way to an engine."""

    token_ids: list[int]
    """The sequence with one token for each image."""
    encoded: list[bytes]
    """Their files."""


class ImageRequests:
    """Makes requests to a model that sees images.

    Args:
        processor: The model's.
        tokenizer: The run's.
    """

    engine_arguments = {"load_format": "auto", "mm_processor_cache_gb": 0}
    """Of ``vllm.EngineArgs``. Random first weights would also replace the mean of pixels in Qwen's models. Of processed
    images vLLM has two lists, in its front process and its engine, which differ after a pause while requests arrive
    (``MultiModalCacheMissError``); :class:`ReadPrompts` has what a group needs."""

    def __init__(self, processor: VisionProcessor, tokenizer: Any) -> None:
        self.processor = processor
        self._tokenizer = tokenizer
        self._read = lru_cache(CACHED_IMAGES)(self._read_once)

    def request(self, request: Request, images: Sequence[Image]) -> Request:
        """A request with the images of its prompt; the token that stands for an image is never sampled."""
        token_ids, arguments = request
        seen = {"images": self.sent(token_ids, images)} if images else {}
        return token_ids, arguments | {"logit_bias": {self.processor.token_id: -100.0}} | seen

    def sent(self, token_ids: Sequence[int], images: Sequence[Image]) -> SentImages:
        """What an engine is sent for a sequence with these images.

        Raises:
            RequestError: If the sequence has not the tokens of the images, in their order.
        """
        (placeholder,) = self._tokens(self.processor.image_token)
        left, sent = list(token_ids), []
        for image in images:
            written, _ = self._read(image)
            place = _find(written, left)
            if place is None:
                raise RequestError(
                    f"{image.where} ({image}) has {len(written)} tokens, which are not where they belong in a prompt: "
                    "another processor wrote them, or the text around them was encoded together with them"
                )
            sent += [*left[:place], placeholder]
            left = left[place + len(written) :]
        return SentImages([*sent, *left], [self._read(image)[1] for image in images])

    def _tokens(self, text: str) -> list[int]:
        found: list[int] = self._tokenizer(text, add_special_tokens=False).input_ids
        return found

    def _read_once(self, image: Image) -> tuple[list[int], bytes]:
        """The tokens of an image, and its file."""
        return self._tokens(self.processor.read(image).text), image.encoded_rgb()


def _find(part: Sequence[int], whole: Sequence[int]) -> int | None:
    """Where a part begins in a sequence for the first time."""
    places = (place for place, token in enumerate(whole) if token == part[0])
    return next((place for place in places if whole[place : place + len(part)] == part), None)


class ReadPrompts:
    """What vLLM's processor makes of the prompts with images of one call, in the engine's process.

    The samples of a group have one prompt, which is read once.
    """

    def __init__(self, renderer: Any) -> None:
        """``renderer`` is vLLM's."""
        self._renderer = renderer
        self._known: list[tuple[SentImages, asyncio.Future[Any]]] = []

    async def read(self, token_ids: Sequence[int], sent: SentImages) -> dict[str, Any]:
        """Return a prompt as an engine computes it, with processed images; RefusedRequest if it is not these tokens."""
        reading = next((reading for known, reading in self._known if known == sent), None)
        if reading is None:
            reading = asyncio.ensure_future(self._renderer.render_cmpl_async([_vllm_prompt(sent)]))
            self._known.append((sent, reading))
        (prompt,) = await asyncio.shield(reading)  # others may wait for it when this request is cancelled
        check_read(token_ids, prompt["prompt_token_ids"])
        return dict(prompt)


def _vllm_prompt(sent: SentImages) -> dict[str, Any]:
    """A sequence with images as vLLM takes it."""
    pictures = [Image(encoded, f"image {number} of a request").open() for number, encoded in enumerate(sent.encoded)]
    return {"prompt_token_ids": sent.token_ids, "multi_modal_data": {"image": pictures}}


def check_read(token_ids: Sequence[int], read: Sequence[int]) -> None:
    """Raise RefusedRequest if vLLM has read other tokens than the prompt's."""
    if list(token_ids) != list(read):
        raise RefusedRequest(
            f"vLLM has read {len(read)} tokens of a prompt with images, where the trainer has {len(token_ids)} or "
            "others: its processor and the trainer's differ (packages, or files in the model's folder)"
        )
