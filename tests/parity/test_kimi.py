"""Folders of Kimi-VL, and of Kimi K2.5 as transformers has it: the embeddings of the same model as
Kimi K2.5 is published."""

import ast
import importlib.util
import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image as Pillow

from engine.config.model_config import ModelConfig
from engine.images.layout import ImageError
from tests.engine.images.folders import CASES, load_processor, picture, save_model
from tests.engine.images.kimi_files import write_kimi_vl
from tests.engine.images.test_processors import SIZES, write_folder
from tests.engine.models.vision.test_towers import encode, tower_of
from tests.parity.engine_driver import engine
from tests.parity.test_images import Seeing

CASE = CASES["Kimi K2.5"]


def test_kimi_vl(tmp_path: Path) -> None:
    """Bugs: Kimi-VL's projector has other names, and its processor's keys were not read."""
    theirs, folder = tmp_path / "theirs", tmp_path / "ours"
    theirs.mkdir()
    folder.mkdir()
    model = save_model(theirs, CASE)
    write_kimi_vl(folder, model, CASE.settings["media_proc_cfg"])
    (folder / "tokenizer.json").write_bytes((theirs / "tokenizer.json").read_bytes())
    assert torch.equal(encode(folder, tower_of(folder)), encode(theirs, tower_of(theirs)))
    ours = load_processor(folder)
    assert ours is not None
    Seeing(CASE, folder, model, ours).run(engine(folder, max_num_batched_tokens=64))


def test_transformers_format(tmp_path: Path) -> None:
    """Bug: rotary pairs that are half a head apart are taken for neighbours."""
    theirs, folder = tmp_path / "theirs", tmp_path / "ours"
    theirs.mkdir()
    model = save_model(theirs, CASE)
    model.save_pretrained(folder, save_original_format=False)
    settings = CASE.settings["media_proc_cfg"]
    side = settings["patch_limit_on_one_side"]
    file = {
        "size": {"max_height": side, "max_width": side},
        "max_patches": settings["in_patch_limit"],
        "merge_size": settings["merge_kernel_size"],
        **{key: settings[key] for key in ("patch_size", "image_mean", "image_std")},
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(file))
    (folder / "tokenizer.json").write_bytes((theirs / "tokenizer.json").read_bytes())
    assert torch.equal(encode(folder, tower_of(folder)), encode(theirs, tower_of(theirs)))
    ours, other = load_processor(folder), load_processor(theirs)
    assert ours is not None and other is not None
    assert ours.settings == other.settings
    Seeing(CASE, folder, model, ours).run(engine(folder, max_num_batched_tokens=64))


@pytest.mark.parametrize(
    ("file", "section", "changes", "why"),
    [
        ("config", "vision_config", {"mm_projector_type": "patchmergerv2"}, "patchmergerv2"),
        ("config", "vision_config", {"init_pos_emb_width": 8}, "init_pos_emb_height is 7"),
        ("preprocessor_config", "media_proc_cfg", {"fixed_output_tokens": 9}, "fixed_output"),
    ],
)
def test_what_is_served_without_images(
    file: str,
    section: str,
    changes: dict[str, object],
    why: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A tower of Kimi K3's kind would compute embeddings of another model."""
    save_model(tmp_path, CASE)
    path = tmp_path / f"{file}.json"
    values = json.loads(path.read_text())
    values[section] |= changes
    path.write_text(json.dumps(values))
    assert ModelConfig.from_folder(tmp_path).vision is None
    assert why in caplog.text


def _resize() -> Callable[..., tuple[tuple[int, int], tuple[int, int]]]:
    """Return transformers' function of sizes, whose module needs torchvision."""
    spec = importlib.util.find_spec("transformers")
    assert spec is not None and spec.origin is not None
    file = Path(spec.origin).parent / "models/kimi_k25/image_processing_kimi_k25.py"
    body = ast.parse(file.read_text()).body
    (function,) = [part for part in body if getattr(part, "name", "") == "navit_resize"]
    names: dict[str, Any] = {"math": math}
    exec(compile(ast.Module([function], []), str(file), "exec"), names)
    resize: Callable[..., tuple[tuple[int, int], tuple[int, int]]] = names["navit_resize"]
    return resize


@pytest.mark.parametrize(("most", "side"), [(100, 40), (16384, 512), (100, 12)])
def test_sizes_and_pixels(most: int, side: int, tmp_path: Path) -> None:
    """Bugs: a small picture is enlarged; padding that is grey, or at another edge; the pixels of
    `detail: low` are those of a larger picture, cut off."""
    media = CASE.settings["media_proc_cfg"]
    media = media | {"in_patch_limit": most, "patch_limit_on_one_side": side}
    write_folder(tmp_path, replace(CASE, settings={"media_proc_cfg": media}))
    ours, resize = load_processor(tmp_path), _resize()
    assert ours is not None
    for width, height in [*SIZES, (400, 333), (3, 5), (2100, 9)]:
        image = picture(width, height)
        for detail, limit in (("auto", most), ("low", min(most, 2048))):
            layout = ours.layout(width, height, detail)
            (rows, columns), padded = resize(height, width, 4, 2, limit, side)
            assert layout.shape == (1, *padded)
            assert layout.size == layout.length == padded[0] * padded[1] // 64
            pixels = ours.pixels(image, layout)[0]
            want = image.resize((columns, rows), Pillow.Resampling.BICUBIC)
            assert np.array_equal(pixels[:rows, :columns], np.asarray(want))
            assert not pixels[rows:].any() and not pixels[:, columns:].any()


def test_pictures_that_kimi_vl_refuses(tmp_path: Path) -> None:
    """Bug: a side with more patches than rotary positions were trained for."""
    case = replace(CASE, settings={"in_token_limit": 4096, "patch_size": 14})
    write_folder(tmp_path, case)
    ours = load_processor(tmp_path)
    assert ours is not None
    assert ours.layout(7100, 30).size == 254 * 2
    with pytest.raises(ImageError, match="takes sides below 7168 pixels"):
        ours.layout(7141, 30)
