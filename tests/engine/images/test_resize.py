"""Pictures resized by several threads have Pillow's pixels, and nobody waits for another's."""

import itertools
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from PIL import Image as Pillow

from engine.images import resize, threads
from engine.images.picture_file import PictureFile
from engine.images.processor import prepare
from engine.images.resize import resized
from engine.images.threads import share_out
from tests.engine.images.files import saved
from tests.engine.images.folders import CASES, load_processor, picture
from tests.engine.images.test_processors import write_folder

SIDES = (1, 2, 3, 7, 16, 31, 48, 97)


@pytest.mark.parametrize("filter", range(6), ids=lambda filter: Pillow.Resampling(filter).name)
def test_strips_have_pillows_pixels(filter: int) -> None:
    """Strips that lack the neighbours at their edges, or passes in another order than Pillow's:
    pixels that are nearly right."""
    for number, (width, height) in enumerate(itertools.product(SIDES, SIDES)):
        image = picture(width, height, seed=number)
        for size in ((16, 48), (31, 7), (width, 33), (33, height), (width, height), (1, 1)):
            whole = image.resize(size, filter).tobytes()
            for strips in (2, 3, 4, 200):
                strip = resized(image, size, filter, strips)
                assert (strip.size, strip.mode, strip.tobytes()) == (size, "RGB", whole)


@pytest.mark.parametrize("filter", [Pillow.Resampling.BICUBIC, Pillow.Resampling.LANCZOS])
@pytest.mark.parametrize(
    ("width", "height", "size"),
    [
        (1920, 1080, (1920, 1088)),
        (1920, 1080, (896, 896)),
        (1081, 1921, (1092, 1932)),
        (640, 427, (640, 416)),
        (301, 3001, (2048, 2048)),
    ],
    ids=str,
)
def test_large_pictures_have_pillows_pixels(
    width: int, height: int, size: tuple[int, int], filter: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Random noise of full contrast, in which every coefficient shows, at sizes of photographs."""
    noise = np.random.default_rng(width).integers(0, 256, (height, width, 3), np.uint8)
    image = Pillow.fromarray(noise)
    monkeypatch.setattr(resize, "threads", lambda: 4)
    assert resized(image, size, filter).tobytes() == image.resize(size, filter).tobytes()


def test_photographs_are_resized_in_strips(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: sizes that are common, and yet resized by one thread."""
    monkeypatch.setattr(resize, "threads", lambda: 4)
    passes: list[str] = []
    for name in ("_along_rows", "_along_columns"):
        monkeypatch.setattr(resize, name, lambda image, *_, name=name: passes.append(name) or image)
    for sides in ((1920, 1080, 1920, 1088), (1080, 1920, 1092, 1932), (4032, 3024, 1540, 1155)):
        resized(Pillow.new("RGB", sides[:2]), sides[2:], Pillow.Resampling.BICUBIC)
    resized(Pillow.new("RGB", (3024, 4032)), (1155, 1540), Pillow.Resampling.BICUBIC)
    assert passes == ["_along_columns", *["_along_rows", "_along_columns"] * 3]


def test_small_pictures_take_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: a hand-over that costs more than the resize, in a server of many small pictures."""
    monkeypatch.setattr(resize, "threads", lambda: 4)
    monkeypatch.setattr(resize, "share_out", lambda *_: pytest.fail("in strips"))
    resized(picture(640, 427), (640, 416), Pillow.Resampling.BICUBIC)


def test_a_picture_beside_others_is_not_divided(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: a router that has other pictures to decode pays for strips that save no time."""
    divided: list[int] = []
    monkeypatch.setattr(resize, "share_out", lambda work, parts: divided.append(len(parts)))
    image = picture(64, 43)
    with threads.prepares():  # this picture
        resized(image, (32, 32), Pillow.Resampling.BICUBIC, 4)
        assert divided == [4, 4]
        with threads.prepares():
            small = resized(image, (32, 32), Pillow.Resampling.BICUBIC, 4)
    assert small.tobytes() == image.resize((32, 32), Pillow.Resampling.BICUBIC).tobytes()
    assert divided == [4, 4]


def test_a_prepared_picture_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bugs: pictures that are decoded are not seen by those that are resized; one whose file is
    broken is counted for ever."""
    write_folder(tmp_path, CASES["Qwen3-VL"])
    processor = load_processor(tmp_path)
    assert processor is not None
    seen: list[int] = []

    def decode(file: PictureFile) -> None:
        seen.append(threads._prepared)
        raise ZeroDivisionError

    monkeypatch.setattr(PictureFile, "decode", decode)
    file = PictureFile.read(saved(picture(64, 64), "PNG"))
    with pytest.raises(ZeroDivisionError):
        prepare(processor, file, processor.layout(64, 64), 0)
    assert seen == [1] and threads._prepared == 0 and threads.alone()


def test_busy_helpers_are_not_waited_for() -> None:
    """A picture stood behind all strips of those before it, although its own thread was free."""
    release = threading.Event()
    helpers = [threads._helpers().submit(release.wait, 30) for _ in range(8)]
    try:
        begin = time.monotonic()
        assert share_out(lambda item: item * 2, range(5)) == [0, 2, 4, 6, 8]
        assert time.monotonic() - begin < 10
    finally:
        release.set()
        for helper in helpers:
            helper.cancel()


def test_work_may_share_out_its_own_parts() -> None:
    """Helpers that wait for strips which only helpers would take never end."""

    def sums(item: int) -> int:
        return sum(share_out(lambda part: part + item, range(4)))

    assert share_out(sums, range(8)) == [6 + 4 * item for item in range(8)]


def test_an_error_in_a_strip_is_raised() -> None:
    """Bug: a picture with a strip of undefined pixels, or an error while others still write."""
    running = threading.Event()

    def work(item: int) -> int:
        if item == 1:
            raise MemoryError
        running.set()
        return item

    with pytest.raises(MemoryError):
        share_out(work, range(4))
    assert running.is_set()
