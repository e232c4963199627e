"""check_constraints: tools, response_format and other limits on the output.

No constraint is enforced yet, so none is accepted: first what is wrong in itself is named, as it
will be when they are, then what is left is refused with not_supported. A request is never answered
as if it had been constrained.
"""

import re
from typing import Any

import msgspec

from deployments.api.errors import invalid, shown, wrong_type

MAX_TOOLS = 128
MAX_SCHEMA_BYTES = 256 * 1024
MAX_PATTERN_BYTES = 64 * 1024
MAX_ENUM = 10_000
MAX_REPEAT = 10_000  # product of nested counted repeats in a pattern

_FUNCTION_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_TYPES = ("null", "boolean", "object", "array", "number", "integer", "string")
_BOUNDS = (
    ("minimum", "maximum"),
    ("minLength", "maxLength"),
    ("minItems", "maxItems"),
    ("minProperties", "maxProperties"),
)
_NOT_REGULAR = re.compile(r"\(\?(?:[=!]|<[=!]|P=|\()|\\[1-9]")  # look-around, back-reference
# Of grammars in EBNF (GBNF, Lark): what matches text, or nothing; groups; a rule's name; a name.
# What is not closed goes to the end of its line, so that no text is looked at twice.
_TERMINAL = re.compile(
    "|".join(
        rf"{quote}(?:[^{end}\\\n]|\\.?)*(?:{end}|$)"
        for quote, end in (('"', '"'), ("'", "'"), (r"\[", r"\]"))
    )
    + r"|//.*|/(?:[^/\\\n]|\\.?)*(?:/|$)|#.*|^%.*",
    re.MULTILINE,
)
_GROUP = re.compile(r"\((?:[^()]|\([^()]*\))*\)[?*+]?")
_RULE = re.compile(r"^[ \t]*[?!]?([A-Za-z_][\w-]*)(?:\.-?\d+)?[ \t]*(?:::=|:)", re.MULTILINE)
_NAME = re.compile(r"([A-Za-z_][\w-]*)([?*]?)")
_COUNT = re.compile(r"\{(\d{0,9}),?(\d{0,9})\}")


def check_constraints(body: dict[str, Any]) -> None:
    """Raises ApiError 400 for each constraint: invalid_*, conflicting_fields, or not_supported."""
    names = _tools(body.get("tools"))
    choice = _tool_choice(body.get("tool_choice"), names)
    wanted = [f for f in (_response_format(body.get("response_format")),) if f]
    wanted += _structured(body.get("structured_outputs"))
    for field, kind in _FLAT.items():
        if body.get(field) is not None:
            _check(kind, body[field], field)
            wanted.append(field)
    if len(wanted) > 1:
        raise invalid(
            f"{wanted[0]} and {wanted[1]} exclude each other", wanted[1], "conflicting_fields"
        )
    for field in ("functions", "function_call"):
        if body.get(field):
            raise invalid(f"{field} is not supported; use tools", field, "not_supported")
    if names and choice != "none":
        raise invalid(
            'tools are not supported yet; with tool_choice "none" they may be present',
            "tools",
            "not_supported",
        )
    if wanted:
        raise invalid(
            f"{wanted[0]} is not supported yet; the output cannot be constrained",
            wanted[0].split(".")[0],
            "not_supported",
        )


def _tools(tools: Any) -> list[str]:
    if tools is None:
        return []
    if not isinstance(tools, list):
        raise wrong_type("tools", "a list")
    if len(tools) > MAX_TOOLS:
        raise invalid(f"tools takes at most {MAX_TOOLS} items", "tools")
    names: list[str] = []
    for i, tool in enumerate(tools):
        path = f"tools[{i}]"
        if not isinstance(tool, dict):
            raise wrong_type(path, "an object")
        if tool.get("type") != "function":
            raise invalid(f'{path}.type must be "function"', f"{path}.type")
        function = tool.get("function")
        if not isinstance(function, dict):
            raise wrong_type(f"{path}.function", "an object")
        name = function.get("name")
        if not isinstance(name, str) or not _FUNCTION_NAME.fullmatch(name):
            raise invalid(
                f"{path}.function.name must have 1 to 64 letters, digits, _ or -",
                f"{path}.function.name",
            )
        if name in names:
            raise invalid(
                f"{path}.function.name {shown(name)} occurs twice", f"{path}.function.name"
            )
        parameters = function.get("parameters")
        if parameters is not None:
            if not isinstance(parameters, dict):
                raise wrong_type(f"{path}.function.parameters", "an object")
            _schema(parameters, f"{path}.function.parameters")
        names.append(name)
    return names


def _tool_choice(choice: Any, names: list[str]) -> str | None:
    if choice is None or choice in ("none", "auto"):
        return "auto" if choice is None else str(choice)
    if choice == "required":
        if not names:
            raise invalid('tool_choice "required" needs tools', "tool_choice")
        return "required"
    function = choice.get("function") if isinstance(choice, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str):
        raise invalid(
            'tool_choice must be "none", "auto", "required" or name a function', "tool_choice"
        )
    if name not in names:
        raise invalid(f"tool_choice names {shown(name)}, which is not in tools", "tool_choice")
    return "named"


def _response_format(value: Any) -> str | None:
    if value is None:
        return None
    kind = value.get("type") if isinstance(value, dict) else None
    if kind == "text":
        return None
    if kind == "json_schema":
        inner = value.get("json_schema")
        schema = inner.get("schema") if isinstance(inner, dict) else None
        if not isinstance(schema, dict):
            raise invalid(
                "response_format.json_schema.schema must be a JSON schema", "response_format"
            )
        _schema(schema, "response_format")
    elif kind != "json_object":
        raise invalid(
            "response_format.type must be text, json_object or json_schema", "response_format"
        )
    return "response_format"


def _structured(value: Any) -> list[str]:
    if value is None:
        return []
    if not isinstance(value, dict):
        raise wrong_type("structured_outputs", "an object")
    found = []
    for name in ("json", "regex", "choice", "grammar"):
        if value.get(name) is not None:
            _check(name, value[name], f"structured_outputs.{name}")
            found.append(f"structured_outputs.{name}")
    return found or ["structured_outputs"]


_FLAT = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "regex": "regex",
    "ebnf": "grammar",
}


def _check(kind: str, value: Any, path: str) -> None:
    if kind == "json":
        if isinstance(value, dict):
            _schema(value, path)
        elif not isinstance(value, str):
            raise wrong_type(path, "a JSON schema")
    elif kind == "choice":
        if not (isinstance(value, list) and value and all(isinstance(v, str) for v in value)):
            raise wrong_type(path, "a list of strings")
    elif not isinstance(value, str):
        raise wrong_type(path, "a string")
    elif len(value.encode()) > MAX_PATTERN_BYTES:
        raise invalid(f"{path} is longer than {MAX_PATTERN_BYTES} bytes", path, f"invalid_{kind}")
    elif kind == "regex":
        _pattern(value, path, "invalid_regex")
    elif not value.strip():
        raise invalid(f"{path} is empty", path, "invalid_grammar")
    elif _endless(value):
        raise invalid(f"the first rule of {path} has no end", path, "invalid_grammar")


def _endless(grammar: str) -> bool:
    """Whether every text of the first rule would be infinite: each of its alternatives leads back
    into a rule of which the same is true. Groups in parentheses and names without a rule count as
    ending. Linear in the grammar's length."""
    _, *parts = _RULE.split(_GROUP.sub("", _TERMINAL.sub("", grammar)))
    names = parts[::2]
    users: dict[str, list[list[str]]] = {name: [] for name in names}
    ending: list[str] = []
    for name, body in zip(names, parts[1::2], strict=True):
        for alternative in body.split("|"):
            needs = {n for n, optional in _NAME.findall(alternative) if not optional and n in users}
            waiting = [name, *needs]  # for each need that ends, one item goes
            for need in needs:
                users[need].append(waiting)
            if not needs:
                ending.append(name)
    seen = set(ending)
    ending = list(seen)
    while ending:
        done = ending.pop()
        for waiting in users[done]:
            waiting.pop()
            if len(waiting) == 1 and waiting[0] not in seen:
                seen.add(waiting[0])
                ending.append(waiting[0])
    return bool(names) and names[0] not in seen


def _pattern(pattern: str, path: str, code: str) -> None:
    if _NOT_REGULAR.search(pattern):
        raise invalid(f"{path} has look-around or a back-reference", path, code)
    product = 1
    for low, high in _COUNT.findall(pattern):
        product *= max(1, int(high or low or 0))
        if product > MAX_REPEAT:
            raise invalid(f"the repeats of {path} multiply to over {MAX_REPEAT}", path, code)
    try:
        re.compile(pattern)
    except (re.error, RecursionError, OverflowError):
        raise invalid(f"{path} is not a valid regular expression", path, code) from None


def _schema(schema: dict[str, Any], path: str) -> None:
    """What can be said of a schema without a compiler: its own types, references, and bounds."""
    if len(msgspec.json.encode(schema)) > MAX_SCHEMA_BYTES:
        raise invalid(f"the schema is larger than {MAX_SCHEMA_BYTES} bytes", path, "invalid_schema")
    stack: list[tuple[Any, str]] = [(schema, "")]
    while stack:
        node, pointer = stack.pop()
        if isinstance(node, bool):
            if not node:
                raise invalid(
                    f"the schema at {pointer or '/'} is false: nothing can meet it",
                    path,
                    "unsatisfiable_schema",
                )
            continue
        if not isinstance(node, dict):
            raise _bad(path, pointer, "a schema must be an object or a boolean")
        _check_node(node, pointer, path, schema)
        for key in ("properties", "$defs", "definitions", "patternProperties"):
            children = node.get(key)
            if children is None:
                continue
            if not isinstance(children, dict):
                raise _bad(path, f"{pointer}/{key}", "must be an object")
            required = node.get("required")
            stack += [
                (child, f"{pointer}/{key}/{_escaped(name)}")
                for name, child in children.items()
                # A property that is only optional may be false: it is then forbidden.
                if child is not False or (isinstance(required, list) and name in required)
            ]
        for key in ("allOf", "anyOf", "oneOf", "prefixItems"):
            children = node.get(key)
            if children is None:
                continue
            if not isinstance(children, list) or not children:
                raise _bad(path, f"{pointer}/{key}", "must be a list that is not empty")
            stack += [
                (child, f"{pointer}/{key}/{i}")
                for i, child in enumerate(children)
                if child is not False or key == "allOf"
            ]
        if isinstance(node.get("items"), dict):
            stack.append((node["items"], f"{pointer}/items"))
        if isinstance(node.get("additionalProperties"), dict):
            stack.append((node["additionalProperties"], f"{pointer}/additionalProperties"))


def _check_node(node: dict[str, Any], pointer: str, path: str, root: dict[str, Any]) -> None:
    kinds = node.get("type")
    for kind in kinds if isinstance(kinds, list) else [] if kinds is None else [kinds]:
        if kind not in _TYPES:
            raise _bad(path, f"{pointer}/type", f"the type is none of {', '.join(_TYPES)}")
    reference = node.get("$ref")
    if reference is not None and not _resolves(reference, root):
        raise _bad(path, f"{pointer}/$ref", "a reference must point into the same schema")
    enum = node.get("enum")
    if enum is not None:
        if not isinstance(enum, list):
            raise _bad(path, f"{pointer}/enum", "must be a list")
        if not enum:
            raise invalid(
                f"{pointer}/enum is empty: nothing can meet it", path, "unsatisfiable_schema"
            )
        if len(enum) > MAX_ENUM:
            raise _bad(path, f"{pointer}/enum", f"has more than {MAX_ENUM} values")
    for low, high in _BOUNDS:
        a, b = node.get(low), node.get(high)
        if isinstance(a, (int, float)) and isinstance(b, (int, float)) and a > b:
            raise _bad(path, f"{pointer}/{low}", f"{low} is above {high}")
    pattern = node.get("pattern")
    if pattern is not None:
        if not isinstance(pattern, str) or len(pattern) > MAX_PATTERN_BYTES:
            raise _bad(path, f"{pointer}/pattern", "is not a usable pattern")
        _pattern(pattern, path, "invalid_schema")


def _resolves(reference: Any, root: dict[str, Any]) -> bool:
    if not isinstance(reference, str) or not reference.startswith("#"):
        return False
    node: Any = root
    for part in reference[1:].split("/")[1:]:
        part = part.replace("~1", "/").replace("~0", "~")
        if isinstance(node, dict) and part in node:
            node = node[part]
        elif isinstance(node, list) and part.isdigit() and len(part) < 6 and int(part) < len(node):
            node = node[int(part)]
        else:
            return False
    return isinstance(node, (dict, bool))


def _escaped(name: str) -> str:
    return name[:64].replace("~", "~0").replace("/", "~1")


def _bad(path: str, pointer: str, why: str) -> Exception:
    return invalid(f"invalid schema at {pointer or '/'}: {why}", path, "invalid_schema")
