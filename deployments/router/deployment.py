"""Router: the Serve deployment that answers HTTP requests and handle calls, with `Api` and
`ModelsBackend`."""

import asyncio
import gc
import logging
import os
import secrets
import sys
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from ray import serve
from ray.serve.handle import DeploymentHandle

from deployments.api.app import build_asgi
from deployments.api.batch_folder import BatchFolder, BatchSettings
from deployments.api.http import uvicorn_hooks
from deployments.api.options import ApiOptions
from deployments.cluster_store import event_secret
from deployments.environment import installed_version
from deployments.images.intake import ImageIntake
from deployments.images.limits import ImageLimits
from deployments.observe.application_metrics import ApplicationMetrics
from deployments.observe.logs import log_through_serve
from deployments.observe.otlp import SpanExporter, TracingSettings
from deployments.observe.ray_exporter import ServeExport
from deployments.observe.tasks import tasks
from deployments.router.batch_worker import BatchWorker, asker
from deployments.router.dispatcher import Dispatcher
from deployments.router.inflight import InflightRequest
from deployments.router.keys.key_files import KeySettings
from deployments.router.keys.key_service import KeyService, SharedCounts
from deployments.router.keys.usage_log import UsageLog
from deployments.router.live_view import ApplicationView
from deployments.router.models.model_loader import (
    ChangeModels,
    FindModels,
    ModelLoader,
    RouterChanges,
)
from deployments.router.models.model_settings import ServedModel
from deployments.router.models.models_backend import ModelsBackend
from deployments.router.request_trace import context_of, spans_of
from deployments.router.rpc.settings import GrpcSettings
from deployments.router.serve import handle_call
from deployments.router.serve.all_routers import AllRouters
from deployments.router.serve.ray_data import DatasetRows
from deployments.router.training import RouterTraining

if TYPE_CHECKING:
    from deployments.router.rpc.server import GrpcServer

logger = logging.getLogger("manta.router")

# Seconds for the other routers to send their metrics: two heartbeats of a replica.
_FIGURES_SECONDS = 1.0
_ASK_SECONDS = 5.0  # seconds for the other routers to find or stop a request
_ASKERS = 8  # maximum of simultaneous calls to the other routers
_LAST_WORDS = 1.0  # seconds after a drain in which errors of failed requests are still sent


@dataclass(frozen=True, slots=True)
class RouterSettings:
    """The settings of a router.

    models: a tuple of the one served model; None if models are added and removed at run time.
    find_models: returns the models of an application; used if models change at run time.
    change_models: functions that add, change and remove models of an application.
    in_flight: maximum number of concurrent requests.
    body_bytes: maximum bytes of a request's body.
    choices: maximum number of a request's prompts, and of all its choices together.
    max_tokens, strict, share_by, share_prefixes, cors_origins, store_bytes, images, page: see
        ApiOptions.
    deadline_seconds, keepalive_seconds: see ApiOptions.deadline_s and keepalive_s.
    stream_seconds: seconds that a request may go on after its model was changed or removed.
    routers: names of the Serve deployments of the application's routers.
    runs_batches: whether this router may run the requests of batches.
    usage_file: path of the usage file; "": none; see UsageConfig.
    batches, grpc: settings; None if they are not served.
    tracing: settings of the span exporter; None: no spans are exported.
    """

    models: tuple[ServedModel, ...] | None
    find_models: FindModels | None
    change_models: ChangeModels | None
    in_flight: int
    body_bytes: int
    choices: int
    max_tokens: int | None
    strict: bool
    share_by: str
    deadline_seconds: float | None
    routers: tuple[str, ...]
    runs_batches: bool = True
    keys: KeySettings = field(default_factory=KeySettings)
    usage_file: str = ""
    usage_bytes: int = 2**26
    usage_files: int = 8
    batches: BatchSettings | None = None
    tracing: TracingSettings | None = None
    share_prefixes: bool = False
    cors_origins: tuple[str, ...] = ()
    keepalive_seconds: float = 5.0
    store_bytes: int = 0
    images: ImageLimits = field(default_factory=ImageLimits)
    page: bool = False
    log_level: str = "info"
    stream_seconds: float = 3600.0
    grpc: GrpcSettings | None = None


class Router:
    """The Serve deployment of routers: the HTTP API, the choice of replicas, and all streams.

    engines: handles of the engine deployments, through which the router discovers replicas. Tokens
        arrive over channels instead.
    batch_routers: the deployment of `BatchRouter`, which Serve deploys because it is bound here.
    """

    def __init__(
        self,
        settings: RouterSettings,
        *engines: "DeploymentHandle[Any]",
        batch_routers: "DeploymentHandle[Any] | None" = None,
    ) -> None:
        log_through_serve(settings.log_level)
        # While another thread runs Python, the event loop waits for one switch interval after each
        # of its system calls, several times per chunk. The default interval is 5 ms.
        sys.setswitchinterval(5e-4)
        self._settings = settings
        self._engines = engines
        self._peer_calls = asyncio.Semaphore(_ASKERS)
        self._grpc: GrpcServer | None = None
        self._worker: BatchWorker | None = None
        self._spans: SpanExporter | None = None

    async def __serve_build_asgi_app__(self) -> handle_call.AsgiApp:
        """Build the ASGI application; Serve calls this hook once, on the loop that serves
        requests."""
        settings = self._settings
        context = serve.get_replica_context()
        app = context.app_name
        try:
            secret = await asyncio.to_thread(event_secret, app)
        except OSError as error:
            logger.warning("event ids are good at this router only: %s", error)
            secret = secrets.token_bytes(32)
        name = f"{context.deployment}-{secrets.token_hex(4)}"
        front = self._front = ModelsBackend(name, several=settings.models is None)
        self._training = RouterTraining(front)
        self._peers = AllRouters(settings.routers, app)
        self._models = ModelLoader(front, app, settings.stream_seconds)
        for model in settings.models or ():
            await self._models.serve(model, self._engines)
        await self._models.follow(settings.find_models)
        self._export = ServeExport(front.metric_families)
        self._application_metrics = ApplicationMetrics(
            name,
            "" if front.several else front.only,
            front.metric_families,
            lambda: front.state().replicas,
            partial(self._peers.ask, _FIGURES_SECONDS, "figures"),
        )
        live = ApplicationView(front.live, partial(self._peers.ask, _FIGURES_SECONDS, "live"))
        key_service = self._key_service = KeyService(
            settings.keys,
            UsageLog(Path(settings.usage_file), settings.usage_bytes, settings.usage_files)
            if settings.usage_file
            else None,
            SharedCounts(app, name),
            front.metrics,
        )
        if not key_service.idle:
            front.on_end.append(key_service.ended)
        if settings.tracing is not None:
            self._spans = SpanExporter(settings.tracing, name, installed_version())
            self._spans.start()
            front.on_end.append(partial(_export, self._spans, settings.tracing, name))
        options = ApiOptions(
            strict=settings.strict,
            share_prefixes=settings.share_prefixes,
            max_body_bytes=settings.body_bytes,
            max_prompts=settings.choices,
            max_choices=settings.choices,
            max_tokens=settings.max_tokens,
            max_in_flight=settings.in_flight,
            share_by=settings.share_by,
            deadline_s=settings.deadline_seconds,
            cors_origins=frozenset(settings.cors_origins),
            keepalive_s=settings.keepalive_seconds,
            store_bytes=settings.store_bytes,
            images=ImageIntake(settings.images),
            page=settings.page,
            event_secret=secret,
            metrics=self._application_metrics.text,
            explain=self._explain,
            stop=self._stop,
            live=live.routers,
            models=None
            if settings.change_models is None
            else RouterChanges(settings.change_models, front, self._models),
            training=self._training,
            observe=lambda route, status, _: front.metrics.http.inc(1, route, str(status)),
        )
        # A caller with a Serve handle is inside the cluster and needs no API key.
        self._trusted = build_asgi(front, options)
        self._rows = DatasetRows(self._trusted)
        # Serve itself adds x-request-id to the request and the response.
        keys = await key_service.start()
        options = replace(options, tell_request_id=False, limits=key_service.limits, **keys)
        http = self._http = build_asgi(front, options)
        uvicorn_hooks.refuse_early(http.refuse_early)

        def keys_changed(fields: dict[str, Any]) -> None:
            http.change_options(**fields)

        key_service.on_change = keys_changed
        if settings.batches is not None:
            folder = await asyncio.to_thread(BatchFolder, settings.batches)
            http.change_options(batches=folder)
            if settings.runs_batches:
                self._worker = BatchWorker(folder, asker(http, lambda: http.options))
                self._worker.start()
        if settings.grpc is not None:
            # Imported only here: the library is large and seldom used.
            from deployments.router.rpc.server import GrpcServer

            self._grpc = GrpcServer(http, front.ready, lambda: front.only, settings.grpc)
            await self._grpc.start()
        # A garbage collection over all imported modules would stall every stream for 70 ms.
        gc.collect()
        gc.freeze()
        return self._http

    def record_autoscaling_stats(self) -> dict[str, int | float]:
        """Return the signals for the autoscaling policy; Serve calls this hook."""
        return self._front.autoscaling_stats() if hasattr(self, "_front") else {}

    # -- calls over Serve handles: plain dicts, so that callers need no class of this repository

    async def generate(self, body: dict[str, Any]) -> dict[str, Any]:
        """Answer a chat completion if the body has `messages`, a text completion otherwise.

        The fields of the body and of the result are those of the HTTP API.
        """
        return await handle_call.call(self._trusted, self._named(body))

    async def stream(
        self, body: dict[str, Any], last_event_id: str | None = None
    ) -> AsyncIterator[dict[str, Any]]:
        """Stream a chat completion if the body has `messages`, a text completion otherwise.

        last_event_id: see handle_call.stream.
        """
        async for chunk in handle_call.stream(self._trusted, self._named(body), last_event_id):
            yield chunk

    # Ray Data's Serve stage calls these methods, which Ray's own LLM deployments have, too. The
    # stage takes the first item that each call yields.

    async def completions(self, request: Any) -> AsyncIterator[dict[str, Any]]:
        """Yield the text completion of a dataset row; see `ray_data.DatasetRows`."""
        yield await self._rows.answer("/v1/completions", request, self._front.only)

    async def chat(self, request: Any) -> AsyncIterator[dict[str, Any]]:
        """Yield the answer to a dataset row with a chat; see `ray_data.DatasetRows`."""
        yield await self._rows.answer("/v1/chat/completions", request, self._front.only)

    async def embeddings(self, request: Any) -> AsyncIterator[dict[str, Any]]:
        """Yield the embeddings of a dataset row; see `ray_data.DatasetRows`."""
        yield await self._rows.answer("/v1/embeddings", request, self._front.only)

    async def update_weights(self, folder: str, version: str = "", model: str = "") -> str:
        """Replace the weights at all replicas by a checkpoint; return the version's name.

        folder: path of the checkpoint, which every replica's node must be able to read until the
            next update.
        version: name of the new weights; "": the next number of the WeightsRecord.
        model: the model's name; "" if only one model is served.
        Raises UpdateFailed (the old weights remain in use), InvalidRequest, and Overloaded.
        """
        return await self._training.update(model, folder, version)

    async def pause(self, mode: str = "keep", model: str = "") -> None:
        """Pause all replicas. mode: as in `engine.LLM.pause`.

        Raises InvalidRequest, Overloaded.
        """
        await self._training.pause(model, mode)

    async def resume(self, model: str = "") -> None:
        """End the pause of all replicas. Raises InvalidRequest, Overloaded."""
        await self._training.resume(model)

    async def control(
        self,
        path: str,
        query: str | Mapping[str, Any] = "",
        body: dict[str, Any] | str | bytes | None = None,
        method: str = "",
    ) -> dict[str, Any]:
        """Call any HTTP route, and return the JSON of its response.

        A response that is not JSON is returned as {"text": ...}.

        path: the route.
        query: the URL's query, such as "mode=keep" or {"mode": "keep"}.
        body: a JSON object, or its text; None for a request without a body.
        method: the HTTP method; "": POST, or GET without a body.
        """
        return await handle_call.control(self._trusted, path, query, body, method)

    def _named(self, body: dict[str, Any]) -> dict[str, Any]:
        """Return a request's body with the model's name filled in if only one model is served."""
        only = self._front.only
        return {"model": only, **body} if only else body

    async def drain(self, seconds: float) -> None:
        """Refuse new requests, and return once all running requests have been answered.

        Called before the application is deleted, because Serve would notify routers too late.

        seconds: time after which running requests end with the error `draining`.
        """
        if self._worker is not None:
            # Another router continues the batches of this router.
            self._worker.close()
        self._front.refuse_new()
        await self._idle(seconds)
        self._front.fail_all()
        await self._idle(_LAST_WORDS)

    async def _idle(self, seconds: float) -> None:
        """Wait until no request is in flight, for at most `seconds`."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and (self._http.in_flight or self._trusted.in_flight):
            await asyncio.sleep(0.05)

    async def state(self) -> dict[str, Any]:
        """Return the load and the replicas as this router sees them: in total and, with several
        models, by model.

        `pid`, `tasks` (asyncio tasks by name) and `held` help to find leaks: the counts in `held`
        are 0 when no request is in flight.
        """
        several = (
            {
                "models": {
                    name: {**_state_json(dispatcher, name), "status": dispatcher.status()}
                    for name, dispatcher in self._front.dispatchers.items()
                }
            }
            if self._front.several
            else {}
        )
        return {
            **_state_json(self._front, self._front.only),
            "pid": os.getpid(),
            "tasks": tasks(),
            "held": {
                **self._front.held(),
                "http": self._http.in_flight,
                "handle": self._trusted.in_flight,
                "image_bytes": self._http.options.images.memory.held,
            },
            **several,
        }

    async def figures(self) -> bytes:
        """Return this router's metrics, encoded for another router's /metrics."""
        return self._application_metrics.report()

    async def explain(self, request_id: str, owner: str | None = None) -> list[dict[str, Any]]:
        """Return this router's traces of a request, one dictionary per prompt; see
        request_trace.py.

        owner: digest of the API key that asks, which sees its own requests only; None: all.
        """
        return self._front.explain(request_id, owner)

    async def _explain(self, request_id: str, owner: str | None) -> list[dict[str, Any]]:
        """Return the traces of a request from this router, or from the others if this one has
        none."""
        if traces := self._front.explain(request_id, owner):
            return traces
        async with self._peer_calls:
            answers = await self._peers.ask(_ASK_SECONDS, "explain", request_id, owner)
        return [part for answer in answers for part in answer]

    async def live(self) -> dict[str, Any]:
        """Return this router's live view; see live_view.py."""
        return self._front.live()

    async def stop(self, request_id: str, owner: str | None = None, partial: bool = False) -> int:
        """End this router's running requests with an id, and return the number of prompts ended.

        owner: digest of the API key that asks, which ends its own requests only; None: all.
        partial: whether a request's answer is the output so far; if false, it is an error.
        """
        return self._front.stop(request_id, owner, partial)

    async def _stop(self, request_id: str, owner: str | None, partial: bool = False) -> int:
        """End the running requests with an id at all routers, and return the number of prompts
        ended.

        Requests with the same id may be at several routers.
        """
        async with self._peer_calls:
            # routers of an earlier version know no third argument
            arguments = [request_id, owner, *([True] if partial else [])]
            answers = await self._peers.ask(_ASK_SECONDS, "stop", *arguments)
        return self._front.stop(request_id, owner, partial) + sum(answers)

    async def __del__(self) -> None:
        if hasattr(self, "_models"):
            self._models.close()
        if self._grpc is not None:
            # Serve itself waits for HTTP requests only.
            await self._grpc.stop()
        if self._spans is not None:
            await self._spans.close()
        if hasattr(self, "_front"):
            self._export.stop()
            if hasattr(self, "_key_service"):
                self._key_service.close()
            if self._worker is not None:
                self._worker.close()
            self._front.close()


class BatchRouter(Router):
    """The Serve deployment of routers for batch work: no proxy reaches them, only Serve handles.

    Serve allows an application only one deployment with an ASGI application, and calls the hook
    that builds it nowhere else.
    """

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self, settings: RouterSettings, *engines: "DeploymentHandle[Any]"
    ) -> None:
        super().__init__(settings, *engines)
        await self.__serve_build_asgi_app__()


def _state_json(what: ModelsBackend | Dispatcher, model: str) -> dict[str, Any]:
    """Return the load, replicas and metrics as JSON: of one model (a Dispatcher), or of all models
    together (a ModelsBackend).

    model: the model's name; "" for several.
    """
    state = what.state()
    return {
        "name": what.name,
        "model": model,
        "in_flight": state.in_flight,
        "queued": state.queued,
        "queued_tokens": state.queued_tokens,
        "replicas": {name: msgspec.structs.asdict(stats) for name, stats in state.replicas.items()},
        "metrics": what.metrics.to_json(),
    }


def _export(
    exporter: SpanExporter, settings: TracingSettings, router: str, inflight: InflightRequest
) -> None:
    context = context_of(*inflight.request.trace, settings)
    if context is not None:
        exporter.add_spans(spans_of(inflight.trace, context, router))
