"""cut, tile_layout: helpers of image processors that cut pictures into square tiles."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from engine.errors import ConfigError
from engine.images.layout import ImageLayout

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


def cut(pixels: "NDArray[np.uint8]", tile: int) -> "list[NDArray[np.uint8]]":
    """Return the square tiles [tile, tile, 3] of a picture [height, width, 3], row by row.

    tile: the side of a tile in pixels, which divides the picture's sides.
    """
    height, width, _ = pixels.shape
    return [
        pixels[top : top + tile, left : left + tile]
        for top in range(0, height, tile)
        for left in range(0, width, tile)
    ]


def tile_layout(
    ids: Sequence[int], image_token_id: int, shape: tuple[int, int, int], size: int
) -> ImageLayout:
    """Return the layout of a picture in tiles.

    ids: the tokens of the picture in the prompt, including image tokens.
    shape: (tiles, height, width) of pixels.
    size: the number of embeddings of a tile.
    Raises ConfigError if the number of image tokens is wrong.
    """
    if ids.count(image_token_id) != shape[0] * size:
        raise ConfigError(
            f"the tokenizer makes {ids.count(image_token_id)} image tokens (id {image_token_id}) "
            f"of the text for {shape[0]} tiles, and the model {shape[0] * size} embeddings",
            param="tokenizer",
        )
    first = ids.index(image_token_id)
    length = len(ids) - first - ids[::-1].index(image_token_id)
    return ImageLayout(tuple(ids), first, length, ids.count(image_token_id), (0, 0), shape)
