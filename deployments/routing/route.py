"""route: picks the replica for a request, by the expected time to its first tokens and the delay of
other requests.

The function uses no clock and no Ray. Costs are in seconds. The cost of a replica is the sum of:

  the wait for its queue + uncached prompt tokens x its seconds per token
  + output tokens x its seconds per step      (slow streams count, too)
  + the delay of requests that run there      (HARM)
  + the wait for memory, if the prompt does not fit now
  + loading the adapter, if the replica lacks it, and evicting another one
  + the time since its overdue frame, if it is busy and silent

If a replica can pull the prefix from another one (engine.kv_moves) in less time than the prefill
takes, its cost includes the pull instead of the prefill. Tokens in a replica's host memory or on
its disk cost the seconds of loading them.

A client's session remains at its replica, unless the replica is gone, has no room, or its queue is
`_SESSION_SECONDS` longer than the shortest. For a session that this router does not know there are
two cases. If some cache has most of the prompt, another router knows the session, and the cost
decides. Otherwise the session begins at a replica that consistent hashing chooses.

Costs within `_TIE` of each other count as equal, because a queue's length is known to half a step
at best. Among equal replicas, one that has the prefix or the adapter is chosen. If none has it,
consistent hashing decides, so that routers agree without communication, and more replicas are used
as the load grows (consistent hashing with bounded loads; `_TIE` is the bound). For a request
without prefix and adapter, the better of two random replicas is chosen.
"""

from collections.abc import Sequence
from functools import lru_cache
from hashlib import blake2b
from random import Random

import numpy as np
from numpy.typing import NDArray

from deployments.routing.decision import Reason, RoutingDecision, RoutingRequest
from deployments.routing.fleet import (
    DECODE,
    FIXED,
    MOVE_SECONDS,
    MOVE_TOKENS,
    TOKEN,
    Fleet,
)
from deployments.routing.prefix_index import STRIDE

# Maximum number of output tokens in the cost, because users notice the beginning most, and the
# length is unknown.
_OUTPUT_HORIZON = 64
_OUTPUT_WEIGHT = 0.1  # weight of a second during output against a second before the first token
# Difference up to which costs count as equal: a share of the lowest cost, plus a number of steps.
_TIE = (0.05, 0.5)
# The number of steps for requests with an adapter. It is larger, as each copy of an adapter takes
# the slot of another adapter.
_ADAPTER_TIE = 2.0
_VICTIM = 2.0  # maximum cost of evicting another adapter, in adapter loads
# Seconds by which the queue of a session's replica may be longer than the shortest queue.
_SESSION_SECONDS = 1.0
# Weight of the seconds of an adapter load, because the slot that it takes costs more than the
# delay.
_COPY = 4.0


def route(
    request: RoutingRequest,
    fleet: Fleet,
    random: Random,
    now: float,
    *,
    among: Sequence[str] | None = None,
    avoid: str = "",
    with_room: bool = False,
) -> RoutingDecision | None:
    """Return the decision to which replica a request should be sent; None if no replica is
    available.

    The fleet is not changed; `Fleet.send` must be called when the choices are sent.

    now: seconds of the clock of `ReplicaState.observe`.

    among: names of the replicas that may be chosen; None: all.
    avoid: name of a replica that is chosen only if there is no other, such as one that has just
        failed this request.
    with_room: whether only replicas with room for more choices may be chosen (`Fleet.places`).
    """
    fleet.refresh()
    terms = fleet.terms
    if not terms.shape[1]:
        return None
    tokens = request.prompt_tokens + (request.sequences - 1) * min(STRIDE, request.prompt_tokens)
    output = _OUTPUT_WEIGHT * min(request.max_tokens, _OUTPUT_HORIZON)
    cost: NDArray[np.float64] = np.array((1.0, tokens, output)) @ terms  # FIXED, TOKEN, DECODE
    over = np.maximum(tokens - fleet.room, 0.0)
    if over.max() > 0:
        cost += np.where(over > 0, fleet.ending + over * fleet.beyond, 0.0)
    late = now - fleet.due
    if late.max() > 0:
        cost += np.maximum(late, 0.0)
    cached: NDArray[np.float64] | None = None
    low: NDArray[np.float64] | None = None
    if request.prefix_hashes:
        matches = fleet.index.match(request.prefix_hashes)
        if matches:
            cached = np.zeros(len(cost))
            for holders, prefix_hashes in matches:
                cached[_columns(holders, len(cost))] = prefix_hashes * STRIDE
            cost -= cached * terms[TOKEN]
            low = _lowered(fleet, request.prefix_hashes, cached)
            if low is not None:
                cost += low * fleet.load
    pulled: NDArray[np.float64] | None = None
    source = -1
    if cached is not None and np.isfinite(fleet.move).any():
        source, pulled = _moves(fleet, cached, low)
        cost -= pulled
    has: NDArray[np.bool_] | None = None
    if request.adapter:
        load = fleet.adapter_seconds
        own = fleet.popularity[request.adapter] + fleet.popularity.request_units(now)
        absent = _COPY * load * (1 + np.minimum(_VICTIM, fleet.victim / own))
        holding = fleet.holders.get(request.adapter)
        if holding:
            has = np.zeros(len(cost), np.bool_)
            has[list(holding)] = True
            absent[has] = 0.0
        cost += absent
    if with_room:
        places = fleet.batch_places if request.batch_work else fleet.places
        cost[places <= 0] = np.inf
    if among is not None and len(among) < len(fleet.replicas):
        allowed = np.full(len(cost), np.inf)
        allowed[[fleet.replicas[name].column for name in among]] = 0.0
        cost += allowed
    if avoid and avoid in fleet.replicas and np.isfinite(cost).sum() > 1:
        cost[fleet.replicas[avoid].column] = np.inf
    best = int(cost.argmin())
    lowest = float(cost[best])
    if lowest == np.inf:
        return None
    steps = _ADAPTER_TIE if request.adapter else _TIE[1]
    bound = lowest + _TIE[0] * abs(lowest) + steps * fleet.step[best]
    equal = (cost <= bound).nonzero()[0]
    column = -1
    reason: Reason = "session"
    if request.session:
        column = _pinned(request, fleet, cost, cached, now)
    if column < 0:
        column, reason = _choose(request, fleet, random, cost, equal, cached, low, has)
    saved = 0 if cached is None else int(cached[column])
    chosen = fleet.columns[column]
    assert chosen is not None
    holder = None
    if cached is not None and pulled is not None and pulled[column] > 0:
        holder, reason = fleet.columns[source], "move"
        saved = int(cached[source] - (0 if low is None else low[source]))
    return RoutingDecision(
        chosen.name,
        reason,
        float(cost[column] - output * terms[DECODE, column]),
        saved,
        bool(request.adapter) and not (has is not None and has[column]),
        "" if holder is None else holder.name,
    )


def _lowered(
    fleet: Fleet, prefix_hashes: Sequence[bytes], cached: NDArray[np.float64]
) -> NDArray[np.float64] | None:
    """Return, by column, the number of cached tokens that the replica must load from host memory or
    disk; None if it is 0 for all.

    cached: prompt tokens in the cache, by column.
    """
    lowered = fleet.index.lowered(prefix_hashes)
    if not lowered:
        return None
    low = np.zeros(len(cached))
    for index, holders in lowered:
        low[_columns(holders, len(low))] += STRIDE * (
            cached[_columns(holders, len(low))] > index * STRIDE
        )
    return low


def _moves(
    fleet: Fleet, cached: NDArray[np.float64], low: NDArray[np.float64] | None
) -> tuple[int, NDArray[np.float64]]:
    """Return the column of the replica from which others may pull the prefix and, by column, the
    seconds that a pull saves there; 0 if computing is faster.

    cached: prompt tokens in the cache, by column.
    low: number of them in host memory or on disk, from where blocks cannot be pulled; None: 0 for
        all.
    """
    held = np.where(np.isfinite(fleet.move), cached if low is None else cached - low, 0.0)
    most = held.max()
    sources = (held == most).nonzero()[0]
    source = int(sources[fleet.terms[FIXED, sources].argmin()])
    lacking = np.maximum(most - cached, 0.0)
    with np.errstate(invalid="ignore"):
        saved = lacking * (fleet.terms[TOKEN] - fleet.move) - MOVE_SECONDS
    saved[~(saved > 0) | (lacking < MOVE_TOKENS)] = 0.0
    return source, saved


def _pinned(
    request: RoutingRequest,
    fleet: Fleet,
    cost: NDArray[np.float64],
    cached: NDArray[np.float64] | None,
    now: float,
) -> int:
    """Return the column of the replica for the request's session; -1 if the cost decides, because
    the session's replica cannot be used or another router knows the session.

    cost: cost by column. cached: prompt tokens in the cache, by column; None: 0 for all.
    """
    possible = np.isfinite(cost).nonzero()[0]
    place = fleet.replicas.get(fleet.sessions.place(request.session))
    if place is not None and place.available:
        column = place.column
    elif cached is not None and 2 * cached[possible].max() > STRIDE * len(request.prefix_hashes):
        return -1
    else:
        column = _owner(fleet, possible, request.session)
    queues = fleet.terms[FIXED] + np.maximum(now - fleet.due, 0.0)
    if cost[column] == np.inf or queues[column] > queues[possible].min() + _SESSION_SECONDS:
        return -1
    return column


def _choose(
    request: RoutingRequest,
    fleet: Fleet,
    random: Random,
    cost: NDArray[np.float64],
    equal: NDArray[np.intp],
    cached: NDArray[np.float64] | None,
    low: NDArray[np.float64] | None,
    has: NDArray[np.bool_] | None,
) -> tuple[int, Reason]:
    """Return one of the columns in `equal`, and the `RoutingDecision.reason`.

    cost, cached, low, has: by column, the cost, the number of cached prompt tokens, the number of
        these to load from host memory or disk, and whether the replica has the adapter; None: no
        replica has any.
    equal: the columns whose costs count as equal.
    """
    if request.adapter:
        if has is not None:
            warm = equal[has[equal]]
            if len(warm):
                return _owner(fleet, warm, _key(request.adapter)), "adapter"
        return _owner(fleet, equal, _key(request.adapter)), "owner" if has is None else "spill"
    if request.prefix_hashes:
        if cached is not None:
            most = cached.max()
            warm = equal[cached[equal] == most]
            if len(warm):
                if low is not None:  # a hit on the device comes before one in host memory
                    warm = warm[low[warm] == low[warm].min()]
                return _of_two(random, cost, warm), "prefix"
            return _owner(fleet, equal, request.prefix_hashes[int(most) // STRIDE - 1]), "spill"
        return _owner(fleet, equal, request.prefix_hashes[0]), "owner"
    if len(cost) == 1:
        return int(equal[0]), "only"
    return _of_two(random, cost, equal), "load"


def _of_two(random: Random, cost: NDArray[np.float64], columns: NDArray[np.intp]) -> int:
    if len(columns) == 1:
        return int(columns[0])
    first, other = columns[random.randrange(len(columns))], columns[random.randrange(len(columns))]
    return int(first if cost[first] <= cost[other] else other)


def _owner(fleet: Fleet, columns: NDArray[np.intp], key: bytes) -> int:
    """Return the column that rendezvous hashing chooses for a key, among `columns`."""
    if len(columns) == 1:
        return int(columns[0])
    mixed = fleet.hashes[columns] ^ np.uint64(int.from_bytes(key[:8], "little"))
    mixed *= np.uint64(0x9E3779B97F4A7C15)
    mixed ^= mixed >> np.uint64(29)
    mixed *= np.uint64(0xBF58476D1CE4E5B9)
    return int(columns[int((mixed ^ (mixed >> np.uint64(32))).argmax())])


def _columns(holders: int, count: int) -> NDArray[np.bool_] | int:
    """Convert the bit set `holders` into a NumPy index that selects these columns in arrays by
    column.

    count: number of columns.
    """
    if not holders & (holders - 1):
        return holders.bit_length() - 1
    data = np.frombuffer(holders.to_bytes((count + 7) // 8, "little"), np.uint8)
    return np.unpackbits(data, count=count, bitorder="little").view(np.bool_)


@lru_cache(4096)
def _key(adapter: str) -> bytes:
    return blake2b(adapter.encode(), digest_size=8).digest()
