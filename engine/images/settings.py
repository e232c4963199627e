"""ProcessorSettings: the image processor's settings in a model folder."""

import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.config_reader import Reader
from engine.errors import ConfigError
from engine.images.families.internvl_chat import chat_settings, is_chat
from engine.images.families.mistral import mistral_settings

Encode = Callable[[str], Sequence[int]]

logger = logging.getLogger("manta.engine")

# Newer folders have the image settings inside the first file, others in the second.
PROCESSOR, PREPROCESSOR = "processor_config.json", "preprocessor_config.json"
_OF_CLIPS = "video_preprocessor_config.json"


@dataclass(frozen=True, slots=True)
class ProcessorSettings:
    """The settings of a checkpoint's image processor, and the tokens of its pictures.

    values: preprocessor_config.json, image_processor of processor_config.json, or the settings of a
        publisher's files under the same names.
    config: config.json.
    folder: the model's folder.
    encode: returns the tokens of a text that may have special tokens; None = there is no tokenizer.
    """

    values: Reader
    config: Reader
    folder: Path
    encode: Encode | None = None

    @classmethod
    def read(cls, folder: Path, encode: Encode | None = None) -> "ProcessorSettings | None":
        """Read a folder's files; None if they have no supported image settings.

        Raises ConfigError naming an invalid file.
        """
        values = cls.values_of(folder)
        if values is None:
            return None
        if values.flag("do_pan_and_scan"):
            logger.warning(
                "%s: do_pan_and_scan: crops of pictures are not supported: the model takes text "
                "alone until this is false",
                values.path,
            )
            return None
        return cls(values, Reader.from_file(folder / "config.json"), folder, encode)

    @staticmethod
    def values_of(folder: Path) -> Reader | None:
        """Return a reader of a checkpoint's image processor settings; None without such a file."""
        config = folder / "config.json"
        if config.is_file() and is_chat(reader := Reader.from_file(config)):
            return chat_settings(reader, special_tokens(folder))
        newer = folder / PROCESSOR
        if newer.is_file():
            inner = Reader.from_file(newer).inner("image_processor")
            if inner.values:
                return inner
        older = folder / PREPROCESSOR
        return Reader.from_file(older) if older.is_file() else mistral_settings(folder)

    def of_clips(self) -> Reader:
        """Return a reader of the folder's video settings, which may be empty."""
        newer, older = self.folder / PROCESSOR, self.folder / _OF_CLIPS
        if newer.is_file():
            inner = Reader.from_file(newer).inner("video_processor")
            if inner.values:
                return inner
        return Reader.from_file(older) if older.is_file() else Reader({}, str(older))

    def filter(self, default: int) -> int:
        """Return the resampling filter, as Pillow numbers it."""
        number = self.values.get("resample", default)
        if number not in range(6):
            raise self.values.error("resample", f"{number!r} is no filter of Pillow's")
        return int(number)

    def token(self, *keys: str) -> int:
        """Return a token id from config.json, under the first of several keys that exists.

        If config.json has none of the keys, the first key is looked up in `values`.
        """
        key = next((key for key in keys if self.config.get(key) is not None), keys[0])
        value = self.config.get(key, self.values.get(key))
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise self.config.error(key, f"must be a token id, got {value!r}")
        return value

    def tokens(self, text: str) -> list[int]:
        """Return the tokens of a text, such as those between tiles of a picture.

        Raises ConfigError without a tokenizer.
        """
        if self.encode is None:
            raise ConfigError(
                f"{self.folder}: the tokens of its pictures need a tokenizer", param="tokenizer"
            )
        return list(self.encode(text))

    def text(self, token_id: int, default: str) -> str:
        """Return the text of a special token, as the chat template writes it.

        default: the family's text, used if tokenizer.json does not have the token.
        """
        return special_tokens(self.folder).get(token_id, default)

    def ids(self, *tokens: tuple[str, int]) -> list[int]:
        """Return the ids of special tokens.

        tokens: (text, default id if tokenizer.json does not have the text) pairs.
        """
        ids = {text: token_id for token_id, text in special_tokens(self.folder).items()}
        return [ids.get(text, default) for text, default in tokens]


def special_tokens(folder: Path) -> dict[int, str]:
    """Return {id: text} of a folder's special tokens; {} without a readable file.

    The file is tokenizer.json, or added_tokens.json in a folder without tokenizer.json.
    """
    try:
        file = folder / "tokenizer.json"
        if not file.is_file():
            added: Any = json.loads((folder / "added_tokens.json").read_text(encoding="utf-8"))
            return {int(token_id): str(text) for text, token_id in added.items()}
        tokenizer: Any = json.loads(file.read_text(encoding="utf-8"))
        return {token["id"]: str(token["content"]) for token in tokenizer["added_tokens"]}
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return {}
