"""The conversion of SentencePiece models: of Llama, Baichuan, InternLM, ChatGLM 2 and 3, and
others."""

import base64
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from deployments.checkpoints.tokenizer_files.converted import Converted
from deployments.checkpoints.tokenizer_files.folder import TokenizerFolder
from deployments.checkpoints.tokenizer_files.piece_model import (
    BPE,
    CONTROL,
    NORMAL,
    USER_DEFINED,
    PieceModel,
)
from deployments.checkpoints.tokenizer_files.tokenizer_json import (
    SPACE,
    added_token,
    around,
    bpe,
    isolated,
    piece_merges,
    pieces,
)

FILE = "tokenizer.model"
# Tokenizer classes whose Python code passes the text between special tokens unchanged to
# sentencepiece, and may add a BOS token.
_PLAIN = frozenset(
    {
        "",
        "BaichuanTokenizer",
        "CodeLlamaTokenizer",
        "GemmaTokenizer",
        "InternLM2Tokenizer",
        "InternLMTokenizer",
        "LlamaTokenizer",
        "OrionTokenizer",
        "YiTokenizer",
    }
)
# ChatGLM's tokenizer class, whose special tokens get ids after the pieces, and which puts two
# special tokens before each text.
_GLM = "ChatGLMTokenizer"
_GLM_TOKENS = ("[MASK]", "[gMASK]", "[sMASK]", "sop", "eop")
_GLM_ROLES = ("<|system|>", "<|user|>", "<|assistant|>", "<|observation|>")
_GLM_START = ("[gMASK]", "sop")
_INTERNLM_ENDS = ("<eoh>", "<eoa>")  # tokens that end a user's and an assistant's message
CLASSES = _PLAIN | {_GLM}

# The text of a byte piece, such as <0x0A>, in a user's text must not become the byte.
_BYTE_AS_TEXT = r"\A<(?=0x[0-9A-F]{2}>\z)"


@dataclass
class _Vocabulary:
    """The vocabulary of a converted SentencePiece model.

    texts: {id: text} of all tokens.
    added: the tokens that are matched in a text before the SentencePiece model runs.
    """

    texts: dict[int, str]
    added: dict[int, bool]  # id -> whether it is special

    def place(self, index: int, text: str, special: bool) -> None:
        self.texts[index] = text
        self.added[index] = special


def convert(folder: TokenizerFolder) -> Converted:
    """Convert a folder's tokenizer.model to the form of tokenizer.json.

    Raises ConfigError for unsupported models.
    """
    try:
        model = PieceModel.parse(folder.bytes(FILE))
    except (ValueError, KeyError) as error:
        raise folder.error(FILE, f"it is no SentencePiece model ({error})") from None
    if model.kind != BPE:
        raise folder.error(FILE, "its model has no merges: only SentencePiece's BPE is converted")
    if model.suffix:
        raise folder.error(FILE, "its words end with their space (treat_whitespace_as_suffix)")
    glm = folder.tokenizer_class == _GLM
    vocabulary = _vocabulary(folder, model, glm)
    special = {f"{name}_token": model.tokens[index] for name, index in model.ids.items()}
    special |= {name: text for name in special if (text := folder.named(name))}
    parts = _parts(folder, model)
    parts["post_processor"] = _added_around(folder, vocabulary, special, glm)
    added = [
        added_token(index, vocabulary.texts[index], special=is_special, single_word=words)
        for index, is_special in sorted(vocabulary.added.items())
        for words in (vocabulary.texts[index].isalpha(),)
    ]
    document = bpe(added, parts, _bpe_model(model, vocabulary.texts))
    return Converted(document, special)


def _vocabulary(folder: TokenizerFolder, model: PieceModel, glm: bool) -> _Vocabulary:
    vocabulary = _Vocabulary(dict(enumerate(model.tokens)), {})
    unknown = model.ids.get("unk")
    for index, kind in enumerate(model.kinds):
        if kind == CONTROL or index == unknown:
            vocabulary.added[index] = True
    if glm:
        for place, text in enumerate((*_GLM_TOKENS, *_GLM_ROLES)):
            vocabulary.place(len(model.tokens) + place, text, True)
    for index, (text, special) in folder.added.items():
        # The published files of ChatGLM 3 declare the role tokens as ordinary tokens.
        vocabulary.place(index, text, special or vocabulary.added.get(index, False))
    for name in ("user_token_id", "assistant_token_id"):  # Baichuan's tokens before messages
        turn = folder.generation.get(name)
        if isinstance(turn, int) and turn in vocabulary.texts:
            vocabulary.added[turn] = True
    if folder.tokenizer_class == "InternLMTokenizer":
        ends = (at for at, text in enumerate(model.tokens) if text in _INTERNLM_ENDS)
        vocabulary.added |= dict.fromkeys(ends, True)
    return vocabulary


def _added_around(
    folder: TokenizerFolder, vocabulary: _Vocabulary, special: Mapping[str, str], glm: bool
) -> dict[str, Any] | None:
    ids = {text: index for index, text in vocabulary.texts.items()}
    if glm:
        return around([(text, ids[text]) for text in _GLM_START])

    def declared(name: str, default: bool) -> list[tuple[str, int]]:
        text = special.get(f"{name}_token", "")
        asked = folder.settings.get(f"add_{name}_token", default)
        return [(text, ids[text])] if asked and text in ids else []

    return around(declared("bos", True), declared("eos", False))


def _parts(folder: TokenizerFolder, model: PieceModel) -> dict[str, Any]:
    """Return the normalizer, pre_tokenizer and decoder of tokenizer.json, by these names."""
    before: list[dict[str, Any]] = []
    if model.charsmap:
        charsmap = base64.b64encode(model.charsmap).decode()
        before.append({"type": "Precompiled", "precompiled_charsmap": charsmap})
    if model.collapse:
        ends = {"type": "Replace", "pattern": {"Regex": "^ +| +$"}, "content": ""}
        runs = {"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "}
        before += [ends, runs]
    # With `legacy: false`, Llama's class adds a space only at the text's beginning, not after each
    # special token.
    once = model.prefix and folder.settings.get("legacy") is False
    parts = pieces(model.prefix and not once, before)
    splits: list[dict[str, Any]] = []
    if once:
        splits.append(
            {"type": "Metaspace", "replacement": SPACE, "prepend_scheme": "first", "split": False}
        )
        parts["normalizer"] = {"type": "Sequence", "normalizers": before} if before else None
    kinds = zip(model.tokens, model.kinds, strict=True)
    if own := [text for text, kind in kinds if kind == USER_DEFINED]:
        longest_first = sorted(own, key=len, reverse=True)
        splits.append(isolated("|".join(map(re.escape, longest_first))))
        splits.append(isolated(_BYTE_AS_TEXT))
    if splits:
        several = {"type": "Sequence", "pretokenizers": splits}
        parts["pre_tokenizer"] = several if len(splits) > 1 else splits[0]
    strip = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
    if (model.prefix or model.collapse) and strip not in parts["decoder"]["decoders"]:
        parts["decoder"]["decoders"].append(strip)
    return parts


def _bpe_model(model: PieceModel, texts: Mapping[int, str]) -> dict[str, Any]:
    normal = [
        index
        for index, kind in enumerate(model.kinds)
        if kind == NORMAL and texts[index] == model.tokens[index]
    ]
    return {
        "vocab": {text: index for index, text in texts.items()},
        "unk_token": texts[model.ids["unk"]] if "unk" in model.ids else None,
        "fuse_unk": True,
        "byte_fallback": model.byte_fallback,
        # User-defined pieces are split off as separate words, and are not results of merges.
        "ignore_merges": USER_DEFINED in model.kinds,
        "merges": list(piece_merges(model.tokens, model.scores, normal)),
    }
