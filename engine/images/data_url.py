"""decode_base64, decode_data_url, frame_urls: decode base64 pictures in requests."""

import binascii

from engine.errors import InvalidRequest
from engine.images.picture_file import FORMATS, invalid_image

_SLICE = 2**20  # characters decoded at a time, a multiple of 4; other threads can run in between
_MAX_HEAD = 256  # maximum characters of a data: URL before its data
_STANDARD = bytes.maketrans(b"-_", b"+/")  # from the URL-safe alphabet to the standard one


def decode_data_url(url: str, max_bytes: int) -> bytes:
    """Return the data of a data: URL. The media type is ignored, as clients may set it wrongly.

    max_bytes: the maximum bytes of the data.
    Raises InvalidRequest.
    """
    comma = url.find(",", 0, _MAX_HEAD)
    if comma < 0 or not url[:comma].lower().endswith(";base64"):
        raise invalid_image("must be a data: URL with ;base64, before its data")
    return decode_base64(url, max_bytes, comma + 1)


def frame_urls(url: str) -> list[str]:
    """Split the data: URL of a video, data:video/jpeg;base64,FRAME,FRAME..., into one per frame.

    Raises InvalidRequest for any other URL, such as that of a video file.
    """
    head, *frames = url.split(",")
    if len(frames) < 2 or head[:5].lower() != "data:" or len(head) > _MAX_HEAD:
        raise InvalidRequest(
            "must be a list of frames, data:video/jpeg;base64,FRAME,FRAME and so on, each the "
            f"base64 of a {FORMATS} file; files of clips are not decoded",
            code="invalid_clip",
        )
    return [f"{head},{frame}" for frame in frames]


def decode_base64(text: str, max_bytes: int, start: int = 0) -> bytes:
    """Decode base64 in either alphabet, which must have no blanks and correct padding.

    max_bytes: the maximum bytes of the result.
    start: the index in the text where the base64 begins.
    Raises InvalidRequest.
    """
    if (len(text) - start) // 4 * 3 > max_bytes + 2:
        raise too_large(max_bytes)
    data = bytearray()
    for at in range(start, len(text), _SLICE):
        piece = text[at : at + _SLICE]
        last = at + _SLICE >= len(text)
        try:
            ascii_bytes = piece.encode("ascii")
            if b"-" in ascii_bytes or b"_" in ascii_bytes:
                ascii_bytes = ascii_bytes.translate(_STANDARD)
            decoded = binascii.a2b_base64(ascii_bytes, strict_mode=True)
        except ValueError:  # also raised for characters outside ASCII
            raise _no_base64() from None
        if not last and len(decoded) != len(piece) // 4 * 3:  # only the last piece may have padding
            raise _no_base64()
        data += decoded
    if not data:
        raise invalid_image("is empty")
    if len(data) > max_bytes:
        raise too_large(max_bytes)
    return bytes(data)


def too_large(max_bytes: int) -> InvalidRequest:
    """Return the error for a file with too many bytes."""
    return invalid_image(f"has more than {max_bytes} bytes", code="image_too_large")


def _no_base64() -> InvalidRequest:
    return invalid_image("is no base64: blanks, other letters or wrong padding")
