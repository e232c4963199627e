"""The engine process: `python -m engine.process.main`, started by its owner `EngineProcess`.

The process reads its configuration as one line of JSON from stdin, connects to two sockets that the
parent has bound, and runs the step loop. It never outlives its parent: stdin closes when the parent
ends, and on Linux the kernel kills this process when the parent's spawning thread ends.
"""

import contextlib
import gc
import logging
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec
import zmq

from engine.config.engine_config import EngineConfig
from engine.errors import MantaError
from engine.messages import (
    Abort,
    AdapterAnswer,
    AddAdapter,
    Answer,
    Control,
    Delta,
    EngineRequest,
    EngineStats,
    Failed,
    FromEngine,
    LogLine,
    Progress,
    Pulse,
    Ready,
    RemoveAdapter,
    StepFrame,
    ToEngine,
    TransferWeights,
    UpdateWeights,
)
from engine.parallel.connections import RemoteRanks
from engine.parallel.nodes import Places, bind, place
from engine.parallel.ranks import Ranks
from engine.process.device_ahead import prepare_device
from engine.process.first_start import FirstStart
from engine.process.lifeline import read_start, set_threads, tie_to_parent

logger = logging.getLogger("manta.engine")

LAST_FRAME_MS = 1000  # maximum milliseconds to wait until the parent has read the last frame
# seconds to wait for the step loop, which may hang in an all-reduce, after a rank's exit
RANK_EXIT_SECONDS = 0.2
PULSE_SECONDS = 0.5
# Idle milliseconds before invariants are checked. The check takes 11 ms for a large device's
# blocks, and a client that sends one request after another would wait for it each time.
QUIET_MS = 500
# Maximum wait without work, after which the core drops adapters that were not used for a day.
IDLE_MS = 3_600_000


class EngineStart(msgspec.Struct, forbid_unknown_fields=True):
    """The message on stdin that starts an engine process.

    core: a key of CORES.
    directory: the parent's working directory, to which relative paths refer.
    inbox, outbox: zmq addresses to pull from and push to.
    parent: the parent's process id.
    spawned: monotonic seconds just before the process was created.
    remote: ranks on other nodes, if there are any.
    """

    core: str
    config: EngineConfig
    directory: str
    inbox: str
    outbox: str
    parent: int
    spawned: float
    remote: RemoteRanks | None = None


class Core(Protocol):
    """The interface of an engine core that the loop of its process calls.

    Errors of one request are reported in its delta, not raised.
    """

    on_device: bool  # whether the step is waiting for the device

    def add_request(self, request: EngineRequest) -> None: ...
    def abort(self, ids: list[int]) -> None: ...
    def step(self) -> list[Delta]: ...
    def has_work(self) -> bool: ...
    def launch_delay(self) -> float: ...
    def stats(self) -> EngineStats: ...
    def take_evicted(self) -> tuple[bytes, bytes]: ...
    def drain(self) -> None: ...
    def reset_prefix_cache(self) -> None: ...
    def sleep(self, level: int, parts: Sequence[str], ticket: int) -> None: ...
    def wake(self, parts: Sequence[str], ticket: int) -> None: ...
    def check_integrity(self) -> None: ...
    def pause(self, mode: str, ticket: int) -> None: ...
    def resume(self) -> None: ...
    def serve_kv(self, host: str, ticket: int) -> None: ...
    def update_weights(self, message: UpdateWeights) -> None: ...
    def transfer_weights(self, message: TransferWeights) -> None: ...
    def close(self) -> None: ...
    def add_adapter(self, message: AddAdapter) -> None: ...
    def remove_adapter(self, message: RemoveAdapter) -> None: ...

    def answers(self) -> list[AdapterAnswer | Answer]:
        """Return the answers to messages that were handled, or have failed, since the last call."""
        ...

    def on_loaded(self, wake: Callable[[], None]) -> None:
        """Set the function to call, from any thread, when `has_work` or `answers` may have changed.

        This happens for example when an adapter is loaded.
        """
        ...


Report = Callable[[str, float], None]  # called with (phase, completed fraction)
Fail = Callable[[MantaError], None]  # ends this process with an error; called from any thread


def _model(
    start: EngineStart, report: Report, fail: Fail, ends: contextlib.ExitStack
) -> tuple[Core, Ready]:
    began, config = time.monotonic(), start.config
    report("imports", 0.0)
    # Compilers and other ranks are started first, so that all processes import at the same time.
    nodes = place(config, Places())
    first, ranks = FirstStart(config), None
    if config.num_ranks > 1:
        ranks = Ranks(config, fail, nodes, start.remote)
        ends.callback(ranks.close)
    if nodes:  # bound only after the other processes were started, as they inherit the affinity
        bind(nodes[0])
    prepare_device(config, 0)
    # imported here, as torch takes seconds that a fake core must not spend
    from engine.factory import build
    from kernels.launch.compiling import report_late

    # Collections during the start need not scan the 300,000 objects that imports have created.
    gc.freeze()
    imported = time.monotonic()
    with first:
        core, ready = build(config, report, first.compilers, ranks)
    report_late()
    ready.start_seconds = {"imports": round(imported - began, 3), **ready.start_seconds}
    return core, ready


def _fake(
    start: EngineStart, report: Report, fail: Fail, ends: contextlib.ExitStack
) -> tuple[Core, Ready]:
    from engine.process.fake import build

    report("start", 0.0)
    return build(start.config)


CORES: dict[
    str, Callable[[EngineStart, Report, Fail, contextlib.ExitStack], tuple[Core, Ready]]
] = {
    "model": _model,
    "fake": _fake,
}


class EngineLoop:
    """The engine process's loop: it handles messages, runs a step, and sends one frame.

    Without work the loop waits for messages, for at most an hour.
    """

    def __init__(
        self, core: Core, inbox: "zmq.Socket[bytes]", send: Callable[[FromEngine], None]
    ) -> None:
        self.stepping = False
        self._waiting = False  # whether the loop waits for input
        self._core = core
        self._inbox = inbox
        self._send = send
        self._decoder = msgspec.msgpack.Decoder(ToEngine)
        self._refused: list[Delta] = []
        self._stopped = False
        self._ticket = 0  # ticket of the last handled message
        self._taken: list[int] = []  # requests that no frame has counted yet
        self._woken, self._waker = os.pipe()
        os.set_blocking(self._woken, False)
        os.set_blocking(self._waker, False)
        self._poller = zmq.Poller()
        self._poller.register(inbox, zmq.POLLIN)
        self._poller.register(self._woken, zmq.POLLIN)
        core.on_loaded(self._wake)

    def _wake(self) -> None:
        """Wake the loop if it waits for input. Thread-safe."""
        # if the pipe is full of earlier calls, the loop wakes anyway
        with contextlib.suppress(BlockingIOError):
            os.write(self._waker, b"x")

    def run(self) -> None:
        """Run the loop until the parent's `Control` message "stop".

        Raises any exception of `Core.step`, after which no valid state is left.
        """
        core = self._core
        checked = False
        while True:
            busy = core.has_work()
            if busy:
                checked = False
            elif not checked and not self._wait_for_input(QUIET_MS):
                core.check_integrity()  # finds leaks while no request should hold anything
                checked = True
            asked = self._take_input(block=not busy)
            while not self._stopped and (delay := core.launch_delay()) >= 0.001:
                self._wait_for_input(int(1000 * delay))
                asked |= self._take_input(block=False)
            if self._stopped:
                return
            stepped = core.has_work()
            self.stepping = stepped
            deltas = core.step() if stepped else []
            self.stepping = False
            if self._refused:
                deltas = self._refused + deltas
                self._refused = []
            answers = core.answers()
            if stepped or asked or deltas:
                taken, self._taken = self._taken, []
                gone, lowered = core.take_evicted()
                frame = StepFrame(core.stats(), deltas, b"", self._ticket, taken, gone, lowered)
                self._send(frame)
            for answer in answers:  # sent after the frame that shows the message's effect
                self._send(answer)

    def pulse(self) -> Pulse:
        """Return a heartbeat with the loop's current activity; called from another thread."""
        doing = "input" if self._waiting else ""
        if self.stepping:
            doing = "device" if self._core.on_device else "step"
        return Pulse(doing, time.process_time())

    def _wait_for_input(self, milliseconds: int | None = None) -> bool:
        self._waiting = True
        events = self._poller.poll(milliseconds)
        self._waiting = False
        return bool(events)

    def _take_input(self, *, block: bool) -> bool:
        """Handle all messages that have arrived; return whether one of them requests a frame.

        block: whether to wait for a message first.
        """
        asked = False
        if block:
            self._wait_for_input(IDLE_MS)
            with contextlib.suppress(BlockingIOError):
                os.read(self._woken, 4096)
        while True:
            try:
                raw = self._inbox.recv(zmq.NOBLOCK, copy=False).buffer
            except zmq.Again:
                return asked
            try:
                message = self._decoder.decode(raw)
            except msgspec.ValidationError as error:
                self._refuse(raw, str(error))
                continue
            if isinstance(message, EngineRequest):
                logger.debug(
                    "queued: %d tokens",
                    len(message.token_ids),
                    extra={"request_id": message.request_id},
                )
                self._core.add_request(message)
                self._taken.append(message.id)
            elif isinstance(message, Abort):
                self._core.abort(message.ids)
            elif isinstance(message, AddAdapter):
                self._core.add_adapter(message)
            elif isinstance(message, RemoveAdapter):
                self._core.remove_adapter(message)
            elif isinstance(message, UpdateWeights):
                self._core.update_weights(message)
            elif isinstance(message, TransferWeights):
                self._core.transfer_weights(message)
            else:
                asked = True
                self._control(message)

    def _control(self, message: Control) -> None:
        self._ticket = max(self._ticket, message.ticket)
        if message.what == "drain":
            self._core.drain()
        elif message.what == "reset_prefix_cache":
            self._core.reset_prefix_cache()
        elif message.what == "sleep":
            self._core.sleep(message.level, message.tags, message.ticket)
        elif message.what == "wake":
            self._core.wake(message.tags, message.ticket)
        elif message.what == "pause":
            self._core.pause(message.argument, message.ticket)
        elif message.what == "resume":
            self._core.resume()
        elif message.what == "serve_kv":
            self._core.serve_kv(message.argument, message.ticket)
        elif message.what == "stop":
            self._stopped = True

    def _refuse(self, raw: memoryview, reason: str) -> None:
        """Answer one malformed request with an error, without effect on others."""
        fields = msgspec.msgpack.decode(raw)
        if isinstance(fields, list) and len(fields) > 1 and isinstance(fields[1], int):
            self._refused.append(Delta(fields[1], [], "error", error=f"invalid_value: {reason}"))
        else:
            print(f"engine: dropped a malformed message: {reason}", file=sys.stderr, flush=True)


class LogToParent(logging.Handler):
    """A logging handler that sends this process's log lines to the parent."""

    def __init__(self, send: Callable[[FromEngine], None]) -> None:
        super().__init__()
        self._send = send

    def emit(self, record: logging.LogRecord) -> None:
        name = getattr(record, "request_id", "")
        self._send(LogLine(record.levelno, self.format(record), name))


def _give_pulse(loop: EngineLoop, send: Callable[[FromEngine], None]) -> None:
    """Send heartbeats on this thread, also during long steps; a stopped process sends none."""
    while True:
        send(loop.pulse())
        time.sleep(PULSE_SECONDS)


def _failure(error: Exception, doing: str) -> Failed:
    if isinstance(error, MantaError):
        return Failed(error.code, error.message, error.param)
    traceback.print_exc()
    return Failed("engine_error", f"{doing}: {type(error).__name__}: {error}")


def main() -> int:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # ignored, as the parent decides when to stop
    line = read_start()
    if not line:
        return 1
    start = msgspec.json.decode(line, type=EngineStart)
    tie_to_parent(start.parent)
    os.chdir(start.directory)
    set_threads(start.config.num_threads)
    # The maximum time for which another Python thread delays the step loop. The default of 5 ms is
    # as long as a step.
    sys.setswitchinterval(5e-4)
    began = time.monotonic()
    gc.disable()  # disabled until `gc.freeze` below, as objects of the start are permanent

    context = zmq.Context()
    inbox = context.socket(zmq.PULL)
    outbox = context.socket(zmq.PUSH)
    for socket, address in ((inbox, start.inbox), (outbox, start.outbox)):
        # unlimited, as a limit could stall the step loop; the parent reads all frames or has ended
        socket.set_hwm(0)
        socket.connect(address)
    encoder = msgspec.msgpack.Encoder()

    outbox_lock = threading.Lock()

    def send(message: FromEngine) -> None:
        with outbox_lock:
            if not outbox.closed:
                outbox.send(encoder.encode(message))

    ours = logging.getLogger("manta")
    ours.addHandler(LogToParent(send))
    ours.propagate = False
    ours.setLevel(start.config.log_level.upper())

    shown: list[tuple[str, int]] = []  # the last (phase, percent) sent

    def report(phase: str, fraction: float) -> None:
        now = (phase, int(fraction * 100))
        if now not in shown:
            shown[:] = [now]
            send(Progress(phase, fraction))

    def fail(error: MantaError) -> None:
        """End the process after a rank has exited, as the running step would never end."""
        send(_failure(error, "a rank has ended"))
        time.sleep(RANK_EXIT_SECONDS)
        os._exit(1)

    code, ends = 1, contextlib.ExitStack()
    try:
        core, ready = CORES[start.core](start, report, fail, ends)
        ready.start_seconds = {"process": round(began - start.spawned, 3), **ready.start_seconds}
        gc.collect()
        gc.freeze()  # garbage collection need not scan objects that live as long as the process
        gc.enable()
        ready.start_seconds["total"] = round(time.monotonic() - start.spawned, 3)
        send(ready)
    except Exception as error:
        send(_failure(error, "the engine could not start"))
    else:
        loop = EngineLoop(core, inbox, send)
        threading.Thread(target=_give_pulse, args=(loop, send), name="pulse", daemon=True).start()
        try:
            loop.run()
            code = 0
        except Exception as error:
            send(_failure(error, "a step failed"))
        core.close()
    ends.close()
    inbox.close(0)
    with outbox_lock:
        outbox.close(LAST_FRAME_MS)
    context.term()
    return code


if __name__ == "__main__":
    # The interpreter is not shut down, as destructors of device libraries can hang and are not
    # needed.
    status = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
