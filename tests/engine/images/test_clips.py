"""Clips become the frames, sizes and texts that transformers' processors make of them."""

import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize as resize_frame
from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor
from transformers.models.qwen3_vl.video_processing_qwen3_vl import smart_resize as resize_clip

from engine.errors import InvalidRequest
from engine.images.data_url import frame_urls
from engine.images.expand import Place, surround
from engine.images.layout import ImageError, is_fps
from engine.images.picture_file import PictureFile
from engine.images.processor import ImageProcessor, PixelCache, clip_layouts, clips_of, prepare
from tests.engine.images.files import saved
from tests.engine.images.folders import CASES, load_processor, picture, save_clip_settings
from tests.engine.images.test_processors import write_folder

SIZES = [(64, 43), (33, 900), (9, 20), (192, 108), (108, 240), (641, 427)]


def processor(name: str, folder: Path, **settings: Any) -> ImageProcessor:
    write_folder(folder, CASES[name])
    save_clip_settings(folder, CASES[name])
    file = folder / "video_preprocessor_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | settings))
    loaded = load_processor(folder)
    assert loaded is not None
    return loaded


@pytest.mark.parametrize("name", ["Qwen2-VL", "Qwen2.5-VL", "Qwen3-VL", "Qwen3.5"])
@pytest.mark.parametrize("count", [2, 3, 5, 8])
def test_sizes_and_tokens(name: str, count: int, tmp_path: Path) -> None:
    """Bugs: a limit of a whole clip that is taken for one of a frame; an odd frame that is lost."""
    ours = processor(name, tmp_path)
    size = json.loads((tmp_path / "video_preprocessor_config.json").read_text())["size"]
    limits = {"min_pixels": size["shortest_edge"], "max_pixels": size["longest_edge"]}
    unit = 2 * CASES[name].settings.get("patch_size", 14)
    for width, height in SIZES:
        layouts = clip_layouts(ours, [(width, height)] * count, 2.0)
        if name.startswith("Qwen2"):
            want = resize_frame(height, width, unit, **limits)
            assert len(layouts) == 1
        else:
            want = resize_clip(count, height, width, 2, unit, **limits)
            assert len(layouts) == math.ceil(count / 2)
        assert {layout.shape[1:] for layout in layouts} == {want}
        area = want[0] * want[1] // unit**2
        assert sum(layout.size for layout in layouts) == math.ceil(count / 2) * area
        frames = [index for layout in layouts for index in layout.frames]
        assert frames == [*range(count), *[count - 1] * (count % 2)]
        assert all(layout.token_ids == (91,) * layout.size for layout in layouts)


@pytest.mark.parametrize(("count", "fps"), [(2, 2.0), (5, 1.5), (6, 24.0)])
def test_times_are_texts(count: int, fps: float, tmp_path: Path) -> None:
    """Bugs: the time of the first frame of a patch, or two pairs of marks around a piece."""
    ours = processor("Qwen3-VL", tmp_path)
    clips = clips_of(ours)
    assert clips is not None and clips.outer == ("<|vision_start|>", "<|vision_end|>")
    place = Place.of(ours, clip_layouts(ours, [(64, 64)] * count, fps), clip=True)
    theirs: Any = Qwen3VLProcessor._calculate_timestamps
    mark = "<|vision_start|><|video_pad|><|vision_end|>"
    times = "".join(
        f"<{seconds:.1f} seconds>{mark}" for seconds in theirs(None, [*range(count)], fps)
    )
    image = Place.of(ours, [ours.layout(64, 64)], clip=False)
    text = f"a{mark}b<|image_pad|>c"
    assert surround(text, [place, image]) == f"a{times}b<|image_pad|>c"
    assert surround(text, [image, place]) == text, "which is refused later"
    bare = surround("a<|video_pad|>b", [place])  # a template without marks of its own
    assert bare == f"a{times}b"


def test_time_of_a_whole_clip(tmp_path: Path) -> None:
    """Bug: frames of Qwen2.5-VL that are a second apart whatever their number a second."""
    (layout,) = clip_layouts(processor("Qwen2.5-VL", tmp_path), [(64, 64)] * 4, 8.0)
    assert layout.time_step == 4 * 2 / 8
    (layout,) = clip_layouts(processor("Qwen2-VL", tmp_path), [(64, 64)] * 4, 8.0)
    assert layout.time_step == 1


def test_capped_frames(tmp_path: Path) -> None:
    """Bug: a key of the file that says that a short clip's frames are no larger than others."""
    sizes = [(640, 640)] * 4
    wide = {"size": {"shortest_edge": 1024, "longest_edge": 32 * 32 * 64}, "max_video_tokens": 9}
    for capped, size in ((False, 16), (True, 9)):
        ours = processor("Qwen3-VL", tmp_path, cap_pixels_per_frame=capped, **wide)
        assert clip_layouts(ours, sizes, 2.0)[0].size == size


def test_pixels_and_names(tmp_path: Path) -> None:
    """Bugs: frames in another order have the same key; a clip that is cut differently has another
    clip's pixels; a file is decoded once more than it is shown."""
    ours = processor("Qwen3-VL", tmp_path)
    frames = [picture(64, 48, seed) for seed in range(3)]
    layouts = clip_layouts(ours, [frame.size for frame in frames], 2.0)
    first, last = (prepare(ours, frames, layout, 0) for layout in layouts)
    size = len(last.pixels) // 2
    assert last.pixels[:size] == last.pixels[size:] and first.pixels[:size] != first.pixels[size:]
    still = ours.pixels(frames[0], layouts[0])
    assert np.array_equal(still.reshape(-1), np.frombuffer(first.pixels[:size], np.uint8))
    swapped = prepare(ours, [frames[1], frames[0], frames[2]], layouts[0], 0)
    assert swapped.digest != first.digest
    files = [PictureFile.read(saved(frame, "PNG")) for frame in frames]
    cache = PixelCache()
    assert prepare(ours, files, layouts[0], 0, cache).pixels == first.pixels
    broken = [files[0], PictureFile.read(saved(frames[1], "PNG")[:-60])]
    with pytest.raises(InvalidRequest, match="frame 1 is truncated or broken"):
        prepare(ours, broken, layouts[0], 0)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ([(64, 64)], "has 1 frames, and the model takes 2 to 6"),
        ([], "has 0 frames"),
        ([(64, 64)] * 7, "has 7 frames"),
        ([(64, 64), (64, 65)], "frame 1 of the clip is 64 x 65, the first is 64 x 64"),
        ([(2000, 5)] * 2, "at most 200 times"),
        ([(0, 5)] * 2, "no pixels"),
    ],
)
def test_what_is_refused(sizes: list[tuple[int, int]], message: str, tmp_path: Path) -> None:
    """Bug: frames that the tower cannot lay side by side reach it."""
    for name in ("Qwen2.5-VL", "Qwen3-VL"):
        with pytest.raises(ImageError, match=message):
            clip_layouts(processor(name, tmp_path, max_frames=6), sizes, 2.0)


@pytest.mark.parametrize("name", ["Gemma 3", "GLM-4.1V", "PaddleOCR-VL", "SmolVLM", "Kimi K2.5"])
def test_other_families_take_none(name: str, tmp_path: Path) -> None:
    """Bug: a family whose pictures are Qwen's takes clips that its tower was not trained with."""
    write_folder(tmp_path, CASES[name])
    loaded = load_processor(tmp_path)
    assert loaded is not None and clips_of(loaded) is None
    with pytest.raises(ImageError, match="takes no clips"):
        clip_layouts(loaded, [(64, 64)] * 2, 2.0)


def test_frames_in_one_url() -> None:
    """Bug: a file of a clip is decoded as a picture, or its URL is shown whole in an error."""
    assert frame_urls("data:video/jpeg;base64,AA,BB") == [
        "data:video/jpeg;base64,AA",
        "data:video/jpeg;base64,BB",
    ]
    for url in (
        "data:video/mp4;base64,AA",
        "http://host/a.mp4",
        "x,a,b",
        "",
        f"data:{'x' * 300},a,b",
    ):
        with pytest.raises(InvalidRequest, match="must be a list of frames") as error:
            frame_urls(url)
        assert not re.search("x{99}", error.value.message)
    wrong = (0, -1, True, "2", None, math.nan, math.inf, 1001)
    assert [is_fps(value) for value in (0.1, 2, 1000, *wrong)] == [True] * 3 + [False] * len(wrong)
