"""Short texts of Ray's errors, which are pages long and coloured."""

import pytest

from deployments.error_text import error_line, plain, reason
from deployments.model_applications import why_failed

ACTOR = """The actor died because of an error raised in its creation task, \x1b[36mray::Server()\x1b[39m (pid=7)
  At least one of the input arguments for this task could not be computed:
ray.exceptions.RaySystemError: System error: No module named 'engine.errors'
traceback: Traceback (most recent call last):
  File "/x/ray/serialization.py", line 532, in deserialize_objects
    obj = self._deserialize_object(data)
ModuleNotFoundError: No module named 'engine.errors'; 'engine' is not a package
"""  # noqa: E501
TASK = """\x1b[36mray::ServeController.deploy()\x1b[39m (pid=7, ip=10.0.0.1)
  File "/x/controller.py", line 7, in deploy
    raise PermissionError
PermissionError: [Errno 13] Permission denied: '/x/haproxy'"""


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        (ACTOR, "ModuleNotFoundError: No module named 'engine.errors'; 'engine' is not a package"),
        (TASK, "PermissionError: [Errno 13] Permission denied: '/x/haproxy'"),
        ("The node timed out.\nThe GCS has become overloaded.", "The GCS has become overloaded"),
        ("one line.", "one line"),
        ("", "ValueError"),
    ],
)
def test_the_cause_is_told(text: str, wanted: str) -> None:
    """The first line of Ray's errors, with colours and without the cause, was all that was said."""
    said = reason(ValueError(text))
    assert wanted in said
    assert "\x1b" not in said and "\n" not in said and "File " not in said


def test_the_length_is_bounded() -> None:
    """A message with a table of nodes fills the terminal."""
    assert len(reason(ValueError("word " * 1000))) == 400


def test_colours_in_a_failed_deployment() -> None:
    """Serve's messages have the colours of the error in them."""
    assert why_failed([TASK]) == error_line(TASK) == TASK.splitlines()[-1]
    assert why_failed(["\x1b[31mnothing starts\x1b[0m"]) == "nothing starts"
    assert plain("\x1b[1;31ma\x1b[0m\tb") == "a\tb"
