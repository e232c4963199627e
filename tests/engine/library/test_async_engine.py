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
from engine.errors import EngineDead, InvalidRequest, RequestFailed, RequestReleased
from engine.library.outputs import RequestOutput, RequestStatus
from tests.engine.text import small_tokenizers

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


def test_the_iterator_and_the_whole_agree() -> None:
    """What is new each time does not add up to the answer as a whole."""

    async def body(engine: AsyncEngine) -> None:
        params = SamplingParams(max_tokens=50, n=2)
        whole = await engine.start_request("the cat", params)
        texts, tokens = ["", ""], [[], []]
        last = None
        async for last in engine.generate("the cat", params):
            for choice in last.outputs:
                texts[choice.index] += choice.text
                tokens[choice.index] += choice.token_ids
        assert last is not None and last.finished
        assert texts == [choice.text for choice in whole.outputs]
        assert tokens == [choice.token_ids for choice in whole.outputs]
        assert tokens[0] == want(len(whole.prompt_token_ids), 50)
        chat = [{"role": "user", "content": "hi"}]
        assert (await engine.start_request(chat, SamplingParams(max_tokens=1))).outputs[0].text

    with_engine(body)


def test_without_a_tokenizer_there_are_only_ids() -> None:
    """An engine with random weights and no tokenizer cannot be benchmarked."""

    async def body(engine: AsyncEngine) -> None:
        out = await engine.start_request([5], SamplingParams(max_tokens=3))
        assert (out.outputs[0].token_ids, out.outputs[0].text) == (want(1, 3), "")
        with pytest.raises(InvalidRequest, match="no tokenizer"):
            engine.start_request("text")

    with_engine(body, text=False)


async def read(engine: AsyncEngine, prompt: list[int], params: SamplingParams) -> None:
    async for _ in engine.generate(prompt, params):
        pass


async def whole(engine: AsyncEngine, prompt: list[int], params: SamplingParams) -> RequestOutput:
    with engine.start_request(prompt, params) as handle:
        return await handle


def test_leaving_cancels() -> None:
    """A client that goes away keeps its blocks until max_tokens."""

    async def body(engine: AsyncEngine) -> None:
        endless = SamplingParams(max_tokens=100000)
        task = asyncio.create_task(read(engine, [5], endless))
        waiting = asyncio.create_task(whole(engine, [6], endless))
        assert await until(lambda: engine._client.stats.running == 2)
        stream = engine.generate([7], endless)
        async for _ in stream:
            break
        await stream.aclose()  # type: ignore[attr-defined]
        for waiter in (task, waiting):
            waiter.cancel()
        await asyncio.gather(task, waiting, return_exceptions=True)
        assert await until(lambda: engine._client.stats.running == 0)
        assert await until(lambda: not engine._open)

    with_engine(body, "step_seconds=0.002,max_model_len=200000")


def test_stop_and_release() -> None:
    """A stop reaches another request, or a wait that was given up is kept for ever."""

    async def body(engine: AsyncEngine) -> None:
        first, other = (
            engine.start_request([5], SamplingParams(max_tokens=100000)) for _ in range(2)
        )
        assert await anext(aiter(first)) is not None
        first.stop()
        async with asyncio.timeout(2):
            out = await first
        assert out.outputs[0].finish_reason == "abort"
        assert first.status() is RequestStatus.INTERRUPTED
        assert other.status() is not RequestStatus.INTERRUPTED
        for _ in range(3):
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.02):
                    await other
        assert not other._waits
        waiting = asyncio.create_task(asyncio.wait_for(other, 2))
        await asyncio.sleep(0)
        other.release()
        with pytest.raises(RequestReleased):
            await waiting
        with pytest.raises(RequestReleased):
            await anext(aiter(other))

    with_engine(body, "step_seconds=0.002,max_model_len=200000")


def test_failures_are_raised_with_their_code() -> None:
    """A failed request looks like an empty answer."""

    async def body(engine: AsyncEngine) -> None:
        with pytest.raises(RequestFailed) as caught:
            await read(engine, [17], SamplingParams())
        assert (caught.value.code, caught.value.message) == (
            "poisoned",
            "the prompt has the poison token",
        )
        (choice,) = (await engine.start_request([17])).outputs
        assert (choice.finish_reason, choice.error[:9]) == ("error", "poisoned:")
        with pytest.raises(InvalidRequest):
            engine.start_request([])

    with_engine(body, "poison=17")


def test_stats_know_of_what_was_asked_before() -> None:
    """A frame that was under way answers: the request just begun, or aborted, is not in it."""

    async def body(engine: AsyncEngine) -> None:
        endless = SamplingParams(max_tokens=100000)
        engine.start_request([5], endless)  # frames come all the time
        for _ in range(50):
            handle = engine.start_request([6], endless)
            both = await asyncio.gather(engine.stats(), engine.stats())
            assert [stats.running for stats in both] == [2, 2]
            handle.stop()
            assert (await engine.stats()).running == 1

    with_engine(body, "max_model_len=200000")


def test_death_ends_all_waits() -> None:
    """Requests or stats hang when the engine is killed."""

    async def body(engine: AsyncEngine) -> None:
        endless = SamplingParams(max_tokens=100000)
        tasks: list[asyncio.Task[object]] = [
            *(asyncio.create_task(read(engine, [5], endless)) for _ in range(10)),
            *(asyncio.create_task(whole(engine, [5], endless)) for _ in range(10)),
        ]
        assert await until(lambda: engine._client.stats.running == 20)
        os.kill(engine.pid, signal.SIGSTOP)
        tasks.append(asyncio.create_task(engine.stats()))
        await asyncio.sleep(0)
        os.kill(engine.pid, signal.SIGKILL)
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
        handle = engine.start_request([5], SamplingParams(max_tokens=30))
        other = engine.start_request([5, 6], SamplingParams(max_tokens=30))
        out = await asyncio.to_thread(handle.sync, 5)
        assert out.outputs[0].token_ids == want(1, 30)

        async def elsewhere() -> RequestOutput:
            return await other

        out = await asyncio.to_thread(lambda: asyncio.run(elsewhere()))
        assert out.outputs[0].token_ids == want(2, 30)

    with_engine(body, "step_seconds=0.002")


def test_a_thousand_random_requests_leave_nothing() -> None:
    """Each cancelled request leaves a task, a descriptor, a thread or an engine request behind."""

    async def body(engine: AsyncEngine) -> None:
        rng = random.Random(0)
        lost: list[str] = []

        async def random_request() -> None:
            prompt = [rng.randrange(VOCAB) for _ in range(rng.randrange(1, 20))]
            params = SamplingParams(max_tokens=rng.randrange(1, 60), n=rng.choice([1, 1, 2]))
            kind = rng.randrange(5)
            if kind == 0:
                out = await whole(engine, prompt, params)
                if out.outputs[0].token_ids != want(len(prompt), params.max_tokens or 0):
                    lost.append("generate")
            elif kind == 1:
                left = rng.randrange(1, 10)
                stream = engine.generate(prompt, params)
                async for _ in stream:
                    left -= 1
                    if not left:
                        break
                await stream.aclose()  # type: ignore[attr-defined]
            elif kind == 2:
                handle = engine.start_request(prompt, params)
                await asyncio.sleep(rng.random() * 0.01)
                handle.stop()
                out = await handle
                tokens = out.outputs[0].token_ids
                if tokens != want(len(prompt), len(tokens)):
                    lost.append("abort")
                handle.release()
            elif kind == 3:
                engine.start_request(prompt, params).release()
            else:
                task = asyncio.create_task(whole(engine, prompt, params))
                await asyncio.sleep(rng.random() * 0.01)
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)

        tasks = len(asyncio.all_tasks())  # main and, before Python 3.12, this
        before = (len(os.listdir("/proc/self/fd")), threading.active_count())
        for _ in range(20):
            await asyncio.gather(*(random_request() for _ in range(50)))
        assert not lost
        stats = await engine.stats()
        assert (stats.running, stats.waiting) == (0, 0)
        while stats.free_blocks < stats.total_blocks:  # a step in flight still writes to the others
            await asyncio.sleep(0.01)
            stats = await engine.stats()
        assert not engine._open
        assert len(asyncio.all_tasks()) == tasks
        assert (len(os.listdir("/proc/self/fd")), threading.active_count()) == before
        gc.collect()
        handles = [o for o in gc.get_objects() if type(o).__name__ == "RequestHandle"]
        assert len(handles) < 5

    with_engine(body)
