"""bench.cpu.steps: the rows that it makes of measurements."""

import pytest
import torch

from bench.cpu import steps as bench
from tests.kernels.cpu.test_generated import able


def test_ratios_are_what_they_say() -> None:
    """One core taken for all of them, a step for its products, bytes for seconds."""
    every = {f"step-{n}": 2.0 * n for n in (1, 2, 4, 8, 32)}
    every |= {f"products-{n}": 1.5 * n for n in (1, 2, 4, 8, 32)}
    every |= {f"host-{n}": 0.2 * n for n in (1, 32)}
    every |= {f"verify-{n}": 3.0 * n for n in (1, 2, 4, 8)}
    every |= {"products-512": 4.0, "weights": 100, "bytes": 60, "read": 80.0, "peak": 51200.0}
    every |= {"read-1": 50.0, "peak-1": 25600.0}
    ours = {**every, "step-1": 3.8, "step-32": 96.0}
    ratios = {row["case"]: row["ratio"] for row in bench.rows_of("gguf", ours, every)}
    assert ratios["gguf/others/1"] == ratios["gguf/others/32"] == 0.25
    assert ratios["gguf/host/1"] == ratios["gguf/host/32"] == 0.1
    assert ratios["gguf/cores/read"] == 1.6 and ratios["gguf/cores/peak"] == 2.0
    assert ratios["gguf/cores/1"] == 1.9 and ratios["gguf/cores/32"] == 1.5
    assert [ratios[f"gguf/verify/{n}"] for n in (2, 4, 8)] == [2.0, 4.0, 8.0]
    assert ratios["gguf/bandwidth"] == 0.5 and ratios["gguf/peak"] == 0.5


@pytest.mark.skipif(not able(), reason="no compiler for this machine")
def test_the_limits_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """A loop that the compiler took away: no machine reads or multiplies so fast."""
    monkeypatch.setattr(bench, "READ", 16 << 20)
    monkeypatch.setattr(bench, "best", lambda run, seconds: _timed(run))
    threads = torch.get_num_threads()
    assert 1e7 < bench.read_bandwidth(threads) < 2e12 * threads
    for quantization in ("gguf", "none"):
        assert 1e8 < bench.peak(quantization, threads) < 5e12 * threads


def _timed(run) -> float:  # type: ignore[no-untyped-def]
    import time

    began = time.perf_counter()
    run()
    return time.perf_counter() - began
