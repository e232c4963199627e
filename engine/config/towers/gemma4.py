"""The configuration of Gemma 4's vision tower."""

from dataclasses import dataclass
from typing import Any

from engine.config.vision import VisionConfig, normalisation, text_alone
from engine.config_reader import Reader

_ACTIVATIONS = ("gelu_pytorch_tanh", "gelu", "silu")
_PARTS = ("vision_tower.", "embed_vision.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Gemma4Vision(VisionConfig):
    """The configuration of Gemma 4's vision tower.

    theta: the base of rotary positions.
    pool: the side, in patches, of the square that is averaged into one embedding.
    positions: number of learned positions on each axis.
    clipped: whether inputs and outputs of linear layers are clamped to bounds in the checkpoint.
    standardised: whether embeddings are shifted and scaled, by vectors of the checkpoint.
    """

    theta: float
    pool: int
    positions: int
    clipped: bool
    standardised: bool


def read_gemma4(config: Reader, settings: Reader) -> Gemma4Vision | None:
    """Read the tower's configuration; None if its heads or positions are not supported.

    Raises ConfigError naming file and key.
    """
    vision, text = config.inner("vision_config"), config.inner("text_config")
    width, heads = vision.size("hidden_size", 768), vision.size("num_attention_heads", 12)
    dim, kv_heads = vision.size("head_dim", 64), vision.size("num_key_value_heads", heads)
    if dim * heads != width or kv_heads != heads:
        text_alone(
            vision,
            f"head_dim {dim} and num_key_value_heads {kv_heads} are not those of hidden_size "
            f"{width} and num_attention_heads {heads}",
        )
        return None
    pool, largest = vision.size("pooling_kernel_size", 3), settings.size("max_soft_tokens", 280)
    positions = vision.size("position_embedding_size", 10240)
    if largest * pool > positions:  # positions that a picture one embedding high needs
        text_alone(
            vision,
            f"position_embedding_size {positions} is less than the {largest * pool} patches in a "
            f"row of a picture of {largest} tokens (max_soft_tokens)",
        )
        return None
    whole = text.get("use_bidirectional_attention") == "vision"
    return Gemma4Vision(
        family="gemma4",
        image_token_id=config.count("image_token_id", 258880),
        names=tuple((before + part, part) for part in _PARTS for before in ("model.", "")),
        hidden_size=width,
        intermediate_size=vision.size("intermediate_size", 3072),
        num_layers=vision.size("num_hidden_layers", 16),
        num_heads=heads,
        patch_size=vision.size("patch_size", 16),
        out_size=text.size("hidden_size"),
        activation=vision.one_of("hidden_activation", _ACTIVATIONS, _ACTIVATIONS[0]),
        norm_eps=vision.number("rms_norm_eps", 1e-6),
        bidirectional=whole,
        windows_alone=whole,
        largest=largest if whole else 0,
        padding_id=text.count("pad_token_id"),
        theta=vision.inner("rope_parameters").number("rope_theta", 100.0),
        pool=pool,
        positions=positions,
        clipped=vision.flag("use_clipped_linears"),
        standardised=vision.flag("standardize"),
        **_from_minus_one(normalisation(settings, (0.0, 0.0, 0.0), (1.0, 1.0, 1.0))),
    )


def _from_minus_one(colours: Any) -> dict[str, Any]:
    """Return `mean` and `deviation` for a tower that scales pixels x from 0..1 to 2x - 1.

    colours: the mean and deviation that the processor applies before this scaling.
    """
    mean, deviation = colours["mean"], colours["deviation"]
    pairs = zip(mean, deviation, strict=True)
    return {
        "mean": tuple(middle + spread / 2 for middle, spread in pairs),
        "deviation": tuple(spread / 2 for spread in deviation),
    }
