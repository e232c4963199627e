"""parse_json: parses a request body, with limits and precise errors. in_thread: runs work that
would block the event loop.

A JSON decoder holds the interpreter lock until it has read the whole body. So nothing else in the
router runs meanwhile, even if the decoder runs in a thread. The decoder's time depends on the
number of values more than on bytes. Therefore values are first counted, in slices, and limited:
decoding then takes 30 ms at most.

Two parsers, whose results must agree (a property test compares them):

    fast     msgspec, then one walk over the result for depth, size, and duplicate keys
    careful  the standard library, with a hook per object; for bodies that fast refuses or suspects

For duplicate keys, msgspec keeps the last value without an error. Counting colons detects this: a
body has one for each key plus those inside strings, so if the parsed tree accounts for fewer than
the bytes hold, a key (with its colon) was dropped. Only an escaped colon (\\u003a) breaks the sum,
and sends the body to the careful reader.
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

# Larger bodies are parsed in a thread; parsing this many characters takes up to 20 ms on the event
# loop.
INLINE_CHARS = 16 * 1024
# Two threads are enough: tokenising releases the interpreter lock only partly, so more threads
# would wait for each other.
_pool = ThreadPoolExecutor(2, thread_name_prefix="tokenize")


async def in_thread(work: Callable[[], T], size: int) -> T:
    """Run `work` and return its result: on the event loop if `size` (characters or bytes) is small,
    else in a thread."""
    if size <= INLINE_CHARS:
        return work()
    return await asyncio.get_running_loop().run_in_executor(_pool, work)


JsonObject = dict[str, Any]  # a JSON object that was read or will be written
# Maximum nesting of lists and objects; tools' schemas need about ten levels.
MAX_DEPTH = 32
# Maximum number of JSON values in a body, nearly all of them token ids; bounds memory at ~25 MB.
MAX_NODES = 700_000
# Maximum number of strings in a body, including keys.
MAX_STRINGS = 100_000
MAX_CONTAINERS = 50_000  # maximum number of lists and objects
_SLICE = 64 * 1024  # bytes that are counted before other threads may run
# Characters, sign included, of the longest integer that msgspec reads. A longer one
# becomes inf, which no field accepts.
_MAX_INTEGER = 4300

_ESCAPED_COLON = re.compile(rb"\\u003[aA]")
_UTF16 = (b"\xff\xfe", b"\xfe\xff")
_INSIDE = re.compile(rb'(?:[^"\\]{1,4096}+|\\.){0,1024}+("?)', re.DOTALL)  # part of a string


def parse_json(body: bytes) -> Any:
    """Parse UTF-8 JSON (a BOM is allowed) into objects, without recursion beyond MAX_DEPTH.

    Integers beyond 64 bits stay integers. Integers of more than 4,300 characters, and floats beyond
    the range of a double, become inf, so that the check of their field can name the field in its
    error.

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
    """Parse JSON inside a string of a body, such as a tool call's arguments, with a body's limits.

    For duplicate keys the last value counts: models generate such JSON, and clients send it back.

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
    """Check the number of values in a body, whose decoding would otherwise block other threads for
    long.

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
    # Some of these characters may be inside strings, so those outside strings are counted again.
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
    """Return the position after the string that began before `at`; the body's end if it is
    unterminated."""
    while True:
        piece = _INSIDE.match(body, at)
        # The pattern also matches an empty piece, so there always is a match.
        assert piece is not None
        if piece.group(1) or piece.end() == at:
            return piece.end() if piece.group(1) else len(body)
        at = piece.end()


def _too_large(limit: int, what: str) -> ApiError:
    return invalid(f"the JSON has more than {limit} {what}", code="json_too_large")


def _walk(root: Any) -> int:
    """Check the depth and size of parsed JSON; return the minimum number of colons that its text
    must have."""
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
                # Long lists are mostly token ids, whose elements need not be checked one by one.
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
    return int(digits) if len(digits) <= _MAX_INTEGER else float("inf")


def _reason(message: str) -> str:
    # The library's messages are constants; only those known here are shown to clients.
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
    """Raise ApiError 400 for strings with half a surrogate pair, which cannot be encoded in
    UTF-8."""
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
