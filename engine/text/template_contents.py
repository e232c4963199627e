"""find_forms, shaped: convert a message's content to the form that a chat template renders.

The forms are a string and a list of parts. A text model's template prints `message.content`. A
vision model's template may iterate over parts, and then omits a string without an error.
`find_forms` renders a random marker in both forms for each role, to see which form a template
shows.
"""

import json
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from engine.errors import InvalidRequest

_REASONING = ("reasoning_content", "thinking", "reasoning")
_CALL = {"id": "call00001", "type": "function", "function": {"name": "f", "arguments": {}}}
_WORD = re.compile(r"\w+")

# Jinja code that converts contents that are lists of parts to one string, with PLACE for images and
# CLIP for video clips.
_PLACES = """{%- set shown = namespace(messages=[]) -%}
{%- for message in messages -%}
{%- if message.content is sequence and message.content is not string -%}
{%- set said = namespace(text="") -%}
{%- for part in message.content -%}
{%- set shown_part = {"image": PLACE, "video": CLIP}.get(part.type, part.text) -%}
{%- set said.text = said.text + shown_part -%}
{%- endfor -%}
{%- set shown.messages = shown.messages + [dict(message, content=said.text)] -%}
{%- else -%}
{%- set shown.messages = shown.messages + [message] -%}
{%- endif -%}
{%- endfor -%}
{%- set messages = shown.messages -%}
"""

Message = dict[str, Any]


class Form(NamedTuple):
    """The forms of message content (a string, a list of parts) that a template renders for a role.

    text: whether the template shows a content that is a text; None if it raises an error.
    parts: whether the template shows a content that is a list of parts; None if it raises an error.
    """

    text: bool | None = None
    parts: bool | None = None

    @property
    def silent(self) -> bool:
        """Whether the template renders the role's messages without an error but omits their text.

        The rendered prompt would then lack the client's text.
        """
        return not self.text and not self.parts and False in self


def find_forms(render: Callable[[list[Message]], str]) -> dict[str, Form]:
    """Find, for each role, the forms in which a chat template renders the content of messages.

    render: a function that returns the template's text of a chat; it may raise any exception.
    """
    mark = f"{secrets.randbelow(10**24):024d}"  # digits, as no filter of a template changes them
    as_object = re.compile(
        rf"""["']text["']\s*:\s*["']{mark}"""
    )  # a list that was printed as an object

    def shows(before: list[Message], role: str, content: Any, after: list[Message]) -> bool | None:
        try:
            text = render([*before, {**_named(role), "content": content}, *after])
        except Exception:  # a template can raise anything on odd messages
            return None
        return mark in text and as_object.search(text) is None

    def form(before: list[Message], role: str, after: list[Message]) -> Form:
        parts = [{"type": "text", "text": mark}]
        return Form(shows(before, role, mark, after), shows(before, role, parts, after))

    forms = {"user": form([], "user", [])}
    if forms["user"] == Form():
        # the template renders no chat, and each further try might reach the time limit
        return forms
    user = shaped({"role": "user", "content": "x"}, forms)
    call = {"role": "assistant", "content": "", "tool_calls": [_CALL]}
    call_in_parts = {**call, "content": [{"type": "text", "text": "x"}]}
    forms["system"] = form([], "system", [user])
    forms["assistant"] = form([user], "assistant", [user])
    asked = call_in_parts if forms["assistant"].parts and not forms["assistant"].text else call
    forms["tool"] = form([user, asked], "tool", [])
    return forms


def _named(role: str) -> Message:
    return {"role": role, **({"tool_call_id": _CALL["id"], "name": "f"} if role == "tool" else {})}


def shaped(message: Mapping[str, Any], forms: Mapping[str, Form]) -> Message:
    """Return a message whose content has the form that the template renders.

    Fields that are None are left out. The reasoning is stored under all field names that templates
    use.

    Raises InvalidRequest for parts that are not text.
    """
    out = {key: value for key, value in message.items() if value is not None}
    for key in _REASONING:
        if key in out:
            reasoning = out[key]
            out = {"thinking": reasoning, **out, "reasoning_content": reasoning}
            break
    content = out.get("content")
    form = forms.get(str(out.get("role"))) or forms.get("user", Form())
    if isinstance(content, str):
        if form.parts and not form.text:
            out["content"] = [{"type": "text", "text": content}]
    elif isinstance(content, (list, tuple)) and not form.parts:
        for part in content:
            if not isinstance(part, Mapping) or not isinstance(part.get("text"), str):
                raise InvalidRequest("this model takes text content only", param="messages")
        out["content"] = "".join(part["text"] for part in content)
    return out


def with_image_places(source: str, place: str, clip_place: str = "") -> str:
    """Return a chat template changed to write `place` for images and `clip_place` for video clips,
    unless it already writes images."""
    if "image" in source or place.strip() in source:
        return source
    places = _PLACES.replace("PLACE", json.dumps(place)).replace("CLIP", json.dumps(clip_place))
    return places + source


def text_of(content: Any) -> str:
    """Return the text of a message's content; parts that are not text become one space each."""
    if isinstance(content, str):
        return content
    if not isinstance(content, (list, tuple)):
        return ""
    parts = [part.get("text") for part in content if isinstance(part, Mapping)]
    return "".join(part if isinstance(part, str) else " " for part in parts)


def check_shown(rendered: str, chat: Sequence[Mapping[str, Any]], silent: bool) -> None:
    """Check that a rendered prompt has the text of the user's last message.

    A template may trim, escape or quote the text, so one word of the text is sufficient.

    silent: whether the template omits all text of user messages.
    Raises InvalidRequest.
    """
    last = len(chat) - 1
    while last >= 0 and chat[last].get("role") != "user":
        last -= 1
    text = text_of(chat[last].get("content")).strip() if last >= 0 else ""
    if not text or (text in rendered and not silent):
        return
    words = _WORD.findall(text[:1024])
    if not silent:
        folded = rendered.casefold()
        if not words or any(word.casefold() in folded for word in words):
            return
    raise InvalidRequest(
        f"this model's chat template leaves out the text of messages[{last}]; use completions with "
        "a prompt, or another template",
        param=f"messages[{last}]",
    )


class Opening:
    """A chat whose last message is unfinished, so that the model continues the message.

    A random marker is put after the message's text, and the rendered prompt is cut at the marker. A
    search for the text itself could find other text of the template.

    chat: the messages, with the marker.
    Raises InvalidRequest if the last message has no text.
    """

    def __init__(self, chat: Sequence[Message]) -> None:
        self._mark = f"{secrets.randbelow(10**24):024d}"
        final = dict(chat[-1])
        content = final.get("content")
        marked = f"{self._mark} "  # the space shows whether the template trims contents
        if isinstance(content, str):
            self._text = content
            final["content"] = content + marked
        elif isinstance(content, (list, tuple)) and any("text" in part for part in content):
            at = max(i for i, part in enumerate(content) if "text" in part)
            self._text = content[at]["text"]
            part = {**content[at], "text": self._text + marked}
            final["content"] = [*content[:at], part, *content[at + 1 :]]
        else:
            raise InvalidRequest(
                "the final message has no content to continue", param="continue_final_message"
            )
        self.chat = [*chat[:-1], final]

    def cut(self, rendered: str) -> str:
        """Return the prompt up to the end of the final message's text.

        Spaces at the text's end remain if the template keeps them, as in transformers.
        Raises InvalidRequest if the template changes more than the spaces of that text.
        """
        at = rendered.rfind(self._mark)
        prompt = rendered[: max(at, 0)]
        text = self._text.rstrip()
        if text and not rendered.startswith(" ", at + len(self._mark)):
            prompt = prompt.removesuffix(self._text[len(text) :])
        if at < 0 or not _ends_with(prompt, text):
            raise InvalidRequest(
                "the chat template changes the final message, so it cannot be continued",
                param="continue_final_message",
            )
        return prompt


def _ends_with(prompt: str, text: str) -> bool:
    """Whether a prompt ends with a text, regardless of spaces."""
    if prompt.rstrip().endswith(text.strip()):
        return True
    letters = "".join(text.split())
    return "".join(prompt.split()).endswith(letters)
