"""MemoryPlan: the use of the device's memory and the number of KV blocks, decided at start.

`plan_memory` adds up the parts. The engine calls it at start with measured numbers, `manta plan`
with estimates and a model on the meta device (`outline`).
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

import torch

from engine.architectures.recurrent.mixer import CHUNK
from engine.config.engine_config import EngineConfig
from engine.config.kv_groups import Full, KVGroups, kv_groups, positions
from engine.errors import ConfigError
from engine.lora.build import adapter_bytes
from engine.models.drafters.drafter import ModelDrafter
from engine.models.registry import Model, build_model
from engine.parallel.group import TensorParallelGroup
from engine.parallel.stages import Stage
from engine.resolve import Resolved
from engine.runner.drafts.graphs import graph_bytes
from engine.runner.request_rows import RequestRows
from engine.speculation.settings import read_speculation
from kernels.dispatch import kernels_for

GIB = 1 << 30
CPU_KV_BYTES = 2 * GIB
LORA_HOST_BYTES = 4 * GIB
# Memory pools and objects of CUDA graphs: measured 0.4 to 0.8 GiB, twice that with adapters.
GRAPH_BYTES = 1 * GIB

# Advice for users at the end of error messages.
WEIGHTS_TOO_LARGE = (
    "Ways out: a smaller or quantised model (dtype, quantization), a device with more "
    "memory or several (tensor_parallel), or free what other processes hold of it"
)
ADAPTERS_TOO_LARGE = (
    "Ways out: lower max_loras, lower max_lora_rank or max_virtual_tokens, or a device with more "
    "memory"
)
ROWS_TOO_LARGE = "Ways out: lower max_num_seqs, lower max_model_len, or a device with more memory"
KV_TOO_LARGE = (
    "Ways out: lower memory_fraction (or kv_cache_bytes, or num_blocks), lower "
    "max_num_batched_tokens, or free what other processes hold of the device"
)
STEP_TOO_LARGE = (
    "Ways out: lower max_num_batched_tokens, lower max_num_seqs, or a device with more memory"
)
GRAPHS_TOO_LARGE = (
    "Ways out: lower memory_fraction or kv_cache_bytes, give fewer graph_sizes, or set cuda_graphs "
    "to false"
)


def kv_ways_out(cuda: bool, has_states: bool) -> str:
    """Return the suggestion for errors about too little memory for the KV cache."""
    more = "memory_fraction, kv_cache_bytes" if cuda else "kv_cache_bytes"
    fewer = "max_num_batched_tokens and max_num_seqs"
    if has_states:
        fewer = "max_num_seqs (each has a state) and max_num_batched_tokens"
    return f"Ways out: lower max_model_len, give more memory ({more}), or lower {fewer}"


def outline(resolved: Resolved, stage: int = 0, *, whole: bool = False) -> Model:
    """Build the model of `resolved` on the meta device, without allocating memory.

    With several ranks the result is the part of the last rank, which has the most heads.

    stage: the pipeline stage.
    whole: whether to build the model of all ranks and stages.
    """
    config = resolved.config
    ranks, stages = (1, 1) if whole else (resolved.ranks, resolved.stages)
    return build_model(
        resolved.model,
        resolved.dtype,
        "meta",
        kernels_for("cpu", config.deterministic),  # the kernels are never called
        quantization=config.quantization,
        quantization_layers=config.quantization_layers,
        # the last rank has the most heads
        group=TensorParallelGroup(ranks - 1, ranks),
        stage=Stage(stage, stages),
        spread_experts=resolved.spread_experts and not whole,
        data_parallel_attention=resolved.config.attention_data_parallel and not whole,
        virtual_tokens=config.max_loras * config.max_virtual_tokens,
        runs_on=resolved.device.type,
    )


def outline_drafter(resolved: Resolved) -> ModelDrafter | None:
    """Build the drafter of `resolved` without allocating memory; None without a drafter model."""
    settings = read_speculation(resolved.config.speculation)
    if settings is None or not settings.by_model:
        return None
    from engine.models.drafters.build import build_drafter

    return build_drafter(settings, outline(resolved), resolved.config.quantization)


def parts_here(resolved: Resolved, model: Model) -> list[Model]:
    """Return the model parts of all ranks that share this rank's memory.

    model: this rank's part, the first of the list.
    """
    if resolved.device.type == "cuda":
        return [model]
    first = model.stage.number
    here = range(first + 1, first + resolved.config.stages_per_node)
    others = [outline(resolved, stage) for stage in here]
    return [part for part in (model, *others) for _ in range(resolved.ranks)]


def lora_host_bytes(config: EngineConfig, available: int) -> int:
    """Return the bytes of host memory for adapters.

    available: free bytes of host memory.
    """
    if not config.max_loras:
        return 0
    return config.lora_host_bytes or min(LORA_HOST_BYTES, available // 4)


def host_kv_bytes(config: EngineConfig, available: int) -> int:
    """Return the bytes of host memory for KV blocks.

    available: free bytes of host memory.
    """
    host_bytes = config.host_kv_bytes
    return int(host_bytes * available) if host_bytes < 1 else int(host_bytes)


def chunk_bytes(resolved: Resolved) -> int:
    """Return the maximum bytes of a recurrent layer's buffers in a step with prompts on CUDA.

    The kernels divide each request's tokens into chunks of CHUNK tokens, and a partial chunk takes
    as much memory as a whole one. `model.step_bytes` does not include these buffers.
    """
    if resolved.device.type != "cuda" or resolved.config.deterministic:
        return 0
    tokens, most = resolved.max_num_batched_tokens, 0
    slots = tokens // CHUNK + min(tokens, resolved.max_num_seqs) + 1
    for layer in resolved.model.attention:
        if layer.mixer is not None:
            some, floats = layer.mixer.of_rank(resolved.ranks).chunk_elements
            most = max(most, some * resolved.dtype.itemsize + 4 * floats)
    return slots * most


def image_cache_shape(resolved: Resolved, model: Model) -> tuple[int, int]:
    """Return the shape (tokens, width) of the image embedding cache; (0, 0) without a vision
    encoder.

    model: this rank's part.
    """
    vision = resolved.model.vision
    if vision is None or not model.stage.first:
        return 0, 0
    return resolved.image_cache_tokens, model.config.hidden_size * (1 + vision.deepstack)


def device_staging_bytes(total: int) -> int:
    """Return the bytes of GPU memory that `kv_moves` reserves for blocks to send to other GPUs.

    total: bytes of the GPU's memory.
    """
    return total // 128


def plan_memory(
    resolved: Resolved,
    model: Model,
    device: str,
    total: int,
    others: tuple[str, int],
    *,
    host_bytes: int,
    host_kv: int = 0,
    activations: int | None = None,
) -> "MemoryPlan":
    """Plan the memory of all parts; KV blocks get the rest, unless their number is configured.

    On the CPU the plan covers all ranks, which share the memory.

    model: the first rank's part.
    device, total: name and bytes of the device's memory, or of the host's free memory.
    others: description and bytes of other uses of the memory.
    host_bytes: see lora_host_bytes.
    host_kv: see host_kv_bytes.
    activations: measured bytes; None = estimate them.
    Raises ConfigError with numbers and advice if something does not fit.
    """
    config, cuda = resolved.config, resolved.device.type == "cuda"
    seqs, longest = resolved.max_num_seqs, resolved.max_model_len
    if activations is None:
        activations = model.step_bytes(resolved.max_num_batched_tokens, seqs)
        activations += chunk_bytes(resolved)
        if model.tower is not None:
            tokens, cached = resolved.max_num_batched_tokens, resolved.image_cache_tokens
            most = model.tower.config.step_size(tokens, cached)
            encode = model.tower.step_bytes(most)
            # if images are not encoded in parallel, the vision encoder runs before the layers
            beside = resolved.encodes_ahead
            activations = activations + encode if beside else max(activations, encode)
    ranks, here, block_size = resolved.ranks, resolved.ranks_here, config.block_size
    groups, parts = model.kv, parts_here(resolved, model)
    rows = RequestRows.allocate(
        seqs,
        longest,
        block_size,
        torch.device("meta"),
        len(groups.groups),
        axes=resolved.model.places_of_axes,
    )
    drafter = outline_drafter(resolved)
    used = [("request rows", rows.num_bytes)]
    adapters = adapter_bytes(resolved, model)
    used += adapters
    if resolved.image_cache_tokens:
        count, width = image_cache_shape(resolved, model)
        used.append((f"images ({count} embeddings)", count * width * model.dtype.itemsize))
    used.append(("activations (largest step)", activations))
    if resolved.captures:
        used.append(("graphs (reserved)", GRAPH_BYTES * (2 if config.max_loras else 1)))
        if drafter is not None:
            itemsize = resolved.dtype.itemsize
            bytes_of_drafts = graph_bytes(seqs, resolved.model.vocab_size, itemsize)
            used.append(("graphs of drafts (reserved)", bytes_of_drafts))
    if cuda and config.kv_moves:
        used.append(("KV blocks for other GPUs", device_staging_bytes(total)))
    used = [(name, here * size) for name, size in used]
    used.insert(0, ("weights", sum(part.num_bytes for part in parts)))
    if drafter is not None:
        used.insert(1, ("drafter", drafter.num_bytes))
    states = sum(part.kv.state_bytes for part in parts)
    if states:
        used.insert(2 + (drafter is not None), (f"states ({seqs} requests)", (seqs + 1) * states))
    if not cuda and host_bytes:
        used.append(("adapters in host memory", host_bytes))
    if not cuda and host_kv:
        used.append(("KV in host memory", host_kv))
    plan = MemoryPlan(device, total, [*used, others] if others[1] else used, cuda=cuda)
    plan.groups, plan.block_size, plan.state_bytes = groups, block_size, states
    plan.kv_ranks = resolved.kv_ranks
    together = [part.kv for part in parts]
    if len(parts) > 1 and ranks > 1:
        heads = resolved.head_ranks
        together = [kv_groups(resolved.model, heads, rank % heads) for rank in range(ranks)]
        if resolved.stages > 1:
            own = [part.layer_numbers for part in parts[::ranks]]
            together = [groups.of(layers) for layers in own for groups in together]
    plan.block_bytes = sum(part_kv.bytes_per_block(block_size, resolved.kv) for part_kv in together)
    if drafter is not None:
        plan.drafter_block_bytes = drafter.kv.bytes_per_block(block_size, resolved.kv)
        plan.block_bytes += plan.drafter_block_bytes
    # the GPU ranks of a node divide its memory; on the CPU a block includes all ranks' parts
    plan.host_kv = host_kv // config.ranks_per_node if cuda else host_kv
    without = states and not plan.host_states
    if (host_kv or config.host_kv_bytes >= 1) and (without or not plan.host_blocks):
        what = f"no snapshot of states beside blocks, which takes {states}"
        if not without:
            what = f"no block of {block_size} tokens, which takes {plan.block_bytes}"
        raise ConfigError(
            f"host_kv_bytes: {host_kv} bytes hold {what}; raise it, or leave it out",
            param="host_kv_bytes",
        )
    free = plan.total - sum(size for _, size in plan.rows)
    reason, ways_out = "", kv_ways_out(cuda, bool(states))
    least = groups.blocks(longest, block_size)
    if config.kv_memory == "growing":
        plan_growth(plan, config, longest, least, free, others[1])
        return plan
    if config.num_blocks:
        check_blocks(config.num_blocks, plan.block_bytes, free)
        plan.num_blocks = config.num_blocks
        kv_bytes = config.num_blocks * plan.block_bytes
        plan.keep_snapshots(config, kv_bytes // 3, free - kv_bytes)
        return plan
    if config.kv_cache_bytes:
        budget, reason = config.kv_cache_bytes, "kv_cache_bytes"
        if budget > free:
            raise ConfigError(
                f"kv_cache_bytes: {budget / GIB:.2f} GiB were asked for and "
                f"{max(0, free) / GIB:.2f} GiB of memory are free beside {plan.largest()}. "
                f"{ways_out}",
                param="kv_cache_bytes",
            )
    elif cuda:
        share, weights = int(total * config.memory_fraction), plan.rows[0][1]
        budget_text = f"memory_fraction {config.memory_fraction} of {total / GIB:.1f} GiB"
        if weights > share:
            raise ConfigError(
                f"the weights need {weights / GIB:.2f} GiB and {budget_text} is {share / GIB:.2f}. "
                f"Raise memory_fraction. {WEIGHTS_TOO_LARGE}",
                param="memory_fraction",
            )
        budget = min(free, free - total + share)
        reason = f"{budget_text} less {(total - free) / GIB:.1f} GiB in use: {plan.largest()}"
    else:
        budget = min(CPU_KV_BYTES, free // 4)
        reason = f"the smaller of 2 GiB and a quarter of what is free beside {plan.largest()}"
    if config.kv_cache_bytes:
        plan.keep_snapshots(config, budget // 3, free - budget)
    else:
        spare = budget - least * plan.block_bytes
        budget -= plan.keep_snapshots(config, budget // 4, spare)
    if adapters:
        size = sum(size for _, size in adapters) / GIB
        reason += f"; {size:.2f} GiB are adapters', by max_loras and max_lora_rank"
    reason += plan.drafter_share(least)
    plan.num_blocks = count_blocks(
        budget, plan.block_bytes, longest, least, given=reason, ways_out=ways_out
    )
    if resolved.model.whole_texts:  # encoders cache nothing; their blocks only count tokens
        most = resolved.max_num_seqs * groups.blocks(longest, block_size)
        plan.num_blocks = min(plan.num_blocks, most)
    return plan


def plan_growth(
    plan: "MemoryPlan", config: EngineConfig, longest: int, least: int, free: int, others: int
) -> None:
    """Set the plan's `num_blocks`, those at the start, and `most_blocks`, for growing KV memory.

    The room for snapshots is set too.

    longest, least: see `count_blocks`.
    free: bytes that the plan's other parts do not use.
    others: bytes of other uses of a GPU, including memory that other engines may release.
    Raises ConfigError.
    """
    most = config.kv_shared_bytes or min(CPU_KV_BYTES, free // 4)
    if plan.cuda and not config.kv_shared_bytes:
        most = int(plan.total * config.memory_fraction) - (plan.total - free) + others
    begin = config.num_blocks * plan.block_bytes or config.kv_cache_bytes
    begin = begin or least * plan.block_bytes
    ways_out = "Ways out: lower max_model_len, raise kv_cache_bytes, or leave it out"
    reason = f"kv_cache_bytes, what it begins with{plan.drafter_share(least)}"
    plan.num_blocks = count_blocks(
        begin, plan.block_bytes, longest, least, given=reason, ways_out=ways_out
    )
    plan.most_blocks = most // plan.block_bytes
    if plan.num_blocks > plan.most_blocks:
        raise ConfigError(
            f"kv_shared_bytes: {most / GIB:.2f} GiB are for the KV of all engines, and this one "
            f"begins with {begin / GIB:.2f} GiB. Ways out: raise kv_shared_bytes or "
            "memory_fraction, lower max_model_len or kv_cache_bytes",
            param="kv_shared_bytes",
        )
    check_blocks(plan.num_blocks, plan.block_bytes, free)
    plan.keep_snapshots(config, most // 8, free - begin)


@dataclass(slots=True)
class MemoryPlan:
    """A memory plan in bytes: `rows` by purpose, the KV cache, and the unused rest of `total`."""

    device: str
    total: int
    rows: list[tuple[str, int]] = field(default_factory=list)
    num_blocks: int = 0
    most_blocks: int = 0  # the maximum number of blocks of growing KV memory
    block_bytes: int = 0
    drafter_block_bytes: int = 0
    block_size: int = 0
    groups: KVGroups | None = None
    # bytes of a request's recurrent states, on all ranks that share the memory
    state_bytes: int = 0
    snapshots: int = 0
    kv_ranks: int = 1  # number of ranks that each have this many blocks, for different requests
    cuda: bool = False
    host_kv: int = 0  # bytes of the host tier

    @property
    def host_blocks(self) -> int:
        """The number of KV blocks in the host tier, besides snapshots."""
        # a pipeline stage may have no layer with KV
        return (self.host_kv - self.host_states * self.state_bytes) // max(1, self.block_bytes)

    @property
    def host_states(self) -> int:
        """The number of snapshots of recurrent states in the host tier."""
        return self.host_kv // 2 // self.state_bytes if self.state_bytes else 0

    def keep_snapshots(self, config: EngineConfig, share: int, spare: int) -> int:
        """Plan the snapshots of recurrent states, and return their bytes.

        There are none without recurrent layers, and none without prefix caching.

        share: bytes for snapshots unless configured.
        spare: the maximum number of bytes for snapshots.
        Raises ConfigError.
        """
        size = self.state_bytes
        if not size or not config.prefix_caching:
            return 0
        if config.snapshot_bytes > max(0, spare):
            raise ConfigError(
                f"snapshot_bytes: {config.snapshot_bytes / GIB:.2f} GiB were asked for and "
                f"{max(0, spare) / GIB:.2f} GiB are left for them beside the keys and values of "
                f"one request of full length. Ways out: lower snapshot_bytes, lower max_num_seqs "
                "(each has a state), or give more memory "
                f"({'memory_fraction' if self.cuda else 'kv_cache_bytes'})",
                param="snapshot_bytes",
            )
        self.snapshots = max(0, min(config.snapshot_bytes or share, spare)) // size
        if self.snapshots:
            num_bytes = self.snapshots * size
            self.rows.append((f"snapshots ({self.snapshots} of states)", num_bytes))
        return self.snapshots * size

    def largest(self) -> str:
        """Return the three largest parts of the plan, for messages."""
        parts = sorted(self.rows, key=lambda row: -row[1])[:3]
        return ", ".join(f"{name} {size / GIB:.2f}" for name, size in parts)

    def drafter_share(self, blocks: int) -> str:
        """Return a text about the drafter's bytes in some blocks, for messages; "" = no drafter."""
        size = blocks * self.drafter_block_bytes / GIB
        return f"; {size:.2f} GiB of the request's are the drafter's (speculation)" if size else ""

    @property
    def positions(self) -> int:
        """The number of tokens that the planned blocks hold for typical requests."""
        kinds = (Full(),) if self.groups is None else self.groups.kinds
        return self.kv_ranks * positions(kinds, self.num_blocks, self.block_size)

    @property
    def where(self) -> str:
        """The text for tables that says which ranks have this many blocks each; "" for one pool."""
        return f" on each of {self.kv_ranks} ranks" if self.kv_ranks > 1 else ""

    def table(self) -> str:
        """Return the plan as an aligned table in GiB, one line for each purpose."""
        rows = [
            *self.rows,
            (
                f"KV cache ({self.num_blocks} blocks of {self.block_size}{self.where})",
                self.num_blocks * self.block_bytes,
            ),
        ]
        used = sum(size for _, size in rows)
        rows.append(("free", max(0, self.total - used)))
        rows.append((f"total on {self.device}", self.total))
        if self.most_blocks:
            most = self.most_blocks * self.block_bytes
            rows.append((f"KV cache grows to ({self.most_blocks} blocks)", most))
        if self.host_kv and self.cuda:
            rows.append((f"host memory for KV ({self.host_blocks} blocks)", self.host_kv))
        width = max(len(name) for name, _ in rows)
        return "\n".join(f"{name:<{width}}  {size / GIB:8.2f} GiB" for name, size in rows)


def available_host_memory() -> int:
    """Return the bytes of host memory available without swapping, within a container's limit."""
    available = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        with open("/proc/meminfo") as file:
            for line in file:
                if line.startswith("MemAvailable:"):
                    available = int(line.split()[1]) * 1024
        with (
            open("/sys/fs/cgroup/memory.max") as limit,
            open("/sys/fs/cgroup/memory.current") as current,
        ):
            text = limit.read().strip()
            if text != "max":
                available = min(available, int(text) - int(current.read()))
    except OSError:
        pass  # without Linux or cgroup v2 the page count is used
    return max(0, available)


def count_blocks(
    budget: int, block_bytes: int, max_model_len: int, needed: int, *, given: str, ways_out: str
) -> int:
    """Return the number of blocks that fit into budget bytes.

    needed: number of blocks of a request of max_model_len tokens.
    given: origin of the budget, for the message.
    ways_out: a suggestion, for the message.
    Raises ConfigError if not even one full-length request fits.
    """
    num_blocks = budget // block_bytes
    if num_blocks < needed:
        raise ConfigError(
            f"KV cache too small: one request of max_model_len {max_model_len} needs "
            f"{needed * block_bytes / GIB:.2f} GiB ({needed} blocks) and "
            f"{max(0, budget) / GIB:.2f} GiB are left ({given}). {ways_out}",
            param="kv_cache_bytes",
        )
    return num_blocks


def check_blocks(num_blocks: int, block_bytes: int, free: int) -> None:
    """Raise ConfigError if the requested number of KV blocks does not fit."""
    if num_blocks * block_bytes > free:
        raise ConfigError(
            f"num_blocks: {num_blocks} blocks need {num_blocks * block_bytes / GIB:.2f} GiB and "
            f"{max(0, free) / GIB:.2f} GiB are free. Ways out: lower num_blocks, leave it out to "
            "take what fits, or a device with more memory",
            param="num_blocks",
        )


class Sized(Protocol):
    """The interface of a model or drafter for `check_weights`: bytes during and after loading."""

    @property
    def num_bytes(self) -> int: ...
    @property
    def loading_bytes(self) -> int: ...


def check_weights(parts: Sequence[Sized], free: int) -> None:
    """Raise ConfigError if the weights do not fit while they are loaded.

    Without this check the system would kill the process.

    parts: models that are loaded at the same time.
    """
    num_bytes = sum(max(model.loading_bytes, model.num_bytes) for model in parts)
    if num_bytes > free:
        raise ConfigError(
            f"the weights need {num_bytes / GIB:.2f} GiB and {free / GIB:.2f} GiB are free. "
            f"{WEIGHTS_TOO_LARGE}",
            param="model",
        )


@contextmanager
def fits_on(device: torch.device, what: str, ways_out: str, *, param: str) -> Iterator[None]:
    """Raise ConfigError with the GPU's used and free bytes if the `with` block runs out of memory.

    what: the plural noun that begins the message, such as "the weights".
    ways_out: a suggestion, for the message.
    param: the field of EngineConfig that the error names.
    """
    try:
        yield
        return
    except torch.OutOfMemoryError:
        held = torch.cuda.memory_allocated(device)
        free, total = torch.cuda.mem_get_info(device)
    raise ConfigError(
        f"{what} do not fit into the memory of {torch.cuda.get_device_name(device)}: of "
        f"{total / GIB:.2f} GiB this engine holds {held / GIB:.2f} GiB, {free / GIB:.2f} GiB are "
        f"free, and that is not enough. {ways_out}",
        param=param,
    )
