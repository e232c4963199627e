"""Kills of replicas that serve the default model in float32: what a lost replica had computed is
computed again elsewhere, and the text is the same to the last token."""

import asyncio
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.deployments.on_ray.serve_cluster import Cluster
from tests.engine.lora.adapters import save_adapter
from tests.faults.clients import Said
from tests.faults.cluster import Broken, deployed
from tests.faults.soak import ENGINE

pytestmark = [pytest.mark.serve, pytest.mark.slow, pytest.mark.timeout(200)]

QUESTION = [{"role": "user", "content": "What is the capital of France? Tell me about it."}]
LONG = [
    {"role": "user", "content": "Go on with this: " + "the sea is grey, the wind is old, " * 60}
]


TUNED = "tuned"  # an adapter


@pytest.fixture(scope="module")
def adapter(default_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return an adapter that is strong enough to change texts, and weak enough to keep their
    sense."""
    model = AutoModelForCausalLM.from_pretrained(default_model, dtype=torch.float32)
    folder = tmp_path_factory.mktemp("adapters") / TUNED
    return save_adapter(model, folder, r=8, lora_alpha=4, target_modules=["q_proj", "v_proj"])


@pytest.fixture(scope="module")
def broken(shared_cluster: Cluster, default_model: Path, adapter: Path) -> Iterator[Broken]:
    # Drafts from a text's own repeats; earlier answers would make later ones too quick to kill.
    drafts = {"method": "lookup", "shared_tokens": 0}
    engine = {**ENGINE, "max_loras": 2, "max_lora_rank": 8, "speculation": drafts}
    adapters = {"paths": {TUNED: str(adapter)}}
    with deployed(
        shared_cluster,
        default_model,
        None,
        replicas=2,
        routers=1,
        num_cpus=0.5,
        engine=engine,
        adapters=adapters,
    ) as server:
        yield server


def bodies(stop: str) -> list[dict[str, Any]]:
    greedy = {"messages": QUESTION, "max_tokens": 32, "temperature": 0}
    return [
        greedy,
        {**greedy, "stop": [stop]},
        {**greedy, "temperature": 0.9, "seed": 5, "n": 4},
        {**greedy, "logprobs": True, "top_logprobs": 2},
        {"messages": LONG, "max_tokens": 12, "temperature": 0.9, "seed": 1},
    ]


@pytest.mark.parametrize(
    ("after", "number"),
    [
        (0.3, signal.SIGKILL),
        (2.5, signal.SIGKILL),
        # With engines that count: test_kills.py.
        pytest.param(2.5, signal.SIGSEGV, marks=pytest.mark.long),
    ],
)
def test_same_text_from_another_replica(
    broken: Broken, after: float, number: signal.Signals
) -> None:
    """Bug: recomputed keys, random counters or the detokeniser's state differ from the first
    replica's, or drafts in the middle of an answer change it. 0.3 s: in the long prompt; 2.5 s:
    while the others stream. SIGSEGV: as if a request were to blame, so those that had hardly begun
    are tried first, which must not show."""

    async def case() -> None:
        await broken.settled(120)
        whole = (await broken.ask(bodies("never")[0])).texts[0]
        asked = bodies(whole[60:68])
        plain = [{**body, "speculation": False} for body in asked]
        wanted = await asyncio.gather(*map(broken.ask, plain))
        asked[0]["prediction"] = {"type": "content", "content": whole}
        assert not any(said.error for said in wanted), wanted
        assert wanted[1].finishes == {0: "stop"} and len(wanted[3].logprobs[0]) == 32
        tasks = [asyncio.create_task(broken.ask(body)) for body in asked]
        await asyncio.sleep(after)
        broken.kill("engine", number=number)
        said = await asyncio.gather(*tasks)
        for got, right in zip(said, wanted, strict=True):
            assert got.outcome == right.outcome
        print(
            f"{number.name} after {after} s: longest gap {max(answer.gap for answer in said):.2f} s"
        )

    asyncio.run(case())


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param({"temperature": 0}, marks=pytest.mark.nightly),  # the four have all of it
        {"temperature": 0.9, "seed": 5, "n": 4},
    ],
)
def test_the_adapter_goes_along(broken: Broken, kind: dict[str, Any]) -> None:
    """Bug: the other replica goes on with the base model, or with keys of the base model from its
    prefix cache."""
    body = {"messages": QUESTION, "max_tokens": 48, "ignore_eos": True, **kind}
    tuned = {**body, "model": TUNED}

    async def killed() -> Said:
        """Return an answer of which a part came from an engine that was killed."""
        task = asyncio.create_task(broken.ask(tuned))
        victims = []
        while not victims:  # whichever has it
            assert not task.done(), "it was too quick"
            replicas = (await broken.states())["replicas"]
            victims = [replica["engine_pid"] for replica in replicas if replica["running"]]
        await asyncio.sleep(0.5)
        (engine,) = (replica for replica in broken.find("engine") if replica.pid == victims[0])
        assert engine.send(signal.SIGKILL)
        return await task

    async def case() -> None:
        await broken.settled(120)
        base, right = await asyncio.gather(broken.ask(body), broken.ask(tuned))
        assert not base.error and not right.error, (base, right)
        assert all(right.texts[index] != text for index, text in base.texts.items())
        for _ in range(3):  # on a busy machine all may be said before the signal comes
            said = await killed()
            assert said.outcome == right.outcome
            if said.migrations:
                break
            await broken.settled(120)
        assert said.migrations >= 1 and not right.migrations
        print(f"{kind}: {said.migrations} went on elsewhere, longest gap {said.gap:.2f} s")

    asyncio.run(case())
