import gc
import os

import pytest

from engine.parallel import shared_memory


@pytest.fixture
def two_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Report two cores, which ranks need; threads as ranks do not."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    monkeypatch.setattr(gc, "freeze", lambda: None)
    # With Python's lock, which the other waits for.
    monkeypatch.setattr(shared_memory, "_LOOKS", 1)
    monkeypatch.setattr(shared_memory, "_YIELDS", 1)
