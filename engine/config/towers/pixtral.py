"""The configuration of the vision tower of Pixtral and Mistral 3."""

from dataclasses import dataclass

from engine.config.vision import (
    CLIP_DEVIATION,
    CLIP_MEAN,
    VisionConfig,
    normalisation,
    text_alone,
)
from engine.config_reader import Reader
from engine.images.families.pixtral_config import merges, patch_and_merge

_ACTIVATIONS = ("gelu", "silu", "gelu_pytorch_tanh")
_PARTS = ("vision_tower.", "multi_modal_projector.")


@dataclass(frozen=True, slots=True, kw_only=True)
class PixtralVision(VisionConfig):
    """The configuration of the vision tower of Pixtral and Mistral 3.

    theta: the base of rotary positions.
    merge: the side, in patches, of the square that becomes one embedding.
    merger_eps: epsilon of the norm before patches are merged; None = each patch is an embedding.
    projector_activation, projector_bias: the activation and biases of the two linear layers that
        project patches to the text model's width.
    """

    theta: float
    merge: int
    merger_eps: float | None
    projector_activation: str
    projector_bias: bool


def read_pixtral(config: Reader, settings: Reader) -> PixtralVision | None:
    """Read the tower's configuration; None if config.json selects an inner layer's output.

    Raises ConfigError naming file and key.
    """
    vision, text = config.inner("vision_config"), config.inner("text_config")
    merged = merges(config)
    layer = config.get("vision_feature_layer", -1 if merged else -2)  # transformers' defaults
    strategy = config.get("vision_feature_select_strategy", "full" if merged else "default")
    if layer != -1 or strategy != "full":
        text_alone(
            config,
            f"vision_feature_layer is {layer!r} and vision_feature_select_strategy {strategy!r}, "
            "and only -1 and 'full' are supported",
        )
        return None
    patch, merge = patch_and_merge(config)
    theta = vision.number("rope_theta", vision.inner("rope_parameters").number("rope_theta", 1e4))
    return PixtralVision(
        family="pixtral",
        image_token_id=config.count("image_token_id", config.count("image_token_index", 10)),
        names=tuple((before + part, part) for part in _PARTS for before in ("model.", "")),
        hidden_size=vision.size("hidden_size", 1024),
        intermediate_size=vision.size("intermediate_size", 4096),
        num_layers=vision.size("num_hidden_layers", 24),
        num_heads=vision.size("num_attention_heads", 16),
        patch_size=patch,
        out_size=text.size("hidden_size"),
        activation=vision.one_of("hidden_act", _ACTIVATIONS, "gelu"),
        norm_eps=1e-5,
        theta=theta,
        merge=merge,
        merger_eps=text.number("rms_norm_eps", 1e-6) if merged else None,
        projector_activation=config.one_of("projector_hidden_act", _ACTIVATIONS, "gelu"),
        projector_bias=config.flag("multimodal_projector_bias", not merged),
        **normalisation(settings, CLIP_MEAN, CLIP_DEVIATION),
    )
