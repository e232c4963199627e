"""Conversations of a file in ShareGPT's format, whose texts a load test sends.

The file is a JSON list, or JSONL, of objects with `conversations` (or `messages`): turns with
`from` (or `role`) and `value` (or `content`).
"""

import json
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from loadtest.errors import ScenarioError

_ASKS = {"human", "user"}
_ANSWERS = {"gpt", "assistant", "chatgpt", "bing", "bard"}
_CHARACTERS = 4  # mean characters per token of English, as there is no tokenizer
MOST_TOKENS = 4096  # maximum tokens of an answer


class Exchange(NamedTuple):
    """A question, and its answer in the file."""

    asked: str
    answered: str

    @property
    def tokens(self) -> int:
        """The approximate number of tokens of the answer."""
        return max(1, min(MOST_TOKENS, round(len(self.answered) / _CHARACTERS)))


Conversation = tuple[Exchange, ...]


@lru_cache(maxsize=4)
def read_conversations(path: Path) -> tuple[Conversation, ...]:
    """Read the conversations in a file that have a question and an answer; others are left out.

    Raises ScenarioError.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ScenarioError(f"{path}: {getattr(error, 'strerror', None) or error}") from None
    conversations = tuple(filter(None, map(_conversation, _entries(path, text))))
    if not conversations:
        raise ScenarioError(
            f"{path}: no conversation; an entry has conversations: a list of turns "
            '{"from": "human" or "gpt", "value": TEXT}, with a question before its answer'
        )
    return conversations


def _entries(path: Path, text: str) -> list[Any]:
    try:
        if not text.lstrip().startswith("["):
            lines = enumerate(text.splitlines(), 1)
            return [_line(path, number, line) for number, line in lines if line.strip()]
        entries: list[Any] = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ScenarioError(f"{path}: not JSON: {error}") from None
    return entries


def _line(path: Path, number: int, line: str) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ScenarioError(f"{path}:{number}: not JSON: {error}") from None


def _conversation(entry: Any) -> Conversation:
    turns = entry.get("conversations", entry.get("messages")) if isinstance(entry, dict) else entry
    exchanges, asked = [], ""
    for turn in turns if isinstance(turns, list) else ():
        if not isinstance(turn, dict):
            break
        who, text = turn.get("from", turn.get("role")), turn.get("value", turn.get("content"))
        if not isinstance(text, str):
            break
        if who in _ASKS and text.strip():
            asked = text
        elif who in _ANSWERS and asked:
            exchanges.append(Exchange(asked, text))
            asked = ""
    return tuple(exchanges)
