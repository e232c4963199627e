"""The workloads of tiers in virtual time, with the real scheduler and host tier."""

import time

import pytest

from bench.simulate.tiers import CASES, run


def test_conversations_come_back_from_the_host() -> None:
    """Bug: prefixes are loaded for requests that find no memory, and evicted; copies hold up steps;
    the process's clock stays virtual."""
    case, before = CASES["quick"], time.perf_counter
    none, tier = run(case), run(case, "reused")
    assert time.perf_counter is before
    sizes = case.sizes
    third = sizes.opening + 2 * sizes.message + 3 * sizes.answer  # tokens that the device has had
    reusable = (third - 1) // 16 * 16 / (third + sizes.message)
    # answers have random lengths, so a turn has more or fewer tokens than the mean
    assert tier["return_hits"] == pytest.approx(reusable, abs=0.01)
    assert none["return_hits"] == 0
    assert tier["dialogue"] > 1.25 * none["dialogue"]
    assert tier["fresh"] == none["fresh"]
    assert tier["first"] < 0.2 * none["first"]
    assert tier["copies"] == pytest.approx(case.rate / 1e9)
