"""ParsedChoice: parses the text of one choice of a chat into reasoning, content and tool calls, and
writes these as fields of OpenAI's answers.
"""

import hashlib
import json
from collections.abc import Sequence

import msgspec

from deployments.api.http.json_body import JsonObject
from deployments.api.output.plan import OutputPlan
from deployments.api.output.step_parser import Event
from engine.messages import Delta
from engine.sampling_params import SamplingParams
from engine.text.detokenizer import ChoiceDecoder, Decoded, open_at

_OPEN = '"input"'


class TextReader:
    """An incremental reader of a custom tool's text, which models write as the only argument of a
    function."""

    def __init__(self) -> None:
        self._held = ""
        self._inside = False
        self._ended = False

    def feed(self, piece: str) -> str:
        """Return the next part of the tool's text, unescaped. Half a surrogate pair is held back
        until the second half arrives. piece: the next piece of the call's JSON."""
        if self._ended:
            return ""
        self._held += piece
        if not self._inside:
            at = self._held.find(_OPEN)
            quote = self._held.find('"', at + len(_OPEN)) if at >= 0 else -1
            if quote < 0:
                return ""
            self._inside, self._held = True, self._held[quote + 1 :]
        at = safe = 0
        text = self._held
        while at < len(text):
            if text[at] == '"':
                self._ended = True
                safe = at
                break
            size = 1
            if text[at] == "\\":
                size = 6 if text[at + 1 : at + 2] == "u" else 2
            at += size
            if at > len(text):
                break
            high = size == 6 and text[at - 4 : at - 2].lower() in ("d8", "d9", "da", "db")
            if not high:
                safe = at
        ready, self._held = text[:safe], text[safe:]
        if not ready:
            return ""
        value: str = json.loads(f'"{ready}"', strict=False)
        return value.encode("utf-8", "replace").decode()


_LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789"


def call_id(number: bytes, choice: int, index: int, short: bool, prefix: str = "call_") -> str:
    """Return the id of a tool call. It is the same if the answer is generated again.

    number: the answer's unique number
    choice, index: index of the choice, and of the call in it
    short: whether the id has nine letters and digits and no prefix
    """
    digest = hashlib.blake2b(b"%b %d %d" % (number, choice, index), digest_size=32).digest()
    letters = "".join(_LETTERS[byte % len(_LETTERS)] for byte in digest)
    return letters[:9] if short else f"{prefix}{letters[:24]}"


class ParsedChoice:
    """The parser of one choice's output, and its result so far.

    Stop strings are searched in content only, because truncated arguments would be useless.

    new: the events of the last `feed`
    """

    def __init__(
        self, plan: OutputPlan, params: SamplingParams, prompt: Sequence[int] = ()
    ) -> None:
        self._plan = plan
        self._custom = plan.custom
        self._parser = plan.parser()
        tokenizer = plan.tokenizer
        hidden: frozenset[int] = frozenset()
        changes: JsonObject = {"stop": ()}
        if plan.shown_ids and params.skip_special_tokens:
            changes["skip_special_tokens"] = False
            hidden = tokenizer.special_ids - plan.shown_ids
        self.decoder = ChoiceDecoder(
            tokenizer, msgspec.structs.replace(params, **changes), prompt=prompt
        )
        self._hidden = hidden
        self._params = params
        self._held = ""  # end of the content that may be the beginning of a stop string
        self._stop: str | None = None
        self.new: list[Event] = []
        self.is_content: list[bool] = []  # for each token of the last `feed`: whether it is content
        self.reasoning_tokens = 0
        self.content: list[str] = []
        self.reasoning: list[str] = []
        self.calls: list[tuple[str, list[str]]] = []  # (name, pieces of its arguments or text)
        self._reader: TextReader | None = None  # reader of a custom tool's open call
        self._told = 0  # number of calls whose beginning `delta` has returned

    def feed(self, delta: Delta) -> Decoded:
        """Parse a delta, and set `new` to the events of its text.

        Returns finish reason and number of tokens, as `ChoiceDecoder.feed` does, but with an empty
        text, as the text is in the events.
        """
        self.new, self.is_content = [], []
        tokens = delta.token_ids
        if not tokens:
            decoded = self.decoder.feed([], delta.finish, delta.stop_token)
            self._parse_text(decoded.text, bool(delta.finish))
            return self._ended(decoded, 0)
        for count, token in enumerate(tokens, 1):
            last = count == len(tokens)
            finish = delta.finish if last else ""
            stop_token = delta.stop_token if last else None
            hidden = token in self._hidden and stop_token is None
            if self._parser.reasons:
                self.reasoning_tokens += 1
            decoded = self.decoder.feed([] if hidden else [token], finish, stop_token)
            self.decoder.num_tokens += hidden
            has_content = self._parse_text(decoded.text, bool(finish))
            self.is_content.append(has_content or stop_token is not None)
            if self._stop is not None:
                return Decoded("", "stop", self._stop, count)
        return self._ended(decoded, len(tokens))

    def _ended(self, decoded: Decoded, count: int) -> Decoded:
        reason = decoded.finish_reason
        parser = self._parser
        if reason == "stop" and parser.calls and parser.calls == parser.opened:
            named = self._plan.tools is not None and self._plan.tools.named
            reason = "stop" if named else "tool_calls"
        if self._stop is not None:
            return Decoded("", "stop", self._stop, count)
        return Decoded("", reason, decoded.stop_reason, count)

    def _parse_text(self, text: str, final: bool) -> bool:
        """Parse the next text; return whether it contained content. final: whether it is the last
        text."""
        events = self._parser.feed(text) if text else []
        if final:
            events += self._parser.finish()
        has_content = False
        for event in events:
            if event.kind == "content" and self._params.stop:
                event = Event("content", self._before_stop(event.text))
            elif self._held:
                self._add(Event("content", self._held))
                self._held = ""
            has_content = has_content or event.kind == "content"
            self._add(event)
            if self._stop is not None:
                return has_content
        if final and self._held:
            self._add(Event("content", self._held))
            self._held = ""
        return has_content

    def _add(self, event: Event) -> None:
        kind, text = event
        if kind == "call":
            self.calls.append((text, []))
            self._reader = TextReader() if text in self._custom else None
        elif kind == "arguments":
            if self._reader is not None:
                text = self._reader.feed(text)
                event = Event(kind, text)
            self.calls[-1][1].append(text)
        elif kind == "content":
            self.content.append(text)
        elif kind == "reasoning":
            self.reasoning.append(text)
        if text or kind == "end":
            self.new.append(event)

    def _before_stop(self, text: str) -> str:
        self._held += text
        if self.decoder.num_tokens > self._params.min_tokens:
            calls = [
                (at + len(stop), at, stop)
                for stop in self._params.stop
                if (at := self._held.find(stop)) >= 0
            ]
            if calls:
                end, start, self._stop = min(calls)
                return self._held[: end if self._params.include_stop_str_in_output else start]
        keep = min(open_at(self._held, stop) for stop in self._params.stop)
        text, self._held = self._held[:keep], self._held[keep:]
        return text

    # --- on the wire ---

    def message(self, number: bytes, choice: int) -> JsonObject:
        """Return the choice's message for a whole answer. number: the answer's unique number."""
        content = "".join(self.content)
        message: JsonObject = {"role": "assistant", "content": content, "refusal": None}
        if self.reasoning and self._plan.shows_reasoning:
            message["reasoning_content"] = message["reasoning"] = "".join(self.reasoning)
        if (self.calls or self.reasoning) and not content:
            message["content"] = None
        if self.calls:
            message["tool_calls"] = [
                {"id": self._id(number, choice, i), **self._called(name, "".join(arguments))}
                for i, (name, arguments) in enumerate(self.calls)
            ]
        return message

    def delta(self, number: bytes, choice: int) -> JsonObject:
        """Return the message delta for the events of the last `feed`; {} if there are none.

        A call's id and name are sent only once. number: the answer's unique number.
        """
        delta: JsonObject = {}
        calls: list[JsonObject] = []
        for kind, text in self.new:
            if kind == "content":
                delta["content"] = delta.get("content", "") + text
            elif kind == "reasoning" and self._plan.shows_reasoning:
                thought = delta.get("reasoning", "") + text
                delta["reasoning_content"] = delta["reasoning"] = thought
            elif kind == "call":
                id = self._id(number, choice, self._told)
                calls.append({"index": self._told, "id": id, **self._called(text, "")})
                self._told += 1
            elif kind == "arguments":
                custom = self.calls[self._told - 1][0] in self._custom
                of, what = ("custom", "input") if custom else ("function", "arguments")
                if not calls:
                    calls.append({"index": self._told - 1, of: {what: ""}})
                calls[-1][of][what] += text
        if calls:
            delta["tool_calls"] = calls
        return delta

    def _called(self, name: str, text: str) -> JsonObject:
        if name in self._custom:
            return {"type": "custom", "custom": {"name": name, "input": text}}
        return {"type": "function", "function": {"name": name, "arguments": text}}

    def forget_new(self) -> None:
        """Discard the events of the last `feed`, which the client already has."""
        self.new, self._told = [], len(self.calls)

    def _id(self, number: bytes, choice: int, index: int) -> str:
        format = self._plan.format
        return call_id(number, choice, index, format is not None and format.short_ids)
