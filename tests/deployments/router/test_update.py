"""A replica that leaves and a model that changes, under requests: nobody is blamed, and nothing
goes on with other weights."""

import asyncio
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from deployments.checkpoints.resolve import ModelIdentity
from deployments.replica import deployment
from engine.errors import EngineDead, Overloaded
from tests.deployments.router.fleet import PROMPT, Fleet, read, text, until

WHOLE = {0: text(len(PROMPT), 1000)}


def run(work):
    return asyncio.run(work)


def told(fleet: Fleet, name: str, **more: str) -> dict:
    """Return the metadata that a replica publishes. more: changed fields."""
    return {**fleet.published(name)[name], **more}


def test_who_is_handed_over_is_not_to_blame():
    """Requests that were at two replicas which left in turn, before their first token, are taken
    for the killers of both, and fail."""

    async def case():
        async with Fleet(3) as fleet:
            for engine in fleet.engines.values():
                engine.pace = 0.5  # nothing has come when they leave
            all_inflight = [fleet.generate(max_tokens=3) for _ in range(12)]
            for name in ("r0", "r1"):
                await asyncio.sleep(0.05)
                await fleet.replica_servers[name].drain(0.0)
            choices = [inflight.choices[0] for inflight in all_inflight]
            assert {choice.place for choice in choices} == {"r2"}
            suspicions = [choice.suspicion for choice in choices]
            assert {
                (suspicion.losses, suspicion.doubts, suspicion.start) for suspicion in suspicions
            } == {(0, 0, "")}
            assert max(inflight.migrations for inflight in all_inflight) >= 1
            assert (
                await asyncio.gather(*map(read, all_inflight)) == [{0: text(len(PROMPT), 3)}] * 12
            )

    run(case())


def test_what_is_handed_over_is_not_computed_twice():
    """After a node's notice the engine goes on with requests that others have taken over, beside
    its replacement on the same cores."""

    async def case():
        async with Fleet(2) as fleet:
            inflight = fleet.generate(max_tokens=4000)
            await until(lambda: len(inflight.choices[0].emitted) > 5)
            first = inflight.choices[0].place
            fleet.replica_servers[first].hand_over()
            await until(lambda: inflight.choices[0].place not in ("", first))
            await until(lambda: not fleet.engines[first].core.has_work())
            inflight.abort()

    run(case())


def test_what_comes_after_the_farewell_is_given_back():
    """A request that was on its way when the replica handed over waits for the connection to
    break, and is blamed for it."""

    async def case():
        async with Fleet(2) as fleet:
            client = fleet.dispatcher.replicas["r0"]
            fleet.replica_servers["r0"].hand_over()
            client.state.stats.draining = False  # the news has not come yet
            client.state.opened(1, 0.0)
            all_inflight = [fleet.generate() for _ in range(8)]
            read_all = asyncio.gather(*map(read, all_inflight))
            assert await read_all == [{0: text(len(PROMPT), 50)}] * 8
            assert not fleet.engines["r0"].requests
            assert {inflight.choices[0].suspicion.losses for inflight in all_inflight} == {0}

    run(case())


def test_what_has_begun_goes_on_with_the_same_weights_only():
    """An update of the model: the second half of an answer by another model than the first."""

    async def case():
        async with Fleet(2) as fleet:
            await fleet.add_replica("r2")
            old, new = {"weights": "a"}, {"weights": "b"}
            every = {"r0": told(fleet, "r0", **old), "r1": told(fleet, "r1", **new)}
            fleet.dispatcher.set_replicas({"r0": every["r0"]})
            await until(lambda: len(fleet.dispatcher.state().replicas) == 1)
            begun = fleet.generate(max_tokens=1000)
            await until(lambda: len(begun.choices[0].emitted) > 3)
            fleet.dispatcher.set_replicas(every)
            await until(lambda: len(fleet.dispatcher.state().replicas) == 2)
            fleet.engines["r0"].die()
            fresh = fleet.generate(max_tokens=5)
            assert await read(fresh) == {0: text(len(PROMPT), 5)}  # whoever is there
            await asyncio.sleep(0.3)
            assert not any(len(request.token_ids) > 20 for request in fleet.engines["r1"].requests)
            fleet.dispatcher.set_replicas({**every, "r2": told(fleet, "r2", **old)})
            assert await read(begun) == WHOLE

    run(case())


def test_replicas_with_another_tokenizer_are_left_to_their_routers():
    """Token ids that mean something else to the model that gets them."""

    async def case():
        async with Fleet(0) as fleet:
            dispatcher = fleet.dispatcher
            dispatcher.replicas.vocabulary = "mine"
            await fleet.add_replica("r0")
            dispatcher.set_replicas({"r0": told(fleet, "r0", tokenizer="other")})
            waiting = fleet.generate()
            await asyncio.sleep(0.2)
            assert not dispatcher.state().replicas
            dispatcher.set_replicas({"r0": told(fleet, "r0", tokenizer="mine")})
            assert await read(waiting) == {0: text(len(PROMPT), 50)}

    run(case())


def test_new_replicas_of_unknown_speed_keep_the_queue():
    """The CPU replica leaves and GPU replicas, which have not shown their speed yet, take its
    place: what waits is more than their rows, so everything new is refused."""

    async def case():
        async with Fleet(1, rows=2) as fleet:
            queue = fleet.dispatcher.queue
            all_inflight = [fleet.generate(max_tokens=1000) for _ in range(4)]
            await until(lambda: queue.seconds() >= 0 and queue._rate < float("inf"))
            await fleet.add_replica("r1")
            fleet.dispatcher.set_replicas({"r1": told(fleet, "r1")})
            await until(lambda: "r1" in fleet.dispatcher.state().replicas)
            try:
                all_inflight += [fleet.generate(max_tokens=1000) for _ in range(4)]
            except Overloaded as refusal:
                pytest.fail(f"refused: {refusal}")
            for inflight in all_inflight:
                inflight.abort()

    run(case())


def test_an_identity_is_of_what_is_in_the_files(tmp_path: Path):
    """Weights told apart by their times, so that the same model on two machines is two; or by their
    names, so that another training under the same name is the same."""

    def folder(name: str, weights: bytes, tokenizer: bytes = b"{}") -> ModelIdentity:
        folder = tmp_path / name
        folder.mkdir()
        (folder / "config.json").write_bytes(b"{}")
        (folder / "tokenizer.json").write_bytes(tokenizer)
        (folder / "model.safetensors").write_bytes(weights)
        return ModelIdentity.of(folder)

    a, again = folder("a", b"1" * 100), folder("again", b"1" * 100)
    assert a == again and a.weights and a.tokenizer
    tuned = folder("tuned", b"1" * 99 + b"2")
    assert tuned.weights != a.weights and tuned.tokenizer == a.tokenizer
    assert folder("other", b"1" * 100, b"[]").tokenizer != a.tokenizer
    assert ModelIdentity.of("fake:first=40") == ModelIdentity("fake:first=40")


def test_a_notice_with_a_deadline_hands_over_before_it(monkeypatch: pytest.MonkeyPatch):
    """A drain of 60 s on a machine that is taken away in 30: the streams break with it."""
    calls: list[tuple[str, float]] = []
    began = time.time()

    class Told:
        def refuse_new(self) -> None:
            calls.append(("refuse", time.time() - began))

        def hand_over(self) -> None:
            calls.append(("hand over", time.time() - began))

    deadlines = iter([{}, {"other": 1}, {"here": int(began * 1000) + 600}])
    monkeypatch.setattr(deployment, "_draining_nodes", lambda: next(deadlines))
    monkeypatch.setattr(deployment, "_NOTICE_SECONDS", 0.05)
    monkeypatch.setattr(deployment, "_BEFORE_DEADLINE", 0.2)
    monkeypatch.setattr(deployment, "node_id", lambda: "here")
    run(deployment.EngineReplica._await_notice(SimpleNamespace(_server=Told(), _others=None)))
    assert [what for what, _ in calls] == ["refuse", "hand over"]
    assert calls[0][1] < 0.35 < calls[1][1] < 0.6


@pytest.mark.parametrize(("seconds", "patience"), [(30, 28), (None, 60)])
def test_a_notice_of_another_node_of_the_replica(
    monkeypatch: pytest.MonkeyPatch, seconds: float | None, patience: float
):
    """Bugs: a replica of two nodes streams until the other one is taken away; or refuses requests
    for ever, because Serve replaces what is on a draining node, which its actor is not."""
    drained: list[float] = []

    class Told:
        def refuse_new(self) -> None: ...
        def check_health(self) -> None: ...

        async def drain(self, seconds: float) -> None:
            await deployment.EngineReplica.check_health(replica)
            drained.append(seconds)

    deadline = 0 if seconds is None else int((time.time() + seconds) * 1000)
    monkeypatch.setattr(deployment, "_draining_nodes", lambda: {"other": deadline, "third": 1})
    monkeypatch.setattr(deployment, "node_id", lambda: "here")
    others = SimpleNamespace(node_ids=("other",))
    replica = SimpleNamespace(_server=Told(), _others=others, _drain_seconds=60.0, _drained=False)
    run(deployment.EngineReplica._await_notice(replica))
    assert drained == [pytest.approx(patience, abs=1)]
    with pytest.raises(EngineDead, match="another node of this replica is to be drained"):
        run(deployment.EngineReplica.check_health(replica))
