"""Tiles of experts in fragments: what a program takes at once, and which ones are for how many
pairs."""

from typing import Any, NamedTuple

from torch import Tensor

from kernels.launch.pdl import pdl


class Tile(NamedTuple):
    pairs: int  # a multiple of 8, of one expert; 8 stand for a lone one
    tiles: int  # of 16 outputs of a warp; of gate_up so many of the gate's and as many of the up's
    rows: int  # warps below each other
    shares: int  # of the inputs: warps that add up what they have
    ahead: int  # tiles of inputs that are on their way
    registers: int = 0  # of a thread at most, so that more programs fit; 0: as the compiler likes


class Tiles(NamedTuple):
    up: Tile
    down: Tile


# Tokens up to which pairs are multiplied one by one, and tiles for that. The warps of a program
# below each other are a token's experts in the second product.
MOST = 1
FEW = Tiles(Tile(8, 1, 2, 4, 3), Tile(8, 1, 8, 2, 6))
# The pairs that an expert has on average -> tiles, the first that fits.
TILES: tuple[tuple[float, Tiles], ...] = (
    (0.25, Tiles(Tile(8, 1, 2, 2, 4), Tile(8, 1, 4, 1, 4))),
    (1, Tiles(Tile(8, 1, 4, 1, 4), Tile(8, 1, 4, 1, 4))),
    (2, Tiles(Tile(8, 1, 4, 1, 4), Tile(8, 2, 4, 1, 3))),
    (4, Tiles(Tile(8, 1, 4, 1, 2), Tile(8, 2, 4, 1, 3))),
    (8, Tiles(Tile(16, 1, 8, 1, 1), Tile(16, 2, 8, 1, 1))),
    (16, Tiles(Tile(24, 2, 4, 1, 1), Tile(16, 2, 8, 1, 1))),
    (32, Tiles(Tile(40, 1, 8, 1, 1, 128), Tile(48, 2, 4, 1, 1))),
    (float("inf"), Tiles(Tile(64, 1, 4, 1, 1), Tile(64, 2, 4, 1, 1))),
)
# Where a row's numbers may not depend on how many rows there are.
FIXED = Tiles(Tile(16, 1, 4, 1, 2), Tile(16, 2, 4, 1, 2))


def tiles_for(pairs: int, experts: int) -> Tiles:
    return next(tiles for most, tiles in TILES if pairs / experts <= most)


def launch_options(tile: Tile, x: Tensor) -> dict[str, Any]:
    return {
        "TILE": tile,
        "num_warps": tile.rows * tile.shares,
        **({"maxnreg": tile.registers} if tile.registers else {}),
        **pdl(x.device),
    }
