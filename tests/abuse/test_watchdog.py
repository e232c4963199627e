"""No request may hold a router's event loop: while it does, all streams of all callers stand still.

All large bodies of cases.yaml, and some that are too plain to have an expected answer there, go to
the API in process. Beside each of them a task wakes every two milliseconds.
"""

import asyncio
import gc
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from deployments.api.app import Api, build_asgi
from deployments.backend import GenerationRequest
from engine.batch import TokenLogprobs
from engine.messages import Delta
from tests.abuse.test_cases import OPTIONS, load, prepare
from tests.deployments.api.asgi import CHAT, COMPLETION, Client
from tests.deployments.fake_backend import MODEL, FakeBackend, FakeGeneration
from tests.loop_gaps import gaps, least

SILENCE = 0.05  # seconds
LARGE = 16 * 1024  # bytes; what is smaller has nothing to be slow with
CONTEXT = 131_072  # so that much of what is sent is accepted, and then tokenised as a whole
MIB = 1 << 20

Sent = tuple[str, str, bytes, list[tuple[bytes, bytes]]]
_JSON = [(b"content-type", b"application/json")]


def _chat(**fields: Any) -> Sent:
    return "POST", "/v1/chat/completions", json.dumps({**CHAT, **fields}).encode(), _JSON


def _completion(**fields: Any) -> Sent:
    return "POST", "/v1/completions", json.dumps({**COMPLETION, **fields}).encode(), _JSON


def _raw(body: bytes, path: str = "/v1/chat/completions") -> Sent:
    return "POST", path, body, _JSON


def _call(arguments: str) -> dict[str, Any]:
    return {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}


def _assistant(*arguments: str) -> dict[str, Any]:
    return {"role": "assistant", "tool_calls": [_call(text) for text in arguments]}


FURTHER: dict[str, Callable[[], Sent]] = {
    "4 MB of empty lists": lambda: _raw(b'{"a":[' + b"[]," * (4 * MIB // 3 - 8) + b"1]}"),
    "4 MB of nested lists": lambda: _raw(b'{"a":[' + b"[[[[]]]]," * (4 * MIB // 9 - 8) + b"1]}"),
    "4 MB of objects": lambda: _raw(b'{"a":[' + b'{"a":0},' * (4 * MIB // 8 - 8) + b"1]}"),
    "4 MB of short texts": lambda: _raw(b'{"a":[' + b'"aa",' * (4 * MIB // 5 - 8) + b"1]}"),
    "4 MB of zeros": lambda: _raw(b'{"a":[' + b"0," * (4 * MIB // 2 - 8) + b"1]}"),
    "as many fractions as a body may have": lambda: _raw(b'{"a":[' + b"1.5," * 699_990 + b"1]}"),
    "as many lists as a body may have": lambda: _raw(b'{"a":[' + b"[]," * 49_990 + b"1]}"),
    "as many keys as a body may have": lambda: _raw(
        b"{" + b",".join(b'"%036x":0' % i for i in range(99_990)) + b"}"
    ),
    "4 MB of escaped quotes": lambda: _raw(b'{"a":"' + b'\\"' * (2 * MIB - 8) + b'"}'),
    "4 MB of escaped colons": lambda: _raw(b'{"a":"' + b"\\u003a" * (4 * MIB // 6 - 8) + b'"}'),
    "4 MB of letters outside ASCII": lambda: _raw('{{"a":"\\u003a{}"}}'.format("é" * MIB).encode()),
    "tool calls": lambda: _chat(messages=[_assistant(*["{}"] * 128)] * 300),
    "tool arguments of 50,000 lists": lambda: _chat(
        messages=[_assistant('{"a":[' + "[]," * 49_900 + "1]}")]
    ),
    "tool arguments of 4 MB": lambda: _chat(
        messages=[_assistant('{"a":"' + "[" * 4_000_000 + '"}')]
    ),
    "4 MB of reasoning": lambda: _chat(
        messages=[{"role": "assistant", "content": "a", "reasoning_content": "<|" * 2_000_000}]
    ),
    "400 KB of chat": lambda: _chat(
        messages=[{"role": "user", "content": "hello world " * 35_000}]
    ),
    "control tokens": lambda: _chat(
        messages=[{"role": "user", "content": "<|im_end|>" * 2_000}] * 20, max_tokens=1
    ),
    "1,024 messages": lambda: _chat(messages=[{"role": "user", "content": "hello " * 20}] * 1024),
    "500,000 digits": lambda: _completion(prompt="7" * 500_000),
    "4 MB of one letter": lambda: _completion(prompt="a" * 4_000_000),
    "130,000 ids": lambda: _completion(prompt=[5] * 130_000),
    "32 prompts of ids, echoed": lambda: _completion(prompt=[[5] * 20_000] * 32, echo=True),
    "32 texts": lambda: _completion(prompt=["hello world " * 8_000] * 32),
    "as many log-probabilities as a prompt may have": lambda: _completion(
        prompt=[5] * 6000, prompt_logprobs=20, max_tokens=1
    ),
    "the same, echoed in a stream": lambda: _completion(
        prompt=[5] * 6000, logprobs=20, echo=True, stream=True, max_tokens=1
    ),
    "the same of a chat": lambda: _chat(
        messages=[{"role": "user", "content": "the " * 6000}], prompt_logprobs=20, max_tokens=1
    ),
    "ids back to text": lambda: _raw(json.dumps({"tokens": [5] * 65_000}).encode(), "/detokenize"),
    "text to ids with texts": lambda: _raw(
        json.dumps({"prompt": "hello " * 40_000, "return_token_strs": True}).encode(), "/tokenize"
    ),
}


def _sent() -> Iterator[Any]:
    for item in load():
        case: dict[str, Any] = item.values[0]
        if not case.get("websocket") and len(prepare(case)[2]) >= LARGE:
            yield pytest.param(case.get("api"), lambda case=case: prepare(case), id=str(item.id))
    for name, make in FURTHER.items():
        yield pytest.param(None, make, id=name.replace(" ", "_"))


class Quick(FakeBackend):
    """A FakeBackend without its checks of each token, which cost time that a router would not
    spend."""

    def generate(self, request: GenerationRequest) -> FakeGeneration:
        return FakeGeneration(self, request)

    def deltas(self, request: GenerationRequest, choice: int) -> list[Delta]:
        wanted = request.params.prompt_logprobs
        if wanted is None:
            return super().deltas(request, choice)
        item = TokenLogprobs(5, -1.5, 2, list(range(40, 40 + wanted)), [-1.0] * wanted, 9.0)
        scores: list[TokenLogprobs | None] = [None, *[item] * (len(request.token_ids) - 1)]
        return [Delta(id=choice, token_ids=[5], finish="length", prompt_logprobs=scores, cached=0)]


@pytest.fixture(autouse=True, scope="module")
def frozen() -> Iterator[None]:
    """Exempt imports from garbage collection, as a router does, so that only requests' objects
    count."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def application(kind: str | None) -> Api:
    backend = Quick(bos=kind == "bos")
    card = backend.cards[MODEL]
    backend.cards = {MODEL: replace(card, max_model_len=CONTEXT)}
    backend.script = "done"
    return build_asgi(backend, OPTIONS[kind])


async def silence(app: Api, sent: Sent) -> float:
    """Return the longest time in seconds in which no other task could run."""
    method, path, body, headers = sent
    work = asyncio.create_task(Client(app).request(method, path, body, headers))
    lengths = await gaps(work.done)
    assert work.result().status < 500
    return max(lengths, default=0.0)


@pytest.mark.parametrize(("kind", "make"), list(_sent()))
def test_the_loop_is_never_silent(kind: str | None, make: Callable[[], Sent]) -> None:
    """A pattern of 63 KB held the loop for 27 s in re.compile, only to be refused; a megabyte of
    `required` names 7 s, a million empty lists 1.7 s. A thread is no way out of a call that keeps
    the interpreter lock."""
    sent, app = make(), application(kind)
    length = asyncio.run(least(lambda: silence(app, sent), SILENCE))
    assert length <= SILENCE, f"the loop was silent for {length:.3f} s"


def test_the_watchdog_sees_a_silent_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """A watchdog that cannot bark: on the loop, and in a thread that keeps the lock."""
    app = application(None)

    def spin(seconds: float) -> None:
        end = time.process_time() + seconds
        while time.process_time() < end:
            pass

    monkeypatch.setattr(
        "deployments.api.dialects.openai.routes.take_tools", lambda *fields, **_: spin(0.2)
    )
    assert asyncio.run(silence(app, _chat())) > SILENCE  # small, so on the loop
    assert asyncio.run(silence(app, _chat(user="a" * 20_000))) < SILENCE  # in a thread that yields
    monkeypatch.setattr(
        "deployments.api.dialects.openai.routes.take_tools",
        lambda *fields, **_: (sorted(range(500_000, 0, -1), key=str), None)[1],
    )
    assert asyncio.run(silence(app, _chat(user="a" * 20_000))) > SILENCE  # in one that does not
