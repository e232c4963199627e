"""InternImages: the image processor of InternVL, with a grid of tiles and a whole view."""

import json
from typing import TYPE_CHECKING

from PIL import Image as Pillow

from engine.images.families.internvl_chat import CONTEXT
from engine.images.families.tiles import cut, tile_layout
from engine.images.layout import ImageLayout, check_sides
from engine.images.resize import resized
from engine.images.settings import ProcessorSettings

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_BEGIN, _END = "<img>", "</img>"


class InternImages:
    """The image processor of InternVL, which stretches pictures to a grid of tiles.

    tile: the side of a tile in pixels.
    size: the number of embeddings of a tile.
    grids: the (columns, rows) of tiles that a picture may have, in order of their number of tiles.
    """

    def __init__(self, settings: ProcessorSettings) -> None:
        values, config = settings.values, settings.config
        self.image_token_id = settings.token("image_token_id")
        self.placeholder = settings.text(self.image_token_id, CONTEXT)
        vision = config.inner("vision_config")
        self.tile = values.inner("size").size("height", vision.square("image_size", 448))
        unit = vision.square("patch_size", 14) * int(1 / config.number("downsample_ratio", 0.5))
        self.size = (self.tile // unit) ** 2
        least, most = values.size("min_patches", 1), values.size("max_patches", 12)
        sides = range(1, most + 1)
        grids = [(x, y) for x in sides for y in sides if least <= x * y <= most]
        self.grids = sorted(grids, key=lambda grid: grid[0] * grid[1])
        self.filter = settings.filter(Pillow.Resampling.BICUBIC)
        self._tokens = settings.tokens
        self._layouts: dict[int, ImageLayout] = {}
        self.settings = json.dumps(["internvl", self.tile, self.filter]).encode()

    def layout(self, width: int, height: int, detail: str = "auto") -> ImageLayout:
        """Return the tokens and the size in pixels of a picture, as an ImageLayout."""
        check_sides(width, height)
        columns, rows = (1, 1) if detail == "low" else self._grid(width, height)
        tiles = columns * rows
        tiles += tiles > 1
        if tiles not in self._layouts:
            ids = self._tokens(f"{_BEGIN}{self.placeholder * (self.size * tiles)}{_END}")
            shape = tiles, self.tile, self.tile
            self._layouts[tiles] = tile_layout(ids, self.image_token_id, shape, self.size)
        return self._layouts[tiles]

    def _grid(self, width: int, height: int) -> tuple[int, int]:
        """Return the grid (columns, rows) of tiles whose aspect ratio is nearest to a picture's.

        Among equally near grids this is the largest one of which the picture fills more than half.
        """
        best, least = (1, 1), float("inf")
        for columns, rows in self.grids:
            difference = abs(width / height - columns / rows)
            filled = width * height > 0.5 * self.tile**2 * columns * rows
            if difference < least or (difference == least and filled):
                best, least = (columns, rows), difference
        return best

    def pixels(self, picture: Pillow.Image, layout: ImageLayout) -> "NDArray[np.uint8]":
        """Return the pixels [tiles, tile, tile, 3] of an RGB picture; the whole view is the last
        tile."""
        import numpy as np

        tiles = []
        if layout.shape[0] > 1:
            columns, rows = self._grid(*picture.size)
            size = columns * self.tile, rows * self.tile
            tiles = cut(resized(picture, size, self.filter), self.tile)
        return np.stack([*tiles, resized(picture, (self.tile, self.tile), self.filter)])
