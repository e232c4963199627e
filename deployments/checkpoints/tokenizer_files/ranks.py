"""The conversion of tiktoken's ranks, which Qwen 1, GLM-4, Kimi and Mistral's tekken.json have.

tiktoken always joins the two neighbours whose joined bytes have the lowest rank. No merge crosses a
token's ends. So a token always results from the same two parts: those that remain before the last
join when its bytes alone are tokenised. Therefore each rank corresponds to one BPE merge, and the
merges in order of rank reproduce tiktoken.
"""

import base64
import binascii
from collections.abc import Mapping
from typing import Any

from deployments.checkpoints.tokenizer_files.converted import Converted
from deployments.checkpoints.tokenizer_files.folder import TokenizerFolder
from deployments.checkpoints.tokenizer_files.tokenizer_json import (
    SINGLE_DIGITS,
    UP_TO_THREE_DIGITS,
    added_token,
    around,
    bpe,
    byte_level,
)
from engine.text.text_stream import BYTE_OF_CHAR

QWEN, KIMI, TEKKEN = "qwen.tiktoken", "tiktoken.model", "tekken.json"

_QWEN_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    *(f"<|extra_{n}|>" for n in range(205)),
)
_GLM_TOKENS = (
    "<|endoftext|>",
    "[MASK]",
    "[gMASK]",
    "[sMASK]",
    "<sop>",
    "<eop>",
    "<|system|>",
    "<|user|>",
    "<|assistant|>",
    "<|observation|>",
    "<|begin_of_image|>",
    "<|end_of_image|>",
    "<|begin_of_video|>",
    "<|end_of_video|>",
)
_KIMI_RESERVED = 256
# The special tokens of tekken.json up to version 7, which does not contain them.
_OLD_TEKKEN_TOKENS = (
    "<unk>",
    "<s>",
    "</s>",
    "[INST]",
    "[/INST]",
    "[AVAILABLE_TOOLS]",
    "[/AVAILABLE_TOOLS]",
    "[TOOL_RESULTS]",
    "[/TOOL_RESULTS]",
    "[TOOL_CALLS]",
    "[IMG]",
    "<pad>",
    "[IMG_BREAK]",
    "[IMG_END]",
    "[PREFIX]",
    "[MIDDLE]",
    "[SUFFIX]",
    "[SYSTEM_PROMPT]",
    "[/SYSTEM_PROMPT]",
    "[TOOL_CONTENT]",
)
# The pattern of Kimi's words: runs of Chinese characters; other words are split before upper-case
# letters.
_HAN = r"\p{Han}"
_UPPER, _LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
_START, _END = r"[^\r\n\p{L}\p{N}]?", r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
KIMI_WORDS = "|".join(
    (
        rf"[{_HAN}]+",
        rf"{_START}[{_UPPER}&&[^{_HAN}]]*[{_LOWER}&&[^{_HAN}]]+{_END}",
        rf"{_START}[{_UPPER}&&[^{_HAN}]]+[{_LOWER}&&[^{_HAN}]]*{_END}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)

_CHARS = {byte: char for char, byte in BYTE_OF_CHAR.items()}


def is_ranks(content: bytes) -> bool:
    """Return whether a file begins like tiktoken's files: with a line of a token in base64 and a
    rank."""
    line = content[:1024].split(b"\n", 1)[0].split()
    if len(line) != 2 or not line[1].isdigit():
        return False
    try:
        base64.b64decode(line[0], validate=True)
    except binascii.Error:
        return False
    return True


def convert_qwen(folder: TokenizerFolder) -> Converted:
    """Convert Qwen 1's qwen.tiktoken to the form of tokenizer.json."""
    ranks = _ranks(folder, QWEN)
    special = {len(ranks) + place: (text, True) for place, text in enumerate(_QWEN_TOKENS)}
    return _converted(ranks, SINGLE_DIGITS, special, nfc=True, named={"eos_token": "<|endoftext|>"})


def convert_glm(folder: TokenizerFolder) -> Converted:
    """Convert GLM-4's tokenizer.model to the form of tokenizer.json.

    The converted tokenizer puts two special tokens before each text.
    """
    ranks = _ranks(folder, "tokenizer.model")
    special = {len(ranks) + place: (text, True) for place, text in enumerate(_GLM_TOKENS)}
    return _converted(
        ranks,
        UP_TO_THREE_DIGITS,
        special | folder.added,
        before=("[gMASK]", "<sop>"),
        named={"eos_token": folder.named("eos_token") or "<|endoftext|>"},
    )


def convert_kimi(folder: TokenizerFolder) -> Converted:
    """Convert Kimi's tiktoken.model to the form of tokenizer.json.

    Unused ids get names of reserved tokens.
    """
    ranks = _ranks(folder, KIMI)
    special = {
        index: (f"<|reserved_token_{index}|>", True)
        for index in range(len(ranks), len(ranks) + _KIMI_RESERVED)
    }
    named = {name: text for name in ("bos_token", "eos_token") if (text := folder.named(name))}
    return _converted(ranks, KIMI_WORDS, special | folder.added, named=named)


def convert_tekken(folder: TokenizerFolder) -> Converted:
    """Convert Mistral's tekken.json to the form of tokenizer.json.

    In both, the special tokens have the first ids.
    """
    content = folder.json(TEKKEN)
    try:
        config = content["config"]
        count = int(config["default_num_special_tokens"])
        entries = content["vocab"][: int(config["default_vocab_size"]) - count]
        ranks = {base64.b64decode(entry["token_bytes"]): entry["rank"] for entry in entries}
        texts = dict(enumerate(_OLD_TEKKEN_TOKENS))
        if listed := content.get("special_tokens"):
            texts = {int(token["rank"]): str(token["token_str"]) for token in listed}
        pattern = str(config["pattern"])
    except (KeyError, TypeError, ValueError) as error:
        raise folder.error(TEKKEN, repr(error)) from None
    if sorted(ranks.values()) != list(range(len(ranks))):
        raise folder.error(TEKKEN, "its ranks are not 0, 1, 2 and so on")
    special = {index: (texts.get(index, f"<SPECIAL_{index}>"), True) for index in range(count)}
    return _converted(
        ranks,
        pattern,
        special,
        first_id=count,
        before=("<s>",),
        named={"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"},
    )


def _ranks(folder: TokenizerFolder, name: str) -> dict[bytes, int]:
    """Parse a file with lines of a token in base64 and its rank into {token's bytes: rank}."""
    ranks: dict[bytes, int] = {}
    try:
        for line in folder.bytes(name).splitlines():
            if line:
                token, rank = line.split()
                ranks[base64.b64decode(token, validate=True)] = int(rank)
    except ValueError as error:
        raise folder.error(name, f"line {len(ranks) + 1}: {error}") from None
    if sorted(ranks.values()) != list(range(len(ranks))):
        raise folder.error(name, "its ranks are not 0, 1, 2 and so on")
    if missing := [byte for byte in range(256) if bytes((byte,)) not in ranks]:
        raise folder.error(name, f"it has no token for the byte {missing[0]}")
    return ranks


def _converted(
    ranks: Mapping[bytes, int],
    pattern: str,
    special: Mapping[int, tuple[str, bool]],
    *,
    nfc: bool = False,
    first_id: int = 0,
    before: tuple[str, ...] = (),
    named: Mapping[str, str],
) -> Converted:
    """Return the converted tokenizer for tiktoken's ranks.

    ranks: {token's bytes: rank}. pattern: regular expression of words.
    special: {id: (text, whether decoding leaves the token out)} of further tokens.
    nfc: whether texts are normalised to NFC first.
    first_id: id of rank 0.
    before: tokens that are put before each text.
    named: `Converted.special`.
    """
    texts = {token: "".join(_CHARS[byte] for byte in token) for token in ranks}
    vocab: dict[str, int] = {texts[token]: rank + first_id for token, rank in ranks.items()}
    vocab |= {text: index for index, (text, _) in special.items()}
    merges: list[list[str]] = []
    for token, rank in sorted(ranks.items(), key=lambda item: item[1]):
        parts = _parts(ranks, token, rank)
        if len(parts) == 2:
            # Tokens without two parts are single bytes, or are matched only as whole words.
            merges.append([texts[part] for part in parts])
    parts_of_text: dict[str, Any] = byte_level(pattern, nfc=nfc)
    parts_of_text["post_processor"] = around([(text, vocab[text]) for text in before])
    document = bpe(
        [
            added_token(index, text, special=is_special)
            for index, (text, is_special) in sorted(special.items())
        ],
        parts_of_text,
        {"vocab": vocab, "merges": merges, "ignore_merges": True},
    )
    return Converted(document, named)


def _parts(ranks: Mapping[bytes, int], token: bytes, limit: int) -> list[bytes]:
    """Return the parts of a token before its last merge: its bytes, merged by the ranks below
    `limit`. limit: the token's own rank."""
    parts = [token[at : at + 1] for at in range(len(token))]
    while len(parts) > 2:
        best, place = limit, -1
        for at in range(len(parts) - 1):
            rank = ranks.get(parts[at] + parts[at + 1], limit)
            if rank < best:
                best, place = rank, at
        if place < 0:
            break
        parts[place : place + 2] = [parts[place] + parts[place + 1]]
    return parts
