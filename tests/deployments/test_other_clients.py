"""Clients of other versions than this environment has: the older generation of openai's, the
libraries that are written on top of it, and trainers.

`make venv` installs each set into a folder of its own.
"""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
API = ROOT / "tests/deployments/api"

pytestmark = pytest.mark.slow


def run(folder: str, package: str, tests: Sequence[str]) -> None:
    """Run tests of the API with an older client's folder first in PYTHONPATH; all must pass.

    folder: name of the folder, in .venv. package: a package in it, and how its version begins.
    """
    beside = Path(sys.prefix) / folder
    if not beside.exists():
        pytest.skip(f"make venv installs tests/{folder}.txt beside the rest")
    assert list(beside.glob(f"{package}.*.dist-info"))
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, *(str(API / test) for test in tests)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(beside)},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0 and "skipped" not in done.stdout, done.stdout[-4000:]


def test_openai_1() -> None:
    """The two generations parse answers differently; half of the users have the other one."""
    tools = ("test_table", "test_a_tool_of_text", "test_through_an_adapter")
    cases = [f"output/test_tools.py::{name}" for name in tools]
    run("openai-1", "openai-1", ["test_openai_client.py", *cases])


def test_libraries() -> None:
    """Bug: an item, a chunk or a schema that one of them does not take, or sends otherwise."""
    own = ("dialects/test_ollama.py", "pooling/test_peers_routes.py")
    cases = [f"{name}::test_its_own_client" for name in own]
    run("clients", "openai-3", ["test_client_libraries.py", *cases])


def test_trainers() -> None:
    """A trainer does not find a route, or the weights that it sends are not served."""
    run("trainers", "trl-1", ["trainers/test_trl.py", "trainers/test_skyrl.py"])
