"""References to images: what they are read from, and what is refused."""

import base64
import io
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import PIL.Image
import PIL.ImageCms
import pytest
import torch

from rlhfkit.data import images
from rlhfkit.data.batch import TokenExample, collate_tokens
from rlhfkit.data.formats import (
    DistilledExample,
    PreferenceExample,
    StepwiseExample,
    UnpairedExample,
    collate_distilled,
    collate_preferences,
    collate_stepwise,
    collate_unpaired,
)
from rlhfkit.data.images import Image


def encoded(mode: str = "RGB", kind: str = "PNG") -> bytes:
    file = io.BytesIO()
    PIL.Image.new(mode, (5, 3), 1 if mode != "RGB" else (200, 10, 20)).save(file, kind)
    return file.getvalue()


def test_a_picture_is_read_from_path_bytes_pillow_and_data_urls(tmp_path: Path) -> None:
    content = encoded()
    (tmp_path / "a.png").write_bytes(content)
    url = "data:image/png;base64," + base64.b64encode(content).decode()
    values: list[Any] = [content, {"bytes": content, "path": "gone.png"}, url, PIL.Image.open(io.BytesIO(content))]
    values += [str(tmp_path / "a.png"), tmp_path / "a.png", {"bytes": None, "path": str(tmp_path / "a.png")}]
    found = [Image.of(value, "row 0") for value in values]
    assert {(one.open().mode, one.open().size, one.open().getpixel((4, 2))) for one in found} == {
        ("RGB", (5, 3), (200, 10, 20))
    }
    assert len({one.key for one in found[:3]}) == 1
    assert found[4] == found[5] == Image.of("a.png", "row 0", folder=tmp_path)
    assert Image.of(found[0], "elsewhere") is found[0]


def test_pictures_are_upright_and_files_mean_the_same_to_every_reader() -> None:
    held, file = PIL.Image.Exif(), io.BytesIO()
    held[0x0112] = 6  # the camera was turned
    PIL.Image.new("RGB", (5, 3), (200, 10, 20)).save(file, "JPEG", exif=held)
    turned = Image(file.getvalue())
    assert turned.open().size == (3, 5)
    assert PIL.Image.open(io.BytesIO(turned.encoded_rgb())).size == (3, 5)
    file = io.BytesIO()
    PIL.Image.new("RGBA", (5, 3), (200, 10, 20, 0)).save(file, "PNG")
    (seen,) = {Image(one).open().getpixel((0, 0)) for one in (file.getvalue(), Image(file.getvalue()).encoded_rgb())}
    assert seen == (200, 10, 20)
    assert PIL.Image.open(io.BytesIO(Image(file.getvalue()).encoded_rgb())).mode == "RGB"
    assert Image(encoded()).encoded_rgb() == encoded()
    opened = Image.of(PIL.Image.open(io.BytesIO(turned.source)), "row 0")
    assert opened.open().size == (3, 5)  # as the same file, though Pillow saves no orientation
    assert Image.of(opened.open(), "row 0").open().size == (3, 5)


@pytest.mark.parametrize("mode", images._MODES)
def test_pictures_of_pillow_have_their_colours_in_each_mode_that_is_taken(mode: str) -> None:
    shown = PIL.Image.new("RGB", (5, 3), (200, 10, 20))
    between = shown.convert("L") if mode in ("LA", "PA") else shown  # not at once, for Pillow
    made = (
        PIL.ImageCms.profileToProfile(shown, *_PROFILES, outputMode="LAB") if mode == "LAB" else between.convert(mode)
    )
    found, expected = Image.of(made, "row 0").open(), made.convert("RGB")
    assert found.mode == "RGB"
    assert found.getpixel((4, 2)) == expected.getpixel((4, 2))


_PROFILES = PIL.ImageCms.createProfile("sRGB"), PIL.ImageCms.createProfile("LAB")


@pytest.mark.parametrize("kind", ["GIF", "WEBP"])
def test_an_animated_picture_is_its_first(kind: str) -> None:
    file = io.BytesIO()
    first, second = (PIL.Image.new("RGB", (5, 3), colour) for colour in ((255, 0, 0), (0, 0, 255)))
    first.save(
        file, kind, save_all=True, append_images=[second], duration=10, **({"lossless": True} if kind == "WEBP" else {})
    )
    for image in (Image(file.getvalue()), Image(Image(file.getvalue()).encoded_rgb())):
        assert image.open().getpixel((0, 0)) == (255, 0, 0)


def test_urls_are_fetched_if_allowed_and_limited_in_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.png").write_bytes(encoded())
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(tmp_path))) as server:
        Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_address[1]}"
        found = Image.of(f"{address}/a.png", "row 3", allow_urls=True)
        assert found.source == encoded()
        assert Image.of_plain(found.plain()) == found  # it is not fetched again where it is kept
        with pytest.raises(ValueError, match=r"row 3: http://\S*/b.png was not answered: .* 404"):
            Image.of(f"{address}/b.png", "row 3", allow_urls=True)
        monkeypatch.setattr(images, "URL_BYTES", 20)
        with pytest.raises(ValueError, match=r"row 3: http://\S*/a.png has more than 20 bytes"):
            Image.of(f"{address}/a.png", "row 3", allow_urls=True)
        server.shutdown()
    with pytest.raises(ValueError, match=r"row 3: http://\S*/a.png was not answered"):
        Image.of(f"{address}/a.png", "row 3", allow_urls=True)


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *arguments: Any) -> None:
        """Print nothing."""


def test_errors_name_the_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(FileNotFoundError, match="row 3, image 1: there is no file"):
        Image.of("gone.png", "row 3, image 1", folder=tmp_path)
    with pytest.raises(ValueError, match="row 3 is a URL, which is not fetched unless it is allowed"):
        Image.of("https://example.com/a.png", "row 3")
    with pytest.raises(ValueError, match="row 3 must be a path, bytes of a file, a Pillow image"):
        Image.of(17, "row 3")
    with pytest.raises(ValueError, match="row 3 is no data: URL with base64"):
        Image.of("data:image/png,abc", "row 3")
    with pytest.raises(ValueError, match=r"row 3 .* cannot be read as a picture"):
        Image.of(encoded()[:40], "row 3").open()
    with pytest.raises(ValueError, match=r"row 3 \(<PIL.*cannot be read as a picture"):
        Image.of(PIL.Image.open(io.BytesIO(encoded()[:50])), "row 3")
    with pytest.raises(ValueError, match=r"row 3 has mode 'I;16' \(5 x 3\), which has no colours"):
        Image.of(encoded("I;16"), "row 3").open()
    monkeypatch.setattr(images, "MAX_PIXELS", 14)
    with pytest.raises(ValueError, match="row 3 has 5 x 3 pixels, more than 14"):
        Image.of(encoded(), "row 3").open()


def test_batches_of_all_kinds_have_the_images_of_their_rows() -> None:
    image, none = Image(b"picture"), torch.zeros(1, 2)
    seen, plain = TokenExample([1, 2], [False, True], (image,)), TokenExample([1, 3], [False, True])
    batches = [
        collate_tokens([seen, plain]),
        collate_preferences([PreferenceExample(seen, plain)]),
        collate_unpaired([UnpairedExample(seen, True), UnpairedExample(plain, False)]),
        collate_stepwise([StepwiseExample(seen, [1.0]), StepwiseExample(plain, [0.0])]),
        collate_distilled([DistilledExample(seen, none, none.int()), DistilledExample(plain, none, none.int())]),
    ]
    assert [batch.attachments for batch in batches] == [((image,), ())] * 5
