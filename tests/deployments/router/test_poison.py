"""A request that its engines die of is given up at the second death, and nobody else is."""

import asyncio
import time

import pytest

from deployments.replica.adapters import SubmittedRequest
from deployments.replica.server import ReplicaServer
from deployments.replica.suspect_queue import SuspectQueue
from deployments.replica.watchdog import StallLimits
from deployments.router.dispatcher import Dispatcher
from deployments.router.inflight import InflightRequest
from deployments.router.models.model_settings import DispatchLimits
from deployments.router.poison import LONG_PROBATION, PROBATION, PROOF, Suspicion
from deployments.transport.channel import Submit
from engine.config.engine_config import EngineConfig
from engine.errors import MantaError, RequestFailed
from engine.messages import EngineRequest, Failed
from engine.sampling_params import SamplingParams
from tests.deployments.router.fleet import FAST, PROMPT, VOCAB, Fleet, read, text, until

LIMITS = DispatchLimits(wait_seconds=10, channel=FAST)
POISON = [*PROMPT[1:], 999]
LETHAL = f"vocab_size={VOCAB},lethal=999"
TOKENS = 400
WHOLE = text(len(PROMPT), TOKENS)


def run(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, 60))


def deaths(fleet: Fleet) -> int:
    return sum(not engine.alive for engine in fleet.engines.values())


async def given_up(inflight: InflightRequest) -> None:
    with pytest.raises(RequestFailed):
        await read(inflight)


async def whole(all_inflight: list[InflightRequest]) -> None:
    for inflight, said in zip(
        all_inflight, await asyncio.gather(*map(read, all_inflight)), strict=True
    ):
        assert said == dict.fromkeys(range(len(inflight.choices)), WHOLE)


def nothing_left(fleet: Fleet) -> bool:
    suspect_queues = [replica_server._suspects for replica_server in fleet.replica_servers.values()]
    return not any(
        (
            *fleet.dispatcher.held().values(),
            *fleet.load().values(),
            *(
                suspect_queue.suspect or suspect_queue._suspects or suspect_queue._passed
                for suspect_queue in suspect_queues
            ),
        )
    )


# -- what a death says of a choice

OWN = Failed("engine_dead", "")


def test_who_is_on_trial_at_a_death_is_to_blame_and_nobody_else():
    """A bystander that is blamed although the culprit is known, or was not in the engine at all; or
    that stays suspected, until it has been at too many deaths."""
    suspect, waiting, passed, bystander, new = (Suspicion() for _ in range(5))
    for suspicion in (suspect, waiting, passed):
        assert not suspicion.lost("r0", 1, PROOF - 1, OWN, 1)
        assert (suspicion.start, suspicion.tokens, suspicion.deaths) == ("alone", PROBATION, ["r0"])
    passed.passes()
    assert passed.start == "after"
    failure = Failed("engine_dead", "", suspects=[1], deaths=["r0"])
    assert suspect.lost("r1", 1, 0, failure, 1)
    assert not waiting.lost("r1", 2, 0, failure, 1) and waiting.start == "alone"
    assert not passed.lost("r1", 3, 0, failure, 1) and passed.start == "after"
    assert not bystander.lost("r1", 4, 5, failure, 1) and not bystander.start
    assert (
        not new.lost("r1", 5, 0, failure, 1) and new.start == "alone"
    )  # it may as well be this one
    for suspicion in (waiting, passed, new):
        suspicion.acquit(["r0"])
    assert (waiting.deaths, passed.deaths, new.deaths) == ([], [], ["r1"])
    assert waiting.lost("r2", 2, 0, Failed("engine_dead", "", suspects=[2]), 1)  # there were two


def test_a_death_of_which_no_trial_tells():
    """A poison that is slower than the trials, which kills engines for ever."""
    slow = Suspicion()
    assert not slow.lost("r0", 1, PROOF, OWN, 1)
    assert (slow.start, slow.tokens) == ("after", 0), "those that had hardly begun are tried first"
    assert not slow.lost("r1", 1, 10, OWN, 1)
    assert (slow.start, slow.tokens) == ("alone", 10 + PROBATION)
    slow.passes()
    assert slow.lost("r2", 1, 100, OWN, 1)
    bystander = Suspicion()
    for replica in ("r0", "r1"):
        assert not bystander.lost(replica, 1, 1000, OWN, 1)
        bystander.passes()
    bystander.acquit(["r0"])
    assert bystander.deaths == ["r1"]
    assert not bystander.lost("r2", 1, 1000, OWN, 1)
    assert bystander.tokens == LONG_PROBATION


@pytest.mark.parametrize("failed", [None, Failed("engine_killed", "")])
def test_deaths_from_outside_are_nobodys_fault_unless_they_go_on(failed):
    """Twenty kills that fail a stream; a request that makes the kernel kill engines for ever."""
    suspicion = Suspicion()
    assert not any(suspicion.lost("r0", 1, PROOF, failed, 1) for _ in range(100))
    assert not suspicion.start
    assert not suspicion.lost("r0", 1, 0, failed, 1)
    assert suspicion.lost("r0", 1, 0, failed, 1)
    suspicion = Suspicion()
    assert [bool(suspicion.lost("r0", 1, 2, failed, 1)) for _ in range(4)] == [False] * 3 + [True]


# -- requests that kill

KINDS = {
    "before any token": ("", 2),
    "at its 50th token": (",lethal_at=49", 3),
    "after 2 tokens each time": (",lethal_after=2", 2),
    "after 12 tokens each time": (",lethal_after=12", 3),
}


@pytest.mark.parametrize("n", [1, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", KINDS)
def test_a_poison_is_given_up_at_its_second_death(kind: str, n: int):
    """One request that takes down replica after replica; or bystanders, also those that were at
    both deaths, that are taken for it."""
    options, allowed = KINDS[kind]

    async def case():
        async with Fleet(5, limits=LIMITS, options=LETHAL + options) as fleet:
            others = [fleet.generate(max_tokens=TOKENS, n=1 + i % 2) for i in range(20)]
            await until(lambda: all(inflight.choices[0].emitted for inflight in others))
            poison = fleet.generate(max_tokens=TOKENS, n=n, prompt=POISON)
            others += [fleet.generate(max_tokens=TOKENS) for _ in range(8)]
            await given_up(poison)
            assert len(poison.replicas) <= allowed + n
            await whole(others)
            assert deaths(fleet) == allowed
            await whole([fleet.generate(max_tokens=TOKENS)])
            await until(lambda: nothing_left(fleet))

    run(case())


def test_who_passed_does_not_kill_while_others_are_tried():
    """A slow poison that passes its trial, goes on, and kills the engine under the next suspect,
    which is blamed."""

    async def case():
        options = LETHAL + ",lethal_after=12"
        async with Fleet(4, limits=LIMITS, options=options) as fleet:
            poison = fleet.generate(max_tokens=TOKENS, prompt=POISON)  # is tried first
            others = [fleet.generate(max_tokens=TOKENS) for _ in range(60)]
            await given_up(poison)
            await whole(others)
            assert deaths(fleet) == 3

    run(case())


@pytest.mark.slow
def test_one_poison_after_the_other_fails_no_bystander():
    """A person who tries again and again: each time streams are at one more death, until they are
    given up for the third."""

    async def case():
        async with Fleet(2, limits=LIMITS, options=LETHAL) as fleet:
            others = [fleet.generate(max_tokens=3000) for _ in range(12)]
            for number in range(4):
                await until(lambda: all(inflight.begun for inflight in others))
                await given_up(fleet.generate(prompt=POISON))
                assert deaths(fleet) == 2 * number + 2
                for name in (f"a{number}", f"b{number}"):
                    await fleet.add_replica(name)
                alive = [name for name, engine in fleet.engines.items() if engine.alive]
                fleet.publish(*alive)
                await until(lambda: len(fleet.dispatcher.state().replicas) == 2)
            assert await asyncio.gather(*map(read, others)) == [{0: text(len(PROMPT), 3000)}] * 12
            assert max(inflight.migrations for inflight in others) > 3

    run(case())


def test_a_suspect_that_comes_to_a_killed_engine_is_not_convicted():
    """An engine that is killed from outside, and the first that finds it gone is told so at once:
    as if it had died by itself, of the suspect that was just handed over and never arrived."""

    async def case():
        async with Fleet(2, limits=LIMITS) as fleet:
            inflight = fleet.generate(max_tokens=TOKENS)
            choice = inflight.choices[0]
            await until(lambda: inflight.begun)
            first, second = choice.place, ({"r0", "r1"} - {choice.place}).pop()
            fleet.engines[second].gone = True
            fleet.engines[first].crash()
            suspects = fleet.replica_servers[second]._suspects
            await until(lambda: suspects.suspect is not None)
            assert not suspects.given
            await asyncio.sleep(0.05)
            assert fleet.replica_servers[second].failed is None, "its client knows better what of"
            await fleet.add_replica("r2")
            fleet.publish("r2", second)
            fleet.engines[second].die()
            assert await read(inflight) == {0: WHOLE}
            assert choice.suspicion.deaths == [first]
            await until(lambda: nothing_left(fleet))

    run(case())


def test_suspects_are_tried_in_the_order_of_the_engine():
    """A suspect that waits in the engine behind all that is more urgent, and every other suspect
    behind it."""

    async def case():
        async with Fleet(1, limits=LIMITS) as fleet:
            replica_server = fleet.replica_servers["r0"]
            tried = []
            suspects = SuspectQueue(
                lambda held: tried.append(held.request.id), asyncio.get_running_loop().call_later
            )
            (router,) = replica_server._routers.values()

            def suspect(id: int, priority: int, begun: bool) -> None:
                prompt = 2 if begun else 3
                request = EngineRequest(id, [5, 6, 7], prompt, SamplingParams(), 0)
                request.priority = priority
                router.live.add(id)
                suspects.submit(SubmittedRequest(router, Submit(request, start="alone")))

            for id, priority, begun in ((1, 0, True), (2, 1, True), (3, 0, False), (4, 0, True)):
                suspect(id, priority, begun)
            for _ in range(3):
                router.live.discard(tried[-1])
                suspects.advance()
            assert tried == [1, 4, 3, 2]
            router.live.discard(tried[-1])

    run(case())


def test_those_that_wait_for_suspects_wait_for_those_on_their_way():
    """A long stream that starts before the suspect of another router comes is company: the
    suspect's engine dies, no request is convicted, and a third engine dies."""

    async def case():
        async with Fleet(1, limits=LIMITS) as fleet:
            (router,) = fleet.replica_servers["r0"]._routers.values()
            started, timers = [], []
            suspects = SuspectQueue(
                lambda held: started.append(held.request.id),
                lambda seconds, call: timers.append(call),
            )

            def submit(id: int, start: str, deaths: list[str]) -> None:
                request = EngineRequest(id, [5, 6, 7], 3, SamplingParams(), 0)
                router.live.add(id)
                message = Submit(request, start=start, deaths=deaths)
                suspects.submit(SubmittedRequest(router, message))

            submit(1, "after", ["dead"])
            submit(2, "", [])
            assert started == [2], "a request that was at no death does not wait"
            submit(3, "alone", ["dead"])
            assert started == [2, 3] and len(timers) == 1
            timers.pop()()
            assert started == [2, 3], "the suspect is on probation"
            router.live.discard(3)
            suspects.advance()
            assert started == [2, 3, 1] and not suspects.accused()
            submit(4, "after", ["dead"])
            assert started[-1] == 4 and not timers, "its suspects have had their time"
            router.live.clear()

    run(case())


def test_several_routers_try_their_suspects_one_after_the_other():
    """An innocent suspect of one router that is at a replica when the other's culprit kills it."""

    async def case():
        async with Fleet(4, limits=LIMITS, options=LETHAL + ",lethal_at=20") as fleet:
            other: Dispatcher = fleet.new_router()
            dispatcher, other_replicas = fleet.dispatcher, fleet.published()
            other.set_replicas(other_replicas)
            await until(lambda: len(other.state().replicas) == 4)
            poison = fleet.generate(max_tokens=TOKENS, prompt=POISON)
            streams = []
            for number in range(60):
                fleet.dispatcher = (dispatcher, other)[number % 2]
                streams.append(fleet.generate(max_tokens=TOKENS))
            fleet.dispatcher = dispatcher
            await given_up(poison)
            await whole(streams)
            assert deaths(fleet) == 3, "each is tried after the second"
            other.close()

    run(case())


def test_suspects_that_wait_can_be_taken_back_or_handed_over():
    """A deadline, a client that leaves, a replica that drains or a router that stops: each while
    suspects wait for their trial, which must not fail, hang or leak."""

    async def case():
        async with Fleet(3, limits=LIMITS) as fleet:
            for engine in fleet.engines.values():
                engine.pace = 0.01
            all_inflight = [fleet.generate(max_tokens=TOKENS, n=2) for _ in range(30)]
            hurried = fleet.generate(max_tokens=TOKENS, deadline=time.monotonic() + 0.6)
            await until(lambda: all(inflight.begun for inflight in [*all_inflight, hurried]))
            fleet.engines[hurried.choices[0].place].crash()
            left = [name for name, engine in fleet.engines.items() if engine.alive]
            suspect_queues = [fleet.replica_servers[name]._suspects for name in left]
            await until(
                lambda: all(
                    suspect_queue.suspect and suspect_queue._suspects
                    for suspect_queue in suspect_queues
                )
            )
            on_trial = {
                suspect_queue.suspect.request.id & 0xFFFF for suspect_queue in suspect_queues
            }
            gone = [e for e in all_inflight if any(c.id in on_trial for c in e.choices)]
            waiting = [e for e in all_inflight if e.choices[0].suspicion.tokens and e not in gone]
            for inflight in [*gone, *waiting[:3]]:
                inflight.abort()
                all_inflight.remove(inflight)
            fleet.replica_servers[left[0]].hand_over()
            with pytest.raises(MantaError) as caught:
                await read(hurried)
            assert caught.value.code == "deadline_exceeded"
            await whole(all_inflight)
            await until(lambda: nothing_left(fleet))

    run(case())


def test_who_is_no_suspect_does_not_wait_for_the_trials():
    """New requests that queue behind those that are tried one by one."""

    async def case():
        async with Fleet(2, limits=LIMITS) as fleet:
            all_inflight = [fleet.generate(max_tokens=TOKENS) for _ in range(60)]
            await until(lambda: all(inflight.begun for inflight in all_inflight))
            fleet.engines["r0"].crash()
            suspects = fleet.replica_servers["r1"]._suspects
            await until(lambda: suspects.suspect is not None)
            new = fleet.generate(max_tokens=5)
            assert await read(new) == {0: WHOLE[:5]}
            assert len(suspects._suspects) > 10
            await whole(all_inflight)

    run(case())


def test_suspects_of_the_last_replica_wait_for_the_next():
    """With nobody left the culprit and its neighbours come to the new replica together, and kill
    it together."""

    async def case():
        async with Fleet(1, limits=LIMITS, options=LETHAL + ",lethal_at=4") as fleet:
            poison = fleet.generate(max_tokens=TOKENS, prompt=POISON)
            others = [fleet.generate(max_tokens=TOKENS) for _ in range(8)]
            for number in (1, 2):
                await until(lambda number=number: deaths(fleet) == number)
                await fleet.add_replica(f"r{number}")
                fleet.publish(f"r{number}")
            await given_up(poison)
            await whole(others)
            assert deaths(fleet) == 2

    run(case())


@pytest.mark.slow
def test_twenty_deaths_from_outside_fail_nothing():
    """Streams that are taken for the cause because they were at several kills."""

    async def case():
        async with Fleet(3, limits=LIMITS) as fleet:
            long = [fleet.generate(max_tokens=3000) for _ in range(4)]
            short: list[InflightRequest] = []
            for number in range(20):
                short += [fleet.generate(max_tokens=TOKENS) for _ in range(4)]
                await asyncio.sleep(0.1)
                victim = next(name for name, engine in fleet.engines.items() if engine.alive)
                if number % 2:
                    fleet.engines[victim].die()
                else:
                    await fleet.replica_servers[victim].stop()
                await fleet.add_replica(f"n{number}")
                fleet.publish(*(name for name, engine in fleet.engines.items() if engine.alive))
            await whole(short)
            assert max(inflight.migrations for inflight in long) > 3
            assert await asyncio.gather(*map(read, long)) == [{0: text(len(PROMPT), 3000)}] * 4

    run(case())


# -- real processes


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["before any token", "at its 50th token"])
def test_real_processes_and_how_long_bystanders_are_held_up(kind: str):
    """A process that exits without a word, which no step failure tells of; and 50 streams that
    wait for ever because each has to be tried alone."""

    async def case():
        async with Fleet(0, limits=LIMITS) as fleet:
            model = f"fake:{LETHAL},step_seconds=0.02{KINDS[kind][0]}"
            for number in range(4):
                replica_server = fleet.replica_servers[f"r{number}"] = ReplicaServer(
                    FAST, StallLimits()
                )
                await replica_server.start(EngineConfig(model=model), "127.0.0.1")
            fleet.publish("r0")
            await until(lambda: fleet.connected() == 1)
            others = [fleet.generate(max_tokens=TOKENS) for _ in range(50)]
            poison = fleet.generate(max_tokens=TOKENS, prompt=POISON)
            fleet.publish()
            gaps = [0.0] * len(others)

            async def watch(number: int, inflight: InflightRequest) -> None:
                last, tokens = 0.0, []
                while items := await inflight.next():
                    now = time.monotonic()
                    gaps[number] = max(gaps[number], now - last if last else 0.0)
                    last = now
                    tokens += [token for _, delta in items for token in delta.token_ids]
                assert tokens == WHOLE

            watching = [asyncio.create_task(watch(i, other)) for i, other in enumerate(others)]
            await until(lambda: len(fleet.dispatcher.state().replicas) == 4)
            await asyncio.sleep(0.5)
            await given_up(poison)
            await asyncio.gather(*watching)
            assert (
                sum(
                    replica_server.failed is not None
                    for replica_server in fleet.replica_servers.values()
                )
                == KINDS[kind][1]
            )
            gaps.sort()
            print(f"{kind}: longest gap {gaps[-1]:.2f} s, median {gaps[len(gaps) // 2]:.2f} s")
            assert gaps[-1] < 8.0

    run(case())
