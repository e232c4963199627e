"""The servers of a comparison: configurations, a record of their replicas over time, and kills."""

import argparse
import asyncio
import contextlib
import os
import signal
import threading
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from itertools import groupby, pairwise
from operator import itemgetter
from typing import Any

from bench.simulate.calibrate import fit, intervals
from engine.messages import EngineStats
from loadtest.chaos.server_processes import instance_at
from loadtest.runner import RunClock

APP = "manta"
POOLS = {"mixed": ("gpu", "cpu"), "gpu-only": ("gpu",), "cpu-only": ("cpu",)}
PRICES = {"gpu": 1.0, "cpu": 0.1}  # price of a replica's hour
ROWS = {"gpu": 64, "cpu": 16}  # concurrent sequences of a replica
STEP_TOKENS = {"gpu": 2048, "cpu": 512}
MAXIMUM = 2  # replicas of a pool
_START_SECONDS = 10.0  # assumed start time of a replica until one is measured
_BESIDE = 6  # cores that CPU replicas leave to GPU replicas, routers and the client
_STATS = ("step", "output_tokens", "prompt_tokens", "busy_seconds", "total_blocks", "block_size")


def configuration(args: argparse.Namespace, name: str) -> dict[str, Any]:
    """Return the server's configuration in the form of manta.yaml."""
    cores = os.cpu_count() or 1
    threads = max(1, (cores - min(_BESIDE, cores // 2)) // MAXIMUM)  # of a CPU replica
    cpu = {"num_threads": threads, "num_blocks": 1024}
    engines = {"gpu": {"memory_fraction": 0.8 / MAXIMUM, **args.gpu_set}, "cpu": cpu}
    reserved = {"gpu": (1, 1 / MAXIMUM), "cpu": (threads if cores > _BESIDE else 0.25, 0)}
    if args.gpu_device == "cpu":
        reserved["gpu"] = reserved["cpu"]
        engines["gpu"] = {**cpu, "device": "cpu", **args.gpu_set}

    def pool(kind: str) -> dict[str, Any]:
        batch = {"max_num_seqs": ROWS[kind], "max_num_batched_tokens": STEP_TOKENS[kind]}
        cpus, gpus = reserved[kind]
        limits = {"min_replicas": 0, "max_replicas": MAXIMUM, "num_cpus": cpus, "num_gpus": gpus}
        costs = {"price": PRICES[kind], "start_seconds": _START_SECONDS}
        return {**limits, **costs, "engine": {**batch, **engines[kind]}}

    return {
        "model": args.model,
        "served_name": "m",
        "app_name": APP,
        "engine": {"prefix_caching": False, "max_model_len": 2048, **args.set},
        "pools": {kind: pool(kind) for kind in POOLS[name]},
        "scaling": {"ttft": 2.0, "calm_seconds": 12.0, "idle_seconds": 8.0},
        "router": {"replicas": 2, "wait_seconds": 200},
        "limits": {"queue_seconds": 200, "drain_seconds": 20},
        "http": {"port": args.port},
    }


class Watch:
    """A recorder that polls Serve and a router once a second while its context runs."""

    def __init__(self, pools: Sequence[str]) -> None:
        # (time.monotonic(), {pool: (ready, starting, stopping replicas)})
        self.samples: list[tuple[float, dict[str, tuple[int, int, int]]]] = []
        self.frames: dict[str, list[EngineStats]] = {}  # the engines' counters by replica
        self._pools = pools
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def __enter__(self) -> "Watch":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(20)

    def _look(self) -> None:
        from ray import serve

        while not self._stop.wait(1.0):
            # The controller or the router may have been killed; it is replaced soon.
            with contextlib.suppress(Exception):
                deployments = serve.status().applications[APP].deployments
                states = {p: deployments[f"engine-{p}"].replica_states for p in self._pools}
                counts = {pool: _counts(states[pool]) for pool in self._pools}
                self.samples.append((time.monotonic(), counts))
                state = serve.get_app_handle(APP).state.remote().result(timeout_s=3)
                for replica, stats in state["replicas"].items():
                    frame = EngineStats(**{name: stats[name] for name in _STATS})
                    self.frames.setdefault(replica, []).append(frame)

    def until_empty(self, seconds: float) -> bool:
        """Wait until no pool has a replica, at most `seconds`. Return whether all are empty."""
        end, empty = time.monotonic() + seconds, False
        while not empty and time.monotonic() < end:
            time.sleep(0.5)
            empty = bool(self.samples) and not any(map(sum, self.samples[-1][1].values()))
        return empty

    def replica_seconds(self, pool: str, since: float) -> float:
        """Return the sum of a pool's replica seconds since a time, in any state."""
        pairs = pairwise(sample for sample in self.samples if sample[0] >= since)
        return round(sum(sum(counts[pool]) * (after - t) for (t, counts), (after, _) in pairs), 1)

    def steps(self, pool: str, since: float) -> list[tuple[float, int]]:
        """Return (seconds, ready replicas) at each change of a pool's count."""
        ready = ((round(t - since, 1), counts[pool][0]) for t, counts in self.samples if t >= since)
        return [next(same) for _, same in groupby(ready, key=itemgetter(1))]

    def measured(self, pool: str, engine: Mapping[str, Any]) -> dict[str, float]:
        """Return the fitted cost of a pool's steps, its rates, and the seconds of a start.

        Returns {} if the pool's engines have run too few steps. A start lasts from the scaling
        decision until the replica is ready.
        """
        mine = [runs for name, runs in self.frames.items() if name.startswith(f"engine-{pool}")]
        fitted = fit([stretch for frames in mine for stretch in intervals(frames)])
        rates = fitted.rates(engine["max_num_seqs"], engine["max_num_batched_tokens"])
        if rates is None:
            return {}
        starting, starts = 0.0, 0
        for (t, before), (following, after) in pairwise(self.samples):
            starting += before[pool][1] * (following - t)
            starts += max(0, after[pool][0] - before[pool][0])
        return {
            **fitted.cost._asdict(),
            "prompt_rate": rates[0],
            "output_rate": rates[1],
            "start_seconds": starting / starts if starting and starts else _START_SECONDS,
            "kv_tokens": mine[0][-1].total_blocks * mine[0][-1].block_size,
        }


def _counts(states: Mapping[Any, int]) -> tuple[int, int, int]:
    ready, stopping = states.get("RUNNING", 0), states.get("STOPPING", 0)
    return ready, sum(states.values()) - ready - stopping, stopping


def kills(url: str, pools: Sequence[str], seconds: float) -> Callable[[RunClock], Awaitable[None]]:
    """Return a function that kills a replica of each pool and a router, at set times of the run."""

    async def kill(clock: RunClock, number: int, name: str) -> None:
        await asyncio.sleep((0.4 + 0.1 * number) * seconds - clock.now())
        title = f"ray::ServeReplica:{APP}:{name}"
        while f"kill {name}" not in (mark.what for mark in clock.marks):
            await asyncio.sleep(0.5)
            processes = (await asyncio.to_thread(instance_at, url)).find("deployment")
            victim = next((p for p in processes if p.title.startswith(title)), None)
            if victim is not None and victim.send(signal.SIGKILL):
                clock.mark(f"kill {name}")

    async def harm(clock: RunClock) -> None:
        names = [*(f"engine-{pool}" for pool in pools), "router"]
        await asyncio.gather(*(kill(clock, *pair) for pair in enumerate(names)))

    return harm
