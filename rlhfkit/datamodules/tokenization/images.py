"""``VisionFormatter``: prompts and conversations with images, for models that see.

Images come from the columns ``images`` (a list) or ``image``, or from parts of chat messages: ``{"type": "image"}``,
with or without an ``image`` of its own, or OpenAI's ``{"type": "image_url", "image_url": {"url": "data:..."}}``. Parts
without one of their own are given those of the column, in order. Texts of messages may have :data:`PLACE` where one
belongs, as for verl and LLaMA-Factory. Where nothing says so, images stand in front of the first text of the user, as
in TRL.

Their tokens are written here, as many as the model's processor says; pixels are computed in forward passes only.
"""

import copy
import itertools
from collections.abc import Mapping, Sequence
from typing import Any, Self

from rlhfkit.data.images import Image
from rlhfkit.datamodules.tokenization.chat import PromptFormatter, as_message
from rlhfkit.datamodules.tokenization.sources import IMAGES
from rlhfkit.models.vision import VisionProcessor

_PARTS = ("image", "image_url")
"""``type`` of parts of a message that are images."""
PLACE = "<image>"
"""Stands for an image of the column in texts of messages that the model has not written."""
_SENTINEL = "\ue001"


class VisionFormatter(PromptFormatter):
    """A :class:`PromptFormatter` whose texts have the tokens of images.

    Args:
        tokenizer: A Hugging Face tokenizer.
        processor: The model's.
        allow_urls: Fetch images from ``http`` and ``https`` URLs.
        **kwargs: Arguments of :class:`PromptFormatter`.
    """

    sees_images = True

    def __init__(self, tokenizer: Any, processor: VisionProcessor, *, allow_urls: bool = False, **kwargs: Any) -> None:
        super().__init__(tokenizer, **kwargs)
        self.processor = processor
        self.allow_urls = allow_urls
        self._where = "the row"
        self._takes_texts: dict[str, bool] = {}  # by template

    def style(self) -> list[Any]:
        """What texts depend on besides the tokenizer: the sizes to which images are brought, too."""
        return [*super().style(), self.processor.processor.image_processor.to_dict()]

    def for_row(self, row: Mapping[str, Any], where: str = "the row") -> Self:
        """Return the formatter for one row, with the images of its columns.

        Raises ValueError if a column holds something else, the row has both columns, or an image cannot be had.
        """
        self.special_pattern  # noqa: B018  (copies share it)
        changed = copy.copy(self._with_columns(row))
        given = [name for name in IMAGES if row.get(name)]
        where = where.removesuffix(",")
        if len(given) > 1:
            raise ValueError(f"{where} has columns {' and '.join(map(repr, given))}: give its images in one of them")
        found = row[given[0]] if given else []
        values = found if isinstance(found, list | tuple) else [found]
        changed.images = tuple(self._image(value, where, number) for number, value in enumerate(values))
        changed._where = where
        return changed

    def _image(self, value: Any, where: str, number: int) -> Image:
        return Image.of(value, f"image {number} of {where}", allow_urls=self.allow_urls)

    # ------------------------------------------------------------------------------------------------- messages

    def as_messages(self, content: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Chat messages with ``role`` and ``content``: text, or a list of texts and images where there are images."""
        numbers = itertools.count(len(self.images))
        return [self._with_parts(message, numbers) for message in content]

    def _with_parts(self, message: Mapping[str, Any], numbers: "itertools.count[int]") -> dict[str, Any]:
        parts = message.get("content")
        if not isinstance(parts, list) or not any(_is_image(part) for part in parts):
            return as_message(message)
        texts = [part for part in parts if not _is_image(part)]
        known = as_message({**message, "content": texts})
        known["content"] = [
            {"type": "image", "image": self._of_part(part, numbers)}
            if _is_image(part)
            else {"type": "text", "text": part["text"]}
            for part in parts
        ]
        return known

    def _of_part(self, part: Mapping[str, Any], numbers: "itertools.count[int]") -> Image | None:
        """The image of a part; ``None``: it is one of the column's."""
        value = part.get("image") or part.get("url") or part.get("path") or part.get("image_url")
        if isinstance(value, Mapping) and value.get("url"):
            value = value["url"]
        return None if value is None else self._image(value, self._where, next(numbers))

    def messages(self, content: Any) -> list[Any]:
        """Chat messages as :meth:`PromptFormatter.messages` makes them, with the images of the row's columns in them.

        Raises:
            ValueError: If there are more or fewer of these than parts for them.
        """
        messages = super().messages(content)
        if self.images and not any(map(_images, messages)):
            messages = [self._with_places(message) for message in messages]
        waiting = [part for message in messages for part in _images(message) if part["image"] is None]
        if not waiting and self.images and not self.attachments(messages):
            return self._in_front(messages)
        if len(waiting) != len(self.images):
            raise ValueError(
                f"{self._where} has {len(self.images)} images in its column, and its messages have {len(waiting)} "
                'parts {"type": "image"} for them: give each its part, or no part at all, which puts them in front'
            )
        left = iter(self.images)
        return [
            {**message, "content": [self._filled(part, left) for part in message["content"]]}
            if _images(message)
            else message
            for message in messages
        ]

    @staticmethod
    def _with_places(message: dict[str, Any]) -> dict[str, Any]:
        """A message with a part for an image of the column in place of each :data:`PLACE` of its text."""
        content = message["content"]
        if message["role"] == "assistant" or not isinstance(content, str) or PLACE not in content:
            return message
        first, *texts = content.split(PLACE)
        parts: list[dict[str, Any]] = [{"type": "text", "text": first}]
        for text in texts:
            parts += [{"type": "image", "image": None}, {"type": "text", "text": text}]
        return {**message, "content": [part for part in parts if part["type"] == "image" or part["text"]]}

    @staticmethod
    def _filled(part: dict[str, Any], left: Any) -> dict[str, Any]:
        return {**part, "image": next(left)} if part["type"] == "image" and part["image"] is None else part

    def _in_front(self, messages: list[Any]) -> list[Any]:
        """The messages with all images of the column in front of the first text of the user."""
        first = next((place for place, message in enumerate(messages) if message["role"] == "user"), None)
        if first is None:
            raise ValueError(f"{self._where} has images and no message of the user that they would belong to")
        images = [{"type": "image", "image": image} for image in self.images]
        asked = {**messages[first], "content": [*images, {"type": "text", "text": messages[first]["content"]}]}
        return [*messages[:first], asked, *messages[first + 1 :]]

    def attachments(self, messages: Sequence[Mapping[str, Any]]) -> tuple[Any, ...]:
        """The images of messages, in the order of their tokens."""
        return tuple(part["image"] for message in messages for part in _images(message) if part["image"] is not None)

    def images_of(self, content: Any) -> tuple[Any, ...]:
        """The images of text or chat messages of the row."""
        return self.attachments(self.messages(content)) if self.templated(content) else self.images

    # ---------------------------------------------------------------------------------------------------- texts

    def handle_special_tokens(self, value: Any, *, templated: bool) -> Any:
        """As :meth:`PromptFormatter.handle_special_tokens`; a text without a template gets its images, too."""
        handled = super().handle_special_tokens(value, templated=templated)
        if isinstance(value, str) and not templated:
            return self._placed(handled)
        if isinstance(handled, list) and handled and isinstance(handled[0], Mapping) and "role" in handled[0]:
            return [self._for_template(message) for message in handled]
        return handled

    def _placed(self, text: str) -> str:
        """A text without a template, with its images where it has their tokens, or in front of it."""
        token = self.processor.image_token
        if self.images and token not in text:
            text = token * len(self.images) + text
        return self.expanded(text, self.images)[0]

    def _for_template(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """A message as templates take it: parts without images themselves, and lists only if it reads no texts."""
        content = message["content"]
        if isinstance(content, list):
            return {**message, "content": [{"type": "image"} if _is_image(part) else part for part in content]}
        return dict(message) if self._reads_texts() else {**message, "content": [{"type": "text", "text": content}]}

    def _reads_texts(self) -> bool:
        """Whether the template writes content that is a text; several families' take lists of parts only."""
        template = self.chat_template
        if template not in self._takes_texts:
            from jinja2 import TemplateError

            asked = [{"role": "user", "content": _SENTINEL}]
            try:
                written = self.tokenizer.apply_chat_template(
                    asked, tokenize=False, **self.arguments | {"chat_template": template}
                )
            except (TemplateError, TypeError):
                written = ""
            self._takes_texts[template] = _SENTINEL in written
        return self._takes_texts[template]

    def render(self, messages: Sequence[Any], *, generation: bool) -> str:
        """Render chat messages as text with the tokens of their images."""
        text = super().render(messages, generation=generation)
        return self.expanded(text, self.attachments(messages))[0]

    def expand(
        self, text: str, spans: Sequence[tuple[int, int]], messages: Sequence[Any]
    ) -> tuple[str, list[tuple[int, int]]]:
        """A text as the template wrote it, and ranges in it, with the tokens of images."""
        return self.expanded(text, self.attachments(messages), spans)

    def expanded(
        self, text: str, images: Sequence[Image], spans: Sequence[tuple[int, int]] = ()
    ) -> tuple[str, list[tuple[int, int]]]:
        """Replace the token of each image by what the processor writes for it; ranges of characters move along.

        Raises:
            ValueError: If the text has not as many such tokens as there are images, or one cannot be read.
        """
        token = self.processor.image_token
        pieces = text.split(token)
        if len(pieces) - 1 != len(images):
            raise ValueError(
                f"{self._where} has {len(images)} images, and its text has {len(pieces) - 1} times {token!r}, which "
                "stands for one: the chat template does not write images, or the text has that token itself"
            )
        if not images:
            return text, list(spans)
        written = [pieces[0]]
        moves = [(0, 0)]  # from this character on, by that many
        place = len(pieces[0])
        for image, piece in zip(images, pieces[1:], strict=True):
            new = self.processor.read(image).text
            written += [new, piece]
            place += len(token)
            moves.append((place, moves[-1][1] + len(new) - len(token)))
            place += len(piece)

        def moved(character: int) -> int:
            return character + next(by for begin, by in reversed(moves) if character >= begin)

        return "".join(written), [(moved(start), moved(end)) for start, end in spans]

    def collapse(self, text: str, images: Sequence[Any]) -> str:
        """A text of :meth:`prompt` with one token in place of each image, as the data has it."""
        token = self.processor.image_token
        for image in images:
            text = text.replace(self.processor.read(image).text, token)
        return text


def _is_image(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("type") in _PARTS


def _images(message: Mapping[str, Any]) -> list[Any]:
    """The parts of a message that are images."""
    content = message.get("content")
    return [part for part in content if _is_image(part)] if isinstance(content, list) else []
