"""A model that sleeps beside one that serves, on a real Ray and Serve with real engines."""

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from deployments.app import deploy, serve_config
from deployments.cli.status import poll
from tests.deployments.on_ray.serve_cluster import Cluster, tiny_model
from tests.deployments.several_models.endpoint import (
    ADMIN,
    APP,
    PROMPT,
    Several,
    Stream,
    configuration,
    wait,
)

SLEEPS = {
    "pools": {"cpu": {"num_cpus": 0.4, "min_replicas": 0, "max_replicas": 1}},
    "scaling": {"idle_seconds": 1.0, "calm_seconds": 1.0},
}
KEEPS = {"engine": {"sleep_in_host_memory": True}, "scaling": {"idle_seconds": 1.0}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    parent = tmp_path_factory.mktemp("sleeping")
    keys = parent / "admins"
    keys.touch(0o600)
    keys.write_text(f"{ADMIN}\n")
    return tiny_model(parent / "tiny")


@pytest.fixture(scope="module")
def several(shared_cluster: Cluster, folder: Path) -> Iterator[Several]:
    """Yield an endpoint of three models, two of which sleep.

    `without` sleeps without weights, `with_weights` with its weights in host memory.
    """
    from ray import serve

    port = shared_cluster.port
    config = configuration(folder, port, one={}, without=SLEEPS, with_weights=KEEPS)
    # A start takes longer than a request waits.
    config = config.model_copy(
        update={"router": config.router.model_copy(update={"wait_seconds": 1})}
    )
    deploy(serve_config(config))
    several = Several(shared_cluster, config)
    names = {"one", "without", "with_weights"}
    wait(lambda: set(several.names()) == names and several.ready("one"), 150)
    yield several
    for name in list(serve.status().applications):
        serve.delete(name)


def status(several: Several, model: str) -> str:
    body = json.loads(several.cluster.get(f"/several/v1/models/{model}"))
    return str(body["status"])


def routers() -> set[str]:
    from ray import serve

    there = serve.status().applications[APP].deployments.get("router")  # not while it is built
    if there is None or sum(there.replica_states.values()) != 1:
        return set()
    handle = serve.get_deployment_handle("router", APP)
    return {str(handle.state.remote().result()["pid"])}


def try_once(several: Several, model: str) -> tuple[int, float, dict[str, Any]]:
    """Send a request; return its status, its Retry-After in seconds (0: none) and its answer."""
    with several.cluster.open("/several/v1/completions", {"model": model, **PROMPT}) as answer:
        body = json.loads(answer.read())
        return answer.status, float(answer.headers.get("retry-after", 0)), body


@pytest.mark.serve
@pytest.mark.slow
def test_weights_in_host_memory_bring_a_model_back_at_once(several: Several) -> None:
    """A replica that is started anew where it should wake; an engine killed in its sleep, or
    whose model is changed then, and does not come back; the other model's answers, which change."""
    wait(lambda: try_once(several, "with_weights")[0] == 200)
    with Stream(several, "one"):
        expected = several.text("with_weights")
        engine = several.engines("with_weights")["engine_pid"]
        for _ in range(2):
            wait(lambda: status(several, "with_weights") == "sleeping")
            wait(lambda: poll(APP).models["with_weights"].status == "SLEEPING")
            wakes = several.engines("with_weights")["wakes"]
            began = time.monotonic()
            assert several.text("with_weights") == expected
            assert time.monotonic() - began < 5.0, "on a busy machine; a start takes longer"
            engines = several.engines("with_weights")
            assert engines["wakes"] == wakes + 1 and engines["engine_pid"] == engine
        wait(lambda: status(several, "with_weights") == "sleeping")
        os.kill(engine, signal.SIGKILL)
        wait(lambda: try_once(several, "with_weights")[0] == 200)
        assert several.text("with_weights") == expected
        assert several.engines("with_weights")["engine_pid"] != engine
        wait(lambda: status(several, "with_weights") == "sleeping")
        before = several.engines("with_weights")["engine_pid"]
        section = several.config.models["with_weights"]
        changed = section.model_copy(update={"engine": {**section.engine, "max_num_seqs": 3}})
        models = {**several.config.models, "with_weights": changed}
        several.config = several.config.model_copy(update={"models": models})
        deploy(serve_config(several.config))
        wait(lambda: several.engines("with_weights")["engine_pid"] != before)
        wait(lambda: try_once(several, "with_weights")[0] == 200)
        assert several.text("with_weights") == expected


@pytest.mark.serve
@pytest.mark.slow
def test_a_sleeping_model_is_woken_by_a_request_and_the_other_notices_nothing(
    several: Several,
) -> None:
    """A request that waits for a model that nobody starts; a promise that is not kept; a model that
    sleeps and takes the other's replicas along; a restarted router that cannot wake anything."""
    pid = several.engines("one")["pid"]
    wait(lambda: try_once(several, "without")[0] == 200)
    with Stream(several, "one"):
        expected = several.text("without")
        wait(lambda: status(several, "without") == "sleeping")
        page = poll(APP).models["without"]
        assert page.status == "SLEEPING" and page.scaling is not None
        assert page.scaling["targets"] == {"cpu": 0}
        code, seconds, answer = try_once(several, "without")
        assert code == 503 and answer["error"]["code"] == "no_replica", answer
        assert "without sleeps, was woken" in answer["error"]["message"] and 1 <= seconds < 60
        assert status(several, "without") == "starting"
        deadline = time.monotonic() + 4 * seconds + 10
        while code != 200:
            assert time.monotonic() < deadline, answer
            time.sleep(seconds)
            code, seconds, answer = try_once(several, "without")
        assert answer["choices"][0]["text"] == expected
        wait(lambda: status(several, "without") == "sleeping")
        # New routers, which have never seen it serve, and hold a request as long as it takes.
        router = several.config.router.model_copy(update={"wait_seconds": 60})
        before = wait(routers)
        deploy(serve_config(several.config.model_copy(update={"router": router})))
        wait(lambda: before.isdisjoint(routers()) and routers())
        assert several.text("without") == expected
    assert several.engines("one")["pid"] == pid
