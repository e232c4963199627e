"""Manta's HTTP endpoint behind Ray Serve against vLLM's own server and Ray Serve LLM, on one GPU.

    python -m bench.versus.http --model FOLDER --name llama-8b --out bench/results

Servers run one after the other, alone on the device, under the same streaming load: the `dialogue`
workload at 1, 64, 256 and 1,024 streams. FOLDER needs config.json and any tokenizer; weights are
random. Prefix caches are off, sampling is greedy, end tokens are ignored. First Manta's engine runs
the same requests offline with the server's settings and as many concurrent requests: an upper bound
for the endpoint.

`manta loadtest`'s client sends the load, as a closed loop in eight processes. `itl_ms` are gaps
between chunks, not divided by the chunks' tokens. If any request of a load fails or gets too few
tokens, the comparison ends. `client` in a line says why the client may have been the bottleneck.
Ray Serve LLM has the settings of `bench.versus.ray_llm`. --ray-llm-path is prepended to PYTHONPATH
for it only, if its Ray is not that of the other sides. Ray 2.60 imports
`vllm.entrypoints.launchers.cli_args`, which vLLM 0.33 has renamed: this pair needs a module of that
name with `from vllm.entrypoints.common.cli_args import *`.

Each line is saved immediately. The whole run takes up to 16 minutes. If the run is interrupted, a
server keeps running. For environments that limit a command's duration: with --seconds no side is
started that is not expected to end in this time, and --resume continues from the day's lines in
--out with the incomplete sides. The exit code is 3 while sides are missing. Nothing is started
while another program uses the port or the device's memory, since its answers would count for the
wrong side.
"""

import argparse
import asyncio
import json
import math
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Generator, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any
from urllib.parse import urlsplit

from bench.report.result_file import Line, print_ratios, ratio_row, versions_under
from bench.versus import ray_llm
from bench.versus.engine import MAX_MODEL_LEN, MAX_NUM_SEQS, MEMORY_FRACTION
from bench.versus.harness import Harness, Piece, lines_of
from deployments.cli.serving.processes import table
from loadtest.runner import RunOptions, RunResult, Task, run_async
from loadtest.scenario import workloads

if TYPE_CHECKING:
    from engine import LLM

STREAMS = {1: 6, 64: 256, 256: 1024, 1024: 1024}  # streams at once -> requests
WARM = 64  # warm-up requests of another workload, all at once
PACKAGES = {"manta": ("transformers",), "vllm": ("vllm",), "ray-serve-llm": ("vllm",)}
PEERS = ("vllm", "ray-serve-llm")
READY_S, STOP_S, LOAD_S = 240, 60, 420
# Side -> expected seconds for llama-8b on an H200, with a margin.
EXPECTED = {"offline": 110, "manta": 140, "vllm": 190, "ray-serve-llm": 560}
# Queue limit of Manta's routers, so high that they refuse no requests, like the peers.
QUEUE_SECONDS = 120
PORT = 8000
URL = f"http://127.0.0.1:{PORT}"

MANTA = """\
model: {model}
served_name: m
engine:
  load_format: dummy
  dtype: bfloat16
  max_model_len: {max_model_len}
  max_num_seqs: {max_num_seqs}
  memory_fraction: {memory_fraction}
  prefix_caching: false
limits:
  queue_seconds: {queue_seconds}
replicas: 1
router:
  replicas: 4
http:
  port: {port}
"""


def clients_of(streams: int) -> int:
    """Return the number of client processes, among which requests and streams are divided."""
    return 1 if streams == 1 else 8


def run_offline(model: str) -> None:
    """Run Manta's engine in this process with each number of streams; print JSON lines."""
    from engine import LLM

    # Use one engine with the server's settings for all numbers of streams. With smaller
    # max_num_seqs it would have fewer CUDA graphs and differ from the endpoint's engine.
    with LLM(
        model,
        load_format="dummy",
        dtype="bfloat16",
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=MAX_NUM_SEQS,
        memory_fraction=MEMORY_FRACTION,
        prefix_caching=False,
    ) as llm:
        generate(llm, workloads.build("uniform")[:64], 64)  # warm-up, as for the servers
        for streams, count in STREAMS.items():
            requests = workloads.build("dialogue")[:count]
            start = time.perf_counter()
            counts = generate(llm, requests, streams)
            seconds = time.perf_counter() - start
            if counts != [wanted for _, wanted in requests]:
                raise SystemExit(f"offline: not the tokens that were asked for, {streams} streams")
            rate = round(sum(counts) / seconds, 1)
            line = {"label": "offline", "concurrency": streams, "requests": count}
            print(json.dumps({**line, "out_tok_s": rate}), flush=True)


def generate(llm: "LLM", requests: list[workloads.Request], streams: int) -> list[int]:
    """Run all requests with `streams` in flight; return the number of output tokens of each.

    Requests and streams are divided as among the load tester's processes.
    """
    from engine import SamplingParams

    def run(some: list[workloads.Request]) -> list[int]:
        params = [
            SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=num_out)
            for _, num_out in some
        ]
        prompts = [ids for ids, _ in some]
        # Show no progress bar, as there are many threads.
        outputs = llm.generate(prompts, params, detokenize=False, progress=False)
        return [len(output.outputs[0].token_ids) for output in outputs]

    if streams >= len(requests):
        return run(requests)  # no request waits for a stream, so no threads are needed
    clients = clients_of(streams)
    counts = [0] * len(requests)

    def run_one(number: int) -> None:
        (counts[number],) = run([requests[number]])

    # Use threads instead of asyncio: a thread wakes only at the end of its request, a coroutine
    # with every token, which would lower the offline result.
    with ExitStack() as pools:
        futures = []
        for client in range(clients):
            pool = pools.enter_context(ThreadPoolExecutor(max(1, streams // clients)))
            futures += [pool.submit(run_one, i) for i in range(client, len(requests), clients)]
        for future in futures:
            future.result()
    return counts


def command_of(
    side: str,
    model: str,
    folder: Path,
    config_text: str = MANTA,
    changes: Mapping[str, Any] | None = None,
) -> list[str]:
    """Return the command that starts a side's server.

    config_text: Manta's configuration as a format string.
    changes: values that replace, or are added to, the comparison's values for it.
    """
    values = {
        "model": model,
        "max_model_len": MAX_MODEL_LEN,
        "max_num_seqs": MAX_NUM_SEQS,
        "memory_fraction": MEMORY_FRACTION,
        "queue_seconds": QUEUE_SECONDS,
        "port": PORT,
        **(changes or {}),
    }
    if side == "manta":
        config = folder / "manta.yaml"
        config.write_text(config_text.format(**values))
        return [sys.executable, "-m", "deployments.cli.main", "serve", str(config)]
    if side == "ray-serve-llm":
        engine = {
            "load_format": "dummy",
            "dtype": "bfloat16",
            "max_model_len": values["max_model_len"],
            "max_num_seqs": values["max_num_seqs"],
            "gpu_memory_utilization": values["memory_fraction"],
            "enable_prefix_caching": False,
            "disable_log_stats": True,
        }
        llm_config = {
            "model_loading_config": {"model_id": "m", "model_source": model},
            "deployment_config": {"num_replicas": 1},
            "engine_kwargs": engine,
            "log_engine_metrics": False,
        }
        devices = {"num_cpus": os.cpu_count(), "num_gpus": 1}
        return ray_llm.command_of(sys.executable, llm_config, values["port"], devices)
    options = {
        "--load-format": "dummy",
        "--dtype": "bfloat16",
        "--max-model-len": MAX_MODEL_LEN,
        "--max-num-seqs": MAX_NUM_SEQS,
        "--gpu-memory-utilization": MEMORY_FRACTION,
        "--served-model-name": "m",
        "--port": PORT,
    }
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", model]
    command += [str(word) for option in options.items() for word in option]
    flags = ["--no-enable-prefix-caching", "--disable-log-stats", "--disable-uvicorn-access-log"]
    return command + flags


def environment_of(side: str, first_path: str) -> dict[str, str]:
    """Return the environment of a side's server. Variables of this process replace the defaults."""
    environment = {
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
        **(ray_llm.SETTINGS if side == "ray-serve-llm" else {}),
        **os.environ,
    }
    if side == "ray-serve-llm" and first_path:
        environment["PYTHONPATH"] = f"{first_path}:{environment.get('PYTHONPATH', '')}"
    return environment


@contextmanager
def server(
    side: str,
    model: str,
    first_path: str,
    config_text: str = MANTA,
    changes: Mapping[str, Any] | None = None,
) -> Iterator[float]:
    """Run a server within the context; yield the seconds until it answered.

    The server and its child processes are ended afterwards.

    config_text, changes: see `command_of`.
    Raises SystemExit if the server does not start, or another server is running.
    """
    with tempfile.TemporaryDirectory() as folder:
        command = command_of(side, model, Path(folder), config_text, changes)
        path = "/ready" if side == "manta" else "/v1/models"
        with serving(side, command, environment_of(side, first_path), URL + path) as seconds:
            yield seconds


@contextmanager
def serving(
    side: str,
    command: list[str],
    environment: Mapping[str, str],
    ready_url: str,
    folder: str | None = None,
) -> Iterator[float]:
    """Run a server's command within the context; yield the seconds until it answered.

    The command's session, its child processes included, is ended afterwards.

    ready_url: answered by a server that is ready. folder: the server's working directory; None:
    that of this process.
    Raises SystemExit if the server does not start, or another program has its port.
    """
    port = urlsplit(ready_url).port or PORT
    refuse_if_held(side, port)
    with tempfile.TemporaryFile("w+") as log:
        start = time.monotonic()
        process = subprocess.Popen(
            command,
            env=environment,
            cwd=folder,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            _wait_until_ready(process, side, ready_url, log)
            yield round(time.monotonic() - start, 1)
        finally:
            _stop(process)
    _wait_until_closed(side, port)


def _wait_until_ready(process: subprocess.Popen[bytes], side: str, url: str, log: IO[str]) -> None:
    limit = time.monotonic() + READY_S
    while time.monotonic() < limit and process.poll() is None:
        try:
            urllib.request.urlopen(url, timeout=2).read()
            return
        except (urllib.error.URLError, OSError):
            time.sleep(0.25)
    log.seek(0)
    raise SystemExit(f"{side} did not start:\n{log.read()[-4000:]}")


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Send SIGINT to the process and its group, then SIGKILL to what remains of its session.

    Ray's workers have process groups of their own. HAProxy outlives the worker that started it.
    """
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGINT)
    with suppress(subprocess.TimeoutExpired):
        process.wait(STOP_S)
    limit = time.monotonic() + STOP_S
    while (pids := processes_of(process.pid)) and time.monotonic() < limit:
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.poll()
        time.sleep(0.1)


def processes_of(session: int) -> list[int]:
    """Return the ids of a session's processes, except those that have ended."""
    return [process.pid for process in table().values() if process.session == session]


def held(port: int) -> str:
    """Return a text that names what a leftover server occupies: a port, or much device memory.

    Returns "" if neither is occupied. Memory is checked because a server takes it before it
    answers.
    """
    try:
        socket.create_connection(("127.0.0.1", port), timeout=1).close()
        return f"port {port}"
    except TimeoutError:
        return f"port {port}"
    except OSError:  # no process listens on the port
        pass
    import torch

    if not torch.cuda.is_available():
        return ""
    free, total = torch.cuda.mem_get_info()
    return "" if free > 0.9 * total else "the device's memory"


def refuse_if_held(side: str, port: int) -> None:
    """Raise SystemExit if a server of an earlier call still runs.

    It would answer instead of this side's server.
    """
    if what := held(port):
        raise SystemExit(f"{side} is not started: another program has {what}; end it first")


def _wait_until_closed(side: str, port: int) -> None:
    """Wait until the port and the device's memory are free for the next server."""
    limit = time.monotonic() + STOP_S
    while what := held(port):
        if time.monotonic() > limit:
            raise SystemExit(f"{side} still has {what} {STOP_S} s after its end")
        time.sleep(0.5)


def load(
    url: str,
    label: str,
    work: str | Mapping[str, Any],
    *,
    arrivals: Mapping[str, Any],
    count: int,
    clients: int,
    copies: int = 1,
    seed: int = 0,
) -> Line:
    """Send the first `count` requests of a workload; return the load tester's result line.

    work: the name of a workload, with greedy sampling, or a scenario's `work`.
    arrivals: a scenario's `arrivals`, such as `closed(8)`.
    copies: how often each request is sent, each time with a different prompt.
    seed: the scenario's seed, by which the prompts of `work` are drawn.

    The line's `ok` is the number of requests that got all their tokens. Raises SystemExit if the
    load takes too long.
    """
    if isinstance(work, str):
        work = {"name": work, "copies": copies, "sampling": {"temperature": 0}}
    workload = work["name"]
    scenario = {
        "seed": seed,
        "target": {"url": url, "model": "m", "timeout": LOAD_S, "chunk_timeout": LOAD_S},
        "work": work,
        "phases": [{"name": "load", "arrivals": arrivals, "requests": count * copies}],
    }
    task, options = Task(json.dumps(scenario), label), RunOptions(procs=clients)

    async def limited() -> RunResult:
        async with asyncio.timeout(LOAD_S):
            return await run_async(task, options)

    try:
        result = asyncio.run(limited())
    except TimeoutError:
        raise SystemExit(f"{label}, {workload}: not over after {LOAD_S} s") from None
    summary, records = result.summary, result.records
    whole = [r for r in records if r.ok and r.output_tokens == r.output_tokens_expected]
    error = next((r.error_message for r in records if r.failed), None)
    return {
        "label": label,
        "workload": workload,
        "concurrency": arrivals.get("concurrency"),
        "ok": len(whole),
        "failed": summary.failed,
        "out_tok_s": round(summary.output_tokens_per_s, 1),
        "req_s": round(summary.served_per_s, 2),
        "ttft_ms_p50": round(1000 * summary.ttft.p50, 1),
        "ttft_ms_p99": round(1000 * summary.ttft.p99, 1),
        "itl_ms_p50": round(1000 * summary.itl_chunk.p50, 1),
        "itl_ms_p99": round(1000 * summary.itl_chunk.p99, 1),
        "chunks": sum(len(record.chunks) for record in records),
        "error": error,
        "client": summary.reasons,
    }


def closed(streams: int) -> dict[str, Any]:
    """Return a scenario's `arrivals` for a closed loop with `streams` requests in flight."""
    return {"kind": "closed", "concurrency": streams}


def whole_load(url: str, side: str, streams: int, count: int, workload: str) -> Line:
    """Run a load and return its line. Raises SystemExit unless all requests got all their tokens.

    A server that refuses requests has less work, so its results would not be comparable.
    """
    clients = clients_of(streams)
    line = load(url, side, workload, arrivals=closed(streams), count=count, clients=clients)
    if line["failed"] or line["ok"] != count:
        raise SystemExit(
            f"{side}, {workload} at {streams} streams: of {count} requests {line['ok']} got all "
            f"their tokens and {line['failed']} failed: {line['error']}"
        )
    return line


def run_side(args: argparse.Namespace, side: str) -> Generator[Line, None, None]:
    """Benchmark one side and yield its result lines as they arrive.

    side: "offline" (Manta's engine without HTTP), "manta" or a peer's server.
    """
    if side == "offline":
        refuse_if_held(side, PORT)
        command = [sys.executable, "-m", "bench.versus.http", "--offline", "--model", args.model]
        yield from lines_of(command)
        _wait_until_closed(side, PORT)
        return
    environment = environment_of(side, args.ray_llm_path)
    ran_on = versions_under(environment, "ray", *PACKAGES[side])
    started = {"versions": ran_on}
    if side == "ray-serve-llm":
        started["environment"] = {name: environment[name] for name in ray_llm.SETTINGS}
    with server(side, args.model, args.ray_llm_path) as ready:
        yield {"label": side, "ready_s": ready, **started}
        whole_load(URL, side, WARM, WARM, "uniform")
        for streams, count in STREAMS.items():
            yield whole_load(URL, side, streams, count, "dialogue")


def compare(args: argparse.Namespace) -> int:
    """Run the missing sides, and write the table once all have run; return the exit code."""
    harness = Harness(args.out, "versus-http", ("label",), finished, args.resume)
    unstarted, _ = harness.run(
        [(side,) for side in ("offline", "manta", *args.peers)],
        lambda piece: run_side(args, piece[0]),
        lambda piece: EXPECTED[piece[0]],
        args.seconds,
    )
    if unstarted:
        return 3

    raw = harness.raw
    rows = rows_of(args.name, raw.all, args.peers)
    starts = {line["label"]: line for line in raw.all if "ready_s" in line}

    def config_of(side: str) -> dict[str, Any]:
        recorded = {name: starts[side].get(name) for name in ("versions", "environment")}
        return {
            "prefix_caching": False,
            "replicas": 1,
            **{name: value for name, value in recorded.items() if value is not None},
        }

    config: dict[str, Any] = {
        "ours": {**config_of("manta"), "routers": 4, "queue_seconds": QUEUE_SECONDS},
        "peers": {side: config_of(side) for side in args.peers},
        "max_model_len": MAX_MODEL_LEN,
        "max_num_seqs": MAX_NUM_SEQS,
        "memory_fraction": MEMORY_FRACTION,
        "load": "dialogue, by manta loadtest: 8 client processes (1 at one stream)",
    }
    raw.finish(config, rows)
    print_ratios(rows)
    return 0


def finished(piece: Piece, lines: list[Line]) -> bool:
    """Whether a side has a line for every load."""
    return {line.get("concurrency") for line in lines} >= STREAMS.keys()


def rows_of(label: str, lines: list[dict[str, Any]], peers: list[str]) -> list[dict[str, Any]]:
    """Compute rows <label>/<streams>/<peer>: tokens/s, time to first token and p99 ITL in ms."""

    def find(side: str, streams: int) -> dict[str, Any]:
        return next(x for x in lines if x["label"] == side and x.get("concurrency") == streams)

    rows = []

    def add_row(case: str, ours: float, peer: float, unit: str) -> None:
        rows.append(ratio_row(case, ours, peer, unit))

    for streams in STREAMS:
        ours = find("manta", streams)
        case = f"{label}/{streams}"
        add_row(f"{case}/engine", ours["out_tok_s"], find("offline", streams)["out_tok_s"], "tok/s")
        for peer in peers:
            theirs = find(peer, streams)
            add_row(f"{case}/{peer}", ours["out_tok_s"], theirs["out_tok_s"], "tok/s")
            for name in ("ttft_ms_p50", "itl_ms_p99"):
                add_row(f"{case}/{peer}/{name}", ours[name], theirs[name], "ms")
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", required=True, help="folder with config.json and a tokenizer")
    parser.add_argument("--name", default="model", help="label of the cases")
    parser.add_argument("--peers", nargs="*", default=list(PEERS), choices=PEERS)
    parser.add_argument("--ray-llm-path", default="", help="put before PYTHONPATH for its server")
    parser.add_argument("--out", type=Path, default=Path("bench/results"))
    parser.add_argument("--resume", action="store_true", help="go on with the day's lines in --out")
    parser.add_argument("--seconds", type=float, default=math.inf, help="to be over after these")
    parser.add_argument("--offline", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.model = str(Path(args.model).resolve())
    if args.offline:
        run_offline(args.model)
    else:
        sys.exit(compare(args))


if __name__ == "__main__":
    main()
