"""TOOL, NAMED, TOOL_CHOICE: the schemas of tools in OpenAI's form, and of the choice among them."""

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from deployments.api.body_fields import MAX_TOOLS, TOOL_NAME
from deployments.api.fields.body import Typed, expects, of_schema
from deployments.api.fields.schema import Schema, either, list_of, one_of, record
from deployments.api.http.errors import ApiError, invalid, shown
from deployments.api.http.json_body import JsonObject

TOOL_NAMED: Schema = {"type": "string", "pattern": f"^{TOOL_NAME.pattern}$"}
ARGUMENTS: Schema = {"type": "object", "properties": {"type": one_of("object")}}


_NAMED = "an object with a function that has a name"
_CHOICES = '"none", "auto", "required", name a function or be allowed_tools'


class ToolGrammar(Struct, gc=False):
    """The grammar of a custom tool's text."""

    syntax: Annotated[Literal["lark", "regex"], expects('"lark" or "regex"', code="invalid_value")]
    definition: Annotated[str, Meta(pattern=r"\S"), expects("a text")]


class TextInput(Struct, tag="text", tag_field="type", gc=False):
    """The input of a custom tool that takes any text."""


class GrammarInput(Struct, tag="grammar", tag_field="type", gc=False):
    """The input of a custom tool that takes texts that match a grammar."""

    grammar: ToolGrammar


# The Meta with the error for an invalid `format` of a custom tool's input.
INPUT = expects('of type "text" or "grammar"', code="invalid_value")


class Described(Struct, kw_only=True, gc=False):
    """The fields that functions and custom tools share. name: `add_tool` checks its characters."""

    name: Annotated[str, of_schema(TOOL_NAMED), expects(_NAMED, up=2)]
    description: str | None = None
    strict: bool | None = None


class Function(Described, kw_only=True):
    """A function that the model may call."""

    parameters: Annotated[Any, of_schema(ARGUMENTS)] = None


class CustomTool(Described, kw_only=True):
    """A custom tool, which takes a text."""

    format: Annotated[TextInput | GrammarInput, INPUT] | None = None

    @property
    def grammar(self) -> ToolGrammar | None:
        """The grammar of the text; None: any text."""
        return self.format.grammar if isinstance(self.format, GrammarInput) else None


class _OfFunction(Struct, tag="function", tag_field="type", gc=False):
    function: Annotated[Function, expects(_NAMED, up=1)]


class OfCustom(Struct, tag="custom", tag_field="type", gc=False):
    """A custom tool in OpenAI's form."""

    custom: Annotated[CustomTool, expects(_NAMED, up=1)]


def _no_kind(tool: JsonObject, path: str) -> ApiError:
    return invalid(
        f"{path}.type {shown(tool.get('type'))} is not supported; function and custom are",
        f"{path}.type",
        "not_supported",
    )


FUNCTION: Typed[Function] = Typed(Function)
TOOL: Typed[_OfFunction | OfCustom] = Typed(
    Annotated[_OfFunction | OfCustom, Meta(extra={"unknown": _no_kind}), expects(_NAMED)],
    default="function",
)
TOOLS = list_of(TOOL.schema, 0, MAX_TOOLS)


def _choice(up: int) -> Meta:
    return expects(_CHOICES, "invalid_value", up=up)


class _Name(Struct, gc=False):
    name: Annotated[str, _choice(2)]


class NamedFunction(Struct, tag="function", tag_field="type", gc=False):
    function: Annotated[_Name, _choice(1)]


class _NamedCustom(Struct, tag="custom", tag_field="type", gc=False):
    custom: Annotated[_Name, _choice(1)]


def no_choice(_: Any = None, path: str = "tool_choice") -> ApiError:
    """Return the error for a tool choice in an unknown form."""
    return invalid(f"{path} must be {_CHOICES}", path)


NAMED: Typed[NamedFunction | _NamedCustom] = Typed(
    Annotated[NamedFunction | _NamedCustom, Meta(extra={"unknown": no_choice}), _choice(0)],
    default="function",
)
TOOL_CHOICE = either(
    one_of("none", "auto", "required"),
    NAMED.schema,
    record(
        {
            "type": one_of("allowed_tools"),
            "allowed_tools": record(
                {"mode": one_of("auto", "required"), "tools": list_of(NAMED.schema, 1)}
            ),
        }
    ),
)
