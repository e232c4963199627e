"""A tokenizer, with each format of calls and each tool_choice: what its grammar lets a model write
is valid, and is read as it was meant.

The engine runs no model: tokens are drawn at random of those that a mask allows, as the engine
takes them. Marks are drawn more often than others, whole and spelled, or no text would ever end.
"""

import asyncio
import json
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np

from deployments.api.app import build_asgi
from deployments.api.output import detect
from deployments.api.output.detect import TemplateOutput
from deployments.api.output.output_format import REASONING, OutputFormat, Reasoning
from deployments.backend import GenerationRequest
from engine.messages import Delta
from engine.structured.compiler import Compiler, Vocabulary
from engine.structured.constraint import Constraint
from engine.text.chat_template import ChatTemplate
from engine.text.declared_tokens import declared_special
from engine.text.tokenizer import Tokenizer
from tests.deployments.api.asgi import Client
from tests.deployments.fake_backend import MODEL, FakeBackend, FakeGeneration

PLAIN = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Texts of marks that some vocabulary has as tokens, or some format reads.
TAGS = [
    *("<tool_call>", "</tool_call>", "<think>", "</think>", "<|im_end|>", "<|im_start|>", "<eos>"),
    *("</s>", "<s>", "<|endoftext|>", "<|eot_id|>", "<end_of_turn>", "<table>", "[TOOL_CALLS]"),
    *("</arg_value>", "</parameter>", "\n</parameter>\n", "<|tool_call_end|>", '<|"|>', "<|call|>"),
    *("<｜tool▁calls▁begin｜>", "<｜end▁of▁sentence｜>", "<|END_ACTION|>", "<|START_RESPONSE|>"),
    *("<channel|>", "<0x0A>", "é日😀", "a/b\\n", "'\""),
]
_TRUE: dict[str, Any] = {"type": "boolean"}
SCHEMAS: dict[str, dict[str, Any]] = {
    "a schema": {
        "type": "object",
        "properties": {
            "text": {"type": "string"},
            "short": {"type": "string", "maxLength": 4},
            "n": {"type": "integer", "minimum": 0, "maximum": 99},
            "several": {"type": "array", "items": {"type": ["null", "boolean"]}, "maxItems": 2},
            "inner": {
                "type": "object",
                "properties": {"<|im_end|>": _TRUE, "b": {"type": "string", "maxLength": 3}},
                "additionalProperties": False,
            },
        },
        "required": ["text", "n"],
        "additionalProperties": False,
    },
    "an expression": {
        "type": "object",
        "properties": {
            "tag": {"type": "string", "pattern": r"^(</?[a-c]_[a-c]>|<\|im_[a-e]{3}\|>)$"}
        },
        "required": ["tag"],
        "additionalProperties": False,
    },
    "constants": {
        "type": "object",
        "properties": {
            "tag": {"enum": TAGS},
            "word": {"type": "string", "enum": TAGS},
            "one": {"const": "<tool_call>"},
            "list": {"type": "array", "items": {"enum": TAGS}, "minItems": 1, "maxItems": 2},
            "object": {"const": {"</think>": ["<|im_end|>"]}},
            "<tool_call>": _TRUE,
        },
        "required": ["tag", "word", "list", "<tool_call>"],
        "additionalProperties": False,
    },
}
VALIDATORS = {what: jsonschema.Draft202012Validator(schema) for what, schema in SCHEMAS.items()}
EXPRESSION = r"(<tool_call>|</think>|<\|im_end\|>)[a-c/]{1,3}\n?<\|[a-d]{2}\|>"
CONTENTS: dict[str, dict[str, Any]] = {
    "a schema": {
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "s", "schema": SCHEMAS["a schema"]},
        }
    },
    "an expression": {"structured_outputs": {"regex": EXPRESSION}},
    "constants": {"structured_outputs": {"choice": TAGS}},
}
CHOICES = ("auto", "required", "named", "none")
THOUGHTS = {"gemma4": "<|channel>thought\n", "command-a": "<|START_THINKING|>"}
_CLOSING = ("'", '"}', "}", "]", ",")
_STEPS = 2000
_ENOUGH = 60  # steps, after which ends are taken where they can be


class WideBackend(FakeBackend):
    """A FakeBackend for a vocabulary of any size."""

    def __init__(self, tokenizer: Tokenizer, num_tokens: int) -> None:
        super().__init__()
        self._tokenizer = tokenizer
        card = replace(
            self.cards[MODEL],
            max_model_len=65_536,
            vocab_size=num_tokens,
            eos_token_ids=tokenizer.eos_token_ids,
        )
        self.cards = {MODEL: card}

    def generate(self, request: GenerationRequest) -> FakeGeneration:
        self.requests.append(request)
        return FakeGeneration(self, request)


class Table:
    """The cases of one tokenizer, with every format of calls."""

    def __init__(self, folder: Path, *, seeds: int) -> None:
        loaded = Tokenizer.load(folder)
        names = loaded.special_tokens
        template = ChatTemplate({"default": PLAIN}, names)
        ends = list(loaded.eos_token_ids)
        self.tokenizer = Tokenizer(
            loaded.backend,
            special_tokens=names,
            eos_token_ids=ends,
            chat_template=template,
            same=loaded,
        )
        ids = self.tokenizer.backend.get_added_tokens_decoder()
        self.num_tokens = max([self.tokenizer.vocab_size, *(i + 1 for i in ids)]) + 7
        self._vocabulary = Vocabulary.load(
            folder, self.num_tokens, self.tokenizer.eos_token_ids, declared_special(folder)
        )
        self._compiler = Compiler(self._vocabulary)
        self._backend = WideBackend(self.tokenizer, self.num_tokens)
        self._client = Client(build_asgi(self._backend))
        self._seeds = seeds
        named = sorted(
            ((self.tokenizer.token_text(i), i) for i in self.tokenizer.mark_ids),
            key=lambda item: -len(item[0]),
        )
        self._ids = {name: i for name, i in named if name}
        self._cuts = re.compile("(" + "|".join(map(re.escape, self._ids)) + ")") if named else None

    def wrong(self, format: OutputFormat) -> list[str]:
        """Return the faults that all cases of a format of calls have shown, in words."""
        wrong = []
        for case in self.cases(format):
            for seed in range(self._seeds):
                try:
                    self._try(format, *case, seed)
                except (AssertionError, ValueError, KeyError, jsonschema.ValidationError) as error:
                    what = str(error).partition("\n")[0][:600]
                    wrong.append(f"{format.name}, {case[0]}, {case[1]}, seed {seed}: {what}")
                    break
        return wrong

    @staticmethod
    def cases(format: OutputFormat) -> Iterator[tuple[str, str, dict[str, Any]]]:
        for what, schema in SCHEMAS.items():
            function = {"name": "f", "parameters": schema}
            other = {"type": "function", "function": {"name": "now"}}
            tools = {"tools": [{"type": "function", "function": function}, other]}
            for choice in CHOICES:
                fields = dict(tools, tool_choice=choice)
                if choice == "named":
                    fields["tool_choice"] = {"type": "function", "function": {"name": "f"}}
                if choice == "none":
                    fields |= CONTENTS[what]
                yield choice, what, fields
            yield "auto or content", what, tools | CONTENTS[what]
            yield "no tools", what, CONTENTS[what]

    def _try(
        self, format: OutputFormat, choice: str, what: str, fields: dict[str, Any], seed: int
    ) -> None:
        reasoning = _reasoning(format)
        detect._known[self.tokenizer] = TemplateOutput(
            format,
            reasoning,
            special_ids=detect._special_ids(self.tokenizer, format, reasoning),
            wrapper=("<|START_RESPONSE|>", "<|END_RESPONSE|>") if "command" in format.name else (),
        )
        self._backend.script = [Delta(0, [], "stop")]
        before = len(self._backend.requests)
        messages = [{"role": "user", "content": "hi"}]
        body = {"model": MODEL, "messages": messages, "max_tokens": 4000, **fields}
        reply = asyncio.run(self._client.post("/v1/chat/completions", body))
        if reply.status == 400:
            error = reply.json()["error"]
            assert error["code"] in ("not_supported", "unsupported_schema"), reply.body
            assert error["message"] and error["param"], reply.body
            return
        assert reply.status == 200, reply.body
        tokens = self._walk(self._backend.requests[before], format, reasoning, seed)
        self._backend.script = [Delta(0, tokens), Delta(0, [], "stop")]
        reply = asyncio.run(self._client.post("/v1/chat/completions", body))
        assert reply.status == 200, reply.body
        text = self.tokenizer.decode(tokens, skip_special_tokens=False)
        _check(reply.json()["choices"][0], choice, what, text)

    def _walk(
        self, request: GenerationRequest, format: OutputFormat, reasoning: Reasoning, seed: int
    ) -> list[int]:
        """Return random tokens of an answer that the request's grammar allows, without the end
        token."""
        grammar = request.params.structured
        assert grammar is not None
        constraint = Constraint(self._compiler.compile(grammar).deep_copy(), self._vocabulary)
        matcher = constraint.matcher
        rng = random.Random(f"{format.name} {grammar.text} {seed}")
        closing = [reasoning.end, '"']  # of what may go on for ever
        closing += [format.tagged.value_close] if format.tagged is not None else []
        closing += format.dialect.quotes[:1] if format.dialect is not None else []
        closing += ["<|channel|>final", "<|message|>"] if reasoning.channels else []
        closers = 3 * self._hints(closing) + self._hints([format.end, format.closing, *_CLOSING])
        begins = [format.trigger, reasoning.start, "a", ": ", "'", "<|start|>assistant"]
        hints = closers + self._hints([*begins, "<|START_RESPONSE|>", "<|END_RESPONSE|>"])
        ends = self._vocabulary.end_ids
        tokens: list[int] = []
        queue: list[int] = []
        for step in range(_STEPS):
            mask = np.frombuffer(matcher.compute_bitmask(), np.int32).copy()
            why = constraint.finish_mask(mask)
            assert not why, why
            # bool: NumPy finds what is set five times as fast as in bytes
            bits = np.unpackbits(mask.view(np.uint8), bitorder="little").view(np.bool_)
            allowed = np.flatnonzero(bits)
            assert allowed.size, f"nothing may follow {self._shown(tokens)}"
            legal_ends = [end for end in ends if bits[end]]
            if queue and not bits[queue[0]]:
                queue = []
            if not queue and allowed.size > 1:
                if legal_ends and (step > _ENOUGH or rng.random() < 0.1):
                    queue = [rng.choice(legal_ends)]
                elif step > _ENOUGH or rng.random() < 0.3:
                    some = closers if step > _ENOUGH and rng.random() < 0.7 else hints
                    rng.shuffle(some)
                    fits = (
                        candidate
                        for candidate in some
                        if matcher.validate_tokens(candidate) == len(candidate)
                    )
                    queue = list(next(fits, []))
            token = queue.pop(0) if queue else int(allowed[rng.randrange(allowed.size)])
            if token in ends:
                return tokens
            assert token < self.num_tokens - 7, f"token {token} is none, behind {tokens}"
            tokens.append(token)
            if constraint.accept_token(token):
                return tokens
        raise AssertionError(f"no end: {self._shown(tokens)}")

    def _hints(self, marks: Sequence[str]) -> list[list[int]]:
        """Return the token sequences that write each mark: by control tokens, and spelled out."""
        sequences = []
        for mark in dict.fromkeys(filter(None, marks)):
            spelled = self.tokenizer.encode_plain(mark)
            pieces = self._cuts.split(mark) if self._cuts else [mark]
            whole = [
                i
                for piece in pieces
                if piece
                for i in (
                    [self._ids[piece]]
                    if piece in self._ids
                    else self._vocabulary.tokens.tokenize_str(piece)
                )
            ]
            sequences += [whole] if whole == spelled else [whole, spelled]
        return sequences

    def _shown(self, tokens: Sequence[int]) -> str:
        return repr(self.tokenizer.decode(tokens, skip_special_tokens=False))[-300:]


def _reasoning(format: OutputFormat) -> Reasoning:
    if format.name == "harmony":
        return next(reasoning for reasoning in REASONING if reasoning.channels)
    start = THOUGHTS.get(format.name, "<think>")
    return next(reasoning for reasoning in REASONING if reasoning.start == start)


def _check(answer: dict[str, Any], choice: str, what: str, text: str) -> None:
    message = answer["message"]
    calls = message.get("tool_calls") or []
    described = f"{answer} of {text!r}"
    assert answer["finish_reason"] == ("tool_calls" if calls and choice != "named" else "stop"), (
        described
    )
    assert not (calls and choice in ("none", "no tools")), described
    assert calls or choice not in ("required", "named"), described
    for call in calls:
        name = call["function"]["name"]
        try:
            arguments = json.loads(call["function"]["arguments"])
        except ValueError:
            raise AssertionError(f"no JSON: {described}") from None
        if name == "f":
            try:
                VALIDATORS[what].validate(arguments)
            except jsonschema.ValidationError as error:
                raise AssertionError(f"{error.message}: {described}") from None
        else:
            assert (name, arguments) == ("now", {}) and choice != "named", described
    if choice in ("none", "no tools") or (choice == "auto or content" and not calls):
        content = message["content"] or ""
        if what == "an expression":
            assert re.fullmatch(EXPRESSION, content), described
        elif what == "constants":
            assert content.strip() in [tag.strip() for tag in TAGS], described
        else:
            VALIDATORS[what].validate(json.loads(content))
