"""The channel: frames whole and cheap, and closed to whoever has no secret."""

import asyncio
import logging
import pickle
import secrets
import struct
import time
from functools import partial

import msgspec
import pytest

from deployments.replica.server import ReplicaServer
from deployments.replica.watchdog import StallLimits
from deployments.transport.channel import (
    VERSION,
    ChannelLimits,
    Heartbeat,
    Hello,
    Proof,
    ReplicaEnd,
    RouterEnd,
    Submit,
    Welcome,
)
from engine.config.engine_config import EngineConfig
from engine.messages import Delta, EngineRequest, EngineStats, StepFrame
from engine.sampling_params import SamplingParams
from tests.deployments.router.fleet import FAST, LocalEngine, until

SECRET = secrets.token_bytes(32)


def run(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, 20))


def frame(message) -> bytes:
    payload = msgspec.msgpack.encode(message)
    return struct.pack("<I", len(payload)) + payload


class Replica:
    """A listening end of the channel, and the messages that came through it."""

    def __init__(self, secret: bytes = SECRET, limits: ChannelLimits = FAST) -> None:
        self.opened: list[ReplicaEnd] = []
        self.messages: list = []
        self.closed: list[str] = []
        self.secret, self.limits = secret, limits

    async def __aenter__(self) -> "Replica":
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(self.make, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for end in self.opened:
            end.close("test")

    def make(self) -> ReplicaEnd:
        return ReplicaEnd(
            self.secret,
            self.limits,
            on_open=self.opened.append,
            on_message=lambda _, message: self.messages.append(message),
            on_close=lambda _, reason: self.closed.append(reason),
            stats=EngineStats,
        )


class RouterSide:
    def __init__(self, secret: bytes = SECRET, limits: ChannelLimits = FAST) -> None:
        self.opened: list[RouterEnd] = []
        self.frames: list = []
        self.closed: list[str] = []
        self.secret, self.limits = secret, limits

    def make(self) -> RouterEnd:
        return RouterEnd(
            self.secret,
            self.limits,
            "router",
            on_open=self.opened.append,
            on_frame=lambda _, message: self.frames.append(message),
            on_close=lambda _, reason: self.closed.append(reason),
        )

    async def connect(self, port: int) -> RouterEnd:
        _, end = await asyncio.get_running_loop().create_connection(self.make, "127.0.0.1", port)
        return end


def test_both_sides_prove_the_secret_and_messages_go_both_ways():
    """A handshake that opens one side only; a frame that changes on its way."""

    async def case():
        async with Replica() as replica:
            router = RouterSide()
            end = await router.connect(replica.port)
            await until(lambda: bool(router.opened and replica.opened))
            request = EngineRequest(
                3, list(range(70_000)), 9, SamplingParams(seed=-1), seed=-(2**63)
            )
            end.send(Submit(request, b"hashes"))
            deltas = [Delta(1, [2, 3], "stop", stop_token=3, cached=7), Delta(2, [], "error")]
            replica.opened[0].send(StepFrame(EngineStats(step=5), deltas))
            await until(lambda: bool(replica.messages and router.frames))
            assert replica.messages == [Submit(request, b"hashes")]
            assert router.frames == [StepFrame(EngineStats(step=5), deltas)]
            assert replica.opened[0].router == "router"
            end.close("enough")
            end.close("again")
            await until(lambda: bool(replica.closed and router.closed))
            assert router.closed == ["enough"]

    run(case())


async def refused(port: int, *parts: bytes, answer: bool = True) -> bytes:
    """Send parts as a stranger; return what came back before the connection was closed."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    received = await reader.read(4096) if answer else b""
    for part in parts:
        writer.write(part)
    async with asyncio.timeout(2):
        while more := await _read(reader):
            received += more
    writer.close()
    return received


async def _read(reader: asyncio.StreamReader) -> bytes:
    try:
        return await reader.read(4096)
    except ConnectionResetError:
        return b""


@pytest.mark.parametrize(
    "message",
    [
        frame(Proof(b"x" * 32, b"y" * 32, "r")),
        frame(Proof(b"", b"", "r")),
        frame(Submit(EngineRequest(1, [1], 1, SamplingParams(), seed=1))),
        frame(Heartbeat()),
        frame(["unknown", 1]),
        struct.pack("<I", 2000) + b"x" * 2000,
        struct.pack("<I", 2**31) + b"x",
        struct.pack("<I", 10) + b"\xc1" * 10,
        b"GET / HTTP/1.1\r\n\r\n",
        frame(pickle.dumps(print)),
        pickle.dumps(print) * 50,
    ],
    ids=lambda message: repr(message[:12]),
)
def test_a_stranger_gets_nothing_and_is_cut_off(message):
    """Anyone in the network who can submit, listen, or make the replica hold memory."""

    async def case():
        async with Replica() as replica:
            received = await refused(replica.port, message)
            assert len(received) < 100  # the greeting
            assert replica.closed and not replica.opened and not replica.messages

    run(case())


def test_a_silent_stranger_is_cut_off():
    """Connections that are opened and kept: the file handles run out."""

    async def case():
        async with Replica() as replica:
            began = time.monotonic()
            await refused(replica.port)
            assert time.monotonic() - began < FAST.handshake + 0.3

    run(case())


def test_strangers_do_not_keep_a_router_out():
    """Bug: 64 connections that only stay, from anywhere, and come again when they are cut off, kept
    new routers out for as long as they liked."""

    async def stay(port: int, source: str) -> None:
        while True:
            _, writer = await asyncio.open_connection("127.0.0.1", port, local_addr=(source, 0))
            try:
                await asyncio.sleep(0.3)
            finally:
                writer.close()

    async def case():
        replica_server = ReplicaServer(ChannelLimits(handshake=30), StallLimits(), LocalEngine)
        await replica_server.start(EngineConfig(model="fake:"), "127.0.0.1")
        sources = ["127.0.0.1"] * 30 + ["127.0.0.2"] * 60
        strangers = [asyncio.create_task(stay(replica_server.port, source)) for source in sources]
        await until(lambda: len(replica_server._unauthenticated) == 64)
        for count in range(1, 4):
            router = RouterSide(replica_server.secret)
            async with asyncio.timeout(1):
                await router.connect(replica_server.port)
                await until(lambda count=count: replica_server.num_routers == count)
        assert len(replica_server._unauthenticated) <= 64
        for task in strangers:
            task.cancel()
        await asyncio.gather(*strangers, return_exceptions=True)
        await replica_server.stop()

    run(case())


def test_another_machines_strangers_do_not_take_each_others_places():
    """Bug: who opens many connections pushes out those of others."""

    async def case():
        replica_server = ReplicaServer(ChannelLimits(handshake=30), StallLimits(), LocalEngine)
        await replica_server.start(EngineConfig(model="fake:"), "127.0.0.1")
        connect = partial(asyncio.open_connection, "127.0.0.1", replica_server.port)
        quiet = [await connect(local_addr=("127.0.0.3", 0)) for _ in range(8)]
        many = [await connect(local_addr=("127.0.0.2", 0)) for _ in range(200)]
        await until(lambda: len(replica_server._unauthenticated) == 64)
        await asyncio.sleep(0.1)
        addresses = [item.address for item in replica_server._unauthenticated]
        assert addresses.count("127.0.0.3") == 8
        for _, writer in quiet + many:
            writer.close()
        await replica_server.stop()

    run(case())


def test_strangers_do_not_fill_the_log(caplog):
    """Bug: a line for each connection without the secret: 57 MB in 100 s."""

    async def case():
        replica_server = ReplicaServer(FAST, StallLimits(), LocalEngine)
        await replica_server.start(EngineConfig(model="fake:"), "127.0.0.1")
        for _ in range(300):
            reader, writer = await asyncio.open_connection("127.0.0.1", replica_server.port)
            writer.write(frame(Proof(bytes(32), bytes(32), "x")))
            await reader.read()
            writer.close()
        replica_server._unauthenticated._report()  # as after ten seconds
        await replica_server.stop()

    with caplog.at_level(logging.INFO, "manta.replica"):
        run(case())
    lines = [record.getMessage() for record in caplog.records if "refused" in record.getMessage()]
    assert len(lines) == 2
    assert lines[0].endswith(": wrong secret") and lines[0].startswith("refused ('127.0.0.1', ")
    assert lines[1].startswith("refused 299 connections, the last ('127.0.0.1', ")


def test_an_overheard_proof_is_of_no_use():
    """Replay: the proof of one connection opens another."""

    async def case():
        async with Replica() as replica:
            heard = []
            loop = asyncio.get_running_loop()
            side = RouterSide()
            _, end = await loop.create_connection(side.make, "127.0.0.1", replica.port)
            transport = end._transport
            write = transport.write
            end._transport = type(
                "Tap",
                (),
                {
                    "write": lambda _, data: (heard.append(data), write(data)),
                    "__getattr__": lambda _, name: getattr(transport, name),
                },
            )()
            await until(lambda: bool(side.opened))
            assert heard
            await refused(replica.port, heard[0])
            assert len(replica.opened) == 1

    run(case())


@pytest.mark.parametrize("kind", ["welcome without proof", "mirror", "wrong secret", "version"])
def test_a_router_does_not_talk_to_an_impostor(kind):
    """Prompts sent to whoever listens on a port that a dead replica has left."""

    async def case():
        async def serve(reader, writer):
            if kind == "welcome without proof":
                writer.write(frame(Welcome(b"m" * 32)))
            elif kind == "version":
                writer.write(frame(Hello(VERSION + 1, b"n" * 32)))
            else:
                writer.write(frame(Hello(VERSION, b"n" * 32)))
                (size,) = struct.unpack("<I", await reader.readexactly(4))
                proof = msgspec.msgpack.decode(await reader.readexactly(size), type=Proof)
                mac = proof.mac if kind == "mirror" else b"m" * 32
                writer.write(frame(Welcome(mac)))
            await reader.read()
            writer.close()

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        router = RouterSide()
        await router.connect(server.sockets[0].getsockname()[1])
        await until(lambda: bool(router.closed))
        assert not router.opened
        server.close()

    run(case())


def test_frames_survive_any_cut_of_the_stream():
    """A frame that is lost or doubled when TCP hands it over in pieces."""

    async def case():
        side = RouterSide()
        sent = [StepFrame(EngineStats(step=n), [Delta(n, list(range(n)))]) for n in range(12)]
        stream = b"".join(frame(message) for message in sent)
        for size in (1, 2, 3, 4, 5, 7, 50, 1000, len(stream)):
            side.frames.clear()
            end = side.make()
            end.open, end._max_frame = True, 2**20
            for begin in range(0, len(stream), size):
                end.data_received(stream[begin : begin + size])
            assert side.frames == sent
            assert not end._tail

    run(case())


@pytest.mark.parametrize("who", ["replica", "router"])
def test_a_peer_that_falls_silent_is_given_up(who):
    """A lost machine: the connection looks open for ever."""

    async def case():
        async with Replica() as replica:
            router = RouterSide()
            end = await router.connect(replica.port)
            await until(lambda: bool(router.opened and replica.opened))
            await asyncio.sleep(FAST.timeout * 1.5)
            assert not router.closed and not replica.closed, "beats did not keep it open"
            mute = replica.opened[0] if who == "replica" else end
            mute.send = lambda message: None
            await until(lambda: bool(router.closed and replica.closed))
            assert "silent" in (router if who == "replica" else replica).closed[0]

    run(case())


def test_a_peer_that_does_not_read_is_given_up_at_the_bound():
    """A stuck router that makes the replica's memory grow without end."""

    async def case():
        limits = ChannelLimits(heartbeat=5, timeout=60, max_backlog=2**20)
        async with Replica(limits=limits) as replica:
            router = RouterSide(limits=limits)
            end = await router.connect(replica.port)
            await until(lambda: bool(router.opened and replica.opened))
            end._transport.pause_reading()
            news = StepFrame(EngineStats(), [Delta(1, list(range(20_000)))])
            for _ in range(2000):
                replica.opened[0].send(news)
                await asyncio.sleep(0)
                if replica.closed:
                    break
            assert replica.closed == ["the peer does not read"]

    run(case())


class _Sink:
    """A transport that drops all data."""

    def write(self, data: bytes) -> None:
        self.last = data

    def get_write_buffer_size(self) -> int:
        return 0


@pytest.mark.timed
def test_cost_of_a_delta_in_a_frame_of_64(record_property):
    """Relaying that grows back to what a Serve stream costs (100 us a token and more).

    The bounds are multiples of encoding and decoding alone, measured in the same run.
    """

    async def case():
        from deployments.backend import GenerationRequest, ModelCard
        from deployments.router.dispatcher import Dispatcher
        from deployments.router.models.model_settings import DispatchLimits
        from deployments.router.replicas.replica_client import ReplicaClient, ReplicaEndpoint

        rounds, size = 300, 64
        replica_server = ReplicaServer(FAST, StallLimits(), LocalEngine)
        end = ReplicaEnd(
            SECRET,
            FAST,
            on_open=lambda _: None,
            on_message=lambda *_: None,
            on_close=lambda *_: None,
            stats=EngineStats,
        )
        sink = end._transport = _Sink()
        end.index = 1
        replica_server._routers[1] = end
        ids = [(1 << 40) | n for n in range(1, size + 1)]
        raw = [
            msgspec.msgpack.encode(
                StepFrame(EngineStats(step=step), [Delta(id, [step]) for id in ids])
            )
            for step in range(rounds)
        ]
        decode = msgspec.msgpack.Decoder(StepFrame).decode

        def seconds(work) -> float:
            best = 1.0
            for _ in range(5):
                began = time.process_time()
                work()
                best = min(best, time.process_time() - began)
            return best / rounds / size * 1e6

        def null() -> None:
            for frame_bytes in raw:
                msgspec.msgpack.encode(decode(frame_bytes))

        def engine_side() -> None:
            for frame_bytes in raw:
                replica_server.on_frame(decode(frame_bytes))

        baseline, engine = seconds(null), seconds(engine_side)

        dispatcher = Dispatcher(
            ModelCard("m", 10**6, 1000, (2,), 0), None, DispatchLimits(channel=FAST), "r"
        )
        client = ReplicaClient(
            "r0",
            ReplicaEndpoint("127.0.0.1", 1, "00", 10**6, 1000, (2,), 2048),
            dispatcher._events,
            fleet=dispatcher.replicas.fleet,
            calls=dispatcher.replicas.calls,
            limits=FAST,
            router="r",
        )
        client.retired = True
        dispatcher.replicas["r0"] = client
        params = SamplingParams(max_tokens=10**5)
        all_inflight = [
            dispatcher.generate(GenerationRequest("q", "m", [1], params, seed=1))
            for _ in range(size)
        ]
        for inflight in all_inflight:
            client.choices[inflight.choices[0].id] = inflight.choices[0]
        receive = client._protocol()
        receive.open, receive._max_frame = True, 2**20
        replica_server.on_frame(decode(raw[0]))
        wire = sink.last

        def router_side() -> None:
            for _ in range(rounds):
                receive.data_received(wire)
                for inflight in all_inflight:
                    inflight._items.clear()

        router = seconds(router_side)
        for inflight in all_inflight:
            inflight.abort()
        client._task.cancel()
        record_property("engine_us", engine)
        record_property("router_us", router)
        print(
            f"us a delta: null {baseline:.2f}, engine side {engine:.2f}, router side {router:.2f}"
        )
        assert engine < 6 * max(baseline, 0.5)
        assert router < 8 * max(baseline, 0.5)

    run(case())
