"""Metrics, dashboard and `manta status`: one name for one thing, in all of them."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from deployments.backend import BackendState
from deployments.cli import status
from deployments.cli.status import StatusSnapshot, page, summarise
from deployments.observe.metrics import (
    PREFIX,
    SCALING_HELP,
    RouterMetrics,
    families,
    quantile,
    render,
)
from deployments.observe.replica_metrics import replica_families, replica_readings
from engine.messages import EngineStats

ROOT = Path(__file__).parents[2]


def served() -> set[str]:
    """Return the names of the metrics at /metrics."""
    names = set()
    state = BackendState()
    for family in (*families(RouterMetrics(), state), *replica_families(EngineStats())):
        if family.kind == "histogram":
            names |= {family.name + suffix for suffix in ("_bucket", "_sum", "_count")}
        else:
            names.add(family.name)
    return names


def exported() -> set[str]:
    """Return the names that Ray's exporter gives to our metrics."""
    return {f"ray_{name}" for name in served() | {PREFIX + name for name in SCALING_HELP}}


# -- the dashboard


def panels() -> list[dict[str, Any]]:
    loaded = json.loads((ROOT / "deploy" / "grafana.json").read_text())
    panels: list[dict[str, Any]] = loaded["panels"]
    return panels


def test_the_dashboard_asks_for_what_we_export() -> None:
    """A renamed metric is an empty panel, which looks like a quiet service."""
    import ray.serve

    names: set[str] = set()
    for panel in panels():
        for target in panel.get("targets", ()):
            names |= set(re.findall(r"\bray_\w+(?=\{)", target["expr"]))
    ours = {name for name in names if name.startswith("ray_manta_")}
    assert len(ours) > 25
    assert ours <= exported(), ours - exported()
    serve = Path(ray.serve.__file__).parent
    text = "".join(path.read_text() for path in (serve / "_private").glob("*.py"))
    for name in names - ours:
        assert f'"{name.removeprefix("ray_")}"' in text, name


def test_the_alerts_ask_for_what_we_export() -> None:
    """A renamed metric, or a label that it does not have, is an alert that never rings."""
    loaded = yaml.safe_load((ROOT / "deploy" / "alerts.yaml").read_text())
    assert set(loaded) == {"groups"}
    (group,) = loaded["groups"]
    assert set(group) == {"name", "rules"} and len(group["rules"]) > 5
    labels = {"model_name", "le", "code", "route", "status"}
    labels |= {"application", "pool", "direction", "deployment"}
    page = (ROOT / "docs" / "operators.md").read_text()
    for rule in group["rules"]:
        assert f"`{rule['alert']}`" in page, rule["alert"]
        assert set(rule) <= {"alert", "expr", "for", "labels", "annotations"}, rule
        assert rule["labels"]["severity"] in ("warning", "critical")
        assert rule["annotations"].keys() == {"summary", "description"}
        expr = rule["expr"]
        for a, b in ("()", "{}", "[]"):
            assert expr.count(a) == expr.count(b), expr
        names = set(re.findall(r"\b(?:ray_)?manta_\w+", expr))
        assert names and names <= served() | exported(), names - served() - exported()
        grouped = re.findall(r"by \(([^)]*)\)", expr)
        used = {label.strip() for item in grouped for label in item.split(",")}
        used |= set(re.findall(r"(\w+)=~?!?\"", expr)) | set(re.findall(r"(\w+)!=\"", expr))
        assert used <= labels, used - labels
        findall = set(re.findall(r"\$labels\.(\w+)", rule["annotations"]["summary"]))
        assert all(
            findall <= {entry.strip() for entry in item.split(",")} | {"le"} for item in grouped
        )


def test_the_dashboard_is_one_that_grafana_takes() -> None:
    """Two panels of one id, or a query that ends in the middle: Grafana shows nothing of it."""
    loaded = json.loads((ROOT / "deploy" / "grafana.json").read_text())
    assert {"uid", "title", "schemaVersion", "templating", "time", "panels"} <= loaded.keys()
    variables = {item["name"] for item in loaded["templating"]["list"]}
    assert variables == {"datasource", "Application", "Cluster"}  # the names that Ray's have
    ids = [panel["id"] for panel in loaded["panels"]]
    assert len(ids) == len(set(ids))
    taken: set[tuple[int, int]] = set()
    for panel in loaded["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken and max(x for x, _ in cells) < 24, panel["title"]
        taken |= cells
        if panel["type"] == "row":
            continue
        assert panel["datasource"] == "${datasource}" and panel["targets"]
        for target in panel["targets"]:
            expr = target["expr"]
            for a, b in ("()", "{}", "[]"):
                assert expr.count(a) == expr.count(b), expr
            selectors = re.findall(r"\w+\{([^}]*)\}", expr)
            assert selectors, expr
            for selector in selectors:
                assert selector == 'application=~"$Application",ray_io_cluster=~"$Cluster"'
            for variable in re.findall(r"\$(\w+)", expr):
                assert variable in variables | {"__rate_interval"}
            for label in re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]):
                assert re.search(rf"by \([^)]*\b{label}\b", expr), expr


def test_standard_names_are_there() -> None:
    """Dashboards and alerts that people bring along look for them."""
    text = render(
        (*families(RouterMetrics(), BackendState()), *replica_families(EngineStats())), "m"
    )
    for name in (
        "num_requests_running",
        "num_requests_waiting",
        "kv_cache_usage_perc",
        "kv_cache_reserved_perc",
        "prefix_cache_hits_total",
        "prefix_cache_queries_total",
        "num_preemptions_total",
        "time_to_first_token_seconds_bucket",
        "inter_token_latency_seconds_bucket",
        "e2e_request_latency_seconds_bucket",
        "request_queue_time_seconds_bucket",
        "num_adapters_loaded",
        "adapter_loads_total",
    ):
        assert f"\nmanta_{name}{{" in text, name


# -- through Ray's exporter


class FakeMetric:
    """A fake of the Counter and Gauge of ray.serve.metrics."""

    made: dict[str, "FakeMetric"]

    def __init__(self, name: str, description: str, tag_keys: tuple[str, ...]) -> None:
        assert name not in self.made, "Ray takes a name once"
        self.made[name] = self
        self.keys = tag_keys
        self.values: dict[tuple[str, ...], float] = {}

    def _key(self, tags: dict[str, str]) -> tuple[str, ...]:
        assert set(tags) == set(self.keys)
        return tuple(tags.values())

    def set(self, value: float, tags: dict[str, str]) -> None:
        self.values[self._key(tags)] = value

    def inc(self, value: float, tags: dict[str, str]) -> None:
        assert value > 0, "Ray raises"
        self.values[self._key(tags)] = self.values.get(self._key(tags), 0.0) + value


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> dict[str, FakeMetric]:
    from deployments.observe import ray_exporter

    by_name: dict[str, FakeMetric] = {}
    for kind in ("Counter", "Gauge"):
        monkeypatch.setattr(
            ray_exporter.ray_metrics, kind, type(kind, (FakeMetric,), {"made": by_name})
        )
    return by_name


async def test_counters_go_on_and_histograms_are_whole(made: dict[str, FakeMetric]) -> None:
    """A counter that is counted twice at each export; a histogram whose buckets are not sums."""
    from deployments.observe.ray_exporter import ServeExport

    metrics = RouterMetrics()
    export = ServeExport(lambda: families(metrics, BackendState(in_flight=3)))
    metrics.output_tokens.inc(5)
    metrics.routed.inc(2, "prefix")
    metrics.between.observe(0.004, 10)
    export._export()
    metrics.output_tokens.inc(2)
    metrics.between.observe(3600.0)
    export._export()
    export._export()
    export.stop()
    assert made["manta_generation_tokens"].values == {(): 7}  # Ray adds _total
    assert made["manta_routed"].values == {("prefix",): 2}
    assert made["manta_router_requests_in_flight"].values == {(): 3}
    buckets = made["manta_inter_token_latency_seconds_bucket"].values
    assert buckets["0.0025",] == 0 and buckets["0.005",] == 10 and buckets["+Inf",] == 11
    assert made["manta_inter_token_latency_seconds_count"].values == {(): 11}
    assert not [
        name
        for name in made
        if f"ray_{name}"
        not in exported() | {f"ray_{name}" for name in made if f"ray_{name}_total" in exported()}
    ]


def test_scaling_decisions_are_counted(made: dict[str, FakeMetric]) -> None:
    """A policy that swings, which nobody sees in the number of replicas."""
    from deployments.observe.ray_exporter import ScalingExport

    export = ScalingExport("manta")
    limits = {"gpu": (0, 3), "cpu": (0, 1)}
    for targets, causes in (
        ({"gpu": 1, "cpu": 1}, {"gpu": "work", "cpu": "work"}),
        ({"gpu": 3, "cpu": 1}, {"gpu": "backlog", "cpu": "overflow"}),
        ({"gpu": 2, "cpu": 0}, {"gpu": "calm", "cpu": "handover"}),
    ):
        export.report(targets, causes, limits, (120.0, 300.0))
    assert made["manta_scaling_target_replicas"].values == {
        ("manta", "gpu"): 2,
        ("manta", "cpu"): 0,
    }
    assert made["manta_scaling_max_replicas"].values == {("manta", "gpu"): 3, ("manta", "cpu"): 1}
    assert made["manta_scaling_min_replicas"].values == {("manta", "gpu"): 0, ("manta", "cpu"): 0}
    assert made["manta_scaling_calm_seconds"].values["manta", "gpu"] == 120.0
    assert made["manta_scaling_idle_seconds"].values["manta", "cpu"] == 300.0
    assert made["manta_scaling_decisions"].values == {
        ("manta", "gpu", "up", "backlog"): 1,
        ("manta", "gpu", "down", "calm"): 1,
        ("manta", "cpu", "down", "handover"): 1,
    }


def test_pools_with_a_policy_each_are_counted(made: dict[str, FakeMetric]) -> None:
    """Each policy tells of its own pool, and the other's number is forgotten: nothing changes."""
    from deployments.observe.ray_exporter import ScalingExport

    export = ScalingExport("manta")
    for target in (1, 2, 3):
        for pool in ("gpu", "cpu"):
            export.report({pool: target}, {pool: "work"}, {pool: (1, 4)}, (120.0, 300.0))
    assert made["manta_scaling_decisions"].values == {
        ("manta", "gpu", "up", "work"): 2,
        ("manta", "cpu", "up", "work"): 2,
    }


# -- manta status


def router(name: str, metrics: RouterMetrics, **replicas: EngineStats) -> dict[str, Any]:
    import msgspec

    stats = {
        f"engine-{k.replace('_', '/')}": msgspec.structs.asdict(v) for k, v in replicas.items()
    }
    load = {"in_flight": 4, "queued": 1, "queued_tokens": 700}
    fields = {"name": name, "model": "m", **load, "replicas": stats, "metrics": metrics.to_json()}
    return json.loads(json.dumps(fields))


def test_status_adds_routers_up_and_takes_the_newest_of_each_replica() -> None:
    """A load that is counted once for each router; rates since the start of time."""
    router_metrics, two = RouterMetrics(), RouterMetrics()
    router_metrics.first_token.observe(0.05, 100)  # before we looked
    before = StatusSnapshot(
        10.0,
        "manta",
        "RUNNING",
        {"gpu": {"RUNNING": 2}},
        [
            router("a", router_metrics, gpu_1=EngineStats(step=5, output_tokens=100)),
            router("b", two),
        ],
    )
    router_metrics.first_token.observe(0.5, 3)
    two.prompt_size.observe(10.0, 4)
    two.failed.inc(2, "overloaded")
    two.routed.inc(4, "load")
    two.output_tokens.inc(60)
    old = EngineStats(step=6, running=9, output_tokens=120, total_blocks=10, free_blocks=10)
    new = EngineStats(
        step=9, running=3, output_tokens=300, total_blocks=10, free_blocks=4, rows=8, draining=True
    )
    after = StatusSnapshot(
        12.0,
        "manta",
        "RUNNING",
        {"gpu": {"RUNNING": 2, "STARTING": 1}, "cpu": {}},
        [router("a", router_metrics, gpu_1=old), router("b", two, gpu_1=new)],
        {
            "time": 11.0,
            "targets": {"gpu": 3},
            "reasons": {"gpu": "a trend [x]"},
            "limits": {"gpu": [1, 4]},
            "cooldowns": {"gpu": [120.0, 300.0]},
        },
        silent=1,
    )
    summary = summarise(after, before)
    (replica,) = summary["replicas"]
    assert (replica["running"], replica["kv_used"], replica["draining"]) == (3, 0.6, True)
    assert replica["output_tokens_per_second"] == 100.0
    assert summary["pools"]["gpu"]["target"] == 3 and summary["pools"]["gpu"]["starting"] == 1
    assert summary["pools"]["cpu"]["kv_used"] is None
    assert summary["rates"]["requests"] == 2.0 and summary["rates"]["failed"] == 1.0
    assert summary["rates"]["output_tokens"] == 30.0
    assert 250 < summary["latency_ms"]["first_token"]["p50"] <= 500
    assert summary["latency_ms"]["between_tokens"]["p99"] is None
    assert summary["routed"] == {"load": 4}
    json.dumps(summary)
    from rich.console import Console

    console = Console(width=120, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(page(summary))
    shown = console.export_text()
    for text in (
        "gpu to 3 (of 1 to 4; fewer after 120 s of calm): a trend [x]",
        "engine-gpu/1 draining",
        "1 routers do not answer",
        "3/8",
    ):
        assert text in shown, shown


def test_status_without_an_earlier_look_or_any_router() -> None:
    """The first second of an application, and the last."""
    summary = summarise(StatusSnapshot(1.0, "manta", "DEPLOYING", {"cpu": {"STARTING": 1}}, []))
    assert summary["rates"]["requests"] is None and summary["model"] is None
    page(summary)
    fresh = router("new", RouterMetrics())
    before = StatusSnapshot(1.0, "manta", "RUNNING", {}, [router("gone", RouterMetrics())])
    page(summarise(StatusSnapshot(2.0, "manta", "RUNNING", {}, [fresh]), before))


def test_status_without_a_name_shows_every_application(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`no application is called 'manta'`, on a cluster that serves two others."""
    there = {
        name: StatusSnapshot(1.0, name, "RUNNING", {"cpu": {"RUNNING": 1}}, [])
        for name in ("one", "two")
    }
    monkeypatch.setattr(status, "_join", lambda _: None)
    monkeypatch.setattr(status, "applications", lambda: list(there))
    monkeypatch.setattr(status, "poll", there.__getitem__)
    monkeypatch.setattr(status, "_POLL_SECONDS", 0.0)
    assert status.run(None, None, as_json=False, once=True, every=1.0) == 0
    shown = capsys.readouterr().out
    assert 0 <= shown.find("one RUNNING") < shown.find("two RUNNING")
    assert status.run("two", None, as_json=True, once=True, every=1.0) == 0
    assert json.loads(capsys.readouterr().out)["application"] == "two"
    with pytest.raises(status.ClusterError, match="name one of one, two"):
        status.run(None, None, as_json=True, once=True, every=1.0)


def test_quantiles() -> None:
    """The bound below, the bound above, or nothing at all."""
    assert quantile((1.0, 2.0), (0, 0, 0), 0.5) is None
    assert quantile((1.0, 2.0), (4, 0, 0), 0.5) == 0.5
    assert quantile((1.0, 2.0), (1, 2, 0), 1.0) == 2.0
    assert quantile((1.0, 2.0), (1, 0, 9), 0.99) == 2.0


def test_the_idle_share_of_a_device() -> None:
    """Bug: a counter of the last step's seconds, whose rate tells nothing of idle time."""
    stats = EngineStats(step_seconds=0.02, busy_seconds=2.5)
    (busy,) = (v for name, v in replica_readings(stats).items() if "busy_seconds" in name)
    assert busy == 2.5
