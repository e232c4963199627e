"""resized: resizes a picture, with several threads if the picture is large."""

import itertools
from collections.abc import Callable

from PIL import Image as Pillow

from engine.images.threads import alone, share_out, threads

_STRIP = 2**18  # minimum pixels of a strip, for which a thread is worth its overhead


def resized(
    picture: Pillow.Image, size: tuple[int, int], filter: int, strips: int | None = None
) -> Pillow.Image:
    """Resize an RGB picture to exactly the pixels of Pillow's `resize`.

    Pillow resizes along rows and along columns in two passes, with 8-bit pixels in between. Rows
    are independent in the first pass, and columns in the second. So threads can resize strips
    separately, without changing any pixel.

    size: (width, height) in pixels.
    filter: the resampling filter, as Pillow numbers it.
    strips: the maximum number of strips; None = by the picture's area and the machine's cores.
    """
    width, height = size
    if strips is None:
        area = max(picture.width * picture.height, width * height)
        strips = min(threads(), area // _STRIP)
    divisible = filter != Pillow.Resampling.NEAREST and _rows_first(*picture.size, *size)
    # Strips take a quarter more CPU time, which gains nothing while other pictures wait for cores.
    if strips < 2 or not divisible or not alone():
        return picture.resize(size, filter)
    if width != picture.width:
        picture = _along_rows(picture, width, filter, strips)
    if height != picture.height:
        picture = _along_columns(picture, height, filter, strips)
    return picture


def _rows_first(width: int, height: int, new_width: int, new_height: int) -> bool:
    """Whether Pillow certainly resizes along rows first, or needs only one pass.

    Pillow 13 begins with columns if these lose more than twice as many pixels as rows. The limit
    here is lower, as other versions of Pillow have other rules.
    """
    if new_height >= height or new_width == width:
        return True
    fewer = height - new_height <= 1.5 * (width - new_width)
    return fewer and height * new_width <= 1.25 * width * new_height


def _along_rows(picture: Pillow.Image, width: int, filter: int, strips: int) -> Pillow.Image:
    whole = Pillow.new("RGB", (width, picture.height), None)

    def resize(strip: tuple[int, int]) -> None:
        top, bottom = strip
        rows = picture.crop((0, top, picture.width, bottom))
        whole.paste(rows.resize((width, bottom - top), filter), (0, top))

    _each_strip(resize, picture.height, strips)
    return whole


def _along_columns(picture: Pillow.Image, height: int, filter: int, strips: int) -> Pillow.Image:
    whole = Pillow.new("RGB", (picture.width, height), None)

    def resize(strip: tuple[int, int]) -> None:
        left, right = strip
        columns = picture.crop((left, 0, right, picture.height))
        whole.paste(columns.resize((right - left, height), filter), (left, 0))

    _each_strip(resize, picture.width, strips)
    return whole


def _each_strip(work: Callable[[tuple[int, int]], None], length: int, strips: int) -> None:
    """Divide `length` lines into `strips` similar parts, and call `work` with each (begin, end)."""
    count = min(strips, length)
    bounds = [length * i // count for i in range(count + 1)]
    share_out(work, list(itertools.pairwise(bounds)))
