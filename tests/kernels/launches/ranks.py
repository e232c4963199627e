"""Launches of all-reduces over peers' memory, and of copies of KV blocks from peers' memory."""

import numpy as np

from kernels.all_reduce import PeerMemory
from kernels.device_copies import copy_device_rows
from tests.kernels.launches.sizes import EPS, MODELS, bf16, int32, int64


def peers(model: str) -> None:
    """Launch all-reduces of two and of eight ranks, at decode and prefill sizes."""
    hidden = MODELS[model].hidden
    for size in (2, 8):
        rank = PeerMemory(1, size, int64(size), int32(1))
        for rows in (1, 64):
            x = bf16(rows, hidden)
            rank.one_shot(x)
            rank.one_shot(x, bf16(rows, hidden))
            rank.two_shot(x)
            rank.two_shot(x, bf16(rows, hidden))
            rank.norm_one_shot(x, bf16(rows, hidden), bf16(hidden), EPS)
            rank.gather(x, size)
        many = bf16(256, hidden)  # a program takes several rows at once
        rank.norm_one_shot(many, bf16(256, hidden), bf16(hidden), EPS)
        rank.gather(int64(rows), 1)


def moved_blocks(_: str) -> None:
    """Launch copies of KV blocks in units of 16 bytes and of 4 bytes."""
    for width in (1 << 15, 36):
        addresses = np.array([[256, 512], [1024, 2048]], np.int64) * width
        copy_device_rows(addresses, width, 8 * width, width, 64, None)
