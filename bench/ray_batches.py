"""Ray Data's stages against the engine offline, and batch work beside interactive requests.

    python -m bench.ray_batches --rows 10000 --out bench/results
    python -m bench.ray_batches --cases engine-stage --rows 400 --set device=cpu num_threads=2

Rows have prompts and answers of mixed lengths. `offline` submits all rows to one `LLM` at once.
`engine-stage` runs an engine in a Ray Data actor; `serve-stage` sends requests to a replica behind
a router. Rates are output tokens/s without the first and the last tenth of the rows, so that starts
and ends do not count; `whole_s` is the time of the whole run. `ours` is the stage, `peer` offline.

`beside` sends interactive requests to the same application, in turns for --seconds without and
--seconds with a dataset in work, at each of --loads. A load is a share of the requests/s that the
application answers with all slots in use, and arrivals are Poisson; load 0 has one request after
the other. With --row-routers the dataset has routers of its own (`router.batch_replicas`). `p99` is
of the time to first token. `idle` has the dataset's output tokens/s beside the
requests, against the idle share (1 - load) of those that it has alone; with load 0 it has the
tokens/s of both against the dataset alone.
"""

import argparse
import asyncio
import contextlib
import json
import multiprocessing
import os
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.synchronize import Event
from pathlib import Path
from statistics import fmean
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
from deployments.environment import send_auth_token
from deployments.ray_data import MantaEngineProcessorConfig
from deployments.scaling.policy import BATCH_ROUTER, ROUTER
from engine import LLM, SamplingParams
from engine.errors import Overloaded
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
    """Return the result line of one engine that gets all rows at once.

    The bench awaits the requests' handles, since polling would take a core."""
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


def serve_processor(batch_size: int, concurrency: int, deployment: str) -> Any:
    """Return a processor of the Serve stage. deployment: name of the routers' deployment."""
    config = ServeDeploymentProcessorConfig(
        deployment_name=deployment,
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


@dataclass(frozen=True)
class Interactive:
    """Interactive requests: tokens of a prompt and of an answer, and the model's vocabulary."""

    prompt: int
    output: int
    vocab: int

    async def _first(self, client: AsyncClient, draw: random.Random) -> float:
        """Send a request, again after a refusal; return the seconds to its first token."""
        ids = [draw.randrange(3, self.vocab) for _ in range(self.prompt)]
        fields = {"max_tokens": self.output, "temperature": 0.0, "ignore_eos": True}
        began, first = time.perf_counter(), 0.0
        while not first:
            try:
                async for _ in client.stream(ids, return_token_ids=True, **fields):
                    first = first or time.perf_counter() - began
            except Overloaded as refusal:
                await asyncio.sleep(refusal.retry_after or 1.0)
        return first

    async def in_turn(self, seconds: float, streams: int = 1) -> list[float]:
        """Return the seconds to first tokens of `streams` users who each send one after the
        other."""
        client, draw = await AsyncClient.connect(), random.Random(1)
        firsts, end = [], time.monotonic() + seconds

        async def user() -> None:
            while time.monotonic() < end:
                firsts.append(await self._first(client, draw))

        await asyncio.gather(*(user() for _ in range(streams)))
        return firsts

    async def arriving(self, seconds: float, rate: float) -> list[float]:
        """Return the seconds to first tokens of Poisson arrivals, `rate` a second."""
        client, draw = await AsyncClient.connect(), random.Random(1)
        requests, end = [], time.monotonic() + seconds
        at = time.monotonic() + draw.expovariate(rate)
        while at < end:
            await asyncio.sleep(max(0.0, at - time.monotonic()))
            requests.append(asyncio.create_task(self._first(client, draw)))
            at += draw.expovariate(rate)
        return await asyncio.gather(*requests)


def _output_tokens(pool: str) -> int:
    handle = serve.get_deployment_handle(f"engine-{pool}", "manta")
    tokens: int = handle.stats.remote().result()["output_tokens"]
    return tokens


@contextlib.contextmanager
def variables(config: MantaConfig) -> Iterator[None]:
    """Set the application's environment variables, for processes that start meanwhile."""
    before = dict(os.environ)
    os.environ.update({**cluster_environment(config, ""), **LOOP})
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


@contextlib.contextmanager
def cluster(config: MantaConfig) -> Iterator[None]:
    """Start Ray and Serve, whose processes, unlike this one, have the application's variables."""
    with contextlib.ExitStack() as stack:
        with variables(config):
            stack.enter_context(ray_and_serve(10))
        yield


def _dataset(
    address: str, rows: list[Row], vocab: int, stage: tuple[int, int, str], stop: Event
) -> None:
    """Process the rows again and again until `stop` is set, in a process of its own."""
    ray.init(address=address, namespace="serve", log_to_driver=False)
    number = 0
    while not stop.is_set():
        # other prompts each time, so that none is in the prefix cache
        part = [{**row, "ids": [3 + (row["ids"][0] + number) % (vocab - 3), *row["ids"][1:]]}
                for row in rows]  # fmt: skip
        for _ in serve_processor(*stage)(ray.data.from_items(part)).iter_rows():
            if stop.is_set():
                break
        number += 1


def beside(
    rows: list[Row],
    requests: Interactive,
    config: MantaConfig,
    loads: Sequence[float],
    slots: int,
    seconds: float,
    turns: int,
    stage: tuple[int, int, str],
) -> list[Line]:
    """Return a result line for each turn of each phase: tokens/s, and seconds to first tokens.

    slots: requests that the engine runs at once.
    stage: batch size and actors of the Serve stage, and its deployment of routers.
    """
    (pool,) = config.pools
    lines: list[Line] = []
    context = multiprocessing.get_context("spawn")  # a job of its own, as a user's dataset is

    def phase(name: str, work: Callable[[], list[float]], load: float) -> None:
        began, before = time.monotonic(), _output_tokens(pool)
        firsts = work()
        whole = time.monotonic() - began
        tokens = (_output_tokens(pool) - before) / whole
        lines.append({"phase": name, "load": load, "tok_s": tokens, "first_s": firsts})
        if name == "both":
            lines[-1]["dataset_tok_s"] = tokens - requests.output * len(firsts) / whole

    def send(load: float) -> list[float]:
        if not load:
            return asyncio.run(requests.in_turn(seconds))
        return asyncio.run(requests.arriving(seconds, load * full))

    def wait() -> list[float]:
        time.sleep(seconds)
        return []

    asyncio.run(requests.in_turn(min(3.0, seconds), slots))
    began = time.monotonic()
    full = len(asyncio.run(requests.in_turn(seconds, slots))) / (time.monotonic() - began)
    for _ in range(turns):
        for load in loads:
            phase("interactive", partial(send, load), load)
        stop = context.Event()
        address = ray.get_runtime_context().gcs_address
        job = context.Process(target=_dataset, args=(address, rows, requests.vocab, stage, stop))
        with variables(config):
            send_auth_token()
            job.start()
        before = _output_tokens(pool)
        while _output_tokens(pool) < before + 50:
            assert job.is_alive(), "the dataset's process has failed"
            time.sleep(0.2)
        phase("dataset", wait, 0.0)
        for load in loads:
            phase("both", partial(send, load), load)
        stop.set()
        job.join()
    return lines


def beside_rows(lines: list[Line]) -> list[Line]:
    """Return the rows of `beside`, two for each load."""
    rows = []
    alone = fmean(line["tok_s"] for line in lines if line["phase"] == "dataset")
    for load in sorted({line["load"] for line in lines}):
        of = {
            name: [line for line in lines if (line["phase"], line["load"]) == (name, load)]
            for name in ("interactive", "both")
        }
        p99 = {
            name: round(sample_at([value for line in some for value in line["first_s"]], 0.99), 4)
            for name, some in of.items()
        }
        case = f"beside/{load:.0%}" if load else "beside/one"
        count = {"requests": sum(len(line["first_s"]) for line in of["both"])}
        rows.append(ratio_row(f"{case}/p99", p99["both"], p99["interactive"], "s") | count)
        used = fmean(line["dataset_tok_s" if load else "tok_s"] for line in of["both"])
        idle = (1 - load) * alone
        rows.append(ratio_row(f"{case}/idle", round(used, 1), round(idle, 1), "tok/s"))
    return rows


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
        rows += beside_rows(phases)
    return rows


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
    parser.add_argument("--routers", type=int, default=1)
    parser.add_argument(
        "--row-routers", type=int, default=0, help="routers for the dataset alone; 0: none"
    )
    parser.add_argument("--seconds", type=float, default=20.0, help="of a phase of `beside`")
    parser.add_argument("--turns", type=int, default=2, help="of `beside`")
    parser.add_argument(
        "--loads", type=float, nargs="+", default=[0.0, 0.3, 0.6], help="of `beside`"
    )
    parser.add_argument(
        "--request",
        type=int,
        nargs=2,
        default=[32, 8],
        metavar=("PROMPT", "OUTPUT"),
        help="tokens of an interactive request",
    )
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
    deployment = BATCH_ROUTER if args.row_routers else ROUTER
    stage = args.batch_size, concurrency, deployment
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
        "router": {"replicas": args.routers, "batch_replicas": args.row_routers},
        "http": {"proxy": "serve"},
    }
    config = parse_config(settings, {})
    with cluster(config):
        if "engine-stage" in args.cases:
            keep("engine-stage", engine_stage(folder, fields, rows, args.batch_size))
        if {"serve-stage", "beside"} & set(args.cases):
            serve.run(assemble(config), name="manta", route_prefix="/")
            if "serve-stage" in args.cases:
                processor = serve_processor(*stage)
                keep("serve-stage", _processed(processor, rows))
            if "beside" in args.cases:
                requests = Interactive(*args.request, vocab)
                slots, turns = fields["max_num_seqs"], (args.seconds, args.turns)
                for line in beside(rows, requests, config, args.loads, slots, *turns, stage):
                    keep("beside", line)
            serve.delete("manta")
    table_rows = table(lines)
    print_ratios(table_rows)
    if args.out:
        config_of = {
            "model": Path(args.model).name,
            "ours": fields,
            "peers": {"offline": "LLM", "alone": "beside"},
            "batch_size": args.batch_size,
            "concurrency": concurrency,
            "request": args.request,
            "routers": args.routers,
            "row_routers": args.row_routers,
        }
        write(args.out, "ray-batches", config_of, table_rows, lines)


if __name__ == "__main__":
    main()
