"""A loop of tool call, result and answer: `python examples/tools.py [URL]`. Needs openai."""

import json
import sys

from openai import OpenAI

url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000/v1"
client = OpenAI(base_url=url, api_key="none")  # with keys, one of these
model = client.models.list().data[0].id


def weather(city: str) -> str:
    return f"18 degrees and rain in {city}"


schema = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 40}},
    "required": ["city"],
    "additionalProperties": False,
}
function = {"name": "weather", "description": "The weather of a city.", "parameters": schema}
messages = [{"role": "user", "content": "How is the weather in Paris?"}]
choice = "required"  # which the small default model needs
while True:
    answer = client.chat.completions.create(
        model=model,
        messages=messages,
        tools=[{"type": "function", "function": function}],
        tool_choice=choice,
        parallel_tool_calls=False,
        temperature=0,
        max_tokens=200,
    )
    message = answer.choices[0].message
    if not message.tool_calls:
        break
    messages.append(message)
    for call in message.tool_calls:
        result = weather(**json.loads(call.function.arguments))
        messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    choice = "auto"
print(message.content)
