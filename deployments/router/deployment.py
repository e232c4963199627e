"""Router: the Serve deployment that answers HTTP and handle calls. Dispatcher and API do the
work."""

import asyncio
import gc
import logging
import os
import secrets
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from ray import serve
from ray.serve.handle import DeploymentHandle

from deployments.api.app import build_asgi
from deployments.api.batch_folder import BatchFolder, BatchSettings
from deployments.api.options import ApiOptions
from deployments.cluster_store import event_secret
from deployments.environment import installed_version
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

if TYPE_CHECKING:
    from deployments.router.rpc.server import GrpcServer

logger = logging.getLogger("manta.router")

_FIGURES_SECONDS = 1.0  # for the other routers to tell their metrics: two heartbeats of a replica
_ASK_SECONDS = 5.0  # for the other routers to tell what they know of a request
_ASKERS = 8  # calls to the other routers at once
_LAST_WORDS = 1.0  # seconds for the errors of a drain to go out


@dataclass(frozen=True, slots=True)
class RouterSettings:
    """The settings of a router.

    models: the one model that is served; None where models come and go.
    find_models: gives the models of an application, where models come and go.
    change_models: changes the models of an application.
    in_flight: requests at most.
    stream_seconds: seconds that a request may go on after its model was changed or taken away.
    usage_file: path of the usage file, "" is none; see UsageConfig.
    batches, grpc: settings, None if they are not served.
    tracing: settings, None: no spans are made.
    """

    models: tuple[ServedModel, ...] | None
    find_models: FindModels | None
    change_models: ChangeModels | None
    in_flight: int
    body_bytes: int
    choices: int
    strict: bool
    share_by: str
    deadline_seconds: float | None
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
    page: bool = False
    log_level: str = "info"
    stream_seconds: float = 3600.0
    grpc: GrpcSettings | None = None


class Router:
    """A router of an application.

    engines: handles of the engine deployments; used for discovery, not for tokens.
    """

    def __init__(self, settings: RouterSettings, *engines: "DeploymentHandle[Any]") -> None:
        log_through_serve(settings.log_level)
        # A thread that runs Python beside the event loop keeps it waiting for as long each time
        # that the loop comes back from the system, which is several times a chunk; by default 5 ms.
        sys.setswitchinterval(5e-4)
        self._settings = settings
        self._engines = engines
        self._peer_calls = asyncio.Semaphore(_ASKERS)
        self._grpc: GrpcServer | None = None
        self._worker: BatchWorker | None = None
        self._spans: SpanExporter | None = None

    async def __serve_build_asgi_app__(self) -> handle_call.AsgiApp:
        """Serve's hook: runs once on the loop that will carry the requests."""
        settings = self._settings
        context = serve.get_replica_context()
        app = context.app_name
        try:
            secret = await asyncio.to_thread(event_secret, app)
        except OSError as error:
            logger.warning("event ids are good at this router only: %s", error)
            secret = secrets.token_bytes(32)
        name = f"router-{secrets.token_hex(4)}"
        front = self._front = ModelsBackend(name, several=settings.models is None)
        self._peers = AllRouters(context.deployment, app)
        self._models = ModelLoader(front, app, settings.stream_seconds)
        for model in settings.models or ():
            await self._models.serve(model, self._engines)
        await self._models.follow(settings.find_models)
        self._export = ServeExport(front.figures)
        self._application_metrics = ApplicationMetrics(
            name,
            "" if front.several else front.only,
            front.figures,
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
            max_choices=settings.choices,
            max_in_flight=settings.in_flight,
            share_by=settings.share_by,
            deadline_s=settings.deadline_seconds,
            cors_origins=frozenset(settings.cors_origins),
            keepalive_s=settings.keepalive_seconds,
            store_bytes=settings.store_bytes,
            page=settings.page,
            event_secret=secret,
            metrics=self._application_metrics.text,
            explain=self._explain,
            stop=self._stop,
            live=live.routers,
            models=None
            if settings.change_models is None
            else RouterChanges(settings.change_models, front, self._models),
            observe=lambda route, status, _: front.metrics.http.add(1, route, str(status)),
        )
        # A caller with a handle is inside the cluster: no key.
        self._trusted = build_asgi(front, options)
        # Serve itself puts the request's id, or a new one, into request and answer.
        keys = await key_service.start()
        options = replace(options, tell_request_id=False, limits=key_service.limits, **keys)
        http = self._http = build_asgi(front, options)

        def keys_changed(fields: dict[str, Any]) -> None:
            http.change_options(**fields)

        key_service.on_change = keys_changed
        if settings.batches is not None:
            folder = await asyncio.to_thread(BatchFolder, settings.batches)
            http.change_options(batches=folder)
            self._worker = BatchWorker(folder, asker(http, lambda: http.options))
            self._worker.start()
        if settings.grpc is not None:
            # Only now: few ask for it, and the library is large.
            from deployments.router.rpc.server import GrpcServer

            self._grpc = GrpcServer(http, front.ready, lambda: front.only, settings.grpc)
            await self._grpc.start()
        # A garbage collection over all imported modules would hold every stream up for 70 ms.
        gc.collect()
        gc.freeze()
        return self._http

    def record_autoscaling_stats(self) -> dict[str, int | float]:
        """Serve's hook: the signals of the autoscaling policy."""
        return self._front.autoscaling_stats() if hasattr(self, "_front") else {}

    # -- handle calls: plain dicts, so that callers need nothing of ours

    async def generate(self, body: dict[str, Any]) -> dict[str, Any]:
        """Answer a chat completion if body has `messages`, else a completion. Fields and answer are
        as in the HTTP API."""
        return await handle_call.call(self._trusted, self._named(body))

    async def stream(
        self, body: dict[str, Any], last_event_id: str | None = None
    ) -> AsyncIterator[dict[str, Any]]:
        """Stream a chat completion if body has `messages`, else a completion.

        last_event_id: as in handle_call.stream.
        """
        async for chunk in handle_call.stream(self._trusted, self._named(body), last_event_id):
            yield chunk

    def _named(self, body: dict[str, Any]) -> dict[str, Any]:
        """Add the model's name to a body that has none, where there is one model."""
        only = self._front.only
        return {"model": only, **body} if only else body

    async def drain(self, seconds: float) -> None:
        """Refuse new requests and return when the last answer is out. Requests that still run after
        so many seconds end with the error `draining`. It is called before the application is
        deleted, because Serve does not tell routers in time."""
        if self._worker is not None:
            self._worker.close()  # the next one goes on with its batches
        self._front.refuse_new()
        await self._idle(seconds)
        self._front.fail_all()
        await self._idle(_LAST_WORDS)

    async def _idle(self, seconds: float) -> None:
        """Wait until no request is in flight, for so long at most."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and (self._http.in_flight or self._trusted.in_flight):
            await asyncio.sleep(0.05)

    async def state(self) -> dict[str, Any]:
        """Return the replicas and load as this router sees them, where there are several models
        also of each. `held` is 0 throughout when nothing is in flight; pid and tasks (of asyncio,
        by name) are for finding leaks."""
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
            },
            **several,
        }

    async def figures(self) -> bytes:
        """Return this router's metrics for another router's /metrics."""
        return self._application_metrics.report()

    async def explain(self, request_id: str, owner: str | None = None) -> list[dict[str, Any]]:
        """Return what this router knows of a request, lately ended or in flight: one dict a prompt;
        see request_trace.py.

        owner: digest of the key that may see it; None: no restriction.
        """
        return self._front.explain(request_id, owner)

    async def _explain(self, request_id: str, owner: str | None) -> list[dict[str, Any]]:
        """Explain a request from whichever router had it: this one, or the others are asked."""
        if traces := self._front.explain(request_id, owner):
            return traces
        async with self._peer_calls:
            answers = await self._peers.ask(_ASK_SECONDS, "explain", request_id, owner)
        return [part for answer in answers for part in answer]

    async def live(self) -> dict[str, Any]:
        """Return what this router knows at this moment; see live_view.py."""
        return self._front.live()

    async def stop(self, request_id: str, owner: str | None = None) -> int:
        """End this router's live requests of an id, and return how many prompts these were.

        owner: as in explain.
        """
        return self._front.stop(request_id, owner)

    async def _stop(self, request_id: str, owner: str | None) -> int:
        """End the live requests of an id at all routers, and return how many prompts these were.
        Calls with one id may be at several routers."""
        async with self._peer_calls:
            answers = await self._peers.ask(_ASK_SECONDS, "stop", request_id, owner)
        return self._front.stop(request_id, owner) + sum(answers)

    async def __del__(self) -> None:
        if hasattr(self, "_models"):
            self._models.close()
        if self._grpc is not None:  # Serve waits for requests over HTTP alone
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


def _state_json(what: ModelsBackend | Dispatcher, model: str) -> dict[str, Any]:
    """Return the load, replicas and counts of one model, or of all."""
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
        exporter.add(spans_of(inflight.trace, context, router))
