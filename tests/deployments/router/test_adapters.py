"""Adapters of a fleet: names, revisions, changes while requests run, several routers. The engines
count instead of thinking, and what they say tells which revision of which adapter they had."""

import asyncio
import contextlib
import itertools
import os
import random
import shutil
from collections import Counter
from typing import Any
from zlib import crc32

import pytest

from deployments import cluster_store as shared
from deployments.adapters.paths import allowed_path, scan, without_paths
from deployments.adapters.record_store import LocalRecordStore, RayRecordStore, mark_of_all
from deployments.adapters.registry import AdapterSettings
from deployments.backend import GenerationRequest
from deployments.router.dispatcher import Dispatcher
from deployments.router.inflight import InflightRequest
from engine.errors import AdapterError, MantaError
from engine.sampling_params import SamplingParams
from tests.deployments.fake_adapters import make_folder, run, settings
from tests.deployments.router.fleet import FIRST, PROMPT, VOCAB, Fleet, read, until


def text(key: str, begin: int = len(PROMPT), count: int = 20) -> list[int]:
    """Return the fake engine's tokens with this revision of an adapter."""
    shift = crc32(key.encode())
    return [
        FIRST + (position + shift) % (VOCAB - FIRST) for position in range(begin, begin + count)
    ]


async def ask(router: Dispatcher, name: str, tokens: int = 20, n: int = 1) -> InflightRequest:
    """Send a request for an adapter to a router, as the API does."""
    record = await router.adapters.pin(name)
    params = SamplingParams(max_tokens=tokens, n=n)
    return router.generate(
        GenerationRequest(
            "q",
            name,
            list(PROMPT),
            params,
            seed=7,
            adapter=record,
        )
    )


@contextlib.asynccontextmanager
async def second_router(fleet: Fleet):
    """Yield another router of the fleet, which reads the shared record store only when it must."""
    router = fleet.new_router()
    router.set_replicas(fleet.published())
    await until(lambda: len(router.state().replicas) == len(fleet.replica_servers))
    try:
        yield router
    finally:
        router.close()


def test_the_first_request_pins_the_revision(tmp_path):
    """An adapter of the configuration that is read at the start by everybody, or whose revision
    depends on who asks."""

    async def case():
        path = str(make_folder(tmp_path / "a"))
        adapter_settings = settings(tmp_path, paths={"a": path})
        async with Fleet(2, loras=2, adapters=adapter_settings) as fleet:
            assert not any(engine.adapter_calls for engine in fleet.engines.values())
            router = fleet.dispatcher
            all_inflight = await asyncio.gather(*(ask(router, "a", n=2) for _ in range(6)))
            record = router.adapters.records["a"]
            assert len(record.revision) == 32 and record.rank == 8 and record.source == "config"
            for inflight in all_inflight:
                assert await read(inflight) == {0: text(record.key), 1: text(record.key)}
            card = router.models()["a"]
            assert (card.parent, card.root) == ("m", record.key)
            async with second_router(fleet) as other:
                assert await other.adapters.pin("a") == record
                assert await read(await ask(other, "a")) == {0: text(record.key)}
            with pytest.raises(AdapterError):
                await router.adapters.pin("b")

    run(case())


def test_replaced_while_requests_run(tmp_path):
    """Running requests that go on with the new weights; or new ones, through a router that has
    not heard, with the old."""

    async def case():
        folder = make_folder(tmp_path / "a")
        async with Fleet(2, loras=2, adapters=settings(tmp_path)) as fleet:
            router = fleet.dispatcher
            old = await router.adapters.add("a", str(folder))
            async with second_router(fleet) as other:
                await other.adapters.refresh()
                running = [await ask(case, "a", 300) for case in (router, other) for _ in range(4)]
                await until(lambda: all(inflight.begun for inflight in running))
                make_folder(folder, r=16)
                stale = (await other.adapters.pin("a")).key
                new = await router.adapters.add("a", str(folder))
                assert new.revision != old.revision == stale.partition("@")[2] and new.rank == 16
                assert other.adapters.records["a"] == old
                after = [await ask(case, "a") for case in (router, other) for _ in range(4)]
                for inflight in after:
                    assert await read(inflight) == {0: text(new.key)}
                for inflight in running:
                    assert await read(inflight) == {0: text(old.key, count=300)}
                assert other.adapters.records["a"] == new
                assert await router.adapters.add("a") == new, "nothing has changed"

    run(case())


def test_removed_while_requests_run(tmp_path):
    """A removed adapter that another router still serves, or whose running requests break."""

    async def case():
        adapter_settings = settings(tmp_path, paths={"b": str(make_folder(tmp_path / "b"))})
        async with Fleet(2, loras=2, adapters=adapter_settings) as fleet:
            router = fleet.dispatcher
            record = await router.adapters.add("a", str(make_folder(tmp_path / "a")))
            async with second_router(fleet) as other:
                await other.adapters.refresh()
                running = await ask(other, "a", 300)
                await until(lambda: running.begun)
                await router.adapters.remove("a")
                late = await ask(other, "a")
                with pytest.raises(MantaError) as caught:
                    await read(late)
                assert caught.value.code == "adapter_not_found"
                assert await read(running) == {0: text(record.key, count=300)}
                assert "a" not in other.models()
                removed = [
                    engine.adapter_calls.count(("remove", "a")) for engine in fleet.engines.values()
                ]
                assert sum(removed) == 1, "whoever had it has forgotten it"
                again = await router.adapters.add("a", record.path)
                assert await read(await ask(other, "a")) == {0: text(again.key)}
                await read(await ask(router, "b"))
                await router.adapters.remove("b")
                await other.adapters.refresh()
                assert "b" not in router.models() and "b" not in other.models()
                await router.adapters.add("b", str(tmp_path / "b"))
                assert router.adapters.records["b"].source == "config"

    run(case())


def test_replicas_that_come_later_and_deaths(tmp_path):
    """An adapter added by hand that a new replica does not know; a moved request that goes on with
    other weights."""

    async def case():
        folder = make_folder(tmp_path / "a")
        async with Fleet(1, loras=2, adapters=settings(tmp_path)) as fleet:
            router = fleet.dispatcher
            old = await router.adapters.add("a", str(folder))
            moved = await ask(router, "a", 400)
            await until(lambda: moved.begun)
            await fleet.add_replica("r1")
            fleet.publish()
            await until(lambda: len(router.state().replicas) == 2)
            fleet.engines["r0"].die()
            assert await read(moved) == {0: text(old.key, count=400)}
            assert moved.migrations == 1 and fleet.engines["r1"].adapter_calls
            broken = await ask(router, "a", 2000)
            await until(lambda: broken.begun)
            make_folder(folder, r=16)
            await router.adapters.add("a")
            await fleet.add_replica("r2")
            fleet.publish()
            await until(lambda: len(router.state().replicas) == 2)
            fleet.engines["r1"].die()
            tokens = []
            with pytest.raises(AssertionError, match="adapter_changed"):
                while items := await broken.next():
                    for _, delta in items:
                        assert not delta.error, delta.error
                        tokens += delta.token_ids
            assert tokens == text(old.key, count=len(tokens)), "no token of other weights"
            assert await read(await ask(router, "a")) == {0: text(router.adapters.records["a"].key)}

    run(case())


def test_many_changes_under_load(tmp_path):
    """500 requests over 40 adapters through two routers, while adapters are added, replaced and
    removed and replicas die and come: the text of a revision that was meant at some time of the
    request, or an error that says why not; and nothing is left."""
    late = 0.3  # seconds that a replica which has just come may not have heard of a change

    async def case():
        dice = random.Random(3)
        names = [f"a{number}" for number in range(40)]
        meant = {name: [(0.0, {"adapter_not_found"})] for name in names}  # since when: what
        ranks = itertools.cycle((4, 8, 16, 32))
        loop = asyncio.get_running_loop()
        async with Fleet(3, loras=4, adapters=settings(tmp_path)) as fleet:
            router = fleet.dispatcher

            def allowed(name: str, begin: float, end: float) -> set[str]:
                states = meant[name]
                first = max(i for i, (since, _) in enumerate(states) if since <= begin)
                return set().union(*(what for since, what in states[first:] if since <= end))

            async def change(name: str) -> None:
                # In place, or in a folder of its own for each revision.
                place = name if dice.random() < 0.5 else f"{name}-{dice.randrange(10**6)}"
                before = meant[name][-1][1]
                removes = "adapter_not_found" not in before and dice.random() < 0.1
                if removes:
                    meant[name].append((loop.time(), before | {"adapter_not_found"}))
                    await router.adapters.remove(name)
                    meant[name].append((loop.time(), {"adapter_not_found"}))
                    return
                anything = before | {"adapter_changed", "adapter_invalid"}  # half written
                meant[name].append((loop.time(), anything))
                folder = make_folder(tmp_path / place, r=next(ranks))
                record = await router.adapters.add(name, str(folder))
                anything.add(record.key)
                meant[name].append((loop.time(), {record.key}))

            checks: list[tuple[str, str, float, float]] = []

            async def random_request(other: Dispatcher) -> None:
                name = names[min(int(dice.paretovariate(0.7)) - 1, 10**6) % len(names)]
                begin = loop.time()
                try:
                    inflight = await ask(dice.choice((router, other)), name, 12)
                    tokens: list[int] = []
                    outcome = ""
                    while items := await inflight.next():
                        for _, delta in items:
                            tokens += delta.token_ids
                            outcome = delta.error.partition(":")[0]
                    outcome = outcome or inflight.request.adapter_key
                    assert tokens == text(inflight.request.adapter_key, count=len(tokens))
                    assert "@" not in outcome or len(tokens) == 12
                except MantaError as error:
                    outcome = error.code
                checks.append((name, outcome, begin, loop.time()))

            async def changes() -> None:
                for number in range(120):
                    await change(dice.choice(names[:12]))
                    if number % 30 == 15:
                        victim = next(iter(fleet.dispatcher.replicas))
                        fleet.engines[victim].die()
                        await fleet.add_replica(f"later{number}")
                        del fleet.replica_servers[victim]
                        for case in (router, other):
                            case.set_replicas(fleet.published())

            async def look(router: Dispatcher) -> None:
                """Refresh a router's adapters all the time, as ModelLoader does."""
                while True:
                    await asyncio.sleep(0.02)
                    await router.adapters.refresh()

            async with second_router(fleet) as other:
                await other.adapters.start()
                looks = asyncio.create_task(look(other))
                for name in names[:30]:
                    await change(name)
                work = asyncio.create_task(changes())
                places = asyncio.Semaphore(12)

                async def in_turn() -> None:
                    async with places:
                        await random_request(other)

                await asyncio.gather(*(in_turn() for _ in range(500)))
                await work
                looks.cancel()
                for name, outcome, begin, end in checks:  # now what an add brought is known
                    assert outcome in allowed(name, begin - late, end), (name, outcome)
                good = [outcome for _, outcome, *_ in checks if "@" in outcome]
                assert len(good) > 250 and len(set(good)) > 30, Counter(good)
                for dispatcher in (router, other):
                    assert dispatcher.held() == {"requests": 0, "waiting": 0, "choices": 0}
                    assert (
                        not dispatcher.replicas.calls._waiting
                        and not dispatcher._events._stale._ended
                    )
                assert not any(
                    replica_server.in_flight for replica_server in fleet.replica_servers.values()
                )
                assert not any(
                    replica_server._adapters._jobs
                    for replica_server in fleet.replica_servers.values()
                )

    run(case())


def test_broken_and_corrupted(tmp_path):
    """E 27-30: a broken adapter that is tried for each request, hurts others or shows paths."""

    async def case():
        paths = {
            "gone": str(tmp_path / "gone"),
            "dora": str(make_folder(tmp_path / "dora", use_dora=True)),
            "good": str(make_folder(tmp_path / "good")),
        }
        async with Fleet(1, loras=2, adapters=settings(tmp_path, paths=paths)) as fleet:
            router = fleet.dispatcher
            for name, code in (("gone", "adapter_not_found"), ("dora", "adapter_invalid")):
                for _ in range(5):
                    with pytest.raises(AdapterError) as caught:
                        await router.adapters.pin(name)
                    assert caught.value.code == code
                    assert "/" not in caught.value.message.removeprefix(f"{name}/")
                assert fleet.engines["r0"].adapter_calls.count(("add", name)) == 1
            good = await router.adapters.pin("good")
            make_folder(tmp_path / "dora")
            assert (await router.adapters.add("dora")).rank == 8, "known to be repaired at once"
            # Changed without a word: those who need it read again are told.
            make_folder(tmp_path / "good", r=32)
            await fleet.add_replica("r1")
            fleet.publish("r1")
            await until(lambda: list(router.state().replicas) == ["r1"])
            inflight = await ask(router, "good")
            ((_, delta),) = await inflight.next()
            assert delta.error.startswith("adapter_changed: ") and "/" not in delta.error
            assert router.adapters.records["good"] == good
            await router.adapters.add("good")
            assert await read(await ask(router, "good")) == {
                0: text(router.adapters.records["good"].key)
            }
            await asyncio.sleep(0)
            assert router.held() == {"requests": 0, "waiting": 0, "choices": 0}

    run(case())


def test_an_abort_while_its_adapter_is_on_the_way(tmp_path):
    """A request that its client has left, and that starts when its adapter has come."""

    async def case():
        async with Fleet(1, loras=1, adapters=settings(tmp_path)) as fleet:
            router = fleet.dispatcher
            record = await router.adapters.add("a", str(make_folder(tmp_path / "a")))
            await fleet.add_replica("r1")
            fleet.publish("r1")
            await until(lambda: list(router.state().replicas) == ["r1"])
            engine, replica_server = fleet.engines["r1"], fleet.replica_servers["r1"]
            add, gate = engine.add_adapter, asyncio.Event()

            async def slowly(*args, **more):
                await gate.wait()
                return await add(*args, **more)

            engine.add_adapter = slowly
            left, stays = await ask(router, "a"), await ask(router, "a")
            await until(lambda: replica_server.in_flight == 2)
            left.abort()
            await until(lambda: replica_server.in_flight == 1)
            gate.set()
            assert await read(stays) == {0: text(record.key)}
            assert len(engine.requests) == 1 and replica_server.in_flight == 0

    run(case())


def test_the_watched_folder(tmp_path, monkeypatch):
    """A folder that is served before it is whole, whose replacement needs a restart, or a link that
    leads out of it."""
    monkeypatch.setattr("deployments.adapters.registry.POLL_SECONDS", 0.02)

    async def case():
        watch = tmp_path / "watch"
        make_folder(watch / "a")
        make_folder(watch / ".b")
        make_folder(tmp_path / "outside")
        (watch / "link").symlink_to(tmp_path / "outside")
        (watch / "empty").mkdir()
        adapter_settings = AdapterSettings("m", watch=str(watch))
        async with Fleet(1, loras=2, adapters=adapter_settings) as fleet:
            router = fleet.dispatcher
            await router.adapters.start()
            assert list(router.adapters.records) == ["a"]
            first = await router.adapters.pin("a")
            assert await read(await ask(router, "a")) == {0: text(first.key)}
            make_folder(watch / "a", r=32)
            await until(lambda: not router.adapters.records["a"].revision)
            second = await router.adapters.pin("a")
            assert second.rank == 32 and second.version > first.version
            assert await read(await ask(router, "a")) == {0: text(second.key)}
            os.rename(watch / ".b", watch / "b")
            await until(lambda: "b" in router.models())
            await read(await ask(router, "b"))
            shutil.rmtree(watch / "a")
            await until(lambda: "a" not in router.models())
            calls = fleet.engines["r0"].adapter_calls
            await until(lambda: ("remove", "a") in calls)
            added = await router.adapters.add("c", str(make_folder(watch / "c")))
            assert added.path == str(watch / "c"), "the watched folder is an allowed root"

    run(case())


TRAVERSALS = [
    "", "..", "../x", "a/../../x", "/etc/passwd", "/proc/self/root/etc", "//host/share", "a//b",
    "a/./b", ".", "...", "~/x", "~root", "\\\\host\\share", "C:\\x", "..\\x", "%2e%2e/x", "a%00b",
    "a\0b", "a\nb", "a\tb", "$HOME/x", "`id`", "a;b", "a|b", "file:///etc/passwd", "local:///x",
    "http://169.254.169.254/x", "s3://other/x", "s3://bucket/models/../x", "s3://bucket/modelsx/y",
    "s3://bucket/models", "memory://x", "simplecache::s3://bucket/models/x", "s3://user:pw@host/x",
    "s3://bucket/models/x?y=1", "s3://bucket/models/x#y", "/" + "a/" * 600, "link/x", "rootx/x",
    "\u202ex", "a/\u2024\u2024/b",
]  # fmt: skip


def test_only_what_is_inside_the_roots_can_be_added(tmp_path, monkeypatch):
    """A path that leads out of the allowed folders, by whatever spelling."""
    root = tmp_path / "root"
    make_folder(root / "good")
    make_folder(tmp_path / "rootx" / "x")
    (root / "link").symlink_to(tmp_path / "rootx")
    roots = [str(root), "s3://bucket/models"]
    assert allowed_path("good", roots) == allowed_path(f"{root}/good/", roots) == str(root / "good")
    assert allowed_path("s3://bucket/models/x/y", roots) == "s3://bucket/models/x/y"
    monkeypatch.setattr("builtins.open", None)
    for case in [*TRAVERSALS, str(root), str(root.parent), f"{root}/link/x", f"{root}x/x"]:
        with pytest.raises(AdapterError) as caught:
            allowed_path(case, roots)
        assert caught.value.code in (
            "invalid_adapter_path",
            "adapter_path_not_allowed",
            "adapter_not_found",
        ), case
    with pytest.raises(AdapterError) as caught:
        allowed_path(str(root / "good"), [])
    assert caught.value.code == "adapter_path_not_allowed"
    assert list(scan(str(root))) == ["good"]


def test_messages_without_paths():
    """An error that tells a client the folders of the machine."""
    for message in (
        "/srv/a b/x: rank 300 is over max_lora_rank 64",
        "/srv/a b/x/adapter_model.safetensors: holds no tensor",
        "/var/cache/manta-adapter-abc/adapter_config.json: r: 0 is not a positive number",
        "s3://bucket/y: adapter_config.json is missing",
    ):
        text = without_paths(message, "/srv/a b/x", "legal")
        assert text.startswith("legal") and "/" not in text.removeprefix("legal/")
    text = without_paths("/srv/a b/x/adapter_model.safetensors: truncated", "/srv/a b/x", "legal")
    assert text == "legal/adapter_model.safetensors: truncated"


def test_the_book_is_shared(monkeypatch):
    """Two routers that see other adapters; a record that is lost when two are written at once."""
    from ray.experimental import internal_kv

    store: dict[str, bytes] = {}

    def put(key, value, overwrite=True):
        existed = key in store
        if overwrite or not existed:
            store[key] = value
        return existed

    def keys(prefix):
        return [key.encode() for key in store if key.startswith(prefix)]

    def get(key):
        return store.get(key if isinstance(key, str) else key.decode())

    for name, fake in (("put", put), ("get", get), ("list", keys), ("del", store.pop)):
        monkeypatch.setattr(internal_kv, f"_internal_kv_{name}", fake)
    from deployments.adapters.record_store import AdapterRecord

    for record_store, other in (
        (RayRecordStore("x"), RayRecordStore("x")),
        (local := LocalRecordStore(), local),
    ):
        mark, records = other.changed(b"")
        assert records == {} and other.changed(mark) is None
        record = AdapterRecord(name="a", path="/a", version=3)
        assert record_store.put(record, fresh=True)
        assert not record_store.put(AdapterRecord(name="a", path="/b"), fresh=True)
        mark, records = other.changed(mark)
        assert records == {"a": record}
        record_store.delete("a")
        assert other.changed(mark)[1] == {}
    before, of_model = mark_of_all("x"), RayRecordStore("x.m", "x")
    of_model.put(record)
    assert before != (added := mark_of_all("x")), "routers look when any model's have changed"
    of_model.delete("a")
    assert mark_of_all("x") != added
    assert RayRecordStore("y").changed(b"") == (b"none", {})


def test_a_model_was_created_when_it_is_said_at_any_router(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each router took the time of its own start: /v1/models gave two answers in turn."""
    store: dict[str, bytes] = {}

    def of_store(what: str, key: str, value: bytes = b"", overwrite: bool = True) -> Any:
        if what == "put" and (overwrite or key not in store):
            store[key] = value
        return store.get(key)

    monkeypatch.setattr(shared, "store", of_store)
    assert [shared.first_served("app", "tiny", now) for now in (100, 107, 99)] == [100] * 3
    assert shared.first_served("app", "larger", 200) == 200


def test_routers_of_an_application_have_one_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: each router signs ids with its own secret, and one that takes over knows none."""
    by_name: dict[str, bytes] = {}

    def of_store(what: str, key: str, value: bytes = b"", overwrite: bool = True) -> Any:
        if what == "put" and (overwrite or key not in by_name):
            by_name[key] = value
        return by_name.get(key)

    monkeypatch.setattr(shared, "store", of_store)
    assert shared.event_secret("app") == shared.event_secret("app")
    assert len(shared.event_secret("app")) == 32
    assert shared.event_secret("app") != shared.event_secret("other")
