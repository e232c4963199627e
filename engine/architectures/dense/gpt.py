"""Models before Llama, such as GPT-2, Falcon and BLOOM: layer norms with biases and plain MLPs.

These models have learned positions, partly rotary embeddings, or ALiBi.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from engine.architectures.by_layer import still
from engine.architectures.dense.alibi import mpt_slopes, slopes
from engine.architectures.dense.llama import without
from engine.architectures.layout import both, four_blocks, grouped, neighbours
from engine.architectures.record import Architecture, CheckpointTensor, Read, always
from engine.config_reader import Reader

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from engine.config.model_config import LayerAttention, ModelConfig

_H = "transformer.h.{i}."
# Files of GPT-2 and BLOOM on the hub omit the names' prefix.
_BARE = tuple((f"{part}.", f"transformer.{part}.") for part in ("h", "wte", "wpe", "ln_f"))
_BUFFERS = ("*.attn.bias", "*.attn.masked_bias", "*.causal_mask", "*.rotary_emb.inv_freq")
_SIZES = {
    "hidden_size": "n_embd",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "max_position_embeddings": "n_positions",
    "intermediate_size": "n_inner",
    "hidden_act": "activation_function",
}
_LAYER_NORMS: Mapping[str, Read] = {
    "norm": always("layer"),
    "norm_bias": always(True),
    "norm_eps": lambda config: config.number("layer_norm_epsilon", 1e-5),
}
_BIASES: Mapping[str, Read] = {
    "qkv_bias": always(True),
    "out_bias": always(True),
    "mlp_bias": always(True),
}
_LEARNED: Mapping[str, Read] = {
    "position_rows": lambda config: config.size("max_position_embeddings"),
}
_ALL_HEADS: Mapping[str, Read] = {
    "num_kv_heads": lambda config: config.size("num_attention_heads"),
}
_FOUR_TIMES: Mapping[str, Read] = {
    "intermediate_size": lambda config: config.size(
        "intermediate_size", 4 * config.size("hidden_size")
    ),
}
_GPT2: Mapping[str, CheckpointTensor] = {
    "embedding": CheckpointTensor(("transformer.wte",)),
    "positions": CheckpointTensor(("transformer.wpe",)),
    "attention_norm": CheckpointTensor((f"{_H}ln_1",)),
    "qkv": CheckpointTensor((f"{_H}attn.c_attn",)),
    "out": CheckpointTensor((f"{_H}attn.c_proj",)),
    "mlp_norm": CheckpointTensor((f"{_H}ln_2",)),
    "up": CheckpointTensor((f"{_H}mlp.c_fc",)),
    "down": CheckpointTensor((f"{_H}mlp.c_proj",)),
    "norm": CheckpointTensor(("transformer.ln_f",)),
    "head": CheckpointTensor(("lm_head",)),
}
_GPTJ: Mapping[str, CheckpointTensor] = {
    **without(_GPT2, "positions", "mlp_norm"),
    "out": CheckpointTensor((f"{_H}attn.out_proj",)),
    "up": CheckpointTensor((f"{_H}mlp.fc_in",)),
    "down": CheckpointTensor((f"{_H}mlp.fc_out",)),
}
_GPTJ_SWITCHES: Mapping[str, Read] = {
    **_LAYER_NORMS,
    **_ALL_HEADS,
    **_FOUR_TIMES,
    "parallel": always("shared"),
    "mlp_bias": always(True),
    "head_bias": always(True),
}
_NEOX = "gpt_neox.layers.{i}."
_FALCON: Mapping[str, CheckpointTensor] = {
    "embedding": CheckpointTensor(("transformer.word_embeddings",)),
    "attention_norm": CheckpointTensor((f"{_H}input_layernorm",)),
    "qkv": CheckpointTensor((f"{_H}self_attention.query_key_value",), grouped),
    "out": CheckpointTensor((f"{_H}self_attention.dense",)),
    "mlp_norm": CheckpointTensor((f"{_H}post_attention_layernorm",)),
    "up": CheckpointTensor((f"{_H}mlp.dense_h_to_4h",)),
    "down": CheckpointTensor((f"{_H}mlp.dense_4h_to_h",)),
    "norm": CheckpointTensor(("transformer.ln_f",)),
    "head": CheckpointTensor(("lm_head",)),
}
_OPT = "model.decoder."
_MPT = "transformer.blocks.{i}."


def _conv(tensors: Mapping[str, CheckpointTensor]) -> dict[str, CheckpointTensor]:
    """Return a copy of the tensors in which matrices are marked as stored transposed, [in, out]."""
    turned = {
        ours: replace(tensors[ours], transposed=True) for ours in ("qkv", "out", "up", "down")
    }
    return {**tensors, **turned}


def _one_key_head(config: Reader) -> int:
    return 1 if config.flag("multi_query", True) else config.size("num_attention_heads")


def _bigcode_rows(model: "ModelConfig") -> "NDArray[np.int64]":
    """Return the stored rows of qkv, which are grouped by KV head if there are several."""
    import numpy as np

    rows = (model.num_heads + 2 * model.num_kv_heads) * model.head_dim
    return np.arange(rows) if model.num_kv_heads == 1 else grouped(model)


def _gpt_neo(config: Reader, plain: "LayerAttention", layers: int) -> Sequence["LayerAttention"]:
    """Return each layer's attention, with unscaled scores: by default alternately global and local.

    config.json may have another order in attention_layers or attention_types.
    """
    full = replace(plain, rope=None, scale=1.0)
    local = replace(full, window=config.size("window_size", 256))
    kinds = config.listed("attention_layers", str)
    if not kinds:
        types = config.listed("attention_types", list) or [[["global", "local"], layers // 2]]
        try:
            kinds = [kind for names, times in types for _ in range(times) for kind in names]
        except (TypeError, ValueError):
            message = f"must be a list of [[kind, ...], times], got {types!r}"
            raise config.error("attention_types", message) from None
    if len(kinds) != layers:
        raise config.error("attention_types", f"names {len(kinds)} layers, the model has {layers}")
    return [local if kind == "local" else full for kind in kinds]


def _falcon_kv_heads(config: Reader) -> int:
    heads = config.size("num_attention_heads")
    if config.flag("new_decoder_architecture"):
        return config.size("num_kv_heads", heads)
    return 1 if config.flag("multi_query", True) else heads


def _falcon_norms(config: Reader) -> str:
    """Return the record's name, which depends on whether attention and MLP have separate norms."""
    own = config.flag("new_decoder_architecture") and config.get("num_ln_in_parallel_attn", 2) == 2
    return "FalconForCausalLM, two norms" if own else "FalconForCausalLM"


def _falcon_parallel(config: Reader) -> str:
    if config.flag("new_decoder_architecture"):
        return "own" if config.get("num_ln_in_parallel_attn", 2) == 2 else "shared"
    return "shared" if config.flag("parallel_attn", True) else ""


def _falcon(config: Reader, plain: "LayerAttention", layers: int) -> Sequence["LayerAttention"]:
    """Return each layer's attention; ALiBi slopes are rounded to bfloat16 and scaled like
    scores."""
    if config.flag("alibi"):
        rounded = tuple(_bfloat16(slope) * plain.scale for slope in slopes(plain.num_heads))
        plain = replace(plain, rope=None, slopes=rounded)
    return [plain] * layers


def _bfloat16(value: float) -> float:
    import numpy as np

    bits = int(np.float32(value).view(np.uint32))
    bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
    return float(np.uint32(bits).view(np.float32))


def _falcon_record(
    name: str, tensors: Mapping[str, CheckpointTensor], **fields: Any
) -> Architecture:
    return Architecture(
        name,
        tensors,
        switches={
            **_LAYER_NORMS,
            "num_kv_heads": _falcon_kv_heads,
            "parallel": _falcon_parallel,
            "intermediate_size": lambda config: config.size(
                "ffn_hidden_size", 4 * config.size("hidden_size")
            ),
        },
        keys={
            "hidden_act": "activation",
            "qkv_bias": "bias",
            "out_bias": "bias",
            "attention_bias": "bias",
            "mlp_bias": "bias",
        },
        attention=_falcon,
        **fields,
    )


def _bloom(config: Reader, plain: "LayerAttention", layers: int) -> Sequence["LayerAttention"]:
    return [replace(plain, rope=None, slopes=slopes(plain.num_heads))] * layers


def _mpt(config: Reader, plain: "LayerAttention", layers: int) -> Sequence["LayerAttention"]:
    inner = config.inner("attn_config")
    if not inner.flag("alibi", True):
        raise inner.error("alibi", "must be true: learned positions of MPT are not computed here")
    slopes = mpt_slopes(plain.num_heads, inner.number("alibi_bias_max", 8.0))
    scale = inner.number("softmax_scale", plain.scale)
    return [replace(plain, rope=None, slopes=slopes, scale=scale)] * layers


ARCHITECTURES = (
    Architecture(
        "GPT2LMHeadModel",
        _conv(_GPT2),
        models="GPT-2",
        model_type="gpt2",
        switches={**_LAYER_NORMS, **_BIASES, **_LEARNED, **_ALL_HEADS, **_FOUR_TIMES},
        keys=_SIZES,
        only={
            "scale_attn_weights": (True,),
            "scale_attn_by_inverse_layer_idx": (False,),
            "add_cross_attention": (False,),
        },
        attention=still,
        renames=_BARE,
        ignored=_BUFFERS,
    ),
    Architecture(
        "GPTBigCodeForCausalLM",
        {**_GPT2, "qkv": CheckpointTensor((f"{_H}attn.c_attn",), _bigcode_rows)},
        models="StarCoder, SantaCoder",
        model_type="gpt_bigcode",
        switches={
            **_LAYER_NORMS,
            **_BIASES,
            **_LEARNED,
            **_FOUR_TIMES,
            "num_kv_heads": _one_key_head,
        },
        keys=_SIZES,
        only={"scale_attn_weights": (True,), "add_cross_attention": (False,)},
        attention=still,
        ignored=_BUFFERS,
    ),
    Architecture(
        "GPTNeoForCausalLM",
        {
            **_GPT2,
            "qkv": CheckpointTensor(tuple(f"{_H}attn.attention.{name}_proj" for name in "qkv")),
            "out": CheckpointTensor((f"{_H}attn.attention.out_proj",)),
        },
        models="GPT-Neo",
        model_type="gpt_neo",
        switches={
            **_LAYER_NORMS,
            **_LEARNED,
            **_ALL_HEADS,
            **_FOUR_TIMES,
            "out_bias": always(True),
            "mlp_bias": always(True),
        },
        keys={
            "hidden_act": "activation_function",
            "num_hidden_layers": "num_layers",
            "num_attention_heads": "num_heads",
        },
        attention=_gpt_neo,
        ignored=("*.attn.attention.bias", "*.attn.attention.masked_bias"),
    ),
    Architecture(
        "GPTNeoXForCausalLM",
        {
            "embedding": CheckpointTensor(("gpt_neox.embed_in",)),
            "attention_norm": CheckpointTensor((f"{_NEOX}input_layernorm",)),
            "qkv": CheckpointTensor((f"{_NEOX}attention.query_key_value",), grouped),
            "out": CheckpointTensor((f"{_NEOX}attention.dense",)),
            "mlp_norm": CheckpointTensor((f"{_NEOX}post_attention_layernorm",)),
            "up": CheckpointTensor((f"{_NEOX}mlp.dense_h_to_4h",)),
            "down": CheckpointTensor((f"{_NEOX}mlp.dense_4h_to_h",)),
            "norm": CheckpointTensor(("gpt_neox.final_layer_norm",)),
            "head": CheckpointTensor(("embed_out",)),
        },
        models="GPT-NeoX, Pythia, Dolly 2",
        model_type="gpt_neox",
        switches={
            **_LAYER_NORMS,
            **_ALL_HEADS,
            "norm_eps": lambda config: config.number("layer_norm_eps", 1e-5),
            "qkv_bias": lambda config: config.flag("attention_bias"),
            "out_bias": lambda config: config.flag("attention_bias"),
            "mlp_bias": always(True),
            "parallel": lambda config: "own" if config.flag("use_parallel_residual", True) else "",
        },
        keys={"partial_rotary_factor": "rotary_pct", "rope_theta": "rotary_emb_base"},
        ignored=("*.attention.bias", "*.attention.masked_bias", "*.rotary_emb.inv_freq"),
    ),
    Architecture(
        "GPTJForCausalLM",
        {
            **_GPTJ,
            "qkv": CheckpointTensor(tuple(f"{_H}attn.{name}_proj" for name in "qkv"), neighbours),
        },
        models="GPT-J",
        model_type="gptj",
        switches=_GPTJ_SWITCHES,
        keys=_SIZES,
        ignored=_BUFFERS,
    ),
    Architecture(
        "CodeGenForCausalLM",
        {**_GPTJ, "qkv": CheckpointTensor((f"{_H}attn.qkv_proj",), both(four_blocks, neighbours))},
        models="CodeGen",
        model_type="codegen",
        switches=_GPTJ_SWITCHES,
        keys=_SIZES,
        ignored=_BUFFERS,
    ),
    Architecture(
        "OPTForCausalLM",
        {
            "embedding": CheckpointTensor((f"{_OPT}embed_tokens",)),
            "positions": CheckpointTensor((f"{_OPT}embed_positions",)),
            "project_in": CheckpointTensor((f"{_OPT}project_in",)),
            "project_out": CheckpointTensor((f"{_OPT}project_out",)),
            "attention_norm": CheckpointTensor((f"{_OPT}layers.{{i}}.self_attn_layer_norm",)),
            "qkv": CheckpointTensor(
                tuple(f"{_OPT}layers.{{i}}.self_attn.{name}_proj" for name in "qkv"),
            ),
            "out": CheckpointTensor((f"{_OPT}layers.{{i}}.self_attn.out_proj",)),
            "mlp_norm": CheckpointTensor((f"{_OPT}layers.{{i}}.final_layer_norm",)),
            "up": CheckpointTensor((f"{_OPT}layers.{{i}}.fc1",)),
            "down": CheckpointTensor((f"{_OPT}layers.{{i}}.fc2",)),
            "norm": CheckpointTensor((f"{_OPT}final_layer_norm",)),
            "head": CheckpointTensor(("lm_head",)),
        },
        models="OPT, Galactica",
        model_type="opt",
        switches={
            **_LAYER_NORMS,
            **_ALL_HEADS,
            **{
                bias: lambda config: config.flag("enable_bias", True)
                for bias in ("qkv_bias", "out_bias", "mlp_bias")
            },
            "norm_eps": always(1e-5),
            "post_norm": lambda config: not config.flag("do_layer_norm_before", True),
            "embedding_size": lambda config: config.size(
                "word_embed_proj_dim", config.size("hidden_size")
            ),
            "position_offset": always(2),
            "position_rows": lambda config: config.size("max_position_embeddings") + 2,
        },
        keys={"intermediate_size": "ffn_dim", "hidden_act": "activation_function"},
        only={"layer_norm_elementwise_affine": (True,), "_remove_final_layer_norm": (False,)},
        renames=(("decoder.", _OPT),),
        attention=still,
    ),
    _falcon_record(
        "FalconForCausalLM",
        _FALCON,
        models="Falcon 7B, 11B and RW",
        model_type="falcon",
        variant=_falcon_norms,
    ),
    _falcon_record(
        "FalconForCausalLM, two norms",
        {
            **_FALCON,
            "attention_norm": CheckpointTensor((f"{_H}ln_attn",)),
            "mlp_norm": CheckpointTensor((f"{_H}ln_mlp",)),
        },
        models="Falcon 40B and 180B",
    ),
    Architecture(
        "BloomForCausalLM",
        {
            **_FALCON,
            "embedding_norm": CheckpointTensor(("transformer.word_embeddings_layernorm",)),
        },
        models="BLOOM, BLOOMZ",
        model_type="bloom",
        switches={
            **_LAYER_NORMS,
            **_BIASES,
            **_ALL_HEADS,
            **_FOUR_TIMES,
            "hidden_act": always("gelu_pytorch_tanh"),
            # ALiBi has no maximum context; this is the training length.
            "max_positions": lambda config: config.size("seq_length", 2048),
        },
        keys={
            "hidden_size": "n_embed",
            "num_hidden_layers": "n_layer",
            "num_attention_heads": "n_head",
        },
        only={"apply_residual_connection_post_layernorm": (False,)},
        renames=(
            *_BARE,
            ("word_embeddings.", "transformer.word_embeddings."),
            ("word_embeddings_layernorm.", "transformer.word_embeddings_layernorm."),
        ),
        attention=_bloom,
    ),
    Architecture(
        "MptForCausalLM",
        {
            "embedding": CheckpointTensor(("transformer.wte",)),
            "attention_norm": CheckpointTensor((f"{_MPT}norm_1",)),
            "qkv": CheckpointTensor((f"{_MPT}attn.Wqkv",)),
            "out": CheckpointTensor((f"{_MPT}attn.out_proj",)),
            "mlp_norm": CheckpointTensor((f"{_MPT}norm_2",)),
            "up": CheckpointTensor((f"{_MPT}ffn.up_proj",)),
            "down": CheckpointTensor((f"{_MPT}ffn.down_proj",)),
            "norm": CheckpointTensor(("transformer.norm_f",)),
            "head": CheckpointTensor(("lm_head",)),
        },
        models="MPT",
        model_type="mpt",
        switches={
            **_ALL_HEADS,
            "norm": always("layer"),
            "norm_eps": always(1e-5),
            "intermediate_size": lambda config: 4 * config.size("hidden_size"),
            "hidden_act": always("gelu"),
            "qkv_clip": lambda config: config.inner("attn_config").number_or_none("clip_qkv"),
        },
        keys={
            "hidden_size": "d_model",
            "num_hidden_layers": "n_layers",
            "num_attention_heads": "n_heads",
            "max_position_embeddings": "max_seq_len",
        },
        only={"no_bias": (True,), "expansion_ratio": (4,), "logit_scale": (None,)},
        attention=_mpt,
    ),
)
