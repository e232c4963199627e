"""The dispatcher's parts alone: assignment, losses, displaced choices, replica clients, cards.
There is no engine and no socket: a connection is a list of what was sent."""

import asyncio
import time
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest

from deployments.adapters.record_store import AdapterRecord
from deployments.backend import GenerationRequest, ModelCard
from deployments.observe.metrics import RouterMetrics
from deployments.router.admission.request_queue import RequestQueue
from deployments.router.admission.scale_from_zero import Waking
from deployments.router.assignment import Assignment
from deployments.router.dispatcher import Dispatcher
from deployments.router.inflight import InflightRequest
from deployments.router.models.model_cards import ModelCards
from deployments.router.models.model_settings import DispatchLimits
from deployments.router.replica_events import ReplicaEvents
from deployments.router.replica_losses import ReplicaLosses
from deployments.router.replicas.replica_client import ReplicaEndpoint
from deployments.router.replicas.replicas import Replicas
from deployments.router.requests_in_flight import RequestsInFlight
from deployments.routing.fleet import Fleet
from deployments.routing.step_cost import StepCost
from deployments.transport.channel import Submit
from engine.errors import MantaError, Overloaded
from engine.messages import BATCH_PRIORITY, Abort, Delta, EngineStats, Failed, StepFrame
from engine.sampling_params import SamplingParams

CARD = ModelCard("m", 4096, 1000, (2,), 0)


class FakeReplicaClient:
    """A replica client whose connection keeps the messages that it is sent."""

    def __init__(self, fleet: Fleet, name: str, endpoint: ReplicaEndpoint) -> None:
        self.replica, self.endpoint = name, endpoint
        self.sent: list[Any] = []
        self.connection: Any = SimpleNamespace(send=self.sent.append)
        self.state = fleet.add_replica(name, step_tokens=512)
        self.choices: dict[int, Any] = {}
        self.failed: Failed | None = None
        self.silent = self.retired = False
        self._fleet = fleet
        self.state.opened(1, 0.0)
        self.state.observe(EngineStats(rows=8), (), 0.0)

    def forget(self, choice: Any) -> None:
        self.choices.pop(choice.id, None)
        self.state.unbook(choice.id)

    def retire(self) -> None:
        self.retired = True
        self._fleet.remove(self.state)

    def lose(self) -> list[Any]:
        """Break the connection, and return the choices that were at the replica."""
        self.connection = None
        self.state.lost()
        self._fleet.forget_caches(self.state)
        lost = list(self.choices.values())
        self.choices.clear()
        return lost


def published(**more: Any) -> dict[str, Any]:
    return {
        "host": "h",
        "port": 1,
        "secret": "00",
        "max_model_len": 4096,
        "vocab_size": 1000,
        "eos_token_ids": [2],
        "step_tokens": 512,
        **more,
    }


class FakeReplicas(Replicas):
    """A fake of Replicas whose clients have no connections."""

    def _connect(self, name: str, endpoint: ReplicaEndpoint, _: Any) -> Any:
        return FakeReplicaClient(self.fleet, name, endpoint)


class Parts:
    def __init__(self, vocabulary: str = "", wait: float = 5.0, **published: Any) -> None:
        self.metrics = RouterMetrics()
        self.replicas = FakeReplicas(DispatchLimits().channel, "router-1", vocabulary)
        self.fleet = self.replicas.fleet
        self.all_inflight = RequestsInFlight("router-1", self.metrics)
        self.cards = ModelCards(CARD)
        self.assignment = Assignment(
            self.replicas, self.cards, Waking(), self.metrics, Random(1), wait
        )
        self.displaced = self.assignment.displaced
        self.losses = ReplicaLosses(1, self.all_inflight, self.assignment, self.metrics)
        self.publish(**published)

    def queue_and_events(self) -> tuple[RequestQueue, ReplicaEvents]:
        waking = Waking()
        queue = RequestQueue(
            DispatchLimits(),
            self.fleet,
            self.all_inflight,
            self.cards,
            self.assignment,
            waking,
            Random(1),
        )
        events = ReplicaEvents(
            self.replicas,
            self.cards,
            SimpleNamespace(),  # type: ignore[arg-type]
            self.assignment,
            self.losses,
            queue,
            waking,
            self.metrics,
            SimpleNamespace(lacks=lambda stats: False),  # type: ignore[arg-type]
        )
        return queue, events

    def publish(self, **published: Any) -> None:
        self.replicas.replace(published, SimpleNamespace())  # type: ignore[arg-type]

    def inflight(self, n: int = 1, id: str = "q", **more: Any) -> InflightRequest:
        params = SamplingParams(n=n, max_tokens=9)
        request = GenerationRequest(id, "m", [5] * 10, params, seed=1, **more)
        inflight = InflightRequest(request, self.metrics, self.assignment, self.all_inflight)
        self.all_inflight.add(inflight)
        return inflight

    def submits(self, name: str) -> list[int]:
        return [
            message.request.id
            for message in self.replicas[name].sent
            if isinstance(message, Submit)
        ]  # type: ignore[attr-defined]


async def test_choices_of_a_request_go_together_and_are_booked_until_they_are_taken_off():
    """n > 1 spread over replicas, each of which computes the prompt; or a booking that outlives
    the request whose client has left."""
    parts = Parts(a=published(), b=published())
    inflight = parts.inflight(n=3)
    parts.assignment.assign(inflight.choices)
    (name,) = {choice.place for choice in inflight.choices}
    state = parts.replicas[name].state
    assert parts.submits(name) == [1, 2, 3] and len(state.bookings) == state.held == 3
    inflight.abort(1)
    assert parts.replicas[name].sent[-1] == Abort([2]) and len(state.bookings) == 2
    inflight.abort()
    assert parts.replicas[name].sent[-1] == Abort([1, 3])
    assert (len(state.bookings), state.held, state.booked_tokens, len(parts.displaced)) == (
        0,
        0,
        0,
        0,
    )
    assert next(parts.assignment.numbers) == 4, "a number that was used is not used again"


async def test_what_has_begun_goes_to_the_same_weights_or_waits_for_them():
    """The second half of an answer by another model."""
    parts = Parts(a=published(weights="old"), b=published(weights="new"))
    inflight = parts.inflight()
    (choice,) = inflight.choices
    parts.assignment.assign([choice], ["a"])
    choice.emitted = [7, 8]
    lost = parts.replicas["a"].lose()  # type: ignore[attr-defined]
    parts.losses.lost(parts.replicas["a"], lost, "test")
    assert not parts.submits("b") and len(parts.displaced) == 1
    parts.publish(b=published(weights="new"), c=published(weights="old"))
    parts.assignment.assign_displaced()
    assert choice.place == "c" and not parts.displaced
    (sent,) = [message for message in parts.replicas["c"].sent if isinstance(message, Submit)]  # type: ignore[attr-defined]
    assert sent.request.token_ids == [5] * 10 + [7, 8]
    assert inflight.migrations == 1 and inflight.replicas == ["a", "c"]
    inflight.abort()


async def test_a_loss_moves_at_once_who_is_not_to_blame_and_gives_up_who_lost_too_many():
    """One request that takes replica after replica with it."""
    parts = Parts(a=published(), b=published(), c=published())
    begun, new = parts.inflight(), parts.inflight()
    for inflight in (begun, new):
        parts.assignment.assign(inflight.choices, ["a"])
    begun.choices[0].emitted = [7] * 9  # more than what clears it
    parts.losses.lost(parts.replicas["a"], parts.replicas["a"].lose(), "test")  # type: ignore[attr-defined]
    assert begun.choices[0].place in "bc" and len(parts.displaced) == 1, "who gave nothing waits"
    await asyncio.sleep(0.3)
    second = new.choices[0].place
    assert second in "bc" and not parts.displaced
    parts.losses.lost(parts.replicas[second], parts.replicas[second].lose(), "test")  # type: ignore[attr-defined]
    with pytest.raises(MantaError):
        await new.next()
    assert begun in parts.all_inflight and new not in parts.all_inflight
    begun.abort()


async def test_what_nobody_can_take_fails_after_its_time_and_is_forgotten():
    """A request without a replica that waits for ever, or a timer that outlives it."""
    parts = Parts(wait=0.05)
    late, gone = parts.inflight(n=2), parts.inflight()
    for inflight in (late, gone):
        parts.assignment.assign(inflight.choices)
    assert len(parts.displaced) == 3
    gone.abort()
    assert len(parts.displaced) == 2
    with pytest.raises(MantaError, match="no replica became ready"):
        await late.next()
    assert not parts.displaced and not parts.all_inflight


def test_links_keep_what_left_until_its_choices_have_ended_and_leave_other_tokenizers_alone():
    """A replica that scales down and takes its streams with it; or an update in which old routers
    read the new model's tokens with the old tokenizer."""
    parts = Parts("mine", a=published(), b=published(tokenizer="other"))
    assert set(parts.replicas) == {"a"}
    client = parts.replicas["a"]
    client.choices[1] = SimpleNamespace(id=1, place="a")  # type: ignore[assignment]
    parts.publish()
    assert not parts.replicas and parts.replicas.closing == {client} and client.retired
    assert parts.replicas.holding(client.choices[1]) is client
    assert parts.replicas.holding(SimpleNamespace(id=2, place="a")) is None  # type: ignore[arg-type]
    assert not parts.fleet.replicas


def test_cards_are_of_the_shortest_replica_and_of_each_adapter():
    """An adapter that promises the context that its virtual tokens take, or forgets what replicas
    have said when the adapters change."""
    cards = ModelCards(CARD)
    cards.learn(ReplicaEndpoint.parse(published(max_model_len=2000, vocab_size=7)))
    cards.learn(ReplicaEndpoint.parse(published(max_model_len=3000, vocab_size=7)))
    assert (cards.base.max_model_len, cards.base.vocab_size) == (2000, 7)
    cards.learn(ReplicaEndpoint.parse(published(max_model_len=3000, image_tokens=9)))
    cards.learn(ReplicaEndpoint.parse(published(max_model_len=3000, image_tokens=5)))
    assert cards.base.image_tokens == 9
    record = AdapterRecord(name="a", path="/a", revision="r", version=5 * 10**9, virtual_tokens=50)
    cards.set_adapters({"a": record})
    cards.learn(ReplicaEndpoint.parse(published(max_model_len=1000)))
    assert set(cards.by_name) == {"m", "a"}
    adapter = cards.by_name["a"]
    assert (adapter.max_model_len, adapter.parent, adapter.created) == (950, "m", 5)


async def test_the_request_queue_refuses_before_a_text_is_tokenised_when_no_row_ends_soon():
    """With nothing waiting, each refused request was parsed and tokenised first; and it was sent to
    wait in an engine whose whole batch went on for a minute."""
    parts = Parts(a=published())
    state = parts.replicas["a"].state
    queue, _ = parts.queue_and_events()
    queue.admit("a key", 0)  # a row is free
    running = [parts.inflight() for _ in range(8)]
    for inflight in running:
        parts.assignment.assign(inflight.choices)
    state.steps.cost = StepCost(10.0, 0.0, 0.0)  # each has nine tokens to come
    stats = EngineStats(rows=8, running=8, routers=1)
    taken = [choice.id for inflight in running for choice in inflight.choices]
    state.observe(stats, taken, 0.0)
    assert state.room()[0] > 0, "choices may wait there"
    with pytest.raises(Overloaded) as refused:
        queue.admit("a key", 0)
    assert refused.value.retry_after == 60.0
    with pytest.raises(Overloaded):
        queue.check(running[0].request)


def full(**more: Any) -> EngineStats:
    return EngineStats(**({"rows": 8, "running": 8, "waiting": 1, "routers": 1} | more))


def busy(parts: Parts) -> Any:
    """Let replica a report four seconds of full work; return its state."""
    state = parts.replicas["a"].state
    for second in range(5):
        work = {"busy_seconds": 1.0 * second, "output_tokens": 800 * second}
        state.observe(full(step=100 * second, **work), (), 100.0 + second)
    return state


@pytest.mark.parametrize("hold", [{"paused": True}, {"asleep": True}, {"weights_dropped": True}])
async def test_what_waited_for_the_end_of_a_pause_makes_no_replica_slow(hold, monkeypatch):
    """Eight requests that came in a trainer's pause of five minutes: by the time to their first
    tokens the engine was too slow for all who came next, and nearly all of these were refused."""
    clock = [100.0]
    monkeypatch.setattr("deployments.router.assignment.time.monotonic", lambda: clock[0])
    parts = Parts(a=published())
    queue, events = parts.queue_and_events()
    client = parts.replicas["a"]

    def frame(deltas: list[Delta], **more: Any) -> None:
        stats = full(**more)
        client.state.observe(stats, (), clock[0])
        events.frame(client, StepFrame(stats, deltas), clock[0])

    for second in range(5):
        clock[0] += 1.0
        work = {"busy_seconds": 1.0 * second, "output_tokens": 800 * second}
        frame([], step=100 * second, **work)
    frame([], step=400, **work, **hold)
    held = [parts.inflight() for _ in range(8)]
    for inflight in held:
        parts.assignment.assign(inflight.choices)
    clock[0] += 300.0
    first = [Delta(inflight.choices[0].id, [7], cached=0) for inflight in held]
    frame(first, step=401, **work)
    assert client.state.first_seconds == 0
    clock[0] += 1.0
    for _ in range(32):
        inflight = parts.inflight()
        queue.enter(inflight, queue.check(inflight.request))
    clock[0] += 1.0
    later = [id for id, choice in client.choices.items() if choice.inflight not in held]
    frame([Delta(later[0], [7], cached=0)], step=402, **work)
    assert client.state.first_seconds == pytest.approx(0.1), "it waited for the engine alone"


async def test_before_a_text_is_tokenised_a_request_is_refused_by_its_own_priority():
    """Each request was taken for one of priority 0: an urgent one, and a dataset's row whose queue
    was empty, were refused with the ordinary ones, and one of low priority was tokenised first."""
    parts = Parts(a=published())
    queue, _ = parts.queue_and_events()
    busy(parts)

    def refused(priority: int) -> bool:
        request = parts.inflight(priority=priority).request
        for ask in (lambda: queue.admit(request.key, priority), lambda: queue.check(request)):
            answers.append(False)
            try:
                ask()
            except Overloaded:
                answers[-1] = True
        early, late = answers[-2:]
        assert early == late, priority
        return early

    answers: list[bool] = []
    seen = set()
    while not (most := refused(-3)):
        seen.add((refused(3), refused(0), most, refused(BATCH_PRIORITY)))
        waiting = parts.inflight()
        queue.enter(waiting, False)
    # In the order of the load: low priority is refused first, and batch work by its own queue.
    wanted = [(False, False, False), (True, False, False), (True, True, False)]
    assert sorted(seen) == [(*answer, False) for answer in wanted]
    while not refused(BATCH_PRIORITY):
        queue.enter(parts.inflight(priority=BATCH_PRIORITY), False)


async def test_slow_first_tokens_of_others_keep_no_rows_of_a_dataset_out():
    """After an hour of slow first tokens a dataset of its own, whose first tokens nobody measures,
    was let in one row at a time until the end."""
    parts = Parts(a=published())
    queue, _ = parts.queue_and_events()
    state = busy(parts)
    state.first_seconds = 60.0
    for _ in range(16):
        row = parts.inflight(priority=BATCH_PRIORITY)
        queue.enter(row, queue.check(row.request))
    assert queue.choices == 16
    with pytest.raises(Overloaded, match="too much work"):
        for _ in range(16):
            other = parts.inflight()
            queue.enter(other, queue.check(other.request))


async def test_requests_are_found_by_id_and_owner_and_told_of_when_they_have_ended():
    """Another key that reads or ends a request because it knows its id; a trace that is lost with
    the request, or told twice."""
    parts, seen = Parts(), []
    requests = parts.all_inflight
    requests.on_end.append(seen.append)
    owned = [("q", "me"), ("q", "you"), ("p", "me")]
    mine, other, third = (parts.inflight(id=id, owner=owner) for id, owner in owned)
    assert list(requests) == [mine, other, third] and next(reversed(requests)) is third
    assert len(requests.explain("q", "me")) == 1 and len(requests.explain("q", None)) == 2
    assert requests.stop("q", "nobody") == 0 and len(requests) == 3
    assert requests.stop("q", "me") == 1 and list(requests) == [other, third]
    assert requests.stop("q", "me") == 0, "it has ended"
    (body,) = requests.explain("q", "me")
    assert (body["error"], body["router"]) == ("cancelled", "router-1")
    with pytest.raises(MantaError, match="was stopped"):
        await mine.next()
    requests.fail_all()
    assert not requests and seen == [mine, other, third]
    with pytest.raises(Overloaded, match="stopping"):
        await third.next()


async def test_a_request_fails_at_its_deadline():
    """One that is already over when the request comes, too."""
    parts = Parts()
    now = time.monotonic()
    late, soon, never = (parts.inflight(deadline=at) for at in (now - 1, now + 0.05, None))
    for inflight in (late, soon):
        with pytest.raises(MantaError) as caught:
            await inflight.next()
        assert caught.value.code == "deadline_exceeded"
    assert time.monotonic() >= now + 0.05 and list(parts.all_inflight) == [never]
    never.abort()
    assert not parts.all_inflight


async def test_load_counts_what_arrives(monkeypatch):
    """Cached tokens that are scaled for."""
    clock = [100.0]
    monkeypatch.setattr("deployments.router.requests_in_flight.time.monotonic", lambda: clock[0])
    parts = Parts()
    requests = parts.all_inflight
    clock[0] += 1.0
    assert requests.arrival_rates()["prompt_rate"] == 0.0, "before there was a call to compare with"
    inflight = parts.inflight()
    parts.metrics.prompt_tokens.inc(990)  # beside those of this one
    parts.metrics.cached_tokens.inc(400)
    for _ in range(3):
        parts.metrics.prompt_size.observe(250)
    clock[0] += 2.0
    # No request has ended: its output is guessed.
    assert requests.arrival_rates() == {"prompt_rate": 300.0, "output_rate": 2 * 128.0}
    parts.metrics.output_size.observe(50)
    parts.metrics.prompt_size.observe(250)
    clock[0] += 1.0
    assert requests.arrival_rates()["output_rate"] == 50.0
    inflight.abort()


async def test_load_counts_everything_that_waits():
    """Choices between two replicas, or adapters' requests, that nobody counts."""
    dispatcher = Dispatcher(CARD, None, DispatchLimits(), "router")  # type: ignore[arg-type]
    params = SamplingParams(n=2, max_tokens=9)
    waiting = dispatcher.generate(GenerationRequest("q", "m", [5] * 10, params, seed=1))
    displaced = InflightRequest(
        waiting.request, dispatcher.metrics, dispatcher.assignment, dispatcher.requests
    )
    dispatcher.assignment.assign(displaced.choices)
    dispatcher._adapter_calls.waiting = 3
    load = dispatcher.load()
    assert (load["in_flight"], load["queued"]) == (1, 2 + 2 + 3) and load["queued_tokens"] > 10
    dispatcher.close()
