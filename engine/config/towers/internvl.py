"""The configuration of InternVL's vision tower, InternViT."""

from dataclasses import dataclass

from engine.architectures.record import Renames
from engine.config.vision import (
    CLIP_DEVIATION,
    CLIP_MEAN,
    TileVision,
    normalisation,
    text_alone,
)
from engine.config_reader import Reader

_ACTIVATIONS = ("gelu", "gelu_pytorch_tanh", "silu")
_PARTS = ("vision_tower.", "multi_modal_projector.")


@dataclass(frozen=True, slots=True, kw_only=True)
class InternVision(TileVision):
    """The configuration of InternVL's vision tower.

    positions: the side, in patches, of the square grid of learned positions; 0 = none.
    norm: "layer_norm" or "rms_norm".
    qkv_bias: whether the projections to queries, keys and values have biases.
    qk_norm: whether queries and keys are normed over all heads together.
    last_norm: whether a norm follows the last layer.
    projector_activation: the activation between the two linear layers that project patches to the
        text model's width.
    """

    positions: int
    norm: str
    qkv_bias: bool
    qk_norm: bool
    last_norm: bool
    projector_activation: str


def read_internvl(config: Reader, settings: Reader) -> InternVision | None:
    """Read the tower's configuration; None if config.json selects an inner layer's output.

    Raises ConfigError naming file and key.
    """
    layer = config.get("vision_feature_layer", -1)
    strategy = config.get("vision_feature_select_strategy", "default")
    if layer != -1 or strategy != "default":
        text_alone(
            config,
            f"vision_feature_layer is {layer!r} and vision_feature_select_strategy {strategy!r}, "
            "and only -1 and 'default' are supported",
        )
        return None
    names = tuple((before + part, part) for part in _PARTS for before in ("model.", ""))
    text = config.inner("text_config")
    return _tower(
        "internvl", config, settings, text, names, qkv_bias="attention_bias", qk_norm="use_qk_norm"
    )


def read_internvl_chat(config: Reader, settings: Reader) -> InternVision | None:
    """Read the tower's configuration in the publisher's format.

    Returns None, after a log line, for values of its keys that are not supported.

    Raises ConfigError naming file and key.
    """
    wanted_values = {"select_layer": -1, "ps_version": "v2", "pad2square": False}
    if settings.size("max_patches", 1) > 1:
        wanted_values["use_thumbnail"] = True
    defaults = {"select_layer": -1, "ps_version": "v1"}  # defaults of the publisher's class
    for key, wanted in wanted_values.items():
        value = config.get(key, defaults.get(key, False))
        if value != wanted:
            text_alone(config, f"{key} is {value!r}, and only {wanted!r} is supported")
            return None
    if settings.get("image_token_id") == -1:
        text_alone(config, "the tokenizer has no special token <IMG_CONTEXT>")
        return None
    names = tuple((part, part) for part in ("vision_model.", "mlp1."))
    text = config.inner("llm_config")
    return _tower(
        "internvl_chat",
        config,
        settings,
        text,
        names,
        qkv_bias="qkv_bias",
        qk_norm="qk_normalization",
    )


def _tower(
    family: str,
    config: Reader,
    settings: Reader,
    text: Reader,
    names: Renames,
    *,
    qkv_bias: str,
    qk_norm: str,
) -> InternVision:
    """Return the tower's configuration in either of the two formats.

    text: the text model's config.
    names: see `VisionConfig`.
    qkv_bias, qk_norm: the format's keys of vision_config for these fields.
    """
    vision = config.inner("vision_config")
    patch, side = vision.square("patch_size", 14), vision.square("image_size", 448)
    return InternVision(
        family=family,
        image_token_id=config.count("image_token_id", settings.count("image_token_id", 151667)),
        names=names,
        hidden_size=vision.size("hidden_size", 1024),
        intermediate_size=vision.size("intermediate_size", 4096),
        num_layers=vision.size("num_hidden_layers", 24),
        num_heads=vision.size("num_attention_heads", 16),
        patch_size=patch,
        merge=int(1 / config.number("downsample_ratio", 0.5)),
        out_size=text.size("hidden_size"),
        activation=vision.one_of("hidden_act", _ACTIVATIONS, _ACTIVATIONS[0]),
        norm_eps=vision.number("layer_norm_eps", 1e-6),
        tile=settings.inner("size").size("height", side),
        positions=side // patch if vision.flag("use_absolute_position_embeddings", True) else 0,
        norm=vision.one_of("norm_type", ("layer_norm", "rms_norm"), "layer_norm"),
        qkv_bias=vision.flag(qkv_bias),
        qk_norm=vision.flag(qk_norm),
        last_norm=not vision.flag("use_mean_pooling", True),
        projector_activation=config.one_of("projector_hidden_act", _ACTIVATIONS, _ACTIVATIONS[0]),
        **normalisation(settings, CLIP_MEAN, CLIP_DEVIATION),
    )
