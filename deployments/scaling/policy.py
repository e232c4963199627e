"""PoolsPolicy, PoolPolicy: Serve's autoscaling policies, which call scaling.decide.

The policies convert Serve's reports into Demand and PoolState, and the plan into Serve's decision.
The controller calls policies ten times a second in its only event loop, so they decide only once a
second.

`PoolsPolicy` decides for all pools of an application together, from the routers' reports. Serve
accepts such a policy from a config file only. `PoolPolicy` is for a single deployment, as
`serve.run` needs, so it does not compare pools. Without reports of routers it uses the reports of
the pool's own engines, and the calls of routers that wait for a replica. These calls wake a pool
that has scaled to zero (router/admission/scale_from_zero.py).

A change of a policy's arguments restarts every replica, because Serve's code version depends on
them. Therefore limits are read from Serve's own options. Serve pickles these classes by value, so
all state is in the instance.
"""

import json
import logging
import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol, cast

from deployments.config.load import MantaConfig, PoolConfig
from deployments.scaling.decide import (
    Demand,
    PoolModel,
    PoolState,
    ScalingHistory,
    ScalingPlan,
    ServiceObjective,
    decide,
    keep,
)

logger = logging.getLogger("ray.serve")

ENGINE_PREFIX = "engine-"  # prefix of the names of the pools' deployments
ENCODER_PREFIX = "encoder-"
ROUTER = "router"
BATCH_ROUTER = "batch-router"
ROUTERS = (ROUTER, BATCH_ROUTER)  # deployments of routers, the second only if it is on
_SMOOTHING = 0.3  # weight of the newest start-up time in the mean
_KEY = "manta/scaling/"
_EVERY = 1.0  # seconds between two decisions
# assumed (prompt tokens/s, output tokens/s) of a replica, by kind of pool, until measured
RATES = {"gpu": (20_000.0, 8_000.0), "cpu": (1_000.0, 200.0)}
_PRICES = {"gpu": 1.0, "cpu": 0.1}
_IMAGES_AT_ONCE = 2.0  # mean number of images per encoder above which another encoder is started
_REPORT_SECONDS = 1.0  # seconds between two reports of a replica
_LOOK_BACK_SECONDS = 2.0  # length of the window over which Serve averages reports


def scales(pool: PoolConfig) -> bool:
    return pool.max_replicas is not None


def price(config: MantaConfig, name: str, pool: PoolConfig) -> float:
    """Return the price per hour of a pool's replica: the configured price, or a default."""
    return pool.price or _PRICES[config.kind(name, pool)]


def policy_arguments(config: MantaConfig, pools: Mapping[str, PoolConfig]) -> dict[str, Any]:
    """Return the keyword arguments of PoolsPolicy, which contain only the pools that scale."""
    models = {}
    for name, pool in pools.items():
        if scales(pool) and pool.role != "encoder":
            kind = config.kind(name, pool)
            models[name] = {
                "prompt_rate": RATES[kind][0],
                "output_rate": RATES[kind][1],
                "start_seconds": pool.start_seconds,
                "price": price(config, name, pool),
                **({} if pool.role == "engine" else {"role": pool.role}),
            }
    return {"pools": models, "objective": config.scaling.model_dump()}


def replica_options(name: str, pool: PoolConfig, config: MantaConfig) -> dict[str, Any]:
    """Return the Serve deployment options that set a pool's number of replicas: a fixed number, or
    autoscaling with limits and PoolPolicy."""
    if not scales(pool):
        return {"num_replicas": pool.replicas}
    arguments = policy_arguments(config, {name: pool})
    policy = {
        "policy_function": "deployments.scaling.policy:PoolPolicy",
        "policy_kwargs": {
            "name": name,
            "pool": arguments["pools"][name],
            "objective": arguments["objective"],
        },
    }
    return {"autoscaling_config": {**limits(pool), "policy": policy}}


def limits(pool: PoolConfig) -> dict[str, Any]:
    """Return Serve's autoscaling_config of a pool, without a policy."""
    assert pool.max_replicas is not None
    return counts(pool.min_replicas, pool.max_replicas)


def encoder_limits(pool: PoolConfig, calm_seconds: float) -> dict[str, Any]:
    """Return Serve's autoscaling_config of an encoder pool, which scales by the calls in progress.

    calm_seconds: see ScalingConfig.
    """
    delays = {"upscale_delay_s": _EVERY, "downscale_delay_s": calm_seconds}
    return {**limits(pool), **delays, "target_ongoing_requests": _IMAGES_AT_ONCE}


def counts(least: int, most: int) -> dict[str, Any]:
    """Return Serve's autoscaling_config with a minimum and a maximum, without a policy.

    initial_replicas is not set, because each redeployment would start again from it. Serve's delays
    are off, because the policy has its own.
    """
    return {
        "min_replicas": least,
        "max_replicas": most,
        "metrics_interval_s": _REPORT_SECONDS,
        "look_back_period_s": _LOOK_BACK_SECONDS,
        "upscale_delay_s": 0.0,
        "downscale_delay_s": 0.0,
    }


class ServeContext(Protocol):
    """The attributes of ray.serve's AutoscalingContext that this module uses."""

    deployment_name: str
    app_name: str | None
    current_num_replicas: int
    target_num_replicas: int
    capacity_adjusted_min_replicas: int
    capacity_adjusted_max_replicas: int
    current_time: float | None

    @property
    def aggregated_metrics(self) -> Mapping[str, Mapping[Any, float]] | None: ...

    @property
    def total_queued_requests(self) -> float | None: ...


class PoolsPolicy:
    """The autoscaling policy of an application, which Serve's controller calls.

    A call gets the contexts of the application's deployments, and returns ({deployment: number of
    replicas}, {deployment: state that Serve stores}). Pools of one role cannot do the work of
    another role, so prefill pools, decode pools and other pools are planned separately.

    pools: {pool: fields of decide.PoolModel, plus "role" unless it is "engine"}.
    objective: fields of decide.ServiceObjective.
    """

    def __init__(
        self, pools: Mapping[str, Mapping[str, Any]], objective: Mapping[str, Any]
    ) -> None:
        roles = {name: fields.get("role", "engine") for name, fields in pools.items()}
        self._parts: list[PoolsPolicy] = [self]
        if len(set(roles.values())) > 1:
            self._parts = [
                PoolsPolicy({name: pools[name] for name in pools if roles[name] == role}, objective)
                for role in dict.fromkeys(roles.values())
            ]
        self._role = next(iter(roles.values()), "engine")
        self._pools = {
            name: PoolModel(**{key: value for key, value in fields.items() if key != "role"})
            for name, fields in pools.items()
        }
        self._objective = ServiceObjective(**objective)
        self._history = ScalingHistory()
        # pool -> (time of the last increase of its target, that target), while replicas are
        # starting
        self._started: dict[str, tuple[float, int]] = {}
        self._plan: ScalingPlan | None = None
        self._decided = 0.0  # time of the last decision

    def __call__(
        self, contexts: Mapping[Any, ServeContext]
    ) -> tuple[dict[Any, int], dict[Any, dict[str, Any]]]:
        by_name = {context.deployment_name: (id, context) for id, context in contexts.items()}
        engines = {
            name: by_name[ENGINE_PREFIX + name][1]
            for name in self._pools
            if ENGINE_PREFIX + name in by_name
        }
        decisions = {id: context.target_num_replicas for id, context in contexts.items()}
        states: dict[Any, dict[str, Any]] = {}
        for name, (id, context) in by_name.items():
            if name.startswith(ENCODER_PREFIX):
                # Imported here, since Ray reads the environment when it is imported, and
                # `manta status` sets RAY_AUTH_MODE first.
                from ray.serve.autoscaling_policy import replica_queue_length_autoscaling_policy

                # Serve applies the delays of `encoder_limits` to this result.
                wanted, states[id] = replica_queue_length_autoscaling_policy(cast(Any, context))
                decisions[id] = math.ceil(wanted)
        if not engines:
            return decisions, states
        routers = [by_name[name][1] for name in ROUTERS if name in by_name]
        for part in self._parts:
            own = {name: context for name, context in engines.items() if name in part._pools}
            if not own:
                continue
            plan = part.plan(own, routers)
            for name, target in plan.targets.items():
                id = by_name[ENGINE_PREFIX + name][0]
                decisions[id] = target
                states[id] = {"target": target, "reason": plan.reasons[name]}
        return decisions, states

    def plan(
        self, engines: Mapping[str, ServeContext], routers: Sequence[ServeContext]
    ) -> ScalingPlan:
        """Return the present plan; once a second compute a new one, and report changed targets.

        engines: Serve's contexts of the engine deployments, by pool.
        routers: Serve's contexts of the application's deployments of routers.
        """
        any_context = next(iter(engines.values()))
        now = any_context.current_time or time.time()
        last = self._plan
        if last and engines.keys() == last.targets.keys() and 0 <= now - self._decided < _EVERY:
            return last
        plan = self.decide(engines, routers, now)
        app = any_context.app_name or ""
        limits = {name: (self._pools[name].minimum, self._pools[name].maximum) for name in engines}
        cooldowns = (self._objective.calm_seconds, self._objective.idle_seconds)
        _export(app, plan, limits, cooldowns)
        if last is None or plan.targets != last.targets:
            _report(app, plan, limits, cooldowns, now)
        return plan

    def decide(
        self, engines: Mapping[str, ServeContext], routers: Sequence[ServeContext], now: float
    ) -> ScalingPlan:
        """Return a new plan, computed from Serve's contexts and earlier measurements.

        engines, routers: see `plan`.
        now: seconds of any clock.
        """
        last = self._plan
        observed = {name: self._pool_state(name, context, now) for name, context in engines.items()}
        pools = {name: self._measured(name, context) for name, context in engines.items()}
        demand = _of_role(_demand(engines, routers, now), engines, self._role)
        plan = decide(pools, observed, demand, self._history, self._objective)
        if last and any(map(_silent, (*engines.values(), *routers))):
            plan = keep(plan, last.targets, "some say nothing of their load")
        self._history, self._plan, self._decided = plan.history, plan, now
        return plan

    def _measured(self, name: str, context: ServeContext) -> PoolModel:
        """Return a pool's PoolModel, with Serve's present limits and the rates that its engines
        report."""
        pool = replace(
            self._pools[name],
            minimum=context.capacity_adjusted_min_replicas,
            maximum=context.capacity_adjusted_max_replicas,
        )
        prompt, output = _values(context, "prompt_able"), _values(context, "output_able")
        if prompt and output:
            pool = replace(pool, prompt_rate=_mean(prompt), output_rate=_mean(output))
        self._pools[name] = pool
        return pool

    def _pool_state(self, name: str, context: ServeContext, now: float) -> PoolState:
        ready, target = context.current_num_replicas, context.target_num_replicas
        starting = max(0, target - ready)
        began = self._started.get(name)
        if starting and (began is None or began[1] < target):
            self._started[name] = (now, target)
        elif not starting and began is not None:
            # All requested replicas are ready, which gives the start-up time, including that of a
            # node.
            del self._started[name]
            if ready >= began[1]:
                pool = self._pools[name]
                took = pool.start_seconds + _SMOOTHING * (now - began[0] - pool.start_seconds)
                self._pools[name] = replace(pool, start_seconds=took)
        return PoolState(ready, starting, _mean(_values(context, "kv_usage")))


class PoolPolicy:
    """The autoscaling policy for one deployment, which considers only its own pool."""

    def __init__(self, name: str, pool: Mapping[str, Any], objective: Mapping[str, Any]) -> None:
        self._name = name
        self._policy = PoolsPolicy({name: pool}, objective)

    def __call__(self, context: ServeContext) -> tuple[int, dict[str, Any]]:
        plan = self._policy.plan({self._name: context}, ())
        return plan.targets[self._name], {"reason": plan.reasons[self._name]}


def _demand(
    engines: Mapping[str, ServeContext], routers: Sequence[ServeContext], now: float
) -> Demand:
    """Return the demand that the routers report; without routers, the demand is the engines'
    tokens/s.

    Only routers know the requests at a replica that Serve is stopping, as Serve no longer reports
    it.
    """
    source = routers or engines.values()
    prompt, output = _sum(source, "prompt_rate"), _sum(source, "output_rate")
    # `queued_tokens` includes the expected output; `share` is the prompts' share of it.
    share = prompt / (prompt + output) if prompt + output > 0 else 0.5
    waiting_tokens = share * _sum(routers, "queued_tokens")
    waiting = _sum(routers, "queued")
    running = 0.0
    for context in engines.values():
        waiting_tokens += sum(_values(context, "waiting_tokens"))
        waiting += context.total_queued_requests or 0.0
        running += sum(_values(context, "running"))
    running = max(running, _sum(routers, "in_flight"))
    return Demand(now, prompt, output, waiting_tokens, math.ceil(waiting), math.ceil(running))


def _of_role(demand: Demand, engines: Mapping[str, ServeContext], role: str) -> Demand:
    """Return the part of a demand that is for pools of one role: prompts, outputs or both.

    engines: Serve's contexts of these pools.
    """
    if role == "engine":
        return demand
    contexts = engines.values()
    running = sum(sum(_values(context, "running")) for context in contexts)
    if role == "prefill":
        return replace(demand, output_rate=0.0, running=math.ceil(running))
    waiting = sum(sum(_values(context, "waiting")) for context in contexts)
    return replace(demand, prompt_rate=0.0, waiting_tokens=0.0, waiting=math.ceil(waiting))


def _sum(contexts: Iterable[ServeContext], metric: str) -> float:
    """Return the sum of a metric over all replicas of some deployments."""
    return sum(sum(_values(context, metric)) for context in contexts)


def _values(context: ServeContext, metric: str) -> list[float]:
    """Return the values of a metric, one per replica that reports it."""
    metrics = context.aggregated_metrics
    return list(metrics.get(metric, {}).values()) if metrics else []


def _silent(context: ServeContext) -> bool:
    """Return whether a deployment has replicas but none of them reports, for lack of CPU time or
    network; idle replicas do report."""
    return bool(context.current_num_replicas and not context.aggregated_metrics)


def _mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else 0.0


# -- reports to operators


Limits = Mapping[str, tuple[int, int]]  # minimum and maximum by pool
Cooldowns = tuple[float, float]  # (calm_seconds, idle_seconds)


def _export(app: str, plan: ScalingPlan, limits: Limits, cooldowns: Cooldowns) -> None:
    """Export a plan's metrics. Called at each decision, because Ray's exporter drops values that
    are not repeated."""
    # Imported here, because Serve pickles this module by value, but there must be one exporter per
    # process.
    from deployments.observe.ray_exporter import scaling_export

    causes = {name: reason.cause for name, reason in plan.reasons.items()}
    scaling_export(app).report(plan.targets, causes, limits, cooldowns)


def _report(app: str, plan: ScalingPlan, limits: Limits, cooldowns: Cooldowns, now: float) -> None:
    """Write a plan to the controller's log, and store it for `scaling_decisions`.

    Each pool has a separate stored record, because pools may have separate policies.
    """
    from ray.experimental.internal_kv import _internal_kv_initialized, _internal_kv_put

    for name, target in plan.targets.items():
        logger.info("scaling: %s to %d: %s", name, target, plan.reasons[name])
        if _internal_kv_initialized():
            record = {
                "time": now,
                "target": target,
                "reason": plan.reasons[name],
                "limits": limits[name],
                "cooldowns": cooldowns,
            }
            _internal_kv_put(f"{_KEY}{app}/{name}", json.dumps(record).encode(), overwrite=True)


def scaling_decisions(app: str) -> dict[str, Any] | None:
    """Return the last scaling decision of an application; None if there was none.

    Its keys are "time", and by pool "targets", "reasons", "limits" ([minimum, maximum]) and
    "cooldowns" ([calm_seconds, idle_seconds]). Needs a connection to Ray.
    """
    from ray.experimental.internal_kv import _internal_kv_get, _internal_kv_list

    prefix = f"{_KEY}{app}/"
    stats = {}
    for key in _internal_kv_list(prefix):
        if record := _internal_kv_get(key):
            stats[key.decode().removeprefix(prefix)] = json.loads(record)
    if not stats:
        return None
    return {
        "time": max(record["time"] for record in stats.values()),
        "targets": {name: record["target"] for name, record in stats.items()},
        "reasons": {name: record["reason"] for name, record in stats.items()},
        "limits": {name: record["limits"] for name, record in stats.items()},
        "cooldowns": {name: record["cooldowns"] for name, record in stats.items()},
    }


# -- rates that routers and engines report


class CounterRates:
    """The rates per second of cumulative counters, over the time between two calls of `update`."""

    def __init__(self, now: float) -> None:
        self._at = now
        self._last: dict[str, float] = {}
        self._rates: dict[str, float] = {}

    def update(self, now: float, **counters: float) -> dict[str, float]:
        """Return {counter: its rate}; the previous rates if less than 0.2 s have passed."""
        if now - self._at >= 0.2:
            self._rates = {
                name: max(0.0, (value - self._last.get(name, value)) / (now - self._at))
                for name, value in counters.items()
            }
            self._last = counters
            self._at = now
        return {name: self._rates.get(name, 0.0) for name in counters}
