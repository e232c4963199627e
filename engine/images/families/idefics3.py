"""Idefics3Images: the image processor of Idefics 3 and SmolVLM, with tiles and a whole view."""

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

# Defaults of transformers' class, for keys that the file lacks.
_LONGEST = 4 * 364
_MOST = 4096  # maximum longer side of a picture in pixels, also if the file's limit is larger
_AROUND, _WHOLE = "<fake_token_around_image>", "<global-img>"


class Idefics3Images:
    """The image processor of Idefics 3 and SmolVLM, which cuts pictures into tiles.

    longest: the length in pixels to which the longer side is resized.
    tile: the side of a tile in pixels.
    size: the number of embeddings of a tile.
    splits: whether pictures are cut into tiles.
    """

    def __init__(self, settings: ProcessorSettings) -> None:
        values, config = settings.values, settings.config
        self.image_token_id = settings.token("image_token_id")
        self.placeholder = settings.text(self.image_token_id, "<image>")
        self.longest = values.inner("size").size("longest_edge", _LONGEST)
        vision = config.inner("vision_config")
        side = vision.square("image_size", 224)  # the tower's input size in pixels
        self.tile = values.inner("max_image_size").size("longest_edge", side)
        self.splits = values.flag("do_image_splitting", True)
        self.filter = settings.filter(Pillow.Resampling.LANCZOS)
        unit = vision.square("patch_size", 32) * config.size("scale_factor", 2)
        self.size = (self.tile // unit) ** 2
        self._tokens = settings.tokens
        self._layouts: dict[tuple[int, int], ImageLayout] = {}
        shown = ["idefics3", self.longest, self.tile, self.filter]
        self.settings = json.dumps(shown).encode()

    def layout(self, width: int, height: int, detail: str = "auto") -> ImageLayout:
        """Return the tokens and the size in pixels of a picture, as an ImageLayout."""
        check_sides(width, height)
        grid = 0, 0
        if self.splits and detail != "low":
            wide, high = self._tiled(*self._fitted(width, height))
            if max(wide, high) > self.tile:
                grid = high // self.tile, wide // self.tile
        if grid not in self._layouts:
            ids = self._tokens(self._text(*grid))
            shape = grid[0] * grid[1] + 1, self.tile, self.tile
            self._layouts[grid] = tile_layout(ids, self.image_token_id, shape, self.size)
        return self._layouts[grid]

    def _text(self, rows: int, columns: int) -> str:
        """Return a picture's text in the prompt: tiles, named by row and column, then the whole
        view."""
        tile = self.placeholder * self.size
        lines = [
            "".join(f"{_AROUND}<row_{row}_col_{column}>{tile}" for column in range(1, columns + 1))
            for row in range(1, rows + 1)
        ]
        before = "".join(f"{line}\n" for line in lines) + ("\n" if lines else "")
        return f"{before}{_AROUND}{_WHOLE}{tile}{_AROUND}"

    def _fitted(self, width: int, height: int) -> tuple[int, int]:
        """Return the size to which a picture is resized, so that its longer side is `longest`.

        If `longest` exceeds `_MOST`, the longer side is `_MOST`.
        """
        longest, ratio = self.longest, width / height
        if width >= height:
            width, height = longest, max(1, _even(longest / ratio))
        else:
            width, height = max(1, _even(longest * ratio)), longest
        if max(width, height) > _MOST:
            ratio = width / height
            if width >= height:
                width, height = _MOST, int(_MOST / ratio)
            else:
                width, height = int(_MOST * ratio), _MOST
        return max(width, 1), max(height, 1)

    def _tiled(self, width: int, height: int) -> tuple[int, int]:
        """Return the width and height of a fitted picture, rounded up to whole tiles."""
        ratio = width / height
        if width >= height:
            width = self._whole(width)
            return width, self._whole(int(width / ratio))
        height = self._whole(height)
        return self._whole(int(height * ratio)), height

    def _whole(self, side: int) -> int:
        return math.ceil(side / self.tile) * self.tile

    def pixels(self, picture: Pillow.Image, layout: ImageLayout) -> "NDArray[np.uint8]":
        """Return the pixels [tiles, tile, tile, 3] of an RGB picture; the whole view is the last
        tile."""
        import numpy as np

        size = self._fitted(*picture.size)
        pixels = resized(picture, size, self.filter)
        tiles = []
        if layout.shape[0] > 1:
            pixels = resized(Pillow.fromarray(pixels), self._tiled(*size), self.filter)
            tiles = cut(pixels, self.tile)
        whole = resized(Pillow.fromarray(pixels), (self.tile, self.tile), self.filter)
        return np.stack([*tiles, whole])


def _even(side: float) -> int:
    return int(side) + int(side) % 2
