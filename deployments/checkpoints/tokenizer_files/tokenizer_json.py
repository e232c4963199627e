"""The parts of a tokenizer.json, the `tokenizers` library's own format, as JSON values."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

SPACE = "▁"  # SentencePiece's mark of a space

# GPT-4's words, with up to three digits together, and Qwen's, with single digits.
UP_TO_THREE_DIGITS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SINGLE_DIGITS = UP_TO_THREE_DIGITS.replace(r"\p{N}{1,3}", r"\p{N}")


def added_token(
    index: int, content: str, *, special: bool, single_word: bool = False
) -> dict[str, Any]:
    """Return a token that is found in a text before the model splits the rest.

    special: whether decoding leaves the token out.
    single_word: whether the token is found only between characters that are no letters.
    """
    return {
        "id": index,
        "content": content,
        "single_word": single_word,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "special": special,
    }


def bpe(
    added: Sequence[Mapping[str, Any]], parts: Mapping[str, Any], model: Mapping[str, Any]
) -> dict[str, Any]:
    """Return a tokenizer.json with a BPE model.

    parts: normalizer, pre_tokenizer, post_processor and decoder.
    model: vocab, merges and the fields that differ from the defaults.
    """
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": list(added),
        **parts,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            **model,
        },
    }


def byte_level(
    pattern: str | None, *, digits: bool = False, nfc: bool = False, first_space: bool = False
) -> dict[str, Any]:
    """Return the normalizer, pre-tokenizer and decoder of a byte-level BPE.

    pattern: regular expression of words; None is GPT-2's, which the byte-level step includes.
    digits: whether each digit is split off first, instead of `pattern`.
    nfc: whether the text is normalised to NFC first.
    first_space: whether a text that begins with a letter gets a space before it.
    """
    step = {
        "type": "ByteLevel",
        "add_prefix_space": first_space,
        "trim_offsets": True,
        "use_regex": pattern is None,
    }
    first: dict[str, Any] | None = None
    if digits:
        first = {"type": "Digits", "individual_digits": True}
    elif pattern is not None:
        first = isolated(pattern)
    return {
        "normalizer": {"type": "NFC"} if nfc else None,
        "pre_tokenizer": step
        if first is None
        else {"type": "Sequence", "pretokenizers": [first, step]},
        "decoder": {**step, "add_prefix_space": True, "use_regex": True},
    }


def isolated(pattern: str) -> dict[str, Any]:
    """Return the pre-tokenizer that makes a word of each match and of the text between matches."""
    regex = {"Regex": pattern}
    return {"type": "Split", "pattern": regex, "behavior": "Isolated", "invert": False}


def pieces(prefix: bool, before: Sequence[Mapping[str, Any]] = ()) -> dict[str, Any]:
    """Return the normalizer and decoder of a SentencePiece model with byte fallback.

    prefix: whether each text gets a space before it.
    before: normalizers that run before spaces are marked.
    """
    spaces = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
    first = [{"type": "Prepend", "prepend": SPACE}] if prefix else []
    decoders: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if prefix:
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    return {
        "normalizer": {"type": "Sequence", "normalizers": [*before, *first, spaces]},
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": decoders},
    }


def piece_merges(
    tokens: Sequence[str], scores: Sequence[float], joined: Iterable[int]
) -> Iterator[list[str]]:
    """Yield the BPE merges that reproduce SentencePiece's order.

    SentencePiece first joins the neighbours that make the piece of the best score. Merges of one
    piece are ordered by their left half's id.

    joined: ids of the pieces that texts are made of.
    """
    index = {tokens[at]: at for at in joined}
    merges = []
    for token, at in index.items():
        for cut in range(1, len(token)):
            left, right = index.get(token[:cut]), index.get(token[cut:])
            if left is not None and right is not None:
                merges.append((-scores[at], at, left, right))
    merges.sort()
    for _, _, left, right in merges:
        yield [tokens[left], tokens[right]]


def around(
    before: Sequence[tuple[str, int]], after: Sequence[tuple[str, int]] = ()
) -> dict[str, Any] | None:
    """Return the step that puts special tokens before and after each text; None without tokens.

    before, after: the tokens and their ids.
    """
    if not before and not after:
        return None

    def sequence(name: str, type_id: int) -> list[dict[str, Any]]:
        def special(tokens: Sequence[tuple[str, int]]) -> list[dict[str, Any]]:
            return [{"SpecialToken": {"id": token, "type_id": type_id}} for token, _ in tokens]

        return [
            *special(before),
            {"Sequence": {"id": name, "type_id": type_id}},
            *special(after),
        ]

    return {
        "type": "TemplateProcessing",
        "single": sequence("A", 0),
        "pair": sequence("A", 0) + sequence("B", 1),
        "special_tokens": {
            token: {"id": token, "ids": [index], "tokens": [token]}
            for token, index in [*before, *after]
        },
    }
