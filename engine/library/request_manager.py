"""Session: the requests of one engine, between text and token ids, for LLM and AsyncEngine."""

import difflib
import itertools
import operator
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from engine.config import EngineConfig
from engine.errors import ConfigError, InvalidRequest, MantaError, context_too_long
from engine.library.handle import RequestHandle
from engine.messages import EngineRequest, Ready, StepFrame
from engine.sampling_params import SamplingParams
from engine.text.detokenizer import ChoiceDecoder
from engine.text.tokenizer import Tokenizer

T = TypeVar("T")
Messages = Sequence[Mapping[str, Any]]
Prompt = str | Sequence[int]


def make_config(model: str, fields: Mapping[str, Any]) -> EngineConfig:
    """An EngineConfig from keyword arguments. Raises ConfigError naming an unknown or wrong one."""
    known = EngineConfig.__struct_fields__
    for name in fields:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise ConfigError(f"the engine has no option {name}{hint}", param=name)
    return EngineConfig(**{**fields, "model": str(model)})


def each(name: str, items: Sequence[T], work: Callable[[T], list[int]]) -> list[list[int]]:
    """What the work makes of each item. Raises InvalidRequest naming the item, if there are
    several."""
    done: list[list[int]] = []
    for i, item in enumerate(items):
        try:
            done.append(work(item))
        except InvalidRequest as error:
            if len(items) == 1:
                raise
            path = f"{name}[{i}]"
            message = f"{path}: {error.message}"
            raise InvalidRequest(message, param=path, code=error.code) from None
    return done


class Client(Protocol):
    """The half of `EngineClient` and `BlockingEngineClient` that a session uses."""

    def submit(self, request: EngineRequest) -> None: ...

    def abort(self, ids: list[int]) -> None: ...


class Session:
    """Starts requests and brings the engine's frames to their handles.

    tokenizer: None allows only prompts of token ids and gives no text.
    """

    def __init__(self, tokenizer: Tokenizer | None, seed: int) -> None:
        self.tokenizer = tokenizer
        self.ready: Ready | None = None
        self._client: Client | None = None
        self._seeds = random.Random(seed)
        self._ids = itertools.count(1)
        self._names = itertools.count(1)
        self._open: dict[int, tuple[RequestHandle, int]] = {}  # engine id -> handle, choice
        self._handles: dict[str, RequestHandle] = {}  # those with a choice in _open

    def connect(self, client: Client, ready: Ready) -> None:
        self._client, self.ready = client, ready

    @property
    def num_open(self) -> int:
        """Choices in flight."""
        return len(self._open)

    def find(self, request_id: str) -> RequestHandle | None:
        """The open request of that id."""
        return self._handles.get(request_id)

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt. Raises InvalidRequest if it is empty, too long or not of this
        model.
        """
        if isinstance(prompt, str):
            ids = self._text_tokenizer().encode(prompt, add_special_tokens=True)
        else:
            ids = [token if type(token) is int else _token_id(token) for token in prompt]
        self._check(ids)
        return ids

    def encode_all(self, prompts: Sequence[Prompt]) -> list[list[int]]:
        """`encode` for many; texts on all cores. An error names the prompt, e.g. ``prompts[3]``."""
        texts = [prompt for prompt in prompts if isinstance(prompt, str)]
        every: Sequence[Prompt] = prompts
        if len(texts) == len(prompts) > 1:
            every = self._text_tokenizer().encode_batch(texts, add_special_tokens=True)
        return each("prompts", every, self.encode)

    def encode_chat(self, messages: Messages, options: Mapping[str, Any]) -> list[int]:
        """The same for a chat; options as in `Tokenizer.encode_chat`."""
        ids = self._text_tokenizer().encode_chat(messages, **options)
        self._check(ids)
        return ids

    def _text_tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            raise InvalidRequest(
                "this engine has no tokenizer; give prompts as token ids", param="prompt"
            )
        return self.tokenizer

    def _check(self, ids: Sequence[int]) -> None:
        assert self.ready is not None
        if not ids:
            raise InvalidRequest("the prompt is empty", param="prompt")
        limit = self.ready.max_model_len
        if len(ids) >= limit:
            raise context_too_long(limit, len(ids))
        for token in ids:
            if not 0 <= token < self.ready.vocab_size:
                raise InvalidRequest(
                    f"token id {token} is outside the vocabulary (0..{self.ready.vocab_size - 1})",
                    param="prompt",
                    code="token_out_of_range",
                )

    def start(
        self,
        token_ids: list[int],
        params: SamplingParams,
        *,
        prompt: str | None = None,
        request_id: str | None = None,
        detokenize: bool = True,
        priority: int = 0,
        cache_salt: str = "",
        adapter: str = "",
    ) -> RequestHandle:
        """Submit a checked prompt: n engine requests with one seed. Raises InvalidRequest,
        EngineDead.
        """
        assert self._client is not None and self.ready is not None
        params.check_vocabulary(self.ready.vocab_size)
        text = detokenize and self.tokenizer is not None
        if params.stop and not text:
            raise InvalidRequest("stop strings need the text, which is not made", param="stop")
        seed = self._seeds.getrandbits(63) if params.seed is None else params.seed
        ids = [next(self._ids) for _ in range(params.n)]
        decoders = [
            ChoiceDecoder(self.tokenizer, params) if text and self.tokenizer is not None else None
            for _ in ids
        ]
        name = request_id or f"request-{next(self._names)}"
        if name in self._handles:
            raise InvalidRequest(f"request id {name!r} is in use", param="request_id")
        handle = RequestHandle(
            self, name, prompt, token_ids, ids, decoders, eager=bool(params.stop)
        )
        self._handles[name] = handle
        for choice, engine_id in enumerate(ids):
            self._open[engine_id] = (handle, choice)
        try:
            for choice, engine_id in enumerate(ids):
                self._client.submit(
                    EngineRequest(
                        engine_id,
                        token_ids,
                        len(token_ids),
                        params,
                        seed,
                        choice,
                        cache_salt,
                        adapter,
                        priority,
                    )
                )
        except MantaError:
            self.forget(ids)
            raise
        return handle

    def on_frame(self, frame: StepFrame) -> None:
        """Bring each delta to its handle. Called by the client, in order."""
        cut: list[int] = []
        find = self._open.get
        for delta in frame.deltas:
            entry = find(delta.id)
            if entry is None:
                continue  # released, or ended by a stop string
            if entry[0].push(entry[1], delta):
                cut.append(delta.id)
                self.forget((delta.id,))
            elif delta.finish:
                self.forget((delta.id,))
        if cut:
            self.abort(cut)

    def on_death(self, error: MantaError) -> None:
        """Every open request ends with this error."""
        entries, self._open, self._handles = self._open, {}, {}
        for handle, _ in entries.values():
            handle.fail(error)

    def abort(self, ids: Sequence[int]) -> None:
        assert self._client is not None
        if ids:
            self._client.abort(list(ids))

    def forget(self, ids: Sequence[int]) -> None:
        for engine_id in ids:
            entry = self._open.pop(engine_id, None)
            if entry is not None and entry[0].ended:
                self._handles.pop(entry[0].request_id, None)


def _token_id(token: object) -> int:
    """An integer of numpy or torch, too. Raises InvalidRequest."""
    try:
        return operator.index(token)  # type: ignore[arg-type]
    except TypeError:
        kind = type(token).__name__
        raise InvalidRequest(
            f"a prompt is a text or a list of token ids, and {kind} is no token id", param="prompt"
        ) from None
