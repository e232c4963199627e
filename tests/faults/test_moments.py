"""A replica is lost at every moment: after each possible number of tokens, before the first
byte and at the last token too. In one event loop over real sockets, so that the moment is exact."""

import asyncio

import pytest

from deployments.router.models.model_settings import DispatchLimits
from tests.deployments.router.fleet import FAST, PROMPT, Fleet, read, text

TOKENS = 24


@pytest.mark.parametrize("how", ["engine", "engine itself", "connection"])
def test_a_replica_is_lost_after_any_number_of_tokens(how: str) -> None:
    """Bug: the loss between two particular messages (nothing sent yet, the last token, the end
    already seen) repeats, drops or never ends something."""

    async def case() -> None:
        limits = DispatchLimits(wait_seconds=5, channel=FAST)
        for moment in range(TOKENS + 1):
            async with Fleet(2, limits=limits) as fleet:
                inflight = fleet.generate(max_tokens=TOKENS, n=2, logprobs=2)
                first, second = inflight.choices
                while len(first.emitted) < moment:
                    await asyncio.sleep(0)
                place = first.place
                if how == "engine":
                    fleet.engines[place].die()
                elif how == "engine itself":  # both are tried, the end may fall into that
                    fleet.engines[place].crash()
                else:
                    for router in list(fleet.replica_servers[place]._routers.values()):
                        router.close("test")
                said = await read(inflight)
                assert said == {0: text(len(PROMPT), TOKENS), 1: text(len(PROMPT), TOKENS)}, moment
                assert first.done and second.done and not fleet.dispatcher.requests

    asyncio.run(asyncio.wait_for(case(), 60))
