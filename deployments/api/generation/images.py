"""ChatImages: reads the images of a chat's request, and places them in the prompt."""

import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import msgspec

from deployments.api.body_fields import name_fields
from deployments.api.fields import chat
from deployments.api.generation.request import ChatMessage, ImagePart
from deployments.api.http.errors import ApiError, invalid, wrong_type
from deployments.api.output.prompt import TemplateMessage
from deployments.backend import ModelCard
from deployments.images.intake import ImageIntake, ImageSource, PlacedPicture
from deployments.images.memory import HeldBytes
from engine.errors import InvalidRequest
from engine.images.data_url import frame_urls
from engine.images.expand import Place, expand_placeholders, surround
from engine.images.layout import DEFAULT_FPS, DETAILS, ImageError, is_fps
from engine.images.picture_file import PictureFile
from engine.images.processor import ImageProcessor, check_layouts, clip_layouts, clips_of
from engine.text.tokenizer import Tokenizer

_ROLES = ("user", "tool")  # roles whose messages may have images


@dataclass(slots=True)
class _Visual:
    """An image or a video clip of a chat.

    param: the path of its field in the request, for errors.
    has_detail: whether its part has a field `detail`.
    sources, files: one item for an image, or one per frame.
    """

    param: str
    has_detail: bool
    sources: list[ImageSource]
    files: list[PictureFile]
    place: Place


@dataclass(slots=True)
class ChatImages:
    """The images and clips of a chat, with their headers read.

    held: the reservation of their bytes in ImageMemory
    placed: the pictures with their positions in the prompt, set after the prompt is encoded
    """

    processor: ImageProcessor
    visuals: list[_Visual]
    held: HeldBytes
    placed: list[PlacedPicture] = field(default_factory=list)

    @property
    def tokens(self) -> int:
        """The number of tokens of all images."""
        return sum(len(lay.token_ids) for visual in self.visuals for lay in visual.place.layouts)

    def check_sizes(self, most: int) -> None:
        """Refuse images with more embeddings than an engine takes, before they are decoded.

        most: `ModelCard.image_tokens`. Raises ApiError 400 naming the image.
        """
        for visual in self.visuals:
            file, param = visual.files[0], visual.param
            sides = (file.width, file.height) if visual.has_detail else None
            try:
                check_layouts(self.processor, visual.place.layouts, most, sides)
            except ImageError as error:
                raise invalid(f"{param}: {error.message}", param, error.code) from None

    def surrounded(self, text: str, order: Sequence[int]) -> str:
        """Return a rendered chat with the texts that the model requires before and after images.

        order: indices of the images in the order of their placeholders.
        """
        return surround(text, [self.visuals[index].place for index in order])

    def place(self, ids: list[int], order: Sequence[int], tokenizer: Tokenizer) -> list[int]:
        """Return a rendered chat's token ids with placeholders expanded to the images' tokens.

        order: indices of the images in the order of placeholders. Raises InvalidRequest
            image_not_shown.
        """
        ordered = [self.visuals[index] for index in order]
        places = [visual.place for visual in ordered]
        expanded, starts = expand_placeholders(ids, tokenizer.token_id, places, len(self.visuals))
        pieces = [(visual, layout) for visual in ordered for layout in visual.place.layouts]
        self.placed = [
            PlacedPicture(visual.sources, visual.files, layout, start)
            for (visual, layout), start in zip(pieces, starts, strict=True)
        ]
        return expanded


class ImageMarks:
    """The random placeholder texts for images, used while a chat's contents are plain strings.

    The code that adds tools and thinking to messages handles strings only.
    """

    def __init__(self, messages: Sequence[ChatMessage]) -> None:
        self._nonce = f"{secrets.randbelow(10**24):024d}"
        self._kinds: list[str] = []  # type of each image's part, for the template
        self.messages = [self._marked(message) for message in messages]

    def _marked(self, message: ChatMessage) -> ChatMessage:
        content: list[Any] = []
        for part in message.content or ():
            if type(part) is ImagePart:
                content.append(chat.TextPart(f"{self._nonce}{len(self._kinds):06d}"))
                self._kinds.append("video" if part.clip else "image")
            else:
                content.append(part)
        if not message.images:
            return message
        return msgspec.structs.replace(message, content=tuple(content))

    def put_back(self, messages: Iterable[TemplateMessage]) -> list[int]:
        """Replace the placeholder texts in contents by image parts; return the images' indices in
        their order of occurrence."""
        order: list[int] = []
        for message in messages:
            content = message.get("content")
            if not isinstance(content, str) or self._nonce not in content:
                continue
            before, *marked = content.split(self._nonce)
            parts: list[Any] = [{"type": "text", "text": before}] if before else []
            for piece in marked:
                order.append(int(piece[:6]))
                parts.append({"type": self._kinds[order[-1]]})
                if text := piece[6:]:
                    parts.append({"type": "text", "text": text})
            message["content"] = parts
        return order


def check_no_images(messages: Iterable[ChatMessage], card: ModelCard) -> None:
    """Raise ApiError 400 for a chat with images on a route that generates no answer."""
    parts = _images(messages)
    if parts:
        _processor(parts, card)
        place = parts[0].place
        raise invalid(f"{place}: only chats that are answered take images", place)


def _images(messages: Iterable[ChatMessage]) -> list[ImagePart]:
    return [part for message in messages for part in message.images]


def _processor(parts: Sequence[ImagePart], card: ModelCard) -> ImageProcessor:
    """Return a model's image processor after checking that the model accepts all parts. Raises
    ApiError 400."""
    clips = clips_of(card.images) is not None
    for part in parts:
        model = f'{part.place}: the model "{card.id}" takes text'
        if card.images is None:
            off = " (engine.images: off)" if card.images_off else ""
            raise no_media(f"{model} only{off}", part.refused)
        kind = part.written.__struct_config__.tag
        if isinstance(part.written, chat.OtherMedia):
            kind = part.written.kind
        elif not part.clip or clips:
            continue
        where = "; clips stand in /v1/chat/completions" if clips and kind in chat.CLIP_KINDS else ""
        raise no_media(f'{model} and images, no "{kind}"{where}', part.refused)
    assert card.images is not None
    return card.images


async def read_images(
    messages: Sequence[ChatMessage], card: ModelCard, intake: ImageIntake, ignored: list[str]
) -> ChatImages:
    """Fetch the files of a chat's images and read their headers. The chat must have an image.

    ignored: the list to which the paths of animations are added, as only their first frame is used.
    Raises ApiError 400, InvalidRequest naming the image, Overloaded.
    """
    parts = _images(messages)
    processor = _processor(parts, card)
    for message in messages:
        if message.role not in _ROLES and message.images:
            first = message.images[0]
            raise no_media(misplaced_image(first.place, message.role), first.refused)
    most = intake.limits.per_request
    if len(parts) > most:
        raise invalid(
            f"a request takes at most {most} images (images.per_request), this one has "
            f"{len(parts)}",
            parts[most].place,
            "too_many_images",
        )
    sources = _sources(parts, intake.limits.frames)
    held = intake.memory.take(0)
    try:
        files = iter(await intake.read([source for of_part in sources for source in of_part], held))
        visuals = [
            _visual(processor, part, own, list(islice(files, len(own))))
            for part, own in zip(parts, sources, strict=True)
        ]
    except BaseException:
        held.release()
        raise
    frames = [
        source.place
        for visual in visuals
        for source, file in zip(visual.sources, visual.files, strict=True)
        if file.frames
    ]
    ignored += name_fields(f"{place}.frames" for place in frames)
    return ChatImages(processor, visuals, held)


def _sources(parts: Sequence[ImagePart], most: int) -> list[list[ImageSource]]:
    """Return, for each part, the sources of its bytes: one for an image, one per frame for a clip.

    most: maximum number of frames of all clips. Raises ApiError 400.
    """
    sources = [
        _frames(part.written, part.place)
        if isinstance(part.written, chat.WrittenClip)
        else [_source(part)]
        for part in parts
    ]
    count = 0
    for part, own in zip(parts, sources, strict=True):
        count += len(own) if part.clip else 0
        if count > most:
            raise invalid(
                f"{part.place}: the clips of a request have at most {most} frames together "
                f"(images.frames), those up to here have {count}",
                part.place,
                "too_many_images",
            )
    return sources


def no_media(message: str, path: str) -> ApiError:
    """Return the error for media that are not supported, or not allowed at `path`."""
    return invalid(message, path, "modality_not_supported")


def misplaced_image(place: str, role: str) -> str:
    """Return the error message for an image in a message whose role must not have images."""
    roles = " and ".join(_ROLES)
    return f"{place}: images stand in messages of the roles {roles}, not {role}"


def _visual(
    processor: ImageProcessor, part: ImagePart, sources: list[ImageSource], files: list[PictureFile]
) -> _Visual:
    place = part.place if part.clip else sources[0].place
    try:
        if part.clip:
            assert isinstance(part.written, chat.WrittenClip)
            sizes = [(file.width, file.height) for file in files]
            layouts = clip_layouts(processor, sizes, _fps(part.written, place))
        else:
            layouts = [processor.layout(files[0].width, files[0].height, sources[0].detail)]
    except ImageError as error:
        raise invalid(f"{place}: {error.message}", place, error.code) from None
    has_detail = isinstance(part.written, (chat.ImageUrlPart, chat.InputImagePart))
    at = Place.of(processor, layouts, clip=part.clip)
    return _Visual(place, has_detail, sources, files, at)


def _fps(written: chat.WrittenClip, place: str) -> float:
    """Return a clip's frames per second. place: the clip's path. Raises ApiError 400."""
    fps = DEFAULT_FPS if written.fps is None else written.fps
    if not is_fps(fps):
        place = f"{place}.fps"
        raise invalid(f"{place} must be a number of frames a second, above 0", place)
    return float(fps)


def _frames(written: chat.WrittenClip, place: str) -> list[ImageSource]:
    """Return the sources of the bytes of a clip's frames. Raises ApiError 400 naming the field."""
    _fps(written, place)
    if isinstance(written, chat.VideoPart):
        place, frames = f"{place}.video", written.video
        if not isinstance(frames, list):
            raise wrong_type(place, "a list of frames, data: URLs or http(s) addresses")
        return [
            ImageSource(f"{place}[{i}]", _string(frame, f"{place}[{i}]"))
            for i, frame in enumerate(frames)
        ]
    place, value = f"{place}.video_url", written.video_url
    if isinstance(value, dict):
        place, value = f"{place}.url", value.get("url")
    try:
        urls = frame_urls(_string(value, place))
    except InvalidRequest as error:
        raise invalid(f"{place} {error.message}", place, error.code) from None
    return [ImageSource(f"{place}[{i}]", url) for i, url in enumerate(urls)]


def _source(part: ImagePart) -> ImageSource:
    """Return the source of an image's bytes. Raises ApiError 400 naming the field."""
    written, place = part.written, part.place
    if isinstance(written, chat.ImageUrlPart):
        value, place = written.image_url, f"{place}.image_url"
        if not isinstance(value, dict):
            return ImageSource(place, _string(value, place))
        place = f"{place}.url"
        return ImageSource(place, _string(value.get("url"), place), detail=_detail(value, part))
    if isinstance(written, chat.InputImagePart):
        _check_no_id(written.file_id, place)
        detail = _detail({"detail": written.detail}, part)
        place = f"{place}.image_url"
        return ImageSource(place, _string(written.image_url, place), detail=detail)
    if isinstance(written, chat.FilePart):
        return _of_file(written, place)
    if isinstance(written, chat.AnthropicImage):
        return _of_block(written.source, f"{place}.source")
    assert isinstance(written, chat.OllamaImage)
    return _of_data(_string(written.base64, place), place)


def _of_file(written: chat.FilePart, place: str) -> ImageSource:
    fields = {"file_data": written.file_data, "file_id": written.file_id}
    if isinstance(written.file, dict):
        fields, place = written.file, f"{place}.file"
    elif isinstance(written.file_url, str):
        return ImageSource(f"{place}.file_url", written.file_url)
    _check_no_id(fields.get("file_id"), place)
    place = f"{place}.file_data"
    return _of_data(_string(fields.get("file_data"), place), place)


def _of_block(source: Any, place: str) -> ImageSource:
    kind = source.get("type") if isinstance(source, dict) else None
    if kind == "base64":
        return _of_data(_string(source.get("data"), f"{place}.data"), f"{place}.data")
    if kind == "url":
        return ImageSource(f"{place}.url", _string(source.get("url"), f"{place}.url"))
    if kind == "file":
        _check_no_id(kind, place)
    raise invalid(f"{place}.type must be base64 or url", f"{place}.type")


def _of_data(data: str, place: str) -> ImageSource:
    if data[:5].lower() == "data:":
        return ImageSource(place, data)
    return ImageSource(place, base64=data)


def _check_no_id(id: Any, place: str) -> None:
    if id is not None:
        raise invalid(
            f"{place}.file_id: files are kept for batches only; send the image itself",
            f"{place}.file_id",
            "not_supported",
        )


def _string(value: Any, place: str) -> str:
    if not isinstance(value, str):
        raise wrong_type(place, "a string")
    return value


def _detail(fields: dict[str, Any], part: ImagePart) -> str:
    detail = fields.get("detail")
    if detail is None:
        return "auto"
    if detail not in DETAILS:
        name = "image_url.detail" if isinstance(part.written, chat.ImageUrlPart) else "detail"
        place = f"{part.place}.{name}"
        raise invalid(f"{place} must be one of {', '.join(DETAILS)}", place)
    return str(detail)
