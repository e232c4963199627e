"""Adapters between their tiers, and requests that wait for them, on a fake device."""

import random

import pytest

from engine.errors import AdapterError
from engine.lora.tiers.store import AdapterStore
from engine.messages import AddAdapter, RemoveAdapter
from engine.scheduling.core import EngineCore
from tests.fakes import Inline, collect, make_core, make_request, make_store, run


def load(store: AdapterStore, name: str) -> bool:
    """Ask for an adapter until the begun loads are done; return whether it is loaded."""
    adapter = store.find(name)
    store.ask(adapter)
    store.poll()
    return store.ask(adapter)


def test_slots_and_host_memory_are_lru() -> None:
    """Bug: the one just used goes, or the budget is exceeded though nobody needs the others."""
    store = make_store("abc", max_loras=2, host_bytes=2)
    for name in "ab":
        assert load(store, name)
    assert load(store, "a") and load(store, "c")
    assert store.resident == ["c", "a"] and store.loads == 3
    assert store.host_bytes == 2 and store.reads == 3
    assert load(store, "b"), "it was read again"
    assert store.reads == 4 and store.loads == 4


def ask_for(store: AdapterStore, name: str) -> None:
    """Let a request for an adapter start and end at once."""
    adapter = store.find(name)
    store.claim(adapter)
    assert load(store, name)
    slot = store.pin(adapter, first=True)
    store.unpin(slot)
    store.release(adapter, started=True)


def test_the_slot_that_is_asked_for_least_is_given_away() -> None:
    """Bug: one request each for many adapters pushes out the one that everybody uses; or one that
    was popular long ago stays for ever."""
    store = make_store("abcdefg", max_loras=2)
    for name in "aaaa":
        ask_for(store, name)
    for name in "bcdefg":
        ask_for(store, name)
        assert store.resident[0] == "a"
    assert store.loads == 7
    for _ in range(1500):
        ask_for(store, "b")
    ask_for(store, "c")
    ask_for(store, "c")
    assert store.resident == ["b", "c"], "a has faded"


def test_what_nobody_has_used_for_a_day_costs_nothing() -> None:
    """Bug: on a quiet server yesterday's favourite keeps its slot, because popularity faded with
    requests alone, and all that was ever read stays in host memory while there is room."""
    now = 1e6
    store = make_store("abcd", max_loras=3, clock=lambda: now)
    for name in "ab" * 1000:
        ask_for(store, name)
    running = store.find("b")
    store.claim(running)
    slot = store.pin(running, first=True)
    now += 86_000
    store.poll()
    assert store.host_bytes == 2 and not store.has_news()
    now += 1000
    assert store.has_news()  # what makes an idle engine take a step
    store.poll()
    assert store.host_bytes == 1 and not store.has_news()
    for name in "cd":
        ask_for(store, name)
    assert set(store.resident) == set("bcd"), "c went, and not a"
    now += 86_401
    store.poll()
    assert store.host_bytes == 1, "of what runs nothing goes, however long it runs"
    store.unpin(slot)
    store.release(running, started=True)
    now += 86_401
    store.poll()
    assert store.host_bytes == 0
    now += 30 * 365 * 86_400  # more than a float can count half-lives
    ask_for(store, "a")
    assert store.resident[0] == "a" and store.host_bytes == 1


def test_what_is_waited_for_is_not_given_away() -> None:
    """Bug: an adapter that was just loaded for its first request goes again before that starts."""
    store = make_store("abc", max_loras=2)
    for name in "aab":
        ask_for(store, name)
    waiting = store.find("b")
    store.claim(waiting)
    store.claim(store.find("c"))
    assert load(store, "c") and store.resident == ["c", "b"]
    store.release(waiting, started=False)


def test_a_pinned_slot_stays_and_nobody_starves() -> None:
    """Bug: weights change under a running request; or a busy adapter keeps all others out."""
    store = make_store("ab", max_loras=1)
    a, b = store.find("a"), store.find("b")
    for adapter in (a, a, b):
        store.claim(adapter)
    assert load(store, "a")
    slot = store.pin(a, first=True)
    assert not load(store, "b") and store.resident == ["a"]
    assert not store.ask(a), "its slot is promised to b: nobody new gets in"
    store.unpin(slot)
    store.release(a, started=True)
    assert b in store.poll() and store.ask(b) and store.resident == ["b"]
    slot = store.pin(b, first=True)
    assert not store.ask(a)
    store.unpin(slot)
    store.release(b, started=True)
    assert load(store, "a")


def test_replaced_while_in_use() -> None:
    """Bug: a running request goes on with the new weights, or the old ones are kept for ever."""
    store = make_store("a", max_loras=2)
    old = store.find("a")
    store.claim(old)
    assert load(store, "a")
    slot = store.pin(old, first=True)
    store.add(AddAdapter(1, "a", "2"))
    store.poll()
    (answer,) = store.take_answers()
    assert answer.info is not None and answer.info.revision == "2"
    assert store.find("a") is not old and store.find("a@1") is old
    assert load(store, "a") and store.host_bytes == 3 and len(store.resident) == 2
    store.release(old, started=True)
    store.unpin(slot)
    assert store.host_bytes == 2 and store.resident == ["a"]
    with pytest.raises(AdapterError) as caught:
        store.find("a@1")
    assert caught.value.code == "adapter_not_found"


def test_added_again_unchanged() -> None:
    """Bug: a watched folder that is announced twice empties slots and prefix cache."""
    store = make_store("a")
    before = store.find("a")
    assert load(store, "a")
    store.add(AddAdapter(1, "a", "1"))
    store.poll()
    assert store.find("a") is before and store.loads == 1


def test_removed() -> None:
    """Bug: a removed adapter keeps its memory, or another revision is removed in its place."""
    store = make_store("a")
    assert load(store, "a")
    for revision, removed in (("0", False), ("", True), ("", False)):
        store.remove(RemoveAdapter(1, "a", revision))
        store.poll()
        assert (store.take_answers()[0].info is not None) == removed
    assert store.host_bytes == 0 and not store.resident


def test_broken_adapter_fails_its_requests_alone() -> None:
    """A broken adapter: others run; the reason reaches the client; it is not read again at once."""
    store = make_store("ab")
    store.find("a").path = "it is broken"
    core, _ = make_core(adapters=store)
    outputs = run(
        core, [make_request(i, adapter=name) for i, name in enumerate(["a", "b", "", "a"])]
    )
    assert [outputs[i].finish for i in range(4)] == ["error", "stop", "stop", "error"]
    assert outputs[0].deltas[-1].error == "adapter_invalid: it is broken"
    reads = store.reads
    assert run(core, [make_request(9, adapter="a")])[9].finish == "error"
    assert store.reads == reads


def test_changed_on_disk_without_being_added_again() -> None:
    """Bug: other weights under the same revision would serve wrong cached prefixes."""
    store = make_store("ab", max_loras=1, host_bytes=1)
    assert load(store, "a") and load(store, "b")
    store.find("a").path = "2"
    core, _ = make_core(adapters=store)
    assert (
        run(core, [make_request(1, adapter="a")])[1]
        .deltas[-1]
        .error.startswith("adapter_changed: ")
    )


def test_only_the_request_that_needs_it_waits() -> None:
    """Bug: the batch stands still while an adapter is read or copied; or the engine spins."""
    disk, device = Inline(hold=True), Inline(hold=True)
    store = make_store("a", disk=disk, device=device)
    core, runner = make_core(adapters=store)
    core.add_request(make_request(1, adapter="a", max_tokens=2))
    core.add_request(make_request(2, max_tokens=20))
    outputs = collect(core.step() + core.step())
    assert not core.scheduler.queue.waiting and core.stats().waiting == 1
    while core.has_work():
        collect(core.step(), outputs)
    assert outputs.keys() == {2} and runner.num_steps < 25
    disk.release()
    assert core.has_work()
    core.step()
    assert not core.has_work(), "still on its way to the device"
    device.release()
    assert run(core)[1].finish
    core.add_request(make_request(3, adapter="a"))
    core.abort([3])
    assert run(core)[3].finish == "abort"


def test_an_aborted_wait_leaves_nothing() -> None:
    """The client leaves while its adapter loads."""
    disk, device = Inline(hold=True), Inline(hold=True)
    core, _ = make_core(adapters=make_store("a", disk=disk, device=device))
    core.add_request(make_request(1, adapter="a"))
    core.step()
    core.abort([1])
    assert collect(core.step())[1].finish == "abort"
    disk.release()
    assert not run(core)
    device.release()
    core.check_integrity()


def test_unknown_and_disabled() -> None:
    """Bug: a request for an adapter that is not there is answered by the model itself."""
    core, _ = make_core(adapters=AdapterStore.disabled())
    assert (
        run(core, [make_request(1, adapter="a")])[1]
        .deltas[0]
        .error.startswith("adapters_disabled: ")
    )
    core, _ = make_core()
    for number, name in enumerate(("x", "lora@2", "../lora", "", "lora@1")):
        finish = run(core, [make_request(number, adapter=name)])[number].finish
        assert (finish == "error") == (number < 3)


@pytest.mark.parametrize("batching", ["mixed", "split"])
def test_random_lives(batching: str) -> None:
    """Many adapters, few slots, uploads that end whenever: everybody ends, with the right text, and
    nothing is held afterwards."""
    for seed in range(6):
        rng = random.Random(seed)
        disk, device = Inline(hold=True), Inline(hold=True)
        store = make_store("abcdefg", max_loras=3, host_bytes=4, disk=disk, device=device)
        core, _ = make_core(
            adapters=store,
            batching=batching,
            max_num_seqs=6,
            num_blocks=30,
            prefix_caching=seed % 2,
        )
        outputs: dict[int, object] = {}
        requests = [
            make_request(i, rng.randrange(1, 30), adapter=rng.choice(["", *"aaabbcdefg"]))
            for i in range(60)
        ]
        for _ in range(4000):
            if requests and rng.random() < 0.3:
                core.add_request(requests.pop())
            if rng.random() < 0.2:
                rng.choice((disk, device)).release()
            if rng.random() < 0.02:
                core.abort([rng.randrange(60)])
            if core.has_work():
                collect(core.step(), outputs)  # type: ignore[arg-type]
            core.check_integrity()
            if not requests and not core.scheduler.requests:
                break
        assert not core.scheduler.requests, f"seed {seed}: somebody starves"
        assert len(outputs) == 60
        disk.release(), device.release()
        core.scheduler.take_loaded()
        assert store.host_bytes <= 4


def steps_of(core: EngineCore, runner: object, names: list[str]) -> int:
    requests = [make_request(i, 4, adapter=name, max_tokens=8) for i, name in enumerate(names)]
    outputs = run(core, requests)
    assert all(output.finish in ("length", "stop") for output in outputs.values())
    return runner.num_steps  # type: ignore[attr-defined]


def test_split_batches_collapse_when_adapters_alternate() -> None:
    """Bug: split batches mix adapters, or mixed batches wait for each other: with one adapter a
    batch, alternating requests run one by one, and with all in one they do not."""
    steps = {}
    for batching in ("mixed", "split"):
        for name, order in (("blocks", "a" * 16 + "b" * 16), ("alternating", "ab" * 16)):
            core, runner = make_core(
                adapters=make_store("ab"), batching=batching, max_num_batched_tokens=256
            )
            steps[batching, name] = steps_of(core, runner, list(order))
    assert steps["mixed", "alternating"] <= steps["mixed", "blocks"] + 2
    assert steps["split", "blocks"] <= 2.5 * steps["mixed", "blocks"]
    assert steps["split", "alternating"] > 10 * steps["mixed", "alternating"]


def test_split_takes_in_order_and_resumes_at_any_end() -> None:
    """Bug: a split batch takes another adapter's request, or lets one overtake: taking stops at
    another adapter, at max_num_seqs and where memory ends, and resumes when a request has ended."""
    core, _ = make_core(adapters=make_store("ab"), batching="split", max_num_seqs=2)
    for number, (name, tokens) in enumerate([("a", 3), ("a", 6), ("a", 3), ("b", 2), ("a", 2)]):
        core.add_request(make_request(number, 4, adapter=name, max_tokens=tokens, ignore_eos=True))
    started: list[int] = []
    together: set[frozenset[str]] = set()
    while core.has_work():
        core.step()
        running = core.scheduler.running
        started += [i for i in running if i not in started]
        together.add(frozenset(r.adapter.info.name for r in running.values() if r.adapter))
        assert len(running) <= 2
        if 2 in running:
            assert 0 not in running, "only when one of the two had ended"
    assert started == [0, 1, 2, 3, 4] and frozenset("ab") not in together
    core, _ = make_core(
        adapters=make_store("ab"), batching="split", admission="reserved", num_blocks=8
    )
    for number in range(3):
        core.add_request(make_request(number, 8, adapter="a", max_tokens=8, ignore_eos=True))
    while not core.scheduler.running:
        core.step()
    assert len(core.scheduler.running) == 2, "a third would not fit at its full length"
    run(core)


def test_a_long_queue_does_not_read_everything() -> None:
    """Bug: requests for more adapters than host memory holds drive out what is next in line."""
    disk = Inline(hold=True)
    store = make_store("abcdefgh", host_bytes=3, disk=disk)
    for name in "abcdefgh":
        store.claim(store.find(name))
    assert store.reads == 4
    disk.release()
    store.poll()
    store.claim(store.find("h"))
    assert store.reads == 4 and store.host_bytes == 3
