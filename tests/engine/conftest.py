import os
from collections.abc import Iterator

import pytest


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
