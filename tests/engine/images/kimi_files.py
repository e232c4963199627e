"""Writes models of transformers as folders in the formats in which Kimi's models are published."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

_PARTS = {
    "vision_tower.layers.": "vision_tower.encoder.blocks.",
    "vision_tower.final_layernorm": "vision_tower.encoder.final_layernorm",
    "pos_emb.position_embeddings": "pos_emb.weight",
    "attn.proj": "wo",
    "norm1": "norm0",
    "norm2": "norm1",
    "mlp.fc1": "mlp.fc0",
    "mlp.fc2": "mlp.fc1",
    "mm_projector.in_proj": "mm_projector.proj.0",
    "mm_projector.out_proj": "mm_projector.proj.2",
}
_OF_KIMI_VL = {
    "mm_projector.proj.0": "multi_modal_projector.linear_1",
    "mm_projector.proj.2": "multi_modal_projector.linear_2",
    "mm_projector.pre_norm": "multi_modal_projector.pre_norm",
}


def published(state: dict[str, Tensor], heads: int) -> dict[str, Tensor]:
    """Return a model's tensors with the names and layout of the published Kimi K2.5, in which
    rotary pairs are adjacent."""
    tensors = {}
    for stored, tensor in state.items():
        name = stored.removeprefix("model.")
        if name.startswith("language_model."):
            name = f"language_model.model.{name.removeprefix('language_model.')}"
        elif name.startswith("lm_head."):
            name = f"language_model.{name}"
        elif ".attn.q_proj" in name or ".attn.k_proj" in name:
            tensor = tensor.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)
        for theirs, ours in _PARTS.items():
            if theirs in name and not name.startswith("language_model."):
                name = name.replace(theirs, ours)
        tensors[name] = tensor
    for name in [name for name in tensors if ".attn.q_proj" in name]:
        parts = [tensors.pop(name.replace("q_proj", f"{part}_proj")) for part in "qkv"]
        tensors[name.replace("attn.q_proj", "wqkv")] = torch.cat(parts)
    return {name: tensor.contiguous() for name, tensor in tensors.items()}


def _config(model: Any) -> dict[str, Any]:
    config: dict[str, Any] = json.loads(model.config.to_json_string(use_diff=False))
    vision = config["vision_config"]
    for side in ("height", "width", "time"):
        vision[f"init_pos_emb_{side}"] = vision.pop(f"pos_emb_{side}")
    for key in ("hidden_act", "rope_parameters"):  # which published files do not have
        del vision[key]
    config["media_placeholder_token_id"] = config.pop("image_token_id")
    for key in ("video_token_id", "vision_start_token_id", "vision_end_token_id"):
        del config[key]
    return config


def write_kimi_k25(folder: Path, model: Any) -> None:
    """Write a model in the published format of Kimi K2.5 and K2.6."""
    config = _config(model)
    vision = config["vision_config"]
    heads = vision["num_attention_heads"]
    for key in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"):
        vision[f"vt_{key}"] = vision.pop(key)
    vision |= {"mm_projector_type": "patchmerger", "projector_ln_eps": 1e-5}
    vision |= {"mm_hidden_size": config.pop("projection_hidden_size")}
    del config["projection_layer_norm_eps"]
    config |= {"architectures": ["KimiK25ForConditionalGeneration"]}
    config["text_config"]["model_type"] = "kimi_k2"
    (folder / "config.json").write_text(json.dumps(config))
    save_file(published(model.state_dict(), heads), folder / "model.safetensors")


def write_kimi_vl(folder: Path, model: Any, media: dict[str, Any]) -> None:
    """Write a model in the published format of Kimi-VL.

    media: the settings of Kimi K2.5's processor.
    """
    config = _config(model)
    for key in ("projection_hidden_size", "projection_layer_norm_eps"):
        del config[key]
    config["vision_config"]["model_type"] = "moonvit"
    config |= {"architectures": ["KimiVLForConditionalGeneration"], "model_type": "kimi_vl"}
    (folder / "config.json").write_text(json.dumps(config))
    tensors = published(model.state_dict(), config["vision_config"]["num_attention_heads"])
    for theirs, ours in _OF_KIMI_VL.items():
        for name in [name for name in tensors if theirs in name]:
            tensors[name.replace(theirs, ours)] = tensors.pop(name)
    save_file(tensors, folder / "model.safetensors")
    merge = media["merge_kernel_size"]
    settings = {
        "patch_size": media["patch_size"],
        "in_token_limit": media["in_patch_limit"],
        "merge_kernel_size": [merge, merge],
        "pad_input": True,
        "num_pooled_tokens": 1024,
        **{key: media[key] for key in ("image_mean", "image_std")},
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))
