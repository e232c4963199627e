"""Chat templates that write tool calls as families of models do, in a few lines each."""

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
TEMPLATES = {
    "hermes": HERMES,
    "qwen3-coder": XML,
    "glm-4.5": GLM,
    "mistral": MISTRAL,
    "llama3-json": LLAMA,
    "deepseek-v3": DEEPSEEK,
    "lfm2": LFM2,
    "gemma4": GEMMA,
}
