"""A model that sleeps: what a router does with its requests, without Ray."""

import asyncio
from typing import Any

import pytest

from deployments.backend import GenerationRequest, ModelCard
from deployments.config.load import parse_config
from deployments.router.admission import scale_from_zero as waking_module
from deployments.router.admission.scale_from_zero import UNKNOWN, Waking
from deployments.router.dispatcher import Dispatcher
from deployments.router.models.model_settings import DispatchLimits
from deployments.router.models.models_backend import ModelsBackend
from deployments.serve.model_deployments import served_model
from engine.errors import Overloaded
from engine.sampling_params import SamplingParams
from tests.deployments.fake_backend import tiny_tokenizer


class Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr(waking_module.time, "monotonic", lambda: self.now)


class Asked:
    """A fake of the call that wakes a pool: calls wait until `answer` is set."""

    def __init__(self) -> None:
        self.calls = self.open = 0
        self.answer = asyncio.Event()

    async def __call__(self) -> None:
        self.calls += 1
        self.open += 1
        try:
            await self.answer.wait()
        finally:
            self.open -= 1


def request(model: str) -> GenerationRequest:
    return GenerationRequest("id", model, [1, 2, 3], SamplingParams(max_tokens=3), 0)


def dispatcher(waking: Waking, wait_seconds: float = 30.0) -> Dispatcher:
    card = ModelCard("m", 64, 300, (2,), 0)
    limits = DispatchLimits(wait_seconds=wait_seconds, waiting=2)
    return Dispatcher(card, tiny_tokenizer(), limits, "router", waking=waking)


async def test_a_request_wakes_once_and_is_held_until_a_start_was_measured() -> None:
    """Each request asks anew, and Serve is flooded; or the first one is refused for a guess."""
    asked = Asked()
    router = dispatcher(Waking("m", 60.0, asked))
    router.set_replicas({})
    assert router.status() == "sleeping" and not router.ready(), "nobody has seen it serve"
    for _ in range(2):
        router.generate(request("m"))
    await asyncio.sleep(0)
    assert asked.calls == 1 and router.metrics.wakes.values[()] == 1
    assert router.status() == "starting" and router.held()["waiting"] == 2
    with pytest.raises(Overloaded) as refused:  # more than may wait
        router.generate(request("m"))
    assert refused.value.code == "no_replica" and 59 <= refused.value.retry_after <= 60
    router.close()
    await asyncio.sleep(0)
    assert not asked.open


async def test_a_measured_start_that_is_too_long_is_promised(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A client that is held for 30 s and then sent away, where 40 s are known; or that comes back
    after 5 s, again and again."""
    clock, asked = Clock(monkeypatch), Asked()
    waking = Waking("m", 60.0, asked)
    waking.replicas(0)
    assert waking.wake() and not waking.wake()
    waking.check(30.0)  # unknown: it may be held
    await asyncio.sleep(0)
    clock.now += 40
    waking.opened(3.0)
    waking.replicas(1)
    await asyncio.sleep(0)
    assert not asked.open, "the call would count as work, and the model never sleep again"
    assert not waking.sleeping and waking.seconds() == UNKNOWN
    waking.replicas(0)
    assert waking.wake()
    clock.now += 4.5
    with pytest.raises(Overloaded, match=r"m sleeps, was woken, .* in 36 s") as refused:
        waking.check(30.0)
    assert refused.value.retry_after == 35.5 and refused.value.code == "no_replica"
    clock.now += 10
    waking.check(30.0)  # held now
    assert waking.seconds() == 26
    clock.now += 60
    waking.check(30.0)
    assert waking.seconds() == UNKNOWN, "late: soon"
    waking.close()


async def test_a_call_that_fails_is_made_again_with_the_next_request() -> None:
    """A model that nobody can wake any more after one error of Serve."""
    asked = Asked()
    asked.answer.set()  # it ends, and no replica has come
    waking = Waking("m", 60.0, asked)
    waking.replicas(0)
    for _ in range(2):
        assert waking.wake()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    assert asked.calls == 2


async def test_what_never_sleeps_is_never_woken() -> None:
    """A call that waits for a replica of a fixed pool, which Serve replaces anyway; a refusal where
    requests were held."""
    asked = Asked()
    router = dispatcher(Waking("m", None, asked))
    router.set_replicas({})
    router.generate(request("m"))
    await asyncio.sleep(0)
    assert not asked.calls and router.status() == "starting" and not router.ready()
    router.close()


async def test_what_lost_its_replica_and_adapters_wake_too() -> None:
    """A request that was sent to the last replica as it went to sleep waits for a replica that
    nobody starts; an adapter that is added to a sleeping model."""
    asked = Asked()
    router = dispatcher(Waking("m", 60.0, asked))
    router.set_replicas({})
    lost = router.generate(request("m"))
    await asyncio.sleep(0)
    router.waking.close()
    await asyncio.sleep(0)
    router.assignment.displaced.add_choices(lost.choices)
    await asyncio.sleep(0)
    router.waking.close()
    await asyncio.sleep(0)
    adding = asyncio.create_task(router._adapter_calls._find("a"))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert asked.calls == 3
    adding.cancel()
    router.close()


async def test_an_endpoint_that_sleeps_takes_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    """`/ready` says 503 of an endpoint whose models all sleep, so that a load balancer takes it out
    and no request ever wakes one; a model whose settings changed is forgotten to have served."""
    front = ModelsBackend("router", several=True)
    router = dispatcher(Waking("m", 60.0, Asked()))
    front.set_dispatcher("m", router, 1.0)
    router.waking.replicas(1)
    router.waking.replicas(0)
    assert front.ready() and router.status() == "sleeping"
    changed = Waking("m", 60.0, Asked())
    changed.take_over(router.waking)
    changed.replicas(0)
    assert changed.wakes_for_requests
    front.refuse_new()
    assert not front.ready()
    front.close()


@pytest.mark.parametrize("start_seconds", [None, 60.0])
async def test_a_model_starts_once(start_seconds: float | None) -> None:
    """`/v1/models` answers while no chat is taken yet; or does not while the model sleeps, or its
    replicas come back, and chats wait for them."""
    front = ModelsBackend("router", several=False)
    router = dispatcher(Waking("m", start_seconds, Asked()))
    front.set_dispatcher("m", router, 1.0)
    assert front.starting()
    router.set_replicas({})
    assert front.starting() == (start_seconds is None), "a request wakes what may sleep"
    router.waking.replicas(1)
    router.waking.replicas(0)
    assert not front.starting()
    front.close()


@pytest.mark.parametrize(
    ("pools", "seconds"),
    [
        ({"cpu": {"min_replicas": 0, "max_replicas": 2, "start_seconds": 7}}, 7.0),
        ({"cpu": {"min_replicas": 1, "max_replicas": 2}}, None),
        ({"cpu": {"replicas": 1}}, None),
        ({"cpu": {"min_replicas": 0, "max_replicas": 1}, "gpu": {"replicas": 1}}, None),
    ],
)
def test_a_model_sleeps_where_all_its_pools_may_be_empty(
    pools: dict[str, Any], seconds: float | None
) -> None:
    """A model of which one pool always serves is told to sleep, and requests are refused."""
    config = parse_config({"models": {"m": {"model": "org/m", "pools": pools}}}, {})
    assert served_model(config.of("m"), 0).start_seconds == seconds
