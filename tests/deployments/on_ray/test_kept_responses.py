"""Answers of /v1/responses that an endpoint keeps, deployed as `manta serve` deploys it."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from deployments.app import deploy, serve_config
from deployments.config.load import parse_config
from deployments.model_applications import model_app
from tests.deployments.on_ray.live import settled
from tests.deployments.on_ray.serve_cluster import Cluster, tiny_model

pytestmark = [pytest.mark.serve, pytest.mark.slow, pytest.mark.timeout(240)]

APP = "keeping"


@contextlib.contextmanager
def endpoint(cluster: Cluster, model: Path, several: bool) -> Iterator[openai.OpenAI]:
    from ray import serve

    engine = {"load_format": "dummy", "dtype": "float32", "num_blocks": 64, "max_num_seqs": 4}
    fields = {"model": str(model), "engine": engine, "pools": {"cpu": {"num_cpus": 0.1}}}
    data = {
        "app_name": APP,
        "route_prefix": f"/{APP}",
        "router": {"replicas": 1},
        "http": {"proxy": "serve", "port": cluster.port, "store_bytes": 1_000_000},
        **({"models": {"tiny": fields}} if several else {"served_name": "tiny", **fields}),
    }
    apps = [APP, model_app(APP, "tiny")] if several else [APP]

    def running() -> bool:
        there = serve.status().applications
        return all(app in there and there[app].status == "RUNNING" for app in apps)

    try:
        deploy(serve_config(parse_config(data, {})))
        settled(running, 120)
        url = f"http://127.0.0.1:{cluster.port}/{APP}/v1"
        with openai.OpenAI(base_url=url, api_key="none", max_retries=8, timeout=30) as client:
            yield client
    finally:
        for app in apps:
            serve.delete(app)


@pytest.mark.parametrize("several", [False, True])
def test_a_deployed_endpoint_keeps_answers(
    shared_cluster: Cluster, tmp_path: Path, several: bool
) -> None:
    """A key that the configuration takes and that routers refuse when they start."""
    with endpoint(shared_cluster, tiny_model(tmp_path / "tiny"), several) as client:
        first = client.responses.create(model="tiny", input="Hi", max_output_tokens=4)
        assert first.store is True
        again = client.responses.create(
            model="tiny", input="And?", max_output_tokens=4, previous_response_id=first.id
        )
        assert client.responses.retrieve(first.id).output == first.output
        assert again.usage and first.usage
        assert again.usage.input_tokens > first.usage.input_tokens
        later = client.responses.create(
            model="tiny", input="Hi", max_output_tokens=4, background=True
        )
        settled(lambda: client.responses.retrieve(later.id).status in ("completed", "incomplete"))
        events = list(client.responses.retrieve(later.id, stream=True))
        assert events[0].type == "response.created" and client.responses.cancel(later.id)
        client.responses.delete(first.id)
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(first.id)
