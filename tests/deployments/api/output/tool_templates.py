"""Chat templates that write tool calls as families of models do, in a few lines each."""

from typing import Any

_HEAD = (
    "{% if tools %}<|im_start|>system\n{% for t in tools %}{{ t | tojson }}\n{% endfor %}"
    "<|im_end|>\n{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n{% endif %}"
    "{{ m.content or '' }}"
)
_TAIL = (
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n"
    "{% elif enable_thinking is defined %}<think>\n{% endif %}{% endif %}"
)


def _template(calls: str, before: str = "", after: str = "") -> str:
    return (
        f"{_HEAD}{{% if m.tool_calls %}}{before}{{% for c in m.tool_calls %}}"
        f"{{% set f = c.function %}}{calls}{{% endfor %}}{after}{{% endif %}}{_TAIL}"
    )


HERMES = _template(
    '\n<tool_call>\n{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}}\n</tool_call>'
)
XML = _template(
    "\n<tool_call>\n<function={{ f.name }}>\n{% for k, v in f.arguments.items() %}"
    "<parameter={{ k }}>\n{{ v if v is string else v | tojson }}\n</parameter>\n{% endfor %}"
    "</function>\n</tool_call>"
)
GLM = _template(
    "\n<tool_call>{{ f.name }}\n{% for k, v in f.arguments.items() %}<arg_key>{{ k }}</arg_key>\n"
    "<arg_value>{{ v if v is string else v | tojson }}</arg_value>\n{% endfor %}</tool_call>"
)
MISTRAL = _template(
    '{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}}'
    "{% if not loop.last %}, {% endif %}",
    "[TOOL_CALLS][",
    "]",
)
LLAMA = _template('{"name": "{{ f.name }}", "parameters": {{ f.arguments | tojson }}}')
DEEPSEEK = _template(
    "<｜tool▁call▁begin｜>{{ c.type }}<｜tool▁sep｜>{{ f.name }}\n```json\n{{ f.arguments + '' }}\n"
    "```<｜tool▁call▁end｜>",
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁calls▁end｜>",
)
LFM2 = _template(
    "{{ ', ' if not loop.first }}{{ f.name }}({% for k, v in f.arguments.items() %}{{ k }}="
    "{% if v is string %}'{{ v }}'{% elif v is mapping %}{{ v | tojson }}{% else %}{{ v }}"
    "{% endif %}{{ ', ' if not loop.last }}{% endfor %})",
    "<|tool_call_start|>[",
    "]<|tool_call_end|>",
)
GEMMA = (
    '{% macro value(v) %}{% if v is string %}<|"|>{{ v }}<|"|>{% elif v is mapping %}'
    "{ {%- for k, w in v | dictsort %}{{ k }}:{{ value(w) }}{{ ',' if not loop.last }}"
    "{% endfor -%} }{% else %}{{ v | tojson }}{% endif %}{% endmacro %}"
) + _template("<|tool_call>call:{{ f.name }}{{ value(f.arguments) }}<tool_call|>")
# As gpt-oss has it: one call a message, and no content beside thoughts in front of it.
HARMONY = (
    "<|start|>system<|message|>Reasoning: {{ reasoning_effort or 'medium' }}<|end|>"
    "{% if tools %}<|start|>developer<|message|>"
    "{% for t in tools %}{{ t | tojson }}\n{% endfor %}<|end|>{% endif %}"
    "{% set last = namespace(name='') %}{% for m in messages %}"
    "{% if m.role == 'tool' %}<|start|>functions.{{ last.name }} to=assistant<|channel|>commentary"
    "<|message|>{{ m.content | tojson }}<|end|>"
    "{% elif m.tool_calls %}"
    "{% if m.content and m.thinking %}{{ raise_exception('both') }}{% endif %}"
    "<|start|>assistant<|channel|>analysis<|message|>{{ m.content or m.thinking }}<|end|>"
    "{% set f = m.tool_calls[0].function %}{% set last.name = f.name %}"
    "<|start|>assistant to=functions.{{ f.name }}<|channel|>commentary json<|message|>"
    "{{ f.arguments | tojson }}<|call|>"
    "{% elif m.role == 'assistant' %}<|start|>assistant<|channel|>final<|message|>{{ m.content }}"
    "{{ '<|end|>' if not loop.last or add_generation_prompt else '<|return|>' }}"
    "{% else %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
HARMONY_MARKS = (
    *("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|return|>"),
    "<|call|>",
)
KIMI = _template(
    "<|tool_call_begin|>{{ c.id }}<|tool_call_argument_begin|>{{ f.arguments | tojson }}"
    "<|tool_call_end|>",
    "<|tool_calls_section_begin|>",
    "<|tool_calls_section_end|>",
).replace("{{ m.content", "{{ '## Return of ' + m.tool_call_id if m.role == 'tool' }}{{ m.content")
COMMAND_A = "{% set count = namespace(value=0) %}" + _template(
    '    {"tool_call_id": "{{ count.value }}", "tool_name": "{{ f.name }}", "parameters": '
    "{{ f.arguments | tojson }}}{{ ',' if not loop.last }}\n"
    "{% set count.value = count.value + 1 %}",
    "<|START_ACTION|>[\n",
    "]<|END_ACTION|>",
)
COMMAND_R = _template(
    '    {\n        "tool_name": "{{ f.name }}",\n        "parameters": '
    "{{ f.arguments | tojson(indent=4) | indent(8) if f.arguments else '{}' }}\n    }"
    "{{ ',\n' if not loop.last }}",
    "\nAction:\n```json\n[\n",
    "\n]```",
)
# As Command A has it: what is said before calls is a plan, and answers stand between marks.
COHERE = (
    "{% set count = namespace(value=0) %}{% if tools %}{% for t in tools %}{{ t | tojson }}\n"
    "{% endfor %}{% endif %}{% for m in messages %}<|START_OF_TURN_TOKEN|>"
    "{% if m.role == 'tool' %}<|START_TOOL_RESULT|>{{ m.content }}<|END_TOOL_RESULT|>"
    "{% elif m.tool_calls %}<|START_THINKING|>{{ m.tool_plan }}<|END_THINKING|><|START_ACTION|>[\n"
    "{% for c in m.tool_calls %}"
    '    {"tool_call_id": "{{ count.value }}", "tool_name": "{{ c.function.name }}", "parameters": '
    "{{ c.function.arguments | tojson }}}{{ ',' if not loop.last }}\n"
    "{% set count.value = count.value + 1 %}{% endfor %}]<|END_ACTION|>"
    "{% elif m.role == 'assistant' %}<|START_RESPONSE|>{{ m.content }}<|END_RESPONSE|>"
    "{% else %}{{ m.content }}{% endif %}<|END_OF_TURN_TOKEN|>{% endfor %}"
    "{% if add_generation_prompt %}<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>{% endif %}"
)
COHERE_MARKS = (
    *("<|START_OF_TURN_TOKEN|>", "<|END_OF_TURN_TOKEN|>", "<|CHATBOT_TOKEN|>"),
    *("<|START_THINKING|>", "<|END_THINKING|>", "<|START_RESPONSE|>", "<|END_RESPONSE|>"),
    *("<|START_ACTION|>", "<|END_ACTION|>"),
)
# Calls that no family writes so, and the checkpoint's declaration of them: the template, and the
# `response_template` without what all of them share.
_FUNCTION = {"name": "{name}", "arguments": "{content}"}
DECLARED: dict[str, tuple[str, dict[str, Any]]] = {
    "json behind a name": (
        _template("\n<do {{ f.name }}>\n{{ f.arguments | tojson }}\n</do>"),
        {
            "open_pattern": r"<do (?P<name>[^>\n]+)>\s*",
            "close_pattern": r"</do>\s*",
            "content": "json",
            "transform": {"type": "function", "function": _FUNCTION},
        },
    ),
    "keys of its own": (
        _template('[[do]] {"f": "{{ f.name }}", "with": {{ f.arguments | tojson }}} [[done]]'),
        {
            "open": "[[do]]",
            "close": ["[[done]]", "[[end]]"],
            "content": "json",
            "transform": {"function": {"name": "{content.f}", "arguments": "{content.with}"}},
        },
    ),
    "a list": (
        _template(
            '{"name": "{{ f.name }}", "parameters": {{ f.arguments | tojson }}}'
            "{{ ', ' if not loop.last }}",
            "<calls>[",
            "]</calls>",
        ),
        {
            "open": "<calls>",
            "close": "</calls>",
            "content": "json",
            "repeats": False,
            "transform": {"function": {"name": "{name}", "arguments": "{parameters}"}},
            "transform_each": True,
        },
    ),
    "tags": (
        _template(
            "\n<do>{{ f.name }}\n{% for k, v in f.arguments.items() %}<a {{ k }}>"
            "{{ v if v is string else v | tojson }}</a>\n{% endfor %}</do>"
        ),
        {
            "open_pattern": r"<do>(?P<name>\S+)\n?",
            "close_pattern": r"</do>\s*",
            "content": "xml-inline",
            "content_args": {"tag_pattern": r"<a (?P<key>[^>]+)>(?P<value>.*?)</a>"},
            "transform": {"function": _FUNCTION},
        },
    ),
    "tags around JSON": (
        _template(
            "\n<do>{{ f.name }}\n{% for k, v in f.arguments.items() %}<a {{ k }}>"
            "{{ v | tojson }}</a>\n{% endfor %}</do>"
        ),
        {
            "open_pattern": r"<do>(?P<name>\S+)\n?",
            "close_pattern": r"</do>\s*",
            "content": "xml-inline",
            "content_args": {
                "tag_pattern": r"<a (?P<key>[^>]+)>(?P<value>.*?)</a>",
                "value_parser": {"name": "json"},
            },
            "transform": {"function": _FUNCTION},
        },
    ),
    "keys without quotes": (
        "{% macro value(v) %}{% if v is string %}~~{{ v }}~~{% elif v is mapping %}"
        "{ {%- for k, w in v.items() %}{{ k }}:{{ value(w) }}{{ ',' if not loop.last }}"
        "{% endfor -%} }{% else %}{{ v | tojson }}{% endif %}{% endmacro %}"
        + _template("<<do:{{ f.name }}{{ value(f.arguments) }}>>"),
        {
            "open_pattern": r"<<do:(?P<name>\w+)",
            "close": ">>",
            "content": "json",
            "content_args": {"unquoted_keys": True, "string_delims": [["~~", "~~"]]},
            "transform": {"function": _FUNCTION},
        },
    ),
}
RESPONSE_TEMPLATE: dict[str, Any] = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "reasoning_content": {"open": "<think>", "close_pattern": r"</think>\s*"},
        "content": {"close_pattern": r"<\|im_end\|>\s*"},
    },
}


def response_template(calls: dict[str, Any]) -> dict[str, Any]:
    fields = {**RESPONSE_TEMPLATE["fields"], "tool_calls": {"repeats": True, **calls}}
    return {**RESPONSE_TEMPLATE, "fields": fields}


TEMPLATES = {
    "hermes": HERMES,
    "qwen3-coder": XML,
    "glm-4.5": GLM,
    "mistral": MISTRAL,
    "llama3-json": LLAMA,
    "deepseek-v3": DEEPSEEK,
    "lfm2": LFM2,
    "gemma4": GEMMA,
    "kimi-k2": KIMI,
    "command-a": COMMAND_A,
    "command-r": COMMAND_R,
}
