"""parse_json: the fast reader must refuse and accept exactly what the careful one does."""

import json
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deployments.api.http import json_body
from deployments.api.http.errors import ApiError
from deployments.api.http.json_body import MAX_DEPTH, parse_json

_STRINGS = st.text(alphabet=st.sampled_from('a:"\\\n{}[]é\U0001f600\x00'), max_size=6)
_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | _STRINGS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(_STRINGS, inner, max_size=4),
    max_leaves=20,
)


def careful(body: bytes) -> Any:
    return json_body._careful(body)


def outcome(parse: Any, body: bytes) -> Any:
    try:
        return parse(body)
    except ApiError as error:
        return error.code, error.param


@given(_VALUES, st.booleans(), st.sampled_from([None, 1]))
@settings(max_examples=150, deadline=None)
def test_reads_what_json_writes(value: Any, escaped: bool, indent: int | None) -> None:
    """A reader that changes a value: colons in strings must not look like dropped keys."""
    body = json.dumps(value, ensure_ascii=escaped, indent=indent).encode()
    assert parse_json(body) == value


@given(_VALUES, st.data())
@settings(max_examples=150, deadline=None)
def test_fast_and_careful_agree(value: Any, data: st.DataObject) -> None:
    """A body that one reader takes and the other does not is a way around a check."""
    body = bytearray(json.dumps(value, ensure_ascii=False).encode())
    for _ in range(data.draw(st.integers(0, 3))):
        place = data.draw(st.integers(0, len(body)))
        piece = data.draw(st.sampled_from([b"", b":", b'"', b"{", b",", b"\\u003a", b"\xff", b"1"]))
        body[place : place + data.draw(st.integers(0, 2))] = piece
    if body.strip():
        assert outcome(parse_json, bytes(body)) == outcome(careful, bytes(body))


@pytest.mark.parametrize("digits", [19, 20, 400, 401, 4299, 4300, 4301, 5000])
@pytest.mark.parametrize("sign", [b"", b"-"])
def test_long_integers_are_read_alike(digits: int, sign: bytes) -> None:
    """Bug: an integer of 401 to 4,300 digits is inf in a body with an escaped colon, and a number
    in the same body without one."""
    plain = b'{"a": ["b", ' + sign + b"7" * digits + b"]}"
    escaped = plain.replace(b'"b"', b'"\\u003a"')
    (_, number), (_, other) = parse_json(plain)["a"], parse_json(escaped)["a"]
    assert number == other == careful(plain)["a"][1]
    assert (type(number) is int) == (digits + len(sign) <= 4300)


@given(
    st.lists(st.tuples(_STRINGS, _VALUES), min_size=2, max_size=5),
    st.integers(0, 3),
    st.booleans(),
)
@settings(max_examples=150, deadline=None)
def test_duplicate_keys_are_always_found(
    pairs: list[tuple[str, Any]], depth: int, escaped: bool
) -> None:
    """msgspec keeps the last of two equal keys and says nothing: a proxy that keeps the first
    would check another request than the one that runs.
    """
    pairs.append((pairs[0][0], "again"))
    dump = json.dumps if escaped else lambda v: json.dumps(v, ensure_ascii=False)
    inner = ",".join(f"{dump(key)}: {dump(value)}" for key, value in pairs)
    body = ('{"a": [' * depth + "{" + inner + "}" + "]}" * depth).encode()
    with pytest.raises(ApiError) as caught:
        parse_json(body)
    assert caught.value.code == "duplicate_key"


def test_depth_is_bounded_exactly() -> None:
    """A limit that differs by reader, or a recursion error as a 500."""
    for make in (
        lambda n: b"[" * n + b"]" * n,
        lambda n: b'{"a":' * n + b"1" + b"}" * n,
        lambda n: b'{"a":' * n + b'"\\u003a"' + b"}" * n,  # through the careful reader
    ):
        parse_json(make(MAX_DEPTH))
        for depth in (MAX_DEPTH + 1, 5_000, 40_000):
            with pytest.raises(ApiError) as caught:
                parse_json(make(depth))
            assert caught.value.code == "json_too_deep"


def test_number_of_values_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """4 MiB of `[],` would become a gigabyte of objects further on."""
    monkeypatch.setattr(json_body, "MAX_NODES", 1000)
    for body in (b"[" + b"[]," * 2000 + b"1]", b"[" + b"1," * 2000 + b"1]"):
        with pytest.raises(ApiError) as caught:
            parse_json(body)
        assert caught.value.code == "json_too_large"


@pytest.mark.parametrize("body", [b'"\\ud800"', b'["\\udc00\\ud800"]', b'{"\\ud800x": 1}'])
def test_half_a_surrogate_pair_is_refused(body: bytes) -> None:
    """A string that cannot be encoded breaks the tokenizer and the log, later and worse."""
    with pytest.raises(ApiError) as caught:
        parse_json(body)
    assert caught.value.code == "invalid_encoding"


def test_large_bodies_are_quick() -> None:
    """The scan for depth and duplicates must not cost a second on the largest body allowed."""
    text = json.dumps({"prompt": "a: b, c " * 500_000}).encode()
    ids = json.dumps({"prompt": list(range(600_000))}).encode()
    objects = json.dumps({"x": [{"a": 1, "b": ":"}] * 33_000}).encode()
    for body in (text, ids, objects):
        began = time.process_time()
        parse_json(body)
        assert time.process_time() - began < 1.0
