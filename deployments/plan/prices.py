"""offers: the node types that fit a pool's replicas, with prices per hour and per million tokens.

Prices come from a dated file. Throughput is stated only if it was measured.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from deployments.config import yaml_lines
from deployments.config.load import PoolConfig
from deployments.plan.gpus import GIB, GPUS
from deployments.plan.memory import EnginePlan, Hardware, plan
from engine.config.engine_config import EngineConfig
from engine.config.model_config import ModelConfig
from engine.errors import ConfigError

_CONFIGS = Path(__file__).parents[1] / "configs"
DEFAULT = _CONFIGS / "prices.yaml"
SPEEDS = _CONFIGS / "speeds.yaml"

# Share of a node's memory that replicas may use; the system and Ray need the remainder.
_HOST_SHARE = 0.9

# Dimensions of the models in speeds.yaml: layers, width, heads, KV heads, vocabulary.
_MEASURED = {
    "llama-8b": (32, 4096, 32, 8, 128256),
    "qwen3-0.6b": (28, 1024, 16, 8, 151936),
}


class NodeType(BaseModel):
    """A node type: a row of the price list.

    gpu: name of its GPUs in GPUS; None: no GPUs. gpus, cpus: number of GPUs and of cores.
    hour: price per hour.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    gpu: str | None = None
    gpus: int = Field(0, ge=0, le=64)
    cpus: int = Field(ge=1, le=4096)
    memory_gib: float = Field(gt=0)
    hour: float = Field(gt=0)

    def device(self) -> Hardware:
        """Return the hardware to plan for: one of the GPUs or, without GPUs, the node's cores and
        memory."""
        if self.gpu is not None:
            return Hardware.gpu(self.gpu)
        return Hardware(self.name, "cpu", int(_HOST_SHARE * self.memory_gib * GIB), self.cpus)


class Prices(BaseModel):
    """A price list of node types."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    date: str
    source: str
    currency: str = "USD"
    nodes: tuple[NodeType, ...]

    @classmethod
    def load(cls, path: Path | None = None) -> "Prices":
        """Read a price list, by default the package's. Raises ConfigError that names file, line and
        key."""
        path = DEFAULT if path is None else path
        try:
            parsed = yaml_lines.parse(path.read_text("utf-8"))
        except OSError as error:
            raise ConfigError(f"{path}: {error.strerror or error}") from None
        except UnicodeDecodeError:
            raise ConfigError(f"{path}: not UTF-8 text") from None
        except yaml_lines.YamlProblem as problem:
            raise ConfigError(f"{path}:{problem.line}: {problem.message}") from None
        try:
            prices = cls.model_validate(parsed.data)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"]))
            line = parsed.line(first["loc"])
            raise ConfigError(f"{path}:{line}: {where}: {first['msg']}") from None
        for node in prices.nodes:
            if (node.gpu is None) != (node.gpus == 0) or (node.gpu or "t4") not in GPUS:
                known = ", ".join(GPUS)
                raise ConfigError(f"{path}: {node.name}: gpu must be one of {known}, with gpus")
        return prices


@dataclass(frozen=True, slots=True)
class NodeOffer:
    """A pool on one node type, with prices for `manta plan`.

    replicas: number of replicas on one node, or on the group of nodes that a replica spans.
    tokens_per_second: measured output tokens/s of one replica; None if nothing was measured.
    """

    node: NodeType
    plan: EnginePlan
    replicas: int
    tokens_per_second: float | None

    @property
    def replica_hour(self) -> float:
        return self.plan.nodes * self.node.hour / self.replicas

    @property
    def million_tokens(self) -> float | None:
        if self.tokens_per_second is None:
            return None
        return self.replica_hour / (self.tokens_per_second * 3600) * 1e6

    def hour(self, replicas: int) -> float:
        """Return the hourly price of the whole nodes that `replicas` replicas need."""
        return -(-replicas // self.replicas) * self.plan.nodes * self.node.hour


def offers(
    kind: str,
    pool: PoolConfig,
    model: ModelConfig,
    config: EngineConfig,
    prices: Prices,
    speeds: Path = SPEEDS,
) -> list[NodeOffer]:
    """Return the node types on which a pool's replicas fit, those with the cheapest replica first.

    kind: kind of the pool, "gpu" or "cpu".
    """
    measured = _throughputs(model, speeds)
    options = []
    for node in prices.nodes:
        if (node.gpu is not None) != (kind == "gpu"):
            continue
        try:
            fits = plan(model, config, node.device(), devices_per_node=max(1, node.gpus))
        except ConfigError:
            continue
        replicas = _replicas(kind, pool, node, fits)
        if replicas:
            # Speeds were measured with one device per replica.
            alone = fits.ranks == 1
            speed = measured.get((node.gpu or node.name, fits.dtype)) if alone else None
            options.append(NodeOffer(node, fits, replicas, speed))
    return sorted(options, key=lambda offer: (offer.replica_hour, offer.node.name))


def _replicas(kind: str, pool: PoolConfig, node: NodeType, fits: EnginePlan) -> int:
    """Return the number of replicas that Ray would place on a node, by their reserved resources.

    fits: the plan of one replica on the node.
    """
    if kind == "gpu":
        by_gpus = int(node.gpus / (pool.num_gpus or fits.ranks_per_node))
        return min(by_gpus, int(node.cpus / (pool.num_cpus or fits.ranks_per_node)))
    # Without num_cpus a replica reserves all cores of a node.
    return min(fits.replicas_per_node, int(node.cpus / (pool.num_cpus or node.cpus)))


class _Speed(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    model: str
    device: str
    dtype: str
    tokens_per_second: float = Field(gt=0)


def _throughputs(model: ModelConfig, path: Path) -> dict[tuple[str, str], float]:
    """Return {(GPU, dtype): measured output tokens/s of one replica}, on the chat workload.

    The result is empty if no model of these dimensions was measured. Only the engine was measured,
    without routers. Raises OSError and ValidationError for an invalid file.
    """
    sizes = (
        model.num_layers,
        model.hidden_size,
        model.num_heads,
        model.num_kv_heads,
        model.vocab_size,
    )
    prices = {}
    rows: Any = yaml_lines.parse(path.read_text("utf-8")).data
    for speed in map(_Speed.model_validate, rows["speeds"]):
        gpu = next((gpu for gpu in GPUS if gpu in speed.device.lower().split()), None)
        if gpu is not None and _MEASURED.get(speed.model) == sizes:
            prices[gpu, speed.dtype] = speed.tokens_per_second
    return prices
