"""The choice of a replica: a pure function, so its rules are checked one by one."""

import time
from collections import Counter
from dataclasses import replace
from itertools import count
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployments.routing.decision import RoutingDecision, RoutingRequest
from deployments.routing.fleet import Fleet
from deployments.routing.prefix_index import (
    HASH_BYTES,
    STRIDE,
    PrefixIndex,
    hash_prefix,
    pack_hashes,
    unpack_hashes,
)
from deployments.routing.route import route
from deployments.routing.sessions import Sessions
from deployments.routing.step_cost import StepCost, StepCostModel
from engine.messages import EngineStats

WORK = RoutingRequest(prompt_tokens=100, max_tokens=64)
FAST = StepCost(0.005, 0.0001, 0.00003)


def stats(**more) -> EngineStats:
    values = {"free_blocks": 1000, "total_blocks": 1000, "block_size": 16, "rows": 64}
    return EngineStats(**{**values, **more})


def fleet(**replicas: EngineStats) -> Fleet:
    """Return a fleet of equally fast replicas, whose stats arrived at second 0."""
    fleet = Fleet()
    for name, figures in replicas.items():
        fleet.add_replica(name, "gpu", step_tokens=512, adapter_slots=2).steps.cost = FAST
        fleet.replicas[name].opened(1, 0.0)
        see(fleet, name, figures)
    return fleet


def see(made: Fleet, name: str, figures: EngineStats, now: float = 0.0, taken=()) -> None:
    made.replicas[name].observe(figures, taken, now)
    made.refresh()


_choices = count(1)


def sent(made: Fleet, decision: RoutingDecision, work: RoutingRequest, now: float = 0.0) -> int:
    """Note that a choice was sent by a decision, and return the choice's number."""
    choice = next(_choices)
    made.send(made.replicas[decision.replica], [choice], decision, work, now)
    made.refresh()
    return choice


def choose(made: Fleet, work: RoutingRequest = WORK, now: float = 0.0, **more) -> Counter:
    decisions = [route(work, made, Random(n), now, **more) for n in range(100)]
    return Counter(decision and decision.replica for decision in decisions)


def send(made: Fleet, work: RoutingRequest, now: float = 0.0, seed: int = 0) -> RoutingDecision:
    decision = route(work, made, Random(seed), now)
    sent(made, decision, work, now)
    return decision


def prompt(seed: int, prefix_hashes: int = 8) -> RoutingRequest:
    dice = Random(seed)
    names = [dice.randbytes(HASH_BYTES) for _ in range(prefix_hashes)]
    return RoutingRequest(prefix_hashes * STRIDE + 10, 64, prefix_hashes=names)


def test_equal_replicas_are_chosen_by_lot():
    """Every router sending to the first name in the list."""
    counts = choose(fleet(a=stats(), b=stats()))
    assert min(counts["a"], counts["b"]) > 25


def test_the_shorter_queue_wins_and_so_does_the_emptier_batch():
    """Round robin in disguise."""
    assert choose(fleet(a=stats(waiting_tokens=2000), b=stats())) == {"b": 100}
    busy = stats(running=64, waiting=20)
    assert choose(fleet(a=busy, b=stats(running=10))) == {"b": 100}


def test_a_slow_replica_gets_work_only_when_the_fast_one_is_behind():
    """A CPU replica that is given half of the traffic because it is idle."""
    known_fleet = fleet(gpu=stats(running=20), cpu=stats())
    known_fleet.replicas["cpu"].steps.cost = StepCost(0.03, 0.005, 0.001)
    see(known_fleet, "cpu", stats(), 0.0)
    assert choose(known_fleet) == {"gpu": 100}
    see(known_fleet, "gpu", stats(running=20, waiting_tokens=100_000), 0.0)
    assert choose(known_fleet) == {"cpu": 100}


def test_what_was_just_sent_counts_until_the_figures_contain_it():
    """A burst between two frames that all goes to the same replica; or load counted twice."""
    known_fleet = fleet(a=stats(), b=stats(waiting_tokens=500))
    counts = Counter(send(known_fleet, WORK, seed=n).replica for n in range(20))
    assert min(counts.values()) > 5
    state = known_fleet.replicas["a"]
    before, fixed = len(state.bookings), known_fleet.terms[0, state.column]
    assert before > 0
    see(known_fleet, "a", stats(), 30.0)
    assert len(state.bookings) == before and known_fleet.terms[0, state.column] == fixed, (
        "an old figure, said again"
    )
    see(known_fleet, "a", stats(), 31.0, list(state.bookings))
    assert (
        len(state.bookings) == 0 == state.uncached_tokens
        and known_fleet.terms[0, state.column] < fixed
    )


def test_what_is_taken_back_before_it_was_counted_counts_no_more():
    """A thousand requests whose clients left at once, and their replica is avoided for it."""
    known_fleet = fleet(a=stats())
    state = known_fleet.replicas["a"]
    fixed = known_fleet.terms[0, state.column]
    decision = route(WORK, known_fleet, Random(0), 0.0)
    known_fleet.send(state, [1, 2], decision, RoutingRequest(100, 64, 2), 0.0)
    assert (len(state.bookings), state.booked_tokens, state.uncached_tokens) == (2, 200, 100)
    known_fleet.refresh()
    assert known_fleet.terms[0, state.column] > fixed
    state.unbook(1)
    state.unbook(2)
    known_fleet.refresh()
    assert known_fleet.terms[0, state.column] == fixed


def test_a_session_stays_where_it_is():
    """A session that follows a prefix or the lot; one that changes places when replicas come; all
    sessions at one replica."""
    names = [n.to_bytes(8, "big") for n in range(60)]
    asked = {name: replace(WORK, session=name) for name in names}
    known_fleet, other = fleet(a=stats(), b=stats()), fleet(a=stats(), b=stats())
    places = {name: send(known_fleet, work).replica for name, work in asked.items()}
    for name in known_fleet.replicas:
        see(known_fleet, name, stats(), 1.0, range(10_000))
    assert 15 < Counter(places.values())["a"] < 45
    assert places == {name: route(w, other, Random(9), 0.0).replica for name, w in asked.items()}
    known_fleet.add_replica("c", "gpu", step_tokens=512).steps.cost = FAST
    known_fleet.replicas["c"].opened(1, 0.0)
    see(known_fleet, "c", stats(), 1.0)
    for name, work in asked.items():
        assert choose(known_fleet, work, 1.0) == {places[name]: 100}
    known_fleet.remove(known_fleet.replicas["a"])
    moved = {name: route(work, known_fleet, Random(0), 1.0) for name, work in asked.items()}
    assert {moved[n].replica for n in names if places[n] == "a"} == {"b", "c"}
    assert all(moved[n].replica == "b" for n in names if places[n] == "b")
    assert {decision.reason for decision in moved.values()} == {"session"}


def test_a_session_does_not_wait_for_a_replica_that_is_busy():
    """A client that names a session waits behind a queue, at a replica without room, that leaves or
    that has just failed it; or the map grows without bound."""
    known_fleet = fleet(a=stats(), b=stats())
    work = replace(WORK, session=b"12345678")
    place = send(known_fleet, work).replica
    (other,) = known_fleet.replicas.keys() - {place}
    see(known_fleet, place, stats(waiting_tokens=5_000), 1.0, range(10_000))
    assert choose(known_fleet, work, 1.0) == {place: 100}, "a short queue"
    for figures in (stats(waiting_tokens=100_000), stats(draining=True)):
        see(known_fleet, place, figures, 1.0)
        assert choose(known_fleet, work, 1.0) == {other: 100}
    see(known_fleet, place, stats(), 2.0)
    assert choose(known_fleet, work, 2.0, avoid=place) == {other: 100}
    see(known_fleet, place, stats(rows=4, running=4, waiting=40), 2.0)
    assert choose(known_fleet, work, 2.0, with_room=True) == {other: 100}
    see(known_fleet, place, stats(running=1), 3.0)
    assert choose(known_fleet, work, 3.0) == {place: 100}
    assert choose(known_fleet, work, 9.0) == {other: 100}, "it is silent"
    sessions = Sessions(2)
    for name in (b"a", b"b", b"a", b"c"):
        sessions.note(name, "r0")
    assert len(sessions) == 2 and sessions.place(b"a") == "r0" and sessions.place(b"b") == ""


def test_a_session_that_another_router_knows_goes_to_its_cache():
    """Turns of a client that come by another router go by the hash of the session, away from the
    replica that another router has chosen; or a shared beginning takes all new sessions to one."""
    known_fleet = fleet(a=stats(), b=stats())
    names = [n.to_bytes(8, "big") for n in range(20)]
    work = replace(prompt(20), session=b"")
    hashes = work.prefix_hashes
    for name in known_fleet.replicas:
        known_fleet = fleet(a=stats(), b=stats())
        known_fleet.add_prefix(known_fleet.replicas[name], hashes[: len(hashes) - 2])
        places = {choose_one(known_fleet, replace(work, session=session)) for session in names}
        assert places == {(name, "prefix")}
        known_fleet = fleet(a=stats(), b=stats())
        known_fleet.add_prefix(known_fleet.replicas[name], hashes[:2])
        places = {choose_one(known_fleet, replace(work, session=session)) for session in names}
        assert places == {("a", "session"), ("b", "session")}


def choose_one(made: Fleet, work: RoutingRequest) -> tuple[str, str]:
    decision = route(work, made, Random(1), 0.0)
    assert decision is not None
    return decision.replica, decision.reason


def test_what_does_not_fit_waits_elsewhere():
    """A request sent to a replica whose KV is full, where it only throws another one out."""
    full = stats(running=30, free_blocks=2)
    assert choose(fleet(a=full, b=stats(running=30, waiting_tokens=300))) == {"b": 100}
    assert choose(fleet(a=full)) == {"a": 100}


def test_silence_of_a_busy_replica_counts_as_waiting():
    """A hanging replica that looks attractive because its last figures were good."""
    known_fleet = fleet(a=stats(running=1), b=stats(running=2, waiting_tokens=1000))
    assert choose(known_fleet, now=0.01) == {"a": 100}
    see(known_fleet, "b", stats(running=2, waiting_tokens=1000), 3.0)
    assert choose(known_fleet, now=3.0) == {"b": 100}


def test_who_has_the_prefix_gets_it_until_it_is_too_busy():
    """A prompt computed again beside a replica that has it; or a queue there, others idle."""
    known_fleet = fleet(a=stats(), b=stats(), c=stats())
    first = send(known_fleet, prompt(1))
    assert first.reason == "owner" and first.cached == 0
    for name in "abc":
        see(known_fleet, name, stats(), 1.0)
    again = route(prompt(1), known_fleet, Random(5), 1.0)
    assert (again.replica, again.reason, again.cached) == (first.replica, "prefix", 8 * STRIDE)
    see(known_fleet, first.replica, stats(running=60, waiting_tokens=50_000), 1.0)
    moved = route(prompt(1), known_fleet, Random(5), 1.0)
    assert moved.replica != first.replica and moved.reason == "spill"


def test_routers_agree_without_talking():
    """Each router placing the same new prefix or adapter somewhere else."""
    for seed in range(20):
        for work in (prompt(seed), RoutingRequest(100, 64, adapter=f"adapter-{seed}")):
            places = {
                route(work, fleet(a=stats(), b=stats(), c=stats()), Random(n), 0.0).replica
                for n in range(5)
            }
            assert len(places) == 1
    owners = Counter(
        route(prompt(n), fleet(a=stats(), b=stats(), c=stats()), Random(n), 0.0).replica
        for n in range(90)
    )
    assert min(owners.values()) > 15


def test_a_new_replica_moves_only_its_share():
    """Hashing modulo the number of replicas: one more, and every cache is in the wrong place."""
    three = fleet(a=stats(), b=stats(), c=stats())
    four = fleet(a=stats(), b=stats(), c=stats(), d=stats())
    moved = Counter()
    for n in range(200):
        before = route(prompt(n), three, Random(0), 0.0).replica
        after = route(prompt(n), four, Random(0), 0.0).replica
        moved[after] += before != after
    assert set(moved) <= set("abcd") and moved["a"] == moved["b"] == moved["c"] == 0
    assert 25 < moved["d"] < 80


def test_an_adapter_stays_where_it_is_and_pushes_out_who_is_wanted_least():
    """Each replica loading every adapter in turn."""
    known_fleet = fleet(a=stats(adapters=["x", "y"]), b=stats(adapters=["z", "w"]))
    for name in ("w", "w", "w", "y"):
        known_fleet.popularity.count(name, 0.0)
    see(known_fleet, "a", stats(adapters=["x", "y"]), 0.0)
    see(known_fleet, "b", stats(adapters=["z", "w"]), 0.0)
    decision = route(RoutingRequest(100, 64, adapter="x"), known_fleet, Random(0), 0.0)
    assert (decision.replica, decision.reason, decision.loads_adapter) == ("a", "adapter", False)
    decision = route(RoutingRequest(100, 64, adapter="new"), known_fleet, Random(0), 0.0)
    assert (decision.replica, decision.loads_adapter) == ("a", True)  # y is wanted less than w
    choice = sent(known_fleet, decision, RoutingRequest(100, 64, adapter="new"))
    state = known_fleet.replicas["a"]
    assert known_fleet.adapters_of(state) == ("new", "x")
    see(known_fleet, "a", stats(adapters=["x", "y"]), 0.001)  # not there yet, but on its way
    assert "new" in known_fleet.adapters_of(state)
    state.unbook(choice)
    see(known_fleet, "a", stats(adapters=["x", "y"]), 1.0)
    assert known_fleet.adapters_of(state) == ("x", "y")


def test_unavailable_avoided_and_other_replicas():
    """New requests at a draining or full replica; a retry at the one that failed."""
    known_fleet = fleet(a=stats(), b=stats(waiting_tokens=9000))
    assert choose(known_fleet, among=["b"]) == {"b": 100}
    assert choose(known_fleet, avoid="a") == {"b": 100}
    assert choose(known_fleet, among=["a"], avoid="a") == {"a": 100}
    see(known_fleet, "a", stats(draining=True), 0.0)
    assert choose(known_fleet) == {"b": 100}
    known_fleet.replicas["b"].lost()
    known_fleet.forget_caches(known_fleet.replicas["b"])
    assert choose(known_fleet) == {None: 100}
    assert route(WORK, Fleet(), Random(0), 0.0) is None


def test_a_replica_that_left_leaves_nothing():
    """A new replica in the row of an old one that seems to hold the old one's prefixes."""
    known_fleet = fleet(a=stats(adapters=["x"]))
    send(known_fleet, prompt(1))
    known_fleet.remove(known_fleet.replicas["a"])
    assert not known_fleet.index.match(prompt(1).prefix_hashes) and not known_fleet.holders["x"]
    assert choose(known_fleet) == {None: 100}
    known_fleet.add_replica("b", "gpu", step_tokens=512)
    known_fleet.replicas["b"].opened(1, 0.0)
    assert route(prompt(1), known_fleet, Random(0), 0.0).cached == 0
    for n in range(40):  # and rows are added beyond the first table
        known_fleet.add_replica(f"more{n}", "gpu", step_tokens=512)
        known_fleet.replicas[f"more{n}"].opened(1, 0.0)
    assert len(choose(known_fleet)) > 10


# -- prefixes


def test_chains_of_prompts():
    """Two prompts that share blocks in the engine and no prefix hash here, or the other way
    round."""
    tokens = list(range(3 * STRIDE + 1))
    prefix_hashes = hash_prefix(tokens)
    assert len(prefix_hashes) == 3 and unpack_hashes(pack_hashes(prefix_hashes)) == prefix_hashes
    assert len(hash_prefix(tokens[:-1])) == 2  # the last token is always computed
    assert hash_prefix([*tokens, 7]) == prefix_hashes
    assert hash_prefix([9, *tokens[1:]])[-1] != prefix_hashes[-1]
    assert hash_prefix(tokens, "adapter") != prefix_hashes != hash_prefix(tokens, "", "salt")


def test_the_index_finds_the_longest_and_is_bounded():
    """A record that grows for ever, or that answers with who holds only a part."""
    index = PrefixIndex(limit=20)
    prefix_hashes = prompt(1).prefix_hashes
    index.add_prefix(prefix_hashes[:3], 0)
    index.add_prefix(prefix_hashes, 1)
    assert index.match(prefix_hashes) == [(0b10, 8), (0b01, 3)]
    assert index.match(prefix_hashes[:2]) == [(0b11, 2)]
    assert index.match(prompt(2).prefix_hashes) == []
    for n in range(30):
        index.add_prefix(prompt(n).prefix_hashes, n)
        assert len(index) <= 20
    assert index.match(prompt(29).prefix_hashes) == [(1 << 29, 8)]
    index.forget(29)
    assert index.match(prompt(29).prefix_hashes) == []
    index.add_prefix(prompt(40).prefix_hashes[:2], 29)  # a new replica in its column
    assert index.match(prompt(29).prefix_hashes) == [] and len(index) <= 20
    assert index.match(prompt(40).prefix_hashes) == [(1 << 29, 2)]


# -- what steps cost


@pytest.mark.parametrize(
    "cost",
    [StepCost(0.01, 0.0, 3e-5), StepCost(0.001, 0.01, 1e-3), StepCost(0.02, 0.003, 1e-4)],
    ids=["gpu", "cpu", "between"],
)
def test_a_step_model_finds_what_things_cost(cost):
    """A model through the origin, by which the fuller of two GPUs always looks cheaper."""
    model, dice = StepCostModel(StepCost.mean([])), Random(1)
    for _ in range(400):
        steps, outputs = dice.randrange(1, 5), dice.randrange(1, 33)
        prompts = dice.choice([0, 0, 100, 512])
        exact = steps * cost.base + outputs * cost.sequence + prompts * cost.token
        model.observe(steps, outputs, prompts, exact * dice.uniform(0.95, 1.05))
    for outputs, prompts in ((1, 0), (16, 0), (8, 512)):
        expected = cost.base + outputs * cost.sequence + prompts * cost.token
        step_seconds = model.cost.base + outputs * model.cost.sequence + prompts * model.cost.token
        assert abs(step_seconds - expected) < 0.15 * expected
    assert min(model.cost) >= 0


def test_a_step_model_hears_of_busy_seconds():
    """A router that was busy for three steps and then reads them at once takes the replica for one
    that costs nothing; idle time, a first frame or a new engine's counts taken for steps."""
    model = StepCostModel(StepCost.mean([]))
    last = EngineStats(step=9, output_tokens=7, busy_seconds=3.0)
    model.observe_frame(last)
    model.observe_frame(last)
    assert not model.measured and model.cost == StepCost.mean([])
    for _ in range(80):
        now = EngineStats(last.step + 2, output_tokens=last.output_tokens + 8)
        now.busy_seconds = last.busy_seconds + 0.04
        model.observe_frame(now)
        last = now
    learnt = model.cost
    assert model.measured and abs(learnt.base + 4 * learnt.sequence - 0.02) < 0.002
    model.observe_frame(EngineStats(step=3, busy_seconds=0.1))
    model.observe_frame(EngineStats(step=4, busy_seconds=0.1))
    assert model.cost == learnt


def test_a_step_model_whose_frames_have_the_seconds_of_the_step_after():
    """On a GPU: the launch of a long prompt is waited for with the step before it, so that its
    tokens looked free and a router sent prompts to whoever had the fewest sequences."""
    cost, dice = StepCost(0.0045, 5e-5, 2e-5), Random(1)
    model = StepCostModel(StepCost.mean([]))
    frame, ahead = EngineStats(step=1), 0.0
    for step in range(2, 3000):
        outputs = dice.randrange(5, 25)
        prompts = dice.choice([100, 400, 1000, 2000]) if dice.random() < 0.1 else 0
        took = cost.base + outputs * cost.sequence + prompts * cost.token
        frame = EngineStats(
            step,
            output_tokens=frame.output_tokens + outputs,
            prompt_tokens=frame.prompt_tokens + prompts,
            busy_seconds=frame.busy_seconds + ahead,
        )
        ahead = took  # seen in the next frame
        model.observe_frame(frame)
    step_seconds = model.cost
    assert abs(step_seconds.token - cost.token) < 0.25 * cost.token
    assert abs(step_seconds.base + 15 * step_seconds.sequence - 0.00525) < 0.1 * 0.00525


# -- always


SNAPSHOTS = st.lists(
    st.builds(
        stats,
        waiting_tokens=st.integers(0, 10**6),
        running=st.integers(0, 2000),
        waiting=st.integers(0, 2000),
        free_blocks=st.integers(0, 1000),
        finished=st.integers(0, 1000),
        output_tokens=st.integers(0, 10**6),
        draining=st.booleans(),
        adapters=st.lists(st.sampled_from("xyz"), max_size=3, unique=True),
    ),
    max_size=6,
)


@given(SNAPSHOTS, st.integers(1, 10**6), st.integers(0, 10**6), st.integers(1, 8), st.booleans())
def test_the_choice_is_available(snapshots, tokens, output, n, adapter):
    """A choice outside the list, or a crash on extreme figures."""
    known_fleet = fleet(**{f"r{index}": figures for index, figures in enumerate(snapshots)})
    prefix_hashes = prompt(tokens).prefix_hashes if tokens > 1000 else ()
    work = RoutingRequest(tokens, output, n, prefix_hashes, "x" if adapter else "")
    decision = route(work, known_fleet, Random(0), 0.0)
    available = {f"r{i}" for i, figures in enumerate(snapshots) if not figures.draining}
    if not available:
        assert decision is None
        return
    assert decision.replica in available
    assert decision.seconds < float("inf") and decision.loads_adapter <= adapter
    sent(known_fleet, decision, work)


@pytest.mark.timed
@pytest.mark.parametrize(("replicas", "limit"), [(64, 50e-6), (1000, 500e-6)])
def test_a_decision_is_quick(replicas, limit, record_property):
    """A loop over the replicas in Python. The bound here is generous, for busy machines."""
    known_fleet = fleet(
        **{f"r{n}": stats(running=n % 40, waiting_tokens=n * 7) for n in range(replicas)}
    )
    work = prompt(1, 32)
    for n in range(replicas):
        known_fleet.index.add_prefix(work.prefix_hashes[: n % 9], n)
    best, dice = float("inf"), Random(0)
    for _ in range(20):
        began = time.process_time()
        for _ in range(50):
            route(work, known_fleet, dice, 0.0)
        best = min(best, (time.process_time() - began) / 50)
    record_property("microseconds", best * 1e6)
    print(f"{replicas} replicas: {best * 1e6:.0f} us a decision")
    assert best < 3 * limit
