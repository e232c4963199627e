"""cuda_format, cpu_format: return the packed Format for a QuantFormat on a device."""

import torch

from engine.config.quant_formats import HEAD, QUANT_FORMATS, QuantFormat
from engine.quantization.layouts.byte_layouts import NF4
from kernels.packed import BLOCK, Format

_SCALES = {"float16": torch.float16, "float32": torch.float32}


def cuda_format(quant: QuantFormat, layer: str, width: int) -> Format:
    """Return the format of a layer's weights on CUDA.

    layer: the layer's name.
    width: the layer's number of inputs, a multiple of 32.
    """
    if layer == HEAD and quant.head:
        quant = QUANT_FORMATS[quant.head]
    if not quant.group:
        return weight_format(quant, width)
    return weight_format(
        quant, next(size for size in (quant.group, 64, BLOCK) if width % size == 0)
    )


def cpu_format(quant: QuantFormat, width: int) -> Format:
    """Return the format of weights with `width` inputs, a multiple of 32, on the CPU.

    If the format's group does not divide the inputs, it becomes the largest smaller multiple of 32
    that does.
    """
    if not quant.group:
        return weight_format(quant, width)
    smaller = range(min(quant.group, width), BLOCK, -BLOCK)
    return weight_format(quant, next((size for size in smaller if width % size == 0), BLOCK))


def weight_format(quant: QuantFormat, group: int) -> Format:
    """Return the format of weights in which `group` inputs share a scale."""
    scale = _SCALES[quant.scale]
    match quant.code:
        case "int":
            zero = 1 << (quant.bits - 1)
            return Format(quant.bits, group, scale, zero=zero, activations=quant.activations)
        case "e4m3":
            return Format(8, group, scale, code="e4m3", activations=quant.activations)
        case "nf4":
            return Format(4, group, scale, table=NF4)
        case "uint":
            return Format(quant.bits, group, scale, offset="add")
