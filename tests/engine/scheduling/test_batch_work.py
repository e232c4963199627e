"""Batch work, requests of the lowest priority, beside others: what a step has of it."""

from typing import Any

import pytest

from engine.messages import BATCH_PRIORITY
from engine.scheduling import scheduler
from tests.engine.scheduling.driver import Driver, random_run


def _driver(**changes: Any) -> Driver:
    sizes = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "num_blocks": 64}
    return Driver(**(sizes | changes))


def _rows(driver: Driver, count: int, **fields: Any) -> list[int]:
    return [
        driver.add_request(8, priority=BATCH_PRIORITY, ignore_eos=True, **fields)
        for _ in range(count)
    ]


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
    assert driver.runner.batches[-1].num_tokens == 30 + 1
    driver.step()
    driver.step()
    assert len(driver.runner.batches[-1].rows) == 1 + 6
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


def _prompt_tokens(driver: Driver) -> int:
    batch = driver.runner.batches[-1]
    return batch.num_tokens - batch.num_decodes


def test_prompts_of_batch_work_fill_steps_after_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request that comes while a dataset is computed waits for a full step of its prompts, or
    the dataset stays limited by requests that came long ago."""
    monkeypatch.setattr(scheduler, "CALM_STEPS", 6)
    driver = _driver(max_num_batched_tokens=60, prefix_caching=False, num_blocks=400)
    driver.add_request(8, max_tokens=2, ignore_eos=True)
    for _ in range(3):
        driver.step()
    assert not driver.core.has_work()
    _rows(driver, 8, max_tokens=2)
    _rows(driver, 20, max_tokens=2)
    computed = []
    while driver.core.has_work():
        driver.step()
        computed.append(_prompt_tokens(driver))
    assert max(computed[:5]) == 10 and max(computed) > 10
    driver.finish()


def test_blocks_of_a_paused_prompt_come_back() -> None:
    """Prompts of a dataset have no part of a step and hold the blocks that another one lacks, so
    the engine has nothing to do while requests wait."""
    driver = _driver(num_blocks=16, block_size=4, prefix_caching=False)
    for number in range(3):
        driver.add_request(20 + number, max_tokens=2, priority=BATCH_PRIORITY, ignore_eos=True)
    driver.step()
    driver.add_request(60, max_tokens=2, ignore_eos=True)
    driver.finish()


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("ahead", [False, True])
def test_random_lives_with_batch_work(seed: int, ahead: bool) -> None:
    """A held, preempted or resumed row has another text, loses a block, or is never served."""
    random_run(seed, priorities=(0, 1, BATCH_PRIORITY, BATCH_PRIORITY), async_scheduling=ahead)
