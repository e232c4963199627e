"""The configuration of the vision tower of Idefics 3 and SmolVLM."""

from dataclasses import dataclass

from engine.config.vision import TileVision, normalisation
from engine.config_reader import Reader

_ACTIVATIONS = ("gelu_pytorch_tanh", "gelu", "silu")


@dataclass(frozen=True, slots=True, kw_only=True)
class Idefics3Vision(TileVision):
    """The configuration of the vision tower of Idefics 3 and SmolVLM.

    positions: the side, in patches, of the square grid of learned positions.
    """

    positions: int


def read_idefics3(config: Reader, settings: Reader) -> Idefics3Vision:
    """Read the tower's configuration. Raises ConfigError naming file and key."""
    vision = config.inner("vision_config")
    patch = vision.square("patch_size", 32)
    side = vision.square("image_size", 224)
    return Idefics3Vision(
        family="idefics3",
        image_token_id=config.count("image_token_id", 128257),
        names=(("model.vision_model.", "vision."), ("model.connector.", "connector.")),
        hidden_size=vision.size("hidden_size", 1152),
        intermediate_size=vision.size("intermediate_size", 3072),
        num_layers=vision.size("num_hidden_layers", 12),
        num_heads=vision.size("num_attention_heads", 16),
        patch_size=patch,
        merge=config.size("scale_factor", 2),
        out_size=config.inner("text_config").size("hidden_size"),
        activation=vision.one_of("hidden_act", _ACTIVATIONS, _ACTIVATIONS[0]),
        norm_eps=vision.number("layer_norm_eps", 1e-6),
        tile=settings.inner("max_image_size").size("longest_edge", side),
        positions=side // patch,
        **normalisation(settings),
    )
