"""The disk tier: blocks that fall out of host memory, and are read back into it on a hit."""

from typing import Any

import pytest

from engine.config.kv_groups import Chunked, Full, Window
from engine.scheduling.memory.disk_tier import DiskTier
from engine.scheduling.memory.host_plan import HostPlan
from engine.scheduling.memory.snapshots import SnapshotPlan
from tests.engine.scheduling.driver import Driver, random_run
from tests.engine.scheduling.test_host_tier import PROMPT, say, tier_of
from tests.fakes import FakeFiles

# The host has no more slots than the device, and loses a prompt as soon.
HOST = HostPlan(blocks=16, block_bytes=1 << 10, everything=True)


def make_driver(host: HostPlan = HOST, **changes: Any) -> Driver:
    """Return a driver of a device with 15 blocks of 4 tokens, which `flood` fills, like the
    host."""
    return Driver(**({"num_blocks": 15, "max_model_len": 60, "host": host, "disk": True} | changes))


def disk_of(driver: Driver) -> DiskTier:
    disk = tier_of(driver).disk
    assert disk is not None
    return disk


def files_of(driver: Driver) -> FakeFiles:
    files = disk_of(driver).files
    assert isinstance(files, FakeFiles)
    return files


def flood(driver: Driver, number: int = 0) -> None:
    """Evict all blocks of the device and of the host."""
    for last in range(3):
        say(driver, [10 + number + last] * 55)


@pytest.mark.parametrize("delay", [0, 5])
@pytest.mark.parametrize("async_scheduling", [True, False])
def test_evicted_prefix_comes_from_disk(async_scheduling: bool, delay: int) -> None:
    """Bugs: a file has the keys of another block, or a hit computes its tokens again."""
    driver = make_driver(async_scheduling=async_scheduling, delay=delay)
    say(driver, PROMPT)
    for number in range(6):  # a quarter of the slots is written at once
        say(driver, [*PROMPT, 4])
        flood(driver, number)
    before, read = driver.runner.num_tokens, driver.core.stats().disk_kv_read_tokens
    say(driver, [*PROMPT, 3])
    assert driver.runner.num_tokens - before < 10
    assert driver.core.stats().disk_kv_read_tokens - read >= 24
    assert driver.core.stats().disk_kv_failed_reads == 0


@pytest.mark.parametrize("async_scheduling", [True, False])
def test_running_requests_are_written(async_scheduling: bool) -> None:
    """Bug: what a replica that is killed has computed of a long stream is nowhere else."""
    driver = make_driver(async_scheduling=async_scheduling)
    number = driver.add_request(PROMPT, max_tokens=15, ignore_eos=True)
    for _ in range(6):
        driver.step()
    assert not driver.outputs[number].finish
    assert len(files_of(driver).files[0]) == 4, "a quarter of the slots is written at once"
    driver.finish()


@pytest.mark.parametrize("field, others", [("cache_salt", "tenant"), ("adapter", "lora")])
def test_others_share_nothing(field: str, others: str) -> None:
    """Bug: a tenant, or an adapter, gets the keys of another by way of the disk."""
    driver = make_driver()
    for number in range(6):
        say(driver, PROMPT)
        flood(driver, number)
    read = driver.core.stats().disk_kv_read_tokens
    assert read > 0
    say(driver, PROMPT, **{field: others})
    assert driver.core.stats().disk_kv_read_tokens == read


@pytest.mark.parametrize("rate, reads", [(1e12, True), (1.0, False)])
def test_slow_disks_are_not_read(rate: float, reads: bool) -> None:
    """Bug: a disk that is slower than the device makes answers later."""
    driver = make_driver()
    for number in range(6):
        say(driver, PROMPT)
        flood(driver, number)
    files_of(driver).read_rate = rate
    tier_of(driver).worth.observe_step(8192, 8192 * 1e-4)
    before = files_of(driver).num_reads
    say(driver, [*PROMPT, 3])
    assert (files_of(driver).num_reads > before) == reads


def test_a_disk_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: a read that never ends keeps its request waiting for ever."""
    monkeypatch.setattr("engine.scheduling.memory.disk_tier._LEAST_WAIT", 0.05)
    driver = make_driver()
    for number in range(6):
        say(driver, PROMPT)
        flood(driver, number)
    files = files_of(driver)
    files._delay = 1 << 40
    number = driver.add_request([*PROMPT, 3], max_tokens=4, ignore_eos=True)
    for _ in range(10_000):
        driver.step()
        if driver.outputs.get(number) and driver.outputs[number].finish:
            break
    assert driver.outputs[number].finish == "length"
    assert driver.core.stats().disk_kv_wait_seconds >= 0.05
    files._reads = {ticket: (0, entries) for ticket, (_, entries) in files._reads.items()}
    driver.finish()


def test_a_full_queue_drops_writes() -> None:
    """Bugs: writes that come faster than the disk wait without bound; of a prefix its tail is
    written, which nothing can start from."""
    driver = make_driver()
    files_of(driver).most = 3
    say(driver, PROMPT)
    disk = disk_of(driver)
    assert disk.dropped > 0 and len(files_of(driver).files[0]) == 3
    flood(driver)
    say(driver, [*PROMPT, 3])
    assert driver.core.stats().disk_kv_read_tokens == 12


@pytest.mark.parametrize("num_slots", [80, 60, 40, 20])
def test_each_block_is_written_or_counted(num_slots: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: of blocks that have room most are not written, and no count says so."""
    driver = make_driver(HostPlan(blocks=num_slots, block_bytes=1 << 10, everything=True))
    disk, entries = disk_of(driver), list[Any]()
    with monkeypatch.context() as patch:
        patch.setattr(disk, "stored", entries.extend)
        say(driver, PROMPT)
    disk.stored(entries)
    driver.finish()
    written = min(len(entries), num_slots // 4)
    stats = driver.core.stats()
    assert (stats.disk_kv_blocks, stats.disk_kv_dropped) == (written, len(entries) - written)


def test_blocks_evicted_before_the_write_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: blocks that leave the host before they are written are in no count."""
    driver = make_driver()
    disk, entries = disk_of(driver), list[Any]()
    with monkeypatch.context() as patch:
        patch.setattr(disk, "stored", entries.extend)
        say(driver, PROMPT)
        stored = entries[:]
        flood(driver)
    disk.stored(stored)
    driver.finish()
    assert (driver.core.stats().disk_kv_blocks, disk.dropped) == (0, len(stored))


def test_finished_writes_take_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: writes that ended long ago leave no room for those of the next request."""
    driver = make_driver(HostPlan(blocks=44, block_bytes=1 << 10, everything=True))
    with monkeypatch.context() as patch:  # the writes end while the engine is idle
        patch.setattr(files_of(driver), "written", list)
        patch.setattr(files_of(driver), "has_news", lambda: False)
        say(driver, PROMPT)
    assert len(disk_of(driver).writing) >= 10
    say(driver, [9] * 40)
    assert disk_of(driver).dropped == 0


def test_idle_engines_collect_finished_writes() -> None:
    """Bug: until the next request, `disk_kv_used_bytes` lacks the last files."""
    driver = make_driver()
    say(driver, PROMPT)
    assert not disk_of(driver).writing and files_of(driver).files[0]
    assert not driver.core.has_work()
    woken: list[int] = []
    driver.core.on_loaded(lambda: woken.append(1))
    files_of(driver).wake()
    assert woken


def test_new_weights_and_resets_find_nothing() -> None:
    """Bug: after an update of the weights a request gets keys of the old ones."""
    for act in ("weights", "reset", "sleep"):
        driver = make_driver()
        for number in range(6):
            say(driver, PROMPT)
            flood(driver, number)
        if act == "weights":
            driver.scheduler.change_weights("fake@1", recompute=True)
        elif act == "reset":
            driver.core.reset_prefix_cache()
        else:  # which empties host memory alone
            driver.scheduler.memory.reset_prefix_cache()
        before = driver.core.stats().disk_kv_read_tokens
        say(driver, [*PROMPT, 4])
        assert (driver.core.stats().disk_kv_read_tokens > before) == (act == "sleep")


def test_keys_that_may_be_wrong_are_deleted() -> None:
    """Bug: what a failed step has written comes back from disk."""
    driver = make_driver()
    say(driver, PROMPT)
    pool = driver.scheduler.memory.pools[0]
    hashes = [name[1] for block in range(15) if (name := pool.name_of(block)) is not None]
    assert files_of(driver).files[0]
    tier_of(driver).forget(hashes)
    assert not files_of(driver).files[0].keys() & {*hashes}


def test_close_writes_what_is_queued() -> None:
    """Bug: a replica that stops loses the last conversation."""
    driver = make_driver()
    driver.core.close()
    assert files_of(driver).closed


@pytest.mark.parametrize("slots, states", [(1, 3), (6, 40)])
def test_random_lives_of_recurrent_models(slots: int, states: int) -> None:
    """Bugs: a request goes on from a state of another place; a slot of a state is lost."""
    read = 0
    for seed in range(2):
        host = HostPlan(20, 1, everything=seed < 1, states=states, state_bytes=1)
        driver = random_run(
            seed,
            host=host,
            disk=True,
            delay=seed,
            failing=(2, 5),
            snapshots=SnapshotPlan(slots, 8, gap=4),
            kinds=(Full(),),
        )
        read += disk_of(driver).read_bytes
        driver.core.check_integrity()
    assert read > 1, "these runs are meant to read"


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"num_blocks": 24, "max_model_len": 64},
        {"micro_batches": 2},
        {"kinds": (Full(), Window(12)), "num_blocks": 60},
        {"kinds": (Full(), Chunked(16)), "num_blocks": 60, "async_scheduling": False},
    ],
)
def test_random_lives(changes: dict[str, Any]) -> None:
    """Bugs: a rare order of write, read, load, preemption, abort and reset that loses a slot, or
    shows a request the keys of another tenant or adapter."""
    read = 0
    for seed in range(3):
        host = HostPlan(25, 1, everything=seed < 2)
        driver = random_run(seed, host=host, disk=True, delay=seed, failing=(2, 5), **changes)
        read += disk_of(driver).read_bytes
        driver.core.check_integrity()
    assert read > 4, "these runs are meant to read"
