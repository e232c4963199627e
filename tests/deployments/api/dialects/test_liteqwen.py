"""liteqwen's /chat, /stream_chat_post and /stop_generate."""

import asyncio
import json
from typing import Any

import pytest

from deployments.api.app import build_asgi
from deployments.api.options import ApiOptions
from engine.sampling_params import MAX_LOGPROBS
from tests.deployments.api.asgi import CHAT, Client, Reply
from tests.deployments.fake_backend import MAX_MODEL_LEN, MODEL, FakeBackend
from tests.deployments.router.fleet import Fleet, read

GREEDY = {"temperature": 0, "max_new_tokens": 12}


def ask(client: Client, path: str = "/chat", **body: Any) -> Reply:
    return asyncio.run(client.post(path, {"query": "hello", "gen_kwargs": GREEDY, **body}))


def rendered(backend: FakeBackend, **fields: Any) -> list[int]:
    """Return the prompt that /v1/chat/completions makes of the same chat."""
    asyncio.run(Client(build_asgi(backend)).chat(**fields))
    return backend.requests.pop().token_ids


def error(reply: Reply) -> tuple[int, str, str]:
    details = reply.json()["error"]
    return reply.status, details["code"], details["param"]


def test_the_answer_is_that_of_a_chat(client: Client, backend: FakeBackend) -> None:
    """Bug: another prompt than the template's, or a history without what was just said."""
    answer = ask(client).json()
    same = asyncio.run(client.chat(**{**CHAT, "max_tokens": 12})).json()
    assert answer["response"] == same["choices"][0]["message"]["content"] != ""
    assert (answer["code"], answer["logits"], answer["flag"]) == (200, [], True)
    assert answer["history"] == [
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": answer["response"]},
    ]
    assert backend.requests[0].token_ids == backend.requests[1].token_ids
    again = ask(client, history=answer["history"], query="more", role="observation").json()
    assert again["history"][:2] == answer["history"] and len(again["history"]) == 4
    last = {"role": "observation", "content": "more"}
    assert backend.requests.pop().token_ids == rendered(
        backend, messages=[*answer["history"], last]
    )


def test_history_of_pairs(client: Client, backend: FakeBackend) -> None:
    """Bug: a question given to the assistant; pairs that come back as messages."""
    answer = ask(client, history=[["a", "b"], ["c", "d"]]).json()
    assert answer["history"] == [["a", "b"], ["c", "d"], ["hello", answer["response"]]]
    turns = zip(("user", "assistant") * 2 + ("user",), ("a", "b", "c", "d", "hello"), strict=True)
    messages = [{"role": role, "content": text} for role, text in turns]
    assert backend.requests.pop().token_ids == rendered(backend, messages=messages)
    for history, at in (
        ([["a"]], "history[0]"),
        ([["a", "b"], {"role": "user", "content": "c"}], "history[1]"),
        ("a", "history"),
        ([{"role": "nobody", "content": "c"}], "history[0].role"),
    ):
        reply = ask(client, history=history)
        assert reply.status == 400 and error(reply)[2] == at


@pytest.mark.parametrize(
    ("given", "tokens"),
    [
        ({"max_new_tokens": 3}, 3),
        ({"max_length": 60}, "60"),
        ({"max_new_tokens": 3, "max_length": 200}, 3),
        ({"max_new_tokens": 100, "max_length": 60}, "60"),
        ({}, str(MAX_MODEL_LEN)),
        ({"max_new_tokens": 10 * MAX_MODEL_LEN}, str(MAX_MODEL_LEN)),
    ],
)
def test_what_is_shorter_ends_it(
    client: Client, backend: FakeBackend, given: dict[str, int], tokens: int | str
) -> None:
    """Bug: max_length taken for the reply's alone. tokens: of the reply, or as a text with the
    prompt's."""
    assert ask(client, gen_kwargs=given).status == 200
    request = backend.requests[0]
    most = request.params.max_tokens
    assert most == (tokens if isinstance(tokens, int) else int(tokens) - len(request.token_ids))


def test_too_long(client: Client) -> None:
    """Bug: a reply of no tokens, or of a negative number, instead of a word about the prompt."""
    for fields in ({"query": "word " * MAX_MODEL_LEN}, {"gen_kwargs": {"max_length": 4}}):
        status, code, param = error(ask(client, **fields))
        assert (status, code, param) == (400, "context_length_exceeded", "query")


def test_the_reply_begins_as_given(client: Client, backend: FakeBackend) -> None:
    """Bug: the beginning counted in max_new_tokens, or left out of the reply; a silent one."""
    plain = rendered(backend)
    begin = backend.tokenizer(MODEL).encode("the answer", add_special_tokens=False)
    answer = ask(client, gen_kwargs={"max_new_tokens": 2, "prefix_token_ids": begin}).json()
    request = backend.requests.pop()
    assert request.token_ids == [*plain, *begin] and request.params.max_tokens == 2
    assert answer["response"].startswith("the answer") and answer["history"][-1]["content"] != ""
    silent = ask(client, gen_kwargs={"max_new_tokens": 2, "prefix_text": "the answer"}).json()
    assert backend.requests.pop().token_ids == [*plain, *begin]
    assert answer["response"] == "the answer" + silent["response"]
    for bad, code in (([10**6], "token_out_of_range"), ("a", "invalid_type")):
        reply = ask(client, gen_kwargs={"prefix_token_ids": bad})
        assert error(reply)[:2] == (400, code)


def test_logits(client: Client) -> None:
    """Bug: positions that do not fit the tokens, pairs that are not in order, or
    log-probabilities, of which a client that weighs models against each other makes nothing."""
    positions = ask(client, gen_kwargs={**GREEDY, "return_logits": True}).json()["logits"]
    assert [position["pos"] for position in positions] == list(range(len(positions))) and len(
        positions
    ) > 1
    for position in positions:
        values = [pair["lgt"] for pair in position["tops"]]
        assert len(values) == MAX_LOGPROBS == 32 and values == sorted(values, reverse=True)
        assert values[0] == 8.5  # -0.5 and 9


def test_events(client: Client, backend: FakeBackend) -> None:
    """Bug: events whose pieces are not the answer, or a stream without its end."""
    kwargs = {**GREEDY, "return_logits": True, "prefix_token_ids": [40]}
    whole = ask(client, gen_kwargs=kwargs).json()
    reply = ask(client, "/stream_chat_post", gen_kwargs=kwargs)
    lines = [event for event in reply.body.decode().split("\n\n") if event]
    assert all(line.startswith("event: delta\ndata: ") for line in lines)
    pieces = [json.loads(line.partition("data: ")[2]) for line in lines]
    assert "".join(piece["delta"] for piece in pieces) == pieces[-1]["text"] == whole["response"]
    assert [pos for piece in pieces for pos in piece["logits"]] == whole["logits"]
    assert [piece["flag"] for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    assert {piece["code"] for piece in pieces} == {200}


def test_an_id_that_is_live(backend: FakeBackend) -> None:
    """Bug: two answers under one id, which one stop would end both."""

    async def explain(id: str, owner: str | None) -> list[dict[str, Any]]:
        return {"live": [{"state": "running"}], "over": [{"state": "finished"}]}.get(id, [])

    client = Client(build_asgi(backend, ApiOptions(explain=explain)))
    for id in ("over", "new"):
        assert ask(client, request_id=id).status == 200
        assert backend.requests[-1].request_id == id
    refused = ask(client, request_id="live")
    assert error(refused) == (409, "duplicate_request_id", "request_id")
    assert error(ask(client, request_id="a b")) == (400, "invalid_value", "request_id")
    assert client.app.in_flight == 0 and len(backend.requests) == 2


def test_stop_asks_for_its_own(backend: FakeBackend) -> None:
    """Bug: a key that ends another's request, or is told that it has ended what it has not."""
    asked: list[tuple[str, str | None]] = []

    async def stop(request_id: str, owner: str | None, partial: bool = False) -> int:
        assert not partial
        asked.append((request_id, owner))
        return int(request_id == "live")

    client = Client(build_asgi(backend, ApiOptions(stop=stop)))
    reply = asyncio.run(client.post("/stop_generate", {"request_id": "live"}))
    assert (reply.status, reply.json()) == (200, {"request_id": "live", "stopped": 1})
    assert asked == [("live", "")]
    for app in (client.app, build_asgi(backend)):
        gone = asyncio.run(Client(app).post("/stop_generate", {"request_id": "gone"}))
        assert error(gone) == (404, "request_not_found", "request_id")
    assert error(asyncio.run(client.post("/stop_generate", {}))) == (
        *(400, "missing_field"),
        "request_id",
    )


def test_a_router_stops_a_request() -> None:
    """Bug: the client of a stopped request waits for more, or its blocks are never free."""

    async def case() -> None:
        async with Fleet(1) as fleet:
            inflight = fleet.generate(max_tokens=10_000)
            while not inflight.choices[0].emitted:
                await asyncio.sleep(0.001)
            assert fleet.dispatcher.requests.stop("q", "another") == 0
            assert fleet.dispatcher.requests.stop("q", None) == 1
            with pytest.raises(Exception, match="stopped") as failure:
                await read(inflight)
            assert getattr(failure.value, "code", "") == "cancelled"
            assert fleet.dispatcher.requests.stop("q", None) == 0
            assert fleet.dispatcher.held()["requests"] == 0

    asyncio.run(case())
