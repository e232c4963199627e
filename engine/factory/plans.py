"""Settings of a scheduler that depend on the model: images, snapshots, grammars, model key."""

import logging
from collections.abc import Callable
from hashlib import blake2b

import torch

from engine.config.engine_config import EngineConfig
from engine.config.kv_groups import kv_groups
from engine.config.towers import lacks_settings
from engine.errors import InvalidRequest
from engine.images.settings import PREPROCESSOR
from engine.resolve import Resolved
from engine.runner.caches.token_pool import TokenPool
from engine.runner.memory import MemoryPlan
from engine.scheduling.memory.block_manager import FreeBlocks, FreeList, LowestFirst
from engine.scheduling.memory.image_plan import ImagePlan
from engine.scheduling.memory.regions import Regions
from engine.scheduling.memory.snapshots import SnapshotPlan
from engine.shards import weight_files
from engine.structured.compiler import Vocabulary
from engine.structured.preparing import Grammars
from engine.text.declared_tokens import declared_special

logger = logging.getLogger("manta.engine")


_END_BYTES = 1 << 16  # number of bytes at both ends of a weight file that identify its contents


def no_routes(resolved: Resolved) -> str:
    """Return why requests that ask for the chosen experts are refused; "" = they are accepted."""
    if resolved.model.experts is None:
        return "this model has no experts"
    if resolved.stages > 1 or resolved.kv_ranks > 1:
        return "not supported with pipeline_parallel or data-parallel attention"
    return ""


def image_plan(resolved: Resolved) -> ImagePlan | None:
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


def snapshot_plan(resolved: Resolved, plan: MemoryPlan) -> SnapshotPlan | None:
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


def free_blocks(config: EngineConfig, device: torch.device) -> Callable[[int], FreeBlocks]:
    """Return the constructor (number of blocks -> FreeBlocks) that `allocation` names."""
    if config.kv_memory == "growing":
        return LowestFirst
    if config.allocation == "contiguous":
        return Regions
    return FreeList if config.allocation == "list" else lambda count: TokenPool(count, device)


def model_key(resolved: Resolved) -> str:
    """Return a key that identifies the model's weights, and is the same on all machines.

    Only the ends of weight files are read, in which differently trained weights also differ.
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


def read_grammars(resolved: Resolved) -> Grammars:
    """Read the vocabulary for structured output at the start, as a later read would block the step
    loop."""
    model = resolved.model
    try:
        ends = model.eos_token_ids
        declared = declared_special(resolved.folder)
        return Grammars(Vocabulary.load(resolved.folder, model.vocab_size, ends, declared))
    except InvalidRequest as refusal:
        return Grammars(refusal)
