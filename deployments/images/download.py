"""ImageDownloads: downloads images from http(s) addresses of allowed hosts.

The client chooses the address, which could be of a host that only this machine reaches. Therefore a
host name is resolved once, all of its addresses must be public, and the connection goes to the
first of them. Redirects are not followed, and no data of the request is sent.
"""

import asyncio
import contextlib
import ipaddress
import re
import socket
import ssl
from collections.abc import Iterator, Sequence
from urllib.parse import SplitResult, urlsplit

from deployments.images.limits import ImageLimits
from engine.errors import InvalidRequest
from engine.images.data_url import too_large
from engine.images.picture_file import invalid_image

MAX_URL = 4096  # characters
_MAX_HEADERS = 32 * 1024  # bytes of a response head
_READ = 64 * 1024
_AT_ONCE = 16  # concurrent downloads
_PORTS = {"http": 80, "https": 443}
_URL = re.compile(r"[!-~]+")  # printable ASCII
# Networks of public addresses that are translated to any IPv4 address: NAT64 and 6to4.
_LEADING_ON = tuple(map(ipaddress.ip_network, ("64:ff9b::/96", "64:ff9b:1::/48", "2002::/16")))

Address = ipaddress.IPv4Address | ipaddress.IPv6Address


def not_allowed(message: str) -> InvalidRequest:
    """Return the error for an image's address that is not allowed."""
    return invalid_image(message, code="image_url_not_allowed")


def _failed(reason: str) -> InvalidRequest:
    return invalid_image(f"could not be fetched: {reason}", code="image_not_fetched")


def is_public(address: Address) -> bool:
    """Whether an address is public, that is reachable from anywhere on the internet."""
    return (
        address.is_global
        and not address.is_multicast
        and not address.is_reserved
        and getattr(address, "ipv4_mapped", None) is None
        and not any(address in network for network in _LEADING_ON)
    )


async def resolve(host: str, port: int) -> Sequence[str]:
    """Return the addresses of a host. Raises OSError."""
    loop = asyncio.get_running_loop()
    infos = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [str(info[4][0]) for info in infos]


class ImageDownloads:
    """The downloader of images from allowed hosts, with at most _AT_ONCE downloads at a time.

    limits: the limits; `hosts` has patterns "host" and "*.domain", with or without a port.
    """

    def __init__(self, limits: ImageLimits) -> None:
        self._limits = limits
        self._at_once = asyncio.Semaphore(_AT_ONCE)

    async def fetch(self, url: str) -> bytes:
        """Download a URL, and return the body. Raises InvalidRequest: image_url_not_allowed,
        image_not_fetched, image_too_large."""
        parts, host, port = self._checked(url)
        limits = self._limits
        async with self._at_once:
            try:
                async with asyncio.timeout(limits.last_seconds):
                    return await self._fetch(parts, host, port)
            except TimeoutError:
                seconds = f"{limits.first_seconds:g} s to its headers, {limits.last_seconds:g} s"
                raise _failed(f"it took longer than {seconds} to its end") from None
            except (OSError, EOFError, ValueError, asyncio.LimitOverrunError) as error:
                if isinstance(error, InvalidRequest):
                    raise
                raise _failed("no answer in HTTP came from its host") from None

    def _checked(self, url: str) -> tuple[SplitResult, str, int]:
        """Return the parts, host and port of a URL, if it is allowed. Raises InvalidRequest."""
        if not self._limits.hosts:
            raise not_allowed(
                "is an http(s) address, and this server fetches none (images.hosts); send the "
                "picture itself, in base64"
            )
        try:
            if len(url) > MAX_URL or not _URL.fullmatch(url):
                raise ValueError
            parts = urlsplit(url)
            host, port = (parts.hostname or "").rstrip("."), parts.port
        except ValueError:
            raise not_allowed("is no address that can be fetched") from None
        if parts.username is not None or parts.password is not None:
            raise not_allowed("is an address with a user, which is not passed on")
        default = _PORTS[parts.scheme]
        port = default if port is None else port
        named = [pattern for pattern in self._limits.hosts if _names(pattern, host)]
        if not named:
            raise not_allowed("is at a host that images.hosts does not have")
        if not any(port == _port(pattern, default) for pattern in named):
            raise not_allowed(f"is at port {port}, and images.hosts has its host with another")
        return parts, host, port

    async def _fetch(self, parts: SplitResult, host: str, port: int) -> bytes:
        async with asyncio.timeout(self._limits.first_seconds):
            addresses = [
                ipaddress.ip_address(text.split("%")[0]) for text in await resolve(host, port)
            ]
            if not addresses or not all(map(is_public, addresses)):
                raise not_allowed("is at a host whose address is not public")
            context = ssl.create_default_context() if parts.scheme == "https" else None
            reader, writer = await asyncio.open_connection(
                str(addresses[0]),
                port,
                ssl=context,
                server_hostname=host if context is not None else None,
                limit=_MAX_HEADERS,
            )
        try:
            async with asyncio.timeout(self._limits.first_seconds):
                writer.write(_request(parts))
                await writer.drain()
                head = await reader.readuntil(b"\r\n\r\n")
            status, headers = _head(head)
            if 300 <= status < 400:
                raise _failed("its host answers with a redirect, which is not followed")
            if status != 200:
                raise _failed(f"its host answers with status {status}")
            return await self._body(reader, headers)
        finally:
            writer.close()
            with contextlib.suppress(OSError, asyncio.TimeoutError):
                writer.transport.abort()

    async def _body(self, reader: asyncio.StreamReader, headers: dict[bytes, bytes]) -> bytes:
        most = self._limits.file_bytes
        if b"content-encoding" in headers:
            raise _failed("its host answers in an encoding that was not asked for")
        body = bytearray()
        if headers.get(b"transfer-encoding", b"").lower() == b"chunked":
            while size := int((await reader.readuntil(b"\r\n")).split(b";")[0], 16):
                if size < 0 or len(body) + size > most:
                    raise too_large(most)
                body += (await reader.readexactly(size + 2))[:size]
            return bytes(body)
        length = headers.get(b"content-length")
        if length is not None and (not length.isdigit() or int(length[:18]) > most):
            raise too_large(most)
        while piece := await reader.read(_READ):
            body += piece
            if len(body) > most:
                raise too_large(most)
        if length is not None and len(body) != int(length):
            raise _failed("its host closed the connection before its end")
        return bytes(body)


def _port(pattern: str, default: int) -> int:
    own = pattern.partition(":")[2]
    return int(own) if own else default


def _names(pattern: str, host: str) -> bool:
    """Whether a pattern, without its port, is for a host."""
    name = pattern.lower().partition(":")[0]
    if name.startswith("*."):
        return host.endswith(name[1:]) and host != name[1:]
    return host == name


def _request(parts: SplitResult) -> bytes:
    path = parts.path or "/"
    query = f"?{parts.query}" if parts.query else ""
    lines = (
        f"GET {path}{query} HTTP/1.1",
        f"Host: {parts.netloc}",
        "Accept: image/*",
        "Accept-Encoding: identity",
        "User-Agent: manta",
        "Connection: close",
    )
    return "".join(f"{line}\r\n" for line in (*lines, "")).encode("ascii")


def _head(head: bytes) -> tuple[int, dict[bytes, bytes]]:
    """Parse a response's head into its status and {lower-case header name: value}. Raises
    ValueError."""
    lines: Iterator[bytes] = iter(head.split(b"\r\n"))
    match = re.match(rb"HTTP/1\.[01] (\d{3})", next(lines))
    if match is None:
        raise ValueError("no HTTP")
    headers = {}
    for line in lines:
        name, _, value = line.partition(b":")
        headers[name.strip().lower()] = value.strip()
    return int(match[1]), headers
