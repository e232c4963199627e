"""On a real Ray: an id through router, replica and engine, asked of any router; status; metrics."""

import json
import re
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from deployments.cli import status
from tests.deployments.on_ray.live import parse_metrics
from tests.deployments.on_ray.serve_cluster import Cluster
from tests.deployments.replica.collector import Collector, attributes

pytestmark = [pytest.mark.serve, pytest.mark.slow]

APP = "pair"


def wait(condition: Callable[[], Any], seconds: float = 30.0) -> Any:
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, "nothing happened"
        time.sleep(0.2)
    return value


@pytest.fixture
def spans(shared_pair: Collector) -> Collector:
    return shared_pair


@pytest.fixture
def cluster(shared_cluster: Cluster, shared_pair: Collector) -> Cluster:
    return shared_cluster


def ask(cluster: Cluster, id: str, **headers: str) -> dict[str, Any]:
    body = {"model": "tiny", "prompt": "hello", "max_tokens": 4, "n": 2}
    request = urllib.request.Request(
        f"http://127.0.0.1:{cluster.port}/v1/completions",
        json.dumps(body).encode(),
        {"content-type": "application/json", "x-request-id": id, **headers},
    )
    with urllib.request.urlopen(request, timeout=30) as answer:
        assert answer.headers["x-request-id"] == id
        return dict(json.loads(answer.read()))


def explained(cluster: Cluster, id: str) -> dict[str, Any]:
    return dict(json.loads(cluster.get(f"/v1/requests/{id}")))


def test_any_router_explains_any_request(cluster: Cluster) -> None:
    """A load balancer sends the question to the router that has never heard of it."""
    ids = [f"asked-{number}" for number in range(12)]
    for id in ids:
        ask(cluster, id)
    routers = set()
    for id in ids:
        for _ in range(3):  # whichever router gets it
            answer = explained(cluster, id)
            (part,) = answer["parts"]
            assert answer["id"] == id and part["state"] == "finished"
            assert part["output_tokens"] == 8 and part["route"][0]["replica"]
            assert part["timing_ms"]["total"] >= part["timing_ms"]["first_token"] > 0
        routers.add(part["router"])
    assert len(routers) == 2


def test_a_look_is_of_all_routers(cluster: Cluster) -> None:
    """The router that a look comes to tells of itself alone, or of itself twice."""
    ids = [f"looked-{number}" for number in range(12)]
    for id in ids:
        ask(cluster, id)
    for _ in range(3):
        body = json.loads(cluster.get("/v1/live"))
        assert len({router["router"] for router in body["routers"]}) == len(body["routers"]) == 2
        models = [model for router in body["routers"] for model in router["models"]]
        assert all(len(model["replicas"]) == 2 for model in models)
        assert set(ids) <= {choice["request"] for model in models for choice in model["choices"]}
    assert "<title>Manta</title>" in cluster.get("/page")


def test_any_router_stops_any_request(cluster: Cluster) -> None:
    """The stop comes over another connection, to a router that has never heard of the request."""
    ids = [f"stopped-{number}" for number in range(4)]

    def post(path: str, body: dict[str, Any]) -> str:
        request = urllib.request.Request(
            f"http://127.0.0.1:{cluster.port}{path}",
            json.dumps(body).encode(),
            {"content-type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            return str(answer.read().decode())

    def live(id: str) -> bool:
        try:
            return bool(explained(cluster, id)["parts"][0]["state"] == "running")
        except urllib.error.HTTPError:
            return False

    with ThreadPoolExecutor(len(ids)) as pool:
        streams = [
            pool.submit(post, "/stream_chat_post", {"query": "hello", "request_id": id})
            for id in ids
        ]
        for id, stream in zip(ids, streams, strict=True):
            wait(lambda id=id: live(id))
            with pytest.raises(urllib.error.HTTPError) as twice:
                post("/chat", {"query": "hello", "request_id": id})
            assert twice.value.code == 409
            assert json.loads(post("/stop_generate", {"request_id": id}))["stopped"] == 1
            try:
                last = stream.result(60).strip().splitlines()[-1]
            except urllib.error.HTTPError as error:  # nothing had been said yet
                assert error.code == 499
            else:
                assert json.loads(last.removeprefix("data: "))["code"] == 499


def test_an_id_leads_through_all_logs(cluster: Cluster) -> None:
    """A stream went wrong at 3 o'clock, and each process has its own names for it."""
    from ray._private.worker import _global_node

    ask(cluster, "followed-1")
    folder = Path(_global_node.get_logs_dir_path()) / "serve"

    def lines() -> dict[str, dict[str, Any]]:
        by_name = {}
        for path in folder.glob("*.log"):
            for line in path.read_text().splitlines():
                if '"followed-1"' in line:
                    body = json.loads(line)
                    by_name[f"{body['deployment']} {body['message'].split(':')[0]}"] = body
        return by_name

    def complete() -> dict[str, dict[str, Any]] | None:
        line = lines()
        kinds = (f"{APP}_router finished", f"{APP}_engine-cpu queued")
        there = all(kind in line for kind in kinds)
        return line if there and any("from router" in kind for kind in line) else None

    items = wait(complete, 15)
    assert {item["request_id"] for item in items.values()} == {"followed-1"}
    ended = items[f"{APP}_router finished"]
    assert ended["output_tokens"] == 8
    engines = {item["replica"] for kind, item in items.items() if "engine-cpu" in kind}
    assert len(engines) == 1 and ended["replicas"] == f"engine-cpu/{engines.pop()}"


def test_a_callers_trace_goes_on(cluster: Cluster, spans: Collector) -> None:
    """A slow request whose time is nobody's: the gateway's trace ends at the service."""
    id, parent = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
    ask(cluster, "not-traced")
    ask(cluster, "traced-1", traceparent=f"00-{id}-{parent}-01")
    by_name = {span["name"]: span for span in wait(lambda: spans.spans(id), 15)}
    assert set(by_name) == {"manta.request", "router.queue", "replica"} | {
        f"engine.{part}" for part in ("queue", "prefill", "decode")
    }
    root = by_name["manta.request"]
    assert root["parentSpanId"] == parent and len(spans.spans()) == len(by_name)
    root_attributes = attributes(root)
    assert (root_attributes["manta.request_id"], root_attributes["gen_ai.usage.output_tokens"]) == (
        "traced-1",
        "8",
    )
    for span in by_name.values():
        assert root["startTimeUnixNano"] <= span["startTimeUnixNano"] <= span["endTimeUnixNano"]
        assert span["endTimeUnixNano"] <= root["endTimeUnixNano"]
    assert attributes(by_name["replica"])["manta.replica"].startswith("engine-cpu/")


def test_status_of_a_running_application(cluster: Cluster) -> None:
    """A page that is right only for what the tests made up."""
    before = status.poll(APP)
    for number in range(3):
        ask(cluster, f"counted-{number}")
    summary = status.summarise(status.poll(APP), before)
    assert (summary["status"], summary["model"]) == ("RUNNING", "tiny")
    assert summary["pools"]["cpu"]["running"] == 2 and len(summary["replicas"]) == 2
    assert len(summary["routers"]) == 2 and summary["silent_routers"] == 0
    assert summary["rates"]["requests"] > 0 and summary["rates"]["output_tokens"] > 0
    assert summary["latency_ms"]["first_token"]["p50"] > 0
    status.page(json.loads(json.dumps(summary)))
    with pytest.raises(status.ClusterError, match=APP):
        status.poll("other")


def test_metrics_are_of_all_routers_whichever_answers(cluster: Cluster) -> None:
    """A scrape of the port was one of two routers in turn, and its counters went back and forth."""
    last: dict[str, float] = {}
    took = []
    for number in range(24):
        if number % 3 == 0:
            ask(cluster, f"scraped-{number}")
        began = time.monotonic()
        metrics = parse_metrics(cluster.get("/metrics"))
        took.append(time.monotonic() - began)
        names = {match[1] for name in metrics if (match := re.search(r'router="([^"]+)"', name))}
        assert len(names) == 2
        for name, value in metrics.items():
            if name.split("{")[0].endswith(("_total", "_bucket", "_count", "_sum")):
                assert value >= last.get(name, 0.0), name
                last[name] = value
        engines = [name for name in metrics if name.startswith("manta_engine_steps_total{")]
        assert len(engines) == 2
    took.sort()
    print(f"a scrape takes {1000 * took[12]:.1f} ms, {1000 * took[-1]:.1f} at most")
    assert took[12] < 0.5
    models = {cluster.get("/v1/models") for _ in range(12)}
    assert len(models) == 1  # `created` was the start of whichever router answered


def test_metrics_reach_rays_exporter(cluster: Cluster) -> None:
    """Names that Ray changes on their way to the dashboard."""
    import ray

    (node,) = ray.nodes()
    url = f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics"

    wanted = {
        f"ray_manta_{name}"
        for name in (
            "time_to_first_token_seconds_bucket",
            "inter_token_latency_seconds_count",
            "generation_tokens_total",
            "routed_total",
            "engine_steps_total",
            "num_requests_running",
            "kv_cache_usage_perc",
        )
    }

    def complete() -> bool:
        with urllib.request.urlopen(url, timeout=5) as answer:
            text = answer.read().decode()
        return wanted <= set(re.findall(r"^(ray_manta_\w+)\{", text, re.MULTILINE))

    ask(cluster, "measured-1")
    wait(complete, 30)
