"""YAML with the line of every key, for error messages. Only plain data is accepted: no tags, no
anchors, no duplicate keys.
"""

from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.constructor import SafeConstructor
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from loadtest.errors import ScenarioError

MAX_BYTES = 2**18

Path = tuple[str | int, ...]


def parse(text: str, name: str) -> tuple[Any, dict[Path, int]]:
    """Parse YAML, and return (data, line of each key path). Raises ScenarioError as 'name:line:
    what'.
    """
    if len(text) > MAX_BYTES:
        raise ScenarioError(f"{name}: more than {MAX_BYTES // 1024} KiB")
    yaml = YAML(typ="safe", pure=True)
    lines: dict[Path, int] = {}
    try:
        node = yaml.compose(text)
        data = None if node is None else _plain(node, (), lines, set(), yaml.constructor, name)
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"{name}:{mark.line + 1}" if mark else name
        what = "a tab; YAML is indented with spaces" if "\\t" in str(error.problem) else None
        raise ScenarioError(f"{where}: {what or error.problem}") from None
    except (YAMLError, ValueError, RecursionError) as error:
        raise ScenarioError(f"{name}: {str(error).splitlines()[0]}") from None
    return data, lines


def _plain(
    node: Node,
    path: Path,
    lines: dict[Path, int],
    seen: set[int],
    make: SafeConstructor,
    name: str,
) -> Any:
    line = node.start_mark.line + 1
    if id(node) in seen:  # an alias repeats the anchor's node
        raise ScenarioError(f"{name}:{line}: aliases are not supported")
    seen.add(id(node))
    if isinstance(node, ScalarNode):
        return make.construct_object(node, deep=True)
    if isinstance(node, SequenceNode):
        items = []
        for number, item in enumerate(node.value):
            lines[(*path, number)] = item.start_mark.line + 1
            items.append(_plain(item, (*path, number), lines, seen, make, name))
        return items
    assert isinstance(node, MappingNode)
    mapping: dict[str, Any] = {}
    for key, value in node.value:
        word, at = str(key.value), key.start_mark.line + 1
        if word in mapping:
            first = lines[(*path, word)]
            raise ScenarioError(f"{name}:{at}: {word!r} a second time; first in line {first}")
        lines[(*path, word)] = at
        mapping[word] = _plain(value, (*path, word), lines, seen, make, name)
    return mapping


def line_of(lines: dict[Path, int], path: Path) -> int:
    """Return the line of a key path, or of its nearest ancestor in the text; 0 if there is none."""
    for end in range(len(path), 0, -1):
        if path[:end] in lines:
            return lines[path[:end]]
    return 0
