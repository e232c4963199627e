"""Fleet: replicas and a router's dispatcher in one event loop, over real sockets on loopback.

Their engines are fake: the tokens of an answer count up, and no model runs.
"""

import asyncio
import itertools
from collections.abc import Callable, Sequence
from typing import Any, Self

import msgspec

from deployments.adapters.record_store import AdapterRecordStore, LocalRecordStore
from deployments.adapters.registry import AdapterSettings
from deployments.backend import GenerationRequest, ModelCard
from deployments.replica.server import ReplicaServer
from deployments.replica.watchdog import StallLimits
from deployments.router.dispatcher import Dispatcher
from deployments.router.inflight import InflightRequest
from deployments.router.models.model_settings import DispatchLimits
from deployments.router.weights_record import LocalWeightsStore, WeightsStore
from deployments.transport.channel import ChannelLimits
from engine.config.engine_config import EngineConfig
from engine.errors import AdapterError, EngineDead, MantaError, UpdateFailed
from engine.messages import (
    AdapterAnswer,
    AdapterInfo,
    AddAdapter,
    Answer,
    Delta,
    EngineRequest,
    KVSource,
    Pulse,
    Ready,
    RemoveAdapter,
    StepFrame,
    TransferWeights,
    UpdateWeights,
)
from engine.process import fake
from engine.sampling_params import SamplingParams

FAST = ChannelLimits(handshake=0.3, heartbeat=0.1, timeout=0.5)
FIRST, VOCAB = 32, 1000  # defaults of fake.FakeOptions
PROMPT = [5] * 10

_frame = msgspec.msgpack.Decoder(StepFrame)


def text(begin: int, count: int) -> list[int]:
    """Return the `count` tokens of the fake engine from position `begin` on; they count up, so that
    a gap or repeat is visible."""
    return [FIRST + position % (VOCAB - FIRST) for position in range(begin, begin + count)]


class Ended(Exception):
    """Raised where a real engine's process would exit."""


class LocalEngine:
    """An EngineClient without a process, which runs the core of engine.process.fake in the event
    loop."""

    pid = 0
    pace = 0.002  # seconds a step

    def __init__(
        self, on_frame: Callable[[StepFrame], None], on_death: Callable[[MantaError], None]
    ) -> None:
        self.requests: list[EngineRequest] = []
        self.alive = False
        self.gone = False  # whether the process has ended, without its client knowing yet
        self.stuck = False
        self.pulse = Pulse()
        self._pulses = 0
        self.adapter_calls: list[tuple[str, str]] = []
        self._tickets = itertools.count(1)
        self._ticket = 0
        self._asked: dict[int, asyncio.Future[AdapterAnswer]] = {}
        self._ordered: dict[int, asyncio.Future[Answer]] = {}
        self._on_frame = on_frame
        self._on_death = on_death
        self._timer: asyncio.TimerHandle | None = None
        self._taken: list[int] = []

    async def start(self, config: EngineConfig) -> Ready:
        self.core, ready = fake.build(config)
        self.core.end_process = self._end
        loop = asyncio.get_running_loop()
        self.core.on_loaded(lambda: loop.call_soon_threadsafe(self._wake))
        self.alive = True
        return ready

    def submit(self, request: EngineRequest) -> None:
        self._check()
        self.requests.append(msgspec.structs.replace(request, token_ids=list(request.token_ids)))
        self.core.add_request(request)
        self._taken.append(request.id)
        self._wake()

    def abort(self, ids: list[int]) -> None:
        self._check()
        self.core.abort(ids)
        self._wake()

    def control(self, what: str) -> int:
        self._check()
        ticket = self._ticket = next(self._tickets)
        getattr(self.core, what)()
        asyncio.get_running_loop().call_soon(self._send, [])
        if self.core.has_work():  # after "resume"
            self._wake()
        return ticket

    async def pause(self, mode: str) -> None:
        self._check()
        ticket = next(self._tickets)
        self.core.pause(mode, ticket)
        await self._order(ticket)

    async def sleep(self, level: int = 1, tags: Sequence[str] = ()) -> None:
        self._check()
        ticket = next(self._tickets)
        self.core.sleep(level, tags, ticket)
        await self._order(ticket)

    async def wake(self, tags: Sequence[str] = ()) -> None:
        self._check()
        ticket = next(self._tickets)
        self.core.wake(tags, ticket)
        await self._order(ticket)

    async def update_weights(
        self,
        folder: str,
        *,
        version: str = "",
        recompute: bool = False,
        check_only: bool = False,
    ) -> None:
        self._check()
        ticket = next(self._tickets)
        self.core.update_weights(UpdateWeights(ticket, folder, version, recompute, check_only))
        await self._order(ticket)

    async def transfer_weights(self, what: str, info: dict[str, Any] | None = None) -> str:
        self._check()
        ticket = next(self._tickets)
        self.core.transfer_weights(TransferWeights(ticket, what, info or {}))
        return await self._order(ticket)

    async def serve_kv(self, host: str) -> tuple[KVSource, float]:
        return KVSource(host, 1, "00"), 1000.0

    async def _order(self, ticket: int) -> str:
        future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._ordered[ticket] = future
        self._wake()
        answer = await future
        if answer.code:
            raise UpdateFailed(answer.message, param=answer.param or None, code=answer.code)
        return answer.message

    async def add_adapter(self, name: str, folder: str, **more: Any) -> AdapterInfo:
        self.adapter_calls.append(("add", name))
        ticket = next(self._tickets)
        self.core.add_adapter(AddAdapter(ticket, name, folder, **more))
        return await self._answer(ticket)

    async def remove_adapter(self, name: str, revision: str = "") -> AdapterInfo:
        self.adapter_calls.append(("remove", name))
        ticket = next(self._tickets)
        self.core.remove_adapter(RemoveAdapter(ticket, name, revision))
        return await self._answer(ticket)

    async def _answer(self, ticket: int) -> AdapterInfo:
        future: asyncio.Future[AdapterAnswer] = asyncio.get_running_loop().create_future()
        self._asked[ticket] = future
        answer = await future
        if answer.info is None:
            raise AdapterError(answer.message, code=answer.code)
        return answer.info

    @property
    def pulses(self) -> int:
        """The number of pulses so far, which grows at each read unless the engine is stuck."""
        self._pulses += not self.stuck
        return self._pulses

    async def close(self) -> None:
        self.alive = False
        if self._timer is not None:
            self._timer.cancel()

    def die(self) -> None:
        """End the engine as SIGKILL would."""
        self.alive = False
        self._on_death(EngineDead("killed", code="engine_killed"))

    def crash(self) -> None:
        """End the engine as a crash of its own, such as an illegal memory access, would."""
        self.alive = False
        self._on_death(EngineDead("crashed"))

    def _check(self) -> None:
        if not self.alive or self.gone:
            raise EngineDead("the engine is closed")

    def _wake(self) -> None:
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self.pace, self._step)

    def _step(self) -> None:
        self._timer = None
        if not self.alive or self.gone or self.stuck:
            return
        try:
            self._send(self.core.step())
        except Ended:
            self.crash()
            return
        for answer in self.core.answers():
            if isinstance(answer, Answer):
                self._ordered.pop(answer.ticket).set_result(answer)
            else:
                self._asked.pop(answer.ticket).set_result(answer)
        if self.core.has_work():
            self._wake()

    def _end(self, status: int) -> None:
        raise Ended

    def _send(self, deltas: list[Delta]) -> None:
        taken, self._taken = self._taken, []
        gone, lowered = self.core.take_evicted()
        frame = StepFrame(self.core.stats(), deltas, b"", self._ticket, taken, gone, lowered)
        self._on_frame(_frame.decode(msgspec.msgpack.encode(frame)))  # as the socket would


class Fleet:
    """Replicas with fake engines, and a dispatcher connected to them: `async with Fleet(2) as
    fleet`.

    Replicas are called r0, r1 and so on.
    """

    kv_moves = False

    def __init__(
        self,
        count: int,
        *,
        limits: DispatchLimits | None = None,
        options: str = "",
        stall: StallLimits | None = None,
        rows: int = 0,
        tokenizer: Any = None,
        loras: int = 0,
        adapters: AdapterSettings | None = None,
        record_store: AdapterRecordStore | None = None,
        weights_store: WeightsStore | None = None,
        seed: int | None = None,
    ) -> None:
        self.replica_servers: dict[str, ReplicaServer] = {}
        self.engines: dict[str, LocalEngine] = {}
        self._count = count
        self._limits = limits or DispatchLimits(wait_seconds=2.0, channel=FAST)
        self._options = options
        self._stall = stall or StallLimits()
        self._rows = rows
        self._tokenizer = tokenizer
        self._loras = loras
        self._adapters = adapters
        self.record_store = record_store or LocalRecordStore()
        self.weights_store = weights_store or LocalWeightsStore()
        self._seed = seed

    async def __aenter__(self) -> Self:
        self.dispatcher = self.new_router()
        for number in range(self._count):
            await self.add_replica(f"r{number}")
        self.publish()
        if self._count:
            await until(lambda: len(self.dispatcher.state().replicas) == self._count)
        return self

    def new_router(self) -> Dispatcher:
        card = ModelCard("m", 4096, VOCAB, (2,), 0, seed=self._seed)
        return Dispatcher(
            card,
            self._tokenizer,
            self._limits,
            "router",
            adapters=self._adapters,
            record_store=self.record_store,
            weights_store=self.weights_store,
        )

    async def __aexit__(self, *_: object) -> None:
        self.dispatcher.close()
        for replica_server in self.replica_servers.values():
            await replica_server.stop()
        await asyncio.sleep(0)

    async def add_replica(self, name: str) -> ReplicaServer:
        replica_server = ReplicaServer(FAST, self._stall, self._engine(name))
        config = EngineConfig(
            model=f"fake:{self._options}",
            max_num_seqs=self._rows,
            max_loras=self._loras,
            kv_moves=self.kv_moves,
        )
        await replica_server.start(config, "127.0.0.1")
        self.replica_servers[name] = replica_server
        return replica_server

    def _engine(self, name: str) -> Callable[..., LocalEngine]:
        def make(*callbacks: Any) -> LocalEngine:
            self.engines[name] = LocalEngine(*callbacks)
            return self.engines[name]

        return make

    def publish(self, *names: str) -> None:
        """Tell the dispatcher that the replicas of these names run; without names, all."""
        self.dispatcher.set_replicas(self.published(*names))

    def published(self, *names: str) -> dict[str, dict[str, Any]]:
        return {
            name: {
                **self.replica_servers[name].published(),
                "eos_token_ids": [2],
                "step_tokens": fake.STEP_TOKENS,
                "adapter_slots": self._loras,
            }
            for name in names or self.replica_servers
        }

    def connected(self) -> int:
        return sum(replica_server.num_routers for replica_server in self.replica_servers.values())

    def load(self) -> dict[str, int]:
        return {
            name: replica_server.in_flight for name, replica_server in self.replica_servers.items()
        }

    def generate(
        self, *, n: int = 1, max_tokens: int = 50, prompt: list[int] | None = None, **more: Any
    ) -> InflightRequest:
        names = ("deadline", "prediction", "priority", "speculate", "verbatim", "whole")
        fields = {name: more.pop(name) for name in names if name in more}
        params = SamplingParams(n=n, max_tokens=max_tokens, **more)
        request = GenerationRequest("q", "m", list(prompt or PROMPT), params, seed=7, **fields)
        return self.dispatcher.generate(request)


async def read(inflight: InflightRequest) -> dict[int, list[int]]:
    """Read a request's deltas to the end, and return all token ids by choice.

    Asserts that each choice ends once, and that log-probabilities, if requested, are those of its
    tokens.
    """
    tokens: dict[int, list[int]] = {choice.index: [] for choice in inflight.choices}
    ended: set[int] = set()
    while items := await inflight.next():
        for index, delta in items:
            assert index not in ended, "a delta after the end"
            if inflight.request.params.logprobs is not None:
                assert [logprob.token_id for logprob in delta.logprobs or ()] == delta.token_ids
            tokens[index] += delta.token_ids
            if delta.finish:
                ended.add(index)
    return tokens


async def until(condition: Callable[[], bool], seconds: float = 3.0) -> None:
    """Poll until `condition()` is true; raises TimeoutError after `seconds`."""
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.005)
