"""Conversion of a GGUF file's metadata to the config.json of its architecture."""

import math
from typing import Any

import numpy as np

from deployments.checkpoints.gguf_file import GGUFFile
from engine.architectures.gguf import KEYS
from engine.config.quantized import KEY


def config_of(
    file: GGUFFile, dtype: str, special: dict[str, Any], types: dict[str, str]
) -> dict[str, Any]:
    """Return the contents of config.json from a file's metadata.

    dtype: dtype of the dequantised weights.
    special: special token ids, such as eos_token_id.
    types: {name of a matrix that keeps its blocks: its GGUF type}.
    """
    layout = file.layout
    if file.own("attention.temperature_scale") and "llama_4_scaling_beta" not in layout.rope:
        raise file.error("attention.temperature_scale is not supported for this architecture")
    hidden, heads = int(file.need("embedding_length")), int(file.need("attention.head_count"))
    head_dim = int(file.own("attention.key_length") or hidden // max(1, heads))
    config: dict[str, Any] = {
        "num_key_value_heads": heads,
        "head_dim": head_dim,
        "rotary_dim": int(file.own("rope.dimension_count", head_dim)),
        "vocab_size": file.shape("token_embd.weight")[0],
        "tie_word_embeddings": not file.has("output.weight"),
        "rope_parameters": rope_of(file, head_dim),
        "original_max_position_embeddings": file.own("rope.scaling.original_context_length"),
        "attention_bias": _attention_bias(file),
        "attention_out_bias": file.has("blk.0.attn_output.bias"),
        "mlp_bias": file.has("blk.0.ffn_up.bias"),
        layout.eps: file.own("attention.layer_norm_rms_epsilon")
        or file.need("attention.layer_norm_epsilon"),
    }
    for key, theirs in {**KEYS, **layout.keys}.items():
        if (value := file.own(theirs)) is not None:
            config[key] = value
    fields = {**layout.says, **{key: make(file) for key, make in layout.computed.items()}}
    config = {key: value for key, value in config.items() if value is not None} | fields
    names = file.record.keys
    config = {names.get(key, key): value for key, value in config.items()}
    if types:
        config[KEY] = {"quant_method": "gguf", "types": types}
    return {
        "architectures": [layout.architecture],
        "model_type": file.record.model_type or file.architecture,
        **config,
        "dtype": dtype,
        **special,
    }


def _attention_bias(file: GGUFFile) -> bool:
    """Return the value of config.json's `attention_bias`: whether queries, keys and values have a
    bias.

    For architectures with a separate `qkv_bias`, it says whether the output projection has a bias.
    """
    if "qkv_bias" in file.record.switches:
        return file.has("blk.0.attn_output.bias")
    return file.has("blk.0.attn_q.bias") or file.has("blk.0.attn_qkv.bias")


def rope_of(file: GGUFFile, head_dim: int) -> dict[str, Any]:
    """Return rope_parameters with llama.cpp's defaults. Raises ConfigError for an unknown
    scaling."""
    read: dict[str, Any] = {"rope_theta": file.own("rope.freq_base", 10000.0)}
    # Older files have only the scaling factor, which means linear scaling.
    kind = file.own("rope.scaling.type", "linear")
    if kind not in ("none", "linear", "yarn", "longrope"):
        raise file.error(f"rope scaling {kind!r} is not supported")
    factor = 1.0 if kind == "none" else _factor(file)
    original = file.own("rope.scaling.original_context_length")
    attention = file.own("rope.scaling.attn_factor", 1.0)
    if file.has("rope_freqs.weight"):
        _refuse_scaling(file, factor=factor, attn_factor=attention)
        read |= _llama3(file, read["rope_theta"], head_dim)
    elif file.has("rope_factors_long.weight"):
        _refuse_scaling(file, factor=factor)
        read |= {
            "rope_type": "longrope",
            "long_factor": file.data("rope_factors_long.weight").tolist(),
            "short_factor": file.data("rope_factors_short.weight").tolist(),
            "original_max_position_embeddings": original,
            "attention_factor": file.own("rope.scaling.attn_factor"),
        }
    elif kind == "yarn" and factor != 1 and _extrapolates(file):
        log_multiplier = file.own("rope.scaling.yarn_log_multiplier") or None
        read |= {
            "rope_type": kind,
            "factor": factor,
            "original_max_position_embeddings": original,
            "attention_factor": file.own("rope.scaling.yarn_attn_factor"),
            "beta_fast": file.own("rope.scaling.yarn_beta_fast"),
            "beta_slow": file.own("rope.scaling.yarn_beta_slow"),
            "mscale": log_multiplier and 1.0,
            "mscale_all_dim": log_multiplier,
        }
        if attention != 1:  # an additional attention factor besides yarn's
            _refuse_scaling(file, yarn_log_multiplier=log_multiplier)
            own = read["attention_factor"] or 1 + 0.1 * math.log(max(1.0, factor))
            read["attention_factor"] = own * attention
    else:  # longrope without its factor tensors needs no scaling
        _refuse_scaling(file, attn_factor=attention)
        read |= {"rope_type": "linear", "factor": factor} if factor != 1 else {}
        read.setdefault("rope_type", "default")
    for key, value in file.layout.rope.items():
        read[key] = value(file) if callable(value) else value
    return {key: value for key, value in read.items() if value is not None}


def _factor(file: GGUFFile) -> float:
    """Return the factor by which positions are scaled; 0 in the file means 1."""
    return float(file.own("rope.scaling.factor", file.own("rope.scale_linear", 0.0)) or 1.0)


def _extrapolates(file: GGUFFile) -> bool:
    """Return whether yarn leaves high frequencies unscaled; if not, yarn is the same as linear
    scaling."""
    share = file.own("rope.scaling.yarn_ext_factor", -1.0)  # negative: not set
    if share > 0 and share != 1:
        raise file.error(f"rope.scaling.yarn_ext_factor {share} is not supported, only 0 and 1")
    return bool(share)


def _refuse_scaling(file: GGUFFile, **values: float | None) -> None:
    """Raise ConfigError for a rope.scaling value that would change the output but is not supported.

    values: {key under rope.scaling: its value}.
    """
    for key, value in values.items():
        if value not in (None, 0, 1):
            raise file.error(
                f"{file.architecture}.rope.scaling.{key} {value} is not supported beside its other "
                "scaling of positions"
            )


def _llama3(file: GGUFFile, base: float, head_dim: int) -> dict[str, Any]:
    """Return Llama 3.1's rope_parameters from the file's tensor rope_freqs, which has a divisor per
    frequency.

    Meta's models all have the same low and high frequency factors, so the largest divisor is the
    scaling factor. Raises ConfigError if the other divisors do not follow from these numbers.
    """
    divisors = np.asarray(file.data("rope_freqs.weight"), dtype=np.float32).ravel()
    factor = float(divisors.max())
    low, high, original = 1.0, 4.0, 8192
    wavelength = 2 * np.pi * base ** (np.arange(0, head_dim, 2) / head_dim)
    smooth = np.clip((original / wavelength - low) / (high - low), 0, 1)
    expected = 1 / ((1 - smooth) / factor + smooth)
    if expected.shape != divisors.shape or not np.allclose(divisors, expected, rtol=1e-3):
        raise file.error("unknown rope_freqs scaling")
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": original,
    }
