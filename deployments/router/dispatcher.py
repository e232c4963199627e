"""Dispatcher: the router's `Backend`. It takes requests in; its parts serve them:

    Gate        which requests are let in, and where they wait until a replica has room
    Placement   to which replica a choice goes, and how it is taken off
    Links       the connections to replicas; Fleet is what is known of these
    Losses      what becomes of choices whose replica is lost
    Displaced   where they wait while there is no replica to go to
    Deltas      what a frame brings, to the requests that it is of

No Ray and no HTTP here: replicas are given by `set_replicas`, requests come through `generate`.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

from deployments.adapters.record_store import Book
from deployments.adapters.registry import Adapters, AdapterSettings
from deployments.backend import DRAINING, BackendState, GenerationRequest, ModelCard, Past
from deployments.checkpoints.resolve import Identity
from deployments.observe.metrics import Family, RouterMetrics, families
from deployments.router.adapters.calls import AdapterCalls
from deployments.router.adapters.stale import StaleAdapters
from deployments.router.admission.fair_queue import AdmissionLimits
from deployments.router.admission.request_queue import Gate, GateLimits
from deployments.router.delta_delivery import Deltas
from deployments.router.failover.displaced import Displaced
from deployments.router.failover.losses import Losses
from deployments.router.failover.recall import recall
from deployments.router.inflight import Choice, Entry
from deployments.router.model_cards import ModelCards
from deployments.router.placement import Placement
from deployments.router.replica_calls import Asking
from deployments.router.replica_client import Endpoint, Link
from deployments.router.replica_clients import Links
from deployments.router.request_trace import Stories, log_story
from deployments.routing.fleet import Fleet
from deployments.scaling.policy import Rates
from deployments.transport.channel import ChannelLimits, FromReplica, Recalled
from engine.errors import MantaError, Overloaded
from engine.messages import AdapterAnswer, Failed
from engine.text.tokenizer import Tokenizer

logger = logging.getLogger("manta.router")


@dataclass(frozen=True, slots=True)
class DispatchLimits:
    """wait_seconds: how long a request waits for a replica at most. in_flight: requests. waiting:
    choices, while no replica is ready. losses: replicas, killed from outside, that a request may
    lose in a row without a token from any. admission: while replicas are ready.
    reader_seconds: how long a stream is kept that paused because nobody reads it."""

    wait_seconds: float = 30.0
    in_flight: int = 4096
    waiting: int = 1024
    admission: AdmissionLimits = field(default_factory=AdmissionLimits)
    losses: int = 1
    reader_seconds: float = 30.0
    channel: ChannelLimits = field(default_factory=ChannelLimits)


class Dispatcher:
    """One model, any number of replicas of it. All methods are called on the event loop that made
    it."""

    def __init__(
        self,
        card: ModelCard,
        tokenizer: Tokenizer,
        limits: DispatchLimits,
        name: str,
        identity: Identity | None = None,
        adapters: AdapterSettings | None = None,
        book: Book | None = None,
    ) -> None:
        self.metrics = RouterMetrics()
        self._cards = ModelCards(card)
        self._tokenizer = tokenizer
        self._limits = limits
        self.name = name
        self._stories = Stories()
        self._links = Links(self._connect, "" if identity is None else identity.tokenizer)
        self._fleet = Fleet()
        self._rates = Rates(time.monotonic())
        self._entries: set[Entry] = set()
        self._random = Random()
        self._draining = False
        self._asking = Asking()
        calls = self._calls = AdapterCalls(
            self._asking, self._links, self._fleet, self._random, limits.wait_seconds
        )
        self.adapters = Adapters(
            adapters or AdapterSettings(card.id), calls, lambda: self._set_models(), book
        )
        self._set_models()
        self._waiting = Displaced(limits.wait_seconds)
        self._placement = Placement(
            self._links,
            self._fleet,
            self._waiting,
            self.metrics,
            self._random,
            lambda: self._cards.base.max_model_len,
        )
        self._losses = Losses(
            limits.losses, self._entries, self._waiting, self.metrics, self._placement.place
        )
        self._stale = StaleAdapters(self.adapters, self._placement.place_again)
        self._deltas = Deltas(self._fleet, self._placement, self._losses, self._stale)
        self._gate = Gate(
            GateLimits(limits.wait_seconds, limits.waiting, limits.admission),
            self._fleet,
            self._random.random,
            lambda: self._cards.base.max_model_len,
            self._placement.begin,
        )

    # -- Backend

    def models(self) -> Mapping[str, ModelCard]:
        return self._cards.by_name

    def _set_models(self) -> None:
        self._cards.set_adapters(self.adapters.records)

    def tokenizer(self, model: str) -> Tokenizer:
        return self._tokenizer

    def admit(self, key: str) -> None:
        try:
            self._check_open()
            self._gate.admit(key)
        except MantaError as refusal:
            self.metrics.failed.add(1, refusal.code)
            raise

    def generate(self, request: GenerationRequest) -> Entry:
        try:
            self._check_open()
            if len(self._entries) >= self._limits.in_flight:
                message = f"this router has {len(self._entries)} requests in flight already"
                raise Overloaded(message, retry_after=self._gate.seconds())
            now = self._gate.check(request)
        except MantaError as refusal:
            self.metrics.failed.add(1, refusal.code)
            raise
        entry = Entry(
            request,
            self._placement.numbers(request.params.n),
            self.metrics,
            self._ended,
            self._placement.take_off,
            self._placement.bring_back,
            self._limits.reader_seconds,
        )
        self._entries.add(entry)
        self.metrics.prompt_tokens.add(len(request.token_ids))
        self.metrics.prompt_size.observe(len(request.token_ids))
        if request.deadline is not None:
            error = MantaError("the request's deadline has passed", code="deadline_exceeded")
            left = max(0.0, request.deadline - time.monotonic())
            entry.timers.append(asyncio.get_running_loop().call_later(left, entry.fail, error))
        self._gate.enter(entry, now=now)
        return entry

    async def recall(
        self, streams: Sequence[str], enough: Callable[[list[Past]], bool]
    ) -> list[Past]:
        return await recall(self._asking, lambda: set(self._links.everywhere()), streams, enough)

    def state(self) -> BackendState:
        return BackendState(
            replicas={
                link.replica: link.state.stats for link in self._links.values() if link.connection
            },
            in_flight=len(self._entries),
            queued=self._gate.choices,
            queued_tokens=self._gate.tokens,
            draining=self._draining,
        )

    def held(self) -> dict[str, int]:
        """What requests hold here: none of it may outlive them."""
        return {
            "entries": len(self._entries),
            "waiting": len(self._waiting) + self._gate.choices,
            "choices": sum(len(link.choices) for link in self._links.everywhere()),
        }

    def explain(self, id: str, owner: str | None) -> list[dict[str, Any]]:
        """What became of the requests with this id; see request_trace.py."""
        unfinished = (entry.story for entry in self._entries)
        now = time.monotonic()
        return [story.tell(self.name, now) for story in self._stories.find(id, owner, unfinished)]

    def ready(self) -> bool:
        return not self._draining and any(link.available for link in self._links.values())

    def _check_open(self) -> None:
        if self._draining:
            raise Overloaded(DRAINING, code="draining", retry_after=5)

    # -- for the router

    def seed(self, seed: int) -> None:
        """Draw what is drawn by lot from this seed, for simulations."""
        self._random.seed(seed)

    def set_replicas(self, replicas: Mapping[str, Mapping[str, Any]]) -> None:
        """These are the running replicas, id -> what each published."""
        self._links.replace(replicas)

    def _connect(self, replica: str, endpoint: Endpoint) -> Link:
        return Link(
            replica,
            endpoint,
            self._limits.channel,
            self.name,
            self._fleet,
            on_open=self._on_open,
            on_frame=self._on_frame,
            on_lost=self._on_lost,
        )

    def figures(self) -> Iterator[Family]:
        """What it has counted, for /metrics and Ray's exporter."""
        return families(self.metrics, self.state())

    def autoscaling_stats(self) -> dict[str, int | float]:
        """What arrives here and what waits here, for autoscaling.py: tokens/s since the last call,
        of prompts those that no cache had, of outputs as many as requests had so far."""
        metrics = self.metrics
        ended = sum(metrics.output_size.counts)
        output = metrics.output_size.sum / ended if ended else 128.0
        rates = self._rates.update(
            time.monotonic(),
            prompt=sum(metrics.prompt_tokens.values.values())
            - sum(metrics.cached_tokens.values.values()),
            requests=sum(metrics.prompt_size.counts),
        )
        return {
            "prompt_rate": rates["prompt"],
            "output_rate": rates["requests"] * output,
            "in_flight": len(self._entries),
            "queued": self._gate.choices + len(self._waiting) + self._calls.waiting,
            "queued_tokens": self._gate.tokens,
        }

    def refuse_new(self) -> None:
        """What is in flight goes on, nothing new begins."""
        self._draining = True

    def fail_all(self) -> None:
        """Tell what is in flight that it has no more time."""
        for entry in list(self._entries):
            message = "the service is stopping, and the time it had for this request is over"
            entry.fail(Overloaded(message, code="draining", retry_after=5))

    def close(self) -> None:
        """Fail what is in flight and leave the replicas."""
        self.refuse_new()
        self.adapters.close()
        self._stale.close()
        self.fail_all()
        self._links.close()

    def _ended(self, entry: Entry) -> None:
        self._entries.discard(entry)
        self._stories.add(entry.story)
        log_story(entry.story)
        self._gate.ended(entry)

    # -- from the links

    def _on_open(self, link: Link) -> None:
        logger.info("replica %s is connected", link.replica)
        self.metrics.channels.add()
        self.adapters.replica_came()
        self._cards.learn(link.endpoint)
        self._placement.place_displaced()
        self._gate.fill()

    def _on_frame(self, link: Link, message: FromReplica) -> None:
        if isinstance(message, AdapterAnswer | Recalled):
            self._asking.answered(message)
            return
        if isinstance(message, Failed):
            assert link.connection is not None
            link.failed = message
            link.connection.close(f"{message.code}: {message.message}")
            return
        now = time.monotonic()
        link.observe(message, now)
        self._deltas.take(link, message, now)
        self._gate.news(link.state)

    def _on_lost(self, link: Link, lost: list[Choice], reason: str) -> None:
        self._asking.lost(link)
        self._links.closing.discard(link)
        self._losses.lost(link, lost, reason)
