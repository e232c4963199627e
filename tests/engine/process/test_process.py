"""The engine process: its loop, and that it never outlives its parent."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
import zmq

from engine.config.engine_config import EngineConfig
from engine.errors import ConfigError, EngineDead, MantaError
from engine.messages import (
    Abort,
    Answer,
    Control,
    Delta,
    EngineRequest,
    FromEngine,
    StepFrame,
)
from engine.process import main
from engine.process.client import EngineClient
from engine.process.fake import FakeCore
from engine.process.main import EngineLoop
from engine.sampling_params import SamplingParams

ROOT = Path(__file__).parents[3]

PARENT = """
import sys, threading, time
from engine import LLM
def start():
    global llm
    llm = LLM("fake:")
if sys.argv[1] == "thread":
    thread = threading.Thread(target=start)
    thread.start()
    thread.join()
else:
    start()
time.sleep(0.2)
print(llm.pid, flush=True)
if sys.argv[1] != "leave":
    time.sleep(60)
"""


def running(pid: int) -> bool:
    """Return whether a process runs; a zombie that nobody has waited for does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):  # the second if it ends while it is read
        return False
    return state != "Z"


def wait_until(condition: "object", seconds: float) -> bool:
    assert callable(condition)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.01)
    return bool(condition())


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("where", ["main", "thread", "leave"])
def test_child_dies_with_its_parent(where: str) -> None:
    """A killed replica leaves a process that holds the GPU; or the other way round, the engine dies
    because the thread that started it has ended."""
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, where], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    try:
        pid = parent.stdout.readline()
        if where != "leave":
            assert running(int(pid))
            parent.send_signal(signal.SIGKILL)
        parent.wait(10)
        assert wait_until(lambda: not running(int(pid)), 1.0)
    finally:
        with contextlib.suppress(ProcessLookupError):
            parent.kill()
        parent.wait()
        parent.stdout.close()


async def start(options: str) -> tuple[EngineClient, list[Delta], list[MantaError]]:
    deltas: list[Delta] = []
    deaths: list[MantaError] = []
    client = EngineClient(lambda frame: deltas.extend(frame.deltas), deaths.append)
    await client.start(EngineConfig(model=f"fake:{options}"))
    return client, deltas, deaths


async def until(condition: Callable[[], object], seconds: float) -> bool:
    return await asyncio.to_thread(wait_until, condition, seconds)


def request(number: int, **params: object) -> EngineRequest:
    return EngineRequest(number, [5, 6, 7], 3, msgspec.convert(params, SamplingParams), 0)


async def test_ctrl_c_is_for_the_parent() -> None:
    """Ctrl-C kills the engine under a server that wanted to drain."""
    client, deltas, _ = await start("")
    try:
        os.kill(client.pid, signal.SIGINT)
        client.submit(request(1, max_tokens=1))
        assert await until(lambda: deltas, 2)
    finally:
        await client.close()


async def test_start_errors_keep_code_and_field() -> None:
    """A wrong setting is told as "engine died"."""
    with pytest.raises(ConfigError) as caught:
        await start("fail_start=1")
    assert caught.value.param == "model"
    with pytest.raises(ConfigError, match="nonsense"):
        await start("nonsense=1")


async def test_failing_step_says_why(capfd: pytest.CaptureFixture[str]) -> None:
    """The reason of a fatal error is only in a log on another machine, or nowhere."""
    client, _, deaths = await start("fail_step=2")
    try:
        client.submit(request(1))
        assert await until(lambda: deaths, 2)
        assert isinstance(deaths[0], EngineDead)
        assert "told to fail" in deaths[0].message
        with pytest.raises(EngineDead):
            client.submit(request(2))
    finally:
        await client.close()
    assert "Traceback" in capfd.readouterr().err


async def test_working_directory_is_the_callers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A relative model path is looked up in the package's folder."""
    monkeypatch.chdir(tmp_path)
    client, _, _ = await start("")
    try:
        assert os.readlink(f"/proc/{client.pid}/cwd") == str(tmp_path)
    finally:
        await client.close()


class Loop:
    """An EngineLoop on a thread, with its sockets in this process."""

    def __init__(self, options: str = "") -> None:
        self.core = FakeCore(EngineConfig(model=f"fake:{options}"))
        self.checks = 0
        check = self.core.check_integrity

        def counted() -> None:
            self.checks += 1
            check()

        self.core.check_integrity = counted  # type: ignore[method-assign]
        self.sent: list[FromEngine] = []
        context = zmq.Context.instance()
        self._inbox = context.socket(zmq.PULL)
        self._push = context.socket(zmq.PUSH)
        port = self._inbox.bind_to_random_port("tcp://127.0.0.1")
        self._push.connect(f"tcp://127.0.0.1:{port}")
        self._loop = EngineLoop(self.core, self._inbox, self.sent.append)
        self._thread = threading.Thread(target=self._loop.run)
        self._thread.start()

    def send(self, message: object) -> None:
        self._push.send(msgspec.msgpack.encode(message))

    def deltas(self) -> list[Delta]:
        frames = [message for message in self.sent if isinstance(message, StepFrame)]
        return [delta for frame in frames for delta in frame.deltas]

    def close(self) -> None:
        self.send(Control("stop"))
        self._thread.join()
        self._inbox.close(0)
        self._push.close(0)


@pytest.fixture
def loop() -> Iterator[Loop]:
    loop = Loop()
    yield loop
    loop.close()


def test_one_frame_a_step_and_a_check_when_idle(loop: Loop) -> None:
    """A frame a request at high batch sizes, or a leak check in every step."""
    assert wait_until(lambda: loop.checks == 1, 2)
    for number in (1, 2):
        loop.send(request(number, max_tokens=5))
    assert wait_until(lambda: sum(bool(d.finish) for d in loop.deltas()) == 2, 1)
    assert wait_until(lambda: loop.checks >= 2, 2)
    checks = loop.checks
    assert checks <= 3  # one more if the first had ended before the second came
    steps = [message.stats.step for message in loop.sent if isinstance(message, StepFrame)]
    assert len(steps) == loop.core.stats().step
    loop.send(Control("stats"))
    assert wait_until(lambda: len(loop.sent) > len(steps), 1)
    assert loop.checks == checks  # nothing ran: it stayed idle


def test_an_order_s_frame_comes_before_its_answer(loop: Loop) -> None:
    """Bug: who has the answer to a pause reads in the stats that nothing is paused."""
    loop.send(request(1))
    assert wait_until(lambda: len(loop.deltas()) > 3, 1)
    loop.send(Control("pause", 7, "keep"))
    assert wait_until(lambda: any(isinstance(message, Answer) for message in loop.sent), 1)
    place = next(i for i, message in enumerate(loop.sent) if isinstance(message, Answer))
    before = [message for message in loop.sent[:place] if isinstance(message, StepFrame)]
    assert before[-1].stats.paused and before[-1].ticket == 7


def test_an_idle_core_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """What comes due by the clock, such as adapters that leave memory, waits for a request."""
    monkeypatch.setattr(main, "IDLE_MS", 10)
    loop = Loop()
    try:
        assert wait_until(lambda: loop.checks == 1, 2)
        due = iter([True])
        monkeypatch.setattr(loop.core, "has_work", lambda: next(due, False))
        assert wait_until(lambda: loop.core.stats().step == 1, 2)
    finally:
        loop.close()


def test_input_is_taken_until_the_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request that arrives while the launch of the next step waits is not in that step."""
    loop = Loop()
    steps, delays = [], iter([5.0])
    monkeypatch.setattr(loop.core, "launch_delay", lambda: next(delays, 0.0))
    step = loop.core.step

    def watched() -> list[Delta]:
        steps.append(set(loop.core._requests))
        return step()

    monkeypatch.setattr(loop.core, "step", watched)
    try:
        loop.send(request(1, max_tokens=3))
        assert wait_until(lambda: len(loop.core._requests) == 1, 2)
        loop.send(request(2, max_tokens=3))
        assert wait_until(lambda: sum(bool(d.finish) for d in loop.deltas()) == 2, 4)
        assert len(steps[0]) == 2
    finally:
        loop.close()


def test_the_check_is_in_nobodys_way(loop: Loop) -> None:
    """Milliseconds between the end of a request and the next one's first step."""
    for number in range(10):
        loop.send(request(number, max_tokens=1))
        ended = number + 1
        assert wait_until(lambda ended=ended: len(loop.deltas()) == ended, 1)  # type: ignore[misc]
    assert loop.checks == 0
    assert wait_until(lambda: loop.checks == 1, 2)


def test_a_frame_names_the_requests_that_it_is_the_first_to_count(loop: Loop) -> None:
    """Who has sent a request cannot know from when on it is in the figures, and guesses by a clock:
    wrong in each step that is longer than the one before. One that is refused is told, too."""
    loop.send(request(1, max_tokens=500))
    assert wait_until(lambda: loop.deltas(), 1)
    loop.send(request(2, max_tokens=5))
    loop.send(EngineRequest(3, [], 0, SamplingParams(), seed=0, adapter="none"))
    assert wait_until(lambda: sum(bool(d.finish) for d in loop.deltas()) == 3, 2)
    frames = [message for message in loop.sent if isinstance(message, StepFrame)]
    assert [id for frame in frames for id in frame.taken] == [1, 2, 3]
    for frame in frames:
        assert {delta.id for delta in frame.deltas} <= {
            id for earlier in frames[: frames.index(frame) + 1] for id in earlier.taken
        }


def test_malformed_input_ends_one_request_only(loop: Loop) -> None:
    """One router with an older version stops the engine for all others."""
    loop.send(["add", 7, "not tokens"])
    loop.send(["add", 8, [1], 1, {"temperature": 99.0}, 0])
    loop.send({"what": "is this"})
    loop.send(request(9, max_tokens=1))
    assert wait_until(lambda: len(loop.deltas()) >= 3, 1)
    finished = {delta.id: delta.finish for delta in loop.deltas()}
    assert finished == {7: "error", 8: "error", 9: "length"}


def test_drain_and_abort(loop: Loop) -> None:
    """An abort of a request that just ended, or a request after the drain, gets no answer."""
    loop.send(request(1))
    assert wait_until(lambda: loop.deltas(), 1)
    loop.send(Control("drain"))
    loop.send(request(2))
    loop.send(Abort([1, 99]))
    ends = {1: "abort", 2: "error"}
    assert wait_until(lambda: {d.id: d.finish for d in loop.deltas()} == ends, 1)
    assert loop.core.stats().draining
