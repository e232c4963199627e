"""The whole server behind HAProxy in a separate process, as `manta serve` starts it, and functions
that read its states, metrics and open files from outside."""

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]
NAME = "live"  # name of the model and of the application
ROUTERS = REPLICAS = 2


def settled(condition: Callable[[], Any], seconds: float = 15.0, every: float = 0.1) -> Any:
    """Wait until the result of `condition` is true, and return the result."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, "it did not come to pass"
        time.sleep(every)
    return value


@dataclass
class Live:
    """A running server.

    port: the HTTP port. folder: HAProxy's folder. process: the process that runs the cluster, and
        answers questions about it on its standard streams.
    """

    port: int
    folder: Path
    process: "subprocess.Popen[str]"
    routers: dict[int, int] = field(default_factory=dict)  # pid -> its own HTTP port

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def get(self, path: str, port: int | None = None) -> tuple[int, str]:
        url = f"http://127.0.0.1:{port or self.port}{path}"
        with urllib.request.urlopen(url, timeout=30) as answer:
            return answer.status, answer.read().decode()

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        request = urllib.request.Request(
            self.url + path, json.dumps(body).encode(), {"content-type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            return dict(json.loads(answer.read()))

    def router_states(self) -> dict[int, dict[str, Any]]:
        """Return each router's state, by process id."""
        return self._ask("routers")

    def replica_stats(self) -> dict[int, dict[str, Any]]:
        """Return each engine replica's stats, by process id."""
        return self._ask("replicas")

    def endpoints(self) -> dict[int, dict[str, Any]]:
        """Return the metadata by which another router can connect to the replicas, by port."""
        return self._ask("endpoints", "port")

    def by_handle(self) -> tuple[list[Any], int]:
        """Return the result of `either_edge.by_handle`, called in the cluster's process."""
        choices, pieces = self._answer("handle")
        return choices, pieces

    def _ask(self, what: str, key: str = "pid") -> dict[int, dict[str, Any]]:
        return {load[key]: load for load in self._answer(what)}

    def _answer(self, what: str) -> Any:
        assert self.process.stdin and self.process.stdout
        self.process.stdin.write(what + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def find_routers(self) -> None:
        """Fill `routers`: for each router's process, the port of HAProxy's configuration on which
        it listens."""
        config = "".join(file.read_text() for file in self.folder.rglob("*.cfg"))
        ports = {int(port) for port in re.findall(r"^\s*server \S+ \S+?:(\d+) ", config, re.M)}
        self.routers.clear()
        for pid in self.router_states():
            listening = {s.local for s in tcp_sockets(pid).values() if s.state == _LISTEN}
            open_ports = ports & listening
            if len(open_ports) == 1:
                self.routers[pid] = open_ports.pop()

    def find_all_routers(self) -> None:
        """Wait until HAProxy has a server for each router, and fill `routers`."""
        settled(lambda: self.find_routers() or len(self.routers) == ROUTERS, 40)

    def metrics(self) -> dict[str, float]:
        """Return the metrics of all routers and replicas, as any of the routers answers them."""
        return parse_metrics(self.get("/metrics")[1])


def parse_metrics(text: str) -> dict[str, float]:
    """Return sample -> value of a metrics text.

    Asserts that Prometheus accepts the text: HELP and TYPE once, before the samples of each metric.
    """
    helped: set[str] = set()
    kinds: dict[str, str] = {}
    samples: dict[str, float] = {}
    for line in text.splitlines():
        if line.startswith("# HELP "):
            name, explanation = line[7:].split(" ", 1)
            assert name not in helped and explanation, line
            helped.add(name)
        elif line.startswith("# TYPE "):
            name, kind = line[7:].split(" ")
            assert name not in kinds and kind in ("counter", "gauge", "histogram"), line
            kinds[name] = kind
        else:
            match = re.fullmatch(r'([a-z_0-9]+)(\{(?:[a-z_]+="[^"\n]*",?)*\})? (\S+)', line)
            assert match, line
            base = match[1]
            if base not in kinds:
                base = re.sub("_(bucket|sum|count)$", "", base)
                assert kinds.get(base) == "histogram", line
            assert base in helped, line
            sample = line.rsplit(" ", 1)[0]
            assert sample not in samples, f"twice: {sample}"
            samples[sample] = float(match[3])
    return samples


# -- open files, through /proc

_LISTEN, _ESTABLISHED = "0A", "01"


@dataclass(frozen=True)
class TcpSocket:
    local: int  # ports
    remote: int
    state: str


def tcp_sockets(pid: int) -> dict[str, TcpSocket]:
    """Return name in `open_files` -> TCP socket, for all TCP sockets of a process."""
    mine = set(open_files(pid))
    by_name = {}
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            name = f"socket:[{fields[9]}]"
            if name in mine:
                ports = [int(fields[i].rsplit(":", 1)[1], 16) for i in (1, 2)]
                by_name[name] = TcpSocket(*ports, fields[3])
    return by_name


def open_files(pid: int) -> list[str]:
    """Return the target of each file descriptor of a process, sorted."""
    names = []
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            names.append(os.readlink(entry))
    return sorted(names)


# -- held resources


def quiet(live: Live) -> bool:
    """Return whether no router or replica holds a request, choice or KV block."""
    for state in live.router_states().values():
        if state["in_flight"] or any(state["held"].values()):
            return False
    for stats in live.replica_stats().values():
        if stats["running"] or stats["waiting"] or stats["in_flight"]:
            return False
        if stats["free_blocks"] != stats["total_blocks"]:
            return False
    return True


def holdings(live: Live) -> dict[str, Counter[str]]:
    """Return process -> counts of its tasks, threads and open files by kind.

    A router's connections from HAProxy are not counted, because HAProxy keeps them for later
    clients and closes them at any time.
    """
    by_name = {}
    routers, replicas = live.router_states(), live.replica_stats()
    pids = {f"router {pid}": pid for pid in routers}
    pids |= {f"replica {pid}": pid for pid in replicas}
    pids |= {f"engine of {pid}": stats["engine_pid"] for pid, stats in replicas.items()}
    for name, pid in pids.items():
        sockets = tcp_sockets(pid)
        held: Counter[str] = Counter()
        for file in open_files(pid):
            socket = sockets.get(file)
            if socket is not None and socket.local == live.routers.get(pid):
                held["connections from haproxy"] += 1
            elif socket is not None:
                held["tcp"] += 1
            else:
                held[re.sub(r"\d+", "N", file)] += 1
        held["threads"] = len(os.listdir(f"/proc/{pid}/task"))
        held["tasks"] = sum({**routers, **replicas}.get(pid, {"tasks": {}})["tasks"].values())
        by_name[name] = held
    return by_name


def resident_mib(pid: int) -> float:
    """Return the resident memory of a process in MiB; 0 for a process that is gone."""
    try:
        pages = Path(f"/proc/{pid}/statm").read_text().split()[1]
    except OSError:
        return 0.0
    return int(pages) * os.sysconf("SC_PAGE_SIZE") / 2**20


# Growth that is no leak: threads of asyncio's pool, which starts them on demand, and connections
# and tasks of Ray. A leak would be one for each of hundreds of requests.
SLACK = {"threads": 5, "tcp": 3, "tasks": 2}


def grown(live: Live, before: dict[str, Counter[str]], at_once: int) -> list[str]:
    """Return a message for each resource of which a process holds more than before.

    at_once: number of connections that HAProxy may have opened since.
    """
    slack = SLACK | {"connections from haproxy": at_once}
    for _ in range(10):  # repeat, as Serve's health checks are short tasks
        after = holdings(live)
        assert before.keys() == after.keys(), "a process was replaced"
        more = [
            f"{process}: {what} {before[process][what]} -> {after[process][what]}"
            for process in before
            for what in after[process]
            if after[process][what] > before[process][what] + slack.get(what, 0)
        ]
        if not more:
            break
        time.sleep(0.5)
    return more


# -- starting the server


@contextlib.contextmanager
def live_server(model: Path, *, fake: bool = False, **settings: Any) -> Iterator[Live]:
    """Run two routers and two replicas of a model, with a core each, and stop them in any case."""
    config = {
        "model": str(model),
        "served_name": NAME,
        "app_name": NAME,
        "pools": {"cpu": {"replicas": REPLICAS, "num_cpus": 1.0}},
        "router": {"replicas": ROUTERS},
        "http": {"proxy": "haproxy"},
        "limits": {"drain_seconds": 1.0},
        **settings,
    }
    command = [sys.executable, "-m", "tests.deployments.on_ray.live", json.dumps(config)]
    process = subprocess.Popen(
        command + ["fake"] * fake,
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin and process.stdout
    try:
        line = process.stdout.readline()
        assert line, "the server did not start"
        facts = json.loads(line)
        live = Live(facts["port"], Path(facts["folder"]), process)
        settled(lambda: all(len(s["replicas"]) == REPLICAS for s in live.router_states().values()))
        live.find_all_routers()
        yield live
    finally:
        process.stdin.close()
        try:
            process.wait(60)
        finally:
            process.kill()
            process.stdout.close()


def main(settings: str, fake: str = "") -> None:
    """Run a cluster until standard input ends, as it does with the test's process.

    Each line of standard input is a question, which a line of JSON answers: "routers" or "replicas"
    for their states, "endpoints" of the replicas, or "handle" for a chat through a Serve handle.
    """
    from ray import serve

    from deployments.app import assemble, cluster_environment
    from deployments.config.load import parse_config
    from tests.deployments.haproxy.either_edge import by_handle
    from tests.deployments.on_ray.serve_cluster import fake_engine, ray_and_serve

    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # Ray's output must not mix with the answers
    folder = Path(tempfile.mkdtemp(prefix="h"))  # short, as socket paths are limited
    config = parse_config(json.loads(settings), {})
    os.environ.update(cluster_environment(config, folder))
    try:
        with ray_and_serve() as cluster:
            application = assemble(config, fake_engine if fake else None)
            serve.run(application, name=NAME, route_prefix="/")
            replicas = serve.get_deployment_handle("engine-cpu", NAME)
            handle = serve.get_app_handle(NAME)
            methods = {
                "routers": (handle.state, ROUTERS),
                "replicas": (replicas.stats, REPLICAS),
                "endpoints": (replicas.record_replica_metadata, REPLICAS),
            }
            print(json.dumps({"port": cluster.port, "folder": str(folder)}), file=answers)
            for line in sys.stdin:
                what = line.strip()
                answer = by_handle(handle, NAME) if what == "handle" else _each(*methods[what])
                print(json.dumps(answer), file=answers)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _each(method: Any, count: int) -> list[dict[str, Any]]:
    """Return the answer of every replica of a deployment to a call.

    Serve sends a call to the less busy one, so as many calls at once as replicas reach nearly all.
    """
    by_name: dict[int, dict[str, Any]] = {}
    deadline = time.monotonic() + 20
    while len(by_name) < count:
        assert time.monotonic() < deadline, f"only {len(by_name)} of {count} answer"
        for call in [method.remote() for _ in range(count)]:
            state = call.result(timeout_s=10)
            by_name[state.get("pid") or state["port"]] = state
    return list(by_name.values())


if __name__ == "__main__":
    main(*sys.argv[1:])
