"""Predict a configuration's day with the simulator, by the service's own routing and scaling.

Costs of steps and times of starts are those of the runs in the same file.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

from bench.simulate.fleet.cluster import run
from bench.simulate.fleet.replica import Job, SimReplica
from bench.simulate.policies import MantaRouting
from deployments.scaling import decide as scaling
from deployments.simulation.speed import Speed
from loadtest.scenario.arrivals import TraceRow

_LOOK_BACK = 2.0  # seconds over which arrivals are counted, as Serve does


@dataclass
class Autoscaler:
    """Replicas that come and go by `decide`, as `cluster.run` calls it each second.

    replica_seconds: by pool, from the decision for a replica to the end of its last request.
    """

    pools: Mapping[str, scaling.PoolModel]
    objective: scaling.ServiceObjective
    policy: MantaRouting
    work: Sequence[Job]
    replica_seconds: Counter[str] = field(default_factory=Counter)
    history: scaling.ScalingHistory = field(default_factory=scaling.ScalingHistory)
    ready_at: dict[int, float] = field(default_factory=dict)  # by replica that is wanted
    leaving: set[int] = field(default_factory=set)

    def __call__(self, now: float, replicas: Sequence[SimReplica], held: Sequence[Job]) -> None:
        self.leaving = {i for i in self.leaving if replicas[i].running or replicas[i].waiting}
        pools = {name: self._state(name, now, replicas) for name in self.pools}
        demand = self._demand(now, replicas, held)
        plan = scaling.decide(self.pools, pools, demand, self.history, self.objective)
        self.history = plan.history
        for name, target in plan.targets.items():
            mine = [replica.index for replica in replicas if replica.speed.pool == name]
            # Replicas that are the last to be ready go first.
            wanted = sorted((i for i in mine if i in self.ready_at), key=self.ready_at.__getitem__)
            for index in wanted[target:]:
                del self.ready_at[index]
                self.leaving.add(index)
            free = [i for i in mine if i not in self.ready_at and i not in self.leaving]
            for index in free[: max(0, target - len(wanted))]:
                self.ready_at[index] = now + self.pools[name].start_seconds
        self.policy.ready = [index for index, at in self.ready_at.items() if at <= now]
        for index in {*self.ready_at, *self.leaving}:
            self.replica_seconds[replicas[index].speed.pool] += 1

    def _state(self, name: str, now: float, replicas: Sequence[SimReplica]) -> scaling.PoolState:
        mine = [replicas[i] for i in self.ready_at if replicas[i].speed.pool == name]
        ready = [replica for replica in mine if self.ready_at[replica.index] <= now]
        used = sum(replica.tokens / replica.speed.kv_tokens for replica in ready)
        return scaling.PoolState(len(ready), len(mine) - len(ready), used / max(1, len(ready)))

    def _demand(
        self, now: float, replicas: Sequence[SimReplica], held: Sequence[Job]
    ) -> scaling.Demand:
        arrived = [job for job in self.work if now - _LOOK_BACK < job.arrival <= now]
        return scaling.Demand(
            now,
            sum(job.prompt for job in arrived) / _LOOK_BACK,
            sum(job.output for job in arrived) / _LOOK_BACK,
            sum(job.prompt for job in held) + sum(replica.waiting_tokens for replica in replicas),
            len(held) + sum(len(replica.waiting) + len(replica.late) for replica in replicas),
            sum(replica.running for replica in replicas),
        )


def predict(
    config: Mapping[str, Any],
    measured: Mapping[str, Mapping[str, float]],
    trace: Sequence[TraceRow],
    seconds: float,
) -> dict[str, Any]:
    """Return times to the first token, replica seconds and cost of a day.

    measured: by pool, of `Watch.measured`. seconds: time after the last arrival, to become empty.
    """
    routers, dice = config["router"]["replicas"], Random(0)
    work = [Job(row.t, row.input, row.output, router=dice.randrange(routers)) for row in trace]
    speeds: list[Speed] = []
    models: dict[str, scaling.PoolModel] = {}
    for name, pool in config["pools"].items():
        engine, own = pool["engine"], measured[name]
        limits = engine["max_num_seqs"], engine["max_num_batched_tokens"]
        step = own["base"], own["sequence"], own["token"]
        ahead = name == "gpu" and engine.get("device") != "cpu"
        speed = Speed(name, *step, int(own["kv_tokens"]), *limits, ahead=ahead)
        speeds += [speed] * pool["max_replicas"]
        rates = own["prompt_rate"], own["output_rate"], own["start_seconds"]
        models[name] = scaling.PoolModel(*rates, pool["price"], 0, pool["max_replicas"])
    policy = MantaRouting()
    policy.ready = []
    scaler = Autoscaler(models, scaling.ServiceObjective(**config["scaling"]), policy, work)
    outcome = run(speeds, policy, work, routers=routers, patience=seconds, tick=scaler)
    now = outcome.stopped
    while scaler.ready_at and now < work[-1].arrival + seconds:
        now += 1  # answers that go on after the last first token are left out
        for replica in outcome.replicas:
            replica.decoding.clear()
            replica.computing.clear()
        scaler(now, outcome.replicas, ())
    return {
        "ttft_p50_s": outcome.ttft(0.5),
        "ttft_p99_s": outcome.ttft(0.99),
        "replica_s": {name: scaler.replica_seconds[name] for name in models},
        "cost": cost(scaler.replica_seconds, config),
    }


def cost(replica_seconds: Mapping[str, float], config: Mapping[str, Any]) -> float:
    """Return the price of replica seconds."""
    pools = config["pools"]
    return sum(seconds / 3600 * pools[name]["price"] for name, seconds in replica_seconds.items())
