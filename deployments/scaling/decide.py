"""decide(pools, observed, demand, history, objective) -> plan: how many replicas each pool should
have, and why. Pure: no clock, no Ray; the simulator and the live policy call the same function.

Work is counted in replicas: tokens that arrive each second over what a replica of the pool was
measured to do. A pool needs

    arriving work when a replica started now would be ready / objective.busy + waiting work

A pool grows at once. A replica takes `start_seconds` to be ready, so the trend of the last minute
is extrapolated that far. A pool shrinks only to what the whole last `calm_seconds` would have
needed, so that counts do not swing. Of two pools, the one that does the work at the lower price
carries it. The other takes what the first cannot do yet, and leaves when the first can.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate

_TREND_SECONDS = 60.0  # of the past that the trend is fitted to
_SAMPLE_SECONDS = 2.0  # the history keeps no closer samples
_KV_FULL = (
    0.85  # share of the KV cache in use beyond which, if something waits, a pool is too small
)
_LEVEL_SECONDS = 20.0  # the present level is the mean of these
_SLACK = 0.04  # of a replica's time: replicas go only when the rest would still have it to spare
_DRAIN = 0.65  # of the start-up time, in which the work that gathered until then should be done
_HELD = 5.0  # times ttft: a cheap pool that is further behind does not carry all alone
_RETURN = 0.7  # of what the cheap pool could carry: below it the other pool's replicas go


@dataclass(frozen=True, slots=True)
class PoolModel:
    """A kind of replica, as measured.

    prompt_rate, output_rate: tokens/s of a busy replica that does nothing else.
    start_seconds: seconds from the decision to the first answer, a new node included.
    price: price of an hour.
    """

    prompt_rate: float
    output_rate: float
    start_seconds: float
    price: float = 1.0
    minimum: int = 0
    maximum: int = 1

    def work(self, prompt_rate: float, output_rate: float) -> float:
        """Return how many replicas these tokens/s keep busy."""
        return prompt_rate / self.prompt_rate + output_rate / self.output_rate


@dataclass(frozen=True, slots=True)
class PoolState:
    """The replicas of a pool now.

    ready, starting: numbers of replicas.
    kv_used: share of KV blocks, over the replicas that are ready.
    """

    ready: int
    starting: int = 0
    kv_used: float = 0.0


@dataclass(frozen=True, slots=True)
class Demand:
    """The work that arrives, waits and runs.

    now: seconds of any clock.
    prompt_rate, output_rate: tokens/s that arrive, the output as its requests are expected to have.
    waiting_tokens: prompt tokens not yet computed.
    waiting: requests that no replica has taken.
    running: requests that a replica has.
    """

    now: float
    prompt_rate: float
    output_rate: float
    waiting_tokens: float = 0.0
    waiting: int = 0
    running: int = 0


@dataclass(frozen=True, slots=True)
class ServiceObjective:
    """The objective of scaling.

    ttft: seconds to the first token that users are promised.
    busy: share of a replica's time that may be planned for.
    calm_seconds: seconds that demand must have been lower before replicas go.
    idle_seconds: seconds without a request before the last replica goes, where the minimum is 0.
    """

    ttft: float = 2.0
    busy: float = 0.93
    calm_seconds: float = 120.0
    idle_seconds: float = 300.0


@dataclass(frozen=True, slots=True)
class ScalingHistory:
    """The past that the next decision needs.

    samples: (second, prompt rate, output rate), oldest first.
    busy_at: second when there was work.
    targets: targets of the last plan.
    started_at: second by pool when the replicas that start now were wanted.
    raised_at: second by pool when its target last rose.
    """

    samples: tuple[tuple[float, float, float], ...] = ()
    busy_at: float = -math.inf
    targets: Mapping[str, int] = field(default_factory=dict)
    started_at: Mapping[str, float] = field(default_factory=dict)
    raised_at: Mapping[str, float] = field(default_factory=dict)


class ScalingReason(str):
    """A sentence for operators. cause: one word for it, for metrics.

    work, trend, backlog, kv: more or as many for what arrives, will arrive, waits, or fills the
    cache. calm, idle: fewer, after a quiet time. needed, grown, silent, handover: no fewer yet,
    because the last minutes needed them, they have just come, not all replicas are heard of, or
    another pool is not ready. overflow, beyond: in the place of another pool that starts, or is at
    its maximum. held: another pool carries everything. minimum, maximum: a limit has the last word.
    """

    cause: str

    def __new__(cls, cause: str, text: str) -> "ScalingReason":
        self = super().__new__(cls, text)
        self.cause = cause
        return self


@dataclass(frozen=True, slots=True)
class ScalingPlan:
    """The outcome of one decision.

    targets, reasons: target and reason by pool.
    history: history for the next call.
    """

    targets: dict[str, int]
    reasons: dict[str, ScalingReason]
    history: ScalingHistory


def decide(
    pools: Mapping[str, PoolModel],
    observed: Mapping[str, PoolState],
    demand: Demand,
    history: ScalingHistory,
    objective: ServiceObjective,
) -> ScalingPlan:
    """Decide how many replicas each pool should have, every second or so. There is at least one
    pool."""
    history = _remember(
        history, demand, objective, any(state.starting for state in observed.values())
    )
    names = sorted(pools, key=lambda name: _price(pools[name], demand))
    main = names[0]
    targets: dict[str, int] = {}
    reasons: dict[str, ScalingReason] = {}
    started = {
        name: history.started_at.get(name, demand.now) if observed[name].starting else demand.now
        for name in names
    }
    idle = demand.now - history.busy_at >= objective.idle_seconds
    holder = _holder(pools, names, observed, demand, history, objective)
    for name in names:
        pool = pools[name]
        if idle:
            count, reason = 0, ScalingReason("idle", f"nothing for {objective.idle_seconds:.0f} s")
        elif holder is not None and name != holder:
            count, reason = 0, ScalingReason("held", f"{holder} carries it")
        elif holder is not None or name == main:
            count, reason = _carry(
                pool, observed[name], demand, history, objective, demand.now - started[name]
            )
            have = observed[name].ready + observed[name].starting
            if (
                count < have
                and demand.now - history.raised_at.get(name, -math.inf) < _LEVEL_SECONDS
            ):
                # The work that it grew for is not yet in the level that it would shrink to.
                count, reason = have, ScalingReason("grown", "it has just grown")
        else:
            count, reason = _overflow(pools[main], observed[main], pool, demand, objective)
            before = history.targets.get(name, 0)
            if count < before and observed[main].starting:
                count, reason = before, ScalingReason("handover", f"until {main} is ready")
            cheaper = [(pools[other], targets[other]) for other in targets]
            beyond = _beyond(pool, observed[name], cheaper, demand, history, objective)
            if beyond > count:
                text = f"beyond what {' and '.join(targets)} can do"
                count, reason = beyond, ScalingReason("beyond", text)
        # A pool that hands over keeps its replicas until the other pool is ready.
        takers = [other for other in names if other != name]
        have = observed[name].ready + observed[name].starting
        if count < have and takers and not idle and name != main and holder is None:
            arrived = observed[main].ready >= targets[main]
            count = count if arrived else max(count, observed[name].ready)
        elif count < have and holder not in (None, name) and observed[str(holder)].ready == 0:
            count, reason = have, ScalingReason("handover", f"until {holder} is ready")
        bounded = min(max(count, pool.minimum), pool.maximum)
        if bounded > count:
            reason = ScalingReason("minimum", f"minimum; {reason}")
        elif bounded < count:
            reason = ScalingReason("maximum", f"maximum, {count} wanted; {reason}")
        targets[name], reasons[name] = bounded, reason
    rose = {name for name in names if targets[name] > history.targets.get(name, 0)}
    raised = {**history.raised_at, **dict.fromkeys(rose, demand.now)}
    history = replace(history, targets=targets, started_at=started, raised_at=raised)
    return ScalingPlan(targets, reasons, history)


def keep(plan: ScalingPlan, targets: Mapping[str, int], reason: str) -> ScalingPlan:
    """The plan without its decreases."""
    low = {name for name, target in plan.targets.items() if target < targets.get(name, 0)}
    lowered = {name: targets[name] if name in low else plan.targets[name] for name in plan.targets}
    silent = ScalingReason("silent", reason)
    reasons = {name: silent if name in low else plan.reasons[name] for name in plan.reasons}
    return ScalingPlan(lowered, reasons, replace(plan.history, targets=lowered))


def _remember(
    history: ScalingHistory, demand: Demand, objective: ServiceObjective, starting: bool
) -> ScalingHistory:
    samples = history.samples
    sample = (demand.now, demand.prompt_rate, demand.output_rate)
    asked = demand.prompt_rate > 0 or demand.waiting > 0 or demand.waiting_tokens > 0
    # No new request, but an answer that takes longer than that, or a replica that starts.
    busy = asked or demand.running > 0 or starting
    since = demand.now if busy or history.busy_at == -math.inf else history.busy_at
    if samples and demand.now - samples[-1][0] < _SAMPLE_SECONDS:
        return replace(history, busy_at=since)  # a request that wakes a pool waits for no sample
    span = max(objective.calm_seconds + _LEVEL_SECONDS, _TREND_SECONDS)
    samples = (*(past for past in samples if past[0] > demand.now - span), sample)
    return replace(history, samples=samples, busy_at=since)


def _works(pool: PoolModel, demand: Demand, history: ScalingHistory) -> list[tuple[float, float]]:
    """Return (second, work) of the time that the trend is taken from."""
    since = demand.now - _TREND_SECONDS
    return [
        (when, pool.work(prompt, output))
        for when, prompt, output in history.samples
        if when > since
    ]


def _knows_calm(demand: Demand, history: ScalingHistory, objective: ServiceObjective) -> bool:
    """Whether the history goes back far enough to let replicas go."""
    return history.samples[0][0] <= demand.now - objective.calm_seconds


def _levels(pool: PoolModel, history: ScalingHistory, objective: ServiceObjective) -> list[float]:
    """Return the work of the calm time, as smooth as the present level."""
    last = history.samples[-1][0]
    window = sum(when > last - _LEVEL_SECONDS for when, _, _ in history.samples)
    since = last - objective.calm_seconds - _LEVEL_SECONDS
    works = [pool.work(prompt, output) for when, prompt, output in history.samples if when >= since]
    sums = [0.0, *accumulate(works)]
    window = min(window, len(works))
    return [(b - a) / window for a, b in zip(sums, sums[window:], strict=False)]


def _backlog(pool: PoolModel, demand: Demand, history: ScalingHistory) -> float:
    """Return the seconds of one replica for the waiting work. The answers are taken to be as long
    as the recent ones, also when no request arrives any more."""
    prompt = sum(prompt for _, prompt, _ in history.samples)
    output = sum(output for _, _, output in history.samples)
    ratio = output / prompt if prompt else 1.0
    return pool.work(demand.waiting_tokens, ratio * demand.waiting_tokens)


def _price(pool: PoolModel, demand: Demand) -> float:
    """Return the price of a unit of this demand's work in a pool."""
    return pool.price * pool.work(max(1.0, demand.prompt_rate), max(1.0, demand.output_rate))


def _holder(
    pools: Mapping[str, PoolModel],
    names: Sequence[str],
    observed: Mapping[str, PoolState],
    demand: Demand,
    history: ScalingHistory,
    objective: ServiceObjective,
) -> str | None:
    """Return the dearer pool that carries everything for less than one replica of the first costs:
    a CPU replica at night. None if there is none. Dearer is by the token."""
    main = pools[names[0]]
    if main.minimum > 0:
        return None
    known = history.samples[-1][0] - history.samples[0][0]
    if known < objective.calm_seconds and observed[names[0]].ready + observed[names[0]].starting:
        return None  # a new controller or policy does not know what the replicas there are for
    for name in names[1:]:
        pool = pools[name]
        last = [pool.work(prompt, output) for _, prompt, output in history.samples[-2:]]
        most = max(*_levels(pool, history, objective), min(last))
        # While the first pool has a replica it must be clearly less, or the two would alternate.
        share = _RETURN if history.targets.get(names[0], 0) else 1.0
        count = max(1, math.ceil(most / objective.busy))
        affordable = min(pool.maximum, math.ceil(main.price / pool.price) - 1)
        late = _backlog(pool, demand, history) > _HELD * objective.ttft * affordable
        if count <= affordable and most <= share * affordable * objective.busy and not late:
            return name
    return None


def _carry(
    pool: PoolModel,
    observed: PoolState,
    demand: Demand,
    history: ScalingHistory,
    objective: ServiceObjective,
    started: float,
) -> tuple[int, ScalingReason]:
    """Return how many replicas this pool needs to do all the work, and why.

    started: seconds since the replicas that start now were wanted.
    """
    works = _works(pool, demand, history)
    level, slope = _trend(works)
    ahead = level + slope * pool.start_seconds
    have = observed.ready + observed.starting
    # Waiting work, and work that gathers until the starting replicas are ready: seconds of one
    # replica.
    until = max(0.0, pool.start_seconds - started)
    gathered = _backlog(pool, demand, history) + until * max(0.0, level - observed.ready)
    extra = 0.0
    if gathered > objective.ttft * max(observed.ready, 1):
        extra = gathered / max(_DRAIN * pool.start_seconds, objective.ttft)
    needed = max(level, ahead) / objective.busy + extra
    count = max(math.ceil(needed - 0.05), 1)
    full = observed.kv_used > _KV_FULL and bool(demand.waiting_tokens or demand.waiting)
    if full:
        count = max(count, math.ceil(observed.ready * observed.kv_used / _KV_FULL))
    if count > have:
        if full:
            return count, ScalingReason("kv", f"KV cache {observed.kv_used:.0%} full")
        if extra > 0.5 and demand.waiting_tokens:
            text = f"{demand.waiting_tokens:.0f} prompt tokens wait for {observed.ready}"
            return count, ScalingReason("backlog", text)
        if extra > 0.5:
            text = f"work of {level:.1f} replicas for the {observed.ready} that are ready"
            return count, ScalingReason("backlog", text)
        if ahead > level * 1.05:
            text = f"work of {level:.1f} replicas, {ahead:.1f} in {pool.start_seconds:.0f} s"
            return count, ScalingReason("trend", text)
        text = f"work of {level:.1f} replicas" if have else "there was none"
        return count, ScalingReason("work", text)
    if count < have:
        # A pool grows for a rise that is certain. It does not shrink if a rise is only possible.
        rising = level + pool.start_seconds * _slope(works)[0]
        most = max(*_levels(pool, history, objective), rising)
        calm = math.ceil(most / (objective.busy - _SLACK) + extra)
        count = max(count, calm, 1) if _knows_calm(demand, history, objective) else have
        # The waiting work may be little for the replicas there, and too much for those that stay.
        if extra or (count < have and gathered > objective.ttft * count):
            return have, ScalingReason("backlog", f"{demand.waiting_tokens:.0f} prompt tokens wait")
        if count < have:
            text = f"{count} carry the most of the last {objective.calm_seconds:.0f} s"
            return count, ScalingReason("calm", text)
        return have, ScalingReason("needed", "the last minutes needed them")
    return count, ScalingReason("work", f"work of {level:.1f} replicas")


def _beyond(
    pool: PoolModel,
    observed: PoolState,
    cheaper: Sequence[tuple[PoolModel, int]],
    demand: Demand,
    history: ScalingHistory,
    objective: ServiceObjective,
) -> int:
    """Return the replicas for the work that all cheaper pools (with their targets) leave at their
    maximum."""
    if any(target < other.maximum for other, target in cheaper):
        return 0

    def left(work: Callable[[PoolModel], float], busy: float) -> float:
        """Return the work that the cheaper pools leave, in replicas of this pool."""
        done = sum(busy * target / max(1e-9, work(other)) for other, target in cheaper)
        return max(0.0, 1.0 - done) * work(pool) / busy

    level = left(lambda one: _trend(_works(one, demand, history))[0], objective.busy)
    wanted = math.ceil(level - 0.05)
    have = observed.ready + observed.starting
    if wanted >= have:
        return wanted
    if not _knows_calm(demand, history, objective):
        return have
    most = left(lambda one: max(_levels(one, history, objective)), objective.busy - _SLACK)
    return min(have, max(wanted, math.ceil(most)))


def _overflow(
    main: PoolModel,
    observed: PoolState,
    pool: PoolModel,
    demand: Demand,
    objective: ServiceObjective,
) -> tuple[int, ScalingReason]:
    """Return how many replicas a second pool must have until the first has enough, and why."""
    short = main.work(demand.prompt_rate, demand.output_rate) / objective.busy - observed.ready
    if (
        short <= max(0.25, 0.05 * observed.ready)
        or not observed.starting
        or pool.start_seconds >= main.start_seconds
    ):
        return 0, ScalingReason("calm", "not needed")
    share = pool.work(demand.prompt_rate, demand.output_rate) / max(
        1e-9, main.work(demand.prompt_rate, demand.output_rate)
    )
    text = f"{short:.1f} replicas of the other pool are missing"
    return math.ceil(short * share), ScalingReason("overflow", text)


def _trend(samples: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """(level at the last sample, slope a second) of work, each as sure as the samples make it.

    The level is a mean, or what the last two samples both exceed: a jump. A slope counts by how far
    it exceeds its own uncertainty, so that noise is no trend.
    """
    last = samples[-1][0]
    recent = [work for when, work in samples if when > last - _LEVEL_SECONDS]
    level = sum(recent) / len(recent)
    jump = min(work for _, work in samples[-2:])
    if jump > level * 1.25 + 0.1:
        return jump, 0.0
    # A step behind us looks like a slope in the long window, and is flat in the short one.
    short = [sample for sample in samples if sample[0] > last - _LEVEL_SECONDS]
    sure = min(slope - 2 * error for slope, error in (_slope(samples), _slope(short)))
    return level, max(0.0, sure)


def _slope(samples: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """The slope a second, and its standard error; (0, 0) for too few samples."""
    count = len(samples)
    if count < 5:
        return 0.0, 0.0
    mean_t = sum(when for when, _ in samples) / count
    mean_w = sum(work for _, work in samples) / count
    spread = sum((when - mean_t) ** 2 for when, _ in samples)
    slope = sum((when - mean_t) * (work - mean_w) for when, work in samples) / spread
    errors = sum((work - mean_w - slope * (when - mean_t)) ** 2 for when, work in samples)
    return slope, math.sqrt(errors / (count - 2) / spread)
