"""MantaConfig: the pydantic model of the configuration, with unit, default and reason of each key.

The model is frozen, and an unknown key is an error. load.py reads a file into it.
"""

import re
from pathlib import Path
from typing import Annotated, Any

from pydantic import (
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from deployments.api.served_model import same_pattern
from deployments.checkpoints.resolve import keeps_blocks
from deployments.config.adapters import AdaptersConfig
from deployments.config.endpoint import (
    BatchConfig,
    GrpcConfig,
    HttpConfig,
    ImagesConfig,
    LimitsConfig,
    LogConfig,
    RouterConfig,
    Section,
    TracingConfig,
    UsageConfig,
)
from deployments.config.engine_options import EngineOptions, flatten
from deployments.config.pools import (
    BLOCK_OPTIONS,
    POOL_KINDS,
    TOWER_OPTIONS,
    PoolConfig,
    PoolKind,
    Pools,
    check_sleep,
)
from engine.config.engine_config import ranks_said

_NAME = r"^[A-Za-z0-9][A-Za-z0-9._:/-]{0,127}$"
_ALIAS = re.compile(r"[A-Za-z0-9._:/@+=*?\[\]!-]{1,256}")
MAX_TEMPLATE = 1 << 20  # maximum of characters of a chat template
_TEMPLATE = (
    "Chat template instead of the model's: Jinja, or a file of Jinja, which is "
    "read with the configuration."
)
PART = "part"  # key of the validation context that turns off checks of consistency among sections


class ScalingConfig(Section):
    """Autoscaling of the pools that have max_replicas. See docs/routing.md."""

    ttft: float = Field(
        2.0,
        gt=0,
        le=600,
        description="Target time to the first token, in seconds. Requests that wait longer make "
        "the pool grow.",
    )
    busy: float = Field(
        0.93,
        gt=0.1,
        le=1,
        description="Target utilization of a replica. A smaller one shortens waits, a larger one "
        "costs less.",
    )
    calm_seconds: float = Field(
        120.0,
        ge=0,
        le=86400,
        description="Replicas are removed only if the others could have carried the peak load of "
        "the last calm_seconds.",
    )
    idle_seconds: float = Field(
        300.0,
        ge=0,
        le=86400,
        description="Seconds without a request after which the last replica is removed, where "
        "min_replicas is 0, or a replica sleeps (engine.sleep_in_host_memory).",
    )


class ModelLimitsConfig(Section):
    """Bounds of one model of several, instead of those of `limits`."""

    waiting: int | None = Field(
        None, ge=0, le=1_000_000, description="`limits.waiting` of this model."
    )
    queue_seconds: float | None = Field(
        None, gt=0, le=3600, description="`limits.queue_seconds` of this model."
    )
    queue_tokens: int | None = Field(
        None, ge=1, le=10**12, description="`limits.queue_tokens` of this model."
    )
    age_seconds: float | None = Field(
        None, gt=0, le=3600, description="`limits.age_seconds` of this model."
    )
    drain_seconds: float | None = Field(
        None, ge=0, le=3600, description="`limits.drain_seconds` of this model's replicas."
    )
    stall_seconds: float | None = Field(
        None, ge=1, le=3600, description="`limits.stall_seconds` of this model."
    )


class ServedModelConfig(Section):
    """A model among several, by its name: `models: {NAME: {...}}`.

    Keys of `engine`, `scaling` and `limits` that it leaves out are those of the top level.
    """

    model: str = Field(
        "default",
        min_length=1,
        max_length=4096,
        description="Model to serve: a folder, a .gguf file, a hub name, or `default`.",
    )
    revision: str | None = Field(None, max_length=256, description="Hub revision.")
    chat_template: str | None = Field(None, max_length=MAX_TEMPLATE, description=_TEMPLATE)
    aliases: list[str] = Field(
        default_factory=list,
        max_length=64,
        description="Other names that requests may use for it, or patterns of names.",
    )
    engine: EngineOptions = Field(
        default_factory=dict, description="EngineConfig fields that differ from the top level's."
    )
    replicas: int = Field(1, ge=0, le=4096, description="Engine replicas of a model with one pool.")
    pools: Pools = Field(
        default_factory=dict,
        description="Engine replicas of the model by kind, instead of `replicas`.",
    )
    adapters: AdaptersConfig = Field(default_factory=AdaptersConfig)
    scaling: ScalingConfig = Field(default_factory=ScalingConfig)
    limits: ModelLimitsConfig = Field(default_factory=ModelLimitsConfig)


_ModelName = Annotated[str, Field(pattern=_NAME)]
_OF_ONE = (
    "model",
    "revision",
    "chat_template",
    "served_name",
    "aliases",
    "replicas",
    "pools",
    "adapters",
)


class MantaConfig(Section):
    """The configuration of an endpoint that serves one model or several."""

    model: str = Field(
        "default",
        min_length=1,
        max_length=4096,
        description="A folder with config.json, a .gguf file, a hub name, `modelscope:org/name`, "
        "or `default`: a small model out of a package.",
    )
    revision: str | None = Field(
        None, max_length=256, description="Hub revision. Default: the default branch."
    )
    chat_template: str | None = Field(None, max_length=MAX_TEMPLATE, description=_TEMPLATE)
    served_name: str | None = Field(
        None,
        pattern=_NAME,
        description="The `model` that requests name. Default: the folder's, file's or hub model's "
        "name.",
    )
    aliases: list[str] = Field(
        default_factory=list,
        max_length=64,
        description="Other names that requests may use for the model, such as `gpt-4o`, or "
        "patterns such as `claude-*`. Answers, keys and metrics have the served name.",
    )
    app_name: str = Field(
        "manta",
        pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]{0,62}$",
        description="Serve application name, by which other Ray jobs find the application.",
    )
    route_prefix: str = Field(
        "/",
        pattern=r"^/([A-Za-z0-9_.-]+(/[A-Za-z0-9_.-]+)*)?$",
        description="Prefix of every path of the HTTP API.",
    )
    engine: EngineOptions = Field(
        default_factory=dict,
        description="Settings of the engines of all pools: [engine](#engine).",
    )
    replicas: int = Field(
        1,
        ge=0,
        le=4096,
        description="Engine replicas without `pools`, in one pool: gpu if there is a GPU, else "
        "cpu.",
    )
    pools: Pools = Field(
        default_factory=dict, description="Engine replicas by kind, instead of `replicas`."
    )
    adapters: AdaptersConfig = Field(default_factory=AdaptersConfig)
    models: dict[_ModelName, ServedModelConfig] = Field(
        default_factory=dict,
        description="Several models behind one endpoint, by the name that requests use: "
        "docs/several-models.md.",
    )
    scaling: ScalingConfig = Field(default_factory=ScalingConfig)
    router: RouterConfig = Field(default_factory=RouterConfig)
    http: HttpConfig = Field(default_factory=HttpConfig)
    images: ImagesConfig = Field(default_factory=ImagesConfig)
    grpc: GrpcConfig = Field(default_factory=GrpcConfig)
    limits: LimitsConfig = Field(default_factory=LimitsConfig)
    log: LogConfig = Field(default_factory=LogConfig)
    usage: UsageConfig = Field(default_factory=UsageConfig)
    batch: BatchConfig = Field(default_factory=BatchConfig)
    tracing: TracingConfig = Field(default_factory=TracingConfig)

    @field_validator("aliases")
    @classmethod
    def _are_names(cls, aliases: list[str]) -> list[str]:
        for alias in aliases:
            if not _ALIAS.fullmatch(alias):
                raise ValueError(f"{alias!r} is no name of a model, and no pattern of names")
        return aliases

    @model_validator(mode="after")
    def _one_way(self, info: ValidationInfo) -> "MantaConfig":
        if info.context and PART in info.context:
            return self
        if self.http.store_bytes and self.router.replicas > 1:
            raise ValueError(
                f"http.store_bytes is set and router.replicas is {self.router.replicas}: a router "
                "knows its own answers only. Set router.replicas to 1, or http.store_bytes to 0"
            )
        if self.http.store_bytes and self.router.batch_replicas and self.batch.folder:
            raise ValueError(
                "http.store_bytes, batch.folder and router.batch_replicas are set: the routers "
                "that run batches do not know the answers that another router stores. Set "
                "router.batch_replicas or http.store_bytes to 0"
            )
        if self.models:
            self._check_models()
        if self.pools and "replicas" in self.model_fields_set:
            raise ValueError("replicas and pools are both set; give the counts in pools")
        self._check_encoders()
        self._check_roles()
        engines = self.engine_pools
        if engines and not any(p.max_replicas or p.replicas for p in engines.values()):
            raise ValueError("pools: all replicas are 0, so nothing would ever answer")
        if not self.pools and not self.replicas:
            raise ValueError("replicas is 0, so nothing would ever answer")
        for name, pool in engines.items():
            self._check_ranks(name, pool)
            if self.sleeps(pool):
                check_sleep(name, self.kind(name, pool), pool)
        alone = not self.pools and not self.models
        if alone and self.engine.get("sleep_in_host_memory"):
            raise ValueError(
                "engine.sleep_in_host_memory: say what a replica shares while it sleeps, "
                "pools: {gpu: {num_gpus: 0.5}}, or that it runs on the CPU, pools: {cpu: {}}"
            )
        if self.adapters != AdaptersConfig():
            self.adapters.check_names(self.name(), self.aliases)
            for pool in engines.values() or [PoolConfig()]:
                if not self.engine_options(pool).get("max_loras"):
                    raise ValueError(
                        "adapters: engine.max_loras is 0, so no adapter could be loaded; set it to "
                        "how many are on a device at once"
                    )
        return self

    def _check_models(self) -> None:
        """Check each model as if it were served alone, and that no two models share a name.

        Raises PydanticCustomError with all errors.
        """
        errors: list[Any] = []

        def wrong(message: str, *loc: str) -> None:
            errors.append({"loc": loc, "msg": message, "type": "models"})

        for key in _OF_ONE:
            if key in self.model_fields_set:
                place = "is NAME in" if key == "served_name" else f"goes under models.NAME.{key} of"
                wrong(f"belongs to one model; it {place} `models`", key)
        holders: dict[str, str] = {same_pattern(name): name for name in self.models}
        for name, own in self.models.items():
            names = {"aliases": own.aliases, "adapters": list(own.adapters.paths)}
            for key, others in names.items():
                for other in others:
                    holder = holders.setdefault(same_pattern(other), name)
                    if holder != name or other in self.models:
                        wrong(f"{other!r} is a name of the model {holder!r}", "models", name, key)
            try:
                self.of(name)
            except ValidationError as error:
                errors += [
                    {**fault, "loc": ("models", name, *fault["loc"])}
                    for fault in flatten(error.errors())
                ]
        if errors:
            raise PydanticCustomError("nested", "models", {"errors": errors})

    def of(self, name: str) -> "MantaConfig":
        """Return the configuration of the model `name` among `models`, as if it were served
        alone."""
        own = self.models[name]
        limits = {
            key: value for key in ModelLimitsConfig.model_fields
            if (value := getattr(own.limits, key)) is not None
        }  # fmt: skip
        scaling = {key: getattr(own.scaling, key) for key in own.scaling.model_fields_set}
        counts = {key: getattr(own, key) for key in ("replicas", "pools")}
        return MantaConfig(
            served_name=name,
            model=own.model,
            revision=own.revision,
            chat_template=own.chat_template,
            aliases=own.aliases,
            engine={**self.engine, **own.engine},
            adapters=own.adapters,
            scaling=self.scaling.model_copy(update=scaling),
            limits=self.limits.model_copy(update=limits),
            **{key: value for key, value in counts.items() if key in own.model_fields_set},
            **{
                key: getattr(self, key)
                for key in ("app_name", "route_prefix", "router", "http", "log")
            },
        )

    def by_model(self) -> dict[str, "MantaConfig"]:
        """Return {model: its configuration, as if the model were served alone}."""
        if self.models:
            return {name: self.of(name) for name in self.models}
        return {self.name(): self}

    @property
    def engine_pools(self) -> dict[str, PoolConfig]:
        """The configured pools of engines, by name."""
        return {name: pool for name, pool in self.pools.items() if pool.role != "encoder"}

    def kind(self, name: str, pool: PoolConfig) -> PoolKind:
        """Return the kind of an engine pool, "gpu" or "cpu": its name if that is a kind, else the
        kind of its device."""
        if name in POOL_KINDS:
            return name
        device = {**self.engine, **pool.engine}.get("device", "auto")
        return "cpu" if device == "cpu" else "gpu"

    @property
    def apart(self) -> bool:
        """Whether there are prefill pools, whose replicas compute prompts for decode replicas."""
        return any(pool.role == "prefill" for pool in self.pools.values())

    def _check_roles(self) -> None:
        """Check that each prefill pool has a decode pool on the same kind of device with equal KV
        blocks, and vice versa. Raises ValueError."""
        roles = {pool.role: name for name, pool in self.engine_pools.items()}
        name = roles.get("prefill") or roles.get("decode")
        if name is None:
            return
        if "prefill" not in roles or len(roles) == 1:
            other = "decode" if "prefill" in roles else "prefill"
            raise ValueError(
                f"pools.{name}: role: {self.pools[name].role} needs a pool with role: {other}; add "
                "one, or leave the role out"
            )
        kinds = {self.kind(name, pool): name for name, pool in self.engine_pools.items()}
        if len(kinds) > 1:
            raise ValueError(
                f"pools.{kinds['cpu']}: prompts do not go from GPUs to CPUs; give all pools with "
                "roles the same engine.device"
            )
        for name, pool in self.engine_pools.items():
            if not {**self.engine, **pool.engine}.get("kv_moves", True):
                raise ValueError(
                    f"pools.{name}: engine.kv_moves is off, without which no prompt gets from pool "
                    "to pool; leave it out"
                )
            for key in pool.engine.keys() & set(BLOCK_OPTIONS):
                raise ValueError(
                    f"pools.{name}.engine.{key}: KV blocks go from pool to pool, so all pools have "
                    "one value; set it under the top level's engine"
                )
            if max(self.divisions(pool)) > 1:
                raise ValueError(
                    f"pools.{name}: KV blocks of several ranks do not go from pool to pool; leave "
                    "the roles out, or tensor_parallel and pipeline_parallel"
                )

    @property
    def encoders(self) -> dict[str, PoolConfig]:
        """The encoder pools by name: one, or none if the replicas encode all images."""
        return {name: pool for name, pool in self.pools.items() if pool.role == "encoder"}

    def _check_encoders(self) -> None:
        """Check that there is at most one encoder pool, and that engines take images for it.

        Raises ValueError.
        """
        names = list(self.encoders)
        if len(names) > 1:
            raise ValueError(
                f"pools.{names[1]}: pools.{names[0]} has role: encoder already; raise its replicas"
            )
        for name in names:
            if not self.engine_pools:
                raise ValueError(
                    f"pools.{name}: encoders answer no requests; add pools.gpu or pools.cpu, whose "
                    "replicas ask them"
                )
            if any(
                self.engine_options(pool).get("images") == "off"
                for pool in self.engine_pools.values()
            ):
                raise ValueError(
                    f"pools.{name}: engine.images is off, so there is nothing to encode; leave one "
                    "of them out"
                )

    def encoder_options(self, pool: PoolConfig) -> dict[str, Any]:
        """Return EngineConfig's fields for an encoder pool, including model and revision."""
        engine = {**self.engine, **pool.engine}
        own = {name: engine[name] for name in TOWER_OPTIONS if name in engine}
        top = {"model": self.model, "revision": self.revision, "log_level": self.log.level}
        return {**top, **own, "device": "cuda" if pool.num_gpus else "cpu", "quantization": "none"}

    def _check_ranks(self, name: str, pool: PoolConfig) -> None:
        """Check that num_gpus and num_cpus of a replica suit its ranks. Raises ValueError."""
        kind = self.kind(name, pool)
        tensor, pipeline, nodes = self.divisions(pool)
        if pipeline % nodes:
            raise ValueError(
                f"pools.{name}: engine.pipeline_nodes is {nodes} and engine.pipeline_parallel "
                f"{pipeline}: all nodes have equally many stages. Set one of them for this pool"
            )
        ranks, gpus, cores = self.node_ranks(pool), pool.num_gpus, pool.num_cpus
        ranks_text = ranks_said(tensor, pipeline, nodes) or "tensor_parallel 1"
        key = "pipeline_parallel" if pipeline > 1 else "tensor_parallel"
        setting = f"pools.{name}.num_gpus is {gpus or 0:g} and {ranks_text}"
        if kind == "cpu" and gpus:
            raise ValueError(
                f"pools.{name}.num_gpus is {gpus:g}: a replica on the CPU uses no GPU, which would "
                "be reserved and idle. Leave num_gpus out, or take pools.gpu"
            )
        if gpus is not None and gpus > ranks:
            raise ValueError(
                f"{setting}: an engine uses a GPU for each rank, and the others would be reserved "
                f"and idle. Set engine.{key}, or take more replicas of fewer GPUs each"
            )
        if kind == "gpu" and ranks > 1 and gpus is not None and gpus < ranks:
            raise ValueError(f"{setting}: each rank needs a GPU of its own. Leave num_gpus out")
        if kind == "cpu" and ranks > 1 and cores is not None and cores < ranks:
            raise ValueError(
                f"pools.{name}.num_cpus is {cores:g} and {ranks_text}: each rank needs a "
                f"core of its own. Raise num_cpus, or lower engine.{key}"
            )

    def sleeps(self, pool: PoolConfig) -> bool:
        """Return whether replicas of a pool sleep when idle, with their weights in host memory."""
        return bool({**self.engine, **pool.engine}.get("sleep_in_host_memory"))

    def node_ranks(self, pool: PoolConfig) -> int:
        """Return the number of ranks on each node of a replica (`EngineConfig.ranks_per_node`)."""
        tensor, pipeline, nodes = self.divisions(pool)
        return tensor * pipeline // nodes

    def divisions(self, pool: PoolConfig) -> tuple[int, int, int]:
        """Return tensor_parallel, pipeline_parallel and pipeline_nodes of a pool."""
        if pool.role == "encoder":
            return 1, 1, 1
        engine = {**self.engine, **pool.engine}
        keys = ("tensor_parallel", "pipeline_parallel", "pipeline_nodes")
        tensor, pipeline, nodes = (int(engine.get(key, 1)) for key in keys)
        return tensor, pipeline, nodes

    def engine_options(self, pool: PoolConfig) -> dict[str, Any]:
        """Return EngineConfig's fields for a pool, including model, revision and log_level."""
        top = {"model": self.model, "revision": self.revision, "log_level": self.log.level}
        moves = {"kv_moves": True} if self.apart else {}
        return {**top, **moves, **self.engine, **pool.engine}

    def pools_on(self, gpus: float) -> dict[str, PoolConfig]:
        """Return the engine pools by name, with device and quantization resolved.

        gpus: number of GPUs of a machine; without configured pools, it decides whether the only
            pool is "gpu" or "cpu".
        """
        named = self.engine_pools
        if not named:
            device = self.engine.get("device", "auto")
            gpu = device == "cuda" or (device == "auto" and gpus > 0)
            named = {"gpu" if gpu else "cpu": PoolConfig(replicas=self.replicas)}
        return {name: self.decided(name, pool) for name, pool in named.items()}

    def decided(self, name: str, pool: PoolConfig) -> PoolConfig:
        """Return a pool with its device filled in, and its quantization if that depends on other
        pools.

        A request may continue only with equal weights. So beside a pool `gpu`, quantization "auto"
        means "none" for pools on the CPU.
        """
        kind = self.kind(name, pool)
        engine = {"device": "cuda" if kind == "gpu" else "cpu", **pool.engine}
        asked = {**self.engine, **engine}.get("quantization", "auto")
        if asked == "auto" and kind == "cpu" and "gpu" in self.pools:
            engine["quantization"] = "none"
        return pool.model_copy(update={"engine": engine})

    def kept_blocks(self, gpus: float) -> list[bool]:
        """Return the sorted distinct values, over all engine pools, of `keeps_blocks`: whether the
        pool keeps a GGUF file's quantised blocks.

        gpus: see `pools_on`.
        """
        pools = self.pools_on(gpus).values()
        return sorted({keeps_blocks(self.engine_options(pool)) for pool in pools})

    def queue_seconds(self) -> float:
        """Return the longest queueing time in seconds: `limits.queue_seconds`, or 0.75 of
        `scaling.ttft`."""
        return self.limits.queue_seconds or 0.75 * self.scaling.ttft

    def name(self) -> str:
        """Return the name by which requests call the model."""
        if self.served_name is not None:
            return self.served_name
        if self.model == "default":
            return "SmolLM2-135M-Instruct"
        path = Path(self.model)
        return path.stem if path.suffix == ".gguf" else path.name
