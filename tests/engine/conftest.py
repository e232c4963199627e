import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

OWN = "MANTA_TEST_OWN_PROCESS"  # set in the separate process of a test with the mark own_process


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test with the mark own_process in a separate process of pytest.

    torch keeps one store per name of a process group. A second group of the same name in a process
    would wait for its ranks at the store of the first group. A process's memory depends on the
    tests before.
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
def real_cores() -> Iterator[None]:
    """Let this process use all cores during the test; skip the test on a machine with one core.

    Processes of parallel tests otherwise have one core each.
    """
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, range(os.cpu_count() or 1))
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("two ranks on the CPU need two cores")
    yield
    os.sched_setaffinity(0, before)
