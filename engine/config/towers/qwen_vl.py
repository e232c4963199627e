"""The configurations of the vision towers of Qwen2-VL, Qwen2.5-VL, Qwen3-VL, Qwen3.5 and 3.6."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from engine.config.vision import (
    CLIP_DEVIATION,
    CLIP_MEAN,
    VisionConfig,
    normalisation,
    rotary_section,
)
from engine.config_reader import Reader
from engine.images.families.qwen_clips import clip_token

ACTIVATIONS = ("gelu_pytorch_tanh", "gelu", "silu")


@dataclass(frozen=True, slots=True, kw_only=True)
class QwenVision(VisionConfig):
    """The configuration of Qwen2-VL's vision tower, whose fields Qwen's later towers share.

    frames: the number of frames of a video that a patch covers; a still picture is repeated.
    merge: the side, in patches, of the square that becomes one embedding.
    """

    frames: int
    merge: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Qwen25Vision(QwenVision):
    """The configuration of Qwen2.5-VL's vision tower.

    window: the side, in embeddings, of the square window of layers with window attention.
    full_layers: the layers with full attention among all patches of a picture.
    """

    window: int
    full_layers: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Qwen3Vision(QwenVision):
    """The configuration of the vision tower of Qwen3-VL and later.

    positions: number of learned positions, a square grid.
    deepstack_layers: the tower's layers after which further embeddings are computed (DeepStack).
    """

    positions: int
    deepstack_layers: tuple[int, ...]


def shared_fields(
    config: Reader,
    settings: Reader,
    patch: int,
    section: tuple[int, ...],
    image_token_id: int = 151655,
) -> Mapping[str, Any]:
    """Return the fields of VisionConfig that all versions of Qwen-VL read in the same way.

    patch, section, image_token_id: defaults of patch_size, mrope_section and the token of pictures.
    """
    vision = config.inner("vision_config")
    # Flat files have the text model's keys at the top level.
    text = config.inner("text_config") if config.get("text_config") else config
    return {
        # files of Qwen3.5 and later always have this key
        "image_token_id": config.count("image_token_id", image_token_id),
        "names": (("model.visual.", "visual."), ("visual.", "visual.")),
        "num_heads": vision.size("num_heads", 16),
        "patch_size": vision.square("patch_size", patch),
        "mrope_section": rotary_section(text, section),
        "frames": vision.square("temporal_patch_size", 2),
        "merge": vision.size("spatial_merge_size", 2),
        **normalisation(settings, CLIP_MEAN, CLIP_DEVIATION),
    }


def read_qwen2_vl(config: Reader, settings: Reader) -> QwenVision:
    """Read the configuration of Qwen2-VL's tower. Raises ConfigError naming file and key."""
    vision = config.inner("vision_config")
    width = vision.size("embed_dim", 1280)
    return QwenVision(
        family="qwen2_vl",
        clip_token_id=clip_token(config),
        hidden_size=width,
        intermediate_size=width * vision.size("mlp_ratio", 4),
        num_layers=vision.size("depth", 32),
        norm_eps=1e-6,
        out_size=vision.size("hidden_size", 3584),
        activation=vision.one_of("hidden_act", ("quick_gelu", *ACTIVATIONS), "quick_gelu"),
        **shared_fields(config, settings, 14, (16, 24, 24)),
    )


def read_qwen2_5_vl(config: Reader, settings: Reader) -> Qwen25Vision:
    """Read the configuration of Qwen2.5-VL's tower. Raises ConfigError naming file and key."""
    vision = config.inner("vision_config")
    shared = shared_fields(config, settings, 14, (16, 24, 24))
    unit = shared["patch_size"] * shared["merge"]
    window = vision.size("window_size", 112)
    if window < unit:
        raise vision.error("window_size", f"must be {unit} pixels at least, got {window}")
    full = vision.listed("fullatt_block_indexes", int)
    return Qwen25Vision(
        family="qwen2_5_vl",
        clip_token_id=clip_token(config),
        hidden_size=vision.size("hidden_size", 3584),
        intermediate_size=vision.size("intermediate_size", 3420),
        num_layers=vision.size("depth", 32),
        norm_eps=1e-6,
        out_size=vision.size("out_hidden_size", 3584),
        activation=vision.one_of("hidden_act", ACTIVATIONS, "silu"),
        window=window // unit,
        full_layers=(7, 15, 23, 31) if full is None else tuple(full),
        **shared,
    )


def read_qwen3_vl(config: Reader, settings: Reader) -> Qwen3Vision:
    """Read the configuration of Qwen3-VL's tower, or of a later one.

    Raises ConfigError naming file and key.
    """
    vision, text = config.inner("vision_config"), config.inner("text_config")
    layers = tuple(vision.listed("deepstack_visual_indexes", int) or ())
    return Qwen3Vision(
        family="qwen3_vl",
        clip_token_id=clip_token(config),
        hidden_size=vision.size("hidden_size", 1152),
        intermediate_size=vision.size("intermediate_size", 4304),
        num_layers=vision.size("depth", 27),
        norm_eps=1e-6,
        out_size=vision.size("out_hidden_size", text.get("hidden_size")),
        activation=vision.one_of("hidden_act", ACTIVATIONS, ACTIVATIONS[0]),
        deepstack=len(layers),
        interleaved=True,
        positions=vision.size("num_position_embeddings", 2304),
        deepstack_layers=layers,
        # this mrope_section is Qwen3-VL's; files of Qwen3.5 and later always have theirs
        **shared_fields(config, settings, 16, (24, 20, 20)),
    )
