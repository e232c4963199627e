"""What `manta serve` at a Ray that others use takes with it when it ends."""

from types import SimpleNamespace

import pytest
import ray
from ray import serve

from deployments.cli.serving.cluster import Cluster


@pytest.mark.parametrize(("replaced", "deleted"), [(False, ["manta"]), (True, [])])
def test_what_was_deployed_in_its_place_stays(
    monkeypatch: pytest.MonkeyPatch, replaced: bool, deleted: list[str]
) -> None:
    """An update from another shell, and then Ctrl-C in the old one, which nobody needs any more:
    the service is gone for everybody."""
    app = SimpleNamespace(last_deployed_time_s=100.0)
    said: list[str] = []
    handle = SimpleNamespace(broadcast=lambda *_: SimpleNamespace(results=lambda **_: None))
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(ray, "shutdown", lambda: said.append("shutdown"))
    monkeypatch.setattr(serve, "status", lambda: SimpleNamespace(applications={"manta": app}))
    monkeypatch.setattr(serve, "get_app_handle", lambda _: handle)
    gone: list[str] = []
    monkeypatch.setattr(serve, "delete", gone.append)
    monkeypatch.setattr("deployments.cli.serving.cluster.forget_app", lambda _: None)
    cluster = Cluster("10.0.0.1:6379")
    cluster.note_deployment("manta")
    if replaced:
        app.last_deployed_time_s = 160.0
    cluster.close("manta", 1.0)
    assert gone == deleted and said == ["shutdown"]
