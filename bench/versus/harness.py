"""Harness: the runner of a comparison's pieces, which saves their lines and can be resumed.

A piece is one run of one side: a tuple of the values that identify it, such as model, run number
and side. Each line of a piece has these values as fields.
"""

import contextlib
import json
import math
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.report.result_file import Line, RawLines

Piece = tuple[Any, ...]


class SideFailed(Exception):
    """Raised when a side's process ends before it has printed all results."""


class Harness:
    """A comparison's raw lines, and the runner of the pieces that are missing in them."""

    def __init__(
        self,
        out: Path,
        name: str,
        fields: Sequence[str],
        finished: Callable[[Piece, list[Line]], bool] = lambda piece, lines: True,
        resume: bool = False,
    ) -> None:
        """Create the day's file, or resume it with its finished pieces.

        fields: names of the values of a piece. A line without a field has the value None.
        finished: (piece, its lines) -> whether the piece is complete. Incomplete pieces run again.
        """
        self._fields, self._finished = fields, finished
        self.raw = RawLines(out, name, self._whole if resume else None)

    @property
    def lines(self) -> list[Line]:
        """The lines of finished pieces."""
        return self._whole(self.raw.all)

    def missing(self, pieces: Iterable[Piece]) -> list[Piece]:
        """Return the pieces that have no lines yet, without duplicates."""
        there = {self._piece(line) for line in self.raw.all}
        return [piece for piece in dict.fromkeys(pieces) if piece not in there]

    def run(
        self,
        pieces: Iterable[Piece],
        run_piece: Callable[[Piece], Iterable[Line]],
        expected: Callable[[Piece], float] = lambda piece: 0.0,
        seconds: float = math.inf,
        go_on: bool = False,
    ) -> tuple[list[Piece], list[Piece]]:
        """Run the missing pieces and save their lines.

        expected: returns the seconds that a piece takes. A piece that would not end within
            `seconds` is not started.
        go_on: whether to run other pieces after a failure; otherwise SideFailed is raised.

        Returns (pieces that were not started, pieces that failed).
        """
        end = time.monotonic() + seconds
        unstarted, failed = [], []
        for piece in self.missing(pieces):
            began, name = time.monotonic(), " ".join(map(str, piece))
            if began + expected(piece) > end:
                unstarted.append(piece)
                continue
            named = {
                field: value
                for field, value in zip(self._fields, piece, strict=True)
                if value is not None
            }
            lines = run_piece(piece)
            try:
                for line in lines:
                    self.raw.keep({**line, **named})
            except SideFailed as failure:
                if not go_on:
                    raise
                failed.append(piece)
                print(f"{name} failed: {failure}", flush=True)
            finally:
                getattr(lines, "close", lambda: None)()  # closing the generator ends the server
            print(f"{name}: {time.monotonic() - began:.0f} s", flush=True)
        for piece in unstarted:
            name = " ".join(map(str, piece))
            print(
                f"not begun, for want of time (~{expected(piece):.0f} s): {name}; "
                "run it again with --resume"
            )
        return unstarted, failed

    def run_sides(
        self, sides: Iterable[str], run_piece: Callable[[Piece], Iterable[Line]]
    ) -> dict[str, Any]:
        """Run each missing side; return {side: its configuration}.

        It is for comparisons whose pieces are sides. Raises SystemExit if a side fails.
        """
        try:
            self.run([(side,) for side in sides], run_piece)
        except SideFailed as failure:
            raise SystemExit(str(failure)) from None
        return {line["side"]: line["config"] for line in self.raw.all if "config" in line}

    def _piece(self, line: Line) -> Piece:
        return tuple(line.get(field) for field in self._fields)

    def _whole(self, lines: list[Line]) -> list[Line]:
        by_piece: dict[Piece, list[Line]] = {}
        for line in lines:
            by_piece.setdefault(self._piece(line), []).append(line)
        whole = {piece for piece, mine in by_piece.items() if self._finished(piece, mine)}
        return [line for line in lines if self._piece(line) in whole]


def lines_of(
    command: list[str],
    folder: Path | None = None,
    environment: Mapping[str, str] | None = None,
    seconds: float = math.inf,
) -> Iterator[Line]:
    """Run a program in its own session, and yield its JSON lines as they arrive.

    Other output goes to this process's stderr.

    folder: working directory, and first import path.
    seconds: time limit, after which the program and its children are killed; children would
        otherwise hold device memory.

    Raises SideFailed after the last line if the program fails, with the cause and the log's end.
    """
    variables = dict(os.environ if environment is None else environment)
    if folder is not None:
        path = [str(folder), *filter(None, [variables.get("PYTHONPATH")])]
        variables["PYTHONPATH"] = os.pathsep.join(path)
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        cwd=folder,
        env=variables,
        start_new_session=True,
    )
    assert process.stdout is not None and process.stderr is not None
    log: list[str] = []

    def note(text: str) -> None:
        log.append(text)
        print(text, end="", file=sys.stderr)

    def kill() -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)

    errors = threading.Thread(target=lambda stream: [note(text) for text in stream],
                              args=(process.stderr,), daemon=True)  # fmt: skip
    errors.start()
    timer = threading.Timer(min(seconds, threading.TIMEOUT_MAX), kill)
    timer.daemon = True
    timer.start()
    try:
        for text in process.stdout:
            line = _json_of(text)
            if line is None:
                note(text)
            else:
                yield line
        code = process.wait()
    except BaseException:
        kill()
        raise
    finally:
        timer.cancel()
        process.wait()
        errors.join(5)  # a remaining child process may hold the pipe open
    if code:
        raise SideFailed(f"exit code {code}\n{explain(log)}")


def _json_of(text: str) -> Line | None:
    """Parse a JSON line; None for other output."""
    if text.startswith("{"):
        with contextlib.suppress(ValueError):
            line: Line = json.loads(text)
            return line
    return None


def explain(log: list[str]) -> str:
    """Return the log's line that names the cause of a failure, and the last 40 lines.

    The cause is the first exception; later ones come from processes that waited for the failed one.
    """
    error = re.compile(r"(?:^|\s)(?:[\w.]+\.)?[A-Z]\w*(?:Error|Exception|Interrupt): \S")
    cause = next((line.strip() for line in log if error.search(line)), "no exception was printed")
    return "".join([f"cause: {cause}\n", *log[-40:]])
