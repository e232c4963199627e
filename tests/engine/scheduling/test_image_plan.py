"""ImagePlan: engines that take images, and requests whose images are refused."""

from dataclasses import replace
from typing import Any

import msgspec
import pytest

from engine.errors import ConfigError
from engine.images.image import Image
from engine.scheduling.memory.image_plan import ImagePlan
from tests.fakes import IMAGE_TOKEN, make_core, make_request, run

TOKEN, CLIP = IMAGE_TOKEN, 4
PLAN = ImagePlan((TOKEN,), cache_tokens=32, largest=8, row_size=3)
PROMPT = [5, TOKEN, TOKEN, 6, TOKEN, TOKEN, 7, 8]
IMAGE = Image(bytes(16), 1, 5, 4, (2, 2), (1, 2, 2), bytes(12))


def refusal(**changes: Any) -> str:
    images = [msgspec.structs.replace(IMAGE, **changes)]
    core, _ = make_core(images=PLAN)
    output = run(core, [make_request(1, PROMPT, images=images)])[1]
    return output.deltas[0].error


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        (
            {"size": 9},
            "image_too_large: an image of 9 tokens is larger than this engine takes (8 tokens, "
            "engine.image_cache_tokens): send it with fewer pixels, or raise the setting",
        ),
        ({"digest": b""}, "invalid_image: the digest must have 16 bytes"),
        ({"pixels": bytes(11)}, "invalid_image: 11 bytes of pixels do not fit the shape (1, 2, 2)"),
        ({"shape": (-1, -2, 2)}, "invalid_image: 12 bytes of pixels do not fit the shape"),
        ({"start": -1}, "invalid_image: images must be in the order of the prompt"),
        ({"length": 0}, "invalid_image: images must be in the order of the prompt"),
        ({"start": 3}, "invalid_image: an image must end before the last token of the prompt"),
        ({"start": 0}, "invalid_image: its 5 tokens must begin and end with image tokens, and"),
        ({"length": 4}, "invalid_image: its 4 tokens must begin and end with image tokens, and"),
        ({"size": 5}, "invalid_image: its 5 tokens must begin and end with image tokens, and"),
        ({"rows": bytes(44)}, "invalid_image: 44 bytes of float32 are not 4 embeddings of 3 "),
        ({"rows": bytes(48), "rows_dtype": "int64"}, "invalid_image: 48 bytes of int64 are not 4"),
    ],
)
def test_wrong_images_end_their_request_alone(changes: dict[str, Any], error: str) -> None:
    """Bug: a faulty client ends the step loop, or has rows written beside its image."""
    assert refusal(**changes).startswith(error)


def test_images_that_overlap_are_refused() -> None:
    """Bug: two images claim one position, and the runner writes it twice."""
    core, _ = make_core(images=PLAN)
    output = run(core, [make_request(1, PROMPT, images=[IMAGE, IMAGE])])[1]
    assert output.deltas[0].error.startswith("invalid_image: images must be in the order")


@pytest.mark.parametrize(
    ("prompt", "error"),
    [
        ([5, CLIP, CLIP, 6], "the prompt has 2 placeholders of clips (token 4) without a clip"),
        ([5, TOKEN, 6], "the prompt has 1 placeholders of images (token 0) without an image"),
        ([*PROMPT, CLIP], "the prompt has 1 placeholders of clips (token 4) without a clip"),
        ([*PROMPT, TOKEN], "the prompt has 1 placeholders of images (token 0) without an image"),
    ],
)
def test_placeholders_without_an_image(prompt: list[int], error: str) -> None:
    """Bug: a model answers about a clip that nobody sent."""
    core, _ = make_core(images=replace(PLAN, token_ids=(TOKEN, CLIP)))
    images = [IMAGE] if prompt[: len(PROMPT)] == PROMPT else []
    output = run(core, [make_request(1, prompt, images=images)])[1]
    assert output.deltas[0].error.startswith(f"image_not_shown: {error}: send the ")


def test_placeholders_in_an_output() -> None:
    """Bug: a request whose replica died ends, because it had sampled such a token."""
    core, _ = make_core(images=replace(PLAN, token_ids=(TOKEN, CLIP)))
    request = make_request(1, [*PROMPT, TOKEN, CLIP], images=[IMAGE], num_prompt_tokens=len(PROMPT))
    assert not any(delta.error for delta in run(core, [request])[1].deltas)


def test_placeholders_of_a_client_that_sends_ids() -> None:
    """Bug: a trainer's next turn is refused, because the model had sampled such a token."""
    core, _ = make_core(images=replace(PLAN, token_ids=(TOKEN, CLIP)))
    request = make_request(1, [5, TOKEN, CLIP, 6], verbatim=True)
    assert not any(delta.error for delta in run(core, [request])[1].deltas)


def test_images_are_refused_where_nothing_computes_them() -> None:
    """Bug: a text model answers as if it had seen the image."""
    core, _ = make_core()
    request = make_request(1, PROMPT, images=[IMAGE])
    assert run(core, [request])[1].deltas[0].error.startswith("images_not_supported: this model")


def test_a_step_must_have_room_for_an_image_that_cannot_be_cut() -> None:
    """Bug: an image waits forever for a step that has room for it."""
    plan = ImagePlan.of((TOKEN,), 512, 320, 64, whole=256)
    assert plan == ImagePlan((TOKEN,), 512, 256, bidirectional=True)
    with pytest.raises(ConfigError, match=r"max_num_batched_tokens is 319.*raise it to 320"):
        ImagePlan.of((TOKEN,), 512, 319, 64, whole=256)
    with pytest.raises(ConfigError, match=r"image_cache_tokens is 255.*raise it to 256"):
        ImagePlan.of((TOKEN,), 255, 320, 64, whole=256)
    assert ImagePlan.of((TOKEN,), 512, 64, 64) == ImagePlan((TOKEN,), 512, 512)
