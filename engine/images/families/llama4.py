"""Llama4Images: the image processor of Llama 4, with tiles of a padded canvas and a whole view."""

import json
import math
from typing import TYPE_CHECKING

from PIL import Image as Pillow

from engine.images.families.tiles import cut, tile_layout
from engine.images.layout import ImageLayout, check_sides
from engine.images.resize import resized
from engine.images.settings import ProcessorSettings

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_Sides = tuple[int, int]  # height, width


class Llama4Images:
    """The image processor of Llama 4, which pads pictures with black at the right and the bottom.

    tile: the side of a tile in pixels.
    size: the number of embeddings of a tile.
    most: the maximum number of tiles, not counting the whole view.
    largest: whether pictures are enlarged to the largest canvas.
    """

    placeholder = "<|image|>"

    def __init__(self, settings: ProcessorSettings) -> None:
        values, vision = settings.values, settings.config.inner("vision_config")
        self.image_token_id = settings.token("image_token_index", "image_token_id")
        self.patch = settings.text(self.image_token_id, "<|patch|>")
        self.tile = vision.square("image_size", 448)
        ratio = vision.number("pixel_shuffle_ratio", 0.5)
        self.size = (self.tile // (vision.square("patch_size", 14) * round(1 / ratio))) ** 2
        self.most = values.size("max_patches", 16)
        self.largest = values.flag("resize_to_max_canvas")
        self.filter = settings.filter(Pillow.Resampling.BILINEAR)
        self._tokens = settings.tokens
        self._layouts: dict[_Sides, ImageLayout] = {}
        shown = ["llama4", self.tile, self.largest, self.filter]
        self.settings = json.dumps(shown).encode()

    def layout(self, width: int, height: int, detail: str = "auto") -> ImageLayout:
        """Return the tokens and the size in pixels of a picture, as an ImageLayout."""
        check_sides(width, height)
        rows, columns = (1, 1) if detail == "low" else self._canvas(height, width)
        tiles = rows * columns
        if (rows, columns) not in self._layouts:
            patches = self.patch * self.size
            line = "<|tile_x_separator|>".join([patches] * columns) + "<|tile_y_separator|>"
            before = line * rows if tiles > 1 else ""
            ids = self._tokens(f"<|image_start|>{before}{self.placeholder}{patches}<|image_end|>")
            shape = tiles + (tiles > 1), self.tile, self.tile
            self._layouts[rows, columns] = tile_layout(ids, self.image_token_id, shape, self.size)
        return self._layouts[rows, columns]

    def _canvas(self, height: int, width: int) -> _Sides:
        """Choose the canvas of a picture, as (rows, columns) of tiles.

        Among canvases that do not shrink the picture, the one is chosen that enlarges it least, or
        most with `largest`. If all shrink the picture, the one that shrinks it least is chosen.
        Among equal ones the smallest is chosen. Scales are float32, as in the model's original
        processor.
        """
        import numpy as np

        counts = range(self.most, 0, -1)
        grids = [(n // m, m) for n in counts for m in range(n, 0, -1) if n % m == 0]
        sides = np.array(grids, np.float32) * np.float32(self.tile)
        scales = (sides / np.array((height, width), np.float32)).min(1)
        larger = scales[scales >= 1]
        scale = larger.min() if larger.size and not self.largest else scales.max()
        nearest = [grid for grid, own in zip(grids, scales, strict=True) if own == scale]
        return min(nearest, key=math.prod)

    def _fitted(self, height: int, width: int, canvas: _Sides) -> _Sides:
        """Return the (height, width) in pixels of a picture on its canvas.

        height, width: the picture's original size in pixels.
        canvas: (rows, columns) of tiles.
        """
        high, wide = (count * self.tile for count in canvas)
        high, down = self._limit(high, height)
        wide, across = self._limit(wide, width)
        if across < down:
            high = min(math.floor(height * across), high)
        else:
            wide = min(math.floor(width * down), wide)
        return max(high, 1), max(wide, 1)

    def _limit(self, canvas: int, side: int) -> "tuple[int, float | np.float32]":
        """Return the maximum length of a picture's side on a canvas, and its scale.

        The scale is float32 if the canvas limits the length, as in the model's original processor.

        canvas, side: the lengths in pixels of the canvas's side and of the original picture's side.
        """
        import numpy as np

        most = max(side, self.tile)
        if canvas < most or self.largest:
            return canvas, np.float32(canvas) / np.float32(side)
        return most, most / side

    def pixels(self, picture: Pillow.Image, layout: ImageLayout) -> "NDArray[np.uint8]":
        """Return the pixels [tiles, tile, tile, 3] of an RGB picture; the whole view is the last
        tile."""
        import numpy as np

        width, height = picture.size
        several = layout.shape[0] > 1
        rows, columns = self._canvas(height, width) if several else (1, 1)
        high, wide = self._fitted(height, width, (rows, columns))
        canvas = np.zeros((rows * self.tile, columns * self.tile, 3), np.uint8)
        canvas[:high, :wide] = resized(picture, (wide, high), self.filter)
        tiles = cut(canvas, self.tile)
        if several:
            tiles.append(resized(picture, (self.tile, self.tile), self.filter))
        return np.stack(tiles)
