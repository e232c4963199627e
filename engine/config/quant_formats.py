"""The formats to which 16-bit weights are quantised while they are loaded.

Configuration, methods, `manta convert`, `manta plan` and the documentation read these records.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

Code = Literal["int", "uint", "e4m3", "nf4"]
HEAD = "head"  # the layer that computes logits


@dataclass(frozen=True, slots=True)
class QuantFormat:
    """A format of `quantization`: how weights and activations are quantised.

    name: the value in the configuration.
    bits: bits of a weight.
    code: "int", integers around zero; "uint", unsigned integers with an offset; "e4m3", 8-bit
        floats; "nf4", the 16 numbers of NF4.
    group: number of inputs that share a scale (and an offset); 0 = all inputs of an output. CUDA
        uses 64 or 32 if the group does not divide a row.
    scale: dtype of scales and offsets.
    head: the name of the LM head's format on CUDA; "" = this one.
    activations: bits of activations in steps of many tokens. With 16, CUDA does not quantise them
        and the CPU uses 16-bit integers.
    devices: types of devices that have matmuls for this format.
    min_capability: the minimum CUDA compute capability; None = any that Manta runs on.
    needs: what a device below min_capability lacks, as a verb phrase for the error.
    instead: the value of `quantization` to use on such a device, with its reason.
    checkpoint: the layout that `manta convert` writes; "" = it writes none.
    describe: the text on this format in configuration.md.
    """

    name: str
    bits: Literal[4, 8]
    code: Code
    devices: tuple[str, ...]
    describe: str
    group: int = 0
    scale: Literal["float16", "float32"] = "float32"
    head: str = ""
    activations: Literal[8, 16] = 16
    min_capability: tuple[int, int] | None = None
    needs: str = ""
    instead: str = ""
    checkpoint: Literal["", "compressed-tensors", "bitsandbytes"] = ""


def _unsigned(bits: Literal[4, 8], group: int) -> QuantFormat:
    return QuantFormat(
        f"uint{bits}-{group}",
        bits=bits,
        code="uint",
        group=group,
        activations=8,
        devices=("cpu",),
        describe=f"{bits} bits, a scale and an offset for {group} inputs; activations in 8 bits",
    )


QUANT_FORMATS: dict[str, QuantFormat] = {
    form.name: form
    for form in (
        QuantFormat(
            "int8",
            bits=8,
            code="int",
            devices=("cpu", "cuda"),
            checkpoint="compressed-tensors",
            describe="weights in 8 bits with a scale an output: half the memory to read, for a "
            "small loss of accuracy. On the CPU, which needs AVX512-VNNI, activations are in 16 "
            "bits with a scale a token",
        ),
        QuantFormat(
            "fp8",
            bits=8,
            code="e4m3",
            activations=8,
            devices=("cuda",),
            checkpoint="compressed-tensors",
            describe="weights in 8-bit floats (e4m3) with a scale an output. On Hopper activations "
            "are rounded to 8 bits too",
        ),
        QuantFormat(
            "w8a8",
            bits=8,
            code="int",
            activations=8,
            devices=("cpu", "cuda"),
            min_capability=(8, 0),
            needs="multiplies 8-bit integers",
            instead="int8, which quantises weights alone",
            checkpoint="compressed-tensors",
            describe="`int8` with activations rounded to 8 bits; on CUDA from compute capability "
            "8.0 on",
        ),
        QuantFormat(
            "int4",
            bits=4,
            code="uint",
            group=128,
            scale="float16",
            head="int8",
            devices=("cuda",),
            checkpoint="compressed-tensors",
            describe="weights in 4 bits with a scale and an offset for each 128 inputs; the head "
            "in 8 bits",
        ),
        QuantFormat(
            "nf4",
            bits=4,
            code="nf4",
            group=64,
            head="int8",
            devices=("cuda",),
            checkpoint="bitsandbytes",
            describe="weights as the 16 numbers of NF4 with a scale for each 64 inputs; the head "
            "in 8 bits",
        ),
        *(_unsigned(8, group) for group in (64, 128, 256, 512)),
        *(_unsigned(4, group) for group in (32, 64, 128)),
    )
}

# Formats that `manta convert` writes, for every device.
CHECKPOINT_FORMATS = tuple(name for name, form in QUANT_FORMATS.items() if form.checkpoint)

if TYPE_CHECKING:  # type checkers need literal names, as they do not read the table's values
    Quantization = str
    LayerQuantization = str
    Convertible = str
else:
    Quantization = Literal["auto", "none", "gguf", *QUANT_FORMATS]
    LayerQuantization = Literal["none", *QUANT_FORMATS]
    Convertible = Literal["auto", "none", "gguf", *CHECKPOINT_FORMATS]
