"""The bodies of Ollama's routes: CHAT, GENERATE, EMBED and others."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from deployments.api.body_fields import MAX_MESSAGE_CALLS, MAX_MESSAGES
from deployments.api.fields.body import expects, of_schema, struct_body, told_of
from deployments.api.fields.chat import Text
from deployments.api.fields.generation import UINT31, Queued, Stop, TopLogprobs, sampled
from deployments.api.fields.pooled import TEXTS, PoolingBody, PoolingOptions, Positive, TextInput
from deployments.api.fields.schema import NOTHING, TEXT, either, list_of, one_of
from deployments.api.fields.tools import TOOLS

# Fields without effect, by which Ollama keeps models loaded and truncates prompts.
IGNORED = frozenset({"keep_alive", "truncate", "shift"})


class CalledFunction(Struct, gc=False):
    """The function of a tool call."""

    name: Text
    arguments: dict[str, Any] | None = None


_NO_CALL = "an object with name and arguments"


class OllamaCall(Struct, gc=False):
    """A tool call in an answer of the model."""

    function: Annotated[CalledFunction, expects(_NO_CALL)]
    id: str | None = None


_Call = Annotated[OllamaCall, told_of("function", _NO_CALL, "invalid_type")]


# A list of images in base64; its items are checked later.
_Images = Annotated[Any, of_schema(either(list_of(TEXT), NOTHING))]


class OllamaMessage(Struct, tag_field="role", kw_only=True, gc=False):
    """The fields that messages of all roles share."""

    content: str | None = None
    images: Annotated[Any, of_schema(NOTHING)] = None

    @property
    def role(self) -> str:
        return str(self.__struct_config__.tag)


class SystemMessage(OllamaMessage, tag="system", kw_only=True):
    """A message of the role system."""


class UserMessage(OllamaMessage, tag="user", kw_only=True):
    """A message of the user."""

    images: _Images = None


class AssistantMessage(OllamaMessage, tag="assistant", kw_only=True):
    """An answer of the model."""

    thinking: str | None = None
    tool_calls: Annotated[list[_Call], of_schema({"maxItems": MAX_MESSAGE_CALLS})] | None = None


class ToolMessage(OllamaMessage, tag="tool", kw_only=True):
    """The result of a tool call, which is identified by its id or by the function's name."""

    images: _Images = None
    tool_name: str | None = None
    tool_call_id: str | None = None


_Message = Annotated[
    SystemMessage | UserMessage | AssistantMessage | ToolMessage,
    told_of("role", "one of system, user, assistant, tool"),
]
# Refused fields of generation requests, with the advice of their errors.
REFUSED: Mapping[str, tuple[str, str]] = {
    "context": (
        "context: ids of earlier turns are not taken; send the conversation to /api/chat",
        "not_supported",
    ),
    "template": (
        "template: the model's own chat template is used, or none with raw",
        "not_supported",
    ),
}


class Options(Struct, kw_only=True, gc=False):
    """The field `options`. num_predict: maximum output tokens; negative: the context's limit."""

    num_predict: Annotated[int, Meta(ge=-2, le=UINT31)] | None = None
    temperature: Annotated[float, sampled("temperature")] | None = None
    top_k: Annotated[int, sampled("top_k", ge=-1)] | None = None
    top_p: Annotated[float, sampled("top_p")] | None = None
    min_p: Annotated[float, sampled("min_p")] | None = None
    seed: Annotated[int, sampled("seed")] | None = None
    stop: Stop = None
    presence_penalty: Annotated[float, sampled("presence_penalty")] | None = None
    frequency_penalty: Annotated[float, sampled("frequency_penalty")] | None = None
    repeat_penalty: Annotated[float, sampled("repetition_penalty")] | None = None


_FORMAT = expects('"json" or a JSON schema', "invalid_value")
_THINK = expects("true, false, low, medium, high or max", "invalid_value")


class OllamaGeneration(Queued, kw_only=True):
    """The fields that the bodies of both generating routes share."""

    format: Annotated[Literal["json", ""] | dict[str, Any], _FORMAT] | None = None
    options: Options | None = None
    stream: bool | None = None
    think: Annotated[bool | Literal["low", "medium", "high", "max", ""], _THINK] | None = None
    logprobs: bool | None = None
    top_logprobs: TopLogprobs | None = None


class OllamaChat(OllamaGeneration, kw_only=True):
    """The body of /api/chat."""

    messages: Annotated[list[_Message], of_schema({"maxItems": MAX_MESSAGES})] | None = None
    tools: Annotated[Any, of_schema(TOOLS)] = None


class OllamaGenerate(OllamaGeneration, kw_only=True):
    """The body of /api/generate."""

    prompt: str | None = None
    suffix: str | None = None
    system: str | None = None
    raw: bool | None = None
    images: _Images = None


CHAT = struct_body(OllamaChat, ignored=IGNORED)
GENERATE = struct_body(OllamaGenerate, ignored=IGNORED, rejected=REFUSED)


class Show(Struct, kw_only=True, gc=False):
    """The body of /api/show. name: the field of older clients for `model`."""

    model: str | None = None
    name: str | None = None


class Pull(Show, kw_only=True):
    """The body of /api/pull."""

    stream: bool | None = None


SHOW = struct_body(
    Show, ignored=frozenset({"verbose", "system", "template", "options"}), openai=False
)
PULL = struct_body(Pull, ignored=frozenset({"insecure", "username", "password"}), openai=False)


class OllamaInput(TextInput):
    """A TextInput that may be empty."""

    SCHEMA = either(TEXT, one_of([]), *TEXTS[1:])
    EMPTY = True


class OllamaEmbed(PoolingBody, kw_only=True):
    """The body of /api/embed."""

    input: OllamaInput
    truncate: bool | None = None
    dimensions: Positive | None = None

    def pooling_options(self) -> PoolingOptions:
        """Return the options: long texts are truncated unless the request's `truncate` is false."""
        return PoolingOptions(truncate=self.truncate is not False)


class OllamaEmbeddings(PoolingBody, kw_only=True):
    """The body of /api/embeddings."""

    prompt: str

    def pooling_options(self) -> PoolingOptions:
        """Return the options: long texts are truncated."""
        return PoolingOptions(truncate=True)


_OF_OLLAMA = frozenset({"keep_alive", "options"})
EMBED = struct_body(OllamaEmbed, ignored=_OF_OLLAMA)
EMBEDDINGS = struct_body(OllamaEmbeddings, ignored=_OF_OLLAMA)
