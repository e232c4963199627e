"""missing_ids: finds the ids of a model's vocabulary that its tokenizer lacks.

An embedding may have more rows than the tokenizer has ids. The additional rows are padding.
"""

from pathlib import Path
from typing import Any

import msgspec

from engine.errors import ConfigError


class _Model(msgspec.Struct):
    vocab: dict[str, int] | list[Any] = {}  # a dict token -> id, or in a unigram model a list by id


class _Added(msgspec.Struct):
    id: int


class _Tokenizer(msgspec.Struct):
    model: _Model
    added_tokens: list[_Added] = []


def missing_ids(folder: Path, vocab_size: int) -> list[int]:
    """Return the ids below vocab_size that tokenizer.json does not have, ascending.

    Returns [] without a tokenizer.json. Only the required fields are decoded, which takes a third
    of a second for the largest file.
    Raises ConfigError.
    """
    path = folder / "tokenizer.json"
    if not path.is_file():
        return []
    try:
        tokenizer = msgspec.json.decode(path.read_bytes(), type=_Tokenizer)
    except (OSError, msgspec.MsgspecError) as error:
        raise ConfigError(f"{path} cannot be read: {error}", param="model") from None
    vocab = tokenizer.model.vocab
    ids = set(vocab.values()) if isinstance(vocab, dict) else set(range(len(vocab)))
    ids.update(token.id for token in tokenizer.added_tokens)
    return sorted(set(range(vocab_size)) - ids)
