"""Keeps a stream alive that waits for its first token: the answer's head, and a comment now and
then.

Without these, proxies that limit silence would cut long prompts.

    seconds    0         5         10        15                          45
    nothing    |---------| head and comment, comment, comment ... first token
    no replica |---------|---------|---------| ... nothing, an error has its status | head, comments

The head is a promise that no error status follows. So it waits: what fails at once, or while no
replica was given the request, is an ordinary error, and HAProxy gives a request whose router ended
without an answer to another one.
"""

import asyncio

from deployments.api.http.exchange import HttpExchange
from deployments.api.stream.merge import failed
from deployments.backend import Generation
from engine.messages import Delta

EVENT_STREAM = b"text/event-stream; charset=utf-8"
STREAM_HEADERS = (("cache-control", "no-cache"), ("x-accel-buffering", "no"))
COMMENT = b": waiting for the first token\n\n"  # clients of server-sent events skip it
HOLD_SECONDS = 45.0  # without a replica; usual limits on silence begin at 60


async def first_items(
    generation: Generation, exchange: HttpExchange, seconds: float
) -> list[tuple[int, Delta]]:
    """Wait for `generation.next()`, and send a sign of life every so many seconds; 0: none.

    Raises what next() raises, ClientDisconnected, and, unless the head is out, the error of a
    choice that the engine refused.
    """
    if not seconds:
        items = await generation.next()
    else:
        loop = asyncio.get_running_loop()
        began = loop.time()
        first = loop.create_task(generation.next())
        try:
            while not (await asyncio.wait({first}, timeout=seconds))[0]:
                if not exchange.started:
                    placed = generation.timing().replicas
                    if not placed and loop.time() - began < HOLD_SECONDS:
                        continue
                    await exchange.start(EVENT_STREAM, STREAM_HEADERS)
                await exchange.write(COMMENT)
            items = first.result()
        finally:
            if not first.done():
                first.cancel()
                await asyncio.wait({first})
    if not exchange.started:
        for _, delta in items:
            if delta.finish == "error":
                raise failed(delta)
    return items
