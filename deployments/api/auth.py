"""check_key: API keys, denied by default."""

import hashlib
import hmac

from deployments.api.errors import AUTHENTICATION, ApiError
from deployments.api.exchange import Exchange


def check_key(exchange: Exchange, digests: frozenset[bytes]) -> None:
    """Exactly one ``Authorization: Bearer <key>`` whose SHA-256 is in digests.

    All digests are compared, each in constant time, so that the answer's time says nothing about
    them.
    Raises ApiError 401 invalid_api_key.
    """
    given = exchange.values(b"authorization")
    scheme, _, key = given[0].partition(b" ") if len(given) == 1 else (b"", b"", b"")
    digest = hashlib.sha256(key.strip()).digest()
    match = False
    for known in digests:
        match |= hmac.compare_digest(digest, known)
    if not match or scheme.lower() != b"bearer":
        raise ApiError(
            401,
            "invalid_api_key",
            "a valid API key is needed: Authorization: Bearer <key>",
            kind=AUTHENTICATION,
            headers=(("www-authenticate", "Bearer"),),
        )
