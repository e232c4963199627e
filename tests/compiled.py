"""Compiles all modules, with pytest's rewriting of asserts, before a stage's processes start.

    python -m tests.compiled

The processes of a stage import all modules in the same order. In a fresh checkout each process
would compile and rewrite every module, all at the same time."""

import compileall
import os
import re
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from _pytest.assertion import rewrite

ROOT = Path(__file__).parents[1]
PACKAGES = ("deployments", "engine", "kernels", "loadtest", "bench", "tests")
REWRITTEN = re.compile(r"(^|/)(test_[^/]*|conftest)\.py$")


def rewrite_asserts(file: Path) -> None:
    """Write a file's bytecode with rewritten asserts to the path where pytest looks for it, unless
    it is there."""
    compiled = rewrite.get_cache_dir(file) / f"{file.stem}{rewrite.PYC_TAIL}"
    if rewrite._read_pyc(file, compiled) is not None:
        return
    no_configuration: Any = None  # only used to call plugins for passing asserts
    source_hash, code = rewrite._rewrite_test(file, no_configuration)
    compiled.parent.mkdir(exist_ok=True)
    unfinished = compiled.with_name(f"{compiled.name}.{os.getpid()}")
    with unfinished.open("wb") as stream:
        rewrite._write_pyc_fp(stream, source_hash, code)
    unfinished.replace(compiled)


def main() -> None:
    rewritten = [*(ROOT / "tests").rglob("test_*.py"), *(ROOT / "tests").rglob("conftest.py")]
    with ProcessPoolExecutor() as processes:
        waiting = processes.map(rewrite_asserts, rewritten, chunksize=8)
        for package in PACKAGES:
            compileall.compile_dir(ROOT / package, quiet=2, rx=REWRITTEN)
        list(waiting)


if __name__ == "__main__":
    main()
