"""`manta plan`: print tables of a configuration's memory and its cost on node types."""

import contextlib
import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from msgspec.structs import asdict

from deployments.checkpoints.resolve import keeps_blocks, outlined, resolve_model, with_drafter
from deployments.cli.console import model_progress
from deployments.cli.target import read_planned
from deployments.config.load import MantaConfig, PoolConfig, PoolKind
from deployments.config.pools import on_cpu
from deployments.plan.encoders import plan_encoders
from deployments.plan.gpus import GIB, GPUS, abilities
from deployments.plan.memory import (
    DoesNotFit,
    EnginePlan,
    Hardware,
    check_quantization,
    plan,
    ranks_that_fit,
)
from deployments.plan.prices import NodeOffer, Prices, offers
from deployments.scaling import roles
from engine.config.engine_config import EngineConfig
from engine.config.kv_groups import Full
from engine.config.model_config import ModelConfig
from engine.config.towers import lacks_settings
from engine.errors import ConfigError
from engine.images.layout import ImageError
from engine.images.processor import image_processor
from engine.images.settings import PREPROCESSOR
from engine.parallel.nodes import read_nodes, shares

_SIDE = 8192  # pixels of a square image that has as many tokens as its processor allows
_OFFERS = 8  # maximum number of node types in a table


def run(
    spec: str,
    gpu: str | None,
    gpus: int | None,
    memory: float | None,
    prices: Path | None = None,
    *,
    trace: Path | None = None,
    rates: Path | None = None,
) -> int:
    """Print the tables of a configuration or model, or how it would serve a trace.

    gpu, memory: as in `device_of`. gpus: number of GPUs of a node. prices: file of a price list.
    trace: file with a recorded load. rates: file with the cost of replicas' steps; see `predict`.

    Raises ConfigError if something does not fit.
    """
    config, file = read_planned(spec, complete=False)
    priced = Prices.load(prices)
    device = device_of(gpu, memory)
    if trace is None:
        if rates is not None:
            raise ConfigError("--rates says how fast replicas serve a trace; give --trace, too")
        for part in config.by_model().values():
            _print(part, _config_file(part, file), device, gpu, gpus, priced)
        return 0
    from deployments.cli.plan_trace import predict, rows_of

    if config.models:
        names = ", ".join(config.models)
        raise ConfigError(
            f"models: there are several ({names}), and a trace is of one; give a configuration of "
            "that one"
        )
    for line in predict(config, _config_file(config, file), device, memory, rows_of(trace), rates):
        print(line)
    return 0


def _config_file(config: MantaConfig, file: Path | None) -> Path:
    """Return the path of the model's config.json; a hub model is downloaded without weights.

    file: the path, if known.
    """
    alone = Path(config.model).expanduser() / "config.json"
    file = file or outlined(config.model) or (alone if alone.is_file() else None)
    if file is None:
        with model_progress() as progress:
            folder = resolve_model(config.model, config.revision, progress, weights=False)
        file = folder / "config.json"
    return file


def _print(
    config: MantaConfig,
    file: Path,
    device: Hardware,
    gpu: str | None,
    gpus: int | None,
    priced: Prices,
) -> None:
    """Print the tables of one model. file: config.json of the model."""
    model = ModelConfig.from_file(file)
    by_name = dict(engines(config, device))
    for number, (name, result) in enumerate(plans(config, file, device, gpus)):
        if not number:
            print(f"Model    {config.name()} ({parameters(result)})")
            for line in keys_and_values(result):
                print(f"         {line}")
            if images := sees_images(model, by_name[name], file):
                print(f"         {images}")
            if images := larger_images(result, file):
                print(f"         {images}; raise engine.image_cache_tokens for larger ones")
        print(f"Pool     {name}")
        for label, value in (*_rows(result), *_drafts(result), *_host_tier(by_name[name], result)):
            print(f"  {label:<28} {value}")
        if device.kind == "cpu" and device.cores:
            for label, value in _nodes(by_name[name]):
                print(f"  {label:<28} {value}")
    for line in _encoders(config, model, device):
        print(line)
    for line in roles.lines(config):
        print(line)
    for line in _costs(config, model, priced, gpu):
        print(line)


def plans(
    config: MantaConfig, file: Path, device: Hardware, gpus: int | None = None
) -> Iterator[tuple[str, EnginePlan]]:
    """Yield (pool, plan) for each pool that would run on the device.

    file: config.json of the model.
    gpus: GPUs of a node; None: as many as a replica has.

    Raises ConfigError if something does not fit.
    """
    for name, engine in engines(config, device, file.parent):
        model = as_loaded(ModelConfig.from_file(file, engine.rope_scaling), engine)
        try:
            yield name, plan(model, engine, device, devices_per_node=gpus)
        except DoesNotFit as error:
            ranks = None if device.kind == "cpu" else ranks_that_fit(model, engine, device)
            if ranks is None:
                # Ranks on a CPU share its memory, so more ranks do not help.
                raise
            raise DoesNotFit(
                f"{error.message}; or set engine.tensor_parallel: {ranks}, with which it fits on "
                f"{ranks * engine.pipeline_parallel} GPUs",
                param=error.param,
            ) from None


def keys_and_values(result: EnginePlan) -> Iterator[str]:
    """Yield lines about the KV cache: bytes per token and kept tokens, by kind of layer.

    Further lines describe the states of recurrent layers.
    """
    if not result.kv_per_token:
        return
    # Ranks on a CPU share its memory, so their sum is shown.
    suffix = " on each GPU" if result.ranks > 1 and result.device.kind == "cuda" else ""
    token_bytes = sum(size for _, _, size in result.kv_per_token)
    yield f"{token_bytes / 1024:,.1f} KiB of keys and values a token{suffix}"
    if len(result.kv_per_token) > 1 or result.kv_per_token[0][0] != Full().describe():
        for tokens, layers, size in result.kv_per_token:
            yield f"  {size / 1024:,.1f} KiB in {layers} layers that keep {tokens}"
    layers, size = result.states
    if layers:
        text = f"{size / (1 << 20):,.1f} MiB of states a running request{suffix}"
        yield f"{text}, in {layers} layers"
        if result.snapshots:
            yield (
                f"{result.snapshots:,} snapshots of as much, from which prefixes go on, and one in "
                "the place of each request that does not run"
            )
        elif result.prefix_caching:
            yield "no prefix cache: no memory for a snapshot of states; raise snapshot_bytes"
        else:
            yield "no prefix cache: prefix_caching is false"


def sees_images(model: ModelConfig, engine: EngineConfig, file: Path) -> str:
    """Return a text about whether an engine accepts images; "" for a text model.

    file: config.json of the model.
    """
    if lacks_settings(file, model.wrapper):
        return f"sees no images: {PREPROCESSOR} is missing"
    if model.vision is None:
        return ""
    return "sees no images: engine.images is off" if engine.images == "off" else "sees images"


def larger_images(result: EnginePlan, file: Path) -> str:
    """Return a text if an engine refuses images that its model's processor allows; else "".

    file: config.json of the model.
    """
    largest = 0
    # settings with an error are refused elsewhere, and tiles that need a tokenizer stay small
    with contextlib.suppress(ConfigError, ImageError):
        processor = image_processor(file.parent) if result.image_tokens else None
        largest = 0 if processor is None else processor.layout(_SIDE, _SIDE).size
    if largest <= result.image_tokens:
        return ""
    return f"images of at most {result.image_tokens:,} tokens, the processor allows {largest:,}"


def parameters(result: EnginePlan) -> str:
    summary = f"{result.parameters / 1e6:,.0f} M parameters"
    if result.active_parameters == result.parameters:
        return summary
    return f"{summary}, of which a token meets {result.active_parameters / 1e6:,.0f} M"


def as_loaded(model: ModelConfig, engine: EngineConfig) -> ModelConfig:
    """Return a model's configuration as an engine would load it: without quantisation if the engine
    does not keep a GGUF file's quantised blocks.

    model: configuration of the model; for a GGUF file, the one with quantised blocks.
    """
    quantized = model.quantized
    if quantized is None or quantized.method != "gguf" or keeps_blocks(asdict(engine)):
        return model
    return replace(model, quantized=None)


def engine_of(
    config: MantaConfig, name: str, pool: PoolConfig, folder: Path | None = None
) -> EngineConfig:
    """Return the engine configuration of a pool's replicas. folder: see `engines`."""
    options = config.engine_options(config.decided(name, pool))
    return EngineConfig(**with_drafter(options, folder, weights=False))


def _costs(
    config: MantaConfig, model: ModelConfig, prices: Prices, gpu: str | None
) -> Iterator[str]:
    """Yield the lines of a cost table for each engine pool or, without configured pools, for a GPU
    and a CPU pool.

    gpu: the command's option, which restricts the table to one GPU, or to GPUs or CPUs; None: all.
    """
    yield f"Costs    {prices.currency}, {prices.source}, {prices.date}; --prices takes others"
    wanted = gpu.lower() if gpu is not None else ""
    kinds: tuple[PoolKind, ...] = ("gpu", "cpu")
    if wanted:
        kinds = ("cpu",) if wanted == "cpu" else ("gpu",)
    pools: dict[str, PoolConfig] = config.engine_pools or {
        kind: PoolConfig(replicas=config.replicas) for kind in kinds
    }
    for name, pool in pools.items():
        kind = config.kind(name, pool)
        engine = engine_of(config, name, pool)
        loaded = as_loaded(model, engine)
        try:
            check_quantization(loaded, engine, "cuda" if kind == "gpu" else "cpu")
        except ConfigError as error:
            yield f"Pool     {name}: {error.message}"
            continue
        lines = [
            offer
            for offer in offers(kind, pool, loaded, engine, prices)
            if kind == "cpu" or wanted not in GPUS or offer.node.gpu == wanted
        ]
        if not lines:
            yield f"Pool     {name}: fits on no node type of the price list"
            continue
        yield f"Pool     {name}: {_span(pool, lines[0], prices.currency)}"
        yield (
            f"  {'node type':<16} {'device':<14} {'replicas':>8} {'node/h':>9} {'replica/h':>9} "
            f"{'KV tokens':>12} {'1 M output tokens':>18}"
        )
        for offer in lines[:_OFFERS]:
            yield _offer(offer)
        if len(lines) > _OFFERS:
            yield f"  and {len(lines) - _OFFERS} dearer ones"
    for name in config.encoders:
        yield f"Pool     {name}: encoders are not in these costs"


def _span(pool: PoolConfig, offer: NodeOffer, currency: str) -> str:
    """Return a text about the hourly cost of a pool's replicas on a node type.

    offer: the cheapest node type for the pool.
    """
    noun = "replica" if pool.replicas == 1 else "replicas"
    hour, nodes = offer.hour(pool.replicas), offer.plan.nodes
    apart = f", each on {nodes} of them" if nodes > 1 else ""
    text = f"{pool.replicas} {noun} on {offer.node.name}{apart}: {hour:,.2f} {currency}/h"
    if pool.max_replicas is not None:
        low, high = offer.hour(pool.min_replicas), offer.hour(pool.max_replicas)
        text += f", scaling {low:,.2f} to {high:,.2f} ({pool.min_replicas} to {pool.max_replicas})"
    return text


def _offer(offer: NodeOffer) -> str:
    node = offer.node
    device = f"{node.gpus} x {node.gpu}" if node.gpu else f"{node.cpus} CPUs"
    tokens = "not measured" if offer.million_tokens is None else f"{offer.million_tokens:.3f}"
    return (
        f"  {node.name:<16} {device:<14} {offer.replicas:>8} {node.hour:>9.2f} "
        f"{offer.replica_hour:>9.3f} {offer.plan.kv_tokens:>12,} {tokens:>18}"
    )


def engines(
    config: MantaConfig, device: Hardware, folder: Path | None = None
) -> Iterator[tuple[str, EngineConfig]]:
    """Yield (pool, engine configuration) for each pool that would run on the device.

    folder: the model's folder, with whose tokenizer a draft model's is compared; None: with none.

    Raises ConfigError if there is none.
    """
    wanted: PoolKind = "gpu" if device.kind == "cuda" else "cpu"
    pools = {
        name: pool
        for name, pool in config.engine_pools.items()
        if config.kind(name, pool) == wanted
    }
    if config.pools and not pools:
        way_out = "add pools.gpu, or give manta plan --gpu cpu"
        if wanted == "cpu":
            others = " and ".join(map(on_cpu, config.engine_pools))
            way_out = f"give manta plan --gpu h200 or another GPU, or {others}"
        raise ConfigError(f"the configuration has no {wanted} pool; {way_out}", param="pools")
    for name, pool in pools.items():
        yield name, engine_of(config, name, pool, folder)
    if not pools:
        yield wanted, engine_of(config, wanted, PoolConfig(), folder)


def _rows(result: EnginePlan) -> Iterator[tuple[str, str]]:
    def size(value: int) -> str:
        return f"{value / GIB:9.2f} GiB"

    device = result.device
    ranks = f", each of {result.ranks} for a replica" if result.ranks > 1 else ""
    if device.kind == "cpu" and ranks:
        ranks = f", {result.ranks} ranks a replica"
    if result.stages > 1:
        ranks += f", in {result.stages} stages of layers"
    if result.nodes > 1:
        ranks += f" on {result.nodes} nodes of {result.ranks_per_node}"
    yield "device", f"{device.name}, {device.memory / GIB:.1f} GiB{ranks}"
    if device.capability is not None:
        native, otherwise = abilities(device.capability)
        major, minor = device.capability
        yield "", f"compute capability {major}.{minor}: {native}"
        if otherwise:
            yield "", otherwise
    if device.bandwidth:
        read = result.weights * result.stages * result.active_parameters / result.parameters
        least = read / device.bandwidth / 1e6  # ms
        yield (
            "",
            f"{device.bandwidth:,} GB/s, {device.teraflops:,} TFLOP/s in 16 bits (data sheet): a "
            f"token of one request waits {least:,.1f} ms for weights at least",
        )
    notes = {
        "weights": result.weights_kind,
        "request rows": f"{result.max_num_seqs} requests at once",
        "activations (largest step)": "estimated",
    }
    for purpose, num_bytes in result.memory.rows:
        yield purpose, f"{size(num_bytes)}  {notes.get(purpose, '')}".rstrip()
        if purpose == "weights":
            yield from (("", f"{'':>13}  {product}") for product in result.products)
    yield (
        "KV cache",
        f"{size(result.kv_bytes)}  {result.num_blocks:,} blocks of {result.memory.block_size} "
        f"tokens{result.memory.where} ({result.block_bytes / 1024:,.0f} KiB each)",
    )
    if most := result.memory.most_blocks:
        yield (
            "",
            f"{size(most * result.block_bytes)}  {most:,} blocks where other engines leave them",
        )
    yield from (("", f"{'':>13}  {line}") for line in result.attention)
    yield "in all", size(result.used)
    yield "tokens in KV", f"{result.kv_tokens:,}"
    yield (
        "full-length requests",
        f"{result.full_length_requests:,.1f} of {result.max_model_len:,} tokens",
    )
    per = "node" if result.nodes == 1 else f"{result.nodes} nodes"
    yield f"replicas per {per}", f"{result.replicas_per_node:,}"


def drafts_memory(result: EnginePlan) -> int:
    """Return the maximum host memory, in bytes, for lookup drafting; 0 without lookup drafting."""
    settings = result.speculation
    if settings is None or settings.by_model:
        return 0
    return settings.lookup.num_bytes(result.max_num_seqs, result.max_model_len)


def _drafts(result: EnginePlan) -> Iterator[tuple[str, str]]:
    """Yield the table row for the host memory of lookup drafting, if the engine uses it."""
    if most := drafts_memory(result):
        where = "" if result.device.kind == "cpu" else " of host memory"
        yield "drafts", f"{most / GIB:9.2f} GiB{where} at most (speculation)"


def _host_tier(engine: EngineConfig, result: EnginePlan) -> Iterator[tuple[str, str]]:
    """Yield the table rows for KV blocks in host memory and on disk, if configured."""
    if not engine.host_kv_bytes:
        return
    memory = result.memory
    unit = " a rank" if result.ranks > 1 and result.device.kind == "cuda" else ""
    text = (
        f"{memory.host_kv / GIB:9.2f} GiB{unit}, {memory.host_blocks:,} blocks that leave the cache"
    )
    if not memory.host_kv:  # a share of the free memory, known only when the engine starts
        text = f"{engine.host_kv_bytes:g} of the free memory, for blocks that leave the cache"
    yield "host memory", text
    if engine.disk_kv_bytes:
        blocks = engine.disk_kv_bytes // max(1, memory.block_bytes)
        where = f"{engine.disk_kv_folder}, once for all engines of the folder"
        yield "disk", f"{engine.disk_kv_bytes / GIB:9.2f} GiB, {blocks:,} blocks in {where}"


def _encoders(config: MantaConfig, model: ModelConfig, device: Hardware) -> Iterator[str]:
    """Yield the lines about each encoder pool: memory of an actor, and its speed if known."""
    for encoder in plan_encoders(config, model, device):
        kind = "GPU" if encoder.kind == "cuda" else "CPU"
        yield f"Pool     {encoder.pool} (encoder: the tower alone, on a {kind})"
        for purpose, size in (*encoder.rows, ("in all", encoder.used)):
            yield f"  {purpose:<28} {size / GIB:9.2f} GiB"
        if encoder.rate:
            yield f"  {'rate (estimated)':<28} {encoder.rate} (640 x 427)"


def _nodes(engine: EngineConfig) -> Iterator[tuple[str, str]]:
    """Yield the table rows for this machine's NUMA nodes and each rank's share of them.

    Raises ConfigError.
    """
    nodes = read_nodes()
    if engine.numa == "none":
        yield "NUMA nodes", f"{len(nodes)}" + "; threads are bound to none" * (len(nodes) > 1)
        return
    ranks = engine.ranks_per_node
    yield "NUMA nodes", f"{len(nodes)}, of which a replica has {min(len(nodes), ranks)}"
    for rank, node in enumerate(shares(nodes[:ranks], ranks, engine.num_threads)):
        other = ", or its like on another node" * (ranks < len(nodes))
        yield f"  rank {rank}", f"{node}{other}"


def device_of(gpu: str | None, memory: float | None, *, quiet: bool = False) -> Hardware:
    """Return the hardware to plan for.

    gpu: name of a GPU, its memory in GiB, or "cpu"; None: this machine.
    memory: free memory of a CPU node in GiB; None: this machine's.
    quiet: whether to print no hint when this machine has no GPU.

    Raises ConfigError for an unknown `gpu`.
    """
    if gpu is None:
        return _this_machine(memory, quiet=quiet)
    name = gpu.lower()
    if name == "cpu":
        return _this_machine(memory, cpu=True, quiet=True)
    if name in GPUS:
        return Hardware.gpu(name)
    try:
        gib = float(name)
    except ValueError:
        raise ConfigError(
            f"--gpu {gpu}: not known; give one of {', '.join(GPUS)}, cpu, or the memory in GiB"
        ) from None
    if not 1 <= gib <= 1024:
        raise ConfigError(f"--gpu {gpu}: the memory in GiB must be 1 to 1024")
    return Hardware(f"GPU with {gib:g} GiB", "cuda", int(gib * GIB))


def _this_machine(memory: float | None, *, cpu: bool = False, quiet: bool = False) -> Hardware:
    import torch

    if torch.cuda.is_available() and not cpu:
        properties = torch.cuda.get_device_properties(0)
        capability = (properties.major, properties.minor)
        return Hardware(properties.name, "cuda", properties.total_memory, capability=capability)
    from engine.runner.memory import available_host_memory

    if memory is not None:
        return Hardware("CPU", "cpu", int(memory * GIB))
    if not quiet:
        print(
            "no GPU here: planning for this machine's CPU; --gpu h200 plans for one",
            file=sys.stderr,
        )
    cores = len(os.sched_getaffinity(0))
    return Hardware("CPU, free memory of this machine", "cpu", available_host_memory(), cores)
