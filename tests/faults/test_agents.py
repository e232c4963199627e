"""Documents, calls, thoughts, Responses and Messages in the middle of which a process is killed. In
full: `python -m tests.faults.agents`."""

import asyncio
import os
import signal
from collections.abc import Iterator
from typing import Any

import grpc.aio
import pytest

from deployments.router.rpc.proto_file import INFERENCE, message, methods
from tests.deployments.on_ray.serve_cluster import Cluster, free_port
from tests.faults.agents import SEEN, SETTINGS, USER, Run, agent_model, kill_once, learn
from tests.faults.cluster import NAME, Broken, deployed

pytestmark = [pytest.mark.serve, pytest.mark.slow, pytest.mark.timeout(300)]


GRPC_PORT = free_port()


@pytest.fixture(scope="module")
def broken(shared_cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broken]:
    model = agent_model(tmp_path_factory.mktemp("models") / "agent")
    settings = {**SETTINGS, "grpc": {"port": GRPC_PORT}}
    with deployed(shared_cluster, model, None, replicas=2, **settings) as server:
        yield server


def test_the_same_answers(broken: Broken) -> None:
    """Bug: a grammar, a parser or a count of thoughts that begins anew at the replica that takes
    over; events that come twice, or never, for a client that goes on at another router."""

    async def case() -> Run:
        await broken.settled(120)
        right, run = await learn(broken), Run()
        for target, seen in (("engine", run.hit), ("router", run.cut)):
            while sum(seen.values()) < 3 and run.kills[target] < 4:  # which have streams is chance
                await kill_once(broken, right, target, run, each=2)
                await broken.settled(120)
        return run

    run = asyncio.run(case())
    print(run)
    assert not run.wrong and run.right == run.asked
    assert sum(run.hit.values()) >= 3 and sum(run.cut.values()) >= 3


def test_over_grpc(broken: Broken) -> None:
    """Bug: a stream over gRPC that ends with its engine; two routers that cannot share a port."""
    request = message("ChatRequest")(model=NAME)
    request.messages.add(**USER[0])
    request.sampling.temperature, request.sampling.seed, request.sampling.max_tokens = 1.0, 3, 250
    _, answer, _ = methods(INFERENCE)["ChatStream"]

    async def read(channel: grpc.aio.Channel, pieces: list[Any]) -> tuple[str, str, int]:
        """Return the text, finish reason and output tokens of a streamed answer.

        pieces: a list that gets the messages as they come.
        """
        stream = channel.unary_stream(
            f"/{INFERENCE}/ChatStream",
            request_serializer=type(request).SerializeToString,
            response_deserializer=answer.FromString,
        )(request)
        text, finish, tokens = "", "", 0
        async for item in stream:
            pieces.append(item)
            for choice in item.choices:
                text, finish = text + choice.reasoning + choice.text, choice.finish_reason
            tokens = item.usage.completion_tokens or tokens
        return text, finish, tokens

    async def moves() -> float:
        states = (await broken.states())["routers"]
        return sum(float(state["metrics"]["migrations"]) for state in states)

    async def case() -> None:
        await broken.settled(120)
        async with grpc.aio.insecure_channel(f"127.0.0.1:{GRPC_PORT}") as channel:
            pieces: list[Any] = []
            right = await read(channel, pieces)
            assert len(pieces) > 3 * SEEN
            before = await moves()
            for _ in range(4):  # on a busy machine all may be said before the signal comes
                pieces = []
                task = asyncio.create_task(read(channel, pieces))
                victims: list[int] = []
                while not task.done() and not (victims and len(pieces) >= SEEN):
                    replicas = (await broken.states())["replicas"]
                    victims = [replica["engine_pid"] for replica in replicas if replica["running"]]
                if not task.done():
                    os.kill(victims[0], signal.SIGKILL)
                assert await task == right
                await broken.settled(120)
                if await moves() > before:
                    return
        raise AssertionError("nothing moved")

    asyncio.run(case())
