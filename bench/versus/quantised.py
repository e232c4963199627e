"""Manta's engine against vLLM's on one GPU with weights in fewer bits, and its own bfloat16.

    python -m bench.versus.quantised --model LLAMA --name llama-8b --formats fp8 int4 --runs 3

LLAMA is a folder with the config.json of a model in 16 bits. Each format is that folder with a
`quantization_config` of compressed-tensors, which both engines read, and random weights: `fp8` has
e4m3 weights with a scale a channel and e4m3 activations with a scale a token, `int4` symmetric
weights in groups of 128 and 16-bit activations. The head stays in 16 bits. Workloads, settings and
turns are those of `bench.versus.engine`. `ratio` is to vLLM, `own` to Manta's bfloat16 in the same
run. What vLLM really loaded is in its log (`Model loading took`), which goes to stderr.
"""

import argparse
import json
import os
import tempfile
from pathlib import Path
from typing import Any

from bench.report.result_file import Line, RawLines, print_ratios
from bench.versus.engine import best, run_side

ALL = ["single", "uniform", "prefill"]
PLAIN = "bf16"


def _group(weights: dict[str, Any], inputs: dict[str, Any] | None, form: str) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    return {
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "format": form,
        "ignore": ["lm_head"],
        "config_groups": {"group_0": group},
    }


_FLOAT = {"num_bits": 8, "type": "float", "symmetric": True}
FORMATS = {
    "fp8": _group(
        {**_FLOAT, "strategy": "channel", "dynamic": False},
        {**_FLOAT, "strategy": "token", "dynamic": True},
        "float-quantized",
    ),
    "int4": _group(
        {
            "num_bits": 4,
            "type": "int",
            "symmetric": True,
            "strategy": "group",
            "group_size": 128,
            "dynamic": False,
        },
        None,
        "pack-quantized",
    ),
}


def with_format(model: Path, name: str, folder: Path) -> Path:
    """A folder whose config.json is the model's with this format."""
    config = json.loads((model / "config.json").read_text())
    made = folder / name
    made.mkdir()
    (made / "config.json").write_text(json.dumps({**config, "quantization_config": FORMATS[name]}))
    return made


def rows_of(label: str, lines: list[Line], formats: list[str], names: list[str]) -> list[Line]:
    """Cases <label>-<format>/<workload>: `ratio` to vLLM, `own` to Manta's bfloat16."""
    found: list[Line] = []
    for name in formats:
        mine = [line for line in lines if line["model"] == name]
        plain = [line for line in lines if line["model"] == PLAIN]
        for workload in names:
            ours, peer = (best(mine, side, workload) for side in ("manta", "vllm"))
            own = ours / best(plain, "manta", workload)
            found.append(
                {
                    "case": f"{label}-{name}/{workload}",
                    "ours": ours,
                    "peer": peer,
                    "unit": "tok/s",
                    "ratio": round(ours / peer, 3),
                    "own": round(own, 3),
                }
            )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", type=Path, required=True, help="a folder with config.json")
    parser.add_argument("--name", default="model", help="label of the cases")
    parser.add_argument("--formats", nargs="+", default=[*FORMATS], choices=[*FORMATS])
    parser.add_argument("--workloads", nargs="+", default=ALL)
    parser.add_argument("--runs", type=int, default=3, help="alternating runs of each side")
    parser.add_argument("--out", type=Path, default=Path("bench/results"))
    args = parser.parse_args()
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "INFO")
    with tempfile.TemporaryDirectory() as made:
        folders = {name: with_format(args.model, name, Path(made)) for name in args.formats}
        turns = [(PLAIN, args.model, "manta")]
        for name, folder in folders.items():
            turns += [(name, folder, "manta"), (name, folder, "vllm")]
        raw = RawLines(args.out, "versus-quantised")
        for run in range(args.runs):
            for name, folder, side in turns:
                for line in run_side(side, str(folder), args.workloads, [], None):
                    raw.keep({"model": name, "run": run, **line})
    configs = {
        side: next(li["config"] for li in raw.all if li["side"] == side and "config" in li)
        for side in ("manta", "vllm")
    }
    rows = rows_of(args.name, raw.all, args.formats, args.workloads)
    formats = {name: FORMATS[name] for name in args.formats}
    ours = {**configs["manta"], "formats": formats}
    raw.finish({"ours": ours, "peers": {"vllm": configs["vllm"]}}, rows)
    print_ratios(rows)
    for row in rows:
        print(f"{row['case']}: {row['own']} of Manta's bfloat16")


if __name__ == "__main__":
    main()
