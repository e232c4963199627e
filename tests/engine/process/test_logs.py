"""What an engine says of a request, by its caller's name, in the log of its owner."""

import asyncio
import logging
import time

import pytest

from engine.config.engine_config import EngineConfig
from engine.messages import EngineRequest, StepFrame
from engine.process.client import EngineClient
from engine.sampling_params import SamplingParams
from tests.fakes import Inline, make_core, make_request, make_store, run


def asked(number: int, **fields: object) -> EngineRequest:
    params = SamplingParams(max_tokens=4, ignore_eos=True)
    return EngineRequest(number, [5, 6, 7], 3, params, 0, request_id=f"call-{number}", **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize("level", ["info", "debug"])
def test_lines_of_the_engine_process_arrive_with_their_id(
    level: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Lines on a standard error that nobody reads, about numbers that nobody knows."""

    async def case() -> None:
        frames: list[StepFrame] = []
        client = EngineClient(frames.append)
        await client.start(EngineConfig(model="fake:", log_level=level))  # type: ignore[arg-type]
        client.submit(asked(3))
        async with asyncio.timeout(10):
            while not any(delta.finish for frame in frames for delta in frame.deltas):
                await asyncio.sleep(0.01)
        await client.close()

    with caplog.at_level(logging.DEBUG, "manta"):
        asyncio.run(case())
    lines = [(r.name, r.message, getattr(r, "request_id", None)) for r in caplog.records]
    assert lines == ([("manta.engine", "queued: 3 tokens", "call-3")] if level == "debug" else [])


def test_the_end_of_a_request_is_told(caplog: pytest.LogCaptureFixture) -> None:
    """A request that failed in a batch of 256, and the line says that one did."""
    with caplog.at_level(logging.DEBUG, "manta.engine"):
        core, _ = make_core()
        run(core, [asked(1), asked(2)])
        core.add_request(asked(3))
        core.scheduler.fail(list(core.scheduler.requests.values()), "numerical_error: NaN")
    by_id = {r.request_id: r for r in caplog.records if r.message.startswith("ended: ")}
    assert by_id.keys() == {"call-1", "call-2", "call-3"}
    assert by_id["call-1"].message.startswith("ended: 6 tokens computed, 0 of them cached, ")
    (failed,) = [r for r in caplog.records if r.levelno == logging.WARNING]
    assert (failed.request_id, failed.message) == ("call-3", "failed: numerical_error: NaN")


def test_waiting_for_an_adapter_is_told_apart() -> None:
    """A minute in the queue, and nobody knows whether for room or for a slow disk."""
    disk, device = Inline(hold=True), Inline()
    core, _ = make_core(adapters=make_store("a", disk=disk, device=device))
    core.add_request(make_request(1, adapter="a", max_tokens=2))
    core.add_request(make_request(2, max_tokens=2))
    core.step()
    time.sleep(0.02)
    disk.release()
    first = {id: output.deltas[0] for id, output in run(core).items()}
    assert 20_000 <= first[1].adapter_us <= first[1].queued_us
    core.add_request(make_request(3, adapter="a", max_tokens=2))  # it is there now
    assert run(core)[3].deltas[0].adapter_us == 0
