"""The conversion of vocab.json and merges.txt, which OPT, GPT-2, Qwen 2, CodeGen and BLOOM have."""

from dataclasses import dataclass

from deployments.checkpoints.tokenizer_files.converted import Converted
from deployments.checkpoints.tokenizer_files.folder import TokenizerFolder
from deployments.checkpoints.tokenizer_files.tokenizer_json import (
    SINGLE_DIGITS,
    added_token,
    around,
    bpe,
    byte_level,
)

VOCAB, MERGES = "vocab.json", "merges.txt"
_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token")


@dataclass(frozen=True, slots=True)
class _Class:
    """The rules of a Python tokenizer class, besides its merges.

    pattern: regular expression of words; None: GPT-2's.
    nfc: whether texts are normalised to NFC first.
    special: texts of the special tokens that tokenizer_config.json does not declare.
    """

    pattern: str | None = None
    nfc: bool = False
    special: str = "<|endoftext|>"


_GPT2 = _Class()
CLASSES = {
    "": _GPT2,
    "BloomTokenizer": _Class(r" ?[^(\s|[.,!?…。，、।۔،])]+", special="</s>"),
    "CodeGenTokenizer": _GPT2,
    "GPT2Tokenizer": _GPT2,
    "Qwen2Tokenizer": _Class(SINGLE_DIGITS, nfc=True),
}


def convert(folder: TokenizerFolder) -> Converted:
    """Convert a folder's vocab.json and merges.txt to the form of tokenizer.json.

    Raises ConfigError for a line that is not a merge of two tokens.
    """
    rules = CLASSES[folder.tokenizer_class]
    vocab = folder.json(VOCAB)
    if {value for value in vocab.values() if isinstance(value, int)} != set(range(len(vocab))):
        raise folder.error(VOCAB, "its ids are not 0, 1, 2 and so on")
    merges: list[list[str]] = []
    lines = folder.bytes(MERGES).decode("utf-8", "replace").split("\n")
    for number, line in enumerate(lines, 1):
        if not line.strip() or (number == 1 and line.startswith("#version")):
            continue
        parts = line.rstrip("\r").split(" ")
        if len(parts) != 2 or any(text not in vocab for text in (*parts, "".join(parts))):
            raise folder.error(MERGES, f"line {number} joins no two tokens of {VOCAB}")
        merges.append(parts)
    special = {name: rules.special for name in _NAMES[:2] if name not in folder.settings}
    special |= {name: text for name in _NAMES if (text := folder.named(name))}
    added = {vocab[text]: (text, True) for text in special.values() if text in vocab}
    added |= folder.added
    vocab |= {text: index for index, (text, _) in added.items()}
    bos = special.get("bos_token", "")
    asked = bool(folder.settings.get("add_bos_token")) and bos in vocab
    first_space = bool(folder.settings.get("add_prefix_space"))
    document = bpe(
        [
            added_token(index, text, special=is_special)
            for index, (text, is_special) in sorted(added.items())
        ],
        {
            **byte_level(rules.pattern, nfc=rules.nfc, first_space=first_space),
            "post_processor": around([(bos, vocab[bos])] if asked else []),
        },
        {"vocab": vocab, "merges": merges},
    )
    return Converted(document, special)
