"""Ray Data's stages against the engine offline, and batch work during interactive requests.

    python -m bench.ray_batches --rows 10000 --out bench/results
    python -m bench.ray_batches --cases engine-stage --rows 400 --set device=cpu num_threads=2

Rows have prompts and answers of mixed lengths. `offline` has all rows in one `LLM` at once.
`engine-stage` runs an engine in a Ray Data actor, `serve-stage` asks a replica behind a router.
Rates are output tokens/s between the ends of the first and the last tenth of the rows, so that
starts and ends do not count; `whole_s` has all of it. `ours` is the stage, `peer` offline.

`beside` sends interactive requests one after the other to the same application, in turns for
--seconds without and --seconds with a dataset in work. It reports the 99th percentile of the time
to first token. `idle` has the output tokens/s of all requests with both, against the tokens/s of
the dataset alone.
"""

import argparse
import asyncio
import contextlib
import json
import os
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import ray
from ray import serve
from ray.data.llm import ServeDeploymentProcessorConfig, build_processor

from bench.report.result_file import Line, print_ratios, ratio_row, write
from bench.versus.engine import engine_fields
from deployments.app import assemble, cluster_environment
from deployments.checkpoints.resolve import resolve_model
from deployments.client import AsyncClient
from deployments.config.load import MantaConfig, parse_config
from deployments.ray_data import MantaEngineProcessorConfig
from engine import LLM, SamplingParams
from engine.library.handle import RequestHandle
from loadtest.measure.figures import sample_at
from tests.deployments.on_ray.serve_cluster import ray_and_serve

CASES = ("offline", "engine-stage", "serve-stage", "beside")
LOOP = {"RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP": "1"}
Row = dict[str, Any]


def rows_of(count: int, vocab: int, most: int) -> list[Row]:
    """Return rows of mixed lengths: most are short and few are long.

    most: tokens of the longest prompt; the longest answer has a quarter of that.
    """
    draw = random.Random(0)
    rows = []
    for number in range(count):
        prompt = max(4, min(most, int(draw.lognormvariate(0, 0.8) * most / 8)))
        output = max(2, min(most // 4, int(draw.lognormvariate(0, 0.6) * most / 16)))
        ids = [draw.randrange(3, vocab) for _ in range(prompt)]
        rows.append({"id": number, "ids": ids, "output": output})
    return rows


def rate(ends: Sequence[tuple[float, int]]) -> float:
    """Return tokens/s between the end of the first tenth of the rows and the end of the ninth.

    ends: time of each row's end, and its tokens.
    """
    ordered = sorted(ends)
    first, last = len(ordered) // 10, len(ordered) * 9 // 10
    seconds = ordered[last][0] - ordered[first][0]
    return sum(tokens for _, tokens in ordered[first + 1 : last + 1]) / max(seconds, 1e-9)


async def _end(handle: RequestHandle, tokens: int) -> tuple[float, int]:
    await handle
    return time.time(), tokens


async def _ends(llm: LLM, rows: list[Row]) -> list[tuple[float, int]]:
    handles = [llm.start_request(row["ids"], _params(row), detokenize=True) for row in rows]
    ends = (_end(handle, row["output"]) for handle, row in zip(handles, rows, strict=True))
    return await asyncio.gather(*ends)


def offline(folder: str, fields: Row, rows: list[Row]) -> Line:
    """Return the result line of one engine that has all rows at once.

    Its handles are awaited, since polling would take a core."""
    with LLM(folder, **fields) as llm:
        began = time.time()
        ends = asyncio.run(_ends(llm, rows))
        whole = time.time() - began
    return {"tok_s": rate(ends), "whole_s": whole, "rows": len(rows)}


def _params(row: Row) -> SamplingParams:
    return SamplingParams(max_tokens=row["output"], temperature=0.0, ignore_eos=True)


def _processed(processor: Any, rows: list[Row]) -> Line:
    began = time.time()
    answered = processor(ray.data.from_items(rows)).take_all()
    whole = time.time() - began
    failed = [row for row in answered if row.get("__inference_error__")]
    assert len(answered) == len(rows) and not failed, failed[:1]
    ends = [(row["ended_s"], row["tokens"]) for row in answered]
    return {"tok_s": rate(ends), "whole_s": whole, "rows": len(rows)}


def engine_stage(folder: str, fields: Row, rows: list[Row], batch_size: int) -> Line:
    config = MantaEngineProcessorConfig(
        model_source=folder, engine_kwargs=fields, batch_size=batch_size, num_cpus=1
    )

    def before(row: Row) -> Row:
        params = {"max_tokens": row["output"], "temperature": 0.0, "ignore_eos": True}
        return {"prompt_token_ids": row["ids"], "sampling_params": params}

    def after(row: Row) -> Row:
        return {"ended_s": time.time(), "tokens": row["num_generated_tokens"]}

    return _processed(build_processor(config, preprocess=before, postprocess=after), rows)


def serve_processor(batch_size: int, concurrency: int) -> Any:
    config = ServeDeploymentProcessorConfig(
        deployment_name="router",
        app_name="manta",
        batch_size=batch_size,
        concurrency=concurrency,
        should_continue_on_error=True,
    )

    def before(row: Row) -> Row:
        body = {
            "prompt": row["ids"],
            "max_tokens": row["output"],
            "temperature": 0.0,
            "ignore_eos": True,
        }
        return {"method": "completions", "request_kwargs": body}

    def after(row: Row) -> Row:
        return {"ended_s": time.time(), "tokens": row["usage"]["completion_tokens"]}

    processor = build_processor(
        config,
        preprocess=before,
        postprocess=after,
        preprocess_map_kwargs={"num_cpus": 0},
        postprocess_map_kwargs={"num_cpus": 0},
    )
    processor.get_stage_by_name("ServeDeploymentStage").map_batches_kwargs["num_cpus"] = 0
    return processor


async def interactive(seconds: float, vocab: int) -> list[float]:
    """Return the seconds to the first token of requests, one after the other."""
    client = await AsyncClient.connect()
    draw, firsts, end = random.Random(1), [], time.monotonic() + seconds
    while time.monotonic() < end:
        ids = [draw.randrange(3, vocab) for _ in range(32)]
        began = time.perf_counter()
        first = 0.0
        async for _ in client.stream(
            ids, max_tokens=8, temperature=0.0, ignore_eos=True, return_token_ids=True
        ):
            first = first or time.perf_counter() - began
        firsts.append(first)
    return firsts


def _output_tokens(pool: str) -> int:
    handle = serve.get_deployment_handle(f"engine-{pool}", "manta")
    tokens: int = handle.stats.remote().result()["output_tokens"]
    return tokens


def beside(
    rows: list[Row],
    vocab: int,
    pool: str,
    seconds: float,
    turns: int,
    batch_size: int,
    concurrency: int,
) -> list[Line]:
    """Return a result line for each turn of each phase: tokens/s, and seconds to first tokens."""
    lines: list[Line] = []
    stop = threading.Event()

    def dataset() -> None:
        number = 0
        while not stop.is_set():
            # other prompts each time, so that none is in the prefix cache
            part = [{**row, "ids": [3 + (row["ids"][0] + number) % (vocab - 3), *row["ids"][1:]]}
                    for row in rows]  # fmt: skip
            serve_processor(batch_size, concurrency)(ray.data.from_items(part)).take_all()
            number += 1

    def phase(name: str, work: Callable[[], list[float]]) -> None:
        began, before = time.monotonic(), _output_tokens(pool)
        firsts = work()
        tokens = (_output_tokens(pool) - before) / (time.monotonic() - began)
        lines.append({"phase": name, "tok_s": tokens, "first_s": firsts})

    def wait() -> list[float]:
        time.sleep(seconds)
        return []

    asyncio.run(interactive(min(3.0, seconds), vocab))
    for _ in range(turns):
        phase("interactive", lambda: asyncio.run(interactive(seconds, vocab)))
        stop.clear()
        thread = threading.Thread(target=dataset)
        thread.start()
        before = _output_tokens(pool)
        while _output_tokens(pool) < before + 50:
            time.sleep(0.2)
        phase("dataset", wait)
        phase("both", lambda: asyncio.run(interactive(seconds, vocab)))
        stop.set()
        thread.join()
    return lines


def table(lines: list[Line]) -> list[Line]:
    """Return the rows of all lines."""
    of = {line["case"]: line for line in lines}
    rows = [
        ratio_row(case, round(of[case]["tok_s"], 1), round(of["offline"]["tok_s"], 1), "tok/s")
        | {"whole_s": round(of[case]["whole_s"], 1), "rows": of[case]["rows"]}
        for case in ("engine-stage", "serve-stage")
        if case in of and "offline" in of
    ]
    phases = [line for line in lines if line["case"] == "beside"]
    if phases:
        firsts: dict[str, list[float]] = {
            name: [value for line in phases if line["phase"] == name for value in line["first_s"]]
            for name in ("interactive", "both")
        }
        rates = {
            name: sum(line["tok_s"] for line in phases if line["phase"] == name)
            for name in ("dataset", "both")
        }
        p99 = {name: round(sample_at(values, 0.99), 4) for name, values in firsts.items()}
        count = {"requests": len(firsts["both"])}
        rows.append(ratio_row("beside/p99", p99["both"], p99["interactive"], "s") | count)
        rows.append(
            ratio_row("beside/idle", round(rates["both"], 1), round(rates["dataset"], 1), "tok/s")
        )
    return rows


@contextlib.contextmanager
def cluster(config: MantaConfig) -> Iterator[None]:
    """Start Ray and Serve, whose processes, unlike this one, get the application's variables."""
    before = dict(os.environ)
    os.environ.update({**cluster_environment(config, ""), **LOOP})
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(ray_and_serve(6))
        finally:
            os.environ.clear()
            os.environ.update(before)
        yield


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--cases", nargs="+", choices=CASES, default=CASES)
    parser.add_argument("--model", default=os.environ.get("MANTA_TEST_MODEL", "default"))
    parser.add_argument("--rows", type=int, default=10_000)
    parser.add_argument("--longest", type=int, default=256, help="tokens of the longest prompt")
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument(
        "--concurrency",
        type=int,
        help="actors of the Serve stage; by default so many that their rows are four times as many "
        "as an engine has at once, since an actor waits for the longest row of its batch",
    )
    parser.add_argument("--seconds", type=float, default=20.0, help="of a phase of `beside`")
    parser.add_argument("--turns", type=int, default=2, help="of `beside`")
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="of the engine")
    parser.add_argument("--out", type=Path, help="folder for the result files")
    args = parser.parse_args(arguments)
    fields: Row = {
        "max_model_len": 2 * args.longest,
        "max_num_seqs": 64,
        "prefix_caching": False,
        **engine_fields(args.set),
    }
    concurrency = args.concurrency or -(-4 * fields["max_num_seqs"] // args.batch_size)
    random_weights = fields.get("load_format") == "dummy"
    folder = str(resolve_model(args.model, weights=not random_weights))
    vocab = json.loads((Path(folder) / "config.json").read_text())["vocab_size"]
    pool = "cpu" if fields.get("device", "cpu") == "cpu" else "gpu"
    rows = rows_of(args.rows, vocab, args.longest)
    lines: list[Line] = []

    def keep(case: str, line: Line) -> None:
        lines.append({"case": case, **line})
        print(json.dumps({**lines[-1], "first_s": len(line.get("first_s", []))}), flush=True)

    if "offline" in args.cases:
        keep("offline", offline(folder, fields, rows))
    settings = {
        "model": folder,
        "engine": {key: value for key, value in fields.items() if key != "device"},
        "pools": {pool: {"replicas": 1, "num_cpus": 1}},
        "router": {"replicas": 1},
        "http": {"proxy": "serve"},
    }
    config = parse_config(settings, {})
    with cluster(config):
        if "engine-stage" in args.cases:
            keep("engine-stage", engine_stage(folder, fields, rows, args.batch_size))
        if {"serve-stage", "beside"} & set(args.cases):
            serve.run(assemble(config), name="manta", route_prefix="/")
            if "serve-stage" in args.cases:
                processor = serve_processor(args.batch_size, concurrency)
                keep("serve-stage", _processed(processor, rows))
            if "beside" in args.cases:
                few = rows[: 8 * args.batch_size]
                sizes = args.batch_size, concurrency
                for line in beside(few, vocab, pool, args.seconds, args.turns, *sizes):
                    keep("beside", line)
            serve.delete("manta")
    table_rows = table(lines)
    print_ratios(table_rows)
    if args.out:
        config_of = {
            "model": args.model,
            "ours": fields,
            "peers": {"offline": "LLM", "alone": "beside"},
            "batch_size": args.batch_size,
            "concurrency": concurrency,
        }
        write(args.out, "ray-batches", config_of, table_rows, lines)


if __name__ == "__main__":
    main()
