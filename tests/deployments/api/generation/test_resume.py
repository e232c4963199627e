"""A stream that is cut goes on at another router: same text, log-probabilities, ends and usage."""

import asyncio
import json
import secrets
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from deployments.api.app import build_asgi
from deployments.api.options import ApiOptions
from deployments.api.stream import event_ids
from tests.deployments.api.asgi import CHAT, COMPLETION, Client, Reply
from tests.deployments.fake_backend import MAX_MODEL_LEN, FakeBackend

SECRET = secrets.token_bytes(32)
JSON = (b"content-type", b"application/json")
ASKS = (JSON, (b"x-event-ids", b"1"))

KINDS: dict[str, dict[str, Any]] = {
    "chat": {**CHAT},
    "a seed that the server draws": {**CHAT, "temperature": 0.8},
    "a seed of the request": {**CHAT, "temperature": 0.8, "seed": 5},
    "three choices": {**CHAT, "temperature": 1, "n": 3},
    "log-probabilities": {**CHAT, "logprobs": True, "top_logprobs": 2, "temperature": 1, "n": 2},
    "a stop string over tokens": {**CHAT, "stop": ["is "]},
    "a stop string that is shown": {**CHAT, "stop": ["wer"], "include_stop_str_in_output": True},
    "no end token": {**CHAT, "ignore_eos": True},
    "token ids": {**CHAT, "return_token_ids": True, "n": 2, "temperature": 1},
    "a grammar": {**CHAT, "response_format": {"type": "json_object"}, "temperature": 1},
    "a completion": {**COMPLETION},
    "its log-probabilities": {**COMPLETION, "logprobs": 2},
    "an echo": {**COMPLETION, "echo": True},
    "an echo with log-probabilities": {**COMPLETION, "echo": True, "logprobs": 1},
    "only the prompt's": {**COMPLETION, "echo": True, "logprobs": 1, "max_tokens": 0},
    "prompts": {**COMPLETION, "prompt": ["one", "two", "three"], "n": 2, "temperature": 1},
    "a stop string of prompts": {**COMPLETION, "prompt": ["one", "two"], "stop": ["answer"]},
}


def path_of(body: dict[str, Any]) -> str:
    return "/v1/chat/completions" if "messages" in body else "/v1/completions"


def router(backend: FakeBackend, **options: Any) -> Client:
    return Client(build_asgi(backend, ApiOptions(event_secret=SECRET, **options)))


async def ask(client: Client, body: dict[str, Any], last: bytes = b"", **more: Any) -> Reply:
    body = {"stream": True, "stream_options": {"include_usage": True}, **body}
    headers = more.pop("headers", ())
    headers = (*headers, JSON, (b"last-event-id", last)) if last else (*headers, *ASKS)
    return await client.post(path_of(body), body, headers=headers, **more)


def events(reply: Reply) -> list[tuple[bytes, Any]]:
    """Return (id, data) of each event of a stream; the id is b"" if it has none."""
    parsed = []
    for block in reply.body.split(b"\n\n"):
        fields = dict(line.split(b": ", 1) for line in block.splitlines())
        if b"data" in fields:
            data = fields[b"data"]
            done = data == b"[DONE]"
            parsed.append((fields.get(b"id", b""), "[DONE]" if done else json.loads(data)))
    return parsed


def told(parts: list[Any]) -> dict[str, Any]:
    """Return what a client makes of the events' data: texts, log-probabilities, ends and usage."""
    out: dict[str, Any] = {"heads": set(), "done": 0, "usage": None, "roles": 0}
    for data in parts:
        if data == "[DONE]":
            out["done"] += 1
            continue
        assert "error" not in data, data
        assert not out["done"]
        out["heads"].add((data["id"], data["created"], data["object"], data["model"]))
        if data.get("usage"):
            assert out["usage"] is None
            out["usage"] = data["usage"]
        for choice in data["choices"]:
            of = out.setdefault(
                choice["index"], {"text": "", "ids": [], "logprobs": [], "finish": None}
            )
            assert of["finish"] is None, "text behind the end"
            delta = choice.get("delta", {})
            out["roles"] += "role" in delta
            of["text"] += choice["text"] if "text" in choice else delta.get("content", "")
            of["ids"] += choice.get("token_ids", [])
            if (logprobs := choice["logprobs"]) is not None:
                lists = [logprobs["content"]] if "content" in logprobs else list(logprobs.values())
                of["logprobs"] += [list(row) for row in zip(*lists, strict=True)]
            if choice["finish_reason"] is not None:
                of["finish"] = (choice["finish_reason"], choice["stop_reason"])
    return out


def keep_all(backend: FakeBackend) -> None:
    """Keep the backend's tokens, as replicas do that live on."""


def keep_none(backend: FakeBackend) -> None:
    """Drop the backend's tokens, as if the replicas had gone with the router."""
    backend.kept.clear()


def keep_some(backend: FakeBackend) -> None:
    """Keep the first tokens of a choice only, as if its last replica had gone and an earlier one
    not."""
    for key, past in list(backend.kept.items()):
        backend.kept[key] = replace(past, token_ids=past.token_ids[:2], finish="")


@pytest.mark.parametrize("kept", [keep_all, keep_none, keep_some])
@pytest.mark.parametrize("burst", [1, 7])
@pytest.mark.parametrize("kind", KINDS)
def test_cut_at_every_event_it_goes_on_with_the_same(
    kind: str, burst: int, kept: Callable[[FakeBackend], None]
) -> None:
    """Bug: whoever was connected to a router or HAProxy that died lost the answer. Two routers that
    know nothing of each other; the stream is cut behind each of its events, and the one that goes
    on is cut again."""

    async def case() -> None:
        body = KINDS[kind]
        before = FakeBackend()
        before.burst = burst
        whole = events(await ask(router(before), body))
        expected = told([data for _, data in whole])
        assert expected["done"] == 1 and all(id for id, data in whole if data != "[DONE]")
        assert len(whole) > 3
        for cut in range(1, len(whole)):
            after = FakeBackend()
            after.kept = {
                key: replace(p, token_ids=[*p.token_ids]) for key, p in before.kept.items()
            }
            kept(after)
            client = router(after)
            reply = await ask(client, body, whole[cut - 1][0])
            assert reply.status == 200, reply.body
            rest = events(reply)
            assert told([data for _, data in [*whole[:cut], *rest]]) == expected, cut
            if kept is keep_all:
                again = [n for r in after.requests for n in r.emitted if n]
                assert not again or all(r.weights == "w" for r in after.requests)
            middle = len(rest) // 2
            if middle:
                second = events(await ask(client, body, rest[middle - 1][0]))
                got = [*whole[:cut], *rest[:middle], *second]
                assert told([data for _, data in got]) == expected, (cut, middle)

    asyncio.run(case())


def test_the_tokens_are_not_computed_again_where_a_replica_has_them() -> None:
    """Bug: going on costs all decode steps again instead of a look into the prefix cache."""

    async def case() -> None:
        backend = FakeBackend()
        whole = events(await ask(router(backend), KINDS["no end token"]))
        await ask(router(backend), KINDS["no end token"], whole[20][0])
        assert len(backend.requests[1].emitted[0]) == 20
        # What has ended needs no engine at all.
        await ask(router(backend), KINDS["no end token"], whole[-3][0])
        assert len(backend.requests) == 2

    asyncio.run(case())


def test_ids_are_asked_for_and_short() -> None:
    """Bug: clients that take an event for one line that begins with "data: " break on an id; ids
    that grow with the answer make it cost the square of its length."""

    async def case() -> None:
        backend = FakeBackend()
        plain = await router(backend).chat(stream=True)
        assert b"id: " not in plain.body.replace(b'"id": ', b"") and not backend.kept
        body = {**CHAT, "max_tokens": MAX_MODEL_LEN - 50, "ignore_eos": True}
        received = events(await ask(router(backend), body))
        assert len(received) > 150 and len(received[-2][0]) <= len(received[3][0]) + 8 <= 72
        wide = {**COMPLETION, "prompt": ["a"] * 32, "n": 8, "temperature": 1}
        assert len(events(await ask(router(backend), wide))[-2][0]) < 4000

    asyncio.run(case())


def test_forged_altered_and_foreign_ids_are_refused() -> None:
    """Bug: an id that somebody made up, or of another body, key, route or application, is obeyed
    or ends in a 500."""

    async def case() -> None:
        import hashlib

        backend = FakeBackend()
        keys = {name: hashlib.sha256(name.encode()).digest() for name in ("alice", "bob")}
        client = router(backend, api_keys=frozenset(keys.values()))
        alice = ((b"authorization", b"Bearer alice"),)
        bob = ((b"authorization", b"Bearer bob"),)
        whole = events(await ask(client, CHAT, headers=alice))
        good = whole[4][0]
        assert (await ask(client, CHAT, good, headers=alice)).status == 200

        async def refused(last: bytes, body: dict[str, Any] = CHAT, headers: Any = alice) -> None:
            reply = await ask(client, body, last, headers=headers)
            error = reply.json()["error"]
            assert (reply.status, error["code"]) == (400, "invalid_event_id"), last
            assert error["param"] == "last-event-id"

        for place in range(len(good)):
            other = b"A" if good[place : place + 1] != b"A" else b"B"
            await refused(good[:place] + other + good[place + 1 :])
        for last in (b"1", b"x" * 9000, good[:-4], good + b"AAAA", b"\xff\xfe", good * 2, b"==="):
            await refused(last)
        await refused(good, {**CHAT, "max_tokens": 31})
        await refused(good, {**CHAT, "stream": False})
        await refused(good, headers=bob)
        elsewhere = Client(build_asgi(backend, ApiOptions()))
        assert (await ask(elsewhere, CHAT, good)).status == 400
        ran = len(backend.requests)
        await refused(b"AAAA")
        assert len(backend.requests) == ran

    asyncio.run(case())


def test_ids_have_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: an id is good for ever."""

    async def case() -> None:
        client = router(FakeBackend())
        whole = events(await ask(client, CHAT))
        later = time.time() + event_ids.LIFE_SECONDS + 2
        monkeypatch.setattr(event_ids.time, "time", lambda: later)
        reply = await ask(client, CHAT, whole[3][0])
        assert (reply.status, reply.json()["error"]["code"]) == (400, "event_id_expired")

    asyncio.run(case())


def test_what_cannot_be_the_same_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: another text behind the first half: nobody has the tokens any more and they come out
    otherwise; or the prompt is another one now."""

    async def case() -> None:
        backend = FakeBackend()
        body = {**CHAT, "temperature": 1, "stop": ["zz"]}
        whole = events(await ask(router(backend), body))
        other = FakeBackend()
        other.script = "some other words, which are as many"
        reply = await ask(router(other), body, whole[5][0])
        if reply.status == 200:
            assert events(reply)[-1][1]["error"]["code"] == "stream_lost"
        else:
            assert (reply.status, reply.json()["error"]["code"]) == (409, "stream_lost")
        monkeypatch.setattr(event_ids, "fingerprint", lambda call: b"else")
        reply = await ask(router(backend), body, whole[5][0])
        assert (reply.status, reply.json()["error"]["code"]) == (409, "stream_changed")

    asyncio.run(case())
