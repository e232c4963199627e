"""log_through_serve: our loggers in a Serve replica write into Serve's log files, as text or JSON.

A line about one request carries `extra={"request_id": ...}`. The id is the same in the router, the
replica and the engine process, whose lines arrive here through its client.
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
    """Passes lines by Serve's buffer, which is made for a line a request and holds back the rare
    lines that matter. Serve's filters still put in application, deployment and replica."""

    def __init__(self, behind: MemoryHandler) -> None:
        super().__init__()
        self.behind = behind

    def emit(self, record: logging.LogRecord) -> None:
        request_id = getattr(record, "request_id", None)
        if self.behind.target is None or not self.behind.filter(record):
            return
        if request_id is not None:  # Serve's id would be that of the task that happens to run
            record.request_id = request_id
        self.behind.target.handle(record)
