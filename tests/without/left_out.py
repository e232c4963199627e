"""A module that stands before a real package refuses one importer, and loads it for others."""

import importlib
import sys
from pathlib import Path

_HERE = Path(__file__).parent


def refuse_or_load(name: str, refused: str) -> None:
    """Load the real package in place of a module of this folder, which calls this.

    refused: the package whose modules get an ImportError instead.
    """
    frame = sys._getframe(2)
    while frame.f_back and frame.f_globals["__name__"].partition(".")[0] == "importlib":
        frame = frame.f_back
    if f"{frame.f_globals['__name__']}.".startswith(f"{refused}."):
        raise ImportError(f"{refused} is to do without {name} in tests")
    path = sys.path[:]
    sys.path[:] = [item for item in path if Path(item) != _HERE]
    del sys.modules[name]
    try:
        importlib.import_module(name)
    finally:
        sys.path[:] = path
