"""The configuration of MoonViT, the vision tower of Kimi-VL, Kimi K2.5 and K2.6."""

from dataclasses import dataclass

from engine.config.towers.qwen_vl import ACTIVATIONS, QwenVision
from engine.config.vision import normalisation, text_alone
from engine.config_reader import Reader
from engine.images.families.kimi import settings_of_media

_IMAGE = 163605  # the token of pictures, if config.json names none
_PROJECTOR = (("in_proj.", "linear_1."), ("out_proj.", "linear_2."), ("pre_norm.", "pre_norm."))
_NAMES = (
    *((f"{name}vision_tower.", "visual.") for name in ("model.", "")),
    ("mm_projector.proj.0.", "visual.merger.linear_1."),
    ("mm_projector.proj.2.", "visual.merger.linear_2."),
    ("mm_projector.pre_norm.", "visual.merger.pre_norm."),
    ("multi_modal_projector.", "visual.merger."),
    *((f"model.mm_projector.{name}", f"visual.merger.{ours}") for name, ours in _PROJECTOR),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class KimiVision(QwenVision):
    """The configuration of the vision tower of Kimi-VL and later.

    positions: number of learned positions, a square grid.
    theta: the base of rotary positions.
    merger_eps: epsilon of the norm before patches are merged.
    fused: whether queries, keys and values are in one matrix, whose rotary pairs are adjacent, as
        in published files. Otherwise they are in three matrices, whose rotary pairs are half a
        head apart, as in transformers.
    """

    positions: int
    theta: float
    merger_eps: float
    fused: bool


def read_kimi_split(config: Reader, settings: Reader) -> KimiVision | None:
    """Read the configuration of a tower in transformers' format; see `read_kimi`."""
    return read_kimi(config, settings, fused=False)


def read_kimi(config: Reader, settings: Reader, *, fused: bool = True) -> KimiVision | None:
    """Read the tower's configuration; None for a tower of another kind.

    Raises ConfigError naming file and key.

    fused: see `KimiVision`.
    """
    vision, media = config.inner("vision_config"), settings_of_media(settings)
    kind = vision.get("mm_projector_type", "patchmerger")
    rows, columns = (
        vision.size(f"pos_emb_{side}", vision.size(f"init_pos_emb_{side}", 64))
        for side in ("height", "width")
    )
    why = ""
    if kind != "patchmerger":
        why = f"mm_projector_type is {kind!r}, and only 'patchmerger' is supported"
    elif rows != columns:
        why = f"init_pos_emb_height is {rows} and init_pos_emb_width {columns}: they must be equal"
    elif media.get("fixed_output_tokens") is not None or not media.flag("pad_input", True):
        why = "fixed_output_tokens and pictures without padding (pad_input) are not supported"
    if why:
        text_alone(config, why)
        return None

    def size(key: str, default: int) -> int:
        return vision.size(key, vision.size(f"vt_{key}", default))

    eps = vision.number("projector_ln_eps", 1e-5)
    return KimiVision(
        family="kimi" if fused else "kimi_split",
        image_token_id=config.count(
            "image_token_id", config.count("media_placeholder_token_id", _IMAGE)
        ),
        names=_NAMES,
        hidden_size=size("hidden_size", 1152),
        intermediate_size=size("intermediate_size", 4304),
        num_layers=size("num_hidden_layers", 27),
        num_heads=size("num_attention_heads", 16),
        patch_size=vision.square("patch_size", 14),
        out_size=config.inner("text_config").size("hidden_size"),
        activation=vision.one_of("hidden_act", ACTIVATIONS, ACTIVATIONS[0]),
        norm_eps=1e-5,
        frames=1,
        merge=vision.square("merge_kernel_size", 2),
        positions=rows * columns,
        theta=vision.inner("rope_parameters").number("rope_theta", 1e4),
        merger_eps=config.number("projection_layer_norm_eps", eps),
        fused=fused,
        **normalisation(media),
    )
