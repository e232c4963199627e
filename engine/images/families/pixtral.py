"""PixtralImages: the image processor of Pixtral and Mistral 3, with a token after each row."""

import json
import math
from typing import TYPE_CHECKING

from PIL import Image as Pillow

from engine.images.families.pixtral_config import patch_and_merge
from engine.images.layout import ImageLayout, check_sides
from engine.images.resize import resized
from engine.images.settings import ProcessorSettings

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_LONGEST = 1024  # transformers' default of the longest side
# (text, id) of the token after each row of a picture except the last, and of the token after the
# last row.
_BREAK, _END = ("[IMG_BREAK]", 12), ("[IMG_END]", 13)
_LOW = 22  # maximum embeddings on the longer side of a picture with detail: low


class PixtralImages:
    """The image processor of Pixtral and Mistral 3, which shrinks pictures that are too large.

    Sides are rounded up to whole embeddings.

    unit: the side, in pixels, of the square that becomes one embedding.
    longest: the maximum (height, width) in pixels.
    """

    def __init__(self, settings: ProcessorSettings) -> None:
        size = settings.values.inner("size")
        self.image_token_id = settings.token("image_token_id", "image_token_index")
        self.placeholder = settings.text(self.image_token_id, "[IMG]")
        self._break, self._end = settings.ids(_BREAK, _END)
        self.unit = math.prod(patch_and_merge(settings.config))
        longest = size.size_or_none("longest_edge")
        self.longest = (
            size.size("height", longest or _LONGEST),
            size.size("width", longest or _LONGEST),
        )
        self.filter = settings.filter(Pillow.Resampling.BICUBIC)
        shown = ["pixtral", self.unit, self.longest, self.filter]
        self.settings = json.dumps(shown).encode()

    def layout(self, width: int, height: int, detail: str = "auto") -> ImageLayout:
        """Return the tokens and the size in pixels of a picture, as an ImageLayout."""
        check_sides(width, height)
        most = [*self.longest]
        if detail == "low":
            most = [min(side, _LOW * self.unit) for side in most]
        ratio = max(height / most[0], width / most[1], 1)
        # at least one row and column, also if a side shrinks to nothing
        rows, columns = (
            max(1, math.ceil(math.floor(side / ratio) / self.unit)) for side in (height, width)
        )
        row = [self.image_token_id] * columns
        token_ids = (*([*row, self._break] * (rows - 1)), *row, self._end)
        shape = 1, rows * self.unit, columns * self.unit
        return ImageLayout(token_ids, 0, len(token_ids) - 1, rows * columns, (0, 0), shape)

    def pixels(self, picture: Pillow.Image, layout: ImageLayout) -> "NDArray[np.uint8]":
        """Return the pixels [1, height, width, 3] of an RGB picture."""
        _, height, width = layout.shape
        return resized(picture, (width, height), self.filter)[None]
