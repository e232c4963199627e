"""The application on a real Ray and Serve: two replicas, the router's choice, losses, redeploys."""

import json
import os
import re
import signal
import threading
import time

import pytest

from deployments.app import NodeCapacity, as_config, assemble, build, pools, serve_config
from deployments.config.load import MantaConfig, parse_config
from engine.errors import ConfigError
from tests.deployments.on_ray.serve_cluster import Cluster, fake_engine, tiny_model


def wait(condition, seconds: float = 30.0):
    """Wait until `condition` returns something true; return that."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, "nothing happened"
        time.sleep(0.05)
    return value


# -- no cluster


def test_pools_take_what_the_machine_has():
    """Two CPU replicas with all cores each, which then wait for one another."""
    small = NodeCapacity(cores=2, gpus=0)
    config = parse_config({"replicas": 2}, {})
    (pool,) = pools(config, small).values()
    assert (pool.num_cpus, pool.num_gpus, pool.engine) == (
        1.0,
        0.0,
        {"device": "cpu", "num_threads": 1},
    )
    assert list(pools(config, NodeCapacity(cores=32, gpus=4))) == ["gpu"]
    assert list(pools(parse_config({"engine": {"device": "cpu"}}, {}), NodeCapacity(32, 4))) == [
        "cpu"
    ]
    both = parse_config({"pools": {"gpu": {"replicas": 3}, "cpu": {"num_cpus": 4.0}}}, {})
    resolved = pools(both, NodeCapacity(32, 4))
    assert (resolved["gpu"].num_cpus, resolved["gpu"].num_gpus) == (1.0, 1.0)
    assert resolved["cpu"].engine["num_threads"] == 4
    assert resolved["gpu"].engine == {"device": "cuda"}
    outcome = parse_config({"engine": {"num_threads": 3}}, {})
    (pool,) = pools(outcome, small).values()
    assert {**outcome.engine, **pool.engine}["num_threads"] == 3
    for key in ("tensor_parallel", "pipeline_parallel"):
        ranks = parse_config({"engine": {key: 2}, "pools": {"gpu": {}, "cpu": {}}}, {})
        resolved = pools(ranks, NodeCapacity(cores=8, gpus=4))
        assert (resolved["gpu"].num_gpus, resolved["gpu"].num_cpus) == (2.0, 2.0)
        assert (resolved["cpu"].num_cpus, resolved["cpu"].engine["num_threads"]) == (8.0, 4)


@pytest.mark.parametrize(
    ("nodes", "cores", "told"),
    [
        (None, None, True),  # `manta build`
        (None, 14.0, False),
        ([8], None, False),  # `manta serve`
        ([0], None, True),  # the head of a cluster whose nodes come when they are needed
        ([0, 16], None, True),
    ],
)
def test_a_guess_of_a_clusters_cores_is_told(nodes, cores, told, monkeypatch, caplog):
    """A CPU pool sized by the laptop that built the file: its replicas fit on no node, or leave
    half of each idle, and nobody knows why."""
    monkeypatch.setattr("ray.is_initialized", lambda: nodes is not None)
    alive = [{"NodeID": "", "Alive": True, "Resources": {"CPU": n}} for n in nodes or ()]
    monkeypatch.setattr("ray.nodes", lambda: alive)
    monkeypatch.setattr(
        "deployments.serve.model_deployments.store", lambda *_: None
    )  # nothing is reported yet
    serve_config(parse_config({"pools": {"cpu": {"num_cpus": cores}}}, {}))
    assert ("pools.cpu.num_cpus" in caplog.text) == told


def test_the_serve_config_is_one_that_serve_takes_and_builds_the_same(tmp_path):
    """A file that Serve refuses, or whose counts are arguments, so that scaling restarts all."""
    from ray.serve.schema import ServeDeploySchema

    config = parse_config(
        {"model": str(tiny_model(tmp_path / "tiny")), "replicas": 2, "http": {"port": 8123}}, {}
    )
    schema = serve_config(config)
    ServeDeploySchema.model_validate(schema)
    (app,) = schema["applications"]
    counts = {entry["name"]: entry["num_replicas"] for entry in app["deployments"]}
    assert counts == {"engine-cpu": 2, "router": 2} or list(counts) == ["engine-gpu", "router"]
    again = as_config(json.loads(json.dumps(app["args"])))
    assert isinstance(again, MantaConfig)
    assert again.model == config.model and again.http.port == 8123
    more = serve_config(
        config.model_copy(update={"router": config.router.model_copy(update={"replicas": 5})})
    )
    assert more["applications"][0]["args"] == app["args"]


def test_build_takes_a_path_a_mapping_and_serves_arguments(tmp_path):
    """`serve run deployments.app:build config=...` that only the documentation knows."""
    model = str(tiny_model(tmp_path / "tiny"))
    path = tmp_path / "manta.yaml"
    path.write_text(f"model: {model}\n")
    for config in (
        str(path),
        {"model": model},
        {"config": str(path)},
        {"config": {"model": model}},
    ):
        assert as_config(config).model == model
        build(config)
    with pytest.raises(ConfigError, match="did you mean model"):
        build({"config": {"modle": "x"}})


def test_routers_know_the_engine_s_seed(tmp_path):
    """It decided requests without a seed in the library alone."""
    model = str(tiny_model(tmp_path / "tiny"))
    for engine, seed in (({"seed": 7}, 7), ({}, None)):
        router = build({"model": model, "engine": engine})._bound_deployment
        assert router.init_args[0].models[0].seed == seed


def test_tools_without_arguments_take_the_file_from_the_environment(tmp_path, monkeypatch):
    """`serve build`, which takes no builder and no arguments."""
    from deployments import app

    path = tmp_path / "manta.yaml"
    path.write_text(f"model: {tiny_model(tmp_path / 'tiny')}\n")
    monkeypatch.setenv("MANTA_CONFIG", str(path))
    assert type(app.app) is type(build(str(path)))
    path.write_text("modle: x\n")
    with pytest.raises(ConfigError, match="did you mean model"):
        _ = app.app
    assert not hasattr(app, "other")


# -- on Ray


@pytest.fixture
def cluster(shared_cluster: Cluster):
    """Yield the shared cluster; afterwards it has no applications."""
    from ray import serve

    yield shared_cluster
    for name in list(serve.status().applications):
        serve.delete(name)


@pytest.fixture
def fake(shared_fleet: Cluster):
    """Return the handle of an application with two counting engines and one router."""
    from ray import serve

    return serve.get_app_handle("manta")


CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "the answer"}]}


def text_of(chunks) -> str:
    return "".join(c["delta"].get("content") or "" for x in chunks for c in x["choices"])


@pytest.mark.serve
@pytest.mark.slow
@pytest.mark.smoke
def test_http_streams_and_both_replicas_work(shared_fleet, fake):
    """An application that answers from one replica while the other idles."""

    def ended(metrics: str) -> int:
        labels = r'model_name="tiny",router="\S+",finished_reason="length"'
        count = re.search(rf"manta_request_success_total{{{labels}}} (\d+)", metrics)
        return int(count[1]) if count else 0

    before = ended(shared_fleet.get("/metrics"))
    whole = shared_fleet.post("/v1/chat/completions", **CHAT, max_tokens=30)
    expected = whole["choices"][0]["message"]["content"]
    assert whole["usage"]["completion_tokens"] == 30
    streams = [shared_fleet.stream("/v1/chat/completions", **CHAT, max_tokens=30) for _ in range(6)]
    firsts = [next(stream) for stream in streams]  # all six run at once
    assert len(firsts) == 6
    replicas = fake.state.remote().result()["replicas"]
    assert sorted(replica["running"] > 0 for replica in replicas.values()) == [True, True]
    for first, stream in zip(firsts, streams, strict=True):
        assert text_of([first, *stream]) == expected
    assert json.loads(shared_fleet.get("/ready"))["status"] == "ready"
    metrics = shared_fleet.get("/metrics")
    assert ended(metrics) == before + 7
    assert metrics.count("manta_num_requests_running{") == 2


@pytest.mark.serve
@pytest.mark.slow
@pytest.mark.smoke
def test_errors_have_the_shape_of_the_api(shared_fleet, fake):
    """Serve's own plain-text errors in front of ours."""
    answer = shared_fleet.post("/v1/chat/completions", model="none", messages=CHAT["messages"])
    assert answer["error"]["code"] == "model_not_found"


@pytest.mark.serve
@pytest.mark.slow
@pytest.mark.smoke
def test_a_killed_engine_costs_a_pause_and_the_replica_comes_back(shared_fleet, fake):
    """A stream that ends in the middle; a dead replica that stays dead."""
    from ray import serve

    expected = shared_fleet.post("/v1/chat/completions", **CHAT, max_tokens=100)
    streams = [
        shared_fleet.stream("/v1/chat/completions", **CHAT, max_tokens=100) for _ in range(4)
    ]
    firsts = [next(stream) for stream in streams]
    engines = serve.get_deployment_handle("engine-cpu", "manta")
    victim = engines.stats.remote().result()
    before = set(fake.state.remote().result()["replicas"])
    os.kill(victim["engine_pid"], signal.SIGKILL)
    for first, stream in zip(firsts, streams, strict=True):
        assert text_of([first, *stream]) == expected["choices"][0]["message"]["content"]

    def renewed() -> bool:
        now = set(fake.state.remote().result()["replicas"])
        return len(now) == 2 and now != before

    wait(renewed)


@pytest.mark.serve
@pytest.mark.slow
def test_a_client_that_leaves_frees_the_engine(shared_fleet, fake):
    """Tokens generated for nobody."""
    stream = shared_fleet.stream("/v1/chat/completions", **CHAT, max_tokens=200)
    next(stream)

    def running() -> int:
        state = fake.state.remote().result()
        return sum(replica["running"] for replica in state["replicas"].values())

    wait(lambda: running() == 1, 2)
    stream.close()
    wait(lambda: running() == 0, 2)
    assert fake.state.remote().result()["in_flight"] == 0


@pytest.mark.serve
@pytest.mark.slow
def test_an_update_waits_for_longer_streams(cluster, tmp_path, monkeypatch):
    """Bug: Serve ended a router that an update replaced after limits.drain_seconds, and the streams
    that took longer were cut."""
    from ray import serve

    from deployments.serve import model_deployments

    monkeypatch.setattr(model_deployments, "KILL_MARGIN", 1.0)
    model = str(tiny_model(tmp_path / "tiny"))

    def deploy(drain_seconds: float) -> None:
        config = {
            "model": model,
            "pools": {"cpu": {"replicas": 1, "num_cpus": 0.4}},
            "router": {"replicas": 1},
            "limits": {"drain_seconds": drain_seconds},
        }
        application = assemble(parse_config(config, {}), fake_engine)
        serve.run(application, name="updated", route_prefix="/updated")

    deploy(0.5)
    whole = cluster.post("/updated/v1/chat/completions", **CHAT, max_tokens=210)
    stream = cluster.stream("/updated/v1/chat/completions", **CHAT, max_tokens=210)
    first = next(stream)
    began = time.monotonic()
    update = threading.Thread(target=deploy, args=(0.6,))
    update.start()
    expected = whole["choices"][0]["message"]["content"]
    assert text_of([first, *stream]) == expected
    assert time.monotonic() - began > 3.0, "it may have ended before its router had to"
    update.join(60)
    assert not update.is_alive()


@pytest.mark.serve
@pytest.mark.slow
def test_the_default_model_by_config_file_again_and_beside_another(
    cluster, default_model, tmp_path
):
    """The whole way with a real model; a redeploy without a change that restarts replicas; and
    `manta serve` of another model, which deleted the first one's application."""
    from ray import serve

    from deployments import app
    from deployments.cli import status
    from deployments.cli.serving import cluster as serving

    config = parse_config(
        {
            "model": str(default_model),
            "served_name": "default",
            "app_name": "real",
            "pools": {"cpu": {"replicas": 2, "num_cpus": 1.0}},
            "router": {"replicas": 1},
            "engine": {"num_blocks": 200},
            "limits": {"drain_seconds": 5.0},
            "http": {"port": cluster.port},
        },
        {},
    )

    def deploy(config: MantaConfig) -> None:
        app.deploy(serve_config(config))
        wait(lambda: serve.status().applications[config.app_name].status == "RUNNING", 120)

    deploy(config)
    handle = serve.get_app_handle("real")
    replicas = wait(
        lambda: len(live := handle.state.remote().result()["replicas"]) == 2 and set(live)
    )
    body = {
        "model": "default",
        "messages": [{"role": "user", "content": "What is the capital of France?"}],
        "temperature": 0,
        "max_tokens": 24,
    }
    whole = cluster.post("/v1/chat/completions", **body)["choices"][0]["message"]["content"]
    assert "Paris" in whole
    streams = [cluster.stream("/v1/chat/completions", **body) for _ in range(4)]
    firsts = [next(stream) for stream in streams]
    for first, stream in zip(firsts, streams, strict=True):
        assert text_of([first, *stream]) == whole
    used = handle.state.remote().result()["replicas"]
    assert all(item["finished"] > 0 for item in used.values())
    deploy(config)
    time.sleep(1)
    assert set(handle.state.remote().result()["replicas"]) == replicas
    fewer = {"cpu": config.pools["cpu"].model_copy(update={"replicas": 1})}
    deploy(config.model_copy(update={"pools": fewer}))
    last = wait(lambda: len(live := handle.state.remote().result()["replicas"]) == 1 and set(live))
    assert last < replicas, "scaling down replaced the replica that stays"

    first = serving.Cluster(cluster.address)
    first.note_deployment("real")
    tiny = {
        "model": str(tiny_model(tmp_path / "tiny")),
        "app_name": "beside",
        "aliases": ["claude-*"],
        "pools": {"cpu": {"num_cpus": 0.4}},
        "router": {"replicas": 1},
        "engine": {"num_blocks": 50, "load_format": "dummy"},
        "limits": {"drain_seconds": 1.0},
        "http": {"port": cluster.port},
    }
    with pytest.raises(ConfigError, match="route_prefix: / is that of the application 'real'"):
        deploy(parse_config(tiny, {}))
    stream = cluster.stream("/v1/chat/completions", **body)
    events = [next(stream)]
    deploy(parse_config({**tiny, "route_prefix": "/beside"}, {}))
    assert text_of([*events, *stream]) == whole
    assert set(handle.state.remote().result()["replicas"]) == last
    asked = {"model": "claude-opus", "prompt": "a"}
    there = wait(lambda: cluster.post("/beside/v1/completions", **asked))
    assert there["usage"]["completion_tokens"] and there["model"] == "tiny"
    assert status.applications() == ["beside", "real"]
    engine = serve.get_deployment_handle("engine-cpu", "beside")
    os.kill(engine.stats.remote().result()["engine_pid"], signal.SIGKILL)
    assert status.poll("beside").routers[0]["model"] == "tiny"
    after = cluster.post("/v1/chat/completions", **body)
    assert after["choices"][0]["message"]["content"] == whole
    other = cluster.post("/v1/completions", model="tiny", prompt="a")["error"]
    assert other["code"] == "model_not_found" and "default" in other["message"]
    first._stop("real", 1.0)  # what Ctrl-C in the first shell does
    wait(lambda: list(serve.status().applications) == ["beside"])
