"""take_tools: the fields of a chat that say which tools there are and which may be called."""

from dataclasses import dataclass
from typing import Any, Literal

from deployments.api.body_fields import take_bool
from deployments.api.bounds import MAX_TOOLS, TOOL_NAME
from deployments.api.http.errors import invalid, shown, wrong_type

Mode = Literal["none", "auto", "required"]
_MODES: dict[str, Mode] = {"none": "none", "auto": "auto", "required": "required"}


@dataclass(slots=True)
class RequestedTool:
    """A tool of a request.

    given: the tool as the template gets it
    schema: the schema of the arguments, not yet looked into
    custom: whether the tool takes a text, which is the one argument, `input`
    grammar: the grammar of that text, in Lark; "" for none
    """

    name: str
    given: dict[str, Any]
    schema: Any
    strict: bool
    where: str
    custom: bool = False
    grammar: str = ""


@dataclass(slots=True)
class RequestedTools:
    """The tools of a request, and which may be called.

    tools: all tools, which the prompt describes
    callable: the names of the tools that may be called
    named: whether one function was asked for by its name
    """

    tools: list[RequestedTool]
    mode: Mode
    callable: frozenset[str]
    named: bool
    parallel: bool


def take_tools(body: dict[str, Any]) -> RequestedTools | None:
    """Return the tools of a chat's body; None if there are none.

    Raises ApiError 400 naming the field: invalid_type, invalid_value, missing_field, not_supported.
    """
    _refuse_functions(body)
    tools = _tools(body.get("tools"))
    parallel = take_bool(body, "parallel_tool_calls", True)
    names = {tool.name for tool in tools}
    mode, chosen, named = _choice(body.get("tool_choice"), names)
    if not tools:
        if mode == "required":
            raise invalid('tool_choice "required" needs tools', "tool_choice")
        return None
    return RequestedTools(tools, mode, frozenset(chosen), named, parallel and not named)


def refuse_tools(body: dict[str, Any]) -> None:
    """Refuse tools, for a route that has none. Raises ApiError 400 not_supported."""
    _refuse_functions(body)
    if body.get("tools"):
        raise invalid("tools are for chat completions", "tools", "not_supported")


def _refuse_functions(body: dict[str, Any]) -> None:
    for field in ("functions", "function_call"):
        asks = field == "functions" or body.get(field) not in ("none", "auto")
        if body.get(field) and asks:
            raise invalid(f"{field} is not supported; use tools", field, "not_supported")


def _tools(value: Any) -> list[RequestedTool]:
    if value is None:
        return []
    if not isinstance(value, list):
        raise wrong_type("tools", "a list")
    if len(value) > MAX_TOOLS:
        raise invalid(f"tools takes at most {MAX_TOOLS} items", "tools")
    found: list[RequestedTool] = []
    for i, tool in enumerate(value):
        where = f"tools[{i}]"
        if not isinstance(tool, dict):
            raise wrong_type(where, "an object with a function that has a name")
        kind = tool.get("type", "function")
        if kind not in ("function", "custom"):
            raise invalid(
                f"{where}.type {shown(kind)} is not supported; function and custom are",
                f"{where}.type",
                "not_supported",
            )
        function = tool.get(kind)
        name = function.get("name") if isinstance(function, dict) else None
        if not isinstance(function, dict) or not isinstance(name, str):
            raise wrong_type(where, "an object with a function that has a name")
        where = f"{where}.{kind}"
        if not TOOL_NAME.fullmatch(name):
            raise invalid(
                f"{where}.name must be 1 to 64 letters, digits, underscores, dots or dashes",
                f"{where}.name",
            )
        if any(other.name == name for other in found):
            raise invalid(f"{where}.name {shown(name)} is there twice", f"{where}.name")
        strict = function.get("strict")
        if strict is not None and not isinstance(strict, bool):
            raise wrong_type(f"{where}.strict", "true or false")
        described = function.get("description")
        if described is not None and not isinstance(described, str):
            raise wrong_type(f"{where}.description", "a string")
        if kind == "custom":
            found.append(_custom(name, described, function.get("format"), where))
            continue
        path = f"{where}.parameters"
        schema = function.get("parameters")
        # In the order of the request, which is what templates print. Without parameters it is told
        # as transformers tells a function that has none.
        told = dict(function)
        told.setdefault("description", "")
        if schema is None:
            told["parameters"] = {"type": "object", "properties": {}}
            schema = {**told["parameters"], "additionalProperties": False}
        if not isinstance(schema, dict) or schema.get("type", "object") != "object":
            raise wrong_type(path, "the JSON schema of an object")
        given = {"type": "function", "function": told}
        found.append(RequestedTool(name, given, {"type": "object", **schema}, bool(strict), path))
    return found


def _custom(name: str, described: str | None, format: Any, where: str) -> RequestedTool:
    """Return a custom tool as a function of one text, because templates know only functions."""
    text: dict[str, Any] = {"type": "string"}
    kind = format.get("type") if isinstance(format, dict) else None
    grammar = ""
    if kind == "grammar":
        inner = format.get("grammar")
        at = f"{where}.format.grammar"
        syntax = inner.get("syntax") if isinstance(inner, dict) else None
        if syntax not in ("lark", "regex"):
            raise invalid(f'{at}.syntax must be "lark" or "regex"', f"{at}.syntax")
        definition = inner.get("definition")
        if not isinstance(definition, str) or not definition.strip():
            raise wrong_type(f"{at}.definition", "a text")
        if syntax == "regex":
            text["pattern"] = f"^(?:{definition})$"
        else:
            grammar = definition
    elif format is not None and kind != "text":
        raise invalid(f'{where}.format must be of type "text" or "grammar"', f"{where}.format")
    schema = {
        "type": "object",
        "properties": {"input": text},
        "required": ["input"],
        "additionalProperties": False,
    }
    plain = {**schema, "properties": {"input": {"type": "string"}}}
    told = {"name": name, "description": described or "", "parameters": plain}
    given = {"type": "function", "function": told}
    return RequestedTool(name, given, schema, True, f"{where}.format", True, grammar)


def _choice(choice: Any, names: set[str]) -> tuple[Mode, set[str], bool]:
    """Return the mode of calls, the callable names, and whether one function was named."""
    if choice is None:
        return "auto", names, False
    if isinstance(choice, str) and choice in _MODES:
        return _MODES[choice], names, False
    if not isinstance(choice, dict):
        raise _no_choice()
    if choice.get("type") == "allowed_tools":
        allowed = choice.get("allowed_tools", choice)  # the Responses API has no inner object
        mode = allowed.get("mode") if isinstance(allowed, dict) else None
        tools = allowed.get("tools") if isinstance(allowed, dict) else None
        if mode not in ("auto", "required") or not isinstance(tools, list) or not tools:
            where = "tool_choice.allowed_tools"
            raise invalid(f'{where} takes a mode, "auto" or "required", and tools', where)
        return mode, {_named(tool, names) for tool in tools}, False
    return "required", {_named(choice, names)}, True


def _named(choice: Any, names: set[str]) -> str:
    kind = choice.get("type", "function") if isinstance(choice, dict) else None
    function = choice.get(kind) if kind in ("function", "custom") else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str):
        raise _no_choice()
    if name not in names:
        raise invalid(f"tool_choice names {shown(name)}, which is not in tools", "tool_choice")
    return name


def _no_choice() -> Exception:
    return invalid(
        'tool_choice must be "none", "auto", "required", name a function or be allowed_tools',
        "tool_choice",
    )
