import gc
import os

import pytest

from engine.parallel import shared_memory


@pytest.fixture
def two_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the process report two cores, as two ranks require; here ranks are threads, which need
    only one."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    monkeypatch.setattr(gc, "freeze", lambda: None)
    # A rank that polls holds Python's lock, for which the other rank waits; so poll only once.
    monkeypatch.setattr(shared_memory, "_LOOKS", 1)
    monkeypatch.setattr(shared_memory, "_YIELDS", 1)
