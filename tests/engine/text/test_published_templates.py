"""Every published chat template renders what transformers renders of it, or both refuse."""

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from engine.errors import InvalidRequest
from engine.text.chat_template import ChatTemplate
from engine.text.template_contents import Form
from tests.published_templates import of_tokenizers, of_trl

Message = dict[str, Any]

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
CITY = {"type": "string", "description": "a <name>"}
PARAMETERS = {"type": "object", "properties": {"city": CITY, "days": {"type": "integer"}}}
FUNCTION = {"name": "weather", "description": "Of a city.", "parameters": PARAMETERS}
TOOLS = {"tools": [{"type": "function", "function": FUNCTION}]}
ON = {"add_generation_prompt": False, "continue_final_message": True}
WHOLE = {"add_generation_prompt": False}

SYSTEM = {"role": "system", "content": "Be kind, é."}
USER = {"role": "user", "content": "hello  "}
ANSWER = {"role": "assistant", "content": " Hi <there>\n"}
THOUGHT = {**ANSWER, "reasoning_content": "hm"}


def calls(content: str, *ids: str) -> Message:
    function = {"name": "weather", "arguments": {"city": 'Paris "é"', "days": 1}}
    tool_calls = [{"id": id, "type": "function", "function": function} for id in ids]
    return {"role": "assistant", "content": content, "tool_calls": tool_calls}


def result(id: str) -> Message:
    return {"role": "tool", "tool_call_id": id, "name": "weather", "content": "sunny"}


def prefill(text: str) -> Message:
    return {"role": "assistant", "content": text}


ONE, TWO = "callabc12", "callabc13"
CALLED = [USER, calls("", ONE), result(ONE)]
CASES: dict[str, tuple[list[Message], dict[str, Any]]] = {
    "a question": ([USER], {}),
    "a system message": ([SYSTEM, USER], {}),
    "an empty system message": ([{**SYSTEM, "content": ""}, USER], {}),
    "turns": ([SYSTEM, USER, ANSWER, USER], {}),
    "two questions": ([USER, USER], {}),
    "a developer": ([{**SYSTEM, "role": "developer"}, USER], {}),
    "a chat without an end": ([USER, ANSWER], WHOLE),
    "a prefill": ([USER, prefill("So e")], ON),
    "a prefill with marks": ([SYSTEM, USER, prefill("<| x ")], ON),
    "tools": ([SYSTEM, USER], TOOLS),
    "tools without a system message": ([USER], TOOLS),
    "a result": (CALLED, TOOLS),
    "a result without tools": (CALLED, {}),
    "turns behind a result": ([SYSTEM, *CALLED, ANSWER, USER], TOOLS),
    "a call behind text": ([USER, calls("Let me see", ONE), result(ONE), ANSWER, USER], TOOLS),
    "two calls": ([USER, calls("", ONE, TWO), result(ONE), result(TWO)], TOOLS),
    "calls in two turns": ([*CALLED, calls("", TWO), result(TWO)], TOOLS),
    "a prefill behind a result": ([*CALLED, prefill("It is")], {**TOOLS, **ON}),
    "thoughts": ([USER, THOUGHT, USER], {}),
    "thoughts before a call": ([USER, {**calls("", ONE), "reasoning_content": "hm"}], WHOLE),
    "no thinking": ([USER], {"enable_thinking": False}),
    "thinking": ([USER], {"enable_thinking": True}),
    "documents": ([USER], {"documents": [{"title": "t", "text": "x"}]}),
}


@cache
def compiled(templates: Callable[[], dict[str, dict[str, str]]]) -> dict[str, ChatTemplate]:
    return {name: ChatTemplate(sources, SPECIAL) for name, sources in templates().items()}


def theirs(source: str, forms: dict[str, Form], chat: list[Message], options: Any) -> str | None:
    """Return transformers' rendering of a chat; None if transformers refuses it.

    Contents are parts where the template shows only these.
    """

    def shaped(message: Message) -> Message:
        form = forms.get(message["role"], forms["user"])
        if form.text or not form.parts:
            return message
        return {**message, "content": [{"type": "text", "text": message["content"]}]}

    variables = {"add_generation_prompt": True, **options, **SPECIAL}
    try:
        texts, _ = render_jinja_template([[*map(shaped, chat)]], chat_template=source, **variables)
    except Exception:  # what a template raises, and ValueError
        return None
    return str(texts[0])


def ours(template: ChatTemplate, chat: list[Message], options: Any) -> str | None:
    try:
        return template.render(chat, **options)
    except InvalidRequest:
        return None


@pytest.mark.parametrize(
    "templates",
    [
        pytest.param(of_trl, id="trl"),
        pytest.param(of_tokenizers, id="tokenizers", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize(("chat", "options"), CASES.values(), ids=CASES)
def test_a_prompt_is_that_of_transformers(
    templates: Callable[[], dict[str, dict[str, str]]], chat: list[Message], options: Any
) -> None:
    """A model is asked in another form than the one that it was trained with."""
    rendered = 0
    for name, template in compiled(templates).items():
        use = "tool_use" if "tools" in options and "tool_use" in template.sources else "default"
        expected = theirs(template.sources[use], template.forms(use), chat, options)
        assert ours(template, chat, options) == expected, name
        rendered += expected is not None
    assert rendered
