"""The mmproj files of Qwen-VL, GLM-V and PaddleOCR-VL, which all resize pictures as Qwen-VL."""

from collections.abc import Callable

from engine.architectures.mmproj.record import (
    Mmproj,
    Tower,
    Values,
    activation,
    inner,
    layer_names,
    merged,
    siglip,
    size,
    sizes,
    table_side,
)


def _qwen(file: Tower) -> Values:
    return {
        "depth": size(file, "block_count"),
        "num_heads": size(file, "attention.head_count"),
        "patch_size": size(file, "patch_size"),
        "spatial_merge_size": merged(file),
        "temporal_patch_size": 2,
    }


def _qwen2(file: Tower) -> Values:
    width = size(file, "embedding_length")
    return {
        **_qwen(file),
        "embed_dim": width,
        "mlp_ratio": inner(file) // width,
        "hidden_size": file.shape("mm.2.weight")[0],
        "hidden_act": activation(file, "quick_gelu"),
    }


def _qwen2_5(file: Tower) -> Values:
    period = int(file.own("vision.n_wa_pattern", 0)) or 1  # 0 = no layer has window attention
    return {
        **_qwen_later(file),
        "window_size": int(file.own("vision.window_size", 112)),
        "fullatt_block_indexes": [
            layer for layer in range(size(file, "block_count")) if (layer + 1) % period == 0
        ],
        "hidden_act": "silu",
    }


def _qwen_later(file: Tower) -> Values:
    return {
        **_qwen(file),
        "hidden_size": size(file, "embedding_length"),
        "intermediate_size": inner(file),
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


def _glm(file: Tower) -> Values:
    return {
        **_qwen(file),
        "hidden_size": size(file, "embedding_length"),
        "intermediate_size": file.shape("mm.up.weight")[0],
        "out_hidden_size": file.shape("mm.down.weight")[0],
        "image_size": table_side(file),
        "attention_bias": file.has("v.blk.0.attn_qkv.bias"),
        "hidden_act": activation(file, "silu"),
        "rms_norm_eps": file.need("vision.attention.layer_norm_epsilon"),
    }


def _paddle(file: Tower) -> Values:
    return {
        **sizes(file),
        "image_size": table_side(file),
        "spatial_merge_size": 2,
        "hidden_act": "gelu_pytorch_tanh",
    }


def qwen_settings(least: int, most: int, frames: int = 2) -> Callable[[Tower], Values]:
    """Return a function that computes the settings of a processor that resizes as Qwen's does.

    least, most: the default limits of a picture's area in pixels.
    frames: the number of frames of a patch.
    """

    def settings(file: Tower) -> Values:
        return {
            "min_pixels": int(file.own("vision.image_min_pixels", least)),
            "max_pixels": int(file.own("vision.image_max_pixels", most)),
            "patch_size": size(file, "patch_size"),
            "merge_size": merged(file),
            "temporal_patch_size": frames,
        }

    return settings


_QWEN_LAYER = layer_names(
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
    mlp: names of the tensors of a layer's MLP, as for `layer_names`.
    """
    return Mmproj(
        projector,
        wrapper,
        ("qwen2vl",),
        {
            **_QWEN_PATCH,
            **_QWEN_LAYER,
            **layer_names("model.visual.blocks", **mlp),
            **_QWEN2_MERGER,
        },
        _QWEN_TOKENS,
        ("mm.2.weight", 0),
        vision,
        qwen_settings(56 * 56, 28 * 28 * 16384),
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
            **layer_names(
                "model.visual.blocks", ffn_up="mlp.linear_fc1", ffn_down="mlp.linear_fc2"
            ),
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
        qwen_settings(256 * 256, 4096 * 4096),
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
            **layer_names("model.visual.blocks", **_GATED),
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
        qwen_settings(112 * 112, 28 * 28 * 12288),
        sections=True,
    )


QWEN: tuple[Mmproj, ...] = (
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
        siglip(
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
        qwen_settings(147384, 2822400, frames=1),
        sections=True,
    ),
)
