"""EngineClient: sends messages to one engine process, and passes its frames to a callback.

The client keeps no state of requests: its user maps ids to requests.
"""

import asyncio
import contextlib
import itertools
import logging
import os
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import zmq

from engine.config.engine_config import EngineConfig
from engine.errors import (
    AdapterError,
    ConfigError,
    EngineDead,
    InvalidRequest,
    MantaError,
    UpdateFailed,
)
from engine.messages import (
    CANNOT_SLEEP,
    Abort,
    AdapterAnswer,
    AdapterInfo,
    AddAdapter,
    Answer,
    Control,
    EngineRequest,
    EngineStats,
    Failed,
    FromEngine,
    KVSource,
    LogLine,
    Progress,
    Pulse,
    Ready,
    RemoveAdapter,
    StepFrame,
    TransferWeights,
    UpdateWeights,
)
from engine.parallel.connections import RemoteRanks
from engine.process.supervisor import EngineProcess

logger = logging.getLogger("manta.engine")

START_SECONDS = 600.0  # default timeout of a start, enough for a large checkpoint on a slow disk
STOP_SECONDS = 5.0
# seconds to wait for the last messages of an ended process
LAST_FRAMES_SECONDS = 0.02
# maximum number of frames handled before other callbacks of the event loop run
MAX_FRAMES_A_TURN = 64

OnFrame = Callable[[StepFrame], None]
OnDeath = Callable[[MantaError], None]
OnProgress = Callable[[str, float], None]


class EngineClient:
    """The parent's connection to one engine process.

    `start`, callbacks and `close` run on one event loop; `submit`, `abort` and `control` on any
    thread.

    on_frame: called with every StepFrame, in order.
    on_death: called once with the error if the engine ended without being closed. No frame follows,
        and every open request is lost.
    remote: the engine's ranks on other nodes, if there are any.
    stats: the state in the last frame.
    """

    def __init__(
        self,
        on_frame: OnFrame,
        on_death: OnDeath | None = None,
        remote: RemoteRanks | None = None,
    ) -> None:
        self._remote = remote
        self._on_frame = on_frame
        self._on_death = on_death
        self._on_progress: OnProgress | None = None
        self._decoder = msgspec.msgpack.Decoder(FromEngine)
        self._engine: EngineProcess | None = None
        self._failed: Failed | None = None
        self._error: MantaError | None = None  # why the engine cannot be used any more
        self._tickets = itertools.count(1)
        self._asked: dict[int, asyncio.Future[AdapterInfo]] = {}  # ticket -> waiting call
        # ticket -> waiting call, for messages with an Answer
        self._ordered: dict[int, asyncio.Future[str]] = {}
        self.ready: Ready | None = None
        self.stats = EngineStats()
        self.pulses = 0  # number of heartbeats received
        self.pulse = Pulse()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._fd = -1
        self._started: asyncio.Future[Ready] | None = None

    async def start(
        self,
        config: EngineConfig,
        *,
        timeout: float = START_SECONDS,
        progress: OnProgress | None = None,
    ) -> Ready:
        """Spawn the process, wait until it can serve, and return its Ready message.

        timeout: seconds that the start may take.
        progress: called with (phase, fraction) during the start.
        Raises ConfigError for an invalid configuration, EngineDead if the process dies or takes too
        long.
        """
        assert self._engine is None, "a client starts once"
        loop = self._loop = asyncio.get_running_loop()
        self._on_progress = progress
        self._started = loop.create_future()
        self._engine = EngineProcess(config, self._exited_elsewhere, self._remote)
        self._fd = int(self._engine.frames.FD)
        loop.add_reader(self._fd, self._readable)
        self._readable()  # called once first, as the descriptor only signals changes
        try:
            async with asyncio.timeout(timeout):
                return await asyncio.shield(self._started)
        except TimeoutError:
            await self.close()
            raise EngineDead(
                f"the engine was not ready after {timeout:.0f} s", code="engine_start_timeout"
            ) from None
        except BaseException:
            await self.close()
            raise

    @property
    def alive(self) -> bool:
        return self.ready is not None and self._error is None

    @property
    def pid(self) -> int:
        """The process id of the engine process; valid after `start`."""
        assert self._engine is not None
        return self._engine.pid

    def submit(self, request: EngineRequest) -> None:
        """Send one choice of a request; its id must not be in use. Never blocks. Thread-safe.

        Raises EngineDead.
        """
        self._live().send(request)

    def abort(self, ids: list[int]) -> None:
        """Abort requests by their ids; each open request ends with an "abort" delta.

        Unknown ids are ignored. Raises EngineDead.
        """
        self._live().send(Abort(ids))

    def control(self, what: str) -> int:
        """Send a `Control` message: "drain", "stats", "reset_prefix_cache", "sleep", "wake" or
        "resume".

        Returns the message's ticket. Raises EngineDead.
        """
        ticket = next(self._tickets)
        self._live().send(Control(what, ticket))
        return ticket

    async def pause(self, mode: str) -> None:
        """Pause the engine; return once no step runs. Requests that arrive during the pause wait.

        mode: see `engine.scheduling.orders.updates.Pause`.
        Raises InvalidRequest, EngineDead.
        """
        await self._order(lambda ticket: Control("pause", ticket, mode))

    async def sleep(self, level: int = 1, tags: Sequence[str] = ()) -> None:
        """Free memory once no request runs; return when the memory is freed.

        A new request wakes the engine.

        level, tags: see `Control`.
        Raises InvalidRequest, ConfigError, EngineDead.
        """
        await self._order(lambda ticket: Control("sleep", ticket, level=level, tags=list(tags)))

    async def wake(self, tags: Sequence[str] = ()) -> None:
        """Allocate freed parts of the memory again; return when they are allocated.

        tags: the parts to allocate, as in `Control`; () = all.
        Raises InvalidRequest, EngineDead.
        """
        await self._order(lambda ticket: Control("wake", ticket, tags=list(tags)))

    async def serve_kv(self, host: str) -> tuple[KVSource, float]:
        """Make the engine listen for other replicas that pull KV blocks.

        Returns (address and secret for pullers, bytes of a token's KV).

        Raises UpdateFailed where the engine has no kv_moves, and EngineDead.

        host: the address to listen on.
        """
        message = await self._order(lambda ticket: Control("serve_kv", ticket, host))
        port, secret, token_bytes = message.split()
        return KVSource(host, int(port), secret), float(token_bytes)

    async def update_weights(
        self,
        folder: str | Path,
        *,
        version: str = "",
        recompute: bool = False,
        check_only: bool = False,
    ) -> None:
        """Replace the weights; parameters: see `UpdateWeights`.

        Raises UpdateFailed, after which the engine keeps serving with the old weights, and
        EngineDead.
        """
        path = os.path.abspath(folder)
        await self._order(
            lambda ticket: UpdateWeights(ticket, path, version, recompute, check_only)
        )

    async def transfer_weights(self, what: str, info: dict[str, Any] | None = None) -> str:
        """Make the engine receive weights from a trainer; parameters: see `TransferWeights`.

        Returns the folder of a complete update, else "". Raises UpdateFailed, EngineDead.
        """
        return await self._order(lambda ticket: TransferWeights(ticket, what, info or {}))

    async def _order(
        self, message: Callable[[int], Control | UpdateWeights | TransferWeights]
    ) -> str:
        """Send a message that has an Answer; return the answer's text.

        message: returns the message for a given ticket.
        """
        engine, ticket = self._live(), next(self._tickets)
        future = self._ordered[ticket] = asyncio.get_running_loop().create_future()
        try:
            engine.send(message(ticket))
            return await future
        finally:
            del self._ordered[ticket]

    async def add_adapter(
        self,
        name: str,
        folder: str | Path,
        *,
        revision: str = "",
        load: bool = True,
        digest: str = "",
    ) -> AdapterInfo:
        """Register a PEFT adapter, or replace the one of that name; return its description.

        Earlier requests finish with the old weights. Parameters: see `AddAdapter`.
        Raises AdapterError, after which nothing has changed, and EngineDead.
        """
        path = str(folder) if "://" in str(folder) else os.path.abspath(folder)
        return await self._ask(
            lambda ticket: AddAdapter(ticket, name, path, revision, load, digest)
        )

    async def remove_adapter(self, name: str, revision: str = "") -> AdapterInfo:
        """Remove an adapter and return its description; accepted requests finish with it.

        Raises AdapterError, EngineDead.
        """
        return await self._ask(lambda ticket: RemoveAdapter(ticket, name, revision))

    async def close(self, timeout: float = STOP_SECONDS) -> None:
        """End the process; no frame follows, so that open requests stay unfinished. Idempotent."""
        self._stop_reading()
        engine, self._engine = self._engine, None
        self._error = self._error or EngineDead("the engine is closed")
        self._fail_asked(self._error)
        if self._started is not None:
            self._started.cancel()
        if engine is not None:
            # a starting engine reads no messages
            patience = timeout if self.ready is not None else 0.0
            await asyncio.get_running_loop().run_in_executor(None, engine.close, patience)

    async def _ask(self, message: Callable[[int], AddAdapter | RemoveAdapter]) -> AdapterInfo:
        engine, ticket = self._live(), next(self._tickets)
        future = self._asked[ticket] = asyncio.get_running_loop().create_future()
        try:
            engine.send(message(ticket))
            return await future
        finally:
            del self._asked[ticket]

    def _answer(self, answer: AdapterAnswer) -> None:
        future = self._asked.get(answer.ticket)
        if future is None or future.done():
            return  # the caller no longer waits
        if answer.info is not None:
            future.set_result(answer.info)
        else:
            future.set_exception(AdapterError(answer.message, code=answer.code))

    def _carried_out(self, answer: Answer) -> None:
        future = self._ordered.get(answer.ticket)
        if future is None or future.done():
            return  # the caller no longer waits
        if not answer.code:
            future.set_result(answer.message)
        elif answer.code == InvalidRequest.code:
            future.set_exception(InvalidRequest(answer.message, param=answer.param))
        elif answer.code == CANNOT_SLEEP:
            future.set_exception(ConfigError(answer.message, param=answer.param))
        else:
            param = answer.param or None
            future.set_exception(UpdateFailed(answer.message, param=param, code=answer.code))

    def _fail_asked(self, error: MantaError) -> None:
        futures: list[asyncio.Future[Any]] = [*self._asked.values(), *self._ordered.values()]
        for future in futures:
            if not future.done():
                future.set_exception(error)

    def _live(self) -> EngineProcess:
        if self._error is not None:
            raise self._error
        if self._engine is None:
            raise EngineDead("the engine has not been started")
        return self._engine

    def _handle_message(self, raw: bytes) -> None:
        message = self._decoder.decode(raw)
        if type(message) is StepFrame:
            self.stats = message.stats
            self._on_frame(message)
        elif type(message) is LogLine:
            extra = {"request_id": message.request_id} if message.request_id else None
            logger.log(message.level, "%s", message.message, extra=extra)
        elif type(message) is Pulse:
            self.pulses += 1
            self.pulse = message
        elif isinstance(message, AdapterAnswer):
            self._answer(message)
        elif isinstance(message, Answer):
            self._carried_out(message)
        elif isinstance(message, Ready):
            assert self._engine is not None
            self._engine.hide()
            self.ready = message
        elif isinstance(message, Failed):
            self._failed = message
        elif isinstance(message, Progress) and self._on_progress is not None:
            self._on_progress(message.phase, message.fraction)

    def _death(self, status: int) -> MantaError:
        """Return the error that describes why the engine ended."""
        failed = self._failed
        if failed is not None:
            if failed.param is not None or failed.code == ConfigError.code:
                return ConfigError(failed.message, param=failed.param, code=failed.code)
            return EngineDead(failed.message, code=failed.code)
        how = f"was killed by signal {-status}" if status < 0 else f"exited with status {status}"
        killed = -status in (signal.SIGKILL, signal.SIGTERM)
        code = "engine_killed" if killed else EngineDead.code
        return EngineDead(f"the engine process {how}; its log has the reason", code=code)

    def _readable(self) -> None:
        if self._engine is None or self._fd < 0:
            return
        receive = self._engine.frames.recv
        assert self._loop is not None and self._started is not None
        try:
            for _ in range(MAX_FRAMES_A_TURN):
                self._handle_message(receive(zmq.NOBLOCK))
        except zmq.Again:
            if self.ready is not None and not self._started.done():
                self._started.set_result(self.ready)
            return
        except BaseException:
            # even if a callback raises, the remaining frames are read
            self._loop.call_soon(self._readable)
            raise
        self._loop.call_soon(self._readable)

    def _exited_elsewhere(self, status: int) -> None:
        """Report the process's exit to the event loop, from the thread that waits for it."""
        assert self._loop is not None
        with contextlib.suppress(RuntimeError):  # the loop is closed, so nothing waits for this
            self._loop.call_soon_threadsafe(self._exited, status)

    def _exited(self, status: int) -> None:
        if self._fd >= 0:
            assert self._loop is not None
            self._loop.call_later(LAST_FRAMES_SECONDS, self._dead, status)

    def _dead(self, status: int) -> None:
        if self._fd < 0:
            return  # closed meanwhile
        assert self._loop is not None and self._engine is not None
        if self._engine.frames.poll(0):  # the process's last messages are read first
            self._loop.call_soon(self._dead, status)
            self._readable()
            return
        self._stop_reading()
        error = self._error = self._death(status)
        self._fail_asked(error)
        assert self._started is not None
        if not self._started.done():
            self._started.set_exception(error)
        elif self._on_death is not None:
            self._on_death(error)

    def _stop_reading(self) -> None:
        if self._fd >= 0:
            assert self._loop is not None
            self._loop.remove_reader(self._fd)
            self._fd = -1
