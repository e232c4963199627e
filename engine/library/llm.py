"""LLM: offline generation with one engine process and blocking calls."""

import asyncio
import contextlib
import difflib
import sys
import threading
from collections.abc import Coroutine, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from engine.config.engine_config import EngineConfig
from engine.errors import ConfigError, EngineDead, InvalidRequest, RequestFailed, no_vectors
from engine.library.handle import RequestHandle
from engine.library.outputs import RequestOutput
from engine.library.prompts import (
    EncodedPrompt,
    Messages,
    Prompt,
    as_list,
    images_ahead,
    is_token_id,
    load_tokenizer,
)
from engine.library.request_manager import RequestManager, Weights, each_params
from engine.messages import AdapterInfo, EngineStats
from engine.process.client import START_SECONDS, OnProgress
from engine.sampling_params import SamplingParams
from engine.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

T = TypeVar("T")
Params = SamplingParams | Sequence[SamplingParams] | None
ImagePrompts = Mapping[str, Any] | Sequence[Mapping[str, Any]]

_POOLED = SamplingParams(max_tokens=0, temperature=0.0, pooled=True)


def make_config(model: str, fields: Mapping[str, Any]) -> EngineConfig:
    """Return an EngineConfig from keyword arguments.

    Raises ConfigError naming an unknown or invalid argument.
    """
    known = EngineConfig.__struct_fields__
    for name in fields:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise ConfigError(f"the engine has no option {name}{hint}", param=name)
    return EngineConfig(**{**fields, "model": str(model)})


class LLM(RequestManager):
    """A model in a separate engine process, with blocking calls. Thread-safe.

     with LLM("folder", max_model_len=2048) as llm:
      outputs = llm.generate(["Hello", "The sea"], SamplingParams(max_tokens=32))
    model: a folder with config.json, weights and tokenizer.json; `deployments.checkpoints.resolve`
        returns such a folder for "default", a .gguf file or a hub name.
    tokenizer: another folder, or a Tokenizer; None = the model's.
    progress: called with (phase, fraction) while the engine starts.
    timeout: seconds that the start may take.
    fields: fields of `EngineConfig`.
    Raises ConfigError if the engine cannot start with these settings, EngineDead if it dies.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        tokenizer: Tokenizer | str | Path | None = None,
        progress: OnProgress | None = None,
        timeout: float = START_SECONDS,
        **fields: Any,
    ) -> None:
        config = make_config(str(model), fields)
        super().__init__(config, load_tokenizer(config, tokenizer))
        self._loop = _LoopThread()
        try:
            self._loop.call(self._start(timeout, progress))
        except BaseException:
            self._loop.close()
            raise

    def generate(
        self,
        prompts: str | Sequence[str] | Sequence[int] | Sequence[Sequence[int]] | ImagePrompts,
        params: Params = None,
        *,
        adapter: str | Sequence[str] = "",
        detokenize: bool = True,
        progress: bool | None = None,
    ) -> list[RequestOutput]:
        """Generate outputs for one prompt or many (text or token ids), in the same order.

        A prompt with images is {"prompt": text, "images": [...]}. The text has the model's
        placeholder for each image, and an image is a Pillow image, a file's bytes, its path, or a
        data: URL. "videos" has videos: lists of images, or {"video": [...], "fps": 2}. Images are
        read before any prompt runs, and resized while other prompts run.

        params: the sampling parameters for all prompts, or a list with one for each.
        adapter: a name from `add_adapter` for all prompts, or a list with one for each; "" = the
            model itself.
        detokenize: whether to set the outputs' text; False saves time.
        progress: whether to show a progress bar; None = only at a terminal.
        All prompts are checked before any prompt runs. A request that fails later has finish_reason
        "error"; the others continue.
        Raises InvalidRequest, EngineDead.
        """
        many = _as_list(prompts)
        texts = [_text_of(prompt) for prompt in many]
        encoded = self._prompts.encode_all(many)
        return self._run(encoded, texts, params, adapter, detokenize, progress)

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        params: Params = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        adapter: str | Sequence[str] = "",
        detokenize: bool = True,
        progress: bool | None = None,
        **template: Any,
    ) -> list[RequestOutput]:
        """Generate answers to one chat or many, rendered by the model's chat template.

        A message's content may have parts {"type": "image", "image": ...} and {"type": "video",
        "video": [...], "fps": 2}, with images as in `generate`, or image_url and video_url with a
        data: URL.

        template: variables of the template, e.g. enable_thinking=False.
        """
        many: Any = [messages] if messages and isinstance(messages[0], Mapping) else messages
        options = {"tools": tools, "add_generation_prompt": add_generation_prompt, **template}
        encoded = self._prompts.encode_chats(many, options)
        return self._run(encoded, [None] * len(encoded), params, adapter, detokenize, progress)

    def embed(
        self,
        texts: str | Sequence[str] | Sequence[int] | Sequence[Sequence[int]],
        *,
        prompt_name: str = "",
        dimensions: int | None = None,
        truncate: bool = False,
        adapter: str | Sequence[str] = "",
        progress: bool | None = None,
    ) -> "list[NDArray[np.float32]]":
        """Return the embedding of each text, [elements] float32.

        The checkpoint's sentence-transformers files decide the pooling.

        prompt_name: the name of the checkpoint's prompt to put before each text; "" = none.
        dimensions: the number of leading elements to return, for Matryoshka models; None = all.
        truncate: whether texts that are too long are cut at their end.
        Raises InvalidRequest, EngineDead, RequestFailed.
        """
        # Only programs that ask for embeddings need NumPy and torch.
        from engine.pooled_checkpoint import read_pooling
        from engine.pooling import as_array

        pooling = read_pooling(self.config.model)
        if pooling is None or pooling.labels:
            raise no_vectors()
        if dimensions is not None:
            pooling.check_dimensions(dimensions, self.ready.vector_size)
        before = pooling.prompt(prompt_name) if prompt_name else ""
        most = self.ready.max_model_len
        limit = min(most, pooling.max_tokens or most)
        ids = self._prompts.encode_pooled(_as_list(texts), before, limit, truncate=truncate)
        prompts = list(map(EncodedPrompt, ids))
        vectors = []
        for output in self._run(prompts, [None] * len(prompts), _POOLED, adapter, False, progress):
            (choice,) = output.outputs
            if choice.vector is None:
                code, _, message = choice.error.partition(": ")
                raise RequestFailed(message or "the text was given up", code=code or "aborted")
            vector = as_array(choice.vector)
            vectors.append(vector if dimensions is None else pooling.cut(vector, dimensions))
        return vectors

    def _run(
        self,
        prompts: list[EncodedPrompt],
        texts: Sequence[str | None],
        params: Params,
        adapter: str | Sequence[str],
        detokenize: bool,
        progress: bool | None,
    ) -> list[RequestOutput]:
        params_each = each_params(params, len(prompts), self.tokenizer)
        adapters = [adapter] * len(prompts) if isinstance(adapter, str) else list(adapter)
        if len(adapters) != len(prompts):
            raise InvalidRequest(
                f"{len(adapters)} adapters for {len(prompts)} prompts", param="adapter"
            )
        for item in params_each:
            item.check_vocabulary(self.ready.vocab_size)
        handles: list[RequestHandle] = []
        outputs: list[RequestOutput] = []
        try:
            for encoded, text, item, name in zip(
                images_ahead(prompts), texts, params_each, adapters, strict=True
            ):
                handle = self._submit(encoded, item, text, detokenize=detokenize, adapter=name)
                handles.append(handle)
            show = sys.stderr.isatty() if progress is None else progress
            for handle in _tracked(handles) if show else handles:
                outputs.append(handle.sync())
        finally:
            # also after an interrupted wait, so that no request continues to run
            for handle in handles:
                handle.release()
        return outputs

    def add_adapter(self, name: str, folder: str | Path) -> AdapterInfo:
        """Register a PEFT adapter, or replace the one of that name; return its description.

        Needs max_loras > 0.

        Raises AdapterError, EngineDead.
        """
        return self._loop.call(self._client.add_adapter(name, folder))

    def remove_adapter(self, name: str) -> AdapterInfo:
        """Remove an adapter and return its description; running requests finish with it.

        Raises AdapterError, EngineDead.
        """
        return self._loop.call(self._client.remove_adapter(name))

    def stats(self) -> EngineStats:
        """Return the engine's state after all earlier calls. Raises EngineDead."""
        return self._loop.call(self._stats())

    def update_weights(
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
        self._loop.call(self._update_weights(source, version, recompute))

    def init_weight_transfer(self, init_info: Mapping[str, Any]) -> None:
        """Join a trainer's group, from which `update_weights` receives tensors.

        init_info: vLLM's `init_info`; {} for weights that a trainer on this machine shares.
            `WeightSender` is the trainer's side.
        Raises UpdateFailed, EngineDead.
        """
        self._loop.call(self._client.transfer_weights("init", dict(init_info)))

    def start_weight_update(self) -> None:
        """Begin an update of several messages, which `finish_weight_update` ends.

        Raises UpdateFailed, EngineDead.
        """
        self._loop.call(self._client.transfer_weights("start"))

    def finish_weight_update(self, *, version: str = "", recompute: bool = False) -> None:
        """Replace the weights by the tensors received since `start_weight_update`.

        version, recompute: see `update_weights`.
        Raises UpdateFailed, after which the old weights stay in use, and EngineDead.
        """
        self._loop.call(self._finish_update(version, recompute))

    def pause(self, mode: str = "keep") -> None:
        """Hold new requests back until `resume`; return once no step runs.

        mode: "abort" ends running requests with their current output, "wait" lets them finish, and
            "keep" stops them until `resume`.
        Raises InvalidRequest, EngineDead.
        """
        self._loop.call(self._client.pause(mode))

    def resume(self) -> None:
        """End a pause, so that kept and waiting requests continue. Raises EngineDead."""
        self._loop.call(self._resume())

    def sleep(self, level: int = 1, tags: Sequence[str] = ()) -> None:
        """Free memory of the device, once no request runs; return when the memory is freed.

        Requests that a pause keeps are computed again after the wake.

        level: 0 only pauses, as `pause("keep")`; 1 moves the weights to host memory; 2 drops the
            weights, so that requests are refused until `update_weights`.
        tags: the parts to free, "weights" and "kv_cache"; none = both.
        After level 1 the next request, or `wake`, allocates the memory again. Raises ConfigError
        without `sleep_in_host_memory`, InvalidRequest, EngineDead.
        """
        self._loop.call(self._sleep(level, tags))

    def wake(self, tags: Sequence[str] = ()) -> None:
        """End the sleep; return when the memory is allocated.

        tags: the parts to allocate, "weights" and "kv_cache"; none = both, and the end of level 0.
        Raises InvalidRequest, or EngineDead with the code device_taken if the device no longer has
        the memory.
        """
        self._loop.call(self._wake(tags))

    def close(self) -> None:
        """End the engine process. Open requests end with EngineDead. Idempotent."""
        with contextlib.suppress(EngineDead):
            self._loop.call(self._close())
        self._loop.close()

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class _LoopThread:
    """An event loop in a thread, for blocking callers. The thread runs until `close`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ended = False
        ready: Future[asyncio.AbstractEventLoop] = Future()
        self._thread = threading.Thread(
            target=lambda: asyncio.run(self._serve(ready)), name="engine-frames", daemon=True
        )
        self._thread.start()
        self._loop = ready.result()

    async def _serve(self, ready: "Future[asyncio.AbstractEventLoop]") -> None:
        self._closed = asyncio.Event()
        ready.set_result(asyncio.get_running_loop())
        await self._closed.wait()

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in the thread and return its result. Raises EngineDead after `close`."""
        with self._lock:
            if self._ended:
                work.close()
                raise EngineDead("the engine was closed")
            future = asyncio.run_coroutine_threadsafe(work, self._loop)
        return future.result()

    def close(self) -> None:
        """Cancel all running calls, wait until they have ended, and end the thread. Idempotent."""
        with self._lock:
            if not self._ended:
                self._ended = True
                self._loop.call_soon_threadsafe(self._closed.set)
        self._thread.join()


def _text_of(prompt: Prompt) -> str | None:
    text = prompt.get("prompt") if isinstance(prompt, Mapping) else prompt
    return text if isinstance(text, str) else None


def _as_list(prompts: Any) -> list[Prompt]:
    if isinstance(prompts, Mapping):
        return [prompts]
    prompts = as_list(prompts)
    if isinstance(prompts, str):
        return [prompts]
    if len(prompts) and is_token_id(prompts[0]):
        return [prompts]
    return list(prompts)


def _tracked(handles: list[RequestHandle]) -> Any:
    from rich.console import Console
    from rich.progress import track

    return track(handles, "Generating", console=Console(stderr=True))
