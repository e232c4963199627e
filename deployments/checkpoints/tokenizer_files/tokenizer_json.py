"""Functions that build the parts of a tokenizer.json (format of the `tokenizers` library) as JSON
values."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

SPACE = "▁"  # the character that SentencePiece uses for a space

# Patterns of words: GPT-4's, with groups of up to three digits, and Qwen's, with single digits.
UP_TO_THREE_DIGITS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SINGLE_DIGITS = UP_TO_THREE_DIGITS.replace(r"\p{N}{1,3}", r"\p{N}")


def added_token(
    index: int, content: str, *, special: bool, single_word: bool = False
) -> dict[str, Any]:
    """Return an entry of `added_tokens`: a token that is matched in a text before the BPE model
    runs on the parts between such tokens.

    special: whether decoding leaves the token out.
    single_word: whether the token is matched only between characters that are no letters.
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
    """Return the contents of a tokenizer.json with a BPE model.

    added: results of `added_token`.
    parts: values of normalizer, pre_tokenizer, post_processor and decoder, by these names.
    model: vocab, merges, and the fields that differ from the defaults.
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
    pattern: str | None,
    *,
    before: Sequence[str] = (),
    digits: bool = False,
    nfc: bool = False,
    first_space: bool = False,
) -> dict[str, Any]:
    """Return the normalizer, pre_tokenizer and decoder of a byte-level BPE, by these names.

    pattern: regular expression of words; None: GPT-2's, which the byte-level step includes.
    before: regular expressions whose matches are split off before, in this order.
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
    first = [isolated(expression) for expression in before]
    if digits:
        first.append({"type": "Digits", "individual_digits": True})
    elif pattern is not None:
        first.append(isolated(pattern))
    return {
        "normalizer": {"type": "NFC"} if nfc else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*first, step]} if first else step,
        "decoder": {**step, "add_prefix_space": True, "use_regex": True},
    }


def isolated(pattern: str) -> dict[str, Any]:
    """Return the pre-tokenizer that splits a text before and after each match of a pattern."""
    regex = {"Regex": pattern}
    return {"type": "Split", "pattern": regex, "behavior": "Isolated", "invert": False}


def pieces(prefix: bool, before: Sequence[Mapping[str, Any]] = ()) -> dict[str, Any]:
    """Return the normalizer, pre_tokenizer and decoder of a SentencePiece model with byte fallback.

    prefix: whether each text gets a space before it.
    before: normalizers that run before spaces are replaced by `SPACE`.
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
    """Yield BPE merges (left text, right text) in an order that reproduces SentencePiece's.

    SentencePiece first joins the neighbours that result in the piece with the best score. Merges
    with the same result are ordered by the id of their left piece.

    tokens, scores: text and score of each piece, by id.
    joined: ids of the pieces that may be parts and results of merges.
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
    """Return the post_processor that adds special tokens before and after each text; None without
    tokens.

    before, after: (text, id) of each token.
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
