import asyncio
import ipaddress
from collections.abc import AsyncIterator, Sequence

import pytest

from deployments.images import download
from deployments.images.download import ImageDownloads, is_public
from deployments.images.limits import ImageLimits
from engine.errors import InvalidRequest

OK = b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\n"
ANSWERS = {
    "/plain": OK + b"Content-Length: 5\r\n\r\nhello",
    "/open": OK + b"\r\nhello",
    "/chunked": OK + b"Transfer-Encoding: chunked\r\n\r\n3;x=y\r\nhel\r\n2\r\nlo\r\n0\r\n\r\n",
    "/redirect": b"HTTP/1.1 302 Found\r\nLocation: http://127.0.0.1/secret\r\n\r\n",
    "/missing": b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n",
    "/large": OK + b"Content-Length: 5000\r\n\r\n" + bytes(5000),
    "/larger": OK + b"Content-Length: " + b"9" * 30 + b"\r\n\r\n",
    "/unbounded": OK + b"\r\n" + bytes(5000),
    "/chunks": OK + b"Transfer-Encoding: chunked\r\n\r\nFFFFFFFF\r\n",
    "/cut": OK + b"Content-Length: 9\r\n\r\nhello",
    "/zipped": OK + b"Content-Encoding: gzip\r\n\r\nhello",
    "/nonsense": b"\x16\x03\x01 this is no HTTP\r\n\r\n",
    "/headers": b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 20_000,
    "/silent": b"",
    "/slow": OK + b"\r\n",
}


@pytest.fixture
async def server(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[tuple[str, list[bytes]]]:
    """Yield the address of a server, and the requests that it gets."""
    requests: list[bytes] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        requests.append(head)
        path = head.split()[1].decode().split("?")[0]
        writer.write(ANSWERS[path])
        if path in ("/silent", "/slow"):
            await asyncio.sleep(2)
        writer.close()

    listening = await asyncio.start_server(answer, "127.0.0.1", 0)
    port = listening.sockets[0].getsockname()[1]

    async def resolve(host: str, port: int) -> Sequence[str]:
        return ["127.0.0.1"]

    monkeypatch.setattr(download, "resolve", resolve)
    monkeypatch.setattr(download, "is_public", lambda address: True)
    yield f"http://pictures.example:{port}", requests
    listening.close()


def downloads(address: str, **limits: float) -> ImageDownloads:
    host = address.removeprefix("http://")
    fields = {"file_bytes": 4096, "first_seconds": 0.3, "last_seconds": 0.6, **limits}
    return ImageDownloads(ImageLimits(hosts=(host,), **fields))  # type: ignore[arg-type]


@pytest.mark.parametrize("path", ["/plain", "/open", "/chunked"])
async def test_bodies(server: tuple[str, list[bytes]], path: str) -> None:
    """HTTP ends a body in three ways."""
    address, requests = server
    assert await downloads(address).fetch(f"{address}{path}?a=b#c") == b"hello"
    head = requests[0].decode()
    assert head.startswith(f"GET {path}?a=b HTTP/1.1\r\n")
    assert f"\r\nHost: {address[7:]}\r\n" in head and "authorization" not in head.lower()


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("/redirect", "redirect, which is not followed"),
        ("/missing", "status 404"),
        ("/large", "more than 4096 bytes"),
        ("/larger", "more than 4096 bytes"),
        ("/unbounded", "more than 4096 bytes"),
        ("/chunks", "more than 4096 bytes"),
        ("/cut", "closed the connection"),
        ("/zipped", "encoding"),
        ("/nonsense", "no answer in HTTP"),
        ("/headers", "no answer in HTTP"),
        ("/silent", "took longer than 0.3 s"),
        ("/slow", "took longer than 0.3 s to its headers, 0.6 s to its end"),
    ],
)
async def test_answers_that_are_refused(
    server: tuple[str, list[bytes]], path: str, says: str
) -> None:
    """Whatever a host answers is the client's error, soon and bounded."""
    address, _ = server
    with pytest.raises(InvalidRequest, match=says):
        await downloads(address).fetch(f"{address}{path}")


@pytest.mark.parametrize(
    "url",
    [
        "http://other.example/x",
        "http://pictures.example.other.example/x",
        "http://pictures.example:81/x",
        "http://user:secret@pictures.example/x",
        "http://pictures.example@127.0.0.1/x",
        "http://127.0.0.1/x",
        "http://[::1]/x",
        "http://2130706433/x",
        "http://pictures.example/\r\nHost: x",
        "http://pictures.example:99999/x",
        "http://[pictures.example/x",
        "http:///x",
        "http://pictures.example/" + "x" * 5000,
        "http://example.net/x",  # not below itself
    ],
)
async def test_hosts_that_are_not_allowed(url: str) -> None:
    """A client must not choose hosts, nor write a request."""
    limits = ImageLimits(hosts=("pictures.example", "*.example.net"))
    with pytest.raises(InvalidRequest) as refused:
        await ImageDownloads(limits).fetch(url)
    assert refused.value.code == "image_url_not_allowed"
    if url == "http://pictures.example:81/x":
        assert "is at port 81, and images.hosts has its host with" in refused.value.message
    if url == "http://other.example/x":
        assert "a host that images.hosts does not have" in refused.value.message


@pytest.mark.parametrize(
    "address",
    [
        *("127.0.0.1", "0.0.0.0", "10.1.2.3", "172.16.0.1", "192.168.1.1", "169.254.169.254"),
        *("100.64.0.1", "224.0.0.1", "255.255.255.255", "192.0.2.1", "240.0.0.1"),
        *("::1", "::", "fe80::1", "fc00::1", "ff02::1", "::ffff:8.8.8.8", "::ffff:127.0.0.1"),
        *("64:ff9b::7f00:1", "2002:7f00:1::", "2001:0:7f00:1::", "fd00:ec2::254"),
    ],
)
def test_addresses_that_are_not_public(address: str) -> None:
    """Each of these leads to this machine, its network, or a cloud's metadata."""
    assert not is_public(ipaddress.ip_address(address))


async def test_an_allowed_name_may_not_lead_inside(monkeypatch: pytest.MonkeyPatch) -> None:
    """Names are their owner's: an allowed one can be pointed at 127.0.0.1, or at both."""
    assert is_public(ipaddress.ip_address("1.1.1.1"))
    for addresses in (["127.0.0.1"], ["1.1.1.1", "10.0.0.1"], []):

        async def resolve(host: str, port: int, found: Sequence[str] = addresses) -> Sequence[str]:
            return found

        monkeypatch.setattr(download, "resolve", resolve)
        limits = ImageLimits(hosts=("a.example",))
        with pytest.raises(InvalidRequest, match="not public"):
            await ImageDownloads(limits).fetch("http://a.example/x")
