"""The simulator's prediction of a configuration's day, by the functions of `manta plan --trace`.

Step costs and start times come from the runs in the same result file.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from deployments.config.load import parse_config
from deployments.simulation.replay import replay, simulated_pools
from deployments.simulation.speed import Speed
from loadtest.scenario.arrivals import TraceRow


def predict(
    config: Mapping[str, Any],
    measured: Mapping[str, Mapping[str, float]],
    trace: Sequence[TraceRow],
    seconds: float,
) -> dict[str, Any]:
    """Return times to the first token, replica seconds and cost of a day.

    measured: pool -> result of `Watch.measured`.
    seconds: time after the last answer, during which the pools become empty.
    """
    speeds: dict[str, Speed] = {}
    for name, pool in config["pools"].items():
        engine, own = {**config["engine"], **pool["engine"]}, measured[name]
        speeds[name] = Speed(
            name,
            own["base"],
            own["sequence"],
            own["token"],
            int(own["kv_tokens"]),
            engine["max_num_seqs"],
            engine["max_num_batched_tokens"],
            ahead=name == "gpu" and engine.get("device") != "cpu",
            context=engine["max_model_len"],
            prefix_caching=engine["prefix_caching"],
        )
    parsed = parse_config(dict(config), {}, check_files=False)
    starts = {name: own["start_seconds"] for name, own in measured.items()}
    outcome = replay(parsed, simulated_pools(parsed, speeds, starts), trace, settle=seconds)
    return {
        "ttft_p50_s": outcome.first(0.5),
        "ttft_p99_s": outcome.first(0.99),
        "refused": outcome.refused.total(),
        "replica_s": {name: pool.replica_seconds for name, pool in outcome.pools.items()},
        "cost": outcome.cost,
    }


def cost(replica_seconds: Mapping[str, float], config: Mapping[str, Any]) -> float:
    """Return the price of replica seconds."""
    pools = config["pools"]
    return sum(seconds / 3600 * pools[name]["price"] for name, seconds in replica_seconds.items())
