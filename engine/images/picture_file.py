"""PictureFile: a picture's file, of which first the header is read; the pixels are decoded later.

Files come from any client. So the first bytes select the only decoder that is used, and the size in
the header is checked before any pixel is decoded. Errors do not quote Pillow's messages.
"""

import io
import struct
from dataclasses import dataclass

from PIL import Image

from engine.errors import InvalidRequest

FORMATS = "PNG, JPEG, WebP, GIF or BMP"
MAX_PIXELS = 89_478_485  # maximum pixels of a picture; Pillow warns of larger ones
# Maximum pixels of a WebP, which Pillow copies with the GIL held: 40 ms for this many.
WEBP_PIXELS = 24_000_000

_MAGIC = (
    (b"\x89PNG\r\n\x1a\n", "PNG"),
    (b"\xff\xd8\xff", "JPEG"),
    (b"GIF87a", "GIF"),
    (b"GIF89a", "GIF"),
    (b"BM", "BMP"),
)
_ORIENTATION = 0x0112  # EXIF's tag
# EXIF's orientation -> the operation that turns the picture upright
_UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
_SIDEWAYS = (5, 6, 7, 8)  # orientations in which width and height are swapped


def invalid_image(message: str, code: str = "invalid_image") -> InvalidRequest:
    """Return the error for an invalid picture. message: a predicate for "the picture"."""
    return InvalidRequest(message, code=code)


@dataclass(frozen=True, slots=True)
class PictureFile:
    """A picture's file, of which only the header was read.

    width, height: size in pixels of the upright picture.
    stored: (width, height) in the file.
    format: the decoder's name.
    orientation: the number of EXIF's orientation; 1 = upright.
    frames: whether the file has more than one frame, of which only the first is decoded.
    """

    data: bytes
    width: int
    height: int
    stored: tuple[int, int]
    format: str
    orientation: int
    frames: bool

    @property
    def pixels(self) -> int:
        return self.width * self.height

    @classmethod
    def read(cls, data: bytes, max_pixels: int = MAX_PIXELS) -> "PictureFile":
        """Read a file's header. Raises InvalidRequest: invalid_image, image_too_large."""
        kind = _format(data)
        try:
            if kind == "WEBP":  # Pillow's WebP decoder allocates all pixels when it opens a file
                max_pixels = min(max_pixels, WEBP_PIXELS)
                _check_size(*_webp_size(data), max_pixels)
            picture = _open(data, kind)
            width, height = picture.size
            orientation = _orientation(picture)
        except InvalidRequest:
            raise
        except (Image.DecompressionBombError, Image.DecompressionBombWarning):
            raise _too_many_pixels(max_pixels) from None
        except Exception:
            raise _broken() from None
        _check_size(width, height, max_pixels)
        stored = width, height
        if orientation in _SIDEWAYS:
            width, height = height, width
        return cls(data, width, height, stored, kind, orientation, _frames(picture))

    def decode(self) -> Image.Image:
        """Decode the picture: upright, in 8-bit RGB, on white where it is transparent.

        The GIL is released meanwhile. Raises InvalidRequest invalid_image.
        """
        try:
            picture = _open(self.data, self.format)
            if picture.size != self.stored:
                raise _broken()
            picture.load()
            if picture.size != self.stored:  # a frame may differ from the size in the header
                raise _broken()
            rgb = _rgb(picture)
            del picture  # so that only two pictures of this size are in memory at once
            return _turned(rgb, self.orientation)
        except InvalidRequest:
            raise
        except MemoryError:
            raise invalid_image("needs more memory than there is", code="image_too_large") from None
        except Exception:  # decoders raise any exception, with addresses in the text
            raise _broken() from None


def upright_rgb(picture: Image.Image) -> Image.Image:
    """Convert a picture of any mode: upright, in 8-bit RGB, on white where it is transparent."""
    return _turned(_rgb(picture), _orientation(picture))


def _turned(picture: Image.Image, orientation: int) -> Image.Image:
    turn = _UPRIGHT.get(orientation)
    return picture if turn is None else picture.transpose(turn)


def _open(data: bytes, kind: str) -> Image.Image:
    return Image.open(io.BytesIO(data), formats=[kind])


def _broken() -> InvalidRequest:
    return invalid_image("is truncated or broken")


def _too_many_pixels(max_pixels: int, size: str = "") -> InvalidRequest:
    return invalid_image(f"has {size}more than {max_pixels} pixels", code="image_too_large")


def _check_size(width: int, height: int, max_pixels: int) -> None:
    if width < 1 or height < 1:
        raise invalid_image("has no pixels")
    if width * height > max_pixels:
        raise _too_many_pixels(max_pixels, f"{width} x {height}, ")


def _format(data: bytes) -> str:
    """Return the name of Pillow's decoder for a file's bytes. Raises InvalidRequest."""
    for magic, name in _MAGIC:
        if data.startswith(magic):
            return name
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return "WEBP"
    raise invalid_image(f"is no {FORMATS} file")


def _webp_size(data: bytes) -> tuple[int, int]:
    """Return (width, height) of a WebP file's canvas."""
    chunk = data[12:16]
    if chunk == b"VP8X":
        width, height = (int.from_bytes(data[at : at + 3], "little") + 1 for at in (24, 27))
    elif chunk == b"VP8L":
        (bits,) = struct.unpack_from("<I", data, 21)
        width, height = (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
    elif chunk == b"VP8 ":
        width, height = (side & 0x3FFF for side in struct.unpack_from("<HH", data, 26))
    else:
        raise _broken()
    return width, height


def _orientation(picture: Image.Image) -> int:
    """Return the number of EXIF's orientation in the header; 1 if it is missing or unreadable.

    `Image.getexif` is not used, as it would decode a PNG to read metadata after the pixels.
    """
    raw = picture.info.get("exif")
    if not isinstance(raw, bytes):
        return 1
    exif = Image.Exif()
    try:
        exif.load(raw)
        value = exif.get(_ORIENTATION)
    except Exception:
        return 1
    return value if value in _UPRIGHT else 1


def _frames(picture: Image.Image) -> bool:
    try:
        return picture.format != "MPO" and bool(getattr(picture, "is_animated", False))
    except Exception:  # an invalid second frame is ignored
        return True


def _rgb(picture: Image.Image) -> Image.Image:
    """Convert a loaded picture of any mode to 8-bit RGB."""
    mode = picture.mode
    if mode.startswith("I") or mode == "F":
        return _deep(picture)
    if mode in ("RGBA", "LA", "PA", "RGBa", "La") or "transparency" in picture.info:
        layer = picture if mode == "RGBA" else picture.convert("RGBA")
        rgb = Image.new("RGB", layer.size, (255, 255, 255))
        rgb.paste(layer, mask=layer)
        return rgb
    return picture if mode == "RGB" else picture.convert("RGB")


def _deep(picture: Image.Image) -> Image.Image:
    """Convert a 16-bit grey picture to 8-bit RGB; Pillow's conversion would clip values at 255."""
    import numpy as np

    grey = np.asarray(picture)
    if grey.dtype != np.uint16:
        grey = grey.clip(0, 65535).astype(np.uint16)
    return Image.fromarray((grey // np.uint16(257)).astype(np.uint8)).convert("RGB")
