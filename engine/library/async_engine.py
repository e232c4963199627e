"""AsyncEngine: one engine process for an asyncio program, with text in and out."""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from engine.config.engine_config import EngineConfig
from engine.errors import RequestFailed
from engine.library.outputs import RequestOutput
from engine.library.prompts import Messages, Prompt, load_tokenizer
from engine.library.request_manager import RequestManager, Weights
from engine.messages import AdapterInfo, EngineStats
from engine.process.client import START_SECONDS, OnProgress
from engine.sampling_params import SamplingParams
from engine.text.tokenizer import Tokenizer


class AsyncEngine(RequestManager):
    """An engine process for asyncio, created by `start`.

    Coroutines must run on the event loop of `start`; request handles may be used on any thread.
    """

    @classmethod
    async def start(
        cls,
        config: EngineConfig,
        *,
        tokenizer: Tokenizer | str | Path | None = None,
        progress: OnProgress | None = None,
        timeout: float = START_SECONDS,
    ) -> "AsyncEngine":
        """Start an engine process, and return once it can serve; arguments: see `LLM`.

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
        """Start a request and yield new output as it arrives; options: see `start_request`.

        Closing the iterator, or cancelling the task that iterates, cancels the request.
        Raises RequestFailed if a choice failed, after all other output was yielded.
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
        """Register a PEFT adapter, or replace the one of that name; return its description.

        Running requests keep the old weights.

        Raises AdapterError, EngineDead.
        """
        return await self._client.add_adapter(name, folder)

    async def remove_adapter(self, name: str) -> AdapterInfo:
        """Remove an adapter and return its description; running requests finish with it.

        Raises AdapterError, EngineDead.
        """
        return await self._client.remove_adapter(name)

    async def stats(self) -> EngineStats:
        """Return the engine's state after all earlier calls. Raises EngineDead."""
        return await self._stats()

    async def sleep(self, level: int = 1, tags: Sequence[str] = ()) -> None:
        """Free memory of the device, once no request runs; return when the memory is freed.

        Requests that a pause keeps are computed again after the wake.

        level: 0 only pauses, as `pause("keep")`; 1 moves the weights to host memory; 2 drops the
            weights, so that requests are refused until `update_weights`.
        tags: the parts to free, "weights" and "kv_cache"; none = both.
        After level 1 the next request, or `wake`, allocates the memory again. Raises ConfigError
        without `sleep_in_host_memory`, InvalidRequest, EngineDead.
        """
        await self._sleep(level, tags)

    async def wake(self, tags: Sequence[str] = ()) -> None:
        """End the sleep; return when the memory is allocated.

        tags: the parts to allocate, "weights" and "kv_cache"; none = both, and the end of level 0.
        Raises InvalidRequest, or EngineDead with the code device_taken if the device no longer has
        the memory.
        """
        await self._wake(tags)

    async def update_weights(
        self, source: Weights, *, version: str = "", recompute: bool = False
    ) -> None:
        """Replace the weights, between two steps, by a checkpoint of the same model.

        Running requests continue with the new weights; `CompletionOutput.versions` has the version
        of each token. Names, shapes, dtypes and quantisation must be those of the model's folder.

        source: a folder of safetensors; or (name, tensor) pairs of the whole checkpoint, on any
            device, which are sent while steps run; or vLLM's `update_info`, whose tensors the
            engine receives from the trainer. After `start_weight_update` an `update_info` may name
            only some of the checkpoint's tensors.
        version: the name of the new weights; "" = the number of updates so far.
        recompute: whether running requests compute their KV again. Otherwise they keep the old KV.
        Raises UpdateFailed, after which the old weights stay in use, and EngineDead.
        """
        await self._update_weights(source, version, recompute)

    async def init_weight_transfer(self, init_info: Mapping[str, Any]) -> None:
        """Join a trainer's group, from which `update_weights` receives tensors.

        init_info: vLLM's `init_info`; {} for weights that a trainer on this machine shares.
            `WeightSender` is the trainer's side.
        Raises UpdateFailed, EngineDead.
        """
        await self._client.transfer_weights("init", dict(init_info))

    async def start_weight_update(self) -> None:
        """Begin an update of several messages, which `finish_weight_update` ends.

        Raises UpdateFailed, EngineDead.
        """
        await self._client.transfer_weights("start")

    async def finish_weight_update(self, *, version: str = "", recompute: bool = False) -> None:
        """Replace the weights by the tensors received since `start_weight_update`.

        version, recompute: see `update_weights`.
        Raises UpdateFailed, after which the old weights stay in use, and EngineDead.
        """
        await self._finish_update(version, recompute)

    async def pause(self, mode: str = "keep") -> None:
        """Hold new requests back until `resume`; return once no step runs.

        mode: "abort" ends running requests with their current output, "wait" lets them finish, and
            "keep" stops them until `resume`.
        Raises InvalidRequest, EngineDead.
        """
        await self._client.pause(mode)

    async def resume(self) -> None:
        """End a pause, so that kept and waiting requests continue. Raises EngineDead."""
        await self._resume()

    async def close(self) -> None:
        """End the engine process. Open requests end with EngineDead. Idempotent."""
        await self._close()

    async def __aenter__(self) -> "AsyncEngine":
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()
