"""read_messages, read_pictures, read_clips: read images and videos in chats and prompts."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image as Pillow

from engine.errors import InvalidRequest
from engine.images.data_url import decode_data_url, frame_urls
from engine.images.layout import DEFAULT_FPS, DETAILS, is_fps
from engine.images.picture_file import PictureFile, upright_rgb

Message = Mapping[str, Any]

_ROLES = ("user", "tool")  # roles whose messages may have images
_CLIPS = ("video", "video_url")
_TYPES = ("text", "refusal", "image", "image_url", *_CLIPS)
_FORMS = "an image of Pillow, a file's bytes, its path, or a data: URL"
_URL = re.compile(r"[a-z][a-z0-9+.-]+://|file:", re.IGNORECASE)
_MAX_FILE = 2**28  # maximum bytes of a picture in a data: URL


@dataclass(frozen=True, slots=True)
class Picture:
    """A picture of a prompt: an RGB image, and its `detail`, one of `DETAILS`.

    place: path of the field that has the picture, such as "images[0]", for errors.
    """

    image: Pillow.Image
    place: str
    detail: str = "auto"
    has_detail: bool = False


@dataclass(frozen=True, slots=True)
class Clip:
    """A video of a prompt.

    images: its frames in RGB.
    fps: frames per second.
    place: path of the field that has the video, such as "videos[0]", for errors.
    """

    images: list[Pillow.Image]
    fps: float
    place: str


Visual = Picture | Clip


def read_messages(chat: Sequence[Message]) -> tuple[list[Message], list[Visual]]:
    """Return a chat with placeholders for its pictures and clips, and a list of them in order.

    Raises InvalidRequest naming an invalid message or part.
    """
    pictures: list[Visual] = []
    messages = [_read(message, f"messages[{i}]", pictures) for i, message in enumerate(chat)]
    return messages, pictures


def read_pictures(images: Any) -> list[Visual]:
    """Open the pictures of a prompt. images: one image or several. Raises InvalidRequest."""
    if isinstance(images, (str, bytes, bytearray, Path, Pillow.Image)):
        images = [images]
    if isinstance(images, Mapping) or not isinstance(images, Iterable):
        raise InvalidRequest(
            f"images must be a list, each {_FORMS}; got a {type(images).__name__}",
            param="images",
            code="invalid_type",
        )
    places = [(image, f"images[{i}]") for i, image in enumerate(images)]
    return [Picture(_open(image, place), place) for image, place in places]


def read_clips(videos: Any) -> list[Visual]:
    """Open the clips of a prompt. Raises InvalidRequest.

    videos: a list of clips, each a list of frames or {"video": frames, "fps": frames per second}. A
        single clip may be such an object, or a data: URL with its frames.
    """
    if isinstance(videos, (str, Mapping)):
        videos = [videos]
    if isinstance(videos, (bytes, bytearray)) or not isinstance(videos, Iterable):
        raise InvalidRequest(
            f"videos must be a list of clips, each a list of frames; got a {type(videos).__name__}",
            param="videos",
            code="invalid_type",
        )
    clips: list[Visual] = []
    for i, video in enumerate(videos):
        place = f"videos[{i}]"
        if not isinstance(video, Mapping):
            clips.append(_of_frames(video, place, DEFAULT_FPS, place))
        elif unknown := video.keys() - {"video", "fps"}:
            raise InvalidRequest(
                f"{place} has {', '.join(sorted(map(str, unknown)))}; a clip has video and fps",
                param=place,
            )
        else:
            clips.append(_clip(video, "video", place))
    return clips


def _read(message: Message, path: str, pictures: list[Visual]) -> Message:
    """Replace a message's pictures and clips by placeholders; return the new message.

    pictures: gets the pictures and clips.
    """
    if message.get("images"):
        raise InvalidRequest(
            f"{path}.images is not read; put each image into its content, as "
            '{"type": "image", "image": ...}',
            param=f"{path}.images",
        )
    content = message.get("content")
    if not isinstance(content, (list, tuple)):
        return message
    parts: list[Any] = []
    for i, part in enumerate(content):
        place = f"{path}.content[{i}]"
        kind = _type(part, place)
        if kind not in ("text", "refusal"):
            role = message.get("role")
            if role not in _ROLES:
                raise InvalidRequest(
                    f"{place}: images stand in messages of the roles {' and '.join(_ROLES)}, not "
                    f"{role}",
                    param=f"{place}.type",
                    code="modality_not_supported",
                )
            if kind in _CLIPS:
                pictures.append(_clip(part, kind, place))
                parts.append({"type": "video"})
            else:
                pictures.append(_picture(part, kind, place))
                parts.append({"type": "image"})
        elif not isinstance(part.get(kind), str):
            raise InvalidRequest(
                f"{place}.{kind} must be a string", param=f"{place}.{kind}", code="invalid_type"
            )
        elif kind == "refusal":
            parts.append({"type": "text", "text": part[kind]})
        else:
            parts.append(part if "type" in part else {"type": kind, **part})
    return {**message, "content": parts}


def _type(part: Any, place: str) -> str:
    """Return the type of a message part; "text" for a part with only a text. Raises
    InvalidRequest."""
    if not isinstance(part, Mapping):
        raise InvalidRequest(
            f"{place} must be an object with a type", param=place, code="invalid_type"
        )
    kind = part.get("type", "text" if "text" in part else None)
    if kind not in _TYPES:
        raise InvalidRequest(
            f"{place}.type {kind!r} is unknown; use one of {', '.join(_TYPES)}",
            param=f"{place}.type",
        )
    return str(kind)


def _picture(part: Message, kind: str, place: str) -> Picture:
    image = _value(part, kind, place)
    detail = part.get("detail")
    at = f"{place}.detail"
    if isinstance(image, Mapping):
        detail, at = image.get("detail", detail), f"{place}.{kind}.detail"
        place = f"{place}.{kind}"
        image = _value(image, "url", place)
    if detail is None:
        detail = "auto"
    elif detail not in DETAILS:
        raise InvalidRequest(f"{at} must be one of {', '.join(DETAILS)}", param=at)
    return Picture(_open(image, place), place, str(detail), has_detail=True)


def _clip(part: Message, kind: str, place: str) -> Clip:
    fps = part.get("fps")
    if fps is None:
        fps = DEFAULT_FPS
    elif not is_fps(fps):
        raise InvalidRequest(
            f"{place}.fps must be a number of frames a second, above 0", param=f"{place}.fps"
        )
    at = f"{place}.{kind}"
    frames = _value(part, kind, place)
    if isinstance(frames, Mapping):
        at = f"{at}.url"
        frames = _value(frames, "url", f"{place}.{kind}")
    return _of_frames(frames, at, float(fps), place)


def _of_frames(frames: Any, at: str, fps: float, place: str) -> Clip:
    """Return a clip with opened frames. Raises InvalidRequest.

    at, place: the paths, for errors, of the field with the frames and of the clip's field.
    """
    if isinstance(frames, str):
        try:
            frames = frame_urls(frames)
        except InvalidRequest as error:
            raise InvalidRequest(f"{at} {error.message}", param=at, code=error.code) from None
    if isinstance(frames, (bytes, bytearray, Mapping)) or not isinstance(frames, Iterable):
        raise InvalidRequest(
            f"{at} must be a list of frames, each {_FORMS}; got a {type(frames).__name__}",
            param=at,
            code="invalid_type",
        )
    images = [_open(frame, f"{at}[{i}]") for i, frame in enumerate(frames)]
    return Clip(images, fps, place)


def _value(fields: Message, key: str, place: str) -> Any:
    value = fields.get(key)
    if value is None:
        raise InvalidRequest(
            f"{place}.{key} is required: {_FORMS}", param=f"{place}.{key}", code="missing_field"
        )
    return value


def _open(image: Any, place: str) -> Pillow.Image:
    """Open an image as RGB. Raises InvalidRequest.

    image: a Pillow image, a file's bytes, its path, or a data: URL.
    """
    if isinstance(image, Pillow.Image):
        return upright_rgb(image)
    try:
        if isinstance(image, str) and image[:5].lower() == "data:":
            image = decode_data_url(image, _MAX_FILE)
        elif isinstance(image, str) and (scheme := _URL.match(image)):
            raise InvalidRequest(
                f"has the URL {scheme.group()}..., and the library fetches none; give {_FORMS}",
                code="image_url_not_allowed",
            )
        elif isinstance(image, (str, Path)):
            image = Path(image).read_bytes()
        if isinstance(image, (bytes, bytearray)):
            return PictureFile.read(bytes(image)).decode()
    except InvalidRequest as error:
        message = f"{place}: an image {error.message}"
        raise InvalidRequest(message, param=place, code=error.code) from None
    except (OSError, ValueError) as error:  # a path with a null byte raises ValueError
        message = f"{place}: an image cannot be read: {error}"
        raise InvalidRequest(message, param=place, code="invalid_image") from None
    raise InvalidRequest(
        f"{place}: an image is one of Pillow, a file's bytes, its path, or a data: URL; got a "
        f"{type(image).__name__}",
        param=place,
        code="invalid_type",
    )
