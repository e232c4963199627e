"""A trace in virtual time, against waits that are known in closed form."""

from collections.abc import Sequence
from itertools import pairwise
from random import Random
from typing import Any

import pytest

from deployments.config.load import parse_config
from deployments.config.models import MantaConfig
from deployments.simulation.replay import Replay, replay, simulated_pools
from deployments.simulation.speed import Speed
from engine.errors import ConfigError
from loadtest.scenario.arrivals import TraceRow

SERVICE = 0.1  # seconds of a request, which is one step
HOPS = 0.0015  # seconds on the way from a router to a replica and back, at most
ONE = Speed("cpu", SERVICE, 0.0, 0.0, 60_000, 1, 512)  # one request at a time
PATIENT = {"wait_seconds": 3600, "replicas": 1}


def config_of(pool: dict[str, Any], **sections: Any) -> MantaConfig:
    data = {"model": "m", "pools": {"cpu": {"price": 2.0, **pool}}, "router": PATIENT, **sections}
    return parse_config(data, {}, check_files=False)


def run(config: MantaConfig, trace: Sequence[TraceRow], speed: Speed = ONE, **more: Any) -> Replay:
    return replay(config, simulated_pools(config, {"cpu": speed}, {}), trace, **more)


def waits(times: Sequence[float], servers: int = 1) -> list[float]:
    """Return the seconds from each arrival to its first token, by Lindley's recursion."""
    free, seconds = [0.0] * servers, []
    for time in times:
        earliest = min(range(servers), key=free.__getitem__)
        free[earliest] = max(free[earliest], time) + SERVICE
        seconds.append(free[earliest] - time)
    return seconds


def poisson(rate: float, count: int) -> list[float]:
    dice, now, times = Random(3), 0.0, []
    for _ in range(count):
        times.append(now)
        now += dice.expovariate(rate)
    return times


def test_a_queue_that_grows_evenly() -> None:
    """D/D/1 above capacity: the n-th request waits n times what each is short of."""
    patient = config_of({}, limits={"queue_seconds": 3600})
    times = [0.08 * number for number in range(100)]
    outcome = run(patient, [TraceRow(time, 10, 1, ()) for time in times])
    refused = outcome.refused.total()
    assert refused <= 2  # until the router has seen the replica full, and knows its rate
    longest = SERVICE + 0.02 * 99 - SERVICE * refused
    assert outcome.firsts[-1] == pytest.approx(longest, abs=HOPS)
    assert outcome.firsts[0] == pytest.approx(SERVICE, abs=HOPS)


def test_random_arrivals_wait_as_the_theory_says() -> None:
    """M/D/1: Lindley's recursion gives each wait, Pollaczek and Khinchine their mean."""
    times = poisson(6.0, 3000)
    outcome = run(
        config_of({}, limits={"queue_seconds": 3600}), [TraceRow(t, 10, 1, ()) for t in times]
    )
    known = sorted(waits(times))
    assert not outcome.refused and len(outcome.firsts) == 3000
    for share in (0.5, 0.9, 0.99):
        assert outcome.first(share) == pytest.approx(known[int(share * 3000)], abs=HOPS)
    load = 6.0 * SERVICE
    mean = sum(outcome.firsts) / 3000 - SERVICE
    assert mean == pytest.approx(load * SERVICE / (2 * (1 - load)), rel=0.1)
    gap = max(after - before for before, after in pairwise(times))
    assert gap > SERVICE  # else nothing was ever idle


def test_equal_runs_are_equal_and_cost_what_they_last() -> None:
    """A plan that changes when nothing else did; a pool of two that costs as one."""
    trace = [TraceRow(time, 50, 20, ()) for time in poisson(4.0, 200)]
    speed = Speed("cpu", 0.01, 0.001, 0.0005, 60_000, 16, 512)
    config = config_of({"replicas": 2}, router={"replicas": 2})
    first, second = run(config, trace, speed), run(config, trace, speed)
    assert first == second and len(first.firsts) == 200
    pool = first.pools["cpu"]
    assert pool.replica_seconds == pytest.approx(2 * first.seconds)
    assert first.cost == pytest.approx(2 * first.seconds / 3600 * 2.0)
    assert first.gap(0.5) == pytest.approx(0.012, rel=0.5)


def test_a_second_replica_comes_after_its_start_and_goes() -> None:
    """Replicas that are there before they are ready, that never go, or that lose requests."""
    times = [0.09 * number for number in range(300)]  # more than one replica's work, for 27 s
    scales = {"min_replicas": 1, "max_replicas": 2, "start_seconds": 5.0}
    scaling = {"ttft": 1.0, "calm_seconds": 5.0, "idle_seconds": 5.0}
    config = config_of(scales, scaling=scaling, limits={"queue_seconds": 3600})
    trace = [TraceRow(time, 10, 1, ()) for time in times]
    outcome = run(config, trace, settle=120.0)
    pool = outcome.pools["cpu"]
    assert pool.most == 2
    alone, two = max(waits(times)), max(waits(times, 2))
    assert two < outcome.firsts[-1] < 0.8 * alone
    assert outcome.seconds < pool.replica_seconds < 1.9 * outcome.seconds
    assert len(outcome.firsts) + outcome.refused.total() == 300
    fixed = run(config_of({"min_replicas": 2, "max_replicas": 2}, scaling=scaling), trace)
    assert fixed.firsts == pytest.approx(sorted(waits(times, 2)), abs=2 * HOPS)
    slow = run(config_of({**scales, "start_seconds": 20.0}, scaling=scaling), trace)
    assert slow.pools["cpu"].replica_seconds < 2 * slow.seconds


def test_the_first_request_of_an_empty_pool_waits_for_a_start() -> None:
    """A pool that is empty, and answers at once or never."""
    scales = {"min_replicas": 0, "max_replicas": 1, "start_seconds": 7.0}
    config = config_of(scales, scaling={"ttft": 1.0, "calm_seconds": 2.0, "idle_seconds": 3.0})
    trace = [TraceRow(0.0, 10, 1, ()), TraceRow(0.5, 10, 1, ()), TraceRow(40.0, 10, 1, ())]
    outcome = run(config, trace, settle=60.0)
    assert len(outcome.firsts) == 3 and not outcome.refused
    for first in (outcome.firsts[0], outcome.firsts[-1]):
        assert 6.5 < first < 7.0 + 2.5  # of the start, and of the reports before the decision
    assert outcome.pools["cpu"].replica_seconds < 0.8 * outcome.seconds


def test_what_does_not_fit_is_refused() -> None:
    """A service that answers ten times its capacity; a prompt that no replica could hold."""
    trace = [TraceRow(time, 10, 1, ()) for time in poisson(100.0, 500)]
    outcome = run(config_of({}), [*trace, TraceRow(trace[-1].t, 40_000, 1, ())])
    assert outcome.refused["context_length_exceeded"] == 1
    assert 400 < outcome.refused["overloaded"] < 500
    assert outcome.first(0.99) < 2.5  # scaling.ttft, and the steps at the replica


def test_prompts_that_begin_alike_are_computed_once() -> None:
    """Blocks of a trace that no cache knows again, or that all rows share."""
    speed = Speed("cpu", 0.01, 0.0, 0.001, 60_000, 4, 512)

    def last(blocks: tuple[int, ...], caching: bool = True) -> float:
        rows = [TraceRow(0.0, 1100, 1, (1, 2)), TraceRow(30.0, 1100, 1, blocks)]
        own = Speed("cpu", 0.01, 0.0, 0.001, 60_000, 4, 512, prefix_caching=caching)
        return run(config_of({}), rows, own if not caching else speed).firsts[0]

    assert last((1, 2)) < 0.2 < last((1, 3)) < 0.7 < 1.0 < last((3, 2))
    assert last((1, 2), caching=False) > 1.0


def test_pools_with_roles_are_not_simulated() -> None:
    """A figure that leaves out what such pools are for."""
    roles = {"p": {"role": "prefill"}, "d": {"role": "decode"}}
    data = {"model": "m", "pools": roles, "engine": {"device": "cpu"}}
    config = parse_config(data, {}, check_files=False)
    with pytest.raises(ConfigError, match="leave the roles out"):
        simulated_pools(config, {"p": ONE, "d": ONE}, {})
