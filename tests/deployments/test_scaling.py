"""How many replicas: a pure function, and Serve's policies around it."""

from types import SimpleNamespace

import pytest

from deployments.autoscaling import PoolPolicy, PoolsPolicy, Rates
from deployments.scaling import Demand, Memory, Pool, Promise, Seen, decide

GPU = Pool(10_000, 5_000, start_seconds=30, price=1.0, maximum=20)
CPU = Pool(500, 100, start_seconds=5, price=0.05, maximum=10)
PROMISE = Promise(ttft=2.0, busy=0.9, calm_seconds=60, idle_seconds=100)


def play(demands, *, pools=None, start=None, memory=None, since=0.0):
    """A decision a second; replicas are ready when their pool says. The plans, by second."""
    pools = pools or {"gpu": GPU}
    ready = dict(start or dict.fromkeys(pools, 0))
    coming = {name: [] for name in pools}
    memory, plans = memory or Memory(), []
    for second, (prompt, output, waiting) in enumerate(demands):
        now = since + second
        for name, times in coming.items():
            ready[name] += sum(when <= now for when in times)
            coming[name] = [when for when in times if when > now]
        seen = {name: Seen(ready[name], len(coming[name])) for name in pools}
        demand = Demand(now, prompt, output, waiting, int(waiting / 100))
        plan = decide(pools, seen, demand, memory, PROMISE)
        memory = plan.memory
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
    """Demand that keeps so many GPU replicas busy."""
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
    seen = {"gpu": Seen(4, 0, kv_used=0.97)}
    plan = decide({"gpu": GPU}, seen, Demand(0, *work(1)[:2]), Memory(), PROMISE)
    assert plan.targets["gpu"] == 5 and "KV" in plan.reasons["gpu"]


def test_limits_hold_and_are_named():
    """A bill without an upper end."""
    small = {"gpu": Pool(10_000, 5_000, 30, minimum=2, maximum=3)}
    plan = play([work(10)] * 10, pools=small, start={"gpu": 2})[-1]
    assert plan.targets["gpu"] == 3 and "maximum, " in plan.reasons["gpu"]
    plan = play([work(0)] * 200, pools=small, start={"gpu": 2})[-1]
    assert plan.targets["gpu"] == 2 and "minimum" in plan.reasons["gpu"]


def test_idle_pools_go_to_zero_and_wake():
    """An endpoint that costs a GPU all night, or never comes back."""
    plans = play([work(1)] * 10 + [(0, 0, 0)] * 150, start={"gpu": 2})
    assert plans[100].targets["gpu"] >= 1 and plans[-1].targets["gpu"] == 0
    woken = decide(
        {"gpu": GPU}, {"gpu": Seen(0)}, Demand(400, 0, 0, 0, 1), plans[-1].memory, PROMISE
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
    assert all(one["gpu"] or one["cpu"] for one in ended)


# -- Serve's policies


def context(name, ready, target, now, **metrics):
    return SimpleNamespace(
        deployment_name=name,
        app_name="manta",
        current_num_replicas=ready,
        target_num_replicas=target,
        current_time=now,
        total_queued_requests=0.0,
        aggregated_metrics={key: {"r1": value} for key, value in metrics.items()},
    )


FIELDS = {
    "prompt_rate": 10_000.0,
    "output_rate": 5_000.0,
    "start_seconds": 30.0,
    "minimum": 0,
    "maximum": 20,
}


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
    # What the routers have measured replaces what the configuration says.
    contexts["id-router"].aggregated_metrics.update(
        {"engine-gpu_prompt_rate": {"r1": 40_000.0}, "engine-gpu_output_rate": {"r1": 20_000.0}}
    )
    contexts["id-gpu"].current_time = 40
    assert policy._measured("gpu", contexts["id-router"]).prompt_rate == 40_000
    assert policy({"id-router": contexts["id-router"]}) == ({"id-router": 2}, {})


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
    rates = Rates(0.0)
    assert rates.update(0.1, tokens=50) == {"tokens": 0.0}
    rates.update(1.0, tokens=100)
    assert rates.update(3.0, tokens=300) == {"tokens": 100.0}
    assert rates.update(3.05, tokens=900) == {"tokens": 100.0}
    assert rates.update(5.0, tokens=0) == {"tokens": 0.0}
