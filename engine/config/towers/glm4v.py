"""The configuration of the vision tower of GLM-4.1V, GLM-4.5V and GLM-4.6V."""

from dataclasses import dataclass

from engine.config.towers.qwen_vl import ACTIVATIONS, QwenVision, shared_fields
from engine.config_reader import Reader

_IMAGE = 151343  # the token of pictures, if config.json names none


@dataclass(frozen=True, slots=True, kw_only=True)
class GlmVision(QwenVision):
    """The configuration of the vision tower of GLM-4.1V and later.

    The tower's MLPs are as wide as the text model's embeddings.

    qkv_bias: whether the projections to queries, keys and values have biases.
    merger_size: the inner width of the MLP that projects patches to the text model.
    positions: number of learned positions, a square grid.
    """

    qkv_bias: bool
    merger_size: int
    positions: int


def read_glm4v(config: Reader, settings: Reader) -> GlmVision:
    """Read the tower's configuration. Raises ConfigError naming file and key."""
    vision = config.inner("vision_config")
    shared = shared_fields(config, settings, 14, (8, 12, 12), _IMAGE)
    out = vision.size("out_hidden_size", 4096)
    return GlmVision(
        family="glm4v",
        hidden_size=vision.size("hidden_size", 1536),
        intermediate_size=out,
        num_layers=vision.size("depth", 24),
        out_size=out,
        activation=vision.one_of("hidden_act", ACTIVATIONS, "silu"),
        qkv_bias=vision.flag("attention_bias"),
        merger_size=vision.size("intermediate_size", 13696),
        positions=(vision.square("image_size", 336) // shared["patch_size"]) ** 2,
        **{**shared, "num_heads": vision.size("num_heads", 12)},
        norm_eps=vision.number("rms_norm_eps", 1e-5),
    )
