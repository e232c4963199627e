"""Pictures resized by several threads have Pillow's pixels, and nobody waits for another's."""

import itertools
import threading
import time
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image as Pillow

from engine.images import processor as processors
from engine.images import resize, threads
from engine.images.picture_file import PictureFile
from engine.images.processor import PixelCache, prepare
from engine.images.resize import resized
from engine.images.threads import share_out
from tests.engine.images.files import saved
from tests.engine.images.folders import CASES, load_processor, picture
from tests.engine.images.test_processors import write_folder

SIDES = (1, 2, 3, 7, 16, 31, 48, 97)


@pytest.mark.parametrize("filter", range(6), ids=lambda filter: Pillow.Resampling(filter).name)
def test_parts_have_pillows_pixels(filter: int) -> None:
    """Parts that lack the neighbours at their edges, or passes in another order than Pillow's:
    pixels that are nearly right."""
    for number, (width, height) in enumerate(itertools.product(SIDES, SIDES)):
        image = picture(width, height, seed=number)
        for size in ((16, 48), (31, 7), (width, 33), (33, height), (width, height), (1, 1)):
            whole = image.resize(size, filter)
            for parts in (1, 2, 3, 4, 200):
                pixels = resized(image, size, filter, parts)
                assert pixels.dtype == np.uint8 and np.array_equal(pixels, whole)


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
    width: int, height: int, size: tuple[int, int], filter: int
) -> None:
    """Random noise of full contrast, in which every coefficient shows, at sizes of photographs."""
    noise = np.random.default_rng(width).integers(0, 256, (height, width, 3), np.uint8)
    image = Pillow.fromarray(noise)
    assert np.array_equal(resized(image, size, filter), image.resize(size, filter))


@given(
    st.tuples(*[st.integers(1, 70)] * 4),
    st.sampled_from([filter for filter in Pillow.Resampling if filter]),  # not NEAREST
    st.integers(2, 80),
)
@settings(max_examples=200, deadline=None)
def test_parts_of_any_size(sides: tuple[int, int, int, int], filter: int, parts: int) -> None:
    """Bug: widths that are no multiple of four pixels, or parts of a single line."""
    width, height, *size = sides
    noise = np.random.default_rng(width).integers(0, 256, (height, width, 3), np.uint8)
    image = Pillow.fromarray(noise)
    pixels = resized(image, (size[0], size[1]), filter, parts)
    assert np.array_equal(pixels, image.resize((size[0], size[1]), filter))


def test_photographs_are_resized_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: sizes that are common, and yet resized by one thread."""
    passes: list[int] = []
    share_out = resize.share_out
    monkeypatch.setattr(
        resize, "share_out", lambda work, parts: passes.append(len(parts)) or share_out(work, parts)
    )
    for sides in ((1920, 1080, 1920, 1088), (1080, 1920, 1092, 1932), (4032, 3024, 1540, 1155)):
        resized(Pillow.new("RGB", sides[:2]), sides[2:], Pillow.Resampling.BICUBIC)
    resized(Pillow.new("RGB", (3024, 4032)), (1155, 1540), Pillow.Resampling.BICUBIC)
    assert passes == [7, 8, 8, 46, 46, 46, 46]


def test_pixels_are_not_copied() -> None:
    """Bug: a view that outlives the threads, for which the bytes of all pixels are copied: new
    pages, which cost a fifth of a picture's time."""
    image = Pillow.new("RGB", (1920, 1080))
    tracemalloc.start()
    try:
        pixels = resized(image, (1920, 1088), Pillow.Resampling.BICUBIC)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 2 * pixels.nbytes  # of which a quarter are parts of two or four threads


def test_small_pictures_take_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: a hand-over that costs more than the resize, in a server of many small pictures."""
    monkeypatch.setattr(resize, "share_out", lambda *_: pytest.fail("in parts"))
    resized(picture(640, 427), (640, 416), Pillow.Resampling.BICUBIC)


def test_a_picture_beside_others_is_not_divided(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: a router that has other pictures to decode pays for parts that save no time."""
    divided: list[int] = []
    share_out = resize.share_out
    monkeypatch.setattr(
        resize,
        "share_out",
        lambda work, parts: divided.append(len(parts)) or share_out(work, parts),
    )
    image = picture(64, 43)
    with threads.prepares():  # this picture
        resized(image, (32, 32), Pillow.Resampling.BICUBIC, 4)
        assert divided == [4, 4]
        with threads.prepares():
            small = resized(image, (32, 32), Pillow.Resampling.BICUBIC, 4)
    assert np.array_equal(small, image.resize((32, 32), Pillow.Resampling.BICUBIC))
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


def test_threads_divide_a_large_picture(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: a thread that waits for a helper's part, while others are not begun."""
    used: list[int] = []
    both = threading.Barrier(2)  # parts that are computed at the same time
    share_out = resize.share_out

    def watched(work: Any, parts: Any) -> None:
        def part(item: Any) -> None:
            both.wait(30)
            used.append(threading.get_ident())
            work(item)

        share_out(part, parts)

    pool = ThreadPoolExecutor(1)
    monkeypatch.setattr(threads, "_helpers", lambda: pool)
    monkeypatch.setattr(resize, "share_out", watched)
    with pool:
        resized(picture(64, 43), (64, 44), Pillow.Resampling.BICUBIC, 8)
    assert len(used) == 8 and {used.count(thread) for thread in used} == {4}


def test_a_new_large_picture_is_hashed_beside_its_resize(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bugs: a hash that nothing runs beside; a picture that comes again and is resized in vain; a
    digest that depends on the order."""
    write_folder(tmp_path, CASES["Qwen3-VL"])
    processor = load_processor(tmp_path)
    assert processor is not None
    beside: list[bool] = []

    def share_out(work: Any, items: Any) -> Any:
        beside.append(True)
        return threads.share_out(work, items)

    monkeypatch.setattr(processors, "share_out", share_out)
    cache = PixelCache()
    new, same_sample = picture(1024, 600), picture(1024, 600)
    same_sample.putpixel((1023, 599), (1, 2, 3))
    assert processors._sample([new]) == processors._sample([same_sample]) != b""
    layout = processor.layout(1024, 600)
    first = prepare(processor, new, layout, 0, cache)
    assert beside == [True]
    whole = processor.pixels(new, layout).tobytes()
    assert first.pixels == whole
    resize_of = processor.pixels
    monkeypatch.setattr(processor, "pixels", lambda *_: pytest.fail("resized again"))
    assert prepare(processor, new.copy(), layout, 0, cache) == first
    monkeypatch.setattr(processor, "pixels", resize_of)
    other = prepare(processor, same_sample, layout, 0, cache)
    assert other.digest != first.digest and other.pixels != first.pixels
    assert beside == [True]
    with threads.prepares():  # another picture
        assert prepare(processor, new, layout, 0) == first
    assert beside == [True]
    prepare(processor, picture(64, 43), processor.layout(64, 43), 0)
    assert beside == [True]


def test_samples_are_forgotten_with_their_pixels() -> None:
    """Bug: samples that grow without end."""
    cache = PixelCache(limit=10)
    for number in range(4):
        cache.put(bytes([number]), bytes(5), b"sample")
        cache.put(bytes([number]), bytes(5), b"sample")
    assert cache.may_have(b"sample") and cache._samples == {b"sample": 2}
    cache.put(b"large", bytes(10), b"other")
    assert not cache.may_have(b"sample") and cache._samples == {b"other": 1}


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
