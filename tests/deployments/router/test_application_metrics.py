"""/metrics: one answer for all routers, whichever is asked; no counter goes back."""

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from deployments.backend import BackendState
from deployments.observe.application_metrics import ApplicationMetrics, SingleFlight
from deployments.observe.metrics import RouterMetrics, families
from deployments.router.serve import all_routers
from deployments.router.serve.all_routers import AllRouters
from engine.messages import EngineStats
from tests.deployments.on_ray.live import parse_metrics


class Router:
    """A stand-in for deployments.router.deployment.Router, which calls the others directly."""

    def __init__(self, name: str, fleet: dict[str, "Router"]) -> None:
        self.metrics = RouterMetrics()
        self.replicas: dict[str, EngineStats] = {}
        self.silent = False
        self.fleet = fleet
        self.figures = ApplicationMetrics(
            name,
            "m",
            lambda: families(self.metrics, BackendState(in_flight=1)),
            lambda: self.replicas,
            self.others,
        )
        fleet[name] = self

    async def others(self) -> list[bytes]:
        await asyncio.sleep(0)
        return [router.figures.report() for router in self.fleet.values() if not router.silent]


def routers(count: int) -> dict[str, Router]:
    fleet: dict[str, Router] = {}
    for number in range(count):
        Router(f"router-{number}", fleet)
    return fleet


def test_any_router_tells_of_all() -> None:
    """One of two routers in turn: generation_tokens_total was 4927, 4818, 4927, 4818 although
    nobody asked for anything in between."""
    fleet = routers(3)
    for number, router in enumerate(fleet.values()):
        router.metrics.output_tokens.inc(100 + number)
        router.metrics.http.inc(1, "/v1/completions", "200")
        router.metrics.first_token.observe(0.05)
    texts = [asyncio.run(router.figures.text()) for router in fleet.values()]
    first, *others = [parse_metrics(text) for text in texts]
    assert others == [first, first]
    for number in range(3):
        labels = f'model_name="m",router="router-{number}"'
        assert first[f"manta_generation_tokens_total{{{labels}}}"] == 100 + number
        assert first[f"manta_router_requests_in_flight{{{labels}}}"] == 1
        assert first[f"manta_time_to_first_token_seconds_count{{{labels}}}"] == 1
        http = f'{labels},route="/v1/completions",status="200"'
        assert first[f"manta_http_requests_total{{{http}}}"] == 1


def test_a_replica_has_one_series_and_the_newest_is_told() -> None:
    """What each router had heard of a replica, added up: twice its tokens with two routers."""
    fleet = routers(2)
    first, two = fleet.values()
    first.replicas = {"r": EngineStats(step=7, output_tokens=70, running=3, prefix_hits=5)}
    two.replicas = {"r": EngineStats(step=8, output_tokens=90, running=1, prefix_hits=4)}
    two.replicas["s"] = EngineStats(step=1)
    for _ in range(2):
        for asked in (first, two):
            metrics = parse_metrics(asyncio.run(asked.figures.text()))
            labels = 'model_name="m",replica="r"'
            assert metrics[f"manta_engine_generation_tokens_total{{{labels}}}"] == 90
            assert metrics[f"manta_num_requests_running{{{labels}}}"] == 1
            assert metrics[f"manta_prefix_cache_hits_total{{{labels}}}"] == 5
            assert len([name for name in metrics if "manta_engine_steps_total{" in name]) == 2
    # The other one falls silent. What it said is not forgotten, and its own series are missing.
    two.silent = True
    metrics = parse_metrics(asyncio.run(first.figures.text()))
    assert metrics['manta_engine_generation_tokens_total{model_name="m",replica="r"}'] == 90
    assert not [name for name in metrics if "router-1" in name]
    first.replicas = {}  # it has left
    metrics = parse_metrics(asyncio.run(first.figures.text()))
    assert not [name for name in metrics if "replica=" in name]


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 5))]
)
def test_no_counter_goes_back(seed: int) -> None:
    """Steps that one router hears of before another, scrapes of either, routers that are silent for
    a while or end, new ones that come."""
    dice = random.Random(seed)
    fleet = routers(3)
    engine, last = EngineStats(), dict[str, float]()

    async def life() -> None:
        nonlocal engine
        for turn in range(300):
            engine = EngineStats(
                step=engine.step + 1,
                output_tokens=engine.output_tokens + dice.randrange(5),
                prefix_hits=engine.prefix_hits + dice.randrange(2),
            )
            for router in fleet.values():
                if dice.random() < 0.6:  # the others hear of it a step later
                    router.replicas = {"r": engine}
                if not router.silent:
                    router.metrics.output_tokens.inc(dice.randrange(9))
                    router.metrics.between.observe(dice.random())
            if turn % 60 == 30:
                del fleet[dice.choice(list(fleet))]
                Router(f"router-{turn}", fleet).replicas = {"r": engine}
            asked = dice.choice(list(fleet.values()))
            for (
                router
            ) in fleet.values():  # a silent one has time to hear of steps before it is asked
                router.silent = router is not asked and turn % 10 > 6
                if router.silent:
                    asked.replicas = {"r": engine}
            texts = await asyncio.gather(
                *(asked.figures.text() for _ in range(dice.choice((1, 3))))
            )
            for text in texts:
                metrics = parse_metrics(text)
                for name, value in metrics.items():
                    if name.split("{")[0].endswith(("_total", "_bucket", "_count", "_sum")):
                        assert value >= last.get(name, 0.0), (turn, name)
                        last[name] = value

    asyncio.run(life())
    assert last['manta_engine_generation_tokens_total{model_name="m",replica="r"}'] > 300


def test_many_scrapes_at_once_cost_two() -> None:
    """A hundred scrapers, each of which has all routers asked; or an answer that was begun before
    somebody asked, older than one that they have seen elsewhere."""
    began: list[int] = []

    async def work() -> int:
        began.append(len(began))
        await asyncio.sleep(0.01)
        if len(began) == 3:
            raise ValueError
        return began[-1]

    async def scrapes() -> None:
        shared = SingleFlight(work)
        first = asyncio.create_task(shared())
        await asyncio.sleep(0.001)  # it has begun
        others = [asyncio.create_task(shared()) for _ in range(100)]
        gone = asyncio.create_task(shared())
        await asyncio.sleep(0.001)
        gone.cancel()
        assert (await first, set(await asyncio.gather(*others))) == (0, {1})
        with pytest.raises(ValueError):
            await shared()
        assert await shared() == 3 and await shared() == 4

    asyncio.run(scrapes())


def test_a_silent_router_costs_the_others_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Serve gives all answers or none: one router that was stopped for ten seconds, and no question
    to the routers had an answer."""

    class Result:
        def __init__(self, answer: Callable[[], Awaitable[Any]]) -> None:
            self.get_async = answer

    async def good() -> str:
        return "good"

    async def broken() -> str:
        raise OSError

    cancelled = []

    async def silent() -> str:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            cancelled.append(True)
            raise
        return "late"

    class Handle:
        def broadcast(self, method: str, *arguments: Any) -> Any:
            assert (method, arguments) == ("figures", (1,))
            return self

        async def _fetch_replica_results_async(self) -> list[Result]:
            return [Result(good), Result(silent), Result(broken), Result(good)]

    monkeypatch.setattr(all_routers.serve, "get_deployment_handle", lambda *names, **_: Handle())

    async def ask() -> tuple[list[str], float]:
        began = asyncio.get_running_loop().time()
        answers = await AllRouters(["router", "batch-router"], "app").ask(0.1, "figures", 1)
        await asyncio.sleep(0)
        return answers, asyncio.get_running_loop().time() - began

    answers, seconds = asyncio.run(ask())
    assert answers == ["good"] * 4 and 0.09 < seconds < 2 and cancelled == [True, True]


def test_accepted_drafts_by_position() -> None:
    """The figure by which operators choose a draft's length; a family with two HELP lines is
    refused by Prometheus."""
    router = Router("router-0", {})
    stats = EngineStats(drafts=3, draft_tokens=9, accepted_by_position=[3, 2, 0, 1])
    router.replicas = {"r": stats, "s": EngineStats()}
    text = asyncio.run(router.figures.text())
    name = "manta_spec_decode_num_accepted_tokens_per_pos_total"
    metrics = parse_metrics(text)
    positions = {key: value for key, value in metrics.items() if key.startswith(name)}
    labels = 'model_name="m",replica="r",position='
    assert positions == {
        f'{name}{{{labels}"{position}"}}': count for position, count in ((0, 3), (1, 2), (3, 1))
    }
    assert text.count(f"# HELP {name} ") == 1
    total = "manta_spec_decode_num_accepted_tokens_total"
    assert metrics[f'{total}{{model_name="m",replica="r"}}'] == 6
    assert metrics[f'{total}{{model_name="m",replica="s"}}'] == 0
