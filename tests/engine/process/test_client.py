"""EngineClient: frames in, requests out, and an end without a trace."""

import asyncio
import os
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from engine.config.engine_config import EngineConfig
from engine.errors import ConfigError, EngineDead, MantaError
from engine.images.image import Image
from engine.messages import EngineRequest, StepFrame
from engine.process.client import EngineClient
from engine.sampling_params import SamplingParams

FAKE = EngineConfig(model="fake:")


@pytest.fixture(autouse=True)
def temporary(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Yield a temporary folder for this test's sockets; pytest's own paths are too long for
    them."""
    with tempfile.TemporaryDirectory() as folder:
        monkeypatch.setattr(tempfile, "tempdir", folder)
        yield Path(folder)


def request(number: int, max_tokens: int | None = None) -> EngineRequest:
    return EngineRequest(number, [5, 6, 7], 3, SamplingParams(max_tokens=max_tokens), 0)


async def until(condition: Callable[[], object], seconds: float = 2.0) -> bool:
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        await asyncio.sleep(0.002)
    return bool(condition())


def traces() -> tuple[int, set[str], list[str]]:
    """Return what a client could leave behind: descriptors, threads, and socket folders."""
    fds = len(os.listdir("/proc/self/fd"))
    threads = {thread.name for thread in threading.enumerate()}
    return fds, threads, os.listdir(tempfile.gettempdir())


def test_frames_arrive_in_order_and_nothing_is_left() -> None:
    """A lost wake-up of the socket stalls a stream; a restarted replica leaks descriptors."""

    async def once() -> None:
        before = traces()
        frames: list[StepFrame] = []
        phases: list[str] = []
        client = EngineClient(frames.append)
        ready = await client.start(FAKE, progress=lambda phase, _: phases.append(phase))
        assert (ready.vocab_size, phases, client.alive) == (1000, ["start"], True)
        assert "process" in ready.start_seconds
        for number in range(100):
            client.submit(request(number, max_tokens=20))
        assert await until(lambda: client.stats.finished == 100)
        tokens: dict[int, list[int]] = {}
        for frame in frames:
            for delta in frame.deltas:
                tokens.setdefault(delta.id, []).extend(delta.token_ids)
        want = list(range(32 + 3, 32 + 23))
        assert tokens == dict.fromkeys(range(100), want)
        pid = client.pid
        await client.close()
        await client.close()
        assert traces() == before
        assert not Path(f"/proc/{pid}").exists()
        with pytest.raises(EngineDead):
            client.submit(request(1))

    async def main() -> None:
        await asyncio.to_thread(lambda: None)  # the executor's thread is asyncio's to keep
        for _ in range(2):
            await once()

    asyncio.run(main())


def test_images_reach_the_engine() -> None:
    """The pixels of a large picture are lost or cut on their way, or another picture answers."""

    async def main() -> None:
        frames: list[StepFrame] = []
        client = EngineClient(frames.append)
        await client.start(FAKE)
        pixels = bytes(3 * 2000 * 1000)
        for number, digest in enumerate((b"a" * 16, b"b" * 16, b"a" * 16)):
            message = request(number, max_tokens=4)
            message.images = [Image(digest, 0, 2, 2, (1, 2), (1, 2000, 1000), pixels)]
            client.submit(message)
        assert await until(lambda: client.stats.finished == 3)
        await client.close()
        tokens: dict[int, list[int]] = {}
        for frame in frames:
            for delta in frame.deltas:
                tokens.setdefault(delta.id, []).extend(delta.token_ids)
        assert tokens[0] == tokens[2] != tokens[1] and len(tokens[1]) == 4

    asyncio.run(main())


def test_death_is_told_at_once() -> None:
    """Requests hang for a health-check period when the engine is killed."""

    async def main() -> None:
        deaths: list[MantaError] = []
        frames: list[StepFrame] = []
        client = EngineClient(frames.append, deaths.append)
        await client.start(EngineConfig(model="fake:step_seconds=0.002"))
        client.submit(request(1))
        assert await until(lambda: frames)
        os.kill(client.pid, signal.SIGKILL)
        began = time.monotonic()
        assert await until(lambda: deaths)
        assert time.monotonic() - began < 0.1
        assert isinstance(deaths[0], EngineDead)
        assert "signal 9" in deaths[0].message
        assert not client.alive
        with pytest.raises(EngineDead):
            client.abort([1])
        await client.close()
        assert len(deaths) == 1

    asyncio.run(main())


def test_last_frames_come_before_the_death() -> None:
    """Tokens that were computed, or the reason of a failure, are lost when the process ends."""

    async def main() -> None:
        events: list[object] = []
        client = EngineClient(events.append, events.append)
        await client.start(EngineConfig(model="fake:exit_step=5"))
        client.submit(request(1))
        assert await until(lambda: events and isinstance(events[-1], MantaError))
        error = events.pop()
        assert isinstance(error, EngineDead) and "status 3" in error.message
        # What zmq's own thread had not written when the process left is gone; the order holds.
        steps = [event.stats.step for event in events if isinstance(event, StepFrame)]
        assert steps == list(range(1, len(steps) + 1))
        await client.close()

    asyncio.run(main())


def test_start_that_takes_too_long_or_fails_leaves_nothing() -> None:
    """A failed start leaves a process that loads weights for nobody."""

    async def main() -> None:
        await asyncio.to_thread(lambda: None)
        before = traces()
        with pytest.raises(EngineDead, match="not ready"):
            await EngineClient(print).start(
                EngineConfig(model="fake:start_seconds=60"), timeout=0.2
            )
        with pytest.raises(ConfigError):
            await EngineClient(print).start(EngineConfig(model="fake:fail_start=1"))
        task = asyncio.create_task(
            EngineClient(print).start(EngineConfig(model="fake:start_seconds=60"))
        )
        await asyncio.sleep(0.1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert traces() == before

    asyncio.run(main())


def test_failing_callback_loses_no_frames() -> None:
    """One exception in a consumer, and every stream of the replica stands still."""

    async def main() -> None:
        seen: list[int] = []

        def callback(frame: StepFrame) -> None:
            seen.append(frame.stats.step)
            if len(seen) == 3:
                raise ValueError("a bug elsewhere")

        failures: list[object] = []
        asyncio.get_running_loop().set_exception_handler(
            lambda _, context: failures.append(context)
        )
        client = EngineClient(callback)
        await client.start(FAKE)
        client.submit(request(1, max_tokens=50))
        assert await until(lambda: client.stats.finished == 1)
        await client.close()
        assert seen == list(range(1, 51))
        assert len(failures) == 1

    asyncio.run(main())


async def test_socket_folder_is_private(temporary: Path) -> None:
    """Another user of the machine reads prompts or injects requests."""
    client = EngineClient(print)
    modes: list[int] = []

    def look(phase: str, fraction: float) -> None:
        modes.extend(path.stat().st_mode & 0o777 for path in temporary.iterdir())

    await client.start(FAKE, progress=look)
    try:
        assert modes == [0o700]
        assert not list(temporary.iterdir())  # so a killed parent leaves no files either
    finally:
        await client.close()
