"""to_lark: converts a GBNF grammar of llama.cpp to llguidance's Lark."""

import json
import re
from collections.abc import Iterator, Mapping

from llguidance.gbnf_to_lark import (
    AlternativeNode,
    ASTNode,
    GrammarParser,
    LiteralNode,
    RegexNode,
    RepetitionNode,
    RuleNode,
    RuleRefNode,
    SequenceNode,
)

_LONG_ESCAPE = re.compile(r"(\\\\)|\\u([0-9a-fA-F]{4})|\\U([0-9a-fA-F]{8})")
_ESCAPE = re.compile(r"\\(?:x([0-9a-fA-F]{2})|(.))", re.DOTALL)
_LETTERS = {"n": "\n", "r": "\r", "t": "\t"}


def to_lark(text: str) -> str:
    """Return a GBNF grammar in Lark, where `root` becomes `start`.

    Rules without recursion become terminals, which match greedily. A grammar without any recursion
    becomes one expression, in which rules need not match greedily.
    Raises ValueError for invalid GBNF.
    """
    try:
        rules = GrammarParser().parse(_LONG_ESCAPE.sub(_short, text))
    except RecursionError:
        raise ValueError("its groups are too deep") from None
    except Exception as error:  # the parser's exceptions have no common base class
        raise ValueError(str(error)) from None
    if "root" not in rules:
        raise ValueError("it has no rule root")
    uses = {name: list(dict.fromkeys(_named(rule))) for name, rule in rules.items()}
    for name, used in uses.items():
        if missing := [callee for callee in used if callee not in rules]:
            raise ValueError(f"the rule {name} uses {missing[0]}, which is not defined")
    names = {name: f"rule_{i}" for i, name in enumerate(rules)}
    for name in _regular(uses):
        names[name] = names[name].upper()
    lines = [f"{names[name]}: {_lark(rule.alternatives, names)}" for name, rule in rules.items()]
    return "\n".join(["%llguidance {}", f"start: {names['root']}", *lines]) + "\n"


def _short(match: re.Match[str]) -> str:
    r"""Replace a \u or \U escape by its character, or by \x for ASCII, as the parser needs it."""
    code = int(match[2] or match[3] or "0", 16)
    if match[1] or code > 0x10FFFF or 0xD800 <= code < 0xE000:
        return match[0]
    return f"\\x{code:02x}" if code < 0x80 else chr(code)


def _named(node: ASTNode | RuleNode) -> Iterator[str]:
    if isinstance(node, RuleRefNode):
        yield node.name
    for child in node.children():
        yield from _named(child)


def _regular(uses: Mapping[str, list[str]]) -> list[str]:
    """Return the names of rules that use no recursive rule, each after the rules that it uses."""
    users: dict[str, list[str]] = {name: [] for name in uses}
    open_uses = {name: len(used) for name, used in uses.items()}
    for name, used in uses.items():
        for rule in used:
            users[rule].append(name)
    regular = [name for name, count in open_uses.items() if not count]
    for name in regular:
        for user in users[name]:
            open_uses[user] -= 1
            if not open_uses[user]:
                regular.append(user)
    return regular


def _lark(node: ASTNode, names: Mapping[str, str]) -> str:
    if isinstance(node, RuleRefNode):
        return names[node.name]
    if isinstance(node, LiteralNode):
        return json.dumps(_ESCAPE.sub(_character, node.value), ensure_ascii=False)
    if isinstance(node, RegexNode):
        # In GBNF a dot also matches line breaks, and & and ~ in character classes are plain
        # characters.
        return "/(.|\\n)/" if node.rx == "." else f"/{re.sub('[&~]', _escaped, node.rx)}/"
    if isinstance(node, RepetitionNode):
        times = f"{node.min_times},{'' if node.max_times is None else node.max_times}"
        return f"({_lark(node.node, names)}){{{times}}}"
    if isinstance(node, SequenceNode):
        return " ".join(_lark(part, names) for part in node.nodes) or '""'
    if isinstance(node, AlternativeNode):
        return f"({' | '.join(_lark(part, names) for part in node.alternatives)})"
    raise ValueError(f"it has a {type(node).__name__}")


def _character(match: re.Match[str]) -> str:
    return chr(int(match[1], 16)) if match[1] else _LETTERS.get(match[2], match[2])


def _escaped(match: re.Match[str]) -> str:
    return f"\\{match[0]}"
