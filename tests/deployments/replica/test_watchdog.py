"""Watchdog: what counts as stuck, and what does not."""

import pytest

from deployments.replica.watchdog import StallLimits, Watchdog
from engine.messages import Pulse

LIMITS = StallLimits(step=30.0, tick=0.5, silent=3.0, hung=8.0)


class Engine:
    """A simulated engine and its watchdog: `tick` simulates half a second of it."""

    def __init__(self) -> None:
        self.watch = Watchdog(LIMITS)
        self.pulses = self.step = 0
        self.cpu = 0.0

    def tick(
        self,
        *,
        pulse: bool = True,
        doing: str = "step",
        cpu: float = 0.0,
        step: bool = False,
        busy: bool = True,
    ) -> str:
        self.pulses += pulse
        self.step += step
        self.cpu += cpu
        return self.watch.check(self.pulses, Pulse(doing, self.cpu), self.step, busy=busy)

    def until_stuck(self, **how: object) -> float:
        for number in range(1, 200):
            if self.tick(**how):  # type: ignore[arg-type]
                return number * LIMITS.tick
        return 1e9


@pytest.mark.parametrize(
    ("what", "how", "seconds"),
    [
        ("stopped", {"pulse": False}, 3.0),
        ("stopped while idle", {"pulse": False, "busy": False, "doing": ""}, 3.0),
        ("a kernel that hangs; the host spins", {"doing": "device", "cpu": 0.5}, 8.0),
        ("a lock that nobody gives back", {}, 8.0),
        ("a loop without end", {"cpu": 0.5}, 30.0),
        ("a disk that does not answer, between steps", {"doing": ""}, 30.0),
        ("idle", {"busy": False, "doing": ""}, 1e9),
        ("requests that wait for an adapter from a slow store", {"doing": "input"}, 1e9),
        ("steps", {"step": True}, 1e9),
    ],
)
def test_how_long_an_engine_may_do_nothing(what: str, how: dict, seconds: float) -> None:
    """Bug: a stuck engine that holds its streams for half a minute (10 s are allowed), or one that
    is taken for stuck although it computes."""
    engine = Engine()
    for _ in range(4):
        assert not engine.tick(step=True)
    assert engine.until_stuck(**how) == pytest.approx(seconds, abs=LIMITS.tick)


def test_a_long_step_of_the_host_is_not_a_hang_and_counts_from_its_own_begin() -> None:
    """Bug: the prompt of a large model on a CPU, or a kernel that compiles, kills its replica, then
    the next one, and is then given up; or two such steps add up."""
    engine = Engine()
    for _ in range(5):
        for _ in range(50):  # 25 s
            assert not engine.tick(cpu=0.4)
        assert not engine.tick(step=True)
    for _ in range(15):
        assert not engine.tick(doing="device")
    assert not engine.tick(doing="device", step=True)
    for _ in range(15):
        assert not engine.tick(doing="device")


def test_what_the_replica_missed_itself_is_not_held_against_the_engine() -> None:
    """Bug: the replica's own process is stopped for a minute, or starved, and then kills a healthy
    engine: seconds passed, but not one look."""
    engine = Engine()
    assert not engine.tick(step=True)
    assert not engine.tick(pulse=False)  # an hour later; the pulses are still in the socket
    assert not engine.tick(step=True)
