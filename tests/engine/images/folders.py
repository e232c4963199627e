"""Tiny random checkpoints of models that take images, saved by transformers."""

import json
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import tokenizers
import torch
import transformers
from PIL import Image as Pillow
from tokenizers.models import WordLevel

from engine.images.processor import ImageProcessor, image_processor
from tests.engine.images.kimi_files import write_kimi_k25

if TYPE_CHECKING:
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
GLM4V = {
    "depth": 2,
    "hidden_size": 64,
    "num_heads": 4,
    "intermediate_size": 80,
    "out_hidden_size": 48,
    "image_size": 112,
    "patch_size": 14,
}
PIXTRAL = {
    "model_type": "pixtral",
    "hidden_size": 64,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
GEMMA4_TEXT = TEXT | {
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "sliding_window": 8,
    "global_head_dim": 24,
    "hidden_size_per_layer_input": 0,
    "vocab_size_per_layer_input": 100,
    "pad_token_id": 3,
}
GEMMA4 = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "patch_size": 4,
    "position_embedding_size": 64,
}
GEMMA4_TOKENS = {"image_token_id": 90, "boi_token_id": 91, "eoi_token_id": 92, "audio_config": None}

SIGLIP = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "patch_size": 4,
}


def _axes(*section: int, **options: Any) -> dict[str, Any]:
    parameters = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": list(section)}
    return {"rope_parameters": parameters | options}


@dataclass(frozen=True)
class Case:
    """A family of vision-language models, and the settings of its tiny checkpoint.

    name: transformers' class without ForConditionalGeneration.
    text, vision: keys of text_config and vision_config. outer: other keys of config.json.
    processor: transformers' image processor; "" if that needs torchvision, in which case our own
        computes the pixels. settings: keys of its file.
    tokens: text -> id of tokens around images, for tokenizer.json.
    """

    name: str
    text: dict[str, Any]
    vision: dict[str, Any]
    processor: str
    settings: dict[str, Any]
    outer: dict[str, Any]
    tokens: dict[str, int] = field(default_factory=dict)
    seed: int = 0  # chosen so that no output contains the image token
    types: str = "mm_token_type_ids"  # transformers' argument with tokens' kinds; "" for none
    # writes config.json and weights, if `save_pretrained` does not write the published format
    write: Callable[[Path, Any], None] | None = None


TOKENS = {"image_token_id": 90, "video_token_id": 91, "vision_start_token_id": 92}
_SMOL_TOKENS = {
    "<image>": 90,
    "<fake_token_around_image>": 91,
    "<global-img>": 92,
    "\n": 93,
    "\n\n": 94,
    "<row_1_col_1>": 95,
    "<row_1_col_2>": 96,
    "<row_2_col_1>": 97,
    "<row_2_col_2>": 98,
}
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
    "SmolVLM": Case(
        "SmolVLM",
        TEXT | {"model_type": "llama", "pad_token_id": 0},
        SIGLIP | {"image_size": 16},
        "SmolVLMImageProcessorPil",
        {"size": {"longest_edge": 32}, "max_image_size": {"longest_edge": 16}},
        {"image_token_id": 90, "scale_factor": 2},
        _SMOL_TOKENS,
    ),
    "GLM-4.1V": Case(
        "Glm4v",
        TEXT | _axes(1, 1, 1, partial_rotary_factor=0.5),
        GLM4V | {"attention_bias": True},
        "Glm4vImageProcessorPil",
        {"size": {"shortest_edge": 2 * 56 * 56, "longest_edge": 2 * 140 * 140}},
        TOKENS,
    ),
    # A mixture of experts, and a table of positions smaller than most images.
    "GLM-4.5V": Case(
        "Glm4vMoe",
        TEXT
        | _axes(1, 1, 1, partial_rotary_factor=0.5)
        | {
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "first_k_dense_replace": 1,
        },
        GLM4V | {"image_size": 42},
        "Glm4vImageProcessorPil",
        {"size": {"shortest_edge": 2 * 56 * 56, "longest_edge": 2 * 140 * 140}},
        TOKENS,
    ),
    "PaddleOCR-VL": Case(
        "PaddleOCRVL",
        TEXT | _axes(2, 3, 1),
        SIGLIP | {"image_size": 28},
        "PaddleOCRVLImageProcessorPil",
        {
            "size": {"shortest_edge": 16 * 16, "longest_edge": 48 * 48},
            "patch_size": 4,
            "merge_size": 2,
        },
        TOKENS,
    ),
    # Positions are rounded to the table's grid, and tiles have fewer patches than the table.
    "Idefics 3": Case(
        "Idefics3",
        TEXT | {"model_type": "llama", "pad_token_id": 0},
        SIGLIP | {"image_size": 28},
        "Idefics3ImageProcessorPil",
        {
            "size": {"longest_edge": 48},
            "max_image_size": {"longest_edge": 24},
            "image_mean": [0.5, 0.4, 0.3],
            "image_std": [0.5, 0.6, 0.7],
        },
        {"image_token_id": 90, "scale_factor": 3},
        _SMOL_TOKENS,
    ),
    "InternVL": Case(
        "InternVL",
        TEXT | {"model_type": "qwen2"},
        SIGLIP | {"image_size": [16, 16], "patch_size": [4, 4], "attention_bias": True},
        "GotOcr2ImageProcessorPil",
        {"size": {"height": 16, "width": 16}, "max_patches": 4, "crop_to_patches": True},
        {"image_token_id": 90, "downsample_ratio": 0.5},
        {"<IMG_CONTEXT>": 90, "<img>": 91, "</img>": 92},
    ),
    # Norms of the 6B vision encoder; a table of positions for another size than that of tiles.
    "InternVL 6B": Case(
        "InternVL",
        TEXT | {"model_type": "qwen3"},
        SIGLIP
        | {
            "image_size": [28, 28],
            "patch_size": [4, 4],
            "norm_type": "rms_norm",
            "use_qk_norm": True,
            "use_mean_pooling": False,
        },
        "GotOcr2ImageProcessorPil",
        {
            "size": {"height": 16, "width": 16},
            "min_patches": 2,
            "max_patches": 3,
            "crop_to_patches": True,
            "image_mean": [0.5, 0.4, 0.3],
            "image_std": [0.5, 0.6, 0.7],
        },
        {"image_token_id": 90, "downsample_ratio": 0.5, "projector_hidden_act": "silu"},
        {"<IMG_CONTEXT>": 90, "<img>": 91, "</img>": 92},
    ),
    "Llama 4": Case(
        "Llama4",
        TEXT
        | {
            "model_type": "llama4_text",
            "num_local_experts": 3,
            "num_experts_per_tok": 1,
            "intermediate_size_mlp": 64,
            "no_rope_layer_interval": 2,
            "attention_chunk_size": 16,
        },
        SIGLIP
        | {
            "intermediate_size": 128,
            "image_size": 16,
            "projector_input_dim": 40,
            "projector_output_dim": 40,
            "vision_output_dim": 40,
        },
        "",
        {"size": {"height": 16, "width": 16}, "max_patches": 4},
        {"image_token_index": 90, "boi_token_index": 91, "eoi_token_index": 92},
        {
            "<|patch|>": 90,
            "<|image_start|>": 91,
            "<|image_end|>": 92,
            "<|image|>": 93,
            "<|tile_x_separator|>": 94,
            "<|tile_y_separator|>": 95,
        },
    ),
    # A table of positions whose size no image's grid has, and images that are shrunk.
    "Kimi K2.5": Case(
        "Kimi_K25",
        TEXT
        | {
            "head_dim": 4,
            "num_key_value_heads": 4,
            "q_lora_rank": 24,
            "kv_lora_rank": 16,
            "qk_nope_head_dim": 8,
            "qk_rope_head_dim": 4,
            "v_head_dim": 8,
            "first_k_dense_replace": 2,
        },
        {
            "hidden_size": 64,
            "intermediate_size": 80,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "patch_size": 4,
            "pos_emb_height": 7,
            "pos_emb_width": 7,
        },
        "",
        {
            "media_proc_cfg": {
                "in_patch_limit": 100,
                "patch_size": 4,
                "image_mean": [0.5, 0.4, 0.3],
                "image_std": [0.5, 0.6, 0.7],
                "merge_kernel_size": 2,
                "fixed_output_tokens": None,
                "patch_limit_on_one_side": 40,
            }
        },
        {
            "image_token_id": 90,
            "video_token_id": 91,
            "projection_hidden_size": 64,
            "tie_word_embeddings": False,
        },
        {"<|media_pad|>": 90},
        seed=1,
        types="",
        write=write_kimi_k25,
    ),
    # An embedding is of 2 x 2 patches.
    "Mistral 3": Case(
        "Mistral3",
        TEXT | {"model_type": "ministral3", "rms_norm_eps": 1e-3},
        PIXTRAL | {"hidden_act": "silu", "patch_size": 14, "rope_parameters": {"rope_theta": 50.0}},
        "PixtralImageProcessorPil",
        {"size": {"longest_edge": 112}, "patch_size": 28},
        {"image_token_index": 90, "spatial_merge_size": 2},
    ),
    "Pixtral": Case(
        "Llava",
        TEXT | {"model_type": "mistral"},
        PIXTRAL | {"patch_size": 16},
        "PixtralImageProcessorPil",
        {"size": {"longest_edge": 64}, "image_mean": [0.5, 0.4, 0.3], "image_std": [0.5, 0.6, 0.7]},
        {
            "image_token_index": 90,
            "vision_feature_layer": -1,
            "vision_feature_select_strategy": "full",
        },
    ),
    "Gemma 4 31B": Case(
        "Gemma4",
        GEMMA4_TEXT | {"use_bidirectional_attention": "vision"},
        GEMMA4 | {"standardize": True},
        "Gemma4ImageProcessorPil",
        {"max_soft_tokens": 12, "patch_size": 4},
        GEMMA4_TOKENS,
    ),
    "Gemma 4 E2B": Case(
        "Gemma4",
        GEMMA4_TEXT
        | {
            "num_kv_shared_layers": 2,
            "hidden_size_per_layer_input": 8,
        },
        GEMMA4 | {"use_clipped_linears": True},
        "Gemma4ImageProcessorPil",
        {"max_soft_tokens": 12, "patch_size": 4},
        GEMMA4_TOKENS,
    ),
}


def save_model(folder: Path, case: Case) -> "PreTrainedModel":
    """Save a random float32 model with its processor's file; return it."""
    torch.manual_seed(case.seed)
    config_class = getattr(transformers, f"{case.name}Config")
    config = config_class(text_config=case.text, vision_config=case.vision, **case.outer)
    model = getattr(transformers, f"{case.name}ForConditionalGeneration")(config).eval().float()
    for module in model.modules():
        # transformers up to 5.22 resizes the positions of PaddleOCR-VL with aligned corners.
        if getattr(module, "interpolation_align_corners", False) and case.name == "PaddleOCRVL":
            module.interpolation_align_corners = False
    for name, tensor in model.state_dict().items():
        if tensor.is_floating_point() and "inv_freq" not in name:
            deviation = 0.3 if tensor.dim() < 2 else 1 / math.sqrt(max(tensor[0].numel(), 1))
            tensor.normal_(0, deviation)
            if name.endswith(("put_min", "put_max")):  # clamps of a layer's input and output
                tensor.fill_(-0.9 if name.endswith("min") else 1.1)
            if "norm" in name and name.endswith("weight") and tensor.dim() == 1:
                tensor.add_(1)
    if case.write is None:
        model.save_pretrained(folder)
    else:
        case.write(folder, model)
    settings = {"image_processor_type": case.processor.removesuffix("Pil"), **case.settings}
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))
    save_tokenizer(folder, case)
    return model


def save_tokenizer(folder: Path, case: Case) -> None:
    """Save a tokenizer with the case's tokens around images, if it has any."""
    if case.tokens:
        others = set(range(case.text["vocab_size"])) - set(case.tokens.values())
        words = {f"{token}": token for token in others} | case.tokens
        tokenizer = tokenizers.Tokenizer(WordLevel(words, unk_token="0"))
        tokenizer.add_special_tokens([text for text in case.tokens if not text.isspace()])
        tokenizer.save(str(folder / "tokenizer.json"))


def save_clip_settings(folder: Path, case: Case) -> None:
    """Save settings that resize the frames of clips to a few patches."""
    unit = 2 * case.settings.get("patch_size", 14)
    frames = 1 if case.name.startswith("Qwen2") else 4
    size = {"shortest_edge": 4 * unit**2 * frames, "longest_edge": 7 * unit**2 * frames}
    (folder / "video_preprocessor_config.json").write_text(json.dumps({"size": size}))


def load_processor(folder: Path) -> ImageProcessor | None:
    """Return our image processor for a folder; None if the folder has no settings of one."""

    def encode(text: str) -> list[int]:
        tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
        return tokenizer.encode(text).ids

    return image_processor(folder, encode)


def their_processor(case: Case) -> Any:
    """Return transformers' image processor of a case."""
    theirs = getattr(transformers, case.processor)
    if most := case.settings.get("max_soft_tokens"):  # fewer than transformers supports
        sys.modules[theirs.__module__]._SUPPORTED_SOFT_TOKENS = (most,)  # type: ignore[attr-defined]
    return theirs(**case.settings)


def their_inputs(
    case: Case, pictures: Sequence[Pillow.Image], ours: ImageProcessor
) -> dict[str, Any]:
    """Return the inputs of transformers' model for the images of one prompt.

    ours: our processor, which computes the pixels if transformers' needs torchvision.
    """
    if not case.processor:
        tiles = [ours.pixels(image, ours.layout(*image.size)) for image in pictures]
        if case.name == "Kimi_K25":
            return _kimi_inputs(tiles, case.settings["media_proc_cfg"])
        pixels = torch.from_numpy(np.concatenate(tiles)).permute(0, 3, 1, 2)
        return {"pixel_values": (pixels.float() / 255 - 0.5) / 0.5}
    inputs = dict(their_processor(case)(images=pictures, return_tensors="pt"))
    for key in ("num_crops", "num_patches", "num_soft_tokens_per_image"):  # for their tokens
        inputs.pop(key, None)
    return inputs


def _kimi_inputs(tiles: Sequence[Any], media: dict[str, Any]) -> dict[str, Any]:
    """Return Kimi's inputs: patches [n, 3, side, side] of all images, and the images' grids."""
    side = media["patch_size"]
    cut, grids = [], []
    for tile in tiles:
        scaled = (tile[0] / 255 - media["image_mean"]) / media["image_std"]
        rows, columns = scaled.shape[0] // side, scaled.shape[1] // side
        patches = scaled.reshape(rows, side, columns, side, 3).transpose(0, 2, 4, 1, 3)
        cut.append(torch.from_numpy(patches.reshape(-1, 3, side, side)).float())
        grids.append([1, rows, columns])
    return {"pixel_values": torch.cat(cut), "image_grid_thw": torch.tensor(grids)}


def picture(width: int, height: int, seed: int = 0) -> Pillow.Image:
    """Return a random image with large and small shapes."""
    rng = np.random.default_rng(seed)
    small = Pillow.fromarray(rng.integers(0, 256, (5, 7, 3), np.uint8))
    smooth = np.asarray(small.resize((width, height), Pillow.Resampling.BICUBIC), np.int16)
    noise = rng.integers(-20, 21, smooth.shape, np.int16)
    return Pillow.fromarray(np.clip(smooth + noise, 0, 255).astype(np.uint8))
