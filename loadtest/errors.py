"""The errors of a load test: mistakes in the scenario or the command, and failures of the run."""

import difflib


class ScenarioError(Exception):
    """Raised when the scenario, an option or a file is wrong and nothing was sent. Exit code 2.

    problems: one line each, ready to print.
    """

    def __init__(self, *problems: str) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


class RunError(Exception):
    """Raised when a run cannot be done: no server, or a client process died. Exit code 1."""


def hint(word: str, known: list[str]) -> str:
    """Return a text to append to an error about an unknown word: the most similar known word, or
    all known words."""
    near = difflib.get_close_matches(word, known, 1, 0.6)
    if near:
        return f"; did you mean {near[0]!r}?"
    return f"; known: {', '.join(known)}" if known else ""
