import gc
import os
from collections.abc import Iterator

import pytest

from engine.parallel import shared_memory


@pytest.fixture
def two_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """As ranks need them; threads do not."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    monkeypatch.setattr(gc, "freeze", lambda: None)
    # With Python's lock, which the other waits for.
    monkeypatch.setattr(shared_memory, "_LOOKS", 1)
    monkeypatch.setattr(shared_memory, "_YIELDS", 1)


@pytest.fixture
def real_cores() -> Iterator[None]:
    """All of this machine's, where tests side by side have one each."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, range(os.cpu_count() or 1))
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("two ranks on the CPU need two cores")
    yield
    os.sched_setaffinity(0, before)
