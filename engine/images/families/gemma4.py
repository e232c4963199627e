"""Gemma4Images: the image processor of Gemma 4, which resizes to one area at any aspect ratio."""

import json
import math
from typing import TYPE_CHECKING

from PIL import Image as Pillow

from engine.images.layout import ImageLayout, check_sides
from engine.images.resize import resized
from engine.images.settings import ProcessorSettings

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

# Defaults of transformers' class, for keys that the file lacks.
_PATCH, _POOL, _MOST = 16, 3, 280
_LOW = 70  # maximum embeddings of a picture with detail: low


class Gemma4Images:
    """The image processor of Gemma 4, which enlarges or shrinks all pictures to the same area.

    unit: the side, in pixels, of the square that becomes one embedding.
    most: the maximum number of embeddings, which gives the area.
    """

    def __init__(self, settings: ProcessorSettings) -> None:
        values = settings.values
        self.image_token_id = settings.token("image_token_id")
        self.placeholder = settings.text(self.image_token_id, "<|image|>")
        config = settings.config
        self._around = config.count("boi_token_id", 255999), config.count("eoi_token_id", 258882)
        self.unit = values.size("patch_size", _PATCH) * values.size("pooling_kernel_size", _POOL)
        self.most = values.size("max_soft_tokens", _MOST)
        self.filter = settings.filter(Pillow.Resampling.BICUBIC)
        shown = ["gemma4", self.unit, self.most, self.filter]
        self.settings = json.dumps(shown).encode()

    def layout(self, width: int, height: int, detail: str = "auto") -> ImageLayout:
        """Return the tokens and the size in pixels of a picture, as an ImageLayout."""
        check_sides(width, height)
        most = min(self.most, _LOW) if detail == "low" else self.most
        rows, columns = self._units(height, width, most)
        size = rows * columns
        begin, end = self._around
        token_ids = (begin, *[self.image_token_id] * size, end)
        shape = 1, rows * self.unit, columns * self.unit
        return ImageLayout(token_ids, 1, size, size, (0, 0), shape)

    def _units(self, height: int, width: int, most: int) -> tuple[int, int]:
        """Return the grid (rows, columns) of a picture's embeddings, with at most `most`
        embeddings."""
        factor = math.sqrt(most * self.unit**2 / (height * width))
        rows = math.floor(factor * height / self.unit)
        columns = math.floor(factor * width / self.unit)
        if rows == 0:
            return 1, min(width // height, most)
        if columns == 0:
            return min(height // width, most), 1
        return rows, columns

    def pixels(self, picture: Pillow.Image, layout: ImageLayout) -> "NDArray[np.uint8]":
        """Return the pixels [1, height, width, 3] of an RGB picture."""
        _, height, width = layout.shape
        return resized(picture, (width, height), self.filter)[None]
