"""Rows of Ray Data's Serve stage, without Ray: waiting, priorities and errors."""

import asyncio
from dataclasses import replace
from typing import Any

import numpy
import pytest
from pydantic import BaseModel, ConfigDict

from deployments.api.app import build_asgi
from deployments.api.options import ApiOptions
from deployments.router.serve import ray_data
from deployments.router.serve.ray_data import DatasetRows
from engine.errors import MantaError, Overloaded
from engine.messages import BATCH_PRIORITY
from engine.pooling import Pooling
from tests.deployments.fake_backend import MODEL, VECTOR, FakeBackend

PATH = "/v1/completions"
STAGE = {"request_id": "0", "idx_in_batch": 3}  # what the stage adds


class FullBackend(FakeBackend):
    """A backend that refuses the first requests, as a full queue does."""

    def __init__(self, refusals: int, error: MantaError) -> None:
        super().__init__()
        self.refusals, self.error = refusals, error

    def generate(self, request: Any) -> Any:
        if self.refusals:
            self.refusals -= 1
            raise self.error
        return super().generate(request)


def ask(backend: FakeBackend, request: Any, path: str = PATH) -> dict[str, Any]:
    app = build_asgi(backend, ApiOptions(strict=True))
    return asyncio.run(DatasetRows(app).answer(path, request, MODEL))


class TheirRequest(BaseModel):
    """A request in the form of `ray.serve.llm.openai_api_models`: with defaults, open to other
    fields."""

    model_config = ConfigDict(extra="allow")
    model: str | None = None
    prompt: Any = None
    max_tokens: int | None = 16
    add_special_tokens: bool = True
    prompt_embeds: bytes | None = None  # a default that Manta would refuse


def test_a_row_waits_for_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """A full queue, which ends a job of a million rows."""
    waits: list[float] = []

    async def sleep(seconds: float) -> None:
        waits.append(seconds)

    monkeypatch.setattr(ray_data.asyncio, "sleep", sleep)  # type: ignore[attr-defined]
    backend = FullBackend(3, Overloaded("full", retry_after=7))
    answer = ask(backend, {**STAGE, "prompt": "hello", "max_tokens": 4, "stream": False})
    assert answer["choices"][0]["finish_reason"] == "length"
    assert [7 <= wait < 9 for wait in waits if wait >= 1] == [True] * 3
    assert [request.priority for request in backend.requests] == [BATCH_PRIORITY]


def test_rows_that_come_together_are_sent_one_at_a_time() -> None:
    """A batch of rows that the router checks at once, while other requests wait."""
    events: list[str] = []

    class Watched(FakeBackend):
        def generate(self, request: Any) -> Any:
            events.append("row")
            return super().generate(request)

    async def case() -> None:
        rows = DatasetRows(build_asgi(Watched(), ApiOptions(strict=True)))
        request = {"prompt": "hello", "max_tokens": 1}
        answers = asyncio.gather(*(rows.answer(PATH, request, MODEL) for _ in range(50)))
        while not answers.done():
            events.append("turn")
            await asyncio.sleep(0)
        await answers

    asyncio.run(case())
    assert events.count("row") == 50
    assert "rowrow" not in "".join(events)


def test_rows_are_as_arrow_makes_them() -> None:
    """Lists that come back as arrays of NumPy, and fields of other rows that are None here."""
    backend = FakeBackend()
    row = {"prompt": numpy.array([40, 41]), "max_tokens": numpy.int64(3), "messages": None}
    plain = {"prompt": [40, 41], "max_tokens": 3}
    assert ask(backend, row)["choices"] == ask(backend, plain)["choices"]
    with pytest.raises(ValueError, match="bytes has no form in JSON"):
        ask(backend, {"prompt": b"x"})


def test_fields_are_those_of_http() -> None:
    """The stage's own fields refused as unknown, defaults of a model of theirs taken for wishes, a
    row's own priority lost."""
    backend = FakeBackend()
    theirs = TheirRequest(**STAGE, prompt="hello", max_tokens=3)
    plain = {**STAGE, "prompt": "hello", "max_tokens": 3, "priority": 2}
    texts = [ask(backend, request)["choices"][0]["text"] for request in (theirs, plain)]
    assert len(set(texts)) == 1
    assert [request.priority for request in backend.requests] == [BATCH_PRIORITY, 2]


def test_other_routes() -> None:
    """A priority that a route does not know is an unknown field in strict mode."""
    backend = FakeBackend()
    messages = [{"role": "user", "content": "hello"}]
    answer = ask(backend, {**STAGE, "messages": messages}, "/v1/chat/completions")
    assert answer["choices"][0]["message"]["content"]
    backend.cards[MODEL] = replace(
        backend.cards[MODEL], pooling=Pooling("mean"), vector_size=VECTOR
    )
    assert ask(backend, {**STAGE, "input": "hello"}, "/v1/embeddings")["data"][0]["embedding"]
    assert [request.priority for request in backend.requests] == [BATCH_PRIORITY] * 2


@pytest.mark.parametrize(
    ("request_kwargs", "message"),
    [
        ({"prompt": "x", "temperature": 9}, "invalid_value: temperature"),
        ({"prompt": "x", "colour": 1}, "colour"),
        ({"prompt": "x", "model": "other"}, "other"),
        ({"prompt": "x", "stream": True}, "stream: the answer to a row"),
        ("x", "request_kwargs: the fields"),
    ],
    ids=str,
)
def test_an_error_fails_the_row_alone(request_kwargs: Any, message: str) -> None:
    """The stage catches no exceptions but a few of Python's own, and ends the job at others."""
    with pytest.raises(ValueError, match=message) as caught:
        ask(FakeBackend(), request_kwargs)
    assert type(caught.value) is ValueError  # a driver without Manta can read it


def test_a_failure_of_the_engine_is_final() -> None:
    """An error that will repeat, tried again for ever."""
    backend = FakeBackend()
    backend.errors[0] = MantaError("poison", code="engine_error")
    with pytest.raises(ValueError, match="engine_error"):
        ask(backend, {"prompt": "hello", "max_tokens": 4})
