"""Contents of messages as a chat template takes them: a text, or a list of parts.

A template of a text model prints `message.content`; one of a vision model may go through its parts,
and prints nothing of a text, without an error. Which it is, is found by rendering a mark in both
forms, for each role.
"""

import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from engine.errors import InvalidRequest

_REASONING = ("reasoning_content", "thinking", "reasoning")
_CALL = {"id": "call00001", "type": "function", "function": {"name": "f", "arguments": {}}}
_WORD = re.compile(r"\w+")

Message = dict[str, Any]


class Form(NamedTuple):
    """The text that a template shows for one role's messages, with a text or a list of parts as
    content.

    None: the template raises an error for such a message.
    """

    text: bool | None = None
    parts: bool | None = None

    @property
    def silent(self) -> bool:
        """Whether it renders such messages without their text."""
        return not self.text and not self.parts and False in self


def find_forms(render: Callable[[list[Message]], str]) -> dict[str, Form]:
    """The form of each role. render: the template's text of a chat; it may raise anything."""
    mark = f"{secrets.randbelow(10**24):024d}"  # digits survive every filter of a template
    as_object = re.compile(rf"""["']text["']\s*:\s*["']{mark}""")  # a list printed as it is

    def shows(before: list[Message], role: str, content: Any, after: list[Message]) -> bool | None:
        try:
            text = render([*before, {**_named(role), "content": content}, *after])
        except Exception:  # what a template can raise on odd messages is open-ended
            return None
        return mark in text and as_object.search(text) is None

    def form(before: list[Message], role: str, after: list[Message]) -> Form:
        parts = [{"type": "text", "text": mark}]
        return Form(shows(before, role, mark, after), shows(before, role, parts, after))

    forms = {"user": form([], "user", [])}
    if forms["user"] == Form():
        return forms  # it renders no chat; one that runs into a limit would do so ten times
    user = shaped({"role": "user", "content": "x"}, forms)
    call = {"role": "assistant", "content": "", "tool_calls": [_CALL]}
    call_in_parts = {**call, "content": [{"type": "text", "text": "x"}]}
    forms["system"] = form([], "system", [user])
    forms["assistant"] = form([user], "assistant", [user])
    asked = call_in_parts if _wants_parts(forms["assistant"]) else call
    forms["tool"] = form([user, asked], "tool", [])
    return forms


def _named(role: str) -> Message:
    return {"role": role, **({"tool_call_id": _CALL["id"], "name": "f"} if role == "tool" else {})}


def _wants_parts(form: Form) -> bool:
    return bool(form.parts) and not form.text


def shaped(message: Mapping[str, Any], forms: Mapping[str, Form]) -> Message:
    """A message as the template takes it: without absent fields, its reasoning under all names, its
    content in a form that the template shows. Raises InvalidRequest for parts of no text."""
    out = {key: value for key, value in message.items() if value is not None}
    for key in _REASONING:
        if key in out:
            reasoning = out[key]
            out = {"thinking": reasoning, **out, "reasoning_content": reasoning}
            break
    content = out.get("content")
    form = forms.get(str(out.get("role"))) or forms.get("user", Form())
    if isinstance(content, str):
        if _wants_parts(form):
            out["content"] = [{"type": "text", "text": content}]
    elif isinstance(content, (list, tuple)) and not form.parts:
        for part in content:
            if not isinstance(part, Mapping) or not isinstance(part.get("text"), str):
                raise InvalidRequest("this model takes text content only", param="messages")
        out["content"] = "".join(part["text"] for part in content)
    return out


def text_of(content: Any) -> str:
    """The text of a content of either form."""
    if isinstance(content, str):
        return content
    if not isinstance(content, (list, tuple)):
        return ""
    parts = [part.get("text") for part in content if isinstance(part, Mapping)]
    return "".join(part for part in parts if isinstance(part, str))


def check_shown(rendered: str, chat: Sequence[Mapping[str, Any]], silent: bool) -> None:
    """Refuse a prompt without the last thing that the user said. silent: the template shows no text
    of users at all. A template may trim, escape or quote a text; then its words are there.

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
    """A chat whose last message stays open, so that the model goes on with it.

    A mark stands behind the message's text, and what the template writes from there on is cut. The
    text itself is not looked for: "e" is also in the words of a template.
    chat: with the mark. Raises InvalidRequest where the last message has no text.
    """

    def __init__(self, chat: Sequence[Message]) -> None:
        self._mark = f"{secrets.randbelow(10**24):024d}"
        final = dict(chat[-1])
        content = final.get("content")
        marked = f"{self._mark} "  # the space tells whether the template trims
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
        """The prompt up to the end of the final message's text. Spaces at its end stay where the
        template keeps them, as with transformers.

        Raises InvalidRequest where the template changes more than the spaces of that text.
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
    """Whether a prompt ends with a text, however each of them is spaced."""
    if prompt.rstrip().endswith(text.strip()):
        return True
    letters = "".join(text.split())
    return "".join(prompt.split()).endswith(letters)
