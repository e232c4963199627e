"""AsyncEngine: streams, cancellation, and nothing left behind."""

import asyncio
import gc
import os
import random
import signal
import threading
import time
from collections.abc import Awaitable, Callable

import pytest

from engine import AsyncEngine, EngineConfig, SamplingParams
from engine.errors import EngineDead, InvalidRequest, Overloaded, RequestFailed, RequestReleased
from engine.library.outputs import RequestStatus
from tests.engine import small_tokenizers

FIRST, VOCAB = 32, 390


def want(prompt: int, count: int) -> list[int]:
    return [FIRST + (prompt + i) % (VOCAB - FIRST) for i in range(count)]


def with_engine(
    body: Callable[[AsyncEngine], Awaitable[None]], options: str = "", text: bool = True
) -> None:
    async def main() -> None:
        config = EngineConfig(model=f"fake:vocab_size={VOCAB},{options}")
        tokenizer = small_tokenizers.byte_level() if text else None
        async with await AsyncEngine.start(config, tokenizer=tokenizer) as engine:
            await asyncio.wait_for(body(engine), 30)

    asyncio.run(main())


async def until(condition: Callable[[], object], seconds: float = 2.0) -> bool:
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        await asyncio.sleep(0.002)
    return bool(condition())


def test_stream_and_generate_agree() -> None:
    """Deltas of a stream do not add up to the answer without streaming."""

    async def body(engine: AsyncEngine) -> None:
        params = SamplingParams(max_tokens=50, n=2)
        whole = await engine.generate("the cat", params)
        texts, tokens = ["", ""], [[], []]
        last = None
        async for last in engine.stream("the cat", params):
            for choice in last.outputs:
                texts[choice.index] += choice.text
                tokens[choice.index] += choice.token_ids
        assert last is not None and last.finished
        assert texts == [choice.text for choice in whole.outputs]
        assert tokens == [choice.token_ids for choice in whole.outputs]
        assert tokens[0] == want(len(whole.prompt_token_ids), 50)
        chat = [{"role": "user", "content": "hi"}]
        assert (await engine.generate(chat, SamplingParams(max_tokens=1))).outputs[0].text

    with_engine(body)


def test_without_a_tokenizer_there_are_only_ids() -> None:
    """An engine with random weights and no tokenizer cannot be benchmarked."""

    async def body(engine: AsyncEngine) -> None:
        out = await engine.generate([5], SamplingParams(max_tokens=3))
        assert (out.outputs[0].token_ids, out.outputs[0].text) == (want(1, 3), "")
        with pytest.raises(InvalidRequest, match="no tokenizer"):
            engine.add("text")

    with_engine(body, text=False)


def test_leaving_a_stream_cancels_it() -> None:
    """A client that goes away keeps its blocks until max_tokens."""

    async def body(engine: AsyncEngine) -> None:
        async def read() -> None:
            async for _ in engine.stream([5], SamplingParams(max_tokens=100000)):
                pass

        task = asyncio.create_task(read())
        waiting = asyncio.create_task(engine.generate([6], SamplingParams(max_tokens=100000)))
        assert await until(lambda: engine._client.stats.running == 2)
        stream = engine.stream([7], SamplingParams(max_tokens=100000))
        async for _ in stream:
            break
        await stream.aclose()  # type: ignore[attr-defined]
        for each in (task, waiting):
            each.cancel()
        await asyncio.gather(task, waiting, return_exceptions=True)
        assert await until(lambda: engine._client.stats.running == 0)
        assert engine._session.num_open == 0

    with_engine(body, "step_seconds=0.002,max_model_len=200000")


def test_abort_by_id() -> None:
    """An abort reaches another request, or one with the same id cannot be started afterwards."""

    async def body(engine: AsyncEngine) -> None:
        handles = [
            engine.add([5], SamplingParams(max_tokens=100000), request_id=name) for name in "ab"
        ]
        with pytest.raises(InvalidRequest, match="in use"):
            engine.add([5], request_id="a")
        assert await handles[0].aget() is not None
        engine.abort("a")
        engine.abort("unknown")
        out = await handles[0].async_sync(timeout=2)
        assert out.outputs[0].finish_reason == "abort"
        assert handles[0].status() is RequestStatus.INTERRUPTED
        assert handles[1].status() is not RequestStatus.INTERRUPTED
        engine.add([5], SamplingParams(max_tokens=1), request_id="a")
        with pytest.raises(TimeoutError):
            await handles[1].async_sync(timeout=0.05)
        handles[1].release()
        with pytest.raises(RequestReleased):
            await handles[1].aget()

    with_engine(body, "step_seconds=0.002,max_model_len=200000")


def test_failures_are_raised_with_their_code() -> None:
    """A failed request looks like an empty answer."""

    async def body(engine: AsyncEngine) -> None:
        with pytest.raises(RequestFailed) as caught:
            await engine.generate([17])
        assert (caught.value.code, caught.value.message) == (
            "poisoned",
            "the prompt has the poison token",
        )
        with pytest.raises(RequestFailed):
            async for _ in engine.stream([17]):
                pass
        with pytest.raises(InvalidRequest):
            engine.add([])

    with_engine(body, "poison=17")


def test_stats_and_drain() -> None:
    """A rolling update cuts the streams of the old replica, or waits for ever."""

    async def body(engine: AsyncEngine) -> None:
        assert (await engine.stats()).running == 0
        handle = engine.add([5], SamplingParams(max_tokens=50))
        assert (await engine.stats()).running == 1
        drained = asyncio.create_task(engine.drain())
        await asyncio.sleep(0.02)
        assert not drained.done()
        with pytest.raises(Overloaded):
            engine.add([6])
        await drained
        assert (await handle.async_sync()).outputs[0].finish_reason == "length"
        await engine.drain()
        assert (await engine.stats()).draining

    with_engine(body, "step_seconds=0.002")


def test_stats_know_of_what_was_asked_before() -> None:
    """A frame that was under way answers: the request just begun, or aborted, is not in it."""

    async def body(engine: AsyncEngine) -> None:
        endless = SamplingParams(max_tokens=100000)
        engine.add([5], endless)  # frames come all the time
        for _ in range(50):
            handle = engine.add([6], endless)
            both = await asyncio.gather(engine.stats(), engine.stats())
            assert [stats.running for stats in both] == [2, 2]
            engine.abort(handle.request_id)
            assert (await engine.stats()).running == 1

    with_engine(body, "max_model_len=200000")


def test_death_ends_all_waits() -> None:
    """Streams, stats or a drain hang when the engine is killed."""

    async def body(engine: AsyncEngine) -> None:
        endless = SamplingParams(max_tokens=100000)
        tasks: list[asyncio.Task[object]] = [
            asyncio.create_task(engine.generate([5], endless)) for _ in range(20)
        ]
        assert await until(lambda: engine._client.stats.running == 20)
        tasks.append(asyncio.create_task(engine.drain()))
        await asyncio.sleep(0)
        os.kill(engine._client.pid, signal.SIGKILL)
        began = time.monotonic()
        done = await asyncio.gather(*tasks, return_exceptions=True)
        assert time.monotonic() - began < 0.2
        assert all(isinstance(error, EngineDead) for error in done)
        with pytest.raises(EngineDead):
            await engine.stats()

    with_engine(body, "step_seconds=0.002,max_model_len=200000")


def test_reading_from_another_thread() -> None:
    """A wait in a thread is not woken by the loop, or a second loop's future by the first."""

    async def body(engine: AsyncEngine) -> None:
        handle = engine.add([5], SamplingParams(max_tokens=30))
        other = engine.add([5, 6], SamplingParams(max_tokens=30))
        whole = await asyncio.to_thread(handle.sync, 5)
        assert whole.outputs[0].token_ids == want(1, 30)
        whole = await asyncio.to_thread(lambda: asyncio.run(other.async_sync(5)))
        assert whole.outputs[0].token_ids == want(2, 30)

    with_engine(body, "step_seconds=0.002")


def test_a_thousand_random_requests_leave_nothing() -> None:
    """Each cancelled request leaves a task, a descriptor, a thread or an engine request behind."""

    async def body(engine: AsyncEngine) -> None:
        rng = random.Random(0)
        lost: list[str] = []

        async def one() -> None:
            prompt = [rng.randrange(VOCAB) for _ in range(rng.randrange(1, 20))]
            params = SamplingParams(max_tokens=rng.randrange(1, 60), n=rng.choice([1, 1, 2]))
            kind = rng.randrange(5)
            if kind == 0:
                out = await engine.generate(prompt, params)
                if out.outputs[0].token_ids != want(len(prompt), params.max_tokens or 0):
                    lost.append("generate")
            elif kind == 1:
                left = rng.randrange(1, 10)
                stream = engine.stream(prompt, params)
                async for _ in stream:
                    left -= 1
                    if not left:
                        break
                await stream.aclose()  # type: ignore[attr-defined]
            elif kind == 2:
                handle = engine.add(prompt, params)
                await asyncio.sleep(rng.random() * 0.01)
                engine.abort(handle.request_id)
                out = await handle.async_sync()
                tokens = out.outputs[0].token_ids
                if tokens != want(len(prompt), len(tokens)):
                    lost.append("abort")
                handle.release()
            elif kind == 3:
                engine.add(prompt, params).release()
            else:
                task = asyncio.create_task(engine.generate(prompt, params))
                await asyncio.sleep(rng.random() * 0.01)
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)

        before = (len(os.listdir("/proc/self/fd")), threading.active_count())
        for _ in range(20):
            await asyncio.gather(*(one() for _ in range(50)))
        assert not lost
        stats = await engine.stats()
        assert (stats.running, stats.waiting) == (0, 0)
        while stats.free_blocks < stats.total_blocks:  # a step in flight still writes to the others
            await asyncio.sleep(0.01)
            stats = await engine.stats()
        assert engine._session.num_open == 0
        assert not engine._session._handles
        assert len(asyncio.all_tasks()) == 2  # main and this
        assert (len(os.listdir("/proc/self/fd")), threading.active_count()) == before
        gc.collect()
        handles = [o for o in gc.get_objects() if type(o).__name__ == "RequestHandle"]
        assert len(handles) < 5

    with_engine(body)
