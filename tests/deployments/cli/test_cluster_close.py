"""What `manta serve` at a Ray that others use takes with it when it ends."""

from types import SimpleNamespace

import pytest
import ray
from ray import serve

from deployments.cli.serving.cluster import Cluster
from deployments.serve.coexistence import note_others


@pytest.mark.parametrize(
    ("since", "deleted"),
    [
        ("nothing", ["manta", "manta.a"]),
        ("replaced", []),
        ("beside", ["manta", "manta.a"]),
    ],
)
def test_what_was_deployed_in_its_place_stays(
    monkeypatch: pytest.MonkeyPatch, since: str, deleted: list[str]
) -> None:
    """An update from another shell, and then Ctrl-C in the old one, which nobody needs any more:
    the service is gone for everybody. An application beside it is no update, though Serve gives
    both the same time. The engines of several models stay behind."""
    deployments = {"router": None, "batch-router": None, "engine-cpu": None}
    app = SimpleNamespace(last_deployed_time_s=100.0, deployments=deployments)
    there = {"manta": app, "manta.a": app, "mantas": app, "mantas.b": app}
    said: list[str] = []
    drained: list[str] = []

    def handle(name: str, _: str) -> SimpleNamespace:
        drained.append(name)
        return SimpleNamespace(broadcast=lambda *_: SimpleNamespace(results=lambda **_: None))

    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(ray, "shutdown", lambda: said.append("shutdown"))
    monkeypatch.setattr(serve, "status", lambda: SimpleNamespace(applications=there))
    monkeypatch.setattr(serve, "get_deployment_handle", handle)
    gone: list[str] = []
    monkeypatch.setattr(serve, "delete", lambda name, **_: gone.append(name))
    monkeypatch.setattr("deployments.cli.serving.cluster.forget_app", lambda _: None)
    by_name: dict[str, bytes] = {}

    def store(what: str, key: str, *value: bytes, **_: bool) -> bytes | None:
        return by_name.get(key) if what == "get" else by_name.update({key: value[0]})

    monkeypatch.setattr("deployments.serve.coexistence.store", store)
    cluster = Cluster("10.0.0.1:6379")
    cluster.note_deployment("manta")
    if since == "beside":
        note_others(160.0, {"manta": 100.0})
    if since != "nothing":
        app.last_deployed_time_s = 160.0
    cluster.close("manta", 1.0)
    assert gone == deleted and said == ["shutdown"]
    assert drained == (["router", "batch-router"] if deleted else [])
