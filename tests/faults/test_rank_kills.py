"""Kills of ranks: a replica in two parts loses one of them, and its streams go on elsewhere."""

import asyncio
import os
import signal
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from tests.deployments.on_ray.serve_cluster import Cluster
from tests.engine.process.test_process import running, wait_until
from tests.faults.agents import agent_model
from tests.faults.cluster import Broken, deployed

pytestmark = [
    pytest.mark.serve,
    pytest.mark.slow,
    pytest.mark.timeout(200),
    pytest.mark.skipif(
        len(os.sched_getaffinity(0)) < 2, reason="two ranks on the CPU need two cores"
    ),
]

ENGINE = {"dtype": "float32", "num_blocks": 600, "max_num_seqs": 8}


@pytest.fixture(
    scope="module",
    params=[
        "tensor_parallel",
        # A stage's end, without Serve: tests/engine/process/test_pipeline.py; with it:
        # test_pipeline_nodes.py.
        pytest.param("pipeline_parallel", marks=pytest.mark.long),
    ],
)
def broken(
    shared_cluster: Cluster,
    tmp_path_factory: pytest.TempPathFactory,
    request: pytest.FixtureRequest,
) -> Iterator[Broken]:
    model = agent_model(tmp_path_factory.mktemp("model"))
    # Cores of the cluster are those that Ray was told of.
    with deployed(
        shared_cluster,
        model,
        None,
        replicas=2,
        routers=1,
        num_cpus=2.0,
        router={"replicas": 1, "num_cpus": 0},
        engine={**ENGINE, request.param: 2},
    ) as server:
        yield server


def ranks_of(engine: int) -> list[int]:
    return [int(pid) for pid in Path(f"/proc/{engine}/task/{engine}/children").read_text().split()]


def ended(*pids: int) -> bool:
    return not any(map(running, pids))


def test_a_killed_rank_ends_its_replica_and_no_stream(broken: Broken) -> None:
    """Bugs: the streams of a replica wait for ever for the rank that is gone; their text is another
    one elsewhere; the engine, or another rank, stays behind and holds the memory."""
    question = {"messages": [{"role": "user", "content": "the cat"}], "ignore_eos": True}
    asked = [
        {**question, "max_tokens": 250, "temperature": 0},
        {**question, "max_tokens": 250, "temperature": 0.9, "seed": 5},
    ]

    async def kill(engine: int) -> None:
        (rank,) = ranks_of(engine)
        os.kill(rank, signal.SIGKILL)
        assert await asyncio.to_thread(wait_until, partial(ended, rank, engine), 5.0), (
            "a process stayed behind"
        )

    async def case() -> None:
        _, said = await broken.same_under_kills(asked, kill)
        print(f"longest gap {max(answer.gap for answer in said):.2f} s")

    asyncio.run(case())
