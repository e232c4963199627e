"""UsageLog: a log file with one JSON line per finished prompt.

All routers of a machine share the file, which is renamed when it is full: usage.jsonl,
usage.jsonl.1 (the newest full file), ...
"""

import fcntl
import logging
import os
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from deployments.api.caller import Period
from deployments.api.key_limits import period_of

logger = logging.getLogger("manta.router")

_MOST_LINES = 100_000  # maximum of lines kept in memory while the file cannot be written
_COMPLAINT_SECONDS = 60.0


class UsageLine(msgspec.Struct):
    """A line of the usage file: the token counts of one finished prompt.

    at: Unix time of the prompt's end.
    key: name of the API key; "" if keys are not used.
    key_id: first half of the key's SHA-256, 32 hex digits.
    prompt_tokens: prompt tokens, including those found in the prefix cache; 0 if the prompt was
        sent again to resume a stream, as another router has counted it.
    seconds: time from the prompt's arrival to its end.
    finish: the finish reason of each choice.
    error: error code; "" without an error.
    """

    at: float
    id: str
    key: str
    key_id: str
    model: str
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    seconds: float
    finish: list[str]
    error: str = ""


class UsageLog:
    """The usage file. `add_line` may be called on the event loop; `flush` writes, and blocks.

    bytes: size at which a file is full.
    files: number of full files that are kept.
    """

    def __init__(self, path: Path, bytes: int, files: int) -> None:
        self.path = path
        self._bytes = bytes
        self._files = files
        self._lines: list[UsageLine] = []
        self._lost = 0
        self._complained = 0.0

    def add_line(self, line: UsageLine) -> None:
        if len(self._lines) < _MOST_LINES:
            self._lines.append(line)
        else:
            self._lost += 1

    def flush(self) -> None:
        """Append the added lines to the file.

        If the file cannot be written, an error is logged and the lines are kept for the next call.
        """
        lines, self._lines = self._lines, []
        if not lines:
            return
        try:
            self._append(b"".join(msgspec.json.encode(line) + b"\n" for line in lines))
        except OSError as error:
            self._lines = lines + self._lines
            now = time.monotonic()
            if now - self._complained > _COMPLAINT_SECONDS:
                self._complained = now
                logger.error(
                    "usage.file: %s: %s; %d lines wait and %d are lost",
                    self.path,
                    error.strerror or error,
                    len(self._lines),
                    self._lost,
                )

    def _append(self, data: bytes) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        lock = os.open(f"{self.path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            # Other routers append to the same file, and may rename it.
            fcntl.flock(lock, fcntl.LOCK_EX)
            size = self.path.stat().st_size if self.path.exists() else 0
            if size and size + len(data) > self._bytes:
                self._rotate()
                size = 0
            with open(os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600), "r+b") as f:
                try:
                    f.seek(size)
                    f.write(data)
                    f.flush()
                except OSError:
                    f.truncate(size)  # leave no partial line
                    raise
        finally:
            os.close(lock)

    def _rotate(self) -> None:
        for number in range(self._files, 0, -1):
            older = self._numbered(number)
            if older.exists():
                if number == self._files:
                    older.unlink()
                else:
                    older.rename(self._numbered(number + 1))
        if self._files:
            self.path.rename(self._numbered(1))
        else:
            self.path.unlink()

    def _numbered(self, number: int) -> Path:
        return self.path.with_name(f"{self.path.name}.{number}")

    def spent(self, at: float) -> dict[str, dict[str, int]]:
        """Return {key id: {period: tokens}} for the day and the month of the Unix time `at`.

        Prompt and output tokens are summed over the usage files that still exist.
        """
        spent: dict[str, dict[str, int]] = {}
        periods: tuple[Period, ...] = ("day", "month")
        current = {period: period_of(period, at) for period in periods}
        begins = at - 32 * 86400
        for line in self._read(begins):
            totals = spent.setdefault(line.key_id, {})
            for period in periods:
                if period_of(period, line.at) == current[period]:
                    name = current[period]
                    tokens = line.prompt_tokens + line.output_tokens
                    totals[name] = totals.get(name, 0) + tokens
        return spent

    def _read(self, since: float) -> Iterator[UsageLine]:
        for path in (self._numbered(n) for n in range(self._files, 0, -1)):
            yield from _lines(path, since)
        yield from _lines(self.path, since)


def _lines(path: Path, since: float) -> Iterator[UsageLine]:
    try:
        if path.stat().st_mtime < since:
            return
        with path.open("rb") as file:
            for raw in file:
                try:
                    line = msgspec.json.decode(raw, type=UsageLine)
                except msgspec.MsgspecError:
                    continue  # not a usage line
                if line.at >= since and line.key_id:
                    yield line
    except OSError:
        return
