"""log_through_serve: directs our loggers' output to the log files of a Serve replica.

A record about one request has `extra={"request_id": ...}`. The id is the same in the router, the
replica and the engine process, whose records EngineClient passes to the replica's loggers.
"""

import logging
from logging.handlers import MemoryHandler


def log_through_serve(level: str = "info") -> None:
    """Add Serve's log handlers of this process to the "manta" loggers. Idempotent.

    level: "info" or "debug".
    """
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
    """A handler that passes records immediately to the target of Serve's MemoryHandler.

    The MemoryHandler would withhold rare records until its buffer is full. Its filters, which add
    application, deployment and replica, still run.
    """

    def __init__(self, behind: MemoryHandler) -> None:
        super().__init__()
        self.behind = behind

    def emit(self, record: logging.LogRecord) -> None:
        request_id = getattr(record, "request_id", None)
        if self.behind.target is None or not self.behind.filter(record):
            return
        if request_id is not None:
            # Serve's filter has replaced the record's request id by that of Serve's current
            # request.
            record.request_id = request_id
        self.behind.target.handle(record)
