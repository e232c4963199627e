"""/page: what is sent, to whom, and what it may do there."""

import asyncio
import hashlib
import posixpath
import re

from deployments.api.app import build_asgi
from deployments.api.options import ApiOptions
from deployments.api.page.routes import page_files
from tests.deployments.api.asgi import Client, Reply
from tests.deployments.fake_backend import FakeBackend

KEYS = frozenset({hashlib.sha256(b"key").digest()})
MOST = 150_000  # bytes of all files


def get(path: str, options: ApiOptions, *headers: tuple[bytes, bytes]) -> Reply:
    client = Client(build_asgi(FakeBackend(), options))
    return asyncio.run(client.request("GET", path, headers=headers))


def test_the_page_is_kept_to_its_host() -> None:
    """Bug: a policy that lets what a model writes run as a script, or be sent elsewhere."""
    for path in (
        "/page",
        "/page/app.js",
        "/page/chat/chat.js",
        "/page/style.css",
        "/page/icon.svg",
    ):
        reply = get(path, ApiOptions(page=True))
        policy = reply.header("content-security-policy") or ""
        assert reply.status == 200 and policy.startswith("default-src 'none'; script-src 'self';")
        assert "unsafe" not in policy and "*" not in policy and "http" not in policy
        for rule in ("base-uri 'none'", "form-action 'none'", "frame-ancestors 'none'"):
            assert rule in policy
        assert reply.header("x-content-type-options") == "nosniff"
        assert reply.header("referrer-policy") == "no-referrer"


def test_the_page_is_not_there_where_it_is_off() -> None:
    """Bug: an operator turned it off, and its files are still given out."""
    for path in ("/page", "/page/app.js", "/page/nothing.js"):
        for options in (ApiOptions(), ApiOptions(api_keys=KEYS)):
            reply = get(path, options)
            assert reply.status == 404 and b"http.page" in reply.body


def test_the_page_needs_no_key_and_opens_nothing_else() -> None:
    """Bug: a browser cannot send a key for a page; a path under /page that gets past the keys."""
    options = ApiOptions(page=True, api_keys=KEYS)
    assert get("/page", options).status == 200
    for path in ("/v1/models", "/page/../v1/models", "/page/%2e%2e/metrics", "/page/"):
        assert get(path, options).status in (401, 404)
    for name in ("..%2fapp.py", "__init__.py", "../files.py", "%2e%2e"):
        assert get(f"/page/{name}", options).status == 404


def test_the_page_is_small_and_whole() -> None:
    """Bug: a library comes in, or a module is imported that the wheel does not have."""
    files = page_files()
    assert sum(len(file.content) for file in files.values()) <= MOST
    for name, file in files.items():
        text = file.content.decode()
        modules = re.findall(r'from "(\.[^"]+)"', text)
        wanted = [posixpath.normpath(f"{posixpath.dirname(name)}/{module}") for module in modules]
        wanted += re.findall(r'"page/([^"]+)"', text)
        assert {module.lstrip("/") for module in wanted} <= files.keys(), name
        assert not re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|eval\(", text)
        assert "https://" not in text and not re.search(r"http://(?!www\.w3\.org/)", text), name
    index = files["index.html"].content.decode()
    assert "<style" not in index and " style=" not in index and " on" not in index
    assert re.findall(r"<script[^>]*>([^<]*)", index) == [""]


def test_a_file_is_sent_once() -> None:
    """Bug: every look at the page transfers all of it again; or an old one is kept for ever."""
    reply = get("/page/app.js", ApiOptions(page=True))
    tag = (reply.header("etag") or "").encode()
    again = get("/page/app.js", ApiOptions(page=True), (b"if-none-match", tag))
    assert again.status == 304 and not again.body and reply.header("cache-control") == "no-cache"
    assert get("/page/app.js", ApiOptions(page=True), (b"if-none-match", b'"x"')).status == 200
