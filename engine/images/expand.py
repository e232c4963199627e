"""surround, expand_placeholders: images in the places that a chat template has for them."""

from collections.abc import Sequence
from itertools import chain

from engine.errors import InvalidRequest
from engine.images.layout import ImageLayout


def surround(text: str, placeholder: str, layouts: Sequence[ImageLayout]) -> str:
    """Return a rendered chat with the text that its images have around their placeholders.

    layouts: in the order of the placeholders; if there are more or fewer of these, the text stays.
    """
    pieces = text.split(placeholder)
    if len(pieces) != len(layouts) + 1:  # `expand_placeholders` refuses such a chat
        return text
    around = (f"{layout.before}{placeholder}{layout.after}" for layout in layouts)
    return pieces[0] + "".join(chain.from_iterable(zip(around, pieces[1:], strict=True)))


def expand_placeholders(
    ids: Sequence[int], placeholder_id: int, layouts: Sequence[ImageLayout], count: int
) -> tuple[list[int], list[int]]:
    """Return a chat's token ids with each image's tokens in place, and each image's first index.

    ids: tokens of the rendered chat, in which one placeholder stands for each image.
    layouts: of the images that the template was given, in its order.
    count: images of the request.

    Raises InvalidRequest where the template has not written one placeholder for each image.
    """
    expanded: list[int] = []
    starts: list[int] = []
    at = 0
    for end, token in enumerate(ids):
        if token != placeholder_id:
            continue
        if len(starts) == len(layouts):
            raise _wrong_count(sum(token == placeholder_id for token in ids), count)
        layout = layouts[len(starts)]
        expanded += ids[at:end]
        starts.append(len(expanded))
        expanded += layout.token_ids
        at = end + 1
    if not len(starts) == len(layouts) == count:
        raise _wrong_count(len(starts), count)
    expanded += ids[at:]
    return expanded, starts


def _wrong_count(written: int, count: int) -> InvalidRequest:
    return InvalidRequest(
        f"this model's chat template has places for {written} of the {count} images; images in "
        "messages of the user are sure to have one",
        param="messages",
        code="image_not_shown",
    )
