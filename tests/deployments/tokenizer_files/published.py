"""Folders of models as they are published, without tokenizer.json and weights, and the library that
each model names for its tokenizer.

Real vocabularies: Qwen 1's, Mistral's, tekken and GPT-2's are the files themselves. SentencePiece
models of Llama 2, ChatGLM 3, Baichuan 2 and InternLM 2 are written from the vocabularies and merges
of their published conversions, so their normalizers are the tests' own. No package ships the ranks
of GLM-4 and Kimi: Llama 3's take their place, with the patterns and special tokens of these models.
BLOOM is only published as tokenizer.json: GPT-2's vocabulary takes its place.
"""

import base64
import json
import re
import shutil
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from deployments.checkpoints.tokenizer_files.formats import recognised, write_tokenizer
from engine.text.text_stream import BYTE_OF_CHAR
from engine.text.tokenizer import Tokenizer
from tests.published_tokenizers import folder as conversion
from tests.published_vocabularies import gpt2, vocabulary

ONE_DIGIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
KIMI = "|".join(
    [
        r"""[\p{Han}]+""",
        r"""[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*"""
        r"""[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?""",
        r"""[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+"""
        r"""[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?""",
        r"""\p{N}{1,3}""",
        r""" ?[^\s\p{L}\p{N}]+[\r\n]*""",
        r"""\s*[\r\n]+""",
        r"""\s+(?!\S)""",
        r"""\s+""",
    ]
)
GPT2 = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
BLOOM = r" ?[^(\s|[.,!?…。，、।۔،])]+"


@dataclass(frozen=True)
class Library:
    """The tokenizer library that a model names: its ids of texts, and its text of ids.

    special: texts of special tokens that it reads as such, and their ids.
    before: ids that begin each text of its own accord.
    size: ids below this are of the vocabulary file.
    nfc: whether it normalises a text before it looks for special tokens.
    without: a character that it reads in another way than when the model was made.
    """

    encode: Callable[[str], list[int]]
    decode: Callable[[Sequence[int]], str]
    special: Mapping[str, int]
    size: int
    first: int = 0
    before: tuple[int, ...] = ()
    nfc: bool = False
    without: str = ""


Published = Callable[[Path], Library]


def _lay(folder: Path, files: Mapping[str, Path | str], **settings: Any) -> None:
    """Write a folder: vocabulary files by name, and JSON files by their names without .json."""
    for name, file in files.items():
        shutil.copy(file, folder / name)
    for name, value in settings.items():
        (folder / f"{name}.json").write_text(json.dumps(value))


# -- tiktoken


def ranks_of(file: Path) -> dict[bytes, int]:
    lines = (line.split() for line in file.read_bytes().splitlines() if line)
    return {base64.b64decode(token): int(rank) for token, rank in lines}


def _tiktoken(
    pattern: str,
    ranks: dict[bytes, int],
    special: dict[str, int],
    before: tuple[int, ...] = (),
    *,
    nfc: bool = False,
) -> Library:
    tiktoken = pytest.importorskip("tiktoken")
    encoding = tiktoken.Encoding(
        "published", pat_str=pattern, mergeable_ranks=ranks, special_tokens=special
    )

    def encode(text: str) -> list[int]:
        text = unicodedata.normalize("NFC", text) if nfc else text
        ids: list[int] = encoding.encode(text, allowed_special="all")
        return ids

    return Library(encode, encoding.decode, special, len(ranks), 0, before, nfc)


def qwen(folder: Path) -> Library:
    file = vocabulary("qwen.tiktoken")
    _lay(
        folder,
        {"qwen.tiktoken": file},
        tokenizer_config={
            "model_max_length": 8192,
            "tokenizer_class": "QWenTokenizer",
            "auto_map": {"AutoTokenizer": ["tokenization_qwen.QWenTokenizer", None]},
        },
        generation_config={"chat_format": "chatml", "eos_token_id": 151643, "top_p": 0.8},
    )
    names = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *(f"<|extra_{n}|>" for n in range(205))]
    special = {name: 151643 + place for place, name in enumerate(names)}
    return _tiktoken(ONE_DIGIT, ranks_of(file), special, nfc=True)


def glm4(folder: Path) -> Library:
    file = vocabulary("llama3.tiktoken")
    ranks = ranks_of(file)
    names = ["<|endoftext|>", "[MASK]", "[gMASK]", "[sMASK]", "<sop>", "<eop>", "<|system|>"]
    special = {name: len(ranks) + place for place, name in enumerate([*names, "<|user|>"])}
    added = {str(index): {"content": name, "special": True} for name, index in special.items()}
    _lay(
        folder,
        {"tokenizer.model": file},
        tokenizer_config={
            "tokenizer_class": "ChatGLM4Tokenizer",
            "added_tokens_decoder": added,
            "eos_token": "<|endoftext|>",
            "chat_template": "[gMASK]<sop>{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}"
            "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}",
        },
    )
    before = (special["[gMASK]"], special["<sop>"])
    pattern = ONE_DIGIT.replace(r"\p{N}|", r"\p{N}{1,3}|")
    return _tiktoken(pattern, ranks, special, before)


def kimi(folder: Path) -> Library:
    file = vocabulary("llama3.tiktoken")
    ranks = ranks_of(file)
    special = {"[BOS]": 128000, "[EOS]": 128001, "<|im_end|>": 128010, "[PAD]": 128255}
    added = {str(index): {"content": name, "special": True} for name, index in special.items()}
    _lay(
        folder,
        {"tiktoken.model": file},
        tokenizer_config={
            "tokenizer_class": "TikTokenTokenizer",
            "added_tokens_decoder": added,
            "bos_token": "[BOS]",
            "eos_token": "[EOS]",
        },
    )
    return _tiktoken(KIMI, ranks, special | {"<|reserved_token_128002|>": 128002})


def tekken(folder: Path) -> Library:
    tiktoken = pytest.importorskip("tiktoken")
    file = vocabulary("tekken.json")
    _lay(folder, {"tekken.json": file})
    content = json.loads(file.read_bytes())
    count = content["config"]["default_num_special_tokens"]
    entries = content["vocab"][: content["config"]["default_vocab_size"] - count]
    encoding = tiktoken.Encoding(
        "tekken",
        pat_str=content["config"]["pattern"],
        mergeable_ranks={base64.b64decode(e["token_bytes"]): e["rank"] for e in entries},
        special_tokens={},
    )
    return Library(
        lambda text: [index + count for index in encoding.encode(text)],
        lambda ids: encoding.decode([index - count for index in ids]),
        {},
        count + len(entries),
        count,
        (1,),
    )


# -- SentencePiece


def _sentencepiece(
    folder: Path,
    tokenizer: str,
    special: dict[str, int],
    before: tuple[int, ...] = (),
    without: str = "",
    added: Mapping[str, int] | None = None,
    **settings: Any,
) -> Library:
    """Return the library with the text between special tokens, as the models' classes call it.

    added: tokens that the folder's tokenizer_config.json adds.
    """
    sentencepiece = pytest.importorskip("sentencepiece")
    config: dict[str, Any] = {"tokenizer_class": tokenizer, **settings.pop("config", {})}
    if added:
        config["added_tokens_decoder"] = {
            str(index): {"content": name, "special": True} for name, index in added.items()
        }
    _lay(folder, {}, tokenizer_config=config, **settings)
    processor = sentencepiece.SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))
    cut = re.compile("(" + "|".join(map(re.escape, special)) + ")")

    def encode(text: str) -> list[int]:
        ids: list[int] = []
        for part in cut.split(text):
            ids += [special[part]] if part in special else processor.encode(part)
        return ids

    def decode(ids: Sequence[int]) -> str:
        text: str = processor.decode(list(ids))
        return text

    return Library(encode, decode, special, processor.vocab_size(), 3, before, without=without)


def rebuilt(
    name: str, target: Path, *, prefix: bool, own: Callable[[str], bool] = lambda text: False
) -> None:
    """Write a SentencePiece model with the vocabulary of a published conversion.

    own: which pieces are the user's own.
    """
    model = json.loads((conversion(name) / "tokenizer.json").read_bytes())["model"]
    order: dict[str, int] = {}
    for merge in model["merges"]:
        left, right = merge.split(" ", 1) if isinstance(merge, str) else merge
        order.setdefault(left + right, len(order))
    model_pb2 = pytest.importorskip("sentencepiece.sentencepiece_model_pb2")
    proto = model_pb2.ModelProto()
    for text, index in sorted(model["vocab"].items(), key=lambda item: item[1]):
        score = -float(order.get(text, len(order) + index))
        kind = 1
        if index < 3:
            kind = 2 if index == 0 else 3
        elif re.fullmatch("<0x[0-9A-F]{2}>", text):
            kind = 6
        elif own(text):
            kind = 4
        proto.pieces.add(piece=text, type=kind, score=score if kind == 1 else 0.0)
    trainer, normalizer = proto.trainer_spec, proto.normalizer_spec
    trainer.model_type, trainer.byte_fallback = 2, True
    trainer.unk_id, trainer.bos_id, trainer.eos_id, trainer.pad_id = 0, 1, 2, -1
    normalizer.name, normalizer.add_dummy_prefix = "identity", prefix
    normalizer.remove_extra_whitespaces, normalizer.escape_whitespaces = False, True
    target.write_bytes(proto.SerializeToString())


def llama(folder: Path) -> Library:
    shutil.copy(vocabulary("mistral-v1.model"), folder / "tokenizer.model")
    return _sentencepiece(folder, "LlamaTokenizer", {"<s>": 1, "</s>": 2}, (1,))


def mistral_v7(folder: Path) -> Library:
    shutil.copy(vocabulary("mistral-v7.model"), folder / "tokenizer.model")
    return _sentencepiece(folder, "LlamaTokenizer", {"</s>": 2, "[INST]": 3}, (1,))


def llama2(folder: Path) -> Library:
    rebuilt("llama2", folder / "tokenizer.model", prefix=True)
    return _sentencepiece(folder, "LlamaTokenizer", {"<s>": 1, "</s>": 2}, (1,))


def chatglm3(folder: Path) -> Library:
    rebuilt("chatglm3", folder / "tokenizer.model", prefix=True)
    names = [
        "[MASK]",
        "[gMASK]",
        "[sMASK]",
        "sop",
        "eop",
        "<|system|>",
        "<|user|>",
        "<|assistant|>",
    ]
    special = {name: 64789 + place for place, name in enumerate(names)}
    before = (special.pop("[gMASK]"), special.pop("sop"))
    del special["eop"]  # read as a word of its own only
    config = {"name_or_path": "THUDM/chatglm3-6b", "auto_map": {"AutoTokenizer": ["x.X", None]}}
    return _sentencepiece(folder, "ChatGLMTokenizer", special, before, config=config)


def chatglm3_later(folder: Path) -> Library:
    """The settings that its publisher added later: a template, and roles as ordinary tokens."""
    library = chatglm3(folder)
    shutil.copy(conversion("chatglm3") / "tokenizer_config.json", folder)
    return library


def chatglm2(folder: Path) -> Library:
    rebuilt("chatglm3", folder / "tokenizer.model", prefix=True)
    config = {"name_or_path": "THUDM/chatglm2-6b"}
    special = {"[MASK]": 64789}
    return _sentencepiece(folder, "ChatGLMTokenizer", special, (64790, 64792), config=config)


def baichuan2(folder: Path) -> Library:
    rebuilt(
        "baichuan2",
        folder / "tokenizer.model",
        prefix=False,
        own=lambda text: text.startswith("<reserved_"),
    )
    special = {"</s>": 2, "<reserved_106>": 195, "<reserved_107>": 196}
    return _sentencepiece(
        folder,
        "BaichuanTokenizer",
        special,
        config={"add_bos_token": False, "add_eos_token": False},
        generation_config={"user_token_id": 195, "assistant_token_id": 196, "eos_token_id": 2},
    )


def baichuan1(folder: Path) -> Library:
    """Write a folder of Baichuan 1, with pieces of the user's own and a space before each text."""
    rebuilt(
        "baichuan2",
        folder / "tokenizer.model",
        prefix=True,
        own=lambda text: text.startswith("<reserved_"),
    )
    config = {"add_bos_token": False}
    return _sentencepiece(folder, "BaichuanTokenizer", {"</s>": 2}, config=config)


def internlm(folder: Path) -> Library:
    """Write a folder of InternLM 1, whose ends of turns are pieces; return its library."""
    rebuilt("internlm2", folder / "tokenizer.model", prefix=False)
    added = {"<eoh>": 92540, "<eoa>": 92541}
    special = {"<s>": 1, **added}
    return _sentencepiece(folder, "InternLMTokenizer", special, (1,), "\0", added)


def internlm2(folder: Path) -> Library:
    rebuilt(
        "internlm2",
        folder / "tokenizer.model",
        prefix=False,
        own=lambda text: text.startswith("[UNUSED_TOKEN_"),
    )
    added = {"<|im_start|>": 92543, "<|im_end|>": 92542}
    special = {"</s>": 2, **added}
    return _sentencepiece(folder, "InternLM2Tokenizer", special, (1,), "\0", added)


# -- vocab.json and merges.txt


def _byte_ranks(vocab: Mapping[str, int]) -> dict[bytes, int]:
    order = sorted(vocab, key=vocab.__getitem__)
    tokens = [bytes(BYTE_OF_CHAR[char] for char in text) for text in order]
    return {token: rank for rank, token in enumerate(tokens)}


def gpt2_folder(folder: Path) -> Library:
    vocab, merges = gpt2()
    _lay(
        folder,
        {"vocab.json": vocab, "merges.txt": merges},
        tokenizer_config={"tokenizer_class": "GPT2Tokenizer", "model_max_length": 1024},
    )
    entries = json.loads(vocab.read_bytes())
    special = {"<|endoftext|>": entries.pop("<|endoftext|>")}
    return _tiktoken(GPT2, _byte_ranks(entries), special)


def opt(folder: Path) -> Library:
    """Write a folder of OPT, whose vocabulary has four special tokens of fairseq before GPT-2's."""
    transformers = pytest.importorskip("transformers")
    vocab, merges = gpt2()
    entries = json.loads(vocab.read_bytes())
    del entries["<|endoftext|>"]
    special = {"<s>": 0, "<pad>": 1, "</s>": 2, "<unk>": 3}
    numbered = {**special, **{text: index + 4 for text, index in entries.items()}}

    def token(text: str) -> dict[str, Any]:
        return {"__type": "AddedToken", "content": text, "normalized": True, "lstrip": False}

    _lay(
        folder,
        {"merges.txt": merges},
        vocab=numbered,
        config={"model_type": "opt"},
        tokenizer_config={
            "bos_token": token("</s>"),
            "eos_token": token("</s>"),
            "unk_token": token("</s>"),
            "pad_token": token("<pad>"),
            "add_bos_token": True,
            "add_prefix_space": False,
            "tokenizer_class": "GPT2Tokenizer",
        },
    )
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    return Library(
        lambda text: theirs.encode(text, add_special_tokens=False),
        lambda ids: theirs.decode(list(ids), clean_up_tokenization_spaces=False),
        {"</s>": 2, "<pad>": 1},
        len(numbered),
        4,
        (2,),
    )


def bloom(folder: Path) -> Library:
    vocab, merges = gpt2()
    entries = json.loads(vocab.read_bytes())
    del entries["<|endoftext|>"]
    special = {"<unk>": 50256, "<s>": 50257, "</s>": 50258}
    names = {f"{name}_token": f"<{text}>" for name, text in (("bos", "s"), ("eos", "/s"))}
    _lay(
        folder,
        {"merges.txt": merges},
        vocab={**entries, **special},
        tokenizer_config={
            "tokenizer_class": "BloomTokenizerFast",
            **names,
            "unk_token": "<unk>",
        },
    )
    return _tiktoken(
        BLOOM + rf"|(?:(?!{BLOOM})[\s\S])+", _byte_ranks(entries), {"<s>": 50257, "</s>": 50258}
    )


@cache
def _qwen2_files() -> tuple[dict[str, int], list[str], dict[str, Any]]:
    source = conversion("qwen2_5")
    model = json.loads((source / "tokenizer.json").read_bytes())["model"]
    merges = [m if isinstance(m, str) else " ".join(m) for m in model["merges"]]
    settings = json.loads((source / "tokenizer_config.json").read_bytes())
    return model["vocab"], merges, settings


def qwen2(folder: Path) -> Library:
    vocab, merges, settings = _qwen2_files()
    _lay(folder, {}, vocab=vocab, tokenizer_config=settings)
    (folder / "merges.txt").write_text("#version: 0.2\n" + "\n".join(merges) + "\n")
    special = {"<|im_start|>": 151644, "<|im_end|>": 151645, "<tool_call>": 151657}
    return _tiktoken(ONE_DIGIT, _byte_ranks(vocab), special, nfc=True)


QUICK: dict[str, Published] = {
    "chatglm 3": chatglm3,
    "llama": llama,
    "opt": opt,
    "qwen 1": qwen,
}
MORE: dict[str, Published] = {
    "baichuan 1": baichuan1,
    "baichuan 2": baichuan2,
    "bloom": bloom,
    "chatglm 3, later": chatglm3_later,
    "chatglm 2": chatglm2,
    "glm 4": glm4,
    "gpt-2": gpt2_folder,
    "internlm 1": internlm,
    "internlm 2": internlm2,
    "kimi": kimi,
    "llama 2": llama2,
    "mistral v7": mistral_v7,
    "qwen 2": qwen2,
    "tekken": tekken,
}


def converted(folder: Path, target: Path) -> Tokenizer:
    """Convert the tokenizer of a published folder into the folder `target`, and return it."""
    form = recognised(folder)
    assert form is not None
    write_tokenizer(folder, form, target)
    return Tokenizer.load(target)
