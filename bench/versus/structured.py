"""The cost of a JSON schema on every stream of a full batch: Manta and vLLM, each against itself.

    python -m bench.versus.structured --model LLAMA --name llama-8b --streams 64 --turns 3

LLAMA is a folder with config.json and the tokenizer's files; weights are random on both sides. Each
side has its own process, started once. The same prompts run alternately with a nested schema on
every stream and without a schema, sampled at temperature 1, end tokens ignored. The schema's
minimum number of array items exceeds `--tokens`, so every stream has `--tokens` tokens, all of them
masked. The best turn of each kind counts: `kept` is tokens/s with the schema divided by tokens/s
without. vLLM uses its default grammar back end, usually xgrammar.
"""

import argparse
import json
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from bench.report.result_file import Line, print_ratios, versions
from bench.versus.harness import Harness, Piece, lines_of

SIDES = ("manta", "vllm")
KINDS = ("none", "schema")
PROMPT = 64  # tokens
HIGH_ID = 32_000  # ids below this are in every real model's vocabulary
MAX_MODEL_LEN = 2048
MEMORY_FRACTION = 0.85

_PLACE: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "minLength": 4, "maxLength": 40},
        "country": {"enum": ["Chile", "Ghana", "Japan", "Norway"]},
        "position": {
            "type": "object",
            "properties": {"lat": {"type": "number"}, "lon": {"type": "number"}},
            "required": ["lat", "lon"],
            "additionalProperties": False,
        },
    },
    "required": ["city", "country", "position"],
    "additionalProperties": False,
}
_ROW: dict[str, Any] = {
    "type": "object",
    "properties": {
        "id": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{4}$"},
        "title": {"type": "string", "minLength": 8, "maxLength": 120},
        "count": {"type": "integer", "minimum": 0, "maximum": 100000},
        "kind": {"enum": ["new", "used", "broken"]},
        "tags": {
            "type": "array",
            "items": {"type": "string", "minLength": 2, "maxLength": 20},
            "minItems": 1,
            "maxItems": 4,
        },
        "place": _PLACE,
        "next": {"anyOf": [{"type": "null"}, _PLACE]},
    },
    "required": ["id", "title", "count", "kind", "tags", "place", "next"],
    "additionalProperties": False,
}
# An item has at least 30 tokens, so the minimum is about 3,000 tokens.
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"rows": {"type": "array", "items": _ROW, "minItems": 100}},
    "required": ["rows"],
    "additionalProperties": False,
}

# (kind, tokens, whether to return texts) -> (ids, text or "") of each stream
Generate = Callable[[str, int, bool], list[tuple[Sequence[int], str]]]


def prompts(streams: int) -> list[list[int]]:
    rng = random.Random(0)
    return [[rng.randrange(10, HIGH_ID) for _ in range(PROMPT)] for _ in range(streams)]


def run_manta(model: str, streams: int, **change: Any) -> tuple[Generate, dict[str, Any], Any]:
    """Start Manta's engine.

    Returns a function that generates, the configuration, and a function that ends the engine.
    change: fields of EngineConfig.
    """
    from engine import LLM, SamplingParams
    from engine.structured.grammar import Grammar

    config: dict[str, Any] = {
        "load_format": "dummy",
        "dtype": "bfloat16",
        "max_model_len": MAX_MODEL_LEN,
        "max_num_seqs": streams,
        "memory_fraction": MEMORY_FRACTION,
        "prefix_caching": False,
        **change,
    }
    llm = LLM(model, **config)
    grammar = Grammar.json_schema(SCHEMA)
    requests = prompts(streams)

    def generate(kind: str, tokens: int, texts: bool) -> list[tuple[Sequence[int], str]]:
        params = SamplingParams(
            temperature=1.0,
            ignore_eos=True,
            max_tokens=tokens,
            structured=grammar if kind == "schema" else None,
        )
        outputs = llm.generate(requests, params, detokenize=texts, progress=False)
        return [(choice.token_ids, choice.text) for output in outputs for choice in output.outputs]

    return generate, {**config, "versions": versions("transformers", "llguidance")}, llm.close


def run_vllm(model: str, streams: int) -> tuple[Generate, dict[str, Any], Any]:
    """Start vLLM's engine.

    Returns a function that generates, the configuration, and a function that ends the engine.
    Settings are vLLM's defaults, except those that must equal Manta's.
    """
    from vllm import LLM, SamplingParams  # type: ignore[import-not-found]
    from vllm.sampling_params import StructuredOutputsParams  # type: ignore[import-not-found]

    config: dict[str, Any] = {
        "load_format": "dummy",
        "dtype": "bfloat16",
        "max_model_len": MAX_MODEL_LEN,
        "max_num_seqs": streams,
        "gpu_memory_utilization": MEMORY_FRACTION,
        "enable_prefix_caching": False,
    }
    llm = LLM(model=model, disable_log_stats=True, **config)
    requests = [{"prompt_token_ids": ids} for ids in prompts(streams)]

    def generate(kind: str, tokens: int, texts: bool) -> list[tuple[Sequence[int], str]]:
        constraint = StructuredOutputsParams(json=SCHEMA) if kind == "schema" else None
        params = SamplingParams(
            temperature=1.0,
            ignore_eos=True,
            max_tokens=tokens,
            detokenize=texts,
            structured_outputs=constraint,
        )
        outputs = llm.generate(requests, params, use_tqdm=False)
        return [(choice.token_ids, choice.text) for output in outputs for choice in output.outputs]

    installed = versions("vllm", "xgrammar", "llguidance", "transformers")
    return generate, {**config, "versions": installed}, lambda: None


def run_side(side: str, model: str, streams: int, tokens: int, turns: int, **change: Any) -> None:
    """Start a side, warm it up, run the turns, and print a JSON line for each turn.

    Raises SystemExit if a stream is too short or not the beginning of a document.
    """
    began = time.perf_counter()
    start = run_manta if side == "manta" else run_vllm
    generate, config, close = start(model, streams, **change)
    ready_s = round(time.perf_counter() - began, 2)
    print(json.dumps({"side": side, "ready_s": ready_s, "config": config}), flush=True)
    for kind in KINDS:
        texts = [text for _, text in generate(kind, 32, True)]
        if kind == "schema" and not all(text.lstrip().startswith("{") for text in texts):
            raise SystemExit(f"{side}: {texts[0]!r} is not the beginning of a document")
    for turn in range(turns):
        for kind in KINDS:
            begin = time.perf_counter()
            counts = [len(ids) for ids, _ in generate(kind, tokens, False)]
            seconds = time.perf_counter() - begin
            if counts != [tokens] * streams:
                raise SystemExit(f"{side}, {kind}: streams of {sorted(set(counts))} tokens")
            rate = round(sum(counts) / seconds, 1)
            line = {"side": side, "kind": kind, "turn": turn, "out_tok_s": rate}
            print(json.dumps(line), flush=True)
    close()


def rows_of(label: str, streams: int, lines: list[Line], sides: Sequence[str]) -> list[Line]:
    """Compute rows of our `kept` against the peer's, and of the tokens/s from which they follow."""
    best = {
        (side, kind): max(
            line["out_tok_s"] for line in lines if (line["side"], line.get("kind")) == (side, kind)
        )
        for side in sides
        for kind in KINDS
    }
    shares = {side: round(best[side, "schema"] / best[side, "none"], 3) for side in sides}
    cases = [
        ("kept", "of none", shares),
        *((kind, "tok/s", {side: best[side, kind] for side in sides}) for kind in KINDS),
    ]
    rows: list[Line] = []
    for name, unit, values in cases:
        ours, *others = (values[side] for side in sides)
        row: Line = {"case": f"{label}/{streams}/{name}", "ours": ours, "unit": unit}
        for peer in others:
            row |= {"peer": peer, "ratio": round(ours / peer, 3)}
        rows.append(row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", type=Path, required=True, help="config.json and a tokenizer")
    parser.add_argument("--name", default="model", help="label of the cases")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=384, help="of each stream")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=SIDES, help="one: no peer")
    parser.add_argument("--out", type=Path, default=Path("bench/results"))
    parser.add_argument("--side", choices=SIDES, help="run one side only, here")
    args = parser.parse_args()
    model = str(args.model.resolve())
    if args.side:
        run_side(args.side, model, args.streams, args.tokens, args.turns)
        return
    harness = Harness(args.out, f"versus-structured-{args.name}", ("side",))

    def run_piece(piece: Piece) -> Iterator[Line]:
        command = [sys.executable, "-m", "bench.versus.structured", "--side", piece[0]]
        command += ["--model", model, "--streams", str(args.streams)]
        command += ["--tokens", str(args.tokens), "--turns", str(args.turns)]
        return lines_of(command)

    configs = harness.run_sides(args.sides, run_piece)
    raw = harness.raw
    rows = rows_of(args.name, args.streams, raw.all, args.sides)
    peers = {side: configs[side] for side in args.sides[1:]}
    raw.finish({"ours": configs[args.sides[0]], "peers": peers, "schema": SCHEMA}, rows)
    for row in rows if len(args.sides) == 1 else ():
        print(f"{row['case']:<38} {row['ours']:>12} {row['unit']}")
    print_ratios(rows if len(args.sides) > 1 else [])


if __name__ == "__main__":
    main()
