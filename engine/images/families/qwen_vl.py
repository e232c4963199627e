"""Pictures of Qwen2-VL, Qwen2.5-VL, Qwen3-VL, Qwen3.5 and Qwen3.6: one view of any shape."""

import json
import math
from typing import TYPE_CHECKING

from PIL import Image as Pillow

from engine.images.layout import ImageError, ImageLayout, check_sides
from engine.images.resize import resized
from engine.images.settings import ProcessorSettings

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

# What transformers' class has where the file is silent.
_PATCH, _MERGE, _LEAST, _MOST = 14, 2, 56 * 56, 28 * 28 * 1280
_ASPECT = 200
_LOW = 512  # embeddings of a picture with detail: low


class QwenImages:
    """The pictures of a folder whose model resizes them to whole blocks of merged patches.

    unit: pixels on the side of one embedding.
    least, most: the area in pixels.
    """

    name, text = "qwen_vl", "<|image_pad|>"
    limits = _LEAST, _MOST  # what transformers' class has where the file is silent

    def __init__(self, settings: ProcessorSettings) -> None:
        values = settings.values
        self.image_token_id = settings.token("image_token_id")
        self.placeholder = settings.text(self.image_token_id, self.text)
        self.unit = values.size("patch_size", _PATCH) * values.size("merge_size", _MERGE)
        size, (least, most) = values.inner("size"), self.limits
        self.least = values.size("min_pixels", size.size("shortest_edge", least))
        self.most = values.size("max_pixels", size.size("longest_edge", most))
        self.filter = settings.filter(Pillow.Resampling.BICUBIC)
        shown = [self.name, self.unit, self.least, self.most, self.filter]
        self.settings = json.dumps(shown).encode()

    def layout(self, width: int, height: int, detail: str = "auto") -> ImageLayout:
        """Return the layout of a picture. Raises ImageError for an aspect ratio above 200."""
        check_sides(width, height)
        if max(width, height) > _ASPECT * min(width, height):
            raise ImageError(
                "invalid_image",
                f"the picture is {width} x {height}, and the model takes sides of which the longer "
                f"is at most {_ASPECT} times the other",
            )
        most = self.most
        if detail == "low":
            most = min(most, max(self.least, _LOW * self.unit**2))
        rows, columns = self._units(height, width, most)
        size = rows * columns
        shape = 1, rows * self.unit, columns * self.unit
        token_ids = (self.image_token_id,) * size
        return ImageLayout(token_ids, 0, size, size, (rows, columns), shape)

    def _units(self, height: int, width: int, most: int) -> tuple[int, int]:
        """Return the grid (rows, columns) of embeddings for a picture of height x width pixels.

        The picture is scaled so that its area is between `self.least` and `most` pixels.
        """
        unit = self.unit
        rows, columns = round(height / unit), round(width / unit)
        if rows * columns * unit**2 > most:
            shrink = math.sqrt(height * width / most)
            rows = max(1, math.floor(height / shrink / unit))
            columns = max(1, math.floor(width / shrink / unit))
        elif rows * columns * unit**2 < self.least:
            grow = math.sqrt(self.least / (height * width))
            rows, columns = math.ceil(height * grow / unit), math.ceil(width * grow / unit)
        return rows, columns

    def pixels(self, picture: Pillow.Image, layout: ImageLayout) -> "NDArray[np.uint8]":
        """Return the pixels [1, height, width, 3] of an RGB picture."""
        import numpy as np

        _, height, width = layout.shape
        return np.asarray(resized(picture, (width, height), self.filter), np.uint8)[None]
