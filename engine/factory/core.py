"""build(config) -> (EngineCore, Ready): builds rank 0's model and memory, and the scheduler."""

import gc
from collections.abc import Callable

import torch

from engine.config.engine_config import EngineConfig
from engine.config.kv_groups import kv_groups
from engine.factory.block_copies import block_moves, host_tier
from engine.factory.plans import (
    free_blocks,
    image_plan,
    model_key,
    no_routes,
    read_grammars,
    snapshot_plan,
)
from engine.factory.rank_part import Progress, RankPart, StartTimes, build_part
from engine.lora.build import DeviceAdapters
from engine.lora.loader import AdapterLoader
from engine.lora.ranked_loader import RankedLoader
from engine.lora.tiers.adapter import Loader
from engine.lora.tiers.store import AdapterStore
from engine.messages import EngineRequest, Ready
from engine.parallel.ranks import Ranks
from engine.parallel.rendezvous import Place, alone, first, other
from engine.pooled_checkpoint import read_head
from engine.resolve import Resolved
from engine.runner.caches.sleep_memory import SleepMemory
from engine.runner.memory import available_host_memory
from engine.runner.model_runner import ModelRunner
from engine.runner.ranked_runner import RankedMemory, RankedRefill, RankedRunner
from engine.runner.refill import Refill
from engine.sampling.sampler import Masked
from engine.sampling_params import SamplingParams
from engine.scheduling.core import CoreConfig, EngineCore
from engine.scheduling.drafts.speculation import Speculation
from engine.scheduling.memory.kv_growth import GrowingMemory
from engine.scheduling.orders.sleeping import Sleeper
from engine.scheduling.orders.updates import WeightLoader
from engine.weights.staging import checkpoint_bytes
from engine.weights.transfers.transfer import WeightTransfer
from kernels.launch.compiling import Compilers


def build(
    config: EngineConfig,
    progress: Progress | None = None,
    compilers: Compilers | None = None,
    ranks: Ranks | None = None,
) -> tuple[EngineCore, Ready]:
    """Build the engine core: load the model and decide how memory is used.

    Returns the core, and the Ready message for the parent process.

    compilers: the kernel compilers of a first start on a machine; the caller closes them.
    ranks: the other ranks of a divided model; the caller closes them.
    Raises ConfigError for anything that a user can correct.
    """
    phases = StartTimes(progress)
    open_place = alone if ranks is None else first(ranks)
    part = build_part(config, 0, open_place, phases, progress, compilers)
    resolved, plan, pooling = part.resolved, part.plan, part.pooling
    assert plan is not None
    snapshots = snapshot_plan(resolved, plan)
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
        model_key=model_key(resolved),
        pooling=head,
        generates=resolved.model.generates,
        whole_texts=resolved.model.whole_texts,
        images=image_plan(resolved),
        no_routes=no_routes(resolved),
        encodes_ahead=resolved.encodes_ahead,
    )
    ranked = None if ranks is None else RankedRunner(part.runner, part.place, ranks)
    core = EngineCore(
        core_config,
        ranked or part.runner,
        _adapters(config, part.adapters, part.host_bytes, ranks),
        free_blocks(config, resolved.device),
        read_grammars(resolved),
        _memory(part, ranks),
        Masked.memory(resolved.device),
        _weights(part, ranks, ranked),
        Speculation.of(resolved.speculation),
        _receiver(part, ranks),
        host_tier(part, core_config, ranked),
        block_moves(part, core_config),
        part.growth,
    )
    phases.start("rehearsal")
    _rehearse(core)
    phases.end("rehearsal")
    if part.growth is not None:
        part.growth.start()
    gc.collect()
    images = core.config.images
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
        image_token_ids=[] if images is None else list(images.token_ids),
        image_tokens=0 if images is None else images.largest,
        dtype=str(resolved.dtype).removeprefix("torch."),
    )


def _weights(
    part: RankPart, ranks: Ranks | None, ranked: RankedRunner | None
) -> WeightLoader | None:
    """Return the loader for weight updates; None for a pooling model, whose head it cannot
    replace."""
    if part.pooling is not None:
        return None
    if ranks is None or ranked is None:
        return part.refill
    return RankedRefill(part.refill, ranks, ranked.copies)


def _receiver(part: RankPart, ranks: Ranks | None) -> WeightTransfer | None:
    """Return the receiver of weights from a trainer; None if that is not supported.

    Pooling models do not support it, nor do models on several nodes, which do not share the folder.
    """
    resolved = part.resolved
    if part.pooling is not None or resolved.config.pipeline_nodes > 1:
        return None
    # Received tensors stay on the device only if no sleep frees its memory.
    hold = part.refill.hold if ranks is None and part.memory is None else None
    num_bytes = max(checkpoint_bytes(resolved.folder), part.runner.model.num_bytes)
    return WeightTransfer(
        resolved.device,
        num_bytes,
        hold=hold,
        free_bytes=lambda: _free_bytes(resolved.device),
        checkpoint=part.refill,
    )


def _free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return available_host_memory() // 2  # half of it, as transferred files take host memory too


def _memory(part: RankPart, ranks: Ranks | None) -> Sleeper | None:
    """Return the object that frees memory for a sleep; None if the engine cannot sleep."""
    if part.memory is None:
        return None
    if part.growth is not None:
        return GrowingMemory(part.memory, part.growth)
    return part.memory if ranks is None else RankedMemory(part.memory, ranks)


def build_rank(
    config: EngineConfig, rank: int, memory: int, meet: Callable[[], tuple[str, int]]
) -> tuple[ModelRunner, Refill, Place, AdapterLoader | None, SleepMemory | None]:
    """Build the part of the model on a rank other than the first.

    Returns the rank's runner, the Refill for weight updates, its place among the ranks, the loader
    of its adapter slots, and the memory that a sleep frees.

    memory, meet: see `engine.parallel.rendezvous.other`.
    """
    open_place = other(rank, config, memory, meet)
    part = build_part(config, rank, open_place, StartTimes(None), None, None)
    gc.collect()
    loader = None if part.adapters is None else part.adapters.loader
    return part.runner, part.refill, part.place, loader, part.memory


def build_alone(config: EngineConfig) -> tuple[Resolved, ModelRunner, Refill]:
    """Build a model on one rank, without a scheduler, for a caller that builds batches itself.

    Returns the resolved config, the runner, and the Refill for weight updates.

    Raises ConfigError.
    """
    part = build_part(config, 0, alone, StartTimes(None), None, None)
    return part.resolved, part.runner, part.refill


def _rehearse(core: EngineCore) -> None:
    """Serve a few short requests, so that the first real one finds all kernels compiled and loaded.

    The last request also gives the scheduler a first estimate of the time of a prompt token.
    """
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    if not core.config.generates:
        params = SamplingParams(temperature=0.0, max_tokens=0, pooled=True)
    longest = core.config.max_model_len - 4
    tier = core.scheduler.tier
    disk = None if tier is None else tier.disk
    if tier is not None:
        # otherwise prompts could be loaded from an earlier engine's files, without computing
        # anything
        tier.disk = None
    for number, length in enumerate((5, 100, 100)):
        ids = [0] * min(length, longest)
        core.add_request(EngineRequest(number, ids, len(ids), params, seed=0))
        while core.has_work():
            core.step()
        core.reset_prefix_cache()
    core.check_integrity()
    core.scheduler.counters.reset()
    if tier is not None:
        tier.reset_counts()
        tier.disk = disk
    if core.scheduler.drafts is not None:
        core.scheduler.drafts.speculation.forget_steps()


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
