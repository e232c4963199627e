"""Calls of a random model that has to call tools, of each format, with many seeds.

    python -m tests.deployments.api.output.tool_seeds --seeds 200

The engine on the CPU writes under the grammar that a request makes, at temperature 1.3, and its
tokens go through the API again. Prints a line for each format; exit status 1 if a call is not
valid.
"""

import argparse
import asyncio
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import jsonschema
import torch
from msgspec.structs import replace
from transformers import AutoModelForCausalLM

from deployments.api.app import build_asgi
from tests.deployments.api.asgi import Client
from tests.deployments.api.output.test_channels import backend_of_channels
from tests.deployments.api.output.test_tools import CITY, backend_with, tool
from tests.deployments.api.output.tool_templates import DECLARED, TEMPLATES, response_template
from tests.engine.text.test_structured import make_core, request, run, save_model

FORMATS = (*TEMPLATES, "harmony", *DECLARED)
# Bounded, so that a random model comes to an end.
_PLACE = {
    "type": "object",
    "properties": {"x": {"type": "boolean"}},
    "additionalProperties": False,
}
SCHEMA: dict[str, Any] = {**CITY, "properties": {**CITY["properties"], "where": _PLACE}}
FIELDS: dict[str, Any] = {
    "tools": [tool("weather", SCHEMA, strict=True), tool("now")],
    "tool_choice": "required",
    "parallel_tool_calls": False,
}


def wrong_calls(name: str, folder: Path, seeds: int, adapter: bool = False) -> list[str]:
    """Run a random model that has to call tools, and return what is wrong with each invalid call.

    seeds: number of answers.
    adapter: whether each seed runs once with a LoRA adapter and once without, in one batch; equal
        calls are a fault then.
    """
    if name == "harmony":
        backend = backend_of_channels()
        fields = {**FIELDS, "thinking_token_budget": 4}
    else:
        source, calls = DECLARED[name] if name in DECLARED else (TEMPLATES[name], None)
        backend = backend_with(source)
        backend._tokenizer.response_template = calls and response_template(calls)
        # Without thoughts, which a random model does not end.
        fields = {**FIELDS, "reasoning_effort": "none"}
    client = Client(build_asgi(backend))
    assert asyncio.run(client.chat(**fields)).status == 200
    params = backend.requests[-1].params
    save_model(folder, backend._tokenizer)
    size: dict[str, Any] = {"max_num_seqs": 32, "num_blocks": 2048, "max_loras": int(adapter)}
    core = make_core(folder, **size)
    more = {"max_tokens": 400, "thinking": params.thinking}
    asked = [request(i, params.structured, **more) for i in range(1, seeds + 1)]
    if adapter:
        from tests.engine.lora.adapters import save_adapter
        from tests.engine.lora.test_logits import add_adapter

        plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        add_adapter(core, "legal", save_adapter(plain, folder / "legal"))
        asked += [replace(base, id=base.id + seeds, adapter="legal") for base in asked]
    wrong = []
    outputs = run(core, *asked)
    for id in range(1, seeds + 1) if adapter else ():
        if outputs[id].tokens == outputs[id + seeds].tokens:
            wrong.append(f"{name}, seed {id}: the adapter changes nothing")
    for id, output in outputs.items():
        backend.script = output.deltas
        answer = asyncio.run(client.chat(**fields, max_tokens=2000)).json()["choices"][0]
        try:
            _check(answer)
        except (AssertionError, ValueError, jsonschema.ValidationError) as error:
            wrong.append(f"{name}, seed {id}: {error!r}: {answer}")
    return wrong


def _check(answer: dict[str, Any]) -> None:
    (call,) = answer["message"]["tool_calls"]
    assert answer["finish_reason"] == "tool_calls" and answer["message"]["content"] is None
    arguments = json.loads(call["function"]["arguments"])
    if call["function"]["name"] == "weather":
        jsonschema.validate(arguments, SCHEMA)
    else:
        assert (call["function"]["name"], arguments) == ("now", {})


def main() -> int:
    parser = argparse.ArgumentParser(description="Calls of a random model.")
    parser.add_argument("--seeds", type=int, default=200)
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=FORMATS)
    options = parser.parse_args()
    bad: list[str] = []
    for name in options.formats:
        with tempfile.TemporaryDirectory() as folder:
            wrong = wrong_calls(name, Path(folder), options.seeds)
        print(f"{name}: {options.seeds - len(wrong)} of {options.seeds} valid", flush=True)
        bad += wrong
    print("\n".join(bad[:5]))
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
