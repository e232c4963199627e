"""take_tools: reads the tools of a chat's request, and the choice of those that may be called."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from deployments.api.body_fields import MAX_TOOLS, TOOL_NAME
from deployments.api.fields.tools import (
    FUNCTION,
    NAMED,
    TOOL,
    NamedFunction,
    OfCustom,
    ToolGrammar,
    no_choice,
)
from deployments.api.http.errors import invalid, shown, wrong_type
from deployments.api.http.json_body import JsonObject

Mode = Literal["none", "auto", "required"]
_MODES: dict[str, Mode] = {"none": "none", "auto": "auto", "required": "required"}


@dataclass(slots=True)
class RequestedTool:
    """A tool of a request.

    declaration: the tool in the form that is passed to the template
    schema: the JSON schema of the arguments, unchecked
    where: the path of the schema in the request, for errors
    custom: whether the tool takes a text; it is the only argument, named `input`
    grammar: the Lark grammar of that text; "": none
    """

    name: str
    declaration: JsonObject
    schema: Any
    strict: bool
    where: str
    custom: bool = False
    grammar: str = ""


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """A choice of tools: those that may be called, and whether a call is required.

    callable: the names of the tools that may be called
    named: whether the request names the one tool to call
    """

    mode: Mode
    callable: frozenset[str]
    named: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestedTools(ToolChoice):
    """The tools of a request, and the choice of those that may be called.

    tools: all tools, to be described in the prompt
    parallel: whether an answer may have several calls
    """

    tools: list[RequestedTool]
    parallel: bool


def take_tools(tools: Any, choice: Any = None, *, parallel: bool = True) -> RequestedTools | None:
    """Return the tools and the tool choice from fields in OpenAI's form; None without tools.

    Raises ApiError 400 naming the field: invalid_type, invalid_value, missing_field, not_supported.
    """
    if tools is None and choice is None:
        return None
    requested = read_tools(tools)
    return requested_tools(requested, read_choice(choice, requested), parallel=parallel)


def requested_tools(
    tools: list[RequestedTool], choice: ToolChoice, *, parallel: bool
) -> RequestedTools | None:
    """Check and return a request's tools with the choice among them; None without tools.

    Raises ApiError 400.
    """
    if not tools:
        if choice.mode == "required":
            raise invalid('tool_choice "required" needs tools', "tool_choice")
        return None
    return RequestedTools(
        choice.mode,
        choice.callable,
        choice.named,
        tools=tools,
        parallel=parallel and not choice.named,
    )


def read_tools(value: Any) -> list[RequestedTool]:
    """Return the tools in a list in OpenAI's form. Raises ApiError 400."""
    if value is None:
        return []
    if not isinstance(value, list):
        raise wrong_type("tools", "a list")
    check_tool_count(value)
    tools: list[RequestedTool] = []
    for i, item in enumerate(value):
        tool = TOOL.read(item, f"tools[{i}]")
        if isinstance(tool, OfCustom):
            custom, place = tool.custom, f"tools[{i}].custom"
            add_custom(tools, custom.name, custom.description, custom.grammar, place)
        else:
            add_tool(tools, item["function"], f"tools[{i}].function")
    return tools


def check_tool_count(tools: Sequence[object]) -> None:
    """Raise ApiError 400 if a request has too many tools."""
    if len(tools) > MAX_TOOLS:
        raise invalid(f"tools takes at most {MAX_TOOLS} items", "tools")


def add_tool(
    tools: list[RequestedTool],
    function: Mapping[str, Any],
    where: str,
    *,
    schema_name: str = "parameters",
) -> None:
    """Check a tool and add it to the request's tools. Raises ApiError 400.

    function: the keys name (a string), description, strict and parameters
    where: the path of the tool in the request, for errors
    schema_name: the request's name for the key parameters
    """
    name = function["name"]
    _check_name(tools, name, where)
    strict = bool(FUNCTION.read(function, where).strict)
    path = f"{where}.{schema_name}"
    schema = function.get("parameters")
    # The order of keys is kept, as templates print them in this order. Missing parameters get the
    # form in which transformers writes a function without parameters.
    declared = dict(function)
    declared.setdefault("description", "")
    if schema is None:
        declared["parameters"] = {"type": "object", "properties": {}}
        schema = {**declared["parameters"], "additionalProperties": False}
    if not isinstance(schema, dict) or schema.get("type", "object") != "object":
        raise wrong_type(path, "the JSON schema of an object")
    declaration = {"type": "function", "function": declared}
    tools.append(RequestedTool(name, declaration, {"type": "object", **schema}, strict, path))


def _check_name(tools: list[RequestedTool], name: str, where: str) -> None:
    if not TOOL_NAME.fullmatch(name):
        raise invalid(
            f"{where}.name must be 1 to 64 letters, digits, underscores, dots or dashes",
            f"{where}.name",
        )
    if any(other.name == name for other in tools):
        raise invalid(f"{where}.name {shown(name)} is there twice", f"{where}.name")


def add_custom(
    tools: list[RequestedTool],
    name: str,
    description: str | None,
    grammar: ToolGrammar | None,
    where: str,
) -> None:
    """Add a custom tool as a function with one text argument, because templates know only
    functions.

    grammar: the grammar that the text must match; None: any text
    where: the path of the tool in the request, for errors

    Raises ApiError 400.
    """
    _check_name(tools, name, where)
    text: JsonObject = {"type": "string"}
    lark = ""
    if grammar is not None and grammar.syntax == "regex":
        text["pattern"] = f"^(?:{grammar.definition})$"
    elif grammar is not None:
        lark = grammar.definition
    schema = {
        "type": "object",
        "properties": {"input": text},
        "required": ["input"],
        "additionalProperties": False,
    }
    plain = {**schema, "properties": {"input": {"type": "string"}}}
    function = {"name": name, "description": description or "", "parameters": plain}
    declaration = {"type": "function", "function": function}
    tools.append(RequestedTool(name, declaration, schema, True, f"{where}.format", True, lark))


def read_choice(choice: Any, tools: Sequence[RequestedTool]) -> ToolChoice:
    """Convert a tool choice in OpenAI's form. Raises ApiError 400."""
    names = frozenset([tool.name for tool in tools])
    if choice is None:
        return ToolChoice("auto", names)
    if isinstance(choice, str) and choice in _MODES:
        return ToolChoice(_MODES[choice], names)
    if not isinstance(choice, dict):
        raise no_choice()
    if choice.get("type") == "allowed_tools":
        # In the Responses API the fields are not in an inner object.
        allowed = choice.get("allowed_tools", choice)
        mode = allowed.get("mode") if isinstance(allowed, dict) else None
        listed = allowed.get("tools") if isinstance(allowed, dict) else None
        return allowed_tools(mode, listed, lambda tool: named_tool(_name(tool), names))
    return named_tool(_name(choice), names)


def allowed_tools(mode: Any, listed: Any, read: Callable[[Any], ToolChoice]) -> ToolChoice:
    """Return the choice of an `allowed_tools` object. Raises ApiError 400.

    mode, listed: the fields `mode` and `tools` of the object
    read: returns the ToolChoice for one item of `listed`
    """
    if mode not in ("auto", "required") or not isinstance(listed, list) or not listed:
        where = "tool_choice.allowed_tools"
        raise invalid(f'{where} takes a mode, "auto" or "required", and tools', where)
    chosen = frozenset[str]().union(*(read(tool).callable for tool in listed))
    return ToolChoice(mode, chosen)


def named_tool(name: Any, names: Collection[str]) -> ToolChoice:
    """Return the choice of one tool by its name. names: names of the request's tools. Raises
    ApiError 400."""
    if not isinstance(name, str):
        raise no_choice()
    if name not in names:
        raise invalid(f"tool_choice names {shown(name)}, which is not in tools", "tool_choice")
    return ToolChoice("required", frozenset((name,)), named=True)


def _name(choice: Any) -> str:
    """Return the tool's name in a tool choice of one tool. Raises ApiError 400."""
    named = NAMED.read(choice, "tool_choice")
    return named.function.name if isinstance(named, NamedFunction) else named.custom.name
