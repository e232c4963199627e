"""Manta's engine against transformers' `generate` on this machine's CPU; prints the ratios.

    python -m bench.versus.cpu.generate --model FOLDER --rounds 3 --out bench/results

Both sides have the same model, prompts and output lengths, bfloat16 weights, greedy sampling, and
ignore end tokens. They alternate in one run, each with all cores while the other idles, and the
best round of each counts. A third side is Manta with `quantization: int8`, whose rows end in
"manta-int8-weights". It has different weights, and is left out if the processor does not support
it.

    single        one prompt at a time, 64 tokens
    batch         32 prompts at once, 64 tokens each; transformers: one static, left-padded batch
    batch-mixed   32 prompts at once, 16 to 112 tokens (mean 64); the static batch runs to the
                  longest, and only requested tokens count
"""

import argparse
import json
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.report.result_file import ratio_row, write
from engine.evaluation.prompts import SHIPPED
from kernels.cpu.codegen.compiler import has_int8

BATCH = 32
CASES = ("single", "batch", "batch-mixed")
INT8 = "manta-int8-weights"


def lengths(case: str) -> list[int]:
    """Return the output tokens of each prompt of a case."""
    if case == "single":
        return [64, 64]
    if case == "batch":
        return [64] * BATCH
    rng = random.Random(0)
    return [rng.randint(16, 112) for _ in range(BATCH)]


def manta(folder: str, quantization: Any = "none") -> Callable[[str, list[list[int]]], None]:
    """Start Manta's engine, and return a function that runs a case."""
    from engine import LLM, SamplingParams

    llm = LLM(
        folder, device="cpu", dtype="bfloat16", quantization=quantization, prefix_caching=False
    )

    def run(case: str, prompts: list[list[int]]) -> None:
        params = [
            SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=n) for n in lengths(case)
        ]
        waves = [[i] for i in range(len(prompts))] if case == "single" else [range(len(prompts))]
        for wave in waves:
            outputs = llm.generate(
                [prompts[i] for i in wave], [params[i] for i in wave], progress=False
            )
            assert all(
                len(out.outputs[0].token_ids) == lengths(case)[i]
                for out, i in zip(outputs, wave, strict=True)
            )

    return run


def transformers(folder: str) -> Callable[[str, list[list[int]]], None]:
    import torch
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    model.generation_config.eos_token_id = None

    def generate(batch: list[list[int]], count: int) -> None:
        width = max(len(ids) for ids in batch)
        ids = torch.tensor([[0] * (width - len(row)) + row for row in batch])
        mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in batch])
        with torch.inference_mode():
            out = model.generate(
                ids, attention_mask=mask, max_new_tokens=count, do_sample=False, pad_token_id=0
            )
        assert out.shape[1] == width + count

    def run(case: str, prompts: list[list[int]]) -> None:
        if case == "single":
            for prompt, count in zip(prompts, lengths(case), strict=True):
                generate([prompt], count)
        else:
            generate(prompts, max(lengths(case)))

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", help="folder; default: the default model")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, help="folder for the result files")
    args = parser.parse_args()
    from engine.text.tokenizer import Tokenizer

    if args.model is None:
        from deployments.checkpoints.resolve import resolve_model

        args.model = str(resolve_model("default"))
    tokenizer = Tokenizer.load(args.model)
    texts = SHIPPED.read_text().splitlines()
    sides = {"manta": manta(args.model), "transformers": transformers(args.model)}
    if has_int8():
        sides[INT8] = manta(args.model, "int8")
    best: dict[tuple[str, str], float] = {}
    lines: list[dict[str, Any]] = []
    for _ in range(args.rounds):
        for case in CASES:
            counts = lengths(case)
            prompts = [tokenizer.encode(text) for text in texts[: len(counts)]]
            for side, run in sides.items():
                start = time.perf_counter()
                run(case, prompts)
                rate = round(sum(counts) / (time.perf_counter() - start), 1)
                lines.append({"case": case, "side": side, "out_tok_s": rate})
                print(json.dumps(lines[-1]), flush=True)
                best[case, side] = max(rate, best.get((case, side), 0.0))
    rows = [
        ratio_row(
            f"smollm2-135m/{case}" + ("" if side == "manta" else f"/{side}"),
            best[case, side],
            best[case, "transformers"],
            "tok/s",
            2,
        )
        for side in sides
        if side != "transformers"
        for case in CASES
    ]
    for row in rows:
        print(f"{row['case']:<48} {row['ours']:>8} {row['peer']:>8}  {row['ratio']:>5}")
    if args.out:
        config = {
            "ours": {"dtype": "bfloat16", "prefix_caching": False},
            INT8: {"dtype": "bfloat16", "quantization": "int8", "prefix_caching": False},
            "peers": {"transformers": {"dtype": "bfloat16", "static batch": BATCH}},
        }
        write(args.out, "versus-cpu-transformers", config, rows, lines)


if __name__ == "__main__":
    main()
