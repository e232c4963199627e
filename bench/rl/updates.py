"""Updates of the weights while streams run: the streams' pause, and the weights' versions.

The version of the weights that produced each token is checked. An update is one of these sequences
of a trainer's calls (`way`):

- `running`: the tensors are received and replaced without a call of `pause`.
- `keep-last`: the tensors are received while steps run; the replacement is within `pause("keep")`.
- `keep`: the whole update is within `pause("keep")`, as in vLLM's trainers.
"""

import asyncio
import contextlib
import random
import socket
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.report.result_file import Line
from bench.rl.trainer import TrainerProcess, token_of
from engine import AsyncEngine, EngineConfig, SamplingParams

WAYS = ("running", "keep-last", "keep")
PROMPT = 32
SETTLE_SECONDS = 60.0  # maximum wait until every stream continues


@dataclass
class Streams:
    """A load of `count` concurrent requests without end, with observations of their tokens.

    tokens: maximum length of an answer; the minimum is half of it.
    longest: the longest gap between two tokens of any stream since the last call of `window`.
    token_of_version: version of the weights -> the token that it produces.
    """

    engine: AsyncEngine
    count: int
    tokens: int
    vocab: int
    token_of_version: dict[str, int] = field(default_factory=dict)
    longest: float = 0.0
    num_tokens: int = 0
    wrong: int = 0  # tokens that another version than the reported one produced
    _last: dict[int, float] = field(default_factory=dict)
    _tasks: list[asyncio.Task[None]] = field(default_factory=list)

    def start(self) -> None:
        self._tasks = [asyncio.create_task(self._run(number)) for number in range(self.count)]

    async def _run(self, number: int) -> None:
        draw = random.Random(number)
        while True:
            length = draw.randint(self.tokens // 2, self.tokens)
            prompt = [draw.randrange(3, self.vocab) for _ in range(PROMPT)]
            params = SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True)
            before = 0.0
            async for output in self.engine.generate(prompt, params, detokenize=False):
                now = time.perf_counter()
                if before:
                    self.longest = max(self.longest, now - before)
                self._last[number] = before = now
                choice = output.outputs[0]
                at = 0
                for version, count in choice.versions:
                    token = self.token_of_version.get(version)
                    new = choice.token_ids[at : at + count]
                    self.wrong += sum(item != token for item in new)
                    at += count
                self.num_tokens += at

    async def all_on(self) -> None:
        """Wait until every stream has produced a token after this call."""
        since = time.perf_counter()
        while not all(self._last.get(number, 0) > since for number in range(self.count)):
            for task in self._tasks:
                if task.done():
                    task.result()  # raises the exception that ended the task
            if time.perf_counter() - since > SETTLE_SECONDS:
                raise RuntimeError("some streams have stopped")
            await asyncio.sleep(0.005)

    async def window(self) -> float:
        """Wait until every stream has continued, and begin a new window.

        Returns the longest gap of the window that ends.
        """
        await self.all_on()
        ended, self.longest = self.longest, 0.0
        return ended

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


async def update(
    engine: AsyncEngine, trainer: TrainerProcess, broadcast: bool, way: str, version: str
) -> dict[str, float]:
    """Update the engine to the trainer's weights; return the seconds of each part of the update."""
    seconds: dict[str, float] = {}

    @contextlib.asynccontextmanager
    async def timed(part: str) -> Any:
        began = time.perf_counter()
        yield
        seconds[part] = round(time.perf_counter() - began, 4)

    async with timed("update_s"):
        if way == "keep":
            async with timed("pause_order_s"):
                await engine.pause("keep")
        await engine.start_weight_update()
        async with timed("take_s"):  # receive the tensors into the staging folder
            info = await asyncio.to_thread(trainer.order, "announce" if broadcast else "share")
            if broadcast:
                sending = asyncio.create_task(asyncio.to_thread(trainer.order, "send"))
                await engine.update_weights(info)
                await sending
            else:
                await engine.update_weights(info)
        if way == "keep-last":
            async with timed("pause_order_s"):
                await engine.pause("keep")
        async with timed("finish_s"):  # check and replace the weights
            await engine.finish_weight_update(version=version)
        if way != "running":
            await engine.resume()
    stats = await engine.stats()
    return seconds | {"replace_s": round(stats.update_seconds, 4)}


async def measure(
    config: EngineConfig,
    *,
    broadcast: bool,
    trainer_device: str,
    streams: int,
    tokens: int,
    seconds: float,
    most: int,
    ways: tuple[str, ...] = WAYS,
) -> list[Line]:
    """Return a line for each update: its way, its seconds, gaps and tokens.

    broadcast: whether the trainer sends weights by NCCL (gloo on CPUs), instead of sharing memory.
    streams, tokens: number of concurrent requests, and the tokens of each.
    seconds: time after which no further update begins. most: maximum updates of each way.
    """
    began = time.perf_counter()
    lines: list[Line] = []
    cuda = trainer_device != "cpu"
    async with await AsyncEngine.start(config) as engine:
        ready = time.perf_counter() - began
        trainer = await asyncio.to_thread(
            lambda: TrainerProcess(
                Path(config.model),
                "bfloat16" if config.dtype == "auto" else config.dtype,
                trainer_device,
                shared=not cuda and not broadcast,
            )
        )
        load = Streams(engine, streams, tokens, engine.ready.vocab_size)
        try:
            if broadcast:
                joining = await asyncio.to_thread(trainer.order, "join", free_port())
                await engine.init_weight_transfer(joining)
            else:
                await engine.init_weight_transfer({})
            for number in range(1 + most * len(ways)):
                # The first update is a warm-up, which allocates buffers; streams begin after it.
                way = "running" if not number else ways[(number - 1) % len(ways)]
                spent = time.perf_counter() - began
                longest_update = max((line["update_s"] for line in lines), default=0.0)
                if lines and spent + 2 * longest_update > seconds:
                    break
                await asyncio.to_thread(trainer.order, "make", number)
                version = f"v{number}"
                load.token_of_version[version] = token_of(number, load.vocab)
                without = 0.0
                if number:
                    await load.window()
                    await asyncio.sleep(min(2.0, seconds / 30))
                    without = await load.window()
                parts = await update(engine, trainer, broadcast, way, version)
                gap = await load.window() if number else 0.0
                line = {
                    "way": way if number else "first",
                    "version": version,
                    **parts,
                    "gap_s": round(gap, 4),
                    "gap_without_s": round(without, 4),
                    "tokens": load.num_tokens,
                    "wrong": load.wrong,
                    "ready_s": round(ready, 2),
                }
                lines.append(line)
                load.wrong = load.num_tokens = 0
                if not number:
                    load.start()
        finally:
            await load.close()
            await asyncio.to_thread(trainer.close)
    return lines
