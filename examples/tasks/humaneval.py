"""Runs what a model wrote for HumanEval, in a process of its own; it is no sandbox."""

import subprocess
import sys
from typing import Any

_SECONDS = 10.0  # for the tests of one answer


def process_results(doc: dict[str, Any], results: list[str]) -> dict[str, float]:
    """Return whether the answer passes the document's tests."""
    program = f"{doc['prompt']}{results[0]}\n{doc['test']}\ncheck({doc['entry_point']})\n"
    try:
        done = subprocess.run(
            [sys.executable, "-I", "-"],
            input=program.encode("utf-8", "replace"),
            capture_output=True,
            timeout=_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return {"pass_at_1": 0.0}
    return {"pass_at_1": float(done.returncode == 0)}
