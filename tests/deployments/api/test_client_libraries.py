"""A two-step tool loop through each library that speaks to us; those not installed are skipped."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from deployments.api.app import build_asgi
from engine.messages import Delta
from tests.deployments.api.output.test_tools import backend_with, written
from tests.deployments.api.output.tool_templates import TEMPLATES
from tests.deployments.api.server import serve
from tests.deployments.fake_backend import MODEL

ANSWER = "It is sunny."
USER = "Weather?"


@pytest.fixture(scope="module")
def root() -> Iterator[str]:
    """Yield the URL of a model that asks for the weather of Paris, and answers once it is told."""
    backend = backend_with(TEMPLATES["hermes"])
    make: Callable[..., list[Delta]] = backend.deltas

    def deltas(request: Any, choice: int) -> list[Delta]:
        prompt = backend._tokenizer.decode(request.token_ids, skip_special_tokens=False)
        backend.script = "<think>\nhm\n</think>\n\n" + written(("weather", {"city": "Paris"}))
        if "<|im_start|>tool" in prompt:
            backend.script = ANSWER
        if "Extract" in prompt:
            backend.script = written(("City", {"name": "Paris"}))
        return make(request, choice)

    backend.deltas = deltas  # type: ignore[method-assign]
    with serve(build_asgi(backend)) as port:
        yield f"http://127.0.0.1:{port}"


@pytest.fixture(autouse=True)
def environment(root: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (
        ("OPENAI_BASE_URL", f"{root}/v1"),
        ("OPENAI_API_KEY", "none"),
        ("OPENAI_AGENTS_DISABLE_TRACING", "1"),
        ("LITELLM_LOCAL_MODEL_COST_MAP", "True"),  # it asks the network for prices otherwise
    ):
        monkeypatch.setenv(name, value)


def test_anthropic(root: str) -> None:
    """Blocks that its accumulator does not take; a count that is not the usage."""
    anthropic = pytest.importorskip("anthropic", reason="pip install anthropic")
    client = anthropic.Anthropic(base_url=root, api_key="none", max_retries=0)
    schema = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    tools = [{"name": "weather", "description": "Of a city.", "input_schema": schema}]
    messages: list[Any] = [{"role": "user", "content": USER}]
    sent: Any = {"model": MODEL, "max_tokens": 1000, "messages": messages, "tools": tools}
    with client.messages.stream(**sent) as stream:
        for _ in stream:
            pass
        message = stream.get_final_message()
    whole = client.messages.create(**sent)
    for answer in (message, whole):
        assert [block.type for block in answer.content] == ["thinking", "tool_use"]
        assert answer.content[1].input == {"city": "Paris"} and answer.stop_reason == "tool_use"
    result = {"type": "tool_result", "tool_use_id": message.content[1].id, "content": "sun"}
    messages += [{"role": "assistant", "content": message.content}]
    messages += [{"role": "user", "content": [result]}]
    end = client.messages.create(**sent)
    assert end.content[0].text == ANSWER
    counted = client.messages.count_tokens(model=MODEL, messages=messages, tools=tools)
    assert counted.input_tokens == end.usage.input_tokens + end.usage.cache_read_input_tokens
    with pytest.raises(anthropic.NotFoundError):
        client.messages.create(**{**sent, "model": "none"})


def test_openai_agents() -> None:
    """Items that it sends back and we do not read, whole and streamed."""
    agents = pytest.importorskip("agents", reason="pip install openai-agents")

    def weather(city: str) -> str:
        """Return the weather of a city."""
        return f"sun in {city}"

    tools = [agents.function_tool(weather)]
    agent = agents.Agent(name="x", model=MODEL, tools=tools, instructions="Help.")
    assert agents.Runner.run_sync(agent, USER).final_output == ANSWER


def test_pydantic_ai() -> None:
    """The same through its chat and its Responses."""
    models = pytest.importorskip(
        "pydantic_ai.models.openai", reason="pip install pydantic-ai-slim[openai]"
    )
    from pydantic_ai import Agent  # type: ignore[import-not-found]

    def weather(city: str) -> str:
        """Return the weather of a city."""
        return f"sun in {city}"

    for kind in (models.OpenAIChatModel, models.OpenAIResponsesModel):
        agent = Agent(kind(MODEL), tools=[weather])
        assert agent.run_sync(USER).output == ANSWER


def test_instructor() -> None:
    """A schema that comes as a tool that must be called."""
    instructor = pytest.importorskip("instructor", reason="pip install instructor")
    import openai
    import pydantic

    city = pydantic.create_model("City", name=(str, ...))
    client = instructor.from_openai(openai.OpenAI())
    messages = [{"role": "user", "content": "Extract: Paris"}]
    extracted = client.chat.completions.create(model=MODEL, response_model=city, messages=messages)
    assert extracted.name == "Paris"


@pytest.mark.parametrize("responses", [False, True])
def test_langchain(responses: bool) -> None:
    """Calls that its chunks do not add up to, over chats and Responses."""
    langchain = pytest.importorskip("langchain_openai", reason="pip install langchain-openai")
    from langchain_core.messages import HumanMessage, ToolMessage  # type: ignore[import-not-found]

    schema = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    function = {"name": "weather", "description": "Of a city.", "parameters": schema}
    model = langchain.ChatOpenAI(model=MODEL, use_responses_api=responses)
    model = model.bind_tools([{"type": "function", "function": function}])
    history: list[Any] = [HumanMessage(USER)]
    asked = model.invoke(history)
    assert asked.tool_calls[0]["args"] == {"city": "Paris"}
    history += [asked, ToolMessage("sun", tool_call_id=asked.tool_calls[0]["id"])]
    assert str(model.invoke(history).text) == ANSWER
    parts = list(model.stream([HumanMessage(USER)]))
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    assert total.tool_calls[0]["args"] == {"city": "Paris"}


def test_litellm(root: str) -> None:
    """Chunks that its builder does not add up, or a result that the next turn does not tell."""
    litellm = pytest.importorskip("litellm", reason="pip install litellm mcp")
    schema = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    function = {"name": "weather", "description": "Of a city.", "parameters": schema}
    messages: list[Any] = [{"role": "user", "content": USER}]
    sent: Any = {"model": f"openai/{MODEL}", "api_base": f"{root}/v1", "api_key": "none"}
    sent |= {"messages": messages, "tools": [{"type": "function", "function": function}]}
    chunks = list(litellm.completion(**sent, stream=True))
    for answer in (litellm.completion(**sent), litellm.stream_chunk_builder(chunks)):
        message = answer.choices[0].message
        (call,) = message.tool_calls
        assert (call.function.name, call.function.arguments) == ("weather", '{"city": "Paris"}')
    messages += [message.model_dump(exclude_none=True)]
    messages += [{"role": "tool", "tool_call_id": call.id, "content": "sun"}]
    assert litellm.completion(**sent).choices[0].message.content == ANSWER
