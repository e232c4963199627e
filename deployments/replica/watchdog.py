"""Watchdog: is the engine process stuck? Pure; no clock: it counts the replica's own ticks, so that
a replica that could not run does not take its own pause for the engine's.

Three kinds of stuck, from the quickest noticed to the slowest:

    no sign of life        the process is stopped, or its machine is out of memory and swaps
    a step in which the    a kernel or a collective hangs on the device, or a lock on the host
      host computes nothing
    a step without end     the host computes: a large step on a CPU, a kernel being compiled
"""

from dataclasses import dataclass

from engine.messages import Pulse

_COMPUTES = 0.01  # seconds of CPU in a tick that count as work; the pulse itself takes less


@dataclass(frozen=True, slots=True)
class StallLimits:
    """The limits of a step, in seconds.

    step: in any step.
    tick: between two checks; an engine gives a sign of life as often.
    silent: without a sign of life.
    hung: in a step in which the host computes nothing.
    """

    step: float = 30.0
    tick: float = 0.5
    silent: float = 3.0
    hung: float = 8.0


class Watchdog:
    """A check of the engine's signs of life. Call `check` every `limits.tick` seconds."""

    def __init__(self, limits: StallLimits) -> None:
        self._limits = limits
        self._pulses = self._step = -1
        self._cpu_seconds = 0.0
        self._silent = self._hung = self._still = 0  # ticks

    def check(self, pulses: int, pulse: Pulse, step: int, *, busy: bool) -> str:
        """Return what is wrong, "" if nothing is.

        pulses: signs of life so far.
        pulse: the last of them.
        step: the last step that ended.
        busy: whether the engine has work.
        """
        limits = self._limits
        heard = pulses != self._pulses
        computed = pulse.cpu_seconds - self._cpu_seconds
        # Requests whose adapters are on their way are work, but none that the engine could do.
        moved = step != self._step or not busy or pulse.doing == "input"
        self._pulses, self._step, self._cpu_seconds = pulses, step, pulse.cpu_seconds
        self._silent = 0 if heard else self._silent + 1
        self._still = 0 if moved else self._still + 1
        waits = pulse.doing == "device" or (pulse.doing == "step" and computed < _COMPUTES)
        if moved or (heard and not waits):
            self._hung = 0
        else:
            self._hung += 1
        for ticks, seconds, what in (
            (self._silent, limits.silent, "no sign of life from the engine process for"),
            (self._hung, min(limits.hung, limits.step), "a step in which nothing moves for"),
            (self._still, limits.step, "the engine has work and has ended no step for"),
        ):
            if ticks * limits.tick >= seconds:
                return f"{what} {ticks * limits.tick:.3g} s"
        return ""
