import asyncio
import base64
import gc
import resource
import sys

import numpy as np
import pytest
from PIL import Image as Pillow

from deployments.images.intake import MAX_PIXEL_BYTES, ImageIntake, ImageSource, PlacedPicture
from deployments.images.limits import ImageLimits
from engine.errors import InvalidRequest, Overloaded
from engine.images.data_url import decode_base64
from engine.images.picture_file import PictureFile
from tests.deployments.images.fake_processor import FakeProcessor
from tests.engine.images.files import bomb, gradient, saved
from tests.loop_gaps import gaps, least

PROCESSOR = FakeProcessor()
PNG = saved(gradient(), "PNG")


def data_url(data: bytes, head: str = "data:image/png;base64,") -> str:
    return head + base64.b64encode(data).decode()


async def read(source: ImageSource, limits: ImageLimits | None = None) -> PictureFile:
    intake = ImageIntake(limits)
    held = intake.memory.take(0)
    (file,) = await intake.read([source], held)
    held.release()
    return file


@pytest.mark.parametrize(
    "url",
    [
        data_url(PNG),
        data_url(PNG, "DATA:text/plain;charset=utf-8;BASE64,"),  # the type is not trusted
        data_url(PNG, "data:;base64,"),
        data_url(PNG).replace("+", "-").replace("/", "_", 10**6).replace("data:image_png", "data:"),
    ],
)
async def test_data_urls(url: str) -> None:
    """Clients write media types and alphabets of all sorts."""
    file = await read(ImageSource("here", url))
    assert file.data == PNG and (file.width, file.height) == (40, 30)


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("data:image/png," + "abc", "with ;base64"),
        ("data:image/png;base64", "with ;base64"),
        ("data:image/png;base64,", "is empty"),
        (data_url(PNG) + "=", "no base64"),
        (data_url(PNG)[:-1], "no base64"),
        (data_url(PNG)[:40] + "\n" + data_url(PNG)[40:], "no base64"),
        (data_url(PNG)[:40] + "é" + data_url(PNG)[41:], "no base64"),
        ("file:///etc/passwd", "must be a data: URL"),
        ("ftp://example.com/x.png", "must be a data: URL"),
        ("hello", "must be a data: URL"),
        ("https://example.com/x.png", "this server fetches none (images.hosts)"),
        (data_url(b"hello"), "is no PNG, JPEG, WebP, GIF or BMP file"),
        (data_url(PNG[:60]), "is truncated or broken"),
    ],
)
async def test_urls_that_are_refused(url: str, says: str) -> None:
    """An error names the image and what to do, never what a library says."""
    with pytest.raises(InvalidRequest) as refused:
        file = await read(ImageSource("messages[0].content[1].image_url.url", url))
        file.decode()
    where = "" if "truncated" in says else "messages[0].content[1].image_url.url "
    assert refused.value.message.startswith(where) and says in refused.value.message
    assert refused.value.param == (where.strip() or None)


def test_padding_between_slices_is_refused() -> None:
    """A slice that ends with padding would hide that more follows."""
    half = base64.b64encode(bytes(2**20 // 4 * 3 - 1)).decode()
    assert len(half) == 2**20 and half.endswith("=")
    with pytest.raises(InvalidRequest, match="no base64"):
        decode_base64(half + half, 2**24)
    whole = base64.b64encode(bytes(2**21)).decode()
    assert decode_base64(whole, 2**24) == bytes(2**21)


async def test_limits_of_bytes() -> None:
    """A file is refused by its length before it is decoded."""
    with pytest.raises(InvalidRequest, match="has more than 100 bytes"):
        await read(ImageSource("x", data_url(PNG)), ImageLimits(file_bytes=100))


def placed(data: bytes, place: str = "x") -> PlacedPicture:
    file = PictureFile.read(data)
    return PlacedPicture([ImageSource(place)], [file], PROCESSOR.layout(file.width, file.height), 3)


async def test_pixels_are_counted_until_nobody_holds_them() -> None:
    """Pixels stay for failover: uncounted they would fill the router."""
    intake = ImageIntake(ImageLimits(memory_bytes=40_000))
    held = intake.memory.take(1000)
    images = await intake.pixels([placed(PNG), placed(PNG)], PROCESSOR, held)
    size = len(images[0].pixels)
    assert size == 3 * 40 * 24 and images[0].start == 4 and images[0].size == 15
    assert images[0].digest == images[1].digest
    assert intake.memory.held == 1000 + 2 * size
    second = intake.memory.take(0)
    with pytest.raises(Overloaded):
        await intake.pixels([placed(PNG)] * 16, PROCESSOR, second)
    second.release()
    del images
    gc.collect()
    assert intake.memory.held == 0


async def test_a_frame_holds_a_requests_pixels(monkeypatch: pytest.MonkeyPatch) -> None:
    """More pixels than a frame takes would cost the router its replica."""
    from deployments.transport.channel import ChannelLimits

    assert ChannelLimits().max_frame > MAX_PIXEL_BYTES
    intake = ImageIntake()
    monkeypatch.setattr("deployments.images.intake.MAX_PIXEL_BYTES", 3000)
    with pytest.raises(InvalidRequest, match="1000 pixels after resizing, these have 1920"):
        await intake.pixels([placed(PNG), placed(PNG)], PROCESSOR, intake.memory.take(0))


async def test_pages_of_pictures_are_used_again() -> None:
    """Bug: a quarter of a picture's cost was the kernel's, for pages that had just been freed."""
    intake = ImageIntake()
    Pillow.core.reset_stats()
    for number in range(4):  # files that differ
        file = PNG + bytes([number])
        await intake.pixels([placed(file)], PROCESSOR, intake.memory.take(0))
    stats = Pillow.core.get_stats()
    assert stats["reused_blocks"] > 4 and stats["blocks_cached"] <= 4


async def test_a_broken_picture_is_named() -> None:
    """Bug: an error of one among several images does not name it."""
    intake = ImageIntake()
    broken = PlacedPicture(
        [ImageSource("messages[3]")], [PictureFile.read(bomb(200)[:-40])], PROCESSOR.layout(9, 9), 0
    )
    with pytest.raises(InvalidRequest, match=r"^messages\[3\] is truncated or broken$"):
        await intake.pixels([placed(PNG), broken], PROCESSOR, intake.memory.take(0))
    assert intake.memory.held == 3 * 64 + 3 * 40 * 24  # until the request itself ends


@pytest.mark.slow
async def test_a_flood_of_bombs_leaves_the_loop_alone() -> None:
    """Decoding on the loop, or a large copy with the lock held, would stop all streams."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(5e-4)  # the router's
    try:
        data = bomb(9000)
        intake = ImageIntake()
        url = data_url(data)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

        async def ask() -> None:
            held = intake.memory.take(0)
            (file,) = await intake.read([ImageSource("x", url)], held)
            layout = PROCESSOR.layout(file.width, file.height)
            await intake.pixels(
                [PlacedPicture([ImageSource("x")], [file], layout, 0)], PROCESSOR, held
            )

        async def flood() -> float:
            asked = [asyncio.create_task(ask()) for _ in range(12)]
            lengths = await gaps(lambda: all(task.done() for task in asked))
            await asyncio.gather(*asked)
            return float(np.percentile(lengths, 99))

        gap = await least(flood, 0.05)
        grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    finally:
        sys.setswitchinterval(interval)
    assert gap < 0.05
    assert grown < 2.5 * 4 * 9000 * 9000  # one bomb at a time, not twelve
