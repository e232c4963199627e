"""Images of requests in flight: sent again with a lost replica's requests, hashed, and let go."""

import asyncio
import gc

from deployments.backend import GenerationRequest
from deployments.config.models import MantaConfig
from deployments.images.memory import HeldImages, ImageMemory
from deployments.router.models.model_settings import DispatchLimits
from deployments.routing.prefix_index import hash_prefix
from deployments.serve.model_deployments import channel_limits
from engine.images.image import Image
from engine.sampling_params import SamplingParams
from tests.deployments.router.fleet import Fleet, read, until

PROMPT = [5, *[7] * 80, 6, 9]
PARAMS = SamplingParams(max_tokens=40, temperature=0.0, n=2)


def image(mark: int, pixels: int = 64) -> Image:
    shape = (1, 1, pixels)
    return Image(bytes([mark]) * 16, 1, 80, 80, (0, 0), shape, bytes([mark]) * 3 * pixels)


def asked(images: list[Image]) -> GenerationRequest:
    return GenerationRequest("", "m", list(PROMPT), PARAMS, 7, images=images)


async def test_images_move_with_their_requests() -> None:
    """Another replica would answer about no picture, or about none of its tokens."""
    async with Fleet(1) as fleet:
        alone = [await read(fleet.dispatcher.generate(asked([image(mark)]))) for mark in range(4)]
    assert len({tuple(tokens[0]) for tokens in alone}) == 4  # the answers tell the images apart
    async with Fleet(2) as fleet:
        inflight = [fleet.dispatcher.generate(asked([image(mark)])) for mark in range(4)]
        await until(lambda: all(request.choices[1].emitted for request in inflight))
        fleet.engines["r0"].die()
        assert await asyncio.gather(*map(read, inflight)) == alone
        moved = [
            request
            for request in fleet.engines["r1"].requests
            if len(request.token_ids) > request.num_prompt_tokens
        ]
        assert moved and all(len(request.images) == 1 for request in moved)
        assert fleet.dispatcher.metrics.images.values[()] == 4


async def test_a_burst_of_images() -> None:
    """A burst of photographs that waits to be sent must not cost the router its replica."""
    limits = DispatchLimits(channel=channel_limits(MantaConfig()))
    async with Fleet(1, limits=limits) as fleet:
        large = [image(mark, 10_000_000) for mark in (1, 2)]
        requests = [fleet.dispatcher.generate(asked([picture])) for picture in large]
        for tokens in await asyncio.gather(*map(read, requests)):
            assert len(tokens[0]) == len(tokens[1]) == 40
        assert fleet.dispatcher.metrics.migrations.values[()] == 0


async def test_prefixes_name_their_images() -> None:
    """Two pictures of one size have the same tokens; routed by these, each misses the other's
    cache."""
    async with Fleet(1) as fleet:
        await read(fleet.dispatcher.generate(asked([image(1)])))
        match = fleet.dispatcher.replicas.fleet.index.match
        assert match(hash_prefix(PROMPT, images=[image(1)]))
        assert not match(hash_prefix(PROMPT, images=[image(2)]))
        assert not match(hash_prefix(PROMPT))


async def test_ended_requests_hold_no_pixels() -> None:
    """Bug: the record of a request that has ended keeps its pixels, too."""
    memory = ImageMemory(10**6)
    async with Fleet(1) as fleet:
        request = asked(HeldImages([image(1)], memory.take(192)))
        inflight = fleet.dispatcher.generate(request)
        del request
        assert memory.held == 192
        await read(inflight)
        for engine in fleet.engines.values():
            engine.requests.clear()
        gc.collect()
        assert memory.held == 0
