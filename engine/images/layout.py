"""ImageLayout: a picture's tokens and size, which depend on its width and height.

ImageError: the error of a picture that a model does not support.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from engine.errors import InvalidRequest

# The values of an image's `detail` in a request; "low" requests few tokens.
DETAILS = ("auto", "low", "high", "original")
# Maximum and default of a clip's frames per second.
MAX_FPS, DEFAULT_FPS = 1000, 2.0


class ImageError(ValueError):
    """The error of a picture that a model does not support; the message is for the client.

    code: a stable machine-readable word.
    """

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


@dataclass(frozen=True, slots=True)
class ImageLayout:
    """The tokens of a picture in a prompt, and the size of its pixels.

    token_ids: the tokens that replace one placeholder of the chat template.
    first: the index in token_ids of the first image token.
    length: number of tokens from the first to the last image token.
    size, grid, shape: see `engine.images.image.Image`.
    before, after: text around the tokens, which is encoded together with the neighbouring text.
    frames: the indices of the clip's frames in this span; (0,) for a still picture.
    time_step: see `engine.images.image.Image`.
    """

    token_ids: tuple[int, ...]
    first: int
    length: int
    size: int
    grid: tuple[int, int]
    shape: tuple[int, int, int]
    before: str = ""
    after: str = ""
    frames: tuple[int, ...] = (0,)
    time_step: float = 0.0


def is_fps(value: Any) -> bool:
    """Whether a value is valid as a clip's frames per second."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value <= MAX_FPS


def too_large(size: int, most: int, *, low: bool = False) -> ImageError:
    """Return the error of an image, or of a span of a clip, that an engine has no room for.

    size: number of its embeddings. most: the maximum that the engine takes.
    low: whether `detail: low` makes the image small enough.
    """
    fewer = "with detail: low, or fewer pixels" if low else "with fewer pixels"
    return ImageError(
        "image_too_large",
        f"an image of {size} tokens is larger than this engine takes ({most} tokens, "
        f"engine.image_cache_tokens): send it {fewer}, or raise the setting",
    )


def check_shown(
    prompt: Sequence[int], token_ids: Sequence[int], images: Iterable[tuple[int, int]]
) -> None:
    """Refuse a prompt that has placeholder tokens without an image or a clip.

    token_ids: the placeholder tokens of images, then of clips.
    images: (index of the first embedding, number of embeddings) of each image or span.
    Raises InvalidRequest.
    """
    images = list(images)
    for kind, token_id in zip(("an image", "a clip"), token_ids, strict=False):
        own = [size for start, size in images if prompt[start] == token_id]
        if (lone := prompt.count(token_id) - sum(own)) > 0:
            noun = kind.partition(" ")[2]
            raise InvalidRequest(
                f"the prompt has {lone} placeholders of {noun}s (token {token_id}) without "
                f"{kind}: send the {noun}, or leave them out",
                param="prompt",
                code="image_not_shown",
            )


def check_sides(width: int, height: int) -> None:
    """Raise ImageError for a picture without pixels."""
    if width < 1 or height < 1:
        raise ImageError("invalid_image", f"the picture has no pixels: it is {width} x {height}")
