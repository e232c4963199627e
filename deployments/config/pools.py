"""Pools of the configuration: replicas of one kind, or encoders."""

import typing
from typing import Annotated, Any, Literal

from pydantic import (
    Field,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from deployments.config.endpoint import Section
from deployments.config.engine_options import EngineOptions

# Engine options that determine how routers read requests, and therefore must be equal for all
# pools.
_REQUEST_OPTIONS = frozenset({"seed", "generation_config"})


PoolKind = Literal["gpu", "cpu"]
_ENCODE_SECONDS = 5.0
POOL_KINDS: tuple[PoolKind, ...] = typing.get_args(PoolKind)
# Engine options that an encoder pool may set itself; TOWER_OPTIONS: all that apply to encoders.
_ENCODER_OPTIONS = ("num_threads", "image_cache_tokens")
# Engine options that determine the content of KV blocks, and therefore must be equal for prefill
# and decode pools.
BLOCK_OPTIONS = ("block_size", "dtype", "kv_dtype", "quantization", "speculation")
TOWER_OPTIONS = (
    *_ENCODER_OPTIONS,
    "dtype",
    "load_format",
    "seed",
    "deterministic",
    "gpu_capability",
)


def on_cpu(name: str) -> str:
    """Return how to run a pool of GPU replicas on the CPU, for messages."""
    return (
        "take pools.cpu in its place" if name == "gpu" else f"set pools.{name}.engine.device: cpu"
    )


class PoolConfig(Section):
    """Engine replicas of one kind, or encoders: one Serve deployment."""

    role: Literal["engine", "encoder", "prefill", "decode"] = Field(
        "engine",
        description="encoder: actors with the vision tower alone, in a pool of any other name "
        "than gpu and cpu, on the CPU unless num_gpus is set (docs/images.md). "
        "prefill, decode: engines for prompts, and for answers, in pools of any name "
        "(docs/kv-tiers.md).",
    )
    encode_seconds: float = Field(
        _ENCODE_SECONDS,
        gt=0,
        le=600,
        description="Longest wait of a replica, in seconds, for an image from this encoder pool.",
    )
    replicas: int = Field(
        1,
        ge=0,
        le=4096,
        description="Engine replicas, where max_replicas is not set.",
    )
    max_replicas: int | None = Field(
        None,
        ge=1,
        le=4096,
        description="If set, the pool scales between min_replicas and this number.",
    )
    min_replicas: int = Field(
        1,
        ge=0,
        le=4096,
        description="Replicas at first, and at least, where max_replicas is set. 0: the pool may "
        "become empty; the next request then waits for a start, or gets 503 with "
        "Retry-After (docs/several-models.md).",
    )
    price: float | None = Field(
        None,
        gt=0,
        le=10_000,
        description="Price of a replica's hour, in any unit. The prices decide which pool carries "
        "the work and which the overflow. Default: 1 for gpu, 0.1 for cpu.",
    )
    start_seconds: float = Field(
        60.0,
        gt=0,
        le=3600,
        description="Assumed seconds from the decision for a replica to its first answer, until "
        "that time is measured.",
    )
    start_first: bool = Field(
        False,
        description="Whether an update starts a new replica before an old one stops, which needs "
        "room for one more.",
    )
    num_cpus: float | None = Field(
        None,
        ge=0,
        le=1024,
        description="CPU cores that Ray reserves for a replica, on each of its nodes; its step "
        "uses as many threads. Default: 1 for each rank in a gpu pool; in a cpu pool the cores of "
        "this machine, or of the largest node, shared out among the replicas. Set it for a "
        "cluster.",
    )
    num_gpus: float | None = Field(
        None,
        ge=0,
        le=64,
        description="GPUs of a replica, on each of its nodes: one for each rank there, or a part "
        "of a GPU that replicas share. Default: as many as ranks in a gpu pool, 0 in a cpu pool.",
    )
    resources: dict[str, float] = Field(
        default_factory=dict,
        description="Custom Ray resources of a replica, on each node, e.g. {pool_a: 0.001}.",
    )
    labels: dict[str, str] = Field(
        default_factory=dict,
        description="Ray node labels that a replica's nodes must have, e.g. {pool: gpu}.",
    )
    engine: EngineOptions = Field(
        default_factory=dict,
        description="EngineConfig fields that differ from `engine` in this pool.",
    )

    @model_validator(mode="after")
    def _limits(self) -> "PoolConfig":
        if self.max_replicas is not None and self.min_replicas > self.max_replicas:
            raise ValueError("min_replicas is above max_replicas")
        for name in _REQUEST_OPTIONS & self.engine.keys():
            raise ValueError(
                f"engine.{name}: a request may move from pool to pool and keeps its text, so there "
                "is one value for all of them; set it under the top level's engine"
            )
        if self.role == "encoder":
            self._check_encoder()
        elif self.encode_seconds != _ENCODE_SECONDS:
            raise ValueError("encode_seconds is of pools with role: encoder; leave it out here")
        return self

    def _check_encoder(self) -> None:
        """Check that an encoder pool has no settings of engines. Raises ValueError."""
        for name in self.engine.keys() - {*_ENCODER_OPTIONS, "device"}:
            raise ValueError(
                f"engine.{name}: an encoder has the model's tower alone, and of its own settings "
                f"only {' and '.join(_ENCODER_OPTIONS)}; set it under engine, or leave it out"
            )
        if (self.num_gpus or 0) > 1:
            raise ValueError(
                f"num_gpus is {self.num_gpus:g}, and an encoder uses one GPU or a part of one; "
                "raise replicas instead"
            )


def _pools(value: Any, validate: ValidatorFunctionWrapHandler) -> Any:
    """Validate pools and their names: gpu and cpu are for engines without a role, other names for
    encoders and pools with a role."""
    errors: list[Any] = []
    for name, pool in value.items() if isinstance(value, dict) else ():
        role = pool.get("role") if isinstance(pool, dict) else getattr(pool, "role", None)
        if role == "encoder" and name in POOL_KINDS:
            message = (
                "gpu and cpu are pools of engines; give the encoder pool another name, such as "
                "pools.pictures"
            )
            errors.append({"loc": (name, "role"), "msg": message, "type": "pool"})
        elif role in (None, "engine") and name not in POOL_KINDS:
            errors.append({"loc": (name, "[key]"), "msg": "", "type": "pool"})
    try:
        result = validate(value)
    except ValidationError as error:
        errors += error.errors()
    if errors:
        raise PydanticCustomError("nested", "pools", {"errors": errors})
    return result


_PoolName = Annotated[str, Field(pattern=r"^[a-z]([a-z0-9-]{0,30}[a-z0-9])?$")]
Pools = Annotated[dict[_PoolName, PoolConfig], WrapValidator(_pools)]


def check_sleep(name: str, kind: PoolKind, pool: PoolConfig) -> None:
    """Check that the settings of a pool allow its replicas to sleep and free the device for others.

    kind: "gpu" or "cpu".

    Raises ValueError.
    """
    where = f"pools.{name}: engine.sleep_in_host_memory is on"
    if pool.max_replicas is not None and not pool.min_replicas:
        raise ValueError(
            f"{where} and min_replicas is 0: the last replica would end where it should sleep. Set "
            "min_replicas to 1"
        )
    if kind == "gpu" and (pool.num_gpus is None or pool.num_gpus >= 1):
        gpus = 1 if pool.num_gpus is None else pool.num_gpus
        raise ValueError(
            f"{where} and num_gpus is {gpus:g}: nobody else could have the GPU while it sleeps. "
            "Set num_gpus to a part of it, for each model that takes turns there, such as 0.5"
        )
