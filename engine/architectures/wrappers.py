"""WRAPPERS: the records of multimodal models; their text models have separate records."""

from engine.architectures.record import Wrapper

# transformers 4 stores the whole text model under language_model, transformers 5 its layers under
# model.language_model.
_RENAMES = (
    ("language_model.model.", "model."),
    ("language_model.lm_head.", "lm_head."),
    ("model.language_model.", "model."),
    ("model.text_model.", "model."),
)
_OTHERS = (
    "vision_tower.*",
    "vision_model.*",
    "visual.*",
    "multi_modal_projector.*",
    "mlp1.*",
    "mlp_AR.*",
    "model.projector.*",
    "mm_projector.*",
    "audio_tower.*",
    "image_newline",
    "model.vision_tower.*",
    "model.vision_model.*",
    "model.visual.*",
    "model.multi_modal_projector.*",
    "model.mm_projector.*",
    "model.connector.*",
    "model.audio_tower.*",
    "model.embed_vision.*",
    "model.embed_audio.*",
    "model.image_newline",
    "mtp.*",
)


_QWEN = "<|vision_start|><|image_pad|><|vision_end|>"
_QWEN_CLIP = "<|vision_start|><|video_pad|><|vision_end|>"
_KIMI = "<|media_begin|>image<|media_content|><|media_pad|><|media_end|>"
# Wrapper.images -> Wrapper.place
_PLACES = {
    "gemma3": "<start_of_image>",
    "gemma4": "<|image|>",
    "glm4v": "<|begin_of_image|><|image|><|end_of_image|>",
    "idefics3": "<image>",
    "internvl": "<IMG_CONTEXT>\n",
    "kimi": _KIMI,
    "kimi_split": _KIMI,
    "llama4": "<|image|>",
    "paddleocr_vl": "<|IMAGE_START|><|IMAGE_PLACEHOLDER|><|IMAGE_END|>",
    "pixtral": "[IMG]",
    "qwen2_vl": _QWEN,
    "qwen2_5_vl": _QWEN,
    "qwen3_vl": _QWEN,
}


def _wrapper(
    name: str, models: str, flat: str = "", *, images: str = "", tower: str = ""
) -> Wrapper:
    place = _PLACES.get(images, "")
    clip_place = _QWEN_CLIP if place == _QWEN else ""
    return Wrapper(
        name,
        models,
        _RENAMES,
        _OTHERS,
        flat,
        images,
        tower,
        place=place,
        clip_place=clip_place,
    )


WRAPPERS: dict[str, Wrapper] = {
    wrapper.name: wrapper
    for wrapper in (
        _wrapper("Gemma3ForConditionalGeneration", "Gemma 3 from 4B on", images="gemma3"),
        _wrapper(
            "Mistral3ForConditionalGeneration",
            "Mistral Small 3.1 on, Ministral 3, Devstral",
            images="pixtral",
        ),
        _wrapper(
            "Gemma4ForConditionalGeneration", "Gemma 4 (E2B, E4B, 31B, 26B-A4B)", images="gemma4"
        ),
        _wrapper("Llama4ForConditionalGeneration", "Llama 4 (Scout, Maverick)", images="llama4"),
        _wrapper("KimiVLForConditionalGeneration", "Kimi-VL", images="kimi"),
        _wrapper("KimiK25ForConditionalGeneration", "Kimi K2.5 and K2.6", images="kimi"),
        _wrapper(
            "Kimi_K25ForConditionalGeneration",
            "Kimi K2.5 and K2.6 (transformers)",
            images="kimi_split",
        ),
        _wrapper(
            "LlavaForConditionalGeneration",
            "LLaVA, Pixtral (which alone sees images)",
            images="pixtral",
            tower="pixtral",
        ),
        _wrapper("LlavaNextForConditionalGeneration", "LLaVA-NeXT"),
        _wrapper("LlavaNextVideoForConditionalGeneration", "LLaVA-NeXT-Video"),
        _wrapper("LlavaOnevisionForConditionalGeneration", "LLaVA-OneVision"),
        _wrapper("VipLlavaForConditionalGeneration", "ViP-LLaVA"),
        _wrapper("InternVLForConditionalGeneration", "InternVL 3 and 3.5", images="internvl"),
        Wrapper(
            "InternVLChatModel",
            "InternVL 2.5, 3 and 3.5 in the publisher's format",
            (*_RENAMES, ("language_model.", "")),
            _OTHERS,
            images="internvl_chat",
            text_key="llm_config",
            place=_PLACES["internvl"],
        ),
        _wrapper("Glm4vForConditionalGeneration", "GLM-4.1V", "glm4v_text", images="glm4v"),
        _wrapper("Glm4vMoeForConditionalGeneration", "GLM-4.5V, GLM-4.6V", images="glm4v"),
        _wrapper("Glm46VForConditionalGeneration", "GLM-4.6V-Flash", images="glm4v"),
        _wrapper("Idefics2ForConditionalGeneration", "Idefics 2"),
        _wrapper("Idefics3ForConditionalGeneration", "Idefics 3", images="idefics3"),
        _wrapper("SmolVLMForConditionalGeneration", "SmolVLM", images="idefics3"),
        _wrapper(
            "PaddleOCRVLForConditionalGeneration",
            "PaddleOCR-VL",
            "paddleocr_vl_text",
            images="paddleocr_vl",
        ),
        _wrapper("Qwen2VLForConditionalGeneration", "Qwen2-VL", "qwen2", images="qwen2_vl"),
        _wrapper("Qwen2_5_VLForConditionalGeneration", "Qwen2.5-VL", "qwen2", images="qwen2_5_vl"),
        _wrapper("Qwen3_5ForConditionalGeneration", "Qwen 3.5 and 3.6 (dense)", images="qwen3_vl"),
        _wrapper(
            "Qwen3_5MoeForConditionalGeneration", "Qwen 3.5 and 3.6 (mixtures)", images="qwen3_vl"
        ),
        _wrapper("Qwen3VLForConditionalGeneration", "Qwen3-VL (dense)", images="qwen3_vl"),
        _wrapper(
            "Qwen3VLMoeForConditionalGeneration", "Qwen3-VL (30B-A3B, 235B-A22B)", images="qwen3_vl"
        ),
        _wrapper("Lfm2VlForConditionalGeneration", "LFM2-VL"),
        _wrapper("AyaVisionForConditionalGeneration", "Aya Vision"),
        _wrapper("Cohere2VisionForConditionalGeneration", "Command A Vision"),
    )
}
# Alternative values of a text_config's model_type -> the record's model_type.
TEXT_TYPES = {
    "qwen2_vl_text": "qwen2",
    "qwen2_5_vl_text": "qwen2",
    "qwen3_vl_text": "qwen3",
    "gemma3": "gemma3_text",
    "kimi_k2": "deepseek_v3",
    "glm4v_moe_text": "glm4_moe",
}
