"""A router's work with a small and a large fleet, counted rather than timed."""

import asyncio
import sys
from collections.abc import Callable

import pytest

from bench.simulate.fleet.speeds import GPU
from bench.simulate.scale import decide, in_virtual_time, over_sockets
from deployments.backend import GenerationRequest
from deployments.router.models.model_settings import DispatchLimits
from deployments.routing.decision import RoutingRequest
from deployments.routing.prefix_index import hash_prefix
from deployments.simulation import virtual_time
from deployments.simulation.service import Service
from engine.sampling_params import SamplingParams


def calls(work: Callable[[], object]) -> int:
    """Return the number of function calls, Python's and C's, of some work."""
    count = 0

    def counting(frame: object, event: str, argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(counting)
    try:
        work()
    finally:
        sys.setprofile(None)
    return count


def calls_of_a_router(replicas: int) -> dict[str, int]:
    """Return what a decision, a frame, a lost and a new replica cost a router, in calls."""

    async def measure() -> dict[str, int]:
        service = Service([GPU] * replicas, 1, DispatchLimits())
        await service.start()
        router = service.routers[0]
        prompt = list(range(512))
        params = SamplingParams(max_tokens=40, ignore_eos=True)
        request = GenerationRequest("q", "m", prompt, params, seed=1)
        wanted = RoutingRequest(len(prompt), 40, prefix_hashes=hash_prefix(prompt))
        fleet, now = router.replicas.fleet, asyncio.get_running_loop().time()
        for replica in fleet.replicas.values():
            fleet.add_prefix(replica, wanted.prefix_hashes[:3])
        decide(router, request, wanted, now)
        victim = next(iter(fleet.replicas.values()))
        counts = {
            "decision": calls(lambda: decide(router, request, wanted, now)),
            "frame": calls(lambda: (victim.observe(victim.stats, (), now), fleet.refresh())),
            "lost": calls(lambda: fleet.forget_caches(victim)),
            "routers": calls(fleet.routers),
        }
        await service.stop()
        return counts

    return virtual_time.run(measure())


def test_a_decision_costs_the_same_in_a_fleet_ten_times_as_large():
    """A walk over all replicas for each request: 0.5 ms of a router's core with a thousand."""
    small, large = calls_of_a_router(20), calls_of_a_router(200)
    print(small, large)
    for what, count in small.items():
        assert large[what] <= count + 3, f"{what}: {large[what]} calls among 200, {count} among 20"


def test_routers_share_replicas_in_virtual_time():
    """A bench whose routers find no replica, or whose figures are of nothing."""
    figures = in_virtual_time(replicas=8, routers=4, rate=10.0, seconds=0.5)
    assert len(figures.first_s) == len(figures.decisions_us) > 5 and not figures.refused
    assert figures.frames > len(figures.first_s)
    assert max(figures.first_s) < 1.0
    assert min(figures.ages_s) >= 0.0


@pytest.mark.slow
def test_routers_and_replicas_in_processes_of_their_own():
    """Bugs: over real sockets a process is never asked, or never ends."""
    figures = over_sockets(replicas=6, routers=2, rate=10.0, seconds=1.0, pairs=5000)
    assert len(figures) == 2
    for router in figures:
        assert router.first_s and router.frames and router.memory_mb > 0
        assert router.index_mb < 20
