"""refuse_tools: tools cannot be called yet, so none is accepted that may be."""

from typing import Any

from deployments.api.errors import invalid, shown, wrong_type

MAX_TOOLS = 128


def refuse_tools(body: dict[str, Any]) -> None:
    """Takes what asks for nothing: no tools, or tools that may not be called.

    Raises ApiError 400 naming the field: not_supported; invalid_type and invalid_value for tools
    and tool_choice that could not be supported either.
    """
    names = tool_names(body.get("tools"))
    choice = body.get("tool_choice")
    if choice not in (None, "none", "auto", "required"):
        name = _chosen(choice)
        if name not in names:
            raise invalid(f"tool_choice names {shown(name)}, which is not in tools", "tool_choice")
    if choice == "required" and not names:
        raise invalid('tool_choice "required" needs tools', "tool_choice")
    if names and choice != "none":
        raise invalid(
            'tools are not supported yet; with tool_choice "none" they may be present',
            "tools",
            "not_supported",
        )
    for field in ("functions", "function_call"):
        if body.get(field):
            raise invalid(f"{field} is not supported; use tools", field, "not_supported")


def tool_names(tools: Any) -> set[str]:
    """The names of the functions. Raises ApiError 400 for what is no list of functions."""
    if tools is None:
        return set()
    if not isinstance(tools, list):
        raise wrong_type("tools", "a list")
    if len(tools) > MAX_TOOLS:
        raise invalid(f"tools takes at most {MAX_TOOLS} items", "tools")
    names: set[str] = set()
    for i, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, dict) else None
        name = function.get("name") if isinstance(function, dict) else None
        if not isinstance(name, str):
            raise wrong_type(f"tools[{i}]", "an object with a function that has a name")
        names.add(name)
    return names


def _chosen(choice: Any) -> str:
    function = choice.get("function") if isinstance(choice, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str):
        raise invalid(
            'tool_choice must be "none", "auto", "required" or name a function', "tool_choice"
        )
    return name
