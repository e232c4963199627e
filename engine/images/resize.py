"""resized: resizes a picture in parts, by several threads if it is large and alone."""

import io
import itertools
from collections.abc import Callable
from typing import TYPE_CHECKING

from PIL import Image as Pillow

from engine.images.threads import alone, share_out

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

# Minimum pixels of a part. The memory of one part serves the next ones, while new pages for whole
# pictures would cost a third of the time.
_PART = 2**18


def resized(
    picture: Pillow.Image, size: tuple[int, int], filter: int, parts: int | None = None
) -> "NDArray[np.uint8]":
    """Resize an RGB picture; return exactly the pixels of Pillow's `resize`, [height, width, 3].

    Pillow resizes along rows and along columns in two passes, with 8-bit pixels in between. Rows
    are independent in the first pass, and columns in the second. So parts can be resized
    separately, without changing any pixel.

    size: (width, height) in pixels.
    filter: the resampling filter, as Pillow numbers it.
    parts: the maximum number of parts of a pass; None = by the picture's area.
    """
    import numpy as np

    width, height = size
    if parts is None:
        parts = max(picture.width * picture.height, width * height) // _PART
    divisible = filter != Pillow.Resampling.NEAREST and _rows_first(*picture.size, *size)
    # Parts gain nothing while other pictures wait for cores. They also shrink the large blocks
    # of memory that Pillow keeps for its next pictures.
    if parts < 2 or not divisible or not alone():
        pixels = picture.resize(size, filter).tobytes()
    else:
        if width != picture.width:
            picture = _along_rows(picture, width, filter, parts)
        pixels = _along_columns(picture, height, filter, parts)
    return np.frombuffer(pixels, np.uint8).reshape(height, width, 3)


def _rows_first(width: int, height: int, new_width: int, new_height: int) -> bool:
    """Whether Pillow certainly resizes along rows first, or needs only one pass.

    Pillow 13 begins with columns if these lose more than twice as many pixels as rows. The limit
    here is lower, as other versions of Pillow have other rules.
    """
    if new_height >= height or new_width == width:
        return True
    fewer = height - new_height <= 1.5 * (width - new_width)
    return fewer and height * new_width <= 1.25 * width * new_height


def _along_rows(picture: Pillow.Image, width: int, filter: int, parts: int) -> Pillow.Image:
    whole = Pillow.new("RGB", (width, picture.height), None)

    def resize(part: tuple[int, int]) -> None:
        top, bottom = part
        rows = picture.crop((0, top, picture.width, bottom))
        whole.paste(rows.resize((width, bottom - top), filter), (0, top))

    _each(resize, picture.height, parts)
    return whole


def _along_columns(picture: Pillow.Image, height: int, filter: int, parts: int) -> bytes:
    """Resize a picture along columns; return its pixels.

    All bytes of a row are computed alike. So Pillow resizes the 12 bytes of 4 pixels as 3 pixels of
    4 bytes, which is faster than 4 RGB pixels, for which it also has 16 bytes.
    """
    import numpy as np

    stream = io.BytesIO(bytes(3 * picture.width * height))

    def resize(part: tuple[int, int]) -> None:
        left, right = 4 * part[0], 4 * part[1]  # beyond the picture's width, `crop` pads
        columns = picture.crop((left, 0, right, picture.height)).tobytes()
        width = 3 * (part[1] - part[0])
        pixels = Pillow.frombuffer("RGBX", (width, picture.height), columns, "raw", "RGBX", 0, 1)
        columns = pixels.resize((width, height), filter).tobytes()
        array = np.frombuffer(columns, np.uint8).reshape(height, -1, 3)
        # A view that outlived the parts would make `getvalue` copy the bytes.
        whole = np.frombuffer(stream.getbuffer(), np.uint8).reshape(height, -1, 3)
        whole[:, left:right] = array[:, : picture.width - left]

    _each(resize, -(-picture.width // 4), parts)
    return stream.getvalue()


def _each(work: Callable[[tuple[int, int]], None], length: int, parts: int) -> None:
    """Divide `length` lines into `parts` similar parts, and call `work` with each (begin, end)."""
    count = min(parts, length)
    bounds = [length * i // count for i in range(count + 1)]
    share_out(work, list(itertools.pairwise(bounds)))
