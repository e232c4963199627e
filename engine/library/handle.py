"""RequestHandle: one request in flight, read from threads or from asyncio.

The engine's frames push to it on one thread; any thread or event loop reads. Text is made when it
is read, in bulk, except where a stop string must be seen at once.
"""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Generator, Iterator, Sequence
from concurrent.futures import Future
from types import EllipsisType
from typing import TYPE_CHECKING, Any

from engine.batch import TokenLogprobs
from engine.errors import MantaError, RequestReleased
from engine.library.outputs import CompletionOutput, RequestOutput, RequestStatus
from engine.messages import Delta

if TYPE_CHECKING:
    from engine.text.detokenizer import ChoiceDecoder

Find = Callable[[], RequestOutput | EllipsisType | None]  # `...`: it is not there yet


class _ChoiceState:
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
    """A request that `start_request` of an `LLM` or `AsyncEngine` started.

        for out in handle: ...          blocking, what is new          get, get_nowait
        async for out in handle: ...    the same for asyncio
        handle.sync()                   blocking, the whole request
        await handle                    the same for asyncio
        with handle: ...                releases it at the end

    Blocking calls must not be made on the event loop that an AsyncEngine runs on. Everything but
    release raises RequestReleased after ``release``, and what waits raises EngineDead when the
    engine process ends first (what had come before can still be read). A wait that ends early
    (timeout, cancellation) leaves the request running.
    """

    def __init__(
        self,
        prompt: str | None,
        prompt_token_ids: list[int],
        ids: Sequence[int],
        decoders: "Sequence[ChoiceDecoder | None]",
        abort: Callable[[list[int]], None],
        *,
        eager: bool,
    ) -> None:
        """ids: in the engine, by choice. abort(ids): each that is open ends with an "abort" delta.
        eager: text is made of each delta as it comes."""
        self._ids = ids
        self._abort = abort
        self._prompt = prompt
        self._prompt_token_ids = prompt_token_ids
        self._choices = [_ChoiceState(i, decoder, eager) for i, decoder in enumerate(decoders)]
        self._running = len(self._choices)
        self._cached: int | None = None
        self._prompt_logprobs: list[TokenLogprobs | None] | None = None
        self._prompt_logprobs_read = 0
        self._error: MantaError | None = None
        self._lock = threading.Lock()
        self._waits: dict[Future[None], Find] = {}  # who waits, and for what

    # For who started it.

    def push(self, choice: int, delta: Delta) -> bool:
        """Take a delta. True: a stop string ended this choice, and the engine should hear of it."""
        with self._lock:
            if not self._choices or self._choices[choice].ended:
                return False
            ended = self._choices[choice].push(delta)
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

    # For the caller.

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

    def get(self, timeout: float | None = None) -> RequestOutput | None:
        """Wait for something new and return only that; None when all has ended and been read.

        Raises TimeoutError after timeout seconds.
        """
        return self._block(self._news, timeout)

    def get_nowait(self) -> RequestOutput | None:
        """What is new, without waiting; None if there is nothing."""
        with self._lock:
            out = self._news()
        return None if out is ... else out

    def sync(self, timeout: float | None = None) -> RequestOutput:
        """Wait for the end and return the whole request; `get` still gives what it had not given.

        Raises TimeoutError after timeout seconds.
        """
        out = self._block(self._whole, timeout)
        assert out is not None
        return out

    def stop(self) -> None:
        """Cancel. The engine frees what it holds in its next step; what was generated stays
        readable.
        """
        with self._lock:
            self._check()
            ids = self._open_ids()
        self._abort(ids)

    def release(self) -> None:
        """Cancel if it runs, and give the memory back. Idempotent; any later use is an error."""
        with self._lock:
            ids = self._open_ids()
            self._choices = []
            self._prompt_token_ids = []
            self._prompt_logprobs = None
            self._error = RequestReleased("the request was released")
            self._wake()
        self._abort(ids)

    def __enter__(self) -> "RequestHandle":
        return self

    def __exit__(self, *exc: object) -> None:
        self.release()

    def __iter__(self) -> Iterator[RequestOutput]:
        while (out := self.get()) is not None:
            yield out

    async def __aiter__(self) -> AsyncIterator[RequestOutput]:
        while (out := await self._wait(self._news)) is not None:
            yield out

    def __await__(self) -> Generator[Any, None, RequestOutput]:
        out = yield from self._wait(self._whole).__await__()
        assert out is not None
        return out

    # Waiting: `find` is asked under the lock, again after each wake.

    def _block(self, find: Find, timeout: float | None) -> RequestOutput | None:
        deadline = None if timeout is None else time.monotonic() + timeout
        while isinstance(found := self._ask(find), Future):
            try:
                found.result(None if deadline is None else max(0.0, deadline - time.monotonic()))
            except TimeoutError:
                raise TimeoutError(f"still waiting after {timeout} s") from None
            finally:
                self._forget(found)
        return found

    async def _wait(self, find: Find) -> RequestOutput | None:
        while isinstance(found := self._ask(find), Future):
            try:
                await asyncio.wrap_future(found)
            finally:
                self._forget(found)
        return found

    def _ask(self, find: Find) -> "RequestOutput | Future[None] | None":
        with self._lock:
            out = find()
            if out is not ...:
                return out
            future: Future[None] = Future()
            self._waits[future] = find
            return future

    def _forget(self, future: "Future[None]") -> None:
        with self._lock:
            self._waits.pop(future, None)

    # Under the lock.

    def _wake(self) -> None:
        for future, find in list(self._waits.items()):
            if self._over or find == self._news:
                del self._waits[future]
                if future.set_running_or_notify_cancel():
                    future.set_result(None)

    @property
    def _over(self) -> bool:
        return self._running == 0 or self._error is not None

    def _open_ids(self) -> list[int]:
        pairs = zip(self._ids, self._choices, strict=False)  # no choices after release
        return [engine_id for engine_id, choice in pairs if not choice.ended]

    def _check(self) -> None:
        if isinstance(self._error, RequestReleased):
            raise self._error

    def _news(self) -> RequestOutput | EllipsisType | None:
        self._check()
        outputs = [choice.take() for choice in self._choices if choice.has_news]
        if outputs:
            scores = self._prompt_logprobs
            if scores is not None:
                read, self._prompt_logprobs_read = self._prompt_logprobs_read, len(scores)
                scores = scores[read:] or None
            return self._output(outputs, scores)
        if self._error is not None:
            raise self._error
        return None if self._running == 0 else ...

    def _whole(self) -> RequestOutput | EllipsisType:
        if self._error is not None:
            raise self._error
        if self._running:
            return ...
        return self._output([choice.all() for choice in self._choices], self._prompt_logprobs)

    def _output(
        self, outputs: list[CompletionOutput], scores: list[TokenLogprobs | None] | None
    ) -> RequestOutput:
        return RequestOutput(
            self._prompt,
            self._prompt_token_ids,
            outputs,
            self._running == 0,
            self._cached,
            scores,
        )
