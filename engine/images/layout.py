"""ImageLayout: a picture's tokens and size, which depend on its width and height.

ImageError: the error of a picture that a model does not support.
"""

from dataclasses import dataclass
from typing import Any

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


def check_sides(width: int, height: int) -> None:
    """Raise ImageError for a picture without pixels."""
    if width < 1 or height < 1:
        raise ImageError("invalid_image", f"the picture has no pixels: it is {width} x {height}")
