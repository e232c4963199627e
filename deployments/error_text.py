"""The texts of exceptions and tracebacks, in one line for a user."""

import re
from collections.abc import Sequence

_CONTROL = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]|[\x00-\x08\x0b-\x1f\x7f]")  # colours, too
_LONGEST = 400  # characters
# The last line of a traceback: an error's name, and what it says unless that begins another one.
_ERROR = re.compile(
    r"(?:\S+: )*[\w.]*(?:Error|Exception|Died|Lost)(?:: (?!Traceback \(most recent)|$)"
)
# Lines of a traceback that say where, and not what.
_WHERE = re.compile(
    r"Traceback \(most recent|traceback:|File \"|[\^~]+$|ray::|During handling|The above exception"
)


def plain(text: str) -> str:
    """The text without colours and control characters."""
    return _CONTROL.sub("", text)


def error_line(text: str) -> str:
    """The line of a traceback that names the deepest cause; "" if no line names an error. Pure."""
    lines = [line.strip() for line in plain(text).splitlines()]
    errors = [line for line in lines if _ERROR.match(line)]
    return _bounded(errors[-1:])


def reason(error: BaseException) -> str:
    """Return what an exception says: its lines up to a traceback, and the traceback's cause; its
    name where it says nothing."""
    text = str(getattr(error, "strerror", None) or error)
    lines = [line.strip() for line in plain(text).splitlines() if line.strip()]
    said = []
    for line in lines:
        if _WHERE.match(line):
            break
        said.append(line)
    cause = error_line(text)
    if cause and cause not in said:
        said.append(cause)
    return _bounded(said or lines) or type(error).__name__


def _bounded(lines: Sequence[str]) -> str:
    text = " ".join(lines).rstrip(".")
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."
