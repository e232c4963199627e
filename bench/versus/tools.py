r"""The load tester's results against those of aiperf and guidellm, with the same server and load.

    python -m bench.versus.tools --aiperf ENV/bin/aiperf --guidellm ENV/bin/guidellm \
        --tokenizer FOLDER --out bench/results

Without --url the server is a fake one with known delays (tests/loadtest/fake_server.py). Tools
alternate. Each sends `--requests` streamed completions at a constant `--rate`; the median over the
rounds counts. These metrics are compared, as all three tools define them equally:

                 manta                     aiperf 0.13                guidellm 0.8
    throughput   output_tokens_per_s       output_token_throughput    output_tokens_per_second
                 all three: tokens of the usage, from the first request to the last answer's end
    ttft         p50 of ttft: from the     time_to_first_token, p50:  time_to_first_token_ms,
                 intended send, a new      from the request's start,  median: from its first byte,
                 connection included       connecting included        after connecting
    itl          p50 of tpot: a request's  inter_token_latency, p50   inter_token_latency_ms,
                 time after its first                                 median weighted by tokens
                 chunk over the tokens
    itl_chunk    p50 of itl_chunk          inter_chunk_latency, p50

The other tools need a folder with a tokenizer to make prompts; the server counts the tokens.
"""

import argparse
import contextlib
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench.report.result_file import write
from loadtest.runner import Task, run

LIMITS = {"throughput": 0.05, "ttft": 0.10, "itl": 0.10, "itl_chunk": 0.10}
UNITS = {"throughput": "tok/s", "ttft": "ms", "itl": "ms", "itl_chunk": "ms"}
DELAYS = ("0.04..0.1", "0.012")  # first token after 40 to 100 ms, then one every 12 ms
INPUT = 32

Figures = dict[str, float]


@contextlib.contextmanager
def known_server() -> Iterator[str]:
    """Run a fake server with DELAYS within the context; yield its URL."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.loadtest.fake_server", *DELAYS],
        cwd=Path(__file__).parents[2],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None and process.stdout is not None
    try:
        yield process.stdout.readline().strip()
    finally:
        process.stdin.close()
        process.wait(10)


def manta(args: argparse.Namespace, folder: Path) -> Figures:
    text = (
        f"work: {{name: tokens, input: {INPUT}, output: {args.tokens}}}\n"
        f"phases: [{{name: a, arrivals: {{kind: constant, rate: {args.rate}}}, "
        f"requests: {args.requests}}}]\n"
    )
    overrides = {"target.url": args.url, "target.model": args.model}
    summary = run(Task(text, overrides=overrides)).summary
    assert summary.succeeded == args.requests, summary.errors
    return {
        "throughput": summary.output_tokens_per_s,
        "ttft": summary.ttft.p50 * 1000,
        "itl": summary.tpot.p50 * 1000,
        "itl_chunk": summary.itl_chunk.p50 * 1000,
    }


def aiperf(args: argparse.Namespace, folder: Path) -> Figures:
    out = folder / "aiperf"
    options = {
        "--model": args.model,
        "--url": args.url,
        "--endpoint-type": "completions",
        "--extra-inputs": "ignore_eos:true",
        "--tokenizer": args.tokenizer,
        "--prompt-input-tokens-mean": INPUT,
        "--prompt-input-tokens-stddev": 0,
        "--prompt-output-tokens-mean": args.tokens,
        "--prompt-output-tokens-stddev": 0,
        "--arrival-pattern": "constant",
        "--request-rate": args.rate,
        "--request-count": args.requests,
        "--workers-max": 1,
        "--output-artifact-dir": out,
        "--ui": "none",
        "--random-seed": 1,
    }
    switches = ["--streaming", "--use-server-token-count", "--use-legacy-max-tokens"]
    switches += ["--no-gpu-telemetry", "--no-server-metrics"]
    _call(args.aiperf, "profile", options, switches)
    figures = json.loads((out / "profile_export_aiperf.json").read_text())
    assert figures["request_count"]["avg"] == args.requests, figures["request_count"]
    return {
        "throughput": figures["output_token_throughput"]["avg"],
        "ttft": figures["time_to_first_token"]["p50"],
        "itl": figures["inter_token_latency"]["p50"],
        "itl_chunk": figures["inter_chunk_latency"]["p50"],
    }


def guidellm(args: argparse.Namespace, folder: Path) -> Figures:
    out = folder / "guidellm.json"
    options = {
        "--backend": f"kind=openai_http,target={args.url},model={args.model},"
        "request_format=/v1/completions",
        "--profile": f"kind=constant,rate={args.rate}",
        "--constraint": f"kind=max_requests,count={args.requests}",
        "--data": f"kind=synthetic_text,prompt_tokens={INPUT},output_tokens={args.tokens}",
        "--tokenizer": f"kind=huggingface_auto,model={args.tokenizer}",
        "--output": f"kind=json,path={out}",
    }
    _call(args.guidellm, "run", options, ["--disable-console"])
    metrics = json.loads(out.read_text())["benchmarks"][0]["metrics"]
    assert metrics["request_totals"]["successful"] == args.requests, metrics["request_totals"]
    return {
        "throughput": metrics["output_tokens_per_second"]["successful"]["mean"],
        "ttft": metrics["time_to_first_token_ms"]["successful"]["median"],
        "itl": metrics["inter_token_latency_ms"]["successful"]["median"],
    }


def _call(program: str, verb: str, options: dict[str, Any], switches: list[str]) -> None:
    words = [str(word) for option in options.items() for word in option]
    done = subprocess.run([program, verb, *words, *switches], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{program} failed:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")


def _version(program: str, package: str) -> str:
    """Return the version of a package, in the environment that contains `program`."""
    code = f"import importlib.metadata as m; print(m.version({package!r}))"
    python = Path(program).parent / "python"
    return subprocess.run([python, "-c", code], capture_output=True, text=True).stdout.strip()


def rows_of(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a row for each peer and metric: medians of the rounds, and whether they agree."""
    sides: dict[tuple[str, str], list[float]] = {}
    for line in lines:
        for figure in LIMITS:
            if figure in line:
                sides.setdefault((line["side"], figure), []).append(line[figure])
    rows = []
    for (side, figure), values in sides.items():
        if side == "manta":
            continue
        ours, peer = statistics.median(sides["manta", figure]), statistics.median(values)
        rows.append(
            {
                "case": f"{side}/{figure}",
                "ours": round(ours, 3),
                "peer": round(peer, 3),
                "unit": UNITS[figure],
                "ratio": round(ours / peer, 4),
                "agrees": abs(ours / peer - 1) <= LIMITS[figure],
            }
        )
    return rows


def main() -> int:
    """Run the comparison; return 1 if a metric differs by more than LIMITS, else 0."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--aiperf", required=True, help="the program, from its own environment")
    parser.add_argument("--guidellm", required=True, help="the program, from its own environment")
    parser.add_argument("--tokenizer", type=Path, required=True, help="folder, for their prompts")
    parser.add_argument("--url", help="server; default: one with known delays")
    parser.add_argument("--model", default="fake", help="model that the server names")
    parser.add_argument("--rate", type=float, default=10)
    parser.add_argument("--requests", type=int, default=150)
    parser.add_argument("--tokens", type=int, default=40, help="output tokens of each request")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, help="folder for the result files")
    args = parser.parse_args()
    server = "its own delays" if args.url else f"first token {DELAYS[0]} s, then every {DELAYS[1]}"
    lines: list[dict[str, Any]] = []
    with contextlib.ExitStack() as stack:
        if args.url is None:
            args.url = stack.enter_context(known_server())
        for number in range(args.rounds):
            for side in (manta, aiperf, guidellm):
                with tempfile.TemporaryDirectory(prefix="manta-versus-") as folder:
                    figures = side(args, Path(folder))
                rounded = {name: round(value, 3) for name, value in figures.items()}
                lines.append({"round": number, "side": side.__name__, **rounded})
                print(json.dumps(lines[-1]), flush=True)
    rows = rows_of(lines)
    print(f"{'':<24} {'manta':>10} {'peer':>10} {'ratio':>7}")
    for row in rows:
        verdict = "" if row["agrees"] else "   differs"
        print(f"{row['case']:<24} {row['ours']:>10} {row['peer']:>10} {row['ratio']:>7}{verdict}")
    if args.out:
        load = {name: getattr(args, name) for name in ("rate", "requests", "tokens", "rounds")}
        peers = {
            name: _version(program, name)
            for name, program in (("aiperf", args.aiperf), ("guidellm", args.guidellm))
        }
        config = {"ours": {"server": server, "model": args.model, **load}, "peers": peers}
        write(args.out, "versus-tools", config, rows, lines)
    return 0 if all(row["agrees"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
