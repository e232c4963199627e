"""GGUF file -> folder with safetensors, config.json, tokenizer.json and chat template.

Reads the file with the `gguf` package (a memory map), unpacks each tensor a few rows at a time and
writes it straight into the safetensors file, so that the peak memory is one slice and neither torch
nor transformers is imported: SmolLM2-135M takes about five seconds, where loading it through
transformers takes 18 and 1.1 GB.

With `blocks` matrices keep the file's own types, byte by byte (`engine.quantized`), which the CPU
multiplies by as they are: a quarter of a second.

Supported: the architectures whose record names GGUF tensors (`engine.architectures`), with a
byte-level BPE tokenizer, and every quantisation `gguf` knows.
"""

import json
import math
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.architectures import ARCHITECTURES, Gguf, Rows
from engine.config_reader import Reader
from engine.errors import ConfigError
from engine.model_config import ModelConfig
from engine.quantized import GGUF_BLOCKS, KEY

Progress = Callable[[str, int, int], None]
"""(what is done, how much of it, out of how much), called from one thread."""

_ARCHITECTURES = {each.gguf.name: each for each in ARCHITECTURES.values() if each.gguf is not None}
_OPTIONAL = "output"  # a tied head is the embedding

_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_SPLIT = _LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")
_PRE_TOKENIZERS = {  # tokenizer.ggml.pre -> what splits text before the merges
    "gpt-2": None,
    "smollm": "digits",
    "llama-bpe": _LLAMA3_SPLIT,
    "llama3": _LLAMA3_SPLIT,
    "llama-v3": _LLAMA3_SPLIT,
    "qwen2": _QWEN2_SPLIT,
    "deepseek-r1-qwen": _QWEN2_SPLIT,
}

_SLICE_BYTES = 64 << 20  # of unpacked float32: bounds the memory, and is how often progress moves


class GGUFFile:
    """One open GGUF file. Raises ConfigError for one that is unreadable or not supported."""

    def __init__(self, path: Path) -> None:
        from gguf import GGUFReader  # here: 0.3 s that `manta --help` need not wait for

        self.path = path
        with path.open("rb") as file:
            if file.read(4) != b"GGUF":
                raise ConfigError(f"{path} is not a GGUF file", param="model")
        try:
            self._reader = GGUFReader(path)
        except (ValueError, KeyError, IndexError, OverflowError) as error:
            raise ConfigError(
                f"{path} is damaged or cut short ({error}); download it again", param="model"
            ) from error
        self.architecture = str(self.get("general.architecture"))
        if self.architecture not in _ARCHITECTURES:
            raise ConfigError(
                f"{path.name}: GGUF architecture {self.architecture!r} is not supported "
                f"(supported: {', '.join(_ARCHITECTURES)})",
                param="model",
            )
        self.record = _ARCHITECTURES[self.architecture]
        self.tensors = {tensor.name: tensor for tensor in self._reader.tensors}

    @property
    def layout(self) -> Gguf:
        assert self.record.gguf is not None
        return self.record.gguf

    def get(self, key: str, default: Any = None) -> Any:
        """The metadata value of a key; "{arch}." stands for the architecture."""
        field = self._reader.get_field(key.replace("{arch}", getattr(self, "architecture", "")))
        return default if field is None else field.contents()

    def need(self, key: str) -> Any:
        value = self.get(key)
        if value is None:
            raise ConfigError(
                f"{self.path.name} has no {key.replace('{arch}', self.architecture)}", param="model"
            )
        return value


def convert(
    source: Path, target: Path, progress: Progress | None = None, *, blocks: bool = False
) -> None:
    """Write the model of a GGUF file into the existing, empty folder `target`.

    Weights become bfloat16; a file whose matrices are all float16 or all float32 keeps its type.
    blocks: those of GGUF_BLOCKS stay as they are, one row of bytes an output, and config.json names
    their types; norms and biases stay float32.
    Raises ConfigError when the model is not supported, the file is damaged or the disk is too
    small.
    """
    file = GGUFFile(source)
    names = _safetensors_names(file)
    tokenizer, special = _tokenizer(file)
    dtype = _weight_dtype(file)
    config = _config(file, dtype, special)
    kept = _kept(file, names) if blocks else {}
    if kept:
        types = {names[name].removesuffix(".weight"): kind for name, kind in kept.items()}
        config[KEY] = {"quant_method": "gguf", "types": types}
    model = ModelConfig.from_dicts(Reader(config, source.name), Reader({}, source.name))
    _write_json(target / "config.json", config)
    _write_json(target / "tokenizer.json", tokenizer)
    _write_json(target / "tokenizer_config.json", _tokenizer_config(file))
    _write_json(target / "generation_config.json", special)
    template = file.get("tokenizer.chat_template")
    if template:
        (target / "chat_template.jinja").write_text(template, encoding="utf-8")
    tensors = [_WrittenTensor.of(file, model, name, names[name], dtype, kept) for name in names]
    _write_weights(tensors, target / "model.safetensors", progress)


def _config(file: GGUFFile, dtype: str, special: dict[str, Any]) -> dict[str, Any]:
    if file.get("{arch}.expert_count"):
        raise ConfigError(
            f"{file.path.name}: mixture-of-experts GGUF is not supported", param="model"
        )
    hidden = int(file.need("{arch}.embedding_length"))
    heads = int(file.need("{arch}.attention.head_count"))
    head_dim = file.get("{arch}.attention.key_length") or file.get("{arch}.rope.dimension_count")
    head_dim = int(head_dim or hidden // heads)
    return {
        "architectures": [file.record.name],
        "model_type": file.architecture,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": int(file.need("{arch}.feed_forward_length")),
        "num_hidden_layers": int(file.need("{arch}.block_count")),
        "num_attention_heads": heads,
        "num_key_value_heads": int(file.get("{arch}.attention.head_count_kv", heads)),
        "head_dim": head_dim,
        "max_position_embeddings": int(file.need("{arch}.context_length")),
        "rms_norm_eps": float(file.need("{arch}.attention.layer_norm_rms_epsilon")),
        "vocab_size": int(file.tensors["token_embd.weight"].shape[1]),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "rope_parameters": _rope(file, head_dim),
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "mlp_bias": False,
        "dtype": dtype,
        **special,
    }


def _rope(file: GGUFFile, head_dim: int) -> dict[str, Any]:
    base = float(file.get("{arch}.rope.freq_base", 10000.0))
    kind = file.get("{arch}.rope.scaling.type", "none")
    if "rope_freqs.weight" in file.tensors:
        # Llama 3.1's scaling is stored as one divisor per frequency. Its two band limits are the
        # same in all of Meta's models, so the largest divisor tells the factor; the check below
        # makes sure.
        divisors = np.asarray(file.tensors["rope_freqs.weight"].data, dtype=np.float32).ravel()
        factor = float(divisors.max())
        low, high, original = 1.0, 4.0, 8192
        wavelength = 2 * np.pi * base ** (np.arange(0, head_dim, 2) / head_dim)
        smooth = np.clip((original / wavelength - low) / (high - low), 0, 1)
        if not np.allclose(divisors, 1 / ((1 - smooth) / factor + smooth), rtol=1e-3):
            raise ConfigError(f"{file.path.name}: unknown rope_freqs scaling", param="model")
        return {
            "rope_type": "llama3",
            "rope_theta": base,
            "factor": factor,
            "low_freq_factor": low,
            "high_freq_factor": high,
            "original_max_position_embeddings": original,
        }
    if kind == "linear":
        factor = float(file.need("{arch}.rope.scaling.factor"))
        return {"rope_type": "linear", "rope_theta": base, "factor": factor}
    if kind != "none":
        raise ConfigError(
            f"{file.path.name}: rope scaling {kind!r} is not supported", param="model"
        )
    return {"rope_type": "default", "rope_theta": base}


def _stem(name: str) -> tuple[str, str]:
    """("attn_q", "weight") of "blk.0.attn_q.weight"; ("", "") of what is no such name."""
    match = re.fullmatch(r"(?:blk\.\d+\.)?(\w+)\.(weight|bias)", name)
    return (match[1], match[2]) if match else ("", "")


def _safetensors_names(file: GGUFFile) -> dict[str, str]:
    """{GGUF name: our name}. Raises ConfigError for a tensor too many or too few."""
    known = file.layout.tensors
    names: dict[str, str] = {}
    for name in file.tensors:
        if name == "rope_freqs.weight":
            continue
        stem, kind = _stem(name)
        ours = known.get(stem, "")
        layer = name.split(".")[1] if name.startswith("blk.") else None
        if not ours or ("{i}" in ours) != (layer is not None):
            raise ConfigError(f"{file.path.name}: unknown tensor {name!r}", param="model")
        names[name] = f"{ours.format(i=layer)}.{kind}"
    layers = range(int(file.need("{arch}.block_count")))
    wanted = [
        name
        for stem, ours in known.items()
        if stem != _OPTIONAL
        for name in ([f"blk.{i}.{stem}" for i in layers] if "{i}" in ours else [stem])
    ]
    if missing := sorted({f"{name}.weight" for name in wanted} - names.keys()):
        raise ConfigError(f"{file.path.name}: tensor {missing[0]!r} is missing", param="model")
    return names


def _weight_dtype(file: GGUFFile) -> str:
    kinds = {tensor.tensor_type.name for tensor in file.tensors.values() if len(tensor.shape) > 1}
    if kinds == {"F32"}:
        return "float32"
    return "float16" if kinds == {"F16"} else "bfloat16"


def _kept(file: GGUFFile, names: dict[str, str]) -> dict[str, str]:
    """{GGUF name: type} of the matrices that stay in blocks."""
    kinds = {name: file.tensors[name].tensor_type.name for name in names}
    return {
        name: kind
        for name, kind in kinds.items()
        if kind in GGUF_BLOCKS and len(file.tensors[name].shape) == 2
    }


@dataclass(frozen=True, slots=True)
class _WrittenTensor:
    """What is written of a tensor. code: safetensors' name of its type. bytes: row-major, in
    slices."""

    name: str
    code: str
    shape: list[int]
    num_bytes: int
    bytes: Callable[[], Iterator[bytes | memoryview]]

    @classmethod
    def of(
        cls,
        file: GGUFFile,
        model: ModelConfig,
        name: str,
        ours: str,
        dtype: str,
        kept: dict[str, str],
    ) -> "_WrittenTensor":
        """kept: see _kept."""
        shape = [int(size) for size in reversed(file.tensors[name].shape)]
        if name in kept:
            rows = _TensorRows(file, model, name)
            shape[1] = rows.data.shape[1]
            return cls(ours, "U8", shape, math.prod(shape), rows.raw)
        if kept and len(shape) == 1:
            dtype = "float32"
        code, width = {"float32": ("F32", 4), "float16": ("F16", 2), "bfloat16": ("BF16", 2)}[dtype]
        rows = _TensorRows(file, model, name)
        return cls(ours, code, shape, width * math.prod(shape), lambda: rows.unpacked(dtype))


class _TensorRows:
    """Of a tensor, in our order, some at a time."""

    def __init__(self, file: GGUFFile, model: ModelConfig, name: str) -> None:
        self._file, self._name = file, name
        tensor = self._tensor = file.tensors[name]
        data = tensor.data if tensor.data.ndim > 1 else tensor.data.reshape(len(tensor.data), -1)
        self.data = data
        self._one_dimensional = len(tensor.shape) == 1
        ordered: Rows | None = file.layout.rows.get(_stem(name)[0])
        self._order = None if ordered is None else ordered(model)

    def _slices(self, row_bytes: int) -> Iterator[NDArray[Any]]:
        rows = int(self._tensor.shape[0]) if self._one_dimensional else self.data.shape[0]
        step = max(1, _SLICE_BYTES // row_bytes)
        for start in range(0, rows, step):
            end = start + step
            yield self.data[start:end] if self._order is None else self.data[self._order[start:end]]

    def raw(self) -> Iterator[bytes | memoryview]:
        """The file's bytes."""
        for part in self._slices(self.data.shape[1]):
            yield np.ascontiguousarray(part).data.cast("B")

    def unpacked(self, dtype: str) -> Iterator[bytes | memoryview]:
        """The values in `dtype`."""
        from gguf.quants import dequantize

        width = 1 if self._one_dimensional else int(self._tensor.shape[0])
        for part in self._slices(4 * width):
            values = dequantize(part, self._tensor.tensor_type).astype(np.float32, copy=False)
            if not np.isfinite(values).all():
                raise ConfigError(
                    f"{self._file.path.name}: tensor {self._name!r} has values that are not finite",
                    param="model",
                )
            yield _cast(np.ascontiguousarray(values), dtype).data.cast("B")


def _cast(values: NDArray[np.float32], dtype: str) -> NDArray[Any]:
    if dtype == "float32":
        return values
    if dtype == "float16":
        return values.astype(np.float16)
    bits = values.view(np.uint32)  # bfloat16: the upper half, rounded to nearest even
    return ((bits + np.uint32(0x7FFF) + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def _write_weights(tensors: list[_WrittenTensor], target: Path, progress: Progress | None) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for tensor in tensors:
        end = offset + tensor.num_bytes
        header[tensor.name] = {
            "dtype": tensor.code,
            "shape": tensor.shape,
            "data_offsets": [offset, end],
        }
        offset = end
    free = shutil.disk_usage(target.parent).free
    if free < offset + (64 << 20):
        raise ConfigError(
            f"the unpacked model needs {offset / 2**30:.2f} GiB in {target.parent}, "
            f"{free / 2**30:.2f} GiB are free; point MANTA_CACHE at a larger disk",
            param="model",
        )
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    done = 0
    with target.open("wb") as out:
        out.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors:
            for part in tensor.bytes():
                done += out.write(part)
                if progress is not None:
                    progress("Unpacking weights", done, offset)


def _tokenizer(file: GGUFFile) -> tuple[dict[str, Any], dict[str, Any]]:
    """(tokenizer.json, {bos_token_id, eos_token_id, ...} as config.json and generation_config.json
    name them).
    """
    kind, pre = file.get("tokenizer.ggml.model"), file.get("tokenizer.ggml.pre")
    if kind != "gpt2" or pre not in _PRE_TOKENIZERS:
        raise ConfigError(
            f"{file.path.name}: tokenizer {kind}/{pre} is not supported (supported: gpt2/"
            f"{', '.join(_PRE_TOKENIZERS)}); use the model's original safetensors folder",
            param="model",
        )
    tokens = [str(token) for token in file.need("tokenizer.ggml.tokens")]
    kinds = [int(kind) for kind in file.need("tokenizer.ggml.token_type")]
    control, user_defined = 3, 4
    added = [
        {
            "id": index,
            "content": token,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": kinds[index] == control,
        }
        for index, token in enumerate(tokens)
        if kinds[index] in (control, user_defined)
    ]
    split = _PRE_TOKENIZERS[pre]
    byte_level = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": split in (None, "digits"),
    }
    if split is None:
        pre_tokenizer: dict[str, Any] = byte_level
    else:
        first: dict[str, Any] = {"type": "Digits", "individual_digits": True}
        if split != "digits":
            pattern = {"Regex": split}
            first = {"type": "Split", "pattern": pattern, "behavior": "Isolated", "invert": False}
        pre_tokenizer = {"type": "Sequence", "pretokenizers": [first, byte_level]}
    special = _special_ids(file)
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": {"type": "NFC"} if split == _QWEN2_SPLIT else None,
        "pre_tokenizer": pre_tokenizer,
        "post_processor": _post_processor(file, tokens),
        "decoder": {**byte_level, "add_prefix_space": True, "use_regex": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": split == _LLAMA3_SPLIT,
            "vocab": {token: index for index, token in enumerate(tokens)},
            "merges": [str(merge).split(" ", 1) for merge in file.need("tokenizer.ggml.merges")],
        },
    }
    return tokenizer, special


def _post_processor(file: GGUFFile, tokens: list[str]) -> dict[str, Any] | None:
    """What puts the beginning-of-sequence token in front, where the model wants it."""
    bos = file.get("tokenizer.ggml.bos_token_id")
    if not file.get("tokenizer.ggml.add_bos_token", False) or bos is None:
        return None
    token = tokens[int(bos)]

    def sequence(name: str, type_id: int) -> list[dict[str, Any]]:
        return [
            {"SpecialToken": {"id": token, "type_id": type_id}},
            {"Sequence": {"id": name, "type_id": type_id}},
        ]

    return {
        "type": "TemplateProcessing",
        "single": sequence("A", 0),
        "pair": sequence("A", 0) + sequence("B", 1),
        "special_tokens": {token: {"id": token, "ids": [int(bos)], "tokens": [token]}},
    }


def _special_ids(file: GGUFFile) -> dict[str, Any]:
    names = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}
    ids: dict[str, Any] = {}
    for ours, theirs in names.items():
        value = file.get(f"tokenizer.ggml.{theirs}_token_id")
        if value is not None:
            ids[ours] = int(value)
    turn_end = file.get("tokenizer.ggml.eot_token_id")
    if turn_end is not None and int(turn_end) != ids.get("eos_token_id"):
        ids["eos_token_id"] = [ids["eos_token_id"], int(turn_end)]
    return ids


def _tokenizer_config(file: GGUFFile) -> dict[str, Any]:
    tokens = file.need("tokenizer.ggml.tokens")
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": int(file.need("{arch}.context_length")),
        "clean_up_tokenization_spaces": False,
        "add_bos_token": bool(file.get("tokenizer.ggml.add_bos_token", False)),
    }
    kinds = {"bos": "bos", "eos": "eos", "pad": "padding", "unk": "unknown"}
    for ours, theirs in kinds.items():
        index = file.get(f"tokenizer.ggml.{theirs}_token_id")
        if index is not None:
            config[f"{ours}_token"] = str(tokens[int(index)])
    return config


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, ensure_ascii=False, indent=1), encoding="utf-8")
