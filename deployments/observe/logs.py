"""Our loggers in a Serve replica: into Serve's log files, where people look, as text or as JSON.

A line about one request says so by `extra={"request_id": ...}`; the id is the same in the router,
the replica and the engine process, whose lines arrive here through its client.
"""

import logging
from logging.handlers import MemoryHandler


def log_through_serve(level: str = "info") -> None:
    """Give "manta.*" loggers the handlers that Serve has set up in this process. Idempotent.
    level: "info" or "debug"."""
    ours = logging.getLogger("manta")
    ours.setLevel(level.upper())
    ours.propagate = False
    known = {handler.behind for handler in ours.handlers if isinstance(handler, _BufferBypass)}
    for handler in logging.getLogger("ray.serve").handlers:
        if isinstance(handler, MemoryHandler):
            if handler not in known:
                ours.addHandler(_BufferBypass(handler))
        elif handler not in ours.handlers:
            ours.addHandler(handler)


class _BufferBypass(logging.Handler):
    """Past Serve's buffer, which is for a line a request and holds back the rare ones that matter;
    through its filters, which put in the application, the deployment and the replica."""

    def __init__(self, behind: MemoryHandler) -> None:
        super().__init__()
        self.behind = behind

    def emit(self, record: logging.LogRecord) -> None:
        given = getattr(record, "request_id", None)
        if self.behind.target is None or not self.behind.filter(record):
            return
        if given is not None:  # theirs is of the task that happens to run
            record.request_id = given
        self.behind.target.handle(record)
