"""Builds the host tier, the disk tier and the moves of KV blocks between replicas."""

import logging
from hashlib import blake2b
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import numpy as np
import torch

from engine.errors import ConfigError
from engine.factory.rank_part import RankPart
from engine.runner.caches.block_file import SlotMemory, read_key
from engine.runner.caches.cuda_copies import CudaCopies
from engine.runner.caches.host_copies import host_copies
from engine.runner.caches.host_slots import HostSlots
from engine.runner.memory import available_host_memory, device_staging_bytes
from engine.runner.ranked_runner import RankedRunner
from engine.scheduling.core import CoreConfig
from engine.scheduling.memory.host_plan import HostCopies, HostPlan
from engine.scheduling.memory.host_tier import HostTier
from engine.scheduling.moves.block_moves import BlockMoves
from engine.scheduling.moves.records import MovePlan
from engine.scheduling.moves.shared import OwnSlots, Sharing
from kernels.exported_memory import ExportedMemory, OpenedMemory

if TYPE_CHECKING:
    from engine.runner.caches.disk_files import DiskFiles

logger = logging.getLogger("manta.engine")

# minimum number of tokens to load on a GPU, which computes fewer about as fast as it loads them
_LEAST_LOADED = 256
# Bytes of host memory for blocks that are sent to other replicas, and again for received blocks.
_STAGED_CUDA, _STAGED_CPU = 128 << 20, 32 << 20
_LEAST_STAGED = 4  # minimum number of staged blocks in each direction


def host_tier(part: RankPart, config: CoreConfig, ranked: RankedRunner | None) -> HostTier | None:
    """Build the host tier, which keeps KV blocks in host memory; None if it is not configured.

    ranked: the runner of all ranks, whose copies are used; None = there is one rank.
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


# Settings that do not change a block's bytes, so that files stay valid when these settings change.
_OF_NO_BLOCK = {
    "host_kv_bytes", "host_kv_store", "disk_kv_bytes", "disk_kv_folder", "disk_kv_clear",
    "disk_kv_key_file", "snapshot_bytes", "kv_cache_bytes", "num_blocks", "memory_fraction",
    "kv_memory", "kv_shared_bytes",
    "max_num_seqs", "allocation", "admission", "batching", "target_tpot_ms", "log_level", "seed",
    "generation_config", "logprobs_mode", "max_loras", "lora_host_bytes", "lora_disk_bytes",
    "lora_disk_folder", "sleep_in_host_memory", "image_cache_tokens",
}  # fmt: skip


def _disk_files(part: RankPart, config: CoreConfig) -> "DiskFiles":
    """Build the files of the disk tier. Raises ConfigError."""
    from engine.runner.caches.disk_files import DiskFiles

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


def block_moves(part: RankPart, config: CoreConfig) -> BlockMoves | None:
    """Build the moves of KV blocks between replicas, with their staging memory.

    None if they are not configured. Raises ConfigError.
    """
    resolved, runner = part.resolved, part.runner
    if not resolved.config.kv_moves:
        return None
    device = resolved.device
    caches = [runner.kv] if runner.drafting is None else [runner.kv, runner.drafting.kv]
    block_bytes = sum(cache.storage.nbytes // cache.num_blocks for cache in caches)
    size = _STAGED_CUDA if device.type == "cuda" else _STAGED_CPU
    slots = max(_LEAST_STAGED, min(config.num_blocks, size // block_bytes))
    staged = _device_staging(device, block_bytes, config.num_blocks)
    own = _shared_slots(2 * slots, block_bytes, staged)
    memory = None if own is None else torch.from_numpy(np.frombuffer(own.memory, np.uint8))
    try:
        copies = host_copies(caches, 2 * slots, 0, device, after_steps=True, memory=memory)
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
    if resolved.config.deterministic:  # only devices of the same kind compute the same bits
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
        meaning.append(name)
    digest = blake2b("\0".join(meaning).encode(), digest_size=16).digest()
    num_bytes = copies.blocks.num_bytes
    token_bytes = num_bytes * len(config.kinds) / config.block_size
    device_slots = 0 if own is None else own.device_count
    plan = MovePlan(slots, num_bytes, digest, token_bytes, device_slots)
    blocks = copies.blocks
    if staged is not None and own is not None:
        blocks.add_device(staged.memory)
        if isinstance(copies, CudaCopies):
            copies.warm_device(2 * slots)

    def attach_device(handle: bytes, count: int) -> int:
        return blocks.attach_device(OpenedMemory(handle, device), count)

    sharing = None if own is None else Sharing(own, blocks.attach, attach_device, blocks.detach)
    # With a host tier no step may read a block whose load has not ended: the tier could store KV of
    # a step whose result is dropped later.
    early = runner.host is None
    if early:
        runner.moved = copies
    memory_of_slots = [memoryview(slot.numpy()) for slot in blocks.slots]
    return BlockMoves(plan, copies, memory_of_slots, sharing, early=early)


class _DeviceStaging(NamedTuple):
    """Device memory that stages `num_slots` blocks for other GPUs on the machine."""

    memory: ExportedMemory
    num_slots: int


def _device_staging(
    device: torch.device, block_bytes: int, num_blocks: int
) -> _DeviceStaging | None:
    """Allocate the device memory from which other GPUs read blocks; None if they cannot."""
    if device.type != "cuda":
        return None
    total = torch.cuda.get_device_properties(device).total_memory
    count = max(_LEAST_STAGED, min(num_blocks, device_staging_bytes(total) // block_bytes))
    try:
        return _DeviceStaging(ExportedMemory(count * block_bytes, device), count)
    except RuntimeError as error:
        logger.warning("KV blocks go to other GPUs by host memory: %s", error)
        return None


def _shared_slots(count: int, slot_bytes: int, staged: _DeviceStaging | None) -> OwnSlots | None:
    """Create the slots that other processes on the machine may map; None if the system cannot.

    count: number of slots in host memory.
    """
    try:
        if staged is None:
            return OwnSlots(count, slot_bytes)
        return OwnSlots(count, slot_bytes, staged.num_slots, staged.memory.handle)
    except OSError as error:
        logger.warning("KV blocks go to other replicas over TCP alone: no shared memory: %s", error)
        if staged is not None:  # without shared slots no other process could find the device memory
            staged.memory.close()
        return None
