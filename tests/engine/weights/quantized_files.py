"""Random quantised matrices in each method's file format, with their float32 weights.

The weights are computed by the method's formula, independently of the engine's code."""

import json
from typing import Any

import numpy as np
import torch
from torch import Tensor

from engine.config.quantized import Scheme

E2M1 = torch.tensor([0.0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
# Quantiles of a normal distribution, by QLoRA's authors; bitsandbytes writes them into each file.
NF4 = torch.tensor(
    [
        *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
        *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
        *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
        *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
    ]
)

_LINEAR = {"targets": ["Linear"]}


def compressed(file_format: str, weights: dict[str, Any], **others: Any) -> dict[str, Any]:
    return {
        "quant_method": "compressed-tensors",
        "format": file_format,
        "config_groups": {"group_0": {**_LINEAR, "weights": weights, **others}},
        "ignore": ["lm_head"],
    }


_TOKEN = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True}
_FLOAT8 = {"num_bits": 8, "type": "float", "symmetric": True}
_SPARSE = {
    "format": "sparse-24-bitmask",
    "sparsity_structure": "2:4",
    "global_sparsity": 0.5,
    "targets": ["Linear"],
    "ignore": ["lm_head"],
}
# method -> quantization_config
FILES: dict[str, dict[str, Any]] = {
    "compressed-w8a8": compressed(
        "int-quantized",
        {"num_bits": 8, "type": "int", "strategy": "channel"},
        input_activations={**_TOKEN, "type": "int"},
    ),
    "compressed-w8a8-static": compressed(
        "int-quantized",
        {"num_bits": 8, "type": "int", "strategy": "tensor"},
        input_activations={"num_bits": 8, "type": "int", "strategy": "tensor", "dynamic": False},
    ),
    "compressed-fp8-dynamic": compressed(
        "float-quantized", {**_FLOAT8, "strategy": "channel"}, input_activations=_TOKEN
    ),
    "compressed-fp8-static": compressed(
        "float-quantized",
        {**_FLOAT8, "strategy": "tensor"},
        input_activations={**_TOKEN, "strategy": "tensor", "dynamic": False},
    ),
    "compressed-fp8-block": compressed(
        "float-quantized", {**_FLOAT8, "strategy": "block", "block_structure": [128, 128]}
    ),
    "compressed-nvfp4": compressed(
        "nvfp4-pack-quantized",
        {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16},
    ),
    "compressed-mxfp4": compressed(
        "mxfp4-pack-quantized",
        {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32},
    ),
    "fp8-block": {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
    },
    "fp8-block-e8m0": {
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
        "scale_fmt": "ue8m0",
    },
    "fp8-tensor": {"quant_method": "fp8", "activation_scheme": "static"},
    "modelopt-fp8": {
        "quant_method": "modelopt",
        "quant_algo": "FP8",
        "kv_cache_quant_algo": "FP8",
        "exclude_modules": ["lm_head"],
    },
    "modelopt-nvfp4": {
        "quant_method": "modelopt",
        "quant_algo": "NVFP4",
        "group_size": 16,
        "exclude_modules": ["lm_head", "*embed*"],
    },
    "auto-round": {
        "quant_method": "auto-round",
        "packing_format": "auto_round:auto_gptq",
        "bits": 4,
        "group_size": 32,
        "sym": True,
        "extra_config": {"model.layers.1.mlp.down_proj": {"bits": 16}},
    },
    "gptq-ordered": {
        "quant_method": "gptq",
        "bits": 4,
        "group_size": 32,
        "desc_act": True,
        "sym": False,
    },
    "nf4": {
        "quant_method": "bitsandbytes",
        "load_in_4bit": True,
        "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_use_double_quant": False,
    },
    "nf4-nested": {
        "quant_method": "bitsandbytes",
        "load_in_4bit": True,
        "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_use_double_quant": True,
    },
    "llm-int8": {"quant_method": "bitsandbytes", "load_in_8bit": True},
    "sparse-24": {"quant_method": "compressed-tensors", "sparsity_config": _SPARSE},
    "sparse-24-fp8": {
        **compressed(
            "float-quantized", {**_FLOAT8, "strategy": "channel"}, input_activations=_TOKEN
        ),
        "sparsity_config": _SPARSE,
    },
}
POWERS = ("fp8-block-e8m0",)  # formats whose scales are powers of two


def words(fields: np.ndarray[Any, Any], bits: int) -> Tensor:
    """Pack fields [n, m] into int32 [n, m * bits / 32], low bits first."""
    n, count = len(fields), 32 // bits
    split = fields.astype(np.uint64).reshape(n, -1, count)
    shifts = np.arange(0, 32, bits, dtype=np.uint64)
    return torch.from_numpy((split << shifts).sum(-1).astype(np.uint32).view(np.int32)).contiguous()


def matrix(
    scheme: Scheme, name: str, out: int, width: int, powers: bool = False
) -> tuple[dict[str, Tensor], Tensor]:
    """Return a random quantised matrix: tensors by name as in a method's files, and float32 weights
    [out, width]."""
    maker = {
        "fp8": _eight_bits,
        "int8": _eight_bits,
        "llm-int8": _eight_bits,
        "nvfp4": _floats,
        "mxfp4": _floats,
        "nf4": _nf4,
        "gptq": _ordered,
        "sparse": _numbers,
    }[scheme.kind]
    generator = torch.Generator().manual_seed(len(name))
    tensors, weight = maker(scheme, out, width, generator, powers)
    if scheme.sparse:
        tensors, weight = _without_zeros(tensors, weight, generator)
    return {f"{name}.{key}": tensor for key, tensor in tensors.items()}, weight


def _eight_bits(
    scheme: Scheme, out: int, width: int, generator: torch.Generator, powers: bool
) -> tuple[dict[str, Tensor], Tensor]:
    codes = torch.randint(-127, 128, (out, width), generator=generator)
    weight = codes.to(torch.int8)
    if scheme.kind == "fp8":
        weight = (codes * 3.5).to(torch.float8_e4m3fn)
    shape: tuple[int, ...] = (out, 1) if scheme.rows else ()
    if scheme.group:
        shape = (-(-out // scheme.rows), -(-width // scheme.group))
    scale = torch.rand(shape, generator=generator) * 0.01 + 0.001
    if powers:
        scale = torch.exp2(torch.log2(scale).round())
    whole = scale
    if scheme.group:
        whole = scale.repeat_interleave(scheme.rows, 0)[:out]
        whole = whole.repeat_interleave(scheme.group, 1)[:, :width]
    if scheme.kind == "llm-int8":
        return {
            "weight": weight,
            "SCB": scale.flatten() * 127,
            "weight_format": torch.tensor(0, dtype=torch.uint8),
        }, weight.float() * (scale * 127) * (1 / 127)
    tensors = {
        "weight": weight,
        scheme.scale: scale.to(torch.float8_e8m0fnu) if powers else scale,
        "input_scale": torch.tensor(0.5),
    }
    return tensors, weight.float() * whole


def _floats(
    scheme: Scheme, out: int, width: int, generator: torch.Generator, powers: bool
) -> tuple[dict[str, Tensor], Tensor]:
    codes = torch.randint(0, 16, (out, width), generator=generator)
    packed = (codes[:, ::2] | (codes[:, 1::2] << 4)).to(torch.uint8)
    groups = (out, width // scheme.group)
    if scheme.kind == "mxfp4":
        stored = torch.randint(112, 122, groups, generator=generator).to(torch.uint8)
        scale = torch.exp2(stored.float() - 127)
        return {scheme.weight: packed, scheme.scale: stored}, _by_group(E2M1[codes], scale)
    stored = (torch.rand(groups, generator=generator) * 400 + 1).to(torch.float8_e4m3fn)
    total = torch.tensor([30000.0 if scheme.divides else 1 / 30000])
    scale = stored.float() / total if scheme.divides else stored.float() * total
    tensors = {
        scheme.weight: packed,
        scheme.scale: stored,
        scheme.total: total if scheme.divides else total.squeeze(),
        "input_global_scale" if scheme.divides else "input_scale": torch.tensor([2.0]),
    }
    return tensors, _by_group(E2M1[codes], scale)


def _numbers(
    scheme: Scheme, out: int, width: int, generator: torch.Generator, powers: bool
) -> tuple[dict[str, Tensor], Tensor]:
    weight = (torch.randn(out, width, generator=generator) * 0.02).bfloat16()
    return {"weight": weight}, weight.float()


def _without_zeros(
    tensors: dict[str, Tensor], weight: Tensor, generator: torch.Generator
) -> tuple[dict[str, Tensor], Tensor]:
    """Zero two of each four weights; return the tensors in the 2:4 format of compressed-tensors
    0.9, and the weights."""
    out, width = weight.shape
    kept = torch.rand(out, width // 4, 4, generator=generator).topk(2).indices
    mask = torch.zeros(out, width // 4, 4, dtype=torch.bool).scatter_(-1, kept, True)
    mask = mask.view(out, width)
    stored = tensors.pop("weight")
    plain = stored.view(torch.uint8) if stored.dtype.itemsize == 1 else stored
    packed = np.packbits(mask.numpy(), axis=-1, bitorder="little")
    tensors = {
        **tensors,
        "compressed": plain[mask].view(stored.dtype).view(out, width // 2),
        "bitmask": torch.from_numpy(packed),
        "shape": torch.tensor([[out], [width]]),
    }
    return tensors, weight * mask


def _by_group(values: Tensor, scale: Tensor) -> Tensor:
    return (values.unflatten(1, (scale.shape[1], -1)) * scale.unsqueeze(-1)).flatten(1)


def _nf4(
    scheme: Scheme, out: int, width: int, generator: torch.Generator, powers: bool
) -> tuple[dict[str, Tensor], Tensor]:
    codes = torch.randint(0, 16, (out * width,), generator=generator)
    runs = out * width // 64
    state: dict[str, Any] = {"quant_type": "nf4", "blocksize": 64, "shape": [out, width]}
    tensors = {
        "weight": ((codes[::2] << 4) | codes[1::2]).to(torch.uint8).unsqueeze(1),
        "weight.quant_map": NF4.clone(),
    }
    if scheme.nested:
        stored = torch.randint(0, 256, (runs,), generator=generator).to(torch.uint8)
        table = torch.rand(256, generator=generator).sort().values
        outer = torch.rand(-(-runs // 256), generator=generator) * 0.03
        state |= {"nested_blocksize": 256, "nested_offset": 0.0375}
        scale = table[stored.int()] * outer.repeat_interleave(256)[:runs] + 0.0375
        tensors["weight.nested_absmax"], tensors["weight.nested_quant_map"] = outer, table
    else:
        stored = scale = torch.rand(runs, generator=generator) * 0.05 + 0.01
    tensors["weight.absmax"] = stored
    text = bytearray(json.dumps(state).encode())
    tensors["weight.quant_state.bitsandbytes__nf4"] = torch.frombuffer(text, dtype=torch.uint8)
    weight = (NF4[codes].view(-1, 64) * scale.unsqueeze(1)).view(out, width)
    return tensors, weight


def one_order(width: int, generator: Any) -> Tensor:
    """Return a random permutation of the inputs, equal for all matrices of the same width.

    It replaces torch.randperm, because files have one order for all matrices with the same inputs.
    """
    return torch.randint(1 << 30, (width,), generator=torch.Generator()).argsort()


def _ordered(
    scheme: Scheme, out: int, width: int, generator: torch.Generator, powers: bool
) -> tuple[dict[str, Tensor], Tensor]:
    """Return a matrix in GPTQ's format; its groups are permuted if the scheme is ordered."""
    groups = width // scheme.group
    codes = torch.randint(0, 16, (out, width), generator=generator)
    zeros = torch.randint(1, 16, (groups, out), generator=generator)
    if scheme.symmetric:
        zeros[:] = 8
    index = torch.arange(width) // scheme.group
    if scheme.ordered:
        index = index[torch.randperm(width, generator=generator)]
    scale = (torch.rand((groups, out), generator=generator) * 0.02 + 0.001).half()
    tensors = {
        "qweight": words(codes.numpy(), 4).T.contiguous(),
        "qzeros": words(zeros.numpy() - scheme.zeros_less_one, 4),
        "scales": scale,
        "g_idx": index.int(),
    }
    weight = scale.float()[index] * (codes.T - zeros[index]).float()
    return tensors, weight.T.contiguous()
