"""A tower without its layers gives the embeddings that the whole engine's tower gives."""

from pathlib import Path

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from engine.config.engine_config import EngineConfig
from engine.config.model_config import ModelConfig
from engine.conversion import convert
from engine.encoder import ImageEncoder, TowerAlone
from engine.errors import ConfigError, InvalidRequest
from engine.images.image import Image
from engine.images.processor import prepare
from engine.models.registry import build_model
from engine.models.vision.tower import Tower
from engine.resolve import resolve
from engine.weights import load_weights
from kernels.dispatch import kernels_for
from tests.engine.images.folders import CASES, load_processor, picture, save_model
from tests.engine.models.vision.test_towers import tower_of

FAMILIES = ("Qwen3-VL", "Gemma 3", "SmolVLM", "Pixtral")


def config_of(folder: Path, **fields: object) -> EngineConfig:
    options = {"device": "cpu", "dtype": "float32", "num_threads": 1} | fields
    return EngineConfig(model=str(folder), **options)  # type: ignore[arg-type]


def image_of(folder: Path) -> Image:
    processor = load_processor(folder)
    assert processor is not None
    return prepare(processor, picture(90, 150, 1), processor.layout(90, 150), 0)


def rows_of(tower: Tower, image: Image) -> torch.Tensor:
    pixels = np.frombuffer(image.pixels, np.uint8).reshape(*image.shape, 3).copy()
    with torch.inference_mode():
        return tower.encode([torch.from_numpy(pixels)])


@pytest.mark.parametrize("family", [name for name in CASES if name in FAMILIES])
def test_embeddings_are_those_of_the_whole_engine(family: str, tmp_path: Path) -> None:
    """Bugs: a tensor of the tower is left out, a level of deepstack is lost, layers of text are
    loaded for nothing, the last bits are others."""
    save_model(tmp_path, CASES[family])
    image = image_of(tmp_path)
    encoder = ImageEncoder(config_of(tmp_path))
    wanted = rows_of(tower_of(tmp_path), image)
    ours = encoder.encode(image)
    assert encoder.dtype == "float32" and ours.tobytes() == wanted.numpy().tobytes()
    names = {parameter.name for parameter in encoder._model.parameters()}
    assert not any("layers.0.self_attn.q_proj" in name and "text" in name for name in names)


def test_embeddings_in_16_bits_and_of_a_converted_folder(tmp_path: Path) -> None:
    """Bugs: two bytes of a number are swapped or widened; a converted folder's other tensors are
    called unexpected."""
    save_model(tmp_path / "model", CASES["Qwen3-VL"])
    image = image_of(tmp_path / "model")
    convert(config_of(tmp_path / "model", dtype="bfloat16"), tmp_path / "converted")
    ours = []
    for name in ("model", "converted"):
        encoder = ImageEncoder(config_of(tmp_path / name, dtype="bfloat16"))
        assert encoder.dtype == "bfloat16"
        ours.append(encoder.encode(image))
    assert len(ours[0]) == image.size * encoder._model.tower.config.out_size * 2 * (
        1 + encoder._model.tower.config.deepstack
    )
    assert np.array_equal(*ours)


@pytest.mark.gpu
def test_embeddings_on_a_gpu(tmp_path: Path) -> None:
    """Bugs: the actor's start on a GPU fails; its kernels are others than the engine's."""
    save_model(tmp_path, CASES["Qwen3-VL"])
    image, device = image_of(tmp_path), torch.device("cuda", 0)
    encoder = ImageEncoder(config_of(tmp_path, device="cuda", dtype="bfloat16"))
    config = ModelConfig.from_folder(tmp_path)
    model = build_model(config, torch.bfloat16, device, kernels_for("cuda"))
    load_weights(model, tmp_path)
    assert model.tower is not None
    pixels = np.frombuffer(image.pixels, np.uint8).reshape(*image.shape, 3).copy()
    with torch.inference_mode():
        rows = model.tower.encode([torch.from_numpy(pixels).to(device)])
    ours = torch.from_numpy(encoder.encode(image)).view(torch.bfloat16).view(len(rows), -1)
    assert torch.equal(ours, rows.cpu())


def test_what_an_encoder_refuses(tmp_path: Path) -> None:
    """Bugs: an image that has no room in memory ends the actor; a text model starts as an encoder
    and answers nothing."""
    save_model(tmp_path, CASES["Qwen3-VL"])
    image = image_of(tmp_path)
    encoder = ImageEncoder(config_of(tmp_path, image_cache_tokens=image.size))
    for change in ({"size": image.size + 1}, {"size": 1}, {"pixels": b"123"}):
        with pytest.raises(InvalidRequest):
            encoder.encode(replace(image, **change))
    assert len(encoder.encode(image))
    off = config_of(tmp_path, images="off")
    with pytest.raises(ConfigError, match="takes no images, so it has nothing to encode; leave"):
        TowerAlone(resolve(off), torch.device("meta"))
