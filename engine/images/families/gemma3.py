"""Gemma3Images: the image processor of Gemma 3, which resizes pictures to a square."""

import json
from typing import TYPE_CHECKING

from PIL import Image as Pillow

from engine.images.layout import ImageLayout, check_sides
from engine.images.resize import resized
from engine.images.settings import ProcessorSettings

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_AROUND = "\n\n"  # text before and after a picture


class Gemma3Images:
    """The image processor of Gemma 3, which resizes pictures to a square.

    side: the side of the square in pixels.
    count: the number of embeddings of a picture.
    """

    def __init__(self, settings: ProcessorSettings) -> None:
        self.image_token_id = settings.token("image_token_index", "image_token_id")
        self._begin = settings.token("boi_token_index", "boi_token_id")
        self._end = settings.token("eoi_token_index", "eoi_token_id")
        self.placeholder = settings.text(self._begin, "<start_of_image>")
        self.side = settings.config.inner("vision_config").square("image_size", 224)
        self.count = settings.config.size("mm_tokens_per_image", 256)
        self.filter = settings.filter(Pillow.Resampling.BILINEAR)
        self.settings = json.dumps(["gemma3", self.side, self.filter]).encode()

    def layout(self, width: int, height: int, detail: str = "auto") -> ImageLayout:
        check_sides(width, height)
        token_ids = self._begin, *[self.image_token_id] * self.count, self._end
        shape = 1, self.side, self.side
        return ImageLayout(
            token_ids, 1, self.count, self.count, (0, 0), shape, before=_AROUND, after=_AROUND
        )

    def pixels(self, picture: Pillow.Image, layout: ImageLayout) -> "NDArray[np.uint8]":
        """Return the pixels [1, side, side, 3] of an RGB picture."""
        return resized(picture, (self.side, self.side), self.filter)[None]
