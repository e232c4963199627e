"""Embeddings from an encoder pool: which requests wait for them, for how long, and that failures of
the pool lose no request."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from deployments.encoder import rows
from deployments.encoder.deployment import asks
from deployments.encoder.rows import EncoderPool, ImageRows
from deployments.replica.server import ReplicaServer
from deployments.replica.watchdog import StallLimits
from deployments.transport import discovery
from deployments.transport.channel import Submit
from engine.config.engine_config import EngineConfig
from engine.images.image import Image
from engine.messages import Abort, EngineRequest, UpdateWeights
from engine.sampling_params import SamplingParams
from tests.deployments.replica.test_replica import Router
from tests.deployments.router.fleet import FAST, LocalEngine, until

pytestmark = pytest.mark.timeout(30)
ROWS = np.arange(8, dtype=np.uint8)


def image(name: int, start: int = 1) -> Image:
    return Image(bytes([name]) * 16, start, 2, 2, (1, 2), (1, 1, 2), bytes([name]) * 6)


def request(id: int, *names: int, salt: str = "") -> EngineRequest:
    images = [image(name, 1 + 3 * number) for number, name in enumerate(names)]
    params = SamplingParams(max_tokens=3)
    return EngineRequest(id, [5] * 30, 30, params, seed=1, cache_salt=salt, images=images)


@dataclass
class Waiting:
    request: EngineRequest
    live: set[int]
    encoded: bool = False

    @property
    def wanted(self) -> bool:
        return self.request.id in self.live


@dataclass
class Scene:
    """A replica's requests, and an encoder pool that answers when `gate` is open."""

    wait: float = 5.0
    fault: Exception | None = None
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    asked: list[int] = field(default_factory=list)
    begun: list[Waiting] = field(default_factory=list)
    live: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.rows = ImageRows(EncoderPool(self.ask, self.wait), self.begin)
        self.rows.size = 6

    async def ask(self, image: Image) -> tuple[Any, str]:
        assert image.pixels and not image.rows
        self.asked.append(image.digest[0])
        await self.gate.wait()
        if self.fault:
            raise self.fault
        return ROWS + image.digest[0], "float16"

    def begin(self, waiting: Waiting) -> None:
        assert not self.rows.submit(waiting), "it would wait for ever"
        self.begun.append(waiting)

    def submit(self, message: EngineRequest) -> bool:
        self.live.add(message.id)
        waiting = Waiting(message, self.live)
        waits = self.rows.submit(waiting)
        if not waits:
            self.begun.append(waiting)
        return waits

    async def answer(self) -> None:
        self.gate.set()
        for _ in range(20):
            await asyncio.sleep(0)

    @property
    def came(self) -> list[list[bool]]:
        """Return whether its images have embeddings, for each request that went on."""
        return [[bool(image.rows) for image in waiting.request.images] for waiting in self.begun]


def scene(case: Callable[[Scene], Awaitable[None]]) -> None:
    async def run() -> None:
        await case(Scene())

    asyncio.run(run())


def test_an_image_is_asked_for_once_and_comes_with_one_request() -> None:
    """Bugs: n choices cost n encodes; embeddings go with the wrong image; a text waits; an image
    that the engine holds is asked for again."""

    async def case(all: Scene) -> None:
        assert not all.submit(request(1))
        assert all.submit(request(2, 7, 8)) and all.submit(request(3, 8, 7))
        await asyncio.sleep(0)
        await all.answer()
        assert all.asked == [7, 8] and all.came == [[], [True, True], [False, False]]
        for image in all.begun[1].request.images:
            assert (
                image.rows == (ROWS + image.digest[0]).tobytes() and image.rows_dtype == "float16"
            )
            assert image.pixels and image.start in (1, 4)
        assert not all.submit(request(4, 7))
        assert all.submit(request(5, 7, salt="other tenant"))

    scene(case)


def test_what_the_engine_dropped_is_asked_for_again() -> None:
    """Bug: the engine's cache was full three pictures ago, and encodes by itself for ever."""

    async def case(all: Scene) -> None:
        all.gate.set()
        for id, name in enumerate((1, 2, 3, 1, 4, 2)):  # three pictures have room
            all.submit(request(id, name))
            await all.answer()
        assert all.asked == [1, 2, 3, 4, 2]

    scene(case)


def test_an_encoder_that_fails_or_is_silent_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bugs: a dead encoder ends the request; each picture waits for a silent one; nobody asks
    again when it is back."""
    monkeypatch.setattr(rows, "_PAUSE_SECONDS", 0.2)

    async def run() -> None:
        broken = Scene(fault=RuntimeError("the actor died"))
        broken.submit(request(1, 7, 8))
        await broken.answer()
        assert broken.came == [[False, False]] and broken.rows.failures == 2
        assert broken.submit(request(2, 9)), "an error is no reason not to ask for other images"

        silent = Scene(wait=0.05)
        assert silent.submit(request(1, 1))
        await until(lambda: silent.came == [[False]])
        assert not silent.submit(request(2, 2)) and silent.rows.failures == 2
        await asyncio.sleep(0.25)
        silent.gate.set()
        assert silent.submit(request(3, 3))
        await silent.answer()
        assert silent.came == [[False], [False], [True]] and silent.rows.failures == 2

    asyncio.run(run())


def test_an_aborted_request_leaves_its_embeddings_to_others() -> None:
    """Bugs: an aborted request is begun; embeddings stay for nobody; the others wait for ever."""

    async def case(all: Scene) -> None:
        for id in (1, 2):
            all.submit(request(id, 7))
        all.rows.take_back(all.live, [1, 99])
        assert all.live == {2}
        await all.answer()
        assert [waiting.request.id for waiting in all.begun] == [2]
        assert not all.rows._arrived and not all.rows._waiting and not all.rows._asking

    scene(case)


def test_encoders_are_not_asked_about_weights_that_they_lack() -> None:
    """Bug: after a trainer's update a picture is seen by the tower of before."""

    async def case(all: Scene) -> None:
        all.submit(request(1, 7))
        all.rows.stop()
        await all.answer()
        assert all.came == [[False]] and not all.submit(request(2, 8))

    scene(case)


def test_a_replica_waits_for_its_encoders_and_for_nothing_else() -> None:
    """Bugs: a text waits behind a picture; an abort meanwhile is forgotten, or never answered; an
    update of weights leaves encoders in use; the count of failures is not told."""

    async def run() -> None:
        all = Scene()
        engines: list[LocalEngine] = []

        def make(*callbacks: Any) -> LocalEngine:
            engines.append(LocalEngine(*callbacks))
            return engines[-1]

        server = ReplicaServer(FAST, StallLimits(), make, None, EncoderPool(all.ask, 5.0))
        await server.start(EngineConfig(model="fake:step_seconds=0.001"), "127.0.0.1")
        router = await Router().connect(server)
        for message in (request(1, 7), request(2, 8), request(3)):
            router.end.send(Submit(message))
        await until(lambda: router.finish(3) == "length")
        assert all.asked == [7, 8] and server.in_flight == 2
        router.end.send(Abort([1]))
        await until(lambda: server.in_flight == 1)
        all.fault = RuntimeError("the actor died")
        all.gate.set()
        await until(lambda: router.finish(2) == "length")
        assert not router.tokens(1) and server.stats.images_not_received == 2
        router.end.send(UpdateWeights(1, "/nowhere"))
        router.end.send(Submit(request(4, 9)))
        await until(lambda: any(r.id & 0xFF == 4 for r in engines[0].requests))
        assert all.asked == [7, 8]
        await server.stop()

    asyncio.run(run())


def test_a_pool_without_actors_is_not_waited_for() -> None:
    """Bug: a request waits for `encode_seconds`, as Serve keeps the call until an actor starts."""
    cancelled: list[bool] = []

    class Encode:
        def remote(self, weights: str, image: Image) -> Any:
            response: Any = asyncio.get_running_loop().create_future()
            response.add_done_callback(lambda done: cancelled.append(done.cancelled()))
            return response

    async def run() -> None:
        handle: Any = SimpleNamespace(app_name="rows", deployment_name="e", encode=Encode())
        discovery.publish("rows", "e", {"a": {}})
        ask = asks(handle, "")
        waiting = asyncio.ensure_future(ask(image(7)))
        await asyncio.sleep(0.05)
        assert not waiting.done()
        discovery.publish("rows", "e", {})
        with pytest.raises(ConnectionError):
            await asyncio.wait_for(waiting, 1)
        with pytest.raises(ConnectionError):
            await asyncio.wait_for(ask(image(7)), 1)
        await asyncio.sleep(0)
        assert cancelled == [True, True], "Serve still has the calls"
        discovery.publish("rows", "e", {"b": {}})
        await asyncio.sleep(0.05)
        waiting = asyncio.ensure_future(ask(image(7)))
        await asyncio.sleep(0.05)
        assert not waiting.done()
        waiting.cancel()

    asyncio.run(run())
