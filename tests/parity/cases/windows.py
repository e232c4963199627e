"""Decoders with sliding-window attention, chunked attention or soft caps of scores."""

from tests.parity.cases.case import Case
from tests.parity.cases.rewriting import wrapped
from tests.parity.cases.settings import GPT, GRANITE, SEVEN, TURNS

WINDOWS: dict[str, Case] = {
    "mistral 7b 0.1": Case("mistral", SEVEN),
    "ministral 8b": Case("ministral", {**SEVEN, "head_dim": 16, "layer_types": TURNS}),
    "qwen 2, windows": Case("qwen2", {**SEVEN, "use_sliding_window": True, "max_window_layers": 1}),
    "gemma 2": Case("gemma2", {**SEVEN, "head_dim": 24, "query_pre_attn_scalar": 32}),
    "gemma 3": Case(
        "gemma3_text",
        {**SEVEN, "head_dim": 24, "query_pre_attn_scalar": 32, "layer_types": TURNS},
    ),
    "gemma 3 4b": Case(
        "gemma3_text",
        {**SEVEN, "head_dim": 24, "query_pre_attn_scalar": 32, "layer_types": TURNS},
        architecture="Gemma3ForConditionalGeneration",
        rewrite=wrapped("language_model."),
    ),
    "phi 3, windows": Case("phi3", SEVEN),
    "starcoder 2, windows": Case("starcoder2", SEVEN),
    "olmo 3": Case("olmo3", {**SEVEN, "layer_types": TURNS}),
    "exaone 4": Case("exaone4", {**SEVEN, "layer_types": TURNS}),
    "cohere 2": Case("cohere2", {**SEVEN, "logit_scale": 0.25, "layer_types": TURNS}),
    "command a vision": Case(
        "cohere2",
        {**SEVEN, "logit_scale": 0.25, "layer_types": TURNS},
        architecture="Cohere2VisionForConditionalGeneration",
        rewrite=wrapped("language_model."),
    ),
    "granite swa": Case(
        "granite_swa",
        {**GRANITE, **SEVEN, "layer_types": TURNS, "layer_rope_theta": [1e4, 0, 1e5]},
    ),
    "cwm": Case("cwm", {**SEVEN, "head_dim": 16, "layer_types": TURNS}),
    "gpt-neo": Case(
        "gpt_neo",
        {
            "num_layers": 4,
            "num_heads": 4,
            "attention_types": [[["global", "local"], 2]],
            "window_size": 7,
        },
        drop=(*GPT, "num_hidden_layers", "num_attention_heads"),
    ),
}
