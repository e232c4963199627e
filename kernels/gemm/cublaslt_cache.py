"""The file that stores the fastest matmul algorithms for later processes.

The file saves seconds of a start. With the same algorithms, results on one machine stay bitwise
equal after a restart.

There is one file per device name and version of cuBLASLt, beside Triton's compiled kernels
(TRITON_CACHE_DIR, by default ~/.triton/cache). NVIDIA's documentation allows an algorithm to be
stored and used again with the same version of cuBLAS. To search again, remove the file. If the file
cannot be read or written, each start searches.
"""

import contextlib
import json
import logging
import os
import re
import tempfile
from pathlib import Path

logger = logging.getLogger("manta.kernels")

# Name of a matmul -> the fastest algorithm's bytes in hex; None: cuBLASLt's own choice.
Found = dict[str, str | None]


def file_for(device: str, version: int, search: str) -> Path:
    """Return the file's path for a device name and a version of cuBLASLt.

    search: an identifier of the search's candidates.
    """
    import triton

    device = re.sub(r"[^A-Za-z0-9]+", "-", device)
    return Path(triton.knobs.cache.dir) / f"manta-products-{device}-{version}-{search}.json"


def read(path: Path) -> Found:
    """Read the file: name of a matmul -> algorithm. Returns {} if there is no valid file."""
    try:
        entries = json.loads(path.read_text())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        logger.warning("%s is not used, products are searched for again: %s", path, error)
        return {}
    if not isinstance(entries, dict):
        return {}
    return {
        name: text
        for name, text in entries.items()
        if text is None or (isinstance(text, str) and re.fullmatch(r"([0-9a-f]{2})+", text))
    }


def add_entries(path: Path, found: Found) -> None:
    """Add the tuner's choices to the file. If several processes write it, the last one wins."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=path.name)
        try:
            with os.fdopen(handle, "w") as file:
                json.dump(read(path) | found, file, indent=0)
            os.replace(name, path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(name)
            raise
    except OSError as error:
        logger.warning("products are searched for at each start, cannot write %s: %s", path, error)
