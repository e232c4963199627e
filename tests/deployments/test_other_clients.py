"""Clients of other versions than this environment has: the older generation of openai's, and the
libraries that are written on top of it. `make venv` installs each set into a folder of its own."""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
API = ROOT / "tests/deployments/api"

pytestmark = pytest.mark.slow


def run(folder: str, openai: str, tests: Sequence[str]) -> None:
    """pytest over these, below API, with that folder in front: all pass and none is skipped.
    openai: the generation of that client which the folder has."""
    beside = Path(sys.prefix) / folder
    if not beside.exists():
        pytest.skip(f"make venv installs tests/{folder}.txt beside the rest")
    assert list(beside.glob(f"openai-{openai}.*.dist-info"))
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
    run("openai-1", "1", ["test_openai_client.py", *cases])


def test_libraries() -> None:
    """Bug: an item, a chunk or a schema that one of them does not take, or sends otherwise."""
    own = ("dialects/test_ollama.py", "pooling/test_peers_routes.py")
    cases = [f"{name}::test_its_own_client" for name in own]
    run("clients", "3", ["test_client_libraries.py", "test_trl.py", *cases])
