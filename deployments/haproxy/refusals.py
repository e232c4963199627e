"""HAProxy's own error responses, written to files as error objects."""

from http import HTTPStatus
from pathlib import Path

from deployments.api.http.errors import ApiError

# HAProxy's parser refuses a request head that exceeds its buffer, and can do so only in HTML. So
# the buffer is larger than the heads that routers accept, and routers refuse larger heads. A
# request that fits into the buffer can be retried at another router.
BUFFER_BYTES = 64 * 1024
# A smaller body fits together with its head: 2 KiB are reserved for the head and the headers that
# HAProxy adds.
REQUEST_BYTES = BUFFER_BYTES - 2048

UNREACHABLE = ApiError(503, "overloaded", "no router can take the request now", retry_after=1)
FULL = ApiError(503, "overloaded", "too many connections are open", retry_after=1)
ADDRESS_FULL = ApiError(
    429,
    "too_many_connections",
    "too many connections are open from this address",
    retry_after=1,
)
NO_HOST = ApiError(400, "invalid_http", "HTTP/1.1 needs the header Host")
VERSION = ApiError(400, "invalid_http", "the version of HTTP must be 1.0, 1.1 or 2")
NOWHERE = ApiError(404, "not_found", "nothing is served at this path")

# Replacements for HAProxy's HTML responses, by status. Errors of its parser stay in HTML, because
# HAProxy 2.8 applies `errorfile` only to later errors.
OWN = {
    400: ApiError(400, "invalid_http", "this is not valid HTTP"),
    408: ApiError(408, "request_timeout", "the request did not arrive in time"),
    413: ApiError(413, "body_too_large", "the body is larger than what the server takes"),
    429: ADDRESS_FULL,
    500: ApiError(503, "overloaded", "the edge cannot take the request now", retry_after=1),
    502: UNREACHABLE,
    503: UNREACHABLE,
    504: UNREACHABLE,
}


def write_own(folder: Path) -> dict[int, Path]:
    """Write a complete response file for each status in OWN, and return {status: path} for
    `errorfile`. Raises OSError."""
    files = {}
    for status, error in OWN.items():
        body = error.body()
        lines = [
            f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}",
            "content-type: application/json",
            f"content-length: {len(body)}",
            *(f"{name}: {value}" for name, value in error.headers),
        ]
        files[status] = folder / f"{status}.http"
        files[status].write_bytes("\r\n".join([*lines, "", ""]).encode() + body)
    return files


def returned(error: ApiError, file: Path) -> str:
    """Return the `return` action of an HAProxy rule that responds with this error.

    file: path to which the error's body is written.

    Raises OSError.
    """
    file.write_bytes(error.body())
    headers = "".join(f" hdr {name} {value}" for name, value in error.headers)
    return (
        f"return status {error.status} content-type application/json file {file}"
        f"{headers} hdr x-request-id %[uuid]"
    )
