"""Matmuls of the deterministic mode: a row of x @ weight.T does not depend on the number of rows.

cuBLAS changes its algorithm, and with it the order of summation, with the number of rows. Here
every output is one chain of multiply-adds from the first column to the last, without split-K. The
tile only decides which outputs a program computes. Tensor cores compute the same chain for all
tiles, but no document guarantees this. So a tile is used for a weight's shape only if its results
on that weight equal those of the first tile bit by bit (`agreeing`).
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.launch.compiling import Compilers
from kernels.launch.pdl import num_sms


class FixedTile(NamedTuple):
    rows: int  # rows of x
    outs: int  # rows of the weight
    depth: int  # columns per iteration
    num_warps: int
    num_stages: int


# Bytes of an element -> tiles, ordered by size. The first can be used for any number of rows.
TILES = {
    2: (
        FixedTile(64, 32, 128, 4, 4),
        FixedTile(64, 128, 64, 4, 4),
        FixedTile(128, 128, 64, 8, 4),
        FixedTile(128, 256, 64, 8, 3),
    ),
    4: (FixedTile(64, 32, 32, 4, 3),),
}
_PROBE = 200  # rows of x with which tiles are compared; not a multiple of any tile's rows


@triton.jit(do_not_specialize=["num_rows"])
def _fixed_kernel(
    x,  # [num_rows, IN]
    weight,  # [OUT, IN]
    bias,
    residual,
    out,  # [num_rows, OUT]
    num_rows,
    OUT: tl.constexpr,
    IN: tl.constexpr,
    BIAS: tl.constexpr,
    ADD: tl.constexpr,
    ROWS: tl.constexpr,
    OUTS: tl.constexpr,
    DEPTH: tl.constexpr,
    GROUP: tl.constexpr,  # blocks of rows that read the weight at the same time, through L2
):
    row_blocks = tl.cdiv(num_rows, ROWS)
    group = tl.program_id(0) // (GROUP * tl.cdiv(OUT, OUTS))
    member = tl.program_id(0) % (GROUP * tl.cdiv(OUT, OUTS))
    size = tl.minimum(row_blocks - group * GROUP, GROUP)
    row = (group * GROUP + member % size) * ROWS + tl.arange(0, ROWS)
    column = member // size * OUTS + tl.arange(0, OUTS)
    depth = tl.arange(0, DEPTH)
    x_at = x + row.to(tl.int64)[:, None] * IN + depth[None, :]
    w_at = weight + column.to(tl.int64)[:, None] * IN + depth[None, :]
    acc = tl.zeros([ROWS, OUTS], tl.float32)
    for start in range(0, IN, DEPTH):
        inside = (start + depth < IN)[None, :]
        xs = tl.load(x_at + start, mask=(row < num_rows)[:, None] & inside, other=0.0)
        ws = tl.load(w_at + start, mask=(column < OUT)[:, None] & inside, other=0.0)
        acc = tl.dot(xs, tl.trans(ws), acc, input_precision="ieee")
    if BIAS:
        acc += tl.load(bias + column, mask=column < OUT, other=0.0).to(tl.float32)[None, :]
    at = row.to(tl.int64)[:, None] * OUT + column[None, :]
    mask = (row < num_rows)[:, None] & (column < OUT)[None, :]
    if ADD:
        acc += tl.load(residual + at, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + at, acc.to(out.dtype.element_ty), mask=mask)


def product(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, tile: FixedTile
) -> Tensor:
    """Return x @ weight.T + bias + residual with a given tile; arguments of `linear_fixed`."""
    num_rows = x.shape[0]
    outs, width = weight.shape
    out = x.new_empty((num_rows, outs)) if residual is None else residual
    if num_rows:
        grid = (triton.cdiv(num_rows, tile.rows) * triton.cdiv(outs, tile.outs),)
        _fixed_kernel[grid](
            x,
            weight,
            bias,
            residual,
            out,
            num_rows,
            OUT=outs,
            IN=width,
            BIAS=bias is not None,
            ADD=residual is not None,
            ROWS=tile.rows,
            OUTS=tile.outs,
            DEPTH=tile.depth,
            GROUP=8,
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
        )
    return out


_agreeing: dict[tuple[object, ...], tuple[FixedTile, ...]] = {}


def agreeing(
    weight: Tensor, bias: Tensor | None = None, *, add: bool = False
) -> tuple[FixedTile, ...]:
    """Return the tiles that give the same bits for this weight, always including the first.

    Tiles are compiled and tested once for each shape. They cannot be tested while a CUDA graph is
    captured or kernels are collected; then tiles that were not tested before are left out.

    bias: the vector that the kernel adds to the product.
    add: whether the kernel adds a residual to the product.
    """
    key = (*weight.shape, weight.dtype, weight.device, bias is not None, add)
    if key not in _agreeing:
        tiles = TILES[weight.element_size()]
        if weight.is_cuda and torch.cuda.is_current_stream_capturing():
            return tiles[:1]
        outs, width = weight.shape
        x = torch.randn((_PROBE, width), device=weight.device).to(weight.dtype)

        def made_by(tile: FixedTile) -> Tensor:
            residual = x.new_ones((_PROBE, outs)) if add else None
            return product(x, weight, bias, residual, tile)

        if Compilers.is_collecting:
            for tile in tiles:
                made_by(tile)
            return tiles[:1]
        wanted = made_by(tiles[0])
        same = (tile for tile in tiles[1:] if torch.equal(made_by(tile), wanted))
        _agreeing[key] = (tiles[0], *same)
    return _agreeing[key]


def linear_fixed(
    x: Tensor,  # [rows, in], contiguous
    weight: Tensor,  # [out, in]
    bias: Tensor | None = None,
    residual: Tensor | None = None,  # [rows, out], overwritten by the result
) -> Tensor:
    """Return x @ weight.T + bias + residual, [rows, out], added in float32 and rounded once."""
    rows, outs = x.shape[0], weight.shape[0]
    tiles = agreeing(weight, bias, add=residual is not None)
    enough = num_sms(x.device) * 3 // 4
    # Choose the largest tile that gives most multiprocessors work and is not mostly empty.
    fitting = (
        tile
        for tile in reversed(tiles)
        if tile.rows <= max(rows, tiles[0].rows)
        and triton.cdiv(rows, tile.rows) * triton.cdiv(outs, tile.outs) >= enough
    )
    return product(x, weight, bias, residual, next(fitting, tiles[0]))
