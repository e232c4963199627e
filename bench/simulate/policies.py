"""Routing policies: Manta's own function, and those of other systems.

The others get better information than in reality: exact counts of requests in flight at any time,
and one prefix tree shared by all routers.
"""

from collections.abc import Sequence
from random import Random

from bench.simulate.fleet.cluster import NOWHERE
from bench.simulate.fleet.replica import Job, SimReplica
from deployments.routing.decision import RoutingRequest
from deployments.routing.fleet import Fleet
from deployments.routing.prefix_index import FORWARDED_HASHES, STRIDE
from deployments.routing.route import route

_NEWS = 0.05  # seconds between a replica's frames to a router without tokens in its steps
_FRAME_GAP = 0.02  # seconds within which frames are merged, to speed up the simulation


class _Counting:
    """The base class of policies that count each replica's requests in flight."""

    name = ""
    popular = False

    def start(self, replicas: Sequence[SimReplica], routers: int, dice: Random) -> None:
        self.replicas = replicas
        self.dice = dice
        self.in_flight = [0] * len(replicas)
        self.turn = [dice.randrange(len(replicas)) for _ in range(routers)]

    def choose(self, job: Job, now: float) -> int:
        index = self.pick(job)
        self.in_flight[index] += 1
        return index

    def pick(self, job: Job) -> int:
        raise NotImplementedError

    def frame(self, replica: SimReplica, now: float) -> None:
        return None

    def first(self, job: Job, now: float) -> None:
        return None

    def end(self, job: Job, now: float) -> None:
        self.in_flight[job.replica] -= 1


class RoundRobin(_Counting):
    """A policy by which each router takes the replicas in rotation."""

    name = "round-robin"

    def pick(self, job: Job) -> int:
        self.turn[job.router] = (self.turn[job.router] + 1) % len(self.replicas)
        return self.turn[job.router]


class TwoChoices(_Counting):
    """Ray Serve's default policy: of two random replicas, the one with fewer requests in flight."""

    name = "two-choices"

    def pick(self, job: Job) -> int:
        replica = self.dice.randrange(len(self.replicas))
        other = self.dice.randrange(len(self.replicas))
        return replica if self.in_flight[replica] <= self.in_flight[other] else other


class OurSlots(TwoChoices):
    """The policy of two choices in front of engines with Manta's eviction of adapters.

    Manta's gain over this policy is due to routing alone.
    """

    name = "two-choices, our slots"
    popular = True


class PrefixTree(TwoChoices):
    """A policy that chooses the longest match in a tree of sent prompts, unless loads are uneven.

    threshold: share of the prompt that must match; otherwise the replica with the smallest tree is
        chosen.
    uneven: (largest - smallest, largest / smallest) requests in flight above which the least loaded
        replica is chosen.

    SGLang's router has uneven = (64, 1.5). Ray Serve LLM's prefix router has no such limit, and
    uses two choices for a poor match.
    """

    def __init__(self, name: str, threshold: float, uneven: tuple[float, float] | None) -> None:
        self.name = name
        self.threshold = threshold
        self.uneven = uneven

    def start(self, replicas: Sequence[SimReplica], routers: int, dice: Random) -> None:
        super().start(replicas, routers, dice)
        self.tree: dict[bytes, int] = {}
        self.sizes = [0] * len(replicas)

    def pick(self, job: Job) -> int:
        index = self._pick(job)
        bit = 1 << index
        for prefix_hash in job.prefix_hashes:
            known = self.tree.get(prefix_hash, 0)
            if not known & bit:
                self.tree[prefix_hash] = known | bit
                self.sizes[index] += 1
        return index

    def _pick(self, job: Job) -> int:
        if self.uneven is not None:
            most, least = max(self.in_flight), min(self.in_flight)
            if most - least > self.uneven[0] and most > self.uneven[1] * least:
                return self.in_flight.index(least)
        holders, depth = 0, 0
        for prefix_hash in job.prefix_hashes:
            now = self.tree.get(prefix_hash, 0) & (holders or -1)
            if not now:
                break
            holders, depth = now, depth + 1
        if depth * STRIDE > self.threshold * job.prompt:
            rows = [i for i in range(holders.bit_length()) if holders >> i & 1]
            return min(rows, key=lambda i: (self.in_flight[i], self.sizes[i]))
        if self.uneven is None:
            return super().pick(job)
        return self.sizes.index(min(self.sizes))


class MantaRouting:
    """Manta's own `route`, with a `Fleet` for each router.

    ready: indices of the replicas that may be chosen; None: all.
    """

    name = "manta"
    popular = True
    ready: Sequence[int] | None = None

    def start(self, replicas: Sequence[SimReplica], routers: int, dice: Random) -> None:
        self.replicas = replicas
        self.dice = dice
        self.news: list[list[list[bytes]]] = [[[] for _ in replicas] for _ in range(routers)]
        self.fleets = [Fleet() for _ in range(routers)]
        self.told = [[0.0] * len(replicas) for _ in range(routers)]
        self.reasons: dict[str, int] = {}
        for fleet in self.fleets:
            for replica in replicas:
                speed = replica.speed
                name = str(replica.index)
                fleet.add_replica(
                    name,
                    speed.pool,
                    step_tokens=speed.chunk,
                    adapter_slots=speed.slots,
                )
                state = fleet.replicas[name]
                state.opened(fleet.routers(), 0.0)
                state.observe(replica.stats(), (), 0.0)

    def choose(self, job: Job, now: float) -> int:
        if self.ready is not None and not self.ready:
            return NOWHERE
        fleet = self.fleets[job.router]
        work = RoutingRequest(job.prompt, 256, 1, job.prefix_hashes, job.adapter)
        among = None if self.ready is None else [str(index) for index in self.ready]
        decision = route(work, fleet, self.dice, now, among=among)
        assert decision is not None
        self.reasons[decision.reason] = self.reasons.get(decision.reason, 0) + 1
        index = int(decision.replica)
        fleet.send(fleet.replicas[decision.replica], [job.number], decision, work, now)
        for router, news in enumerate(self.news):
            if router != job.router and job.prefix_hashes:
                news[index].append(job.prefix_hashes[:FORWARDED_HASHES])
        job.expected = decision.seconds
        return index

    def frame(self, replica: SimReplica, now: float) -> None:
        stats = None
        idle = not replica.running and not replica.waiting
        for router, fleet in enumerate(self.fleets):
            gap = now - self.told[router][replica.index]
            least = _FRAME_GAP if replica.of_router[router] else _NEWS
            if gap >= least or idle:
                stats = stats or replica.stats()
                state = fleet.replicas[str(replica.index)]
                requests, replica.taken[router] = replica.taken[router], []
                state.observe(stats, requests, now)
                self.told[router][replica.index] = now
                news = self.news[router][replica.index]
                if news:
                    for prefix_hashes in news:
                        fleet.add_prefix(state, prefix_hashes)
                    news.clear()

    def first(self, job: Job, now: float) -> None:
        fleet = self.fleets[job.router]
        fleet.replicas[str(job.replica)].begun(job.number)

    def end(self, job: Job, now: float) -> None:
        fleet = self.fleets[job.router]
        fleet.replicas[str(job.replica)].unbook(job.number)
