"""cache_folder: the folder of Triton's cache; the CPU kernels' object code is next to it."""

import os
from pathlib import Path


def cache_folder() -> Path:
    """Return Triton's cache folder without importing Triton, which takes a third of a second."""
    home = os.environ.get("TRITON_HOME") or os.path.expanduser("~")
    return Path(os.environ.get("TRITON_CACHE_DIR") or Path(home, ".triton", "cache"))
