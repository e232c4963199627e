"""build_runner: builds a rank's ModelRunner, and the memory of rows, KV blocks and host tier."""

import gc
import logging
from collections.abc import Callable, Sequence

import torch

from engine.config.engine_config import EngineConfig
from engine.errors import ConfigError
from engine.lora.build import DeviceAdapters
from engine.models.drafters.drafter import ModelDrafter
from engine.models.registry import Model
from engine.parallel.rendezvous import Place
from engine.pooling import Pooling
from engine.resolve import Resolved
from engine.runner.caches.block_pages import BlockPages
from engine.runner.caches.cache_memory import CacheMemory
from engine.runner.caches.host_copies import host_copies
from engine.runner.caches.kv_cache import KVCache
from engine.runner.caches.sleep_memory import SleepMemory
from engine.runner.drafts.drafting import Drafting
from engine.runner.drafts.passes import DraftPasses
from engine.runner.forward import ModelForward, OwnInputs
from engine.runner.images import StepImages
from engine.runner.inputs import make_inputs
from engine.runner.launch.graphs import default_sizes
from engine.runner.memory import (
    GIB,
    KV_TOO_LARGE,
    ROWS_TOO_LARGE,
    STEP_TOO_LARGE,
    MemoryPlan,
    available_host_memory,
    fits_on,
    host_kv_bytes,
    parts_here,
    plan_memory,
)
from engine.runner.model_runner import ModelRunner
from engine.runner.request_rows import RequestRows
from engine.runner.warm_up import launch_everything, warm_up, warm_up_tower
from engine.sampling.sampler import Sampler
from engine.sampling.step_sampler import StepSampler
from engine.scheduling.memory.kv_growth import KVGrowth
from engine.scheduling.memory.kv_shares import KVShare, shares_folder
from engine.text.token_ids import missing_ids
from kernels.dispatch import Kernels
from kernels.launch.compiling import Compilers

logger = logging.getLogger("manta.engine")


# row of the memory plan for memory that is not the engine's
_OTHERS = "CUDA context and other processes"
_SHARE_SECONDS = 10.0  # maximum seconds to wait for other engines' KV memory at the start
_ANY = 1 << 62  # number of blocks of a rank that does not limit the minimum over ranks


def graph_sizes(resolved: Resolved) -> Sequence[int]:
    return resolved.config.graph_sizes or default_sizes(resolved.max_num_seqs)


def build_runner(
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
            # a draft model's inputs are uploaded after the event for which a result waits
            own_layout = rows, kv.block_size, most + max_num_seqs, device, steps + 1
            passes = DraftPasses(drafter, kernels, rows, drafts_kv, sampler, group, vocab_size)
            own_inputs = None if drafter.reads_states else make_inputs(*own_layout)
            drafting = Drafting(passes, own_inputs, most)
        return ModelRunner(forward, sampling, prompts, drafting)

    plan: MemoryPlan | None = None
    host_kv = _host_kv(config)
    if device.type == "cuda":
        if compilers is not None:
            _hand_over(compilers, resolved, model, lambda: runner_with(4, model.one_layer()))
        activations = _measure_step(resolved, runner_with)
        # subtracted, as the plan counts recurrent states separately
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
    # A pipeline stage without recurrent layers does not limit the number of snapshots.
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
            # again, as whole pages of the first cache hold more blocks than were requested
            pages.grow(plan.num_blocks)
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
    """Open this engine's share of the device's KV memory, and claim memory for its first blocks.

    Raises ConfigError if other engines on the device leave too little.
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
            # not reserved on the CPU, where other processes change the free memory anyway
            return 0
        reserved = torch.cuda.memory_reserved(device) + (0 if memory is None else memory.num_bytes)
        return max(0, beside - reserved)

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
    """Allocate host memory in a runner for num_blocks KV blocks and num_states snapshots.

    Raises ConfigError.
    """
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
    compilers: Compilers, resolved: Resolved, model: Model, make_runner: Callable[[], ModelRunner]
) -> None:
    """Pass every kernel that the rest of the start will launch to the compilers.

    Meanwhile the GEMMs of CUDA graphs are tuned, which needs none of these kernels. A failure is
    only logged, as a broken kernel fails again at its launch.

    make_runner: returns the runner of a model of one layer.
    """
    try:
        runner = make_runner()
        with compilers.collecting():
            sizes = graph_sizes(resolved) if resolved.captures else ()
            most = resolved.max_num_batched_tokens
            drafts = resolved.speculation is not None
            graphs = launch_everything(runner, sizes, most, drafts=drafts)
        if graphs is not None:
            model.tune(*graphs.matmul_sizes())
    except Exception as error:
        logger.warning("not all kernels are compiled ahead: %s: %s", type(error).__name__, error)


def _measure_step(resolved: Resolved, runner_with: Callable[[int], ModelRunner]) -> int:
    """Run the largest step with a few KV blocks; return the bytes of its activations.

    runner_with: returns a runner with the given number of KV blocks.
    """
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
