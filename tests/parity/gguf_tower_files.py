"""Writes tiny vision-language models as llama.cpp's converters do: a GGUF file of the text model,
and one of the vision encoder, with names of the `gguf` package's table."""

import json
import re
from collections.abc import Iterator
from math import isqrt
from pathlib import Path
from typing import Any

import gguf
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.engine.images.folders import Case
from tests.parity.gguf_files import Written, add, finish, permuted, write

QWEN = {90: "<|image_pad|>", 91: "<|video_pad|>", 92: "<|vision_start|>"}
GEMMA = {90: "<image_soft_token>", 91: "<start_of_image>", 92: "<end_of_image>"}
PIXTRAL = {90: "[IMG]", 12: "[IMG_BREAK]", 13: "[IMG_END]"}
GLM = {90: "<|image|>", 91: "<|video|>", 92: "<|begin_of_image|>", 93: "<|end_of_image|>"}
PADDLE = {90: "<|IMAGE_PLACEHOLDER|>", 91: "<|IMAGE_START|>", 92: "<|IMAGE_END|>"}

_SIGMOIDS = {"expert_gating_func": 2}
KIMI = {90: "<|media_pad|>"}


def _sections(*sizes: int) -> dict[str, Any]:
    return {"rope.dimension_sections": [*sizes, 0]}


# Case -> (type of projector, settings of the text model's file)
PAIRS = {
    "Qwen2-VL": ("qwen2vl_merger", Written("qwen2vl", more=_sections(1, 2, 3), tokens=QWEN)),
    "Qwen2.5-VL": ("qwen2.5vl_merger", Written("qwen2vl", more=_sections(2, 3, 1), tokens=QWEN)),
    "Qwen3-VL": ("qwen3vl_merger", Written("qwen3vl", more=_sections(2, 2, 2), tokens=QWEN)),
    "Qwen3-VL, a mixture": (
        "qwen3vl_merger",
        Written("qwen3vlmoe", more=_sections(2, 2, 2), tokens=QWEN),
    ),
    "GLM-4.1V": ("glm4v", Written("glm4", more=_sections(1, 1, 1), tokens=GLM)),
    "GLM-4.5V": ("glm4v", Written("glm4moe", more=_sections(1, 1, 1), tokens=GLM)),
    "PaddleOCR-VL": ("paddleocr", Written("paddleocr", more=_sections(2, 3, 1), tokens=PADDLE)),
    "Kimi-VL": ("kimivl", Written("deepseek2", more=_SIGMOIDS, tokens=KIMI)),
    "Kimi K2.5": ("kimik25", Written("deepseek2", more=_SIGMOIDS, tokens=KIMI)),
    "Gemma 3": ("gemma3", Written("gemma3", tokens=GEMMA)),
    "Mistral 3": ("pixtral", Written("mistral3", tokens=PIXTRAL)),
    "Pixtral": ("pixtral", Written("llama", drop=("attention.sliding_window",), tokens=PIXTRAL)),
    "SmolVLM": ("idefics3", Written("llama")),
    "InternVL": ("internvl", Written("qwen2", drop=("attention.sliding_window",))),
    "InternVL 6B": ("internvl", Written("qwen3", drop=("attention.sliding_window",))),
}
_OTHER_HALF = {"ffn_up": "ffn_down", "ffn_down": "ffn_up"}
# The converters' names of tensors that the table lacks.
_NAMES = {
    "multi_modal_projector.mm_input_projection_weight": "mm.input_projection.weight",
    "multi_modal_projector.mm_soft_emb_norm.weight": "mm.soft_emb_norm.weight",
    "visual.merger.norm": "v.post_ln",
    "model.vision_tower.layernorm": "v.post_ln",
    "visual.merger.linear_fc1": "mm.0",
    "visual.merger.linear_fc2": "mm.2",
    "model.multi_modal_projector.layer_norm": "mm.model.mlp.0",
    "model.multi_modal_projector.linear_1": "mm.model.mlp.1",
    "model.multi_modal_projector.linear_2": "mm.model.mlp.3",
}


def write_pair(
    name: str,
    case: Case,
    checkpoint: Path,
    folder: Path,
    quant: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    *,
    swapped: bool = False,
    text_quant: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    **changes: Any,
) -> Path:
    """Write a checkpoint's model.gguf and mmproj-model.gguf; return the first.

    quant, text_quant: of the tower's and the text model's matrices. swapped: as MLPs' halves were
    named once. changes: keys of the tower's metadata, without "clip.".
    """
    projector, written = PAIRS[name]
    config = json.loads((checkpoint / "config.json").read_text())
    tensors = load_file(checkpoint / "model.safetensors")
    text = {}
    for stored in [stored for stored in tensors if of_text(stored)]:
        plain = stored.replace("model.language_model.", "model.").replace("text_model.", "")
        text[plain.replace("language_model.", "")] = tensors.pop(stored)
    parts = checkpoint / "text"
    parts.mkdir(exist_ok=True)
    inner = {**config["text_config"], "tie_word_embeddings": "lm_head.weight" not in text}
    (parts / "config.json").write_text(json.dumps(inner))
    save_file(text, parts / "model.safetensors")
    if case.tokens:
        written = Written(
            written.arch,
            drop=written.drop,
            more=written.more,
            tokens={number: token for token, number in case.tokens.items()},
        )
    write(parts, folder / "model.gguf", written, text_quant)
    writer = gguf.GGUFWriter(folder / "mmproj-model.gguf", "clip")
    metadata = {"projector_type": projector, "has_vision_encoder": True}
    metadata |= _metadata(projector, case, config) | changes
    for key, value in metadata.items():
        kinds = {bool: "bool", int: "uint32", float: "float32", str: "string", list: "array"}
        getattr(writer, f"add_{kinds[type(value)]}")(f"clip.{key}", value)
    for theirs, tensor in _tensors(projector, tensors, config):
        if swapped:
            theirs = re.sub("ffn_(up|down)", lambda half: _OTHER_HALF[half[0]], theirs)
        add(writer, theirs, tensor, quant)
    finish(writer)
    return folder / "model.gguf"


def of_text(name: str) -> bool:
    """Whether a checkpoint's tensor of this name belongs to the text model."""
    parts = ("vis", "multi_modal_projector", "mm_projector", "connector", "mlp_AR")
    return not any(part in name for part in parts)


def _metadata(projector: str, case: Case, config: dict[str, Any]) -> dict[str, Any]:
    vision = {key.removeprefix("vt_"): value for key, value in config["vision_config"].items()}
    settings = case.settings.get("media_proc_cfg", case.settings)
    side = vision.get("image_size", 560)
    patch = vision["patch_size"]
    depth = vision.get("num_hidden_layers", vision.get("depth"))
    metadata: dict[str, Any] = {
        "vision.projection_dim": config["text_config"]["hidden_size"],
        "vision.image_size": side[0] if isinstance(side, list) else side,
        "vision.patch_size": patch[0] if isinstance(patch, list) else patch,
        "vision.embedding_length": vision.get("embed_dim", vision["hidden_size"]),
        "vision.feed_forward_length": vision.get("intermediate_size", vision["hidden_size"]),
        "vision.block_count": depth,
        "vision.attention.head_count": vision.get("num_attention_heads", vision.get("num_heads")),
        "vision.attention.layer_norm_epsilon": vision.get(
            "layer_norm_eps", vision.get("rms_norm_eps", 1e-6)
        ),
        "vision.image_mean": settings.get("image_mean", [0.5, 0.5, 0.5]),
        "vision.image_std": settings.get("image_std", [0.5, 0.5, 0.5]),
    }
    if projector.startswith("qwen"):
        area = settings.get("size") or {
            "shortest_edge": settings["min_pixels"],
            "longest_edge": settings["max_pixels"],
        }
        metadata["vision.image_min_pixels"] = area["shortest_edge"]
        metadata["vision.image_max_pixels"] = area["longest_edge"]
        if "image_mean" not in settings:  # of CLIP
            metadata["vision.image_mean"] = [0.48145466, 0.4578275, 0.40821073]
            metadata["vision.image_std"] = [0.26862954, 0.26130258, 0.27577711]
    if projector == "qwen2.5vl_merger":
        metadata["use_silu"] = True
        metadata["vision.n_wa_pattern"] = vision["fullatt_block_indexes"][0] + 1
        metadata["vision.window_size"] = vision["window_size"]
    elif projector == "qwen3vl_merger":
        levels = vision["deepstack_visual_indexes"]
        metadata["use_gelu"] = True
        metadata["vision.is_deepstack_layers"] = [i in levels for i in range(depth)]
        metadata["vision.spatial_merge_size"] = vision["spatial_merge_size"]
    elif projector == "glm4v":
        metadata["use_silu"] = True
        metadata |= _clip_colours(settings)
    elif projector == "paddleocr":
        metadata["use_gelu"] = True
        metadata["vision.image_min_pixels"] = settings["size"]["shortest_edge"]
        metadata["vision.image_max_pixels"] = settings["size"]["longest_edge"]
        metadata["vision.image_size"] = isqrt(settings["size"]["longest_edge"])
        metadata |= _clip_colours(settings)
    elif projector.startswith("kimi"):
        metadata["use_gelu"] = True
        metadata["vision.attention.layer_norm_epsilon"] = 1e-5
        metadata["vision.image_size"] = vision["init_pos_emb_height"] * patch
        metadata["vision.projector.scale_factor"] = settings["merge_kernel_size"]
        if projector == "kimik25":
            metadata["vision.image_min_pixels"] = 8 * patch**2
            metadata["vision.image_max_pixels"] = settings["in_patch_limit"] * patch**2
    elif projector == "gemma3":
        metadata["use_gelu"] = True
        count = int(config["mm_tokens_per_image"] ** 0.5)
        metadata["vision.projector.scale_factor"] = side // patch // count
    elif projector == "pixtral":
        metadata["vision.image_size"] = settings["size"]["longest_edge"]
        metadata["use_silu" if vision["hidden_act"] == "silu" else "use_gelu"] = True
        if "spatial_merge_size" in config:
            metadata["vision.spatial_merge_size"] = config["spatial_merge_size"]
        metadata |= _clip_colours(settings)
    elif projector == "idefics3":
        metadata["use_gelu"] = True
        metadata["vision.projector.scale_factor"] = config["scale_factor"]
        metadata["vision.preproc_image_size"] = settings["size"]["longest_edge"]
    elif projector == "internvl":
        metadata["use_gelu"] = True
        metadata["vision.projector.scale_factor"] = int(1 / config["downsample_ratio"])
        metadata["vision.preproc_min_tiles"] = settings.get("min_patches", 1)
        metadata["vision.preproc_max_tiles"] = settings["max_patches"]
        metadata |= _clip_colours(settings)
    return metadata


def _clip_colours(settings: dict[str, Any]) -> dict[str, Any]:
    """Return image settings with CLIP's colour statistics, transformers' default, if the file has
    none."""
    if "image_mean" in settings:
        return {}
    return {
        "vision.image_mean": [0.48145466, 0.4578275, 0.40821073],
        "vision.image_std": [0.26862954, 0.26130258, 0.27577711],
    }


def _tensors(
    projector: str, tensors: dict[str, Tensor], config: dict[str, Any]
) -> Iterator[tuple[str, Tensor]]:
    table = gguf.get_tensor_name_map(gguf.MODEL_ARCH.MMPROJ, 8)
    vision = config["vision_config"]
    for stored, tensor in tensors.items():
        name = stored.removeprefix("model.")
        if projector in ("idefics3", "internvl"):
            name = f"model.{name}"
        if projector == "gemma3":
            if ".head." in name:
                continue
            name = name.replace("vision_tower.", "vision_tower.vision_model.").replace(
                "vision_model.vision_model.", "vision_model."
            )
        if "soft_emb_norm" in name:
            tensor = tensor + 1
        if projector == "pixtral" and name.endswith(("q_proj.weight", "k_proj.weight")):
            tensor = permuted(tensor, vision["num_attention_heads"])
        if projector == "kimik25" and "wqkv" in name:
            tensor = _columns_first(tensor, vision["vt_num_attention_heads"])
        if projector == "kimivl" and "pos_emb" in name:
            tensor = tensor.flatten(0, 1)
        name = re.sub(r"mm_projector\.proj\.([02])", _linear, name)
        if projector == "kimivl" and "wqkv" in name:
            for part, third in zip("qkv", tensor.chunk(3), strict=True):
                theirs = table.get_name(name.replace("wqkv", f"w{part}"), (".weight", ".bias"))
                assert theirs is not None, name
                yield theirs, third
            continue
        if projector == "paddleocr":
            name = name.replace("visual.", "model.")
        if "patch_embed.proj.weight" in name and projector.startswith(("qwen", "glm")):
            first, second = tensor.unbind(2)
            yield "v.patch_embd.weight", first
            yield "v.patch_embd.weight.1", second
            continue
        if ".qkv." in name and projector not in ("qwen3vl_merger", "glm4v"):
            for part, third in zip("qkv", tensor.chunk(3), strict=True):
                theirs = table.get_name(name.replace("qkv", part), (".weight", ".bias"))
                assert theirs is not None, name
                yield theirs, third
            continue
        if "deepstack_merger_list" in name:
            _, _, level, layer, kind = name.split(".")
            number = vision["deepstack_visual_indexes"][int(level)]
            yield f"v.deepstack.{number}.{layer.removeprefix('linear_')}.{kind}", tensor
            continue
        base, _, kind = name.rpartition(".")
        if projector == "internvl" and (".lambda_" in name or "position_embedding" in name):
            name += ".weight"
        special = _NAMES.get(name) or (f"{_NAMES[base]}.{kind}" if base in _NAMES else None)
        theirs = special or table.get_name(name, (".weight", ".bias"))
        assert theirs is not None, name
        yield theirs, tensor


def _linear(match: re.Match[str]) -> str:
    """Return the converter's name of a layer of Kimi K2.5's projector, numbered 0 or 2."""
    return f"mm_projector.proj.linear_{1 + int(match[1]) // 2}"


def _columns_first(qkv: Tensor, heads: int) -> Tensor:
    """Reorder rotary pairs of queries and keys, which alternate between columns and rows, to all
    pairs of columns of a head before those of rows."""
    q, k, v = qkv.chunk(3)
    parts = [part.unflatten(0, (heads, -1, 2, 2)).transpose(1, 2).flatten(0, 3) for part in (q, k)]
    return torch.cat([*parts, v])
