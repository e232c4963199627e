"""Runs examples/rollout_fleet.py on two replicas of the default model, and kills one every minute.

The rollouts must equal those without kills; the tokens that are computed twice are counted.

    python -m tests.faults.grpo
    python -m tests.faults.grpo --steps 40 --every 60

The loop runs twice, without and with kills. Tokens are counted by the engines' stats, which are
read from a victim just before it is killed. Writes bench/results/faults-grpo-<date>.json with
each step in .jsonl. Exit status 1 if a rollout differs, 5 % of the tokens or more were computed
twice, no engine was killed, or the reward did not rise.
"""

import argparse
import asyncio
import contextlib
import os
import runpy
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from bench.report.result_file import write
from deployments.checkpoints.resolve import resolve_model
from deployments.client import Client
from tests.deployments.on_ray.serve_cluster import Cluster, ray_and_serve
from tests.faults.cluster import NAME, Broken, deployed

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "bench" / "results"
ENGINE = {"deterministic": True, "num_threads": 1, "num_blocks": 600, "max_num_seqs": 32}
MOST_TWICE = 0.05


@dataclass
class Loop:
    """The outcome of a run of the loop.

    computed: prompt and output tokens computed by all engines, killed ones included.
    """

    steps: list[dict[str, Any]] = field(default_factory=list)
    rollouts: list[Any] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    computed: int = 0
    kills: int = 0
    seconds: float = 0.0


def counts(broken: Broken) -> dict[int, int]:
    """Return the tokens that each engine has computed, by its process id."""
    replicas = asyncio.run(broken.states())["replicas"]
    return {
        replica["engine_pid"]: replica["prompt_tokens"] + replica["output_tokens"]
        for replica in replicas
    }


@contextlib.contextmanager
def killing(broken: Broken, loop: Loop, every: float) -> Iterator[None]:
    """Kill an engine that has work every `every` seconds, once the last victim is replaced.

    At most one engine is killed in a step of the loop, because a request that has lost four
    replicas is refused as their cause, and a step may be long on busy cores.
    """
    over = threading.Event()

    def kill() -> None:
        killed_in = -1
        while not over.wait(every):
            asyncio.run(broken.settled(300))
            while not over.is_set():
                if len(loop.steps) == killed_in:
                    time.sleep(0.02)
                    continue
                replicas = asyncio.run(broken.states())["replicas"]
                busy = [replica for replica in replicas if replica["running"]]
                if busy:
                    victim = max(busy, key=lambda replica: replica["running"])
                    os.kill(victim["engine_pid"], signal.SIGKILL)
                    loop.computed += victim["prompt_tokens"] + victim["output_tokens"]
                    loop.kills += 1
                    killed_in = len(loop.steps)
                    break
                time.sleep(0.02)

    thread = threading.Thread(target=kill)
    if every:
        thread.start()
    try:
        yield
    finally:
        over.set()
        if every:
            thread.join()


@contextlib.contextmanager
def fleet(cluster: Cluster, folder: Path, **engine: Any) -> Iterator[Broken]:
    """Deploy the two replicas for the loops."""
    settings = {"replicas": 2, "routers": 1, "num_cpus": 0.5, "engine": ENGINE | engine}
    with deployed(cluster, folder, None, **settings) as broken:
        asyncio.run(broken.settled(300))
        yield broken


def run(
    broken: Broken, folder: Path, work: Path, steps: int, every: float, **settings: Any
) -> Loop:
    """Run the loop once.

    work: folder for checkpoints, which must not be deleted meanwhile. every: seconds between kills;
        0 for none. settings: arguments of the example.
    """
    example = runpy.run_path(str(ROOT / "examples" / "rollout_fleet.py"))
    loop = Loop()

    def on_step(step: int, rollouts: Any, reward: float) -> None:
        loop.rollouts.append(rollouts)
        loop.steps.append({"every_s": every, "step": step, "reward": reward, "kills": loop.kills})
        print(loop.steps[-1], file=sys.stderr, flush=True)

    before = sum(counts(broken).values())
    began = time.monotonic()
    with killing(broken, loop, every):
        loop.rewards = example["main"](
            Client.connect(NAME), folder, work, steps, on_step=on_step, **settings
        )
    loop.seconds = time.monotonic() - began
    asyncio.run(broken.settled(300))
    loop.computed += sum(counts(broken).values()) - before
    return loop


def compared(quiet: Loop, killed: Loop) -> dict[str, Any]:
    """Return figures that compare the run without kills and the run with kills."""
    half = len(quiet.rewards) // 2 or 1
    first, last = quiet.rewards[:half], quiet.rewards[half:] or quiet.rewards
    return {
        "same": quiet.rollouts == killed.rollouts,
        "kills": killed.kills,
        "computed_twice": round(killed.computed / quiet.computed - 1, 4),
        "tokens": quiet.computed,
        "reward_first_half": round(sum(first) / len(first), 4),
        "reward_second_half": round(sum(last) / len(last), 4),
        "seconds": round(killed.seconds, 1),
        "seconds_without": round(quiet.seconds, 1),
    }


def faults_of(figures: dict[str, Any]) -> list[str]:
    """Return a message for each figure of `compared` that is out of its bounds."""
    wrong = {
        "a rollout differs": not figures["same"],
        "nothing was killed": not figures["kills"],
        "too many tokens were computed twice": figures["computed_twice"] >= MOST_TWICE,
        "the reward did not rise": figures["reward_second_half"] <= figures["reward_first_half"],
    }
    return [what for what, is_so in wrong.items() if is_so]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--model", default=os.environ.get("MANTA_TEST_MODEL", "default"))
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--every", type=float, default=60.0, help="seconds between kills")
    parser.add_argument("--length", type=int, default=32, help="tokens of a rollout")
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    torch.set_num_threads(1)
    folder = resolve_model(args.model)
    with (
        tempfile.TemporaryDirectory() as work,
        ray_and_serve(6) as cluster,
        fleet(cluster, folder) as broken,
    ):
        quiet, killed = (
            run(broken, folder, Path(work), args.steps, every, length=args.length)
            for every in (0.0, args.every)
        )
    figures = compared(quiet, killed)
    wrong = faults_of(figures)
    print(figures, wrong)
    config = {"model": args.model, "every_s": args.every, "ours": ENGINE}
    row = {"case": "grpo", **figures}
    write(args.out, "faults-grpo", config, [row], quiet.steps + killed.steps)
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
