"""FakeProcessor, an image processor for tests without a model."""

import numpy as np
import PIL.Image
from numpy.typing import NDArray

from engine.images.layout import ImageError, ImageLayout


class FakeProcessor:
    """An image processor that resizes an image to multiples of 8 pixels, with a token per 8 x 8.

    begin, end: ids of the tokens before and after an image's tokens.
    text: the text before and after an image.
    """

    settings = b"fake"
    text = ""

    def __init__(self, placeholder: str = "<image>", token: int = 7, begin: int = 5, end: int = 6):
        self.placeholder = placeholder
        self.image_token_id = token
        self._around = begin, end

    def layout(self, width: int, height: int, detail: str = "auto") -> ImageLayout:
        if max(width, height) > 50 * min(width, height):
            raise ImageError("invalid_image", "is more than 50 times as long as wide")
        side = 16 if detail == "low" else 512
        rows, columns = grid = (
            max(1, min(height, side) // 8),
            max(1, min(width, side) // 8),
        )
        size = rows * columns
        begin, end = self._around
        ids = (begin, *[self.image_token_id] * size, end)
        shape = 1, rows * 8, columns * 8
        return ImageLayout(ids, 1, size, size, grid, shape, before=self.text, after=self.text)

    def pixels(self, picture: PIL.Image.Image, layout: ImageLayout) -> NDArray[np.uint8]:
        _, height, width = layout.shape
        return np.asarray(picture.resize((width, height), PIL.Image.Resampling.BICUBIC))[None]
