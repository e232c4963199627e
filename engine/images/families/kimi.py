"""KimiImages: the image processor of Kimi-VL, Kimi K2.5 and K2.6."""

import json
import math
from typing import TYPE_CHECKING

from PIL import Image as Pillow

from engine.config_reader import Reader
from engine.images.layout import ImageError, ImageLayout, check_sides
from engine.images.resize import resized
from engine.images.settings import ProcessorSettings

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

# Defaults of the publisher's classes, for keys that the file lacks.
_PATCH, _MERGE, _MOST, _SIDE = 14, 2, 16384, 512
_LOW = 512  # maximum embeddings of a picture with detail: low, without padding


def settings_of_media(values: Reader) -> Reader:
    """Return a reader of a folder's processor settings, which Kimi K2.5 nests in an object."""
    media = values.inner("media_proc_cfg")
    return media if media.values else values


class KimiImages:
    """The image processor of Kimi-VL and Kimi K2.5, which only shrinks pictures.

    Pictures are padded to whole embeddings at the right and at the bottom.

    patch: the side of a patch in pixels.
    merge: the side, in patches, of the square that becomes one embedding.
    most: the maximum number of patches of a picture, without padding.
    side: the maximum side of a picture in patches, to which larger ones are shrunk; None = Kimi-VL,
        which refuses larger ones.
    """

    def __init__(self, settings: ProcessorSettings) -> None:
        values = settings_of_media(settings.values)
        self.image_token_id = settings.token("image_token_id", "media_placeholder_token_id")
        self.placeholder = settings.text(self.image_token_id, "<|media_pad|>")
        self.patch = values.size("patch_size", _PATCH)
        self.merge = values.square("merge_kernel_size", values.size("merge_size", _MERGE))
        self.side: int | None = None
        if (most := values.size_or_none("in_token_limit")) is None:
            most = values.size("in_patch_limit", values.size("max_patches", _MOST))
            side = values.inner("size").size("max_height", _SIDE)
            self.side = values.size("patch_limit_on_one_side", side)
        self.most = most
        self.filter = settings.filter(Pillow.Resampling.BICUBIC)
        shown = ["kimi", self.patch, self.merge, self.most, self.side, self.filter]
        self.settings = json.dumps(shown).encode()

    def layout(self, width: int, height: int, detail: str = "auto") -> ImageLayout:
        """Return the layout of a picture. Raises ImageError if it is too large for Kimi-VL."""
        check_sides(width, height)
        shrunk = self._shrunk(width, height, detail)
        shape = self._padded(shrunk)
        if self.side is None and max(shape) // self.patch >= _SIDE:
            raise ImageError(
                "invalid_image",
                f"the picture is {width} x {height}, resized {shrunk[0]} x {shrunk[1]}, and the "
                f"model takes sides below {_SIDE * self.patch} pixels",
            )
        unit = self.patch * self.merge
        size = shape[1] // unit * (shape[2] // unit)
        return ImageLayout((self.image_token_id,) * size, 0, size, size, (0, 0), shape)

    def pixels(self, picture: Pillow.Image, layout: ImageLayout) -> "NDArray[np.uint8]":
        """Return the pixels [1, height, width, 3] of an RGB picture, padded with black."""
        import numpy as np

        details = (self._shrunk(*picture.size, detail) for detail in ("auto", "low"))
        width, height = next(size for size in details if self._padded(size) == layout.shape)
        whole = np.zeros((*layout.shape, 3), np.uint8)
        whole[0, :height, :width] = resized(picture, (width, height), self.filter)
        return whole

    def _shrunk(self, width: int, height: int, detail: str) -> tuple[int, int]:
        """Return the width and height of a resized picture without padding."""
        most = min(self.most, _LOW * self.merge**2) if detail == "low" else self.most
        patches = max(1, width // self.patch) * max(1, height // self.patch)
        scale = min(1.0, math.sqrt(most / patches))
        if self.side is not None:
            longest = self.side * self.patch
            scale = min(scale, longest / height, longest / width)
        return max(1, int(width * scale)), max(1, int(height * scale))

    def _padded(self, size: tuple[int, int]) -> tuple[int, int, int]:
        """Return the shape (1, height, width) of a picture with padding."""
        unit = self.patch * self.merge
        width, height = (-(-side // unit) * unit for side in size)
        return 1, height, width
