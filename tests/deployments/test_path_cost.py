"""The whole path of a streamed chunk, in real processes: see path_cost.py."""

import pytest

from tests.deployments.path_cost import carried, measure

pytestmark = [pytest.mark.timed, pytest.mark.timeout(180)]


def good(found: dict[str, float]) -> bool:
    return (
        found["router's calls"] < 42
        and found["replica's calls"] < 4.5
        and found["ratio"] < 4
        and found["engine ratio"] < 1.3
        and found["stream scale"] >= 1.6
        and found["tokens a chunk"] < 1.1
    )


def test_the_path_costs_no_more_than_a_few_null_paths(capsys: pytest.CaptureFixture[str]) -> None:
    """Bug: a task, a copy or an object for each token somewhere between engine and socket, or
    something that two routers wait for or do for each other. The null path is uvicorn sending bytes
    that are there. Calls are the same in each run: 39 in a router, 3.3 in a replica. Times, with
    others at work on the same cores: router 1.7 to 2.8 times the null path, engine side 0.4 to 0.8
    times, two routers 1.7 to 2.1 times what one carries."""
    costs = measure(streams=128, seconds=0.7, rounds=8, good=good)
    with capsys.disabled():
        print(f"\nus of CPU a chunk: {costs}")
    assert good(costs)


def test_two_routers_carry_twice_the_requests_of_one(capsys: pytest.CaptureFixture[str]) -> None:
    """Bug: something for each request that a router does for the other's. The engine answers at
    once; 2,300 to 2,450 requests for a second of a router's CPU alone, 2,200 to 2,350 beside the
    other."""
    rates = carried(32, 1.0, 8, lambda found: found["scale"] >= 1.6)
    with capsys.disabled():
        print(f"\nshort requests: {rates}")
    assert rates["scale"] >= 1.6
