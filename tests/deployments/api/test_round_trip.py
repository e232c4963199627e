"""Whatever is answered can be sent back: in each dialect, whole and streamed, kept and not, at each
place where a limit may cut it, with and without the tools that were there before."""

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest

from deployments.api.app import build_asgi
from deployments.api.options import ApiOptions
from tests.deployments.api.asgi import Client
from tests.deployments.api.output.test_tools import CITY, PARIS, backend_with, written
from tests.deployments.api.output.tool_templates import TEMPLATES
from tests.deployments.fake_backend import MODEL, FakeBackend

_PLAIN = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# It knows no tools, and refuses two turns of one role, as Gemma's and older ones of Mistral's do.
STRICT = (
    "{% set turns = messages if messages[0].role != 'system' else messages[1:] %}"
    "{% for m in turns %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}{% endfor %}"
)
NOT_TOOLS = "{# tool #}" + _PLAIN  # speaks of tools and shows no call
TEMPLATE = {
    "plain": _PLAIN,
    "strict": STRICT + _PLAIN,
    "thinks": "{# <think> #}" + STRICT + _PLAIN,
    "no calls": NOT_TOOLS,
    "hermes": TEMPLATES["hermes"],
    "mistral": TEMPLATES["mistral"],
    "deepseek-v3": TEMPLATES["deepseek-v3"],
    "kimi-k2": TEMPLATES["kimi-k2"],
}
CALL = written(("weather", PARIS))
ANSWERS = {
    "empty": "",
    "blank": " \n",
    "text": "hello there",
    "thoughts": "<think>\nHm.\n</think>\n\n",
    "open thoughts": "<think>\nHm, and then",
    "thoughts and text": "<think>\nHm.\n</think>\n\nYes.",
    "call": CALL,
    "all": f"<think>\nHm.\n</think>\n\nSo:\n{CALL}\n{CALL}",
}
FUNCTION = {"name": "weather", "description": "Of a city.", "parameters": CITY}
OPENED = {"enable_thinking": True}


class Dialect:
    """A conversation in one dialect: `ask` sends the conversation and adds the answer to it."""

    path = "/v1/chat/completions"
    limit = "max_completion_tokens"

    def __init__(self, client: Client, streamed: bool, limit: int) -> None:
        self.client, self.streamed, self.most = client, streamed, limit
        self.history: list[dict[str, Any]] = [self.user("Hello")]

    def user(self, text: str) -> dict[str, Any]:
        return {"role": "user", "content": text}

    def tools(self) -> list[dict[str, Any]]:
        return [{"type": "function", "function": FUNCTION}]

    def body(self, tools: bool) -> dict[str, Any]:
        more = {"tools": self.tools()} if tools else {}
        return {"messages": self.history, self.limit: self.most, **more}

    async def ask(self, tools: bool) -> None:
        body = {"model": MODEL, "stream": self.streamed, **self.body(tools)}
        reply = await self.client.post(self.path, body)
        assert reply.status == 200, (reply.json(), body)
        if self.streamed:
            self.take_events(reply.body)
        else:
            self.take_answer(reply.json())

    def take_answer(self, answer: Any) -> None:
        self.history.append(answer["choices"][0]["message"])

    def take_events(self, body: bytes) -> None:
        message: dict[str, Any] = {"role": "assistant", "content": None}
        for line in body.decode().split("\n"):
            if not line.startswith("data: {"):
                continue
            for choice in json.loads(line[6:])["choices"]:
                for name, value in choice["delta"].items():
                    if name == "tool_calls":
                        for piece in value:
                            calls = message.setdefault(name, [])
                            if piece["index"] == len(calls):
                                calls.append(piece)
                            else:
                                arguments = piece["function"]["arguments"]
                                calls[-1]["function"]["arguments"] += arguments
                    elif name != "role" and value is not None:
                        message[name] = (message.get(name) or "") + value
        self.history.append(message)

    def reply(self) -> None:
        """Add the results of the answer's calls, or another question."""
        for call in self.history[-1].get("tool_calls") or ():
            result = {"role": "tool", "tool_call_id": call["id"], "content": "sunny"}
            self.history.append(result)
        if self.history[-1]["role"] != "tool":
            self.history.append(self.user("And?"))


class KnownFields(Dialect):
    """A client with types of its own, which loses fields that it does not know, and empty ones."""

    def reply(self) -> None:
        known = ("role", "content", "tool_calls")
        said = {name: self.history[-1].get(name) for name in known}
        self.history[-1] = {name: value for name, value in said.items() if value}
        super().reply()


class Responses(Dialect):
    path = "/v1/responses"
    limit = "max_output_tokens"
    stored = False
    last: dict[str, Any]

    def tools(self) -> list[dict[str, Any]]:
        return [{"type": "function", **FUNCTION}]

    def body(self, tools: bool) -> dict[str, Any]:
        more = {"tools": self.tools()} if tools else {}
        return {"input": self.history, self.limit: self.most, "store": False, **more}

    def take_answer(self, answer: Any) -> None:
        self.last = answer
        self.history += answer["output"]

    def take_events(self, body: bytes) -> None:
        lines = [line[6:] for line in body.decode().split("\n") if line.startswith("data: ")]
        self.take_answer(json.loads(lines[-1])["response"])

    def reply(self) -> None:
        self.history += (results := list(self.results()))
        if not results:
            self.history.append(self.user("And?"))

    def results(self) -> Iterator[dict[str, Any]]:
        for item in self.last["output"]:
            if item["type"] == "function_call":
                result = {"type": "function_call_output", "call_id": item["call_id"]}
                yield {**result, "output": "sunny"}


class Kept(Responses):
    """A conversation of /v1/responses that the service keeps."""

    def body(self, tools: bool) -> dict[str, Any]:
        body = {**super().body(tools), "store": True}
        return {**body, "previous_response_id": self.last["id"]} if hasattr(self, "last") else body

    def take_answer(self, answer: Any) -> None:
        super().take_answer(answer)
        self.history = []


class Messages(Dialect):
    path = "/v1/messages"
    limit = "max_tokens"

    def tools(self) -> list[dict[str, Any]]:
        return [{"name": "weather", "input_schema": CITY}]

    def take_answer(self, answer: Any) -> None:
        self.history.append({"role": "assistant", "content": answer["content"]})

    def take_events(self, body: bytes) -> None:
        blocks: list[dict[str, Any]] = []
        for line in body.decode().split("\n"):
            if not line.startswith("data: "):
                continue
            event = json.loads(line[6:])
            if event["type"] == "content_block_start":
                blocks.append(event["content_block"])
            elif event["type"] == "content_block_delta":
                for name, value in event["delta"].items():
                    if name in ("text", "thinking"):
                        blocks[-1][name] += value
        self.take_answer({"content": blocks})

    def reply(self) -> None:
        calls = [block for block in self.history[-1]["content"] if block["type"] == "tool_use"]
        results = [
            {"type": "tool_result", "tool_use_id": block["id"], "content": "sunny"}
            for block in calls
        ]
        self.history.append({"role": "user", "content": results or "And?"})


class Ollama(Dialect):
    path = "/api/chat"

    def body(self, tools: bool) -> dict[str, Any]:
        more = {"tools": self.tools()} if tools else {}
        return {"messages": self.history, "options": {"num_predict": self.most}, **more}

    def take_answer(self, answer: Any) -> None:
        self.history.append(answer["message"])

    def take_events(self, body: bytes) -> None:
        message: dict[str, Any] = {"role": "assistant", "content": ""}
        for line in body.decode().splitlines():
            for name, value in json.loads(line)["message"].items():
                if name != "role":
                    message[name] = message.get(name, type(value)()) + value
        self.take_answer({"message": message})

    def reply(self) -> None:
        for _ in self.history[-1].get("tool_calls", ()):
            self.history.append({"role": "tool", "tool_name": "weather", "content": "sunny"})
        if self.history[-1]["role"] != "tool":
            self.history.append(self.user("And?"))


DIALECTS = [Dialect, KnownFields, Responses, Kept, Messages, Ollama]


async def converse(client: Client, backend: FakeBackend, kind: type[Dialect], case: Any) -> None:
    text, streamed, most, tools = case
    backend.script = text
    talk = kind(client, streamed, most)
    await talk.ask(tools)
    talk.reply()
    talk.most = 100
    backend.script = "Yes."
    await talk.ask(False)
    talk.reply()
    await talk.ask(tools)


@pytest.mark.parametrize("name", TEMPLATE)
@pytest.mark.parametrize("kind", DIALECTS)
def test_an_answer_can_be_sent_back(kind: type[Dialect], name: str) -> None:
    """An answer of thoughts alone, an empty one, or calls without the tools that were there before:
    it ends the conversation, as each later request has it in its history."""
    backend = backend_with(TEMPLATE[name])
    client = Client(build_asgi(backend, ApiOptions(store_bytes=10**7)))
    takes_tools = name != "no calls"

    async def all_cases() -> None:
        streamed = tools = False
        for text in ANSWERS.values():
            whole = len(backend._tokenizer.encode(text)) + 1
            for most in (*range(1, whole, max(1, whole // 5)), whole + 9):
                streamed, tools = not streamed, takes_tools and (streamed or not tools)
                await converse(client, backend, kind, (text, streamed, most, tools))

    asyncio.run(all_cases())
