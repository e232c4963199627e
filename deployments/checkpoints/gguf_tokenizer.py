"""Conversion of a GGUF file's tokenizer to tokenizer.json of the `tokenizers` library.

Two kinds of tokenizers are supported: byte-level BPE, for which the file names the pre-tokenizer,
and SentencePiece's BPE, whose merges follow from the scores of its pieces.
"""

from dataclasses import dataclass
from typing import Any

from deployments.checkpoints.gguf_file import GGUFFile
from deployments.checkpoints.tokenizer_files.ranks import KIMI_WORDS
from deployments.checkpoints.tokenizer_files.tokenizer_json import (
    SINGLE_DIGITS,
    SPACE,
    UP_TO_THREE_DIGITS,
    added_token,
    around,
    bpe,
    byte_level,
    piece_merges,
    pieces,
)

_NORMAL, _CONTROL, _USER_DEFINED = 1, 3, 4  # token types

# Parts of the patterns in models' original tokenizer.json: upper-case and lower-case letters.
_UPPER, _LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
_ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def _cased(ending: str, digits: str) -> str:
    """Return a regular expression for words that end between a lower-case and an upper-case letter.

    ending: pattern of a word's ending, such as 's. digits: pattern of numbers.
    """
    return (
        rf"[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]*[{_LOWER}]+{ending}"
        rf"|[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]+[{_LOWER}]*{ending}|{digits}|{_REST}"
    )


@dataclass(frozen=True, slots=True)
class _Split:
    """The rules of a pre-tokenizer, by which a text is split before the BPE merges.

    pattern: regular expression of words; None: GPT-2's, which the byte-level step includes.
    before: regular expressions whose matches are split off before, in this order.
    digits: whether each digit is split off first.
    nfc: whether the text is normalised to NFC first.
    whole: whether a word that is in the vocabulary skips the merges.
    bos: whether a beginning-of-sequence token is added by default.
    """

    pattern: str | None = None
    before: tuple[str, ...] = ()
    digits: bool = False
    nfc: bool = False
    whole: bool = False
    bos: bool = False


# DeepSeek V3: numbers, then Chinese and Japanese characters, then words and punctuation.
_DEEPSEEK = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_DIGITS = _Split(digits=True)
_LLAMA = _Split(UP_TO_THREE_DIGITS, whole=True, bos=True)
_PLAIN_LLAMA = _Split(UP_TO_THREE_DIGITS)
_QWEN = _Split(SINGLE_DIGITS, nfc=True)
_SPLITS = {  # name in the file's tokenizer.ggml.pre -> rules
    "gpt-2": _Split(),
    "phi-2": _Split(),
    "mpt": _Split(nfc=True),
    "olmo": _Split(nfc=True),
    "smollm": _DIGITS,
    "starcoder": _DIGITS,
    "refact": _DIGITS,
    "command-r": _Split(digits=True, nfc=True),
    "exaone": _DIGITS,
    "llama-bpe": _LLAMA,
    "llama3": _LLAMA,
    "llama-v3": _LLAMA,
    "dbrx": _PLAIN_LLAMA,
    "smaug-bpe": _PLAIN_LLAMA,
    "glm4": _PLAIN_LLAMA,
    "chatglm-bpe": _PLAIN_LLAMA,
    "qwen2": _QWEN,
    "stablelm2": _Split(SINGLE_DIGITS),
    "deepseek-r1-qwen": _QWEN,
    "deepseek-v3": _Split(
        _DEEPSEEK, (r"\p{N}{1,3}", "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"), bos=True
    ),
    "gpt-4o": _Split(_cased(_ENDINGS, r"\p{N}{1,3}")),
    "kimi-k2": _Split(KIMI_WORDS, whole=True),
    "tekken": _Split(_cased("", r"\p{N}"), whole=True),
}


def tokenizer_of(file: GGUFFile) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return (special token ids by their names in config.json, contents of tokenizer.json).

    Raises ConfigError for an unsupported tokenizer.
    """
    kind, pre = file.get("tokenizer.ggml.model"), file.get("tokenizer.ggml.pre")
    if kind == "llama":
        return _special_ids(file), _sentencepiece(file)
    if kind != "gpt2" or pre not in _SPLITS:
        raise file.error(
            f"tokenizer {kind}/{pre} is not supported (supported: llama, gpt2/"
            f"{', '.join(_SPLITS)}); use the model's original safetensors folder"
        )
    return _special_ids(file), _byte_level(file, _SPLITS[pre])


def _tokens(file: GGUFFile) -> tuple[list[str], list[int]]:
    """Return the tokens' texts and types, by id. Raises ConfigError if the embedding has too few
    rows."""
    tokens = [str(token) for token in file.get("tokenizer.ggml.tokens") or []]
    kinds = [int(kind) for kind in file.get("tokenizer.ggml.token_type") or [_NORMAL] * len(tokens)]
    if not tokens or len(kinds) != len(tokens):
        raise file.error(f"{len(tokens)} tokens, and types of {len(kinds)}; download it again")
    if file.has("token_embd.weight") and len(tokens) > (rows := file.shape("token_embd.weight")[0]):
        raise file.error(f"{len(tokens)} tokens, and token_embd.weight has {rows} rows")
    return tokens, kinds


def _added(tokens: list[str], kinds: list[int]) -> list[dict[str, Any]]:
    return [
        added_token(index, token, special=kinds[index] == _CONTROL)
        for index, token in enumerate(tokens)
        if kinds[index] in (_CONTROL, _USER_DEFINED)
    ]


def _byte_level(file: GGUFFile, split: _Split) -> dict[str, Any]:
    tokens, kinds = _tokens(file)
    return bpe(
        _added(tokens, kinds),
        {
            **byte_level(split.pattern, before=split.before, digits=split.digits, nfc=split.nfc),
            "post_processor": _post_processor(file, tokens, split.bos),
        },
        {
            "vocab": {token: index for index, token in enumerate(tokens)},
            "ignore_merges": split.whole,
            "merges": [
                str(merge).split(" ", 1) for merge in file.get("tokenizer.ggml.merges") or []
            ],
        },
    )


def _sentencepiece(file: GGUFFile) -> dict[str, Any]:
    """Return tokenizer.json of a SentencePiece BPE tokenizer.

    A character that is not in the vocabulary becomes the tokens of its UTF-8 bytes.
    """
    tokens, kinds = _tokens(file)
    scores = [float(score) for score in file.get("tokenizer.ggml.scores") or []]
    if len(scores) != len(tokens):
        raise file.error(f"{len(tokens)} tokens, and scores of {len(scores)}; download it again")
    # Added tokens are matched in the raw text, before spaces are replaced.
    tokens = [
        token.replace(SPACE, " ") if kind == _USER_DEFINED else token
        for token, kind in zip(tokens, kinds, strict=True)
    ]
    unknown = file.get("tokenizer.ggml.unknown_token_id")
    normal = (index for index, kind in enumerate(kinds) if kind == _NORMAL)
    return bpe(
        _added(tokens, kinds),
        {
            **pieces(bool(file.get("tokenizer.ggml.add_space_prefix", True))),
            "post_processor": _post_processor(file, tokens, True),
        },
        {
            "vocab": {token: index for index, token in enumerate(tokens)},
            "unk_token": None if unknown is None else tokens[int(unknown)],
            "fuse_unk": True,
            "byte_fallback": True,
            "merges": list(piece_merges(tokens, scores, normal)),
        },
    )


def _post_processor(file: GGUFFile, tokens: list[str], default: bool) -> dict[str, Any] | None:
    """Return tokenizer.json's post-processor that adds the beginning-of-sequence token; None if the
    token is not added.

    default: whether to add the token if the file does not specify it.
    """
    bos = file.get("tokenizer.ggml.bos_token_id")
    if not file.get("tokenizer.ggml.add_bos_token", default) or bos is None:
        return None
    return around([(tokens[int(bos)], int(bos))])


def _special_ids(file: GGUFFile) -> dict[str, Any]:
    """Return the special token ids by config.json's names.

    End-of-turn and end-of-message tokens are added to eos_token_id. Raises ConfigError for an id
    outside the vocabulary.
    """
    count = len(file.get("tokenizer.ggml.tokens") or [])
    names = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}
    ids: dict[str, Any] = {}
    for ours, theirs in {**names, "eot": "eot", "eom": "eom"}.items():
        value = file.get(f"tokenizer.ggml.{theirs}_token_id")
        if value is not None:
            if int(value) >= count:
                raise file.error(f"tokenizer.ggml.{theirs}_token_id is {value} of {count} tokens")
            ids[ours] = int(value)
    ends = [ids.pop(name) for name in ("eot", "eom") if name in ids]
    if ends:  # ids of tokens that end a turn, or a message with tool calls
        first = [ids["eos_token_id"]] if "eos_token_id" in ids else []
        ends = list(dict.fromkeys([*first, *ends]))
        ids["eos_token_id"] = ends if len(ends) > 1 else ends[0]
    return ids


def sampling_of(file: GGUFFile) -> dict[str, Any]:
    """Return the sampling defaults that a file recommends, by generation_config.json's names."""
    names = {
        "temp": "temperature",
        "top_p": "top_p",
        "top_k": "top_k",
        "min_p": "min_p",
        "penalty_repeat": "repetition_penalty",
    }
    recommended = {ours: file.get(f"general.sampling.{name}") for name, ours in names.items()}
    return {  # rounded, because float32 makes 0.2 0.20000000298
        name: float(f"{value:.6g}") if isinstance(value, float) else value
        for name, value in recommended.items()
        if value is not None
    }


def tokenizer_config_of(file: GGUFFile) -> dict[str, Any]:
    tokens = file.get("tokenizer.ggml.tokens")
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": int(file.need("context_length")),
        "clean_up_tokenization_spaces": False,
        "add_bos_token": bool(file.get("tokenizer.ggml.add_bos_token", False)),
    }
    kinds = {"bos": "bos", "eos": "eos", "pad": "padding", "unk": "unknown"}
    for ours, theirs in kinds.items():
        index = file.get(f"tokenizer.ggml.{theirs}_token_id")
        if index is not None and int(index) < len(tokens):
            config[f"{ours}_token"] = str(tokens[int(index)])
    return config
