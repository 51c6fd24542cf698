"""``Image``: a picture of a row as a reference: a path, or encoded bytes. Pixels exist where a model needs them only.

Records, caches, dumps and checkpoints keep the reference. Two references of one :attr:`Image.key` are one picture.
"""

import base64
import binascii
import contextlib
import hashlib
import io
import os
import warnings
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, Self

MAX_PIXELS = 2**26
"""Pixels of the largest picture that is opened; below what Pillow itself refuses."""
URL_BYTES = 2**26
"""Bytes of the largest file that is fetched."""
URL_TIMEOUT = 30.0
"""Seconds without an answer after which a URL is given up."""

_MODES = ("1", "L", "P", "RGB", "RGBA", "RGBX", "LA", "PA", "CMYK", "YCbCr", "HSV", "LAB")


class Image:
    """A picture that is opened when needed.

    Args:
        source: Path of its file, or the file's bytes.
        where: Its place for messages, such as ``rows.jsonl, row 3, image 0``.
    """

    def __init__(self, source: Path | bytes, where: str = "the image") -> None:
        self.source = source
        self.where = where

    @classmethod
    def of(cls, value: Any, where: str, *, folder: str | Path | None = None, allow_urls: bool = False) -> Self:
        """Read the value of a column or of a part of a chat message.

        Args:
            value: A path, bytes of a file, a Pillow image, a ``data:`` URL with base64, a mapping with ``bytes`` or
                ``path`` as ``datasets`` has them, or an :class:`Image`.
            where: Its place for messages.
            folder: What relative paths are relative to; ``None``: the current folder.
            allow_urls: Fetch ``http`` and ``https`` URLs, now.

        Raises:
            FileNotFoundError: If there is no such file.
            ValueError: If the value is none of these, or a URL that is not allowed or not answered.
        """
        if isinstance(value, cls):
            return value
        if isinstance(value, Mapping):
            value = value.get("bytes") or value.get("path")
        if isinstance(value, bytes | bytearray):
            return cls(bytes(value), where)
        if isinstance(value, str) and value.startswith("data:"):
            return cls(_of_data_url(value, where), where)
        if isinstance(value, str) and value.startswith(("http://", "https://")):
            if not allow_urls:
                raise ValueError(
                    f"{where} is a URL, which is not fetched unless it is allowed: {value[:80]!r}. Download the "
                    "pictures first and give their paths, or allow it: allow_image_urls=True"
                )
            return cls(_fetched(value, where), where)
        if isinstance(value, str | os.PathLike):
            path = Path(folder or ".", Path(value).expanduser())
            if not path.is_file():
                raise FileNotFoundError(f"{where}: there is no file {str(path)!r}")
            return cls(path, where)
        if callable(getattr(value, "save", None)) and hasattr(value, "mode"):  # Pillow's, which may not be imported
            return cls(_of_pillow(value, where), where)
        raise ValueError(
            f"{where} must be a path, bytes of a file, a Pillow image or a data: URL, it is {type(value).__name__}: "
            f"{value!r:.80}"
        )

    @classmethod
    def of_plain(cls, plain: str) -> Self:
        """Inverse of :meth:`plain`; a file need not exist yet."""
        where = "an image of a saved row"
        return cls(_of_data_url(plain, where) if plain.startswith("data:") else Path(plain), where)

    def plain(self) -> str:
        """The reference as text: the path, or the bytes in a ``data:`` URL."""
        if isinstance(self.source, Path):
            return str(self.source)
        return f"data:{self._media_type};base64,{base64.b64encode(self.source).decode()}"

    @property
    def _media_type(self) -> str:
        begins = self.encoded()[:12]
        known = {b"\x89PNG": "png", b"\xff\xd8\xff": "jpeg", b"GIF8": "gif", b"BM": "bmp", b"RIFF": "webp"}
        return next((f"image/{name}" for magic, name in known.items() if begins.startswith(magic)), "image/tiff")

    def thumbnail(self, side: int = 160) -> str:
        """A ``data:`` URL of the picture with sides of at most ``side`` pixels, below 100 kB: PNG or JPEG."""
        picture = self.open()
        picture.thumbnail((side, side))
        encoded = {}
        for kind in ("png", "jpeg"):
            file = io.BytesIO()
            picture.save(file, format=kind, quality=80)
            encoded[kind] = file.getvalue()
        kind = min(encoded, key=lambda name: len(encoded[name]))
        return f"data:image/{kind};base64,{base64.b64encode(encoded[kind]).decode()}"

    @cached_property
    def key(self) -> str:
        """The same for the same picture: of bytes their SHA-256, of a file its path, size and time of change."""
        if isinstance(self.source, bytes):
            return hashlib.sha256(self.source).hexdigest()
        status = self.source.stat()
        return f"{self.source.resolve()}:{status.st_size}:{status.st_mtime_ns}"

    def encoded(self) -> bytes:
        """The bytes of the file."""
        return self.source if isinstance(self.source, bytes) else self.source.read_bytes()

    def encoded_rgb(self) -> bytes:
        """A file in which every reader finds the pixels of :meth:`open`: its own, or a PNG.

        Readers differ in what they make of a camera's orientation and of what is transparent.
        """
        import PIL.Image

        own, picture = self.encoded(), self.open()
        found = PIL.Image.open(io.BytesIO(own))
        if found.mode == "RGB" and _orientation(found) == _UPRIGHT:
            return own
        file = io.BytesIO()
        picture.save(file, format="PNG")
        return file.getvalue()

    def open(self) -> Any:
        """The Pillow image in RGB, upright as its camera's orientation (EXIF) says; the first of an animated one.

        Raises:
            ValueError: With its place, if it cannot be read, is larger than :data:`MAX_PIXELS`, or has numbers in place
                of colours.
        """
        import PIL.Image

        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", PIL.Image.DecompressionBombWarning)  # ours has a lower limit
                opened = PIL.Image.open(io.BytesIO(self.encoded()))
                width, height = opened.size
                if width * height > MAX_PIXELS:
                    raise ValueError(
                        f"{self.where} has {width} x {height} pixels, more than {MAX_PIXELS}: make it smaller"
                    )
                _check_mode(opened, self.where)
                return _turned(opened).convert("RGB")
        except (OSError, SyntaxError, PIL.Image.DecompressionBombError) as error:
            raise ValueError(f"{self.where} ({self}) cannot be read as a picture: {error}") from error

    def __eq__(self, other: object) -> bool:
        """Whether both are the same picture."""
        return isinstance(other, Image) and self.key == other.key

    def __hash__(self) -> int:
        """Of the key."""
        return hash(self.key)

    def __repr__(self) -> str:
        """Path, or number of bytes."""
        return f"Image({len(self.source)} bytes)" if isinstance(self.source, bytes) else f"Image({str(self.source)!r})"


_ORIENTATION, _UPRIGHT = 0x0112, 1
"""The tag of EXIF, and its usual value."""


def _orientation(picture: Any) -> int:
    """How a camera was held; upright if that cannot be read."""
    with contextlib.suppress(Exception):
        return int(picture.getexif().get(_ORIENTATION, _UPRIGHT))
    return _UPRIGHT


def _turned(picture: Any) -> Any:
    """A picture as its camera's orientation says."""
    import PIL.ImageOps

    return picture if _orientation(picture) == _UPRIGHT else PIL.ImageOps.exif_transpose(picture)


def _check_mode(image: Any, where: str) -> None:
    if image.mode not in _MODES:
        raise ValueError(
            f"{where} has mode {image.mode!r} ({image.width} x {image.height}), which has no colours: convert it to "
            "'RGB' or 'L' first"
        )


def _of_pillow(picture: Any, where: str) -> bytes:
    """A file of an image of Pillow, upright: the file would not have its camera's orientation."""
    _check_mode(picture, where)
    file = io.BytesIO()
    try:
        kept = _turned(picture)
        kept = kept.convert("RGB") if kept.mode == "HSV" else kept  # in no format
        kept.save(file, format="PNG" if kept.mode in ("1", "L", "P", "RGB", "RGBA", "LA") else "TIFF")
    except (OSError, SyntaxError, ValueError) as error:
        raise ValueError(f"{where} ({picture}) cannot be read as a picture: {error}") from error
    return file.getvalue()


def _of_data_url(url: str, where: str) -> bytes:
    head, comma, data = url.partition(",")
    try:
        if not comma or not head.endswith(";base64"):
            raise ValueError("it has no ';base64,'")
        return base64.b64decode(data, validate=True)
    except (ValueError, binascii.Error) as error:
        raise ValueError(f"{where} is no data: URL with base64 ({error}): {url[:60]!r}") from error


def _fetched(url: str, where: str) -> bytes:
    from urllib.request import urlopen

    try:
        with urlopen(url, timeout=URL_TIMEOUT) as answer:
            data: bytes = answer.read(URL_BYTES + 1)
    except OSError as error:
        raise ValueError(f"{where}: {url[:200]} was not answered: {error}") from error
    if len(data) > URL_BYTES:
        raise ValueError(f"{where}: {url[:200]} has more than {URL_BYTES} bytes")
    return data
