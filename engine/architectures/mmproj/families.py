"""The mmproj files of Gemma 3, Pixtral, Idefics 3 and InternVL."""

from collections.abc import Mapping
from math import isqrt
from typing import TYPE_CHECKING, Any

from engine.architectures.layout import half_pairs
from engine.architectures.mmproj.record import (
    LAYER,
    Mmproj,
    Tower,
    Values,
    activation,
    layer_names,
    merged,
    siglip,
    size,
    sizes,
    square,
)

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


def _gemma3(file: Tower) -> Values:
    return {**sizes(file), "hidden_act": "gelu_pytorch_tanh"}


def _gemma3_count(file: Tower) -> Values:
    scale = int(file.own("vision.projector.scale_factor", 4))
    side = size(file, "image_size") // size(file, "patch_size") // scale
    return {"mm_tokens_per_image": side**2}


def _pixtral(file: Tower) -> Values:
    return {
        **sizes(file),
        "model_type": "pixtral",
        "hidden_act": activation(file, "gelu"),
        "rope_parameters": {"rope_theta": float(file.own("rope.freq_base", 10000.0))},
    }


def _pixtral_settings(file: Tower) -> Values:
    side = size(file, "patch_size")
    return {"size": {"longest_edge": size(file, "image_size")}, "patch_size": side}


def _pixtral_outer(file: Tower) -> Values:
    return {
        "vision_feature_layer": -1,
        "vision_feature_select_strategy": "full",
        "spatial_merge_size": merged(file, 1),
        "multimodal_projector_bias": file.has("mm.1.bias"),
        "projector_hidden_act": "gelu",
    }


def _llava_outer(file: Tower) -> Values:
    return {**_pixtral_outer(file), "model_type": "llava"}


def _idefics3(file: Tower) -> Values:
    return {**sizes(file), "hidden_act": "gelu_pytorch_tanh"}


def _idefics3_settings(file: Tower) -> Values:
    side = size(file, "image_size")
    longest = int(file.own("vision.preproc_image_size", 4 * side))
    return {"size": {"longest_edge": longest}, "max_image_size": {"longest_edge": side}}


def _intern(file: Tower) -> Values:
    common = sizes(file)
    # the picture size by the number of learned positions, of which the first is the class token's
    lines = isqrt(file.shape("v.position_embd.weight")[-2] - 1)
    return {
        **common,
        "image_size": [lines * common["patch_size"]] * 2,
        "patch_size": [common["patch_size"]] * 2,
        "hidden_act": activation(file, "gelu"),
        "attention_bias": file.has("v.blk.0.attn_q.bias"),
        "use_qk_norm": file.has("v.blk.0.attn_q_norm.weight"),
        "norm_type": "layer_norm" if file.has("v.blk.0.ln1.bias") else "rms_norm",
        "use_mean_pooling": not file.has("v.post_ln.weight"),
    }


def _intern_settings(file: Tower) -> Values:
    return {
        **square(file),
        "crop_to_patches": True,
        "min_patches": int(file.own("vision.preproc_min_tiles", 1)),
        "max_patches": int(file.own("vision.preproc_max_tiles", 12)),
    }


def _scale(file: Tower) -> int:
    return int(file.own("vision.projector.scale_factor", 2))


def _neighbours(heads: int, count: int) -> "NDArray[np.int64]":
    """Return the file's rows of queries or keys in the folder's order.

    Rotary pairs are adjacent in the file, as in llama.cpp's files of Llama, and half a head apart
    in the folder.

    heads, count: the numbers of heads and of rows.
    """
    return half_pairs(heads, count // heads)


_PIXTRAL = {
    "v.patch_embd": "model.vision_tower.patch_conv",
    "v.pre_ln": "model.vision_tower.ln_pre",
    **layer_names(
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
    "permuted": dict.fromkeys((f"{LAYER}attn_q", f"{LAYER}attn_k"), _neighbours),
}
_INTERN = "model.vision_tower"

OTHERS: tuple[Mmproj, ...] = (
    Mmproj(
        "gemma3",
        "Gemma3ForConditionalGeneration",
        ("gemma3",),
        siglip(
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
        square,
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
        siglip("model.vision_model", {"mm.model.fc": "model.connector.modality_projection.proj"}),
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
            **layer_names(
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
            f"{LAYER}ls1.weight": f"{_INTERN}.encoder.layer.{{i}}.lambda_1",
            f"{LAYER}ls2.weight": f"{_INTERN}.encoder.layer.{{i}}.lambda_2",
            "mm.model.mlp.0": "model.multi_modal_projector.layer_norm",
            "mm.model.mlp.1": "model.multi_modal_projector.linear_1",
            "mm.model.mlp.3": "model.multi_modal_projector.linear_2",
        },
        {"image_token_id": ("<IMG_CONTEXT>",)},
        ("mm.model.mlp.3.weight", 0),
        _intern,
        _intern_settings,
        lambda file: {"downsample_ratio": 1 / _scale(file), "projector_hidden_act": "gelu"},
        optional=("v.post_ln", f"{LAYER}attn_q_norm", f"{LAYER}attn_k_norm"),
    ),
)
