"""Prompts: encodes text, token ids or chat messages into checked token ids of a model."""

import logging
import operator
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from engine.config.engine_config import EngineConfig
from engine.errors import InvalidRequest, context_too_long
from engine.messages import Ready
from engine.process.fake import PREFIX as FAKE
from engine.text.tokenizer import Tokenizer

logger = logging.getLogger("manta.engine")

T = TypeVar("T")
Messages = Sequence[Mapping[str, Any]]
Prompt = str | Sequence[int]  # or an array of NumPy, torch or any DLPack library


def load_tokenizer(config: EngineConfig, given: Tokenizer | str | Path | None) -> Tokenizer | None:
    """Return the given tokenizer, or that of the model folder.

    Returns None for a folder without a tokenizer, and for a fake engine. Prompts must then be token
    ids, and answers have no text.
    """
    if isinstance(given, Tokenizer):
        return given
    recommended = config.generation_config == "auto"
    if given is not None:
        return Tokenizer.load(given, recommended=recommended)
    folder = Path(config.model)
    if config.model.startswith(FAKE):
        return None
    dummy = config.load_format == "dummy"
    if not (folder / "tokenizer.json").is_file() and (dummy or folder.is_dir()):
        if not dummy:
            logger.warning(
                "%s has no tokenizer.json: prompts have to be token ids, and answers have no text. "
                "Give tokenizer=, or save the model with a fast tokenizer",
                folder,
            )
        return None
    return Tokenizer.load(folder, recommended=recommended)


class Prompts:
    """An encoder of prompts into checked token ids.

    Every method raises InvalidRequest if a prompt is empty, too long or not of this model.

    tokenizer: None allows only prompts of token ids.
    """

    def __init__(self, tokenizer: Tokenizer | None, ready: Ready) -> None:
        self._tokenizer = tokenizer
        self._ready = ready

    def encode(self, prompt: Prompt | Messages) -> list[int]:
        prompt = as_list(prompt)
        if isinstance(prompt, str):
            return self._checked(self._text().encode(prompt, add_special_tokens=True))
        if len(prompt) and isinstance(prompt[0], Mapping):
            return self._checked(self._text().encode_chat(prompt))  # type: ignore[arg-type]
        return self._checked(
            [token if type(token) is int else _token_id(token) for token in prompt]
        )

    def encode_all(self, prompts: Sequence[Prompt]) -> list[list[int]]:
        """Encode many prompts, texts on all cores. An error names the prompt, e.g.
        ``prompts[3]``."""
        texts = [prompt for prompt in prompts if isinstance(prompt, str)]
        every: Sequence[Prompt] = prompts
        if len(texts) == len(prompts) > 1:
            every = self._text().encode_batch(texts, add_special_tokens=True)
        return _each("prompts", every, self.encode)

    def encode_chats(
        self, chats: Sequence[Messages], options: Mapping[str, Any]
    ) -> list[list[int]]:
        """Encode many chats.

        options: arguments of `Tokenizer.encode_chat`.
        """

        def encode(chat: Messages) -> list[int]:
            return self._checked(self._text().encode_chat(chat, **options))

        return _each("messages", chats, encode)

    def encode_pooled(
        self, texts: Sequence[Prompt], before: str, limit: int, *, truncate: bool
    ) -> list[list[int]]:
        """Encode texts that will be embedded.

        before: the text that is put before each text.
        limit: the most tokens of one text.
        truncate: whether longer texts are cut.
        """

        def encode(text: Prompt) -> list[int]:
            text = as_list(text)
            if not isinstance(text, str):
                if before:
                    raise InvalidRequest(
                        "a prompt by name goes before texts, not token ids", param="prompt_name"
                    )
                ids = [token if type(token) is int else _token_id(token) for token in text]
                return self._checked(ids[:limit] if truncate else ids, limit + 1)
            most = limit if truncate else None
            ids = self._text().encode(before + text, add_special_tokens=True, max_tokens=most)
            return self._checked(ids, limit + 1)

        return _each("texts", texts, encode)

    def _text(self) -> Tokenizer:
        if self._tokenizer is None:
            raise InvalidRequest(
                "this engine has no tokenizer; give prompts as token ids, or tokenizer= to it",
                param="prompt",
            )
        return self._tokenizer

    def _checked(self, ids: list[int], limit: int | None = None) -> list[int]:
        """Return the ids of a prompt after checking them.

        limit: the prompt must have fewer tokens than this; None = the context.
        """
        if not ids:
            raise InvalidRequest("the prompt is empty", param="prompt")
        vocab_size = self._ready.vocab_size
        if len(ids) >= (limit or self._ready.max_model_len):
            raise context_too_long(limit - 1 if limit else self._ready.max_model_len, len(ids))
        for token in ids:
            if not 0 <= token < vocab_size:
                raise InvalidRequest(
                    f"token id {token} is outside the vocabulary (0..{vocab_size - 1})",
                    param="prompt",
                    code="token_out_of_range",
                )
        return ids


def as_list(prompt: Any) -> Any:
    """Convert arrays of NumPy, torch and other DLPack libraries to lists; return others unchanged.

    Raises InvalidRequest for a single number.
    """
    if isinstance(prompt, (str, list, tuple)):
        return prompt
    if hasattr(prompt, "tolist"):
        prompt = prompt.tolist()
    elif hasattr(prompt, "__dlpack__"):
        import numpy

        prompt = numpy.from_dlpack(prompt).tolist()
    if not hasattr(prompt, "__len__"):
        kind = type(prompt).__name__
        raise InvalidRequest(
            f"a prompt is a text or a list of token ids, and {kind} is neither", param="prompt"
        )
    return prompt


def is_token_id(value: object) -> bool:
    """Whether the value is one integer. An array of one integer is a prompt instead."""
    return isinstance(value, int) or (
        hasattr(value, "__index__") and getattr(value, "ndim", 0) == 0
    )


def _each(name: str, items: Sequence[T], encode: Callable[[T], list[int]]) -> list[list[int]]:
    done: list[list[int]] = []
    for i, item in enumerate(items):
        try:
            done.append(encode(item))
        except InvalidRequest as error:
            if len(items) == 1:
                raise
            path = f"{name}[{i}]"
            message = f"{path}: {error.message}"
            raise InvalidRequest(message, param=path, code=error.code) from None
    return done


def _token_id(token: object) -> int:
    """Return a token id as an int, also from NumPy or torch. Raises InvalidRequest."""
    try:
        return operator.index(token)  # type: ignore[arg-type]
    except TypeError:
        kind = type(token).__name__
        raise InvalidRequest(
            f"a prompt is a text or a list of token ids, and {kind} is no token id", param="prompt"
        ) from None
