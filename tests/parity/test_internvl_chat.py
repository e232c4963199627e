"""Folders of InternVL in its publisher's format: the rows, the pixels and the text of the same
model in transformers' format."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.config.model_config import ModelConfig
from engine.images.processor import prepare
from engine.text.chat_template import ChatTemplate
from tests.engine.images.folders import CASES, Case, load_processor, picture, save_model
from tests.engine.models.vision.test_towers import encode, their_rows, tower_of
from tests.parity.engine_driver import engine
from tests.parity.test_images import Seeing

IMAGENET = {"image_mean": [0.485, 0.456, 0.406], "image_std": [0.229, 0.224, 0.225]}
# What this format cannot say otherwise.
SIXB = {"image_size": [28, 28], "use_mean_pooling": True}
CHAT = {
    "InternVL": replace(CASES["InternVL"], settings=CASES["InternVL"].settings | IMAGENET),
    "InternVL 6B": replace(
        CASES["InternVL 6B"],
        settings=CASES["InternVL 6B"].settings | IMAGENET,
        vision=CASES["InternVL 6B"].vision | SIXB,
        outer=CASES["InternVL 6B"].outer | {"projector_hidden_act": "gelu"},
        seed=1,
    ),
}
_PARTS = {
    "vision_tower.": "vision_model.",
    "patch_embeddings.projection": "patch_embedding",
    "cls_token": "class_embedding",
    "position_embeddings": "position_embedding",
    "encoder.layer.": "encoder.layers.",
    "attention.projection_layer": "attn.proj",
    "attention.": "attn.",
    "layernorm_before": "norm1",
    "layernorm_after": "norm2",
    "lambda_": "ls",
    "multi_modal_projector.layer_norm": "mlp1.0",
    "multi_modal_projector.linear_1": "mlp1.1",
    "multi_modal_projector.linear_2": "mlp1.3",
}


def write_chat(theirs: Path, folder: Path, case: Case, **changes: Any) -> None:
    """Write the same model as its publisher does."""
    tensors = {}
    for name, tensor in load_file(theirs / "model.safetensors").items():
        if "language_model" not in name and "lm_head" not in name:
            for part, ours in _PARTS.items():
                name = name.replace(part, ours)
        tensors[name.removeprefix("model.")] = tensor
    for name in [name for name in tensors if ".q_proj." in name and "vision" in name]:
        parts = [tensors.pop(name.replace("q_proj", f"{part}_proj")) for part in "qkv"]
        tensors[name.replace("q_proj", "qkv")] = torch.cat(parts)
    tied = not any("lm_head" in name for name in tensors)
    save_file(tensors, folder / "model.safetensors")
    config = json.loads((theirs / "config.json").read_text())
    vision = config["vision_config"]
    chat = {
        "architectures": ["InternVLChatModel"],
        "auto_map": {"AutoModel": "modeling_internvl_chat.InternVLChatModel"},
        "model_type": "internvl_chat",
        "downsample_ratio": config["downsample_ratio"],
        "dynamic_image_size": True,
        "force_image_size": case.settings["size"]["height"],
        "min_dynamic_patch": case.settings.get("min_patches", 1),
        "max_dynamic_patch": case.settings["max_patches"],
        "ps_version": "v2",
        "select_layer": -1,
        "use_thumbnail": True,
        "llm_config": config["text_config"] | {"tie_word_embeddings": tied},
        "vision_config": {
            "model_type": "intern_vit_6b",
            "qkv_bias": vision["attention_bias"],
            "qk_normalization": vision["use_qk_norm"],
            "image_size": vision["image_size"][0],
            "patch_size": vision["patch_size"][0],
            **{key: vision[key] for key in ("norm_type", "layer_norm_eps", "hidden_act")},
            **{key: vision[key] for key in ("hidden_size", "intermediate_size")},
            **{key: vision[key] for key in ("num_hidden_layers", "num_attention_heads")},
        },
    }
    (folder / "config.json").write_text(json.dumps(chat | changes))
    # As it lies in published folders: another class's, whose size is a number.
    settings = {"size": 448, "crop_size": 448, "image_mean": [0.1] * 3, "image_std": [1.0] * 3}
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))
    (folder / "tokenizer.json").write_bytes((theirs / "tokenizer.json").read_bytes())


@pytest.mark.parametrize("name", CHAT)
def test_the_same_as_transformers_format(name: str, tmp_path: Path) -> None:
    """Bugs: keys are taken for queries in a projection of all three; mean and deviation are those
    of a file that the publisher's code does not read."""
    case, theirs, folder = CHAT[name], tmp_path / "theirs", tmp_path / "ours"
    for part in (theirs, folder):
        part.mkdir()
    model = save_model(theirs, case)
    write_chat(theirs, folder, case)
    rows = encode(folder, tower_of(folder))
    want = their_rows(case, model, theirs)
    assert (rows - want).norm() / want.norm() < 1e-5
    ours, other = load_processor(folder), load_processor(theirs)
    assert ours is not None and other is not None
    for size in ((64, 43), (33, 900), (400, 20)):
        image, layout = picture(*size), ours.layout(*size)
        assert layout == other.layout(*size)
        images = [prepare(processor, image, layout, 0) for processor in (ours, other)]
        assert images[0].pixels == images[1].pixels
    Seeing(case, folder, model, ours).run(engine(folder, max_num_batched_tokens=64))


def test_what_is_served_without_pictures(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Bug: pictures that are put together otherwise are computed as if they were not."""
    case, theirs, folder = CHAT["InternVL"], tmp_path / "theirs", tmp_path / "ours"
    for part in (theirs, folder):
        part.mkdir()
    save_model(theirs, case)
    for key, value in {
        "select_layer": -4,
        "ps_version": "v1",
        "pad2square": True,
        "use_thumbnail": False,
    }.items():
        caplog.clear()
        write_chat(theirs, folder, case, **{key: value})
        assert ModelConfig.from_folder(folder).vision is None
        assert key in caplog.text
    write_chat(theirs, folder, case, use_thumbnail=False, dynamic_image_size=False)
    assert ModelConfig.from_folder(folder).vision is not None
    processor = load_processor(folder)
    assert processor is not None and processor.layout(400, 20).shape[0] == 1
    tokenizer = folder / "tokenizer.json"
    tokenizer.write_text(tokenizer.read_text().replace("<IMG_CONTEXT>", "<unused>"))
    assert ModelConfig.from_folder(folder).vision is None
    assert "no special token <IMG_CONTEXT>" in caplog.text
    tokenizer.unlink()
    assert ModelConfig.from_folder(folder).vision is not None, "a plan needs no tokenizer"


def test_its_template_of_texts_has_places_for_pictures(tmp_path: Path) -> None:
    """Bug: the published templates know of texts alone, and a picture is refused."""
    config = {"architectures": ["InternVLChatModel"], "vision_config": {"image_size": 448}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    source = "{% for m in messages %}{{ m['role'] + ': ' + m['content'] }}{% endfor %}"
    (tmp_path / "chat_template.jinja").write_text(source)
    template = ChatTemplate.load(tmp_path, {})
    assert template is not None
    parts = [{"type": "image"}, {"type": "text", "text": "What is it?"}]
    rendered = template.render([{"role": "user", "content": parts}])
    assert rendered == "user: <IMG_CONTEXT>\nWhat is it?"
