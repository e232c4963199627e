"""Every tokenizer that npm brings, with every format of calls, every tool_choice, and schemas,
expressions and constants: valid answers that are read as they were written, or a refusal."""

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken

from deployments.api.output.output_format import FORMATS
from engine.text.tokenizer import Tokenizer
from tests.deployments.api.output.grammar_table import TAGS, Table
from tests.engine.text.small_tokenizers import byte_fallback, byte_level
from tests.published_tokenizers import NAMES, folder

# Pieces with bytes to fall back on; `test_marks_of_all_formats` has byte-level pairs.
SLOW = "llama2"


def marked(name: str) -> Any:
    """Return the parameter of a tokenizer, which the slow or the nightly stage has."""
    return pytest.param(name, marks=pytest.mark.slow if name == SLOW else pytest.mark.nightly)


@pytest.mark.parametrize("name", [*map(marked, NAMES)])
def test_published(name: str) -> None:
    """An engine's error, an answer that is not valid, or one that is read as another."""
    table = Table(folder(name), seeds=1)
    assert [line for format in FORMATS for line in table.wrong(format)] == []


def made(folder: Path, kind: str, special: bool | None) -> Path:
    """Write a small tokenizer that has the marks of all formats as tokens; return its folder.

    special: whether these tokens are special; None: every second is.
    """
    tokenizer: Tokenizer = {"byte_level": byte_level, "byte_fallback": byte_fallback}[kind]()
    marks = [text for text in TAGS if text.startswith(("<", "[")) and "0x" not in text]
    marks += ["<|channel>", "<|START_THINKING|>", "<|END_THINKING|>", "<arg_key>", "</arg_key>"]
    marks += ["<arg_value>", "<|tool_call_start|>", "<|tool_call>", "<tool_call|>"]
    marks += ["<|channel|>", "<|message|>", "<|start|>", "<|end|>", "<|constrain|>", "<|return|>"]
    known = tokenizer.backend.get_vocab(True)
    for i, text in enumerate(mark for mark in marks if mark not in known):
        is_special = i % 2 == 0 if special is None else special
        tokenizer.backend.add_tokens([AddedToken(text, special=is_special, normalized=False)])
    tokenizer.backend.save(str(folder / "tokenizer.json"))
    config = json.dumps(tokenizer.special_tokens)
    (folder / "tokenizer_config.json").write_text(config)
    return folder


@pytest.mark.parametrize(
    ("kind", "special"),
    [
        ("byte_level", None),
        *(
            pytest.param(kind, special, marks=pytest.mark.nightly)
            for kind in ("byte_level", "byte_fallback")
            for special in (None, True, False)
            if (kind, special) != ("byte_level", None)
        ),
    ],
)
def test_marks_of_all_formats(tmp_path: Path, kind: str, special: bool | None) -> None:
    """A vocabulary whose marks are tokens, as those that no package brings have them."""
    table = Table(made(tmp_path, kind, special), seeds=1)
    assert [line for format in FORMATS for line in table.wrong(format)] == []
