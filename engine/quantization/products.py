"""How a device multiplies weights in fewer bits, in words: for `manta plan` and `manta doctor`."""

from collections.abc import Iterator

from engine.config.quantized import Quantized
from kernels.packed import FLOAT8_PRODUCTS, INT8_PRODUCTS, Code, multiplies

# Speed of llama-8b on one H200 against 16-bit weights (bench/results/versus-quantised-*.json):
# workload -> ratio, of "single" (one stream), "uniform" (256 requests), "prefill" (prompts).
MEASURED = {
    "fp8": {"single": 1.586, "uniform": 1.233, "prefill": 1.486},
    "fp8-block": {"single": 1.556, "uniform": 1.192, "prefill": 1.324},
    "int4": {"single": 1.88, "uniform": 0.942, "prefill": 1.117},
}
_WORDS = {"single": "one stream", "uniform": "256 requests", "prefill": "prompts"}
_INTEGERS = ("gptq", "awq", "packed")


def products(
    quantization: str, quantized: Quantized | None, capability: tuple[int, int] | None, cuda: bool
) -> Iterator[str]:
    """A line for each format. quantization: the configuration's; quantized: of the checkpoint, if
    it is in fewer bits; capability: compute capability of CUDA, if that is known."""
    if quantized is None:
        if quantization not in ("auto", "none"):
            both: Code | None = "int" if quantization == "w8a8" else None
            both = "e4m3" if quantization == "fp8" else both
            yield _line(quantization, both, quantization, capability, cuda, kept=True)
        return
    if quantized.method == "gguf":
        yield _line(quantized.name, None, "", capability, cuda, kept=True)
        return
    schemes = dict.fromkeys(scheme for _, scheme in quantized.rules if scheme is not None)
    for scheme in schemes:
        both = None
        blocks = scheme.kind == "fp8" and scheme.rows == scheme.group == 128
        if scheme.activations == 8 and (blocks or not scheme.group):
            both = "e4m3" if scheme.kind == "fp8" else "int"
        measured = ""
        if both == "e4m3":
            measured = "fp8-block" if blocks else "fp8"
        if scheme.kind in _INTEGERS and scheme.bits == 4 and not scheme.ordered:
            measured = "int4"
        kept = cuda or scheme.kind not in ("fp8", "nf4")
        first = 2 if blocks else 32
        yield _line(scheme.name, both, measured, capability, cuda, kept, first)


def _line(
    name: str,
    both: Code | None,  # activations are rounded to that too
    measured: str,  # of MEASURED
    capability: tuple[int, int] | None,
    cuda: bool,
    kept: bool,
    first: int = 32,  # tokens of a step whose activations are rounded
) -> str:
    if not kept:
        return f"{name}: no product here; expanded to 16 bits at the start"
    if not cuda:
        if name == "int8":
            return f"{name}: multiplied in 8 bits, activations in 16"
        return f"{name}: multiplied in its bits, activations in 8"
    text = f"{name}: decoded in the product, expanded for it above 256 tokens a step"
    if both:
        integers = both == "int"
        what = "8-bit integers" if integers else "8-bit floats"
        needs = f"{INT8_PRODUCTS[0]}.{INT8_PRODUCTS[1]}" if integers else f"{FLOAT8_PRODUCTS}.x"
        if capability is not None and multiplies(both, capability):
            text = f"{name}: products of {what} from {first} tokens a step on; below, decoded"
        else:
            text += f" (products of {what} take compute capability {needs})"
    ratios = MEASURED.get(measured, {}) if capability is not None and capability[0] == 9 else {}
    if ratios:
        told = ", ".join(f"{_WORDS[each]} {ratio:.2f}" for each, ratio in ratios.items())
        text += f"; measured on an H200, times 16 bits: {told}"
    return text
