"""resized: resizes a picture, with several threads if the picture is large."""

import itertools
from collections.abc import Callable

from PIL import Image as Pillow

from engine.images.threads import alone, share_out, threads

_STRIP = 2**18  # pixels; to hand a strip of fewer to a thread costs more than to resize it


def resized(
    picture: Pillow.Image, size: tuple[int, int], filter: int, strips: int | None = None
) -> Pillow.Image:
    """Return an RGB picture in another size, with exactly the pixels of Pillow's `resize`.

    Pillow resizes along rows and along columns in two passes, with 8-bit pixels in between. In the
    pass along rows no row depends on another, in the pass along columns no column. So strips, which
    threads resize separately, change no pixel.

    size: (width, height) in pixels.
    filter: the resampling filter, as Pillow numbers it.
    strips: the maximum number of strips; None = by the picture's area and the machine's cores.
    """
    width, height = size
    if strips is None:
        area = max(picture.width * picture.height, width * height)
        strips = min(threads(), area // _STRIP)
    divisible = filter != Pillow.Resampling.NEAREST and _rows_first(*picture.size, *size)
    # Strips cost a quarter more CPU time, which shortens nothing where pictures wait for cores.
    if strips < 2 or not divisible or not alone():
        return picture.resize(size, filter)
    if width != picture.width:
        picture = _along_rows(picture, width, filter, strips)
    if height != picture.height:
        picture = _along_columns(picture, height, filter, strips)
    return picture


def _rows_first(width: int, height: int, new_width: int, new_height: int) -> bool:
    """Whether Pillow certainly resizes along rows first, or in one pass alone.

    Pillow 13 begins with columns where they lose more than twice the pixels that rows lose. The
    limit here is lower, since other versions of Pillow have other rules.
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
    """Call `work` for (begin, end) of each of `strips` about equal parts of `length` lines."""
    count = min(strips, length)
    bounds = [length * i // count for i in range(count + 1)]
    share_out(work, list(itertools.pairwise(bounds)))
