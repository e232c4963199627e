"""StructBody: what a Struct refuses is told by the field, in the words that all routes share."""

from typing import Annotated, Any, ClassVar, Literal

import pytest
from msgspec import Meta, Struct

from deployments.api.fields.body import (
    Fault,
    Known,
    Shape,
    fields_of,
    of_schema,
    struct_body,
    words,
)
from deployments.api.fields.chat import CALL, MESSAGE
from deployments.api.fields.generation import sampled
from deployments.api.fields.schema import NEVER, Schema
from deployments.api.http.errors import ApiError

Side = Literal["left", "right"]


class Even(Shape):
    """An even number, or a list that ends with one."""

    SCHEMA: ClassVar[Schema] = {"type": ["integer", "array"]}

    def __init__(self, number: int) -> None:
        self.number = number

    @classmethod
    def parse(cls, value: Any) -> "Even":
        if isinstance(value, list):
            raise Fault("must be even", f"[{len(value) - 1}]")
        return cls(value)


class Part(Struct, kw_only=True):
    text: str
    size: Annotated[int, Meta(ge=1, le=9)] | None = None


class Whole(Struct, kw_only=True):
    name: Annotated[str, Meta(min_length=1, max_length=4)]
    side: Annotated[Side, words(Side)] | None = None
    seconds: Annotated[float, Meta(gt=0, le=5)] | None = None
    top_p: Annotated[float, sampled("top_p")] | None = None
    count: int | None = None
    flag: bool | None = None
    part: Part | None = None
    parts: Annotated[list[Part], Meta(min_length=1, max_length=2)] | None = None
    even: Even | None = None
    path: Annotated[str, Meta(min_length=1, extra={"needed": True})] | None = None
    tags: Annotated[list[str], Meta(extra={"expected": "texts", "whole": True})] | None = None


BODY = struct_body(Whole)
FAULTS = [
    ({"name": None}, "name is required", "missing_field"),
    ({"name": 5}, "name must be a string", "invalid_type"),
    ({"name": ""}, "name must not be empty", "invalid_value"),
    ({"name": "abcde"}, "name must have at most 4 bytes", "invalid_value"),
    ({"name": "ééé"}, "name must have at most 4 bytes", "invalid_value"),
    ({"side": "up"}, "side must be left or right", "invalid_value"),
    ({"side": 5}, "side must be left or right", "invalid_type"),
    ({"seconds": "5"}, "seconds must be a number", "invalid_type"),
    ({"seconds": 0}, "seconds must be above 0 and at most 5", "invalid_value"),
    ({"seconds": 10**400}, "seconds must be above 0 and at most 5", "invalid_value"),
    ({"top_p": 2}, "top_p must be in (0.0, 1.0], got 2", "invalid_value"),
    ({"count": True}, "count must be an integer", "invalid_type"),
    ({"flag": 1}, "flag must be true or false", "invalid_type"),
    ({"part": []}, "part must be an object", "invalid_type"),
    ({"part": {}}, "part.text is required", "missing_field"),
    ({"part": {"text": "a", "size": 10}}, "part.size must be between 1 and 9", "invalid_value"),
    ({"parts": []}, "parts takes 1 to 2 items, got 0", "invalid_value"),
    ({"parts": [{"text": "a"}, {"text": 5}]}, "parts[1].text must be a string", "invalid_type"),
    ({"even": [2, 3]}, "even[1] must be even", "invalid_type"),
    ({"path": ""}, "path is required", "missing_field"),
    ({"tags": ["a", 5]}, "tags must be texts", "invalid_value"),
]


@pytest.mark.parametrize(("fields", "message", "code"), FAULTS)
def test_a_fault_names_its_field(fields: dict[str, Any], message: str, code: str) -> None:
    """Bug: an error in msgspec's words, with a path like `$.parts[1].text`, or of another field."""
    with pytest.raises(ApiError) as caught:
        BODY.read({"name": "a", **fields}, [], strict=False)
    assert (caught.value.message, caught.value.code) == (message, code)
    assert caught.value.param == message.split()[0]


NO_PART = (
    'must be "text", or "image_url", "input_image" or "file" for an image, where the model sees '
    "them"
)
MESSAGE_FAULTS = [
    ({}, "m.role is required", "missing_field"),
    ({"role": "user"}, "m.content is required", "missing_field"),
    ({"role": "user", "content": 5}, "m.content must be a string or a list of parts", ""),
    ({"role": "user", "content": ["a"]}, "m.content[0] must be an object with a type", ""),
    ({"role": "user", "content": [{"type": 5}]}, f"m.content[0].type {NO_PART}", "value"),
    ({"role": "user", "content": [{"type": "image"}]}, f"m.content[0].type {NO_PART}", "value"),
    ({"role": "tool", "content": [{"type": "text"}]}, "m.content[0].text must be a string", ""),
    ({"role": "user", "content": "a", "name": 5}, "m.name must be a string", ""),
]


@pytest.mark.parametrize(("message", "text", "code"), MESSAGE_FAULTS)
def test_a_fault_of_a_message_names_its_part(message: Any, text: str, code: str) -> None:
    """Bug: an unknown tag of a union told in msgspec's words, or of another form than was sent."""
    with pytest.raises(ApiError) as caught:
        MESSAGE.read(message, "m")
    code = {"": "invalid_type", "value": "invalid_value"}.get(code, code)
    assert (caught.value.message, caught.value.code) == (text, code)
    assert caught.value.param == text.split()[0]


@pytest.mark.parametrize("call", [5, {"type": "x"}, {"id": "a"}, {"id": "a", "function": []}])
def test_what_is_no_call_is_told_of_the_call(call: Any) -> None:
    """Bug: an error of `function`, where the list has something that is no call at all."""
    with pytest.raises(ApiError) as caught:
        CALL.read(call, "calls[0]")
    assert caught.value.message == "calls[0] must be a function call"


def test_unknown_fields_are_named() -> None:
    """Bug: a misspelt field inside another one that is dropped without a word."""
    ignored: list[str] = []
    part = {"text": "a", "sizes": 3, "nothing": None}
    whole = BODY.read({"name": "a", "sides": 1, "part": part, "user": "x"}, ignored, strict=False)
    assert ignored == ["sides", "user", "part.sizes"] and whole.part == Part(text="a")


def test_the_schema_is_the_check() -> None:
    """Bug: a document that says less than the Struct, or in another order."""
    schemas, required = fields_of(Whole)
    assert required == ("name",) and schemas["side"] == {"enum": ["left", "right"]}
    assert schemas["seconds"] == {"type": "number", "exclusiveMinimum": 0, "maximum": 5}
    size = {"type": ["integer", "null"], "minimum": 1, "maximum": 9}
    part = {"type": "object", "properties": {"text": {"type": "string"}, "size": size}}
    assert schemas["part"] == {**part, "required": ["text"]}


class Leaf(Struct):
    text: str


class Closed(Struct):
    data: Annotated[Any, of_schema(NEVER)] = None


class Inner(Known[Leaf | Closed]):
    KINDS: ClassVar = {"leaf": Leaf, "closed": Closed}


class Node(Struct):
    parts: list[Inner]


class Outer(Known[Node]):
    KINDS: ClassVar = {"node": Node}


class Tree(Struct):
    outer: Outer


def test_objects_of_unknown_types_are_left_out_and_others_checked() -> None:
    """Bug: a conversation refused for an item of a new type, or a fault told of a whole list."""
    body = struct_body(Tree)
    parts: list[Any] = [{"type": "leaf", "text": "a"}, {"type": "new"}, 5, {"type": "closed"}]
    tree = body.read({"outer": {"type": "node", "parts": parts}}, [], strict=False)
    assert tree.outer.known is not None
    read = [part.known for part in tree.outer.known.parts]
    assert read == [Leaf("a"), None, None, Closed()]
    with pytest.raises(ApiError) as caught:
        body.read({"outer": {"type": "node", "parts": [5, {"type": "leaf"}]}}, [], strict=False)
    assert caught.value.param == "outer.parts[1].text" and caught.value.code == "missing_field"
    assert caught.value.message == "outer.parts[1].text is required"
    schema = fields_of(Node)[0]["parts"]["items"]
    leaf, others = schema["anyOf"]
    assert leaf["properties"] == {"type": {"enum": ["leaf"]}, "text": {"type": "string"}}
    assert others["not"]["properties"]["type"] == {"enum": ["leaf", "closed"]}


def test_parts_that_no_model_reads_are_in_no_schema() -> None:
    """Bug: a document that offers audio, or images of the system, which are always refused."""
    assert '"refusal"' in str(MESSAGE.schema).replace("'", '"')
    assert "audio" not in str(MESSAGE.schema)
    roles = {str(form["properties"]["role"]["enum"][0]): form for form in MESSAGE.schema["anyOf"]}
    for kind in ("image_url", "video"):
        assert {role for role in roles if kind in str(roles[role])} == {"user", "tool"}
