import gc
import os
import subprocess
import sys

import pytest

from engine.parallel import shared_memory

OWN = "MANTA_TEST_OWN_PROCESS"  # set in the separate process of a test with the mark own_process


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test with the mark own_process in a separate process of pytest.

    torch keeps one store per name of a process group. A second group of the same name in a process
    would wait for its ranks at the store of the first group.
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
    """Let the process report two cores, as two ranks require; here ranks are threads, which need
    only one."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    monkeypatch.setattr(gc, "freeze", lambda: None)
    # A rank that polls holds Python's lock, for which the other rank waits; so poll only once.
    monkeypatch.setattr(shared_memory, "_LOOKS", 1)
    monkeypatch.setattr(shared_memory, "_YIELDS", 1)
