"""Our loggers in a Serve replica: into Serve's log files, where people look."""

import logging
from logging.handlers import MemoryHandler


def log_through_serve() -> None:
    """Give "manta.*" loggers the handlers that Serve has set up in this process. Idempotent.

    Not through its buffer: that is for a line a request, and holds back the rare ones that matter.
    """
    ours = logging.getLogger("manta")
    ours.setLevel(logging.INFO)
    ours.propagate = False
    for handler in logging.getLogger("ray.serve").handlers:
        target = handler.target if isinstance(handler, MemoryHandler) else handler
        if target is not None and target not in ours.handlers:
            ours.addHandler(target)
