"""Faults of the network between clients and server, against a server that has none of its own."""

import pytest

from loadtest.chaos.faults import beside, needs_proxies, parse_chaos
from loadtest.errors import ScenarioError
from loadtest.runner import RunOptions, RunResult, Task, run
from tests.loadtest.fake_server import FakeServer


def disturbed(faults: list[str], *, gap: float = 0.02, seconds: float = 2.4) -> RunResult:
    text = (
        "work: {name: tokens, input: 4, output: 10}\n"
        f"phases: [{{name: a, arrivals: {{kind: constant, rate: 25}}, duration: {seconds}s}}]\n"
    )
    with FakeServer(first=0.02, gap=gap) as server:
        task = Task(text, overrides={"target.url": server.url})
        harm = beside(faults, server.url, 0)
        return run(task, RunOptions(proxied=needs_proxies(faults), beside=harm))


def test_a_delay_is_felt_both_ways_and_ends() -> None:
    """A delay that is not there, is there only one way, or never ends; one with a wrong mark."""
    result = disturbed(["delay-network@0.8s for 0.8s by 150ms"])
    s = result.summary
    assert s.failed == 0 and s.missing_tokens == s.doubled_tokens == 0
    inside = [r.ttft_s for r in result.records if 0.85 < r.intended_s < 1.3 and r.ttft_s]
    outside = [r.ttft_s for r in result.records if not 0.5 < r.intended_s < 1.7 and r.ttft_s]
    assert min(inside) >= 0.319 and min(outside) < 0.12  # 150 ms there, 150 ms back
    marks = {mark.what: mark.t for mark in s.faults}
    assert marks["delay network by 150 ms for 0.8 s"] == pytest.approx(0.8, abs=0.1)
    assert marks["network as before (delay)"] == pytest.approx(1.6, abs=0.1)


def test_silence_and_cut() -> None:
    """A partition that loses bytes; a cut that leaves streams waiting for ever."""
    result = disturbed(["pause-network@0.5s for 1s, kill-network@2s"], gap=0.03)
    s = result.summary
    during = [t for r in result.records for t, _ in r.chunks if 0.6 < t < 1.45]
    assert not during and s.longest_gap_s > 0.9
    broken = [r for r in result.records if r.failed]
    assert broken and all(r.error_class in ("cut", "disconnect") for r in broken)
    assert all(1.5 < r.intended_s < 2.1 and abs(r.end_s - 2) < 0.3 for r in broken)
    assert s.succeeded == s.requests - len(broken) > 40 and s.missing_tokens == 0


@pytest.mark.parametrize(
    "text",
    ["delay-engine@1s for 1s by 1s", "delay-network@1s for 1s", "pause-network@1s",
     "kill-network@1s for 1s", "pause-network@1s for 1s by 1s"],
)  # fmt: skip
def test_faults_that_mean_nothing(text: str) -> None:
    """A fault that is taken and then does something else."""
    with pytest.raises(ScenarioError):
        parse_chaos(text)
