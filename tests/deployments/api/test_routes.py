"""Routes that generate nothing: tokens, health, metrics, models; and what is counted of any."""

import hashlib
import re
from asyncio import run
from dataclasses import replace
from typing import Any

import pytest

from deployments.api.app import build_asgi
from deployments.api.options import ApiOptions
from tests.deployments.api.asgi import CHAT, Client
from tests.deployments.fake_backend import FakeBackend


def test_tokenize_and_back(client: Client) -> None:
    """The ids that generation would use, and their text."""
    reply = run(client.post("/tokenize", {"prompt": "hello <|im_end|>"})).json()
    assert reply["count"] == len(reply["tokens"]) and reply["max_model_len"] == 256
    text = run(client.post("/detokenize", {"tokens": reply["tokens"]})).json()["prompt"]
    assert text == "hello <|im_end|>"
    body = {"model": "tiny", "messages": CHAT["messages"], "return_token_strs": True}
    chat = run(client.post("/tokenize", body)).json()
    assert "".join(chat["token_strs"]) == (
        "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    )
    usage = run(client.chat()).json()["usage"]
    assert usage["prompt_tokens"] == chat["count"]


def test_health_ready_metrics_models(backend: FakeBackend) -> None:
    """Live is not ready; HEAD as GET; models by name, with a slash too. A service that is to stop
    said that no replica can take requests *yet*. /v1/models answered seconds before chats."""

    async def figures() -> str:
        return "manta_up 1\n"

    app = build_asgi(backend, ApiOptions(metrics=figures))
    client = Client(app)
    backend.is_ready = False
    assert run(client.request("GET", "/health")).status == 200
    ready = run(client.request("GET", "/ready"))
    assert ready.status == 503 and ready.json()["error"]["code"] == "not_ready"
    backend.draining = True
    ready = run(client.request("GET", "/ready"))
    error = ready.json()["error"]
    assert (ready.status, ready.header("retry-after")) == (503, "1")
    assert (error["code"], error["message"]) == ("draining", "the service is about to stop")
    models = run(client.request("GET", "/v1/models"))
    assert (models.status, models.json()["error"]["code"]) == (503, "draining")
    backend.is_ready, backend.draining, backend.is_starting = False, False, True
    models = run(client.request("GET", "/v1/models"))
    assert (models.status, models.header("retry-after")) == (503, "1")
    assert models.json()["error"]["code"] == "not_ready"
    backend.is_starting = False
    assert run(client.request("GET", "/v1/models")).status == 200, "chats wait for a replica"
    backend.is_ready = True
    assert run(client.request("GET", "/ready")).status == 200
    metrics = run(client.request("GET", "/metrics"))
    assert metrics.body == b"manta_up 1\n"
    assert (metrics.header("content-type") or "").startswith("text/plain")
    backend.cards["org/tiny"] = backend.cards["tiny"]
    assert run(client.request("GET", "/v1/models")).json()["data"][0]["id"] == "tiny"
    assert run(client.request("GET", "/v1/models/org/tiny")).status == 200
    head = run(client.request("HEAD", "/v1/models"))
    assert head.status == 200 and head.body == b""


@pytest.mark.parametrize(
    ("path", "meant"),
    [
        ("/v1/fine_tuning/jobs", None),
        ("/v1/audio/speech", None),
        ("/v1/vector_stores", None),
        ("/v1/images/generations", None),
        ("/v1/chat/completions/", "/v1/chat/completions"),
        ("/v1/chat/completion", "/v1/chat/completions"),
        ("/v1/health", "/health"),
        ("/healthz", "/health"),
    ],
)
def test_a_404_names_a_route_only_if_it_is_near(
    client: Client, path: str, meant: str | None
) -> None:
    """/v1/embeddings was said to be nearly /v1/completions, and /v1/audio/speech /v1/adapters."""
    reply = run(client.request("GET", path))
    message = reply.json()["error"]["message"]
    assert (reply.status, reply.json()["error"]["code"]) == (404, "not_found")
    assert "served: /v1/chat/completions, /v1/completions, /v1/responses" in message
    hint = f', did you mean "{meant}"?;' if meant else ";"
    assert message.startswith(f'there is no "{path}"{hint} served: ')


@pytest.mark.parametrize("before", ["", "/v1/v1"])
def test_routes_are_served_without_v1(backend: FakeBackend, before: str) -> None:
    """A base URL without /v1, or with two of them, was a 404; and must open nothing to anyone."""
    client = Client(build_asgi(backend))
    messages = [{"role": "user", "content": "hello"}]
    for path, body in (
        ("/chat/completions", {"messages": messages}),
        ("/completions", {"prompt": "hello"}),
        ("/responses", {"input": "hello"}),
        ("/messages", {"messages": messages, "max_tokens": 8}),
    ):
        reply = run(client.post(before + path, body))
        assert reply.status == 200, (path, reply.body)
    listed = run(client.request("GET", f"{before}/models"))
    shown = run(client.request("GET", f"{before}/models/tiny"))
    assert (listed.json()["data"][0]["id"], shown.json()["id"]) == ("tiny", "tiny")
    keys = frozenset({hashlib.sha256(b"key").digest()})
    admins = frozenset({hashlib.sha256(b"admin").digest()})
    closed = Client(build_asgi(backend, ApiOptions(api_keys=keys, admin_keys=admins)))
    for method, path in (("GET", "/models"), ("POST", "/models"), ("GET", "/adapters")):
        assert run(closed.request(method, before + path)).status == 401
        asked = ((b"authorization", b"Bearer key"), (b"content-type", b"application/json"))
        status = run(closed.request(method, before + path, headers=asked)).status
        assert status == (200 if (method, path) == ("GET", "/models") else 403), (method, path)


def test_models_for_anthropics_client(backend: FakeBackend) -> None:
    """OpenAI's list, which Anthropic's client cannot read, and errors without a type."""
    client = Client(build_asgi(backend))
    card = backend.cards["tiny"]
    backend.cards = {name: replace(card, id=name) for name in "abc"}
    theirs = ((b"anthropic-version", b"2023-06-01"), (b"x-api-key", b"x"))

    def get(path: str) -> Any:
        return run(client.request("GET", path, headers=theirs)).json()

    listed = get("/v1/models")
    assert [model["id"] for model in listed["data"]] == ["a", "b", "c"]
    assert (listed["first_id"], listed["last_id"], listed["has_more"]) == ("a", "c", False)
    expected = {
        "type": "model",
        "id": "b",
        "display_name": "b",
        "created_at": "2023-11-14T22:13:20Z",
    }
    assert listed["data"][1] == get("/v1/models/b") == expected
    for path in ("/v1/models/d", "/v1/nothing"):
        assert (get(path)["type"], get(path)["error"]["type"]) == ("error", "not_found_error")


def test_ping(backend: FakeBackend) -> None:
    """SageMaker takes a container down whose /ping is a 404."""
    assert run(Client(build_asgi(backend)).request("GET", "/ping")).status == 200


@pytest.mark.parametrize("path", ["/v1/load_lora_adapter", "/v1/unload_lora_adapter"])
def test_vllms_routes_of_adapters_are_for_admins(backend: FakeBackend, path: str) -> None:
    """A user's key that changes what is served, by another name of the route."""
    keys = frozenset({hashlib.sha256(b"key").digest()})
    admins = frozenset({hashlib.sha256(b"admin").digest()})
    client = Client(build_asgi(backend, ApiOptions(api_keys=keys, admin_keys=admins)))
    for key, status in ((b"none", 401), (b"key", 403), (b"admin", 400)):
        headers = ((b"authorization", b"Bearer " + key), (b"content-type", b"application/json"))
        assert run(client.request("POST", path, b"{}", headers)).status == status


def test_version(backend: FakeBackend) -> None:
    """What runs there could not be asked; and it is nothing to tell those without a key."""
    reply = run(Client(build_asgi(backend)).request("GET", "/version"))
    assert reply.status == 200 and re.fullmatch(r"\d+\.\d+\.\d+.*", reply.json()["version"])
    closed = build_asgi(backend, ApiOptions(api_keys=frozenset({bytes(32)})))
    assert run(Client(closed).request("GET", "/version")).status == 401


def test_observe_has_a_fixed_set_of_routes(backend: FakeBackend) -> None:
    """Labels that callers can invent make a metrics store grow without end."""
    seen: list[tuple[str, int]] = []
    app = build_asgi(backend, ApiOptions(observe=lambda r, s, t: seen.append((r, s))))
    client = Client(app)
    for i in range(50):
        run(client.request(f"M{i}", f"/path{i}"))
        run(client.request("GET", f"/v1/models/m{i}"))
    run(client.chat())
    assert set(seen) == {("other", 404), ("/v1/models/{name}", 404), ("/v1/chat/completions", 200)}


def test_the_root_answers_who_looks_for_a_server(backend: FakeBackend) -> None:
    """Ollama's clients ask HEAD or GET / before anything else, without a key; people who open the
    address in a browser want the page."""
    keyed = ApiOptions(api_keys=frozenset({b"x" * 32}), page=True)
    client = Client(build_asgi(backend, keyed))
    for method in ("GET", "HEAD"):
        reply = run(client.request(method, "/"))
        assert reply.status == 200 and (reply.header("content-type") or "").startswith("text/plain")
        assert reply.body == (b"Ollama is running" if method == "GET" else b"")
    html = ((b"accept", b"text/html,application/xhtml+xml"),)
    reply = run(client.request("GET", "/", headers=html))
    assert (reply.status, reply.header("location")) == (307, "/page")
    plain = Client(build_asgi(backend, ApiOptions(page=False)))
    assert run(plain.request("GET", "/", headers=html)).status == 200
