"""The openai client's older generation, which instructor and langchain still install."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
OLD = Path(sys.prefix) / "openai-1"


@pytest.mark.slow
def test_openai_1() -> None:
    """The two generations parse answers differently; half of the users have the other one."""
    if not OLD.exists():
        pytest.skip("make venv installs openai 1.x beside the current one")
    environment = {**os.environ, "PYTHONPATH": str(OLD)}
    command = [sys.executable, "-c", "import openai; print(openai.__version__)"]
    version = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert version.stdout.startswith("1.")
    api = ROOT / "tests/deployments/api"
    tools = ("test_table", "test_a_tool_of_text", "test_through_an_adapter")
    tests = [str(api / "test_openai_client.py")]
    tests += [f"{api / 'tools/test_tools.py'}::{name}" for name in tools]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *tests],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout[-4000:]
