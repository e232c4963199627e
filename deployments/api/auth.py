"""The check of API keys, which denies by default."""

import hashlib
import hmac

from deployments.api.caller import ANYONE, LEAST_PRIORITY, NO_RULE, Caller
from deployments.api.http.errors import ApiError
from deployments.api.http.exchange import HttpExchange
from deployments.api.options import ApiOptions


def authenticate(exchange: HttpExchange, options: ApiOptions, *, admin: bool) -> Caller:
    """Return the caller that the API key in the request's headers identifies.

    The key comes from exactly one header ``Authorization: Bearer <key>`` or, without that header,
    from one ``x-api-key: <key>``. If keys are configured for this kind of route, the key's SHA-256
    must be among their digests. If none are configured, every caller is ANYONE.

    No other code reads these headers. Fair queueing, prefix cache, ownership and rights depend on
    the Caller, so the same key in either header means the same caller.

    All digests are compared, each in constant time, so that the time of the answer reveals nothing
    about them.

    admin: whether the route needs an admin key
    Raises ApiError 401 invalid_api_key, 403 permission_denied.
    """
    if not options.api_keys and not (admin and options.admin_keys):
        return ANYONE
    credentials = exchange.headers.get(b"authorization", [])
    if not credentials:
        credentials = [b"bearer " + key for key in exchange.headers.get(b"x-api-key", [])]
    scheme, _, key = credentials[0].partition(b" ") if len(credentials) == 1 else (b"", b"", b"")
    digest = hashlib.sha256(key.strip()).digest()
    user, operator = _among(digest, options.api_keys), _among(digest, options.admin_keys)
    if not (user or operator) or scheme.lower() != b"bearer":
        raise ApiError(
            401,
            "invalid_api_key",
            "a valid API key is needed: Authorization: Bearer <key>",
            headers=(("www-authenticate", "Bearer"),),
        )
    if admin and not operator:
        raise ApiError(403, "permission_denied", "this needs a key of http.admin_keys_file")
    return _caller(digest, operator, options)


def known_caller(id: str, options: ApiOptions) -> Caller | None:
    """Return the caller whose Caller.id is `id`; None if its key is no longer configured."""
    if not id:
        return ANYONE
    for digests in (options.admin_keys, options.api_keys):
        for digest in digests:
            if digest.hex()[:32] == id:
                return _caller(digest, digests is options.admin_keys, options)
    return None


def _caller(digest: bytes, operator: bool, options: ApiOptions) -> Caller:
    rule = options.rules.get(digest, NO_RULE)
    least = LEAST_PRIORITY if operator else rule.priority
    return Caller(digest.hex()[:32], operator, least, rule)


def _among(digest: bytes, digests: frozenset[bytes]) -> bool:
    match = False
    for known in digests:
        match |= hmac.compare_digest(digest, known)
    return match
