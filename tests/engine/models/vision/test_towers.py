"""Towers give the embeddings that transformers' models give, from pictures to rows."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from engine.config.engine_config import EngineConfig
from engine.config.model_config import ModelConfig
from engine.conversion import convert
from engine.images.processor import prepare
from engine.models.registry import Model, build_model
from engine.models.vision.idefics3 import nearest_lines
from engine.models.vision.tower import Tower
from engine.parallel.group import TensorParallelGroup
from engine.parallel.stages import Stage
from engine.weights import load_weights
from kernels.dispatch import kernels_for
from tests.engine.images.folders import (
    CASES,
    Case,
    load_processor,
    picture,
    save_model,
    their_inputs,
)

PICTURES = [picture(200, 120), picture(90, 150, 1)]


def tower_of(folder: Path, *, deterministic: bool = False, **changes: Any) -> Tower:
    config = ModelConfig.from_folder(folder)
    kernels = kernels_for("cpu", deterministic)
    model = build_model(config, torch.float32, "cpu", kernels, **changes)
    load_weights(model, folder)
    assert model.tower is not None
    return model.tower


def encode(folder: Path, tower: Tower) -> Tensor:
    processor = load_processor(folder)
    assert processor is not None
    pixels = []
    for image in PICTURES:
        ours = prepare(processor, image, processor.layout(*image.size), 0)
        array = np.frombuffer(ours.pixels, np.uint8).reshape(*ours.shape, 3).copy()
        pixels.append(torch.from_numpy(array))
    with torch.inference_mode():
        return tower.encode(pixels)


def their_rows(case: Case, model: Any, folder: Path) -> Tensor:
    ours = load_processor(folder)
    assert ours is not None
    with torch.inference_mode():
        features = model.get_image_features(**their_inputs(case, PICTURES, ours))
        if case.name == "Llama4":
            features.pooler_output = model.multi_modal_projector(features.last_hidden_state)
    levels = [features.pooler_output, *(getattr(features, "deepstack_features", None) or ())]
    joined = [torch.cat([*level]) if isinstance(level, list | tuple) else level for level in levels]
    return torch.cat([level.flatten(0, -2) for level in joined], 1)


@pytest.mark.parametrize("name", CASES)
def test_rows_equal_transformers(name: str, tmp_path: Path) -> None:
    """Patches in another order, a position that is one off or a level of the wrong layer: rows that
    look like embeddings. Two pictures of different size are encoded in one call."""
    case = CASES[name]
    theirs = save_model(tmp_path, case)
    ours = encode(tmp_path, tower_of(tmp_path))
    want = their_rows(case, theirs, tmp_path)
    assert ours.shape == want.shape
    assert (ours - want).norm() / want.norm() < 1e-5
    assert (ours - want).abs().max() < 1e-4 * want.abs().max()


@pytest.mark.parametrize("name", ["Qwen2-VL", "Qwen2.5-VL", "Qwen3-VL", "Qwen3.5"])
def test_rows_of_clips_equal_transformers(name: str, tmp_path: Path) -> None:
    """Bugs: frames of a patch in the other order; patches that see those of another time. A picture
    is encoded in the same call."""
    case = CASES[name]
    theirs = save_model(tmp_path, case)
    tower, patch = tower_of(tmp_path), case.settings.get("patch_size", 14)
    frames = torch.from_numpy(np.stack([np.asarray(picture(140, 84, s)) for s in range(4)]))
    frames = frames[:, : 4 * patch, : 6 * patch]
    height, width = frames.shape[1] // patch, frames.shape[2] // patch
    scaled = tower.normalised(frames).permute(0, 3, 1, 2)
    cut = scaled.reshape(2, 2, 3, height // 2, 2, patch, width // 2, 2, patch)
    rows = cut.permute(0, 3, 6, 4, 7, 2, 1, 5, 8).reshape(2 * height * width, -1)
    with torch.inference_mode():
        grid = torch.tensor([[2, height, width]])
        features = theirs.get_video_features(pixel_values_videos=rows, video_grid_thw=grid)
        still = frames[:1]
        ours = tower.encode([still, frames, still])
        alone = tower.encode([still])
    levels = [features.pooler_output, *(getattr(features, "deepstack_features", None) or ())]
    joined = [torch.cat([*level]) if isinstance(level, list | tuple) else level for level in levels]
    want, size = torch.cat(joined, 1), len(alone)
    assert (ours[size:-size] - want).norm() / want.norm() < 1e-5
    assert torch.allclose(ours[:size], alone, atol=1e-5)
    assert torch.allclose(ours[-size:], alone, atol=1e-5)


@pytest.mark.parametrize("name", ["Gemma 4 E2B", "InternVL", "Pixtral", "Qwen3-VL"])
def test_the_largest_warm_up(name: str, tmp_path: Path) -> None:
    """Bug: the warm-up's picture has more rows than the tower has positions."""
    save_model(tmp_path, CASES[name])
    tower = tower_of(tmp_path)
    pixels = torch.zeros(*tower.shape_of(600), 3, dtype=torch.uint8)
    with torch.inference_mode():
        assert 0 < len(tower.encode([pixels])) <= 600


def test_deterministic_windows(tmp_path: Path) -> None:
    """Bug: a window of a picture, which is computed alone, rotates by the whole step's places."""
    save_model(tmp_path, CASES["Qwen2.5-VL"])
    ours = encode(tmp_path, tower_of(tmp_path, deterministic=True))
    assert (ours - encode(tmp_path, tower_of(tmp_path))).abs().max() < 1e-5 * ours.abs().max()


@pytest.mark.parametrize("name", ["SmolVLM", "InternVL", "Llama 4"])
def test_tower_beside_a_quantized_text_model(name: str, tmp_path: Path) -> None:
    """A tower that is rounded with the text model sees less, and no test of texts shows it."""
    save_model(tmp_path, CASES[name])
    want = encode(tmp_path, tower_of(tmp_path))
    assert torch.equal(encode(tmp_path, tower_of(tmp_path, quantization="int8")), want)


def test_positions_of_smolvlm_as_trained() -> None:
    """Bug: float32 puts a line of patches one before its own where the table has 25 lines."""
    # Here, as it takes three seconds of every process that collects tests.
    from transformers.models.smolvlm.modeling_smolvlm import SmolVLMVisionEmbeddings

    for side, count in ((25, 25), (19, 19), (32, 32), (27, 13)):
        config = transformers.SmolVLMVisionConfig(hidden_size=1, image_size=side, patch_size=1)
        config.num_attention_heads = 1
        theirs = SmolVLMVisionEmbeddings(config).eval()
        theirs.patch_embedding.weight.data.zero_()
        assert theirs.patch_embedding.bias is not None
        theirs.patch_embedding.bias.data.zero_()
        theirs.position_embedding.weight.data[:, 0] = torch.arange(float(side**2))
        mask = torch.ones(1, count, count, dtype=torch.bool)
        with torch.inference_mode():
            want = theirs(torch.zeros(1, 3, count, count), mask).view(count, count)
        lines = nearest_lines(count, side)
        assert torch.equal((lines[:, None] * side + lines).float(), want)


def test_folders_whose_text_alone_is_served(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A folder that had served text before towers were read must go on doing so: without the
    processor's file, without the tower's tensors, or with a quantised tower."""
    save_model(tmp_path, CASES["Qwen3-VL"])
    folder = ModelConfig.from_folder
    assert folder(tmp_path).vision is not None
    preprocessor = tmp_path / "preprocessor_config.json"
    text = preprocessor.read_text()
    preprocessor.unlink()
    config = folder(tmp_path)
    assert config.vision is None
    model = build_model(config, torch.float32, "cpu", kernels_for("cpu"))
    load_weights(model, tmp_path)
    assert model.tower is None
    preprocessor.write_text(text)

    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    quantized = {
        name.replace("mlp.linear_fc1.weight", "mlp.linear_fc1.weight_packed"): tensor
        for name, tensor in tensors.items()
    }
    save_file(quantized, file)
    assert folder(tmp_path).vision is None
    assert "weight_packed" in caplog.text
    save_file({name: tensors[name] for name in tensors if "visual" not in name}, file)
    config = folder(tmp_path)
    assert config.vision is None
    load_weights(build_model(config, torch.float32, "cpu", kernels_for("cpu")), tmp_path)


def test_internvl_of_an_inner_layer(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A folder that was trained on another layer of the tower gets no images, and keeps its
    text."""
    save_model(tmp_path, CASES["InternVL"])
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"vision_feature_layer": -2}))
    assert ModelConfig.from_folder(tmp_path).vision is None
    assert "vision_feature_layer is -2" in caplog.text


def test_tiles_without_whole_embeddings(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A folder whose tiles transformers fails to join serves its text."""
    save_model(tmp_path, CASES["SmolVLM"])
    settings = {"max_image_size": {"longest_edge": 20}}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(settings))
    assert ModelConfig.from_folder(tmp_path).vision is None
    assert "tiles of 20 pixels have no whole embeddings" in caplog.text


def test_sections_of_rotary_axes(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Bug: a folder whose rotary parameters have no section, or one of another width, is refused,
    though it had served text."""
    save_model(tmp_path, CASES["Qwen3-VL"])
    path = tmp_path / "config.json"
    values = json.loads(path.read_text())
    text = values["text_config"]
    for head_dim, section, want in (
        (12, [2, 2, 2], (2, 2, 2)),
        (128, None, (24, 20, 20)),  # what transformers takes
        (12, None, None),
        (12, [9, 2, 2], None),
    ):
        text["head_dim"], text["rope_parameters"]["mrope_section"] = head_dim, section
        path.write_text(json.dumps(values))
        vision = ModelConfig.from_folder(tmp_path).vision
        assert (None if vision is None else vision.mrope_section) == want
        assert ("mrope_section has" in caplog.text) == (want is None)
        caplog.clear()


@pytest.mark.parametrize(
    ("name", "saved", "other"),
    [
        ("Qwen3-VL", ("model.visual.",), "visual."),
        ("Mistral 3", ("vision_tower.", "multi_modal_projector."), "model.{}"),
    ],
)
def test_other_names_of_tensors(
    name: str, saved: tuple[str, ...], other: str, tmp_path: Path
) -> None:
    """Checkpoints of transformers 4 have `visual.` for `model.visual.`; some of version 5 have
    `model.vision_tower.` for `vision_tower.`."""
    save_model(tmp_path, CASES[name])
    want = encode(tmp_path, tower_of(tmp_path))
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    for begin in saved:
        names = [name for name in tensors if name.startswith(begin)]
        assert names
        for name in names:
            tensors[other.format(begin) + name.removeprefix(begin)] = tensors.pop(name)
    save_file(tensors, file)
    assert torch.equal(encode(tmp_path, tower_of(tmp_path)), want)


@pytest.mark.parametrize(
    "name",
    ["Gemma 3", "Qwen2.5-VL", "Mistral 3", "SmolVLM", "InternVL", "Llama 4", "Kimi K2.5"],
)
def test_converted_folders(name: str, tmp_path: Path) -> None:
    """Bug: a converted folder has its tensors under our names, and served text alone, or named one
    of the tower's as an error."""
    source, target = tmp_path / "source", tmp_path / "target"
    source.mkdir()
    save_model(source, CASES[name])
    if not CASES[name].tokens:
        (source / "tokenizer.json").write_text("{}")
    convert(EngineConfig(model=str(source), device="cpu", dtype="float32"), target)
    assert torch.equal(encode(target, tower_of(target)), encode(source, tower_of(source)))


def test_flat_files(tmp_path: Path) -> None:
    """Bug: files of the hub have the text model's keys among their own, where sections of rotary
    axes were not read, and Qwen2.5-VL's are not Qwen3-VL's."""
    save_model(tmp_path, CASES["Qwen2.5-VL"])
    want = encode(tmp_path, tower_of(tmp_path))
    path = tmp_path / "config.json"
    values = json.loads(path.read_text())
    text = values.pop("text_config")
    rope = text.pop("rope_parameters")
    text |= {"rope_theta": rope["rope_theta"], "model_type": "qwen2_5_vl"}
    text["rope_scaling"] = {"type": "mrope", "mrope_section": rope["mrope_section"]}
    path.write_text(json.dumps(text | values))
    file = tmp_path / "model.safetensors"
    tensors = {name.replace("model.visual.", "visual."): t for name, t in load_file(file).items()}
    flat = {name.replace("language_model.", ""): t for name, t in tensors.items()}
    save_file(flat, file)
    assert torch.equal(encode(tmp_path, tower_of(tmp_path)), want)
    vision = ModelConfig.from_folder(tmp_path).vision
    assert vision is not None
    assert (vision.mrope_section, vision.interleaved) == ((2, 3, 1), False)


def test_tower_of_a_quantized_model(tmp_path: Path) -> None:
    """Ministral 3 is published with a text model in FP8 and a tower in 16 bits."""
    case = CASES["Mistral 3"]
    save_model(tmp_path, replace(case, text=case.text | {"hidden_size": 64, "head_dim": 16}))
    want = encode(tmp_path, tower_of(tmp_path))
    file = tmp_path / "model.safetensors"
    tensors: dict[str, Tensor] = {}
    for name, tensor in load_file(file).items():
        tensors[name] = tensor
        if "language_model.model.layers" in name and tensor.dim() == 2:
            scale = tensor.abs().max() / 448
            tensors[name] = (tensor / scale).to(torch.float8_e4m3fn)
            tensors[f"{name}_scale_inv"] = scale
            tensors[f"{name.removesuffix('weight')}activation_scale"] = torch.ones(())
    assert len(tensors) > len(load_file(file))
    save_file(tensors, file)
    path = tmp_path / "config.json"
    values = json.loads(path.read_text())
    values["quantization_config"] = {
        "quant_method": "fp8",
        "activation_scheme": "static",
        "weight_block_size": None,
        "modules_to_not_convert": [
            "model.vision_tower",
            "model.multi_modal_projector",
            "lm_head",
        ],
    }
    path.write_text(json.dumps(values))
    assert torch.equal(encode(tmp_path, tower_of(tmp_path)), want)


@pytest.mark.parametrize(
    ("name", "section", "changes", "why"),
    [
        ("Pixtral", "", {"vision_feature_layer": -2}, "vision_feature_layer is -2"),
        ("Gemma 4 31B", "vision_config", {"head_dim": 16}, "head_dim 16"),
        ("Gemma 4 31B", "vision_config", {"position_embedding_size": 35}, "less than the 36"),
    ],
)
def test_towers_that_are_not_supported(
    name: str,
    section: str,
    changes: dict[str, int],
    why: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A tower of another kind is left out, and its model keeps its text."""
    save_model(tmp_path, CASES[name])
    path = tmp_path / "config.json"
    values = json.loads(path.read_text())
    (values[section] if section else values).update(changes)
    path.write_text(json.dumps(values))
    assert ModelConfig.from_folder(tmp_path).vision is None
    assert why in caplog.text


def test_bytes_and_ranks(tmp_path: Path) -> None:
    """The planner did not count a tower. Each rank has it whole, but of pipeline stages only the
    first."""
    save_model(tmp_path, CASES["Qwen3-VL"])
    config = ModelConfig.from_folder(tmp_path)

    def built(config: ModelConfig, **changes: Any) -> Model:
        kernels = kernels_for("cpu")
        return build_model(config, torch.bfloat16, "meta", kernels, runs_on="cuda", **changes)

    without = built(replace(config, vision=None))
    model = built(config)
    assert model.tower is not None
    size = sum(parameter.tensor.nbytes for parameter in model.tower.parameters())
    elements = sum(parameter.tensor.numel() for parameter in model.tower.parameters())
    assert model.num_bytes - without.num_bytes == size > 2 * elements
    assert model.num_parameters - without.num_parameters == elements
    assert model.num_active_parameters == without.num_active_parameters
    half = built(config, group=TensorParallelGroup(1, 2))
    assert half.tower is not None
    assert sum(p.tensor.nbytes for p in half.tower.parameters()) == size
    last = built(config, stage=Stage(1, 2))
    assert last.tower is None
    assert last.ignores("model.visual.patch_embed.proj.weight")
