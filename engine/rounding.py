"""Writes a quantised copy of a checkpoint, in layouts of compressed-tensors and bitsandbytes.

It works matrix by matrix, so that host memory only needs to hold the largest. The embedding, a tied
head and matrices that no layout can hold stay unquantised.
"""

import json
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engine.config.quant_formats import QUANT_FORMATS, QuantFormat
from engine.config.quantized import KEY, Quantized
from engine.config.quantized_config import read_quantized
from engine.config_reader import Reader
from engine.errors import ConfigError
from engine.models.registry import Model
from engine.quantization.layouts.byte_layouts import NF4
from engine.quantization.method import Part
from engine.quantization.rounded.formats import weight_format
from engine.quantization.rounded.quantize_rows import nearest, rounded
from engine.quantization.stored.base import layout_of
from engine.quantization.stored.stored_experts import all_experts
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
    """Return compressed-tensors' description of a format's weights."""
    weights = {
        "num_bits": quant.bits,
        "type": "float" if quant.code == "e4m3" else "int",
        "symmetric": quant.code != "uint",
        "strategy": "group" if quant.group else "channel",
    }
    return weights | ({"group_size": group} if quant.group else {})


def _description(quant: QuantFormat, group: int) -> dict[str, Any]:
    """Return the `quantization_config` of a format.

    group: the group size of its weights.
    """
    if quant.checkpoint == "bitsandbytes":
        return {
            "quant_method": "bitsandbytes",
            "load_in_4bit": True,
            "bnb_4bit_quant_type": quant.code,
            "bnb_4bit_use_double_quant": False,
            "bnb_4bit_quant_storage": "uint8",
        }
    weights = _weights(quant, group)
    layers = {"targets": ["Linear"], "weights": weights}
    if quant.activations == 8:
        kind = weights["type"]
        layers["input_activations"] = {**_TOKENS, "type": kind}
        return _compressed(f"{kind}-quantized", group_0=layers)
    if not quant.head:
        return _compressed("pack-quantized", group_0=layers)
    head = {"targets": [_HEAD], "weights": _weights(QUANT_FORMATS[quant.head], 0)}
    return _compressed("pack-quantized", group_0=layers, group_1=head)


def round_checkpoint(
    model: Model,
    folder: Path,
    target: Path,
    name: str,
    progress: Callable[[Loading], None] | None = None,
) -> int:
    """Write a quantised copy of a checkpoint and return the number of quantised matrices.

    model: the model of the folder, on the meta device.
    target: an empty folder.
    name: one of CHECKPOINT_FORMATS.
    Raises ConfigError if no matrix can be quantised.
    """
    quant = QUANT_FORMATS[name]
    stored = read_index(folder)
    parts = _parts(model)
    group = _group(quant, parts) if quant.group else 0
    description = _description(quant, group)
    quantized = _read(description)
    ours = {
        tensor_name: model.tensor_name(tensor_name).removesuffix(".weight")
        for tensor_name in stored
    }
    chosen = {
        tensor_name
        for tensor_name, matrix in ours.items()
        if tensor_name.endswith(".weight") and matrix in parts and _fits(quantized, parts[matrix])
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
    description[_SKIPPED[quant.checkpoint]] = plain
    quantized = _read(description)
    encode = _Encoder(quant, quantized)
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
    total = sum(tensor.num_bytes for tensor in stored.values())
    done = 0
    began = time.monotonic()
    try:
        for tensor_name, tensor in stored.items():
            values = _values(tensor)
            if tensor_name in chosen:
                if not bool(values.isfinite().all()):
                    raise ConfigError(
                        f"{tensor.file}: tensor {tensor_name} holds NaN or infinity", param="model"
                    )
                encoded = encode.all(tensor_name.removesuffix(".weight"), ours[tensor_name], values)
            else:
                encoded = {tensor_name: values}
            for key, part in encoded.items():
                writer.write_parameter(key, part)
            done += tensor.num_bytes
            if progress is not None:
                progress(Loading(done, total, time.monotonic() - began))
    finally:
        files = writer.files
        writer.close()
    _write_index(target, files)
    copy_others(folder, target, None)
    config = json.loads((target / "config.json").read_text(encoding="utf-8"))
    config[KEY] = description
    (target / "config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
    return len(chosen)


def _parts(model: Model) -> dict[str, list[Part]]:
    """Return, by a matrix's name in the model, the parts of layers that use it."""
    parts: dict[str, list[Part]] = {}
    for spec in model.matrices():
        # the head's rows are divided by their length after loading
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


def _group(quant: QuantFormat, parts: dict[str, list[Part]]) -> int:
    """Return the largest group size that divides all rows: the format's, 64 or 32.

    Rows that are not multiples of 32 are ignored.
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

    quantized: the quantisation of the checkpoint that is written.
    """

    quant: QuantFormat
    quantized: Quantized

    def all(self, stem: str, ours: str, weight: Tensor) -> dict[str, Tensor]:
        """Return a matrix's quantised tensors by name; meta tensors for a meta matrix.

        stem: the matrix's name in the file.
        ours: its name in the model.
        """
        scheme = self.quantized.scheme(ours)
        assert scheme is not None
        if weight.device == _META:
            shapes = self._encoded(torch.zeros(8, weight.shape[1]), scheme.bits, scheme.group)
            return {
                f"{stem}.{key}": torch.empty(
                    self._grown(key, tensor, weight), dtype=tensor.dtype, device=_META
                )
                for key, tensor in shapes.items()
            }
        tensors = self._encoded(weight.float(), scheme.bits, scheme.group)
        if self.quant.code == "nf4":
            tensors[_STATE] = _state(weight)
        return {f"{stem}.{key}": tensor for key, tensor in tensors.items()}

    def _grown(self, key: str, tensor: Tensor, weight: Tensor) -> tuple[int, ...]:
        """Return the shape of a whole matrix's tensor, from one that was quantised for 8 rows."""
        if key == _STATE:
            return tuple(_state(weight).shape)
        if key in ("weight_shape", "weight.quant_map"):
            return tuple(tensor.shape)
        return tensor.shape[0] * weight.shape[0] // 8, *tensor.shape[1:]

    def _encoded(self, weight: Tensor, bits: int, group: int) -> dict[str, Tensor]:
        """Quantise a matrix; return the checkpoint's tensors for it by suffix of their names.

        weight: float32 [out, in].
        bits, group: the format's bits of a code, and inputs that share a scale.
        """
        out, width = weight.shape
        shape = {"weight_shape": torch.tensor([out, width])}
        if self.quant.code == "nf4":
            return _nf4(weight, group)
        if bits == 4:
            codes, scale, zeros = _with_zeros(weight, group)
            return {
                "weight_packed": _words(codes),
                "weight_scale": scale,
                "weight_zero_point": _words(zeros.t()).t().contiguous(),
                **shape,
            }
        eight = self.quant if self.quant.bits == 8 else QUANT_FORMATS[self.quant.head]
        codes, scale, _ = rounded(weight_format(eight, width), weight)
        if eight.code == "e4m3":
            return {"weight": codes.view(torch.float8_e4m3fn), "weight_scale": scale}
        if eight.activations == 8:
            return {"weight": (codes ^ 128).view(torch.int8), "weight_scale": scale}
        return {"weight_packed": codes.view(torch.int32), "weight_scale": scale, **shape}


def _with_zeros(weight: Tensor, group: int) -> tuple[Tensor, Tensor, Tensor]:
    """Quantise a matrix to 4 bits with zero points, so that weight is about scale * (code - zero).

    Returns codes [out, in], scales [out, groups] float16, and integer zero points [out, groups].
    """
    groups = weight.unflatten(1, (-1, group))
    low, high = groups.amin(-1).clamp_(max=0), groups.amax(-1).clamp_(min=0)
    # Groups of zeros get the smallest positive float16 as scale.
    scale = ((high - low) / 15).clamp_(min=6e-8).half()
    step = scale.float()
    zeros = (-low / step).round_().clamp_(0, 15)
    codes = (groups / step.unsqueeze(-1)).round_() + zeros.unsqueeze(-1)
    return codes.clamp_(0, 15).flatten(1).to(torch.uint8), scale, zeros.to(torch.uint8)


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
