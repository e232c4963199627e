"""Marks: tokens that no text of a grammar spells, and a tokenizer.json in which none can be."""

import secrets
from collections.abc import Iterable
from typing import Any

import msgspec

_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")


def is_mark(content: str, special: bool) -> bool:
    """Tell whether an added token comes only where a grammar names it.

    llguidance takes these for control tokens: special ones, and any in angle brackets, such as
    Qwen's <tool_call>.
    """
    return special or (content.startswith("<") and content.endswith(">"))


def hide_marks(
    raw: bytes, end_ids: Iterable[int] = (), declared: Iterable[str] = ()
) -> tuple[str, dict[int, str]]:
    """Give the marks of a tokenizer.json secret names. Returns it, and the true names by id.

    end_ids: what ends an answer is a mark, too, where it is a piece of text like any other.
    declared: names of more marks.

    llguidance tokenizes the text that a grammar forces. There it would find "<tool_call>" or
    "<|im_end|>" of a constant, and then forbid that very token, as a mark is no text.

    Raises ValueError, KeyError, TypeError: it is no tokenizer.json.
    """
    content: dict[str, Any] = msgspec.json.decode(raw)
    content["added_tokens"] = added = list(content.get("added_tokens") or [])
    model = content["model"]
    vocab = model.get("vocab")
    pieces: Iterable[tuple[str, int]] = vocab.items() if isinstance(vocab, dict) else ()
    if isinstance(vocab, list):  # of Unigram, where the id is the place
        pieces = ((name, i) for i, (name, _) in enumerate(vocab))
    ends, special = set(end_ids), set(declared)
    present = {token["id"] for token in added}
    flags = dict.fromkeys(_FLAGS, False)
    added += [
        {**flags, "id": i, "content": name}
        for name, i in pieces
        if i not in present and (i in ends or name in special)
    ]
    marks: dict[int, str] = {
        token["id"]: token["content"]
        for token in added
        if token["id"] in ends
        or token["content"] in special
        or is_mark(token["content"], bool(token.get("special")))
    }
    secret = secrets.token_hex(8)
    names = {name: f"<{secret}{id}>" for id, name in marks.items()}
    for token in added:
        if token["id"] in marks:
            token.update(content=names[token["content"]], special=True)
    if isinstance(vocab, dict):
        for name in names.keys() & vocab.keys():
            vocab[names[name]] = vocab.pop(name)
        if model.get("merges"):  # a pair, or a text with a space in it
            pairs = (
                (merge, merge.split(" ") if isinstance(merge, str) else merge)
                for merge in model["merges"]
            )
            model["merges"] = [
                merge for merge, pair in pairs if names.keys().isdisjoint((*pair, "".join(pair)))
            ]
    elif isinstance(vocab, list):
        model["vocab"] = [[names.get(name, name), score] for name, score in vocab]
    if model.get("unk_token") in names:
        model["unk_token"] = names[model["unk_token"]]
    content["post_processor"] = None  # it names marks, and puts none into a forced text
    content["normalizer"] = _spaces_alone(content.get("normalizer"))
    return msgspec.json.encode(content).decode(), marks


def _spaces_alone(normalizer: Any) -> Any:
    """A normalizer without what would change more of a forced text than how spaces are written."""
    if not isinstance(normalizer, dict):
        return None
    if normalizer.get("type") == "Sequence":
        normalizers = [
            inner for inner in map(_spaces_alone, normalizer["normalizers"]) if inner is not None
        ]
        return {**normalizer, "normalizers": normalizers} if normalizers else None
    spaces = normalizer.get("pattern") == {"String": " "}
    return normalizer if normalizer.get("type") == "Prepend" or spaces else None
