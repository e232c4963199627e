"""Conversion of a GGUF file to a folder with safetensors, config.json, tokenizer and template.

The file is read with the `gguf` package (a memory map). Each tensor is dequantised a few rows at a
time and written directly to the safetensors file, so that peak memory is one slice. torch and
transformers are not imported: SmolLM2-135M takes about 5 s, instead of 18 s and 1.1 GB with
transformers.

With `blocks`, matrices keep the file's quantised blocks unchanged (`engine.config.quantized`), for
CPU kernels that multiply quantised blocks; this takes a quarter of a second.

If the file's folder has a vision encoder (mmproj), the written folder is that of a multimodal model
(`gguf_tower`).

Supported: the architectures of `engine.architectures.gguf`, the tokenizers of `gguf_tokenizer`, and
every quantisation that `gguf` knows.
"""

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deployments.checkpoints.gguf_config import config_of
from deployments.checkpoints.gguf_file import GGUFFile
from deployments.checkpoints.gguf_tokenizer import sampling_of, tokenizer_config_of, tokenizer_of
from deployments.checkpoints.gguf_tower import TowerFile, tower_beside
from deployments.checkpoints.weights_file import Progress, WrittenTensor, cast, write_weights
from engine.architectures import Rows
from engine.config.model_config import ModelConfig
from engine.config.quantized import GGUF_BLOCKS
from engine.config_reader import Reader
from engine.images.settings import PREPROCESSOR

# Tensors that are not written, because config.json has their contents or these follow from it.
_IN_CONFIG = ("rope_freqs.weight", "rope_factors_*.weight", "blk.*.attn_rot_embd")
_EXPERTS = ("ffn_gate", "ffn_up", "ffn_down")
# Matrices that are always dequantised: those used in the activations' type, and lookup tables.
_DENSE = ("ffn_gate_inp", "ffn_gate_inp_shexp", "position_embd", "attn_kv_b")
# Parts of attn_kv_b in newer files: keys [heads, latent, key], and values [heads, value, latent].
_KEYS, _VALUES = "attn_k_b", "attn_v_b"
# Dequantised bytes per slice, which bounds memory and determines how often progress is reported.
_SLICE_BYTES = 64 << 20


def convert(
    source: Path,
    target: Path,
    progress: Progress | None = None,
    *,
    blocks: bool = False,
    sampling: Mapping[str, float] | None = None,
) -> None:
    """Write the model of a GGUF file into the existing, empty folder `target`.

    Weights become bfloat16; a file whose matrices are all float16 or all float32 keeps its type.

    blocks: whether matrices of GGUF_BLOCKS types keep their quantised blocks, as uint8 tensors
        [rows, bytes of a row]. config.json then names their types; norms and biases become float32.
    sampling: defaults for generation_config.json, which the file's own defaults override.

    Raises ConfigError if the model is not supported, the file is damaged or the disk is too small.
    """
    file = GGUFFile(source)
    tower = tower_beside(file)
    special, tokenizer = tokenizer_of(file)
    dtype, model, pieces = _described(file, special)
    types = _types(file, pieces) if blocks else {}
    defaults = {**(sampling or {}), **sampling_of(file)}
    _write_config(config_of(file, dtype, special, types), tower, target)
    _write_json(target / "tokenizer.json", tokenizer)
    _write_json(target / "tokenizer_config.json", tokenizer_config_of(file))
    _write_json(target / "generation_config.json", special | defaults)
    template = file.get("tokenizer.chat_template")
    if template:
        (target / "chat_template.jinja").write_text(template, encoding="utf-8")
    tensors = [_written(file, model, piece, dtype, types) for piece in pieces]
    if tower is not None:
        tensors += tower.tensors()
    write_weights(tensors, target / "model.safetensors", progress)


def write_outline(source: Path, target: Path) -> None:
    """Write only config.json and the image settings, as `convert` with `blocks` would write them.

    Raises the errors of `convert`.
    """
    file = GGUFFile(source)
    special, _ = tokenizer_of(file)
    dtype, _, pieces = _described(file, special)
    config = config_of(file, dtype, special, _types(file, pieces))
    _write_config(config, tower_beside(file), target)


def _described(file: GGUFFile, special: dict[str, Any]) -> "tuple[str, ModelConfig, list[_Piece]]":
    """Return the dtype for dequantised tensors, the model's configuration, and the tensors to
    write.

    special: special token ids by their names in config.json.
    """
    dtype = _weight_dtype(file)
    model = _model(file, config_of(file, dtype, special, {}))
    return dtype, model, _pieces(file, model)


def _types(file: GGUFFile, pieces: "list[_Piece]") -> dict[str, str]:
    """Return {name of a written matrix, without ".weight": its GGUF type} for the matrices that
    keep their blocks."""
    return {
        piece.ours.removesuffix(".weight"): file.kind(piece.name)
        for piece in pieces
        if file.kind(piece.name) in GGUF_BLOCKS
        and len(piece.shape) == 2
        and piece.stem not in _DENSE
    }


def _model(file: GGUFFile, config: dict[str, Any]) -> ModelConfig:
    name = file.path.name
    return ModelConfig.from_dicts(Reader(config, name), Reader({}, name))


def _weight_dtype(file: GGUFFile) -> str:
    kinds = {file.kind(name) for name in file.names if len(file.shape(name)) > 1}
    if kinds == {"F32"}:
        return "float32"
    return "float16" if kinds == {"F16"} else "bfloat16"


# ---- Which tensor is what ------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Piece:
    """A tensor to write, and the GGUF file's tensor that it comes from.

    ours: the tensor's name in the written folder.
    name: name of the file's tensor.
    stem: the same name without layer and kind, such as "attn_q".
    shape: shape of the tensor to write.
    at: index along the first axis of the file's tensor, if that stacks several; None: the whole
        tensor.
    values: name of the file's tensor with values, if `name` has only the keys of attn_kv_b; "": all
        rows come from `name`.
    """

    ours: str
    name: str
    stem: str
    shape: tuple[int, ...]
    at: int | None = None
    values: str = ""


def _split(name: str) -> tuple[str | None, str, str | None, str]:
    """Split a GGUF tensor name into layer, stem, expert and kind.

    "blk.3.attn_q.weight" results in ("3", "attn_q", None, "weight"). Only older files have an
    expert number. The stem is "" for names in another form.
    """
    match = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+?)(?:\.(\d+))?\.(weight|bias)", name)
    return (match[1], match[2], match[3], match[4]) if match else (None, "", None, "")


def _pieces(file: GGUFFile, model: ModelConfig) -> list[_Piece]:
    """Return the tensors to write, in the file's order.

    Raises ConfigError for an extra or missing tensor, or one of a wrong shape.
    """
    targets = file.layout.targets(file.record)
    all_pieces: list[_Piece] = []
    seen: set[tuple[str, str | None]] = set()
    for name in file.names:
        layer, stem, expert, kind = _split(name)
        if any(fnmatchcase(name, pattern) for pattern in _IN_CONFIG) or _beyond(layer, model):
            continue
        stem = f"{stem}_exps" if expert is not None and stem in _EXPERTS else stem
        if stem == _VALUES and f"attn_kv_b.{kind}" in targets:
            continue  # with the keys
        values = name.replace(_KEYS, _VALUES) if stem == _KEYS else ""
        stem = "attn_kv_b" if values else stem
        ours = targets.get(f"{stem}.{kind}", "")
        if not ours or ("{i}" in ours) != (layer is not None):
            raise file.error(f"unknown tensor {name!r}")
        shape, ours = file.shape(name), ours.replace("{i}", layer or "")
        if stem == "ffn_gate_inp_shexp" and len(shape) == 1:  # older files store a vector
            shape = (1, *shape)
        if values:
            shape = _joined_shape(file, name, values)
        if expert is not None:
            ours = ours.replace("{e}", expert)
        if "{e}" in ours or "{h}" in ours:
            names = [ours.replace("{e}", str(at)).replace("{h}", str(at)) for at in range(shape[0])]
            pieces = [_Piece(target, name, stem, shape[1:], at) for at, target in enumerate(names)]
        else:
            pieces = [_Piece(ours, name, stem, shape, values=values)]
        _check_shape(file, model, pieces[0], kind, len(pieces))
        all_pieces += pieces
        seen.add((stem, layer))
    _check_all(file, model, targets, seen)
    return all_pieces


def _joined_shape(file: GGUFFile, keys: str, values: str) -> tuple[int, ...]:
    """Return the shape [rows, latent] of the matrix attn_kv_b, of which the file has two tensors.

    keys, values: names of the tensors with the rows of all heads' keys, and of their values.

    Raises ConfigError if the two shapes do not match.
    """
    of_keys, of_values = file.shape(keys), file.shape(values)
    if len(of_keys) != 3 or (of_keys[0], of_keys[1]) != (of_values[0], of_values[-1]):
        raise file.error(f"tensors {keys!r} and {values!r} are not parts of one matrix")
    return of_keys[0] * (of_keys[2] + of_values[1]), of_keys[1]


def _beyond(layer: str | None, model: ModelConfig) -> bool:
    """Return whether a layer follows the model's own layers, like those for multi-token
    prediction."""
    return layer is not None and int(layer) >= model.num_layers


def _check_shape(file: GGUFFile, model: ModelConfig, piece: _Piece, kind: str, count: int) -> None:
    """Check a tensor's shape against the one that follows from the metadata, if any. Raises
    ConfigError.

    kind: "weight" or "bias". count: number of tensors that the file's tensor stacks.
    """
    q, kv = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    hidden, mlp, experts = model.hidden_size, model.intermediate_size, model.experts
    latent, out = model.attention[0].latent, q
    if latent is not None:
        q, out = (model.num_heads * size for size in (latent.nope + latent.rope, latent.value))
    rows = {
        "token_embd": model.vocab_size,
        "output": model.vocab_size,
        "attn_q": q,
        "attn_k": kv,
        "attn_v": kv,
        "attn_qkv": q + 2 * kv,
        "attn_output": hidden,
        "ffn_down": hidden,
        "attn_norm": hidden,
        "ffn_norm": hidden,
        "output_norm": hidden,
    }
    columns = dict.fromkeys(("token_embd", "output", "attn_q", "attn_k", "attn_v"), hidden)
    columns |= {"attn_output": out, "ffn_gate": hidden, "ffn_up": hidden, "ffn_down": mlp}
    if latent is not None:
        rows |= {
            "attn_q_a": latent.query_rank,
            "attn_q_b": q,
            "attn_kv_a_mqa": latent.rank + latent.rope,
            "attn_kv_b": model.num_heads * (latent.nope + latent.value),
        }
        columns |= {"attn_q_a": hidden, "attn_q_b": latent.query_rank}
        columns |= {"attn_kv_a_mqa": hidden, "attn_kv_b": latent.rank}
    if experts is not None:
        rows |= {
            "ffn_gate_inp": experts.count,
            "ffn_gate_exps": experts.size,
            "ffn_up_exps": experts.size,
            "ffn_down_exps": hidden,
        }
        columns |= {"ffn_gate_exps": hidden, "ffn_up_exps": hidden, "ffn_down_exps": experts.size}
    wanted = [rows.get(piece.stem)]
    if len(piece.shape) == 2 and kind == "weight":
        wanted.append(columns.get(piece.stem))
    stacked = piece.at is not None and piece.stem.endswith("_exps")
    right = len(piece.shape) == len(wanted) and all(
        size is None or size == has for size, has in zip(wanted, piece.shape, strict=True)
    )
    if stacked and experts is not None and count != experts.count:
        wanted, right = [experts.count, *wanted], False
    if not right and any(wanted):
        implied = [size if size is not None else "any" for size in wanted]
        raise file.error(
            f"tensor {piece.name!r} has shape {list(file.shape(piece.name))}, the file's header "
            f"implies {implied}"
        )


def _check_all(
    file: GGUFFile,
    model: ModelConfig,
    targets: dict[str, str],
    seen: set[tuple[str, str | None]],
) -> None:
    """Check that every layer has all its tensors. Raises ConfigError.

    targets: result of `Gguf.targets`. seen: (stem, layer) of the file's tensors.
    """
    sparse = set() if model.experts is None else set(model.experts.layers)
    stems = {stem for stem, _ in seen}
    absent = set(_OPTIONAL) - stems
    if (latent := model.attention[0].latent) is not None:
        absent |= {"attn_q"} if latent.query_rank else set(_QUERY_LATENT)
    for target, ours in targets.items():
        stem, _, kind = target.rpartition(".")
        if kind == "bias" or stem in absent:
            continue
        layers: list[int | None] = [None]
        if "{i}" in ours:
            of_experts = stem.endswith(("_exps", "_shexp", "_inp"))
            if stem.endswith("_shexp") and (model.experts is None or not model.experts.shared_size):
                continue
            layers = [
                i
                for i in range(model.num_layers)
                if not (of_experts or stem in _EXPERTS) or (i in sparse) == of_experts
            ]
        for layer in layers:
            if (stem, None if layer is None else str(layer)) not in seen:
                block = "" if layer is None else f"blk.{layer}."
                raise file.error(f"tensor '{block}{stem}.weight' is missing")


# Tensors that may be missing: the output head if it is tied, and norms that only some architectures
# have.
_OPTIONAL = ("output", "attn_q_norm", "attn_k_norm", "ffn_norm")
# Tensors that replace attn_q if queries have a latent.
_QUERY_LATENT = ("attn_q_a", "attn_q_a_norm", "attn_q_b")


# ---- Values --------------------------------------------------------------------------------------


def _written(
    file: GGUFFile, model: ModelConfig, piece: _Piece, dtype: str, types: dict[str, str]
) -> WrittenTensor:
    """Return a tensor to write, with the function that yields its bytes.

    dtype: type of dequantised tensors.
    types: result of `_types`, the matrices that keep their blocks.
    """
    values = _Values(file, model, piece)
    shape = list(piece.shape)
    if piece.ours.removesuffix(".weight") in types and len(shape) == 2:
        shape[1] = values.data.shape[1]
        return WrittenTensor(piece.ours, "U8", shape, math.prod(shape), values.raw)
    if types and len(shape) == 1:
        dtype = "float32"
    return WrittenTensor.of(piece.ours, dtype, shape, lambda: values.unpacked(dtype))


class _Values:
    """A reader of one tensor, a few rows at a time, with rows in the order of the written
    folder."""

    def __init__(self, file: GGUFFile, model: ModelConfig, piece: _Piece) -> None:
        self._file, self._piece = file, piece
        data = file.data(piece.name)
        data = data if piece.at is None else data[piece.at]
        self.data = data.reshape(1, -1) if data.ndim < len(piece.shape) else data
        ordered: Rows | None = file.layout.rows.get(piece.stem)
        self._order = None if ordered is None else ordered(model)
        # Unlike checkpoints, GGUF files of some architectures store a norm's weight plus one.
        self._less = file.layout.plus_one and piece.name.endswith("norm.weight")

    def _slices(self, row_bytes: int) -> Iterator[NDArray[Any]]:
        """Yield the rows of a matrix in slices.

        The memory of a slice is released when the next slice is requested.
        """
        step = max(1, _SLICE_BYTES // row_bytes)
        for start in range(0, len(self.data), step):
            end = start + step
            if self._order is None:
                yield self.data[start:end]
                self._file.give_back(self.data[start:end])
            else:
                # Rows may be anywhere in the tensor, so the memory of the whole tensor is released.
                yield self.data[self._order[start:end]]
                self._file.give_back(self.data)

    def raw(self) -> Iterator[bytes | memoryview]:
        """Yield the bytes of the tensor's blocks, unchanged."""
        for part in self._slices(self.data.shape[1]):
            yield np.ascontiguousarray(part).data.cast("B")

    def unpacked(self, dtype: str) -> Iterator[bytes | memoryview]:
        """Yield the bytes of the dequantised values in `dtype`."""
        if self._piece.values:
            yield cast(self._joined(), dtype).data.cast("B")
            return
        vector = len(self._piece.shape) == 1
        parts = iter([self.data]) if vector else self._slices(4 * self._piece.shape[1])
        for part in parts:
            values = self._file.unpacked(self._piece.name, part)
            if vector and self._order is not None:
                values = values[self._order]
            if self._less:
                values = values - 1
            yield cast(np.ascontiguousarray(values), dtype).data.cast("B")

    def _joined(self) -> NDArray[np.float32]:
        """Return the matrix attn_kv_b, joined from the tensors of `_KEYS` and `_VALUES`."""
        piece, file = self._piece, self._file
        parts = []
        for name in (piece.name, piece.values):
            data = file.data(name)
            parts.append(file.unpacked(name, data).reshape(file.shape(name)))
            file.give_back(data)
        keys, values = parts
        whole = np.concatenate((keys.swapaxes(1, 2), values), axis=1)
        return np.ascontiguousarray(whole.reshape(piece.shape))


def _write_config(config: dict[str, Any], tower: TowerFile | None, target: Path) -> None:
    """Write config.json and, for a multimodal model, preprocessor_config.json into `target`.

    config: contents of the text model's config.json.
    tower: the model's vision encoder; None: the model is a text model.
    """
    if tower is not None:
        config = tower.around(config)
        _write_json(target / PREPROCESSOR, tower.settings())
    _write_json(target / "config.json", config)


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, ensure_ascii=False, indent=1), encoding="utf-8")
