"""Our loggers in a Serve replica: into Serve's log files, where people look."""

import logging


def log_through_serve() -> None:
    """Give "manta.*" loggers the handlers that Serve has set up in this process. Idempotent."""
    ours = logging.getLogger("manta")
    ours.setLevel(logging.INFO)
    ours.propagate = False
    for handler in logging.getLogger("ray.serve").handlers:
        if handler not in ours.handlers:
            ours.addHandler(handler)
