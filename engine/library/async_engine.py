"""AsyncEngine: one engine process for an asyncio program, with text in and out."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from engine.config import EngineConfig
from engine.errors import EngineDead, MantaError, Overloaded, RequestFailed
from engine.library.handle import RequestHandle
from engine.library.llm import load_tokenizer, start_request
from engine.library.outputs import RequestOutput
from engine.library.request_manager import Messages, Prompt, Session
from engine.messages import AdapterInfo, EngineStats, Ready, StepFrame
from engine.process.client import START_SECONDS, EngineClient, OnProgress
from engine.sampling_params import SamplingParams
from engine.text.tokenizer import Tokenizer


class AsyncEngine:
    """Made by `start`. Methods belong to the loop it was started on; handles may go anywhere."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._client = EngineClient(self._on_frame, self._on_death)
        self._asked: dict[int, asyncio.Future[EngineStats]] = {}  # by the ticket of the order
        self._idle: asyncio.Future[None] | None = None  # there once it drains

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
        found = await asyncio.to_thread(load_tokenizer, config, tokenizer)
        engine = cls(Session(found, config.seed))
        ready = await engine._client.start(config, timeout=timeout, progress=progress)
        engine._session.connect(engine._client, ready)
        return engine

    @property
    def ready(self) -> Ready:
        assert self._session.ready is not None
        return self._session.ready

    @property
    def tokenizer(self) -> Tokenizer | None:
        return self._session.tokenizer

    def add(
        self,
        prompt: Prompt | Messages,
        params: SamplingParams | None = None,
        request_id: str | None = None,
        **options: Any,
    ) -> RequestHandle:
        """Start a request from text, token ids or chat messages; returns at once.

        request_id: must not be that of an open request. options: detokenize, priority,
        cache_salt, adapter.
        Raises InvalidRequest, EngineDead, and Overloaded while it drains.
        """
        if self._idle is not None:
            raise Overloaded("the engine is draining", code="draining")
        return start_request(self._session, prompt, params, request_id=request_id, **options)

    async def stream(
        self,
        prompt: Prompt | Messages,
        params: SamplingParams | None = None,
        request_id: str | None = None,
        **options: Any,
    ) -> AsyncIterator[RequestOutput]:
        """Yield what is new as it comes. Leaving the loop cancels the request.

        Raises RequestFailed when a choice failed, after everything else was yielded.
        """
        handle = self.add(prompt, params, request_id, **options)
        try:
            failed: RequestFailed | None = None
            async for out in handle:
                failed = failed or _failure(out)
                yield out
            if failed is not None:
                raise failed
        finally:
            handle.release()

    async def generate(
        self,
        prompt: Prompt | Messages,
        params: SamplingParams | None = None,
        request_id: str | None = None,
        **options: Any,
    ) -> RequestOutput:
        """Wait for the whole answer. Cancelling it cancels the request. Raises RequestFailed."""
        handle = self.add(prompt, params, request_id, **options)
        try:
            out = await handle.async_sync()
        finally:
            handle.release()
        failed = _failure(out)
        if failed is not None:
            raise failed
        return out

    def abort(self, request_id: str) -> None:
        """Stop an open request; what it generated stays readable. Unknown ids are ignored."""
        handle = self._session.find(request_id)
        if handle is not None:
            handle.stop()

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
        ticket = self._client.control("stats")
        future = self._asked[ticket] = asyncio.get_running_loop().create_future()
        try:
            return await future
        finally:
            self._asked.pop(ticket, None)

    async def drain(self) -> None:
        """Refuse new requests and wait until the open ones have ended. Raises EngineDead."""
        self._client.control("drain")
        if self._idle is None:
            self._idle = asyncio.get_running_loop().create_future()
        await asyncio.shield(self._idle)

    def _on_frame(self, frame: StepFrame) -> None:
        self._session.on_frame(frame)
        for ticket, future in self._asked.items():
            if ticket <= frame.ticket:
                _resolve(future, frame.stats)
        if self._idle is not None and not self._session.num_open:
            _resolve(self._idle, None)

    def _on_death(self, error: MantaError) -> None:
        self._session.on_death(error)
        for future in (*self._asked.values(), self._idle):
            if future is not None and not future.done():
                future.set_exception(error)
                future.exception()  # whoever waits gets it; if nobody does, that is no news

    async def close(self) -> None:
        """End the engine process. Open requests end with EngineDead. Idempotent."""
        self._on_death(EngineDead("the engine was closed"))
        await self._client.close()

    async def __aenter__(self) -> "AsyncEngine":
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()


def _resolve(future: "asyncio.Future[Any]", value: Any) -> None:
    if not future.done():
        future.set_result(value)


def _failure(out: RequestOutput) -> RequestFailed | None:
    """What a failed choice in this output is to be raised as."""
    for choice in out.outputs:
        if choice.finish_reason == "error":
            code, _, message = choice.error.partition(": ")
            return RequestFailed(message or choice.error, code=code)
    return None
