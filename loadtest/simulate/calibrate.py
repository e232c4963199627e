"""What a step of the real engine costs on this machine, and how far the simulator is from it.

Two seeded runs of the same kind at the engine itself, requests arriving at random. The first is
fitted by the model that routers use (deployments.steps). The second is predicted: each stretch of
steps by the fit, and the times to first tokens by SimReplica with the same arrivals.
"""

import asyncio
import time
from dataclasses import dataclass
from random import Random
from typing import Any

from deployments.steps import Cost, StepModel
from engine.messages import EngineRequest, EngineStats, StepFrame
from engine.sampling_params import SamplingParams
from loadtest.simulate.cluster import run
from loadtest.simulate.policies import RoundRobin
from loadtest.simulate.replica import Job, Speed

_REQUESTS = 16
_RATE = 0.5  # a second
_STEP_TOKENS = 512
_ROWS = 32
_STRETCH = 0.2  # seconds over which predicted and real times are compared


@dataclass(slots=True)
class Observed:
    """frames: (second, stats). firsts: seconds to the first token, by request."""

    frames: list[tuple[float, EngineStats]]
    firsts: list[float]
    jobs: list[Job]
    kv_tokens: int


def main(model: str | None) -> None:
    if model is None:
        from deployments.models import resolve_model

        model = str(resolve_model("default"))
    first, second = asyncio.run(_observe(model))
    cost = fit(first)
    print(
        f"a step: {cost.base * 1e3:.2f} ms, each sequence {cost.sequence * 1e3:.3f} ms, "
        f"each prompt token {cost.token * 1e6:.1f} us"
    )
    errors = sorted(stretch_errors(second, cost))
    print(
        f"error of {len(errors)} stretches of {_STRETCH} s of a second run: "
        f"median {errors[len(errors) // 2]:.1%}, 90 % below {errors[int(len(errors) * 0.9)]:.1%}"
    )
    predicted = simulated_firsts(second, cost)
    for share in (0.5, 0.9):
        real, guess = _share(second.firsts, share), _share(predicted, share)
        print(f"first tokens, p{share * 100:.0f}: real {real:.3f} s, simulated {guess:.3f} s")


def fit(observed: Observed) -> Cost:
    model = StepModel(Cost.mean([]))
    for _ in range(3):  # the frames of one run are few; each pass starts from the last solution
        for steps, outputs, prompts, seconds in _intervals(observed, 0.0):
            model.observe(steps, outputs, prompts, seconds)
    return model.cost


def stretch_errors(observed: Observed, cost: Cost) -> list[float]:
    """|predicted - real| / real of each busy stretch."""
    return [
        abs(steps * cost.base + outputs * cost.sequence + prompts * cost.token - seconds) / seconds
        for steps, outputs, prompts, seconds in _intervals(observed, _STRETCH)
    ]


def simulated_firsts(observed: Observed, cost: Cost) -> list[float]:
    speed = Speed(
        "cpu",
        cost.base,
        cost.sequence,
        cost.token,
        observed.kv_tokens,
        _ROWS,
        _STEP_TOKENS,
    )
    outcome = run([speed], RoundRobin(), observed.jobs, routers=1)
    return outcome.waits()


def _intervals(observed: Observed, least: float) -> list[tuple[int, int, int, float]]:
    """(steps, outputs, prompt tokens, seconds) between frames at which it was busy, joined to
    stretches of at least `least` seconds."""
    found: list[tuple[int, int, int, float]] = []
    began = observed.frames[0]
    for before, after in zip(observed.frames, observed.frames[1:], strict=False):
        if not before[1].running:
            began = after
            continue
        seconds = after[0] - began[0]
        if seconds >= least and after[1].step > began[1].step:
            found.append(
                (
                    after[1].step - began[1].step,
                    after[1].output_tokens - began[1].output_tokens,
                    after[1].prompt_tokens - began[1].prompt_tokens,
                    seconds,
                )
            )
            began = after
    return found


def _share(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


async def _observe(model: str) -> tuple[Observed, Observed]:
    from engine.client import EngineClient
    from engine.config import EngineConfig

    frames: list[tuple[float, EngineStats]] = []
    firsts: dict[int, float] = {}
    open_ids: set[int] = set()

    def on_frame(frame: StepFrame) -> None:
        now = time.monotonic()
        frames.append((now, frame.stats))
        for delta in frame.deltas:
            firsts.setdefault(delta.id, now)
            if delta.finish:
                open_ids.discard(delta.id)

    client = EngineClient(on_frame)
    ready = await client.start(
        EngineConfig(
            model=model,
            device="cpu",
            max_num_seqs=_ROWS,
            max_num_batched_tokens=_STEP_TOKENS,
            prefix_caching=False,
        )
    )
    results: list[Observed] = []
    try:
        for number, seed in enumerate((0, 1, 2)):  # the first warms up
            frames.clear()
            firsts.clear()
            jobs = _jobs(seed, _REQUESTS if number else 4)
            began = time.monotonic()
            for index, job in enumerate(jobs):
                await asyncio.sleep(max(0.0, began + job.arrival - time.monotonic()))
                open_ids.add(index + 1000 * number)
                job.end = time.monotonic()  # when it was really sent
                client.submit(_request(index + 1000 * number, job, ready.vocab_size))
            while open_ids:
                await asyncio.sleep(0.02)
            waits = [firsts[index + 1000 * number] - job.end for index, job in enumerate(jobs)]
            for job in jobs:
                job.end = -1.0
            kv = ready.num_blocks * ready.block_size
            results.append(Observed(list(frames), waits, jobs, kv))
    finally:
        await client.close()
    return results[1], results[2]


def _jobs(seed: int, count: int) -> list[Job]:
    dice, now, jobs = Random(seed), 0.0, []
    for _ in range(count):
        now += dice.expovariate(_RATE)
        jobs.append(Job(now, dice.choice((20, 60, 150, 400)), dice.randrange(8, 40)))
    return jobs


def _request(id: int, job: Job, vocab: int) -> EngineRequest:
    dice = Random(id)
    tokens = [dice.randrange(100, min(vocab, 40_000)) for _ in range(job.prompt)]
    params: Any = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=job.output)
    return EngineRequest(id, tokens, job.prompt, params, seed=1)


if __name__ == "__main__":
    main(None)
