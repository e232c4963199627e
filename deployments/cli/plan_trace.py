"""`manta plan --trace`: predict in virtual time how a configuration would serve a recorded load."""

import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from deployments.cli.plan import as_loaded, device_of, engine_of
from deployments.config.load import MantaConfig
from deployments.plan.memory import EnginePlan, Hardware, plan
from deployments.simulation.rates import PoolRates, mean_context, of_data_sheet, read_rates
from deployments.simulation.replay import Replay, replay, simulated_pools
from deployments.simulation.speed import Speed
from engine.config.model_config import ModelConfig
from engine.errors import ConfigError
from loadtest.errors import ScenarioError
from loadtest.scenario.arrivals import TraceRow, read_trace


def rows_of(path: Path) -> list[TraceRow]:
    """Return the requests of a trace file. Raises ConfigError with file, line and field."""
    try:
        return read_trace(path)
    except ScenarioError as error:
        raise ConfigError("\n".join(error.problems)) from None


def predict(
    config: MantaConfig,
    file: Path,
    device: Hardware,
    memory: float | None,
    trace: Sequence[TraceRow],
    rates: Path | None,
) -> Iterator[str]:
    """Yield the lines of a prediction of one model.

    file: config.json of the model.
    device: the GPU for GPU pools, or this machine.
    memory: free memory of a CPU node in GiB; None: this machine's.
    rates: file for `read_rates`; None: a GPU's data sheet is used.

    Raises ConfigError.
    """
    measured = {} if rates is None else read_rates(rates, config.name())
    context = mean_context([(row.input, row.output) for row in trace])
    speeds: dict[str, Speed] = {}
    sources: dict[str, str] = {}
    kind_of_device = "gpu" if device.kind == "cuda" else "cpu"
    for name, pool in config.pools_on(float(kind_of_device == "gpu")).items():
        on_cpu = pool.engine["device"] == "cpu"
        if not on_cpu and kind_of_device == "cpu":
            raise ConfigError(
                f"pools.{name} runs on GPUs; give --gpu h200 or another", param=f"pools.{name}"
            )
        hardware = device if (kind_of_device == "cpu") == on_cpu else device_of("cpu", memory)
        engine = engine_of(config, name, pool)
        model = as_loaded(ModelConfig.from_file(file, engine.rope_scaling), engine)
        fits = plan(model, engine, hardware)
        known = measured.get(name)
        sources[name] = f"measured, {rates}"
        if known is None and not on_cpu and rates is None:
            known = of_data_sheet(fits, context)
            sources[name] = f"{hardware.name}'s data sheet, so at best; --rates takes measured ones"
        if known is None:
            where = "no --rates" if rates is None else f"{rates} has none"
            raise ConfigError(
                f"pools.{name}: nothing says how fast its replicas are ({where}). Save "
                "`GET /v1/live` of a service that is busy, and give it as --rates FILE",
                param=f"pools.{name}",
            )
        measured[name] = known
        speeds[name] = _speed(name, known, fits, engine.block_size)
    starts = {
        name: known.start_seconds
        for name, known in measured.items()
        if known.start_seconds is not None
    }
    pools = simulated_pools(config, speeds, starts)
    print(f"simulating {len(trace):,} requests", file=sys.stderr)
    outcome = replay(config, pools, trace)
    yield from _lines(trace, outcome)
    for name, run in outcome.pools.items():
        cost, speed = measured[name], speeds[name]
        yield (
            f"Pool     {name}: {run.replica_seconds / 3600:,.3f} replica hours at {run.price:g}, "
            f"at most {run.most} at once, of {pools[name].least} to {pools[name].most}"
        )
        yield (
            f"  steps of {1000 * cost.base:.3g} ms, {1000 * cost.sequence:.3g} ms a sequence and "
            f"{1000 * cost.token:.3g} ms a prompt token ({sources[name]})"
        )
        yield (
            f"  {speed.max_num_seqs:,} requests at once, {speed.kv_tokens:,} tokens in KV; a start "
            f"takes {pools[name].start_seconds:g} s"
        )


def _speed(name: str, rates: PoolRates, fits: EnginePlan, block_size: int) -> Speed:
    return Speed(
        name,
        rates.base,
        rates.sequence,
        rates.token,
        fits.kv_tokens if rates.kv_tokens is None else rates.kv_tokens,
        fits.max_num_seqs,
        fits.max_num_batched_tokens,
        ahead=fits.async_scheduling,
        context=fits.max_model_len,
        block=block_size,
        prefix_caching=fits.prefix_caching,
    )


def _lines(trace: Sequence[TraceRow], outcome: Replay) -> Iterator[str]:
    """Yield the lines about the trace and the results of all pools together."""
    lengths = sum(row.input for row in trace), sum(row.output for row in trace)
    yield (
        f"Trace    {len(trace):,} requests in {trace[-1].t:,.1f} s, {lengths[0]:,} prompt and "
        f"{lengths[1]:,} output tokens"
    )
    rows: Mapping[str, str] = {
        "answered": f"{len(outcome.firsts):,}",
        "refused": _refused(outcome),
        "first token": _quantiles(outcome.first(0.5), outcome.first(0.99)),
        "between tokens": _quantiles(outcome.gap(0.5), outcome.gap(0.99)),
        "cost": f"{outcome.cost:,.4f} in {outcome.seconds:,.1f} s, by pools.*.price an hour",
    }
    for label, value in rows.items():
        yield f"  {label:<28} {value}"


def _refused(outcome: Replay) -> str:
    codes = ", ".join(f"{count:,} {code}" for code, count in outcome.refused.most_common())
    return f"{outcome.refused.total():,}" + f" ({codes})" * bool(codes)


def _quantiles(p50: float, p99: float) -> str:
    return f"p50 {1000 * p50:,.1f} ms, p99 {1000 * p99:,.1f} ms"
