"""An encoder pool on Ray: a tiny model that sees pictures says the same with it, without it, and
when its actor is killed while a request waits for it."""

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from deployments.app import assemble
from deployments.config.load import parse_config
from tests.deployments.images.test_end_to_end import BODY, JPEG, OPTIONS, Model, part
from tests.deployments.on_ray.live import settled
from tests.deployments.on_ray.serve_cluster import Cluster

pytestmark = [pytest.mark.serve, pytest.mark.slow, pytest.mark.timeout(300)]
APP = "encoders"


def test_answers_are_the_same_with_without_and_after_an_encoder(
    shared_cluster: Cluster, tmp_path: Path
) -> None:
    """Bugs: a killed encoder loses a request, or is never replaced; a request waits for one that is
    dead; embeddings that came are other numbers than those of the replica; the pool is deployed and
    nobody asks it."""
    from ray import serve

    model = Model(tmp_path)
    config = parse_config(
        {
            "model": str(tmp_path),
            "served_name": "m",
            "engine": {name: value for name, value in OPTIONS.items() if name != "device"},
            "pools": {
                "cpu": {"num_cpus": 1.0},
                "pictures": {"role": "encoder", "num_cpus": 1.0, "encode_seconds": 60.0},
            },
            "router": {"replicas": 1},
            "limits": {"drain_seconds": 1.0},
        },
        {},
    )
    assert model.folder == tmp_path
    serve.run(assemble(config), name=APP, route_prefix="/pictures")
    try:
        engines = serve.get_deployment_handle("engine-cpu", APP)
        encoders = serve.get_deployment_handle("encoder-pictures", APP)

        def counts() -> tuple[int, int, int]:
            stats = engines.stats.remote().result(timeout_s=20)
            keys = ("images_received", "images_encoded", "images_not_received")
            received, encoded, failed = (stats[key] for key in keys)
            return received, encoded, failed

        def ask(salt: str, content: list[Any] | None = None) -> tuple[list[int], list[float]]:
            body = BODY | {"cache_salt": salt, "logprobs": True}
            if content is not None:
                body = body | {"messages": [{"role": "user", "content": content}]}
            answer = shared_cluster.post("/pictures/v1/chat/completions", **body)
            (choice,) = answer["choices"]
            logprobs = [token["logprob"] for token in choice["logprobs"]["content"]]
            return choice["token_ids"], logprobs

        settled(lambda: ask("warm", [{"type": "text", "text": "the answer"}]), 60)
        single = [{"type": "text", "text": "the number of"}, part(JPEG)]
        with_encoder = ask("a")
        bits = ask("b", single)
        assert counts() == (3, 0, 0)
        encoder = encoders.stats.remote().result(timeout_s=20)
        assert encoder["images"] == 3

        os.kill(encoder["pid"], signal.SIGSTOP)
        with ThreadPoolExecutor() as threads:
            waiting = threads.submit(ask, "c")
            settled(lambda: counts()[1] == 0 and not waiting.done())
            os.kill(encoder["pid"], signal.SIGKILL)
            assert waiting.result(40)[0] == with_encoder[0]
        received, encoded, failed = counts()
        assert (received, encoded) == (3, 2) and failed == 2
        assert ask("d", single) == bits, "other bits than those of the replica's own tower"

        def is_back() -> bool:
            before = counts()[0]
            assert ask(os.urandom(4).hex(), single) == bits
            return counts()[0] > before

        settled(is_back, 60, every=1.0)
        os.kill(encoders.stats.remote().result(timeout_s=20)["pid"], signal.SIGKILL)
        began = time.monotonic()
        assert ask("e", single) == bits
        assert time.monotonic() - began < 4, "the request waited for an actor that is dead"
    finally:
        serve.delete(APP)
