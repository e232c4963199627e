"""How many replicas: a pure function, and Serve's policies around it."""

import itertools
from dataclasses import replace
from random import Random
from types import SimpleNamespace

import pytest

from deployments.scaling.decide import (
    Demand,
    PoolModel,
    PoolState,
    ScalingHistory,
    ServiceObjective,
    decide,
)
from deployments.scaling.policy import CounterRates, PoolPolicy, PoolsPolicy, _demand

GPU = PoolModel(10_000, 5_000, start_seconds=30, price=1.0, maximum=20)
GPU_60 = replace(GPU, maximum=60)
CPU = PoolModel(500, 100, start_seconds=5, price=0.05, maximum=10)
PROMISE = ServiceObjective(ttft=2.0, busy=0.9, calm_seconds=60, idle_seconds=100)


def play(demands, *, pools=None, start=None, history=None, since=0.0):
    """Decide once a second, with replicas that are ready when their pool says; return the plans."""
    pools = pools or {"gpu": GPU}
    ready = dict(start or dict.fromkeys(pools, 0))
    coming = {name: [] for name in pools}
    history, plans = history or ScalingHistory(), []
    for second, (prompt, output, waiting) in enumerate(demands):
        now = since + second
        for name, times in coming.items():
            ready[name] += sum(when <= now for when in times)
            coming[name] = [when for when in times if when > now]
        seen = {name: PoolState(ready[name], len(coming[name])) for name in pools}
        demand = Demand(now, prompt, output, waiting, int(waiting / 100))
        plan = decide(pools, seen, demand, history, PROMISE)
        history = plan.history
        for name, target in plan.targets.items():
            have = ready[name] + len(coming[name])
            coming[name] += [now + pools[name].start_seconds] * max(0, target - have)
            fewer = max(0, have - target)
            dropped = min(fewer, len(coming[name]))
            coming[name] = coming[name][: len(coming[name]) - dropped]
            ready[name] -= fewer - dropped
        plans.append(plan)
    return plans


def work(replicas: float):
    """Return the demand that keeps so many GPU replicas busy."""
    return replicas * 5_000, replicas * 2_500, 0


def test_steady_work_has_steady_replicas():
    """Counts that swing with the noise of arrivals."""
    plans = play([work(4 + 0.2 * (-1) ** n) for n in range(200)], start={"gpu": 5})
    assert {plan.targets["gpu"] for plan in plans} == {5}


def test_a_jump_is_answered_within_seconds_and_says_why():
    """Half a minute of averaging before anything happens."""
    plans = play([work(2)] * 60 + [work(10)] * 10, start={"gpu": 3})
    assert plans[59].targets == {"gpu": 3}
    assert plans[65].targets["gpu"] >= 12
    assert "work of" in plans[65].reasons["gpu"] or "wait" in plans[65].reasons["gpu"]


def test_a_trend_is_followed_ahead():
    """Replicas that come when the queue is there already."""
    ramp = [work(4 + n / 20) for n in range(80)]
    plans = play(ramp, start={"gpu": 5})
    needed_then = (4 + (79 + GPU.start_seconds) / 20) / PROMISE.busy
    assert plans[-1].targets["gpu"] >= int(needed_then)
    assert any("in 30 s" in plan.reasons["gpu"] for plan in plans)


def test_down_only_after_a_calm_time_and_not_below_what_it_needed():
    """A replica stopped in the gap between two bursts."""
    plans = play([work(9)] * 60 + [work(3)] * 100, start={"gpu": 11})
    assert {plan.targets["gpu"] for plan in plans[60:110]} == {11}
    assert plans[-1].targets["gpu"] == 4
    assert "carry the most of the last 60 s" in next(
        plan.reasons["gpu"] for plan in plans[100:] if plan.targets["gpu"] < 11
    )


def test_what_waits_counts():
    """A backlog that nobody works off, because arrivals alone would fit."""
    prompt, output, _ = work(3)
    plans = play([work(3)] * 30 + [(prompt, output, 400_000)] * 5, start={"gpu": 4})
    assert plans[-1].targets["gpu"] > 4
    assert any("prompt tokens wait" in plan.reasons["gpu"] for plan in plans)


def test_a_full_kv_cache_counts():
    """Long contexts: little work a second, and no room."""
    seen = {"gpu": PoolState(4, 0, kv_used=0.97)}
    plan = decide({"gpu": GPU}, seen, Demand(0, *work(1)[:2], 500), ScalingHistory(), PROMISE)
    assert plan.targets["gpu"] == 5 and "KV" in plan.reasons["gpu"]
    # Full, and nobody waits for it: as it should be.
    plan = decide({"gpu": GPU}, seen, Demand(0, *work(1)[:2]), ScalingHistory(), PROMISE)
    assert plan.targets["gpu"] == 4


def test_what_waits_must_be_little_for_those_that_stay():
    """52 replicas to 23 while there is still a second's work for 52, and one up and down again."""
    queue = [work(2)] * 60 + [work(20)] * 400
    ready, waiting, counts = 3, 0.0, []
    history, coming = ScalingHistory(), []
    for now, (prompt, output, _) in enumerate(queue):
        ready += sum(when <= now for when in coming)
        coming = [when for when in coming if when > now]
        waiting = max(0.0, waiting + prompt - ready * 5_000)
        demand = Demand(now, prompt, output, waiting, int(waiting / 100))
        plan = decide(
            {"gpu": GPU_60}, {"gpu": PoolState(ready, len(coming))}, demand, history, PROMISE
        )
        history, wanted = plan.history, plan.targets["gpu"]
        coming += [now + GPU.start_seconds] * (wanted - ready - len(coming))
        ready = min(ready, wanted)
        counts.append(wanted)
    top = counts.index(max(counts))
    assert counts[:top] == sorted(counts[:top]) and counts[top:] == sorted(counts[top:])[::-1]
    assert counts[top] > counts[-1] == 24


def test_nobody_goes_in_the_middle_of_a_rise():
    """A ramp whose last seconds look flat: ten replicas go, and come back at its end."""
    dice = Random(1)
    ramp = [work(6 + 0.2 * min(n, 120) + dice.gauss(0, 1.0)) for n in range(260)]
    counts = [plan.targets["gpu"] for plan in play(ramp, pools={"gpu": GPU_60}, start={"gpu": 7})]
    ways = [b - a for a, b in itertools.pairwise(counts) if a != b]
    assert sum((a > 0) != (b > 0) for a, b in itertools.pairwise(ways)) <= 1, counts


def test_what_has_just_grown_stays():
    """Up for a jump, and down again a moment later, because the mean has not seen it yet."""
    jump = [work(2)] * 100 + [work(10), work(10), work(9), work(7)] * 30
    targets = [plan.targets["gpu"] for plan in play(jump, start={"gpu": 3})]
    assert targets[103] >= 11 and targets[100:120] == sorted(targets[100:120])


def test_limits_hold_and_are_named():
    """A bill without an upper end."""
    small = {"gpu": PoolModel(10_000, 5_000, 30, minimum=2, maximum=3)}
    plan = play([work(10)] * 10, pools=small, start={"gpu": 2})[-1]
    assert plan.targets["gpu"] == 3 and "maximum, " in plan.reasons["gpu"]
    plan = play([work(0)] * 200, pools=small, start={"gpu": 2})[-1]
    assert plan.targets["gpu"] == 2 and "minimum" in plan.reasons["gpu"]


def test_idle_pools_go_to_zero_and_wake():
    """An endpoint that costs a GPU all night, or never comes back."""
    plans = play([work(1)] * 10 + [(0, 0, 0)] * 150, start={"gpu": 2})
    assert plans[100].targets["gpu"] >= 1 and plans[-1].targets["gpu"] == 0
    woken = decide(
        {"gpu": GPU}, {"gpu": PoolState(0)}, Demand(400, 0, 0, 0, 1), plans[-1].history, PROMISE
    )
    assert woken.targets["gpu"] == 1


def test_a_cpu_pool_holds_takes_the_overflow_and_leaves():
    """Two pools that both carry everything, or none that does while a GPU node starts."""
    pools = {"gpu": GPU, "cpu": CPU}
    plans = play([work(0.02)] * 60, pools=pools, start={"gpu": 0, "cpu": 1})
    assert plans[-1].targets == {"gpu": 0, "cpu": 1}
    assert plans[-1].reasons["gpu"] == "cpu carries it"
    more = [work(0.02)] * 60 + [work(3)] * 100
    plans = play(more, pools=pools, start={"gpu": 0, "cpu": 1})
    during, after = plans[70], plans[-1]
    assert during.targets["gpu"] >= 4 and during.targets["cpu"] == CPU.maximum
    assert after.targets["gpu"] >= 4 and after.targets["cpu"] == 0
    back = more + [work(0.02)] * 200
    plans = play(back, pools=pools, start={"gpu": 0, "cpu": 1})
    assert plans[-1].targets["gpu"] == 0 and plans[-1].targets["cpu"] >= 1
    ended = [plan.targets for plan in plans[160:]]
    assert all(item["gpu"] or item["cpu"] for item in ended)


def test_what_a_pool_at_its_maximum_cannot_do_another_does():
    """Requests that wait for ever at the cheaper pool's limit, beside a pool that could come."""
    pools = {"gpu": replace(GPU, maximum=2), "cpu": CPU, "dear": replace(GPU, price=3.0)}
    plans = play(
        [work(1.5)] * 70 + [work(2.0)] * 70 + [work(1.5)] * 150,
        pools=pools,
        start={"gpu": 2, "cpu": 0, "dear": 0},
    )
    assert plans[65].targets == {"gpu": 2, "cpu": 0, "dear": 0}
    assert plans[130].targets["gpu"] == 2
    assert plans[130].targets["cpu"] == 8  # a tenth of the work, that of 0.2 GPUs
    assert plans[130].reasons["cpu"] == "beyond what gpu can do"
    assert plans[130].targets["dear"] == 0
    taken = [plan.targets["cpu"] for plan in plans[140:]]
    assert taken[:50] == [8] * 50, "gone before it was calm"
    assert taken[-1] == 0


def test_the_third_pool_takes_what_two_at_their_maximum_leave():
    """The second pool's limit forgotten."""
    pools = {"gpu": replace(GPU, maximum=2), "cpu": CPU, "dear": replace(GPU, price=3.0)}
    plans = play([work(4)] * 100, pools=pools, start={"gpu": 2, "cpu": 10, "dear": 0})
    assert plans[-1].targets == {"gpu": 2, "cpu": 10, "dear": 3}
    assert plans[-1].reasons["dear"] == "beyond what gpu and cpu can do"


def test_a_start_is_no_idleness():
    """A pool that is given up before its first replica is there, because that takes longer than
    idle_seconds: it never comes."""
    slow = PoolModel(10_000, 5_000, start_seconds=3 * PROMISE.idle_seconds, maximum=2)
    plans = play([(0, 0, 0)] * int(4.5 * PROMISE.idle_seconds), pools={"gpu": slow})
    counts = [plan.targets["gpu"] for plan in plans]
    assert set(counts[: int(3.9 * PROMISE.idle_seconds)]) == {1} and counts[-1] == 0


# -- Serve's policies


def context(name, ready, target, now, **metrics):
    return SimpleNamespace(
        capacity_adjusted_min_replicas=0,
        capacity_adjusted_max_replicas=20,
        deployment_name=name,
        app_name="manta",
        current_num_replicas=ready,
        target_num_replicas=target,
        current_time=now,
        total_queued_requests=0.0,
        aggregated_metrics={key: {"r1": value} for key, value in metrics.items()},
    )


FIELDS = {"prompt_rate": 10_000.0, "output_rate": 5_000.0, "start_seconds": 30.0}


def test_the_application_policy_reads_routers_and_engines():
    """Metrics under names that nobody reports; a router that is scaled with the engines."""
    policy = PoolsPolicy({"gpu": FIELDS}, {"busy": 0.9})
    for now in range(30):
        contexts = {
            "id-router": context("router", 2, 2, now, prompt_rate=20_000, output_rate=10_000),
            "id-gpu": context("engine-gpu", 1, 1, now, kv_usage=0.5, waiting_tokens=0),
        }
        decisions, states = policy(contexts)
    assert decisions["id-router"] == 2
    assert decisions["id-gpu"] >= 5 and states["id-gpu"]["reason"]
    # What the engines have measured replaces what the configuration says; Serve's limits hold.
    fast = {"prompt_able": 40_000.0, "output_able": 20_000.0}
    contexts["id-gpu"] = context("engine-gpu", 1, 1, 40, **fast)
    contexts["id-gpu"].capacity_adjusted_max_replicas = 2
    assert policy(contexts)[0]["id-gpu"] == 2
    assert policy._pools["gpu"].output_rate == 20_000
    assert policy({"id-router": contexts["id-router"]}) == ({"id-router": 2}, {})


def test_what_waits_in_the_routers_counts_once():
    """A queue told in tokens of prompt and output, taken for prompts alone: four times the work."""
    policy = PoolsPolicy({"gpu": FIELDS}, {"busy": 0.9})
    queue = {"prompt_rate": 1_000, "output_rate": 3_000, "queued_tokens": 8_000, "queued": 20}
    router, engine = context("router", 2, 2, 0, **queue), context("engine-gpu", 2, 2, 0, running=3)
    demand = _demand({"gpu": engine}, [router], 0.0)
    assert (demand.waiting_tokens, demand.waiting, demand.running) == (2_000, 20, 3)
    assert policy({"r": router, "e": engine})[0]["e"] == 2
    # Those of batch work have queues of their own.
    batch = context("batch-router", 1, 1, 0, **queue, in_flight=9)
    demand = _demand({"gpu": engine}, [router, batch], 0.0)
    assert (demand.waiting_tokens, demand.waiting, demand.running) == (4_000, 40, 9)


def test_routers_of_batch_work_are_heard_and_not_scaled() -> None:
    """A dataset's queue that starts no replica, or routers that the policy changes with the
    engines."""
    policy = PoolsPolicy({"gpu": FIELDS}, {"busy": 0.9})
    for now in range(30):
        rates = {"prompt_rate": 20_000, "output_rate": 10_000}
        contexts = {
            "r": context("router", 2, 2, now, prompt_rate=0, output_rate=0),
            "b": context("batch-router", 4, 4, now, **rates),
            "e": context("engine-gpu", 1, 1, now, kv_usage=0.5, waiting_tokens=0),
        }
        decisions, _ = policy(contexts)
    assert (decisions["r"], decisions["b"]) == (2, 4) and decisions["e"] >= 5


def test_a_backlog_counts_when_nothing_arrives_any_more():
    """The end of a burst: three replicas to one, and that one to a pool that is slower still, with
    minutes of work in the queue."""
    pools = {"gpu": replace(GPU, maximum=3), "cpu": CPU}
    left = [max(0.0, 400_000 - n * 10_000) for n in range(100)]
    demands = [work(6)] * 80 + [(0, 0, tokens) for tokens in left]
    plans = play(demands, pools=pools, start={"gpu": 3, "cpu": 0})
    for second, plan in enumerate(plans[80:]):
        assert plan.targets["gpu"] == 3 or left[second] < 50_000, plan
    assert plans[-1].targets["gpu"] < 3


def test_what_a_leaving_replica_has_is_no_idleness():
    """The last replica stopped while 100 requests are still with two that drain, and will be handed
    over to it."""
    policy = PoolsPolicy({"gpu": FIELDS}, {"idle_seconds": 4.0, "calm_seconds": 6.0})
    for now in range(30):
        router = context("router", 1, 1, now, prompt_rate=0, output_rate=0, in_flight=100)
        engine = context("engine-gpu", 1, 1, now, running=0)
        assert policy({"r": router, "e": engine})[0]["e"] == 1


def test_silence_is_no_idleness():
    """Processes without a core to report from, whose work is taken for none: the fleet is stopped
    at its busiest."""
    policy = PoolsPolicy({"gpu": FIELDS}, {"idle_seconds": 4.0, "calm_seconds": 6.0})
    load = {"prompt_rate": 30_000, "output_rate": 15_000, "in_flight": 100}
    for now in range(1, 60):
        router = context("router", 1, 1, now, **(load if now < 30 else {}))
        decided = policy({"r": router, "e": context("engine-gpu", 7, 7, now, running=50)})[0]["e"]
        assert decided >= 6
    for now in range(60, 90):
        router = context("router", 1, 1, now, prompt_rate=0, output_rate=0, in_flight=0)
        decided = policy({"r": router, "e": context("engine-gpu", 7, 7, now, running=0)})[0]["e"]
    assert decided == 0


def test_decides_once_a_second():
    """A controller that is busy with what it decided a tenth of a second ago."""
    policy = PoolsPolicy({"gpu": FIELDS}, {})
    policy({"gpu": context("engine-gpu", 1, 1, 5.0, running=1)})
    unread = context("engine-gpu", 1, 1, 5.5)
    del unread.aggregated_metrics
    assert policy({"gpu": unread})[0] == {"gpu": 1}


def test_a_new_policy_leaves_a_gpu_that_is_there():
    """An update of the configuration: the new policy has no past yet, takes the load for none, and
    gives everything to the CPU pool."""
    pools = {"gpu": GPU, "cpu": CPU}
    plans = play([(0, 0, 0)] * 3 + [work(2)] * 70, pools=pools, start={"gpu": 3, "cpu": 1})
    assert min(plan.targets["gpu"] for plan in plans) == 3


def test_a_long_answer_is_no_idleness():
    """The only replica is stopped under the stream of a request that came before idle_seconds."""
    history = ScalingHistory()
    for now in range(300):
        plan = decide(
            {"gpu": GPU}, {"gpu": PoolState(1)}, Demand(now, 0, 0, running=1), history, PROMISE
        )
        history = plan.history
    assert plan.targets == {"gpu": 1}


def test_the_policy_measures_how_long_a_start_takes():
    """A trend followed for 30 s ahead where nodes take five minutes."""
    policy = PoolsPolicy({"gpu": FIELDS}, {})
    for now, ready, target in ((0, 1, 1), (1, 1, 3), (100, 2, 3), (201, 3, 3)):
        policy({"gpu": context("engine-gpu", ready, target, now, prompt_rate=1, output_rate=1)})
    assert policy._pools["gpu"].start_seconds == pytest.approx(30 + 0.3 * 170)


def test_the_deployment_policy_stands_alone():
    """`serve.run`, which takes no policy for an application."""
    policy = PoolPolicy("cpu", FIELDS, {})
    for now in range(30):
        target, state = policy(
            context("engine-cpu", 1, 1, now, prompt_rate=30_000.0, output_rate=5_000.0)
        )
    assert target >= 4 and "work of" in state["reason"]


def test_rates_of_counters():
    """A first rate since the beginning of time, or a division by nothing."""
    rates = CounterRates(0.0)
    assert rates.update(0.1, tokens=50) == {"tokens": 0.0}
    rates.update(1.0, tokens=100)
    assert rates.update(3.0, tokens=300) == {"tokens": 100.0}
    assert rates.update(3.05, tokens=900) == {"tokens": 100.0}
    assert rates.update(5.0, tokens=0) == {"tokens": 0.0}
