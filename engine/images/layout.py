"""ImageLayout, ImageError: what a picture's width and height alone decide."""

from dataclasses import dataclass

# What a request may ask for; "low" asks for few tokens.
DETAILS = ("auto", "low", "high", "original")


class ImageError(ValueError):
    """The error of a picture that a model cannot take; the message is for the sender.

    code: a stable machine-readable word.
    """

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


@dataclass(frozen=True, slots=True)
class ImageLayout:
    """The place of a picture in a prompt, and the size of its pixels.

    token_ids: the tokens that stand in the prompt for one placeholder of the chat template.
    first: the index in token_ids of the first image token.
    length: tokens from the first to the last image token.
    size, grid, shape: as of `engine.images.image.Image`.
    before, after: text around the tokens, which is encoded together with the text beside it.
    """

    token_ids: tuple[int, ...]
    first: int
    length: int
    size: int
    grid: tuple[int, int]
    shape: tuple[int, int, int]
    before: str = ""
    after: str = ""


def check_sides(width: int, height: int) -> None:
    """Raise ImageError for a picture without pixels."""
    if width < 1 or height < 1:
        raise ImageError("invalid_image", f"the picture has no pixels: it is {width} x {height}")
