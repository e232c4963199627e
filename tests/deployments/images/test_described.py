"""/openapi.json on images: what it allows is answered, what it does not is refused."""

from typing import Any

import pytest
from jsonschema import Draft202012Validator

from deployments.api.openapi.document import document
from deployments.api.options import ApiOptions
from deployments.api.routes import ROUTES
from tests.deployments.fake_backend import MODEL
from tests.deployments.images.test_wire import WIDE, Server, encoded, forms, part, text, url, user

PATHS = document(ROUTES, ApiOptions())["paths"]
ITEM = {"type": "input_image", "image_url": url(WIDE)}
BLOCK = {"type": "image", "source": {"type": "base64", "data": encoded(WIDE)}}
IMAGES = [encoded(WIDE)]


def allowed(path: str, body: dict[str, Any]) -> bool:
    content = PATHS[path]["post"]["requestBody"]["content"]["application/json"]
    return bool(Draft202012Validator(content["schema"]).is_valid(body))


def bodies() -> dict[str, tuple[str, dict[str, Any], bool]]:
    """Return bodies by name: path, body and whether it is answered."""
    chat = {"model": MODEL, "max_tokens": 4}
    asked = {"role": "user", "content": "a"}
    turn = {**asked, "images": IMAGES}
    cases: dict[str, tuple[str, dict[str, Any], bool]] = {
        **{name: (*form, True) for name, form in forms().items()},
        "ollama": ("/api/chat", {"model": MODEL, "messages": [turn]}, True),
        "ollama, prompt": (
            "/api/generate",
            {"model": MODEL, "prompt": "a", "images": IMAGES},
            True,
        ),
        "ollama, a text": ("/api/generate", {"model": MODEL, "prompt": "a", "images": "x"}, False),
        "ollama, numbers": (
            "/api/chat",
            {"model": MODEL, "messages": [{**turn, "images": [1]}]},
            False,
        ),
        "ollama, system": (
            "/api/chat",
            {"model": MODEL, "messages": [{**turn, "role": "system"}, asked]},
            False,
        ),
    }
    for name, written in {
        "no url": {"type": "image_url"},
        "an empty object": {"type": "image_url", "image_url": {}},
        "a number": {"type": "image_url", "image_url": {"url": 5}},
        "null": {"type": "image_url", "image_url": None},
        "detail": part(WIDE, detail="huge"),
        "an id": {"type": "file", "file": {"file_data": url(WIDE), "file_id": "f"}},
        "no file": {"type": "file"},
        "video": {"type": "video_url", "video_url": {"url": "x"}},
    }.items():
        cases[f"chat, {name}"] = (
            "/v1/chat/completions",
            {**chat, "messages": [user(text("a"), written)]},
            False,
        )
    for role in ("system", "developer", "assistant"):
        cases[f"chat, {role}"] = (
            "/v1/chat/completions",
            {**chat, "messages": [{"role": role, "content": [part(WIDE)]}, asked]},
            False,
        )
    for name, item in {
        "no url": {"type": "input_image"},
        "an id": {**ITEM, "file_id": "f"},
    }.items():
        turns = [{"role": "user", "content": [item]}]
        cases[f"responses, {name}"] = ("/v1/responses", {"model": MODEL, "input": turns}, False)
    for name, block in {
        "no source": {"type": "image"},
        "another source": {"type": "image", "source": {"type": "file", "file_id": "f"}},
        "no data": {"type": "image", "source": {"type": "base64"}},
        "a document": {**BLOCK, "type": "document"},
    }.items():
        cases[f"messages, {name}"] = ("/v1/messages", {**chat, "messages": [user(block)]}, False)
    turns = [asked, {"role": "assistant", "content": [BLOCK]}]
    cases["messages, assistant"] = ("/v1/messages", {**chat, "messages": turns}, False)
    cases["messages, system"] = (
        "/v1/messages",
        {**chat, "messages": [asked], "system": [BLOCK]},
        False,
    )
    return cases


@pytest.mark.parametrize("name", bodies())
def test_the_document_says_what_is_taken(name: str) -> None:
    """Bug: the document left images out, so no generated client could send one."""
    path, body, answered = bodies()[name]
    assert allowed(path, body) == answered
    reply = Server().post(path, body)
    assert (reply.status == 200) == answered, reply.body
    assert answered or reply.status == 400
