"""The common functions of launch sweeps.

Each launch runs once in another process before any launch is timed, and its result is compared with
the expected one. The table of times ends with recommended settings.
"""

import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from tempfile import TemporaryFile
from threading import Timer
from typing import Any, NamedTuple

import torch

from bench.kernels.measure import apart

PROCESSES = 12
EACH_S = 80.0  # seconds after which a launch counts as hanging
NO_TIME = "no time"
# Ratio to the time with the engine's launch; smaller gains are within the noise between two runs.
PAYS = 0.97
DIFFERS = 0.02  # largest accepted difference of two results, relative to their norm
WRONG = "WRONG"  # prefix of the remark on a launch with a larger difference


class Timed(NamedTuple):
    """The time of one launch.

    us: inf if it did not run.
    table: the table that the launch belongs to; "" for the launch that the engine uses.
    """

    us: float
    what: str
    table: str = ""
    remark: str = ""

    def __str__(self) -> str:
        mark = "" if self.table else "   <- today"
        return f"{self.us:9.2f} us  {self.what:<60} {self.remark}{mark}".rstrip()

    @property
    def right(self) -> bool:
        return math.isfinite(self.us) and not self.remark.startswith(WRONG)


def differs(found: Any, wanted: Any, most: float = DIFFERS) -> str:
    """Return a remark on the distance between two results, or "" if one is missing."""
    if found is None or wanted is None:
        return ""
    error = apart(found, wanted)
    return f"{'' if error < most else f'{WRONG}: '}differs by {error:.1e}"


def pays(us: float, today: float) -> bool:
    return us < PAYS * today


def to_set(rows: Iterable[Timed]) -> str:
    """Return a text with each table's fastest launch, if its gain is large enough.

    The text advises to time these launches together, as only one was changed at a time.
    """
    ran = sorted(row for row in rows if row.right)
    if not ran:
        return "nothing ran"
    today = next((row.us for row in ran if not row.table), math.inf)
    best: dict[str, str] = {}
    for row in ran:
        if row.table and pays(row.us, today):
            best.setdefault(row.table, row.what)
    return "; ".join(best.values()) or "nothing"


def lines(rows: Iterable[Timed], most: int | None = None) -> Iterator[str]:
    """Yield lines: the `most` fastest launches, the engine's launch, and recommended settings."""
    ranked = sorted(rows)
    for number, row in enumerate(ranked):
        if most is None or number < most or not row.table:
            yield str(row)
    yield f"set: {to_set(ranked)}"


def first_launches(module: str, arguments: list[str], count: int, seconds: float) -> dict[int, str]:
    """Run each of a module's `count` launches once, in several processes.

    This fills Triton's cache, and finds launches that crash or hang before anything is timed. A
    process is `python -m MODULE ARGUMENTS --these NUMBERS`, which calls `launch_these`. If it dies
    at a launch, another process runs the remaining numbers.

    Returns {number of a failed launch: reason}; the reason is NO_TIME for launches not reached
    within `seconds`. Raises SystemExit without a CUDA device.
    """
    if not torch.cuda.is_available():
        raise SystemExit("error: no CUDA device here")
    command = [sys.executable, "-m", module, *arguments, "--these"]
    limit = time.monotonic() + seconds
    failed = dict.fromkeys(range(count), NO_TIME)

    def walk(numbers: list[int]) -> None:
        while numbers and time.monotonic() < limit:
            ran, why = _walk(command, numbers, limit)
            for number in numbers[:ran]:
                del failed[number]
            numbers = numbers[ran:]
            if numbers and time.monotonic() < limit:
                failed[numbers.pop(0)] = why

    processes = max(1, min(PROCESSES, os.cpu_count() or 1))
    with ThreadPoolExecutor(processes) as pool:
        list(pool.map(walk, [[*range(i, count, processes)] for i in range(processes)]))
    return failed


def launch_these(numbers: list[int], launch: Callable[[int], object]) -> None:
    """Run launches in a process of `first_launches`; print each finished launch's number."""
    for number in numbers:
        launch(number)
        torch.cuda.synchronize()
        print(number, flush=True)


def _walk(command: list[str], numbers: list[int], limit: float) -> tuple[int, str]:
    """Run launches in one process; return (count of finished launches, why the next one failed)."""
    ran, late = 0, False
    with (
        TemporaryFile("w+") as errors,
        subprocess.Popen(
            [*command, *map(str, numbers)],
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            start_new_session=True,  # so that a running assembler can be killed with the process
        ) as process,
    ):
        assert process.stdout is not None
        while ran < len(numbers):
            patience = max(0.0, min(EACH_S, limit - time.monotonic()))
            began = time.monotonic()
            timer = Timer(patience, _end, [process.pid])
            timer.start()
            line = process.stdout.readline()
            timer.cancel()
            late = time.monotonic() - began >= patience
            if not line:
                break
            ran += line.strip() == str(numbers[ran])
        _end(process.pid)
        status = process.wait()
        errors.seek(0)
        printed = errors.read().strip().splitlines() or [f"exit status {status}"]
    return ran, f"not done after {EACH_S:.0f} s" if late else printed[-1][:120]


def _end(pid: int) -> None:
    with suppress(ProcessLookupError):  # the process has ended already
        os.killpg(pid, signal.SIGKILL)
