"""ModelsBackend: the `Backend` of one model or of several.

Each model has a Dispatcher of its own, so that queues, limits, replicas and metrics of models are
independent. A dictionary finds a request's dispatcher by the model's name.
"""

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from deployments.adapters.record_store import AdapterRecord
from deployments.adapters.registry import AdapterRegistry
from deployments.backend import (
    BackendState,
    GenerationRequest,
    ModelCard,
    RecalledChoice,
    draining,
)
from deployments.observe.metrics import MetricFamily, RouterMetrics, families, of_model
from deployments.router.dispatcher import Dispatcher
from deployments.router.inflight import InflightRequest
from engine.errors import AdapterError, InvalidRequest, MantaError, Overloaded
from engine.lora.tiers.names import not_found
from engine.text.tokenizer import Tokenizer

_POLL = 0.2  # seconds between polls of whether a removed model is idle


class _Owners(dict[str, Dispatcher]):
    """The dispatcher of each model or adapter name that requests may use.

    Raises MantaError for an unknown name, because its model was just removed.
    """

    def __missing__(self, model: str) -> Dispatcher:
        raise InvalidRequest("the model was taken away", param="model", code="model_not_found")


class ModelsBackend:
    """The backend of all models of one router. All methods must be called on the event loop that
    created the object.

    name: name of the router.
    several: whether models are added and removed at run time. If false, there is one model, and
        metrics and reports do not name it.
    dispatchers: the dispatcher of each served model, by the model's name.
    """

    def __init__(self, name: str, *, several: bool = False) -> None:
        self.name = name
        self.several = several
        self.metrics = RouterMetrics()  # with several models: those that belong to no single model
        # Functions that are called with each finished prompt.
        self.on_end: list[Callable[[InflightRequest], None]] = []
        self.adapters = AdaptersByModel(self)
        self.dispatchers: dict[str, Dispatcher] = {}
        self._leaving: dict[Dispatcher, asyncio.Task[None]] = {}
        self._cards: dict[str, ModelCard] = {}
        self._owners = _Owners()
        self._draining = False

    def set_dispatcher(self, model: str, dispatcher: Dispatcher, seconds: float) -> None:
        """Serve a model with a new dispatcher from now on.

        seconds: maximum seconds for which requests of a replaced dispatcher may continue.
        """
        dispatcher.requests.on_end.append(self._ended)
        dispatcher.cards.on_change = self._rebuild
        if not self.several:
            self.metrics = dispatcher.metrics
        before = self.dispatchers.get(model)
        self.dispatchers[model] = dispatcher
        if self._draining:
            dispatcher.refuse_new()
        if before is not None:
            message = f"{model} was changed, and the time that this request had is over"
            self._retire(before, seconds, Overloaded(message, code="draining", retry_after=5))
        self._rebuild()

    def _ended(self, inflight: InflightRequest) -> None:
        for listener in self.on_end:
            listener(inflight)

    def take_out(self, model: str, seconds: float) -> None:
        """Refuse new requests for a model; requests in flight may continue for `seconds`."""
        dispatcher = self.dispatchers.pop(model)
        removed = MantaError(
            f"the model {model} was removed while it answered; GET /v1/models says what is served",
            param="model",
            code="model_removed",
        )
        dispatcher.leave(removed)
        self._retire(dispatcher, seconds, removed)
        self._rebuild()

    def sort(self, names: Sequence[str]) -> None:
        """Set the order in which models are listed."""
        self.dispatchers = {name: self.dispatchers[name] for name in names}
        self._rebuild()

    def _rebuild(self) -> None:
        """Collect the names of models and adapters that requests may use.

        If two models have adapters of the same name, the name refers to the first model's adapter.
        """
        cards: dict[str, ModelCard] = {}
        owners = _Owners()
        for dispatcher in self.dispatchers.values():
            for name, card in dispatcher.models().items():
                if card.parent is None or name not in cards:
                    cards[name], owners[name] = card, dispatcher
        self._cards, self._owners = cards, owners

    def _retire(self, dispatcher: Dispatcher, seconds: float, reason: MantaError) -> None:
        """Start a task that closes a dispatcher once it has no requests, or after `seconds`.

        reason: the error of requests that take longer than `seconds`.
        """
        task = asyncio.get_running_loop().create_task(self._wait_idle(dispatcher, seconds, reason))
        self._leaving[dispatcher] = task

    async def _wait_idle(self, dispatcher: Dispatcher, seconds: float, reason: MantaError) -> None:
        deadline = time.monotonic() + seconds
        while dispatcher.requests and time.monotonic() < deadline:
            await asyncio.sleep(_POLL)
        dispatcher.close(reason)
        del self._leaving[dispatcher]

    # -- Backend

    def models(self) -> Mapping[str, ModelCard]:
        return self._cards

    def tokenizer(self, model: str) -> Tokenizer:
        return self._owners[model].tokenizer(model)

    def admit(self, key: str, priority: int, model: str) -> None:
        owner = self._owners.get(model)
        if owner is not None:
            owner.admit(key, priority, model)
        elif self._draining:
            raise draining()

    def generate(self, request: GenerationRequest) -> InflightRequest:
        return self._owners[request.model].generate(request)

    async def recall(
        self,
        model: str,
        streams: Sequence[str],
        enough: Callable[[list[RecalledChoice]], bool],
    ) -> list[RecalledChoice]:
        return await self._owners[model].recall(model, streams, enough)

    def state(self) -> BackendState:
        total = BackendState(draining=self._draining)
        for model, dispatcher in self.dispatchers.items():
            state = dispatcher.state()
            before = f"{model}/" if self.several else ""
            total.replicas |= {before + name: stats for name, stats in state.replicas.items()}
            total.in_flight += state.in_flight
            total.queued += state.queued
            total.queued_tokens += state.queued_tokens
        return total

    def ready(self) -> bool:
        return any(dispatcher.ready() for dispatcher in self.dispatchers.values())

    def starting(self) -> bool:
        return all(dispatcher.starting() for dispatcher in self.dispatchers.values())

    # -- for the router

    @property
    def only(self) -> str:
        """The name of the only model, which requests need not name; "" if there are several."""
        return next(iter(self.dispatchers)) if len(self.dispatchers) == 1 else ""

    def _all(self) -> Iterator[Dispatcher]:
        yield from self.dispatchers.values()
        yield from self._leaving

    def metric_families(self) -> Iterator[MetricFamily]:
        """Yield the router's metrics, for /metrics and Ray's exporter."""
        for model, dispatcher in self.dispatchers.items():
            figures = families(dispatcher.metrics, dispatcher.state())
            yield from figures if not self.several else of_model(figures, model)
        if self.several:
            yield from self.metrics.of_no_model()

    def held(self) -> dict[str, int]:
        """Return, by kind of object, the number of objects that unfinished requests hold in this
        router.

        A count above 0 while no request is in flight indicates a leak.
        """
        counts = {"requests": 0, "waiting": 0, "choices": 0}
        for dispatcher in self._all():
            for name, count in dispatcher.held().items():
                counts[name] += count
        return counts

    def explain(self, id: str, owner: str | None) -> list[dict[str, Any]]:
        """Return the traces of the requests with an id, as JSON; see request_trace.py.

        owner: digest of the API key that asks, which sees its own requests only; None: all.
        """
        return [
            part for dispatcher in self._all() for part in dispatcher.requests.explain(id, owner)
        ]

    def live(self) -> dict[str, Any]:
        """Return this router's live view of each model; see live_view.py."""
        models = [
            {"model": model, **dispatcher.live()} for model, dispatcher in self.dispatchers.items()
        ]
        return {"router": self.name, "models": models}

    def stop(self, id: str, owner: str | None, partial: bool = False) -> int:
        """End the running requests with an id, and return the number of prompts ended.

        owner: digest of the API key that asks, which ends its own requests only; None: all.
        partial: whether a request's answer is the output so far; if false, it is an error.
        """
        return sum(dispatcher.requests.stop(id, owner, partial) for dispatcher in self._all())

    def autoscaling_stats(self) -> dict[str, int | float]:
        """Return the load metrics of the only model; {} if there are several.

        With several models, each has its own application, which scales by the reports of its
        engines.
        """
        if self.several:
            return {}
        return next((dispatcher.load() for dispatcher in self.dispatchers.values()), {})

    def refuse_new(self) -> None:
        """Refuse new requests; requests in flight go on."""
        self._draining = True
        for dispatcher in self._all():
            dispatcher.refuse_new()

    def fail_all(self) -> None:
        """Fail all requests in flight, because the drain has timed out."""
        for dispatcher in self._all():
            dispatcher.requests.fail_all()

    def close(self) -> None:
        """Fail the requests in flight, and disconnect from all replicas."""
        self._draining = True
        for task in self._leaving.values():
            task.cancel()
        for dispatcher in self._all():
            dispatcher.close()


class AdaptersByModel:
    """The adapters of all models. An adapter's name belongs to one model only."""

    def __init__(self, front: ModelsBackend) -> None:
        self._front = front

    def _each(self) -> dict[str, AdapterRegistry]:
        return {name: dispatcher.adapters for name, dispatcher in self._front.dispatchers.items()}

    @property
    def records(self) -> dict[str, AdapterRecord]:
        records: dict[str, AdapterRecord] = {}
        for registry in self._each().values():
            records = {**registry.records, **records}
        return records

    async def refresh(self) -> None:
        await asyncio.gather(*(registry.refresh() for registry in self._each().values()))

    async def pin(self, name: str) -> AdapterRecord:
        return await self._of(name).pin(name)

    async def add(self, name: str, path: str = "", model: str = "") -> AdapterRecord:
        base = self._base(name, model) or self._front.only
        registries = self._each()
        if not base:
            raise _which_model(list(registries))
        holders = [
            other
            for other, registry in registries.items()
            if name in registry.records and other != base
        ]
        if name in registries or (holders and name not in registries[base].records):
            what = "a model" if name in registries else f"an adapter of {holders[0]}"
            raise AdapterError(f"{name} is the name of {what}", code="invalid_model_name")
        return await registries[base].add(name, path)

    async def remove(self, name: str, model: str = "") -> AdapterRecord:
        base = self._base(name, model)
        return await (self._each()[base] if base else self._of(name)).remove(name)

    def by_model(self) -> list[tuple[str, AdapterRecord]]:
        return [pair for registry in self._each().values() for pair in registry.by_model()]

    def _base(self, name: str, model: str) -> str:
        """Return the name of an adapter's base model; "" if no model has the adapter.

        name: the adapter's name.
        model: the base model as the caller named it; "": the model that has the adapter.

        Raises MantaError if several models have the adapter, or no model has the given name.
        """
        registries = self._each()
        if model and model not in registries:
            raise AdapterError(f"no model is called {model!r}", code="model_not_found")
        holders = [base for base, registry in registries.items() if name in registry.records]
        if not model and len(holders) > 1:
            raise _which_model(holders)
        return model or next(iter(holders), "")

    def _of(self, name: str) -> AdapterRegistry:
        """Return the registry that has an adapter, or an arbitrary registry if none has it.

        A registry that lacks an adapter reads what other routers have written. Raises AdapterError
        if there is no registry.
        """
        registries = list(self._each().values())
        for registry in registries:
            if name in registry.records:
                return registry
        if not registries:
            raise not_found(name)
        return registries[0]


def _which_model(names: list[str]) -> InvalidRequest:
    return InvalidRequest(
        f"model must name the base model, one of {', '.join(names)}",
        param="model",
        code="missing_field",
    )
