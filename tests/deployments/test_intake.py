"""Intake: what a replica is given, by its frames and by what was sent since."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployments.intake import Intake
from engine.messages import EngineStats


def frame(**more) -> EngineStats:
    base = {"rows": 64, "total_blocks": 10**4, "free_blocks": 10**4, "block_size": 16, "routers": 1}
    return EngineStats(**{**base, **more})


def intake(**more) -> Intake:
    one = Intake(step_tokens=2048)
    one.observe(frame(**more), 100.0)
    return one


def test_room_is_the_free_rows_and_a_little_more():
    """A batch that is not full because the router waits for a frame; or the whole queue in the
    engine, where nobody can put it in order."""
    assert intake().room() == 64 + 4
    assert intake(running=60).room() == 4 + 4
    assert intake(running=64).room() == 4
    full = intake(running=64)
    for choice in range(4):
        full.book(choice, 10, 100.0)
    assert full.room() == 0
    assert intake(rows=0, running=5000).room() > 0, "an engine that does not tell its rows"


def test_a_share_of_the_free_rows_is_a_share_until_the_next_frame():
    """Two routers with a queue each: after each choice they take half of what is left, until both
    have filled all rows, and the rest waits in the engine while another replica has room. Or the
    first router at a new replica, which is told that it is alone there."""

    def sent(one: Intake) -> int:
        count = 0
        while one.room() > 0:
            one.book(count, 1, 100.0)
            count += 1
        return count

    assert sent(intake(routers=2)) == 32 + 2
    assert sent(intake(routers=2, running=50)) == 7 + 2
    new = Intake(step_tokens=2048)
    new.opened(4, 100.0)
    new.observe(frame(), 100.01)
    assert sent(new) == 16 + 1
    new.observe(frame(running=17), 103.0)
    assert sent(new) == 64 - 17 + 4, "the others never came"


def test_room_ends_with_a_backlog_of_prompts_or_of_memory():
    """Hundreds of long prompts in the engine because it has rows for them."""
    assert intake(running=5, waiting_tokens=5000).room() == 0
    one = intake(running=5)
    one.book(1, 5000, 100.0)
    assert one.room() == 0
    one.unbook(1)
    assert one.room() > 0
    short = intake(running=20, waiting=3, waiting_tokens=3000, free_blocks=100)
    assert 0 < short.room() <= 4


def test_news_inside_a_long_step_are_no_speed():
    """A replica whose steps take a second says twice in each that it is alive: what it computed is
    divided by the time since then, and four times what it can do is let in."""
    one, now = intake(running=64, waiting=9, waiting_tokens=900, step=1), 100.0
    full = {"running": 64, "waiting": 9, "waiting_tokens": 900}
    for step in range(2, 6):
        for beat in (0.45, 0.9):
            before = {"prompt_tokens": 500 * (step - 2), "busy_seconds": step - 2.0}
            one.observe(frame(step=step - 1, **before, **full), now + beat)
        now += 1.0
        after = {"prompt_tokens": 500 * (step - 1), "busy_seconds": step - 1.0}
        one.observe(frame(step=step, **after, **full), now)
    assert one._prompts.measured == pytest.approx(500)


def test_a_booking_ends_with_the_first_token_the_frame_or_the_connection():
    """Room that shrinks for ever, because what was sent is counted twice."""
    one = intake(running=10, step_seconds=0.1)
    one.book(1, 100, 100.0)
    one.book(2, 100, 100.0)
    one.begun(1)
    assert one.room() == 53 + 4
    one.observe(frame(running=12, step_seconds=0.1), 100.1)
    assert one.room() == 51 + 4, "sent a moment ago: not in the figures for sure"
    one.observe(frame(running=12, step_seconds=0.1), 100.3)
    assert one.room() == 52 + 4
    one.book(3, 100, 100.3)
    one.lost()
    assert not one._booked and not one._unbegun and not one._ours and not one._booked_tokens


@given(st.integers(1, 8), st.integers(0, 64), st.integers(0, 40))
def test_routers_that_do_not_talk_do_not_overfill_a_replica(routers, running, waiting):
    """As many times the free rows as there are routers, in the engine's queue."""
    running, waiting = min(running, 64), waiting if running >= 64 else 0
    rooms = [
        intake(running=running, waiting=waiting, routers=routers).room() for _ in range(routers)
    ]
    free = 64 - running
    assert sum(max(0, room) for room in rooms) <= free + 2 * routers + 4
    if free:
        assert all(room > 0 for room in rooms), "a router that is shut out while rows are free"
