"""SimReplica: an engine replica in discrete events, with continuous batching under a token budget
per step, chunked prefill, a KV limit, a prefix cache and adapter slots.

It is simpler than the engine in three ways. A request reserves KV memory for its whole length when
it starts, so there is no preemption. Shared blocks count for each request that uses them. The time
of a step does not depend on the lengths of contexts.
"""

from collections import OrderedDict, deque
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count

from deployments.routing.prefix_index import STRIDE
from deployments.simulation.speed import Speed
from engine.lora.tiers.popularity import Popularity
from engine.messages import EngineStats
from engine.scheduling.pacing.chunking import prefill_tokens, startable_tokens

_BLOCK = 16
_FRAMES = 0.2  # longest stretch of equal steps simulated at once, in seconds


@dataclass(slots=True, eq=False)
class Job:
    """A request; times are in seconds.

    prefix_hashes: hashes of the prompt's blocks. full_prefix_hashes: those of prompt and output.
    """

    arrival: float
    prompt: int
    output: int
    prefix_hashes: list[bytes] = field(default_factory=list)
    full_prefix_hashes: list[bytes] = field(default_factory=list)
    adapter: str = ""
    router: int = 0
    replica: int = -1
    expected: float = 0.0  # seconds to the first token that the router expected
    cached: int = 0
    left: int = 0  # prompt tokens not yet computed
    first: float = -1.0  # time of the first token
    end: float = -1.0
    number: int = field(default_factory=count(1).__next__)

    def __lt__(self, other: "Job") -> bool:
        return self.arrival < other.arrival


class SimReplica:
    """A simulated replica.

    The caller calls `submit`, then `begin` if the replica is idle, and `finish` at the time that
    `begin` returned.

    popular: whether to evict the least requested adapter, as in our engine, instead of the least
        recently used one.
    """

    def __init__(self, index: int, speed: Speed, routers: int, *, popular: bool = False) -> None:
        self.index = index
        self.speed = speed
        self.waiting: deque[Job] = deque()
        self.late: list[Job] = []  # arrived after the next step was launched
        self.computing: list[Job] = []
        self.decoding: list[tuple[int, Job]] = []  # heap by the step in which each request ends
        self.of_router = [0] * routers  # running requests by router
        # Per router: requests that no frame to this router has counted yet.
        self.taken: list[list[int]] = [[] for _ in range(routers)]
        self.tokens = 0  # reserved KV tokens
        self.cache: OrderedDict[bytes, None] = OrderedDict()
        # adapter -> time from which it is usable; least recently used first
        self.adapters: OrderedDict[str, float] = OrderedDict()
        self.using: dict[str, int] = {}  # running requests by adapter
        self.wanted: dict[str, int] = {}  # running and waiting requests by adapter
        self.popularity = Popularity() if popular else None
        self.step = 0
        self.busy = False
        self.began = 0.0
        self.seconds = 0.0  # seconds per step in the current stretch
        self.steps = 0  # steps in the current stretch
        self.chunk: list[tuple[Job, int]] = []
        self.version = 0
        self.waiting_tokens = self.outputs = self.prompts = self.ended = self.loads = 0
        self.queries = self.hits = 0
        self.busy_seconds = 0.0

    @property
    def running(self) -> int:
        return len(self.computing) + len(self.decoding)

    def submit(self, job: Job) -> None:
        job.left = job.prompt
        (self.late if self.busy and self.speed.ahead else self.waiting).append(job)
        self.waiting_tokens += job.prompt
        self.taken[job.router].append(job.number)
        if job.adapter:
            self.wanted[job.adapter] = self.wanted.get(job.adapter, 0) + 1
            if self.popularity is not None:
                self.popularity.count(job.adapter, job.arrival)

    def begin(self, now: float) -> float:
        """Start the next step, or a stretch of equal steps.

        Returns the time at which to call `finish`: the end, or the next time at which something
        can change. Returns 0.0 without work.
        """
        speed = self.speed
        budget = speed.chunk - len(self.decoding)
        if self.decoding:
            startable = min(speed.max_num_seqs - self.running, len(self.waiting))
            requests = len(self.waiting) + len(self.late)
            queued = startable_tokens(self.waiting_tokens, requests, startable)
            computing = sum(job.left for job in self.computing)
            budget = min(budget, prefill_tokens(queued + computing, speed.chunk))
        chunk = self.chunk = []
        for job in self.computing:
            if budget <= 0:
                break
            length = min(job.left, budget)
            chunk.append((job, length))
            budget -= length
        later = self._admit(now, budget, chunk)
        # No step was launched before these requests arrived.
        if self.late and not chunk and not self.decoding:
            self._take_late()
            later = self._admit(now, budget, chunk)
        if not chunk and not self.decoding:
            self.busy = False
            return later
        self.busy = True
        self.began = now
        tokens = sum(length for _, length in chunk)
        done = sum(length == job.left for job, length in chunk)
        sequences = len(self.decoding) + done
        self.seconds = speed.base + speed.sequence * sequences + speed.token * tokens
        self.steps = 1
        if not chunk:
            until = min(later - now if later else _FRAMES, _FRAMES)
            self.steps = max(1, min(self.decoding[0][0] - self.step, int(until / self.seconds)))
        if self.late:
            self.steps = 1
            self._take_late()
        return now + self.steps * self.seconds

    def interrupt(self, now: float) -> float:
        """End the current stretch after the current step, because a request arrived.

        Returns the new time of its end.
        """
        if self.steps > 1:
            self.steps = min(self.steps, int((now - self.began) / self.seconds) + 1)
        return self.began + self.steps * self.seconds

    def finish(self, now: float) -> list[Job]:
        """Finish a stretch: record first tokens, and return the requests that ended."""
        self.step += self.steps
        self.busy_seconds += self.steps * self.seconds
        self.outputs += self.steps * len(self.decoding)
        ended = []
        while self.decoding and self.decoding[0][0] <= self.step:
            ended.append(heappop(self.decoding)[1])
        for job, length in self.chunk:
            job.left -= length
            self.prompts += length
            if job.left:
                continue
            self.computing.remove(job)
            job.first = now
            self.outputs += 1
            if job.output <= 1:
                ended.append(job)
            else:
                heappush(self.decoding, (self.step + job.output - 1, job))
        self.chunk = []
        for job in ended:
            job.end = now
            self.ended += 1
            self.tokens -= job.prompt + job.output
            self.of_router[job.router] -= 1
            if job.adapter:
                self.using[job.adapter] -= 1
                self.wanted[job.adapter] -= 1
            self._keep(job.full_prefix_hashes or job.prefix_hashes)
        return ended

    def stats(self) -> EngineStats:
        """Return the statistics that a frame of this replica contains."""
        free = max(0, self.speed.kv_tokens - self.tokens)
        return EngineStats(
            step=self.step,
            running=self.running,
            waiting=len(self.waiting) + len(self.late),
            waiting_tokens=self.waiting_tokens + sum(job.left for job in self.computing),
            free_blocks=free // _BLOCK,
            total_blocks=self.speed.kv_tokens // _BLOCK,
            block_size=_BLOCK,
            prefix_queries=self.queries,
            prefix_hits=self.hits,
            prompt_tokens=self.prompts,
            output_tokens=self.outputs,
            step_seconds=self.seconds,
            busy_seconds=self.busy_seconds,
            finished=self.ended,
            adapters=sorted(self.adapters, key=self._rank, reverse=True)
            if self.popularity is not None
            else list(reversed(self.adapters)),
            adapter_loads=self.loads,
            rows=self.speed.max_num_seqs,
            routers=len(self.of_router),
        )

    def _admit(self, now: float, budget: int, chunk: list[tuple[Job, int]]) -> float:
        """Admit waiting requests in order, skipping those whose adapter is loading.

        budget: the step's remaining prompt tokens.
        chunk: list to which (request, its prompt tokens in the step) are appended.

        Returns the time at which the first loading adapter will be usable, or 0.
        """
        later = 0.0
        skipped: list[Job] = []
        waiting = self.waiting
        while waiting and budget > 0 and self.running < self.speed.max_num_seqs:
            job = waiting[0]
            if self.tokens + job.prompt + job.output > self.speed.kv_tokens and self.running:
                break
            waiting.popleft()
            if job.adapter:
                usable = self._load(job.adapter, now)
                if usable > now:
                    later = min(later or usable, usable)
                    skipped.append(job)
                    continue
                self.using[job.adapter] = self.using.get(job.adapter, 0) + 1
            self.waiting_tokens -= job.prompt
            self.tokens += job.prompt + job.output
            self.of_router[job.router] += 1
            held = 0
            for prefix_hash in job.prefix_hashes:
                if prefix_hash not in self.cache:
                    break
                self.cache.move_to_end(prefix_hash)
                held += 1
            job.cached = held * STRIDE
            self.queries += job.prompt
            self.hits += job.cached
            job.left = job.prompt - job.cached
            self._keep(job.prefix_hashes)
            self.computing.append(job)
            length = min(job.left, budget)
            chunk.append((job, length))
            budget -= length
        waiting.extendleft(reversed(skipped))
        return later

    def _take_late(self) -> None:
        self.waiting.extend(self.late)
        self.late.clear()

    def _load(self, adapter: str, now: float) -> float:
        """Load an adapter; return the time from which it is usable, inf if all slots are in use."""
        if adapter in self.adapters:
            self.adapters.move_to_end(adapter)
            return self.adapters[adapter]
        if len(self.adapters) >= self.speed.slots:
            victims = (
                name
                for name, usable in self.adapters.items()
                if not self.using.get(name) and usable <= now
            )
            if self.popularity is None:
                victim = next(victims, None)
            else:
                victim = min(victims, key=self._rank, default=None)
            if victim is None:
                return now + 0.01  # try again then, as a slot may be free
            del self.adapters[victim]
        self.loads += 1
        self.adapters[adapter] = now + self.speed.adapter_seconds
        return self.adapters[adapter]

    def _rank(self, adapter: str) -> tuple[bool, float]:
        """Return an adapter's sort key for eviction: (whether requests wait for it, popularity).

        The adapter with the smallest key is evicted.
        """
        assert self.popularity is not None
        return self.wanted.get(adapter, 0) > 0, self.popularity[adapter]

    def _keep(self, prefix_hashes: list[bytes]) -> None:
        cache = self.cache
        # In reverse order, so that a prefix's last blocks are evicted first.
        for prefix_hash in reversed(prefix_hashes):
            cache[prefix_hash] = None
            cache.move_to_end(prefix_hash)
        room = max(0, self.speed.kv_tokens - self.tokens) // STRIDE + 16
        while len(cache) > room:
            cache.popitem(last=False)
