"""The accuracy cost of 4-bit weights on real models, with and without a calibration text.

    python -m bench.calibration --calibrate text.txt --models default gemma.gguf --out bench/results

Next-token distributions are compared with those of the model's 16-bit weights in float32. Texts are
the shipped prompts and the first 512 tokens of LICENSE; the calibration text must not contain them.
Models run on the CPU, which also rounds activations. `int4` is `manta convert --quantization int4`;
`int4-calibrated` also has `--calibrate`. kv rows are bfloat16 with a quantised KV cache. `bits`
counts codes, scales and zero points of the quantised matrices, without matrices that stay in 16
bits.
"""

import argparse
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench.accuracy import PIECE, TEXT, logprobs
from bench.report.result_file import write
from engine.config.engine_config import EngineConfig
from engine.config.model_config import ModelConfig
from engine.conversion import convert_rounded
from engine.evaluation.divergence import Divergence
from engine.evaluation.prompts import SHIPPED
from engine.models.registry import Model, build_model
from engine.resolve import kv_form
from engine.shards import read_headers
from engine.text.tokenizer import Tokenizer
from engine.weights import load_weights
from kernels.dispatch import kernels_for
from kernels.kv.format import KVFormat

KV = ("kv-int8", "kv-fp8", "kv-int4")
CASES = ("bf16", "int8", "int4", "int4-calibrated", *KV)
_ROUNDED = (".weight_packed", ".weight_scale", ".weight_zero_point")


def texts(tokenizer: Tokenizer) -> list[Tensor]:
    """Return the token ids of each text, including the model's begin-of-text tokens."""
    lines = SHIPPED.read_text().splitlines()
    entries = [torch.tensor(tokenizer.encode(line, add_special_tokens=True)) for line in lines]
    first = torch.tensor(tokenizer.encode("", add_special_tokens=True), dtype=torch.int64)
    ids = torch.tensor(tokenizer.encode(TEXT.read_text()))
    return entries + [torch.cat([first, piece]) for piece in ids[: 2 * PIECE].split(PIECE)]


def loaded(folder: Path, dtype: torch.dtype) -> Model:
    model = build_model(ModelConfig.from_folder(folder), dtype, "cpu", kernels_for("cpu"))
    load_weights(model, folder)
    return model


def bits_of(folder: Path) -> float:
    """Return the mean bits per weight of the quantised matrices in a folder, including scales."""
    entries = read_headers(folder).values()
    stored = sum(entry.num_bytes for entry in entries if entry.name.endswith(_ROUNDED))
    names = {entry.name for entry in entries}
    weights = 0
    for entry in entries:
        if entry.name.endswith(_ROUNDED[0]):
            stem = entry.name.removesuffix(_ROUNDED[0])
            # an int32 word has 8 codes if there are zero points, else 4
            codes = 8 if f"{stem}.weight_zero_point" in names else 4
            weights += entry.num_bytes // 4 * codes
    return 8 * stored / weights


def measure(folder: Path, text: Path, cases: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Yield a row for each case. folder: a model in 16 bits."""
    entries = texts(Tokenizer.load(str(folder)))
    exact = logprobs(loaded(folder, torch.float32), entries, KVFormat())
    for case in cases:
        row: dict[str, Any] = {"case": f"{folder.name.rpartition('-')[0]}/{case}"}
        with tempfile.TemporaryDirectory() as parent:
            at, form = folder, KVFormat()
            if case.startswith("int"):
                at = Path(parent) / case
                config = EngineConfig(model=str(folder), quantization=case.partition("-")[0])
                calibration = text if case.endswith("-calibrated") else None
                convert_rounded(config, at, calibration=calibration)
                row["bits"] = round(bits_of(at), 3)
            model = loaded(at, torch.bfloat16)
            if case in KV:
                form = kv_form(model.config, case.removeprefix("kv-"))
            sums = Divergence()
            for entry in zip(entries, exact, logprobs(model, entries, form), strict=True):
                sums.add_text(*entry)
            del model
        exact_perplexity, perplexity = sums.perplexities
        yield row | {
            "kl": round(sums.kl, 5),
            "same_token": round(sums.same_token, 4),
            "perplexity": round(perplexity, 3),
            "perplexity_ratio": round(perplexity / exact_perplexity, 4),
            "tokens": sums.tokens,
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--calibrate", type=Path, required=True, metavar="FILE")
    parser.add_argument("--models", nargs="+", default=["default"])
    parser.add_argument("--cases", nargs="+", default=CASES, choices=CASES)
    parser.add_argument("--out", type=Path, help="folder for the result files")
    args = parser.parse_args()
    from deployments.checkpoints.resolve import resolve_model

    rows = []
    for spec in args.models:
        for row in measure(resolve_model(spec), args.calibrate, args.cases):
            print(row, flush=True)
            rows.append(row)
    if args.out:
        config = {
            "models": [Path(spec).name for spec in args.models],
            "texts": ["engine/evaluation/prompts.txt", "LICENSE"],
            "calibration": args.calibrate.name,
        }
        write(args.out, "calibration", config, rows, rows)


if __name__ == "__main__":
    main()
