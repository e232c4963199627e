"""Kills of replicas whose model keeps states: what a lost replica had in its rows and snapshots is
computed again elsewhere, and the next turn goes on from there."""

import asyncio
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from engine.text.tokenizer import Tokenizer
from tests.deployments.on_ray.serve_cluster import Cluster
from tests.engine.text.small_tokenizers import byte_level
from tests.faults.agents import HERMES
from tests.faults.cluster import Broken, deployed
from tests.parity.cases import DELTA_NET, Case, save

pytestmark = [pytest.mark.serve, pytest.mark.slow, pytest.mark.timeout(200)]

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


@pytest.fixture(scope="module")
def broken(shared_cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broken]:
    model = hybrid(tmp_path_factory.mktemp("model"))
    with deployed(
        shared_cluster,
        model,
        None,
        replicas=2,
        routers=1,
        num_cpus=0.5,
        router={"replicas": 1, "num_cpus": 0},
        engine=ENGINE,
    ) as server:
        yield server


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
