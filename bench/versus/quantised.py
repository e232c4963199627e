"""Manta with quantised weights or KV cache against vLLM, and against its own bfloat16.

    python -m bench.versus.quantised --model LLAMA --name llama-8b --formats fp8 int4 --runs 3

LLAMA is a folder with the config.json of a model in 16 bits. For a weight format a
`quantization_config` is added, which both engines read; weights are random. `fp8` has e4m3 weights
with a scale per channel and e4m3 activations with a scale per token; `w8a8` has integers instead.
`fp8-block` has e4m3 weights with a scale per 128 x 128 block, and the activations that each engine
uses for them. `int4` has symmetric weights in groups of 128 and 16-bit activations. `mxfp4` has
experts in e2m1 with a scale per 32 (as in the files of gpt-oss or of compressed-tensors). The head
and the experts' routers stay in 16 bits. `kv-fp8`, `kv-int8` and `kv-int4` have 16-bit weights and
a quantised KV cache; vLLM supports only the first. Workloads, settings and order of runs are those
of `bench.versus.engine`. `ratio` is to vLLM, `own` to Manta's bfloat16 in the same run. vLLM's log
on stderr shows what it loaded (`Model loading took`).

--own leaves vLLM out. --resume continues from the day's lines in --out with the missing runs, and
adds other formats and workloads to the same table.
"""

import argparse
import json
import os
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

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
        "ignore": ["lm_head", "re:.*mlp.gate$"],
        "config_groups": {"group_0": group},
    }


def _eight_bits(kind: str, form: str) -> dict[str, Any]:
    weights = {"num_bits": 8, "type": kind, "symmetric": True}
    return _group(
        {**weights, "strategy": "channel", "dynamic": False},
        {**weights, "strategy": "token", "dynamic": True},
        form,
    )


def _mxfp4() -> dict[str, Any]:
    """Return the `quantization_config` of MXFP4 experts with one tensor per expert."""
    weights = {"num_bits": 4, "type": "float", "symmetric": True}
    group = _group(
        {**weights, "strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"},
        None,
        "mxfp4-pack-quantized",
    )
    return {**group, "ignore": [*group["ignore"], "re:.*self_attn.*"]}


GPT_OSS = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": [
        "model.layers.*.self_attn",
        "model.layers.*.mlp.router",
        "model.embed_tokens",
        "lm_head",
    ],
}


class Form(NamedTuple):
    """A format of weights or of the KV cache, with each engine's options for it.

    config: quantization_config, or None.
    manta, vllm: options of each engine, "key=value"; vllm is None if it does not support the
    format.
    """

    config: dict[str, Any] | None = None
    manta: tuple[str, ...] = ()
    vllm: tuple[str, ...] | None = ()


FORMATS = {
    "fp8": Form(_eight_bits("float", "float-quantized")),
    "fp8-block": Form(
        {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [128, 128],
        }
    ),
    "w8a8": Form(_eight_bits("int", "int-quantized")),
    "int4": Form(
        _group(
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
        )
    ),
    "mxfp4": Form(_mxfp4()),
    "kv-fp8": Form(manta=("kv_dtype=fp8",), vllm=("kv_cache_dtype=fp8",)),
    "kv-int8": Form(manta=("kv_dtype=int8",), vllm=None),
    "kv-int4": Form(manta=("kv_dtype=int4",), vllm=None),
}


def with_format(model: Path, name: str, folder: Path) -> Path:
    """Make a folder with the model's config.json for this format."""
    config = json.loads((model / "config.json").read_text())
    chosen = FORMATS[name].config
    if name == "mxfp4" and config.get("model_type") == "gpt_oss":
        chosen = GPT_OSS  # a format with all experts of a layer in one tensor
    if chosen:
        config["quantization_config"] = chosen
    target = folder / name
    target.mkdir()
    (target / "config.json").write_text(json.dumps(config))
    return target


def turns_of(formats: list[str], own: bool) -> list[tuple[str, str, list[str]]]:
    """Return the measurements of one run in order: (PLAIN or a format, side, engine options).

    own: whether vLLM is left out.
    """
    sides: list[tuple[str, str, list[str]]] = [(PLAIN, "manta", [])]
    for name in formats:
        for side, change in (("manta", FORMATS[name].manta), ("vllm", FORMATS[name].vllm)):
            if change is not None and not (own and side == "vllm"):
                sides.append((name, side, [*change]))
    return sides


def rows_of(label: str, lines: list[Line]) -> list[Line]:
    """Compute rows <label>-<format>/<workload>.

    `ratio` is relative to vLLM, if it ran; `own` is relative to Manta's bfloat16.
    """
    plain = [line for line in lines if line["model"] == PLAIN]
    names = dict.fromkeys(line["workload"] for line in plain if "workload" in line)
    rows: list[Line] = []
    for name in dict.fromkeys(line["model"] for line in lines if line["model"] != PLAIN):
        mine = [line for line in lines if line["model"] == name]
        for workload in names:
            sides = {line["side"] for line in mine if line.get("workload") == workload}
            if "manta" not in sides:
                continue
            ours = best(mine, "manta", workload)
            row: Line = {"case": f"{label}-{name}/{workload}", "ours": ours, "unit": "tok/s"}
            if "vllm" in sides:
                peer = best(mine, "vllm", workload)
                row |= {"peer": peer, "ratio": round(ours / peer, 3)}
            row["own"] = round(ours / best(plain, "manta", workload), 3)
            rows.append(row)
    return rows


def measure(
    model: Path, formats: list[str], names: list[str], runs: int, raw: RawLines, own: bool
) -> None:
    """Run the measurements that are missing in raw, and save their lines.

    own: whether vLLM is left out.
    """
    there = {_of(line) for line in raw.all}
    with tempfile.TemporaryDirectory() as parent:
        folders = {name: with_format(model, name, Path(parent)) for name in formats}
        for run in range(runs):
            for name, side, change in turns_of(formats, own):
                missing = [label for label in names if (name, run, side, label) not in there]
                folder = str(folders.get(name, model))
                for line in run_side(side, folder, missing, change, None) if missing else ():
                    raw.keep({"model": name, "run": run, **line})


def _of(line: Line) -> tuple[str, int, str, str]:
    """Return the values that identify a line's measurement."""
    return line["model"], line["run"], line["side"], line.get("workload", "")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", type=Path, required=True, help="a folder with config.json")
    parser.add_argument("--name", default="model", help="label of the cases")
    parser.add_argument("--formats", nargs="+", default=[*FORMATS], choices=[*FORMATS])
    parser.add_argument("--workloads", nargs="+", default=ALL)
    parser.add_argument("--runs", type=int, default=3, help="alternating runs of each side")
    parser.add_argument("--own", action="store_true", help="without vLLM")
    parser.add_argument("--resume", action="store_true", help="go on with the day's lines in --out")
    parser.add_argument("--out", type=Path, default=Path("bench/results"))
    args = parser.parse_args()
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "INFO")
    raw = RawLines(args.out, "versus-quantised", list if args.resume else None)
    measure(args.model, args.formats, args.workloads, args.runs, raw, args.own)
    configs = {line["side"]: line["config"] for line in raw.all if "config" in line}
    rows = rows_of(args.name, raw.all)
    did = dict.fromkeys(line["model"] for line in raw.all if line["model"] != PLAIN)
    formats = {name: FORMATS[name]._asdict() for name in did}
    peers = {side: config for side, config in configs.items() if side != "manta"}
    raw.finish({"ours": {**configs["manta"], "formats": formats}, "peers": peers}, rows)
    print_ratios([row for row in rows if "ratio" in row])
    for row in rows:
        print(f"{row['case']}: {row['ours']} {row['unit']}, {row['own']} of Manta's bfloat16")


if __name__ == "__main__":
    main()
