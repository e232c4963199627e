"""Two NUMA nodes, emulated: this machine's cores as two nodes of a made sysfs, as `numa=fake` lists
them. Engines run in earnest, and where their threads run is read from /proc; of memory the policy
that the kernel is asked for is recorded, as the second node has none.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from engine.parallel.nodes import MPOL_PREFERRED
from tests.engine.harness_tasks import write_model

ROOT = Path(__file__).parents[3]

# Runs at the start of each Python process of the test host.
SITE = """
import json, os, pathlib
from engine.parallel import nodes
folder = pathlib.Path({folder!r})
nodes.read_nodes.__defaults__ = (None, folder / "sysfs", folder / "status")

def recorded(mode, node):
    with open(folder / "memory", "a") as file:
        file.write(json.dumps([os.getpid(), mode, node]) + "\\n")

nodes.bind.__defaults__ = (None, recorded)
"""

HOST = """
import contextlib, json, os, sys
from engine import LLM, SamplingParams

folder, layouts = sys.argv[1], json.loads(sys.argv[2])
os.sched_setaffinity(0, range(os.cpu_count()))
with contextlib.ExitStack() as ends:
    texts = []
    for options in layouts:
        llm = ends.enter_context(
            LLM(folder, device="cpu", dtype="float32", max_model_len=64, numa="bind", **options)
        )
        (output,) = llm.generate(["a b"], SamplingParams(max_tokens=8, temperature=0.0))
        texts.append(output.outputs[0].token_ids)
    threads = {}
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            command = open(f"/proc/{pid}/cmdline").read().split("\\0")
            roles = [part for part in command if part.startswith("engine.process.")]
            environment = open(f"/proc/{pid}/environ").read()
            if not roles or os.environ["TMPDIR"] not in environment:
                continue
            cores = []
            for task in os.listdir(f"/proc/{pid}/task"):
                status = open(f"/proc/{pid}/task/{task}/status").read()
                allowed = status.partition("Cpus_allowed_list:\\t")[2].split("\\n")[0]
                stat = open(f"/proc/{pid}/task/{task}/stat").read().rpartition(")")[2].split()
                cores.append([task == pid, allowed, int(stat[11]) + int(stat[12])])
            threads[pid] = [roles[0], cores]
    print(json.dumps([threads, texts]))
"""


def emulate(folder: Path) -> dict[str, str]:
    """Write an emulated host of two nodes and a tiny model; return the environment of its
    processes.
    """
    half = os.cpu_count() // 2  # type: ignore[operator]
    for number, cores in enumerate((f"0-{half - 1}", f"{half}-{2 * half - 1}")):
        (folder / "sysfs" / f"node{number}").mkdir(parents=True)
        (folder / "sysfs" / f"node{number}" / "cpulist").write_text(f"{cores}\n")
    (folder / "status").write_text("Mems_allowed_list:\t0-1\n")
    for name in ("site", "tmp", "model"):
        (folder / name).mkdir()
    (folder / "site" / "sitecustomize.py").write_text(SITE.format(folder=str(folder)))
    write_model(folder / "model", bos=False)
    return {
        **os.environ,
        "PYTHONPATH": f"{folder / 'site'}:{ROOT}",
        "TMPDIR": str(folder / "tmp"),
    }


def host(folder: Path, layouts: list[dict[str, int]]) -> tuple[dict[str, Any], list[Any], Any]:
    """Run engines of these options side by side on an emulated host of two nodes.

    Returns each process's role and, of each thread, (whether it is the main one, its cores, its
    ticks); the texts; and what was asked of the kernel about memory, as (process, mode, node).
    """
    environment = emulate(folder)
    done = subprocess.run(
        [sys.executable, "-c", HOST, str(folder / "model"), json.dumps(layouts)],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    threads, texts = json.loads(done.stdout.splitlines()[-1])
    asked = [json.loads(line) for line in (folder / "memory").read_text().splitlines()]
    return threads, texts, asked


@pytest.mark.slow
@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="two nodes need two cores")
@pytest.mark.parametrize(
    "layouts",
    [
        pytest.param([{}, {}], id="a replica for each node"),
        pytest.param([{"tensor_parallel": 2}], id="a rank for each node"),
    ],
)
def test_places_on_two_nodes(layouts: list[dict[str, int]], tmp_path: Path) -> None:
    """Bugs: two replicas on one node; a thread that computes on the other node; memory of the node
    whose cores another rank has; threads more than a node has cores."""
    threads, texts, asked = host(tmp_path, layouts)
    assert len({tuple(text) for text in texts}) == 1 and len(texts[0]) == 8
    node_of = {str(process): node for process, mode, node in asked if mode == MPOL_PREFERRED}
    assert sorted(node_of.values()) == [0, 1] and len(asked) == 2
    half = os.cpu_count() // 2  # type: ignore[operator]
    for process, node in node_of.items():
        _, cores = threads[process]
        first, last = node * half, node * half + half - 1
        own = f"{first}" if half == 1 else f"{first}-{last}"
        assert [allowed for main, allowed, _ in cores if main] == [own]
        # Threads that only wait began before the process was bound, and may wake anywhere.
        everywhere = f"0-{2 * half - 1}"
        assert {allowed for _, allowed, _ in cores} <= {own, everywhere}
        ticks = sum(used for _, allowed, used in cores if allowed == everywhere)
        assert ticks <= 0.05 * sum(used for *_, used in cores), cores
