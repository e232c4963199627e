"""Dispatcher: the router's `Backend`. Chooses a replica for each request, relays its tokens, and
moves it when a replica is lost. No Ray and no HTTP here: replicas are given by `set_replicas`,
requests come through `generate`."""

import asyncio
import itertools
import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

from deployments.adapters.book import Book
from deployments.adapters.calls import AdapterCalls
from deployments.adapters.registry import Adapters, AdapterSettings
from deployments.adapters.stale import StaleAdapters
from deployments.admission import AdmissionLimits
from deployments.autoscaling import Rates
from deployments.backend import DRAINING, BackendState, GenerationRequest, ModelCard
from deployments.blame import by_itself
from deployments.channel import ChannelLimits, FromReplica, Submit
from deployments.decision import Work
from deployments.explain import Stories, log_story
from deployments.fleet import Fleet
from deployments.gate import Gate, GateLimits
from deployments.ledger import Choice, Entry
from deployments.link import Endpoint, Link
from deployments.metrics import RouterMetrics, render
from deployments.models import Identity
from deployments.prefix_index import chain, pack
from deployments.routing import route
from engine.errors import MantaError, Overloaded, RequestFailed
from engine.messages import Abort, AdapterAnswer, Delta, Failed
from engine.tokenizer import Tokenizer

logger = logging.getLogger("manta.router")

_SUSPECT_PAUSE = 0.25  # seconds; as long as it may take to hear of replicas that died together


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
        self._card = card
        self._card_known = False  # a replica has said what it can really do
        self._tokenizer = tokenizer
        self._vocabulary = "" if identity is None else identity.tokenizer
        self._limits = limits
        self.name = name
        self._stories = Stories()
        self._links: dict[str, Link] = {}
        self._fleet = Fleet()
        self._rates = Rates(time.monotonic())
        self._closing: set[Link] = set()  # retired, with choices left
        self._entries: set[Entry] = set()
        # Moved, and no replica to go to; by id, with the timer that ends the wait.
        self._waiting: dict[int, tuple[Choice, asyncio.TimerHandle]] = {}
        self._ids = itertools.count(1)
        self._random = Random()
        self._draining = False
        calls = self._calls = AdapterCalls(
            self._links, self._fleet, self._random, limits.wait_seconds
        )
        self._models: dict[str, ModelCard] = {}
        self.adapters = Adapters(
            adapters or AdapterSettings(card.id), calls, lambda: self._set_models(), book
        )
        self._stale = StaleAdapters(self.adapters, self._place_again)
        self._set_models()
        self._gate = Gate(
            GateLimits(limits.wait_seconds, limits.waiting, limits.admission),
            self._links,
            self._random.random,
            lambda: self._card.max_model_len,
            self._send,
        )

    # -- Backend

    def models(self) -> Mapping[str, ModelCard]:
        return self._models

    def _set_models(self) -> None:
        card = self._card
        self._models = {card.id: card}
        for name, record in self.adapters.records.items():
            root = record.key if record.revision else name
            created = record.version // 10**9 or card.created
            self._models[name] = replace(
                card,
                id=name,
                max_model_len=max(0, card.max_model_len - record.virtual_tokens),
                root=root,
                parent=card.id,
                created=created,
            )

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
        first_id = next(self._ids)
        for _ in range(request.params.n - 1):
            next(self._ids)
        entry = Entry(
            request,
            first_id,
            self.metrics,
            self._ended,
            self._abort,
            self._resume,
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

    def state(self) -> BackendState:
        return BackendState(
            replicas={link.replica: link.stats for link in self._links.values() if link.connection},
            in_flight=len(self._entries),
            queued=self._gate.choices,
            queued_tokens=self._gate.tokens,
            draining=self._draining,
        )

    def held(self) -> dict[str, int]:
        """What requests hold here: none of it may outlive them."""
        links = [*self._links.values(), *self._closing]
        return {
            "entries": len(self._entries),
            "waiting": len(self._waiting) + self._gate.choices,
            "choices": sum(len(link.choices) for link in links),
        }

    def explain(self, id: str, owner: str | None) -> list[dict[str, Any]]:
        """What became of the requests with this id; see explain.py."""
        unfinished = (entry.story for entry in self._entries)
        now = time.monotonic()
        return [story.tell(self.name, now) for story in self._stories.find(id, owner, unfinished)]

    def ready(self) -> bool:
        return not self._draining and any(link.available for link in self._links.values())

    def _check_open(self) -> None:
        if self._draining:
            raise Overloaded(DRAINING, code="draining", retry_after=5)

    # -- for the router

    def set_replicas(self, replicas: Mapping[str, Mapping[str, Any]]) -> None:
        """These are the running replicas, id -> what each published. Those of a model with another
        tokenizer are left to the routers that come with them, while an update is under way."""
        mine = ("", self._vocabulary)
        if self._vocabulary:
            replicas = {
                name: told for name, told in replicas.items() if told.get("tokenizer", "") in mine
            }
        for replica in self._links.keys() - replicas.keys():
            link = self._links.pop(replica)
            logger.info("replica %s has left, %d choices there", replica, len(link.choices))
            if link.choices:
                self._closing.add(link)
            link.retire()
        for replica in replicas.keys() - self._links.keys():
            endpoint = Endpoint.parse(replicas[replica])
            self._links[replica] = Link(
                replica,
                endpoint,
                self._limits.channel,
                self.name,
                self._fleet,
                on_open=self._on_open,
                on_frame=self._on_frame,
                on_lost=self._on_lost,
            )

    def prometheus(self) -> str:
        """The text of /metrics."""
        state = self.state()
        return render(self.metrics, state, self._card.id)

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
        for link in [*self._links.values(), *self._closing]:
            link.close("the router is shutting down")

    # -- placing

    def _send(self, entry: Entry, links: list[Link]) -> None:
        """A new one, to one of these replicas: they have room."""
        self.metrics.queue.observe(time.monotonic() - entry.arrived)
        self._place([choice for choice in entry.choices if not choice.done], links)

    def _place(self, choices: list[Choice], links: list[Link] | None = None) -> None:
        """Send choices of one entry to a replica, one of `links` if given, or let them wait."""
        request = choices[0].entry.request
        tokens = len(request.token_ids) + len(choices[0].emitted)
        limit = request.params.max_tokens
        work = Work(
            tokens,
            self._card.max_model_len if limit is None else limit,
            len(choices),
            chain(request.token_ids + choices[0].emitted, request.adapter, request.cache_salt),
            request.adapter.partition("@")[0],  # as replicas call it
        )
        weights = next((choice.weights for choice in choices if choice.emitted), "")
        if weights:
            links = [
                link
                for link in (self._links.values() if links is None else links)
                if link.endpoint.weights == weights
            ]
        everywhere = links is None or len(links) == len(self._links)
        among = None if everywhere else [link.replica for link in links or ()]
        now = time.monotonic()
        decision = route(work, self._fleet, self._random, now, among=among, avoid=choices[0].place)
        if decision is None:
            self._wait(choices)
            return
        replica = decision.replica
        link = self._links[replica]
        assert link.connection is not None
        self.metrics.routed.add(1, decision.reason)
        self._fleet.send(decision, work, now)
        entry = choices[0].entry
        entry.placed = now
        entry.replicas.append(replica)
        entry.story.sent(decision, now, len(choices[0].emitted))
        for choice in choices:
            choice.place = replica
            choice.weights = link.endpoint.weights
            choice.blame.passed &= not choice.given
            choice.begun = len(choice.emitted)
            link.choices[choice.id] = choice
            link.intake.book(choice.id, tokens, entry.placed)
            link.connection.send(
                Submit(
                    choice.as_request(),
                    links=pack(work.links),
                    adapter_path=request.adapter_path,
                    adapter_version=0 if entry.begun else request.adapter_version,
                    turn=choice.blame.turn,
                    deaths=choice.blame.deaths,
                )
            )

    def _wait(self, choices: list[Choice]) -> None:
        seconds, loop = self._limits.wait_seconds, asyncio.get_running_loop()
        error = Overloaded(
            f"no replica became ready within {seconds:g} s", code="no_replica", retry_after=5
        )
        for choice in choices:
            timer = loop.call_later(seconds, choice.entry.fail, error)
            self._waiting[choice.id] = (choice, timer)

    def _stop_waiting(self, choice: Choice) -> bool:
        """Whether it waited."""
        _, timer = self._waiting.pop(choice.id, (None, None))
        if timer is not None:
            timer.cancel()
        return timer is not None

    def _ended(self, entry: Entry) -> None:
        self._entries.discard(entry)
        self._stories.add(entry.story)
        log_story(entry.story)
        self._gate.ended(entry)

    def _abort(self, choices: list[Choice]) -> None:
        by_link: dict[Link, list[int]] = {}
        for choice in choices:
            self._stop_waiting(choice)
            link = self._find(choice)
            if link is not None:
                by_link.setdefault(link, []).append(choice.id)
                link.forget(choice)
        for link, ids in by_link.items():
            if link.connection is not None:
                link.connection.send(Abort(ids))

    def _resume(self, choices: list[Choice]) -> None:
        """Their reader is back. New numbers, because the old ones may not have ended yet."""
        for choice in choices:
            choice.id = next(self._ids)
        self._place(choices)

    def _find(self, choice: Choice) -> Link | None:
        link = self._links.get(choice.place)
        if link is not None and choice.id in link.choices:
            return link
        return next((link for link in self._closing if choice.id in link.choices), None)

    # -- from the links

    def _on_open(self, link: Link) -> None:
        logger.info("replica %s is connected", link.replica)
        self.metrics.channels.add()
        self.adapters.replica_came()
        sharing = max((other.stats.routers for other in self._links.values()), default=1)
        link.intake.opened(sharing, time.monotonic())
        endpoint = link.endpoint
        known = self._card.max_model_len if self._card_known else endpoint.max_model_len
        self._card_known = True
        self._card = ModelCard(
            id=self._card.id,
            max_model_len=min(known, endpoint.max_model_len),
            vocab_size=endpoint.vocab_size,
            eos_token_ids=endpoint.eos_token_ids,
            created=self._card.created,
            root=self._card.root,
        )
        self._set_models()
        self._place_waiting()

    def _on_frame(self, link: Link, message: FromReplica) -> None:
        if isinstance(message, AdapterAnswer):
            self._calls.answered(message)
            return
        if isinstance(message, Failed):
            assert link.connection is not None
            link.failed = message
            link.connection.close(f"{message.code}: {message.message}")
            return
        now = time.monotonic()
        link.observe(message, now)
        choices = link.choices
        for delta in message.deltas:
            choice = choices.get(delta.id)
            if choice is None:
                continue  # aborted while the delta was on its way
            if delta.cached >= 0:  # its first
                link.intake.begun(delta.id)
                if delta.adapter_us > 0:
                    self._fleet.adapter_loaded(delta.adapter_us / 1e6)
            if delta.finish:
                link.forget(choice)
                if delta.finish == "error" and delta.error.startswith("draining"):
                    self.metrics.migrations.add()
                    choice.entry.migrations += 1
                    choice.entry.story.moves(link.replica, "it is to stop", now)
                    self._place([choice])
                    continue
                if choice.passes(delta, link.endpoint.max_model_len):
                    self._passes(link, choice, delta, now)
                    continue
            if delta.finish == "error" and self._stale.takes(choice, delta):
                continue
            choice.entry.take(choice, delta, now)
        self._gate.news(link)

    def _passes(self, link: Link, choice: Choice, delta: Delta, now: float) -> None:
        """It has been tried, and goes on when the others have been, too. It stays where it is: what
        was computed is there, and with n > 1 the other choices."""
        delta.finish = ""
        choice.entry.take(choice, delta, now)
        choice.begun = len(choice.emitted)
        choice.place = ""
        choice.blame.passes()
        choice.entry.story.moves(link.replica, "its engine lives", now)
        if not choice.entry.paused:
            self._place([choice], [link] if link.available else None)

    def _place_waiting(self) -> None:
        waiting = [choice for choice, _ in self._waiting.values()]
        for choice in waiting:
            self._stop_waiting(choice)
        for _, choices in itertools.groupby(waiting, key=lambda choice: choice.entry):
            self._place(list(choices))
        self._gate.fill()

    def _place_again(self, choices: list[Choice]) -> None:
        """They asked for an adapter that means something else now. New numbers, because some may
        not have ended yet."""
        self._abort(choices)
        self._resume(choices)

    def _on_lost(self, link: Link, lost: list[Choice], reason: str) -> None:
        self._calls.lost(link)
        self._closing.discard(link)
        level = logging.WARNING if lost or not link.retired else logging.INFO
        logger.log(level, "replica %s: %s; %d choices move", link.replica, reason, len(lost))
        moving: dict[Entry, list[Choice]] = {}
        for choice in lost:
            if choice.done:
                continue  # its entry failed with another choice of this loop
            blame = choice.blame
            why = blame.lost(
                link.replica,
                choice.id,
                choice.given,
                link.failed,
                self._limits.losses,
                link.silent,
            )
            if why:
                logger.warning(
                    "given up at %s: %s",
                    link.replica,
                    why,
                    extra={"request_id": choice.entry.request.request_id},
                )
                choice.entry.fail(RequestFailed(why))
                continue
            self.metrics.migrations.add()
            choice.entry.migrations += 1
            choice.entry.story.moves(link.replica, f"lost: {reason}", time.monotonic())
            logger.warning(
                "moves from %s after %d tokens: %s",
                link.replica,
                len(choice.emitted),
                reason,
                extra={"request_id": choice.entry.request.request_id},
            )
            if blame.losses:
                # It may be the cause: let those that are not go first, to be ahead of its next
                # death; and let all news of replicas that died at once arrive.
                self._wait([choice])
                asyncio.get_running_loop().call_later(_SUSPECT_PAUSE, self._place_suspect, choice)
            else:
                moving.setdefault(choice.entry, []).append(choice)
        if link.failed is not None and by_itself(link.failed):
            for choice in (one for entry in self._entries for one in entry.choices):
                choice.blame.acquit(link.failed.deaths)
        for choices in moving.values():
            # Together: a poison with n > 1 must not be tried at two replicas.
            left = [choice for choice in choices if not choice.done]
            if left:
                self._place(left)

    def _place_suspect(self, choice: Choice) -> None:
        if self._stop_waiting(choice):
            self._place([choice])
