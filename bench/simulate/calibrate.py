"""The cost of the real engine's steps on this machine, and the simulator's error.

The engine serves two seeded runs with random arrivals. The routers' step-cost model (step_cost.py)
is fitted to the first run. The second run is predicted: the time of each stretch of steps by the
fit, and times to first token by SimReplica with the same arrivals.
"""

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

from bench.report import result_file
from bench.simulate.fleet.cluster import run
from bench.simulate.fleet.replica import Job
from bench.simulate.policies import RoundRobin
from deployments.routing.step_cost import STRETCH, StepCost, StepCostModel
from deployments.simulation.speed import Speed
from engine.messages import EngineRequest, EngineStats, StepFrame
from engine.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class Load:
    """The requests of a run.

    rate: requests per second.
    prompts: prompt lengths to choose from. outputs: range of output lengths.
    rows, step_tokens: the engine's max_num_seqs and token budget of a step.
    """

    rate: float
    count: int
    prompts: tuple[int, ...]
    outputs: tuple[int, int]
    rows: int
    step_tokens: int

    def jobs(self, seed: int, count: int) -> list[Job]:
        dice, now, jobs = Random(seed), 0.0, []
        for _ in range(count):
            now += dice.expovariate(self.rate)
            jobs.append(Job(now, dice.choice(self.prompts), dice.randrange(*self.outputs)))
        return jobs


LOADS = {  # by device; about half of the capacity of a typical replica
    "cpu": Load(1.0, 60, (20, 60, 150, 400), (8, 40), 32, 512),  # the default model
    "cuda": Load(20.0, 400, (100, 400, 1000, 2000), (50, 200), 256, 2048),  # 8B
}
_WARM = 0.2  # share of the requests sent before the two runs, to compile kernels
_PASSES = 100  # number of fits to the same stretches, so that the prior has almost no weight


@dataclass(slots=True)
class Observed:
    """The observations of a run on the real engine, with which the simulation is compared.

    firsts: seconds to the first token, per request. gaps: mean seconds per later token.
    """

    frames: list[EngineStats]
    firsts: list[float]
    jobs: list[Job]
    kv_tokens: int
    rows: int
    step_tokens: int
    ahead: bool  # whether a step is launched before the previous one has ended
    gaps: list[float] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Stretch:
    """A stretch of consecutive steps of the engine: their number, tokens and busy seconds."""

    steps: int
    outputs: int
    prompts: int
    seconds: float

    def predicted(self, cost: StepCost) -> float:
        base, sequence, token = cost
        return self.steps * base + self.outputs * sequence + self.prompts * token


def main(model: str | None, name: str, fields: Mapping[str, Any], out: Path | None) -> None:
    """Calibrate and print the table; with `out`, also write the result file.

    fields: {field of EngineConfig: value}.
    """
    import torch

    if model is None:
        from deployments.checkpoints.resolve import resolve_model

        model = str(resolve_model("default"))
    cuda = torch.cuda.is_available() and fields.get("device") != "cpu"
    load = LOADS["cuda" if cuda else "cpu"]
    engine = {
        "async_scheduling": cuda,
        "max_num_seqs": load.rows,
        "max_num_batched_tokens": load.step_tokens,
        "prefix_caching": False,
        **fields,
    }
    first, second = asyncio.run(_observe(model, engine, load))
    rows, lines = compare(name, first, second)
    for row in rows:
        peer = f"{row['peer']:>10g}" if "peer" in row else " " * 10
        ratio = f"{row['ratio']:>7g}" if "ratio" in row else ""
        print(f"{row['case']:<36} {row['ours']:>10g} {peer} {row['unit']:<6} {ratio}")
    if out:
        line = {"engine": engine, "load": {slot: getattr(load, slot) for slot in Load.__slots__}}
        config = {"ours": line, "peers": {"the real engine": {}}}
        result_file.write(out, f"simulate-calibration-{name}", config, rows, lines)


def compare(
    name: str, first: Observed, second: Observed
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Compare the simulation with the second run.

    Returns rows: the costs fitted to the first run, then predictions (ours) and the second run
    (peer). Also returns lines: the second run's stretches and requests.
    """
    cost = fit(intervals(first.frames)).cost
    stretches = intervals(second.frames)
    predicted = [stretch.predicted(cost) for stretch in stretches]
    errors = sorted(
        abs(guess - stretch.seconds) / stretch.seconds
        for guess, stretch in zip(predicted, stretches, strict=True)
    )
    simulated = [job for job in simulate(second, cost) if job.first >= 0]
    waits = [job.first - job.arrival for job in simulated]
    gaps = [
        (job.end - job.first) / (job.output - 1)
        for job in simulated
        if job.end >= 0 and job.output > 1
    ]
    rows: list[dict[str, Any]] = [
        {"case": f"{name}/step", "ours": round(cost.base * 1e3, 3), "unit": "ms"},
        {"case": f"{name}/sequence", "ours": round(cost.sequence * 1e3, 4), "unit": "ms"},
        {"case": f"{name}/prompt_token", "ours": round(cost.token * 1e6, 2), "unit": "us"},
    ]

    def add_row(case: str, ours: float, peer: float) -> None:
        ratio = round(ours / peer, 3)
        row = {"case": f"{name}/{case}", "ours": round(ours, 5), "peer": round(peer, 5)}
        rows.append({**row, "unit": "s", "ratio": ratio})

    add_row("busy", sum(predicted), sum(stretch.seconds for stretch in stretches))
    for what, ours, peers in (("ttft", waits, second.firsts), ("itl", gaps, second.gaps)):
        add_row(f"{what}_p50", _share(ours, 0.5), _share(peers, 0.5))
        add_row(f"{what}_p90", _share(ours, 0.9), _share(peers, 0.9))
    for share in (0.5, 0.9):
        case = f"{name}/stretch_error_p{share * 100:.0f}"
        rows.append({"case": case, "ours": round(_share(errors, share), 4), "unit": "share"})
    lines: list[dict[str, Any]] = [
        {
            "kind": "stretch",
            "steps": stretch.steps,
            "outputs": stretch.outputs,
            "prompts": stretch.prompts,
            "seconds": round(stretch.seconds, 4),
            "predicted": round(guess, 4),
        }
        for guess, stretch in zip(predicted, stretches, strict=True)
    ]
    lines += [
        {
            "kind": "request",
            "arrival_s": round(job.arrival, 3),
            "prompt": job.prompt,
            "output": job.output,
            "ttft_s": round(real, 4),
            "itl_s": round(gap, 5),
        }
        for job, real, gap in zip(second.jobs, second.firsts, second.gaps, strict=True)
    ]
    return rows, lines


def fit(stretches: list[Stretch]) -> StepCostModel:
    """Fit the routers' step-cost model to stretches of steps."""
    model = StepCostModel(StepCost.mean([]), fade=1.0)
    for stretch in stretches * _PASSES:
        model.observe(stretch.steps, stretch.outputs, stretch.prompts, stretch.seconds)
    return model


def simulate(real: Observed, cost: StepCost) -> list[Job]:
    """Simulate the run's requests with one SimReplica."""
    speed = Speed("", *cost, real.kv_tokens, real.rows, real.step_tokens, ahead=real.ahead)
    work = [Job(job.arrival, job.prompt, job.output) for job in real.jobs]
    return run([speed], RoundRobin(), work, routers=1).jobs


def intervals(frames: list[EngineStats]) -> list[Stretch]:
    """Combine an engine's frames into stretches of at least STRETCH busy seconds."""
    stretches: list[Stretch] = []
    began = frames[0]
    for stats in frames:
        seconds = stats.busy_seconds - began.busy_seconds
        if seconds >= STRETCH:
            stretches.append(
                Stretch(
                    stats.step - began.step,
                    stats.output_tokens - began.output_tokens,
                    stats.prompt_tokens - began.prompt_tokens,
                    seconds,
                )
            )
            began = stats
    return stretches


def _share(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


async def _observe(model: str, engine: Mapping[str, Any], load: Load) -> tuple[Observed, Observed]:
    from engine.library.llm import make_config
    from engine.process.client import EngineClient

    frames: list[EngineStats] = []
    firsts: dict[int, float] = {}
    ends: dict[int, float] = {}

    def on_frame(frame: StepFrame) -> None:
        now = time.monotonic()
        frames.append(frame.stats)
        for delta in frame.deltas:
            firsts.setdefault(delta.id, now)
            if delta.finish:
                ends[delta.id] = now

    client = EngineClient(on_frame)
    ready = await client.start(make_config(model, engine))
    results: list[Observed] = []
    try:
        for seed, count in enumerate((int(_WARM * load.count), load.count, load.count)):
            for values in (frames, firsts, ends):
                values.clear()
            jobs = load.jobs(seed, count)
            began = time.monotonic()
            for number, job in enumerate(jobs):
                await asyncio.sleep(max(0.0, began + job.arrival - time.monotonic()))
                job.arrival = time.monotonic() - began
                client.submit(_request(seed * load.count + number, job, ready.vocab_size))
            while len(ends) < count:
                await asyncio.sleep(0.02)
            numbered = [(job, seed * load.count + number) for number, job in enumerate(jobs)]
            waits = [firsts[id] - began - job.arrival for job, id in numbered]
            gaps = [(ends[id] - firsts[id]) / (job.output - 1) for job, id in numbered]
            results.append(
                Observed(
                    frames=list(frames),
                    firsts=waits,
                    jobs=jobs,
                    kv_tokens=ready.num_blocks * ready.block_size,
                    rows=frames[-1].rows,
                    step_tokens=ready.step_tokens,
                    ahead=bool(engine["async_scheduling"]),
                    gaps=gaps,
                )
            )
    finally:
        await client.close()
    return results[1], results[2]


def _request(id: int, job: Job, vocab: int) -> EngineRequest:
    dice = Random(id)
    tokens = [dice.randrange(100, min(vocab, 40_000)) for _ in range(job.prompt)]
    params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=job.output)
    return EngineRequest(id, tokens, job.prompt, params, seed=1)
