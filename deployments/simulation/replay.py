"""replay: simulates in virtual time how a configuration serves a recorded load.

Routers, replica servers, scheduling and scaling are the real code; only engine steps are simulated,
from measured costs. HTTP, tokenising, speculation, adapters and failures are not simulated.
"""

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from random import Random

from deployments.backend import GenerationRequest
from deployments.config.models import MantaConfig
from deployments.router.dispatcher import Dispatcher
from deployments.scaling import policy as autoscaling
from deployments.serve.model_deployments import dispatch_limits, wake_seconds
from deployments.simulation import virtual_time
from deployments.simulation.controller import Controller, SimulatedPool, Wakes
from deployments.simulation.service import MODEL, Service
from deployments.simulation.speed import Speed
from engine.errors import ConfigError, MantaError
from engine.sampling_params import SamplingParams
from loadtest.measure.figures import sample_at
from loadtest.scenario.arrivals import TRACE_BLOCK, TraceRow

_TOO_LONG = "context_length_exceeded"
_DIGITS = 997  # base of the digits, as token ids, that encode block and request numbers in prompts
_FILLER = 999  # token id of the other tokens of a prompt


@dataclass(frozen=True, slots=True)
class PoolRun:
    """The number of replicas and the cost of one pool in a replay.

    replica_seconds: sum of the replicas' lives. most: maximum number of replicas at once.
    price: price of one replica per hour.
    """

    replica_seconds: float
    most: int
    price: float

    @property
    def cost(self) -> float:
        return self.replica_seconds / 3600 * self.price


@dataclass(slots=True)
class Replay:
    """The outcome of a replay; times are seconds.

    firsts: time to the first token of each answered request, ascending.
    gaps: mean time between tokens, for each answered request with several tokens, ascending.
    refused: number of requests without a whole answer, by error code.
    seconds: duration of the replay in virtual time.
    """

    firsts: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    refused: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0
    pools: dict[str, PoolRun] = field(default_factory=dict)

    @property
    def cost(self) -> float:
        return sum(pool.cost for pool in self.pools.values())

    def first(self, share: float) -> float:
        """Return a quantile of the seconds to the first token. share: the quantile, such as
        0.99."""
        return sample_at(self.firsts, share)

    def gap(self, share: float) -> float:
        """Return a quantile of the requests' mean seconds between tokens. share: as in `first`."""
        return sample_at(self.gaps, share)


def simulated_pools(
    config: MantaConfig, speeds: Mapping[str, Speed], start_seconds: Mapping[str, float]
) -> dict[str, SimulatedPool]:
    """Return the pools of a configuration, for `replay`.

    speeds: speed of a replica, by pool.
    start_seconds: measured seconds of a start, by pool; others have the configured start_seconds.

    Raises ConfigError for pools that are not simulated.
    """
    if config.apart:
        raise ConfigError(
            "pools with role prefill or decode are not simulated; leave the roles out, or measure "
            "with `manta loadtest`",
            param="pools",
        )
    gpus = float("gpu" in speeds)
    pools = {}
    for name, pool in config.pools_on(gpus).items():
        scales = autoscaling.scales(pool)
        least = pool.min_replicas if scales else pool.replicas
        pools[name] = SimulatedPool(
            speeds[name],
            first=least,
            least=least,
            most=pool.replicas if pool.max_replicas is None else pool.max_replicas,
            start_seconds=start_seconds.get(name, pool.start_seconds),
            price=autoscaling.price(config, name, pool),
            scales=scales,
        )
    return pools


def replay(
    config: MantaConfig,
    pools: Mapping[str, SimulatedPool],
    trace: Sequence[TraceRow],
    *,
    settle: float = 0.0,
    seed: int = 1,
) -> Replay:
    """Run the requests of a trace through a simulated, newly started service.

    Equal arguments give equal results.

    pools: result of `simulated_pools`.
    settle: maximum seconds to continue after the last answer, until pools have shrunk to their
        minimum; the cost of replicas is counted until then.
    """
    return virtual_time.run(_replay(config, pools, trace, settle, seed))


async def _replay(
    config: MantaConfig,
    pools: Mapping[str, SimulatedPool],
    trace: Sequence[TraceRow],
    settle: float,
    seed: int,
) -> Replay:
    loop, dice, outcome = asyncio.get_running_loop(), Random(seed), Replay()
    wakes = Wakes(wake_seconds(config))
    context = min(pool.speed.context for pool in pools.values())
    routers, limits = config.router.replicas, dispatch_limits(config)
    service = Service([], routers, limits, make_waking=wakes.waking, context=context)
    for router in service.routers:
        router.random.seed(dice.random())
    await service.start()
    drain_seconds = config.limits.drain_seconds
    controller = Controller(service, pools, _policy(config, pools), drain_seconds, wakes=wakes)
    await controller.start()
    connected = sum(pool.first for pool in pools.values())
    while not all(len(router.state().replicas) == connected for router in service.routers):
        await asyncio.sleep(0.01)
    controller.run()
    began = loop.time()
    tasks: set[asyncio.Task[None]] = set()
    for number, row in enumerate(trace):
        await asyncio.sleep(began + row.t - loop.time())
        router = dice.choice(service.routers)
        task = asyncio.create_task(_ask(router, row, number, context, outcome))
        tasks.add(task)
        task.add_done_callback(tasks.discard)
    await asyncio.gather(*tasks)
    last = loop.time()
    while not controller.empty() and loop.time() < last + settle:
        await asyncio.sleep(1.0)
    ended = loop.time()
    outcome.seconds = ended - began
    outcome.pools = {
        name: PoolRun(
            controller.replica_seconds(name, began, ended), controller.most(name), pool.price
        )
        for name, pool in pools.items()
    }
    await controller.stop()
    await service.stop()
    outcome.firsts.sort()
    outcome.gaps.sort()
    return outcome


def _policy(
    config: MantaConfig, pools: Mapping[str, SimulatedPool]
) -> autoscaling.PoolsPolicy | None:
    """Return the autoscaling policy of the pools that scale; None if none does.

    A replica's tokens/s and time to start are those of its simulated pool.
    """
    arguments = autoscaling.policy_arguments(config, config.engine_pools)
    for name, fields in arguments["pools"].items():
        speed = pools[name].speed
        prompt, output = speed.cost.rates(speed.max_num_seqs, speed.chunk)
        fields |= {"prompt_rate": prompt, "output_rate": output}
        fields["start_seconds"] = pools[name].start_seconds
    return autoscaling.PoolsPolicy(**arguments) if arguments["pools"] else None


async def _ask(
    router: Dispatcher, row: TraceRow, number: int, context: int, outcome: Replay
) -> None:
    """Send a request of the trace to a router, read the answer, and add its times to `outcome`.

    number: the row's index in the trace. context: maximum of tokens of a request.
    """
    if row.input + row.output > context:
        outcome.refused[_TOO_LONG] += 1
        return
    loop = asyncio.get_running_loop()
    params = SamplingParams(max_tokens=row.output, ignore_eos=True)
    request = GenerationRequest(
        f"trace-{number}", MODEL, _token_ids(row, number), params, seed=number
    )
    arrived, first = loop.time(), -1.0
    try:
        router.admit("", 0)
        inflight = router.generate(request)
        while await inflight.next():
            if first < 0:
                first = loop.time()
    except MantaError as error:
        outcome.refused[error.code] += 1
        return
    outcome.firsts.append(first - arrived)
    if row.output > 1:
        outcome.gaps.append((loop.time() - first) / (row.output - 1))


def _token_ids(row: TraceRow, number: int) -> list[int]:
    """Return the token ids of a prompt.

    Prompts whose rows begin with the same blocks have equal ids in these blocks, so that the prefix
    cache finds them. After its row's blocks each prompt has ids that no other prompt has.

    number: the row's index in the trace.
    """
    ids: list[int] = []
    for block in row.blocks[: -(-row.input // TRACE_BLOCK)]:
        ids += [*_digits(block), *[_FILLER] * (TRACE_BLOCK - 3)]
    ids += _digits(number)
    ids += [_FILLER] * (row.input - len(ids))
    return ids[: row.input]


def _digits(number: int) -> tuple[int, int, int]:
    return number % _DIGITS, number // _DIGITS % _DIGITS, number // _DIGITS**2 % _DIGITS
