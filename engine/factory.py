"""build(config) -> (EngineCore, Ready): connects model, memory, runner and scheduler.

It runs in the engine process.
"""

import gc
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from importlib.metadata import version
from pathlib import Path

import msgspec
import torch

from engine.config.engine_config import EngineConfig
from engine.config.kv_groups import kv_groups
from engine.config.towers import lacks_settings
from engine.errors import ConfigError, InvalidRequest
from engine.images.settings import PREPROCESSOR
from engine.lora.build import DeviceAdapters
from engine.lora.loader import AdapterLoader
from engine.lora.ranked_loader import RankedLoader
from engine.lora.tiers.adapter import Loader
from engine.lora.tiers.store import AdapterStore
from engine.messages import EngineRequest, Ready
from engine.models.drafters.build import build_drafter, load_drafter
from engine.models.drafters.drafter import ModelDrafter
from engine.models.registry import Model, build_model
from engine.parallel.ranks import Ranks
from engine.parallel.rendezvous import Activations, Open, Place, alone, first, other
from engine.pooled_checkpoint import read_head, read_pooling
from engine.pooling import Pooling
from engine.resolve import Resolved, acting, resolve
from engine.runner.caches.block_file import SlotMemory, read_key
from engine.runner.caches.block_pages import BlockPages
from engine.runner.caches.cache_memory import CacheMemory
from engine.runner.caches.disk_files import DiskFiles
from engine.runner.caches.host_copies import HostSlots, host_copies
from engine.runner.caches.kv_cache import KVCache
from engine.runner.caches.sleep_memory import SleepMemory, sleep_memory
from engine.runner.caches.token_pool import TokenPool
from engine.runner.drafting import Drafting
from engine.runner.forward import ModelForward, OwnInputs
from engine.runner.graphs import default_sizes
from engine.runner.images import StepImages
from engine.runner.inputs import make_inputs
from engine.runner.memory import (
    ADAPTERS_TOO_LARGE,
    GIB,
    GRAPHS_TOO_LARGE,
    KV_TOO_LARGE,
    ROWS_TOO_LARGE,
    STEP_TOO_LARGE,
    WEIGHTS_TOO_LARGE,
    MemoryPlan,
    Sized,
    available_host_memory,
    check_weights,
    fits_on,
    host_kv_bytes,
    lora_host_bytes,
    outline,
    parts_here,
    plan_memory,
)
from engine.runner.model_runner import ModelRunner
from engine.runner.ranked_runner import RankedMemory, RankedRefill, RankedRunner
from engine.runner.refill import Refill
from engine.runner.request_rows import RequestRows
from engine.runner.warm_up import capture_graphs, launch_everything, warm_up, warm_up_tower
from engine.sampling.sampler import Masked, Sampler
from engine.sampling.step_sampler import StepSampler
from engine.sampling_params import SamplingParams
from engine.scheduling.core import CoreConfig, EngineCore
from engine.scheduling.memory.block_manager import FreeBlocks, FreeList, LowestFirst
from engine.scheduling.memory.host_plan import HostCopies, HostPlan
from engine.scheduling.memory.host_tier import HostTier
from engine.scheduling.memory.image_plan import ImagePlan
from engine.scheduling.memory.kv_growth import GrowingMemory, KVGrowth
from engine.scheduling.memory.kv_shares import KVShare, shares_folder
from engine.scheduling.memory.regions import Regions
from engine.scheduling.memory.snapshots import SnapshotPlan
from engine.scheduling.moves.block_moves import BlockMoves, MovePlan
from engine.scheduling.orders.sleeping import Sleeper
from engine.scheduling.orders.updates import WeightLoader
from engine.scheduling.speculation import Speculation
from engine.scheduling.step import SchedulerCounters
from engine.shards import weight_files
from engine.speculation.settings import read_speculation
from engine.structured.compiler import Vocabulary
from engine.structured.preparing import Grammars
from engine.text.token_ids import missing_ids
from engine.text.tokenizer import declared_special
from engine.weights import load_weights
from engine.weights.staging import checkpoint_bytes
from engine.weights.stream import Loading
from engine.weights.transfer import WeightTransfer
from kernels.dispatch import Kernels, kernels_for
from kernels.launch.compiling import Compilers
from kernels.launch.device import act_as

logger = logging.getLogger("manta.engine")

# (phase, fraction done); while weights load, the phase also has ": " and their progress.
Progress = Callable[[str, float], None]
_LOG_SECONDS = 5.0
_LEAST_LOADED = 256  # tokens; a GPU computes fewer about as fast as it loads them
# Bytes of host memory for blocks on their way to other replicas, and as much for their way here.
_STAGED_CUDA, _STAGED_CPU = 128 << 20, 32 << 20
_LEAST_STAGED = 4  # blocks
_END_BYTES = 1 << 16  # bytes at both ends of a weight file that tell it from others
_OTHERS = "CUDA context and other processes"  # a purpose of the memory plan
_SHARE_SECONDS = 10.0  # longest wait for other engines' KV memory at the start
_ANY = 1 << 62  # number of blocks that never lowers the minimum over ranks


class _StartTimes:
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
class _Part:
    """The part of the engine on one rank."""

    resolved: Resolved
    place: Place
    runner: ModelRunner
    plan: MemoryPlan | None  # only on a node's first rank on the CPU, where ranks share the memory
    adapters: DeviceAdapters | None
    host_bytes: int  # bytes of host memory for adapters
    pooling: Pooling | None
    memory: SleepMemory | None  # only of an engine that may sleep
    refill: Refill
    growth: KVGrowth | None  # only of KV memory that grows


def build(
    config: EngineConfig,
    progress: Progress | None = None,
    compilers: Compilers | None = None,
    ranks: Ranks | None = None,
) -> tuple[EngineCore, Ready]:
    """Build the engine core: load the model and decide how memory is used.

    compilers: compile kernels at a first start on a machine; the caller closes them.
    ranks: the other ranks of a divided model; the caller closes them.
    Raises ConfigError for anything that a user can correct.
    """
    phases = _StartTimes(progress)
    open_place = alone if ranks is None else first(ranks)
    part = _build_part(config, 0, open_place, phases, progress, compilers)
    resolved, plan, pooling = part.resolved, part.plan, part.pooling
    assert plan is not None
    snapshots = _snapshot_plan(resolved, plan)
    head = None if pooling is None else read_head(pooling, resolved.model.hidden_size)
    core_config = CoreConfig(
        max_num_seqs=resolved.max_num_seqs,
        max_num_batched_tokens=resolved.max_num_batched_tokens,
        max_model_len=resolved.max_model_len,
        num_blocks=plan.num_blocks,
        block_size=config.block_size,
        kv_ranks=resolved.kv_ranks,
        kinds=kv_groups(resolved.model, resolved.head_ranks).kinds,
        snapshots=snapshots,
        prefix_caching=resolved.config.prefix_caching
        and (snapshots is None or snapshots.slots > 0),
        async_scheduling=resolved.async_scheduling,
        micro_batches=resolved.stages,
        target_tpot=config.target_tpot_ms / 1000,
        admission=config.admission,
        batching=config.batching,
        eos_token_ids=tuple(resolved.model.eos_token_ids),
        vocab_size=resolved.model.vocab_size,
        model_key=_model_key(resolved),
        pooling=head,
        generates=resolved.model.generates,
        whole_texts=resolved.model.whole_texts,
        images=_image_plan(resolved),
        no_routes=_no_routes(resolved),
        encodes_ahead=resolved.encodes_ahead,
    )
    ranked = None if ranks is None else RankedRunner(part.runner, part.place, ranks)
    core = EngineCore(
        core_config,
        ranked or part.runner,
        _adapters(config, part.adapters, part.host_bytes, ranks),
        _free_blocks(config, resolved.device),
        _grammars(resolved),
        _memory(part, ranks),
        Masked.memory(resolved.device),
        _weights(part, ranks, ranked),
        Speculation.of(resolved.speculation),
        _receiver(part, ranks),
        _host_tier(part, core_config, ranked),
        _moves(part, core_config),
        part.growth,
    )
    phases.start("rehearsal")
    _rehearse(core)
    phases.end("rehearsal")
    if part.growth is not None:
        part.growth.start()
    gc.collect()
    return core, Ready(
        max_model_len=core.config.max_model_len,
        vocab_size=resolved.model.vocab_size,
        block_size=config.block_size,
        num_blocks=plan.positions,
        eos_token_ids=list(resolved.model.eos_token_ids),
        start_seconds=phases.seconds,
        memory_table=plan.table(),
        step_tokens=resolved.max_num_batched_tokens,
        vector_size=0 if head is None else head.size,
        prefix_caching=core.config.prefix_caching,
        stats=core.stats(),
        images=resolved.model.vision is not None,
        dtype=str(resolved.dtype).removeprefix("torch."),
    )


def _host_tier(part: _Part, config: CoreConfig, ranked: RankedRunner | None) -> HostTier | None:
    """Return the directory of the KV blocks in host memory, if the engine keeps any there.

    Raises ConfigError.
    """
    own = part.runner.host
    if own is None:
        return None
    if not config.prefix_caching:
        raise ConfigError(
            "host_kv_bytes: the device has no room for a snapshot of states, without which no "
            "prefix is found; set snapshot_bytes, or leave it out",
            param="host_kv_bytes",
        )
    copies: HostCopies | None = own if ranked is None else ranked.copies
    assert copies is not None
    cuda = part.resolved.device.type == "cuda"
    plan = HostPlan(
        own.blocks.count,
        own.blocks.num_bytes,
        _LEAST_LOADED if cuda else config.block_size,
        part.resolved.config.host_kv_store == "all",
        0 if config.snapshots is None else own.num_states,
        0 if own.states is None else own.states.num_bytes,
    )
    files = _disk_files(part, config) if part.resolved.config.disk_kv_bytes else None
    return HostTier(plan, copies, len(config.kinds), files)


# Settings that change no byte of a block, so that files outlive a change of them.
_OF_NO_BLOCK = {
    "host_kv_bytes", "host_kv_store", "disk_kv_bytes", "disk_kv_folder", "disk_kv_clear",
    "disk_kv_key_file", "snapshot_bytes", "kv_cache_bytes", "num_blocks", "memory_fraction",
    "kv_memory", "kv_shared_bytes",
    "max_num_seqs", "allocation", "admission", "batching", "target_tpot_ms", "log_level", "seed",
    "generation_config", "logprobs_mode", "max_loras", "lora_host_bytes", "lora_disk_bytes",
    "lora_disk_folder", "sleep_in_host_memory", "image_cache_tokens",
}  # fmt: skip


def _disk_files(part: _Part, config: CoreConfig) -> DiskFiles:
    """Return the files of KV blocks below the host tier. Raises ConfigError."""
    settings, host = part.resolved.config, part.runner.host
    assert host is not None
    device = part.resolved.device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    values = msgspec.structs.asdict(settings)
    identity = [f"{key}={values[key]!r}" for key in sorted(values.keys() - _OF_NO_BLOCK)]
    code = f"{version('manta-serve')} torch {torch.__version__} {name} {part.resolved.dtype}"
    return DiskFiles(
        Path(settings.disk_kv_folder),
        settings.disk_kv_bytes,
        [code, config.model_key, repr(config.kinds), *identity],
        _slot_memory(host.blocks),
        None if host.states is None or config.snapshots is None else _slot_memory(host.states),
        len(config.kinds),
        key=read_key(settings.disk_kv_key_file) if settings.disk_kv_key_file else b"",
        clear=settings.disk_kv_clear,
        free_memory=available_host_memory(),
    )


def _slot_memory(slots: HostSlots) -> SlotMemory:
    memory = slots.memory
    view = memoryview(memory.numpy().data)
    return SlotMemory(view, slots.num_bytes, memory.data_ptr())


def _moves(part: _Part, config: CoreConfig) -> BlockMoves | None:
    """Return the moves of KV blocks between replicas, with their staging memory; None if the engine
    has none. Raises ConfigError."""
    resolved, runner = part.resolved, part.runner
    if not resolved.config.kv_moves:
        return None
    device = resolved.device
    caches = [runner.kv] if runner.drafting is None else [runner.kv, runner.drafting.kv]
    block_bytes = sum(cache.storage.nbytes // cache.num_blocks for cache in caches)
    size = _STAGED_CUDA if device.type == "cuda" else _STAGED_CPU
    slots = max(_LEAST_STAGED, min(config.num_blocks, size // block_bytes))
    try:
        copies = host_copies(caches, 2 * slots, 0, device, after_steps=True)
    except (OSError, RuntimeError) as error:
        raise ConfigError(
            f"kv_moves: {error}. Ways out: raise the limit of locked memory (ulimit -l, or the "
            "container's memlock), or leave it out",
            param="kv_moves",
        ) from error
    meaning = [
        config.model_key,
        str(resolved.dtype),
        f"{resolved.kv.name} {resolved.kv.bits}",
        repr(config.kinds),
        repr([(tuple(part().shape[::2]), config.block_size) for part in copies.blocks.parts]),
        repr(resolved.config.speculation),
    ]
    if resolved.config.deterministic:  # texts are equal on equal devices alone
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
        meaning.append(name)
    digest = blake2b("\0".join(meaning).encode(), digest_size=16).digest()
    num_bytes = copies.blocks.num_bytes
    plan = MovePlan(slots, num_bytes, digest, num_bytes * len(config.kinds) / config.block_size)
    return BlockMoves(plan, copies, [memoryview(slot.numpy()) for slot in copies.blocks.slots])


def _weights(part: _Part, ranks: Ranks | None, ranked: RankedRunner | None) -> WeightLoader | None:
    """Return the loader by which `update_weights` replaces the weights; None for a pooling model,
    whose head it would not replace."""
    if part.pooling is not None:
        return None
    if ranks is None or ranked is None:
        return part.refill
    return RankedRefill(part.refill, ranks, ranked.copies)


def _receiver(part: _Part, ranks: Ranks | None) -> WeightTransfer | None:
    """Return the receiver of weights from a trainer; None where not all ranks would find its
    folders."""
    resolved = part.resolved
    if part.pooling is not None or resolved.config.pipeline_nodes > 1:
        return None
    # Memory that is free while an engine sleeps is not for tensors.
    hold = part.refill.hold if ranks is None and part.memory is None else None
    num_bytes = max(checkpoint_bytes(resolved.folder), part.runner.model.num_bytes)
    return WeightTransfer(
        resolved.device, num_bytes, hold=hold, free_bytes=lambda: _free_bytes(resolved.device)
    )


def _free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return available_host_memory() // 2  # the files are in host memory, too


def _memory(part: _Part, ranks: Ranks | None) -> Sleeper | None:
    """Return the memory that a sleep frees; None if the engine cannot sleep."""
    if part.memory is None:
        return None
    if part.growth is not None:
        return GrowingMemory(part.memory, part.growth)
    return part.memory if ranks is None else RankedMemory(part.memory, ranks)


def _no_routes(resolved: Resolved) -> str:
    """Return why requests for the experts of their tokens are refused; "" = they are not."""
    if resolved.model.experts is None:
        return "this model has no experts"
    if resolved.stages > 1 or resolved.kv_ranks > 1:
        return "not supported with pipeline_parallel or data-parallel attention"
    return ""


def _image_plan(resolved: Resolved) -> ImagePlan | None:
    vision = resolved.model.vision
    if vision is None:
        file = resolved.folder / "config.json"
        if resolved.config.images != "off" and lacks_settings(file, resolved.model.wrapper):
            logger.warning("%s: sees no images: %s is missing", resolved.folder, PREPROCESSOR)
        return None
    return ImagePlan.of(
        vision.token_ids,
        resolved.image_cache_tokens,
        resolved.max_num_batched_tokens,
        resolved.max_num_seqs,
        vision.largest if vision.bidirectional else 0,
        resolved.model.hidden_size * (1 + vision.deepstack),
    )


def _snapshot_plan(resolved: Resolved, plan: MemoryPlan) -> SnapshotPlan | None:
    groups, config = kv_groups(resolved.model, resolved.head_ranks), resolved.config
    if not groups.recurrent:
        return None
    if config.prefix_caching and not plan.snapshots:
        size, key = groups.state_bytes / (1 << 20), "snapshot_bytes"
        why = (
            f"{key} is {config.snapshot_bytes}; raise it" if config.snapshot_bytes else f"set {key}"
        )
        logger.warning("no prefix cache: no room for a snapshot of %.2f MiB: %s", size, why)
    budget = resolved.max_num_batched_tokens
    return SnapshotPlan.of(
        groups, resolved.kv, config.block_size, budget, plan.snapshots, resolved.device.type
    )


def build_rank(
    config: EngineConfig, rank: int, memory: int, meet: Callable[[], tuple[str, int]]
) -> tuple[ModelRunner, Refill, Place, AdapterLoader | None, SleepMemory | None]:
    """Build the part of the model on a rank other than the first.

    Returns the rank's runner, what replaces its weights, its place among the ranks, the loader of
    its adapter slots, and the memory that it frees for a sleep.

    memory, meet: see `engine.parallel.rendezvous.other`.
    """
    open_place = other(rank, config, memory, meet)
    part = _build_part(config, rank, open_place, _StartTimes(None), None, None)
    gc.collect()
    loader = None if part.adapters is None else part.adapters.loader
    return part.runner, part.refill, part.place, loader, part.memory


def build_alone(config: EngineConfig) -> tuple[Resolved, ModelRunner, Refill]:
    """Build a model on one rank for a caller that lays out batches itself, without a scheduler.

    Returns the resolved config, the runner, and what replaces the weights. Raises ConfigError.
    """
    part = _build_part(config, 0, alone, _StartTimes(None), None, None)
    return part.resolved, part.runner, part.refill


def _build_part(
    config: EngineConfig,
    rank: int,
    open_place: Open,
    phases: "_StartTimes",
    progress: Progress | None,
    compilers: Compilers | None,
) -> _Part:
    """Build one rank's part of the engine; all ranks do so at the same time."""
    phases.start("device")
    resolved = resolve(config, rank)
    device = resolved.device
    if device.type == "cuda":
        torch.cuda.set_device(device)
        if config.gpu_capability is not None:
            act_as(acting(config, "", torch.cuda.get_device_capability(device)))
        # creates the CUDA context here, so that its memory is not counted elsewhere
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
        drafter = build_drafter(settings, model, config.quantization)
        # no memory page is touched yet
        if device.type == "cpu" and not rank % config.ranks_per_node:
            parts: list[Sized] = [*parts_here(resolved, model)]
            if drafter is not None:
                parts.append(drafter)
            check_weights(parts, available_host_memory())
        place.world.least(rank)
        folder = None if config.load_format == "dummy" else resolved.folder
        load_weights(
            model,
            folder,
            seed=config.seed or 0,
            ranks=config.num_ranks,
            progress=_tell(progress),
        )
        if device.type == "cuda":
            torch.cuda.synchronize()
            # From here on the cores are for the step loop and the threads that read adapters. Each
            # thread would otherwise get a pool of torch's threads, which spin on all cores.
            torch.set_num_threads(resolved.num_threads)
        if drafter is not None and settings is not None:
            load_drafter(drafter, settings, folder, config.seed or 0)
    # waits until all ranks' weights are loaded, so that free memory is measured without them
    place.world.least(rank)
    phases.end("weights")

    memory = _sleep_memory(resolved, model if drafter is None else (model, drafter))
    pooling = read_pooling(resolved.folder)
    phases.start("memory")
    device_adapters = _device_adapters(resolved, model) if config.max_loras else None
    host_bytes = lora_host_bytes(config, available_host_memory())
    runner, plan, growth = _build_runner(
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
                runner, _graph_sizes(resolved), most, drafts=resolved.speculation is not None
            )
            torch.cuda.synchronize()
        phases.end("graphs")
    refill = Refill(
        model,
        lambda: outline(resolved, whole=True),
        memory,
    )
    return _Part(
        resolved, place, runner, plan, device_adapters, host_bytes, pooling, memory, refill, growth
    )


def _sleep_memory(resolved: Resolved, model: object) -> SleepMemory | None:
    config, device = resolved.config, resolved.device
    if not config.sleep_in_host_memory:
        return None
    memory = sleep_memory(device)
    with fits_on(device, "the weights", WEIGHTS_TOO_LARGE, param="model"):
        # Adapters with virtual tokens write rows of the embedding table.
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
    """Return a function that reports loading progress.

    The log gets a line every few seconds and at the end; a waiting caller gets each report.
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


def _free_blocks(config: EngineConfig, device: torch.device) -> Callable[[int], FreeBlocks]:
    """Return the constructor of the free blocks that `allocation` names."""
    if config.kv_memory == "growing":
        return LowestFirst
    if config.allocation == "contiguous":
        return Regions
    return FreeList if config.allocation == "list" else lambda count: TokenPool(count, device)


def _rehearse(core: EngineCore) -> None:
    """Serve a few short requests, so that the first real one finds all kernels compiled and loaded.

    The earlier requests compile. From the last one the scheduler learns the time of prompt tokens.
    """
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    if not core.config.generates:
        params = SamplingParams(temperature=0.0, max_tokens=0, pooled=True)
    longest = core.config.max_model_len - 4
    tier = core.scheduler.tier
    disk = None if tier is None else tier.disk
    if tier is not None:
        tier.disk = None  # what an earlier engine has written would not be computed
    for number, length in enumerate((5, 100, 100)):
        ids = [0] * min(length, longest)
        core.add_request(EngineRequest(number, ids, len(ids), params, seed=0))
        while core.has_work():
            core.step()
        core.reset_prefix_cache()
    core.check_integrity()
    core.scheduler.counters = SchedulerCounters()
    if tier is not None:
        tier.reset_counts()
        tier.disk = disk
    if core.scheduler.drafts is not None:
        core.scheduler.drafts.speculation.forget_steps()


def _model_key(resolved: Resolved) -> str:
    """Return a key that changes with the weights, and is the same on all machines.

    Weight files are read at their ends only: different trainings differ there, too.
    """
    folder, config = resolved.folder, resolved.config
    state = blake2b((folder / "config.json").read_bytes(), digest_size=16)
    state.update(config.quantization.encode())
    state.update(repr(config.quantization_layers).encode())
    state.update(f"\0{resolved.kv.name}{resolved.kv.bits}\0".encode())
    if config.load_format == "dummy":
        state.update(f"\0dummy\0{config.seed or 0}".encode())
    else:
        for path in weight_files(folder):
            size = path.stat().st_size
            state.update(f"\0{path.name}\0{size}\0".encode())
            with path.open("rb") as file:
                state.update(file.read(_END_BYTES))
                file.seek(max(0, size - _END_BYTES))
                state.update(file.read(_END_BYTES))
    return state.hexdigest()


def _device_adapters(resolved: Resolved, model: Model) -> DeviceAdapters:
    config = resolved.config
    what = f"the LoRA slots ({config.max_loras} of rank {config.max_lora_rank})"
    if config.max_virtual_tokens:
        what += f" and their virtual tokens ({config.max_virtual_tokens} each)"
    with fits_on(resolved.device, what, ADAPTERS_TOO_LARGE, param="max_loras"):
        return DeviceAdapters.allocate(resolved, model)


def _adapters(
    config: EngineConfig,
    device_adapters: DeviceAdapters | None,
    host_bytes: int,
    ranks: Ranks | None,
) -> AdapterStore | None:
    if device_adapters is None:
        return None
    loader: Loader = device_adapters.loader
    if ranks is not None:
        loader = RankedLoader(loader, ranks)
    return AdapterStore(loader, config.max_loras, host_bytes)


def _grammars(resolved: Resolved) -> Grammars:
    """Read the vocabulary for structured output now; later it would block the step loop."""
    model = resolved.model
    try:
        ends = model.eos_token_ids
        declared = declared_special(resolved.folder)
        return Grammars(Vocabulary.load(resolved.folder, model.vocab_size, ends, declared))
    except InvalidRequest as refusal:
        return Grammars(refusal)


def _graph_sizes(resolved: Resolved) -> Sequence[int]:
    return resolved.config.graph_sizes or default_sizes(resolved.max_num_seqs)


def _build_runner(
    resolved: Resolved,
    place: Place,
    model: Model,
    kernels: Kernels,
    device_adapters: DeviceAdapters | None,
    host_bytes: int,
    compilers: Compilers | None,
    pooling: Pooling | None,
    memory: SleepMemory | None,
    drafter: ModelDrafter | None,
) -> tuple[ModelRunner, MemoryPlan | None, KVGrowth | None]:
    config, device = resolved.config, resolved.device
    max_num_seqs, max_model_len = resolved.max_num_seqs, resolved.max_model_len
    groups = model.kv
    what = f"the rows of {max_num_seqs} requests of up to {max_model_len} tokens"
    with fits_on(device, what, ROWS_TOO_LARGE, param="max_num_seqs"):
        rows = RequestRows.allocate(
            max_num_seqs,
            max_model_len,
            config.block_size,
            device,
            len(groups.groups),
            axes=resolved.model.places_of_axes,
        )
        vocab_size = resolved.model.vocab_size
        never = missing_ids(resolved.folder, vocab_size)
        part = place.group.share(vocab_size)
        sampler = Sampler(
            max_num_seqs + 1, vocab_size, device, never, part, resolved.config.logprobs_mode
        )

    def runner_with(
        num_blocks: int,
        model: Model = model,
        snapshots: int = 0,
        memory: CacheMemory | None = None,
        pages: BlockPages | None = None,
    ) -> ModelRunner:
        sizes = num_blocks, config.block_size, resolved.dtype, device, resolved.kv
        kv = KVCache.allocate(
            groups, *sizes, rows=max_num_seqs + 1, snapshots=snapshots, memory=memory, pages=pages
        )
        steps = resolved.stages + resolved.async_scheduling
        layout = rows, kv.block_size, resolved.max_num_batched_tokens, device, steps
        own: OwnInputs | None = None
        if config.attention_data_parallel:
            own = OwnInputs(make_inputs(*layout), model.group.rank, rows)
        lora = None if device_adapters is None else device_adapters.lora
        images = None
        if resolved.model.vision is not None:
            images = StepImages.of(resolved, model, rows, memory)
        forward = ModelForward(
            model, kernels, rows, kv, make_inputs(*layout), own, lora, place.link, images
        )
        sampling = StepSampler(model, sampler, rows.tokens, pooling)
        prompts = None if device_adapters is None else device_adapters.prompts
        drafting = None
        if drafter is not None:
            group = groups.whole_group
            assert group is not None
            drafts_kv = KVCache.allocate(drafter.kv, *sizes, memory=memory, pages=pages)
            most = resolved.max_num_batched_tokens
            own_layout = rows, kv.block_size, most + max_num_seqs, device, steps
            drafting = Drafting(
                drafter,
                kernels,
                rows,
                drafts_kv,
                sampler,
                group,
                vocab_size,
                None if drafter.reads_states else make_inputs(*own_layout),
                most,
            )
        return ModelRunner(forward, sampling, prompts, drafting)

    plan: MemoryPlan | None = None
    host_kv = _host_kv(config)
    if device.type == "cuda":
        if compilers is not None:
            _hand_over(compilers, resolved, lambda: runner_with(4, model.one_layer()))
        activations = _measure_step(resolved, runner_with)
        # recurrent states are counted separately
        activations -= (max_num_seqs + 1) * groups.state_bytes
        free, total = torch.cuda.mem_get_info(device)
        ours = torch.cuda.memory_reserved(device) + (0 if memory is None else memory.num_bytes)
        context = (_OTHERS, total - free - ours)
        plan = plan_memory(
            resolved,
            model,
            torch.cuda.get_device_name(device),
            total,
            context,
            host_bytes=host_bytes,
            host_kv=host_kv,
            activations=activations,
        )
    elif not place.world.rank % config.ranks_per_node:
        total = available_host_memory()
        total += sum(part.num_bytes for part in parts_here(resolved, model))
        plan = plan_memory(
            resolved, model, "cpu", total, ("", 0), host_bytes=host_bytes, host_kv=host_kv
        )
    num_blocks = place.world.least(_ANY if plan is None else plan.num_blocks)
    # A stage without recurrent layers has room for any number of snapshots.
    bounds = plan is not None and bool(groups.recurrent or not resolved.model.recurrent)
    snapshots = place.world.least(plan.snapshots if plan is not None and bounds else _ANY)
    if plan is not None:
        plan.num_blocks, plan.snapshots = num_blocks, snapshots
    block_bytes = groups.bytes_per_block(config.block_size, resolved.kv)
    if drafter is not None:
        block_bytes += drafter.kv.bytes_per_block(config.block_size, resolved.kv)
    size = num_blocks * block_bytes / GIB
    what = f"the KV cache's {num_blocks} blocks ({size:.2f} GiB)"
    pages, share = None, None
    if config.kv_memory == "growing":
        assert plan is not None
        pages = BlockPages(device, plan.most_blocks)
        share = _share(config, plan, device, memory)
    with fits_on(device, what, KV_TOO_LARGE, param="memory_fraction"):
        runner = runner_with(num_blocks, snapshots=snapshots, memory=memory, pages=pages)
        growth = None
        if pages is not None and share is not None and plan is not None:
            plan.num_blocks = pages.rounded(num_blocks)
            pages.grow(plan.num_blocks)  # as the first cache's last pages hold more than was asked
            runner.set_pages(pages)
            growth = KVGrowth(pages, share, plan.num_blocks)
    if config.host_kv_bytes:
        blocks = place.world.least(_ANY if plan is None else plan.host_blocks)
        states = place.world.least(plan.host_states if plan is not None and bounds else _ANY)
        _take_host_memory(runner, blocks, states, device)
    return runner, plan, growth


def _share(
    config: EngineConfig, plan: MemoryPlan, device: torch.device, memory: SleepMemory | None
) -> KVShare:
    """Return this engine's share of the device's KV memory, with what it begins with.

    Raises ConfigError if the other engines of the device leave less.
    """
    if device.type == "cuda":
        name = str(torch.cuda.get_device_properties(device).uuid)
        reserve = int(plan.total * (1 - config.memory_fraction))
    else:
        name, reserve = "cpu", 0

    def free() -> int:
        if device.type == "cuda":
            return torch.cuda.mem_get_info(device)[0] - reserve
        return available_host_memory()

    beside = sum(size for purpose, size in plan.rows if purpose != _OTHERS)

    def kept() -> int:
        if device.type != "cuda":
            return 0  # on the CPU what is free changes with all processes
        taken = torch.cuda.memory_reserved(device) + (0 if memory is None else memory.num_bytes)
        return max(0, beside - taken)

    share = KVShare(shares_folder(name), plan.most_blocks * plan.block_bytes, free, kept)
    size = plan.num_blocks * plan.block_bytes
    if not share.wait_for(size, _SHARE_SECONDS):
        room = share.room()
        share.close()
        raise ConfigError(
            f"kv_memory: growing: the KV blocks begin with {size / GIB:.2f} GiB, and the engines "
            f"of the device leave {room / GIB:.2f} GiB. Ways out: lower kv_cache_bytes of these "
            "engines, or raise kv_shared_bytes or memory_fraction",
            param="kv_memory",
        )
    return share


def _host_kv(config: EngineConfig) -> int:
    """Return the bytes of host memory for KV blocks. Raises ConfigError if they are not free."""
    available = available_host_memory()
    size = host_kv_bytes(config, available)
    if size > available:
        raise ConfigError(
            f"host_kv_bytes: {size / GIB:.2f} GiB were asked for and {available / GIB:.2f} GiB of "
            "host memory are free. Ways out: lower it, or give a share such as 0.5",
            param="host_kv_bytes",
        )
    return size


def _take_host_memory(
    runner: ModelRunner, num_blocks: int, num_states: int, device: torch.device
) -> None:
    """Allocate the host tier of a runner, for so many blocks and snapshots. Raises ConfigError."""
    caches = [runner.kv] if runner.drafting is None else [runner.kv, runner.drafting.kv]
    reread = not all(kind.whole for kind in runner.kv.groups.kinds) or runner.kv.states is not None
    try:
        runner.host = host_copies(caches, num_blocks, num_states, device, after_steps=reread)
    except (OSError, RuntimeError) as error:
        raise ConfigError(
            f"host_kv_bytes: {error}. Ways out: lower it, or raise the limit of locked memory "
            "(ulimit -l, or the container's memlock)",
            param="host_kv_bytes",
        ) from error


def _hand_over(
    compilers: Compilers, resolved: Resolved, make_runner: Callable[[], ModelRunner]
) -> None:
    """Give the compilers every kernel that the rest of the start will launch.

    make_runner: makes the runner of a model of one layer.
    A failure is only logged: a kernel that is needed fails again where it is launched.
    """
    try:
        runner = make_runner()
        with compilers.collecting():
            sizes = _graph_sizes(resolved) if resolved.captures else ()
            most = resolved.max_num_batched_tokens
            launch_everything(runner, sizes, most, drafts=resolved.speculation is not None)
    except Exception as error:
        logger.warning("not all kernels are compiled ahead: %s: %s", type(error).__name__, error)


def _measure_step(resolved: Resolved, runner_with: Callable[[int], ModelRunner]) -> int:
    """Measure the activation bytes of the largest step, with a KV cache of a few blocks."""
    device = resolved.device
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    with fits_on(device, "a step's activations", STEP_TOO_LARGE, param="max_num_batched_tokens"):
        runner = runner_with(4)
        drafts = resolved.speculation is not None
        warm_up(runner, resolved.max_num_batched_tokens, drafts=drafts)
        torch.cuda.synchronize()
        activations = torch.cuda.max_memory_allocated(device) - before
        if runner.forward.images is not None:
            before = torch.cuda.memory_allocated(device)
            torch.cuda.reset_peak_memory_stats(device)
            warm_up_tower(runner, resolved.max_num_batched_tokens)
            torch.cuda.synchronize()
            encode = torch.cuda.max_memory_allocated(device) - before
            beside = resolved.encodes_ahead
            activations = activations + encode if beside else max(activations, encode)
    del runner
    gc.collect()
    torch.cuda.empty_cache()
    return activations
