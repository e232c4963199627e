"""Job: a process that has joined a Ray cluster, and runs programs one after the other."""

import contextlib
import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

# Reads programs from standard input, a JSON string per line, and runs them. The answer to each is
# whether it succeeded, and its output, without the lines that Ray prints.
_RUNS = """
import contextlib, io, json, os, sys, traceback
answers = os.fdopen(os.dup(1), "w", buffering=1)
os.dup2(2, 1)
for line in sys.stdin:
    output, good = io.StringIO(), True
    with contextlib.redirect_stdout(output):
        try:
            exec(json.loads(line), {"__name__": "__main__"})
        except BaseException:
            traceback.print_exc(file=output)
            good = False
    print(json.dumps([good, output.getvalue()]), file=answers)
"""


class Job:
    """A process that has joined a cluster and runs programs one after the other.

    It saves the time in which a process for each program would import Ray and start workers.
    """

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self._process = process

    def run(self, program: str) -> str:
        """Run a program, assert that it succeeds, and return its output."""
        assert self._process.stdin and self._process.stdout
        self._process.stdin.write(json.dumps(textwrap.dedent(program)) + "\n")
        self._process.stdin.flush()
        good, output = json.loads(self._process.stdout.readline())
        assert good, output[-3000:]
        return str(output)


@contextlib.contextmanager
def job(address: str, folder: Path) -> Iterator[Job]:
    """Start a Job in a folder, yield it, and end it. address: the cluster's."""
    with subprocess.Popen(
        [sys.executable, "-c", _RUNS],
        cwd=folder,
        env={**os.environ, "RAY_ADDRESS": address},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            yield Job(process)
        finally:
            process.terminate()
