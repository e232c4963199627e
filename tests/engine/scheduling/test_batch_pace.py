"""BatchPace: what a step has of batch work, and when the next one is launched."""

import random

import pytest

from engine.scheduling.pacing import batch_pace
from engine.scheduling.pacing.batch_pace import BatchPace
from engine.scheduling.pacing.chunking import prefill_tokens
from tests.fakes import make_core, make_request


def _seconds(decodes: int, tokens: int) -> float:
    return 0.004 + 0.0001 * decodes + 0.00002 * tokens


def _measured(pace: BatchPace, steps: int, late: bool = False, seed: int = 1) -> None:
    dice = random.Random(seed)
    for _ in range(steps):
        decodes, tokens = dice.randrange(256), dice.randrange(500)
        pace.observe(decodes, 0, tokens, _seconds(decodes, tokens), late=late)


def test_a_step_is_launched_shortly_before_the_last_one_ends() -> None:
    """A request that arrives in a long step waits for a second one, which was launched at once."""
    pace = BatchPace()
    assert pace.launch_after(200, 0, 300) <= 0, "nothing is known"
    _measured(pace, 400)
    lead = _seconds(200, 300) - pace.launch_after(200, 0, 300)
    assert 0.002 <= lead < 0.004
    assert pace.launch_after(0, 0, 0) < _seconds(0, 0) - 0.0019


@pytest.mark.parametrize("late", [False, True])
def test_it_is_launched_earlier_after_the_device_was_idle(late: bool) -> None:
    """The device waits for the host between all steps, as launching takes longer than assumed."""
    pace = BatchPace()
    _measured(pace, 400)
    before = pace.launch_after(200, 0, 300)
    _measured(pace, 3, late=late)
    assert (pace.launch_after(200, 0, 300) < before - 0.005) == late
    _measured(pace, 400)
    assert pace.launch_after(200, 0, 300) == pytest.approx(before, abs=0.0015)


def test_it_is_launched_earlier_where_steps_vary() -> None:
    """A step that ends before it was expected leaves the device idle."""
    pace = BatchPace()
    _measured(pace, 400)
    before = pace.launch_after(200, 0, 300)
    pace.observe(200, 0, 300, 0.7 * _seconds(200, 300), late=False)
    assert pace.launch_after(200, 0, 300) < 0.75 * before


@pytest.mark.parametrize(("prompt", "milliseconds"), [(4, 8), (30, 15), (400, 25)])
def test_prompts_have_a_bounded_time(prompt: int, milliseconds: int) -> None:
    """On a slow device a share of the budget takes a second; or prompts of batch work take longer
    than those of the requests that wait for them."""
    pace = BatchPace()
    assert pace.limits(64, 1000, 0, (3, 9), 0) == (64, 180, 0)
    for tokens in range(40):
        pace.observe_prompt(prompt)
        pace.observe(3, 0, tokens, 0.01 + 0.001 * tokens, late=False)
    rows, limit, _ = pace.limits(64, 1000, 0, (3, 9), 0)
    assert rows == 64 and abs(limit - milliseconds) <= 2


@pytest.mark.parametrize(("waiting", "others"), [(600, 0), (600, 50), (1400, 20), (2500, 20)])
def test_prompts_are_as_quick_beside_batch_work(waiting: int, others: int) -> None:
    """Batch work stands still while prompts are computed, or they wait for its decodes."""
    pace, budget, own = BatchPace(), 2048, 100
    least = 256 // batch_pace._ROWS
    unknown = (least, 0, prefill_tokens(waiting, budget))
    assert pace.limits(256, budget, waiting, (others, own), 0) == unknown
    _measured(pace, 400)

    def first_token(*, beside: bool) -> tuple[float, int]:
        """Return the seconds of all chunks, and the decodes of batch work beside them."""
        left, seconds, decoded = waiting, 0.0, 0
        while left:
            rows, tokens = 0, prefill_tokens(left, budget)
            if beside:
                rows, _, tokens = pace.limits(256, budget, left, (others, own), 0)
                rows = min(rows, own)
            tokens = min(left, tokens)
            left -= tokens
            seconds += _seconds(others + rows, tokens)
            decoded += rows
        return seconds, decoded

    alone, _ = first_token(beside=False)
    shared, decoded = first_token(beside=True)
    assert shared <= alone
    assert decoded >= 5 * least


def test_a_prompt_of_one_step_is_computed_beside_few_decodes() -> None:
    """A first token that all decodes of batch work delay, though there is no next chunk to gain."""
    pace = BatchPace()
    _measured(pace, 400)
    assert pace.limits(256, 8192, 500, (20, 200), 0) == (256 // batch_pace._ROWS, 0, 500)


def test_a_full_budget_has_few_decodes_of_batch_work() -> None:
    """Prompts that fill whole steps are slowed by decodes beside them."""
    pace = BatchPace()
    _measured(pace, 400)
    assert pace.limits(256, 2048, 5000, (20, 100), 0) == (256 // batch_pace._ROWS, 0, 2048)


@pytest.mark.parametrize("priority", [0, batch_pace.CALM_STEPS])
def test_launches_are_held_for_batch_work_alone(priority: int) -> None:
    """Every request of an engine without batch work waits for a timer."""
    core, _ = make_core(async_scheduling=True)
    core.add_request(make_request(1, 8, priority=priority, max_tokens=30, ignore_eos=True))
    _measured(core.scheduler.batch_pace, 400)
    core.scheduler.batch_pace.observe = lambda *_, **__: None  # type: ignore[method-assign]
    core.step()
    delays = []
    while core.has_work():
        delays.append(core.launch_delay())
        core.step()
    assert (max(delays) > 0) == (priority > 0)
