"""structural_tag: text in which a trigger begins a tag, with JSON of a schema in it."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken

from deployments.api.app import build_asgi
from engine.structured.compiler import Compiler, Vocabulary
from engine.text.tokenizer import Tokenizer
from tests.deployments.api.asgi import Client
from tests.deployments.api.output.grammar_table import WideBackend
from tests.deployments.api.output.test_tools import CITY, TOOLS, backend_with, code_of
from tests.deployments.api.output.tool_templates import TEMPLATES
from tests.deployments.fake_backend import MODEL
from tests.engine.text.small_tokenizers import byte_level

STRUCTURES = [
    {"begin": "<function=f>", "schema": CITY, "end": "</function>"},
    {"begin": "<function=g>", "schema": {"type": "integer"}, "end": "</function>"},
    {"begin": "<call>now", "schema": {"const": "<call>"}, "end": "<end>"},
]
TRIGGERS = ["<function=", "<call>", "<unused>"]
PARIS = json.dumps({"city": "Paris", "days": 1})


def tokenizer() -> Tokenizer:
    """Return a tokenizer in which <call> is a special token, and <end> and <other> are ordinary
    ones."""
    plain = byte_level()
    plain.backend.add_tokens([AddedToken("<call>", special=True), AddedToken("<end>")])
    plain.backend.add_tokens([AddedToken("<other>")])
    return Tokenizer(
        plain.backend, special_tokens=plain.special_tokens, chat_template=plain.chat_template
    )


def sent(form: str) -> dict[str, Any]:
    inner = {"structures": STRUCTURES, "triggers": TRIGGERS}
    if form == "response_format":
        return {"response_format": {"type": "structural_tag", **inner}}
    value = json.dumps(inner) if form == "text" else inner
    return {"structured_outputs": {"structural_tag": value}}


@pytest.mark.parametrize("form", ["response_format", "text", "object"])
def test_tags(tmp_path: Path, form: str) -> None:
    """A tag that is not whole, or of another schema, or spelled where it is a token; text that is
    refused though it begins none."""
    known = tokenizer()
    backend = WideBackend(known, known.vocab_size + 7)
    reply = asyncio.run(Client(build_asgi(backend)).chat(**sent(form)))
    assert reply.status == 200, reply.body
    assert reply.header("x-ignored-fields") is None
    grammar = backend.requests[-1].params.structured
    assert grammar is not None
    known.backend.save(str(tmp_path / "tokenizer.json"))
    vocabulary = Vocabulary.load(tmp_path, known.vocab_size + 7, known.eos_token_ids)
    compiler = Compiler(vocabulary)

    def accepts(*parts: str) -> bool:
        """Return whether the grammar accepts a whole text.

        parts: texts, and tokens by their names in square brackets.
        """
        matcher = compiler.compile(grammar).deep_copy()
        ids: list[int] = []
        for part in parts:
            token = known.token_id(part[1:-1]) if part.startswith("[") else None
            ids += known.encode_plain(part) if token is None else [token]
        return matcher.try_consume_tokens(ids) == len(ids) and bool(matcher.is_accepting())

    whole = f"<function=f>{PARIS}</function>"
    good: list[tuple[str, ...]] = [
        ("",),
        ("free < text",),
        ("a ", whole, " and ", "<function=g>12</function>", whole),
        ("x", "[<call>]", 'now"<call>"', "[<end>]", "\n", whole),
        ("a", "[<other>]", "b", "[<other>]", "[<end>]", whole),
    ]
    assert [parts for parts in good if not accepts(*parts)] == []
    bad: list[tuple[str, ...]] = [
        ("<function=h>1</function>",),
        ("<function=f>{}</function>",),
        ("<function=g>12",),
        ("<call>", 'now"<call>"', "[<end>]"),
        ("[<call>]", 'now"<call>"', "<end>"),
        ("[<call>]", "later"),
        ("<unused>",),
    ]
    assert [parts for parts in bad if accepts(*parts)] == []


def test_a_schema_in_a_tag_is_enforced_or_named() -> None:
    """A keyword of a tag's schema that is left out without a word."""
    known = tokenizer()
    client = Client(build_asgi(WideBackend(known, known.vocab_size + 7)))
    odd = {"begin": "<f>", "schema": {"type": "string", "pattern": "(?!a)b"}, "end": ""}
    inner = {"type": "structural_tag", "structures": [odd], "triggers": ["<"]}
    reply = asyncio.run(client.chat(response_format=inner))
    assert reply.status == 200, reply.body
    where = "response_format.structures[0].schema"
    assert reply.header("x-ignored-fields") == f"{where}#/pattern"


def test_not_beside_tools() -> None:
    """A limit that is dropped beside tools, or ends in a 500."""
    client = Client(build_asgi(backend_with(TEMPLATES["hermes"])))
    inner = {"type": "structural_tag", "structures": STRUCTURES, "triggers": TRIGGERS}
    body = {"model": MODEL, "tools": TOOLS, "response_format": inner}
    reply = asyncio.run(client.chat(**body))
    assert code_of(reply) == (400, "not_supported", "response_format")
