"""The dispatcher: requests spread, survive the loss of replicas, and always end."""

import asyncio
import random
import time
from dataclasses import fields
from itertools import count

import msgspec
import pytest

from deployments.adapters.record_store import AdapterRecord
from deployments.api.app import build_asgi
from deployments.api.http.errors import from_backend
from deployments.api.options import ApiOptions
from deployments.backend import GenerationRequest
from deployments.observe.metrics import RouterMetrics
from deployments.router.inflight import InflightRequest
from deployments.router.models.model_settings import DispatchLimits
from deployments.router.models.models_backend import ModelsBackend
from deployments.transport.channel import ChannelLimits
from engine.errors import MantaError, Overloaded
from engine.messages import BATCH_PRIORITY, Delta, EngineRequest
from engine.pooling import as_array
from engine.sampling_params import SamplingParams
from tests.deployments.api.asgi import Client
from tests.deployments.fake_backend import tiny_tokenizer
from tests.deployments.router.fleet import FAST, PROMPT, Fleet, read, text, until

WHOLE = {0: text(len(PROMPT), 50)}


class Anybody:
    """A fake assignment and list of requests that do nothing."""

    def __init__(self):
        self.numbers = count(40)

    def take_off(self, _):
        pass

    def ended(self, _):
        pass

    bring_back = take_off


def run(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, 20))


def test_two_replicas_share_the_load_and_every_choice_gets_its_own_tokens():
    """A router that keeps sending to one replica, or mixes up the choices of two requests."""

    async def case():
        async with Fleet(2) as fleet:
            all_inflight = [fleet.generate(n=2) for _ in range(10)]
            await until(lambda: min(fleet.load().values()) >= 8)
            for tokens in await asyncio.gather(*map(read, all_inflight)):
                assert tokens == {0: WHOLE[0], 1: WHOLE[0]}
            assert fleet.load() == {"r0": 0, "r1": 0}
            assert fleet.dispatcher.state().in_flight == 0

    run(case())


def test_a_row_is_not_given_twice_during_a_long_step():
    """What was sent is forgotten while the replica is in a step that takes longer than those before
    it: its beats say the old figures again, and as many as were sent are sent once more."""

    async def case():
        async with Fleet(1, rows=8) as fleet:
            await read(fleet.generate(max_tokens=5))  # steps are known to be quick
            fleet.engines["r0"].pace = 0.8
            all_inflight = [fleet.generate() for _ in range(16)]
            state = fleet.dispatcher.replicas["r0"].state
            for _ in range(7):
                await asyncio.sleep(0.1)
                assert len(state.bookings) == 10 and state.room()[0] <= 0
                assert len(fleet.engines["r0"].requests) == 11, "8 rows, 2 to spare, the first one"
            fleet.engines["r0"].pace = 0.002
            for tokens in await asyncio.gather(*map(read, all_inflight)):
                assert tokens == WHOLE
            assert (len(state.bookings), state.held) == (0, 0)

    run(case())


@pytest.mark.parametrize("how", ["engine dies", "connection breaks", "replica stops"])
def test_a_lost_replica_is_a_pause_not_an_error(how):
    """Lost, repeated or different tokens after a failover; a stream that just ends."""

    async def case():
        async with Fleet(2) as fleet:
            all_inflight = [fleet.generate(n=2) for _ in range(8)]
            await until(lambda: all(inflight.choices[1].emitted for inflight in all_inflight))
            if how == "engine dies":
                fleet.engines["r0"].die()
            elif how == "connection breaks":
                next(iter(fleet.replica_servers["r0"]._routers.values())).close("test")
            else:
                await fleet.replica_servers["r0"].stop()
            for tokens in await asyncio.gather(*map(read, all_inflight)):
                assert tokens == {0: WHOLE[0], 1: WHOLE[0]}
            assert fleet.dispatcher.metrics.migrations.values[()] > 0
            timings = [inflight.timing() for inflight in all_inflight]
            assert (
                sum(t.migrations for t in timings) == fleet.dispatcher.metrics.migrations.values[()]
            )
            assert all(t.replicas[-1] == "r1" for t in timings if t.migrations)
            assert all(0 < t.queue_s < 5 for t in timings)
            resumed = [
                request
                for request in fleet.engines["r1"].requests
                if len(request.token_ids) > request.num_prompt_tokens
            ]
            assert resumed, "nothing was resumed in the middle"
            assert all(r.seed == 7 and r.num_prompt_tokens == len(PROMPT) for r in resumed)

    run(case())


def test_texts_become_vectors_beside_generation_and_after_a_loss():
    """A vector that belongs to another text, is lost with its replica, or is counted as the answer
    of a chat: then autoscaling takes texts for requests that generate."""

    async def case():
        async with Fleet(2) as fleet:
            chats = [fleet.generate() for _ in range(4)]
            pooled = SamplingParams(max_tokens=0, temperature=0, pooled=True)
            fleet.engines["r0"].pace = fleet.engines["r1"].pace = 0.05
            texts = [[7] * (n + 1) for n in range(30)]
            asked = [
                fleet.dispatcher.generate(GenerationRequest("", "m", list(ids), pooled, 0))
                for ids in texts
            ]
            await asyncio.sleep(0.01)
            fleet.engines["r0"].die()
            for ids, inflight in zip(texts, asked, strict=True):
                ((choice, delta),) = await inflight.next()
                assert (choice, delta.finish, delta.token_ids) == (0, "length", [])
                assert as_array(delta.vector).tolist() == [len(ids), sum(ids), 7, 7]
                assert await inflight.next() == []
            assert all(tokens == WHOLE for tokens in await asyncio.gather(*map(read, chats)))
            metrics = fleet.dispatcher.metrics
            assert metrics.migrations.values[()] > 0
            for chat in (metrics.first_token, metrics.prompt_size, metrics.output_size):
                assert sum(chat.counts) == len(chats)
            assert sum(metrics.vector.counts) == len(texts)
            assert metrics.vector_tokens.values[()] == sum(map(len, texts))
            assert fleet.dispatcher.held() == {"requests": 0, "waiting": 0, "choices": 0}

    run(case())


def test_a_seed_that_the_engine_decides_outlives_a_replica():
    """`engine.seed` over HTTP: the request goes on elsewhere with numbers that another replica, or
    another draw, would give."""

    async def case():
        async with Fleet(2, tokenizer=tiny_tokenizer(), seed=7) as fleet:
            client = Client(build_asgi(fleet.dispatcher, ApiOptions()))
            fields = {"model": "m", "prompt": PROMPT, "temperature": 1, "max_tokens": 50}
            asked = [asyncio.create_task(client.completion(**fields)) for _ in range(4)]
            await until(lambda: fleet.engines["r0"].core.stats().step > 5)
            fleet.engines["r0"].die()
            replies = await asyncio.gather(*asked)
            assert {reply.status for reply in replies} == {200}
            requests = [r for engine in fleet.engines.values() for r in engine.requests]
            assert any(len(r.token_ids) > r.num_prompt_tokens for r in requests)
            assert {r.seed for r in requests} == {SamplingParams().seed_for(PROMPT, 7)}

    run(case())


def test_a_request_that_moves_is_the_same_request():
    """A field that is forgotten when a request goes on elsewhere: another adapter, seed, priority,
    salt, grammar or parameter. Fields that come later are in here too."""

    async def case():
        request = GenerationRequest(
            "q",
            "m",
            PROMPT,
            SamplingParams(n=2, max_tokens=9, temperature=0.7, stop=["x"], logprobs=2),
            seed=5,
        )
        shared = {field.name for field in fields(GenerationRequest)} & {
            field.name for field in msgspec.structs.fields(EngineRequest)
        }
        assert shared >= {"token_ids", "params", "seed", "cache_salt", "adapter", "priority"}
        for name in shared - {"token_ids", "params", "adapter"}:
            kind = type(getattr(request, name))
            setattr(request, name, kind([7] if issubclass(kind, list | tuple) else 7))
        request.adapter = AdapterRecord(name="legal", path="/legal", revision="abc")
        inflight = InflightRequest(request, RouterMetrics(), Anybody(), Anybody())
        choice = inflight.choices[1]
        inflight.take_delta(choice, Delta(41, [8, 9]), 1.0)
        assert inflight.trace.accepted_runs == {1: 1}, "the step has accepted a draft"
        moved = choice.as_request()
        assert moved.token_ids == [*PROMPT, 8, 9] and moved.num_prompt_tokens == len(PROMPT)
        assert (moved.id, moved.choice, moved.params) == (41, 1, request.params)
        assert moved.adapter == "legal@abc"
        for name in shared - {"token_ids", "params", "adapter"}:
            assert getattr(moved, name) == getattr(request, name), name

    run(case())


def test_the_only_replica_is_lost_and_comes_back():
    """Requests that fail although a replica returns within the time to wait."""

    async def case():
        async with Fleet(1) as fleet:
            inflight = fleet.generate()
            await until(lambda: len(inflight.choices[0].emitted) > 5)
            await fleet.replica_servers["r0"].stop()
            await until(lambda: not fleet.dispatcher.ready())
            late = fleet.generate()
            await fleet.add_replica("r1")
            fleet.publish("r1")
            assert await read(inflight) == WHOLE
            assert await read(late) == WHOLE

    run(case())


@pytest.mark.parametrize("how", ["lost", "drained", "over"])
def test_a_removed_model_s_requests_end_at_once_and_say_why(how: str):
    """30 s of silence and "no replica became ready" for a stream whose model nobody serves any
    more; or "the service is stopping"."""

    async def case():
        async with Fleet(1) as fleet:
            front = ModelsBackend("router", several=True)
            front.set_dispatcher("a", fleet.dispatcher, 60.0)
            short, long = fleet.generate(), fleet.generate(max_tokens=4000)
            await until(lambda: len(long.choices[0].emitted) > 5)
            front.take_out("a", 0.3 if how == "over" else 60.0)
            assert await read(short) == WHOLE, "it goes on at its replica"
            began = time.monotonic()
            if how == "lost":
                await fleet.replica_servers["r0"].stop()
            elif how == "drained":
                await fleet.replica_servers["r0"].drain(0.1)
                fleet.publish()
            with pytest.raises(MantaError, match="a was removed") as caught:
                await read(long)
            assert caught.value.code == "model_removed"
            assert from_backend(caught.value).status == 404
            assert time.monotonic() - began < 1.5
            front.close()

    run(case())


def test_what_waits_for_a_removed_model_fails_without_a_replica():
    """A request that waited for the first replica of a model that is removed meanwhile."""

    async def case():
        async with Fleet(0) as fleet:
            front = ModelsBackend("router", several=True)
            front.set_dispatcher("a", fleet.dispatcher, 60.0)
            inflight = fleet.generate(n=2)
            front.take_out("a", 60.0)
            with pytest.raises(MantaError) as caught:
                await asyncio.wait_for(inflight.next(), 1)
            assert caught.value.code == "model_removed"
            assert not any(fleet.dispatcher.held().values())
            front.close()

    run(case())


def test_each_wait_for_a_replica_has_its_own_time():
    """The timer of a wait that is over ends the next one as soon as it begins."""

    async def case():
        async with Fleet(1, limits=DispatchLimits(wait_seconds=1.0, channel=FAST)) as fleet:
            inflight = fleet.generate(max_tokens=4000)
            emitted = inflight.choices[0].emitted
            for lost, new in (("r0", "r1"), ("r1", "r2")):
                before = len(emitted)
                await until(lambda before=before: len(emitted) > before + 5)
                await fleet.replica_servers[lost].stop()
                await until(lambda: not fleet.dispatcher.ready())
                await asyncio.sleep(0.7)
                assert fleet.dispatcher.assignment.displaced
                await fleet.add_replica(new)
                fleet.publish(new)
            before = len(emitted)
            await until(lambda: len(emitted) > before)
            assert not fleet.dispatcher.assignment.displaced
            inflight.abort()

    run(case())


def test_without_a_replica_a_request_waits_a_bounded_time():
    """A request that hangs for ever, or fails at once while the first replica is still loading."""

    async def case():
        limits = DispatchLimits(wait_seconds=0.2, waiting=2, channel=FAST)
        async with Fleet(0, limits=limits) as fleet:
            began = time.monotonic()
            all_inflight = [fleet.generate(), fleet.generate(n=2)]
            for inflight in all_inflight:
                with pytest.raises(Overloaded) as caught:
                    await inflight.next()
                assert caught.value.code == "no_replica"
                assert caught.value.retry_after >= 1
            assert 0.15 < time.monotonic() - began < 1.0
            assert fleet.dispatcher.state().in_flight == 0
            inflight = fleet.generate(n=2)
            with pytest.raises(Overloaded):  # two choices wait already
                fleet.generate()
            inflight.abort()
            assert await inflight.next() == []

    run(case())


def test_abort_frees_the_replica_and_ends_the_stream():
    """Leaked requests on the engine, or a next() that waits for ever after abort."""

    async def case():
        async with Fleet(1) as fleet:
            inflight = fleet.generate(n=2, max_tokens=4000)
            await inflight.next()
            inflight.abort(0)
            await until(lambda: fleet.load() == {"r0": 1})
            reader = asyncio.create_task(read(inflight))
            await asyncio.sleep(0.05)
            inflight.abort()
            inflight.abort()
            await asyncio.wait_for(reader, 1)
            await until(lambda: not fleet.engines["r0"].core.has_work())
            assert fleet.load() == {"r0": 0}
            assert fleet.dispatcher.state().in_flight == 0
            assert not fleet.dispatcher.replicas["r0"].choices
            assert fleet.dispatcher.metrics.finished.values[("abort",)] == 2

    run(case())


def test_replicas_that_die_at_once_are_not_blamed_on_the_requests():
    """A rack without power: requests moved to replicas that are dead already, which nobody knows
    yet, and then given up for having lost two of them."""

    async def case():
        async with Fleet(3, limits=DispatchLimits(wait_seconds=5, channel=FAST)) as fleet:
            all_inflight = [fleet.generate() for _ in range(9)]
            await until(lambda: all(inflight.choices[0].emitted for inflight in all_inflight))
            late = fleet.generate()  # without a token yet
            for name in ("r0", "r1", "r2"):
                fleet.engines[name].die()
            await until(lambda: not fleet.dispatcher.ready())
            await fleet.add_replica("r3")
            fleet.publish("r3")
            assert await asyncio.gather(*map(read, [*all_inflight, late])) == [WHOLE] * 10

    run(case())


@pytest.mark.parametrize("times", [3, 4])
def test_silence_is_no_death_to_blame_a_request_for(times: int):
    """An overload on a busy machine: replicas that stood still for some seconds, in turns, and 500
    for each request that had waited at two of them. Four times is enough, whatever the cause."""

    async def case():
        limits = DispatchLimits(wait_seconds=5, losses=1, channel=FAST)
        async with Fleet(2, limits=limits) as fleet:
            for engine in fleet.engines.values():
                engine.stuck = True
            inflight = fleet.generate()
            choice, clients = inflight.choices[0], fleet.dispatcher.replicas
            for _ in range(times):
                await until(lambda: choice.done or choice.id in clients[choice.place].choices)
                connection = clients[choice.place].connection
                connection._missed, connection._heard = 99, False
                connection._tick()
                await until(lambda c=connection: not c.open)
            for engine in fleet.engines.values():
                engine.stuck = False
                engine._wake()
            if times == 3:
                assert await read(inflight) == WHOLE
            else:
                with pytest.raises(MantaError, match="4 replicas"):
                    await read(inflight)

    run(case())


def test_what_came_before_a_failure_is_handed_out_first():
    """Tokens that were generated and paid for but swallowed by the exception behind them."""

    async def case():
        limits = DispatchLimits(wait_seconds=0.1, channel=FAST)
        async with Fleet(1, limits=limits) as fleet:
            inflight = fleet.generate()
            await until(lambda: len(inflight.choices[0].emitted) > 3)
            fleet.engines["r0"].die()
            await until(lambda: fleet.dispatcher.state().in_flight == 0)
            assert len(await inflight.next()) > 3
            with pytest.raises(Overloaded):
                await inflight.next()

    run(case())


def test_a_reader_that_lags_gets_everything_in_one_call():
    """One wake-up a token, which is what makes other servers slow; or an unbounded task list."""

    async def case():
        async with Fleet(1) as fleet:
            inflight = fleet.generate()
            await until(lambda: fleet.dispatcher.state().in_flight == 0)
            items = await inflight.next()
            assert [token for _, delta in items for token in delta.token_ids] == WHOLE[0]
            assert items[-1][1].finish == "length"
            assert items[0][1].cached == 0 and {d.cached for _, d in items[1:]} == {-1}
            assert await inflight.next() == []

    run(case())


@pytest.mark.parametrize("ends", ["at a replica", "after a loss", "by an abort"])
def test_an_answer_that_is_read_at_its_end_comes_in_one_delta_a_choice(ends: str):
    """A task that wakes for each of a row's tokens, or an end that such a reader never sees."""

    async def case():
        async with Fleet(2) as fleet:
            inflight = fleet.generate(n=2, whole=True)
            reader = asyncio.create_task(inflight.next())
            await until(lambda: len(inflight.choices[0].emitted) > 3)
            assert not reader.done()
            if ends == "after a loss":
                fleet.engines[inflight.choices[0].place].die()
            elif ends == "by an abort":
                inflight.cut()
            items = await reader
            assert sorted(index for index, _ in items) == [0, 1]
            for index, delta in items:
                assert delta.token_ids == inflight.choices[index].emitted
                assert delta.finish == ("abort" if ends == "by an abort" else "length")
            if ends != "by an abort":
                assert items[0][1].token_ids == WHOLE[0]
            assert await inflight.next() == []

    run(case())


def test_prompt_logprobs_and_cached_tokens_come_once_over_a_failover():
    """Usage that counts cached tokens twice; a prompt's logprobs computed and sent again."""

    async def case():
        async with Fleet(2) as fleet:
            inflight = fleet.generate(prompt_logprobs=1)
            await until(lambda: len(inflight.choices[0].emitted) > 3)
            first = inflight.choices[0].place
            other = "r1" if first == "r0" else "r0"
            fleet.engines[first].die()
            await until(lambda: fleet.dispatcher.state().in_flight == 0)
            items = await inflight.next()
            assert [delta.cached >= 0 for _, delta in items].count(True) == 1
            assert fleet.engines[first].requests[0].params.prompt_logprobs == 1
            assert fleet.engines[other].requests[0].params.prompt_logprobs is None

    run(case())


def test_a_takeover_carries_the_prediction():
    """A request that went on elsewhere had lost its prediction, and its speed with it, or was
    refused for the image tokens of its ids."""

    async def case():
        async with Fleet(2) as fleet:
            inflight = fleet.generate(prediction=[7, 8, 9], speculate=False, verbatim=True)
            await until(lambda: len(inflight.choices[0].emitted) > 3)
            first = inflight.choices[0].place
            fleet.engines[first].die()
            await until(lambda: fleet.dispatcher.state().in_flight == 0)
            for engine in fleet.engines.values():
                assert engine.requests[0].prediction == [7, 8, 9]
                assert engine.requests[0].speculate is False
                assert engine.requests[0].verbatim

    run(case())


def test_rows_of_a_dataset_do_not_count_as_slow_first_tokens():
    """Rows that wait for other requests made the engine look so slow that these were refused."""

    async def case():
        async with Fleet(1) as fleet:
            state = fleet.dispatcher.replicas["r0"].state
            await read(fleet.generate(max_tokens=2, priority=BATCH_PRIORITY))
            assert state.first_seconds == 0
            await read(fleet.generate(max_tokens=2))
            assert state.first_seconds > 0

    run(case())


def test_limits_and_deadlines():
    """A router without bounds; a deadline that only the caller keeps."""

    async def case():
        limits = DispatchLimits(in_flight=2, channel=FAST)
        async with Fleet(1, limits=limits) as fleet:
            all_inflight = [fleet.generate(max_tokens=4000) for _ in range(2)]
            with pytest.raises(Overloaded):
                fleet.generate()
            all_inflight[0].abort()
            hurried = fleet.generate(max_tokens=4000, deadline=time.monotonic() + 0.1)
            with pytest.raises(MantaError) as caught:
                await read(hurried)
            assert caught.value.code == "deadline_exceeded"
            await until(lambda: fleet.load() == {"r0": 1})

    run(case())


def test_a_router_that_is_to_stop_ends_what_it_has_and_takes_nothing_new():
    """A stop that looks ready to a load balancer, or that leaves a stream without its error."""

    async def case():
        async with Fleet(1) as fleet:
            dispatcher = fleet.dispatcher
            assert dispatcher.ready() and not dispatcher.state().draining
            short, long = fleet.generate(), fleet.generate(max_tokens=4000)
            dispatcher.refuse_new()
            assert not dispatcher.ready() and dispatcher.state().draining
            for refused in (fleet.generate, lambda: dispatcher.admit("", 0)):
                with pytest.raises(Overloaded) as caught:
                    refused()
                assert caught.value.code == "draining" and caught.value.retry_after > 0
            assert await read(short) == WHOLE
            dispatcher.requests.fail_all()
            with pytest.raises(Overloaded) as caught:
                await read(long)
            assert caught.value.code == "draining"
            await until(lambda: fleet.load() == {"r0": 0})
            assert not any(dispatcher.held().values())

    run(case())


def test_a_draining_replica_gets_nothing_new_and_hands_over_what_does_not_end():
    """Requests cut off by a scale-down, or sent to a replica that is about to leave."""

    async def case():
        async with Fleet(2) as fleet:
            long = [fleet.generate(max_tokens=1000) for _ in range(4)]
            await until(lambda: min(fleet.load().values()) == 2)
            drain = asyncio.create_task(fleet.replica_servers["r0"].drain(0.3))
            await until(lambda: fleet.dispatcher.replicas["r0"].state.stats.draining)
            seen = len(fleet.engines["r0"].requests)
            short = [fleet.generate() for _ in range(6)]
            assert await asyncio.gather(*map(read, short)) == [WHOLE] * 6
            assert len(fleet.engines["r0"].requests) == seen
            await drain
            fleet.publish("r1")
            await fleet.replica_servers["r0"].stop()
            assert await asyncio.gather(*map(read, long)) == [{0: text(len(PROMPT), 1000)}] * 4

    run(case())


def test_a_replica_that_serve_takes_out_finishes_and_is_left():
    """Connections kept to replicas that are gone: file handles and memory that only grow."""

    async def case():
        async with Fleet(2) as fleet:
            all_inflight = [fleet.generate() for _ in range(4)]
            await until(lambda: min(fleet.load().values()) == 2)
            fleet.publish("r1")
            assert fleet.replica_servers["r0"].num_routers == 1, "cut off with requests in flight"
            assert await asyncio.gather(*map(read, all_inflight)) == [WHOLE] * 4
            await until(lambda: fleet.replica_servers["r0"].num_routers == 0)
            assert fleet.dispatcher.metrics.migrations.values[()] == 0
            assert not fleet.dispatcher.replicas.closing

    run(case())


def test_a_silent_replica_is_noticed_by_the_missing_beats():
    """A machine that has lost power: nothing breaks, nothing comes, and Ray needs 13 s to tell."""

    async def case():
        async with Fleet(2) as fleet:
            all_inflight = [fleet.generate(max_tokens=100) for _ in range(4)]
            await until(lambda: min(fleet.load().values()) == 2)
            fleet.engines["r0"].stuck = True
            for end in fleet.replica_servers["r0"]._routers.values():
                end.send = lambda message: None  # type: ignore[method-assign]
            began = time.monotonic()
            await asyncio.gather(*map(read, all_inflight))
            assert time.monotonic() - began < 3

    run(case())


def test_random_requests_aborts_and_losses_leave_nothing_behind():
    """Any leak in dispatcher, replica clients or replica servers; any request that never ends."""

    async def case():
        dice = random.Random(3)
        limits = DispatchLimits(wait_seconds=5, losses=50, channel=FAST)
        async with Fleet(3, limits=limits) as fleet:

            async def random_request() -> None:
                inflight = fleet.generate(
                    n=dice.choice([1, 1, 3]), max_tokens=dice.randrange(1, 60)
                )
                if dice.random() < 0.4:
                    await asyncio.sleep(dice.random() * 0.05)
                    inflight.abort()
                elif dice.random() < 0.5:
                    inflight.abort(0)
                count = inflight.request.params.max_tokens
                for index, tokens in (await read(inflight)).items():
                    whole = text(len(PROMPT), count)
                    assert tokens == whole[: len(tokens)]
                    assert len(tokens) == count or inflight.choices[index].done

            tasks = []
            for number in range(400):
                tasks.append(asyncio.create_task(random_request()))
                if number % 100 == 50:
                    end = dice.choice(list(fleet.replica_servers.values()))
                    for connection in list(end._routers.values()):
                        connection.close("test")
                await asyncio.sleep(0.002)
            await asyncio.gather(*tasks)
            await until(lambda: fleet.load() == dict.fromkeys(fleet.replica_servers, 0))
            await until(lambda: not any(e.core.has_work() for e in fleet.engines.values()))
            assert not fleet.dispatcher.requests and not fleet.dispatcher.assignment.displaced
            assert not any(client.choices for client in fleet.dispatcher.replicas.values())
            loop = asyncio.get_running_loop()
            timers = [t for t in getattr(loop, "_scheduled", []) if not t.cancelled()]
            assert len(timers) < 20, "timers of requests that ended"

    run(case())


def test_channel_limits_are_the_configured_ones():
    """A configured heartbeat that never reaches the connection."""

    async def case():
        limits = DispatchLimits(channel=ChannelLimits(heartbeat=0.05, timeout=0.2))
        async with Fleet(1, limits=limits) as fleet:
            connection = fleet.dispatcher.replicas["r0"].connection
            assert connection is not None and connection._limits.heartbeat == 0.05

    run(case())
