"""Batch work, requests of the lowest priority, beside others: what a step has of it."""

from typing import Any

import pytest

from engine.messages import BATCH_PRIORITY
from engine.scheduling.pacing.chunking import batch_limits
from tests.engine.scheduling.driver import Driver, random_run


def _driver(**changes: Any) -> Driver:
    sizes = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "num_blocks": 64}
    return Driver(**(sizes | changes))


def _rows(driver: Driver, count: int, **fields: Any) -> list[int]:
    return [
        driver.add_request(8, priority=BATCH_PRIORITY, ignore_eos=True, **fields)
        for _ in range(count)
    ]


def _calm(driver: Driver) -> None:
    driver.scheduler.last_interactive = -1e9


def test_alone_batch_work_fills_steps() -> None:
    """An engine that nobody else uses is kept half empty for requests that never come."""
    driver = _driver()
    _rows(driver, 8, max_tokens=20)
    for _ in range(6):
        driver.step()
    assert len(driver.runner.batches[-1].rows) == 8
    driver.finish()


@pytest.mark.parametrize("ahead", [False, True])
def test_a_prompt_finds_a_step_almost_without_batch_work(ahead: bool) -> None:
    """A prompt waits behind the prompts and decodes of a dataset's rows."""
    driver = _driver(async_scheduling=ahead)
    _rows(driver, 6, max_tokens=40)
    for _ in range(6):
        driver.step()
    driver.add_request(30, max_tokens=10, ignore_eos=True)
    while not any(new.num_prompt_tokens == 30 for new in driver.runner.batches[-1].new_rows):
        driver.step()
    batch = driver.runner.batches[-1]
    assert batch.num_tokens <= 30 + sum(batch_limits(8, 64, prompts=True))
    driver.step()
    decodes, prompts = batch_limits(8, 64, prompts=False)
    assert len(driver.runner.batches[-1].rows) <= 1 + decodes + prompts
    driver.finish()


def test_rows_are_taken_from_batch_work() -> None:
    """A dataset has all rows for as long as its answers last, and others wait for their ends."""
    driver = _driver()
    _rows(driver, 8, max_tokens=30)
    for _ in range(4):
        driver.step()
    urgent = [driver.add_request(8, max_tokens=2, ignore_eos=True) for _ in range(3)]
    for _ in range(8):
        driver.step()
    assert all(driver.outputs[number].finish for number in urgent)
    assert driver.scheduler.counters.preemptions == 3
    driver.finish()


def test_blocks_are_taken_from_batch_work() -> None:
    """A prompt that lacks blocks waits until rows of a dataset have ended."""
    driver = _driver(num_blocks=20, block_size=4, prefix_caching=False)
    _rows(driver, 4, max_tokens=12)
    for _ in range(10):
        driver.step()
    urgent = driver.add_request(40, max_tokens=2, ignore_eos=True)
    for _ in range(12):
        driver.step()
    assert driver.outputs[urgent].finish
    assert driver.scheduler.counters.preemptions > 0
    driver.finish()


def test_afterwards_it_fills_steps_again() -> None:
    """Batch work stays limited by requests that came long ago."""
    driver = _driver()
    driver.add_request(8, max_tokens=2, ignore_eos=True)
    _rows(driver, 8, max_tokens=40)
    for _ in range(12):
        driver.step()
    assert len(driver.runner.batches[-1].rows) < 8
    _calm(driver)
    for _ in range(8):
        driver.step()
    assert len(driver.runner.batches[-1].rows) == 8
    driver.finish()


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("ahead", [False, True])
def test_random_lives_with_batch_work(seed: int, ahead: bool) -> None:
    """A held, preempted or resumed row has another text, loses a block, or is never served."""
    random_run(seed, priorities=(0, 1, BATCH_PRIORITY, BATCH_PRIORITY), async_scheduling=ahead)
