"""Compressed request bodies."""

import zlib

from deployments.api.http.errors import ApiError, invalid
from deployments.api.http.exchange import ENCODINGS
from deployments.api.http.off_loop import INLINE_CHARS, in_thread


async def decoded(data: bytes, encoding: bytes, limit: int) -> bytes:
    """The body that was sent compressed. encoding: of ENCODINGS. limit: bytes.

    A few KB are unpacked at once, more off the event loop, and never more than the limit: of a body
    that unpacks to gigabytes nothing else is made.
    Raises ApiError 400 invalid_encoding, 413 body_too_large.
    """
    unpack = zlib.decompressobj(ENCODINGS[encoding])
    try:
        body = unpack.decompress(data, INLINE_CHARS)
        if not unpack.eof:
            left = limit + 1 - len(body)
            body += await in_thread(lambda: unpack.decompress(unpack.unconsumed_tail, left), left)
    except zlib.error:
        raise _broken(encoding) from None
    if len(body) > limit:
        raise ApiError(413, "body_too_large", f"the body is larger than {limit} bytes unpacked")
    if not unpack.eof or unpack.unused_data:
        raise _broken(encoding)
    return body


def _broken(encoding: bytes) -> ApiError:
    return invalid(
        f"the body is not one whole {encoding.decode()} stream, as content-encoding says",
        "content-encoding",
        "invalid_encoding",
    )
