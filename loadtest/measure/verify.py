"""Verification: the comparison of a scenario's answers with a reference file. `loadtest reference`
writes the file, by one request at a time to an otherwise idle server. Other programs can also write
the file, with such lines:

    {"key": "...", "text": "...", "token_ids": [...], "finish_reason": "length"}

`key` identifies the question (RequestSpec.key). Token ids are compared if both sides have them,
otherwise texts. A truncated or cancelled answer is correct if it is a prefix of the reference.
"""

from collections.abc import Sequence
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any

import msgspec

from loadtest.errors import ScenarioError
from loadtest.measure.records import RequestRecord, Verified


class ReceivedAnswer:
    """A received answer: pieces of text, and token ids if all pieces came with ids."""

    __slots__ = ("ids", "texts")

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.ids: list[int] | None = []

    def add_chunk(self, text: str, token_ids: list[int] | None) -> None:
        self.texts.append(text)
        if token_ids is None and text:
            self.ids = None
        elif token_ids and self.ids is not None:
            self.ids += token_ids

    @property
    def text(self) -> str:
        return "".join(self.texts)


class Reference(msgspec.Struct, frozen=True, omit_defaults=True):
    """A line of a reference file. pieces: the answer's text, chunk by chunk."""

    key: str
    text: str
    token_ids: list[int] | None = None
    finish_reason: str | None = None
    pieces: list[str] | None = None


def reference_of(key: str, record: RequestRecord, answer: ReceivedAnswer) -> Reference:
    return Reference(
        key, answer.text, answer.ids or None, record.finish_reason, [t for t in answer.texts if t]
    )


def read_references(path: Path) -> dict[str, Reference]:
    """Read a reference file into {key: Reference}. Raises ScenarioError with the line."""
    decode = msgspec.json.Decoder(Reference).decode
    references: dict[str, Reference] = {}
    try:
        with path.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    try:
                        reference = decode(line)
                    except (msgspec.DecodeError, UnicodeDecodeError) as error:
                        raise ScenarioError(f"{path}:{number}: {error}") from None
                    references[reference.key] = reference
    except OSError as error:
        raise ScenarioError(f"{path}: {error.strerror or error}") from None
    if not references:
        raise ScenarioError(f"{path}: no reference answers in it")
    return references


def write_references(references: list[Reference], path: Path) -> None:
    encode = msgspec.json.encode
    path.write_bytes(b"".join(encode(reference) + b"\n" for reference in references))


def check(
    record: RequestRecord, answer: ReceivedAnswer, reference: Reference | None
) -> RequestRecord:
    """Return the record with `verified` set; "not checked" without a reference or an answer."""
    if reference is None or not (record.ok or answer.texts):
        return record
    whole = record.ok
    got, want = _comparable(answer, reference)
    same = got == want if whole else got == want[: len(got)]
    if same and whole and reference.finish_reason is not None:
        same = record.finish_reason == reference.finish_reason
    verified: Verified = "ok" if same else "different"
    return msgspec.structs.replace(record, verified=verified)


def count_slips(
    record: RequestRecord, answer: ReceivedAnswer, reference: Reference
) -> RequestRecord:
    """Return the record of a complete but different answer with missing and doubled tokens counted.

    The function is slow, so it should be called after the run.
    """
    got, want = _comparable(answer, reference)
    if isinstance(got, str):
        if not reference.pieces:
            return record
        got, want = [text for text in answer.texts if text], reference.pieces
    if len(got) * len(want) > 10_000_000:
        return record
    missing, doubled = slips(got, want)
    return msgspec.structs.replace(
        record,
        missing_tokens=max(record.missing_tokens, missing),
        doubled_tokens=max(record.doubled_tokens, doubled),
    )


def _comparable(
    answer: ReceivedAnswer, reference: Reference
) -> tuple[Sequence[Any], Sequence[Any]]:
    if answer.ids and reference.token_ids:
        return answer.ids, reference.token_ids
    return answer.text, reference.text


def slips(got: Sequence[Any], want: Sequence[Any]) -> tuple[int, int]:
    """Return (tokens of `want` missing in `got`, tokens that `got` has twice).

    Both numbers are 0 if the texts differ in another way: a diverging answer has lost no tokens.
    """
    matcher = SequenceMatcher(None, want, got, autojunk=False)
    missing = doubled = 0
    for kind, i, j, k, end in matcher.get_opcodes():
        if kind == "replace":
            return 0, 0
        if kind == "delete":
            missing += j - i
        elif kind == "insert":
            added = list(got[k:end])
            near = list(got[max(0, k - len(added)) : k]), list(got[end : end + len(added)])
            if added not in near:
                return 0, 0
            doubled += end - k
    return missing, doubled
