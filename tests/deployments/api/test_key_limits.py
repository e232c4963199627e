"""What an API key may do: models, rates and budgets, and how a refusal says so."""

import asyncio
import hashlib
import json
import time
from dataclasses import replace
from typing import Any

import pytest

from deployments.api.app import build_asgi
from deployments.api.caller import Caller, KeyRule
from deployments.api.http.errors import ApiError
from deployments.api.key_limits import KeyCount, KeyLimits, period_ends, period_of
from deployments.api.options import ApiOptions
from engine.pooling import Pooling
from tests.deployments.api.asgi import COMPLETION, Client, Reply
from tests.deployments.fake_backend import MODEL, VECTOR, FakeBackend

KEY = hashlib.sha256(b"one").digest()
AT = 1_795_413_600.0  # 2026-11-23 06:00 UTC


def app_of(rule: KeyRule) -> Client:
    options = ApiOptions(api_keys=frozenset({KEY}), rules={KEY: rule}, limits=KeyLimits())
    return Client(build_asgi(FakeBackend(), options))


def ask(client: Client, method: str = "POST", path: str = "/v1/completions", **body: Any) -> Reply:
    headers = [(b"content-type", b"application/json"), (b"authorization", b"Bearer one")]
    data = json.dumps({**COMPLETION, **body}).encode() if method == "POST" else b""
    return asyncio.run(client.request(method, path, data, headers))


def error(reply: Reply) -> dict[str, Any]:
    error: dict[str, Any] = reply.json()["error"]
    return error


def caller(rule: KeyRule) -> Caller:
    return Caller(id="k", rule=rule)


def test_requests_per_minute_are_refused_in_openais_words() -> None:
    """A limit that never refuses; a refusal that does not say which, or when to come again."""
    client = app_of(KeyRule(name="team", requests=2))
    first = ask(client)
    assert first.status == 200
    assert first.header("x-ratelimit-limit-requests") == "2"
    assert first.header("x-ratelimit-remaining-requests") == "1"
    assert ask(client).status == 200
    refused = ask(client)
    assert refused.status == 429
    assert error(refused)["code"] == "rate_limit_exceeded"
    assert error(refused)["message"].startswith(
        'Rate limit reached for key "team" on requests per min (RPM): Limit 2, Used 2, Requested 1.'
        " Please try again in 29."
    )
    assert refused.header("retry-after") == "30"


POOLED: dict[str, dict[str, Any]] = {
    "/v1/embeddings": {"input": "the sea"},
    "/v1/rerank": {"query": "the sea", "documents": ["one", "two"]},
    "/v2/rerank": {"query": "the sea", "documents": ["one", "two"]},
    "/v1/score": {"text_1": "the sea", "text_2": ["one", "two"]},
    "/v1/classify": {"input": "the sea"},
}


@pytest.mark.parametrize("path", POOLED)
def test_every_route_of_texts_counts(path: str) -> None:
    """Bug: only embeddings counted, so that a key over its rate or budget went on reranking."""
    number = {"/v1/embeddings": 0, "/v1/classify": VECTOR}.get(path, 1)
    labels = tuple(f"kind {i}" for i in range(number))
    backend = FakeBackend()
    pooling = Pooling("cls", labels=labels)
    backend.cards[MODEL] = replace(backend.cards[MODEL], pooling=pooling, vector_size=VECTOR)
    rule = KeyRule(name="team", requests=1, tokens=1000)
    options = ApiOptions(api_keys=frozenset({KEY}), rules={KEY: rule}, limits=KeyLimits())
    client = Client(build_asgi(backend, options))
    headers = [(b"content-type", b"application/json"), (b"authorization", b"Bearer one")]
    data = json.dumps({"model": MODEL, **POOLED[path]}).encode()

    first = asyncio.run(client.request("POST", path, data, headers))
    assert first.status == 200, first.json()
    asked = sum(len(request.token_ids) for request in backend.requests)
    assert first.header("x-ratelimit-remaining-tokens") == str(1000 - asked)
    assert asyncio.run(client.request("POST", path, data, headers)).status == 429


def test_tokens_per_minute_count_prompts_at_once_and_outputs_at_the_end() -> None:
    """Long prompts, or long answers, that cost nothing."""
    limits, key = KeyLimits(), caller(KeyRule(tokens=100))
    limits.charge(key, 60, 0.0)
    with pytest.raises(ApiError, match=r"tokens per min \(TPM\): Limit 100, Used 60, Requested 50"):
        limits.charge(key, 50, 0.0)
    limits.ended("k", 60, 100, AT)  # 60 in debt
    with pytest.raises(ApiError) as refused:
        limits.charge(key, 1, 30.0)
    assert dict(refused.value.headers)["retry-after"] == "7"  # 30 s gave 50 back, of 60 + 1
    limits.charge(key, 1, 37.0)
    with pytest.raises(ApiError, match=r"Request too large .* Limit 100, Requested 101") as refused:
        limits.charge(key, 101, 1e6)
    assert dict(refused.value.headers) == {"x-should-retry": "false"}


def test_a_budget_ends_with_its_period() -> None:
    """A budget that never comes back; one that is over and is told as a rate, so that clients try
    again every second until midnight."""
    limits, key = KeyLimits(), caller(KeyRule(name="team", budget=100, period="day"))
    limits.count_request(key, 0.0, AT)
    limits.ended("k", 60, 39, AT)
    limits.count_request(key, 1.0, AT + 1)
    limits.ended("k", 1, 0, AT + 1)
    with pytest.raises(ApiError) as refused:
        limits.count_request(key, 2.0, AT + 2)
    error = refused.value
    assert (error.status, error.code, error.kind) == (
        429,
        "insufficient_quota",
        "insufficient_quota",
    )
    assert "exceeded your current quota" in error.message and "100 of 100 tokens" in error.message
    assert dict(error.headers) == {"retry-after": str(18 * 3600 - 2), "x-should-retry": "false"}
    limits.count_request(key, 2.0, AT + 86400)
    assert period_of("month", AT) == "2026-11" and period_ends("month", AT) == 7.75 * 86400
    assert period_of("day", AT) == "2026-11-23" and period_ends("day", AT) == 18 * 3600


def test_a_key_has_one_limit_at_all_routers() -> None:
    """Two routers that each give a key its whole limit; a router that starts and takes the history
    of another for what was used this minute; a router's end that gives a budget back."""
    key = caller(KeyRule(requests=10, tokens=1000, budget=5000, period="month"))
    first, second = KeyLimits(), KeyLimits()
    for now in range(8):
        first.count_request(key, 0.0, AT)
        first.charge(key, 100, 0.0)
        first.ended("k", 100, 0, AT)
        assert now < 8
    second.hear({"one": {k: KeyCount(0, 0, "", 0) for k in first.told(AT)}}, AT)
    second.count_request(key, 0.0, AT)
    second.charge(key, 100, 0.0)
    second.hear({"one": first.told(AT)}, AT)
    second.hear({"one": first.told(AT)}, AT)  # nothing new
    second.count_request(key, 0.0, AT)
    with pytest.raises(ApiError, match="RPM"):
        second.count_request(key, 0.0, AT)
    with pytest.raises(ApiError, match="Used 900"):
        second.charge(key, 101, 0.0)
    late = KeyLimits()
    late.hear({"one": first.told(time.time())}, time.time())
    late.count_request(key, 0.0, AT)
    late.charge(key, 1000, 0.0)
    gone = {"one": {"k": KeyCount(8, 800, "2026-11", 5000)}}
    late.hear(gone, AT)
    with pytest.raises(ApiError, match="5000 of 5000"):
        late.count_request(key, 0.0, AT)


@pytest.mark.parametrize(("path", "chat"), [("/v1/completions", 0), ("/v1/chat/completions", 1)])
def test_models_of_other_keys_are_refused_and_not_listed(path: str, chat: int) -> None:
    """A key that uses what it was not given, or learns what there is."""
    client = app_of(KeyRule(name="team", models=("other-*",)))
    body = {"messages": [{"role": "user", "content": "x"}]} if chat else {}
    refused = ask(client, path=path, **body)
    assert refused.status == 403 and error(refused)["code"] == "model_not_found"
    assert error(refused)["message"] == 'Key "team" does not have access to model "tiny"'
    unknown = ask(client, path=path, model="nothing", **body)
    assert unknown.status == 404 and "tiny" not in error(unknown)["message"]
    assert ask(client, "GET", "/v1/models").json()["data"] == []
    assert ask(client, "GET", "/v1/models/tiny").status == 403
    assert ask(client, path="/tokenize", prompt="x", model=None).status == 403
    assert ask(app_of(KeyRule(models=("tin?",)))).status == 200


def test_a_key_without_limits_is_not_counted() -> None:
    """A table of keys that grows, and headers that mean nothing."""
    client = app_of(KeyRule(name="team", priority=-4))
    reply = ask(client)
    assert reply.status == 200
    assert not [name for name, _ in reply.headers if name.startswith("x-ratelimit")]
    assert client.app.options.limits.told(AT) == {}


def test_rules_change_while_requests_come() -> None:
    """A raised limit that waits for a restart; a lowered one that keeps the old minute's rest."""
    client = app_of(KeyRule(requests=1))
    assert [ask(client).status for _ in range(2)] == [200, 429]
    client.app.change_options(rules={KEY: KeyRule()})
    assert ask(client).status == 200
    client.app.change_options(api_keys=frozenset({bytes(32)}))
    refused = ask(client)
    assert refused.status == 401 and error(refused)["code"] == "invalid_api_key"
