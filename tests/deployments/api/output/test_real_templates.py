"""Tools in the chat templates of real models: what they print of a conversation is what
transformers prints of it."""

import asyncio
import json
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from deployments.api.app import build_asgi
from deployments.api.output.detect import template_output
from tests.deployments.api.asgi import Client
from tests.deployments.api.output.test_tools import TOOLS, backend_with, code_of
from tests.published_templates import of_trl

# Template -> the format of its calls.
FORMATS = {
    "deepseekv3": "deepseek-v3",
    "glm4moe": "glm-4.5",
    "gptoss": "harmony",
    **dict.fromkeys(("gemma4", "gemma4_v2", "gemma4_v3", "gemma4_v4", "gemma4_v5"), "gemma4"),
    "diffusion_gemma": "gemma4",
    **dict.fromkeys(("lfm2_v2", "lfm2_2_5", "lfm2_2_5_v2", "lfm2_2_5_vl"), "lfm2"),
    "llama3_1": "llama3-json",
    "llama3_2": "llama3-json",
    **dict.fromkeys(("qwen2_5", "qwen3", "qwen3_instruct_2507", "qwen3_vl"), "hermes"),
    **dict.fromkeys(("qwen3_5_nothink", "qwen3_5_think", "qwen3_6", "qwen3_8"), "qwen3-coder"),
    **{
        f"nemotron_3{name}": "qwen3-coder" for name in ("_5_lightning", "_nano", "_super", "_ultra")
    },
}
# They print calls in formats that are not known here, or none at all.
REFUSED = ("deepseek_r1_distill", "lfm2", "muse_glimmer")
ARGUMENTS = {"city": "123", "days": 3, "unit": "c"}


def template(name: str) -> str:
    return of_trl()[name]["default"]


def conversation(arguments: Any, content: str) -> list[dict[str, Any]]:
    call = {"id": "callabc12", "type": "function"}
    function = {"name": "weather", "arguments": arguments}
    result = {"role": "tool", "tool_call_id": "callabc12", "name": "weather", "content": "sunny"}
    return [
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": content, "tool_calls": [{**call, "function": function}]},
        result,
        {"role": "assistant", "content": "It is sunny."},
        {"role": "user", "content": "and now?"},
    ]


@pytest.mark.parametrize("name", FORMATS)
def test_the_prompt_is_what_transformers_renders(name: str) -> None:
    """Fields of a tool in another order, arguments as another type, a result that is left out."""
    source = template(name)
    backend = backend_with(source)
    known = template_output(backend._tokenizer)
    assert known.calls is not None and known.calls.name == FORMATS[name]
    messages = conversation(json.dumps(ARGUMENTS), "")
    reply = asyncio.run(Client(build_asgi(backend)).chat(tools=TOOLS, messages=messages))
    assert reply.status == 200, reply.body
    ours = backend._tokenizer.decode(backend.requests[-1].token_ids, skip_special_tokens=False)
    # transformers makes such parameters of a function that has none.
    now = {**TOOLS[1]["function"], "parameters": {"type": "object", "properties": {}}}
    theirs, _ = render_jinja_template(
        [conversation(json.dumps(ARGUMENTS) if known.text_arguments else ARGUMENTS, "")],
        tools=[TOOLS[0], {"type": "function", "function": now}],
        chat_template=source,
        add_generation_prompt=True,
        eos_token="<|im_end|>",
    )
    assert ours == theirs[0]


@pytest.mark.parametrize("name", REFUSED)
def test_a_format_that_is_not_known_is_refused(name: str) -> None:
    """Tools that a model is told of, whose calls would come as text."""
    client = Client(build_asgi(backend_with(template(name))))
    refused = code_of(asyncio.run(client.chat(tools=TOOLS)))
    assert refused == (400, "tools_not_supported", "tools")


def test_thoughts_in_a_channel_of_gemma() -> None:
    """Thoughts that come as content, with their marks."""
    backend = backend_with(template("gemma4_v5"))
    backend.script = "<|channel>thought\nhm<channel|>yes"
    (choice,) = asyncio.run(Client(build_asgi(backend)).chat()).json()["choices"]
    message = choice["message"]
    assert (message["reasoning_content"], message["content"]) == ("hm", "yes")
