import gc
import os
import subprocess
import sys

import pytest

from engine.parallel import shared_memory

OWN = "MANTA_TEST_OWN_PROCESS"  # set in the process of a test with the mark own_process


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test with the mark own_process in a pytest of its own.

    torch keeps the store of a group by its name. A second group of a process, which has the name
    of the first, would wait for its ranks at the first one's store.
    """
    if not pyfuncitem.get_closest_marker("own_process") or os.environ.get(OWN):
        return None
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", pyfuncitem.nodeid]
    done = subprocess.run(
        command,
        cwd=pyfuncitem.config.rootpath,
        env={**os.environ, OWN: "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-6000:]
    return True


@pytest.fixture
def two_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Report two cores, which ranks need; threads as ranks do not."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    monkeypatch.setattr(gc, "freeze", lambda: None)
    # With Python's lock, which the other waits for.
    monkeypatch.setattr(shared_memory, "_LOOKS", 1)
    monkeypatch.setattr(shared_memory, "_YIELDS", 1)
