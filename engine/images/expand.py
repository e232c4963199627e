"""surround, expand_placeholders: replace a chat's image placeholders by the images' tokens."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from engine.errors import ConfigError, InvalidRequest
from engine.images.layout import ImageLayout
from engine.images.processor import ImageProcessor, clips_of


@dataclass(frozen=True, slots=True)
class Place:
    """An image or a clip in a chat: its placeholder text, and the tokens that replace it.

    placeholder: the text that the template writes for the image or clip.
    layouts: the layout of the image, or the layouts of the clip's spans of tokens.
    outer: texts before and after the placeholder, which are replaced together with the placeholder
        if both are present.
    """

    placeholder: str
    layouts: Sequence[ImageLayout]
    outer: tuple[str, str] = ("", "")

    @classmethod
    def of(
        cls, processor: ImageProcessor, layouts: Sequence[ImageLayout], *, clip: bool
    ) -> "Place":
        """Return the Place of an image, or of a clip.

        layouts: the layout of the image, or those of the clip's spans.
        """
        clips = clips_of(processor) if clip else None
        if clips is None:
            return cls(processor.placeholder, layouts)
        return cls(clips.placeholder, layouts, clips.outer)


def surround(text: str, places: Sequence[Place]) -> str:
    """Insert the images' texts (`ImageLayout.before`, `after`) into a rendered chat.

    A clip of several spans gets a placeholder for each span.

    places: the images' places, in the order of the placeholders. A chat whose placeholders differ
        is returned unchanged.
    """
    names = {place.placeholder for place in places}
    pieces = re.split(f"({'|'.join(map(re.escape, names))})", text) if names else [text]
    # `expand_placeholders` refuses such a chat
    if pieces[1::2] != [place.placeholder for place in places]:
        return text
    texts = pieces[::2]
    for number, place in enumerate(places):
        begin, end = place.outer
        before, after = texts[number : number + 2]
        if before.endswith(begin) and after.startswith(end):
            texts[number] = before.removesuffix(begin)
            texts[number + 1] = after.removeprefix(end)
        texts[number] += "".join(
            f"{layout.before}{place.placeholder}{layout.after}" for layout in place.layouts
        )
    return "".join(texts)


def expand_placeholders(
    ids: Sequence[int],
    token_id: Callable[[str], int | None],
    places: Sequence[Place],
    count: int,
) -> tuple[list[int], list[int]]:
    """Replace the placeholders in a chat's token ids by the tokens of the images.

    Returns (token ids, index at which each layout begins).

    ids: tokens of the rendered chat, with one placeholder token for each layout.
    token_id: returns the token id of a placeholder; None if the placeholder is not a single token.
    places: the layouts of the images and clips in the chat, in the order of the template.
    count: the number of images and clips in the request.

    Raises InvalidRequest if the template has not written one placeholder for each layout,
    ConfigError for a placeholder that is not a single token.
    """
    tokens = {place.placeholder: token_id(place.placeholder) for place in places}
    for text, token in tokens.items():
        if token is None:
            raise ConfigError(
                f"the tokenizer has no token {text}, in whose place images stand", param="model"
            )
    wanted = [(tokens[place.placeholder], layout) for place in places for layout in place.layouts]
    known = {*tokens.values()}
    written = [(at, token) for at, token in enumerate(ids) if token in known]
    if len(places) != count or [token for _, token in written] != [token for token, _ in wanted]:
        raise _wrong_count(len(written), count)
    expanded: list[int] = []
    starts: list[int] = []
    at = 0
    for (end, _), (_, layout) in zip(written, wanted, strict=True):
        expanded += ids[at:end]
        starts.append(len(expanded))
        expanded += layout.token_ids
        at = end + 1
    expanded += ids[at:]
    return expanded, starts


def _wrong_count(written: int, count: int) -> InvalidRequest:
    return InvalidRequest(
        f"this model's chat template has places for {written} of the {count} images; images in "
        "messages of the user are sure to have one",
        param="messages",
        code="image_not_shown",
    )
