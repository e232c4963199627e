"""Manta's engine against vLLM's on one GPU, offline and alternating.

    python -m bench.versus.engine --model LLAMA QWEN --name llama-8b qwen3-0.6b --runs 3

With --change Manta runs against itself, with and without the change. Examples are the cost of
deterministic mode, and blocks of one token against blocks of sixteen:

    python -m bench.versus.engine --model LLAMA --name llama-8b --change deterministic=true
    python -m bench.versus.engine --model LLAMA --name llama-8b --change block_size=1

With --against FOLDER the other side is the Manta of another checkout, usually of an older commit:

    python -m bench.versus.engine --model LLAMA --name llama-8b --against ../manta-before

vLLM must be installed in this interpreter's environment. A model is a folder that needs only a
config.json: weights are random on both sides. Sampling is greedy, and end tokens are ignored.
Prefix caches are off, except for `conversations` and `second_turn`. The ratio of `second_turn` is
of milliseconds, so below 1 is better. Each run has its own process, since both engines need the
whole device. Sides alternate, and the best run of each side counts. Every run's raw line is saved
immediately. --resume continues from the day's lines in --out with the missing runs, for
environments that limit a command's duration.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

from bench.report.result_file import Line, print_ratios, ratio_row, versions
from bench.report.result_file import commit as commit  # re-exported for other benchmarks
from bench.versus import offline
from bench.versus.harness import Harness, Piece, lines_of
from bench.versus.vllm_weights import NOTE, WORKER, check_drawn
from loadtest.scenario.workloads import Request

MAX_MODEL_LEN = 9216
MAX_NUM_SEQS = 1024
MEMORY_FRACTION = 0.85
# Workloads of a model if --workloads is missing: the columns of docs/performance.md.
ALL = ["single", "uniform", "dialogue", "prefill"]
TABLE = {  # models that do not run ALL
    "qwen3-0.6b": ALL[:3],
    "qwen3-30b-a3b": ALL[:2],
    "gpt-oss-20b": ALL[:2],
    "gemma-3-12b": ALL[:3],
    "deepseek-v2-lite": ["single", "uniform", "prefill"],
    "qwen3-next-24": [  # 24 of qwen3-next's 48 layers: 75 GiB
        *("single", "uniform", "prefill"),
        *("decode_128k", "conversations", "second_turn"),
    ],
}

PLAIN = "manta-as-it-is"  # the side Manta without the change
BEFORE = "manta-before"  # the side Manta of another checkout
# names of this module in older checkouts
_FORMER = ("bench.versus_engine", "loadtest.versus_engine")


def _needs(names: list[str]) -> dict[str, Any]:
    """Return the engine options that the workloads need.

    All workloads of a call need the same options, as run_side starts an engine per such group.
    """
    return {key: value for name in names for key, value in offline.NEEDS.get(name, {}).items()}


def engine_fields(items: list[str]) -> dict[str, Any]:
    """Parse fields of EngineConfig, e.g. ["block_size=1", "admission=peak"]."""
    fields: dict[str, Any] = {}
    for item in items:
        key, _, text = item.partition("=")
        try:
            fields[key] = json.loads(text)
        except ValueError:
            fields[key] = text
    return fields


def run_manta(
    model: str,
    names: list[str],
    change: dict[str, Any] | None = None,
    side: str = "manta",
    load_format: str = "dummy",
) -> None:
    """Start Manta's engine, run each workload once, and print a JSON line for each.

    change: engine options that differ. side: the label of the lines.
    """
    from engine import LLM, SamplingParams

    began = time.perf_counter()
    config: dict[str, Any] = {
        "load_format": load_format,
        "dtype": "bfloat16",
        "max_model_len": MAX_MODEL_LEN,
        "max_num_seqs": MAX_NUM_SEQS,
        "memory_fraction": MEMORY_FRACTION,
        "prefix_caching": False,
        **_needs(names),
        **(change or {}),
    }
    with LLM(model, **config) as llm:
        _print(
            side=side,
            ready_s=round(time.perf_counter() - began, 2),
            config={**config, "versions": versions("transformers")},
            phases=llm.ready.start_seconds,
        )

        def generate(requests: list[Request]) -> tuple[list[list[int]], float]:
            params = [
                SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=num_out)
                for _, num_out in requests
            ]
            start = time.perf_counter()
            outputs = llm.generate([ids for ids, _ in requests], params, detokenize=False)
            seconds = time.perf_counter() - start
            return [list(output.outputs[0].token_ids) for output in outputs], seconds

        for name in names:
            _print(side=side, workload=name, **offline.measure(name, generate))


def run_vllm(
    model: str,
    names: list[str],
    change: dict[str, Any] | None = None,
    load_format: str = "dummy",
) -> None:
    """Start vLLM's engine, run each workload once, and print a JSON line for each.

    Settings are vLLM's defaults, except `change` and those that must equal Manta's.
    """
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
    from vllm import LLM, SamplingParams  # type: ignore[import-not-found]

    drawn = load_format == "dummy"
    began = time.perf_counter()
    needs = _needs(names)
    config: dict[str, Any] = {
        "load_format": load_format,
        "dtype": "bfloat16",
        "max_model_len": needs.get("max_model_len", MAX_MODEL_LEN),
        "max_num_seqs": MAX_NUM_SEQS,
        "gpu_memory_utilization": MEMORY_FRACTION,
        "enable_prefix_caching": needs.get("prefix_caching", False),
        # Recurrent states in float32, as in Manta; vLLM's default is 16 bits for most models.
        "mamba_ssm_cache_dtype": "float32",
        # vLLM's default for DeltaNet, FlashInfer's kernels, needs nvcc; these need only Triton.
        "additional_config": {"gdn_prefill_backend": "triton"},
        **({"worker_cls": WORKER} if drawn else {}),
        **(change or {}),
    }
    llm = LLM(model=model, skip_tokenizer_init=True, disable_log_stats=True, **config)
    ready_s = round(time.perf_counter() - began, 2)
    if drawn:
        check_drawn(llm)
        config["weights"] = NOTE
    _print(side="vllm", ready_s=ready_s, config={**config, "versions": versions("vllm")})

    def generate(requests: list[Request]) -> tuple[list[list[int]], float]:
        params = [
            SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=num_out, detokenize=False)
            for _, num_out in requests
        ]
        prompts = [{"prompt_token_ids": ids} for ids, _ in requests]
        start = time.perf_counter()
        outputs = llm.generate(prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - start
        return [list(output.outputs[0].token_ids) for output in outputs], seconds

    for name in names:
        _print(side="vllm", workload=name, **offline.measure(name, generate))


def _print(**line: Any) -> None:
    print(json.dumps(line), flush=True)


def _file(module: str) -> str:
    return module.replace(".", "/") + ".py"


def run_side(
    side: str,
    model: str,
    names: list[str],
    change: list[str],
    against: Path | None,
    load_format: str = "dummy",
) -> Iterator[Line]:
    """Yield the lines of one run as they arrive, from one process per group of workloads.

    Workloads of a group need the same engine options.
    names: the workloads; empty to measure only the start.
    """
    module, folder = "bench.versus.engine", None
    if side == BEFORE:
        assert against is not None
        folder = against.resolve()
        places = [name for name in (module, *_FORMER) if (folder / _file(name)).exists()]
        module = places[0] if places else module
    own = "manta" if side == BEFORE else side
    command = [sys.executable, "-m", module, "--side", own, "--model", str(Path(model).resolve())]
    if side in ("manta", "vllm") and change:
        command += ["--change", *change]
    if load_format != "dummy":
        command += ["--load-format", load_format]
    for group in offline.by_engine(names):
        for line in lines_of([*command, "--workloads", *group], folder):
            yield {**line, "side": side}


def best(lines: list[dict[str, Any]], side: str, name: str) -> float:
    """Return a side's best result of a workload. See `offline.best`."""
    mine = (line for line in lines if line["side"] == side and line.get("workload") == name)
    return offline.best(name, mine)


def compare(
    models: dict[str, str],
    names: list[str],
    runs: int,
    out: Path,
    change: list[str],
    resume: bool,
    against: Path | None = None,
    title: str = "versus-engine",
) -> None:
    """Measure two sides in turns, `runs` times each, and print the table of ratios.

    Sides are Manta and vLLM, Manta with and without a change, or Manta and an older checkout.

    models: label -> folder.
    names: names of workloads; empty for those of TABLE.
    change: engine options that differ, as KEY=VALUE; empty for another comparison.
    resume: whether to run only what today's file lacks.
    against: the folder of another checkout.

    Writes <out>/<title>-<date>.json (the table) and .jsonl (the raw lines); with a change,
    change-<change>-<date>; against another checkout, before-after-<its commit>-<date>.
    """
    other, name = "vllm", title
    if change:
        other, name = PLAIN, f"change-{'-'.join(change)}".replace("=", "-")
    elif against is not None:
        other, name = BEFORE, f"before-after-{commit(against)[:9]}"
    sides = ("manta", other)

    wanted = {label: names or TABLE.get(label, ALL) for label in models}

    def finished(piece: Piece, lines: list[Line]) -> bool:
        return {line.get("workload") for line in lines} >= set(wanted.get(piece[0], ()))

    def run_piece(piece: Piece) -> Iterator[Line]:
        label, _, side = piece
        return run_side(side, models[label], wanted[label], change, against)

    harness = Harness(out, name, ("model", "run", "side"), finished, resume)
    harness.run(product(models, range(runs), sides), run_piece)
    raw = harness.raw
    # the lines include the models of earlier calls
    labels = dict.fromkeys(line["model"] for line in raw.all)
    rows = [row for label in labels for row in _rows(label, raw.all, other)]
    configs = {
        side: next(li["config"] for li in raw.all if li["side"] == side and "config" in li)
        for side in sides
    }
    raw.finish({"ours": configs["manta"], "peers": {other: configs[other]}}, rows)
    print_ratios(rows)


def _rows(label: str, lines: list[dict[str, Any]], other: str) -> list[dict[str, Any]]:
    """Return the rows of one model: each workload that both sides ran, and the time until ready."""
    mine = [line for line in lines if line["model"] == label]
    did = [
        dict.fromkeys(
            timed_line["workload"]
            for timed_line in mine
            if timed_line["side"] == side and "workload" in timed_line
        )
        for side in ("manta", other)
    ]
    names = [name for name in did[0] if name in did[1]]
    metrics = [
        (name, offline.unit(name), best(mine, "manta", name), best(mine, other, name))
        for name in names
    ]
    ready = (
        min(line["ready_s"] for line in mine if line["side"] == side and "ready_s" in line)
        for side in ("manta", other)
    )
    return [
        ratio_row(f"{label}/{name}", ours, peer, unit)
        for name, unit, ours, peer in [*metrics, ("ready", "s", *ready)]
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", nargs="+", required=True, help="folders with config.json")
    parser.add_argument(
        "--name", nargs="+", default=["model"], help="a label of the cases for each"
    )
    parser.add_argument("--workloads", nargs="*", help="default: those of the docs' table")
    parser.add_argument("--runs", type=int, default=3, help="alternating runs of each side")
    parser.add_argument("--out", type=Path, default=Path("bench/results"))
    parser.add_argument("--title", default="versus-engine", help="of the result file, against vLLM")
    parser.add_argument("--resume", action="store_true", help="go on with the day's lines in --out")
    parser.add_argument(
        "--change", nargs="+", default=[], metavar="KEY=VALUE", help="compare Manta with itself"
    )
    parser.add_argument("--against", type=Path, metavar="FOLDER", help="another checkout of Manta")
    parser.add_argument("--side", choices=["manta", PLAIN, "vllm"], help="run one side only, here")
    parser.add_argument(
        "--load-format",
        choices=["dummy", "auto"],
        default="dummy",
        help="with --side: auto reads the folder's weights",
    )
    args = parser.parse_args()
    names = ALL if args.workloads is None else args.workloads
    if args.side in ("manta", PLAIN):
        change = engine_fields(args.change)
        run_manta(args.model[0], names, change, args.side, args.load_format)
    elif args.side == "vllm":
        run_vllm(args.model[0], names, engine_fields(args.change), args.load_format)
    elif args.change and args.against is not None:
        parser.error("--change and --against: one of them")
    elif len(args.name) != len(args.model):
        parser.error(f"--name: {len(args.name)} labels for {len(args.model)} models")
    else:
        models = dict(zip(args.name, args.model, strict=True))
        compare(
            models,
            args.workloads or [],
            args.runs,
            args.out,
            args.change,
            args.resume,
            args.against,
            args.title,
        )


if __name__ == "__main__":
    main()
