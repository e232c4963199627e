"""read_gemma3: reads the configuration of Gemma 3's vision tower."""

import math

from engine.config.vision import TileVision, normalisation
from engine.config_reader import Reader

_ACTIVATIONS = ("gelu_pytorch_tanh", "gelu", "silu")
_NAMES = (
    # stored as a bare parameter, without `.weight`
    (
        "multi_modal_projector.mm_input_projection_weight",
        "projector.mm_input_projection.weight",
    ),
    ("multi_modal_projector.", "projector."),
    *(
        (f"vision_tower.{model}{part}", f"vision.{part}")
        for model in ("vision_model.", "")
        # the parts that are used; SigLIP's head is not
        for part in ("embeddings.", "encoder.", "post_layernorm.")
    ),
)


def read_gemma3(config: Reader, settings: Reader) -> TileVision:
    """Read the tower's configuration. Raises ConfigError naming file and key."""
    vision, text = config.inner("vision_config"), config.inner("text_config")
    side, patch = vision.square("image_size", 224), vision.square("patch_size", 16)
    count = config.size("mm_tokens_per_image", 256)
    lines = math.isqrt(count)
    if lines**2 != count or side % (patch * lines):
        raise config.error(
            "mm_tokens_per_image",
            f"{count} embeddings do not divide a picture of {side} x {side} pixels, whose patches "
            f"are of {patch} x {patch}",
        )
    return TileVision(
        family="gemma3",
        image_token_id=config.count("image_token_index", config.count("image_token_id", 262144)),
        names=(*((f"model.{theirs}", ours) for theirs, ours in _NAMES), *_NAMES),
        hidden_size=vision.size("hidden_size", 768),
        intermediate_size=vision.size("intermediate_size", 3072),
        num_layers=vision.size("num_hidden_layers", 12),
        num_heads=vision.size("num_attention_heads", 12),
        patch_size=patch,
        out_size=text.size("hidden_size", 2304),
        activation=vision.one_of("hidden_act", _ACTIVATIONS, _ACTIVATIONS[0]),
        norm_eps=vision.number("layer_norm_eps", 1e-6),
        bidirectional=True,
        largest=count,
        tile=side,
        merge=side // patch // lines,
        **normalisation(settings),
    )
