"""RankPart: a rank's part of the engine, from its device and weights to its CUDA graphs."""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from engine.config.engine_config import EngineConfig
from engine.factory.runner import build_runner, graph_sizes
from engine.lora.build import DeviceAdapters
from engine.models.drafters.drafter import ModelDrafter
from engine.models.registry import Model, build_model
from engine.parallel.rendezvous import Activations, Open, Place
from engine.pooled_checkpoint import read_pooling
from engine.pooling import Pooling
from engine.resolve import Resolved, acting, resolve
from engine.runner.caches.sleep_memory import SleepMemory, sleep_memory
from engine.runner.memory import (
    ADAPTERS_TOO_LARGE,
    GRAPHS_TOO_LARGE,
    WEIGHTS_TOO_LARGE,
    MemoryPlan,
    Sized,
    available_host_memory,
    check_weights,
    fits_on,
    lora_host_bytes,
    outline,
    parts_here,
)
from engine.runner.model_runner import ModelRunner
from engine.runner.refill import Refill
from engine.runner.warm_up import capture_graphs
from engine.scheduling.memory.kv_growth import KVGrowth
from engine.speculation.settings import read_speculation
from engine.weights import load_weights
from engine.weights.stream import Loading
from kernels.dispatch import kernels_for
from kernels.launch.compiling import Compilers, hash_compiler
from kernels.launch.device import act_as

logger = logging.getLogger("manta.engine")


# Called with (phase, completed fraction); while weights load, the phase ends with their progress.
Progress = Callable[[str, float], None]
_LOG_SECONDS = 5.0


class StartTimes:
    """The seconds of each phase of the start, for the start-up table."""

    def __init__(self, progress: Progress | None) -> None:
        self.seconds: dict[str, float] = {}
        self._progress = progress
        self._since = time.monotonic()

    def start(self, name: str) -> None:
        if self._progress is not None:
            self._progress(name, 0.0)

    def end(self, name: str) -> None:
        now = time.monotonic()
        self.seconds[name] = round(now - self._since, 3)
        self._since = now
        if self._progress is not None:
            self._progress(name, 1.0)


@dataclass(frozen=True, slots=True)
class RankPart:
    """The part of the engine on one rank."""

    resolved: Resolved
    place: Place
    runner: ModelRunner
    plan: MemoryPlan | None  # None on the CPU, except on a node's first rank
    adapters: DeviceAdapters | None
    host_bytes: int  # bytes of host memory for adapters
    pooling: Pooling | None
    memory: SleepMemory | None  # None if the engine cannot sleep
    refill: Refill
    growth: KVGrowth | None  # None if KV memory does not grow


def build_part(
    config: EngineConfig,
    rank: int,
    open_place: Open,
    phases: StartTimes,
    progress: Progress | None,
    compilers: Compilers | None,
) -> RankPart:
    """Build one rank's part of the engine; all ranks do so at the same time.

    open_place: connects the rank to the others.
    phases: gets the seconds of each phase.
    compilers: the kernel compilers of a first start on a machine, if it is one.
    Raises ConfigError.
    """
    phases.start("device")
    resolved = resolve(config, rank)
    device = resolved.device
    if device.type == "cuda":
        torch.cuda.set_device(device)
        hashing = hash_compiler()
        if config.gpu_capability is not None:
            act_as(acting(config, "", torch.cuda.get_device_capability(device)))
        # creates the CUDA context now, so that its memory is not attributed to later allocations
        torch.zeros(1, device=device)
    else:
        torch.set_num_threads(resolved.num_threads)
    place = open_place(device, _handed_on(resolved), config.deterministic)
    kernels = kernels_for(device.type, config.deterministic)
    phases.end("device")

    phases.start("weights")
    with fits_on(device, "the weights", WEIGHTS_TOO_LARGE, param="model"):
        model = build_model(
            resolved.model,
            resolved.dtype,
            device,
            kernels,
            quantization=config.quantization,
            quantization_layers=config.quantization_layers,
            group=place.group,
            stage=place.stage,
            spread_experts=resolved.spread_experts,
            data_parallel_attention=config.attention_data_parallel,
            virtual_tokens=config.max_loras * config.max_virtual_tokens,
        )
        settings = read_speculation(config.speculation)
        drafter: ModelDrafter | None = None
        if settings is not None and settings.by_model:
            from engine.models.drafters.build import build_drafter

            drafter = build_drafter(settings, model, config.quantization)
        # measured before memory pages of weights are touched
        if device.type == "cpu" and not rank % config.ranks_per_node:
            parts: list[Sized] = [*parts_here(resolved, model)]
            if drafter is not None:
                parts.append(drafter)
            check_weights(parts, available_host_memory())
        place.world.least(rank)
        folder = None if config.load_format == "dummy" else resolved.folder
        load_weights(
            model, folder, seed=config.seed or 0, ranks=config.num_ranks, progress=_tell(progress)
        )
        if device.type == "cuda":
            torch.cuda.synchronize()
            # From here on the cores are for the step loop and the threads that read adapters.
            # Otherwise each of these threads would get a pool of torch's threads, which spin on all
            # cores.
            torch.set_num_threads(resolved.num_threads)
        if drafter is not None and settings is not None:
            from engine.models.drafters.build import load_drafter

            load_drafter(drafter, settings, folder, config.seed or 0)
    # a barrier: all ranks load their weights before free memory is measured
    place.world.least(rank)
    phases.end("weights")

    memory = _sleep_memory(resolved, model if drafter is None else (model, drafter))
    pooling = read_pooling(resolved.folder)
    phases.start("memory")
    device_adapters = _device_adapters(resolved, model) if config.max_loras else None
    host_bytes = lora_host_bytes(config, available_host_memory())
    if device.type == "cuda":
        hashing.join()
    runner, plan, growth = build_runner(
        resolved,
        place,
        model,
        kernels,
        device_adapters,
        host_bytes,
        compilers,
        pooling,
        memory,
        drafter,
    )
    phases.end("memory")

    if resolved.captures:
        phases.start("graphs")
        with fits_on(device, "the CUDA graphs", GRAPHS_TOO_LARGE, param="memory_fraction"):
            most = resolved.max_num_batched_tokens
            capture_graphs(
                runner, graph_sizes(resolved), most, drafts=resolved.speculation is not None
            )
            torch.cuda.synchronize()
        phases.end("graphs")
    refill = Refill(model, lambda: outline(resolved, whole=True), memory)
    return RankPart(
        resolved, place, runner, plan, device_adapters, host_bytes, pooling, memory, refill, growth
    )


def _sleep_memory(resolved: Resolved, model: object) -> SleepMemory | None:
    config, device = resolved.config, resolved.device
    if not config.sleep_in_host_memory:
        return None
    memory = sleep_memory(device)
    with fits_on(device, "the weights", WEIGHTS_TOO_LARGE, param="model"):
        # Adapters with virtual tokens change rows of the embedding table.
        host_bytes = available_host_memory() // config.ranks_per_node
        memory.keep(model, host_bytes, written=config.max_virtual_tokens > 0)
    return memory


def _handed_on(resolved: Resolved) -> Activations:
    cuda, model = resolved.device.type == "cuda", resolved.model
    return Activations(
        resolved.stages,
        resolved.max_num_batched_tokens,
        model.hidden_size,
        resolved.dtype if cuda else torch.float32,
    )


def _tell(progress: Progress | None) -> Callable[[Loading], None]:
    """Return a function that logs loading progress and passes it to `progress`.

    The log gets a line every few seconds and at the end; `progress` gets each report.
    """
    logged = 0.0

    def report(loading: Loading) -> None:
        nonlocal logged
        over = loading.done == loading.total
        if progress is not None:
            progress(f"weights: {loading}", loading.fraction)
        if over or loading.seconds - logged >= _LOG_SECONDS:
            logged = loading.seconds
            logger.info("weights: %s", loading)

    return report


def _device_adapters(resolved: Resolved, model: Model) -> DeviceAdapters:
    config = resolved.config
    what = f"the LoRA slots ({config.max_loras} of rank {config.max_lora_rank})"
    if config.max_virtual_tokens:
        what += f" and their virtual tokens ({config.max_virtual_tokens} each)"
    with fits_on(resolved.device, what, ADAPTERS_TOO_LARGE, param="max_loras"):
        return DeviceAdapters.allocate(resolved, model)
