"""How many of our functions a plain streamed chat runs before the engine has it."""

import asyncio
import sys
from collections import Counter
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest

from deployments.api.app import build_asgi
from deployments.api.options import ApiOptions
from deployments.router.models.models_backend import ModelsBackend
from tests.deployments.api.asgi import Client
from tests.deployments.fake_backend import tiny_tokenizer
from tests.deployments.router.fleet import Fleet, LocalEngine

ROOT = Path(__file__).parents[3]
PRODUCT = tuple(f"{ROOT / name}/" for name in ("deployments", "engine"))
API = ("deployments/api/", "engine/text/", "engine/sampling_params.py", "engine/typecheck.py")
# Calls and functions of each leg: 161 of 140 together.
BOUNDS = {"api": (106, 93), "router": (55, 47)}
BODY = {
    "model": "m",
    "messages": [{"role": "user", "content": "Tell me something about the sea, please"}],
    "max_tokens": 8,
    "stream": True,
}


class CallCounter:
    """A counter of calls of our own functions between `begin` and the engine's `submit`.

    The resumption of a coroutine or generator counts as a call, as in `sys.setprofile`.
    """

    def __init__(self) -> None:
        self.calls: Counter[CodeType] = Counter()
        self._count = 0

    def begin(self) -> None:
        sys.setprofile(self._note)

    def _note(self, frame: FrameType, event: str, _: Any) -> None:
        if event != "call":
            return
        if frame.f_code is LocalEngine.submit.__code__:
            sys.setprofile(None)
        elif frame.f_code.co_filename.startswith(PRODUCT):
            self.calls[frame.f_code] += 1

    def legs(self) -> dict[str, tuple[int, int]]:
        """Return calls and functions: in the API (texts and parameters included), and behind it."""
        legs: dict[str, list[int]] = {"api": [], "router": []}
        for code, count in self.calls.items():
            name = str(Path(code.co_filename).relative_to(ROOT))
            legs["api" if name.startswith(API) else "router"].append(count)
        return {leg: (sum(counts), len(counts)) for leg, counts in legs.items()}

    def report(self) -> str:
        """Return a line for each function: calls, file, name."""
        lines = [
            f"{count:4} {Path(code.co_filename).relative_to(ROOT)}:{code.co_qualname}"
            for code, count in self.calls.items()
        ]
        return "\n".join(lines)


async def count_way_in() -> CallCounter:
    """Send one streamed chat to a router with one replica after a few others, and count it."""
    counter = CallCounter()
    async with Fleet(1, tokenizer=tiny_tokenizer()) as fleet:
        front = ModelsBackend("router")
        front.set_dispatcher("m", fleet.dispatcher, 0.0)
        client = Client(build_asgi(front, ApiOptions()))
        for _ in range(3):
            await client.post("/v1/chat/completions", BODY)
        counter.begin()
        try:
            await client.post("/v1/chat/completions", BODY)
        finally:
            sys.setprofile(None)
    return counter


@pytest.mark.parametrize("leg", BOUNDS)
def test_a_plain_streamed_chat_takes_few_calls_to_the_engine(leg: str) -> None:
    """Bug: a round of helpers, copies and checks more for each request."""
    counter = asyncio.run(count_way_in())
    calls, functions = counter.legs()[leg]
    most_calls, most_functions = BOUNDS[leg]
    report = f"{calls} calls of {functions} functions in {leg}\n{counter.report()}"
    assert calls <= most_calls and functions <= most_functions, report
