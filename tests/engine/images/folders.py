"""Tiny random checkpoints of models that take pictures, saved by transformers as users' are."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from PIL import Image as Pillow
from transformers import PreTrainedModel

TEXT: dict[str, Any] = {
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 100,
    "head_dim": 12,
    "max_position_embeddings": 512,
}
QWEN3 = {
    "depth": 3,
    "hidden_size": 64,
    "num_heads": 4,
    "intermediate_size": 80,
    "out_hidden_size": 48,
    "patch_size": 16,
    "num_position_embeddings": 49,
}


def _axes(*section: int, **options: Any) -> dict[str, Any]:
    parameters = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": list(section)}
    return {"rope_parameters": parameters | options}


@dataclass(frozen=True)
class Case:
    """A family: its class without ForConditionalGeneration, the keys of its config, and of its
    processor's file.

    outer: keys of config.json beside those of the two models.
    """

    name: str
    text: dict[str, Any]
    vision: dict[str, Any]
    processor: str
    settings: dict[str, Any]
    outer: dict[str, Any]
    seed: int = 0  # one with which no output has the token of images
    types: str = "mm_token_type_ids"  # what transformers calls the kinds of tokens


TOKENS = {"image_token_id": 90, "video_token_id": 91, "vision_start_token_id": 92}
CASES = {
    "Gemma 3": Case(
        "Gemma3",
        TEXT
        | {
            "layer_types": ["sliding_attention", "full_attention"],
            "sliding_window": 10,
            "query_pre_attn_scalar": 12,
        },
        {
            "hidden_size": 64,
            "intermediate_size": 80,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "image_size": 84,
            "patch_size": 14,
        },
        "Gemma3ImageProcessorPil",
        {"size": {"height": 84, "width": 84}, "image_std": [0.5, 0.6, 0.7]},
        {
            "image_token_index": 90,
            "boi_token_index": 91,
            "eoi_token_index": 92,
            "mm_tokens_per_image": 9,
        },
        types="token_type_ids",
    ),
    "Qwen2-VL": Case(
        "Qwen2VL",
        TEXT | _axes(1, 2, 3),
        {"depth": 2, "embed_dim": 48, "num_heads": 3, "hidden_size": 48, "mlp_ratio": 2},
        "Qwen2VLImageProcessorPil",
        {"min_pixels": 56 * 56, "max_pixels": 140 * 140},
        TOKENS,
        seed=1,
    ),
    "Qwen2.5-VL": Case(
        "Qwen2_5_VL",
        TEXT | _axes(2, 3, 1),
        {
            "depth": 3,
            "hidden_size": 48,
            "num_heads": 3,
            "intermediate_size": 60,
            "out_hidden_size": 48,
            "window_size": 56,
            "fullatt_block_indexes": [1],
        },
        "Qwen2VLImageProcessorPil",
        {"min_pixels": 56 * 56, "max_pixels": 140 * 140, "patch_size": 14},
        TOKENS,
    ),
    "Qwen3-VL": Case(
        "Qwen3VL",
        TEXT | _axes(2, 2, 2, mrope_interleaved=True),
        QWEN3 | {"deepstack_visual_indexes": [0, 2]},
        "Qwen2VLImageProcessorPil",
        {
            "size": {"shortest_edge": 64 * 64, "longest_edge": 192 * 192},
            "patch_size": 16,
            "image_mean": [0.5, 0.4, 0.3],
            "image_std": [0.5, 0.6, 0.7],
        },
        TOKENS,
    ),
    "Qwen3.5": Case(
        "Qwen3_5",
        TEXT
        | {
            "layer_types": ["linear_attention", "full_attention"],
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 2,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
            **_axes(1, 1, 1, mrope_interleaved=True, partial_rotary_factor=0.5),
        },
        QWEN3,
        "Qwen2VLImageProcessorPil",
        {"min_pixels": 64 * 64, "max_pixels": 192 * 192, "patch_size": 16},
        TOKENS,
    ),
}


def save_model(folder: Path, case: Case) -> PreTrainedModel:
    """Save a random float32 model with its processor's file; return it."""
    torch.manual_seed(case.seed)
    config_class = getattr(transformers, f"{case.name}Config")
    config = config_class(text_config=case.text, vision_config=case.vision, **case.outer)
    model = getattr(transformers, f"{case.name}ForConditionalGeneration")(config).eval().float()
    for name, tensor in model.state_dict().items():
        if tensor.is_floating_point() and "inv_freq" not in name:
            deviation = 0.3 if tensor.dim() < 2 else 1 / math.sqrt(max(tensor[0].numel(), 1))
            tensor.normal_(0, deviation)
            if "norm" in name and name.endswith("weight") and tensor.dim() == 1:
                tensor.add_(1)
    model.save_pretrained(folder)
    settings = {"image_processor_type": case.processor.removesuffix("Pil"), **case.settings}
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))
    return model


def their_processor(case: Case) -> Any:
    return getattr(transformers, case.processor)(**case.settings)


def their_inputs(case: Case, pictures: Sequence[Pillow.Image]) -> dict[str, Any]:
    """Return the inputs of transformers' model for pictures."""
    inputs = dict(their_processor(case)(images=pictures, return_tensors="pt"))
    inputs.pop("num_crops", None)  # which is for their tokens
    return inputs


def picture(width: int, height: int, seed: int = 0) -> Pillow.Image:
    """Return a random picture with large and small shapes."""
    rng = np.random.default_rng(seed)
    small = Pillow.fromarray(rng.integers(0, 256, (5, 7, 3), np.uint8))
    smooth = np.asarray(small.resize((width, height), Pillow.Resampling.BICUBIC), np.int16)
    noise = rng.integers(-20, 21, smooth.shape, np.int16)
    return Pillow.fromarray(np.clip(smooth + noise, 0, 255).astype(np.uint8))
