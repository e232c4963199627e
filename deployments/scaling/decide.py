"""decide: computes the number of replicas that each pool should have, with reasons.

The function uses no clock and no Ray; the simulator and the live policy both call it.

Work is measured in replicas: the arriving tokens/s divided by the measured tokens/s of a replica of
the pool. A pool needs this number of replicas:

  (arriving work at the time when a replica started now is ready) / objective.busy + waiting work

A pool grows without a delay. A replica takes `start_seconds` to be ready, so the trend of the last
minute is extrapolated that far. A pool shrinks only to a number of replicas that would have been
enough throughout the last `calm_seconds`, so that counts do not oscillate. Of two pools, the one
with the lower price for the work does it. Until it has enough replicas, the other pool does the
remaining work.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate

_TREND_SECONDS = 60.0  # length of the past to which the trend is fitted
_SAMPLE_SECONDS = 2.0  # minimum seconds between two samples of the history
_KV_FULL = 0.85  # share of KV cache in use above which a pool with waiting requests grows
_LEVEL_SECONDS = 20.0  # the present level of work is the mean over these last seconds
_SLACK = 0.04  # share of idle time that replicas must have left after one is removed
# Work that accumulates while replicas start should be done within this share of the start-up time.
_DRAIN = 0.65
_HELD = 5.0  # backlog, in units of ttft, above which only the cheapest pool may do all the work
# Share of a small pool's capacity; the cheapest pool is emptied only if the work is below it.
_RETURN = 0.7


@dataclass(frozen=True, slots=True)
class PoolModel:
    """The measured properties of a pool's replicas.

    prompt_rate, output_rate: tokens/s of a replica that only computes prompts, or only decodes.
    start_seconds: seconds from the decision to start a replica to its first answer, including the
        start of a node.
    price: price of one replica per hour.
    minimum, maximum: limits of the number of replicas.
    """

    prompt_rate: float
    output_rate: float
    start_seconds: float
    price: float = 1.0
    minimum: int = 0
    maximum: int = 1

    def work(self, prompt_rate: float, output_rate: float) -> float:
        """Return the number of replicas that a load, in tokens/s, would keep busy."""
        return prompt_rate / self.prompt_rate + output_rate / self.output_rate


@dataclass(frozen=True, slots=True)
class PoolState:
    """The present replicas of a pool.

    ready, starting: number of replicas that answer requests, and that are starting.
    kv_used: mean share of KV blocks in use at the ready replicas.
    """

    ready: int
    starting: int = 0
    kv_used: float = 0.0


@dataclass(frozen=True, slots=True)
class Demand:
    """The arriving, waiting and running work.

    now: seconds of any clock.
    prompt_rate, output_rate: prompt tokens and expected output tokens that arrive per second.
    waiting_tokens: number of prompt tokens that were not computed yet.
    waiting: number of requests that were not sent to a replica yet.
    running: number of requests at replicas.
    """

    now: float
    prompt_rate: float
    output_rate: float
    waiting_tokens: float = 0.0
    waiting: int = 0
    running: int = 0


@dataclass(frozen=True, slots=True)
class ServiceObjective:
    """The targets that `decide` meets with as few replicas as possible.

    ttft: TTFT target in seconds.
    busy: planned maximum share of time for which a replica is busy.
    calm_seconds: seconds of lower demand after which replicas are removed.
    idle_seconds: seconds without a request after which the last replica is removed, if the minimum
        is 0.
    """

    ttft: float = 2.0
    busy: float = 0.93
    calm_seconds: float = 120.0
    idle_seconds: float = 300.0


@dataclass(frozen=True, slots=True)
class ScalingHistory:
    """The arrival rates and earlier decisions, which `decide` returns for its next call.

    samples: (time, prompt tokens/s, output tokens/s), oldest first.
    busy_at: the last time with work.
    targets: targets of the last plan, by pool.
    started_at: by pool, the time since which at least one replica has been starting.
    raised_at: by pool, the last time at which the target rose.
    """

    samples: tuple[tuple[float, float, float], ...] = ()
    busy_at: float = -math.inf
    targets: Mapping[str, int] = field(default_factory=dict)
    started_at: Mapping[str, float] = field(default_factory=dict)
    raised_at: Mapping[str, float] = field(default_factory=dict)


class ScalingReason(str):
    """The reason for a pool's number of replicas, as a sentence for operators and a word for
    metrics.

    cause: the word for metrics, one of
        work, trend, backlog, kv: the pool grows or keeps its size, because of arriving work, its
            upward trend, waiting work, or a full KV cache;
        calm, idle: the pool shrinks after a time of low demand, or of no demand at all;
        needed, grown, silent, handover: the pool does not shrink yet, because its replicas were
            needed in the last minutes, the pool has just grown, some replicas do not report, or
            the pool that takes over its work is not ready;
        overflow, beyond: the pool helps another pool that is starting replicas, or is at its
            maximum;
        held: another pool does all the work;
        minimum, maximum: a limit of the pool has changed the number.
    """

    cause: str

    def __new__(cls, cause: str, text: str) -> "ScalingReason":
        self = super().__new__(cls, text)
        self.cause = cause
        return self


@dataclass(frozen=True, slots=True)
class ScalingPlan:
    """The number of replicas that each pool should have, and why.

    targets, reasons: number of replicas and its reason, by pool.
    history: the argument for the next call of `decide`.
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
    """Return the number of replicas that each pool should have. To be called about every second.

    pools: at least one pool, by name.
    observed: present replicas by pool.
    """
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
                # The smaller count is based on a mean that does not contain the work for which the
                # pool grew.
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
        # If another pool takes over a pool's work, the pool keeps its replicas until the other one
        # is ready.
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
    """Return a plan in which no pool shrinks below its previous target.

    targets: the previous targets by pool.
    reason: the reason for pools that would have shrunk; their cause is "silent".
    """
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
    # Without new requests, a long answer or a starting replica counts as work.
    busy = asked or demand.running > 0 or starting
    since = demand.now if busy or history.busy_at == -math.inf else history.busy_at
    if samples and demand.now - samples[-1][0] < _SAMPLE_SECONDS:
        # busy_at is always updated, so that a request that wakes a pool does not wait for the next
        # sample.
        return replace(history, busy_at=since)
    span = max(objective.calm_seconds + _LEVEL_SECONDS, _TREND_SECONDS)
    samples = (*(past for past in samples if past[0] > demand.now - span), sample)
    return replace(history, samples=samples, busy_at=since)


def _works(pool: PoolModel, demand: Demand, history: ScalingHistory) -> list[tuple[float, float]]:
    """Return (time, work in replicas of the pool) for each sample of the last _TREND_SECONDS."""
    since = demand.now - _TREND_SECONDS
    return [
        (when, pool.work(prompt, output))
        for when, prompt, output in history.samples
        if when > since
    ]


def _knows_calm(demand: Demand, history: ScalingHistory, objective: ServiceObjective) -> bool:
    """Return whether the history covers `calm_seconds`, as it must before replicas are removed."""
    return history.samples[0][0] <= demand.now - objective.calm_seconds


def _levels(pool: PoolModel, history: ScalingHistory, objective: ServiceObjective) -> list[float]:
    """Return moving averages over _LEVEL_SECONDS of the work in the last `calm_seconds`, in
    replicas of the pool."""
    last = history.samples[-1][0]
    window = sum(when > last - _LEVEL_SECONDS for when, _, _ in history.samples)
    since = last - objective.calm_seconds - _LEVEL_SECONDS
    works = [pool.work(prompt, output) for when, prompt, output in history.samples if when >= since]
    sums = [0.0, *accumulate(works)]
    window = min(window, len(works))
    return [(b - a) / window for a, b in zip(sums, sums[window:], strict=False)]


def _backlog(pool: PoolModel, demand: Demand, history: ScalingHistory) -> float:
    """Return the waiting work, as seconds that one replica would need for it.

    The ratio of output to prompt tokens is assumed as in the recent past, also when no requests
    arrive.
    """
    prompt = sum(prompt for _, prompt, _ in history.samples)
    output = sum(output for _, _, output in history.samples)
    ratio = output / prompt if prompt else 1.0
    return pool.work(demand.waiting_tokens, ratio * demand.waiting_tokens)


def _price(pool: PoolModel, demand: Demand) -> float:
    """Return the price per hour of the arriving work, if replicas of this pool did all of it."""
    return pool.price * pool.work(max(1.0, demand.prompt_rate), max(1.0, demand.output_rate))


def _holder(
    pools: Mapping[str, PoolModel],
    names: Sequence[str],
    observed: Mapping[str, PoolState],
    demand: Demand,
    history: ScalingHistory,
    objective: ServiceObjective,
) -> str | None:
    """Return the name of a pool, other than the cheapest per token, that can do all the work for
    less than the price of one replica of the cheapest pool; None if there is none.

    An example is a CPU replica at night, which costs more per token than a GPU replica but less per
    hour.

    names: the pools, the cheapest per token first.
    """
    main = pools[names[0]]
    if main.minimum > 0:
        return None
    known = history.samples[-1][0] - history.samples[0][0]
    if known < objective.calm_seconds and observed[names[0]].ready + observed[names[0]].starting:
        # The history of a new controller or policy is too short for removing the cheapest pool's
        # replicas.
        return None
    for name in names[1:]:
        pool = pools[name]
        last = [pool.work(prompt, output) for _, prompt, output in history.samples[-2:]]
        most = max(*_levels(pool, history, objective), min(last))
        # While the cheapest pool has a replica, the work must be clearly less, to avoid
        # oscillation.
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
    """Return the number of replicas that a pool needs to do all the work alone, and why.

    observed: the pool's present replicas.
    started: seconds since the starting replicas were requested.
    """
    works = _works(pool, demand, history)
    level, slope = _trend(works)
    ahead = level + slope * pool.start_seconds
    have = observed.ready + observed.starting
    # Work that waits now, or will accumulate until the starting replicas are ready, in seconds of
    # one replica.
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
        # Only a significant upward trend makes a pool grow, but any upward slope keeps it from
        # shrinking.
        rising = level + pool.start_seconds * _slope(works)[0]
        most = max(*_levels(pool, history, objective), rising)
        calm = math.ceil(most / (objective.busy - _SLACK) + extra)
        count = max(count, calm, 1) if _knows_calm(demand, history, objective) else have
        # The pool also keeps its replicas while more work waits than fewer replicas could do within
        # ttft.
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
    """Return the number of a pool's replicas for the work that exceeds the maximum of all cheaper
    pools.

    cheaper: (pool, target) of each cheaper pool.
    """
    if any(target < other.maximum for other, target in cheaper):
        return 0

    def left(work: Callable[[PoolModel], float], busy: float) -> float:
        """Return the work that the cheaper pools cannot do, in replicas of this pool.

        work: returns all work in replicas of the given pool. busy: as in ServiceObjective.
        """
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
    """Return the number of a pool's replicas that help the main pool while it starts more replicas,
    and why.

    observed: the main pool's present replicas.
    """
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
    """Return cautious estimates (present work, its growth per second); the growth is at least 0.

    The work is the mean over _LEVEL_SECONDS or, after a jump, the lower one of the last two
    samples. Two standard errors are subtracted from the slope, so that noise is not a trend.

    samples: (time, work) of each sample, oldest first.
    """
    last = samples[-1][0]
    recent = [work for when, work in samples if when > last - _LEVEL_SECONDS]
    level = sum(recent) / len(recent)
    jump = min(work for _, work in samples[-2:])
    if jump > level * 1.25 + 0.1:
        return jump, 0.0
    # A jump some time ago looks like a slope in the long window, but the short window is flat.
    short = [sample for sample in samples if sample[0] > last - _LEVEL_SECONDS]
    sure = min(slope - 2 * error for slope, error in (_slope(samples), _slope(short)))
    return level, max(0.0, sure)


def _slope(samples: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Return (slope per second, its standard error) of a line through (time, work) samples; (0, 0)
    for fewer than five."""
    count = len(samples)
    if count < 5:
        return 0.0, 0.0
    mean_t = sum(when for when, _ in samples) / count
    mean_w = sum(work for _, work in samples) / count
    spread = sum((when - mean_t) ** 2 for when, _ in samples)
    slope = sum((when - mean_t) * (work - mean_w) for when, work in samples) / spread
    errors = sum((work - mean_w - slope * (when - mean_t)) ** 2 for when, work in samples)
    return slope, math.sqrt(errors / (count - 2) / spread)
