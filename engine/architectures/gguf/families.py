"""The layouts of architectures in GGUF files, as entries (`Gguf`)."""

from collections.abc import Mapping
from typing import Any

from engine.architectures.dense.llama import LAYER
from engine.architectures.gguf.deepseek import DEEPSEEK
from engine.architectures.gguf.record import NORMED, Gguf, Make, Metadata, own
from engine.architectures.layout import half_pairs, neighbouring_pairs, neighbours
from engine.architectures.mixtures.families import experts_at
from engine.architectures.record import CheckpointTensor, Rows

_PERMUTED: Mapping[str, Rows] = {
    "attn_q": lambda model: half_pairs(model.num_heads, model.head_dim),
    "attn_k": lambda model: half_pairs(model.num_kv_heads, model.head_dim),
}
# For files of vision models, in which rotary pairs are half a head apart, but adjacent in
# checkpoints.
_HALVES: Mapping[str, Rows] = {
    "attn_q": lambda model: neighbouring_pairs(model.num_heads, model.head_dim, model.rotary_dim),
    "attn_k": lambda model: neighbouring_pairs(
        model.num_kv_heads, model.head_dim, model.rotary_dim
    ),
}
# Some files name a layer's second norm after the preceding block.
_BEHIND = {"mlp_norm": ("post_attention_norm",)}
_EXPERT = f"{LAYER}mlp.experts.{{e}}."
_APART = experts_at(
    "mlp.router",
    f"{_EXPERT}gate_proj",
    f"{_EXPERT}up_proj",
    f"{_EXPERT}down_proj",
)
_GRANITE_EXPERT = f"{LAYER}block_sparse_moe.experts.{{e}}."
_GRANITE_APART = {
    "experts_gate_up": CheckpointTensor(
        (f"{_GRANITE_EXPERT}gate.weight", f"{_GRANITE_EXPERT}up.weight")
    ),
    "experts_down": CheckpointTensor((f"{_GRANITE_EXPERT}down.weight",)),
}
_GRANITE_SHARED = {
    "shared_gate_up": CheckpointTensor((f"{LAYER}shared_mlp.gate", f"{LAYER}shared_mlp.up"))
}
_GRANITE = {
    "attention_multiplier": "attention.scale",
    "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale",
    "logits_scaling": "logit_scale",
}


def _layers(file: Metadata) -> range:
    return range(int(file.own("block_count")))


def _layer_types(file: Metadata) -> list[str] | None:
    """Convert the file's sliding_window_pattern to layer_types; None without a pattern.

    The pattern is a list with true for each layer with a window, or a period, whose last layer has
    no window. With period 0 all layers have the window.
    """
    pattern = file.own("attention.sliding_window_pattern")
    if pattern is None:
        return None
    if isinstance(pattern, int):
        pattern = [not pattern or (i + 1) % pattern != 0 for i in _layers(file)]
    return ["sliding_attention" if local else "full_attention" for local in pattern]


def _window(file: Metadata) -> int | None:
    """Return the file's sliding window; None if it is 0."""
    return int(file.own("attention.sliding_window", 0)) or None


def _dense(file: Metadata) -> list[int]:
    return [i for i in _layers(file) if not file.has(f"blk.{i}.ffn_gate_inp.weight")]


def _head_dim(file: Metadata) -> int:
    heads = int(file.own("attention.head_count"))
    return int(file.own("attention.key_length") or file.own("embedding_length") // heads)


def _gemma_scale(layers: int) -> Make:
    """Return a function that computes query_pre_attn_scalar, which files do not have.

    The value is the head size. In the 27B, identified by its `layers` layers, it is the hidden size
    divided by the number of heads.
    """

    def scalar(file: Metadata) -> int:
        if len(_layers(file)) == layers:
            return int(file.own("embedding_length")) // int(file.own("attention.head_count"))
        return _head_dim(file)

    return scalar


def _mpt(file: Metadata) -> dict[str, Any]:
    most = float(file.own("attention.max_alibi_bias", 0.0))  # 0 means that the file has no ALiBi
    clip = file.own("attention.clamp_kqv")
    return {"alibi": most > 0, "alibi_bias_max": most or 8.0, "clip_qkv": clip}


def _sections(file: Metadata) -> bool:
    """Whether the file has M-RoPE sections."""
    return any(file.get("glm4.rope.dimension_sections") or ())


def _with(stem: str) -> Make:
    """Return a function that tests whether a file's first layer has a tensor."""
    return lambda file: file.has(f"blk.0.{stem}.weight")


_WINDOWS: Mapping[str, Make] = {"layer_types": _layer_types}
_QWEN_MOE: Mapping[str, Make] = {"mlp_only_layers": _dense}
_H = "transformer.h.{i}."

GGUFS: tuple[Gguf, ...] = (
    # Files of Llama and similar models have the same name; files with experts are Mixtral's.
    Gguf(
        "MixtralForCausalLM", "llama", rows=_PERMUTED, when=lambda file: file.own("expert_count", 0)
    ),
    Gguf("LlamaForCausalLM", "llama", rows=_PERMUTED),
    Gguf(
        "Ministral3ForCausalLM",
        "mistral3",
        rows=_PERMUTED,
        computed={"sliding_window": lambda file: None},
        rope={"llama_4_scaling_beta": own("attention.temperature_scale")},
    ),
    Gguf("Qwen2ForCausalLM", "qwen2"),
    Gguf("Qwen2ForCausalLM", "qwen2vl"),
    Gguf("Qwen3ForCausalLM", "qwen3"),
    Gguf("Qwen3ForCausalLM", "qwen3vl"),
    Gguf(
        "Qwen2MoeForCausalLM",
        "qwen2moe",
        keys={"shared_expert_intermediate_size": "expert_shared_feed_forward_length"},
        says={"norm_topk_prob": False},
        computed=_QWEN_MOE,
    ),
    Gguf("Qwen3MoeForCausalLM", "qwen3moe", says={"norm_topk_prob": True}, computed=_QWEN_MOE),
    Gguf("Qwen3MoeForCausalLM", "qwen3vlmoe", says={"norm_topk_prob": True}, computed=_QWEN_MOE),
    Gguf("QWenLMHeadModel", "qwen", says={"no_bias": True}),
    Gguf("SeedOssForCausalLM", "seed_oss", stems=_BEHIND),
    Gguf("Ernie4_5ForCausalLM", "ernie4_5"),
    Gguf("PaddleOCRTextModel", "paddleocr"),
    Gguf(
        "Ernie4_5_MoeForCausalLM",
        "ernie4_5-moe",
        keys={
            "moe_layer_start_index": "leading_dense_block_count",
            "moe_layer_interval": "interleave_moe_layer_step",
            "moe_num_shared_experts": "expert_shared_count",
        },
    ),
    Gguf("HunYuanDenseV1ForCausalLM", "hunyuan-dense"),
    Gguf(
        "HunYuanMoEV1ForCausalLM",
        "hunyuan-moe",
        keys={"num_shared_expert": "expert_shared_count"},
        says={"use_mixed_mlp_moe": True},
    ),
    Gguf("GraniteForCausalLM", "granite", rows=_PERMUTED, keys=_GRANITE),
    Gguf(
        "GraniteMoeSharedForCausalLM",
        "granitemoe",
        rows=_PERMUTED,
        pieces={**_GRANITE_APART, **_GRANITE_SHARED},
        keys={**_GRANITE, "shared_intermediate_size": "expert_shared_feed_forward_length"},
        when=lambda file: file.own("expert_shared_feed_forward_length", 0),
    ),
    Gguf(
        "GraniteMoeForCausalLM",
        "granitemoe",
        rows=_PERMUTED,
        pieces=_GRANITE_APART,
        keys=_GRANITE,
    ),
    Gguf("SmolLM3ForCausalLM", "smollm3", rows=_PERMUTED),
    Gguf("ArceeForCausalLM", "arcee", rows=_PERMUTED),
    Gguf("NemotronForCausalLM", "nemotron", plus_one=True, eps="norm_eps"),
    Gguf("Jais2ForCausalLM", "jais2", eps="layer_norm_eps"),
    Gguf("GemmaForCausalLM", "gemma", plus_one=True),
    Gguf(
        "Gemma2ForCausalLM",
        "gemma2",
        plus_one=True,
        computed={**_WINDOWS, "query_pre_attn_scalar": _gemma_scale(46)},
    ),
    Gguf(
        "Gemma3ForCausalLM",
        "gemma3",
        plus_one=True,
        computed={**_WINDOWS, "query_pre_attn_scalar": _gemma_scale(62)},
    ),
    Gguf("PhiForCausalLM", "phi2", eps="layer_norm_eps"),
    Gguf("Phi3ForCausalLM", "phi3", computed={"sliding_window": _window}),
    Gguf(
        "PhiMoEForCausalLM",
        "phimoe",
        computed={
            "sliding_window": _window,
            "lm_head_bias": lambda file: file.has("output.bias"),
        },
    ),
    Gguf(
        "StableLmForCausalLM",
        "stablelm",
        computed={
            "use_qkv_bias": lambda file: file.has("blk.0.attn_q.bias"),
            "qk_layernorm": _with("attn_q_norm"),
        },
        eps="layer_norm_eps",
    ),
    Gguf("Starcoder2ForCausalLM", "starcoder2", eps="norm_epsilon"),
    # GLM-4's checkpoints have several class names, of which this is the newest. Older GGUF files
    # have q, k and v in one tensor.
    Gguf(
        "GlmForCausalLM",
        "chatglm",
        pieces={"qkv": CheckpointTensor((f"{LAYER}self_attn.qkv_proj",), neighbours)},
        when=_with("attn_qkv"),
    ),
    Gguf("GlmForCausalLM", "chatglm"),
    Gguf("Glm4ForCausalLM", "glm4", rows=_HALVES, when=_sections),
    Gguf("Glm4ForCausalLM", "glm4"),
    Gguf(
        "Glm4MoeForCausalLM",
        "glm4moe",
        stems=_BEHIND,
        keys={"n_shared_experts": "expert_shared_count"},
        computed={
            "num_hidden_layers": lambda file: (
                len(_layers(file)) - int(file.own("nextn_predict_layers", 0))
            ),
            "use_qk_norm": _with("attn_q_norm"),
            **NORMED,
        },
    ),
    Gguf(
        "Dots1ForCausalLM",
        "dots1",
        keys={"n_shared_experts": "expert_shared_count"},
        computed=NORMED,
    ),
    *DEEPSEEK,
    Gguf("MiniMaxM2ForCausalLM", "minimax-m2"),
    Gguf("OlmoForCausalLM", "olmo", rows=_PERMUTED),
    Gguf(
        "Olmo3ForCausalLM",
        "olmo2",
        computed=_WINDOWS,
        when=lambda file: file.own("attention.sliding_window"),
    ),
    Gguf("Olmo2ForCausalLM", "olmo2"),
    Gguf("OlmoeForCausalLM", "olmoe", says={"norm_topk_prob": False}),
    Gguf(
        "Exaone4ForCausalLM",
        "exaone4",
        computed={**_WINDOWS, "sliding_window": _window},
    ),
    Gguf(
        "CohereForCausalLM",
        "command-r",
        keys={"logit_scale": "logit_scale"},
        computed={"use_qk_norm": _with("attn_q_norm")},
        eps="layer_norm_eps",
    ),
    Gguf(
        "Cohere2ForCausalLM",
        "cohere2",
        keys={"logit_scale": "logit_scale"},
        computed=_WINDOWS,
        eps="layer_norm_eps",
    ),
    Gguf(
        "GptOssForCausalLM",
        "gpt-oss",
        stems=_BEHIND,
        pieces={
            **_APART,
            "experts_gate_up_bias": CheckpointTensor(
                (f"{_EXPERT}gate_proj.bias", f"{_EXPERT}up_proj.bias")
            ),
            "experts_down_bias": CheckpointTensor((f"{_EXPERT}down_proj.bias",)),
        },
        rope={"truncate": False},
        computed=_WINDOWS,
    ),
    Gguf(
        "InternLM2ForCausalLM",
        "internlm2",
        rows=_PERMUTED,
        pieces={"qkv": CheckpointTensor(tuple(f"{LAYER}attention.w{name}" for name in "qkv"))},
    ),
    Gguf(
        "MiniCPMForCausalLM",
        "minicpm",
        rows=_PERMUTED,
        keys={"scale_emb": "embedding_scale"},
        computed={
            "scale_depth": lambda file: file.own("residual_scale") * len(_layers(file)) ** 0.5,
            "dim_model_base": lambda file: file.own("embedding_length") / file.own("logit_scale"),
        },
    ),
    Gguf("XverseForCausalLM", "xverse", rows=_PERMUTED),
    # One entry for all sizes: the number of heads identifies a 13B, the vocabulary size Baichuan 2.
    Gguf(
        "BaichuanForCausalLM",
        "baichuan",
        rows=_PERMUTED,
        pieces={"qkv": CheckpointTensor(tuple(f"{LAYER}self_attn.{name}_proj" for name in "qkv"))},
    ),
    Gguf("ExaoneForCausalLM", "exaone"),
    Gguf(
        "GPT2LMHeadModel",
        "gpt2",
        pieces={
            "qkv": CheckpointTensor((f"{_H}attn.c_attn",)),
            "out": CheckpointTensor((f"{_H}attn.c_proj",)),
            "up": CheckpointTensor((f"{_H}mlp.c_fc",)),
            "down": CheckpointTensor((f"{_H}mlp.c_proj",)),
        },
        eps="layer_norm_epsilon",
    ),
    Gguf(
        "GPTBigCodeForCausalLM",
        "starcoder",
        says={"multi_query": True},
        eps="layer_norm_epsilon",
    ),
    Gguf(
        "GPTNeoXForCausalLM",
        "gptneox",
        pieces={"qkv": CheckpointTensor(("gpt_neox.layers.{i}.attention.query_key_value",))},
        eps="layer_norm_eps",
    ),
    # If attention and MLP have separate norms, attention uses the second one.
    Gguf(
        "FalconForCausalLM, two norms",
        "falcon",
        stems={"attention_norm": ("attn_norm_2",), "mlp_norm": ("attn_norm",)},
        pieces={"qkv": CheckpointTensor((f"{_H}self_attention.query_key_value",))},
        keys={"num_kv_heads": "attention.head_count_kv"},
        says={"new_decoder_architecture": True},
        eps="layer_norm_epsilon",
        when=_with("attn_norm_2"),
    ),
    Gguf(
        "FalconForCausalLM",
        "falcon",
        pieces={"qkv": CheckpointTensor((f"{_H}self_attention.query_key_value",))},
        keys={"num_kv_heads": "attention.head_count_kv"},
        says={"new_decoder_architecture": True, "num_ln_in_parallel_attn": 1},
        eps="layer_norm_epsilon",
    ),
    Gguf("MptForCausalLM", "mpt", computed={"attn_config": _mpt}, eps="layer_norm_epsilon"),
    Gguf(
        "BloomForCausalLM",
        "bloom",
        pieces={"qkv": CheckpointTensor((f"{_H}self_attention.query_key_value",))},
        eps="layer_norm_epsilon",
    ),
)
