"""Kills of replicas in two parts whose model keeps states: one of the parts, or the engine.

What a lost replica had in its rows and snapshots is computed again elsewhere.
"""

import asyncio
import json
import os
import signal
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from engine.text.tokenizer import Tokenizer
from tests.deployments.on_ray.serve_cluster import Cluster
from tests.engine.process.test_process import running, wait_until
from tests.engine.text.small_tokenizers import byte_level
from tests.faults.agents import HERMES
from tests.faults.cluster import Broken, deployed
from tests.parity.cases import DELTA_NET, Case, save

pytestmark = [
    pytest.mark.serve,
    pytest.mark.slow,
    pytest.mark.timeout(200),
    pytest.mark.skipif(
        len(os.sched_getaffinity(0)) < 2, reason="two ranks on the CPU need two cores"
    ),
]

# Every number is the request's alone, however its tokens were cut into chunks.
ENGINE = {"dtype": "float32", "num_blocks": 600, "max_num_seqs": 8, "deterministic": True}


def hybrid(folder: Path) -> Path:
    """Save a random model with three layers of Gated DeltaNet and one of attention."""
    tokenizer: Tokenizer = byte_level()
    case = DELTA_NET["qwen 3.5"]
    changes = {
        "vocab_size": tokenizer.vocab_size,
        "eos_token_id": list(tokenizer.eos_token_ids),
        "max_position_embeddings": 2048,
    }
    save(Case(case.model_type, {**case.changes, **changes}), folder)
    tokenizer.backend.save(str(folder / "tokenizer.json"))
    config = {"eos_token": "<|im_end|>", "chat_template": HERMES}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


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
    model = hybrid(tmp_path_factory.mktemp("model"))
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


def test_a_lost_state_is_computed_again(broken: Broken) -> None:
    """Bugs: a stream goes on elsewhere from a state of zeros, or of who had the row before; slots
    of cancelled or moved requests stay taken; the next turn after it computes all of it."""
    question = {"messages": [{"role": "user", "content": "the cat sat on the mat " * 12}]}
    asked: list[dict[str, Any]] = [
        {**question, "ignore_eos": True, "max_tokens": 200, "temperature": 0},
        {**question, "ignore_eos": True, "max_tokens": 200, "temperature": 0.9, "seed": 5},
    ]

    async def kill(engine: int) -> None:
        os.kill(engine, signal.SIGKILL)

    async def case() -> None:
        wanted, _ = await broken.same_under_kills(asked, kill)
        turn = [
            *question["messages"],
            {"role": "assistant", "content": wanted[0].texts[0]},
            {"role": "user", "content": "and then"},
        ]
        again = {"messages": turn, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
        first, second = await broken.ask(again), await broken.ask(again)
        assert not first.error and first.outcome == second.outcome
        await broken.idle(20)
        replicas = (await broken.states())["replicas"]
        assert any(replica["prefix_hits"] for replica in replicas), "nothing was found again"

    asyncio.run(case())
