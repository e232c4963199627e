"""A comparison can be cut off and taken up again, and says why a side failed."""

import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bench.report.result_file import Line
from bench.versus.harness import Harness, Piece, SideFailed, explain, lines_of

PIECES: list[Piece] = [(run, side) for run in range(2) for side in ("ours", "theirs")]


def harness(out: Path) -> Harness:
    """Return a comparison of which each piece has two lines."""
    return Harness(out, "x", ("run", "side"), lambda _, lines: len(lines) == 2, resume=True)


def test_what_was_cut_off_runs_again(tmp_path: Path) -> None:
    """Half a piece beside whole ones would be a run under different conditions; a side that fails
    loses the lines of others, or its server is left."""
    ran, closed = [], []

    def run_piece(piece: Piece) -> Iterator[Line]:
        ran.append(piece)
        try:
            yield {"part": 1}
            if piece == PIECES[1] and len(ran) == 2:
                raise SideFailed("no memory")
            yield {"part": 2}
        finally:
            closed.append(piece)

    with pytest.raises(SideFailed):
        harness(tmp_path).run(PIECES, run_piece)
    assert ran == closed == PIECES[:2]
    ours = harness(tmp_path)
    assert ours.missing(PIECES) == PIECES[1:]
    assert ours.run(PIECES, run_piece) == ([], [])
    assert ran[2:] == PIECES[1:] and len(ours.lines) == len(ours.raw.all) == 8
    assert ours.lines[-1] == {"part": 2, "run": 1, "side": "theirs"}


def test_no_piece_begins_that_would_be_cut_off(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A server left behind by the end of the time; others that do not run because one failed."""

    def run_piece(piece: Piece) -> Iterator[Line]:
        yield {"part": 1}
        if piece == PIECES[0]:
            raise SideFailed("no memory")
        yield {"part": 2}

    ours = harness(tmp_path)
    expected = {piece: 90.0 if piece == PIECES[2] else 1.0 for piece in PIECES}
    left, failed = ours.run(PIECES, run_piece, expected.__getitem__, 50.0, go_on=True)
    assert (left, failed) == ([PIECES[2]], [PIECES[0]])
    assert len(ours.lines) == 4 and "1 ours; run it again" in capsys.readouterr().out


def test_a_side_that_takes_too_long_is_killed() -> None:
    """Bug: an engine that hangs keeps the device from every side after it."""
    program = (
        "import subprocess, time\n"
        "print('{\"side\": 1}', flush=True)\n"
        "subprocess.Popen(['sleep', '60']).wait()\n"
    )
    began, lines = time.monotonic(), []
    with pytest.raises(SideFailed, match="exit code -9"):
        for line in lines_of([sys.executable, "-c", program], seconds=1.0):
            lines.append(line)
    assert lines == [{"side": 1}] and time.monotonic() - began < 30


def test_a_side_that_fails_says_why() -> None:
    """The words "see root cause above" alone, with the cause in a log that nobody keeps."""
    program = (
        "import sys\n"
        "print('{\"side\": 1}')\n"
        "print('(Core pid=1) ERROR [core.py:9] RuntimeError: no compiler', file=sys.stderr)\n"
        "print('x\\n' * 60, file=sys.stderr)\n"
        "raise ValueError('initialisation failed, see above')\n"
    )
    lines: list[Any] = []
    with pytest.raises(SideFailed) as caught:
        for line in lines_of([sys.executable, "-c", program]):
            lines.append(line)
    text = str(caught.value)
    assert lines == [{"side": 1}] and "exit code 1" in text
    assert "cause: (Core pid=1) ERROR [core.py:9] RuntimeError: no compiler" in text
    assert text.endswith("ValueError: initialisation failed, see above\n")
    assert len(text.splitlines()) == 42
    assert explain([]).startswith("cause: no exception")


def test_a_line_that_only_looks_like_ours() -> None:
    """Bug: a library prints a line with a brace at its start, which ends the comparison and leaves
    the side running, with the device's memory."""
    program = "print('{not: ours}')\nprint('{\"side\": 1}')"
    assert [*lines_of([sys.executable, "-c", program])] == [{"side": 1}]
