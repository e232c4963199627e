"""host_copies: builds the copies of KV blocks between an engine's device and its host slots.

Each of several ranks has slots for its part of each block, with the same slot numbers
(`engine.runner.ranked_runner.RankedCopies`).
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.runner.caches.cpu_copies import CpuCopies
from engine.runner.caches.cuda_copies import CudaCopies
from engine.runner.caches.host_slots import HostSlots
from engine.runner.caches.kv_cache import KVCache

Copies = CpuCopies | CudaCopies


def host_copies(
    caches: Sequence[KVCache],
    num_blocks: int,
    num_states: int,
    device: torch.device,
    *,
    after_steps: bool,
    memory: Tensor | None = None,
) -> Copies:
    """Allocate host slots for caches, and return the object that copies to and from them.

    caches: the model's cache, which may have recurrent states, and others with the same block ids.
    after_steps: see `CudaCopies`.
    memory: host memory to use for the slots of blocks; None = new memory.
    Raises RuntimeError if the memory cannot be pinned.
    """
    blocks = HostSlots.of_blocks(caches, num_blocks, device, memory)
    own = caches[0].states
    states = None if own is None else HostSlots.of_states(own, num_states, device)
    if device.type == "cuda":
        return CudaCopies(blocks, states, num_states, device, after_steps=after_steps)
    return CpuCopies(blocks, states, num_states)
