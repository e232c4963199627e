"""ImagePlan: how an engine takes images, and the check of a request's images."""

import math
from dataclasses import dataclass
from typing import Self

from engine.errors import ConfigError, InvalidRequest
from engine.images.image import Image
from engine.images.layout import check_shown, too_large
from engine.messages import EngineRequest

_DIGEST_BYTES = 16
_ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True)
class ImagePlan:
    """The placeholder tokens of images in prompts, and the limits of an engine's images.

    token_ids: the placeholder token ids in prompts: of images, then of videos.
    cache_tokens: the maximum number of embeddings that the runner has at once.
    largest: the maximum number of embeddings of an image; larger images are refused. A step encodes
        at most this number or its token budget, whichever is larger.
    bidirectional: whether tokens of an image see each other, so that no step computes a part of
        an image.
    row_size: elements of an embedding, including features that are added after the first layers.
    """

    token_ids: tuple[int, ...]
    cache_tokens: int
    largest: int
    bidirectional: bool = False
    row_size: int = 0

    @classmethod
    def of(
        cls,
        token_ids: tuple[int, ...],
        cache_tokens: int,
        step_tokens: int,
        rows: int,
        whole: int = 0,
        row_size: int = 0,
    ) -> Self:
        """Return the plan of a model.

        cache_tokens: the setting `engine.image_cache_tokens`, resolved.
        step_tokens: the maximum number of tokens in a step.
        rows: the maximum number of running requests, each of which may decode in the step of an
            image.
        whole: tokens of the largest image, if tokens of an image see each other; 0 = they do not.
        row_size: elements of an embedding.
        Raises ConfigError if an image has no room in a step or in the cache.
        """
        if whole and step_tokens < whole + rows:
            raise ConfigError(
                f"engine.max_num_batched_tokens is {step_tokens}, but the model computes an image "
                f"of {whole} tokens in one step, beside {rows} decodes (engine.max_num_seqs): "
                f"raise it to {whole + rows}, or set engine.images: off",
                param="max_num_batched_tokens",
            )
        if cache_tokens < max(whole, 1):
            raise ConfigError(
                f"engine.image_cache_tokens is {cache_tokens}, less than an image of the model: "
                f"raise it to {max(whole, 1)}",
                param="image_cache_tokens",
            )
        return cls(token_ids, cache_tokens, whole or cache_tokens, bool(whole), row_size)


def check_images(message: EngineRequest, plan: ImagePlan | None) -> None:
    """Refuse a request whose images the engine cannot compute, or whose text or chat has
    placeholders without an image. Raises InvalidRequest.

    plan: the engine's plan; None = the engine takes no images.
    """
    if message.images:
        _check_each(message, plan)
    if plan is None or message.verbatim:
        return
    prompt, most = message.token_ids, message.num_prompt_tokens
    if len(prompt) > most:  # outputs may contain the placeholder tokens
        prompt = prompt[:most]
    check_shown(prompt, plan.token_ids, ((image.start, image.size) for image in message.images))


def _check_each(message: EngineRequest, plan: ImagePlan | None) -> None:
    if plan is None:
        raise InvalidRequest(
            "this model takes no images", param="images", code="images_not_supported"
        )
    if message.params.pooled:
        raise InvalidRequest(
            "embeddings are made of texts alone, without images",
            param="images",
            code="images_not_supported",
        )
    end = 0
    for index, image in enumerate(message.images):
        param = f"images[{index}]"
        if image.size > plan.largest:
            error = too_large(image.size, plan.largest)
            raise InvalidRequest(error.message, param=param, code=error.code)
        if problem := _problem(image, message, plan, end):
            raise InvalidRequest(problem, param=param, code="invalid_image")
        end = image.start + image.length


def _problem(image: Image, message: EngineRequest, plan: ImagePlan, end: int) -> str:
    """Return why the engine cannot compute an image; "" = it can.

    end: the position where the previous image ends.
    """
    if len(image.digest) != _DIGEST_BYTES:
        return f"the digest must have {_DIGEST_BYTES} bytes"
    if min(image.shape) < 1 or math.prod(image.shape) * 3 != len(image.pixels):
        return f"{len(image.pixels)} bytes of pixels do not fit the shape {image.shape}"
    row_bytes = plan.row_size * _ITEM_BYTES.get(image.rows_dtype, 0)
    if image.rows and len(image.rows) != image.size * row_bytes:
        return (
            f"{len(image.rows)} bytes of {image.rows_dtype} are not {image.size} embeddings of "
            f"{plan.row_size} elements"
        )
    if image.start < end or image.length < 1:
        return "images must be in the order of the prompt, without overlap"
    # A token after the image is needed, because the last token of a prompt may run as a decode.
    if image.start + image.length >= message.num_prompt_tokens:
        return "an image must end before the last token of the prompt"
    span = message.token_ids[image.start : image.start + image.length]
    token_id = span[0]
    known = token_id in plan.token_ids
    if not known or span[-1] != token_id or span.count(token_id) != image.size:
        return (
            f"its {image.length} tokens must begin and end with image tokens, and have {image.size}"
        )
    return ""
