"""reason, error_line: one-line texts of exceptions and tracebacks, for users."""

import re
from collections.abc import Sequence

# Escape sequences, including colours, and control characters.
_CONTROL = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]|[\x00-\x08\x0b-\x1f\x7f]")
_LONGEST = 400  # characters
# A line of a traceback that names an error with its message; not one whose message is a traceback.
_ERROR = re.compile(
    r"(?:\S+: )*[\w.]*(?:Error|Exception|Died|Lost)(?:: (?!Traceback \(most recent)|$)"
)
# Lines of a traceback that say where an error was raised, rather than its cause.
_WHERE = re.compile(
    r"Traceback \(most recent|traceback:|File \"|[\^~]+$|ray::|During handling|The above exception"
)


def plain(text: str) -> str:
    """Return a text without escape sequences, such as colours, and control characters."""
    return _CONTROL.sub("", text)


def error_line(text: str) -> str:
    """Return the last line of a traceback that names an error, the deepest cause; "" if none
    does."""
    lines = [line.strip() for line in plain(text).splitlines()]
    errors = [line for line in lines if _ERROR.match(line)]
    return _bounded(errors[-1:])


def reason(error: BaseException) -> str:
    """Return an exception's message in one line: the text before an embedded traceback, and the
    traceback's cause.

    Returns the exception's class name if it has no message.
    """
    text = str(getattr(error, "strerror", None) or error)
    lines = [line.strip() for line in plain(text).splitlines() if line.strip()]
    reasons = []
    for line in lines:
        if _WHERE.match(line):
            break
        reasons.append(line)
    cause = error_line(text)
    if cause and cause not in reasons:
        reasons.append(cause)
    return _bounded(reasons or lines) or type(error).__name__


def _bounded(lines: Sequence[str]) -> str:
    text = " ".join(lines).rstrip(".")
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."
