"""Parsers of models' text: events do not depend on how it is cut."""

import codecs
import json
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deployments.api.output.channel_parser import ChannelParser
from deployments.api.output.chat_output import ParsedChoice
from deployments.api.output.grammar import Function
from deployments.api.output.output_format import FORMATS, OutputFormat, Reasoning
from deployments.api.output.parser import OutputParser, Thinking
from deployments.api.output.plan import OutputPlan
from deployments.api.output.step_parser import Event, StepParser
from engine.messages import Delta
from engine.sampling_params import SamplingParams
from tests.deployments.api.output.test_tools import CITY, DEEP
from tests.engine.text.small_tokenizers import byte_level

Make = Callable[[], StepParser]


def merged(parser: StepParser, pieces: list[str]) -> list[Event]:
    events: list[Event] = []
    for event in [*(e for piece in pieces for e in parser.feed(piece)), *parser.finish()]:
        if events and events[-1].kind == event.kind and event.kind not in ("call", "end"):
            event = Event(event.kind, events.pop().text + event.text)
        events.append(event)
    return events


FUNCTIONS = [Function("weather", CITY), Function("now", {"type": "object", "properties": {}})]


@settings(max_examples=300, deadline=None)
@given(
    format=st.sampled_from(FORMATS),
    thinking=st.sampled_from(("open", "may", "no")),
    pieces=st.lists(
        st.sampled_from(["a ", "\n", "<", "CALL", "{", '"', "</think>", "<think>", "TRIGGER"]),
        max_size=8,
    ),
    cut=st.integers(0, 400),
    end=st.integers(0, 400),
)
def test_every_chunking(
    format: OutputFormat, thinking: Thinking, pieces: list[str], cut: int, end: int
) -> None:
    """Events that depend on how the text is cut, also of a text that is cut off or makes no sense;
    a parser that fails."""
    call = format.opening + format.write("weather", DEEP) + format.closing
    text = "".join(pieces).replace("CALL", call).replace("TRIGGER", format.trigger)[: end or None]

    def parser() -> OutputParser:
        raw = {function.name: function.raw(format) for function in FUNCTIONS}
        return OutputParser(format, raw, Reasoning("<think>", "</think>"), thinking)

    whole = merged(parser(), [text])
    assert merged(parser(), list(text)) == whole
    assert merged(parser(), [text[:cut], text[cut:]]) == whole


# What a model of channels may write, and what it may not.
_ODD = (
    *("<|channel|>analysis<|message|>", "<|channel|>final<|message|>", "<|start|>", "assistant"),
    *("<|end|>", "<|call|>", "a ", " to=functions.now", "<|message|>", "{", "}", '"', "<|chan"),
    *("<|channel|>commentary to=functions.now <|constrain|>json<|message|>", "x" * 300),
)


@settings(max_examples=300, deadline=None)
@given(
    pieces=st.lists(st.sampled_from(_ODD), max_size=9),
    cut=st.integers(0, 400),
    end=st.integers(0, 400),
    calls=st.booleans(),
)
def test_every_chunking_of_channels(pieces: list[str], cut: int, end: int, calls: bool) -> None:
    """The same of headers that are no headers, or are cut off; a parser that waits for ever."""
    text = "".join(pieces)[: end or None]

    def parser() -> StepParser:
        return ChannelParser(calls=calls)

    whole = merged(parser(), [text])
    assert merged(parser(), list(text)) == whole
    assert merged(parser(), [text[:cut], text[cut:]]) == whole


HARD = {**DEEP, "city": 'a\\"\n{ß} 😀</'}
_THOUGHTS = Reasoning("<think>", "</think>")
CHANNELS = (
    "<|channel|>analysis<|message|>hm 😀<|end|><|start|>assistant<|channel|>commentary<|message|>"
    "So ß:<|end|><|start|>assistant<|channel|>commentary to=functions.weather <|constrain|>json"
    '<|message|>{"city": "ß\\n😀<|end", "days": 1}<|call|>'
)


def written(name: str) -> tuple[str, Make]:
    """Return a text with thoughts, content and calls, and a function that makes its parser."""
    if name == "channels":
        return CHANNELS, lambda: ChannelParser(calls=True)
    format = next(known for known in FORMATS if known.name == name)
    raw = {function.name: function.raw(format) for function in FUNCTIONS}
    calls = [format.write("weather", HARD)]
    calls += [format.write("now", {})] if format.parallel else []
    text = format.opening + format.separator.join(calls) + format.closing
    said = "So ß:\n" if format.trigger else ""
    return (
        f"<think>hm 😀</think>\n{said}{text}",
        lambda: OutputParser(format, raw, _THOUGHTS, "may"),
    )


@pytest.mark.parametrize(
    "name", [*(format.name for format in FORMATS if format.name != "harmony"), "channels"]
)
def test_cut_at_every_byte(name: str) -> None:
    """Of each format: other events where a chunk ends inside a mark, a name or a character."""
    text, make = written(name)
    whole = merged(make(), [text])
    kinds = [event.kind for event in whole]
    assert "reasoning" in kinds and kinds.count("call") == kinds.count("end") > 0
    data = text.encode()
    for cut in range(len(data) + 1):
        decoder = codecs.getincrementaldecoder("utf-8")()
        pieces = [decoder.decode(data[:cut]), decoder.decode(data[cut:], final=True)]
        assert merged(make(), pieces) == whole, data[:cut]


@pytest.mark.parametrize("name", ["hermes", "qwen3-coder", "channels"])
def test_tokens_of_a_byte(name: str) -> None:
    """The same through the decoder of tokens, each of which is a byte."""
    text, make = written(name)
    tokenizer = byte_level()
    ids = [i for char in text for i in tokenizer.encode_plain(char)]

    class Plan(OutputPlan):
        def parser(self) -> StepParser:
            return make()

    plan = Plan(tokenizer, None, _THOUGHTS, "may", None, frozenset())

    def events(cut: int) -> tuple[str, str, list[tuple[str, str]], int]:
        choice = ParsedChoice(plan, SamplingParams())
        for piece, finish in ((ids[:cut], ""), (ids[cut:], "stop")):
            choice.feed(Delta(0, piece, finish))
        calls = [(name, "".join(pieces)) for name, pieces in choice.calls]
        return "".join(choice.content), "".join(choice.reasoning), calls, choice.reasoning_tokens

    whole = events(0)
    assert whole[1].strip() == "hm 😀" and whole[2]
    assert all(events(cut) == whole for cut in range(1, len(ids), 7))


@pytest.mark.parametrize("name", ["glm-4.7", "minimax-m2"])
def test_json_that_holds_what_ends_it(name: str) -> None:
    """An argument that is cut where a string in its list spells the end of arguments."""
    format = next(known for known in FORMATS if known.name == name)
    assert format.tagged is not None
    value = ["a" + format.tagged.value_close.strip() + '"\\', {"b": format.end}]
    text = format.opening + format.write("f", {"x": value, "y": 2}) + format.closing
    for cut in range(len(text) + 1):
        parser = OutputParser(format, {}, None, "no")
        events = parser.feed(text[:cut]) + parser.feed(text[cut:]) + parser.finish()
        arguments = "".join(event.text for event in events if event.kind == "arguments")
        assert json.loads(arguments) == {"x": value, "y": 2}
        assert events[-1].kind == "end"


@pytest.mark.parametrize(
    "text, content",
    [
        ('{"a": "<tool_call><|END|>"}', '{"a": "<tool_call><|END|>"}'),
        ('<|BEGIN|>{"a": "<|BEGIN|><|END|>"} <|END|>', '{"a": "<|BEGIN|><|END|>"} '),
        ("<think>hm</think>\n\n<|BEGIN|>b<|END|", "b<|END|"),
        ("<think>hm</think>x <|END|>", "x "),
        ("", None),
    ],
)
def test_limited_content_is_left_alone(text: str, content: str | None) -> None:
    """A mark inside a document that is read as a call, or taken out; a wrapper that is shown."""
    format = next(known for known in FORMATS if known.name == "hermes")
    for cut in range(len(text) + 1):
        marks = (_THOUGHTS, "may", ("<|BEGIN|>", "<|END|>"))
        parser = OutputParser(format, {}, *marks, limited=True)
        events = merged(parser, [text[:cut], text[cut:]])
        assert [event.text for event in events if event.kind == "content"] == (
            [content] if content else []
        )
        assert not any(event.kind == "call" for event in events)
    parser = OutputParser(format, {}, *marks, limited=True)
    (called, *_) = merged(parser, ["\n" + format.write("f", {"a": 1})])
    assert called == Event("call", "f")


def test_a_limited_final_message_is_left_alone() -> None:
    """A document of gpt-oss that ends at a mark inside one of its strings."""
    text = '<|channel|>final json<|message|>{"a": "<|end|><|start|>x"}'
    for cut in range(len(text) + 1):
        events = merged(ChannelParser(calls=True, limited=True), [text[:cut], text[cut:]])
        assert events == [Event("content", '{"a": "<|end|><|start|>x"}')]
