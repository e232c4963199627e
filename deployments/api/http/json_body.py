"""parse_json: a request body as Python objects, or a 400 that says where and why; in_thread: runs
work that would hold up the event loop.

A decoder holds the interpreter lock until it has read the whole body, so nothing else of the router
runs meanwhile, even if the decoder has its own thread. Its time depends on the number of values
more than on bytes. Values are counted first, in slices: decoding then takes some 30 ms at most.

Two readers that must agree (a property test holds them together):

    fast     msgspec, then one walk over the result for depth, size, and duplicate keys
    careful  the standard library, with a hook per object; for bodies that fast refuses or suspects

Of two equal keys msgspec keeps the last, without an error. Counting colons detects this: a body has
one for each key plus those inside strings, so if the parsed tree accounts for fewer than the bytes
hold, a key (with its colon) was dropped. Only an escaped colon (\\u003a) breaks the sum, and sends
the body to the careful reader.
"""

import asyncio
import json
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NoReturn, TypeVar

import msgspec

from deployments.api.http.errors import ApiError, invalid, shown

T = TypeVar("T")

# Larger bodies are read in a thread: up to 20 ms on the loop.
INLINE_CHARS = 16 * 1024
# Two threads: tokenising frees the interpreter lock only in part, so more would only take turns.
_pool = ThreadPoolExecutor(2, thread_name_prefix="tokenize")


async def in_thread(work: Callable[[], T], size: int) -> T:
    """Run `work` and return its result: at once if size (characters or bytes) is small, else off
    the event loop."""
    if size <= INLINE_CHARS:
        return work()
    return await asyncio.get_running_loop().run_in_executor(_pool, work)


JsonObject = dict[str, Any]  # a JSON object that was read or will be written
# Containers inside each other; tools' schemas need about ten.
MAX_DEPTH = 32
# Maximum JSON values of a body, nearly all of them token ids; bounds memory at ~25 MB.
MAX_NODES = 700_000
# Strings, keys included.
MAX_STRINGS = 100_000
MAX_CONTAINERS = 50_000  # lists and objects
_SLICE = 64 * 1024  # bytes that are counted before other threads have their turn
# Digits of the longest integer; longer ones are read as infinity, which no field accepts.
_MAX_DIGITS = 400

_ESCAPED_COLON = re.compile(rb"\\u003[aA]")
_UTF16 = (b"\xff\xfe", b"\xfe\xff")
_INSIDE = re.compile(rb'(?:[^"\\]{1,4096}+|\\.){0,1024}+("?)', re.DOTALL)  # part of a string


def parse_json(body: bytes) -> Any:
    """Parse UTF-8 JSON (a BOM is allowed) into objects, without recursion beyond MAX_DEPTH.

    Integers of any size stay integers; floats beyond double become inf, so that the field that
    holds one can be named by the check of that field.
    Raises ApiError 400: invalid_json, invalid_encoding, duplicate_key, json_too_deep,
        json_too_large.
    """
    if body.startswith(b"\xef\xbb\xbf"):
        body = body[3:]
    if body.startswith(_UTF16) or b"\0" in body[:4]:
        raise invalid("the body must be UTF-8", code="invalid_encoding")
    if not body.strip(b" \t\r\n"):
        raise invalid("the body is empty; a JSON object is expected", code="invalid_json")
    _count(body)
    try:
        value = msgspec.json.decode(body)
    except RecursionError:
        raise _too_deep() from None
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return _careful(body)
    if body.count(b":") != _walk(value) or _ESCAPED_COLON.search(body):
        return _careful(body)
    return value


def parse_inner(text: str) -> Any:
    """Parse JSON in a string of a body, such as a tool call's arguments, within a body's limits.

    Of two equal keys the last counts: models write such JSON, and callers send it back.

    Raises ApiError 400: invalid_json, json_too_deep, json_too_large.
    """
    body = text.encode()
    _count(body)
    try:
        value = msgspec.json.decode(body)
    except RecursionError:
        raise _too_deep() from None
    except msgspec.MsgspecError:
        raise invalid("malformed", code="invalid_json") from None
    _walk(value)
    return value


def _count(body: bytes) -> None:
    """Refuse a body with so many values that decoding it would block other threads for long.

    Raises ApiError json_too_large.
    """
    commas = quotes = containers = 0
    for at in range(0, len(body), _SLICE):
        end = at + _SLICE
        commas += body.count(b",", at, end)
        quotes += body.count(b'"', at, end)
        containers += body.count(b"[", at, end) + body.count(b"{", at, end)
    if commas < MAX_NODES and quotes <= 2 * MAX_STRINGS and containers <= MAX_CONTAINERS:
        return
    # Some of these characters may be inside strings: count again what is outside of strings.
    commas = strings = containers = at = 0
    while True:
        quote = body.find(b'"', at, at + _SLICE)
        end = at + _SLICE if quote < 0 else quote
        commas += body.count(b",", at, end)
        containers += body.count(b"[", at, end) + body.count(b"{", at, end)
        if commas >= MAX_NODES:
            raise _too_large(MAX_NODES, "values")
        if containers > MAX_CONTAINERS:
            raise _too_large(MAX_CONTAINERS, "lists and objects")
        at = end
        if quote >= 0:
            strings += 1
            if strings > MAX_STRINGS:
                raise _too_large(MAX_STRINGS, "strings")
            at = _end_of_string(body, quote + 1)
        if at >= len(body):
            return


def _end_of_string(body: bytes, at: int) -> int:
    """Return the end of the string that began before `at`, or that of the body if it has none."""
    while True:
        piece = _INSIDE.match(body, at)
        # The pattern matches an empty piece, too.
        assert piece is not None
        if piece.group(1) or piece.end() == at:
            return piece.end() if piece.group(1) else len(body)
        at = piece.end()


def _too_large(limit: int, what: str) -> ApiError:
    return invalid(f"the JSON has more than {limit} {what}", code="json_too_large")


def _walk(root: Any) -> int:
    """Check a tree's depth and size; return the minimum number of colons in its JSON text."""
    colons = nodes = 0
    level = [root]
    for depth in range(MAX_DEPTH + 1):
        below: list[Any] = []
        for item in level:
            kind = type(item)
            if kind is str:
                colons += item.count(":")
            elif depth == MAX_DEPTH and (kind is dict or kind is list):
                raise _too_deep()
            elif kind is dict:
                colons += len(item)
                for key in item:
                    if ":" in key:
                        colons += key.count(":")
                below.extend(item.values())
            elif kind is list:
                # Long lists are mostly token ids, whose elements need no visit.
                if len(item) >= 64 and set(map(type, item)) <= {int, float}:
                    nodes += len(item)
                else:
                    below.extend(item)
        nodes += len(below)
        if nodes > MAX_NODES:
            raise _too_large(MAX_NODES, "values")
        if not below:
            break
        level = below
    return colons


def _careful(body: bytes) -> Any:
    try:
        text = body.decode("utf-8")
    except UnicodeDecodeError as error:
        raise invalid(
            f"the body is not UTF-8 (byte {error.start})", code="invalid_encoding"
        ) from None
    try:
        value = json.loads(
            text, object_pairs_hook=_no_duplicates, parse_constant=_constant, parse_int=_integer
        )
    except json.JSONDecodeError as error:
        raise invalid(
            f"invalid JSON at line {error.lineno} column {error.colno}: {_reason(error.msg)}",
            code="invalid_json",
        ) from None
    except RecursionError:
        raise _too_deep() from None
    _walk(value)
    _no_surrogates(value)
    return value


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                name = key.encode("utf-8", "replace").decode()[:128]
                raise invalid(f"the key {shown(name)} occurs twice", name, "duplicate_key")
            seen.add(key)
    return fields


def _constant(name: str) -> NoReturn:
    raise invalid(f"invalid JSON: {name} is not a JSON number", code="invalid_json")


def _integer(digits: str) -> int | float:
    return int(digits) if len(digits) <= _MAX_DIGITS else float("inf")


def _reason(message: str) -> str:
    # The library's texts are constants; only those known here are passed on.
    for known in (
        "Expecting property name",
        "Expecting value",
        "Expecting ',' delimiter",
        "Expecting ':' delimiter",
        "Extra data",
        "Unterminated string",
        "Invalid control character",
        "Invalid \\escape",
        "Invalid \\uXXXX escape",
        "Illegal trailing comma",
    ):
        if message.startswith(known):
            return known[0].lower() + known[1:]
    return "malformed"


def _no_surrogates(root: Any) -> None:
    """Refuse strings with half a surrogate pair, which nothing can encode. Raises ApiError 400."""
    stack = [root]
    while stack:
        item = stack.pop()
        if isinstance(item, str):
            if not item.isascii() and any("\ud800" <= c <= "\udfff" for c in item):
                raise invalid(
                    "a string has a lone surrogate (\\ud800..\\udfff)", code="invalid_encoding"
                )
        elif isinstance(item, dict):
            stack.extend(item)
            stack.extend(item.values())
        elif isinstance(item, list) and item:
            stack.extend(item)


def _too_deep() -> ApiError:
    return invalid(f"the JSON is nested deeper than {MAX_DEPTH} levels", code="json_too_deep")
