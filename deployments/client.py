"""Client and AsyncClient: typed clients for other Ray jobs of the cluster, without HTTP.

  client = Client.connect()                      # ray.init(address=...) first
  print(client.chat([{"role": "user", "content": "Hello"}], max_tokens=20).text)
  for chunk in client.stream("Once upon", max_tokens=20): print(chunk.text, end="")
  client.embed(["the sea", "the land"]).vectors   # of an embedding model
  client.update_weights("/checkpoints/step-1", "step 1")  # and a trainer's other orders

Fields are those of the HTTP API. The HTTP API's errors are raised as exceptions of `engine.errors`.
Unknown fields are always refused. A job without Manta installed uses
`serve.get_app_handle("manta")` with plain dicts; see docs/python.md.
"""

import asyncio
import time
from base64 import b64decode
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar
from weakref import WeakKeyDictionary

from ray import serve
from ray.exceptions import RayError, RayTaskError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle

from deployments.api.fields.generation import CHAT, COMPLETION
from deployments.model_calls import AsyncModelCalls, Messages, ModelCalls, checked, prompt_field
from deployments.resumable_stream import ResumableStream
from deployments.route_call import RouteCall, UpdateRefused
from deployments.trainer_calls import AsyncTrainerCalls, TrainerCalls
from engine.errors import EngineDead, InvalidRequest, MantaError, Overloaded, RequestFailed
from engine.messages import RoutedExperts

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

T = TypeVar("T")
# A prompt: a text, token ids (also as an array of NumPy, torch or DLPack), or the messages of a
# chat.
Prompt = str | Sequence[int] | Messages


@dataclass(frozen=True, slots=True)
class Usage:
    """The token counts of an answer.

    cached_tokens: number of prompt tokens that came from a prefix cache.
    """

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class Choice:
    """A choice of a complete answer. Fields that were not requested are None.

    logprobs: as in the HTTP API.
    token_ids: ids of the output tokens, with `return_token_ids=True`.
    token_logprobs: the log-probability of each of token_ids, with `logprobs` as well.
    weight_versions: (version, number of tokens) of the weights that sampled token_ids, in order.
    routed_experts: the experts chosen for each token of prompt and output but the last, an array
        [tokens, layers, experts of a token], with `return_routed_experts=True`.
    """

    index: int
    text: str
    finish_reason: str
    logprobs: Any = None
    token_ids: tuple[int, ...] | None = None
    token_logprobs: tuple[float, ...] | None = None
    weight_versions: tuple[tuple[str, int], ...] | None = None
    routed_experts: "NDArray[np.integer] | None" = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class Completion:
    """A complete answer.

    raw: the HTTP API's response object.
    prompt_token_ids: ids of the prompt, with `return_token_ids=True`; None if not requested.
    prompt_logprobs: the log-probability of each prompt token, None for the first, with
        `prompt_logprobs=0` as well; None if not requested.
    """

    id: str
    model: str
    choices: tuple[Choice, ...]
    usage: Usage
    raw: dict[str, Any]
    prompt_token_ids: tuple[int, ...] | None = None
    prompt_logprobs: tuple[float | None, ...] | None = None

    @property
    def text(self) -> str:
        """The text of the first choice."""
        return self.choices[0].text


@dataclass(frozen=True, slots=True)
class Chunk:
    """A chunk of one choice of a streamed answer.

    index: index of the choice.
    finish_reason: None until the choice's last chunk.
    raw: the HTTP API's chunk object, which may have parts of several choices.
    token_ids, token_logprobs: of this chunk's tokens, as in `Choice`.
    """

    index: int
    text: str
    finish_reason: str | None
    raw: dict[str, Any]
    token_ids: tuple[int, ...] | None = None
    token_logprobs: tuple[float, ...] | None = None


class _Connected:
    """A client's connection to an application.

    model: name of the application's only model; "": it has several, and each call must name one
        (`model="..."`).
    deployment: name of the Serve deployment of routers; "": those that also answer HTTP.
    """

    def __init__(self, app_name: str, model: str, deployment: str = "") -> None:
        self._app_name = app_name
        self._deployment = deployment
        self.model = model
        self._handle: DeploymentHandle[Any] | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        # The Serve handle belongs to this process and cannot be pickled.
        return type(self), (self._app_name, self.model, self._deployment)

    def _method(self, name: str, *, stream: bool = False) -> "DeploymentHandle[Any]":
        """Return the Serve handle for a method of the application's router.

        The first call in a process raises MantaError (code app_not_found) if there is no
        application.
        """
        if self._handle is None:
            self._handle = _find(self._app_name, self._deployment)
        return self._handle.options(method_name=name, stream=stream)


class Client(_Connected, TrainerCalls, ModelCalls):
    """A synchronous client. It may be passed to other processes of the cluster."""

    def _carry_out(self, call: RouteCall[T]) -> T:
        arguments, again = call.arguments(self.model), _RouterRetry()
        while True:
            try:
                return _result(call, self._method("control").remote(*arguments).result())
            except RayError as error:
                time.sleep(again.pause(error) if call.repeats else _lost(error))

    @classmethod
    def connect(cls, app_name: str = "manta", *, deployment: str = "") -> "Client":
        """Return a client of the application. Raises MantaError (code app_not_found).

        deployment: "batch-router" for batch work, where `router.batch_replicas` is set.
        """
        handle = _find(app_name, deployment)
        try:
            state = handle.options(method_name="state").remote().result()
        except RayError as error:
            _lost(error)
        return cls(app_name, state["model"], deployment)

    def chat(self, messages: Messages, **fields: Any) -> Completion:
        """Return the answer to a list of chat messages."""
        return self.generate(messages, **fields)

    def generate(self, prompt: Prompt, **fields: Any) -> Completion:
        """Return the continuation of a text or of token ids, or the answer to a chat.

        Raises the errors of `engine.errors`.
        """
        body = _body(self.model, prompt, fields)
        again = _RouterRetry()
        while True:
            try:
                return _completion(self._method("generate").remote(body).result())
            except RayError as error:
                time.sleep(again.pause(error))

    def stream(self, prompt: Prompt, **fields: Any) -> Iterator[Chunk]:
        """Yield the answer to a prompt piece by piece.

        If a router dies, another one resumes the stream after a pause. Leaving the loop early
        aborts the request.
        """
        body = _body(self.model, prompt, fields)
        again = _RouterRetry()
        while True:
            responses: Any = self._method("stream", stream=True).remote(body, again.last)
            try:
                for item in responses:
                    if again.take_chunk(item):
                        return
                    yield from _chunks(item)
                return
            except (RayError, Overloaded) as error:
                pause = again.pause(error)
            finally:
                responses.cancel()
            time.sleep(pause)


class AsyncClient(_Connected, AsyncTrainerCalls, AsyncModelCalls):
    """An asyncio client, with the methods of Client as coroutines."""

    async def _carry_out(self, call: RouteCall[T]) -> T:
        arguments, again = call.arguments(self.model), _RouterRetry()
        while True:
            try:
                return _result(call, await self._method("control").remote(*arguments))
            except RayError as error:
                await asyncio.sleep(again.pause(error) if call.repeats else _lost(error))

    @classmethod
    async def connect(cls, app_name: str = "manta", *, deployment: str = "") -> "AsyncClient":
        """Return a client of the application. Raises MantaError (code app_not_found).

        deployment: as in `Client.connect`.
        """
        handle = _find(app_name, deployment)
        try:
            state = await handle.options(method_name="state").remote()
        except RayError as error:
            _lost(error)
        return cls(app_name, state["model"], deployment)

    async def chat(self, messages: Messages, **fields: Any) -> Completion:
        """Return the answer to a list of chat messages."""
        return await self.generate(messages, **fields)

    async def generate(self, prompt: Prompt, **fields: Any) -> Completion:
        """Return the continuation of a text or of token ids, or the answer to a chat.

        Raises the errors of `engine.errors`.
        """
        body = _body(self.model, prompt, fields)
        again = _RouterRetry()
        while True:
            try:
                return _completion(await self._method("generate").remote(body))
            except RayError as error:
                await asyncio.sleep(again.pause(error))

    async def stream(self, prompt: Prompt, **fields: Any) -> AsyncIterator[Chunk]:
        """Yield the answer to a prompt piece by piece.

        If a router dies, another one resumes the stream after a pause. Leaving the loop early
        aborts the request.
        """
        body = _body(self.model, prompt, fields)
        again = _RouterRetry()
        while True:
            responses: Any = self._method("stream", stream=True).remote(body, again.last)
            try:
                async for item in responses:
                    if again.take_chunk(item):
                        return
                    for chunk in _chunks(item):
                        yield chunk
                return
            except (RayError, Overloaded) as error:
                pause = again.pause(error)
            finally:
                responses.cancel()
            await asyncio.sleep(pause)


class _RouterRetry:
    """The retries of one call after its router is lost.

    last: id of the last received event of a stream, after which another router resumes the stream.
    """

    def __init__(self) -> None:
        self.last = ""
        self._resuming = ResumableStream()

    def take_chunk(self, item: dict[str, Any]) -> bool:
        """Return whether an item of a stream marks its end. The item's event id is removed from the
        item and stored in `last`."""
        if "error" not in item:
            self._resuming.heard()
        self.last = item.pop("event_id", self.last)
        return bool(item.get("done"))

    def pause(self, error: RayError | Overloaded) -> float:
        """Return the seconds until the next attempt, or raise the call's error if there is no
        further attempt.

        Overloaded is retried only if the stream has begun.
        """
        if isinstance(error, Overloaded):
            headers = {"retry-after": str(error.retry_after)}
            pause = self._resuming.pause(503, headers) if self.last else None
        else:
            pause = None if isinstance(error, RayTaskError) else self._resuming.pause()
        if pause is not None:
            return pause
        if isinstance(error, Overloaded):
            raise error
        _lost(error)


# Serve's handle of an application -> the handle that all our clients in this process use instead,
# until Serve is shut down.
_HANDLES: "WeakKeyDictionary[DeploymentHandle[Any], DeploymentHandle[Any]]" = WeakKeyDictionary()


def _find(app_name: str, deployment: str = "") -> "DeploymentHandle[Any]":
    """Return the handle of an application's routers. Raises MantaError (code app_not_found).

    deployment: name of the deployment of routers; "": the application's ingress deployment.
    """
    try:
        app_handle = (
            serve.get_deployment_handle(deployment, app_name)
            if deployment
            else serve.get_app_handle(app_name)
        )
    except (RayServeException, KeyError) as error:  # KeyError: no such deployment
        where = f" with a deployment {deployment!r}" if deployment else ""
        raise MantaError(
            f"no Serve application {app_name!r}{where} here: {error}", code="app_not_found"
        ) from error
    handle = _HANDLES.get(app_handle)
    if handle is None:
        handle = DeploymentHandle(app_handle.deployment_name, app_handle.app_name)
        # Ray passes the cluster's environment (`cluster_environment` in serve/proxy.py) to tasks
        # and actors. With it a handle would run on the caller's event loop, which may be missing or
        # end with the next asyncio.run. Up to Ray 2.60 there is no public way to change this.
        handle._init(_run_router_in_separate_loop=True)
        _HANDLES[app_handle] = handle
    return handle


def _body(model: str, prompt: Prompt, fields: dict[str, Any]) -> dict[str, Any]:
    """Return the body of a request.

    fields: further fields of the HTTP API.
    Raises InvalidRequest, also for unknown fields, as handle calls have no header x-ignored-fields.
    """
    body = {**({"model": model} if model else {}), **prompt_field(prompt, "prompt"), **fields}
    return checked(body, (CHAT if "messages" in body else COMPLETION).known)


def _completion(answer: dict[str, Any]) -> Completion:
    _check(answer)
    usage = answer["usage"]
    details = usage.get("prompt_tokens_details") or {}
    # In text completions, which may have several prompts, the choices have the fields about the
    # prompt.
    prompt = answer if "prompt_token_ids" in answer else answer["choices"][0]
    return Completion(
        id=answer["id"],
        model=answer["model"],
        choices=tuple(
            Choice(
                index=choice["index"],
                text=choice["message"]["content"] if "message" in choice else choice["text"],
                finish_reason=choice["finish_reason"],
                logprobs=choice.get("logprobs"),
                token_ids=_tuple(choice, "token_ids"),
                token_logprobs=_tuple(choice, "token_logprobs"),
                weight_versions=_versions(choice.get("weight_versions")),
                routed_experts=_routed(choice.get("routed_experts")),
            )
            for choice in answer["choices"]
        ),
        usage=Usage(
            usage["prompt_tokens"],
            usage["completion_tokens"],
            details.get("cached_tokens", 0),
        ),
        raw=answer,
        prompt_token_ids=_tuple(prompt, "prompt_token_ids"),
        prompt_logprobs=_tuple(prompt, "prompt_token_logprobs"),
    )


def _versions(parts: list[dict[str, Any]] | None) -> tuple[tuple[str, int], ...] | None:
    if parts is None:
        return None
    return tuple((part["version"], part["num_tokens"]) for part in parts)


def _routed(shown: dict[str, Any] | None) -> "NDArray[np.integer] | None":
    if shown is None:
        return None
    shape, data = tuple(shown["shape"]), b64decode(shown["data"])
    return RoutedExperts(shape, shown["dtype"], data).array()


def _tuple(of: dict[str, Any], name: str) -> tuple[Any, ...] | None:
    """Return the list under a key of a mapping as a tuple; None if there is none."""
    return None if (values := of.get(name)) is None else tuple(values)


def _chunks(item: dict[str, Any]) -> Iterator[Chunk]:
    _check(item)
    for choice in item["choices"]:
        text = choice["delta"].get("content") if "delta" in choice else choice["text"]
        yield Chunk(
            choice["index"],
            text or "",
            choice.get("finish_reason"),
            item,
            _tuple(choice, "token_ids"),
            _tuple(choice, "token_logprobs"),
        )


def _result(call: RouteCall[T], answer: dict[str, Any]) -> T:
    """Return the result of a call from its answer, or raise the exception for an error answer."""
    try:
        _check(answer)
    except InvalidRequest as error:
        if call.updates:
            raise UpdateRefused(error.message, param=error.param, code=error.code) from None
        raise
    return call.read(answer)


def _check(answer: dict[str, Any]) -> None:
    """Raise the exception for an answer if it is an error object."""
    error = answer.get("error")
    if error is None:
        return
    status, code = answer.get("status", 500), error.get("code")
    message, param = error.get("message", ""), error.get("param")
    if code == EngineDead.code:
        raise EngineDead(message, param=param, code=code)
    if status in (429, 503):
        retry = float(answer.get("retry_after", 1))
        raise Overloaded(message, param=param, code=code, retry_after=retry)
    if status < 500:
        raise InvalidRequest(message, param=param, code=code)
    raise RequestFailed(message, param=param, code=code)


def _lost(error: RayError) -> NoReturn:
    """Raise EngineDead (code router_lost) for a call that failed because its router or node was
    lost."""
    raise EngineDead(
        f"the router did not answer: {type(error).__name__}", code="router_lost"
    ) from error
