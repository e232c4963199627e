"""ReplicaState: what a replica may be given, by its frames and by what was sent since."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployments.routing.replica_state import ReplicaState
from engine.messages import EngineStats


def frame(**more) -> EngineStats:
    base = {"rows": 64, "total_blocks": 10**4, "free_blocks": 10**4, "block_size": 16, "routers": 1}
    return EngineStats(**{**base, **more})


def known(**more) -> ReplicaState:
    state = ReplicaState("r", step_tokens=2048)
    state.observe(frame(**more), (), 100.0)
    return state


def test_room_is_the_free_rows_and_a_little_more():
    """A batch that is not full because the router waits for a frame; or the whole queue in the
    engine, where nobody can put it in order."""
    assert known().room()[0] == 64 + 4
    assert known(running=60).room()[0] == 4 + 4
    assert known(running=64).room()[0] == 4
    full = known(running=64)
    for choice in range(4):
        full.book(choice, 10, 10)
    assert full.room()[0] == 0
    assert known(rows=0, running=5000).room()[0] > 0, "an engine that does not tell its rows"


def test_a_share_of_the_free_rows_is_a_share_until_the_next_frame():
    """Two routers with a queue each: after each choice they take half of what is left, until both
    have filled all rows, and the rest waits in the engine while another replica has room. Or the
    first router at a new replica, which is told that it is alone there."""

    def sent(one: ReplicaState) -> int:
        count = 0
        while one.room()[0] > 0:
            one.book(count, 1, 1)
            count += 1
        return count

    assert sent(known(routers=2)) == 32 + 2
    assert sent(known(routers=2, running=50)) == 7 + 2
    new = ReplicaState("r", step_tokens=2048)
    new.opened(4, 100.0)
    new.observe(frame(), (), 100.01)
    assert sent(new) == 16 + 1
    new.observe(frame(running=17), (), 103.0)
    assert sent(new) == 64 - 17 + 4, "the others never came"


def test_room_ends_with_a_backlog_of_prompts_or_of_memory():
    """Hundreds of long prompts in the engine because it has rows for them."""
    assert known(running=5, waiting_tokens=5000).room()[0] == 0
    state = known(running=5)
    state.book(1, 5000, 5000)
    assert state.room()[0] == 0
    state.unbook(1)
    assert state.room()[0] > 0
    shared = known(running=5, waiting_tokens=600, routers=2)
    shared.book(1, 300, 300)
    assert shared.room()[0] == 0, "the other router sends as much"
    short = known(running=20, waiting=3, waiting_tokens=1000, free_blocks=60)
    assert 0 < short.room()[0] <= 4


def test_a_slow_replica_is_sent_the_prompts_of_a_few_steps():
    """Half a step's budget waits in the engine, out of the router's order: 1,024 tokens of work
    that takes it 17 s beside its decodes."""
    state = known(running=40)
    state.book(1, 600, 600)
    assert state.room()[0] > 0, "its rate is not known yet"
    busy = {"running": 40, "waiting": 1, "waiting_tokens": 100, "step_seconds": 0.8}
    for step in range(1, 5):
        stats = frame(step=step, busy_seconds=0.8 * step, prompt_tokens=48 * step, **busy)
        state.observe(stats, (1,), 100.0 + step)
    assert state.room()[0] > 0, (
        "60 tokens/s: 120 in two steps and a half, but an eighth of a budget"
    )
    state.book(2, 200, 200)
    assert state.room()[0] == 0


def test_news_inside_a_long_step_are_no_speed():
    """A replica whose steps take a second says twice in each that it is alive: what it computed is
    divided by the time since then, and four times what it can do is let in."""
    state, now = known(running=64, waiting=9, waiting_tokens=900, step=1), 100.0
    full = {"running": 64, "waiting": 9, "waiting_tokens": 900}
    for step in range(2, 6):
        for beat in (0.45, 0.9):
            before = {"prompt_tokens": 500 * (step - 2), "busy_seconds": step - 2.0}
            state.observe(frame(step=step - 1, **before, **full), (), now + beat)
        now += 1.0
        after = {"prompt_tokens": 500 * (step - 1), "busy_seconds": step - 1.0}
        state.observe(frame(step=step, **after, **full), (), now)
    assert state._prompts.measured == pytest.approx(500)


def test_steps_shared_with_batch_work_are_no_full_rate():
    """Steps that are kept short for requests to come counted as all that the engine can do, so that
    a burst beside a dataset was refused."""
    rows = {"batch_requests": 70, "waiting": 6, "batch_waiting_tokens": 600, "running": 64}
    state = known(step=1, **rows, waiting_tokens=600)
    for step in range(2, 6):
        done = {"output_tokens": 10 * step, "busy_seconds": 1.0 * step}
        state.observe(frame(step=step, **done, **rows, waiting_tokens=600), (), 100.0 + step)
    assert state.rate() == math.inf
    for step in range(6, 12):
        done = {"output_tokens": 1000 * step, "busy_seconds": 1.0 * step}
        state.book(step, 900, 900)
        state.observe(frame(step=step, **done, **rows, waiting_tokens=1500), (step,), 100.0 + step)
    assert 500 < state.rate() < math.inf


def test_a_booking_ends_when_the_figures_count_it_and_no_sooner():
    """Sent requests that were forgotten after two steps of the last one's length: a step that took
    several times that, with 64 new prompts in it, and the beats that say the old figures again
    meanwhile, had freed rows given away twice, and 60 requests waited inside an engine."""
    state = known(running=10, step_seconds=0.03)
    for choice in range(4):
        state.book(choice, 100, 40)
    assert (state.room()[0], len(state.bookings), state.booked_tokens, state.uncached_tokens) == (
        54,
        4,
        400,
        160,
    )
    for beat in range(1, 20):
        state.observe(frame(running=10, step_seconds=0.03), (), 100 + beat / 2)
        assert state.room()[0] == 54 and len(state.bookings) == 4
    state.observe(frame(running=13, step_seconds=3.0), (0, 1, 2), 110.0)
    assert (state.room()[0], len(state.bookings), state.booked_tokens, state.uncached_tokens) == (
        54,
        1,
        100,
        40,
    )
    state.observe(frame(running=14, step_seconds=0.03), (3,), 110.1)
    assert (state.room()[0], len(state.bookings), state.booked_tokens, state.held) == (54, 0, 0, 4)


def test_a_booking_ends_with_the_first_token_the_end_or_the_connection():
    """Room that shrinks for ever: the replica is an older one that does not say what its figures
    count, the request was taken back before they did, or the connection broke."""
    state = known(running=10)
    for choice in range(3):
        state.book(choice, 100, 100)
    state.begun(0)
    state.begun(0)
    assert (len(state.bookings), state.held) == (2, 3)
    state.unbook(1)
    state.unbook(1)
    assert (len(state.bookings), state.held) == (1, 2)
    state.settle((1, 99))  # taken back on its way, and a number of before the last connection
    assert len(state.bookings) == 1
    state.lost()
    assert (len(state.bookings), state.booked_tokens, state.uncached_tokens, state.held) == (
        0,
        0,
        0,
        0,
    )
    assert not state._unbegun and not state.available


def test_an_adapter_that_was_sent_counts_until_its_request_begins():
    """An adapter taken for gone while it is being loaded, and loaded at a second replica, because
    loading took longer than two steps."""
    state = known()
    state.book(1, 10, 10, "a")
    state.book(2, 10, 10, "b")
    state.observe(frame(waiting=2), (1, 2), 200.0)
    assert state.sent_adapters == {"a", "b"}
    state.begun(1)
    assert state.sent_adapters == {"b"}
    state.unbook(2)
    assert not state.sent_adapters


@given(st.integers(1, 8), st.integers(0, 64), st.integers(0, 40))
def test_routers_that_do_not_talk_do_not_overfill_a_replica(routers, running, waiting):
    """As many times the free rows as there are routers, in the engine's queue."""
    running, waiting = min(running, 64), waiting if running >= 64 else 0
    rooms = [
        known(running=running, waiting=waiting, routers=routers).room()[0] for _ in range(routers)
    ]
    free = 64 - running
    assert sum(max(0, room) for room in rooms) <= free + 2 * routers + 4
    if free:
        assert all(room > 0 for room in rooms), "a router that is shut out while rows are free"
