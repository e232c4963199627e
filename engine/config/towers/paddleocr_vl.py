"""The configuration of PaddleOCR-VL's vision tower."""

from dataclasses import dataclass

from engine.config.towers.qwen_vl import ACTIVATIONS, QwenVision, shared_fields
from engine.config_reader import Reader

_IMAGE = 100295  # the token of pictures, if config.json names none
_TOWERS = ("model.visual.vision_model.", "visual.vision_model.")
# The parts that are used; published files also have a head and packed positions.
_PARTS = ("embeddings.position_embedding.", "encoder.", "post_layernorm.")
_NAMES = (
    *((f"{name}embeddings.patch_embedding.", "visual.patch_embed.proj.") for name in _TOWERS),
    *((f"{name}{part}", f"visual.{part}") for name in _TOWERS for part in _PARTS),
    ("model.projector.", "visual.merger."),
    ("mlp_AR.", "visual.merger."),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PaddleVision(QwenVision):
    """The configuration of PaddleOCR-VL's tower: SigLIP's layers with rotary positions.

    positions: number of learned positions, a square grid.
    """

    positions: int


def read_paddleocr_vl(config: Reader, settings: Reader) -> PaddleVision:
    """Read the tower's configuration. Raises ConfigError naming file and key."""
    vision = config.inner("vision_config")
    text = config.inner("text_config") if config.get("text_config") else config
    shared = shared_fields(config, settings, 14, (16, 24, 24), _IMAGE)
    own = {"names": _NAMES, "num_heads": vision.size("num_attention_heads", 16), "frames": 1}
    return PaddleVision(
        family="paddleocr_vl",
        hidden_size=vision.size("hidden_size", 1152),
        intermediate_size=vision.size("intermediate_size", 4304),
        num_layers=vision.size("num_hidden_layers", 27),
        out_size=text.size("hidden_size", 1024),
        activation=vision.one_of("hidden_act", ACTIVATIONS, ACTIVATIONS[0]),
        norm_eps=vision.number("layer_norm_eps", 1e-6),
        positions=(vision.square("image_size", 384) // shared["patch_size"]) ** 2,
        **{**shared, **own},
    )
