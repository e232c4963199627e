"""Conversion of a GGUF file's tokenizer to tokenizer.json of the `tokenizers` library.

Two kinds are supported: byte-level BPE, whose pre-tokenizer the file names, and SentencePiece's
BPE, whose merges follow from the scores of its pieces.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from deployments.checkpoints.gguf_file import GGUFFile

_NORMAL, _CONTROL, _USER_DEFINED = 1, 3, 4  # token types
_SPACE = "▁"  # SentencePiece's mark of a space

# Patterns of the models' own tokenizer.json.
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_UPPER, _LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
_ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def _cased(ending: str, digits: str) -> str:
    """Return a pattern of words that end before an upper-case letter that follows a lower-case
    one."""
    return (
        rf"[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]*[{_LOWER}]+{ending}"
        rf"|[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]+[{_LOWER}]*{ending}|{digits}|{_REST}"
    )


@dataclass(frozen=True, slots=True)
class _Split:
    """The pre-tokenizer: how a text is split before the BPE merges.

    pattern: regular expression of words; None is GPT-2's, which the byte-level step includes.
    digits: whether each digit is split off first.
    nfc: whether the text is normalised to NFC first.
    whole: whether a word that is in the vocabulary skips the merges.
    bos: whether a beginning-of-sequence token is added if the file does not say.
    """

    pattern: str | None = None
    digits: bool = False
    nfc: bool = False
    whole: bool = False
    bos: bool = False


_DIGITS = _Split(digits=True)
_LLAMA = _Split(_LLAMA3, whole=True, bos=True)
_PLAIN_LLAMA = _Split(_LLAMA3)
_QWEN = _Split(_QWEN2, nfc=True)
_SPLITS = {  # by the file's tokenizer.ggml.pre
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
    "stablelm2": _Split(_QWEN2),
    "deepseek-r1-qwen": _QWEN,
    "gpt-4o": _Split(_cased(_ENDINGS, r"\p{N}{1,3}")),
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
    """Return the tokens and their types. Raises ConfigError if the embedding has too few rows."""
    tokens = [str(token) for token in file.get("tokenizer.ggml.tokens") or []]
    kinds = [int(kind) for kind in file.get("tokenizer.ggml.token_type") or [_NORMAL] * len(tokens)]
    if not tokens or len(kinds) != len(tokens):
        raise file.error(f"{len(tokens)} tokens, and types of {len(kinds)}; download it again")
    if file.has("token_embd.weight") and len(tokens) > (rows := file.shape("token_embd.weight")[0]):
        raise file.error(f"{len(tokens)} tokens, and token_embd.weight has {rows} rows")
    return tokens, kinds


def _json(
    tokens: list[str],
    kinds: list[int],
    parts: dict[str, Any],
    model: dict[str, Any],
) -> dict[str, Any]:
    added = [
        {
            "id": index,
            "content": token,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": kinds[index] == _CONTROL,
        }
        for index, token in enumerate(tokens)
        if kinds[index] in (_CONTROL, _USER_DEFINED)
    ]
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
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
            "vocab": {token: index for index, token in enumerate(tokens)},
            **model,
        },
    }


def _byte_level(file: GGUFFile, split: _Split) -> dict[str, Any]:
    tokens, kinds = _tokens(file)
    byte_level = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": split.pattern is None,
    }
    first: dict[str, Any] | None = None
    if split.digits:
        first = {"type": "Digits", "individual_digits": True}
    elif split.pattern is not None:
        pattern = {"Regex": split.pattern}
        first = {"type": "Split", "pattern": pattern, "behavior": "Isolated", "invert": False}
    pre_tokenizer: dict[str, Any] = byte_level
    if first is not None:
        pre_tokenizer = {"type": "Sequence", "pretokenizers": [first, byte_level]}
    return _json(
        tokens,
        kinds,
        {
            "normalizer": {"type": "NFC"} if split.nfc else None,
            "pre_tokenizer": pre_tokenizer,
            "post_processor": _post_processor(file, tokens, split.bos),
            "decoder": {**byte_level, "add_prefix_space": True, "use_regex": True},
        },
        {
            "ignore_merges": split.whole,
            "merges": [
                str(merge).split(" ", 1) for merge in file.get("tokenizer.ggml.merges") or []
            ],
        },
    )


def _sentencepiece(file: GGUFFile) -> dict[str, Any]:
    """Return tokenizer.json of a SentencePiece BPE tokenizer.

    A character that is not in the vocabulary becomes its bytes' tokens.
    """
    tokens, kinds = _tokens(file)
    scores = [float(score) for score in file.get("tokenizer.ggml.scores") or []]
    if len(scores) != len(tokens):
        raise file.error(f"{len(tokens)} tokens, and scores of {len(scores)}; download it again")
    tokens = [  # added tokens are matched in the raw text, before spaces are replaced
        token.replace(_SPACE, " ") if kind == _USER_DEFINED else token
        for token, kind in zip(tokens, kinds, strict=True)
    ]
    unknown = file.get("tokenizer.ggml.unknown_token_id")
    prefix = bool(file.get("tokenizer.ggml.add_space_prefix", True))
    spaces = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
    normalizers = [{"type": "Prepend", "prepend": _SPACE}] if prefix else []
    decoders: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if prefix:
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    return _json(
        tokens,
        kinds,
        {
            "normalizer": {"type": "Sequence", "normalizers": [*normalizers, spaces]},
            "pre_tokenizer": None,
            "post_processor": _post_processor(file, tokens, True),
            "decoder": {"type": "Sequence", "decoders": decoders},
        },
        {
            "unk_token": None if unknown is None else tokens[int(unknown)],
            "fuse_unk": True,
            "byte_fallback": True,
            "merges": list(_merges(tokens, kinds, scores)),
        },
    )


def _merges(tokens: list[str], kinds: list[int], scores: list[float]) -> Iterator[list[str]]:
    """Yield the BPE merges that reproduce SentencePiece's order.

    SentencePiece first joins the neighbours that make the piece of the best score. Merges of one
    piece are ordered by their left half's id.
    """
    index = {
        token: at
        for at, (token, kind) in enumerate(zip(tokens, kinds, strict=True))
        if kind == _NORMAL
    }
    merges = []
    for token, at in index.items():
        for cut in range(1, len(token)):
            left, right = index.get(token[:cut]), index.get(token[cut:])
            if left is not None and right is not None:
                merges.append((-scores[at], at, left, right))
    merges.sort()
    for _, _, left, right in merges:
        yield [tokens[left], tokens[right]]


def _post_processor(file: GGUFFile, tokens: list[str], default: bool) -> dict[str, Any] | None:
    """Return the step that adds the beginning-of-sequence token, or None if the model has none."""
    bos = file.get("tokenizer.ggml.bos_token_id")
    if not file.get("tokenizer.ggml.add_bos_token", default) or bos is None:
        return None
    token = tokens[int(bos)]

    def sequence(name: str, type_id: int) -> list[dict[str, Any]]:
        return [
            {"SpecialToken": {"id": token, "type_id": type_id}},
            {"Sequence": {"id": name, "type_id": type_id}},
        ]

    return {
        "type": "TemplateProcessing",
        "single": sequence("A", 0),
        "pair": sequence("A", 0) + sequence("B", 1),
        "special_tokens": {token: {"id": token, "ids": [int(bos)], "tokens": [token]}},
    }


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
    if ends:  # ends of a turn, and of a message with tool calls
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
    return {  # rounded, as 0.2 is 0.20000000298 in the file
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
