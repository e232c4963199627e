"""LLM: offline generation. One engine process, blocking calls, no event loop."""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from engine.config import EngineConfig
from engine.errors import EngineDead, InvalidRequest
from engine.library.handle import RequestHandle
from engine.library.outputs import RequestOutput
from engine.library.request_manager import Messages, Prompt, Session, each, make_config
from engine.messages import AdapterInfo, EngineStats, Ready
from engine.process.client import START_SECONDS, BlockingEngineClient, OnProgress
from engine.process.fake import PREFIX as FAKE
from engine.sampling_params import SamplingParams
from engine.text.tokenizer import Tokenizer

Params = SamplingParams | Sequence[SamplingParams] | None


def load_tokenizer(
    config: EngineConfig, given: "Tokenizer | str | Path | None"
) -> Tokenizer | None:
    """The tokenizer given, or the model folder's; None where there is nothing to read: a fake
    engine, or random weights beside a bare config.json."""
    if isinstance(given, Tokenizer):
        return given
    if given is not None:
        return Tokenizer.load(given)
    bare = config.load_format == "dummy" and not (Path(config.model) / "tokenizer.json").exists()
    return None if bare or config.model.startswith(FAKE) else Tokenizer.load(config.model)


class LLM:
    """A model in a process of its own.

        with LLM("folder", max_model_len=2048) as llm:
            outputs = llm.generate(["Hello", "The sea"], SamplingParams(max_tokens=32))

    model: a folder with config.json, weights and tokenizer.json; `deployments.checkpoints.resolve`
        makes one of "default", a .gguf file or a hub name.
    tokenizer: another folder, or a Tokenizer; default the model's.
    progress(phase, fraction): called while it starts. timeout: seconds it may take.
    fields: of `EngineConfig`.
    Thread-safe. Raises ConfigError if it cannot start with these settings, EngineDead if it dies.
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
        self.config = make_config(str(model), fields)
        session = Session(load_tokenizer(self.config, tokenizer), self.config.seed)
        self._session = session
        self._client = BlockingEngineClient(session.on_frame, session.on_death)
        self.ready: Ready = self._client.start(self.config, timeout=timeout, progress=progress)
        session.connect(self._client, self.ready)

    @property
    def tokenizer(self) -> Tokenizer | None:
        return self._session.tokenizer

    @property
    def pid(self) -> int:
        """Of the engine process."""
        return self._client.pid

    def stats(self) -> EngineStats:
        """The engine's state after its last step."""
        return self._client.stats

    def generate(
        self,
        prompts: str | Sequence[str] | Sequence[int] | Sequence[Sequence[int]],
        params: Params = None,
        *,
        adapter: str | Sequence[str] = "",
        detokenize: bool = True,
        progress: bool | None = None,
    ) -> list[RequestOutput]:
        """Generate for one prompt or many (text or token ids); the outputs are in the same order.

        params: for all, or one for each. adapter: a name known by `add_adapter`, or one for each
        prompt; "" = the model itself. detokenize=False leaves text "" (and saves its time).
        progress: show a bar; default only at a terminal.
        All prompts are checked before any is run. A request that fails while the others go on has
        finish_reason "error". Raises InvalidRequest, EngineDead.
        """
        many = _as_list(prompts)
        texts = [prompt if isinstance(prompt, str) else None for prompt in many]
        every = self._session.encode_all(many)
        prompts_ids = list(zip(texts, every, strict=True))
        return self._run(prompts_ids, params, adapter, detokenize, progress)

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
        """The same for one chat or many, through the model's chat template.

        template: variables for it, e.g. enable_thinking=False.
        """
        many = [messages] if messages and isinstance(messages[0], Mapping) else list(messages)
        options = {"tools": tools, "add_generation_prompt": add_generation_prompt, **template}

        def encode(chat: Any) -> list[int]:
            return self._session.encode_chat(chat, options)

        every = each("messages", many, encode)
        return self._run([(None, ids) for ids in every], params, adapter, detokenize, progress)

    def start_request(
        self,
        prompt: Prompt | Messages,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        detokenize: bool = True,
        priority: int = 0,
        adapter: str = "",
    ) -> RequestHandle:
        """Start one request and return at once. Raises InvalidRequest, EngineDead."""
        return start_request(
            self._session,
            prompt,
            params,
            request_id=request_id,
            detokenize=detokenize,
            priority=priority,
            adapter=adapter,
        )

    def add_adapter(self, name: str, folder: str | Path) -> AdapterInfo:
        """Make a PEFT adapter known, or replace the one of that name. Needs max_loras > 0.

        Raises AdapterError, EngineDead.
        """
        return self._client.add_adapter(name, folder)

    def remove_adapter(self, name: str) -> AdapterInfo:
        """Forget an adapter; requests that run finish on it. Raises AdapterError, EngineDead."""
        return self._client.remove_adapter(name)

    def reset_prefix_cache(self) -> None:
        """Forget all cached prefixes."""
        self._client.control("reset_prefix_cache")

    def _run(
        self,
        prompts: list[tuple[str | None, list[int]]],
        params: Params,
        adapter: str | Sequence[str],
        detokenize: bool,
        progress: bool | None,
    ) -> list[RequestOutput]:
        params_each = _params_for(prompts, params)
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
            for (text, ids), item, name in zip(prompts, params_each, adapters, strict=True):
                handles.append(
                    self._session.start(ids, item, prompt=text, detokenize=detokenize, adapter=name)
                )
            show = sys.stderr.isatty() if progress is None else progress
            for handle in _tracked(handles) if show else handles:
                outputs.append(handle.sync())
        finally:
            for handle in handles:  # also when a wait was interrupted: nothing may go on running
                handle.release()
        return outputs

    def close(self) -> None:
        """End the engine process. Open requests end with EngineDead. Idempotent."""
        self._client.close()
        self._session.on_death(EngineDead("the engine was closed"))

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def start_request(
    session: Session,
    prompt: Prompt | Messages,
    params: SamplingParams | None,
    **options: Any,
) -> RequestHandle:
    """Submit text, token ids or chat messages; options as in `Session.start`."""
    (params,) = _params_for([prompt], params)
    if isinstance(prompt, str):
        return session.start(session.encode(prompt), params, prompt=prompt, **options)
    if prompt and isinstance(prompt[0], Mapping):
        return session.start(session.encode_chat(cast(Messages, prompt), {}), params, **options)
    return session.start(session.encode(cast(Sequence[int], prompt)), params, **options)


def _as_list(prompts: Any) -> list[Prompt]:
    if isinstance(prompts, str):
        return [prompts]
    if len(prompts) and isinstance(prompts[0], int):
        return [prompts]
    return list(prompts)


def _params_for(prompts: Sequence[Any], params: Params) -> list[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * len(prompts)
    many: list[Any] = list(params) if isinstance(params, (list, tuple)) else [params]
    for item in many:
        if not isinstance(item, SamplingParams):
            raise InvalidRequest(
                "params must be SamplingParams or a list of them, one for each prompt; got a "
                f"{type(item).__name__}",
                param="params",
                code="invalid_type",
            )
    if len(many) != len(prompts):
        raise InvalidRequest(
            f"{len(many)} sampling parameters for {len(prompts)} prompts", param="params"
        )
    return many


def _tracked(handles: list[RequestHandle]) -> Any:
    from rich.console import Console
    from rich.progress import track

    return track(handles, "Generating", console=Console(stderr=True))
