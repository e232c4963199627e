"""Answers of /v1/responses that an endpoint of one model keeps. Of several models:
several_models/test_several_models.py."""

import openai
import pytest

from tests.deployments.on_ray.live import settled
from tests.deployments.on_ray.serve_cluster import Cluster

pytestmark = [pytest.mark.serve, pytest.mark.slow, pytest.mark.timeout(240)]


def keeps(url: str, model: str) -> None:
    """Check that an endpoint keeps answers, goes on from them and deletes them."""
    with openai.OpenAI(base_url=url, api_key="none", max_retries=8, timeout=30) as client:
        first = client.responses.create(model=model, input="Hi", max_output_tokens=4)
        assert first.store is True
        again = client.responses.create(
            model=model, input="And?", max_output_tokens=4, previous_response_id=first.id
        )
        assert client.responses.retrieve(first.id).output == first.output
        assert again.usage and first.usage
        assert again.usage.input_tokens > first.usage.input_tokens
        later = client.responses.create(
            model=model, input="Hi", max_output_tokens=4, background=True
        )
        settled(lambda: client.responses.retrieve(later.id).status in ("completed", "incomplete"))
        events = list(client.responses.retrieve(later.id, stream=True))
        assert events[0].type == "response.created" and client.responses.cancel(later.id)
        client.responses.delete(first.id)
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(first.id)


def test_a_deployed_endpoint_keeps_answers(shared_fleet: Cluster) -> None:
    """A key that the configuration takes and that routers refuse when they start."""
    keeps(f"http://127.0.0.1:{shared_fleet.port}/v1", "tiny")
