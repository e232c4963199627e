"""Prompts with images in the library: what a picture may be, and where its tokens stand."""

import base64
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec import structs
from PIL import Image as Pillow

from deployments.api.generation.images import DETAILS as HTTP_DETAILS
from engine.errors import InvalidRequest
from engine.images.image import Image
from engine.images.layout import DEFAULT_FPS, DETAILS
from engine.library import prompts as library
from engine.library.pictures import Clip, read_clips
from engine.library.prompts import EncodedPrompt, Prompts, images_ahead
from engine.messages import Ready
from engine.text.tokenizer import Tokenizer
from tests.deployments.images.fake_processor import FakeProcessor
from tests.deployments.images.vision_backend import vision_tokenizer
from tests.engine.images.files import gradient, saved
from tests.engine.images.folders import CASES
from tests.engine.images.test_processors import write_folder

READY = Ready(256, 512, 16, 16, [2], {}, "", 256)
PICTURE = gradient(40, 16)
TEXT = {"type": "text", "text": "a"}
SHOWN = {"type": "image", "image": PICTURE}
MARK = "<|vision_start|><|image_pad|><|vision_end|>"


@pytest.fixture
def encoder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Prompts:
    tokenizer = vision_tokenizer()
    pad = tokenizer.token_id("<|image_pad|>")
    assert pad is not None
    processor = FakeProcessor("<|image_pad|>", pad, 0, 0)
    monkeypatch.setattr(library, "image_processor", lambda folder, encode: processor)
    (tmp_path / "config.json").write_text("{}")
    ready = structs.replace(READY, image_token_ids=[pad])
    return Prompts(tokenizer, ready, str(tmp_path))


def chat(*parts: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": list(parts)}]


def test_pictures_of_all_sorts_are_the_same(encoder: Prompts, tmp_path: Path) -> None:
    """A picture's pixels must not depend on how a program has it."""
    data = saved(PICTURE, "PNG")
    (tmp_path / "a.png").write_bytes(data)
    pictures = [PICTURE, PICTURE.convert("RGBA"), data, tmp_path / "a.png", str(tmp_path / "a.png")]
    encoded = [encoder.encode(chat({"type": "image", "image": picture})) for picture in pictures]
    assert len({prompt.images()[0].digest for prompt in encoded}) == 1
    assert len({tuple(prompt.ids) for prompt in encoded}) == 1
    image = encoded[0].images()[0]
    expected = np.asarray(PICTURE.resize((40, 16), Pillow.Resampling.BICUBIC))
    assert image.pixels == expected.tobytes() and image.shape == (1, 16, 40)


def test_token_ids_are_taken_as_they_are(encoder: Prompts) -> None:
    """A prompt with a sampled image token is refused, though nobody typed it."""
    assert encoder.encode([5, 6, 7]).verbatim
    assert not encoder.encode("five").verbatim
    assert not encoder.encode(chat(TEXT)).verbatim


def test_images_stand_where_their_placeholders_were(encoder: Prompts) -> None:
    """A prompt's own text may have placeholders; a chat's text may not."""
    other = gradient(16, 16)
    prompt = {"prompt": f"a{MARK}b{MARK}", "images": [PICTURE, other]}
    first, second = encoder.encode(prompt).images()
    ids = encoder.encode(prompt).ids
    assert (first.size, second.size) == (10, 4)
    assert ids[first.start : first.start + 10] == [ids[second.start]] * 10
    typed = {"type": "text", "text": MARK}
    asked = encoder.encode(chat(typed, {"type": "image", "image": other}, typed))
    assert asked.ids.count(ids[first.start]) == 4
    with pytest.raises(InvalidRequest, match=r"prompt has 2 placeholders .* for 1 images"):
        encoder.encode({"prompt": f"a{MARK}b{MARK}", "images": [PICTURE]})


@pytest.mark.parametrize(
    ("picture", "code"),
    [
        (b"hello", "invalid_image"),
        (saved(PICTURE, "PNG")[:60], "invalid_image"),
        ("/nowhere/a.png", "invalid_image"),
        ("data:image/png;base64,!", "invalid_image"),
        (7, "invalid_type"),
    ],
)
def test_what_is_no_picture(encoder: Prompts, picture: Any, code: str) -> None:
    """An exception of Pillow's would not be caught by who catches ours."""
    with pytest.raises(InvalidRequest) as refused:
        encoder.encode(chat({"type": "image", "image": picture}))
    assert refused.value.code == code


def test_what_does_not_fit(encoder: Prompts, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model of text must not get tokens of images, nor a context more than it has."""
    with pytest.raises(InvalidRequest, match="maximum context length is 256 tokens"):
        encoder.encode(chat({"type": "image", "image": gradient(512, 512)}))
    monkeypatch.setattr(library, "image_processor", lambda folder, encode: None)
    other = Prompts(vision_tokenizer(), encoder._ready, encoder._model)
    with pytest.raises(InvalidRequest, match="takes text only"):
        other.encode(chat({"type": "image", "image": PICTURE}))
    with pytest.raises(InvalidRequest, match=r"videos\[0\]: this model takes no clips"):
        encoder.encode({"prompt": MARK, "videos": [[PICTURE, PICTURE]]})


@pytest.mark.parametrize(
    ("prompt", "place", "way_out"),
    [
        (chat(SHOWN), r"messages\[0\].content\[0\]", "with detail: low, or fewer pixels"),
        ({"prompt": MARK * 2, "images": [gradient(8, 8), PICTURE]}, r"images\[1\]", "with fewer"),
    ],
)
def test_images_beyond_the_cache(encoder: Prompts, prompt: Any, place: str, way_out: str) -> None:
    """Bug: the batch runs, and the answer is empty."""
    ready = structs.replace(encoder._ready, image_tokens=4)
    small = Prompts(vision_tokenizer(), ready, encoder._model)
    says = rf"{place}: an image of 10 tokens .* \(4 tokens, engine.image_cache_tokens\).*{way_out}"
    with pytest.raises(InvalidRequest, match=says) as refused:
        small.encode(prompt)
    assert refused.value.code == "image_too_large"
    assert small.encode(chat({**SHOWN, "detail": "low"})).images()[0].size == 4


def test_placeholders_without_an_image(encoder: Prompts) -> None:
    """Bugs: such a prompt runs, and its answer is empty; in a list of texts it is answered."""
    text = f"a{MARK}"
    for prompts in ([text], ["a", text], [{"prompt": text}]):
        with pytest.raises(InvalidRequest, match="1 placeholders of images") as refused:
            encoder.encode_all(prompts)
        assert refused.value.code == "image_not_shown"
    ids = encoder.encode({"prompt": text, "images": [PICTURE]}).ids
    assert encoder.encode(ids).verbatim
    assert encoder.encode_all(["a", "b"])[1].ids == encoder.encode("b").ids


def test_clips_of_programs() -> None:
    """Bugs: a misspelt rate is the default one; null, which HTTP takes, is refused."""
    frames = [PICTURE, PICTURE]
    clips = read_clips([frames, {"video": frames, "fps": None}, {"video": frames, "fps": 3}])
    assert [clip.fps for clip in clips if isinstance(clip, Clip)] == [DEFAULT_FPS, DEFAULT_FPS, 3]
    with pytest.raises(InvalidRequest, match=r"videos\[0\] has FPS; a clip has video and fps"):
        read_clips([{"video": frames, "FPS": 3}])


def test_tokens_between_tiles_are_the_tokenizers(tmp_path: Path) -> None:
    """Bug: the tokenizer that prompts have does not reach the processor of a picture in tiles."""
    case = CASES["SmolVLM"]
    write_folder(tmp_path, case)
    ready = structs.replace(READY, image_token_ids=[90])
    encoder = Prompts(Tokenizer.load(tmp_path), ready, str(tmp_path))
    encoded = encoder.encode({"prompt": "7<image>9", "images": [gradient(40, 16)]})
    tile, whole = [90] * 4, [94, 91, 92, 90, 90, 90, 90, 91]
    assert encoded.ids == [7, 91, 95, *tile, 91, 96, *tile, *whole, 9]
    (image,) = encoded.images()
    assert (image.start, image.length, image.size, image.shape) == (3, 17, 12, (3, 16, 16))


@pytest.mark.parametrize(
    ("message", "names"),
    [
        ({"content": [TEXT, {"type": "audio", "audio": b""}]}, r"\[0\].content\[1\].type 'audio'"),
        ({"content": [{"type": "picture"}]}, "use one of text, refusal, image, image_url"),
        ({"content": ["a"]}, r"\[0\].content\[0\] must be an object with a type"),
        ({"content": [{"type": "text"}]}, r"content\[0\].text must be a string"),
        ({"content": "a", "images": [PICTURE]}, r"messages\[0\].images() is not read"),
        ({"content": [{"type": "image"}]}, r"content\[0\].image is required"),
        ({"content": [{"type": "image", "url": "a.png"}]}, r"content\[0\].image is required"),
        ({"content": [{"type": "image_url", "image_url": {}}]}, r"image_url.url is required"),
        ({"content": [SHOWN | {"detail": "tiny"}]}, r"\[0\].detail must be one of auto, low, high"),
        ({"content": [SHOWN], "role": "system"}, "roles user and tool, not system"),
    ],
)
def test_parts_that_are_refused(encoder: Prompts, message: Any, names: str) -> None:
    """Bug: a part of a type that the template does not know was left out without a word."""
    with pytest.raises(InvalidRequest, match=names):
        encoder.encode([{"role": "user"} | message])


def test_detail_is_that_of_http(encoder: Prompts) -> None:
    """Bug: detail: low cost as many tokens as none."""
    assert DETAILS == HTTP_DETAILS
    address = "data:image/png;base64," + base64.b64encode(saved(PICTURE, "PNG")).decode()
    asked = [
        SHOWN,
        SHOWN | {"detail": "high"},
        SHOWN | {"detail": "low"},
        {"type": "image_url", "image_url": {"url": address, "detail": "low"}},
    ]
    sizes = [encoder.encode(chat(part)).images()[0].size for part in asked]
    assert sizes == [10, 10, 4, 4]


def test_a_refusal_is_a_text(encoder: Prompts) -> None:
    """A model's refusal must stay in the chat, as over HTTP; a text needs no type."""
    prompts = [
        encoder.encode(chat(part))
        for part in ({"type": "refusal", "refusal": "no"}, {"text": "no"})
    ]
    assert (
        prompts[0].ids == prompts[1].ids == encoder.encode(chat({"type": "text", "text": "no"})).ids
    )


@pytest.mark.parametrize("url", ["https://example.com/a.png", "HTTP://a/b", "file:///a.png"])
def test_urls_are_not_fetched(encoder: Prompts, url: str) -> None:
    """Bug: a URL was taken for a path."""
    with pytest.raises(InvalidRequest, match="the library fetches none; give an image of Pillow"):
        encoder.encode(chat({"type": "image_url", "image_url": {"url": url}}))
    with pytest.raises(InvalidRequest, match=r"images\[0\]: an image has the URL"):
        encoder.encode({"prompt": MARK, "images": [url]})


def test_one_picture_needs_no_list(encoder: Prompts, tmp_path: Path) -> None:
    """Bug: a path was walked by character."""
    path = tmp_path / "a.png"
    path.write_bytes(saved(PICTURE, "PNG"))
    prompts = [
        encoder.encode({"prompt": MARK, "images": images})
        for images in ([path], path, str(path), path.read_bytes(), PICTURE)
    ]
    assert len({prompt.images()[0].digest for prompt in prompts}) == 1
    with pytest.raises(InvalidRequest, match=r"images must be a list, .* got a int"):
        encoder.encode({"prompt": MARK, "images": 7})


def test_engines_without_a_tower(encoder: Prompts) -> None:
    """Bug: images that an engine was told to leave out came back as an empty answer."""
    tokenizer, model = vision_tokenizer(), encoder._model
    off = Prompts(tokenizer, encoder._ready, model, images="off")
    with pytest.raises(InvalidRequest, match='images="off"'):
        off.encode(chat(SHOWN))
    assert off.encode(chat(TEXT)).ids == encoder.encode(chat(TEXT)).ids
    blind = Prompts(tokenizer, READY, model)
    with pytest.raises(InvalidRequest, match="takes text only"):
        blind.encode(chat(SHOWN))


def test_images_are_made_a_few_prompts_ahead() -> None:
    """Bugs: a batch waits for all of its pictures; prompts get the pictures of others."""
    prepared: list[int] = []

    def images(number: int) -> list[Image]:
        prepared.append(number)
        return [Image(bytes([number]), 0, 1, 1, (0, 0), (1, 1, 1), b"abc")]

    prompts = [EncodedPrompt([number], partial(images, number)) for number in range(100)]
    prompts[7] = EncodedPrompt([7])
    ahead = images_ahead(prompts)
    for number, prompt in enumerate(ahead):
        assert len(prepared) <= number + 30, "the pictures of a whole batch are in memory"
        digests = [image.digest for image in prompt.images()]
        assert prompt.ids == [number] and digests == ([] if number == 7 else [bytes([number])])
    assert len(prepared) == 99
