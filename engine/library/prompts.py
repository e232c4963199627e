"""Prompts: encodes text, token ids or chat messages into checked token ids of a model."""

import logging
import operator
import os
import re
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from engine.config.engine_config import EngineConfig
from engine.errors import InvalidRequest, context_too_long
from engine.images.expand import Place, expand_placeholders, surround
from engine.images.image import Image
from engine.images.layout import ImageError, check_shown
from engine.images.processor import (
    ImageProcessor,
    PixelCache,
    check_layouts,
    clip_layouts,
    image_processor,
    prepare,
)
from engine.images.threads import share_out
from engine.library.pictures import Clip, Visual, read_clips, read_messages, read_pictures
from engine.messages import Ready
from engine.process.fake import PREFIX as FAKE
from engine.text.tokenizer import Tokenizer

logger = logging.getLogger("manta.engine")

T = TypeVar("T")
R = TypeVar("R")
Messages = Sequence[Mapping[str, Any]]
# A text, token ids (or an array of NumPy, torch or any DLPack library), or {"prompt": a text with
# the model's placeholder for each image and clip, "images": [a PIL image, a file's bytes, its path,
# or a data: URL], "videos": [a list of such frames, or {"video": frames, "fps": frames a second}]}.
Prompt = str | Sequence[int] | Mapping[str, Any]

_MOST_THREADS = 8  # maximum number of threads that process the images of a batch of prompts


@dataclass(slots=True)
class EncodedPrompt:
    """The checked token ids of a prompt, and its images.

    images: a function that resizes and hashes the images, and returns them; it takes milliseconds
        for each. `list` = no images.
    verbatim: as in `EngineRequest`.
    """

    ids: list[int]
    images: Callable[[], list[Image]] = list
    verbatim: bool = False


def images_ahead(prompts: Sequence[EncodedPrompt]) -> Iterator[EncodedPrompt]:
    """Yield the prompts in order, while threads process the images of the next few prompts."""
    if all(prompt.images is list for prompt in prompts):
        yield from prompts
        return
    threads = min(_MOST_THREADS, os.cpu_count() or 1)
    ahead: deque[EncodedPrompt] = deque()
    with ThreadPoolExecutor(threads, "images") as pool:
        for prompt in prompts:
            images = pool.submit(prompt.images).result
            ahead.append(EncodedPrompt(prompt.ids, images, prompt.verbatim))
            if len(ahead) > 2 * threads:
                yield ahead.popleft()
        yield from ahead


def load_tokenizer(config: EngineConfig, given: Tokenizer | str | Path | None) -> Tokenizer | None:
    """Return a given Tokenizer, or load one from a given folder or the model's folder.

    Returns None for a folder without a tokenizer, and for a fake engine. Prompts must then be token
    ids, and answers have no text.
    """
    if isinstance(given, Tokenizer):
        return given
    if given is not None:
        return Tokenizer.load(given, generation_config=config.generation_config)
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
    return Tokenizer.load(folder, generation_config=config.generation_config)


class Prompts:
    """An encoder of prompts into checked token ids.

    Every method raises InvalidRequest if a prompt is empty, too long or invalid for the model.

    tokenizer: the model's tokenizer; None allows only prompts of token ids.
    model: the model's folder, whose files decide whether the model takes images.
    images: see `EngineConfig`.
    """

    def __init__(
        self, tokenizer: Tokenizer | None, ready: Ready, model: str, images: str = "auto"
    ) -> None:
        self._tokenizer = tokenizer
        self._ready = ready
        self._model = model
        self._off = images == "off"
        self._cache = PixelCache()

    @cached_property
    def _images(self) -> ImageProcessor | None:
        folder = Path(self._model)
        if not (folder / "config.json").is_file():
            return None
        return image_processor(folder, self._text().encode)

    def encode(self, prompt: Prompt | Messages) -> EncodedPrompt:
        if isinstance(prompt, Mapping):
            return self._with_images(prompt)
        tokens: Any = as_list(prompt)
        if isinstance(tokens, str):
            return self._of_text(self._text().encode(tokens, add_special_tokens=True))
        if len(tokens) and isinstance(tokens[0], Mapping):
            return self.encode_chat(tokens)
        ids = [token if type(token) is int else _token_id(token) for token in tokens]
        return EncodedPrompt(self._checked(ids), verbatim=True)

    def _of_text(self, ids: list[int]) -> EncodedPrompt:
        """Check the tokens of a text without images."""
        self._checked(ids)
        check_shown(ids, self._ready.image_token_ids, ())
        return EncodedPrompt(ids)

    def encode_chat(
        self, chat: Messages, options: Mapping[str, Any] | None = None
    ) -> EncodedPrompt:
        """Encode a chat, which may have image and video parts.

        Image parts are {"type": "image", "image": ...} or image_url, with an optional detail. Video
        parts are {"type": "video", "video": [frames]} or video_url, with an optional fps.

        options: arguments of `Tokenizer.encode_chat`.
        """
        written, pictures = read_messages(chat)

        def encode(edit: Callable[[str], str] | None) -> list[int]:
            return self._text().encode_chat(written, edit=edit, **(options or {}))

        return self._with_pictures(encode, pictures, "messages")

    def _with_images(self, prompt: Mapping[str, Any]) -> EncodedPrompt:
        text = prompt.get("prompt")
        if not isinstance(text, str) or prompt.keys() - {"prompt", "images", "videos"}:
            raise InvalidRequest(
                "a prompt with images has a text as prompt, and images or videos", param="prompt"
            )
        pictures = read_pictures(prompt.get("images", ())) + read_clips(prompt.get("videos", ()))

        def encode(edit: Callable[[str], str] | None) -> list[int]:
            written = text if edit is None else edit(text)
            return self._text().encode(written, add_special_tokens=True)

        return self._with_pictures(encode, pictures, "prompt", text)

    def _with_pictures(
        self,
        encode: Callable[[Callable[[str], str] | None], list[int]],
        pictures: list[Visual],
        param: str,
        text: str | None = None,
    ) -> EncodedPrompt:
        """Encode a prompt with its placeholders expanded to the images' tokens.

        encode: returns the tokens of the prompt's text, after applying a given function to the
            text.
        text: the prompt's text, whose placeholders decide the order of pictures and clips; None =
            `pictures` is in the order of the template's placeholders.
        """
        if not pictures:
            return self._of_text(encode(None))
        if self._off:
            raise InvalidRequest(
                'this engine takes no images, for it was started with images="off"',
                param="images",
                code="modality_not_supported",
            )
        processor = self._images if self._ready.image_token_ids else None
        if processor is None:
            raise InvalidRequest(
                "this model takes text only", param=param, code="modality_not_supported"
            )
        most = self._ready.image_tokens
        placed = [(picture, _place(processor, picture, most)) for picture in pictures]
        if text is not None:
            placed = _in_order(text, placed)
        places = [place for _, place in placed]
        ids = encode(lambda written: surround(written, places))
        ids, starts = expand_placeholders(ids, self._text().token_id, places, len(places))
        self._checked(ids)  # checked before any work on pixels
        layouts = [(picture, layout) for picture, place in placed for layout in place.layouts]
        spans = [
            (start + layout.first, layout.size)
            for start, (_, layout) in zip(starts, layouts, strict=True)
        ]
        check_shown(ids, self._ready.image_token_ids, spans)

        def images() -> list[Image]:
            def prepared(index: int) -> Image:
                picture, layout = layouts[index]
                pixels = picture.images if isinstance(picture, Clip) else picture.image
                return prepare(processor, pixels, layout, starts[index], self._cache)

            return share_out(prepared, range(len(layouts)))

        return EncodedPrompt(ids, images)

    def encode_all(self, prompts: Sequence[Prompt]) -> list[EncodedPrompt]:
        """Encode many prompts, using all cores. An error names the prompt, e.g. ``prompts[3]``."""
        texts = [prompt for prompt in prompts if isinstance(prompt, str)]
        if len(texts) == len(prompts) > 1:
            encoded = self._text().encode_batch(texts, add_special_tokens=True)
            return _each("prompts", encoded, self._of_text)
        return _each("prompts", prompts, self.encode)

    def encode_chats(
        self, chats: Sequence[Messages], options: Mapping[str, Any]
    ) -> list[EncodedPrompt]:
        """Encode many chats; options as for `encode_chat`."""
        return _each("messages", chats, lambda chat: self.encode_chat(chat, options))

    def encode_pooled(
        self, texts: Sequence[Prompt], before: str, limit: int, *, truncate: bool
    ) -> list[list[int]]:
        """Encode texts for embedding requests.

        before: a prefix for each text.
        limit: the maximum number of tokens of one text.
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
        """Check the token ids of a prompt, and return them.

        limit: the prompt must have fewer tokens than this; None = the context length.
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
    """Whether the value is a single integer, not an array of one integer, which is a prompt."""
    return isinstance(value, int) or (
        hasattr(value, "__index__") and getattr(value, "ndim", 0) == 0
    )


def _each(name: str, items: Sequence[T], encode: Callable[[T], R]) -> list[R]:
    done: list[R] = []
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


def _place(processor: ImageProcessor, picture: Visual, most: int) -> Place:
    """Return the placeholder tokens of a picture or clip in a prompt. Raises InvalidRequest.

    most: the maximum number of embeddings of an image; 0 = unknown.
    """
    sides = None
    try:
        if isinstance(picture, Clip):
            sizes = [image.size for image in picture.images]
            layouts = clip_layouts(processor, sizes, picture.fps)
        else:
            layouts = [processor.layout(*picture.image.size, picture.detail)]
            sides = picture.image.size if picture.has_detail else None
        check_layouts(processor, layouts, most, sides)
    except ImageError as error:
        message = f"{picture.place}: {error.message}"
        raise InvalidRequest(message, param=picture.place, code=error.code) from None
    return Place.of(processor, layouts, clip=isinstance(picture, Clip))


def _in_order(text: str, placed: list[tuple[Visual, Place]]) -> list[tuple[Visual, Place]]:
    """Return the pictures and clips of a text in the order of their placeholders.

    Raises InvalidRequest if the numbers of placeholders and of pictures or clips differ.
    """
    ordered: list[tuple[int, tuple[Visual, Place]]] = []
    for placeholder in dict.fromkeys(place.placeholder for _, place in placed):
        own = [pair for pair in placed if pair[1].placeholder == placeholder]
        starts = [match.start() for match in re.finditer(re.escape(placeholder), text)]
        if len(starts) != len(own):
            kind = "clip" if isinstance(own[0][0], Clip) else "image"
            raise InvalidRequest(
                f"the prompt has {len(starts)} placeholders {placeholder} for {len(own)} {kind}s; "
                f"write one where each {kind} stands",
                param="prompt",
                code="image_not_shown",
            )
        ordered += zip(starts, own, strict=True)
    return [pair for _, pair in sorted(ordered, key=operator.itemgetter(0))]
