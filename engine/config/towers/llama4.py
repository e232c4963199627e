"""The configuration of Llama 4's vision tower."""

from dataclasses import dataclass

from engine.config.vision import TileVision, normalisation
from engine.config_reader import Reader

_PARTS = ("vision_model.", "multi_modal_projector.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Llama4Vision(TileVision):
    """The configuration of Llama 4's vision tower.

    theta: the base of rotary positions.
    adapted_size: the width of the two layers of the tower's adapter.
    """

    theta: float
    adapted_size: int


def read_llama4(config: Reader, settings: Reader) -> Llama4Vision:
    """Read the tower's configuration. Raises ConfigError naming file and key."""
    vision = config.inner("vision_config")
    rotary = vision.inner("rope_parameters")
    return Llama4Vision(
        family="llama4",
        image_token_id=config.count("image_token_index", 200092),
        names=tuple((part, part) for part in _PARTS),
        hidden_size=vision.size("hidden_size", 768),
        intermediate_size=vision.size("intermediate_size", 5632),
        num_layers=vision.size("num_hidden_layers", 34),
        num_heads=vision.size("num_attention_heads", 16),
        patch_size=vision.square("patch_size", 14),
        merge=round(1 / vision.number("pixel_shuffle_ratio", 0.5)),
        out_size=config.inner("text_config").size("hidden_size"),
        activation="gelu",
        norm_eps=1e-5,
        tile=vision.square("image_size", 448),
        theta=vision.number("rope_theta", rotary.number("rope_theta", 1e4)),
        adapted_size=vision.size("projector_output_dim", 4096),
        **normalisation(settings),
    )
