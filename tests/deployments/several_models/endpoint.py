"""An endpoint of several models on the tests' Ray cluster: its configuration, and calls of clients
and operators."""

import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from deployments.config.load import MantaConfig, parse_config
from tests.deployments.on_ray.serve_cluster import Cluster

APP = "several"
ENGINE = {
    "load_format": "dummy",
    "num_blocks": 64,
    "max_num_seqs": 4,
    "dtype": "float32",
    "num_threads": 1,
}
ADMIN = "admin-key-of-the-tests-0123456789"
PAUSE_S = 0.1
PROMPT = {"prompt": "the answer", "max_tokens": 24, "temperature": 0, "ignore_eos": True}


def wait(condition: Callable[[], Any], seconds: float = 120.0) -> Any:
    """Wait until `condition` returns something true; return that."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, "nothing happened"
        time.sleep(0.1)
    return value


def configuration(folder: Path, port: int, **models: Any) -> MantaConfig:
    fields = {"model": str(folder), "pools": {"cpu": {"num_cpus": 0.4}}}
    return parse_config(
        {
            "app_name": APP,
            "route_prefix": "/several",
            "engine": ENGINE,
            "models": {name: {**fields, **more} for name, more in models.items()},
            "router": {"replicas": 1},
            "http": {
                "proxy": "serve",
                "port": port,
                "admin_keys_file": str(folder.parent / "admins"),
                "store_bytes": 1_000_000,
            },
            "limits": {"drain_seconds": 5.0},
        },
        {},
    )


class Several:
    """An endpoint of several models, with the calls of clients and operators."""

    def __init__(self, cluster: Cluster, config: MantaConfig) -> None:
        self.cluster, self.config = cluster, config

    def names(self) -> list[str]:
        return list(self.models())

    def models(self) -> dict[str, dict[str, Any]]:
        try:
            body = json.loads(self.cluster.get("/several/v1/models"))
        except OSError:
            return {}
        return {entry["id"]: entry for entry in body["data"]}

    def text(self, model: str) -> str:
        answer = self.cluster.post("/several/v1/completions", model=model, **PROMPT)
        assert "choices" in answer, answer
        assert answer["model"] == model.replace("claude-3", "one")
        return str(answer["choices"][0]["text"])

    def ready(self, model: str) -> bool:
        return "choices" in self.cluster.post(
            "/several/v1/completions", model=model, prompt="a", max_tokens=1
        )

    def engines(self, model: str) -> dict[str, Any]:
        from ray import serve

        handle = serve.get_deployment_handle("engine-cpu", f"{APP}.{model}")
        stats: dict[str, Any] = handle.stats.remote().result()
        return stats

    def router_tasks(self) -> dict[str, int]:
        """Return the number of a router's asyncio tasks by name, without Serve's own calls."""
        from ray import serve

        tasks: dict[str, int] = serve.get_app_handle(APP).state.remote().result()["tasks"]
        return {name: count for name, count in tasks.items() if "call_user" not in name}


class Stream:
    """A thread that sends equal requests to a model, one after the other, and compares their texts.

    It pauses after each request, so that replicas that start meanwhile get CPU time.
    """

    def __init__(self, several: Several, model: str) -> None:
        self.answers: list[str] = []
        self.wrong: list[str] = []
        self._expected = several.text(model)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(several, model))

    def _run(self, several: Several, model: str) -> None:
        while not self._stop.wait(PAUSE_S):
            try:
                chunks = list(
                    several.cluster.stream("/several/v1/completions", model=model, **PROMPT)
                )
                text = "".join(chunk["choices"][0]["text"] for chunk in chunks)
            except Exception as error:
                text = repr(error)
            (self.answers if text == self._expected else self.wrong).append(text)

    def __enter__(self) -> "Stream":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        assert not self.wrong, self.wrong
        assert self.answers
