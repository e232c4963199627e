"""Images over HTTP: the forms of all dialects, where they stand in prompts, and what is refused."""

import asyncio
import base64
import gc
import gzip
import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from PIL import Image

from deployments.api.app import build_asgi
from deployments.api.options import ApiOptions
from deployments.images.intake import ImageIntake
from deployments.images.limits import ImageLimits
from tests.deployments.api.asgi import Client, Reply, scope_of
from tests.deployments.fake_backend import MODEL, FakeBackend
from tests.deployments.images.vision_backend import FIRST_TURN_ONLY, VisionBackend
from tests.engine.images.files import bomb, gradient, kinds, lies, others, png, saved
from tests.engine.images.test_picture_file import LIBRARY, mutated

WIDE, TALL = saved(gradient(40, 16), "PNG"), saved(gradient(16, 32), "JPEG")


def encoded(data: bytes) -> str:
    return base64.b64encode(data).decode()


def url(data: bytes) -> str:
    return f"data:image/png;base64,{encoded(data)}"


def part(data: bytes, **fields: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url(data), **fields}}


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def user(*parts: dict[str, Any]) -> dict[str, Any]:
    return {"role": "user", "content": list(parts)}


class Server:
    """A model with images behind the HTTP API."""

    def __init__(self, backend: FakeBackend | None = None, **limits: Any) -> None:
        self.backend = backend or VisionBackend()
        self.intake = ImageIntake(ImageLimits(**limits))
        self._client = Client(build_asgi(self.backend, ApiOptions(images=self.intake)))

    def post(self, path: str, body: dict[str, Any]) -> Reply:
        return asyncio.run(self._client.post(path, body))

    def chat(self, *messages: dict[str, Any], **fields: Any) -> Reply:
        body = {"model": MODEL, "messages": list(messages), "max_tokens": 4, **fields}
        return self.post("/v1/chat/completions", body)

    def shape(self) -> tuple[str, list[tuple[int, ...]]]:
        """Return the last prompt with each image as one <|image_pad|>, and the images' grids."""
        request = self.backend.requests[-1]
        ids, images = list(request.token_ids), list(request.images)
        for image in reversed(images):
            span = ids[image.start : image.start + image.length]
            assert isinstance(self.backend, VisionBackend)
            assert span == [self.backend.pad] * image.size
            assert ids[image.start - 1] == ids[image.start + image.length] == 0
            assert len(image.pixels) == np.prod(image.shape) * 3
            ids[image.start - 1 : image.start + image.length + 1] = [self.backend.pad]
        tokenizer = self.backend.tokenizer(MODEL)
        return tokenizer.decode(ids, skip_special_tokens=False), [image.grid for image in images]


@pytest.fixture
def server() -> Server:
    return Server()


IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"


def test_a_family_may_have_text_around_images(server: Server) -> None:
    """Bug: Gemma 3's ends of lines around an image, which its template does not write."""
    assert isinstance(server.backend, VisionBackend)
    server.backend.processor.text = "xy"
    assert server.chat(user(text("a<|image_pad|>"), part(WIDE), part(TALL))).status == 200
    shown, _ = server.shape()
    image = IMAGE.replace("<|image_pad|>", "xy<|image_pad|>xy")
    assert f"user\na<|image_pad|>{image}{image}<|im_end|>" in shown


def test_images_stand_where_they_were_written(server: Server) -> None:
    """Swapped images, or an image beside its text, are another question."""
    first = user(text("a"), part(WIDE), text("b"), part(TALL), text("c"))
    reply = server.chat(first, {"role": "assistant", "content": "d"}, user(part(TALL)))
    assert reply.status == 200
    shown, grids = server.shape()
    assert shown == (
        f"<|im_start|>user\na{IMAGE}b{IMAGE}c<|im_end|>\n<|im_start|>assistant\nd<|im_end|>\n"
        f"<|im_start|>user\n{IMAGE}<|im_end|>\n<|im_start|>assistant\n"
    )
    assert grids == [(2, 5), (4, 2), (4, 2)]
    images = server.backend.requests[-1].images
    assert images[1].digest == images[2].digest != images[0].digest
    assert reply.json()["usage"]["prompt_tokens"] == len(server.backend.requests[-1].token_ids)


def test_placeholders_in_texts_are_texts(server: Server) -> None:
    """A user's word would take an image's place, or crash an engine that looks for one."""
    words = "<|image_pad|> <|vision_start|>"
    assert server.chat(user(text(words), part(WIDE), text(words))).status == 200
    pad = server.backend.tokenizer(MODEL).token_id("<|image_pad|>")
    request = server.backend.requests[-1]
    assert request.token_ids.count(pad) == sum(image.size for image in request.images) == 10
    assert server.chat({"role": "user", "content": words}).status == 200
    assert pad not in server.backend.requests[-1].token_ids


def forms() -> dict[str, tuple[str, dict[str, Any]]]:
    """Return the form of "a", an image and "b" in each dialect: path and body."""
    block = {
        "type": "image",
        "source": {"type": "base64", "media_type": "x", "data": encoded(WIDE)},
    }
    chat = {"model": MODEL, "max_tokens": 4}
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    asked = [{"role": "user", "content": "q"}, {"role": "assistant", "tool_calls": [call]}]
    use = {
        "role": "assistant",
        "content": [{"type": "tool_use", "id": "c1", "name": "f", "input": {}}],
    }
    result = {"type": "tool_result", "tool_use_id": "c1", "content": [text("a"), block, text("b")]}
    items = [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]
    item = {"type": "input_image", "image_url": url(WIDE), "detail": "auto"}
    file = {"type": "file", "file": {"file_data": url(WIDE), "filename": "a.png"}}
    call_item = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"}
    output = {"type": "function_call_output", "call_id": "c1", "output": [items[0], item, items[1]]}
    image_url = {"type": "image_url", "image_url": url(WIDE)}
    return {
        "chat": (
            "/v1/chat/completions",
            {**chat, "messages": [user(text("a"), part(WIDE), text("b"))]},
        ),
        "chat, url alone": (
            "/v1/chat/completions",
            {**chat, "messages": [user(text("a"), image_url, text("b"))]},
        ),
        "chat, file": (
            "/v1/chat/completions",
            {**chat, "messages": [user(text("a"), file, text("b"))]},
        ),
        "chat, tool": (
            "/v1/chat/completions",
            {
                **chat,
                "messages": [
                    *asked,
                    {
                        "role": "tool",
                        "tool_call_id": "c1",
                        "content": [text("a"), part(WIDE), text("b")],
                    },
                ],
            },
        ),
        "responses": (
            "/v1/responses",
            {"model": MODEL, "input": [{"role": "user", "content": [items[0], item, items[1]]}]},
        ),
        "responses, tool": (
            "/v1/responses",
            {"model": MODEL, "input": [{"role": "user", "content": "q"}, call_item, output]},
        ),
        "messages": ("/v1/messages", {**chat, "messages": [user(text("a"), block, text("b"))]}),
        "messages, tool": (
            "/v1/messages",
            {**chat, "messages": [user(text("q")), use, user(result)]},
        ),
    }


@pytest.mark.parametrize("form", forms())
def test_the_forms_of_all_dialects(server: Server, form: str) -> None:
    """Each client has its own form for the same question."""
    path, body = forms()[form]
    reply = server.post(path, body)
    assert reply.status == 200, reply.body
    shown, grids = server.shape()
    assert f"a{IMAGE}b" in shown and grids == [(2, 5)]


def test_ollama(server: Server) -> None:
    """Ollama's images stand beside the text, and before it."""
    images = {"images": [encoded(WIDE), encoded(TALL)], "stream": False}
    turn = {"role": "user", "content": "a", "images": images["images"]}
    bodies = {
        "/api/chat": {"model": MODEL, "messages": [turn], "stream": False},
        "/api/generate": {"model": MODEL, "prompt": "a", **images},
    }
    for path, body in bodies.items():
        assert server.post(path, body).status == 200
        shown, grids = server.shape()
        assert f"user\n{IMAGE}{IMAGE}a<|im_end|>" in shown and grids == [(2, 5), (4, 2)]
    raw = server.post("/api/generate", {"model": MODEL, "prompt": "a", "raw": True, **images})
    assert raw.status == 400 and raw.json()["param"] == "images"
    shown = server.post("/api/show", {"model": MODEL}).json()
    assert "vision" in shown["capabilities"]


def test_what_a_model_takes_is_told(server: Server) -> None:
    """A client must know before it sends a picture."""

    async def listed(backend: FakeBackend) -> Any:
        reply = await Client(build_asgi(backend)).request("GET", "/v1/models", headers=())
        return reply.json()["data"][0]

    assert asyncio.run(listed(server.backend))["input_modalities"] == ["text", "image"]
    assert "input_modalities" not in asyncio.run(listed(FakeBackend()))


@pytest.mark.parametrize("form", forms())
def test_a_model_of_text_is_named(form: str) -> None:
    """An image that is dropped would be answered as if it had been seen."""
    path, body = forms()[form]
    reply = Server(FakeBackend()).post(path, body)
    error = reply.json()["error"]
    assert reply.status == 400 and f'the model "{MODEL}" takes text only' in error["message"]


def test_completions_refuse_images_by_name(server: Server) -> None:
    """An unknown field would be left out, and the text answered alone."""
    for name in ("images", "multi_modal_data", "multimodal_data", "image_data"):
        body = {"model": MODEL, "prompt": "a", name: [encoded(WIDE)]}
        error = server.post("/v1/completions", body).json()["error"]
        assert (error["code"], error["param"]) == ("modality_not_supported", name)


@pytest.mark.parametrize("role", ["system", "assistant", "developer"])
def test_other_roles(server: Server, role: str) -> None:
    """Models have seen no images there, and templates drop them."""
    ask = {"role": "user", "content": "a"}
    reply = server.chat({"role": role, "content": [part(WIDE)]}, ask)
    error = reply.json()["error"]
    shown = "system" if role == "developer" else role
    assert error["message"].endswith(f"of the roles user and tool, not {shown}")
    assert (reply.status, error["param"]) == (400, "messages[0].content[0].type")
    block = {"type": "image", "source": {"type": "base64", "data": encoded(WIDE)}}
    if role != "developer":
        body = {
            "model": MODEL,
            "max_tokens": 4,
            "messages": [{"role": role, "content": [block]}, ask],
        }
        assert f"not {role}" in server.post("/v1/messages", body).json()["error"]["message"]


@pytest.mark.parametrize(
    ("written", "code", "param"),
    [
        ({"type": "image_url"}, "invalid_type", "image_url"),
        ({"type": "image_url", "image_url": {}}, "invalid_type", "image_url.url"),
        (part(WIDE, detail="huge"), "invalid_value", "image_url.detail"),
        (
            {"type": "image_url", "image_url": "http://127.0.0.1:9/x"},
            "image_url_not_allowed",
            "image_url",
        ),
        (
            {"type": "image_url", "image_url": "file:///etc/passwd"},
            "image_url_not_allowed",
            "image_url",
        ),
        ({"type": "input_image", "file_id": "f"}, "not_supported", "file_id"),
        ({"type": "file", "file": {"file_id": "f"}}, "not_supported", "file.file_id"),
        (
            {"type": "file", "file": {"file_data": "data:application/pdf;base64,JVBERi0="}},
            "invalid_image",
            "file.file_data",
        ),
        (part(png(20_000, 20_000)), "image_too_large", "image_url.url"),
        (part(saved(gradient(600, 4), "PNG")), "invalid_image", "image_url.url"),
        (part(WIDE[:60]), "invalid_image", "image_url.url"),
        ({"type": "input_audio", "input_audio": {}}, "modality_not_supported", "type"),
    ],
)
def test_what_is_refused(server: Server, written: Any, code: str, param: str) -> None:
    """Every fault is the client's, and is named."""
    reply = server.chat(user(text("a"), written))
    error = reply.json()["error"]
    assert (reply.status, error["code"]) == (400, code), error
    assert error["param"] == f"messages[0].content[1].{param}"
    assert server.backend.requests == []
    assert server.intake.memory.held == 0


@pytest.mark.parametrize("kind", ["input_audio", "video_url", "document", "video"])
def test_audio_and_video(server: Server, kind: str) -> None:
    """Bug: a model that sees was said to take text only."""
    written = {"type": kind, kind: {}, "source": {}}
    turns = {"model": MODEL, "max_tokens": 4, "messages": [user(text("a"), written)]}
    if kind in ("document", "video"):
        path = "/v1/messages"
        use = {"type": "tool_use", "id": "c1", "name": "f", "input": {}}
        result = {"type": "tool_result", "tool_use_id": "c1", "content": [written]}
        answered = [user(text("a")), {"role": "assistant", "content": [use]}, user(result)]
        inner = server.post(path, {**turns, "messages": answered}).json()["error"]["message"]
        assert inner.startswith("messages[2].content[0].content[0]: ")
        system = server.post(path, {**turns, "system": [written]}).json()["error"]["message"]
        assert system == "system[0]: system prompts are texts"
    else:
        path = "/v1/chat/completions"
        refused = server.post("/tokenize", {"model": MODEL, "messages": turns["messages"]})
        assert f'no "{kind}"' in refused.json()["error"]["message"]
    reply = server.post(path, turns)
    assert reply.status == 400
    message = reply.json()["error"]["message"]
    begin = f'messages[0].content[1]: the model "{MODEL}" takes text'
    assert message == f'{begin} and images, no "{kind}"'
    alone = Server(FakeBackend()).post(path, turns).json()["error"]["message"]
    assert alone == f"{begin} only"


def test_tokens_are_counted_before_pixels(server: Server) -> None:
    """A header costs nothing; decoding what cannot be answered would cost a core."""
    reply = server.chat(user(part(png(2000, 2000))))  # there are no pixels behind the header
    error = reply.json()["error"]
    assert error["code"] == "context_length_exceeded" and error["param"] == "messages"
    assert (
        "Images are 4098 of these tokens" in error["message"] and "256 tokens" in error["message"]
    )
    assert server.intake.decoded == 0 and server.intake.memory.held == 0
    small = server.chat(user(part(png(2000, 2000), detail="low")))
    assert small.json()["error"]["code"] == "invalid_image"  # it fits, and is decoded


def test_images_beyond_the_cache_are_refused_before_they_are_decoded() -> None:
    """Bugs: the image is decoded first; the error names neither its field nor what to change."""
    backend = VisionBackend()
    backend.cards[MODEL] = replace(backend.cards[MODEL], image_tokens=200)
    server = Server(backend)
    large = png(200, 200)  # there are no pixels behind the header
    says = "an image of 625 tokens is larger than this engine takes (200 tokens, engine.image_cache"
    source = {"type": "base64", "media_type": "image/png", "data": encoded(large)}
    block = {"type": "image", "source": source}
    for path, sent, param, way_out in (
        (
            "/v1/chat/completions",
            part(large),
            "messages[0].content[0].image_url.url",
            "with detail: low, or fewer pixels",
        ),
        ("/v1/messages", block, "messages[0].content[0].source.data", "send it with fewer pixels"),
    ):
        body = {"model": MODEL, "messages": [user(sent)], "max_tokens": 4}
        error = server.post(path, body).json()["error"]
        assert f"{param}: {says}" in error["message"] and way_out in error["message"]
    reply = server.chat(user(part(large)))
    error = reply.json()["error"]
    assert reply.status == 400 and error["code"] == "image_too_large"
    assert error["param"] == "messages[0].content[0].image_url.url"
    assert server.intake.decoded == 0 and server.intake.memory.held == 0
    counted = server.post("/v1/messages/count_tokens", {"model": MODEL, "messages": [user(block)]})
    assert counted.json()["input_tokens"] > 625


def test_detail(server: Server) -> None:
    """Ignored, `low` would cost what `high` costs."""
    big = saved(gradient(64, 64), "PNG")
    assert server.chat(user(part(big, detail="low"))).status == 200
    assert server.shape()[1] == [(2, 2)]
    assert server.chat(user(part(big, detail="high"))).status == 200
    assert server.shape()[1] == [(8, 8)]


def test_limits_of_a_request() -> None:
    """Without them one request holds a router."""
    server = Server(per_request=2, memory_bytes=2**20)
    error = server.chat(user(*[part(WIDE)] * 3)).json()["error"]
    assert (error["code"], error["param"]) == ("too_many_images", "messages[0].content[2]")
    other = server.intake.memory.take(2**20 - 100)
    reply = server.chat(user(part(WIDE)))
    assert (reply.status, reply.json()["error"]["code"]) == (503, "overloaded")
    assert reply.header("retry-after")
    other.release()
    assert server.chat(user(part(WIDE))).status == 200


def test_limits_of_an_image_are_named() -> None:
    """An operator must know which setting to raise; none raises what a WebP may have."""
    server = Server(pixels=1000, file_bytes=2000)
    big = encoded(saved(gradient(400, 400), "BMP"))
    for written, reason in (
        (part(png(50, 50)), "has 50 x 50, more than 1000 pixels (images.pixels)"),
        (part(base64.b64decode(big)), "has more than 2000 bytes (images.file_bytes)"),
        ({"type": "file", "file": {"file_data": big}}, "has more than 2000 bytes (images."),
    ):
        error = server.chat(user(written)).json()["error"]
        assert error["code"] == "image_too_large" and reason in error["message"]
    webp = bytearray(kinds()["webp"])
    assert webp[12:16] == b"VP8 "
    webp[26:30] = b"\xff\x3f" * 2
    error = Server().chat(user(part(bytes(webp)))).json()["error"]
    assert error["message"].endswith("more than 24000000 pixels")


def large_body(data: bytes = b"") -> bytes:
    """Return a chat with a file, by default noise, above the limit of bodies of texts."""
    noise = np.random.default_rng(0).integers(0, 256, (1300, 1300, 3), np.uint8)
    data = data or saved(Image.fromarray(noise), "PNG")
    body = {"model": MODEL, "messages": [user(part(data, detail="low"))], "max_tokens": 4}
    raw = json.dumps(body).encode()
    assert len(raw) > ApiOptions().max_body_bytes
    return raw


TYPE = (b"content-type", b"application/json")


@pytest.mark.parametrize("chunked", [False, True])
def test_large_bodies_are_for_images(chunked: bool) -> None:
    """A photograph has more bytes than a text may have, also where its client tells no length."""
    raw = large_body()
    length = (b"content-length", str(len(raw)).encode())
    pieces = [raw[at : at + 50_000] for at in range(0, len(raw), 50_000)]

    async def send(server: Server) -> Reply:
        headers = [TYPE] if chunked else [TYPE, length]
        sent = pieces if chunked else raw
        return await server._client.request("POST", "/v1/chat/completions", sent, headers)

    server = Server()
    assert asyncio.run(send(server)).status == 200
    for smaller, most in (
        (Server(FakeBackend()), "4194304 bytes"),
        (Server(body_bytes=5_000_000), "5000000 bytes (images.body_bytes)"),
        (Server(body_bytes=5_000), "4194304 bytes"),
    ):
        reply = asyncio.run(send(smaller))
        assert reply.status == 413
        assert reply.json()["error"]["message"] == f"the body is larger than {most}"
        assert smaller.intake.memory.held == 0
    busy = Server(memory_bytes=len(raw) + 1000)
    other = busy.intake.memory.take(2000)
    assert asyncio.run(send(busy)).status == 503
    assert busy.intake.memory.held == 2000
    other.release()
    server.backend.requests.clear()
    gc.collect()
    assert server.intake.memory.held == 0


def test_a_body_without_a_length_is_counted_while_it_comes() -> None:
    """Bug: uploads that never end, of which none is counted, fill the router."""
    server, raw = Server(), large_body()
    held: list[int] = []
    statuses: list[int] = []

    async def receive() -> dict[str, Any]:
        if len(held) * 50_000 > len(raw):  # read whole
            await asyncio.sleep(60)
        at = len(held) * 50_000
        held.append(server.intake.memory.held)
        piece = raw[at : at + 50_000]
        return {"type": "http.request", "body": piece, "more_body": at + 50_000 < len(raw)}

    async def send(message: dict[str, Any]) -> None:
        statuses.append(message.get("status", 0))

    scope = scope_of("POST", "/v1/chat/completions", [TYPE])
    asyncio.run(server._client.app(scope, receive, send))
    assert statuses[0] == 200
    assert held[0] == held[40] == 0 and len(raw) <= held[-1] <= len(raw) + 2**20


def test_large_bodies_may_be_compressed() -> None:
    """Bug: the limit of texts for a compressed body, of which the client tells another length."""
    raw = large_body(saved(gradient(1300, 1300), "BMP"))
    headers = [TYPE, (b"content-encoding", b"gzip")]

    async def send(server: Server) -> Reply:
        packed = gzip.compress(raw, 1)
        return await server._client.request("POST", "/v1/chat/completions", packed, headers)

    server = Server()
    assert asyncio.run(send(server)).status == 200
    for smaller, most in (
        (Server(FakeBackend()), "4194304 bytes unpacked"),
        (Server(body_bytes=5_000_000), "5000000 bytes unpacked (images.body_bytes)"),
    ):
        reply = asyncio.run(send(smaller))
        assert reply.status == 413
        assert reply.json()["error"]["message"] == f"the body is larger than {most}"
    busy = Server(memory_bytes=len(raw) + 1000)
    busy.intake.memory.take(2000)
    assert asyncio.run(send(busy)).status == 503
    server.backend.requests.clear()
    gc.collect()
    assert server.intake.memory.held == 0


def test_frames_that_are_not_seen_are_told(server: Server) -> None:
    """A clip of which one frame was seen would be answered as if it were whole."""
    reply = server.chat(user(part(kinds()["gif animated"])))
    assert reply.status == 200
    assert reply.header("x-ignored-fields") == "messages[0].content[0].image_url.url.frames"


def test_keys_without_effect_are_told(server: Server) -> None:
    """Bug: what a client asks for inside of a part was left out in silence."""
    image, file = part(WIDE, min_pixels=9, detail="low"), {"file_data": url(WIDE), "a b": 1}
    parts = [
        {**text("a"), "foo": 1, "annotations": [], "cache_control": {"type": "ephemeral"}},
        {**image, "uuid": "x"},
        {"type": "file", "file": {**file, "filename": "a.png", "file_id": None}},
    ]
    reply = server.chat(user(*parts))
    assert reply.status == 200
    assert (reply.header("x-ignored-fields") or "").split(", ") == [
        "messages[0].content[0].foo",
        "cache_control",
        "messages[0].content[1].uuid",
        "messages[0].content[1].image_url.min_pixels",
        "messages[0].content[2].file.a?b",
    ]
    assert server.chat(user(text("a"), part(WIDE))).header("x-ignored-fields") is None


def test_a_template_without_a_place_for_an_image() -> None:
    """The image would be left out, or another one would stand in its place."""
    server = Server(VisionBackend(FIRST_TURN_ONLY))
    path, body = forms()["chat, tool"]
    error = server.post(path, body).json()["error"]
    assert error["code"] == "image_not_shown" and "0 of the 1 images" in error["message"]


def test_prompts_with_images_are_not_cut(server: Server) -> None:
    """Half an image has no embeddings."""
    error = server.chat(user(part(WIDE)), truncate_prompt_tokens=9).json()["error"]
    assert (error["code"], error["param"]) == ("conflicting_fields", "truncate_prompt_tokens")
    assert server.chat(user(part(WIDE)), truncate_prompt_tokens=200).status == 200


def test_tokens_are_counted_without_an_answer(server: Server) -> None:
    """Anthropic's clients ask for the count first."""
    path, body = forms()["messages"]
    counted = server.post("/v1/messages/count_tokens", {n: body[n] for n in ("model", "messages")})
    usage = server.post(path, body).json()["usage"]
    tokens = usage["input_tokens"] + usage["cache_read_input_tokens"]
    assert tokens == counted.json()["input_tokens"]
    reply = server.post("/tokenize", {"model": MODEL, "messages": [user(part(WIDE))]})
    assert reply.status == 400 and "messages[0].content[0]" in reply.json()["error"]["message"]


def test_pixels_are_given_back(server: Server) -> None:
    """A leak of one image a request fills a router in minutes."""
    for stream in (False, True):
        assert server.chat(user(part(WIDE)), stream=stream).status == 200
    assert server.intake.memory.held > 0  # the backend of this test keeps its requests
    server.backend.requests.clear()
    gc.collect()
    assert server.intake.memory.held == 0


def fuzzed(seeds: range) -> None:
    server = Server(pixels=1_000_000)
    for seed in seeds:
        reply = server.chat(user(part(mutated(seed), detail="low")))
        assert reply.status in (200, 400), (seed, reply.body)
        if reply.status == 400:
            error = reply.json()["error"]
            reason = error["message"].removeprefix(error["param"])
            assert not LIBRARY.search(reason), (seed, reason)


def test_fuzzed_files(server: Server) -> None:
    """A file that no decoder expected must cost its sender a 400, and nobody anything else."""
    fuzzed(range(200))
    for data in (*others().values(), bomb(300)[:-50]):
        assert server.chat(user(part(data, detail="low"))).status == 400


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses", "/v1/messages"])
async def test_lying_files_harm_nobody_else(path: str) -> None:
    """Bug: a file that stops the loop, or takes others' streams with it."""
    server = Server(memory_bytes=2**24)
    server.backend.script = "one two three four five six seven eight"
    server.backend.pause = 0.02

    async def stream() -> str:
        message = user(text("a"), part(WIDE))
        body = {"model": MODEL, "messages": [message], "max_tokens": 60, "stream": True}
        reply = await server._client.post("/v1/chat/completions", body)
        events = [event for event in reply.events() if event != "[DONE]"]
        return "".join(event["choices"][0]["delta"].get("content") or "" for event in events)

    def body(data: bytes) -> dict[str, Any]:
        item = {"type": "input_image", "image_url": url(data), "detail": "low"}
        block = {"type": "image", "source": {"type": "base64", "data": encoded(data)}}
        if path == "/v1/responses":
            return {"model": MODEL, "input": [{"role": "user", "content": [item]}]}
        written = block if path == "/v1/messages" else part(data, detail="low")
        return {"model": MODEL, "messages": [user(written)], "max_tokens": 4}

    streams = [asyncio.create_task(stream()) for _ in range(3)]
    files = {**lies(), **others()}
    replies = await asyncio.gather(
        *(server._client.post(path, body(data)) for data in files.values())
    )
    for name, reply in zip(files, replies, strict=True):
        decodable = "a row more" in name or name == "gif, zero"
        assert reply.status == 400 or (decodable and reply.status == 200), (name, reply.body)
    assert set(await asyncio.gather(*streams)) == {server.backend.script}
    server.backend.requests.clear()
    gc.collect()
    assert server.intake.memory.held == 0


@pytest.mark.slow
def test_many_fuzzed_files() -> None:
    """The mutations of the test above, in numbers that reach rare branches."""
    fuzzed(range(200, 5000))
