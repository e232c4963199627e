"""The simulator: what it models holds, and what it shows about routing and scaling stays so."""

import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from random import Random

import pytest

from bench.simulate import calibrate, costs, scaling
from bench.simulate.fleet.cluster import run
from bench.simulate.fleet.replica import Job, SimReplica
from bench.simulate.fleet.workload import Mix, ideal_hits, jobs
from bench.simulate.pictures import Line, Panel, svg
from bench.simulate.policies import PrefixTree, RoundRobin, TwoChoices
from bench.simulate.routing import adapters, compare, make_case
from deployments.routing.step_cost import StepCost
from deployments.simulation.speed import Speed

SPEED = Speed("gpu", 0.01, 0.001, 0.0001, 10_000, 4, 100, slots=2, adapter_seconds=0.5)


def serve(*work: Job, speed: Speed = SPEED):
    return run([speed], RoundRobin(), list(work), routers=1)


def test_a_request_takes_its_steps():
    """A step that costs nothing, or a prompt that is computed at once whatever its length."""
    job = Job(0.0, prompt=250, output=3)
    serve(job)
    chunks = 3 * 0.01 + 250 * 0.0001 + 0.001  # 100, 100 and 50 tokens; the last one samples
    assert abs(job.first - 0.0005 - chunks) < 1e-9
    other = Job(0.0, prompt=50, output=3)
    long = serve(other, Job(5.0, 10, 1))
    assert abs(other.end - other.first - 2 * 0.011) < 1e-9
    assert long.pending == 0


def test_an_arrival_ends_a_stretch_of_equal_steps():
    """Someone who waits for the end of another's answer, in a simulator that skips steps."""
    first, second = Job(0.0, 10, 100), Job(0.5, 10, 2)
    serve(first, second)
    assert second.first - second.arrival < 0.04
    assert first.end < 0 < second.first  # it ended when all had a first token


def test_what_comes_during_a_step_waits_for_the_one_launched_ahead():
    """First tokens a step too soon, half of what they take on a GPU; or someone who comes to an
    idle replica, or just as its last request ends, kept waiting for a step that nobody launched."""

    def wait(speed: Speed, at: float, first: int = 100) -> float:
        job = Job(at, 10, 2)
        serve(Job(0.0, 10, first), job, speed=speed)
        return job.first - job.arrival

    ahead = replace(SPEED, ahead=True)
    one_step = 0.01 + 0.001
    assert abs(wait(ahead, 0.5) - wait(SPEED, 0.5) - one_step) < 1e-6
    assert wait(ahead, 5.0) == wait(SPEED, 5.0)
    assert wait(ahead, 0.0, first=1) == wait(SPEED, 0.0, first=1)


def test_rows_and_memory_make_requests_wait():
    """A replica without limits, where queues never form."""
    work = [Job(0.0, 10, 50) for _ in range(5)]
    serve(*work)
    assert max(job.first for job in work) > 50 * 0.01
    big = [Job(0.0, 5000, 100), Job(0.0, 5000, 100)]
    serve(*big)
    assert big[1].first > big[0].end


def test_prefixes_and_adapters_are_kept_and_pushed_out():
    """Hits that nothing can evict; adapters that are loaded for each request, or never."""
    new = [Random(n).randbytes(8) for n in range(40)]
    first, again = Job(0.0, 650, 2, new[:10]), Job(1.0, 650, 2, new[:10])
    flood = [Job(2.0 + n / 10, 6000, 1, [bytes([n, m]) * 4 for m in range(90)]) for n in range(4)]
    last = Job(9.0, 650, 2, new[:10])
    serve(first, again, *flood, last)
    assert (first.cached, again.cached) == (0, 640) and last.cached < 640
    order = ["a", "b", "a", "c", "a", "b"]
    work = [Job(float(n), 10, 2, adapter=name) for n, name in enumerate(order)]
    result = serve(*work)
    assert result.loads == 4  # a, b, c, and b again
    assert work[0].first > 0.5 > work[2].first - 2.0


def test_workloads_are_seeded_and_as_asked():
    """Two policies that did not see the same requests; a rate that is not the rate."""
    mix = Mix(0.4, 0.3, groups=8, adapters=10, adapted=0.5, burst=2.0)
    work = jobs(mix, 50, 100, 2, 1)
    again = jobs(mix, 50, 100, 2, 1)
    assert [(j.arrival, j.prompt, j.prefix_hashes) for j in work] == [
        (j.arrival, j.prompt, j.prefix_hashes) for j in again
    ]
    assert 0.9 * 5000 < len(work) < 1.1 * 5000
    assert 0.4 < sum(bool(job.adapter) for job in work) / len(work) < 0.6
    assert 0 < ideal_hits(work) < sum(job.prompt for job in work)
    assert all(len(job.prefix_hashes) == (job.prompt - 1) // 64 for job in work)


def test_routing_beats_the_others_where_speeds_differ():
    """Slow replicas that get as much as fast ones; prefixes that are computed again."""
    rows, outcomes = compare(make_case("mixed", 4, 12.0))
    by_policy = {row.case.rpartition("/")[2]: row for row in rows}
    assert by_policy["p99_ttft"].ratio <= 0.5, by_policy
    assert by_policy["prefix_hit_rate"].peer - by_policy["prefix_hit_rate"].ours <= 0.03, by_policy
    assert outcomes[0].pending == 0


@pytest.mark.parametrize(
    ("seconds", "share"),
    [
        pytest.param(60.0, 0.3, marks=pytest.mark.slow),
        pytest.param(240.0, 0.2, marks=pytest.mark.nightly),
    ],
)
def test_adapters_stay_in_few_places(seconds: float, share: float) -> None:
    """Every replica loading every adapter in turn, or keeping what came last rather than what is
    wanted; five times fewer loads by a lucky seed; what slots gain, told as routing's gain."""
    rows, outcomes = adapters(2.0, seconds)
    loads, slots, late = rows
    assert loads.ratio <= share and late.ratio < 1.0
    assert loads.peer > slots.peer > 3 * slots.ours
    assert len({outcome.seed for outcome in outcomes}) == 4 and len(outcomes) == 12


def test_policies_of_others_do_what_they_say():
    """Peers that are weaker than they are."""
    replicas = [SimReplica(index, SPEED, 1) for index in range(4)]
    turns = RoundRobin()
    turns.start(replicas, 1, Random(0))
    assert len({turns.choose(Job(0, 10, 1), 0) for _ in range(4)}) == 4
    two = TwoChoices()
    two.start(replicas, 1, Random(0))
    for _ in range(400):
        two.choose(Job(0, 10, 1), 0)
    assert max(two.in_flight) - min(two.in_flight) < 6
    tree = PrefixTree("tree", 0.5, (64, 1.5))
    tree.start(replicas, 1, Random(0))
    prefix_hashes = [Random(n).randbytes(8) for n in range(4)]
    places = {tree.choose(Job(0, 260, 1, prefix_hashes), 0) for _ in range(20)}
    assert len(places) == 1
    for _ in range(100):
        places.add(tree.choose(Job(0, 260, 1, prefix_hashes), 0))
    assert len(places) > 1  # too uneven: load decides


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=[pytest.mark.slow] if case == "daily" else [])
        for case in scaling.CASES
    ],
)
def test_scaling_keeps_its_promises(case):
    """A policy that pays for promises with replicas, or swings: 95 %, 1.15 times who knows the
    future, and one change of direction more, as what has gathered while replicas started is worked
    off by some that go again."""
    ours = scaling.simulate(case, scaling.MantaScaling())
    best = scaling.simulate(case, scaling.Clairvoyant(scaling.CASES[case][0]))
    assert ours.in_time >= 0.95 and ours.cost <= 1.15 * best.cost, (
        ours.in_time,
        ours.cost,
        best.cost,
    )
    assert ours.turns <= best.turns + 1, ours.reasons
    asked, good = (sum(column) for column in zip(*ours.minutes.values(), strict=True))
    assert good / asked == pytest.approx(ours.in_time)
    ElementTree.fromstring(scaling.picture(case, [ours, best]))
    if case == "quiet":
        zero = [gpus for now, _, gpus, _, _ in ours.at if 900 < now < 2300]
        assert not any(zero), "a CPU replica carries the trickle"


def test_pictures_are_xml():
    """A file that no browser shows."""
    line = Line("one", [(0.01, 0.0), (1.0, 0.5), (100.0, 1.0)], steps=True)
    ElementTree.fromstring(svg("t", [Panel("p", "x", [line], log=True), Panel("q", "y", [line])]))


class Watched(RoundRobin):
    def __init__(self):
        self.frames = []

    def frame(self, replica, now):
        self.frames.append(replica.stats())


def observed(cost: StepCost, seed: int) -> calibrate.Observed:
    """Return a replica's run of which every step costs exactly this."""
    load, policy = calibrate.LOADS["cpu"], Watched()
    speed = Speed("cpu", *cost, 50_000, load.rows, load.step_tokens)
    work = load.jobs(seed, 60)
    run([speed], policy, [*work, Job(work[-1].arrival + 19, 10, 1)], routers=1)
    waits = [job.first - job.arrival for job in work]
    gaps = [(job.end - job.first) / (job.output - 1) for job in work]
    return calibrate.Observed(
        policy.frames, waits, work, 50_000, load.rows, load.step_tokens, False, gaps
    )


def test_calibration_finds_a_replica_again():
    """A fit that does not fit what it was made from; an error that only the table has."""
    true = StepCost(0.02, 0.004, 0.0008)
    rows, lines = calibrate.compare("one", observed(true, 1), observed(true, 2))
    by_case = {row["case"].removeprefix("one/"): row for row in rows}
    assert abs(by_case["step"]["ours"] - 20) < 1 and abs(by_case["sequence"]["ours"] - 4) < 0.2
    assert abs(by_case["prompt_token"]["ours"] - 800) < 40
    for what in ("busy", "ttft_p50", "ttft_p90", "itl_p50", "itl_p90"):
        assert abs(by_case[what]["ratio"] - 1) < 0.05, rows
    assert by_case["stretch_error_p90"]["ours"] < 0.05
    assert {line["kind"] for line in lines} == {"stretch", "request"}
    # Twice as slow as it was: that is seen.
    slow = StepCost(*(2 * c for c in true))
    rows, _ = calibrate.compare("one", observed(true, 1), observed(slow, 2))
    assert next(row["ratio"] for row in rows if row["case"] == "one/busy") < 0.6


def test_costs_of_routing_are_told():
    """A table whose figures nobody can make again; a digest that is as large as the prompt."""
    by_case = {row.case: row for row in costs.all_rows()}
    assert by_case["prefix/told_of_a_prompt"].ours == (costs.PROMPT - 1) // 64 * 8
    assert 0 < by_case["prefix/told_a_second"].ours < 10_000
    assert all(row.ours > 0 for row in by_case.values())
    # The bounds are 50 and 500 us; and a loop over the replicas would take 15 times as long.
    few, many = by_case["decision/64"].ours, by_case["decision/1000"].ours
    assert many < 5 * few and few < 150 and many < 1500
