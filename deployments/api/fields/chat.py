"""Messages, MESSAGE, CALL: the schemas of a chat's messages, a message and a tool call in OpenAI's
form."""

from typing import Annotated, Any, Literal, Union

from msgspec import Meta, Struct, defstruct

from deployments.api.body_fields import MAX_MESSAGE_CALLS, MAX_MESSAGE_PARTS, MAX_MESSAGES, ROLES
from deployments.api.fields.body import Typed, expects, of_schema
from deployments.api.fields.schema import NEVER, NULL, TEXT, Schema, either, needed, one_of, record
from deployments.api.http.errors import ApiError, invalid, shown, wrong_type
from engine.images.layout import DETAILS, MAX_FPS

_NO_TEXT = expects("a string")  # also the error for a missing text
_NO_CALL = expects("a function call", up=1)
_NO_ID = expects("the id of a tool call in an earlier message", "invalid_tool_call_id")
Text = Annotated[str, _NO_TEXT]


class TextPart(Struct, tag="text", tag_field="type", gc=False):
    """A content part with a text."""

    text: Text


class RefusalPart(Struct, tag="refusal", tag_field="type", gc=False):
    """A content part with a model's refusal."""

    refusal: Text

    @property
    def text(self) -> str:
        return self.refusal


# A field that accepts any value here but none in the JSON schemas, because it is always refused
# later.
_Untold = Annotated[Any, of_schema(NEVER)]


# The contents of image fields are checked by generation/images.py.
_URL: Schema = {
    "type": "string",
    "description": "data:image/png;base64,..., or an http(s) address of the server's images.hosts",
}
_DATA: Schema = {"type": "string", "description": "base64 of the file, or a data: URL"}
_EITHER_URL = either(_URL, record({"url": _URL}, detail=one_of(*DETAILS)))
_FILE = record({"file_data": _DATA}, filename=TEXT, file_id=NULL)
_SOURCE = either(
    record({"type": one_of("base64"), "data": _DATA}, media_type=TEXT),
    record({"type": one_of("url"), "url": _URL}),
)
_FRAMES: Schema = {
    "type": "string",
    "pattern": "^[Dd][Aa][Tt][Aa]:[^,]*,[^,]*,",
    "description": "data:video/jpeg;base64,FRAME,FRAME and so on, each the base64 of a file",
}
_EITHER_FRAMES = either(_FRAMES, record({"url": _FRAMES}))
_LIST: Schema = {"type": "array", "items": _URL, "minItems": 2}
_RATE: Schema = {"type": "number", "exclusiveMinimum": 0, "maximum": MAX_FPS}
_Fps = Annotated[Any, of_schema(_RATE)]
_NoId = Annotated[Any, of_schema(NULL)]


class ImageUrlPart(Struct, tag="image_url", tag_field="type"):
    """An image in a chat. image_url: an object with url and detail, or the url."""

    image_url: Annotated[Any, of_schema(needed(_EITHER_URL))] = None


class InputImagePart(Struct, tag="input_image", tag_field="type"):
    """An image in an item of the Responses API."""

    image_url: Annotated[Any, of_schema(needed(_URL))] = None
    detail: Annotated[Any, of_schema(one_of(*DETAILS))] = None
    file_id: _NoId = None


class FilePart(Struct, tag="file", tag_field="type"):
    """An image's file: the object `file` in a chat, the other fields in an item of the Responses
    API."""

    file: Annotated[Any, of_schema(needed(_FILE))] = None
    file_data: Any = None
    file_url: Any = None
    file_id: Any = None


class VideoPart(Struct, tag="video", tag_field="type"):
    """A video clip in a chat. video: a list of its frames' URLs. fps: frames per second."""

    video: Annotated[Any, of_schema(needed(_LIST))] = None
    fps: _Fps = None


class VideoUrlPart(Struct, tag="video_url", tag_field="type"):
    """A video clip in a chat. video_url: a data: URL with all frames, or an object with such a
    `url`."""

    video_url: Annotated[Any, of_schema(needed(_EITHER_FRAMES))] = None
    fps: _Fps = None


class AnthropicImage(Struct):
    """A content block with an image in Anthropic's API. source: an object with `type` and data or
    url."""

    source: Annotated[Any, of_schema(needed(_SOURCE))] = None


class MisplacedBlock(AnthropicImage):
    """A content block with an image where images are not allowed."""

    source: _Untold = None


class OllamaImage(Struct):
    """An item of the list `images` in Ollama's API."""

    base64: Any = None


class OtherMedia(Struct):
    """A content part with media that are refused. kind: the `type` of the part."""

    kind: str


WrittenImage = ImageUrlPart | InputImagePart | FilePart | AnthropicImage | OllamaImage
WrittenClip = VideoPart | VideoUrlPart


class MediaPart(Struct, tag_field="type"):
    """A content part with media that are refused, as read from a body.

    The only field of a subclass has the name of the part's type.
    """


# Image parts in messages of roles that must not have images.
_MISPLACED_PARTS = (
    defstruct("image_url", [("image_url", _Untold, None)], bases=(ImageUrlPart,), tag="image_url"),
    defstruct(
        "input_image", [("image_url", _Untold, None)], bases=(InputImagePart,), tag="input_image"
    ),
    defstruct("file", [("file", _Untold, None)], bases=(FilePart,), tag="file"),
)
_INPUT_FILE = defstruct(
    "input_file",
    [
        ("file", Any, None),
        ("file_data", Annotated[Any, of_schema(_DATA)], None),
        ("file_url", Annotated[Any, of_schema(_URL)], None),
        ("file_id", _NoId, None),
    ],
    bases=(FilePart,),
    tag="input_file",
)
_IMAGE_PARTS = (ImageUrlPart, InputImagePart, FilePart)
_IMAGE_KINDS = [part.__struct_config__.tag for part in _IMAGE_PARTS]
_MEDIA_PARTS: list[Any] = [
    defstruct(name, [(name, _Untold, None)], bases=(MediaPart,), tag=name)
    for name in ("input_audio", "audio_url")
]
_CLIP_PARTS = (VideoPart, VideoUrlPart)
# Types of parts with video clips in other servers' APIs; the last one is of items in the Responses
# API.
CLIP_KINDS = (*(str(part.__struct_config__.tag) for part in _CLIP_PARTS), "input_video")
# Video clips in items of the Responses API, and in messages of roles that must not have images.
_MISPLACED_CLIPS: list[Any] = [
    defstruct(name, [(name, _Untold, None)], bases=(MediaPart,), tag=name) for name in CLIP_KINDS
]
Part = TextPart | RefusalPart | ImageUrlPart | InputImagePart | FilePart | WrittenClip | MediaPart


def _no_part(part: Any, path: str) -> ApiError:
    *kinds, last = (f'"{kind}"' for kind in _IMAGE_KINDS)
    images = f"{', '.join(kinds)} or {last} for an image, where the model sees them"
    return invalid(f'{path}.type must be "text", or {images}', f"{path}.type")


def _one_of(*parts: type[Struct]) -> Any:
    return Annotated[Union[(*parts,)], expects("an object with a type", unknown=_no_part)]


_Part: Any = _one_of(TextPart, RefusalPart, *_IMAGE_PARTS, *_CLIP_PARTS, *_MEDIA_PARTS)
_PartOfText: Any = _one_of(
    TextPart, RefusalPart, *_MISPLACED_PARTS, *_MISPLACED_CLIPS, *_MEDIA_PARTS
)
_ITEM_TEXTS = ("input_text", "output_text", "summary_text", "reasoning_text")
_ItemPart: Any = _one_of(
    *(defstruct(name, [], bases=(TextPart,), tag=name) for name in _ITEM_TEXTS),
    TextPart,
    RefusalPart,
    *_IMAGE_PARTS,
    *_MISPLACED_CLIPS,
    *_MEDIA_PARTS,
    _INPUT_FILE,
)


def _parts(least: int) -> Meta:
    """Return the Meta that documents the length of a list of parts; ChatBuilder checks the
    length."""
    return of_schema({"minItems": least, "maxItems": MAX_MESSAGE_PARTS})


ItemContent = Annotated[
    str | Annotated[list[_ItemPart], _parts(0)], expects("a string or a list of parts")
]
_EITHER = Meta(extra={"expected": "a string or a list of parts"})
_Content = Annotated[str | Annotated[list[_Part], _parts(1)], _EITHER]
_ContentOfText = Annotated[str | Annotated[list[_PartOfText], _parts(1)], _EITHER]


class CalledFunction(Struct, gc=False):
    """The function of a tool call. arguments: JSON in a string, or an object."""

    name: Text
    arguments: Any = None


class CalledCustom(Struct, gc=False):
    """The custom tool of a tool call, with its input text."""

    name: Text
    input: Any = None


class FunctionCall(Struct, tag="function", tag_field="type", gc=False):
    """A call of a function."""

    function: Annotated[CalledFunction, _NO_CALL]
    id: Text


class CustomCall(Struct, tag="custom", tag_field="type", gc=False):
    """A call of a custom tool."""

    custom: Annotated[CalledCustom, _NO_CALL]
    id: Text


CALL: Typed[FunctionCall | CustomCall] = Typed(
    Annotated[FunctionCall | CustomCall, expects("a function call")], default="function"
)


class Message(Struct, tag_field="role", kw_only=True, gc=False):
    """The fields that messages of all roles share."""

    content: _ContentOfText
    name: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class UserMessage(Message, tag="user", kw_only=True):
    """A message of the user."""

    content: _Content


class ToolMessage(Message, tag="tool", kw_only=True):
    """The result of a call in an earlier message."""

    content: _Content
    tool_call_id: Annotated[str, _NO_ID]


class AssistantMessage(Message, tag="assistant", kw_only=True):
    """An answer of the model. Without content and tool calls its text is `refusal`, or empty."""

    content: Annotated[str | Annotated[list[_PartOfText], _parts(0)], _EITHER] | None = None  # type: ignore[assignment]
    tool_calls: Annotated[
        Any, of_schema({"type": "array", "items": CALL.schema, "maxItems": MAX_MESSAGE_CALLS})
    ] = None
    refusal: Annotated[Any, of_schema({"type": "string"})] = None


def unknown_role(role: Any, path: str) -> ApiError:
    """Return the error for a message's role that is missing or unknown."""
    if role is None:
        return invalid(f"{path} is required", path, "missing_field")
    if not isinstance(role, str):
        return wrong_type(path, "a string")
    return invalid(f"{path} {shown(role)} is unknown; use one of {', '.join(ROLES)}", path)


_PLAIN = [
    defstruct(role, [], bases=(Message,), tag=role, kw_only=True)
    for role in ROLES
    if role not in ("assistant", "user", "tool")
]
_OfRole: Any = Annotated[
    Union[(*_PLAIN, UserMessage, AssistantMessage, ToolMessage)],
    Meta(extra={"unknown": lambda item, path: unknown_role(item.get("role"), f"{path}.role")}),
]
MESSAGE: Typed[Message] = Typed(_OfRole)


Messages = Annotated[
    list[_OfRole],
    Meta(min_length=1, max_length=MAX_MESSAGES),
    Meta(extra={"sizes": f"must have 1 to {MAX_MESSAGES} items"}),
]
_OF_TEXT = expects("a part of text", "modality_not_supported")
_PARTS_EXPECTED = f"a string or a list of 1 to {MAX_MESSAGE_PARTS} parts"


class PredictedText(Struct, gc=False):
    """A part of a predicted text."""

    type: Annotated[Literal["text"], _OF_TEXT]
    text: Text


class Prediction(Struct, gc=False):
    """The text that a client expects in the answer."""

    type: Annotated[Literal["content"], expects('"content"', "invalid_value")]
    content: Annotated[
        str
        | Annotated[
            list[Annotated[PredictedText, _OF_TEXT]],
            Meta(min_length=1, max_length=MAX_MESSAGE_PARTS),
        ],
        expects(_PARTS_EXPECTED, "invalid_type"),
    ]

    @property
    def text(self) -> str:
        if isinstance(self.content, str):
            return self.content
        return "".join([part.text for part in self.content])
