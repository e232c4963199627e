"""round_checkpoint: writes a quantised copy of a checkpoint, as compressed-tensors or bitsandbytes.

The copy is written matrix by matrix, so that host memory only needs to hold the largest matrix, or
layer by layer with a calibration text. The embedding, a tied head and matrices that no layout
supports stay unquantised.
"""

import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engine.config.model_config import ModelConfig
from engine.config.quant_formats import CHECKPOINT_FORMATS, QUANT_FORMATS, QuantFormat
from engine.config.quantized import KEY, Quantized, Scheme
from engine.config.quantized_config import read_quantized
from engine.config_reader import Reader
from engine.errors import ConfigError
from engine.models.registry import Model
from engine.quantization.by_layer import no_match, pattern_of
from engine.quantization.layouts.byte_layouts import NF4
from engine.quantization.method import Part
from engine.quantization.rounded.formats import weight_format
from engine.quantization.rounded.quantize_rows import nearest, rounded
from engine.quantization.stored.base import layout_of
from engine.quantization.stored.stored_experts import all_experts
from engine.rounding.calibration import Inputs, calibrate
from engine.rounding.groups import GROUP, WIDE, in_wide_groups
from engine.rounding.integers import Codes, Feedback, fed_back, searched
from engine.weights.converted import Writer, copy_others
from engine.weights.index import read_index
from engine.weights.parameter import Parameter
from engine.weights.stored import StoredTensor
from engine.weights.stream import Loading

_HEAD = "lm_head"
# Quantisation method -> the key of quantization_config that lists unquantised modules.
_SKIPPED = {"compressed-tensors": "ignore", "bitsandbytes": "llm_int8_skip_modules"}
_TOKENS = {"num_bits": 8, "strategy": "token", "dynamic": True, "symmetric": True}
_META = torch.device("meta")


def _compressed(file_format: str, **groups: dict[str, Any]) -> dict[str, Any]:
    return {
        "quant_method": "compressed-tensors",
        "format": file_format,
        "quantization_status": "compressed",
        "config_groups": groups,
    }


def _weights(quant: QuantFormat, group: int) -> dict[str, Any]:
    """Return the `weights` entry of compressed-tensors' configuration for a format."""
    weights = {
        "num_bits": quant.bits,
        "type": "float" if quant.code == "e4m3" else "int",
        "symmetric": quant.code != "uint",
        "strategy": "group" if quant.group else "channel",
    }
    return weights | ({"group_size": group} if quant.group else {})


def _description(
    quant: QuantFormat, group: int, layers: Mapping[tuple[str, int], Sequence[str]]
) -> dict[str, Any]:
    """Return the `quantization_config` of a format.

    group: the group size of 4-bit weights.
    layers: (name of a format, group size) -> the modules with these instead of the defaults.
    """
    if quant.checkpoint == "bitsandbytes":
        return {
            "quant_method": "bitsandbytes",
            "load_in_4bit": True,
            "bnb_4bit_quant_type": quant.code,
            "bnb_4bit_use_double_quant": False,
            "bnb_4bit_quant_storage": "uint8",
        }
    groups = [_group_of(quant, ["Linear"], group)]
    groups += [_group_of(QUANT_FORMATS[name], at, size) for (name, size), at in layers.items()]
    if quant.head and not any(_HEAD in at for at in layers.values()):
        groups.append(_group_of(QUANT_FORMATS[quant.head], [_HEAD], 0))
    formats = {layers_of["format"] for layers_of in groups}
    if len(formats) == 1:
        for layers_of in groups:
            del layers_of["format"]
    named = {f"group_{number}": layers_of for number, layers_of in enumerate(groups)}
    return _compressed(formats.pop() if len(formats) == 1 else "mixed-precision", **named)


def _group_of(quant: QuantFormat, targets: Sequence[str], group: int) -> dict[str, Any]:
    """Return compressed-tensors' config group for the modules with a format."""
    weights = _weights(quant, group)
    layers = {"targets": [*targets], "weights": weights, "format": "pack-quantized"}
    if quant.activations == 8:
        kind = weights["type"]
        layers["input_activations"] = {**_TOKENS, "type": kind}
        layers["format"] = f"{kind}-quantized"
    return layers


def round_checkpoint(
    model: Model,
    folder: Path,
    target: Path,
    name: str,
    progress: Callable[[Loading], None] | None = None,
    pieces: Sequence[Tensor] = (),
    layers: Mapping[str, str] | None = None,
) -> int:
    """Write a quantised copy of a checkpoint and return the number of quantised matrices.

    model: the folder's model on the meta device.
    target: an empty folder.
    name: one of CHECKPOINT_FORMATS.
    pieces: pieces of token ids of a calibration text, for "int4"; see `calibrate`.
    layers: pattern of names of matrices -> format, where it differs from `name`.
    Raises ConfigError if no matrix can be quantised.
    """
    quant = QUANT_FORMATS[name]
    stored = read_index(folder)
    parts = _parts(model)
    formats = _formats(parts, name, layers or {})
    group = GROUP if "int4" in formats.values() else _group(quant, parts) if quant.group else 0
    description = _description(quant, group, {})
    quantized = _read(description)
    ours = {
        tensor_name: model.tensor_name(tensor_name).removesuffix(".weight")
        for tensor_name in stored
    }
    chosen = {
        tensor_name
        for tensor_name, matrix in ours.items()
        if tensor_name.endswith(".weight")
        and formats.get(matrix, "none") != "none"
        and _fits(quantized, parts[matrix])
    }
    if not chosen:
        raise ConfigError(
            f"{folder}: quantization {name!r} can keep none of its matrices; their rows must be "
            "multiples of 32",
            param="quantization",
        )
    others = (tensor_name for tensor_name, tensor in stored.items() if len(tensor.shape) > 1)
    plain = sorted(
        tensor_name.removesuffix(".weight") for tensor_name in others if tensor_name not in chosen
    )
    fewer = _in_wide_groups(model, stored, {ours[name]: name for name in chosen}, formats)
    differing: dict[tuple[str, int], list[str]] = {}
    for tensor_name in sorted(chosen):
        kind = formats[ours[tensor_name]], WIDE if tensor_name in fewer else group
        if kind != (name, group):
            differing.setdefault(kind, []).append(tensor_name.removesuffix(".weight"))
    if differing:
        description = _description(quant, group, differing)
    description[_SKIPPED[quant.checkpoint]] = plain
    quantized = _read(description)
    encode = _Encoder(quant, quantized, formats)
    plan: dict[str, dict[str, Tensor]] = {}
    for tensor_name, tensor in stored.items():
        meta = torch.empty(tensor.shape, dtype=tensor.dtype, device=_META)
        stem = tensor_name.removesuffix(".weight")
        plan[tensor_name] = (
            encode.all(stem, ours[tensor_name], meta)
            if tensor_name in chosen
            else {tensor_name: meta}
        )
    entries = [
        Parameter(key, tensor, ()) for tensors in plan.values() for key, tensor in tensors.items()
    ]
    writer = Writer(target, entries, "model")
    copy = _Copy(stored, writer, encode, ours, progress)
    try:
        if pieces:
            copy.calibrate(model.config, folder, pieces, chosen)
        for tensor_name in stored:
            if tensor_name not in copy.written:
                copy.write(tensor_name, tensor_name in chosen)
    finally:
        files = writer.files
        writer.close()
    _write_index(target, files)
    copy_others(folder, target, None)
    config = json.loads((target / "config.json").read_text(encoding="utf-8"))
    config[KEY] = description
    (target / "config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
    return len(chosen)


class _Copy:
    """A writer of the quantised copy, tensor by tensor.

    ours: name of a tensor in the file -> name of its matrix in the model.
    """

    def __init__(
        self,
        stored: Mapping[str, StoredTensor],
        writer: Writer,
        encode: "_Encoder",
        ours: Mapping[str, str],
        progress: Callable[[Loading], None] | None,
    ) -> None:
        self._stored, self._writer, self._encode, self._ours = stored, writer, encode, ours
        self._progress = progress
        self._total = sum(tensor.num_bytes for tensor in stored.values())
        self._done = 0
        self._began = time.monotonic()
        self.written: set[str] = set()

    def write(self, name: str, rounds: bool, feedback: Feedback | None = None) -> Codes | None:
        """Write a tensor; return its codes if it is quantised to 4-bit integers.

        rounds: whether to quantise the tensor.
        feedback: the calibration's statistics of the matrix's inputs; None = no calibration.
        Raises ConfigError for NaN and infinity in a matrix to quantise.
        """
        tensor = self._stored[name]
        values, codes = _values(tensor), None
        encoded = {name: values}
        if rounds:
            if not bool(values.isfinite().all()):
                raise ConfigError(
                    f"{tensor.file}: tensor {name} holds NaN or infinity", param="model"
                )
            stem, matrix = name.removesuffix(".weight"), self._ours[name]
            codes = self._encode.codes(matrix, values, feedback)
            encoded = self._encode.all(stem, matrix, values, codes)
        for key, part in encoded.items():
            self._writer.write_parameter(key, part)
        self.written.add(name)
        self._done += tensor.num_bytes
        if self._progress is not None:
            self._progress(Loading(self._done, self._total, time.monotonic() - self._began))
        return codes

    def calibrate(
        self, config: ModelConfig, folder: Path, pieces: Sequence[Tensor], chosen: set[str]
    ) -> None:
        """Quantise and write the matrices for which the calibration text gives inputs.

        chosen: the names of the tensors to quantise.
        """
        names = {self._ours[name]: name for name in chosen}

        def take(inputs: Inputs) -> dict[str, Tensor]:
            matrices = [matrix for matrix in inputs.matrices if matrix in names]
            feedback = Feedback.of(*inputs[1:]) if matrices else None
            rounded = {}
            for matrix in matrices:
                codes = self.write(names[matrix], True, feedback)
                if codes is not None:
                    rounded[matrix] = codes.dense()
            return rounded

        calibrate(config, folder, pieces, take)


def _parts(model: Model) -> dict[str, list[Part]]:
    """Return {matrix's name in the model: the parts of layers that use the matrix}."""
    parts: dict[str, list[Part]] = {}
    for spec in model.matrices():
        # loading normalises the head's rows, so this head stays unquantised
        if spec.name == "head" and model.config.unit_head:
            continue
        for part in spec.parts:
            parts.setdefault(part.name, []).append(part)
    for experts in model.expert_specs():
        for spec in all_experts(experts):
            for part in spec.parts:
                if part.stack is None:
                    parts.setdefault(part.name, []).append(part)
    return parts


def _in_wide_groups(
    model: Model,
    stored: Mapping[str, StoredTensor],
    names: Mapping[str, str],
    formats: Mapping[str, str],
) -> set[str]:
    """Return the names of int4 tensors that get wider groups, and so fewer scales.

    names: a quantised matrix's name in the model -> the name of its tensor in the file.
    formats: a matrix's name in the model -> its format.
    """
    layers = [[part.name for part in spec.parts] for spec in model.matrices()]
    for experts in model.expert_specs():
        layers.append([part.name for spec in all_experts(experts) for part in spec.parts])
    tensors = [
        [names[matrix] for matrix in dict.fromkeys(matrices)]
        for matrices in layers
        if all(matrix in names and formats[matrix] == "int4" for matrix in matrices)
        and not any(names[matrix].startswith(_HEAD) for matrix in matrices)
    ]
    return in_wide_groups(tensors, stored)


def _formats(
    parts: Mapping[str, list[Part]], name: str, layers: Mapping[str, str]
) -> dict[str, str]:
    """Return {matrix's name in the model: its format}.

    parts: see `_parts`.
    name: the format of matrices without a matching pattern in `layers`.
    Raises ConfigError for a pattern that matches no matrix, and for formats that cannot be
    combined.
    """
    formats, unused = dict.fromkeys(parts, name), dict.fromkeys(layers)
    for matrix in parts:
        pattern = pattern_of(layers, matrix)
        if pattern is not None:
            formats[matrix] = layers[pattern]
            unused.pop(pattern, None)
    if unused:
        raise no_match(next(iter(unused)))
    layout = QUANT_FORMATS[name].checkpoint
    for other in layers.values():
        if other != "none" and (
            QUANT_FORMATS[other].checkpoint != layout or layout == "bitsandbytes"
        ):
            able = [own for own in CHECKPOINT_FORMATS if QUANT_FORMATS[own].checkpoint == layout]
            able = able if layout == "compressed-tensors" else []
            raise ConfigError(
                f"quantization_layers: a folder in {name!r} cannot have {other!r} beside it; "
                f"there: {', '.join(('none', *able))}",
                param="quantization_layers",
            )
    return formats


def _group(quant: QuantFormat, parts: dict[str, list[Part]]) -> int:
    """Return the largest group size that divides the inputs of all matrices: the format's, 64 or
    32.

    Matrices whose inputs are not a multiple of 32 are ignored.
    """
    widths = {part.in_features for same in parts.values() for part in same}
    widths = {width for width in widths if width % 32 == 0}
    return next(
        (size for size in (quant.group, 64) if all(width % size == 0 for width in widths)), 32
    )


def _fits(quantized: Quantized, parts: Iterable[Part]) -> bool:
    for part in parts:
        if part.out_features % 8 or part.in_features % 32 or quantized.keeps(part.name):
            return False
        try:
            if layout_of(quantized, part, _META) is None:
                return False
        except ConfigError:
            return False
    return True


def _read(description: dict[str, Any]) -> Quantized:
    quantized = read_quantized(Reader({KEY: description}, "config.json"))
    assert quantized is not None
    return quantized


def _values(stored: StoredTensor) -> Tensor:
    with stored.file.open("rb") as file:
        file.seek(stored.offset)
        data = bytearray(file.read(stored.num_bytes))
    return torch.frombuffer(data, dtype=stored.dtype).view(stored.shape)


@dataclass(frozen=True, slots=True)
class _Encoder:
    """A quantiser of weight matrices to the tensors of one checkpoint format.

    quantized: the quantisation of the new checkpoint.
    """

    quant: QuantFormat
    quantized: Quantized
    formats: Mapping[str, str]  # a matrix's name in the model -> its format

    def codes(self, ours: str, weight: Tensor, feedback: Feedback | None) -> Codes | None:
        """Round a matrix to 4-bit integers; return None if its format is another one.

        ours: the matrix's name in the model.
        """
        scheme = self.quantized.scheme(ours)
        assert scheme is not None
        if scheme.kind != "packed" or scheme.bits != 4:
            return None
        if feedback is None:
            return searched(weight.float(), scheme.group)
        return fed_back(weight.float(), scheme.group, feedback)

    def all(
        self, stem: str, ours: str, weight: Tensor, codes: Codes | None = None
    ) -> dict[str, Tensor]:
        """Quantise a matrix; return {name: tensor} for the file, with meta tensors for a meta
        matrix.

        stem: the matrix's name in the file.
        ours: the matrix's name in the model.
        codes: the result of the method `codes`; None = compute it.
        """
        scheme = self.quantized.scheme(ours)
        assert scheme is not None
        if codes is not None:
            tensors = _packed(codes)
            return {f"{stem}.{key}": tensor for key, tensor in tensors.items()}
        if weight.device == _META:
            shapes = self._encoded(ours, torch.zeros(8, weight.shape[1]), scheme)
            return {
                f"{stem}.{key}": torch.empty(
                    self._grown(key, tensor, weight), dtype=tensor.dtype, device=_META
                )
                for key, tensor in shapes.items()
            }
        tensors = self._encoded(ours, weight.float(), scheme)
        if self.quant.code == "nf4":
            tensors[_STATE] = _state(weight)
        return {f"{stem}.{key}": tensor for key, tensor in tensors.items()}

    def _grown(self, key: str, tensor: Tensor, weight: Tensor) -> tuple[int, ...]:
        """Return the shape of a quantised tensor of a matrix, without quantising the matrix.

        key: the suffix of the tensor's name.
        tensor: the corresponding tensor of a matrix with 8 rows.
        weight: the matrix, which may be on the meta device.
        """
        if key == _STATE:
            return tuple(_state(weight).shape)
        if key in ("weight_shape", "weight.quant_map"):
            return tuple(tensor.shape)
        return tensor.shape[0] * weight.shape[0] // 8, *tensor.shape[1:]

    def _encoded(self, ours: str, weight: Tensor, scheme: Scheme) -> dict[str, Tensor]:
        """Quantise a matrix; return {suffix of the name: tensor} for the file.

        ours: the matrix's name in the model.
        weight: float32 [out, in].
        """
        out, width = weight.shape
        shape = {"weight_shape": torch.tensor([out, width])}
        if self.quant.code == "nf4":
            return _nf4(weight, scheme.group)
        if scheme.bits == 4:
            return _packed(searched(weight, scheme.group))
        own = QUANT_FORMATS[self.formats[ours]]
        eight = own if own.bits == 8 else QUANT_FORMATS[own.head]
        codes, scale, _ = rounded(weight_format(eight, width), weight)
        if eight.code == "e4m3":
            return {"weight": codes.view(torch.float8_e4m3fn), "weight_scale": scale}
        if eight.activations == 8:
            return {"weight": (codes ^ 128).view(torch.int8), "weight_scale": scale}
        return {"weight_packed": codes.view(torch.int32), "weight_scale": scale, **shape}


def _packed(codes: Codes) -> dict[str, Tensor]:
    """Return compressed-tensors' tensors for a 4-bit matrix."""
    return {
        "weight_packed": _words(codes.codes),
        "weight_scale": codes.scale,
        "weight_zero_point": _words(codes.zeros.t()).t().contiguous(),
        "weight_shape": torch.tensor(codes.codes.shape),
    }


def _words(codes: Tensor) -> Tensor:
    """Pack 4-bit codes [n, m] into int32 [n, m / 8], the first code in the lowest bits."""
    both = codes.reshape(codes.shape[0], -1, 2)
    return (both[..., 0] | (both[..., 1] << 4)).contiguous().view(torch.int32)


_STATE = "weight.quant_state.bitsandbytes__nf4"


def _nf4(weight: Tensor, group: int) -> dict[str, Tensor]:
    runs = weight.reshape(-1, group)
    scale = runs.abs().amax(-1)
    codes = nearest(runs / scale.clamp(min=1e-30).unsqueeze(-1), NF4).view(-1, 2)
    return {
        "weight": (codes[:, :1] << 4) | codes[:, 1:],
        "weight.absmax": scale,
        "weight.quant_map": torch.tensor(NF4),
        _STATE: _state(weight),
    }


def _state(weight: Tensor) -> Tensor:
    values = {
        "quant_type": "nf4",
        "blocksize": 64,
        "dtype": str(weight.dtype).removeprefix("torch."),
        "shape": list(weight.shape),
    }
    return torch.frombuffer(bytearray(json.dumps(values).encode()), dtype=torch.uint8)


def _write_index(target: Path, files: dict[str, str]) -> None:
    total = sum(file.stat().st_size for file in target.glob("*.safetensors"))
    text = json.dumps({"metadata": {"total_size": total}, "weight_map": files}, indent=1)
    (target / "model.safetensors.index.json").write_text(text + "\n", encoding="utf-8")
