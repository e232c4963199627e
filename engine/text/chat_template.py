"""Chat templates: the model's own jinja file, rendered in a sandbox with limits on time and size.

The template comes from the operator's checkpoint, but the messages come from any client. So nothing
of a request is ever compiled as jinja, and a render's work is bounded: each iteration of a loop
checks the time, and each piece of output the size.
"""

import contextlib
import json
import logging
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment

from engine.architectures import WRAPPERS
from engine.config_reader import Reader
from engine.errors import ConfigError, InvalidRequest
from engine.text.template_contents import (
    Form,
    Opening,
    find_forms,
    shaped,
    with_image_places,
)

# Seconds of this thread's CPU time, so that a busy machine refuses no request. A thousand messages
# take some 10 ms.
MAX_SECONDS = 0.25
MAX_CHARS = 8_000_000  # maximum characters of a rendered chat, more than any context has
MAX_REPEAT = 1_000_000  # maximum length of 'x' * n, and maximum n ** n, in a template
MAX_DEPTH = 64  # maximum depth of nested lists and objects in messages and tools
MAX_REASON = 300  # maximum characters of a template's error message, which may quote the messages
# maximum seconds of the search for the message at fault; a hundred messages take some 5 ms
_SEARCH_SECONDS = 0.02

# Name of a context variable; a request cannot pass names with a leading underscore.
_CLOCK = "_render_deadline"
# jinja's error message for a missing field
_MISSING = re.compile(r"'dict object' has no attribute '([A-Za-z_]\w{0,63})'")
# fields of a message
_FIELDS = frozenset({"role", "content", "name", "tool_calls", "tool_call_id"})
_TOOL = {
    "type": "function",
    "function": {
        "name": "f",
        "description": "x",
        "parameters": {"type": "object", "properties": {}},
    },
}

logger = logging.getLogger("manta.engine")


class _TooMuch(Exception):
    """The error of a render that exceeds one of the limits."""


class _Refused(Exception):
    """The error that a template raises by raise_exception.

    The error's text is written by the template's author, so clients may see it.
    """


class _Generation(Extension):
    """The tag ``{% generation %}``, which marks assistant text for training and has no effect
    here."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_pass"), [], [], body).set_lineno(line)

    def _pass(self, caller: Macro) -> str:
        return str(caller())


class _Environment(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset({"*", "**"})

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        """Parse a template, and make each loop check the time: `for x in xs` becomes `for x in xs |
        _bounded`."""
        tree = super()._parse(source, name, filename)
        for loop in list(tree.find_all(nodes.For)):
            loop.iter = nodes.Filter(loop.iter, "_bounded", [], [], None, None, lineno=loop.lineno)
        return tree

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "**":
            too_large = not isinstance(right, (int, float)) or abs(right) > 64
        else:
            items, times = (left, right) if hasattr(left, "__len__") else (right, left)
            too_large = hasattr(items, "__len__") and len(items) * times > MAX_REPEAT
        if too_large:
            raise _TooMuch("an operation in the chat template makes too large a value")
        return super().call_binop(context, operator, left, right)


@jinja2.pass_context
def _bounded(context: Context, items: Iterable[Any]) -> Iterator[Any]:
    deadline = context.resolve(_CLOCK)
    for item in items:
        if time.thread_time() > deadline:
            raise _TooMuch("the chat template took too long")
        yield item


def _raise_exception(message: str) -> None:
    raise _Refused(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _environment() -> _Environment:
    env = _Environment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
    )
    env.filters["tojson"] = _tojson
    env.filters["_bounded"] = _bounded
    env.globals["raise_exception"] = _raise_exception
    env.globals["strftime_now"] = _strftime_now
    return env


class ChatTemplate:
    """A model's chat template, or its two templates "default" and "tool_use".

    sources: name -> jinja source; "default" must be there.
    special_tokens: values of ``bos_token``, ``eos_token`` and so on in the template.
    Raises ConfigError if a source is not valid jinja.
    """

    def __init__(self, sources: Mapping[str, str], special_tokens: Mapping[str, str]) -> None:
        env = _environment()
        self.sources = dict(sources)
        self.special_tokens = dict(special_tokens)
        self._compiled: dict[str, jinja2.Template] = {}
        self._forms: dict[str, dict[str, Form]] = {}  # template name -> role -> form of contents
        for name, source in sources.items():
            try:
                self._compiled[name] = env.from_string(source)
            except jinja2.TemplateError as error:
                raise ConfigError(f"the chat template {name!r} is not valid: {error}") from error

    @classmethod
    def load(cls, folder: Path, special_tokens: Mapping[str, str]) -> "ChatTemplate | None":
        """Read the template of a checkpoint's folder; return None if it has none.

        The first source that exists is used, as in transformers: chat_template.jinja (and
        additional_chat_templates/), chat_template.json, tokenizer_config.json.
        """
        sources: dict[str, str] = {}
        if (folder / "chat_template.jinja").is_file():
            sources["default"] = (folder / "chat_template.jinja").read_text(encoding="utf-8")
            for extra in sorted((folder / "additional_chat_templates").glob("*.jinja")):
                sources[extra.stem] = extra.read_text(encoding="utf-8")
        else:
            for name in ("chat_template.json", "tokenizer_config.json"):
                if not sources and (folder / name).is_file():
                    settings = json.loads((folder / name).read_text(encoding="utf-8"))
                    value = settings.get("chat_template")
                    if isinstance(value, str):
                        sources["default"] = value
                    elif isinstance(value, list):
                        sources = {item["name"]: item["template"] for item in value}
        if sources and "default" not in sources:
            sources["default"] = next(iter(sources.values()))
        if not sources:
            return None
        places = _places_of_images(folder)
        if places[0]:
            sources = {name: with_image_places(source, *places) for name, source in sources.items()}
        template = cls(sources, special_tokens)
        if template.silent:
            logger.warning(
                "the chat template of %s leaves out the text of messages, as a text and as a list "
                "of parts: chats are refused",
                folder,
            )
        return template

    @cached_property
    def silent(self) -> bool:
        """Whether the template omits the text of user messages."""
        return self.forms("default")["user"].silent

    def forms(self, name: str) -> dict[str, Form]:
        """Return, for each role, the forms of message content that a template renders.

        name: the template's name.
        """
        known = self._forms.get(name)
        if known is None:

            def render(chat: list[dict[str, Any]]) -> str:
                context = self._context(
                    chat, None if name == "default" else [_TOOL], {}, MAX_SECONDS
                )
                return _generate(self._compiled[name], context, MAX_CHARS)

            known = self._forms[name] = find_forms(render)
        return known

    def plain_turns(self) -> str:
        """Return all text that the template writes around messages of chats without tools and
        thinking."""
        if self.forms("default")["user"] == Form():
            return ""  # the template renders no chat
        user, answer = {"role": "user", "content": "1"}, {"role": "assistant", "content": "2"}
        system = {"role": "system", "content": "3"}
        texts: list[str] = []
        for chat in ([user], [user, answer, user], [system, user, answer, user]):
            with contextlib.suppress(InvalidRequest):  # e.g. the template refuses system messages
                texts.append(self.render(chat, add_generation_prompt=False))
        return "".join(texts)

    def _context(
        self,
        chat: list[dict[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        variables: Mapping[str, Any],
        max_seconds: float,
    ) -> dict[str, Any]:
        return {
            "documents": None,
            "add_generation_prompt": False,
            **self.special_tokens,
            **variables,
            "messages": chat,
            "tools": tools,
            _CLOCK: time.thread_time() + max_seconds,
        }

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        max_seconds: float = MAX_SECONDS,
        max_chars: int = MAX_CHARS,
        **variables: Any,
    ) -> str:
        """Return the text of a chat, as transformers' ``apply_chat_template(tokenize=False)`` does.

        variables: further names for the template, e.g. enable_thinking, documents.
        Raises InvalidRequest if the template refuses the messages or a limit is exceeded.
        """
        if not messages:
            raise InvalidRequest("messages must not be empty", param="messages")
        if continue_final_message and add_generation_prompt:
            raise InvalidRequest(
                "continue_final_message and add_generation_prompt exclude each other",
                param="continue_final_message",
            )
        for name in variables:
            if name.startswith("_"):
                raise InvalidRequest(
                    f"{name} is not a template variable", param="chat_template_kwargs"
                )
        use = "tool_use" if tools is not None and "tool_use" in self._compiled else "default"
        forms = self.forms(use)
        chat = [shaped(message, forms) for message in messages]
        opening = Opening(chat) if continue_final_message else None
        variables["add_generation_prompt"] = add_generation_prompt
        context = self._context(
            chat if opening is None else opening.chat, tools, variables, max_seconds
        )
        template = self._compiled[use]
        try:
            text = _generate(template, context, max_chars)
        except _TooMuch as error:
            raise InvalidRequest(str(error), param="messages", code="template_limit") from error
        except Exception as error:  # a template can raise anything on odd messages
            raise self._refusal(error, template, context) from error
        return text if opening is None else opening.cut(text)

    def _refusal(
        self, error: Exception, template: jinja2.Template, context: dict[str, Any]
    ) -> InvalidRequest:
        """Return the error for the client, which names the message at fault and the reason."""
        chat: list[dict[str, Any]] = context["messages"]
        index = _first_at_fault(error, template, context)
        where = "messages" if index is None else f"messages[{index}]"
        if isinstance(error, _Refused):
            named = f"the {where}" if index is None else where
            reason = str(error)[:MAX_REASON]
            return InvalidRequest(f"the chat template refused {named}: {reason}", param=where)
        # Callers do not see the error's text, because it may reveal objects and paths of this
        # process. Only the name of a missing field is shown, as it comes from the template.
        missing = _MISSING.fullmatch(str(error))
        if index is None or missing is None:
            named = f"these {where}" if index is None else where
            reason = f" ({type(error).__name__})"
        else:
            named = where
            own = missing[1] in _FIELDS and missing[1] not in chat[index]
            part = "it" if own else "a part of it"
            reason = f': {part} has no "{missing[1]}"'
        if index is not None and _of_tools(chat[index]):
            knows = any("tool_calls" in source for source in self.sources.values())
            reason += "" if knows else "; this model's template knows no tool calls"
        return InvalidRequest(f"the chat template cannot render {named}{reason}", param=where)


def _places_of_images(folder: Path) -> tuple[str, str]:
    """Return the placeholders of images and of clips (`Wrapper.place`, `clip_place`) of a folder's
    model; "" without support for them."""
    if not (folder / "config.json").is_file():
        return "", ""
    config = Reader.from_file(folder / "config.json")
    names = config.get("architectures")
    wrapper = WRAPPERS.get(str(names[0])) if isinstance(names, list) and names else None
    if wrapper is None or not wrapper.family(config):
        return "", ""
    return wrapper.place, wrapper.clip_place


def _generate(template: jinja2.Template, context: dict[str, Any], max_chars: int) -> str:
    pieces: list[str] = []
    size = 0
    for piece in template.generate(context):
        size += len(piece)
        if size > max_chars:
            raise _TooMuch("the chat is too long")
        if time.thread_time() > context[_CLOCK]:
            raise _TooMuch("the chat template took too long")
        pieces.append(piece)
    return "".join(pieces)


def _first_at_fault(
    error: Exception, template: jinja2.Template, context: dict[str, Any]
) -> int | None:
    """Return the index of the first message with which the template raises the same error.

    Returns None if the template fails for every chat, if the chat only lacks a user message, or if
    the search takes too long.
    """
    chat: list[dict[str, Any]] = context["messages"]
    deadline = time.thread_time() + _SEARCH_SECONDS
    parts = isinstance(next((m["content"] for m in chat if m.get("content")), None), list)
    asked = {"role": "user", "content": [{"type": "text", "text": "x"}] if parts else "x"}

    def raised(messages: list[dict[str, Any]]) -> str | None:
        try:
            _generate(template, {**context, "messages": messages, _CLOCK: deadline}, MAX_CHARS)
        except _TooMuch:
            raise
        except Exception as other:
            return f"{type(other).__name__} {other}"
        return None

    ours = f"{type(error).__name__} {error}"

    def fails(messages: list[dict[str, Any]]) -> bool:
        """Whether the template raises the same error for these messages.

        If not, they are tried again with a user message added, as a shortened chat may fail only
        for lack of one.
        """
        refusal = raised(messages)
        return refusal == ours or (refusal is not None and raised([*messages, asked]) == ours)

    # The first `fine` messages render without the error, the first `failing` messages raise it.
    fine, failing = 0, len(chat)
    try:
        if raised([asked]) == ours or raised([*chat, asked]) is None:
            return None
        while failing - fine > 1:
            middle = (fine + failing) // 2
            if fails(chat[:middle]):
                failing = middle
            else:
                fine = middle
    except _TooMuch:
        return None
    return failing - 1


def _of_tools(message: Mapping[str, Any]) -> bool:
    return "tool_calls" in message or message.get("role") == "tool"


def map_strings(value: Any, change: Callable[[str], str], depth: int = MAX_DEPTH) -> Any:
    """Return a copy of JSON-like data with a function applied to every string, dictionary keys
    included.

    Raises InvalidRequest for more than `depth` levels.
    """
    if isinstance(value, str):
        return change(value)
    if isinstance(value, (Mapping, list, tuple)) and depth == 0:
        raise InvalidRequest(
            f"a message is nested deeper than {MAX_DEPTH} levels", param="messages"
        )
    if isinstance(value, Mapping):
        mapped = {}
        for key, item in value.items():
            new_key = change(key) if isinstance(key, str) else key
            is_text = isinstance(item, str)
            mapped[new_key] = change(item) if is_text else map_strings(item, change, depth - 1)
        return mapped
    if isinstance(value, (list, tuple)):
        return [map_strings(item, change, depth - 1) for item in value]
    return value
