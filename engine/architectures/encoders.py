"""Encoders: the bidirectional embedding models BERT, RoBERTa, ModernBERT and NomicBert."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from engine.architectures.by_layer import FULL, WINDOW, layer_types
from engine.architectures.record import (
    Architecture,
    CheckpointTensor,
    HeadLayer,
    Read,
    ReadClassifier,
    always,
)
from engine.config_reader import Reader

if TYPE_CHECKING:
    from engine.config.model_config import LayerAttention


def _both_ways(config: Reader, plain: "LayerAttention", layers: int) -> Sequence["LayerAttention"]:
    return [replace(plain, rope=None, bidirectional=True)] * layers


def _bert(network: str) -> Mapping[str, CheckpointTensor]:
    layer = f"{network}.encoder.layer.{{i}}."
    return {
        "embedding": CheckpointTensor((f"{network}.embeddings.word_embeddings",)),
        "positions": CheckpointTensor((f"{network}.embeddings.position_embeddings",)),
        "token_types": CheckpointTensor((f"{network}.embeddings.token_type_embeddings",)),
        "embedding_norm": CheckpointTensor((f"{network}.embeddings.LayerNorm",)),
        "qkv": CheckpointTensor(
            tuple(f"{layer}attention.self.{name}" for name in ("query", "key", "value"))
        ),
        "out": CheckpointTensor((f"{layer}attention.output.dense",)),
        "attention_norm": CheckpointTensor((f"{layer}attention.output.LayerNorm",)),
        "up": CheckpointTensor((f"{layer}intermediate.dense",)),
        "down": CheckpointTensor((f"{layer}output.dense",)),
        "mlp_norm": CheckpointTensor((f"{layer}output.LayerNorm",)),
    }


def _separator(config: Reader) -> int:
    """Return the separator token's id for a classifier of pairs of texts; -1 = no pairs.

    The id is read from tokenizer.json, as config.json does not have it. Embedding models have -1,
    as they read single texts.
    """
    folder = Path(config.path).parent
    pairs = config.classifies() and config.size("type_vocab_size") > 1
    if not pairs or not (folder / "tokenizer.json").is_file():
        return -1
    beside = folder / "tokenizer_config.json"
    named = Reader.from_file(beside).get("sep_token", "[SEP]") if beside.is_file() else "[SEP]"
    text = named.get("content") if isinstance(named, dict) else named
    added = Reader.from_file(folder / "tokenizer.json").get("added_tokens", [])
    return next((int(token["id"]) for token in added if token.get("content") == text), -1)


_SWITCHES: Mapping[str, Read] = {
    "norm": always("layer"),
    "norm_bias": always(True),
    "norm_eps": lambda config: config.number("layer_norm_eps", 1e-12),
    "num_kv_heads": lambda config: config.size("num_attention_heads"),
    "qkv_bias": always(True),
    "out_bias": always(True),
    "mlp_bias": always(True),
    "post_norm": always(True),
    "position_rows": lambda config: config.size("max_position_embeddings"),
    "token_types": lambda config: config.size("type_vocab_size"),
    "separator": _separator,
    "tie_embeddings": always(True),
}
# Positions begin at the row after the padding token's.
_ROBERTA: Mapping[str, Read] = {
    **_SWITCHES,
    "position_offset": lambda config: config.get("pad_token_id", 1) + 1,
    "max_positions": lambda config: (
        config.size("max_position_embeddings") - config.get("pad_token_id", 1) - 1
    ),
}
_IGNORED = (
    "classifier.*",
    "pooler.*",
    "*.pooler.*",
    "cls.*",
    "lm_head.*",
    "*embeddings.position_ids",
)


def _bert_head(config: Reader) -> tuple[str, tuple[HeadLayer, ...]]:
    return "cls", (HeadLayer("bert.pooler.dense", "Tanh"), HeadLayer("classifier"))


def _roberta_head(config: Reader) -> tuple[str, tuple[HeadLayer, ...]]:
    return "cls", (HeadLayer("classifier.dense", "Tanh"), HeadLayer("classifier.out_proj"))


def _modern_head(config: Reader) -> tuple[str, tuple[HeadLayer, ...]]:
    dense = HeadLayer(
        "head.dense",
        config.get("classifier_activation", "gelu"),
        bias=config.flag("classifier_bias"),
    )
    eps = config.number("norm_eps", 1e-5)
    norm = HeadLayer("head.norm", bias=config.flag("norm_bias"), eps=eps)
    mode = config.one_of("classifier_pooling", ("cls", "mean"), "cls")
    return mode, (dense, norm, HeadLayer("classifier"))


def _record(
    name: str,
    network: str,
    models: str,
    model_type: str,
    switches: Mapping[str, Read],
    head: ReadClassifier,
) -> Architecture:
    return Architecture(
        name,
        _bert(network),
        models=models,
        model_type=model_type,
        switches=switches,
        only={
            "position_embedding_type": ("absolute",),
            "is_decoder": (False,),
            "add_cross_attention": (False,),
        },
        attention=_both_ways,
        ignored=_IGNORED,
        encoder=True,
        classifier=head,
    )


def _modern(config: Reader, plain: "LayerAttention", layers: int) -> Sequence["LayerAttention"]:
    """Return each layer's attention: every third one is full, the others have a window.

    Each kind has a separate rotary base.
    """
    every = config.size("global_attn_every_n_layers", 3)
    kinds = layer_types(config, layers, lambda i: WINDOW if i % every else FULL)
    ropes = config.inner("rope_parameters")
    thetas = {
        FULL: config.number("global_rope_theta", 160_000.0),
        WINDOW: config.number("local_rope_theta", 10_000.0),
    }
    attention = []
    for kind in kinds:
        theta = ropes.inner(kind).number("rope_theta", thetas[kind])
        window = config.size("local_attention", 128) // 2 if kind == WINDOW else 0
        rope = replace(plain.rope, theta=theta) if plain.rope is not None else None
        attention.append(replace(plain, rope=rope, window=window, bidirectional=True))
    return attention


_LAYER = "model.layers.{i}."
_MODERN = Architecture(
    "ModernBertModel",
    {
        "embedding": CheckpointTensor(("model.embeddings.tok_embeddings",)),
        "embedding_norm": CheckpointTensor(("model.embeddings.norm",)),
        "attention_norm": CheckpointTensor((f"{_LAYER}attn_norm",)),
        "qkv": CheckpointTensor((f"{_LAYER}attn.Wqkv",)),
        "out": CheckpointTensor((f"{_LAYER}attn.Wo",)),
        "mlp_norm": CheckpointTensor((f"{_LAYER}mlp_norm",)),
        "gate_up": CheckpointTensor((f"{_LAYER}mlp.Wi",)),
        "down": CheckpointTensor((f"{_LAYER}mlp.Wo",)),
        "norm": CheckpointTensor(("model.final_norm",)),
    },
    models="ModernBERT, GTE-ModernBERT (vectors only)",
    model_type="modernbert",
    switches={
        "norm": always("layer"),
        "norm_bias": lambda config: config.flag("norm_bias"),
        "norm_eps": lambda config: config.number("norm_eps", 1e-5),
        "num_kv_heads": lambda config: config.size("num_attention_heads"),
        "tie_embeddings": always(True),
    },
    keys={"hidden_act": "hidden_activation"},
    attention=_modern,
    ignored=("head.*", "decoder.*", "classifier.*"),
    encoder=True,
    classifier=_modern_head,
    # The first layer has no attention norm, as the embedding's norm replaces it.
    absent=lambda model, layer: () if layer else ("attention_norm",),
)


def _turned_both_ways(
    config: Reader, plain: "LayerAttention", layers: int
) -> Sequence["LayerAttention"]:
    return [replace(plain, bidirectional=True)] * layers


def _nomic_positions(config: Reader) -> int:
    """Return the maximum text length, which for rotary_scaling_factor is the trained length.

    Beyond that length the factor changes the rotary embedding, which is not supported.
    """
    longest = config.size("max_position_embeddings", 2048)
    if config.get("rotary_scaling_factor") is None:
        return longest
    return min(longest, config.size("max_trained_positions", 2048))


def _nomic_activation(config: Reader) -> str:
    """Return the activation function; the hub's files have "swiglu", the name of the gated MLP."""
    swiglu = config.get("activation_function") == "swiglu"
    return "silu" if swiglu else str(config.get("hidden_act", "silu"))


def _nomic_head(config: Reader) -> tuple[str, tuple[HeadLayer, ...]]:
    return "cls", (HeadLayer("nomic_bert.pooler.dense", "Tanh"), HeadLayer("classifier"))


_NOMIC_LAYER = "encoder.layers.{i}."
_NO_BIAS = (False, None)
_NOMIC = Architecture(
    "NomicBertModel",
    {
        "embedding": CheckpointTensor(("embeddings.word_embeddings",)),
        "token_types": CheckpointTensor(("embeddings.token_type_embeddings",)),
        "embedding_norm": CheckpointTensor(("emb_ln",)),
        "qkv": CheckpointTensor((f"{_NOMIC_LAYER}attn.Wqkv",)),
        "out": CheckpointTensor((f"{_NOMIC_LAYER}attn.out_proj",)),
        "attention_norm": CheckpointTensor((f"{_NOMIC_LAYER}norm1",)),
        "gate_up": CheckpointTensor((f"{_NOMIC_LAYER}mlp.fc12", f"{_NOMIC_LAYER}mlp.fc11")),
        "down": CheckpointTensor((f"{_NOMIC_LAYER}mlp.fc2",)),
        "mlp_norm": CheckpointTensor((f"{_NOMIC_LAYER}norm2",)),
    },
    models="NomicBert, Nomic Embed Text v1 and v1.5 (vectors only)",
    model_type="nomic_bert",
    switches={
        "norm": always("layer"),
        "norm_bias": always(True),
        "norm_eps": lambda config: config.number("layer_norm_eps", 1e-12),
        "num_kv_heads": lambda config: config.size("num_attention_heads"),
        "max_positions": _nomic_positions,
        "post_norm": always(True),
        "token_types": lambda config: config.size("type_vocab_size"),
        "separator": _separator,
        "tie_embeddings": always(True),
    },
    keys={
        "hidden_size": "n_embd",
        "intermediate_size": "n_inner",
        "num_hidden_layers": "n_layer",
        "num_attention_heads": "n_head",
        "max_position_embeddings": "n_positions",
        "layer_norm_eps": "layer_norm_epsilon",
        "rope_theta": "rotary_emb_base",
        "partial_rotary_factor": "rotary_emb_fraction",
    },
    computed={"hidden_act": _nomic_activation},
    only={
        "activation_function": ("swiglu",),
        "qkv_proj_bias": _NO_BIAS,
        "mlp_fc1_bias": _NO_BIAS,
        "mlp_fc2_bias": _NO_BIAS,
        "prenorm": (False,),
        "parallel_block": (False,),
        "use_rms_norm": (False, None),
        "causal": (False,),
        "rotary_emb_interleaved": (False,),
        "rotary_emb_scale_base": (None,),
        "num_experts": (None, 0, 1),
        "moe_every_n_layers": (None, 0),
    },
    attention=_turned_both_ways,
    renames=(("nomic_bert.", ""), ("bert.", "")),
    ignored=("classifier.*", "pooler.*", "cls.*", "lm_head.*", "*position_ids"),
    encoder=True,
    classifier=_nomic_head,
)
ARCHITECTURES = (
    _record(
        "BertModel", "bert", "BERT, BGE, E5, GTE (vectors only)", "bert", _SWITCHES, _bert_head
    ),
    _record(
        "RobertaModel", "roberta", "RoBERTa (vectors only)", "roberta", _ROBERTA, _roberta_head
    ),
    _record(
        "XLMRobertaModel",
        "roberta",
        "XLM-RoBERTa, BGE-M3, multilingual E5 (vectors only)",
        "xlm-roberta",
        _ROBERTA,
        _roberta_head,
    ),
    _MODERN,
    _NOMIC,
)
