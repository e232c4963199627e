"""ModelFacts: the family, size and precision of a checkpoint, for listings of models."""

import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path

from engine.config.model_config import ModelConfig
from engine.config.quantized import GGUF_BLOCKS, Quantized
from engine.errors import ConfigError
from engine.shards import Entry, read_headers, weight_files

_TYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
_WORDS = ("I32", "U8", "I8")  # safetensors' types of tensors with packed quantised weights
_SCALES = ("scale", "scale_inv", "scales", "zeros", "zero_point", "g_idx", "absmax", "quant_map")


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """The description of a checkpoint, for listings of models.

    family: config.json's model_type.
    generates: whether the model generates text.
    quantization: type in which most weights are stored, such as "Q4_K" or "BF16".
    format: format of the weight files.
    size_bytes: total size of the weight files.
    sizes: the network's dimensions under GGUF's names, such as block_count.
    parameters: returns the number of weights according to the files' headers, or 0 if unknown; slow
        for many tensors.
    """

    family: str = ""
    generates: bool = True
    quantization: str = ""
    format: str = "safetensors"
    size_bytes: int = 0
    sizes: Mapping[str, int] = field(default_factory=dict)
    parameters: Callable[[], int] = lambda: 0


def read_facts(folder: Path, config: ModelConfig) -> ModelFacts:
    """Return the facts of the checkpoint in a folder. The weight files' headers are read only when
    `parameters` is called."""
    family = config.record.model_type or config.architecture
    quantized = config.quantized
    sizes = {
        "embedding_length": config.hidden_size,
        "block_count": config.num_layers,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_heads,
        "attention.head_count_kv": config.num_kv_heads,
        "vocab_size": config.vocab_size,
    }
    return ModelFacts(
        family=family,
        generates=config.generates and not config.classifies,
        quantization=_TYPES.get(config.dtype, config.dtype)
        if quantized is None
        else _precision(quantized),
        format="gguf" if quantized is not None and quantized.method == "gguf" else "safetensors",
        size_bytes=sum(path.stat().st_size for path in weight_files(folder)),
        sizes=sizes,
        parameters=cache(partial(_count, folder, quantized)),
    )


def _precision(quantized: Quantized) -> str:
    """Return the name of the type or quantisation in which most matrices are stored."""
    if quantized.method == "gguf":
        types = Counter(quantized.types.values())
        return types.most_common(1)[0][0] if types else "F16"
    names = [scheme.name for _, scheme in quantized.rules if scheme is not None]
    return names[0] if names else quantized.method.upper()


def _count(folder: Path, quantized: Quantized | None) -> int:
    """Return the number of weights, without scales, according to the files' headers; 0 if a file is
    missing or damaged.

    quantized: the checkpoint's quantisation; None: none.
    """
    try:
        entries = read_headers(folder)
    except ConfigError:
        return 0
    return sum(_weights(entry, quantized) for entry in entries.values())


def _weights(entry: Entry, quantized: Quantized | None) -> int:
    plain = math.prod(entry.shape)
    if quantized is None:
        return plain
    matrix, _, own = entry.name.rpartition(".")
    if quantized.method == "gguf":
        weights, size = GGUF_BLOCKS.get(quantized.types.get(matrix, ""), (0, 0))
        return entry.num_bytes // size * weights if weights else plain
    scheme = quantized.scheme(matrix)
    if scheme is None:
        return plain
    if own.endswith(_SCALES):
        return 0
    return entry.num_bytes * 8 // scheme.bits if entry.code in _WORDS else plain
