"""Cross-origin requests (CORS): browsers let pages of `http.cors_origins` call this service.

Only browsers enforce CORS. A page of another origin cannot send JSON here, because its browser
first sends a preflight request, which is refused.
"""

import re

from deployments.api.http.errors import ApiError, shown
from deployments.api.http.exchange import HttpExchange

ANY = "*"
_MAX_AGE = 3600  # seconds for which a browser may cache a preflight's answer
_METHODS = "GET, HEAD, POST, DELETE"
# Response headers that pages may read.
_READABLE = "x-request-id, x-ignored-fields, retry-after, x-should-retry"
_NAMES = re.compile(rb"[A-Za-z0-9_\-, ]{1,2048}")


def tell_origin(exchange: HttpExchange, origins: frozenset[str]) -> None:
    """Set the headers that let the calling web page read the answer, whatever its status."""
    if ANY not in origins:
        exchange.always.append((b"vary", b"origin"))  # caches store one answer per origin
    if (origin := _allowed(exchange, origins)) is not None:
        exchange.always += [
            (b"access-control-allow-origin", b"*" if ANY in origins else origin),
            (b"access-control-expose-headers", _READABLE.encode()),
        ]


def is_preflight(exchange: HttpExchange) -> bool:
    return bool(
        exchange.method == "OPTIONS"
        and b"origin" in exchange.headers
        and b"access-control-request-method" in exchange.headers
    )


async def answer_preflight(exchange: HttpExchange, origins: frozenset[str]) -> None:
    """Answer a preflight, in the same way for all paths.

    Browsers send no API key with a preflight, and the answer reveals nothing.

    Raises ApiError 403 origin_not_allowed.
    """
    if _allowed(exchange, origins) is None:
        origin = shown(exchange.headers[b"origin"][0].decode("latin-1"))
        raise ApiError(
            403,
            "origin_not_allowed",
            f"pages of {origin} may not ask here; the operator names origins in http.cors_origins",
        )
    # All requested headers are allowed, as clients in browsers send many custom headers.
    asked = exchange.headers.get(b"access-control-request-headers", [])
    names = asked[0] if len(asked) == 1 and _NAMES.fullmatch(asked[0]) else b"authorization"
    headers = (
        ("access-control-allow-methods", _METHODS),
        ("access-control-allow-headers", names.decode()),
        ("access-control-max-age", str(_MAX_AGE)),
    )
    await exchange.answer(200, b"", headers=headers)


def _allowed(exchange: HttpExchange, origins: frozenset[str]) -> bytes | None:
    """Return the request's Origin header if pages of this origin may call the service, else
    None."""
    origins_sent = exchange.headers.get(b"origin", [])
    if len(origins_sent) != 1:
        return None
    return (
        origins_sent[0] if ANY in origins or origins_sent[0].decode("latin-1") in origins else None
    )
