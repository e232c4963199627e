"""AsyncEngine: one engine process for an asyncio program, with text in and out."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from engine.config.engine_config import EngineConfig
from engine.errors import RequestFailed
from engine.library.outputs import RequestOutput
from engine.library.prompts import Messages, Prompt, load_tokenizer
from engine.library.request_manager import RequestManager
from engine.messages import AdapterInfo, EngineStats
from engine.process.client import START_SECONDS, OnProgress
from engine.sampling_params import SamplingParams
from engine.text.tokenizer import Tokenizer


class AsyncEngine(RequestManager):
    """Made by `start`. Coroutines belong to the loop it was started on; handles may go anywhere."""

    @classmethod
    async def start(
        cls,
        config: EngineConfig,
        *,
        tokenizer: Tokenizer | str | Path | None = None,
        progress: OnProgress | None = None,
        timeout: float = START_SECONDS,
    ) -> "AsyncEngine":
        """Start an engine process and wait until it can serve; arguments as for `LLM`.

        Raises ConfigError, EngineDead.
        """
        engine = cls(config, await asyncio.to_thread(load_tokenizer, config, tokenizer))
        await engine._start(timeout, progress)
        return engine

    async def generate(
        self,
        prompt: Prompt | Messages,
        params: SamplingParams | None = None,
        **options: Any,
    ) -> AsyncIterator[RequestOutput]:
        """Yield new output as it comes; options as for `start_request`. Closing the iterator, or
        cancelling the task that iterates, cancels the request.

        Raises RequestFailed when a choice failed, after everything else was yielded.
        """
        failed: RequestFailed | None = None
        with self.start_request(prompt, params, **options) as handle:
            async for out in handle:
                for choice in out.outputs:
                    if choice.finish_reason == "error" and failed is None:
                        code, _, message = choice.error.partition(": ")
                        failed = RequestFailed(message or choice.error, code=code)
                yield out
        if failed is not None:
            raise failed

    async def add_adapter(self, name: str, folder: str | Path) -> AdapterInfo:
        """Make a PEFT adapter known, or replace the one of that name: requests that run finish on
        the old weights. Raises AdapterError, EngineDead.
        """
        return await self._client.add_adapter(name, folder)

    async def remove_adapter(self, name: str) -> AdapterInfo:
        """Forget an adapter; requests that run finish on it. Raises AdapterError, EngineDead."""
        return await self._client.remove_adapter(name)

    async def stats(self) -> EngineStats:
        """The engine's state after all that was asked of it before. Raises EngineDead."""
        return await self._stats()

    async def sleep(self) -> None:
        """Give the memory of weights and caches back once no request is left; the weights stay in
        host memory. Returns when that is so. The next request, or `wake`, takes it again. Raises
        ConfigError without `sleep_in_host_memory`, EngineDead."""
        await self._sleep()

    async def wake(self) -> None:
        """End the sleep; returns when the engine could go on. Raises EngineDead, with the code
        device_taken where the device has no room any more."""
        await self._wake()

    async def close(self) -> None:
        """End the engine process. Open requests end with EngineDead. Idempotent."""
        await self._close()

    async def __aenter__(self) -> "AsyncEngine":
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()
