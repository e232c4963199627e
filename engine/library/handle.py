"""RequestHandle: one request in flight, read from threads or from asyncio.

Deltas come from the session (the client's reader thread, or the event loop); any thread reads. Text
is made when it is read, in bulk, except where a stop string must be seen at once.
"""

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import TYPE_CHECKING, Protocol

from engine.batch import TokenLogprobs
from engine.errors import EngineDead, MantaError, RequestReleased
from engine.library.outputs import CompletionOutput, RequestOutput, RequestStatus
from engine.messages import Delta

if TYPE_CHECKING:
    from engine.text.detokenizer import ChoiceDecoder

_Waiter = tuple[asyncio.AbstractEventLoop, "asyncio.Future[None]"]


class Owner(Protocol):
    """What a handle asks of the session that made it."""

    def abort(self, ids: Sequence[int]) -> None:
        """Stop these; each that is open ends with an "abort" delta."""
        ...

    def forget(self, ids: Sequence[int]) -> None:
        """Deliver nothing more for these."""
        ...


class _Choice:
    """One choice: what came, how much of it is text already, how much was read."""

    __slots__ = ("_decoded", "_decoder", "_eager", "_read", "_stop_token", "_texts", "whole")

    def __init__(self, index: int, decoder: "ChoiceDecoder | None", eager: bool) -> None:
        self.whole = CompletionOutput(index)  # all so far; its text only after `all`
        self._decoder = decoder
        self._eager = eager
        self._texts: list[str] = []
        self._decoded = 0  # of whole.token_ids, in _texts
        self._read = (0, 0)  # of whole.token_ids and of _texts; (-1, -1) once the end was read
        self._stop_token: int | None = None

    @property
    def ended(self) -> bool:
        return self.whole.finish_reason is not None

    @property
    def has_news(self) -> bool:
        read = self._read[0]
        return read >= 0 and (self.ended or read < len(self.whole.token_ids))

    def push(self, delta: Delta) -> bool:
        """Take a delta; whether the choice has ended with it."""
        whole, tokens, logprobs = self.whole, delta.token_ids, delta.logprobs
        finish = delta.finish or None
        self._stop_token = delta.stop_token
        if self._eager:
            finish, kept = self._decode(tokens, delta.finish)
            tokens = tokens[:kept]
            logprobs = None if logprobs is None else logprobs[:kept]
        whole.token_ids += tokens
        if logprobs is not None:
            whole.logprobs = [*(whole.logprobs or ()), *logprobs]
        if finish is not None:
            whole.finish_reason = finish
            whole.error = delta.error
        return finish is not None

    def _decode(self, tokens: list[int], finish: str) -> tuple[str | None, int]:
        assert self._decoder is not None
        decoded = self._decoder.feed(tokens, finish, self._stop_token)
        self._texts.append(decoded.text)
        self.whole.stop_reason = decoded.stop_reason
        return decoded.finish_reason, decoded.num_tokens

    def _catch_up(self) -> None:
        """Make text of what has come since the last time."""
        decoder, tokens = self._decoder, self.whole.token_ids
        if decoder is None or self._eager or decoder.finished:
            return
        self._decode(tokens[self._decoded :], self.whole.finish_reason or "")
        self._decoded = len(tokens)

    def take(self) -> CompletionOutput:
        """What is new since the last take. Legal if has_news."""
        self._catch_up()
        whole, (tokens, texts) = self.whole, self._read
        self._read = (-1, -1) if self.ended else (len(whole.token_ids), len(self._texts))
        return CompletionOutput(
            whole.index,
            "".join(self._texts[texts:]),
            whole.token_ids[tokens:],
            whole.finish_reason,
            whole.stop_reason,
            None if whole.logprobs is None else whole.logprobs[tokens:],
            whole.error,
        )

    def all(self) -> CompletionOutput:
        self._catch_up()
        self.whole.text = "".join(self._texts)
        return self.whole


class RequestHandle:
    """A request that was started; made by `LLM.start_request` and `AsyncEngine.add`.

    Blocking methods (get, sync) must not be called on the event loop that an AsyncEngine runs on;
    aget and async_sync are their twins for there. All methods but release raise RequestReleased
    after ``release``, and those that wait raise EngineDead when the engine process ends first (what
    had come before can still be read).
    """

    def __init__(
        self,
        owner: Owner,
        request_id: str,
        prompt: str | None,
        prompt_token_ids: list[int],
        ids: Sequence[int],
        decoders: "Sequence[ChoiceDecoder | None]",
        *,
        eager: bool,
    ) -> None:
        self.request_id = request_id
        self._owner = owner
        self._ids = list(ids)  # in the engine, by choice
        self._prompt = prompt
        self._prompt_token_ids = prompt_token_ids
        self._choices = [_Choice(i, decoder, eager) for i, decoder in enumerate(decoders)]
        self._running = len(self._choices)
        self._cached: int | None = None
        self._prompt_logprobs: list[TokenLogprobs | None] | None = None
        self._prompt_logprobs_read = 0
        self._error: MantaError | None = None
        self._lock = threading.Lock()
        self._news = threading.Condition(self._lock)
        self._end = threading.Condition(self._lock)
        self._waiters: list[_Waiter] = []  # coroutines; woken on every delta

    # For the session.

    def push(self, choice: int, delta: Delta) -> bool:
        """Take a delta. True: a stop string ended this choice, and the engine should hear of it."""
        with self._lock:
            item = self._choices[choice]
            if item.ended:
                return False
            ended = item.push(delta)
            if delta.cached >= 0:
                self._cached = delta.cached
            if delta.prompt_logprobs is not None and choice == 0:
                self._prompt_logprobs = [*(self._prompt_logprobs or ()), *delta.prompt_logprobs]
            if ended:
                self._running -= 1
            self._wake()
            return ended and not delta.finish

    def fail(self, error: MantaError) -> None:
        """Nothing more will come."""
        with self._lock:
            if self._running and self._error is None:
                self._error = error
                self._wake()

    def _wake(self) -> None:
        self._news.notify_all()
        if self._over:
            self._end.notify_all()
        if self._waiters:
            waiters, self._waiters = self._waiters, []
            for loop, future in waiters:
                if asyncio._get_running_loop() is loop:
                    _set(future)
                else:
                    with contextlib.suppress(RuntimeError):  # that loop is closed
                        loop.call_soon_threadsafe(_set, future)

    @property
    def ended(self) -> bool:
        """No choice runs any more."""
        return self._over

    # For the caller.

    def get(self, timeout: float | None = None) -> RequestOutput | None:
        """Wait for something new and return only that; None when all has ended and been read.

        Raises TimeoutError after timeout seconds.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        with self._lock:
            while True:
                done, out = self._poll()
                if done:
                    return out
                if not self._news.wait(_left(deadline)):
                    raise TimeoutError(f"nothing new for {timeout} s")

    def get_nowait(self) -> RequestOutput | None:
        """What is new, without waiting; None if there is nothing."""
        with self._lock:
            return self._poll()[1]

    async def aget(self, timeout: float | None = None) -> RequestOutput | None:
        """`get` for asyncio."""
        if timeout is not None:
            async with asyncio.timeout(timeout):
                return await self.aget()
        while True:
            with self._lock:
                done, out = self._poll()
                waiter = None if done else self._add_waiter()
            if waiter is None:
                return out
            await self._wait(waiter)

    def status(self) -> RequestStatus:
        with self._lock:
            self._check()
            if self._error is not None:
                return RequestStatus.INTERRUPTED
            reasons = [choice.whole.finish_reason for choice in self._choices]
            if self._running == 0:
                stopped = "abort" in reasons or "error" in reasons
                return RequestStatus.INTERRUPTED if stopped else RequestStatus.FINISHED
            most = max(len(choice.whole.token_ids) for choice in self._choices)
            names = (RequestStatus.INIT, RequestStatus.CONTEXT_FINISHED, RequestStatus.GENERATING)
            return names[min(most, 2)]

    def sync(self, timeout: float | None = None) -> RequestOutput:
        """Wait for the end and return the whole request; `get` still gives what it had not given.

        Raises TimeoutError after timeout seconds.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        with self._lock:
            while not self._over:
                self._check()
                if not self._end.wait(_left(deadline)):
                    raise TimeoutError(f"not finished after {timeout} s")
            return self._whole()

    async def async_sync(self, timeout: float | None = None) -> RequestOutput:
        """`sync` for asyncio."""
        if timeout is not None:
            async with asyncio.timeout(timeout):
                return await self.async_sync()
        while True:
            with self._lock:
                self._check()
                if self._over:
                    return self._whole()
                waiter = self._add_waiter()
            await self._wait(waiter)

    def stop(self) -> None:
        """Cancel. The engine frees what it holds in its next step; what was generated stays
        readable.
        """
        with self._lock:
            self._check()
            ids = self._open_ids()
        with contextlib.suppress(EngineDead):  # then there is nothing to cancel
            self._owner.abort(ids)

    def release(self) -> None:
        """Cancel if it runs, and give the memory back. Idempotent; any later use is an error."""
        with self._lock:
            ids = self._open_ids()
            self._choices = []
            self._prompt_token_ids = []
            self._prompt_logprobs = None
            self._error = RequestReleased(f"request {self.request_id} was released")
            self._wake()
        self._owner.forget(self._ids)
        if ids:
            with contextlib.suppress(EngineDead):
                self._owner.abort(ids)

    def __iter__(self) -> Iterator[RequestOutput]:
        """`get` until the end."""
        while (out := self.get()) is not None:
            yield out

    async def __aiter__(self) -> AsyncIterator[RequestOutput]:
        """`aget` until the end."""
        while (out := await self.aget()) is not None:
            yield out

    # Under the lock.

    @property
    def _over(self) -> bool:
        return self._running == 0 or self._error is not None

    def _open_ids(self) -> list[int]:
        return [
            request_id
            for request_id, choice in zip(self._ids, self._choices, strict=False)
            if not choice.ended
        ]

    def _check(self) -> None:
        if isinstance(self._error, RequestReleased):
            raise self._error

    def _poll(self) -> tuple[bool, RequestOutput | None]:
        """(whether there is an answer now, the answer)."""
        self._check()
        outputs = [choice.take() for choice in self._choices if choice.has_news]
        scores = self._prompt_logprobs
        if outputs:
            if scores is not None:
                read, self._prompt_logprobs_read = self._prompt_logprobs_read, len(scores)
                scores = scores[read:] or None
            return True, self._output(outputs, scores)
        if self._error is not None:
            raise self._error
        return self._running == 0, None

    def _whole(self) -> RequestOutput:
        if self._error is not None:
            raise self._error
        return self._output([choice.all() for choice in self._choices], self._prompt_logprobs)

    def _output(
        self, outputs: list[CompletionOutput], scores: list[TokenLogprobs | None] | None
    ) -> RequestOutput:
        return RequestOutput(
            self.request_id,
            self._prompt,
            self._prompt_token_ids,
            outputs,
            self._running == 0,
            self._cached,
            scores,
        )

    def _add_waiter(self) -> _Waiter:
        loop = asyncio.get_running_loop()
        waiter = (loop, loop.create_future())
        self._waiters.append(waiter)
        return waiter

    async def _wait(self, waiter: _Waiter) -> None:
        try:
            await waiter[1]
        except BaseException:
            with self._lock:
                if waiter in self._waiters:  # cancelled before anything came
                    self._waiters.remove(waiter)
            raise


def _set(future: "asyncio.Future[None]") -> None:
    if not future.done():
        future.set_result(None)


def _left(deadline: float | None) -> float | None:
    return None if deadline is None else max(0.0, deadline - time.monotonic())
