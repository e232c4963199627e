"""docs/loadtest.md: its scenarios are scenarios, its commands and metrics exist."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from loadtest.measure import asserts
from loadtest.measure.records import ERROR_CLASSES
from loadtest.scenario.parse import parse
from loadtest.scenario.schedule import lay_out

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "loadtest.md").read_text("utf-8")


@pytest.mark.parametrize("text", re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL))
def test_scenarios(text: str, tmp_path: Path) -> None:
    """The first thing that a new user copies does not run."""
    for name in ("gold.key", "free.key"):
        (tmp_path / name).write_text("secret\n")
    plans = lay_out(parse(text, "docs", tmp_path), "m")
    for plan in plans:
        plan.spec(plan.visits[0]).body()


def test_names() -> None:
    """A renamed metric, error class or command that the page still has."""
    for text in re.findall(r'(?:--assert|assert: \[) ?"(.*?)"', PAGE):
        asserts.parse(text)
    classes = next(line for line in PAGE.splitlines() if line.startswith("| `errors.CLASS`"))
    assert set(re.findall(r"`([a-z0-9_]+)`", classes)) == set(ERROR_CLASSES)
    helped = subprocess.run(
        [sys.executable, "-m", "loadtest", "--help"], cwd=ROOT, capture_output=True, text=True
    )
    for command in set(re.findall(r"manta loadtest ([a-z]+)", PAGE)):
        assert f" {command} " in helped.stdout


def test_python_example() -> None:
    """The Python entry point moved."""
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert "kind='poisson' rate=20.0" in done.stdout, done.stderr
