"""Pictures through the clients of OpenAI, Anthropic and Ollama; those not installed are skipped."""

import base64
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from deployments.api.app import build_asgi
from deployments.api.options import ApiOptions
from tests.deployments.api.server import serve
from tests.deployments.fake_backend import MODEL
from tests.deployments.images.test_wire import TALL, WIDE, encoded, url
from tests.deployments.images.vision_backend import VisionBackend

ANSWER = "It is a cat."
GRIDS = [(2, 5), (4, 2)]  # of WIDE and TALL
FUNCTION = {"name": "look", "description": "At a page.", "parameters": {"type": "object"}}


class Endpoint:
    """A server with a model that sees, whose answer is ANSWER. root: its address."""

    def __init__(self, backend: VisionBackend, root: str) -> None:
        self.backend, self.root = backend, root

    def grids(self) -> list[tuple[int, int]]:
        """Return the grids of the images of the last request."""
        return [image.grid for image in self.backend.requests[-1].images]


@pytest.fixture(scope="module")
def endpoint() -> Iterator[Endpoint]:
    backend = VisionBackend()
    backend.script = ANSWER
    backend.cards[MODEL] = replace(backend.cards[MODEL], max_model_len=4096)  # for tools
    with serve(build_asgi(backend, ApiOptions())) as port:
        yield Endpoint(backend, f"http://127.0.0.1:{port}")


@pytest.fixture
def openai_client(endpoint: Endpoint) -> Iterator[Any]:
    openai = pytest.importorskip("openai", reason="pip install openai")
    with openai.OpenAI(base_url=f"{endpoint.root}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_openai_chats(endpoint: Endpoint, openai_client: Any) -> None:
    """Several pictures, whole and streamed, and one in a tool's result."""
    parts = [{"type": "image_url", "image_url": {"url": url(file)}} for file in (WIDE, TALL)]
    question = {"type": "text", "text": "Which is a cat?"}
    messages: list[Any] = [{"role": "user", "content": [*parts, question]}]
    chat = openai_client.chat.completions
    whole = chat.create(model=MODEL, messages=messages)
    assert whole.choices[0].message.content == ANSWER and endpoint.grids() == GRIDS
    stream = chat.create(
        model=MODEL, messages=messages, stream=True, stream_options={"include_usage": True}
    )
    text, usage = "", None
    for chunk in stream:
        text += "".join(choice.delta.content or "" for choice in chunk.choices)
        usage = chunk.usage or usage
    assert text == ANSWER and endpoint.grids() == GRIDS
    assert usage.prompt_tokens == whole.usage.prompt_tokens > 18
    call = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    messages += [{"role": "assistant", "tool_calls": [call]}]
    messages += [{"role": "tool", "tool_call_id": "c1", "content": parts[1:]}]
    chat.create(model=MODEL, messages=messages, tools=[{"type": "function", "function": FUNCTION}])
    assert endpoint.grids() == [*GRIDS, GRIDS[1]]


def test_openai_responses(endpoint: Endpoint, openai_client: Any) -> None:
    """Items with pictures, whole and streamed, and a function's output that is one."""
    items = [
        {"type": "input_image", "image_url": url(file), "detail": "auto"} for file in (WIDE, TALL)
    ]
    asked = {"role": "user", "content": [*items, {"type": "input_text", "text": "Which?"}]}
    responses = openai_client.responses
    assert responses.create(model=MODEL, input=[asked]).output_text == ANSWER
    assert endpoint.grids() == GRIDS
    with responses.stream(model=MODEL, input=[asked]) as stream:
        assert stream.get_final_response().output_text == ANSWER
    assert endpoint.grids() == GRIDS
    call = {"type": "function_call", "call_id": "c1", "name": "look", "arguments": "{}"}
    output = {"type": "function_call_output", "call_id": "c1", "output": items[1:]}
    tool = {"type": "function", **FUNCTION, "strict": False}
    responses.create(model=MODEL, input=[asked, call, output], tools=[tool])
    assert endpoint.grids() == [*GRIDS, GRIDS[1]]


def test_a_refusal_is_the_openai_clients_error(openai_client: Any) -> None:
    """Bug: a broken picture that the client tells of as a failure of the server."""
    import openai

    part = {"type": "image_url", "image_url": {"url": url(WIDE[:60])}}
    with pytest.raises(openai.BadRequestError) as refused:
        openai_client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": [part]}]
        )
    assert refused.value.code == "invalid_image"
    assert refused.value.param == "messages[0].content[0].image_url.url"


def test_anthropic(endpoint: Endpoint) -> None:
    """Several blocks, streamed too, their count, and a tool result that is a picture."""
    anthropic = pytest.importorskip("anthropic", reason="pip install anthropic")

    def block(file: bytes, kind: str) -> dict[str, Any]:
        source = {"type": "base64", "media_type": f"image/{kind}", "data": encoded(file)}
        return {"type": "image", "source": source}

    blocks = [block(WIDE, "png"), block(TALL, "jpeg")]
    messages: list[Any] = [
        {"role": "user", "content": [*blocks, {"type": "text", "text": "Which is a cat?"}]}
    ]
    sent: dict[str, Any] = {"model": MODEL, "messages": messages}
    with anthropic.Anthropic(base_url=endpoint.root, api_key="none", max_retries=0) as client:
        whole = client.messages.create(**sent, max_tokens=100)
        assert whole.content[0].text == ANSWER and endpoint.grids() == GRIDS
        with client.messages.stream(**sent, max_tokens=100) as stream:
            assert "".join(stream.text_stream) == ANSWER
        assert endpoint.grids() == GRIDS
        counted = client.messages.count_tokens(**sent)
        usage = whole.usage
        assert counted.input_tokens == usage.input_tokens + (usage.cache_read_input_tokens or 0)
        use = {"type": "tool_use", "id": "c1", "name": "look", "input": {}}
        result = {"type": "tool_result", "tool_use_id": "c1", "content": blocks[1:]}
        messages += [{"role": "assistant", "content": [use]}, {"role": "user", "content": [result]}]
        tools = [{"name": "look", "input_schema": {"type": "object"}}]
        client.messages.create(**sent, max_tokens=100, tools=tools)
        assert endpoint.grids() == [*GRIDS, GRIDS[1]]
        with pytest.raises(anthropic.BadRequestError, match="truncated or broken"):
            asked = [{"role": "user", "content": [block(WIDE[:60], "png")]}]
            client.messages.create(model=MODEL, messages=asked, max_tokens=9)


def test_ollama(endpoint: Endpoint, tmp_path: Path) -> None:
    """Files by path, bytes and base64, in a chat and a prompt, streamed too; what `show` tells."""
    ollama = pytest.importorskip("ollama", reason="pip install ollama")
    client = ollama.Client(host=endpoint.root)
    file = tmp_path / "wide.png"
    file.write_bytes(WIDE)
    messages = [{"role": "user", "content": "Which is a cat?", "images": [str(file), TALL]}]
    assert client.chat(MODEL, messages).message.content == ANSWER
    assert endpoint.grids() == GRIDS
    pieces = client.chat(MODEL, messages, stream=True)
    assert "".join(piece.message.content for piece in pieces) == ANSWER
    images = [base64.b64encode(WIDE).decode(), TALL]
    assert client.generate(MODEL, "Which is a cat?", images=images).response == ANSWER
    assert endpoint.grids() == GRIDS
    assert "vision" in client.show(MODEL).capabilities
    with pytest.raises(ollama.ResponseError, match="truncated or broken"):
        client.generate(MODEL, "a", images=[WIDE[:60]])
