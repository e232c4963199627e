"""products: describes the matmul kernels for quantised weights, for `manta plan` and `doctor`."""

import json
from collections.abc import Collection, Iterator, Sequence
from functools import cache, partial
from importlib.resources import files
from typing import assert_never

from engine.config.quant_formats import QUANT_FORMATS
from engine.config.quantized import Quantized, Scheme
from engine.quantization.layouts.byte_layouts import eight_bit_form
from engine.quantization.rounded.formats import cuda_format
from kernels.candidates import Candidate, taking
from kernels.experts.candidates import FIXED_PACKED_EXPERTS, PACKED_EXPERTS
from kernels.gemm.packed.candidates import FIXED_LINEAR, PACKED_LINEAR
from kernels.packed import BLOCK, Format

# Compute capabilities among which to find the minimum for a format: T4, A100, L40, H100, B200.
_CAPABILITIES = ((7, 5), (8, 0), (8, 9), (9, 0), (10, 0))
_ROUNDED = ("8-bit floats", "8-bit integers")  # operands of kernels that also quantise activations
_WORDS = {"single": "one stream", "uniform": "256 requests", "prefill": "prompts"}


def products(
    quantization: str,
    quantized: Quantized | None,
    capability: tuple[int, int] | None,
    cuda: bool,
    linears: Collection[str],
    experts: Collection[str],
    deterministic: bool = False,
) -> Iterator[str]:
    """Yield a line of text for each format of the model's matrices; on CUDA another for experts.

    quantization: the value in the configuration.
    quantized: the checkpoint's quantisation, if any.
    capability: compute capability of CUDA; None = unknown.
    linears, experts: names of matrices, without ".weight".
    """
    line = partial(_line, capability=capability, cuda=cuda, deterministic=deterministic)
    groups = {False: linears, True: experts if cuda else ()}
    if quantized is None:
        if quantization in ("auto", "none"):
            return
        form = cuda_format(QUANT_FORMATS[quantization], "", BLOCK)
        for of_experts, names in groups.items():
            if names:
                yield line(quantization, form, quantization, experts=of_experts)
        return
    if quantized.method == "gguf":
        yield line(quantized.name, None, "")
        return
    if not cuda:
        groups = {False: (*linears, *experts)}
    for of_experts, names in groups.items():
        schemes = dict.fromkeys(map(quantized.scheme, names))
        for scheme in schemes:
            if scheme is None:
                continue
            packed = cuda or scheme.kind not in ("fp8", "nf4")
            if scheme.kind == "sparse" or (of_experts and scheme.ordered):
                packed = False
            if scheme.sparse and packed:
                yield f"{scheme.name}: zeros are filled in at the start, and multiplied too"
            yield line(scheme.name, *_nominal(scheme), kept=packed, experts=of_experts)


def _nominal(scheme: Scheme) -> tuple[Format | None, str]:
    """Return (format of a matrix of typical size, key of `measured_speeds` or "").

    The format is None if no matmul quantises activations for this scheme.
    """
    match scheme.kind:
        case "gptq" | "awq" | "packed":
            return None, "int4" if scheme.bits == 4 and not scheme.ordered else ""
        case "nvfp4" | "mxfp4" | "nf4" | "sparse":
            return None, ""
        case "fp8" | "int8" | "llm-int8":
            group = 16 if scheme.group % BLOCK else scheme.group or BLOCK
            form = eight_bit_form(scheme, group, scheme.rows if scheme.group else 1)
        case kind:
            assert_never(kind)
    if form.code != "e4m3" or form.activations != 8:
        return form, ""
    if form.rows > 1:
        return form, "fp8-block" if (form.rows, form.group) == (128, 128) else ""
    return form, "fp8"


def _line(
    name: str,
    form: Format | None,
    measured: str,  # key of `measured_speeds`, or ""
    *,
    capability: tuple[int, int] | None,
    cuda: bool,
    deterministic: bool,
    kept: bool = True,
    experts: bool = False,
) -> str:
    text = f"{name}, experts" if experts else name
    if not kept:
        return f"{text}: no GEMM here; dequantised to 16 bits at the start"
    if not cuda:
        if name == "int8":
            return f"{text}: multiplied in 8 bits, activations in 16"
        return f"{text}: multiplied in its bits, activations in 8"
    if form is None:  # activations are never quantised for this format
        form = Format(4, 128)
    tables = {False: (PACKED_LINEAR, PACKED_EXPERTS), True: (FIXED_LINEAR, FIXED_PACKED_EXPERTS)}
    text += f": {_kernels(tables[deterministic][experts], form, capability)}"
    if deterministic:
        return text
    hopper = capability is not None and capability[0] == 9
    speeds = measured_speeds()
    if hopper and not experts and measured in speeds:
        ratios = speeds[measured].items()
        ratios_text = ", ".join(f"{_WORDS[workload]} {ratio:.2f}" for workload, ratio in ratios)
        text += f"; measured on an H100 or H200, times 16 bits: {ratios_text}"
    return text


def _kernels(
    table: Sequence[Candidate[Format]], form: Format, capability: tuple[int, int] | None
) -> str:
    """Return in words the kernels of a table for a format, and the GPU that 8-bit GEMMs need."""
    able = [other for other in _CAPABILITIES if _rounding(table, form, other)]
    kernel = _rounding(table, form, capability) if capability else None
    if kernel is not None:
        first, _ = kernel.tokens(form)
        steps = f"from {first} tokens a step on; below, decoded"
        return f"GEMMs of {kernel.operands} {'in steps of any size' if first == 1 else steps}"
    text = "dequantised to 16 bits in each step"
    decoding = [
        kernel
        for kernel in taking(table, form, capability or _CAPABILITIES[0])
        if kernel.operands == "decoded codes"
    ]
    if decoding:
        last = max(kernel.tokens(form)[1] for kernel in decoding)
        above = "" if last == float("inf") else f", dequantised for it above {last} tokens a step"
        text = f"decoded in the GEMM{above}"
    if not able:
        return text
    major, minor = able[0]
    needs = f"{major}.{minor}" if able[-1] == _CAPABILITIES[-1] else f"{major}.x"
    rounding = _rounding(table, form, able[0])
    assert rounding is not None
    return f"{text} (GEMMs of {rounding.operands} take compute capability {needs})"


def _rounding(
    table: Sequence[Candidate[Format]], form: Format, capability: tuple[int, int]
) -> Candidate[Format] | None:
    """Return the first kernel of a table that also quantises activations; None without one."""
    kernels = taking(table, form, capability)
    return next((kernel for kernel in kernels if kernel.operands in _ROUNDED), None)


@cache
def measured_speeds() -> dict[str, dict[str, float]]:
    """Return the speed-ups of llama-8b on a Hopper over 16-bit weights: format -> workload ->
    ratio.

    The workloads are "single" (one stream), "uniform" (256 requests) and "prefill" (prompts). The
    numbers are those of bench/results/versus-quantised-*.json.
    """
    file = files("engine.quantization").joinpath("measured_speeds.json")
    speeds: dict[str, dict[str, float]] = json.loads(file.read_text())
    return speeds
