"""How a device multiplies weights in fewer bits, in words: for `manta plan` and `manta doctor`."""

from collections.abc import Collection, Iterator
from functools import partial

from engine.config.quant_formats import QUANT_FORMATS
from engine.config.quantized import Quantized, Scheme
from engine.quantization.layouts.byte_layouts import eight_bit_form
from engine.quantization.rounded.formats import cuda_format
from kernels.packed import BLOCK, FLOAT8_PRODUCTS, INT8_PRODUCTS, Format

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
    quantization: str,
    quantized: Quantized | None,
    capability: tuple[int, int] | None,
    cuda: bool,
    linears: Collection[str],
    experts: Collection[str],
    deterministic: bool = False,
) -> Iterator[str]:
    """A line for each format that the model's matrices have; on CUDA another one for experts.

    quantization: the configuration's; quantized: of the checkpoint, if it is in fewer bits;
    capability: compute capability of CUDA, if that is known. linears, experts: names of matrices,
    without ".weight".
    """
    line = partial(_line, capability=capability, cuda=cuda, deterministic=deterministic)
    told = {False: linears, True: experts if cuda else ()}
    if quantized is None:
        if quantization in ("auto", "none"):
            return
        form = cuda_format(QUANT_FORMATS[quantization], "", BLOCK)
        for of_experts, names in told.items():
            if names:
                yield line(quantization, form, quantization, experts=of_experts)
        return
    if quantized.method == "gguf":
        yield line(quantized.name, None, "")
        return
    if not cuda:
        told = {False: (*linears, *experts)}
    for of_experts, names in told.items():
        schemes = dict.fromkeys(map(quantized.scheme, names))
        for scheme in schemes:
            if scheme is None:
                continue
            kept = cuda or scheme.kind not in ("fp8", "nf4")
            if of_experts and scheme.ordered:
                kept = False
            yield line(scheme.name, *_nominal(scheme), kept=kept, experts=of_experts)


def _nominal(scheme: Scheme) -> tuple[Format | None, str]:
    """The format of a matrix whose sizes divide as usual, where there are products that round
    activations for any like it; and the key of MEASURED."""
    if scheme.kind in _INTEGERS:
        return None, "int4" if scheme.bits == 4 and not scheme.ordered else ""
    if scheme.kind not in ("fp8", "int8", "llm-int8"):
        return None, ""
    group = 16 if scheme.group % BLOCK else scheme.group or BLOCK
    form = eight_bit_form(scheme, group, scheme.rows if scheme.group else 1)
    if form.code != "e4m3" or form.activations != 8:
        return form, ""
    if form.rows > 1:
        return form, "fp8-block" if (form.rows, form.group) == (128, 128) else ""
    return form, "fp8"


def _line(
    name: str,
    form: Format | None,
    measured: str,  # of MEASURED
    *,
    capability: tuple[int, int] | None,
    cuda: bool,
    deterministic: bool,
    kept: bool = True,
    experts: bool = False,
) -> str:
    text = f"{name}, experts" if experts else name
    if not kept:
        return f"{text}: no product here; expanded to 16 bits at the start"
    if not cuda:
        if name == "int8":
            return f"{text}: multiplied in 8 bits, activations in 16"
        return f"{text}: multiplied in its bits, activations in 8"
    floats = form is not None and form.code == "e4m3"
    if deterministic:  # as `kernels.cuda_deterministic` has them
        if experts:
            return f"{text}: decoded in the product"
        if form is not None and not floats and form.rounds(capability or INT8_PRODUCTS):
            return f"{text}: products of 8-bit integers in steps of any size"
        return f"{text}: expanded to 16 bits in each step"
    what = f"products of {'8-bit floats' if floats else '8-bit integers'}"
    above = "" if experts else ", expanded for it above 256 tokens a step"
    decoded = f"{text}: decoded in the product{above}"
    able = (FLOAT8_PRODUCTS, 0) if floats else INT8_PRODUCTS  # the least that multiplies such
    if form is None or not _rounds(form, able, experts):
        text = decoded
    elif capability is None or not _rounds(form, capability, experts):
        needs = f"{FLOAT8_PRODUCTS}.x" if floats else f"{INT8_PRODUCTS[0]}.{INT8_PRODUCTS[1]}"
        text = f"{decoded} ({what} take compute capability {needs})"
    elif experts:
        text += f": {what} in steps of any size"
    else:
        text += f": {what} from {form.rounded_rows} tokens a step on; below, decoded"
    hopper = capability is not None and capability[0] == 9
    if hopper and not experts and measured in MEASURED:
        ratios = MEASURED[measured].items()
        told = ", ".join(f"{_WORDS[each]} {ratio:.2f}" for each, ratio in ratios)
        text += f"; measured on an H200, times 16 bits: {told}"
    return text


def _rounds(form: Format, capability: tuple[int, int], experts: bool) -> bool:
    return form.rounds_experts(capability) if experts else form.rounds(capability)
