"""The cost of routing: microseconds of a decision, and of recording each replica's prefixes.

Costs are CPU times, the best of many rounds, so other load on the machine matters little.
"""

import time
import tracemalloc
from collections.abc import Callable
from random import Random

from bench.simulate.fleet.speeds import GPU
from bench.simulate.routing import RoutingRow
from deployments.routing.decision import RoutingRequest
from deployments.routing.fleet import Fleet
from deployments.routing.prefix_index import PrefixIndex, hash_prefix, pack_hashes, unpack_hashes
from deployments.routing.route import route
from engine.messages import EngineStats

PROMPT = 2048  # tokens
_GOALS = {64: 50.0, 1000: 500.0}  # target microseconds per decision, by number of replicas
_PAIRS = 50_000


def all_rows() -> list[RoutingRow]:
    """Return rows with the costs of a routing decision and of recording prefixes.

    Measured are the CPU time of a decision for each fleet of _GOALS, the CPU time of hashing and
    recording a prompt's prefixes, and the bytes that routers send each other.
    """
    dice = Random(1)
    tokens = [dice.randrange(50_000) for _ in range(PROMPT)]
    prefix_hashes = hash_prefix(tokens)
    num_hashes = len(pack_hashes(prefix_hashes))
    # Maximum number of hashes per second of a replica, if it computes only new prompts.
    a_second = num_hashes / (PROMPT * GPU.token)
    rows = [decision(count) for count in _GOALS]
    rows += [
        _alone("prefix/names_of_a_prompt", best(lambda: hash_prefix(tokens)), "us"),
        _alone(
            "prefix/record_a_name",
            best(lambda: _recorded(prefix_hashes)) / len(prefix_hashes),
            "us",
        ),
        _alone(
            "prefix/pack_and_unpack_a_name",
            best(lambda: unpack_hashes(pack_hashes(prefix_hashes))) / len(prefix_hashes),
            "us",
        ),
        _alone("prefix/told_of_a_prompt", num_hashes, "bytes", "to each other router"),
        _alone(
            "prefix/told_a_second",
            a_second,
            "bytes/s",
            "of a busy GPU replica, to each other router",
        ),
    ]
    rows += [
        _alone(f"prefix/memory_of_a_pair/{count}", _memory(count), "bytes") for count in _GOALS
    ]
    return [*rows, _alone("frame", best(_frames(64)), "us")]


def decision(count: int) -> RoutingRow:
    """Measure one decision among `count` replicas, against its target."""
    dice, fleet = Random(1), _fleet(count)
    work = RoutingRequest(2100, 200, prefix_hashes=[dice.randbytes(8) for _ in range(32)])
    for row in range(count):
        fleet.index.add_prefix(work.prefix_hashes[: row % 9], row)
    took, goal = best(lambda: route(work, fleet, dice, 0.0)), _GOALS[count]
    return RoutingRow(
        f"decision/{count}", round(took, 1), goal, "us", round(took / goal, 3), "the goal"
    )


def best(work: Callable[[], object], rounds: int = 30, times: int = 50) -> float:
    """Return the CPU microseconds of one call of `work`, the best of `rounds` rounds."""
    least = 1.0
    for _ in range(rounds):
        began = time.process_time()
        for _ in range(times):
            work()
        least = min(least, (time.process_time() - began) / times)
    return least * 1e6


def _alone(case: str, ours: float, unit: str, note: str = "") -> RoutingRow:
    return RoutingRow(case, round(ours, 2), 0.0, unit, 0.0, note)


def _fleet(count: int) -> Fleet:
    dice, fleet = Random(2), Fleet()
    for number in range(count):
        name = f"gpu/{number}"
        replica = fleet.add_replica(name, "gpu", step_tokens=GPU.chunk)
        replica.opened(1, 0.0)
        stats = EngineStats(running=number % 50, waiting_tokens=dice.randrange(2000))
        replica.observe(stats, (), 0.0)
    return fleet


def _recorded(prefix_hashes: list[bytes]) -> None:
    PrefixIndex().add_prefix(prefix_hashes, 1)


def _memory(count: int) -> float:
    """Return the memory of the prefix index in bytes per (prefix, replica) pair."""
    dice, index = Random(3), PrefixIndex()
    tracemalloc.start()
    for _ in range(_PAIRS):
        index.add_prefix([dice.randbytes(8)], dice.randrange(count))
    size, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return size / len(index)


def _frames(count: int) -> Callable[[], None]:
    """Return a function that writes a frame's state to the fleet's columns."""
    fleet, step = _fleet(count), 0

    def write_frame() -> None:
        nonlocal step
        step += 1
        stats = EngineStats(
            step=step,
            running=8,
            output_tokens=8 * step,
            total_blocks=1000,
            busy_seconds=0.01 * step,
        )
        fleet.replicas["gpu/7"].observe(stats, (), 0.01 * step)
        fleet.refresh()

    return write_frame
