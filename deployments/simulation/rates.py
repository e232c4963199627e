"""PoolRates: the cost of replicas' steps, read from a file or derived from a GPU's data sheet."""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from deployments.plan.memory import EnginePlan
from deployments.routing.step_cost import StepCost
from deployments.scaling.policy import ENGINE_PREFIX
from engine.errors import ConfigError

_FORMS = (
    "give the answer of GET /v1/live of a service that is busy, or an object such as "
    '{"gpu": {"base": 0.0043, "sequence": 5e-05, "token": 2e-05}} in seconds for a step, for each '
    "sequence in it and for each prompt token in it, with start_seconds and kv_tokens if known"
)


class PoolRates(BaseModel):
    """The measured or estimated speed of a pool's replicas.

    base, sequence, token: fields of StepCost, in seconds.
    kv_tokens: capacity of a replica's KV cache in tokens; None: unknown.
    start_seconds: seconds from the decision to start a replica until it accepts requests; None:
        unknown.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    base: float = Field(ge=0, le=600)
    sequence: float = Field(ge=0, le=600)
    token: float = Field(gt=0, le=600)
    kv_tokens: int | None = Field(None, gt=0)
    start_seconds: float | None = Field(None, ge=0, le=36_000)

    @property
    def cost(self) -> StepCost:
        return StepCost(self.base, self.sequence, self.token)


def read_rates(path: Path, model: str) -> dict[str, PoolRates]:
    """Return the rates in a file, by pool. Raises ConfigError that names the file and key.

    path: the answer of GET /v1/live, or a JSON object of PoolRates by pool.
    model: name of the model, for a live view of several models.
    """
    try:
        data = json.loads(path.read_text("utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}") from None
    except ValueError:
        raise ConfigError(f"{path}: not JSON; {_FORMS}") from None
    if isinstance(data, dict) and "routers" in data:
        rates = _of_live(data, model)
        if not rates:
            raise ConfigError(f"{path}: no replica is measured; save it while the service is busy")
        return rates
    if not isinstance(data, dict) or not data:
        raise ConfigError(f"{path}: no pools; {_FORMS}")
    rates = {}
    for name, fields in data.items():
        try:
            rates[name] = PoolRates.model_validate(fields)
        except ValidationError as error:
            first = error.errors()[0]
            key = ".".join(map(str, (name, *first["loc"])))
            raise ConfigError(f"{path}: {key}: {first['msg']}; {_FORMS}") from None
    return rates


def _of_live(data: Mapping[str, Any], model: str) -> dict[str, PoolRates]:
    """Return, by pool, the mean step costs of the replicas that a live view has measurements for.

    kv_tokens is that of one of the pool's replicas.
    """
    costs: dict[str, list[StepCost]] = {}
    tokens: dict[str, int] = {}
    for pool, cost, kv_tokens in _measured(data, model):
        costs.setdefault(pool, []).append(cost)
        tokens[pool] = kv_tokens
    return {
        pool: PoolRates(**StepCost.mean(known)._asdict(), kv_tokens=tokens[pool] or None)
        for pool, known in costs.items()
    }


def _measured(data: Mapping[str, Any], name: str) -> Iterator[tuple[str, StepCost, int]]:
    """Yield (pool, step cost, tokens of its KV cache) for each measured replica, once per router.

    data: a live view. name: the model's name, used if the view has several models.
    """
    for router in data["routers"]:
        models = router["models"]
        for model in models:
            if len(models) > 1 and model["model"] != name:
                continue
            for replica in model["replicas"]:
                if (steps := replica.get("steps")) is None:
                    continue
                stats = replica["stats"]
                seconds = (steps[key] / 1000 for key in ("base_ms", "sequence_ms", "token_ms"))
                size = stats.get("total_blocks", 0) * stats.get("block_size", 0)
                yield replica["pool"].removeprefix(ENGINE_PREFIX), StepCost(*seconds), size


def of_data_sheet(plan: EnginePlan, context: float) -> PoolRates:
    """Return lower bounds of a GPU's step costs, from its memory bandwidth and TFLOP/s.

    context: mean number of tokens, prompt and output together, that a sequence has at a step.

    Raises ConfigError for a device without a data sheet.
    """
    device = plan.device
    if not device.bandwidth or not device.teraflops:
        raise ConfigError(f"nothing is known of the speed of {device.name}")
    bandwidth, flops = 1e9 * device.bandwidth, 1e12 * device.teraflops * plan.ranks
    active = plan.active_parameters / plan.parameters
    token_bytes = sum(size for _, _, size in plan.kv_per_token)
    return PoolRates(
        base=plan.weights * plan.stages * active / bandwidth,
        sequence=token_bytes * context / bandwidth,
        token=2 * plan.active_parameters / flops,
    )


def mean_context(lengths: Sequence[tuple[int, int]]) -> float:
    """Return the mean number of tokens, prompt and output together, that a sequence has at a step.

    lengths: numbers of (prompt, output) tokens of each request.
    """
    steps = sum(output for _, output in lengths)
    return sum(output * (prompt + output / 2) for prompt, output in lengths) / steps
