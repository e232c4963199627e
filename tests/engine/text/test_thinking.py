"""How long an answer may think: exact in tokens, wherever the request goes on."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from engine.sampling_params import SamplingParams
from engine.structured.grammar import Grammar
from engine.structured.thinking import ThinkingBudget, ThinkingCount
from engine.text.tokenizer import Tokenizer
from tests.engine.text.small_tokenizers import byte_level
from tests.engine.text.test_structured import make_core, request, run, save_model

START, END = "<think>", "</think>"
GRAMMAR = Grammar.lark(
    f'start: "{START}"? thoughts /[a-z]{{2,5}}/\nthoughts[suffix="{END}"]: /[ -~]*/\n'
)


def budget_of(tokenizer: Tokenizer, tokens: int, start: str = "") -> ThinkingBudget:
    return ThinkingBudget(tokens, tuple(tokenizer.encode(END)), (END, "<call>"), start)


def ask(id: int, tokens: int, tokenizer: Tokenizer, output: list[int] | None = None) -> Any:
    thinking_request = request(id, GRAMMAR, output=output or [])
    thinking_request.params = msgspec.structs.replace(
        thinking_request.params, thinking=budget_of(tokenizer, tokens)
    )
    packed = msgspec.msgpack.encode(thinking_request.params)
    thinking_request.params = msgspec.msgpack.decode(packed, type=SamplingParams)
    return thinking_request


def test_exact_and_the_same_after_a_move(tmp_path: Path) -> None:
    """A budget that is a token off, that counts anew at the replica that takes over, or that cuts
    the answer instead of the thoughts."""
    tokenizer = byte_level()
    core = make_core(save_model(tmp_path, tokenizer), max_num_seqs=32)
    end = tokenizer.encode(END)
    budgets = {id: id % 7 * 5 for id in range(1, 15)}
    whole = run(core, *(ask(id, n, tokenizer) for id, n in budgets.items()))
    for id, tokens in budgets.items():
        ids = whole[id].tokens
        assert whole[id].finish == "stop"
        # A random model does not end its thoughts by itself.
        assert ids[tokens : tokens + len(end)] == end, id
        answer = tokenizer.decode([i for i in ids[tokens + len(end) :] if i != 2])
        assert 2 <= len(answer) <= 5 and answer.isalpha()
    cuts = {id: min(len(whole[id].tokens) - 2, 3 + id) for id in budgets}
    moved = run(
        core,
        *(ask(id, n, tokenizer, whole[id].tokens[: cuts[id]]) for id, n in budgets.items()),
    )
    for id, cut in cuts.items():
        assert moved[id].tokens == whole[id].tokens[cut:], id


@pytest.mark.parametrize(
    "text, start, inside, forced",
    [
        ("abc", "", True, None),
        ("abcde", "", True, 0),
        ("abcde</t", "", True, 3),
        ("ab</think>", "", False, None),
        ("a<call>", "", False, None),
        ("abcde</think>", "", False, None),
        ("<think>abc", START, True, None),
        ("<think>abcde", START, True, 0),
        ("<thin", START, None, None),
        ("hello", START, False, None),
    ],
)
def test_where_thoughts_end(text: str, start: str, inside: bool | None, forced: int | None) -> None:
    """Thoughts that are cut after they have ended, or before they began; a mark in two pieces that
    is forced from its beginning again."""
    end = tuple(ord(c) for c in END)
    budget = ThinkingBudget(5, end, (END, "<call>"), start)
    count = ThinkingCount(budget, lambda token: bytes([token]))
    for char in text.encode():
        count.accept_token(char)
    assert count.inside is inside
    assert count.forced == (None if forced is None else end[forced])
