"""Mmproj: the record of a projector's file, and what several families share."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import isqrt
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

Values = dict[str, Any]
# (number of heads, number of rows) -> the file's row for each row of the folder
Permutation = Callable[[int, int], "NDArray[np.int64]"]


class Tower(Protocol):
    """The interface of an mmproj file's metadata."""

    def own(self, key: str, default: Any = None) -> Any:
        """Return the value of a metadata key. key: without the prefix "clip."."""
        ...

    def need(self, key: str) -> Any:
        """Return the value of a required metadata key; see `own`. Raises ConfigError if it is
        missing."""
        ...

    def has(self, tensor: str) -> bool: ...

    def shape(self, tensor: str) -> tuple[int, ...]:
        """Return a tensor's shape, rows first. Raises ConfigError if it is missing."""
        ...


@dataclass(frozen=True, slots=True)
class Mmproj:
    """The layout of one projector's file.

    projector: the value of clip.projector_type.
    wrapper: transformers' class name in the converted folder's config.json.
    text: values of general.architecture of the text models that use the encoder.
    tensors: tensor name in the file, complete or without ".weight" -> name in the folder; {i} is
        the layer. Tensors with the same name in the folder are concatenated, in this order.
    tokens: key of config.json -> possible texts of the token; the first that the vocabulary has is
        used. The first key is the image token, which each vocabulary has.
    out: (a tensor, its axis whose length is the width of an embedding).
    vision: returns vision_config.
    settings: returns the processor's settings, except mean and deviation.
    outer: returns further keys of config.json.
    optional: names of `tensors` that some models of the family lack.
    plus_one: a norm whose weights in the file have one added.
    permuted: name of a matrix -> the file's row for each row of the folder, where they differ.
    grid: the name of a table of learned positions; "" = none. Its shape is [side * side, width] in
        the file, and [side, side, width] in the folder.
    sections: whether the text model has M-RoPE.
    levels: returns the layers after which further embeddings are computed (DeepStack).
    when: returns whether the entry is for a file; among entries of one projector the first match
        applies.
    """

    projector: str
    wrapper: str
    text: tuple[str, ...]
    tensors: Mapping[str, str]
    tokens: Mapping[str, tuple[str, ...]]
    out: tuple[str, int]
    vision: Callable[[Tower], Values]
    settings: Callable[[Tower], Values]
    outer: Callable[[Tower], Values] = lambda file: {}
    optional: tuple[str, ...] = ()
    plus_one: str = ""
    permuted: Mapping[str, Permutation] = field(default_factory=dict)
    grid: str = ""
    sections: bool = False
    levels: Callable[[Tower], list[int]] = lambda file: []
    when: Callable[[Tower], bool] = lambda file: True
    ignored: tuple[str, ...] = field(default=("v.token_embd.img_break",))


def size(file: Tower, key: str) -> int:
    return int(file.need(f"vision.{key}"))


def inner(file: Tower) -> int:
    """Return the MLP width by a tensor's shape, as Qwen2-VL's metadata are wrong."""
    return max(file.shape("v.blk.0.ffn_up.weight"))


def sizes(file: Tower) -> Values:
    """Return the keys and values of vision_config that most families have."""
    return {
        "hidden_size": size(file, "embedding_length"),
        "intermediate_size": inner(file),
        "num_hidden_layers": size(file, "block_count"),
        "num_attention_heads": size(file, "attention.head_count"),
        "image_size": size(file, "image_size"),
        "patch_size": size(file, "patch_size"),
        "layer_norm_eps": file.need("vision.attention.layer_norm_epsilon"),
    }


def activation(file: Tower, default: str) -> str:
    """Return the activation of MLPs. default: the activation for files without the key."""
    if file.own("use_silu", False):
        return "silu"
    return "gelu" if file.own("use_gelu", False) else default


def merged(file: Tower, default: int = 2) -> int:
    return int(file.own("vision.spatial_merge_size", default))


def table_side(file: Tower) -> int:
    """Return the side in pixels of the square picture that has as many patches as learned
    positions."""
    return isqrt(file.shape("v.position_embd.weight")[0]) * size(file, "patch_size")


def square(file: Tower) -> Values:
    side = size(file, "image_size")
    return {"size": {"height": side, "width": side}}


LAYER = "v.blk.{i}."


def layer_names(before: str, **names: str) -> dict[str, str]:
    """Return the names of a layer's tensors: name in the file -> name in the folder.

    before: the prefix of the folder's names, up to the layer's number.
    names: suffix in the file -> suffix in the folder.
    """
    return {f"{LAYER}{stem}": f"{before}.{{i}}.{name}" for stem, name in names.items()}


def siglip(before: str, projector: Mapping[str, str]) -> dict[str, str]:
    """Return the names of SigLIP's and the projector's tensors: name in the file -> in the folder.

    before: the prefix of the folder's names.
    projector: the names of the projector's tensors.
    """
    return {
        "v.patch_embd": f"{before}.embeddings.patch_embedding",
        "v.position_embd": f"{before}.embeddings.position_embedding",
        "v.post_ln": f"{before}.post_layernorm",
        **layer_names(
            f"{before}.encoder.layers",
            ln1="layer_norm1",
            ln2="layer_norm2",
            attn_q="self_attn.q_proj",
            attn_k="self_attn.k_proj",
            attn_v="self_attn.v_proj",
            attn_out="self_attn.out_proj",
            ffn_up="mlp.fc1",
            ffn_down="mlp.fc2",
        ),
        **projector,
    }
