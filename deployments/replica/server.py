"""ReplicaServer: passes requests and tokens between an engine and routers. This module does not
need Ray."""

import asyncio
import itertools
import logging
import secrets
import time
from typing import Any

import msgspec

from deployments.encoder.rows import EncoderPool, ImageRows
from deployments.replica.adapters import ReplicaAdapters, SubmittedRequest
from deployments.replica.engine import MakeEngine
from deployments.replica.sleep import ReplicaSleep, SleepSettings
from deployments.replica.stream_memory import StreamMemory
from deployments.replica.suspect_queue import SuspectQueue
from deployments.replica.watchdog import StallLimits, Watchdog
from deployments.routing.step_cost import StepCost, StepCostModel
from deployments.transport.channel import (
    AdapterVersion,
    ChannelLimits,
    FromRouter,
    Recall,
    Recalled,
    ReplicaEnd,
)
from deployments.transport.unauthenticated import UnauthenticatedConnections
from engine.config.engine_config import EngineConfig
from engine.errors import EngineDead, MantaError, Overloaded
from engine.messages import (
    Abort,
    AddAdapter,
    Answer,
    Control,
    Delta,
    EngineRequest,
    EngineStats,
    Failed,
    KVSource,
    Ready,
    StepFrame,
    TransferWeights,
    UpdateWeights,
)
from engine.process.client import EngineClient
from engine.scheduling.orders.sleeping import CHECK

logger = logging.getLogger("manta.replica")

_ROUTER_BITS = 40  # the engine's request id is (connection's index << 40) | the router's request id
_ROUTER_MASK = (1 << _ROUTER_BITS) - 1
_IDLE_NEWS = 0.05  # seconds between stats for a router without tokens in the steps
_PULLS = (1.0, 10.0)  # a drain ends after these seconds: without a pulled byte, in all
# Number of routers beyond which _IDLE_NEWS grows in proportion: with many routers there are many
# replicas, whose stats would otherwise use up a router's core.
_FEW_ROUTERS = 16
FAREWELL = 0.2  # seconds for sending the last frames before connections are closed
_MAX_PREFIX_BYTES = 4096  # maximum bytes of prefix hashes in a frame: those of eight long prompts


class ReplicaServer:
    """The server of one replica, between the routers' connections and the engine.

    The server splits each step's deltas by connection, and makes the request ids of all routers
    unique. When a router's connection is lost, the server aborts that router's requests.
    """

    def __init__(
        self,
        limits: ChannelLimits,
        stall: StallLimits,
        make_engine: MakeEngine = EngineClient,
        sleep: SleepSettings | None = None,
        encoders: EncoderPool | None = None,
    ) -> None:
        """Set up the server; `start` starts its engine.

        sleep: settings of an engine that sleeps; None: the engine never sleeps.
        encoders: the pool that encodes images for the engine; None: the engine encodes them.
        """
        self.secret = secrets.token_bytes(32)
        self.stats = EngineStats()
        self.steps = StepCostModel(StepCost.mean(()))  # measured cost of this engine's steps
        self.failed: Failed | None = None
        self.port = 0
        # (source from which other replicas pull KV blocks, bytes per token); None: blocks cannot be
        # pulled
        self.kv: tuple[KVSource, float] | None = None
        self._limits = limits
        self._engine = make_engine(self.on_frame, self.on_death)
        self._adapters = ReplicaAdapters(self._engine, self._start, self._refuse)
        self._suspects = SuspectQueue(self._begin, asyncio.get_running_loop().call_later)
        self._rows = None if encoders is None else ImageRows(encoders, self._begin)
        self._sleep: ReplicaSleep | None = None
        if sleep is not None:
            self._sleep = ReplicaSleep(
                sleep,
                order=self._engine.control,
                start=self._suspects.submit,
                refuse=self._refuse_held,
                busy=lambda: self.in_flight,
            )
        self._memory = StreamMemory()
        self._server: asyncio.Server | None = None
        self._unauthenticated = UnauthenticatedConnections()
        self._routers: dict[int, ReplicaEnd] = {}
        self._orders: set[asyncio.Task[None]] = set()
        self._indices = itertools.count(1)
        self._draining = False
        self._leaving = False
        self._stall = stall
        self._watchdog = Watchdog(stall)
        self._watchdog_timer: asyncio.TimerHandle | None = None
        self._loop = asyncio.get_running_loop()

    async def start(self, config: EngineConfig, host: str) -> Ready:
        """Start the engine, then listen on a free port of `host`. Raises the engine's start
        errors."""
        if self._sleep is not None:
            await self._sleep.before_start()
        ready = await self._engine.start(config)
        self._started = host, config, ready
        self.stats = ready.stats or self.stats
        if self._rows is not None:
            self._rows.size = self.stats.image_cache_size
        self._server = await self._loop.create_server(self._accept, host, 0)
        self.port = self._server.sockets[0].getsockname()[1]
        if config.kv_moves:
            self.kv = await self._engine.serve_kv(host)
        self._check_engine()
        if self._sleep is not None:
            self._sleep.begin()
        return ready

    async def stop(self) -> None:
        if self._watchdog_timer is not None:
            self._watchdog_timer.cancel()
        if self._server is not None:
            self._server.close()
        for connection in [*self._unauthenticated, *self._routers.values()]:
            # The engine ends as well, so requests need not be aborted there.
            connection.live.clear()
            connection.close("the replica has stopped")
        self._unauthenticated.close()
        self._adapters.close()
        if self._rows is not None:
            self._rows.close()
        if self._sleep is not None:
            self._sleep.stop()
        await self._engine.close()
        if self._sleep is not None:
            self._sleep.close()

    async def drain(self, seconds: float) -> None:
        """Refuse new requests, wait for running ones to end, and then return unfinished ones to the
        routers.

        seconds: maximum seconds to wait for running requests.
        """
        self.refuse_new()
        deadline = time.monotonic() + seconds
        while self.in_flight and time.monotonic() < deadline and self.failed is None:
            await asyncio.sleep(0.05)
        pulled = self.in_flight > 0 and self.kv is not None
        self.hand_over()
        await asyncio.sleep(FAREWELL)
        if pulled:
            await self._await_pulls()

    async def _await_pulls(self) -> None:
        """Wait while other replicas pull the KV blocks of requests that were returned to the
        routers.

        Returns when no block was sent for a second, and after 10 seconds at the latest (`_PULLS`).
        """
        quiet, longest = _PULLS
        deadline = time.monotonic() + longest
        sent = -1
        while time.monotonic() < deadline and self.failed is None:
            if self.stats.sent_kv_bytes == sent:
                return
            sent = self.stats.sent_kv_bytes
            await asyncio.sleep(quiet)

    def published(self) -> dict[str, Any]:
        """Return those fields of `router.replicas.replica_client.ReplicaEndpoint` that the server
        has: by them routers connect, and other replicas pull KV blocks."""
        host, config, ready = self._started
        metadata = {
            "host": host,
            "port": self.port,
            "secret": self.secret.hex(),
            "max_model_len": ready.max_model_len,
            "vocab_size": ready.vocab_size,
            "eos_token_ids": list(ready.eos_token_ids),
            "step_tokens": ready.step_tokens,
            "image_tokens": ready.image_tokens,
            "adapter_slots": config.max_loras,
            "prefix_caching": config.prefix_caching and ready.prefix_caching,
            "dtype": ready.dtype,
            "logprobs_mode": config.logprobs_mode,
            "tensor_parallel": config.tensor_parallel,
            "pipeline_parallel": config.pipeline_parallel,
        }
        if self.kv is not None:
            source, token_bytes = self.kv
            metadata |= {"kv_port": source.port, "kv_secret": source.secret}
            metadata["kv_token_bytes"] = token_bytes
        return metadata

    def hand_over(self) -> None:
        """Return running and newly arriving requests to the routers, which send them to other
        replicas.

        Routers would also move the requests of a lost connection, but would count a loss against
        each request, and some losses make a request fail.
        """
        self.refuse_new()
        self._leaving = True
        for router in list(self._routers.values()):
            if router.live and self.failed is None:
                ids = sorted(router.live)
                self._abort(self._take_back(router, ids))
                router.live.clear()
                router.send_frame(self.stats, [_given_back(id & _ROUTER_MASK) for id in ids])
        self._suspects.advance()

    def refuse_new(self) -> None:
        """Tell the routers to send no new requests; running requests go on."""
        self._draining = True
        self._announce()

    @property
    def in_flight(self) -> int:
        return sum(len(router.live) for router in self._routers.values())

    @property
    def engine_pid(self) -> int:
        return self._engine.pid

    @property
    def num_routers(self) -> int:
        return len(self._routers)

    def check_health(self) -> None:
        """Raise EngineDead if the engine's process has ended, or is stuck according to the
        watchdog."""
        if self.failed is not None:
            raise EngineDead(self.failed.message, code=self.failed.code)
        if not self._engine.alive:
            raise EngineDead("the engine process is gone")

    def _check_engine(self) -> None:
        """Check the engine with the watchdog every `tick` seconds; report it as dead if it is
        stuck."""
        engine, stats = self._engine, self.stats
        held = 0 if self._sleep is None else self._sleep.held
        busy = bool(stats.running or stats.waiting or self.in_flight > held)
        wrong = self._watchdog.check(engine.pulses, engine.pulse, stats.step, busy=busy)
        if wrong:
            self.on_death(EngineDead(wrong, code="engine_stalled"))
        if self.failed is None:
            self._watchdog_timer = self._loop.call_later(self._stall.tick, self._check_engine)

    # -- from the engine

    def on_frame(self, frame: StepFrame) -> None:
        self._share_out(frame)
        if self._sleep is not None:
            self._sleep.on_frame(frame)
        if self._suspects.suspect is not None:
            self._suspects.advance()

    def _share_out(self, frame: StepFrame) -> None:
        """Send each router the deltas of its own requests, and the engine's stats."""
        stats, now = frame.stats, self._loop.time()
        self._memory.take_deltas(frame.deltas, now)
        self.steps.observe_frame(stats)
        if self._draining:
            stats.draining = True
        stats.routers = len(self._routers)
        if self._rows is not None:
            stats.images_not_received = self._rows.failures
        last, self.stats = self.stats, stats
        # Without this frame a router would see the earlier state until the next heartbeat, because
        # an idle or paused engine sends no further frame.
        idle = not stats.running and not stats.waiting
        for_all = idle or _by_orders(stats) != _by_orders(last)
        routers = self._routers
        for router in routers.values() if frame.gone or frame.lowered else ():
            if len(router.gone) < _MAX_PREFIX_BYTES * 8:
                router.gone += frame.gone
            if len(router.lowered) < _MAX_PREFIX_BYTES * 8:
                router.lowered += frame.lowered
        pause = _IDLE_NEWS * max(1.0, len(routers) / _FEW_ROUTERS)
        for id in frame.taken:
            sender = routers.get(id >> _ROUTER_BITS)
            if sender is not None:
                sender.taken.append(id & _ROUTER_MASK)
        if len(routers) == 1:
            (router,) = routers.values()
            index = router.index
            mine = []
            for delta in frame.deltas:
                id = delta.id
                if id >> _ROUTER_BITS == index:
                    delta.id = id & _ROUTER_MASK
                    mine.append(delta)
                    if delta.finish:
                        router.live.discard(id)
            if mine or for_all or router.since_sent(now) > pause:
                router.send_frame(stats, mine)
            return
        by_router: dict[int, list[Delta]] = {}
        for delta in frame.deltas:
            id = delta.id
            index = id >> _ROUTER_BITS
            owner = routers.get(index)
            if owner is None:
                # The router is disconnected, and its requests are being aborted.
                continue
            delta.id = id & _ROUTER_MASK
            by_router.setdefault(index, []).append(delta)
            if delta.finish:
                owner.live.discard(id)
        for index, router in list(routers.items()):
            deltas = by_router.get(index)
            if deltas or for_all or router.since_sent(now) > pause:
                router.send_frame(stats, deltas or [])

    def on_death(self, error: MantaError) -> None:
        """Handle the engine's failure: notify the routers, which move the requests, and refuse new
        connections."""
        if self.failed is not None:
            return
        logger.error("the engine has failed: %s: %s", error.code, error.message)
        self.failed = Failed(error.code, error.message, error.param)
        if self._server is not None:
            self._server.close()
        # Only requests that the engine had received can be the cause.
        accused = self._suspects.accused()
        doubt = len(accused) > 1
        deaths = accused[0].message.deaths if len(accused) == 1 else []
        for router in list(self._routers.values()):
            router.live.clear()
            ids = [
                submitted.request.id & _ROUTER_MASK
                for submitted in accused
                if submitted.connection is router
            ]
            suspects = ids if accused else None
            router.send(
                msgspec.structs.replace(self.failed, suspects=suspects, deaths=deaths, doubt=doubt)
            )
        self._suspects.advance()

    # -- from the routers

    def _accept(self) -> ReplicaEnd:
        return ReplicaEnd(
            self.secret,
            self._limits,
            on_made=self._unauthenticated.add,
            on_open=self._opened,
            on_message=self._received,
            on_close=self._closed,
            stats=lambda: self.stats,
        )

    def _opened(self, connection: ReplicaEnd) -> None:
        self._unauthenticated.discard(connection)
        connection.index = next(self._indices)
        self._routers[connection.index] = connection
        logger.info("router %s is connected from %s", connection.router, connection.peer)
        connection.send_frame(self.stats, [])

    def _received(self, connection: ReplicaEnd, message: FromRouter) -> None:
        if self.failed is not None:
            # The router has received `failed`, and moves its requests.
            return
        base = connection.index << _ROUTER_BITS
        if isinstance(message, Abort):
            ids = [base | (id & _ROUTER_MASK) for id in message.ids]
            self._abort(self._take_back(connection, ids))
            self._suspects.advance()
            return
        if isinstance(message, AddAdapter | AdapterVersion):
            self._adapters.order(connection, message)
            return
        if isinstance(message, Recall):
            records = self._memory.find(message.streams, self._loop.time())
            connection.send(Recalled(message.ticket, records))
            return
        if isinstance(message, UpdateWeights | TransferWeights | Control):
            if self._rows is not None and not isinstance(message, Control):
                self._rows.stop()
            task = self._loop.create_task(self._carry_out(connection, message))
            self._orders.add(task)
            task.add_done_callback(self._orders.discard)
            return
        request = message.request
        if self._leaving:
            connection.send_frame(self.stats, [_given_back(request.id)])
            return
        id = base | request.id
        if not 0 <= request.id <= _ROUTER_MASK or id in connection.live:
            connection.close(f"request number {request.id} is out of range or in use")
            return
        request.id = id
        logger.debug(
            "from router %s: %d tokens",
            connection.router,
            len(request.token_ids),
            extra={"request_id": request.request_id},
        )
        for other in self._routers.values():
            # Hashes beyond the limit are dropped, because prompts have mostly their beginnings in
            # common.
            if other is not connection and len(other.prefix_hashes) < _MAX_PREFIX_BYTES:
                other.prefix_hashes += message.prefix_hashes[:_MAX_PREFIX_BYTES]
        connection.live.add(id)
        if message.stream:
            self._memory.begin(request, message.stream)
        submitted = SubmittedRequest(connection, message)
        if self._sleep is not None:
            self._sleep.submit(submitted)
        else:
            self._suspects.submit(submitted)

    async def _carry_out(
        self, connection: ReplicaEnd, order: UpdateWeights | TransferWeights | Control
    ) -> None:
        """Execute a trainer's order, and send the answer to the router."""
        answer = Answer(order.ticket)
        try:
            if isinstance(order, UpdateWeights):
                await self._engine.update_weights(
                    order.folder,
                    version=order.version,
                    recompute=order.recompute,
                    check_only=order.check_only,
                )
            elif isinstance(order, TransferWeights):
                answer.message = await self._engine.transfer_weights(order.what, order.info)
            elif order.what == "pause":
                await self._engine.pause(order.argument)
            elif order.what in ("sleep", "wake"):
                await self._sleep_or_wake(order)
            elif order.what in ("resume", "reset_prefix_cache"):
                self._engine.control(order.what)
                if self._sleep is not None and order.what == "resume":
                    self._sleep.take_back()
            else:
                answer = Answer(order.ticket, "invalid_value", f"{order.what} is no router's order")
        except MantaError as error:
            answer = Answer(order.ticket, error.code, error.message, error.param or "")
        connection.send(answer)

    async def _sleep_or_wake(self, order: Control) -> None:
        """Execute a trainer's order "sleep" or "wake". During a trainer's sleep, idle times do not
        control the engine's sleep. Raises MantaError.
        """
        checks = order.what == "sleep" and order.level == CHECK
        if self._sleep is not None and not checks:
            await self._sleep.let_trainer()
        if order.what == "sleep":
            await self._engine.sleep(order.level, order.tags)
            return
        await self._engine.wake(order.tags)
        if self._sleep is not None and not order.tags:
            self._sleep.take_back()

    def _begin(self, submitted: SubmittedRequest) -> None:
        if self._rows is not None and self._rows.submit(submitted):
            return
        if submitted.message.adapter is not None:
            self._adapters.submit(submitted)
        else:
            self._start(submitted.message.request)

    def _take_back(self, connection: ReplicaEnd, ids: list[int]) -> list[int]:
        """Drop aborted requests that the engine does not have yet; return the ids of the other
        aborted requests.

        ids: ids of the aborted requests.
        """
        for id in ids:
            self._memory.end(id, self._loop.time())
        self._suspects.take_back(connection, ids)
        if self._rows is not None:
            self._rows.take_back(connection.live, ids)
        return self._adapters.take_back(connection, ids)

    def _start(self, request: EngineRequest) -> None:
        try:
            self._engine.submit(request)
        except EngineDead as error:
            self._hear_death(error)
            return
        suspect = self._suspects.suspect
        if suspect is not None and suspect.request is request:
            self._suspects.given = True

    def _refuse_held(self, submitted: SubmittedRequest, message: str) -> None:
        error = Overloaded(message, code="device_busy")
        self._refuse(submitted.connection, submitted.request.id, error)

    def _refuse(self, connection: ReplicaEnd, id: int, error: MantaError) -> None:
        connection.live.discard(id)
        self._memory.end(id, self._loop.time())
        text = f"{error.code}: {error.message}"
        delta = Delta(id & _ROUTER_MASK, [], "error", error=text)
        connection.send_frame(self.stats, [delta])
        self._suspects.advance()

    def _closed(self, connection: ReplicaEnd, reason: str) -> None:
        if connection.index < 0:
            self._unauthenticated.refused(connection, reason)
            return
        self._routers.pop(connection.index, None)
        logger.info(
            "router %s: %s; %d requests aborted", connection.router, reason, len(connection.live)
        )
        for id in connection.live:
            self._memory.end(id, self._loop.time())
        if connection.live and self.failed is None:
            self._abort(list(connection.live))
            connection.live.clear()
            self._suspects.advance()

    def _abort(self, ids: list[int]) -> None:
        try:
            self._engine.abort(ids)
        except EngineDead as error:
            self._hear_death(error)

    def _hear_death(self, error: EngineDead) -> None:
        """Report the engine's death if an error from its client means that its process has
        ended."""
        if not self._engine.alive:
            self.on_death(error)
        # If the process is alive, its client will report the cause soon, after the engine's last
        # frames.

    def _announce(self) -> None:
        self.stats.draining = True
        for router in list(self._routers.values()):
            router.send_frame(self.stats, [])


def _given_back(id: int) -> Delta:
    """Return the delta that tells a router that a draining replica returns a request.

    id: id of the request at its router.
    """
    return Delta(id, [], "error", error="draining: this replica is about to end")


def _by_orders(stats: EngineStats) -> tuple[object, ...]:
    """Return a tuple of the stats that trainers' orders change."""
    return stats.paused, stats.asleep, stats.weights_dropped, stats.weights_version
