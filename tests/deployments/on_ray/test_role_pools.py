"""Pools with roles on Ray: prompts are computed in one, their KV blocks go to the other, and both
may lose a replica."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from deployments.app import assemble
from deployments.config.load import parse_config
from tests.deployments.on_ray.live import settled
from tests.deployments.on_ray.serve_cluster import Cluster, tiny_model

pytestmark = [pytest.mark.serve, pytest.mark.slow, pytest.mark.timeout(300)]
APP = "roles"


def test_prompts_and_answers_apart(shared_cluster: Cluster, tmp_path: Path) -> None:
    """Bugs: a role, a port or a secret is lost on the way from the configuration to the router;
    blocks do not go between actors; a killed replica for prompts stops the service."""
    from ray import serve

    options = {"load_format": "dummy", "dtype": "float32", "deterministic": True, "seed": 1}
    config = parse_config(
        {
            "model": str(tiny_model(tmp_path / "tiny", 2048)),
            "served_name": "m",
            "engine": options | {"device": "cpu", "kv_cache_bytes": 1 << 24},
            "pools": {
                "prompts": {"role": "prefill", "num_cpus": 0.5},
                "answers": {"role": "decode", "num_cpus": 0.5},
            },
            "router": {"replicas": 1},
            "limits": {"drain_seconds": 1.0},
        },
        {},
    )
    serve.run(assemble(config), name=APP, route_prefix="/roles")
    try:
        pools = {
            name: serve.get_deployment_handle(f"engine-{name}", APP)
            for name in ("prompts", "answers")
        }

        def stats(pool: str) -> dict[str, Any]:
            answer: dict[str, Any] = pools[pool].stats.remote().result(timeout_s=30)
            return answer

        def ask(first: int) -> list[int]:
            prompt = [10 + (first + at * 7) % 200 for at in range(900)]
            body = {"prompt": prompt, "max_tokens": 20, "temperature": 0.8, "seed": 5}
            extra = {"ignore_eos": True, "return_token_ids": True}
            answer = shared_cluster.post("/roles/v1/completions", model="m", **body, **extra)
            token_ids: list[int] = answer["choices"][0]["token_ids"]
            return token_ids

        settled(lambda: ask(99), 60)
        settled(lambda: stats("prompts")["routers"] and stats("answers")["routers"], 60)
        before = stats("answers")["moved_tokens"]
        text = ask(0)
        assert len(text) == 20
        assert stats("answers")["moved_tokens"] - before >= 880
        assert stats("answers")["failed_moves"] == 0
        assert stats("prompts")["sent_kv_bytes"] > 0
        assert ask(0) == text, "from the cache of the replica for answers"

        os.kill(stats("prompts")["engine_pid"], signal.SIGKILL)
        other = ask(1)
        assert len(other) == 20

        def are_moved_again() -> bool:
            moved = stats("answers")["moved_tokens"]
            ask(int.from_bytes(os.urandom(2), "little"))
            return bool(stats("answers")["moved_tokens"] > moved)

        settled(are_moved_again, 90, every=1.0)
    finally:
        serve.delete(APP)
