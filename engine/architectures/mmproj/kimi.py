"""The mmproj files of Kimi-VL and of Kimi K2.5 and K2.6, whose vision encoder is MoonViT."""

from collections.abc import Mapping
from math import isqrt
from typing import TYPE_CHECKING, Any

from engine.architectures.mmproj.record import (
    Mmproj,
    Tower,
    Values,
    inner,
    layer_names,
    size,
)

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_TABLE = "v.position_embd"
_ENCODER = "vision_tower.encoder"
_TENSORS: Mapping[str, str] = {
    "v.patch_embd": "vision_tower.patch_embed.proj",
    _TABLE: "vision_tower.patch_embed.pos_emb",
    **layer_names(
        f"{_ENCODER}.blocks",
        ln1="norm0",
        ln2="norm1",
        attn_qkv="wqkv",
        attn_q="wqkv",
        attn_k="wqkv",
        attn_v="wqkv",
        attn_out="wo",
        ffn_up="mlp.fc0",
        ffn_down="mlp.fc1",
    ),
    "v.post_ln": f"{_ENCODER}.final_layernorm",
}


def _merge(file: Tower) -> int:
    return int(file.own("vision.projector.scale_factor", 2))


def _vision(file: Tower) -> Values:
    *grid, _ = file.shape(f"{_TABLE}.weight")
    rows, columns = grid if len(grid) == 2 else [isqrt(grid[0])] * 2
    return {
        "patch_size": size(file, "patch_size"),
        "init_pos_emb_height": rows,
        "init_pos_emb_width": columns,
        "merge_kernel_size": [_merge(file)] * 2,
        "projector_ln_eps": file.need("vision.attention.layer_norm_epsilon"),
    }


def _kimi_vl(file: Tower) -> Values:
    return {**_vision(file), **_sizes(file, ""), "model_type": "moonvit"}


def _kimi_k25(file: Tower) -> Values:
    return {**_vision(file), **_sizes(file, "vt_"), "mm_projector_type": "patchmerger"}


def _sizes(file: Tower, before: str) -> Values:
    """Return the encoder's sizes by their keys in vision_config. before: the keys' prefix."""
    return {
        f"{before}hidden_size": size(file, "embedding_length"),
        f"{before}intermediate_size": inner(file),
        f"{before}num_hidden_layers": size(file, "block_count"),
        f"{before}num_attention_heads": size(file, "attention.head_count"),
    }


def _patches(file: Tower, default: int) -> int:
    """Return the maximum number of patches of a picture.

    default: the number for files without a limit.
    """
    patch = size(file, "patch_size") ** 2
    return int(file.own("vision.image_max_pixels", default * patch)) // patch


def _kimi_vl_settings(file: Tower) -> Values:
    return {
        "patch_size": size(file, "patch_size"),
        "merge_kernel_size": [_merge(file)] * 2,
        "in_token_limit": _patches(file, 4096),
        "pad_input": True,
    }


def _kimi_k25_settings(file: Tower) -> Values:
    return {
        "patch_size": size(file, "patch_size"),
        "merge_size": _merge(file),
        "max_patches": _patches(file, 16384),
    }


def _alternating(heads: int, count: int) -> "NDArray[np.int64]":
    """Return the file's rows of queries, keys and values in the folder's order.

    In the folder rotary pairs of columns and of rows alternate. In the file a head has all pairs
    of columns first.

    heads, count: the numbers of heads and of rows.
    """
    import numpy as np

    width = count // 3
    pairs = np.arange(width).reshape(heads, 2, -1, 2).swapaxes(1, 2).ravel()
    return np.concatenate((pairs, width + pairs, 2 * width + np.arange(width)))


def _entry(projector: str, wrapper: str, names: Mapping[str, str], **others: Any) -> Mmproj:
    """Return the entry of a projector behind MoonViT.

    names: the projector's tensors, as in `Mmproj.tensors`.
    others: further fields of Mmproj.
    """
    return Mmproj(
        projector,
        wrapper,
        ("deepseek2",),
        {**_TENSORS, **names},
        {"media_placeholder_token_id": ("<|media_pad|>",)},
        ("mm.2.weight", 0),
        **others,
    )


KIMI: tuple[Mmproj, ...] = (
    _entry(
        "kimivl",
        "KimiVLForConditionalGeneration",
        {
            "mm.input_norm": "multi_modal_projector.pre_norm",
            "mm.1": "multi_modal_projector.linear_1",
            "mm.2": "multi_modal_projector.linear_2",
        },
        vision=_kimi_vl,
        settings=_kimi_vl_settings,
        grid=_TABLE,
    ),
    _entry(
        "kimik25",
        "KimiK25ForConditionalGeneration",
        {
            "mm.input_norm": "mm_projector.pre_norm",
            "mm.1": "mm_projector.proj.0",
            "mm.2": "mm_projector.proj.2",
        },
        vision=_kimi_k25,
        settings=_kimi_k25_settings,
        permuted={"v.blk.{i}.attn_qkv": _alternating},
    ),
)
