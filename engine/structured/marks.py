"""hide_marks: renames control tokens in a tokenizer.json, so that a grammar's text cannot spell
them."""

import secrets
from collections.abc import Iterable
from typing import Any

import msgspec

_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")


def is_mark(content: str, special: bool) -> bool:
    """Whether llguidance allows an added token only where a grammar names the token.

    llguidance treats all special tokens as control tokens, and all tokens in angle brackets, such
    as Qwen's <tool_call>.
    """
    return special or (content.startswith("<") and content.endswith(">"))


def hide_marks(
    raw: bytes, end_ids: Iterable[int] = (), declared: Iterable[str] = ()
) -> tuple[str, dict[int, str]]:
    """Rename the control tokens of a tokenizer.json to secret names.

    Returns the new text of tokenizer.json, and {id: real name}. The tokens are renamed because
    llguidance tokenizes the text that a grammar forces. A constant "<tool_call>" or "<|im_end|>"
    would become the control token, which llguidance then forbids, as a control token is not text.

    raw: the text of tokenizer.json.
    end_ids: end tokens, which are renamed even if they are ordinary tokens.
    declared: names of further control tokens.
    Raises ValueError, KeyError, TypeError for an invalid tokenizer.json.
    """
    content: dict[str, Any] = msgspec.json.decode(raw)
    content["added_tokens"] = added = list(content.get("added_tokens") or [])
    model = content["model"]
    vocab = model.get("vocab")
    pieces: Iterable[tuple[str, int]] = vocab.items() if isinstance(vocab, dict) else ()
    if isinstance(vocab, list):  # a Unigram model, where the index is the id
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
        # a merge is a pair, or a string of two parts with a space between them
        if model.get("merges"):
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
    content["post_processor"] = None  # removed, as it would add control tokens to forced text
    content["normalizer"] = _spaces_alone(content.get("normalizer"))
    return msgspec.json.encode(content).decode(), marks


def _spaces_alone(normalizer: Any) -> Any:
    """Return a tokenizer's normalizer with only the steps that rewrite spaces; None if it has
    none."""
    if not isinstance(normalizer, dict):
        return None
    if normalizer.get("type") == "Sequence":
        normalizers = [
            inner for inner in map(_spaces_alone, normalizer["normalizers"]) if inner is not None
        ]
        return {**normalizer, "normalizers": normalizers} if normalizers else None
    spaces = normalizer.get("pattern") == {"String": " "}
    return normalizer if normalizer.get("type") == "Prepend" or spaces else None
