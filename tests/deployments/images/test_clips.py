"""Clips over HTTP: their forms, where they stand in prompts, and what is refused."""

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken

from deployments.api.app import build_asgi
from deployments.api.options import ApiOptions
from deployments.images.intake import ImageIntake
from deployments.images.limits import ImageLimits
from engine.errors import InvalidRequest
from engine.images.processor import image_processor
from engine.library.prompts import Prompts
from engine.messages import Ready
from engine.text.chat_template import ChatTemplate
from engine.text.tokenizer import Tokenizer
from tests.deployments.api.asgi import Client, Reply
from tests.deployments.fake_backend import MODEL, FakeBackend, tiny_tokenizer
from tests.deployments.images.test_wire import encoded, part, text, url, user
from tests.deployments.images.vision_backend import TEMPLATE
from tests.engine.images.files import gradient, png, saved

FRAMES = [saved(gradient(64, 64 - shade), "JPEG") for shade in (0, 0, 0)]
FRAMES[1] = saved(gradient(64, 64).rotate(90), "PNG")
URLS = [url(frame) for frame in FRAMES]
JOINED = "data:video/jpeg;base64," + ",".join(map(encoded, FRAMES))
VIDEO = "<|vision_start|><|video_pad|><|vision_end|>"
KINDS = """{%- if part.type == 'video' -%}<|vision_start|><|video_pad|><|vision_end|>
{%- elif part.type == 'image' -%}"""


def clip(**fields: Any) -> dict[str, Any]:
    return {"type": "video", "video": URLS, **fields}


class Server:
    """A model with images and clips behind the HTTP API, and the library's encoder of prompts."""

    def __init__(self, folder: Path, name: str = "Qwen3VL", **limits: Any) -> None:
        from tokenizers import Tokenizer as Backend

        backend = Backend.from_str(tiny_tokenizer().backend.to_str())
        marks = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
        backend.add_special_tokens([AddedToken(mark, special=True) for mark in marks])
        names = {"eos_token": "<|im_end|>"}
        template = TEMPLATE.replace("{%- if part.type == 'image' -%}", KINDS)
        self.tokenizer = Tokenizer(
            backend, special_tokens=names, chat_template=ChatTemplate({"default": template}, names)
        )
        keys = ("vision_start_token_id", "vision_end_token_id", "image_token_id", "video_token_id")
        ids = {key: backend.token_to_id(mark) for key, mark in zip(keys, marks, strict=True)}
        config = {
            "architectures": [f"{name}ForConditionalGeneration"],
            **ids,
            "vision_config": {"depth": 2},
        }
        (folder / "config.json").write_text(json.dumps(config))
        size = {"size": {"shortest_edge": 32, "longest_edge": 1 << 20}, "patch_size": 16}
        for file in ("preprocessor_config.json", "video_preprocessor_config.json"):
            (folder / file).write_text(json.dumps(size))
        self.backend = FakeBackend()
        self.backend._tokenizer = self.tokenizer
        card = replace(self.backend.cards[MODEL], images=image_processor(folder))
        self.backend.cards[MODEL] = card
        self.intake = ImageIntake(ImageLimits(**limits))
        self._client = Client(build_asgi(self.backend, ApiOptions(images=self.intake)))
        tokens = [ids[key] for key in keys[2:]]
        ready = Ready(4096, 512, 16, 256, [2], {}, "", 256, image_token_ids=tokens)
        self.prompts = Prompts(self.tokenizer, ready, str(folder))

    def post(self, path: str, body: dict[str, Any]) -> Reply:
        return asyncio.run(self._client.post(path, body))

    def chat(self, *messages: dict[str, Any]) -> Reply:
        body = {"model": MODEL, "messages": list(messages), "max_tokens": 4}
        return self.post("/v1/chat/completions", body)

    def shown(self) -> str:
        """Return the last prompt with each image and piece of a clip as one placeholder."""
        request = self.backend.requests[-1]
        ids = list(request.token_ids)
        for image in reversed(request.images):
            span = ids[image.start : image.start + image.length]
            assert {*span} == {span[0]} and len(span) == image.size
            ids[image.start : image.start + image.length] = span[:1]
        return self.tokenizer.decode(ids, skip_special_tokens=False)


@pytest.fixture
def server(tmp_path: Path) -> Server:
    return Server(tmp_path)


@pytest.mark.parametrize(
    "written",
    [
        clip(fps=4),
        {"type": "video_url", "video_url": {"url": JOINED}, "fps": 4},
        {"type": "video_url", "video_url": JOINED, "fps": 4.0},
    ],
)
def test_a_clip_beside_images(server: Server, written: dict[str, Any]) -> None:
    """Bugs: an image's pixels in a clip's place; a clip of one form has other pixels."""
    still = part(FRAMES[0])
    typed = text("<|video_pad|>")
    assert server.chat(user(text("a"), still, written, text("b"), still, typed)).status == 200
    pieces = f"<0.1 seconds>{VIDEO}<0.5 seconds>{VIDEO}"
    mark = VIDEO.replace("video", "image")
    assert f"user\na{mark}{pieces}b{mark}<|video_pad|><|im_end|>" in server.shown()
    images = server.backend.requests[-1].images
    assert [image.shape[0] for image in images] == [1, 2, 2, 1]
    first, other, third = (images[1].pixels[:12288], images[1].pixels[12288:], images[2].pixels)
    assert first == images[0].pixels != other and third == first * 2
    pad = server.tokenizer.token_id("<|video_pad|>")
    spans = [server.backend.requests[-1].token_ids[image.start] == pad for image in images]
    assert spans == [False, True, True, False]
    assert server.backend.requests[-1].token_ids.count(pad) == sum(im.size for im in images[1:3])


def test_the_library_takes_the_same_clip(server: Server) -> None:
    """Bug: a program's clip is another prompt than a client's."""
    assert server.chat(user(text("a"), clip(fps=4), part(FRAMES[0]))).status == 200
    request = server.backend.requests[-1]
    image = {"type": "image", "image": FRAMES[0]}
    for video in ({"video": FRAMES}, {"video": iter(URLS)}, {"video": JOINED}):
        chat: list[Any] = [user(text("a"), {"type": "video", **video, "fps": 4}, image)]
        prompt = server.prompts.encode(chat)
        # the library's pictures are decoded when they are named, and the server's files later
        pixels = [(image.start, image.pixels) for image in prompt.images()]
        assert pixels == [(image.start, image.pixels) for image in request.images]
    assert prompt.ids == request.token_ids


def test_prompts_take_the_same_clips(server: Server) -> None:
    """Bugs: clips and images of `generate` in each other's places, or clips of another pace."""
    other = FRAMES[::-1]
    written = user(clip(fps=4), text("a"), part(FRAMES[0]), clip(video=[*map(url, other)]))
    assert server.chat(written).status == 200
    request = server.backend.requests[-1]
    still = VIDEO.replace("video", "image")
    prompt = f"<|im_start|>user\n{VIDEO}a{still}{VIDEO}<|im_end|>\n<|im_start|>assistant\n"
    for first in ({"video": FRAMES, "fps": 4}, {"video": JOINED, "fps": 4.0}):
        fields = {"prompt": prompt, "images": FRAMES[0], "videos": [first, iter(other)]}
        encoded = server.prompts.encode(fields)
        assert encoded.ids == request.token_ids
        pixels = [(image.start, image.pixels) for image in encoded.images()]
        assert pixels == [(image.start, image.pixels) for image in request.images]
    alone = [
        server.prompts.encode({"prompt": VIDEO, "videos": clips}).ids
        for clips in (JOINED, {"video": FRAMES}, [FRAMES], [JOINED])
    ]
    assert alone == alone[:1] * 4


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"videos": [FRAMES]}, r"has 2 placeholders <\|video_pad\|> for 1 clips; write one where"),
        ({"videos": 7}, "videos must be a list of clips, each a list of frames; got a int"),
        ({"videos": FRAMES[0]}, "videos must be a list of clips, .* got a bytes"),
        ({"videos": FRAMES}, r"videos\[0\] must be a list of frames, .* got a bytes"),
        ({"videos": [FRAMES, FRAMES[:1]]}, r"videos\[1\]: the clip has 1 frames"),
        ({"videos": [FRAMES, [b"a", b"b"]]}, r"videos\[1\]\[0\]: an image"),
        ({"videos": [{"video": FRAMES, "fps": 0}]}, r"videos\[0\].fps must be a number"),
        ({"videos": [{"fps": 2}]}, r"videos\[0\].video is required"),
        ({"videos": "a.mp4"}, r"videos\[0\] must be a list of frames, data:.* are not decoded"),
        ({"images": [], "clips": []}, "has a text as prompt, and images or videos"),
    ],
)
def test_prompts_that_are_refused(server: Server, fields: Any, message: str) -> None:
    """Bug: a prompt whose clips have no place is answered without them."""
    with pytest.raises(InvalidRequest, match=message):
        server.prompts.encode({"prompt": VIDEO * 2, **fields})


def test_what_a_model_takes_is_told(server: Server) -> None:
    """A client must know before it sends a clip."""

    async def listed() -> Any:
        reply = await Client(build_asgi(server.backend)).request("GET", "/v1/models", headers=())
        return reply.json()["data"][0]

    assert asyncio.run(listed())["input_modalities"] == ["text", "image", "video"]


@pytest.mark.parametrize(
    ("written", "code", "param"),
    [
        (clip(video=URLS[:1]), "invalid_clip", ""),
        (clip(video=[]), "invalid_clip", ""),
        (clip(video=None), "invalid_type", ".video"),
        (clip(video=JOINED), "invalid_type", ".video"),
        (clip(video=[URLS[0], 5]), "invalid_type", ".video[1]"),
        (clip(video=[URLS[0], url(png(9, 9))]), "invalid_clip", ""),
        (clip(video=[URLS[0], "data:image/png;base64,!"]), "invalid_image", ".video[1]"),
        (clip(video=[URLS[0], "http://host/a.png"]), "image_url_not_allowed", ".video[1]"),
        (clip(video=[URLS[0], url(FRAMES[1][:-60])]), "invalid_image", ".video"),
        (clip(video=URLS * 3), "too_many_images", ""),
        (clip(fps=0), "invalid_value", ".fps"),
        (clip(fps="2"), "invalid_value", ".fps"),
        ({"type": "video_url", "video_url": {"url": URLS[0]}}, "invalid_clip", ".video_url.url"),
        ({"type": "video_url", "video_url": "http://a/b.mp4"}, "invalid_clip", ".video_url"),
        ({"type": "video_url"}, "invalid_type", ".video_url"),
        (
            {"type": "video_url", "video_url": f"{JOINED},!"},
            "invalid_image",
            ".video_url[3]",
        ),
    ],
)
def test_what_is_refused(written: Any, code: str, param: str, tmp_path: Path) -> None:
    """Every fault is the client's, and is named; nothing stays counted."""
    server = Server(tmp_path, frames=8)
    reply = server.chat(user(text("a"), written))
    error = reply.json()["error"]
    assert (reply.status, error["code"]) == (400, code), error
    assert error["param"] == f"messages[0].content[1]{param}"
    assert server.backend.requests == [] and server.intake.memory.held == 0


def test_clips_of_a_request_are_counted_together(tmp_path: Path) -> None:
    """Bug: a limit of each clip lets a request have as many frames as images."""
    server = Server(tmp_path, frames=5)
    assert server.chat(user(clip())).status == 200
    error = server.chat(user(clip(), text("a"), clip())).json()["error"]
    assert error["param"] == "messages[0].content[2]" and "images.frames" in error["message"]


def test_a_template_of_texts_gets_places_of_clips(tmp_path: Path) -> None:
    """Bug: a model with a template of texts lists videos, and no chat with a clip is rendered."""
    Server(tmp_path)
    source = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    (tmp_path / "chat_template.jinja").write_text(source)
    template = ChatTemplate.load(tmp_path, {})
    assert template is not None
    parts = [{"type": "text", "text": "a"}, {"type": "video"}, {"type": "image"}]
    image = VIDEO.replace("video", "image")
    assert template.render([{"role": "user", "content": parts}]) == f"<user>a{VIDEO}{image}"


def test_tokens_are_counted_before_pixels(server: Server) -> None:
    """Frames of which there are headers alone."""
    error = server.chat(user(clip(video=[url(png(900, 900))] * 8))).json()["error"]
    assert error["code"] == "context_length_exceeded" and server.intake.decoded == 0


@pytest.mark.parametrize("name", ["Qwen2_5_VL", "Qwen2VL"])
def test_a_clip_in_one_piece(name: str, tmp_path: Path) -> None:
    """Bug: frames apart as Qwen3-VL has them, or seconds on Qwen2-VL's axis of time."""
    server = Server(tmp_path, name)
    assert server.chat(user(text("a"), clip(fps=4))).status == 200
    assert f"user\na{VIDEO}<|im_end|>" in server.shown()
    (image,) = server.backend.requests[-1].images
    assert image.shape == (4, 64, 64) and image.grid == (2, 2) and image.size == 8
    assert image.time_step == (2 if name == "Qwen2_5_VL" else 1)


def test_other_routes_refuse_clips_by_name(server: Server) -> None:
    """Bug: a route that leaves a clip out answers about something else."""
    message = 'takes text and images, no "video"; clips stand in /v1/chat/completions'
    chat = {"model": MODEL, "max_tokens": 4}
    anthropic = server.post("/v1/messages", {**chat, "messages": [user(clip())]})
    item = {"role": "user", "content": [clip()]}
    responses = server.post("/v1/responses", {"model": MODEL, "input": [item]})
    item = {"role": "user", "content": [{"type": "input_video", "video_url": JOINED}]}
    other = server.post("/v1/responses", {"model": MODEL, "input": [item]}).json()["error"]
    assert message.replace("video", "input_video") in other["message"]
    system = server.chat({"role": "system", "content": [clip()]}, user(text("a")))
    for reply in (anthropic, responses, system):
        assert reply.status == 400 and message in reply.json()["error"]["message"]
