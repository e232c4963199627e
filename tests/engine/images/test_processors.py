"""Pictures become the pixels, sizes and tokens that transformers' processors make of them."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from PIL import Image as Pillow

from engine.architectures import WRAPPERS
from engine.config.towers.paddleocr_vl import read_paddleocr_vl
from engine.config_reader import Reader
from engine.errors import ConfigError
from engine.images.picture_file import PictureFile
from engine.images.processor import ImageError, ImageProcessor, PixelCache, image_processor, prepare
from tests.engine.images.files import saved
from tests.engine.images.folders import (
    CASES,
    Case,
    load_processor,
    picture,
    save_tokenizer,
    their_processor,
)

SIZES = [(64, 43), (1, 1), (33, 900), (192, 108), (108, 240), (400, 20), (641, 427)]


def write_folder(folder: Path, case: Case) -> None:
    """Write the files that image processors read, without a model."""
    config = {"architectures": [f"{case.name}ForConditionalGeneration"], **case.outer}
    config |= {"model_type": case.name.lower()}
    config |= {"vision_config": case.vision, "text_config": case.text}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "preprocessor_config.json").write_text(json.dumps(case.settings))
    save_tokenizer(folder, case)


def both(case: Case, folder: Path) -> tuple[ImageProcessor, Any]:
    """Return our processor and transformers', which neither scales nor centres pixels."""
    write_folder(folder, case)
    ours = load_processor(folder)
    assert ours is not None
    theirs = their_processor(case)
    theirs.image_mean, theirs.image_std, theirs.rescale_factor = [0.0] * 3, [1.0] * 3, 1.0
    return ours, theirs


QWENS = [name for name in CASES if name.startswith(("Qwen", "GLM"))]
TILED = ["SmolVLM", "Idefics 3", "InternVL", "InternVL 6B"]


@pytest.mark.parametrize("name", QWENS)
def test_pixels_of_qwens(name: str, tmp_path: Path) -> None:
    """A side rounded half up, a filter of torch's or rows read as columns: pixels that are nearly
    right, and another number of tokens than the model was trained with."""
    case = CASES[name]
    ours, theirs = both(case, tmp_path)
    patch = case.settings.get("patch_size", 14)
    for width, height in SIZES:
        image = picture(width, height)
        layout = ours.layout(width, height)
        pixels = ours.pixels(image, layout)
        want = theirs(images=[image], return_tensors="np")
        (grid,) = want["image_grid_thw"].tolist()
        assert [1, 2 * layout.grid[0], 2 * layout.grid[1]] == grid
        assert layout.size == len(layout.token_ids) == layout.length == grid[1] * grid[2] // 4
        assert layout.shape == (1, grid[1] * patch, grid[2] * patch)
        rows = want["pixel_values"].reshape(*layout.grid, 2, 2, 3, 2, patch, patch)
        back = rows[:, :, :, :, :, 0].transpose(0, 2, 5, 1, 3, 6, 4).reshape(pixels.shape)
        assert np.array_equal(back, pixels.astype(np.float32))


def test_pixels_of_paddleocr_vl(tmp_path: Path) -> None:
    """Bug: sides that are rounded before a small picture is enlarged."""
    case = CASES["PaddleOCR-VL"]
    ours, theirs = both(case, tmp_path)
    for width, height in [*SIZES, (3, 5), (7, 300), (300, 7)]:
        image = picture(width, height)
        layout = ours.layout(width, height)
        pixels = ours.pixels(image, layout)
        want = theirs(images=[image], return_tensors="np")
        (grid,) = want["image_grid_thw"].tolist()
        assert [1, 2 * layout.grid[0], 2 * layout.grid[1]] == grid
        rows = want["pixel_values"].reshape(grid[1], grid[2], 3, 4, 4)
        back = rows.transpose(0, 3, 1, 4, 2).reshape(pixels.shape)
        assert np.array_equal(back, pixels.astype(np.float32))


def test_names_of_paddleocr_vls_tensors(tmp_path: Path) -> None:
    """A head that the tower of the published file has, and nothing reads, ended the start."""
    write_folder(tmp_path, CASES["PaddleOCR-VL"])
    file = Reader.from_file(tmp_path / "config.json")
    vision = read_paddleocr_vl(file, Reader({}, "preprocessor_config.json"))
    tower = "visual.vision_model."
    names = {
        f"{tower}embeddings.patch_embedding.bias": "visual.patch_embed.proj.bias",
        f"model.{tower}encoder.layers.0.mlp.fc1.bias": "visual.encoder.layers.0.mlp.fc1.bias",
        "mlp_AR.linear_1.weight": "visual.merger.linear_1.weight",
        f"{tower}head.probe": None,
        f"{tower}embeddings.packing_position_embedding.weight": None,
    }
    assert {name: vision.tensor_name(name) for name in names} == names
    ignored = [
        name for name in names if WRAPPERS["PaddleOCRVLForConditionalGeneration"].ignores(name)
    ]
    assert ignored == [*names]


def test_pixels_of_gemma3(tmp_path: Path) -> None:
    """Bug: a side of the processor's class, or a picture that keeps its shape."""
    case = CASES["Gemma 3"]
    ours, theirs = both(case, tmp_path)
    assert (ours.placeholder, ours.image_token_id) == ("<start_of_image>", 90)
    for width, height in SIZES:
        image = picture(width, height)
        layout = ours.layout(width, height)
        assert layout.token_ids == (91, *[90] * 9, 92)
        assert (layout.first, layout.length, layout.size, layout.grid) == (1, 9, 9, (0, 0))
        assert (layout.before, layout.after) == ("\n\n", "\n\n")
        pixels = ours.pixels(image, layout)
        assert pixels.shape == (*layout.shape, 3) == (1, 84, 84, 3)
        want = theirs(images=[image], return_tensors="np")["pixel_values"].transpose(0, 2, 3, 1)
        assert np.array_equal(want, pixels.astype(np.float32))


def test_crops_are_refused_by_name(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A folder that asks for crops would get answers about another prompt than its model's."""
    case = CASES["Gemma 3"]
    write_folder(tmp_path, case)
    settings = {**case.settings, "do_pan_and_scan": True}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(settings))
    assert image_processor(tmp_path) is None
    assert "preprocessor_config.json: do_pan_and_scan: crops" in caplog.text


@pytest.mark.parametrize("name", TILED)
def test_pixels_of_tiles(name: str, tmp_path: Path) -> None:
    """A resize that is left out, tiles column by column, the whole picture first: a picture that
    the model sees in pieces of which each is right."""
    case = CASES[name]
    ours, theirs = both(case, tmp_path)
    for width, height in [*SIZES, (16, 16), (48, 47), (1, 300)]:
        image = picture(width, height)
        layout = ours.layout(width, height)
        pixels = ours.pixels(image, layout)
        want = theirs(images=[image], return_tensors="np")["pixel_values"]
        want = want.reshape(-1, *want.shape[-3:]).transpose(0, 2, 3, 1)
        assert layout.shape == pixels.shape[:3] == want.shape[:3]
        assert np.array_equal(want, pixels.astype(np.float32))
        few = ours.layout(width, height, "low")
        assert few.shape[0] == 1 == len(ours.pixels(image, few))


@pytest.mark.parametrize("name", ["SmolVLM", "Idefics 3"])
def test_tokens_around_tiles_of_smolvlm(name: str, tmp_path: Path) -> None:
    """Two line breaks are one token of their tokenizer, and rows are counted from 1."""
    case = CASES[name]
    write_folder(tmp_path, case)
    ours = load_processor(tmp_path)
    assert ours is not None
    tokenizer = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    # Here, as it takes three seconds of every process that collects tests.
    from transformers.models.smolvlm.processing_smolvlm import get_image_prompt_string

    for width, height, grid in ((30, 30, (2, 2)), (50, 10, (1, 2)), (10, 50, (2, 1))):
        marks = ("<fake_token_around_image>", "<image>", "<global-img>")
        text = get_image_prompt_string(*grid, 4, *marks)
        layout = ours.layout(width, height)
        assert [*layout.token_ids] == tokenizer.encode(text).ids
        assert layout.length > layout.size == 4 * (grid[0] * grid[1] + 1)
    assert ours.layout(30, 30, "low").token_ids == (91, 92, 90, 90, 90, 90, 91)
    alone = image_processor(tmp_path)
    assert alone is not None
    with pytest.raises(ConfigError, match="need a tokenizer"):
        alone.layout(30, 30)


def test_tokens_of_internvl(tmp_path: Path) -> None:
    """A picture begins and ends with a token, and has 4 of each tile; of one tile it has no view
    of the whole."""
    write_folder(tmp_path, CASES["InternVL"])
    ours = load_processor(tmp_path)
    assert ours is not None
    for width, tiles in ((20, 1), (40, 3), (60, 4), (900, 5)):
        layout = ours.layout(width, 20)
        assert layout.token_ids == (91, *[90] * (4 * tiles), 92)
        assert (layout.first, layout.length, layout.size) == (1, 4 * tiles, 4 * tiles)


# Width and height of a picture -> rows and columns of tiles of 28 pixels, height and width that it
# takes of them, by transformers' processor, which needs torchvision.
CANVASES = [
    (64, 43, 2, 3, 43, 64),
    (1, 1, 1, 1, 28, 28),
    (33, 900, 16, 1, 448, 16),
    (108, 240, 5, 3, 140, 62),  # 63 without rounding to float32
    (400, 20, 1, 15, 20, 400),
    (641, 427, 3, 5, 84, 126),
    (29, 28, 1, 2, 28, 29),
    (57, 57, 3, 3, 57, 57),
    (1, 300, 11, 1, 300, 1),
]


def test_pictures_of_llama4(tmp_path: Path) -> None:
    """A picture that is stretched, put in the middle or enlarged where there is room."""
    case = CASES["Llama 4"]
    vision = case.vision | {"image_size": 28, "patch_size": 7}
    settings = {"size": {"height": 28, "width": 28}, "max_patches": 16}
    write_folder(tmp_path, replace(case, vision=vision, settings=settings))
    ours = load_processor(tmp_path)
    assert ours is not None
    for width, height, rows, columns, high, wide in CANVASES:
        image = picture(width, height)
        layout = ours.layout(width, height)
        tiles = rows * columns
        assert layout.shape[0] == tiles + (tiles > 1)
        line = [90] * 4 + ([94] + [90] * 4) * (columns - 1) + [95]
        before = line * rows if tiles > 1 else []
        assert [*layout.token_ids] == [91, *before, 93, *[90] * 4, 92]
        pixels = ours.pixels(image, layout)
        canvas = pixels[:tiles].reshape(rows, columns, 28, 28, 3).transpose(0, 2, 1, 3, 4)
        canvas = canvas.reshape(rows * 28, columns * 28, 3)
        filter = Pillow.Resampling.BILINEAR
        assert np.array_equal(canvas[:high, :wide], np.asarray(image.resize((wide, high), filter)))
        assert not canvas[high:].any()
        assert not canvas[:, wide:].any()
        if tiles > 1:
            assert np.array_equal(pixels[-1], np.asarray(image.resize((28, 28), filter)))
        assert ours.layout(width, height, "low").token_ids == (91, 93, 90, 90, 90, 90, 92)


@pytest.mark.parametrize("name", ["Mistral 3", "Pixtral"])
def test_pixels_of_pixtral(name: str, tmp_path: Path) -> None:
    """A side that is rounded before it is divided, or a row's end left out of the count: the rows
    of a picture are torn."""
    case = CASES[name]
    ours, theirs = both(case, tmp_path)
    unit = case.settings.get("patch_size", 16)
    for width, height in SIZES[:2] + SIZES[3:]:
        image = picture(width, height)
        layout = ours.layout(width, height)
        want = theirs(images=[image], return_tensors="np")
        ((rows, columns),) = want["image_sizes"] // unit
        ids = ([90] * columns + [12]) * rows
        assert layout.token_ids == (*ids[:-1], 13)
        assert (layout.first, layout.length, layout.size) == (0, len(ids) - 1, rows * columns)
        assert layout.grid == (0, 0)
        pixels = ours.pixels(image, layout)
        assert pixels.shape == (*layout.shape, 3) == (1, rows * unit, columns * unit, 3)
        back = want["pixel_values"].transpose(0, 2, 3, 1)
        assert np.array_equal(back, pixels.astype(np.float32))


def test_tokens_and_limits_of_pixtral(tmp_path: Path) -> None:
    """The ends of rows have other ids in a vocabulary that was trained further; a line of pixels
    has a row; both sides may have a limit of their own."""
    case = CASES["Mistral 3"]
    write_folder(tmp_path, case)
    texts = {90: "[IMG]", 70: "[IMG_BREAK]", 71: "[IMG_END]"}
    tokens = {"added_tokens": [{"id": id, "content": text} for id, text in texts.items()]}
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokens))
    ours = image_processor(tmp_path)
    assert ours is not None
    assert ours.placeholder == "[IMG]"
    assert ours.layout(56, 56).token_ids == (90, 90, 70, 90, 90, 71)
    assert ours.layout(9000, 1).token_ids == (90, 90, 90, 90, 71)
    settings = {**case.settings, "size": {"height": 280, "width": 2800}}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(settings))
    ours = image_processor(tmp_path)
    assert ours is not None
    assert ours.layout(2800, 280).shape == (1, 280, 2800)
    assert ours.layout(2800, 280, "low").shape == (1, 84, 616)
    assert ours.layout(280, 560).shape == (1, 280, 140)


def test_pixels_of_gemma_4(tmp_path: Path) -> None:
    """A side that is rounded up, or a long picture without its one row: more tokens than the model
    takes."""
    case = CASES["Gemma 4 31B"]
    ours, theirs = both(case, tmp_path)
    for width, height in [*SIZES, (3000, 1), (1, 3000)]:
        image = picture(width, height)
        layout = ours.layout(width, height)
        pixels = ours.pixels(image, layout)
        want = theirs(images=[image], return_tensors="np")
        (size,) = want["num_soft_tokens_per_image"]
        assert layout.token_ids == (91, *[90] * size, 92)
        assert (layout.first, layout.length, layout.size) == (1, size, size)
        columns, rows = want["image_position_ids"][0].max(0) + 1
        assert pixels.shape == (*layout.shape, 3) == (1, rows * 4, columns * 4, 3)
        patches = want["pixel_values"][0, : rows * columns].reshape(rows, columns, 4, 4, 3)
        back = patches.transpose(0, 2, 1, 3, 4).reshape(pixels.shape)
        assert np.array_equal(back, pixels.astype(np.float32))
    (tmp_path / "preprocessor_config.json").write_text("{}")  # so that the class's values are taken
    ours = image_processor(tmp_path)
    assert ours is not None
    assert [ours.layout(640, 427, detail).size for detail in ("high", "low")] == [260, 60]


def test_llava_with_another_tower(tmp_path: Path) -> None:
    """Bug: a LLaVA whose tower is CLIP takes pictures for Pixtral's."""
    case = CASES["Pixtral"]
    write_folder(tmp_path, case)
    assert image_processor(tmp_path) is not None
    write_folder(tmp_path, replace(case, vision={"model_type": "clip_vision_model"}))
    assert image_processor(tmp_path) is None


def test_low_detail_and_narrow_pictures_of_qwens(tmp_path: Path) -> None:
    """A picture of 2010 x 10 cost tens of thousands of tokens in models without a bound."""
    case = CASES["Qwen3-VL"]
    write_folder(tmp_path, case)
    settings = {**case.settings, "size": {"shortest_edge": 4096, "longest_edge": 4096 * 4096}}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(settings))
    ours = load_processor(tmp_path)
    assert ours is not None
    assert ours.layout(3000, 2000).size > 2000
    assert 400 < ours.layout(3000, 2000, "low").size <= 512
    with pytest.raises(ImageError, match="2010 x 10"):
        ours.layout(2010, 10)
    with pytest.raises(ImageError, match="no pixels"):
        ours.layout(0, 10)


def test_settings_inside_the_newer_file(tmp_path: Path) -> None:
    """Newer folders have the settings in processor_config.json, whose values come first."""
    case = CASES["Qwen3-VL"]
    write_folder(tmp_path, case)
    inner = {**case.settings, "size": {"shortest_edge": 256 * 256, "longest_edge": 512 * 512}}
    newer = {"processor_class": "Qwen3VLProcessor", "image_processor": inner}
    (tmp_path / "processor_config.json").write_text(json.dumps(newer))
    ours = load_processor(tmp_path)
    assert ours is not None
    assert ours.layout(10, 10).size == 64


def test_placeholder_is_the_tokenizers(tmp_path: Path) -> None:
    """A model that was trained further may write another text for a picture."""
    write_folder(tmp_path, CASES["Qwen3-VL"])
    ours = image_processor(tmp_path)
    assert ours is not None
    assert ours.placeholder == "<|image_pad|>"
    tokens = {"added_tokens": [{"id": 90, "content": "<picture>"}]}
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokens))
    ours = image_processor(tmp_path)
    assert ours is not None
    assert ours.placeholder == "<picture>"


def test_models_without_pictures(tmp_path: Path) -> None:
    """A text model, and a folder that was saved without its processor, still serve text."""
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["Qwen3ForCausalLM"]}))
    assert load_processor(tmp_path) is None
    write_folder(tmp_path, CASES["Qwen3-VL"])
    (tmp_path / "preprocessor_config.json").unlink()
    assert load_processor(tmp_path) is None


def test_digests_are_of_pixels_shape_and_settings(tmp_path: Path) -> None:
    """Bug (CVE-2025-46722): two pictures of equal bytes and different shape had one name."""
    case = CASES["Qwen3-VL"]
    write_folder(tmp_path, case)
    ours = load_processor(tmp_path)
    assert ours is not None
    wide, tall = picture(128, 64), picture(64, 128)
    blank = [image.point(lambda value: 7) for image in (wide, tall)]
    digests = set()
    for image in (wide, tall, *blank):
        prepared = prepare(ours, image, ours.layout(*image.size), 5)
        assert (prepared.start, len(prepared.digest)) == (5, 16)
        assert prepared == prepare(ours, image.copy(), ours.layout(*image.size), 5)
        digests.add(prepared.digest)
    assert len(digests) == 4
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({**case.settings, "resample": 2}))
    other = load_processor(tmp_path)
    assert other is not None
    again = prepare(other, blank[0], other.layout(*blank[0].size), 5)
    assert again.digest not in digests


def test_pixels_of_a_picture_that_comes_again(tmp_path: Path) -> None:
    """Bugs: another picture's pixels; a cache that grows; a picture that is decoded each turn."""
    case = CASES["Qwen3-VL"]
    write_folder(tmp_path, case)
    ours = load_processor(tmp_path)
    assert ours is not None
    files = [PictureFile.read(saved(picture(64, 64, seed), "PNG")) for seed in (0, 1)]
    layout = ours.layout(64, 64)
    size = 3 * math.prod(layout.shape)
    cache = PixelCache(2 * size)
    fresh = [prepare(ours, file, layout, 0) for file in files]
    assert fresh[0].digest != fresh[1].digest and fresh[0].pixels != fresh[1].pixels
    assert fresh[0].pixels == prepare(ours, files[0].decode(), layout, 0).pixels
    for _ in range(2):
        assert [prepare(ours, file, layout, 0, cache) for file in files] == fresh
    undecodable = replace(files[0], format="GIF")  # of which the cache has the pixels
    assert prepare(ours, undecodable, layout, 9, cache).start == 9
    for number in range(5):
        cache.put(bytes([number]), b"x" * size)
    cache.put(bytes([4]), b"y" * size)
    assert [cache.get(bytes([number])) is None for number in range(5)] == [True] * 3 + [False] * 2
    cache.put(b"large", bytes(3 * size))
    assert cache.get(b"large") is None and cache.get(bytes([4])) == b"y" * size


def test_pixels_are_copied_only_where_they_must_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: Pillow's bytes taken for those of a view, in which pixels stand in another order."""
    write_folder(tmp_path, CASES["Qwen3-VL"])
    ours = load_processor(tmp_path)
    assert ours is not None
    image = picture(64, 64)
    layout = ours.layout(*image.size)
    plain = ours.pixels(image, layout)
    for view in (plain, plain[:, ::-1], plain.transpose(0, 2, 1, 3), plain[..., ::-1]):
        monkeypatch.setattr(ours, "pixels", lambda *_, view=view: view)
        prepared = prepare(ours, image, layout, 0)
        assert prepared.pixels == view.tobytes()
        assert (prepared.pixels is plain.base.base) == (view is plain)
