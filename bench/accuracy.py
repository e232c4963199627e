"""The accuracy cost of each weight format on the default model.

Next-token distributions are compared with those of float32 weights and activations.

    python -m bench.accuracy --out bench/results

The reference has the file's own weights in float32. A row has, over all tokens: the mean KL
divergence from the reference (nats), the share of equal most likely tokens, and perplexity relative
to the reference. gguf-file is the model's file. Other gguf rows quantise its weights once more with
`gguf.quants`, so they include both errors. convert rows are folders that `manta convert
--quantization NAME` makes of the file in 16 bits, run on the CPU. kv rows are bfloat16 with an 8-
or 4-bit KV cache.
"""

import argparse
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench.report.result_file import write
from engine.config.engine_config import EngineConfig
from engine.config.model_config import ModelConfig
from engine.config.quant_formats import CHECKPOINT_FORMATS, QUANT_FORMATS
from engine.config.quantized import Quantized
from engine.conversion import convert_rounded
from engine.evaluation.divergence import Divergence
from engine.evaluation.paged import Paged
from engine.evaluation.prompts import SHIPPED
from engine.models.registry import Model, build_model
from engine.quantization.layouts.gguf import BLOCK_TYPES
from engine.quantization.layouts.layout import GgufLayout
from engine.quantization.method import Part
from engine.resolve import kv_form
from engine.text.tokenizer import Tokenizer
from engine.weights import load_weights
from engine.weights.index import read_index
from kernels.dispatch import kernels_for
from kernels.kv.format import KVFormat
from kernels.packed import unpacked

ROOT = Path(__file__).parent.parent
TEXT = ROOT / "LICENSE"  # two excerpts are texts, too, because the prompts are short
PIECE = 256
BLOCK = 16

FILE = "gguf-file"
GGUF = ("Q8_0", "Q5_1", "Q5_0", "Q4_1", "Q4_0")
ON_THE_FLY = tuple(name for name, quant in QUANT_FORMATS.items() if "cpu" in quant.devices)
CONVERTED = tuple(f"convert-{name}" for name in CHECKPOINT_FORMATS)
KV = ("kv-int8", "kv-fp8", "kv-int4")
CASES = ("bf16", FILE, *(f"gguf-{kind.lower()}" for kind in GGUF), *ON_THE_FLY, *CONVERTED, *KV)


class Weights:
    """The float32 tensors of a folder with block-quantised matrices, loaded one at a time."""

    def __init__(self, folder: Path) -> None:
        """Read the folder's headers. Raises ConfigError if it holds no model."""
        self.config = ModelConfig.from_folder(folder)
        assert self.config.quantized is not None, f"{folder} has no blocks"
        self._types = dict(self.config.quantized.types)
        self._stored = read_index(folder)

    def raw(self, name: str) -> Tensor:
        """Return a tensor as stored in the file."""
        stored = self._stored[name]
        with stored.file.open("rb") as file:
            file.seek(stored.offset)
            data = bytearray(file.read(stored.num_bytes))
        return torch.frombuffer(data, dtype=stored.dtype).view(stored.shape)

    def values(self, name: str) -> Tensor:
        raw = self.raw(name)
        kind = self._types.get(name.removesuffix(".weight"))
        if kind is None:
            return raw.float()
        layout = GgufLayout(_part(name, kind, raw), kind, torch.device("cpu"))
        (parameter,) = layout.parameters.values()
        parameter.tensor.copy_(raw)
        return torch.cat([unpacked(layout.form, tensor) for tensor in layout.decoded(4096)])


def _part(name: str, kind: str, raw: Tensor) -> Part:
    block = BLOCK_TYPES[kind]
    rows, width = raw.shape[0], raw.shape[1] // block.num_bytes * block.width
    return Part(name, rows, width, (0, rows), (0, width))


def quantised(values: Tensor, kind: str) -> Tensor:
    """Quantise values with the gguf package, to uint8 [rows, bytes]."""
    from gguf import GGMLQuantizationType
    from gguf.quants import quantize

    return torch.from_numpy(quantize(values.numpy(), GGMLQuantizationType[kind]))


def filled(model: Model, tensor: Callable[[str], Tensor]) -> Model:
    """Fill a model's parameters, and return the model.

    tensor: name of a checkpoint tensor -> the tensor.
    """
    for parameter in model.parameters():
        at = 0
        parameter.allocate()
        for source in parameter.sources:
            parameter.tensor[at : at + source.num_rows] = source.part_of(tensor(source.name))
            at += source.num_rows
    model.finish()
    return model


def model_of(case: str, weights: Weights) -> Model:
    """Build the model of a case. case: one of CASES, or "float32"."""
    kernels = kernels_for("cpu")
    plain = replace(weights.config, quantized=None)
    if case == FILE:
        model = build_model(weights.config, torch.bfloat16, "cpu", kernels)
        return filled(model, weights.raw)
    if case.startswith("gguf-"):
        kind = case.removeprefix("gguf-").upper()
        assert weights.config.quantized is not None
        types = dict.fromkeys(weights.config.quantized.types, kind)
        config = replace(plain, quantized=Quantized("gguf", types=types))
        matrices = dict(types)

        def tensor(name: str) -> Tensor:
            values = weights.values(name)
            blocks = name.removesuffix(".weight") in matrices
            return quantised(values, kind) if blocks else values

        return filled(build_model(config, torch.bfloat16, "cpu", kernels), tensor)
    dtype = torch.float32 if case == "float32" else torch.bfloat16
    quantization = case if case in ON_THE_FLY else "none"
    model = build_model(plain, dtype, "cpu", kernels, quantization=quantization)
    return filled(model, weights.values)


def converted(folder: Path, name: str) -> Model:
    """Convert a 16-bit model to a quantised one, and build it.

    folder: the model's folder. name: the quantisation's name.
    """
    with tempfile.TemporaryDirectory() as parent:
        target = Path(parent) / name
        convert_rounded(EngineConfig(model=str(folder), quantization=name), target)
        config = ModelConfig.from_folder(target)
        model = build_model(config, torch.bfloat16, "cpu", kernels_for("cpu"))
        load_weights(model, target)
    return model


def logprobs(model: Model, entries: list[Tensor], form: KVFormat) -> list[Tensor]:
    """Return the log-probabilities after each token of each text, [n, vocab] float32 per text.

    entries: token ids of each text. form: the format of the KV cache. All texts are computed in one
    step.
    """
    placed, at = [], 0
    for ids in entries:
        count = -(-len(ids) // BLOCK)
        placed.append((ids, range(at, at + count), 0))
        at += count
    hidden = Paged(model, at, BLOCK, form).run(*placed)
    return [logits.float().log_softmax(-1) for logits in hidden]


def row_of(sums: Divergence, case: str) -> dict[str, Any]:
    exact, other = sums.perplexities
    return {
        "case": f"smollm2-135m/{case}",
        "kl": round(sums.kl, 5),
        "same_token": round(sums.same_token, 4),
        "perplexity": round(other, 3),
        "perplexity_ratio": round(other / exact, 4),
        "tokens": sums.tokens,
    }


def texts(tokenizer: Tokenizer) -> Iterator[Tensor]:
    for line in SHIPPED.read_text().splitlines():
        yield torch.tensor(tokenizer.encode(line))
    ids = torch.tensor(tokenizer.encode(TEXT.read_text()))
    yield from ids[: 2 * PIECE].split(PIECE)


def measure(
    folder: Path, plain_folder: Path, cases: tuple[str, ...] = CASES
) -> Iterator[dict[str, Any]]:
    """Yield a row for each case.

    folder: the block-quantised model. plain_folder: the model in 16 bits.
    """
    weights, tokenizer = Weights(folder), Tokenizer.load(str(folder))
    entries = list(texts(tokenizer))
    model = model_of("float32", weights)
    plain = KVFormat()
    exact = logprobs(model, entries, plain)
    for case in cases:
        if case in CONVERTED:
            model = converted(plain_folder, case.removeprefix("convert-"))
        else:
            model = model_of(case, weights)
        kind = case.removeprefix("kv-")
        form = kv_form(model.config, kind) if case in KV else plain
        sums = Divergence()
        for entry in zip(entries, exact, logprobs(model, entries, form), strict=True):
            sums.add_text(*entry)
        del model
        yield row_of(sums, case)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--cases", nargs="*", default=CASES, choices=CASES)
    parser.add_argument("--out", type=Path, help="folder for the result files")
    args = parser.parse_args()
    from deployments.checkpoints.resolve import resolve_model

    rows = []
    folders = resolve_model("default", blocks=True), resolve_model("default")
    for row in measure(*folders, tuple(args.cases)):
        print(row, flush=True)
        rows.append(row)
    if args.out:
        config = {"model": "default", "texts": ["engine/evaluation/prompts.txt", "LICENSE"]}
        write(args.out, "accuracy", config, rows, rows)


if __name__ == "__main__":
    main()
