"""ChatRequest and TextRequest: a client's request for a chat or a completion, in any dialect."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import msgspec

from deployments.api.fields.chat import OtherMedia, RefusalPart, TextPart, WrittenClip, WrittenImage
from deployments.api.generation.sampling import RequestedSampling
from deployments.api.generation.tenancy import QueueFields
from deployments.api.http.errors import ApiError, from_backend
from deployments.api.output.constraints import RequestedGrammar
from deployments.api.output.prompt import TemplateMessage
from deployments.api.output.request import RequestedTools
from engine.errors import MantaError
from engine.text.infill import Gap

_MESSAGE = re.compile(r"messages\[(\d+)\]")


class ToolCall(msgspec.Struct, frozen=True, gc=False):
    """A tool call in an assistant's message. arguments: an object, which templates serialise."""

    id: str
    name: str
    arguments: Any


class ImagePart(msgspec.Struct, frozen=True, gc=False):
    """An image, video clip or other media in a message; it is decoded or refused once the model is
    known.

    place: the path of its field in the request, for errors, e.g. ``messages[0].content[1]``
    refused: the path in the error if the model takes no images
    """

    written: WrittenImage | WrittenClip | OtherMedia
    place: str
    refused: str

    text: ClassVar[str] = ""  # images add nothing to a message's text

    @property
    def clip(self) -> bool:
        return isinstance(self.written, WrittenClip)


Content = tuple[TextPart | RefusalPart | ImagePart, ...]


class ChatMessage(msgspec.Struct, frozen=True, gc=False):
    """A checked message of a chat.

    place: the path of its field in the request, e.g. ``messages[2]`` or ``instructions``
    content: the parts; None: the message has no content
    tool_call_id: the id of the tool call whose result the message has
    """

    role: str
    place: str
    content: Content | None = None
    name: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None

    @property
    def text(self) -> str:
        """The content's text parts, concatenated."""
        return "".join([part.text for part in self.content or ()])

    @property
    def images(self) -> list[ImagePart]:
        """The images of the content."""
        return [part for part in self.content or () if type(part) is ImagePart]

    def for_template(self) -> TemplateMessage:
        """Return the message as templates expect it: the content as one string, and tool calls with
        a type."""
        message: TemplateMessage = {"role": self.role}
        if self.content is not None:
            parts = self.content
            message["content"] = parts[0].text if len(parts) == 1 else self.text
        if self.name is not None:
            message["name"] = self.name
        if self.reasoning_content is not None:
            message["reasoning_content"] = self.reasoning_content
        if self.reasoning is not None:
            message["reasoning"] = self.reasoning
        if self.tool_calls:
            message["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                }
                for call in self.tool_calls
            ]
        if self.tool_call_id is not None:
            message["tool_call_id"] = self.tool_call_id
        return message


@dataclass(frozen=True, slots=True)
class TemplateOptions:
    """The options of rendering a chat.

    opens: whether the prompt ends with the beginning of the assistant's turn
    continues: whether the prompt ends within the last message, which the model continues
    variables: {name: value} of additional template variables
    """

    opens: bool = True
    continues: bool = False
    variables: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class PromptCut:
    """The truncation of a prompt.

    tokens: the maximum number of tokens; -1: the model's maximum
    keeps_end: whether a longer prompt is truncated at its beginning instead of its end
    """

    tokens: int
    keeps_end: bool


class GenerationFields(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The fields that chats and completions have in common.

    model: the model's name in the request; None: the only served model
    usage, continuous_usage: whether a stream reports usage at its end, and in each event
    speculation: whether the engine may use speculative decoding
    token_names: whether log-probabilities name tokens by ids, as ``token_id:N``
    echo: whether the answer begins with the prompt
    best_of: the field best_of, which must equal the number of choices
    names: our names of fields -> the client's, where these differ
    """

    model: Any
    sampling: RequestedSampling
    queue: QueueFields
    stream: bool = False
    usage: bool = False
    continuous_usage: bool = False
    constraint: RequestedGrammar | None = None
    cut: PromptCut | None = None
    speculation: bool = True
    return_token_ids: bool = False
    token_names: bool = False
    best_of: int | None = None
    echo: bool = False
    PROMPT: ClassVar[str] = "messages"  # our name of the field with the prompt
    names: Mapping[str, str] = msgspec.field(default_factory=dict)

    def own_name(self, name: str) -> str:
        """Return the client's name for a field, given our name."""
        return self.names.get(name, name)

    @property
    def prompt_name(self) -> str:
        """The client's name of the field with the prompt."""
        return self.own_name(self.PROMPT)

    def own_error(self, error: ApiError | MantaError) -> ApiError:
        """Return an error in which our name of the field at fault is replaced by the client's."""
        answer = from_backend(error)
        if answer.param is None or (own := self.own_name(answer.param)) == answer.param:
            return answer
        plain = rf"(?<![\w.\]]){re.escape(answer.param)}(?![\w\[])"
        message = re.sub(plain, lambda _: own, answer.message)
        return ApiError(
            answer.status, answer.code, message, param=own, kind=answer.kind, headers=answer.headers
        )


class ChatRequest(GenerationFields, frozen=True, kw_only=True):
    """A client's request for a chat completion.

    effort: how much the model should reason; None: the template's default
    thinking_budget: maximum number of reasoning tokens; None, -1: no limit
    prediction: the text that the client expects in the answer
    """

    messages: tuple[ChatMessage, ...]
    template: TemplateOptions = TemplateOptions()
    tools: RequestedTools | None = None
    effort: str | None = None
    thinking_budget: int | None = None
    prediction: str = ""
    shows_reasoning: bool = True
    separate_reasoning: bool = True

    def own_name(self, name: str) -> str:
        match = _MESSAGE.fullmatch(name)
        if match is not None and int(match[1]) < len(self.messages):
            return self.messages[int(match[1])].place
        return self.names.get(name, name)


class TextRequest(GenerationFields, frozen=True, kw_only=True):
    """A client's request for a text completion.

    prompts: texts, or lists of token ids
    many: whether the client sent a list of prompts rather than a single one
    gaps: the texts around gaps to fill in (fill in the middle), instead of prompts
    special: whether special tokens are put before each text
    """

    prompts: tuple[str, ...] | tuple[list[int], ...] = ()
    many: bool = False
    gaps: tuple[Gap, ...] = ()
    special: bool = True
    PROMPT: ClassVar[str] = "prompt"
