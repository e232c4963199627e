"""A random model that has to call tools. 200 seeds:
`python -m tests.deployments.api.output.tool_seeds`"""

from pathlib import Path

import pytest

from tests.deployments.api.output.tool_seeds import FORMATS, wrong_calls
from tests.deployments.api.output.tool_templates import DECLARED

# One format of each kind: JSON between tags, tags around values, channels, an expression.
QUICK = ("hermes", "qwen3-coder", "harmony", "gemma4")
# Of what checkpoints declare one: grammars of the others are those of a family.
SLOW = [
    format
    for format in FORMATS
    if format not in (*QUICK, *DECLARED) or format == "tags around JSON"
]


@pytest.mark.parametrize(
    "name", [*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)]
)
def test_a_random_model_calls_tools(name: str, tmp_path: Path) -> None:
    """A call that is invalid, or that is cut, or not read as one."""
    assert not wrong_calls(name, tmp_path, 8)


@pytest.mark.slow
def test_two_hundred_calls(tmp_path: Path) -> None:
    """The same where only one seed of many shows it."""
    assert not wrong_calls("hermes", tmp_path, 200)


def test_calls_through_an_adapter(tmp_path: Path) -> None:
    """An adapter whose rows are not masked, or whose logits are masked before it is added."""
    assert not wrong_calls("hermes", tmp_path, seeds=2, adapter=True)
