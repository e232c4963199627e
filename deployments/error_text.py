"""reason, error_line: reduce exceptions and tracebacks to one-line texts for users."""

import re
from collections.abc import Sequence

# Matches escape sequences, including colours, and control characters.
_CONTROL = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]|[\x00-\x08\x0b-\x1f\x7f]")
_LONGEST = 400  # maximum characters of a text
# Matches a line of a traceback with an error's name and message, unless the message is itself a
# traceback.
_ERROR = re.compile(
    r"(?:\S+: )*[\w.]*(?:Error|Exception|Died|Lost)(?:: (?!Traceback \(most recent)|$)"
)
# Matches lines of a traceback that state where an error was raised, rather than its cause.
_WHERE = re.compile(
    r"Traceback \(most recent|traceback:|File \"|[\^~]+$|ray::|During handling|The above exception"
)


def plain(text: str) -> str:
    """Return a text without escape sequences, such as colours, and control characters."""
    return _CONTROL.sub("", text)


def error_line(text: str) -> str:
    """Return the last line of a text with an error's name and message, which is the deepest cause
    in a traceback; "" if there is none."""
    lines = [line.strip() for line in plain(text).splitlines()]
    errors = [line for line in lines if _ERROR.match(line)]
    return _bounded(errors[-1:])


def reason(error: BaseException) -> str:
    """Return an exception's message in one line: the text before an embedded traceback, and the
    deepest cause in the traceback.

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
