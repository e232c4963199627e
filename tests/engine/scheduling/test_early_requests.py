"""Requests that start while blocks of their prefix are on their way from another engine."""

from types import SimpleNamespace
from typing import Any

import pytest

from engine.scheduling.moves.source import Order
from engine.scheduling.moves.wire import Ask
from tests.engine.scheduling.moving import MovingPair

PROMPT = [at % 40 for at in range(41)]


def moving_pair(**changes: Any) -> MovingPair:
    """Return two engines, of which the second pulls a prompt that the first has. Its loads last
    until a step needs them."""
    settings = {"block_size": 4, "max_num_batched_tokens": 64, "max_num_seqs": 4}
    sizes = {"max_model_len": 60, "num_blocks": 40, "delay": 10_000}
    pair = MovingPair(40, **{**settings, **sizes, **changes})
    pair.drivers[0].add_request(PROMPT, max_tokens=3)
    pair.drivers[0].finish()
    pair.add_request(1, PROMPT, max_tokens=6)
    return pair


def release(pair: MovingPair) -> None:
    """Run until the second engine's request starts."""
    for _ in range(100):
        for engine in range(2):
            pair.step(engine)
        if not pair.moves(1).waiting():
            return
        pair.deliver()
    raise AssertionError("it waits for its loads")


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_a_request_starts_before_its_loads_have_ended(async_scheduling: bool) -> None:
    """Bugs: a step reads blocks before they are there; blocks are freed while they are written."""
    pair = moving_pair(async_scheduling=async_scheduling)
    release(pair)
    pair.finish()
    assert pair.moves(1).pulled_tokens == 40 and pair.drivers[1].runner.num_tokens < 10


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_keys_that_prove_wrong_are_computed_again(async_scheduling: bool) -> None:
    """Bugs: a token of keys that are another request's is sent; such keys stay in the prefix
    cache; the request is lost."""
    pair = moving_pair(async_scheduling=async_scheduling)
    driver, moves = pair.drivers[1], pair.moves(1)
    (imported,) = moves._imports.values()
    slots = SimpleNamespace(on_device=False)
    imported.pull.borrowed = SimpleNamespace(intact=lambda _: False, slots=slots)  # type: ignore[assignment]
    release(pair)
    (request,) = driver.scheduler.requests.values()
    (pool,) = driver.scheduler.memory.pools
    while moves._loads:
        pair.step(1)
        assert not any(output.tokens for output in driver.outputs.values())
    assert request.hashes and not pool.match_prefix(request.hashes)
    pair.finish()
    assert (moves.pulled_tokens, moves.failed_pulls) == (0, 1)
    assert driver.runner.num_tokens > 40


def test_blocks_are_not_handed_on_before_they_are_there() -> None:
    """Bug: a third engine gets blocks whose own load is in flight."""
    pair = moving_pair(async_scheduling=True)
    moves, core = pair.moves(1), pair.drivers[1].core
    (imported,) = moves._imports.values()
    release(pair)
    assert moves._loads
    pull = imported.pull
    order = Order(Ask(pull.compatibility, b"".join(pull.hashes), 0, 1), pull.deadline + 600)
    moves._post_order(order)
    (pool,) = core.scheduler.memory.pools
    moves.poll(pool, core.scheduler.step, core.scheduler.step)
    assert moves._loads and order in moves._exports
    assert order.answer.empty() and order.staged[0].empty()
    pair.step(1)
    assert not moves._loads
    pair.step(1)
    assert not order.answer.get_nowait().refusal
    slots: list[int] = []
    while (batch := order.staged[0].get_nowait()) is not None:
        slots += batch.slots
    assert len(slots) == 10
    moves._post_sent(order, slots)
    pair.finish()
