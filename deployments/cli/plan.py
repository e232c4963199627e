"""`manta plan`: a table of what a configuration takes."""

import os
import sys
from collections.abc import Iterator

from deployments.cli.console import model_progress
from deployments.cli.target import read_target
from deployments.config import MantaConfig
from deployments.models import resolve_model
from deployments.planning import GIB, GPUS, Device, Plan, plan
from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.model_config import ModelConfig


def run(spec: str, gpu: str | None, gpus: int, memory: float | None) -> int:
    """Print the table. Raises ConfigError when something does not fit."""
    config = read_target(spec)
    with model_progress() as progress:
        folder = resolve_model(config.model, config.revision, progress, weights=False)
    model = ModelConfig.from_folder(folder)
    device = _device(gpu, memory)
    if device.kind == "cuda":
        print(f"Model    {config.name()} ({model.num_parameters() / 1e6:,.0f} M parameters)")
    for name, engine in _engines(config, device):
        result = plan(model, engine, device, devices_per_node=gpus)
        print(f"Pool     {name}")
        for label, value in _rows(result):
            print(f"  {label:<26} {value}")
    return 0


def _engines(config: MantaConfig, device: Device) -> Iterator[tuple[str, EngineConfig]]:
    """(pool, engine configuration) of each pool that would run on the device."""
    wanted = "gpu" if device.kind == "cuda" else "cpu"
    pools = {name: pool for name, pool in config.pools.items() if name == wanted}
    if config.pools and not pools:
        raise ConfigError(
            f"the configuration has no {wanted} pool; give --gpu "
            + ("cpu" if wanted == "gpu" else "h200 or another GPU"),
            param="pools",
        )
    for name, pool in pools.items():
        yield name, EngineConfig(**config.engine_options(pool))
    if not pools:
        yield wanted, EngineConfig(model=config.model, **config.engine)


def _rows(result: Plan) -> Iterator[tuple[str, str]]:
    def size(value: int) -> str:
        return f"{value / GIB:9.2f} GiB"

    device = result.device
    yield "device", f"{device.name}, {device.memory / GIB:.1f} GiB"
    yield "weights", f"{size(result.weights)}  {result.dtype}"
    yield "request rows", f"{size(result.request_rows)}  {result.max_num_seqs} requests at once"
    yield "activations", f"{size(result.activations)}  largest step, estimated"
    yield (
        "context and graphs" if device.kind == "cuda" else "Python process",
        f"{size(result.overhead)}  estimated",
    )
    yield (
        "KV cache",
        f"{size(result.kv_bytes)}  {result.num_blocks:,} blocks of {result.block_size} tokens "
        f"({result.block_bytes / 1024:,.0f} KiB each)",
    )
    yield "in all", size(result.used)
    yield "tokens in KV", f"{result.kv_tokens:,}"
    yield (
        "full-length requests",
        f"{result.full_length_requests:,.1f} of {result.max_model_len:,} tokens",
    )
    yield "replicas per node", f"{result.replicas_per_node:,}"


def _device(gpu: str | None, memory: float | None) -> Device:
    if gpu is None:
        return _this_machine(memory)
    name = gpu.lower()
    if name == "cpu":
        return _this_machine(memory, cpu=True)
    if name in GPUS:
        return Device(name.upper(), "cuda", GPUS[name])
    try:
        gib = float(name)
    except ValueError:
        raise ConfigError(
            f"--gpu {gpu}: not known; give one of {', '.join(GPUS)}, cpu, or the memory in GiB"
        ) from None
    if not 1 <= gib <= 1024:
        raise ConfigError(f"--gpu {gpu}: the memory in GiB must be 1 to 1024")
    return Device(f"GPU with {gib:g} GiB", "cuda", int(gib * GIB))


def _this_machine(memory: float | None, *, cpu: bool = False) -> Device:
    import torch

    if torch.cuda.is_available() and not cpu:
        properties = torch.cuda.get_device_properties(0)
        return Device(properties.name, "cuda", properties.total_memory)
    from engine.runner.memory import available_host_memory

    if memory is not None:
        return Device("CPU", "cpu", int(memory * GIB))
    if not cpu:
        print(
            "no GPU here: planning for this machine's CPU; --gpu h200 plans for one",
            file=sys.stderr,
        )
    cores = len(os.sched_getaffinity(0))
    return Device("CPU, free memory of this machine", "cpu", available_host_memory(), cores)
