"""What `manta serve` says of a deployment that failed, by what Serve tells of it."""

import pytest

from deployments.catalog import why_failed

REPLICA = """The deployment failed to start 1 times in a row. Error:
RuntimeError: Traceback (most recent call last):
  File "replica.py", line 983, in initialize
    raise ValueError("not this") from error
"""


@pytest.mark.parametrize(
    ("message", "found"),
    [
        (REPLICA + "errors.ConfigError: no such pool", "errors.ConfigError: no such pool"),
        (REPLICA + "AssertionError\n\nDuring handling", "AssertionError"),
        ("ray::Replica: ValueError: one\n  File x", "ray::Replica: ValueError: one"),
        ("no node has 8 GPUs", "no node has 8 GPUs"),
        ("", "no reason given"),
    ],
)  # fmt: skip
def test_the_deepest_cause(message: str, found: str) -> None:
    """The line that a traceback begins with, or a line of code, for the cause."""
    assert why_failed([message, message]) == found
