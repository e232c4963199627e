"""Memory: how many KV blocks fit, decided once at start and explained in one table."""

import os
from dataclasses import dataclass, field

from engine.errors import ConfigError

GIB = 1 << 30
CPU_KV_BYTES = 2 * GIB


@dataclass(slots=True)
class MemoryPlan:
    """Bytes by purpose: those in rows, then the KV cache; the rest of total stays free."""

    device: str
    total: int
    rows: list[tuple[str, int]] = field(default_factory=list)
    num_blocks: int = 0
    block_bytes: int = 0
    block_size: int = 0

    def table(self) -> str:
        """One line a purpose, aligned, in GiB."""
        rows = [
            *self.rows,
            (
                f"KV cache ({self.num_blocks} blocks of {self.block_size})",
                self.num_blocks * self.block_bytes,
            ),
        ]
        used = sum(size for _, size in rows)
        rows.append(("free", max(0, self.total - used)))
        rows.append((f"total on {self.device}", self.total))
        width = max(len(name) for name, _ in rows)
        return "\n".join(f"{name:<{width}}  {size / GIB:8.2f} GiB" for name, size in rows)


def available_host_memory() -> int:
    """Bytes of host memory that can be had without swapping; a container's limit counts."""
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
        pass  # not Linux, or no cgroup v2: the page count above stands
    return max(0, available)


def count_blocks(
    budget: int, block_bytes: int, block_size: int, max_model_len: int, *, given: str
) -> int:
    """Blocks that fit into budget bytes.

    given: where the budget comes from, for the message.
    Raises ConfigError when not even one full-length request fits.
    """
    num_blocks = budget // block_bytes
    needed = -(-max_model_len // block_size)
    if num_blocks < needed:
        raise ConfigError(
            f"KV cache too small: one request of max_model_len {max_model_len} needs "
            f"{needed * block_bytes / GIB:.2f} GiB ({needed} blocks of {block_size} tokens) and "
            f"{max(0, budget) / GIB:.2f} GiB are left ({given}). Ways out: lower max_model_len, "
            "give more memory (memory_fraction, kv_cache_bytes), or lower max_num_batched_tokens "
            "and max_num_seqs",
            param="kv_cache_bytes",
        )
    return num_blocks
