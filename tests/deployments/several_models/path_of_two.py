"""Measures the CPU time of a streamed chunk in a router of two models and in a router of one model:

    python -m tests.deployments.several_models.path_of_two

Processes are those of tests/deployments/path_cost.py. `alone`: a router of one model, with so many
streams. `again`: a second such router, which shows how much two equal processes differ. `two`: a
router of two models, each with so many streams. `beside`: a router of two models, of which one gets
requests. Figures are microseconds of the router's CPU per chunk, the minimum of all rounds, because
other work on the machine only adds to them. In each round all routers take turns, and another one
is first. Function calls per chunk are equal in all runs, except for calls that the window of
measurement cuts off, 2 of 41.
"""

import argparse
import asyncio
import time
from contextlib import ExitStack
from typing import Any

from tests.deployments.path_cost import STEP, Spent, process, spend

WAYS = ("alone", "again", "two", "beside")


def measure(streams: int, seconds: float, rounds: int) -> list[dict[str, Any]]:
    """Return lines with `way`, `streams`, `tokens` (a chunk) and either `calls` or `us`.

    Counting takes time itself, so a line has one of the two. rounds: number of timed rounds, or 0.
    """
    lines = []
    with ExitStack() as stack:
        first, second = (stack.enter_context(process("replica", STEP)) for _ in range(2))
        alone, again = (stack.enter_context(process("router", {"a": first})) for _ in range(2))
        both = stack.enter_context(process("router", {"a": first, "b": second}))
        ways = {
            "alone": (alone, streams, ("a",)),
            "again": (again, streams, ("a",)),
            "two": (both, 2 * streams, ("a", "b")),
            "beside": (both, streams, ("a",)),
        }

        def run(way: str, count: bool) -> Spent:
            router, number, models = ways[way]
            pids = [router["pid"]]
            costs = asyncio.run(
                spend(
                    [router["port"]],
                    number,
                    seconds,
                    pids,
                    counting=pids if count else (),
                    models=models,
                )
            )
            time.sleep(0.3)  # until the aborted streams are gone
            return costs

        for number, count in enumerate((True, True, *[False, True] * rounds)):
            turn = number // 2 % len(WAYS)
            for way in WAYS[turn:] + WAYS[:turn]:
                result = run(way, count)
                value = (
                    {"calls": round(result.calls[0] / result.chunks, 2)}
                    if count
                    else {"us": round(result.cpu[0] / result.chunks * 1e6, 2)}
                )
                tokens = round(result.tokens / result.chunks, 3)
                lines.append({"way": way, "streams": ways[way][1], **value, "tokens": tokens})
    return lines


def best(lines: list[dict[str, Any]], figure: str) -> dict[str, float]:
    """Return the least value of a figure, by way."""
    return {
        way: min(line[figure] for line in lines if line["way"] == way and figure in line)
        for way in WAYS
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="CPU of a streamed chunk, with two models.")
    parser.add_argument("--streams", type=int, default=128)
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    lines = measure(options.streams, options.seconds, options.rounds)
    for figure in ("us", "calls"):
        print(figure, best(lines, figure))


if __name__ == "__main__":
    main()
