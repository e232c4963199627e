"""RequestManager: starts the requests of one engine, and passes deltas to their handles."""

import asyncio
import contextlib
import itertools
import secrets
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from engine.config.engine_config import EngineConfig
from engine.errors import ConfigError, EngineDead, InvalidRequest, MantaError, UpdateFailed
from engine.library.handle import RequestHandle
from engine.library.progress import RequestProgress
from engine.library.prompts import EncodedPrompt, Messages, Prompt, Prompts
from engine.messages import EngineRequest, EngineStats, Ready, StepFrame
from engine.process.client import EngineClient, OnProgress
from engine.sampling_params import SamplingParams
from engine.text.detokenizer import ChoiceDecoder
from engine.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from torch import Tensor

# A folder of safetensors, the tensors of a checkpoint by name, or vLLM's `update_info`.
Weights: TypeAlias = "str | Path | Iterable[tuple[str, Tensor]] | Mapping[str, Any]"


class RequestManager:
    """The base class of `LLM` and `AsyncEngine`.

    Coroutines must run on the event loop of `_start`; other methods may run on any thread.

    tokenizer: the model's tokenizer; None allows only prompts of token ids, and answers have no
        text.
    """

    ready: Ready  # set once started
    _prompts: Prompts

    def __init__(self, config: EngineConfig, tokenizer: Tokenizer | None) -> None:
        self.config = config
        self.tokenizer = tokenizer
        self._dozes = False  # whether a sleep of level 0 has paused the engine
        self._client = EngineClient(self._on_frame, self._on_death)
        self._ids = itertools.count(1)
        self._open: dict[int, tuple[RequestHandle, int]] = {}  # engine id -> (handle, choice)
        # ticket of a "stats" message -> the call that waits for the frame with this ticket
        self._asked: dict[int, asyncio.Future[EngineStats]] = {}

    @property
    def pid(self) -> int:
        """The process id of the engine process."""
        return self._client.pid

    def start_request(
        self,
        prompt: Prompt | Messages,
        params: SamplingParams | None = None,
        *,
        detokenize: bool = True,
        priority: int = 0,
        cache_salt: str = "",
        adapter: str = "",
        prediction: str | Sequence[int] = "",
        speculate: bool = True,
    ) -> RequestHandle:
        """Start a request from text, token ids or chat messages, and return at once.

        Prompts with images are as in `LLM.generate` and `LLM.chat`.

        detokenize: whether to set the output's text.
        priority: requests with smaller numbers run earlier.
        cache_salt: only requests of the same salt share cached prefixes.
        adapter: a name from `add_adapter`; "" = the model itself.
        prediction: text or tokens that the answer probably contains, for drafts.
        speculate: whether the engine may use drafts, which do not change the answer.
        Raises InvalidRequest, EngineDead.
        """
        expected: Sequence[int] = ()
        if not isinstance(prediction, str):
            expected = prediction
        elif prediction and self.tokenizer is None:
            raise InvalidRequest("a prediction of text needs a tokenizer", param="prediction")
        elif self.tokenizer is not None:
            expected = self.tokenizer.encode(prediction, add_special_tokens=False)
        (params,) = each_params(params, 1, self.tokenizer)
        return self._submit(
            self._prompts.encode(prompt),
            params,
            prompt if isinstance(prompt, str) else None,
            detokenize=detokenize,
            priority=priority,
            cache_salt=cache_salt,
            adapter=adapter,
            prediction=expected,
            speculate=speculate,
        )

    def _submit(
        self,
        encoded: EncodedPrompt,
        params: SamplingParams,
        prompt: str | None,
        *,
        detokenize: bool,
        priority: int = 0,
        cache_salt: str = "",
        adapter: str = "",
        prediction: Sequence[int] = (),
        speculate: bool = True,
    ) -> RequestHandle:
        """Start an engine request for each of the n choices of a checked prompt; return the handle.

        All choices have the same seed.
        """
        token_ids, images = encoded.ids, encoded.images()
        if self._client.stats.weights_dropped:
            raise InvalidRequest(
                "the weights were dropped by sleep(level=2); update_weights first",
                code="weights_dropped",
            )
        params.check_vocabulary(self.ready.vocab_size)
        tokenizer = self.tokenizer if detokenize else None
        if params.stop and tokenizer is None:
            raise InvalidRequest("stop strings need the text, which is not made", param="stop")
        seed = params.seed_for(token_ids, self.config.seed)
        if seed is None:
            seed = secrets.randbits(63)
        ids = [next(self._ids) for _ in range(params.n)]
        decoders = [
            None if tokenizer is None else ChoiceDecoder(tokenizer, params, prompt=token_ids)
            for _ in ids
        ]
        progress = RequestProgress(prompt, token_ids, decoders, eager=bool(params.stop))
        handle = RequestHandle(progress, ids, self._abort)
        for choice, number in enumerate(ids):
            self._open[number] = (handle, choice)
        try:
            for choice, number in enumerate(ids):
                self._client.submit(
                    EngineRequest(
                        number,
                        token_ids,
                        len(token_ids),
                        params,
                        seed,
                        choice,
                        cache_salt,
                        adapter,
                        priority,
                        prediction=list(prediction),
                        speculate=speculate,
                        images=images,
                        verbatim=encoded.verbatim,
                    )
                )
        except MantaError:
            for number in ids:
                self._open.pop(number, None)
            raise
        return handle

    def reset_prefix_cache(self) -> None:
        """Drop all cached prefixes. Raises EngineDead."""
        self._client.control("reset_prefix_cache")

    async def _update_weights(self, source: Weights, version: str, recompute: bool) -> None:
        if isinstance(source, (str, Path)):
            await self._client.update_weights(source, version=version, recompute=recompute)
            await self._stats()
            return
        if isinstance(source, Mapping) and "names" not in source:
            source = source.items()
        elif isinstance(source, Mapping):
            folder = await self._client.transfer_weights("update", dict(source))
            if folder:
                await self._replace(folder, version, recompute)
            return
        from engine.weights.staging import checkpoint_bytes, stage  # imports torch

        try:
            staged = await asyncio.to_thread(stage, source, checkpoint_bytes(self.config.model))
        except ConfigError as error:
            raise UpdateFailed(error.message, param=error.param) from error
        try:
            await self._client.update_weights(staged.folder, version=version, recompute=recompute)
        finally:
            staged.discard()
        await self._stats()

    async def _finish_update(self, version: str, recompute: bool) -> None:
        folder = await self._client.transfer_weights("finish")
        await self._replace(folder, version, recompute)

    async def _replace(self, folder: str, version: str, recompute: bool) -> None:
        """Replace the weights by a trainer's update; if that fails, drop the received tensors.

        folder: the name under which the engine has the update's tensors.
        """
        try:
            await self._update_weights(folder, version, recompute)
        except UpdateFailed:
            await self._client.transfer_weights("drop")
            raise

    async def _resume(self) -> None:
        self._client.control("resume")
        await self._stats()

    async def _sleep(self, level: int, tags: Sequence[str]) -> None:
        if level:
            await self._client.sleep(level, tags)
            await self._stats()
        else:
            await self._client.pause("keep")
            self._dozes = True

    async def _wake(self, tags: Sequence[str]) -> None:
        await self._client.wake(tags)
        if self._dozes and not tags:
            self._dozes = False
            self._client.control("resume")
        await self._stats()

    def _abort(self, ids: list[int]) -> None:
        if ids:
            # raised by a dead engine, in which nothing can be aborted
            with contextlib.suppress(EngineDead):
                self._client.abort(ids)

    # The methods below run on the event loop.

    async def _start(self, timeout: float, progress: OnProgress | None) -> None:
        """Start the engine process. Raises ConfigError, EngineDead."""
        self.ready = await self._client.start(self.config, timeout=timeout, progress=progress)
        self._prompts = Prompts(self.tokenizer, self.ready, self.config.model, self.config.images)

    async def _stats(self) -> EngineStats:
        ticket = self._client.control("stats")
        future = self._asked[ticket] = asyncio.get_running_loop().create_future()
        try:
            return await future
        finally:
            self._asked.pop(ticket, None)

    async def _close(self) -> None:
        try:
            await self._client.close()
        finally:
            self._on_death(EngineDead("the engine was closed"))

    def _on_frame(self, frame: StepFrame) -> None:
        try:
            self._deliver(frame)
        # all requests must end, as this frame's output is lost and its readers would wait forever
        except Exception as error:
            self._on_death(EngineDead(f"reading the engine's frames failed: {error!r}"))
            raise

    def _deliver(self, frame: StepFrame) -> None:
        cut: list[int] = []  # ids of choices that a stop string ended
        for delta in frame.deltas:
            entry = self._open.get(delta.id)
            if entry is None:
                continue
            if entry[0]._push(entry[1], delta, frame.stats.weights_version):
                cut.append(delta.id)
            if delta.finish:
                del self._open[delta.id]
        self._abort(cut)
        for ticket, future in self._asked.items():
            if ticket <= frame.ticket and not future.done():
                future.set_result(frame.stats)

    def _on_death(self, error: MantaError) -> None:
        """End all open requests and waiting calls with an error."""
        entries, self._open = self._open, {}
        for handle, _ in entries.values():
            handle._fail(error)
        for future in self._asked.values():
            if not future.done():
                future.set_exception(error)


def each_params(
    params: Any, count: int, tokenizer: Tokenizer | None = None
) -> list[SamplingParams]:
    """Return a list with the sampling parameters of each of `count` prompts. Raises InvalidRequest.

    params: parameters for all prompts, a list, or None for the defaults of the model's authors
        (`Tokenizer.sampling_defaults`).
    """
    if params is None:
        defaults: dict[str, Any] = {} if tokenizer is None else tokenizer.sampling_defaults
        return [SamplingParams(**defaults)] * count
    if isinstance(params, SamplingParams):
        return [params] * count
    many: Sequence[Any] = params if isinstance(params, (list, tuple)) else [params]
    for item in many:
        if not isinstance(item, SamplingParams):
            raise InvalidRequest(
                "params must be SamplingParams or a list of them, one for each prompt; got a "
                f"{type(item).__name__}",
                param="params",
                code="invalid_type",
            )
    if len(many) != count:
        raise InvalidRequest(f"{len(many)} sampling parameters for {count} prompts", param="params")
    return list(many)
