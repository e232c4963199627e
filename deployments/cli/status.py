"""`manta status`: shows a page about each running application, live on a terminal, or as JSON.

The data come from Serve and from the routers, which get a report from each replica with every step.
Rates are differences between two polls.
"""

import json
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import partial
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.table import Table

from deployments.cli.console import out
from deployments.cli.serving.cluster import Cluster, router_handles
from deployments.cli.serving.joining import ClusterError, join, rays_here
from deployments.cli.serving.time_limit import within
from deployments.environment import send_auth_token
from deployments.model_applications import model_app
from deployments.observe.metrics import RouterMetrics, quantile
from deployments.scaling.policy import (
    ENCODER_PREFIX,
    ENGINE_PREFIX,
    ROUTER,
    ROUTERS,
    scaling_decisions,
)

_POLL_SECONDS = 1.0  # seconds between the two polls of --once and --json
_ANSWER = 5.0  # maximum seconds for the routers to answer
_LOOKS = 9.0  # maximum seconds for one poll of an application
_WIDTH = 110  # columns without a terminal

Report = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class StatusSnapshot:
    """The data from one poll of an application.

    time: Unix time of the poll.
    status: Serve's status of the application.
    counts: {pool: {Serve's replica state: number of replicas}}.
    routers: results of `Router.state`, of each router that has answered.
    scaling: result of `scaling_decisions`; None: there was none.
    silent: number of routers that did not answer.
    models: snapshots of the models, if there are several.
    """

    time: float
    app: str
    status: str
    counts: Mapping[str, Mapping[str, int]]
    routers: Sequence[Report]
    scaling: Report | None = None
    silent: int = 0
    models: Mapping[str, "StatusSnapshot"] = field(default_factory=dict)


def run(app: str | None, address: str | None, *, as_json: bool, once: bool, every: float) -> int:
    """Print the status until Ctrl-C, or once.

    app: name of the application; None: all of ours on the cluster.
    every: seconds between polls.

    As JSON, each of several models is a separate object. Raises ClusterError if there is no cluster
    or no such application, or for several applications as JSON.
    """
    _join(address)
    before = _looks(app)
    if as_json and len(names := sorted({snapshot.app for snapshot in before.values()})) > 1:
        raise ClusterError(f"--json tells of one application; name one of {', '.join(names)}")
    if as_json or once or not out.is_terminal:
        time.sleep(_POLL_SECONDS)
        summaries = [summarise(now, before.get(name)) for name, now in _looks(app).items()]
        if as_json:
            for snapshot in summaries:
                print(json.dumps(snapshot, indent=2))
        else:
            width = out.width if out.is_terminal else _WIDTH
            Console(highlight=False, width=width).print(pages(summaries))
        return 0
    with Live(console=out, auto_refresh=False, screen=False) as live:
        while True:
            time.sleep(every)
            looks = _looks(app)
            summaries = [summarise(now, before.get(name)) for name, now in looks.items()]
            live.update(pages(summaries), refresh=True)
            before = looks


def _join(address: str | None) -> None:
    """Join the Ray cluster to ask.

    address: address of the cluster; None: as for `Cluster`, else the cluster that a `manta serve`
        on this machine has started.

    Raises ClusterError.
    """
    cluster = Cluster(address)
    if not cluster.own and cluster.address is not None:
        join(cluster.address)
    else:
        addresses = rays_here()
        if not addresses:
            raise ClusterError("no Ray cluster was found; `manta serve` prints the --address")
        if len(addresses) > 1:
            raise ClusterError(
                "several Ray clusters run on this machine; give the --address of one: "
                + ", ".join(addresses)
            )
        send_auth_token()
        join(addresses[0])
    import ray.serve  # imported first, because the import sets the logger's level

    logging.getLogger(ray.serve.__name__).setLevel(logging.WARNING)


def _looks(app: str | None) -> dict[str, StatusSnapshot]:
    """Poll the applications; return {application, or "application model" with several models:
    snapshot}.

    app: the only application to poll; None: all.
    Raises ClusterError, also if Ray no longer answers.
    """
    try:
        names = [app] if app is not None else within(_LOOKS, applications)
        snapshots = {name: within(_LOOKS, partial(poll, name)) for name in names}
        return {
            f"{snapshot.app} {model}".strip(): part
            for snapshot in snapshots.values()
            for model, part in (snapshot.models or {"": snapshot}).items()
        }
    except TimeoutError as error:
        raise ClusterError(f"Ray has not answered for {_LOOKS:g} s") from error


def applications() -> list[str]:
    """Return the sorted names of our applications. Raises ClusterError if there are none."""
    from ray import serve

    there = serve.status().applications
    ours = sorted(
        name
        for name, application in there.items()
        # Other programs' applications have no router. An application that is being built has no
        # deployment yet.
        if ROUTER in application.deployments or not application.deployments
    )
    if not ours:
        raise ClusterError("no application runs on this cluster; `manta serve` starts one")
    return ours


def poll(app: str) -> StatusSnapshot:
    """Return a snapshot of an application from Serve and all routers. Needs a connection to Ray."""
    from ray import serve
    from ray.exceptions import RayError
    from ray.serve.exceptions import RayServeException

    status = serve.status()
    application = status.applications.get(app)
    if application is None:
        known = ", ".join(status.applications) or "none"
        raise ClusterError(f"no application is called {app!r}; there is: {known}")
    answers: list[Any] = []
    try:
        calls = [handle.broadcast("state") for handle in router_handles(status, app)]
        end = time.monotonic() + _ANSWER
        for call in calls:
            timeout = max(0.0, end - time.monotonic())
            answers += call.results(timeout_s=timeout, return_exceptions=True)
    except (RayError, RayServeException, TimeoutError):
        # No router can be called at the moment, which the page shows.
        pass
    routers = [answer for answer in answers if isinstance(answer, Mapping)]
    whole = StatusSnapshot(
        time.time(),
        app,
        _word(application.status),
        _counts(application),
        sorted(routers, key=lambda router: str(router["name"])),
        scaling_decisions(app),
        sum(
            sum(application.deployments[name].replica_states.values())
            for name in ROUTERS
            if name in application.deployments
        )
        - len(routers),
    )
    return replace(whole, models=_models(whole, serve.status().applications))


def _counts(application: Any) -> dict[str, dict[str, int]]:
    """Return {pool: {replica state: number of replicas}}.

    application: Serve's status of the application.
    """
    return {
        name.removeprefix(ENGINE_PREFIX).removeprefix(ENCODER_PREFIX): {
            _word(state): count for state, count in deployment.replica_states.items()
        }
        for name, deployment in application.deployments.items()
        if name.startswith((ENGINE_PREFIX, ENCODER_PREFIX))
    }


def _models(whole: StatusSnapshot, there: Mapping[str, Any]) -> dict[str, StatusSnapshot]:
    """Return a snapshot of each model, by name; {} if there is only one.

    whole: snapshot of the routers' application.
    there: Serve's status of all applications, by name.
    """
    names = {name for router in whole.routers for name in router.get("models", {})}
    pages = {}
    for name in sorted(names):
        own = model_app(whole.app, name)
        application = there.get(own)
        states = [router["models"][name] for router in whole.routers if name in router["models"]]
        status = "GONE" if application is None else _word(application.status)
        if status == "RUNNING" and all(state.get("status") == "sleeping" for state in states):
            # Serve reports RUNNING, because the pool's target is zero replicas
            status = "SLEEPING"
        pages[name] = replace(
            whole,
            status=status,
            counts={} if application is None else _counts(application),
            routers=states,
            scaling=scaling_decisions(own),
        )
    return pages


def _word(state: Any) -> str:
    """Return the text of a Serve state, which is an enum or text."""
    return str(state.value if isinstance(state, Enum) else state)


# -- from snapshots to pages


def summarise(now: StatusSnapshot, before: StatusSnapshot | None = None) -> dict[str, Any]:
    """Return the data of an application's page, which `--json` prints.

    before: an earlier snapshot, for computing rates; None: rates are None.
    """
    seconds = now.time - before.time if before is not None else 0.0
    last = _replicas(before.routers) if before is not None else {}
    replicas = []
    for name, stats in sorted(_replicas(now.routers).items()):
        old = last.get(name)
        total = stats["total_blocks"]
        replicas.append(
            {
                "name": name,
                "pool": name.partition("/")[0].removeprefix("engine-"),
                "running": stats["running"],
                "rows": stats["rows"],
                "waiting": stats["waiting"],
                "waiting_tokens": stats["waiting_tokens"],
                "kv_used": round(1 - stats["free_blocks"] / total, 3) if total else 0.0,
                "step_ms": round(1000 * stats["step_seconds"], 2),
                "prompt_tokens_per_second": _rate(stats, old, "prompt_tokens", seconds),
                "output_tokens_per_second": _rate(stats, old, "output_tokens", seconds),
                "prefix_hits": _share(stats["prefix_hits"], stats["prefix_queries"]),
                "preemptions": stats["preemptions"],
                "adapters": stats["adapters"],
                "draining": stats["draining"],
            }
        )
    metrics = _metrics(now.routers, before.routers if before is not None else ())
    model = next((router["model"] for router in now.routers), None)
    return {
        "time": round(now.time, 3),
        "application": now.app,
        "status": now.status,
        "model": model,
        "pools": {
            name: _pool(name, counts, replicas, now.scaling) for name, counts in now.counts.items()
        },
        "replicas": replicas,
        "routers": [
            {
                "name": router["name"],
                "in_flight": router["in_flight"],
                "queued": router["queued"],
                "queued_tokens": router["queued_tokens"],
                "replicas": len(router["replicas"]),
            }
            for router in now.routers
        ],
        "silent_routers": now.silent,
        "rates": {
            name: round(sum(_values(metrics[key])) / seconds, 2) if seconds > 0 else None
            for name, key in (
                ("requests", "prompt_size"),
                ("prompt_tokens", "prompt_tokens"),
                ("output_tokens", "output_tokens"),
                ("failed", "failed"),
                ("moved", "migrations"),
            )
        },
        "latency_ms": {
            name: {f"p{q}": _quantile(key, metrics[key], q) for q in (50, 99)}
            for name, key in (
                ("queue", "queue"),
                ("first_token", "first_token"),
                ("between_tokens", "between"),
            )
        },
        "cached": _share(metrics["cached_tokens"], metrics["prompt_tokens"]),
        "routed": metrics["routed"],
        "scaling": now.scaling,
    }


_SHAPES = RouterMetrics()  # used for the metrics' names and buckets


def _replicas(routers: Sequence[Report]) -> dict[str, Report]:
    """Return {replica: its stats}, from the router whose stats of the replica have the newest
    step."""
    replicas: dict[str, Report] = {}
    for router in routers:
        for name, stats in router["replicas"].items():
            if name not in replicas or stats["step"] > replicas[name]["step"]:
                replicas[name] = stats
    return replicas


def _metrics(now: Sequence[Report], before: Sequence[Report]) -> dict[str, Any]:
    """Return the changes of the metrics since an earlier poll, summed over all routers.

    now, before: the routers' reports of the two polls. For a router that is missing in the earlier
        poll, the changes are since its start.
    """
    last = {router["name"]: router["metrics"] for router in before}
    total = _SHAPES.to_json()
    for router in now:
        old = last.get(router["name"], {})
        for name, value in router["metrics"].items():
            total[name] = _plus(total[name], value, old.get(name))
    return total


def _plus(total: Any, new: Any, old: Any) -> Any:
    if isinstance(new, list):
        old = old or [0] * len(new)
        return [a + b - c for a, b, c in zip(total, new, old, strict=True)]
    if isinstance(new, Mapping):
        old = old or {}
        keys = {**total, **new}
        return {key: total.get(key, 0) + new.get(key, 0) - old.get(key, 0) for key in keys}
    return total + new - (old or 0)


def _values(metric: Any) -> list[float]:
    if isinstance(metric, Mapping):
        return list(metric.values())
    return metric if isinstance(metric, list) else [metric]


def _quantile(name: str, counts: Sequence[float], percent: int) -> float | None:
    value = quantile(getattr(_SHAPES, name).buckets, counts, percent / 100)
    return None if value is None else round(1000 * value, 2)


def _rate(now: Report, before: Report | None, name: str, seconds: float) -> float | None:
    if before is None or seconds <= 0:
        return None
    return round(max(0.0, (now[name] - before[name]) / seconds), 1)


def _share(part: float, whole: float) -> float | None:
    return round(part / whole, 3) if whole else None


def _pool(
    name: str, counts: Mapping[str, int], replicas: Sequence[Report], scaling: Report | None
) -> dict[str, Any]:
    mine = [replica for replica in replicas if replica["pool"] == name]
    rates = [replica["output_tokens_per_second"] for replica in mine]
    return {
        "running": counts.get("RUNNING", 0),
        "starting": counts.get("STARTING", 0) + counts.get("UPDATING", 0),
        "stopping": counts.get("STOPPING", 0),
        "target": scaling["targets"].get(name) if scaling is not None else None,
        "reason": scaling["reasons"].get(name) if scaling is not None else None,
        "limits": scaling["limits"].get(name) if scaling is not None else None,
        "cooldowns": scaling["cooldowns"].get(name) if scaling is not None else None,
        "requests": sum(replica["running"] for replica in mine),
        "waiting": sum(replica["waiting"] for replica in mine),
        "kv_used": round(sum(replica["kv_used"] for replica in mine) / len(mine), 3)
        if mine
        else None,
        "output_tokens_per_second": round(sum(rates), 1) if rates and None not in rates else None,
    }


def pages(found: Sequence[Report]) -> RenderableType:
    """Return the pages of several applications, one below another.

    found: results of `summarise`.
    """
    parts: list[RenderableType] = []
    for summary in found:
        parts += ([""] if parts else []) + [page(summary)]
    return Group(*parts)


def page(found: Report) -> RenderableType:
    """Return the page of one application: texts and tables. found: result of `summarise`."""
    rates, late = found["rates"], found["latency_ms"]
    head = (
        f"{escape(found['application'])} {escape(found['status'])}  {escape(str(found['model']))}  "
        f"{time.strftime('%H:%M:%S', time.localtime(found['time']))}"
    )
    if found["silent_routers"]:
        head += f"  ({found['silent_routers']} routers do not answer)"
    lines = [
        f"requests/s {_text(rates['requests'])}  failed/s {_text(rates['failed'])}  "
        f"moved/s {_text(rates['moved'])}  tokens/s in {_text(rates['prompt_tokens'])} "
        f"({_percent(found['cached'])} cached) out {_text(rates['output_tokens'])}",
        "  ".join(
            f"{name.replace('_', ' ')} p50 {_text(late[name]['p50'])} p99 "
            f"{_text(late[name]['p99'])} ms"
            for name in ("queue", "first_token", "between_tokens")
        ),
    ]
    routed = found["routed"]
    if sum(routed.values()):
        total = sum(routed.values())
        shares = sorted(routed.items(), key=lambda item: -item[1])
        lines.append("routed by " + ", ".join(f"{k} {_percent(v / total)}" for k, v in shares if v))
    pools = _table("pool", "run", "start", "stop", "target", "requests", "wait", "KV", "tok/s")
    for name, pool in found["pools"].items():
        pools.add_row(
            name,
            *(_text(pool[key]) for key in ("running", "starting", "stopping", "target")),
            *(_text(pool[key]) for key in ("requests", "waiting")),
            _percent(pool["kv_used"]),
            _text(pool["output_tokens_per_second"]),
        )
    replicas = _table(
        "replica", "rows", "wait", "prompt", "KV", "hits", "step ms", "tok/s", "preempt", "adapters"
    )
    for replica in found["replicas"]:
        replicas.add_row(
            escape(replica["name"]) + (" draining" if replica["draining"] else ""),
            f"{replica['running']}/{replica['rows'] or '?'}",
            _text(replica["waiting"]),
            _text(replica["waiting_tokens"]),
            _percent(replica["kv_used"]),
            _percent(replica["prefix_hits"]),
            _text(replica["step_ms"]),
            _text(replica["output_tokens_per_second"]),
            _text(replica["preemptions"]),
            _text(len(replica["adapters"])),
        )
    routers = _table("router", "in flight", "queued", "tokens", "replicas")
    for router in found["routers"]:
        keys = ("in_flight", "queued", "queued_tokens", "replicas")
        routers.add_row(escape(router["name"]), *(_text(router[key]) for key in keys))
    parts: list[RenderableType] = [head, *lines, pools, replicas, routers]
    if (scaling := found["scaling"]) is not None:
        at = time.strftime("%H:%M:%S", time.localtime(scaling["time"]))
        for name, target in scaling["targets"].items():
            (low, high), (calm, idle) = scaling["limits"][name], scaling["cooldowns"][name]
            fewer = f"fewer after {calm:g} s of calm" + (f", 0 after {idle:g} s" if not low else "")
            why = escape(scaling["reasons"][name])
            parts.append(f"{at} {name} to {target} (of {low} to {high}; {fewer}): {why}")
    return Group(*parts)


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number else "left", no_wrap=True)
    return table


def _text(value: float | None) -> str:
    return "-" if value is None else f"{value:,.10g}"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.0f}%"
