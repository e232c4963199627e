"""The layout of GGUF files with a vision encoder (mmproj): an `Mmproj` entry for each projector.

llama.cpp writes a multimodal model's vision encoder into a separate file, with similar tensor names
for all families. `deployments.checkpoints.gguf_tower` converts the tensors to the names and shapes
of transformers' checkpoints. No torch here.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import isqrt
from typing import Any, Protocol

Values = dict[str, Any]


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
    text: values of general.architecture of the text models for which the encoder is.
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
    permuted: names of matrices in which the rows of a rotary pair are adjacent, as llama.cpp stores
        queries and keys of a Llama.
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
    permuted: tuple[str, ...] = ()
    sections: bool = False
    levels: Callable[[Tower], list[int]] = lambda file: []
    when: Callable[[Tower], bool] = lambda file: True
    ignored: tuple[str, ...] = field(default=("v.token_embd.img_break",))


def _size(file: Tower, key: str) -> int:
    return int(file.need(f"vision.{key}"))


def _inner(file: Tower) -> int:
    """Return the MLP width by a tensor's shape, as Qwen2-VL's metadata are wrong."""
    return max(file.shape("v.blk.0.ffn_up.weight"))


def _sizes(file: Tower) -> Values:
    """Return the keys and values of vision_config that most families have."""
    return {
        "hidden_size": _size(file, "embedding_length"),
        "intermediate_size": _inner(file),
        "num_hidden_layers": _size(file, "block_count"),
        "num_attention_heads": _size(file, "attention.head_count"),
        "image_size": _size(file, "image_size"),
        "patch_size": _size(file, "patch_size"),
        "layer_norm_eps": file.need("vision.attention.layer_norm_epsilon"),
    }


def _activation(file: Tower, default: str) -> str:
    """Return the activation of MLPs. default: the activation for files without the key."""
    if file.own("use_silu", False):
        return "silu"
    return "gelu" if file.own("use_gelu", False) else default


def _merged(file: Tower, default: int = 2) -> int:
    return int(file.own("vision.spatial_merge_size", default))


def _qwen(file: Tower) -> Values:
    return {
        "depth": _size(file, "block_count"),
        "num_heads": _size(file, "attention.head_count"),
        "patch_size": _size(file, "patch_size"),
        "spatial_merge_size": _merged(file),
        "temporal_patch_size": 2,
    }


def _qwen2(file: Tower) -> Values:
    width = _size(file, "embedding_length")
    return {
        **_qwen(file),
        "embed_dim": width,
        "mlp_ratio": _inner(file) // width,
        "hidden_size": file.shape("mm.2.weight")[0],
        "hidden_act": _activation(file, "quick_gelu"),
    }


def _qwen2_5(file: Tower) -> Values:
    period = int(file.own("vision.n_wa_pattern", 0)) or 1  # 0 = no layer has window attention
    return {
        **_qwen_later(file),
        "window_size": int(file.own("vision.window_size", 112)),
        "fullatt_block_indexes": [
            layer for layer in range(_size(file, "block_count")) if (layer + 1) % period == 0
        ],
        "hidden_act": "silu",
    }


def _qwen_later(file: Tower) -> Values:
    return {
        **_qwen(file),
        "hidden_size": _size(file, "embedding_length"),
        "intermediate_size": _inner(file),
        "out_hidden_size": file.shape("mm.2.weight")[0],
    }


def _qwen3(file: Tower) -> Values:
    return {
        **_qwen_later(file),
        "num_position_embeddings": file.shape("v.position_embd.weight")[0],
        "deepstack_visual_indexes": _deepstack(file),
        "hidden_act": "gelu_pytorch_tanh",
    }


def _deepstack(file: Tower) -> list[int]:
    flags = file.own("vision.is_deepstack_layers") or []
    return [layer for layer, level in enumerate(flags) if level]


def _table(file: Tower) -> int:
    """Return the side in pixels of the square picture that has as many patches as learned
    positions."""
    return isqrt(file.shape("v.position_embd.weight")[0]) * _size(file, "patch_size")


def _glm(file: Tower) -> Values:
    return {
        **_qwen(file),
        "hidden_size": _size(file, "embedding_length"),
        "intermediate_size": file.shape("mm.up.weight")[0],
        "out_hidden_size": file.shape("mm.down.weight")[0],
        "image_size": _table(file),
        "attention_bias": file.has("v.blk.0.attn_qkv.bias"),
        "hidden_act": _activation(file, "silu"),
        "rms_norm_eps": file.need("vision.attention.layer_norm_epsilon"),
    }


def _paddle(file: Tower) -> Values:
    return {
        **_sizes(file),
        "image_size": _table(file),
        "spatial_merge_size": 2,
        "hidden_act": "gelu_pytorch_tanh",
    }


def _qwen_settings(least: int, most: int, frames: int = 2) -> Callable[[Tower], Values]:
    """Return a function that computes the settings of a processor that resizes as Qwen's does.

    least, most: the default limits of a picture's area in pixels.
    frames: the number of frames of a patch.
    """

    def settings(file: Tower) -> Values:
        return {
            "min_pixels": int(file.own("vision.image_min_pixels", least)),
            "max_pixels": int(file.own("vision.image_max_pixels", most)),
            "patch_size": _size(file, "patch_size"),
            "merge_size": _merged(file),
            "temporal_patch_size": frames,
        }

    return settings


def _square(file: Tower) -> Values:
    side = _size(file, "image_size")
    return {"size": {"height": side, "width": side}}


def _gemma3(file: Tower) -> Values:
    return {**_sizes(file), "hidden_act": "gelu_pytorch_tanh"}


def _gemma3_count(file: Tower) -> Values:
    scale = int(file.own("vision.projector.scale_factor", 4))
    side = _size(file, "image_size") // _size(file, "patch_size") // scale
    return {"mm_tokens_per_image": side**2}


def _pixtral(file: Tower) -> Values:
    return {
        **_sizes(file),
        "model_type": "pixtral",
        "hidden_act": _activation(file, "gelu"),
        "rope_parameters": {"rope_theta": float(file.own("rope.freq_base", 10000.0))},
    }


def _pixtral_settings(file: Tower) -> Values:
    side = _size(file, "patch_size")
    return {"size": {"longest_edge": _size(file, "image_size")}, "patch_size": side}


def _pixtral_outer(file: Tower) -> Values:
    return {
        "vision_feature_layer": -1,
        "vision_feature_select_strategy": "full",
        "spatial_merge_size": _merged(file, 1),
        "multimodal_projector_bias": file.has("mm.1.bias"),
        "projector_hidden_act": "gelu",
    }


def _llava_outer(file: Tower) -> Values:
    return {**_pixtral_outer(file), "model_type": "llava"}


def _idefics3(file: Tower) -> Values:
    return {**_sizes(file), "hidden_act": "gelu_pytorch_tanh"}


def _idefics3_settings(file: Tower) -> Values:
    side = _size(file, "image_size")
    longest = int(file.own("vision.preproc_image_size", 4 * side))
    return {"size": {"longest_edge": longest}, "max_image_size": {"longest_edge": side}}


def _intern(file: Tower) -> Values:
    sizes = _sizes(file)
    # the picture size by the number of learned positions, of which the first is the class token's
    lines = isqrt(file.shape("v.position_embd.weight")[-2] - 1)
    return {
        **sizes,
        "image_size": [lines * sizes["patch_size"]] * 2,
        "patch_size": [sizes["patch_size"]] * 2,
        "hidden_act": _activation(file, "gelu"),
        "attention_bias": file.has("v.blk.0.attn_q.bias"),
        "use_qk_norm": file.has("v.blk.0.attn_q_norm.weight"),
        "norm_type": "layer_norm" if file.has("v.blk.0.ln1.bias") else "rms_norm",
        "use_mean_pooling": not file.has("v.post_ln.weight"),
    }


def _intern_settings(file: Tower) -> Values:
    return {
        **_square(file),
        "crop_to_patches": True,
        "min_patches": int(file.own("vision.preproc_min_tiles", 1)),
        "max_patches": int(file.own("vision.preproc_max_tiles", 12)),
    }


def _scale(file: Tower) -> int:
    return int(file.own("vision.projector.scale_factor", 2))


_LAYER = "v.blk.{i}."


def _layer(before: str, **names: str) -> dict[str, str]:
    """Return the names of a layer's tensors: name in the file -> name in the folder.

    before: the prefix of the folder's names, up to the layer's number.
    names: suffix in the file -> suffix in the folder.
    """
    return {f"{_LAYER}{stem}": f"{before}.{{i}}.{name}" for stem, name in names.items()}


_QWEN_LAYER = _layer(
    "model.visual.blocks",
    ln1="norm1",
    ln2="norm2",
    attn_qkv="attn.qkv",
    attn_q="attn.qkv",
    attn_k="attn.qkv",
    attn_v="attn.qkv",
    attn_out="attn.proj",
)
_QWEN_PATCH = {
    "v.patch_embd": "model.visual.patch_embed.proj",
    "v.patch_embd.weight.1": "model.visual.patch_embed.proj.weight",
}
_GATED = {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
_QWEN2_MERGER = {
    "v.post_ln": "model.visual.merger.ln_q",
    "mm.0": "model.visual.merger.mlp.0",
    "mm.2": "model.visual.merger.mlp.2",
}
_QWEN_TOKENS = {
    "image_token_id": ("<|image_pad|>",),
    "video_token_id": ("<|video_pad|>",),
    "vision_start_token_id": ("<|vision_start|>",),
    "vision_end_token_id": ("<|vision_end|>",),
}


def _qwen2_merged(
    projector: str, wrapper: str, vision: Callable[[Tower], Values], **mlp: str
) -> Mmproj:
    """Return the entry of Qwen2-VL's or Qwen2.5-VL's vision encoder.

    projector, wrapper, vision: see Mmproj.
    mlp: names of the tensors of a layer's MLP, as for `_layer`.
    """
    return Mmproj(
        projector,
        wrapper,
        ("qwen2vl",),
        {**_QWEN_PATCH, **_QWEN_LAYER, **_layer("model.visual.blocks", **mlp), **_QWEN2_MERGER},
        _QWEN_TOKENS,
        ("mm.2.weight", 0),
        vision,
        _qwen_settings(56 * 56, 28 * 28 * 16384),
        sections=True,
    )


def _qwen3_vl(wrapper: str, text: str) -> Mmproj:
    """Return the entry of Qwen3-VL's vision encoder for one kind of text model. See Mmproj."""
    levels = "model.visual.deepstack_merger_list.{i}"
    return Mmproj(
        "qwen3vl_merger",
        wrapper,
        (text,),
        {
            **_QWEN_PATCH,
            **_QWEN_LAYER,
            "v.position_embd": "model.visual.pos_embed",
            **_layer("model.visual.blocks", ffn_up="mlp.linear_fc1", ffn_down="mlp.linear_fc2"),
            "v.post_ln": "model.visual.merger.norm",
            "mm.0": "model.visual.merger.linear_fc1",
            "mm.2": "model.visual.merger.linear_fc2",
            "v.deepstack.{i}.norm": f"{levels}.norm",
            "v.deepstack.{i}.fc1": f"{levels}.linear_fc1",
            "v.deepstack.{i}.fc2": f"{levels}.linear_fc2",
        },
        _QWEN_TOKENS,
        ("mm.2.weight", 0),
        _qwen3,
        _qwen_settings(256 * 256, 4096 * 4096),
        sections=True,
        levels=_deepstack,
    )


def _glm4v(wrapper: str, text: str) -> Mmproj:
    """Return the entry of GLM-4.1V's vision encoder for one kind of text model. See Mmproj."""
    return Mmproj(
        "glm4v",
        wrapper,
        (text,),
        {
            **_QWEN_PATCH,
            **_QWEN_LAYER,
            **_layer("model.visual.blocks", **_GATED),
            "v.norm_embd": "model.visual.post_conv_layernorm",
            "v.position_embd": "model.visual.embeddings.position_embedding",
            "v.post_ln": "model.visual.post_layernorm",
            "mm.patch_merger": "model.visual.downsample",
            "mm.model.fc": "model.visual.merger.proj",
            "mm.post_norm": "model.visual.merger.post_projection_norm",
            "mm.gate": "model.visual.merger.gate_proj",
            "mm.up": "model.visual.merger.up_proj",
            "mm.down": "model.visual.merger.down_proj",
        },
        {
            "image_token_id": ("<|image|>",),
            "video_token_id": ("<|video|>",),
            "image_start_token_id": ("<|begin_of_image|>",),
            "image_end_token_id": ("<|end_of_image|>",),
        },
        ("mm.down.weight", 0),
        _glm,
        _qwen_settings(112 * 112, 28 * 28 * 12288),
        sections=True,
    )


def _siglip(before: str, projector: Mapping[str, str]) -> dict[str, str]:
    """Return the names of SigLIP's and the projector's tensors: name in the file -> in the folder.

    before: the prefix of the folder's names.
    projector: the names of the projector's tensors.
    """
    return {
        "v.patch_embd": f"{before}.embeddings.patch_embedding",
        "v.position_embd": f"{before}.embeddings.position_embedding",
        "v.post_ln": f"{before}.post_layernorm",
        **_layer(
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


_PIXTRAL = {
    "v.patch_embd": "model.vision_tower.patch_conv",
    "v.pre_ln": "model.vision_tower.ln_pre",
    **_layer(
        "model.vision_tower.transformer.layers",
        ln1="attention_norm",
        ln2="ffn_norm",
        attn_q="attention.q_proj",
        attn_k="attention.k_proj",
        attn_v="attention.v_proj",
        attn_out="attention.o_proj",
        ffn_gate="feed_forward.gate_proj",
        ffn_up="feed_forward.up_proj",
        ffn_down="feed_forward.down_proj",
    ),
    "mm.1": "model.multi_modal_projector.linear_1",
    "mm.2": "model.multi_modal_projector.linear_2",
}
_MERGER = {
    "mm.input_norm": "model.multi_modal_projector.norm",
    "mm.patch_merger": "model.multi_modal_projector.patch_merger.merging_layer",
}
_PIXTRAL_FIELDS: Mapping[str, Any] = {
    "text": ("llama", "mistral3"),
    "tokens": {"image_token_index": ("[IMG]",)},
    "out": ("mm.2.weight", 0),
    "vision": _pixtral,
    "settings": _pixtral_settings,
    "outer": _pixtral_outer,
    "permuted": (f"{_LAYER}attn_q", f"{_LAYER}attn_k"),
}
_INTERN = "model.vision_tower"

MMPROJS: tuple[Mmproj, ...] = (
    _qwen2_merged(
        "qwen2vl_merger",
        "Qwen2VLForConditionalGeneration",
        _qwen2,
        ffn_up="mlp.fc1",
        ffn_down="mlp.fc2",
    ),
    _qwen2_merged(
        "qwen2.5vl_merger",
        "Qwen2_5_VLForConditionalGeneration",
        _qwen2_5,
        **_GATED,
    ),
    _qwen3_vl("Qwen3VLForConditionalGeneration", "qwen3vl"),
    _qwen3_vl("Qwen3VLMoeForConditionalGeneration", "qwen3vlmoe"),
    _glm4v("Glm4vForConditionalGeneration", "glm4"),
    _glm4v("Glm4vMoeForConditionalGeneration", "glm4moe"),
    Mmproj(
        "paddleocr",
        "PaddleOCRVLForConditionalGeneration",
        ("paddleocr",),
        _siglip(
            "visual.vision_model",
            {
                "mm.input_norm": "mlp_AR.pre_norm",
                "mm.1": "mlp_AR.linear_1",
                "mm.2": "mlp_AR.linear_2",
            },
        ),
        {
            "image_token_id": ("<|IMAGE_PLACEHOLDER|>",),
            "video_token_id": ("<|video_pad|>",),
            "vision_start_token_id": ("<|IMAGE_START|>",),
            "vision_end_token_id": ("<|IMAGE_END|>",),
        },
        ("mm.2.weight", 0),
        _paddle,
        _qwen_settings(147384, 2822400, frames=1),
        sections=True,
    ),
    Mmproj(
        "gemma3",
        "Gemma3ForConditionalGeneration",
        ("gemma3",),
        _siglip(
            "model.vision_tower",
            {
                "mm.input_projection.weight": (
                    "model.multi_modal_projector.mm_input_projection_weight"
                ),
                "mm.soft_emb_norm": "model.multi_modal_projector.mm_soft_emb_norm",
            },
        ),
        {
            # llama.cpp's converter omits <image_soft_token>, the last token, from the vocabulary.
            "image_token_index": ("<image_soft_token>", "<pad>"),
            "boi_token_index": ("<start_of_image>",),
            "eoi_token_index": ("<end_of_image>",),
        },
        ("mm.input_projection.weight", 1),
        _gemma3,
        _square,
        _gemma3_count,
        plus_one="mm.soft_emb_norm",
    ),
    Mmproj(
        "pixtral",
        "Mistral3ForConditionalGeneration",
        tensors={**_PIXTRAL, **_MERGER},
        when=lambda file: file.has("mm.patch_merger.weight"),
        **_PIXTRAL_FIELDS,
    ),
    Mmproj(
        "pixtral",
        "LlavaForConditionalGeneration",
        tensors=_PIXTRAL,
        **{**_PIXTRAL_FIELDS, "outer": _llava_outer},
    ),
    Mmproj(
        "idefics3",
        "Idefics3ForConditionalGeneration",
        ("llama",),
        _siglip("model.vision_model", {"mm.model.fc": "model.connector.modality_projection.proj"}),
        {"image_token_id": ("<image>",)},
        ("mm.model.fc.weight", 0),
        _idefics3,
        _idefics3_settings,
        lambda file: {"scale_factor": _scale(file)},
    ),
    Mmproj(
        "internvl",
        "InternVLForConditionalGeneration",
        ("qwen2", "qwen3", "qwen3moe", "llama"),
        {
            "v.class_embd": f"{_INTERN}.embeddings.cls_token",
            "v.position_embd.weight": f"{_INTERN}.embeddings.position_embeddings",
            "v.patch_embd": f"{_INTERN}.embeddings.patch_embeddings.projection",
            "v.post_ln": f"{_INTERN}.layernorm",
            **_layer(
                f"{_INTERN}.encoder.layer",
                ln1="layernorm_before",
                ln2="layernorm_after",
                attn_q="attention.q_proj",
                attn_k="attention.k_proj",
                attn_v="attention.v_proj",
                attn_q_norm="attention.q_norm",
                attn_k_norm="attention.k_norm",
                attn_out="attention.projection_layer",
                ffn_up="mlp.fc1",
                ffn_down="mlp.fc2",
            ),
            f"{_LAYER}ls1.weight": f"{_INTERN}.encoder.layer.{{i}}.lambda_1",
            f"{_LAYER}ls2.weight": f"{_INTERN}.encoder.layer.{{i}}.lambda_2",
            "mm.model.mlp.0": "model.multi_modal_projector.layer_norm",
            "mm.model.mlp.1": "model.multi_modal_projector.linear_1",
            "mm.model.mlp.3": "model.multi_modal_projector.linear_2",
        },
        {"image_token_id": ("<IMG_CONTEXT>",)},
        ("mm.model.mlp.3.weight", 0),
        _intern,
        _intern_settings,
        lambda file: {"downsample_ratio": 1 / _scale(file), "projector_hidden_act": "gelu"},
        optional=("v.post_ln", f"{_LAYER}attn_q_norm", f"{_LAYER}attn_k_norm"),
    ),
)
