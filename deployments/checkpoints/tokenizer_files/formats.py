"""recognised, write_tokenizer: recognise and convert the tokenizer files of a folder without
tokenizer.json.

No code of the folder is run: its files decide which of our conversions reads them.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deployments.checkpoints.tokenizer_files import merges, ranks, sentencepiece
from deployments.checkpoints.tokenizer_files.converted import Converted
from deployments.checkpoints.tokenizer_files.folder import TokenizerFolder
from deployments.checkpoints.tokenizer_files.templates import KnownTemplate, known_template
from engine.errors import ConfigError

# Files of a tokenizer in any of the formats.
FILES = (
    sentencepiece.FILE,
    ranks.QWEN,
    ranks.KIMI,
    ranks.TEKKEN,
    merges.VOCAB,
    merges.MERGES,
    "added_tokens.json",
    "special_tokens_map.json",
    "tokenizer_config.json",
    "generation_config.json",
)
_WAY_OUT = (
    "on a machine where its own code may run, save its tokenizer with "
    "AutoTokenizer.from_pretrained(...).save_pretrained(...) and put tokenizer.json into the folder"
)


@dataclass(frozen=True, slots=True)
class Format:
    """A format of tokenizer files.

    files: names of the files with the vocabulary.
    classes: names of the Python tokenizer classes whose rules the conversion implements; None: the
        files contain all rules.
    convert: converts the files of a folder.
    family: key of the chat template in `templates._RECORDS`; "": the class of the tokenizer.
    """

    files: tuple[str, ...]
    classes: frozenset[str] | None
    convert: Callable[[TokenizerFolder], Converted]
    family: str = ""


_TEKKEN = Format((ranks.TEKKEN,), None, ranks.convert_tekken, "tekken")
_QWEN = Format((ranks.QWEN,), None, ranks.convert_qwen, "QWenTokenizer")
_KIMI = Format((ranks.KIMI,), None, ranks.convert_kimi)
_GLM = Format(
    (sentencepiece.FILE,), frozenset({"ChatGLM4Tokenizer", "ChatGLMTokenizer"}), ranks.convert_glm
)
_PIECES = Format((sentencepiece.FILE,), sentencepiece.CLASSES, sentencepiece.convert)
_MERGES = Format((merges.VOCAB, merges.MERGES), frozenset(merges.CLASSES), merges.convert)


def recognised(path: Path) -> Format | None:
    """Return the format of a folder's tokenizer files; None: no known format. Takes milliseconds.

    Raises ConfigError (param model) for files with rules in a Python class that is not known.
    """
    folder = TokenizerFolder(path)
    form = _format(folder)
    if form is None or form.classes is None or folder.tokenizer_class in form.classes:
        return form
    name = folder.tokenizer_class or "none"
    known = ", ".join(sorted(filter(None, form.classes)))
    raise ConfigError(
        f"model folder {path} has no tokenizer.json, and {' and '.join(form.files)} of the "
        f"tokenizer class {name} is not converted (known: {known}); {_WAY_OUT}",
        param="model",
    )


def _format(folder: TokenizerFolder) -> Format | None:
    for known in (_TEKKEN, _QWEN, _KIMI):
        if folder.has(*known.files):
            return known
    if folder.has(sentencepiece.FILE):
        with (folder.path / sentencepiece.FILE).open("rb") as file:
            return _GLM if ranks.is_ranks(file.read(1024)) else _PIECES
    return _MERGES if folder.has(*_MERGES.files) else None


def write_tokenizer(path: Path, known: Format, target: Path) -> None:
    """Convert the tokenizer of a model folder, and write its files into the folder `target`.

    The files are tokenizer.json, tokenizer_config.json, generation_config.json with the tokens that
    end an answer, and the known chat template if the model has none. A model's own template does
    not say which tokens end an answer, so in this case the tokens of the known template are used,
    too. Raises ConfigError for damaged files.
    """
    folder = TokenizerFolder(path)
    converted = known.convert(folder)
    settings = {
        **folder.settings,
        **converted.special,
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
    }
    settings.pop("auto_map", None)  # refers to Python code in the folder
    if declared := folder.settings.get("added_tokens_decoder"):
        settings["added_tokens_decoder"] = _as_converted(declared, converted.tokenizer)
    _write(target / "tokenizer.json", converted.tokenizer)
    _write(target / "tokenizer_config.json", settings)
    generation = folder.generation
    own = "chat_template" in settings or folder.has("chat_template.jinja")
    family = known.family or folder.tokenizer_class
    template = known_template(folder, family, converted.tokenizer)
    if template is not None:
        generation = _with_ends(folder, template, converted.tokenizer)
        if not own and not folder.has("chat_template.json"):
            (target / "chat_template.jinja").write_text(template.source, encoding="utf-8")
    _write(target / "generation_config.json", generation)


def _as_converted(
    declared: Mapping[str, Mapping[str, Any]], tokenizer: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the added_tokens_decoder of tokenizer_config.json, with `normalized`, `single_word`
    and `special` from tokenizer.json where it has the token.

    The models' Python classes use `special` only for decoding, and ignore `normalized` and
    `single_word`, so the declared flags may be wrong.
    """
    flags = {
        str(token["id"]): {name: token[name] for name in ("normalized", "single_word", "special")}
        for token in tokenizer["added_tokens"]
    }
    return {index: {**token, **flags.get(index, {})} for index, token in declared.items()}


def _with_ends(
    folder: TokenizerFolder, template: KnownTemplate, tokenizer: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the contents of generation_config.json, with the tokens that end an answer in the chat
    template added to eos_token_id."""
    ids = {token["content"]: token["id"] for token in tokenizer["added_tokens"]}
    ends: list[int] = []
    for settings in (folder.generation, folder.config):
        value = settings.get("eos_token_id")
        ends += value if isinstance(value, list) else [] if value is None else [value]
    ends += [ids[text] for text in template.ends if text in ids]
    return {**folder.generation, **({"eos_token_id": list(dict.fromkeys(ends))} if ends else {})}


def _write(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, ensure_ascii=False), encoding="utf-8")
