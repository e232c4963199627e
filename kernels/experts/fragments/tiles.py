"""The tiles of kernels for experts in fragments, and their choice by the number of (token, expert)
pairs."""

from typing import Any, NamedTuple

from torch import Tensor

from kernels.launch.pdl import pdl


class FragmentTile(NamedTuple):
    pairs: int  # pairs of one expert per program, a multiple of 8; 8 also for a single pair
    tiles: int  # tiles of 16 outputs per warp; for gate_up, as many of the gate and of the up
    rows: int  # number of groups of warps with different outputs
    shares: int  # warps per group, among which the inputs are divided
    ahead: int  # tiles of inputs that are loaded ahead
    # maximum registers of a thread, so that more programs fit; 0: the compiler's choice
    registers: int = 0


class FragmentTiles(NamedTuple):
    up: FragmentTile
    down: FragmentTile


# Maximum number of tokens whose pairs are multiplied one by one, and the tiles for this case. In
# the down matmul each warp of a program computes one of a token's experts.
MOST = 1
FEW = FragmentTiles(FragmentTile(8, 1, 2, 4, 3), FragmentTile(8, 1, 8, 2, 6))
# (maximum mean number of pairs per expert, tiles); the first row that fits is used.
TILES: tuple[tuple[float, FragmentTiles], ...] = (
    (0.25, FragmentTiles(FragmentTile(8, 1, 2, 2, 4), FragmentTile(8, 1, 4, 1, 4))),
    (1, FragmentTiles(FragmentTile(8, 1, 4, 1, 4), FragmentTile(8, 1, 4, 1, 4))),
    (2, FragmentTiles(FragmentTile(8, 1, 4, 1, 4), FragmentTile(8, 2, 4, 1, 3))),
    (4, FragmentTiles(FragmentTile(8, 1, 4, 1, 2), FragmentTile(8, 2, 4, 1, 3))),
    (8, FragmentTiles(FragmentTile(16, 1, 8, 1, 1), FragmentTile(16, 2, 8, 1, 1))),
    (16, FragmentTiles(FragmentTile(24, 2, 4, 1, 1), FragmentTile(16, 2, 8, 1, 1))),
    (32, FragmentTiles(FragmentTile(40, 1, 8, 1, 1, 128), FragmentTile(48, 2, 4, 1, 1))),
    (float("inf"), FragmentTiles(FragmentTile(64, 1, 4, 1, 1), FragmentTile(64, 2, 4, 1, 1))),
)
# Tiles of the deterministic mode, the same for any number of rows.
FIXED = FragmentTiles(FragmentTile(16, 1, 4, 1, 2), FragmentTile(16, 2, 4, 1, 2))


def tiles_for(pairs: int, experts: int) -> FragmentTiles:
    return next(tiles for most, tiles in TILES if pairs / experts <= most)


def launch_options(tile: FragmentTile, x: Tensor) -> dict[str, Any]:
    return {
        "TILE": tile,
        "num_warps": tile.rows * tile.shares,
        **({"maxnreg": tile.registers} if tile.registers else {}),
        **pdl(x.device),
    }
