"""The towers of Qwen3-VL, Qwen3.5 and Qwen3.6."""

from dataclasses import dataclass

from engine.config.vision import (
    CLIP_DEVIATION,
    CLIP_MEAN,
    VisionConfig,
    normalisation,
    rotary_section,
    square,
)
from engine.config_reader import Reader

_ACTIVATIONS = ("gelu_pytorch_tanh", "gelu", "silu")


@dataclass(frozen=True, slots=True, kw_only=True)
class QwenVision(VisionConfig):
    """The tower of Qwen3-VL and later.

    frames: frames of a patch; a still picture is repeated.
    merge: patches on the side of one embedding.
    positions: rows of the table of learned positions, a square.
    deepstack_layers: the layers after which a level of embeddings is made.
    """

    frames: int
    merge: int
    positions: int
    deepstack_layers: tuple[int, ...]


def read_qwen3_vl(config: Reader, settings: Reader) -> QwenVision:
    """Read the tower. Raises ConfigError naming file and key."""
    vision, text = config.inner("vision_config"), config.inner("text_config")
    layers = tuple(vision.listed("deepstack_visual_indexes", int) or ())
    return QwenVision(
        family="qwen3_vl",
        image_token_id=config.count("image_token_id"),
        names=(("model.visual.", "visual."), ("visual.", "visual.")),
        hidden_size=vision.size("hidden_size", 1152),
        intermediate_size=vision.size("intermediate_size", 4304),
        num_layers=vision.size("depth", 27),
        num_heads=vision.size("num_heads", 16),
        patch_size=square(vision, "patch_size", 16),
        out_size=vision.size("out_hidden_size", text.get("hidden_size")),
        activation=vision.one_of("hidden_act", _ACTIVATIONS, _ACTIVATIONS[0]),
        norm_eps=1e-6,
        deepstack=len(layers),
        # files of Qwen3.5 and later always have their own
        mrope_section=rotary_section(text, (24, 20, 20)),
        interleaved=True,
        frames=square(vision, "temporal_patch_size", 2),
        merge=vision.size("spatial_merge_size", 2),
        positions=vision.size("num_position_embeddings", 2304),
        deepstack_layers=layers,
        **normalisation(settings, CLIP_MEAN, CLIP_DEVIATION),
    )
