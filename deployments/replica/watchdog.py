"""Watchdog: detects that the engine process is stuck.

The watchdog counts the replica process's own ticks instead of reading a clock, so that a pause of
the replica process does not count as a pause of the engine. An engine sends keep-alive messages
(`Pulse`), also during a step. The three ways to be stuck, in the order of their detection:

  no keep-alive          the process is stopped, or its machine swaps
  a step in which the    a kernel or a collective hangs on the device, or a lock on the host
  host computes nothing
  a step without end     the host computes: a large step on a CPU, a kernel being compiled
"""

from dataclasses import dataclass

from engine.messages import Pulse

# CPU seconds per tick from which on the host counts as computing; the keep-alive thread alone uses
# fewer.
_COMPUTES = 0.01


@dataclass(frozen=True, slots=True)
class StallLimits:
    """The times after which an engine counts as stuck, in seconds.

    step: longest step.
    tick: time between two checks, and between two keep-alive messages of an engine.
    silent: longest time without a keep-alive message.
    hung: longest time within a step in which the host computes nothing.
    """

    step: float = 30.0
    tick: float = 0.5
    silent: float = 3.0
    hung: float = 8.0


class Watchdog:
    """The checker of an engine's keep-alive messages. `check` must be called every `limits.tick`
    seconds."""

    def __init__(self, limits: StallLimits) -> None:
        self._limits = limits
        self._pulses = self._step = -1
        self._cpu_seconds = 0.0
        self._silent = self._hung = self._still = 0  # durations in ticks

    def check(self, pulses: int, pulse: Pulse, step: int, *, busy: bool) -> str:
        """Return the reason why the engine counts as stuck; "" if it does not.

        pulses: number of keep-alive messages so far.
        pulse: the last keep-alive message.
        step: number of the last step that ended.
        busy: whether the engine has work.
        """
        limits = self._limits
        heard = pulses != self._pulses
        computed = pulse.cpu_seconds - self._cpu_seconds
        # Requests that wait for their adapters count as work, although the engine cannot run them
        # yet, so steps do not have to end.
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
