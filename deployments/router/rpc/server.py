"""GrpcServer: the gRPC services on a port of the router's process.

All routers of a node listen on the same port, and the kernel distributes connections among them.
Each call becomes a request to the HTTP API inside this process. So keys, limits, admission, errors
and resumed streams work as over HTTP.
"""

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any, cast

import grpc
import grpc.aio
from grpc_reflection.v1alpha import reflection

from deployments.api.app import Api
from deployments.api.auth import authenticate
from deployments.api.body_fields import MAX_DEADLINE
from deployments.api.http.errors import (
    AUTHENTICATION,
    INVALID,
    NOT_FOUND,
    OVERLOADED,
    PERMISSION,
    RATE_LIMIT,
    TIMEOUT,
    ApiError,
)
from deployments.api.http.exchange import HttpExchange, request_id
from deployments.api.stream.event_ids import LAST
from deployments.router.rpc.bodies import answer_of, body_of, models_of
from deployments.router.rpc.proto_file import HEALTH, INFERENCE, POOL, message, methods
from deployments.router.rpc.settings import GrpcSettings
from deployments.router.serve.handle_call import AsgiApp, AsgiCall

logger = logging.getLogger("manta.grpc")

_CHAT, _COMPLETIONS, _MODELS = "/v1/chat/completions", "/v1/completions", "/v1/models"
_HEALTH_SECONDS = 1.0  # seconds between polls for Watch calls
_Code = grpc.StatusCode
# gRPC status code by an error's `type`, because an error inside a stream has no HTTP status.
_KINDS = {
    INVALID: _Code.INVALID_ARGUMENT,
    AUTHENTICATION: _Code.UNAUTHENTICATED,
    PERMISSION: _Code.PERMISSION_DENIED,
    NOT_FOUND: _Code.NOT_FOUND,
    TIMEOUT: _Code.DEADLINE_EXCEEDED,
    RATE_LIMIT: _Code.RESOURCE_EXHAUSTED,
    OVERLOADED: _Code.UNAVAILABLE,
}
_STATUS = {
    409: _Code.ABORTED,
    413: _Code.RESOURCE_EXHAUSTED,
    431: _Code.RESOURCE_EXHAUSTED,
    503: _Code.UNAVAILABLE,
}

Ready = Callable[[], bool]
OnlyModel = Callable[[], str]  # the model of requests that name none; "" if there are several


class GrpcServer:
    """A router's gRPC server.

    port: the port that the server listens on, also if the settings have 0 (any free port).
    model: returns the model of a request without a model name.
    """

    def __init__(self, api: Api, ready: Ready, model: OnlyModel, settings: GrpcSettings) -> None:
        self._settings = settings
        self._server = grpc.aio.server(
            interceptors=(_Keys(api),),
            options=(
                # A protobuf message is hardly larger than the JSON of the same request.
                ("grpc.max_receive_message_length", api.options.max_image_body_bytes),
                ("grpc.so_reuseport", 1),
            ),
        )
        service, health = _Inference(api, model), _Health(ready)
        for name, servicer in ((INFERENCE, service), (HEALTH, health)):
            self._server.add_generic_rpc_handlers((_handlers(name, servicer),))
        names = (INFERENCE, HEALTH, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, self._server, POOL)
        address = f"{settings.host}:{settings.port}"
        if ":" in settings.host:
            address = f"[{settings.host}]:{settings.port}"
        if settings.certificate:
            pair = Path(settings.key).read_bytes(), Path(settings.certificate).read_bytes()
            secure = grpc.ssl_server_credentials((pair,))
            self.port = self._server.add_secure_port(address, secure)
        else:
            self.port = self._server.add_insecure_port(address)

    async def start(self) -> None:
        await self._server.start()
        logger.info("gRPC at %s:%d", self._settings.host, self.port)

    async def stop(self) -> None:
        """Stop the server: refuse new calls, and wait up to `stop_seconds` for running calls to
        end."""
        await self._server.stop(self._settings.stop_seconds)


def _handlers(service: str, implementation: Any) -> Any:
    """Return grpc's handler for all methods of a service.

    service: full name of the service.

    implementation: object that has a Python method for each method of the service, of the same
        name.
    """
    handlers = {}
    for name, (request, answer, streamed) in methods(service).items():
        make = grpc.unary_stream_rpc_method_handler if streamed else None
        make = make or grpc.unary_unary_rpc_method_handler
        handlers[name] = make(
            getattr(implementation, name),
            request_deserializer=request.FromString,
            response_serializer=answer.SerializeToString,
        )
    return grpc.method_handlers_generic_handler(service, handlers)


def _headers(metadata: Any) -> list[tuple[bytes, bytes]]:
    """Return the entries of a gRPC call's metadata that are passed on as HTTP headers."""
    return [
        (key.encode(), value.encode("utf-8", "replace"))
        for key, value in metadata or ()
        if isinstance(value, str)
        and (key.startswith("x-") or key in ("authorization", LAST.decode()))
    ]


class _Keys(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """An interceptor that checks a call's API key, if keys are used, before its message is read.

    Health calls need no key, as over HTTP.
    """

    def __init__(self, api: Api) -> None:
        self._api = api

    async def intercept_service(
        self, continuation: Callable[[Any], Awaitable[Any]], details: Any
    ) -> Any:
        handler = await continuation(details)
        if handler is None or details.method.startswith(f"/{HEALTH}/"):
            return handler
        scope = {"method": "POST", "path": "/", "headers": _headers(details.invocation_metadata)}
        exchange = HttpExchange(scope, _nothing, _nothing)
        try:
            authenticate(exchange, self._api.options, admin=False)
        except ApiError as error:
            failure = error
        else:
            return handler

        async def refuse(_: Any, context: Any) -> None:
            await _abort(context, failure.status, _error_json(failure))

        async def refuse_stream(requests: Any, context: Any) -> AsyncIterator[Any]:
            await refuse(requests, context)
            yield

        if handler.response_streaming and handler.request_streaming:
            return grpc.stream_stream_rpc_method_handler(refuse_stream)
        if handler.response_streaming:
            return grpc.unary_stream_rpc_method_handler(refuse_stream)
        return grpc.unary_unary_rpc_method_handler(refuse)


def _error_json(error: ApiError) -> dict[str, Any]:
    return {
        "message": error.message,
        "type": error.kind,
        "code": error.code,
        "param": error.param,
    }


async def _nothing(*_: Any) -> Any:
    raise AssertionError("it is only looked at")


async def _abort(context: Any, status: int, error: dict[str, Any], retry_after: str = "") -> None:
    code = _STATUS.get(status) or _KINDS.get(error.get("type", ""), _Code.INTERNAL)
    trailers = [("manta-code", str(error.get("code") or ""))]
    if error.get("param"):
        trailers.append(("manta-param", str(error["param"]).encode("ascii", "replace").decode()))
    if retry_after:
        trailers.append(("retry-after", retry_after))
    await context.abort(code, error.get("message", ""), tuple(trailers))


class _Inference:
    """The methods of manta.v1.Inference."""

    def __init__(self, api: Api, model: OnlyModel) -> None:
        self._api = cast(AsgiApp, api)
        self._model = model

    async def Chat(self, request: Any, context: Any) -> Any:
        return await self._whole(_CHAT, request, context)

    async def Generate(self, request: Any, context: Any) -> Any:
        return await self._whole(_COMPLETIONS, request, context)

    async def ChatStream(self, request: Any, context: Any) -> AsyncIterator[Any]:
        async for answer in self._streamed(_CHAT, request, context):
            yield answer

    async def GenerateStream(self, request: Any, context: Any) -> AsyncIterator[Any]:
        async for answer in self._streamed(_COMPLETIONS, request, context):
            yield answer

    async def Models(self, request: Any, context: Any) -> Any:
        call = await self._begin(_MODELS, None, context)
        try:
            return models_of(await _body(call, context))
        finally:
            await call.end()

    async def _whole(self, path: str, request: Any, context: Any) -> Any:
        body = await self._read(request, context)
        call = await self._begin(path, {**body, "stream": False}, context)
        try:
            return answer_of(await _body(call, context))
        finally:
            await call.end()

    async def _streamed(self, path: str, request: Any, context: Any) -> AsyncIterator[Any]:
        body = await self._read(request, context)
        options = {"include_usage": True, **(body.get("stream_options") or {})}
        sent = {**body, "stream": True, "stream_options": options}
        call = await self._begin(path, sent, context)
        try:
            if call.status != 200:
                await _body(call, context)
            done = False
            async for event in call.events():
                if event is None:
                    done = True
                elif "error" in event:
                    await _abort(context, 0, event["error"])
                else:
                    yield answer_of(event)
            if not done:
                await context.abort(_Code.UNAVAILABLE, "the stream broke")
        finally:
            await call.end()

    async def _read(self, request: Any, context: Any) -> dict[str, Any]:
        try:
            return body_of(request, self._model())
        except ApiError as error:
            await _abort(context, error.status, _error_json(error))
            raise

    async def _begin(self, path: str, body: dict[str, Any] | None, context: Any) -> AsgiCall:
        """Start a request to the HTTP API, and return it once its response has started.

        The gRPC call's initial metadata is sent at the same time.

        path, body: path and JSON body of the HTTP request; without a body it is a GET.
        """
        headers = _headers(context.invocation_metadata())
        ids = [value for name, value in headers if name == b"x-request-id"]
        id = request_id(ids)
        headers = [(n, v) for n, v in headers if n != b"x-request-id"]
        headers.append((b"x-request-id", id.encode()))
        seconds_left = context.time_remaining()
        if seconds_left is not None and seconds_left < MAX_DEADLINE:
            headers = [(n, v) for n, v in headers if n != b"x-deadline-seconds"]
            headers.append((b"x-deadline-seconds", b"%.3f" % max(seconds_left, 0.001)))
        call = AsgiCall(self._api, path, body, headers)
        try:
            await call.started.wait()
            metadata = [("x-request-id", id)]
            if (ignored := call.headers.get(b"x-ignored-fields")) is not None:
                metadata.append(("x-ignored-fields", ignored.decode("ascii", "replace")))
            await context.send_initial_metadata(tuple(metadata))
        except BaseException:
            await call.end()
            raise
        return call


async def _body(call: AsgiCall, context: Any) -> dict[str, Any]:
    """Return the JSON body of an unstreamed response; abort the gRPC call if it is an error."""
    data = b"".join([part async for part in call.parts()])
    body: dict[str, Any] = json.loads(data) if data else {}
    if call.status != 200:
        retry = call.headers.get(b"retry-after", b"").decode()
        await _abort(context, call.status, body.get("error") or {}, retry)
    return body


class _Health:
    """The methods of grpc.health.v1.Health: SERVING while `ready()` is true."""

    def __init__(self, ready: Ready) -> None:
        self._ready = ready
        self._answer = message("grpc.health.v1.HealthCheckResponse")

    def _status(self, service: str) -> int:
        if service not in ("", INFERENCE):
            return 3
        return 1 if self._ready() else 2

    async def Check(self, request: Any, context: Any) -> Any:
        status = self._status(request.service)
        if status == 3:
            await context.abort(_Code.NOT_FOUND, f"there is no service {request.service[:64]!r}")
        return self._answer(status=status)

    async def Watch(self, request: Any, context: Any) -> AsyncIterator[Any]:
        last = -1
        while True:
            if (status := self._status(request.service)) != last:
                last = status
                yield self._answer(status=status)
            await asyncio.sleep(_HEALTH_SECONDS)
