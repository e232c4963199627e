"""All-reduce over peer-mapped GPU memory: each rank's kernel reads the other ranks' inputs.

Each rank has a region of device memory that all ranks have mapped (NVLink or PCIe):

    signals | program 0: of rank 0, of rank 1, ... | program 1: ...          int64
    calls   | program 0 | program 1 | ... | whether a wait timed out          int64
    slots   | even calls: program 0, program 1, ... | odd calls: program 0, ...

In a call, program p of each rank copies its part of x into its slot, signals to program p of each
other rank, waits for their signals, and reads their slots. Programs with different numbers do not
interact. The ranks make the same calls in the same order. So program p has made the same number of
calls on all ranks. The device counts the calls, so replays of a CUDA graph are counted, too.

With two slots, for even and for odd calls, one wait per call is enough. A rank overwrites the slot
of call k in call k + 2 at the earliest. In call k + 1 it has seen the signals of all ranks. A rank
sends that signal only after its kernel of call k has ended, as kernels of a stream run in order.

One shot: each rank reads the inputs of all ranks, and adds them. Two shots: each rank reduces its
share of the tiles, and the ranks then read each other's shares. With four or more ranks that moves
fewer bytes, for one more wait. Both add in float32 in the order of ranks, round once, and then add
the residual. So all ranks have the same bits, with one shot or two.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.launch.pdl import gdc_launch_dependents, gdc_wait, num_sms, pdl

PROGRAMS = 64  # a power of two; at most the number of multiprocessors, as all must run at once
LARGEST = 16 << 20  # maximum bytes of a message
TILE = 1 << 14  # maximum bytes that a program reads of each rank at once
PATIENCE = 1 << 29  # polls for a signal, of about a microsecond each: minutes


class Region(NamedTuple):
    """The rank, and the layout of every rank's region of peer memory, as one `tl.constexpr`.

    rank, size: this rank and the number of ranks.
    head: bytes before the slots.
    programs: the number of slots for even calls; odd calls have the same number.
    slot: bytes of a slot.
    """

    rank: int
    size: int
    head: int
    programs: int
    slot: int


def region_bytes(size: int) -> int:
    """Return the bytes of each rank's region for `size` ranks. A region begins as zeros."""
    return _head(size, PROGRAMS) + 2 * LARGEST


def _head(size: int, programs: int) -> int:
    """Return the offset of the slots in a region, in bytes."""
    return -(-8 * (programs * (size + 1) + 1) // 256) * 256


@triton.jit
def _region(peers, rank, dtype: tl.constexpr):
    """Return a rank's region as a pointer to elements of `dtype`."""
    return tl.multiple_of(tl.load(peers + rank).to(tl.pointer_type(dtype)), 16)


@triton.jit
def _slot(peers, rank, odd, REGION: tl.constexpr, dtype):
    """Return a pointer to a rank's slot for this program. odd: 1 in odd calls, else 0."""
    at = tl.load(peers + rank) + REGION.head
    at += (odd * REGION.programs + tl.program_id(0)) * REGION.slot
    return tl.multiple_of(at.to(tl.pointer_type(dtype)), 16)


@triton.jit
def _meet(peers, wanted, patience, missing_rank, REGION: tl.constexpr):
    """Signal to this program of all other ranks, and wait for their signals of this call.

    Returns the number of ranks whose signal is missing after `patience` polls. After a timeout
    later calls do not wait.
    """
    RANK: tl.constexpr = REGION.rank
    SIZE: tl.constexpr = REGION.size
    PROGRAMS: tl.constexpr = REGION.programs
    RANKS: tl.constexpr = triton.next_power_of_2(SIZE)
    rank = tl.arange(0, RANKS)
    others = (rank < SIZE) & (rank != RANK)
    place = tl.program_id(0) * SIZE
    theirs = tl.load(peers + rank, mask=others, other=0).to(tl.pointer_type(tl.int64))
    ours = _region(peers, RANK, tl.int64) + place + rank
    gave_up = _region(peers, RANK, tl.int64) + PROGRAMS * (SIZE + 1)
    patience = tl.where(tl.load(gave_up) > 0, 0, patience)
    signal = tl.zeros([RANKS], tl.int64) + wanted
    nothing = tl.zeros([RANKS], tl.int64)
    tl.debug_barrier()  # a few threads send the signals; all threads' writes must precede them
    tl.atomic_xchg(theirs + place + RANK, signal, mask=others, sem="release", scope="sys")
    seen = tl.atomic_add(ours, nothing, mask=others, sem="acquire", scope="sys")
    missing = tl.sum((others & (seen < wanted)).to(tl.int32), axis=0)
    polls = 0
    while (missing > 0) & (polls < patience):
        seen = tl.atomic_add(ours, nothing, mask=others, sem="acquire", scope="sys")
        missing = tl.sum((others & (seen < wanted)).to(tl.int32), axis=0)
        polls += 1
    if missing > 0:
        tl.store(missing_rank, tl.max(tl.where(others & (seen < wanted), rank, 0), axis=0))
        tl.store(gave_up, 1)
    tl.debug_barrier()
    return missing


@triton.jit(do_not_specialize=["patience"])
def _one_shot_kernel(
    x,
    onto,  # x itself, or the residual that the all-reduced x is added to
    weight,
    normed,
    peers,
    missing_rank,
    eps,
    total,
    columns,
    patience,
    REGION: tl.constexpr,  # `Region`
    ADD: tl.constexpr,
    NORM: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """All-reduce in one shot, unit by unit.

    A unit is ROWS rows of x with a norm, else one tile of elements. The rows of a unit are read at
    once: reads one after the other would each wait for the other device.
    """
    SIZE: tl.constexpr = REGION.size
    dtype: tl.constexpr = x.dtype.element_ty
    units = tl.cdiv(total, ROWS * columns)
    rows = tl.arange(0, ROWS)[:, None]
    cols = tl.arange(0, BLOCK)[None, :]
    inside = rows * BLOCK + cols
    if PDL:
        gdc_wait()
    calls = _region(peers, REGION.rank, tl.int64) + REGION.programs * SIZE + tl.program_id(0)
    call = tl.load(calls)
    mine = _slot(peers, REGION.rank, call & 1, REGION, dtype) + inside
    for unit in range(tl.program_id(0), units, tl.num_programs(0)):
        at = (unit * ROWS + rows) * columns + cols
        mask = (cols < columns) & (at < total)
        tl.store(mine, tl.load(x + at, mask=mask), mask=mask)
        mine += ROWS * BLOCK
    missing = _meet(peers, 2 * call + 1, patience, missing_rank, REGION)
    if PDL:
        # Launch dependents only now: where ranks share a device, an earlier launch may take the
        # place of a rank that has not started.
        gdc_launch_dependents()
    read = inside
    for unit in range(tl.program_id(0), units, tl.num_programs(0)):
        at = (unit * ROWS + rows) * columns + cols
        mask = (cols < columns) & (at < total)
        value = tl.zeros([ROWS, BLOCK], tl.float32)
        for rank in tl.static_range(SIZE):
            theirs = _slot(peers, rank, call & 1, REGION, dtype)
            value += tl.load(theirs + read, mask=mask, other=0.0).to(tl.float32)
        value = tl.where(missing == 0, value, float("nan")).to(dtype)
        if ADD:
            before = tl.load(onto + at, mask=mask, other=0.0)
            value = (before.to(tl.float32) + value.to(tl.float32)).to(before.dtype)
        tl.store(onto + at, value, mask=mask)
        if NORM:
            value = value.to(tl.float32)
            rms = tl.sqrt(tl.sum(value * value, axis=1, keep_dims=True) / columns + eps)
            scale = tl.load(weight + cols, mask=cols < columns, other=0.0).to(tl.float32)
            tl.store(normed + at, (value / rms * scale).to(normed.dtype.element_ty), mask=mask)
        read += ROWS * BLOCK
    tl.store(calls, call + 1)


@triton.jit(do_not_specialize=["patience"])
def _two_shot_kernel(
    x,
    onto,
    peers,
    missing_rank,
    total,
    patience,
    REGION: tl.constexpr,  # `Region`
    ADD: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """All-reduce in two shots, unit by unit.

    A unit has one tile for each rank to reduce. A rank writes the sum of its tile over the tile's
    inputs in its own slot, which no other rank reads before the second wait.
    """
    SIZE: tl.constexpr = REGION.size
    dtype: tl.constexpr = x.dtype.element_ty
    units = tl.cdiv(total, SIZE * BLOCK)
    cols = tl.arange(0, BLOCK)
    if PDL:
        gdc_wait()
    calls = _region(peers, REGION.rank, tl.int64) + REGION.programs * SIZE + tl.program_id(0)
    call = tl.load(calls)
    mine = _slot(peers, REGION.rank, call & 1, REGION, dtype) + cols
    write = mine
    for unit in range(tl.program_id(0), units, tl.num_programs(0)):
        for rank in tl.static_range(SIZE):
            at = (unit * SIZE + rank) * BLOCK + cols
            tl.store(write, tl.load(x + at, mask=at < total), mask=at < total)
            write += BLOCK
    missing = _meet(peers, 2 * call + 1, patience, missing_rank, REGION)
    read = cols + REGION.rank * BLOCK
    write = mine + REGION.rank * BLOCK
    for unit in range(tl.program_id(0), units, tl.num_programs(0)):
        at = (unit * SIZE + REGION.rank) * BLOCK + cols
        value = tl.zeros([BLOCK], tl.float32)
        for rank in tl.static_range(SIZE):
            theirs = _slot(peers, rank, call & 1, REGION, dtype)
            value += tl.load(theirs + read, mask=at < total, other=0.0).to(tl.float32)
        tl.store(write, value.to(dtype), mask=at < total)
        read += SIZE * BLOCK
        write += SIZE * BLOCK
    if missing == 0:
        missing = _meet(peers, 2 * call + 2, patience, missing_rank, REGION)
    if PDL:
        gdc_launch_dependents()
    read = cols
    for unit in range(tl.program_id(0), units, tl.num_programs(0)):
        for rank in tl.static_range(SIZE):
            at = (unit * SIZE + rank) * BLOCK + cols
            theirs = _slot(peers, rank, call & 1, REGION, dtype)
            value = tl.load(theirs + read, mask=at < total, other=0.0).to(tl.float32)
            value = tl.where(missing == 0, value, float("nan")).to(dtype)
            if ADD:
                before = tl.load(onto + at, mask=at < total, other=0.0)
                value = (before.to(tl.float32) + value.to(tl.float32)).to(before.dtype)
            tl.store(onto + at, value, mask=at < total)
            read += BLOCK
    tl.store(calls, call + 1)


@triton.jit(do_not_specialize=["patience"])
def _gather_kernel(
    x,
    out,
    peers,
    missing_rank,
    total,
    patience,
    REGION: tl.constexpr,  # `Region`
    FROM: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Copy the inputs x of the first FROM ranks to out [FROM, total]."""
    dtype: tl.constexpr = x.dtype.element_ty
    units = tl.cdiv(total, BLOCK)
    cols = tl.arange(0, BLOCK)
    if PDL:
        gdc_wait()
    calls = _region(peers, REGION.rank, tl.int64) + REGION.programs * REGION.size + tl.program_id(0)
    call = tl.load(calls)
    mine = _slot(peers, REGION.rank, call & 1, REGION, dtype) + cols
    for unit in range(tl.program_id(0), units, tl.num_programs(0)):
        at = unit * BLOCK + cols
        tl.store(mine, tl.load(x + at, mask=at < total), mask=at < total)
        mine += BLOCK
    _meet(peers, 2 * call + 1, patience, missing_rank, REGION)
    if PDL:
        gdc_launch_dependents()
    read = cols
    for unit in range(tl.program_id(0), units, tl.num_programs(0)):
        at = unit * BLOCK + cols
        for rank in tl.static_range(FROM):
            theirs = _slot(peers, rank, call & 1, REGION, dtype)
            value = tl.load(theirs + read, mask=at < total)
            tl.store(out + rank * total + at, value, mask=at < total)
        read += BLOCK
    tl.store(calls, call + 1)


@dataclass(frozen=True, slots=True)
class PeerMemory:
    """The memory regions of a group's ranks as one rank maps them, and collectives over them.

    peers: int64 [size] on the device: the address of each rank's region on this device.
    missing_rank: int32 [1] in pinned host memory: -1, or the rank whose signal timed out. The
        result of an all-reduce that timed out is NaN, that of another collective is undefined.
    patience: polls for a signal before a wait times out.
    holder: the object that keeps the regions alive.
    programs: the maximum number of programs of an all-reduce.
    """

    rank: int
    size: int
    peers: Tensor
    missing_rank: Tensor
    patience: int = PATIENCE
    holder: Any = None
    programs: int = PROGRAMS

    @classmethod
    def over(
        cls, rank: int, addresses: Sequence[int], device: torch.device, holder: Any = None
    ) -> "PeerMemory":
        """Return the PeerMemory of one rank over all ranks' regions.

        addresses: the regions' addresses, in the order of ranks; each has `region_bytes` zeros.
        """
        peers = torch.tensor(addresses, dtype=torch.int64, device=device)
        missing_rank = torch.full((1,), -1, dtype=torch.int32, pin_memory=device.type == "cuda")
        programs = min(PROGRAMS, 1 << (num_sms(device).bit_length() - 1))
        return cls(rank, len(addresses), peers, missing_rank, holder=holder, programs=programs)

    @property
    def slot(self) -> int:
        """The bytes of a program's slot: the maximum that it sends to other ranks in one call."""
        return LARGEST // self.programs // 256 * 256

    def _options(self, device: torch.device) -> dict[str, Any]:
        head = _head(self.size, self.programs)
        return {
            "REGION": Region(self.rank, self.size, head, self.programs, self.slot),
            **pdl(device),
        }

    def one_shot(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """All-reduce x in place, or add the sum to residual in place; return the written tensor.

        x: contiguous, of at most LARGEST bytes. residual: of x's shape.
        """
        block = _block(x, self.programs)
        programs = min(self.programs, triton.cdiv(x.numel(), block))
        onto = x if residual is None else residual
        _one_shot_kernel[(programs,)](
            x, onto, x, x, self.peers, self.missing_rank, 0.0, x.numel(), block, self.patience,
            ADD=residual is not None, NORM=False, ROWS=1, BLOCK=block,
            num_warps=_warps(block, x), **self._options(x.device),
        )  # fmt: skip
        return onto

    def norm_fits(self, x: Tensor) -> bool:
        """Whether x [n, columns] has rows that are short enough for `norm_one_shot`."""
        rows, columns = x.shape
        return rows > 0 and triton.next_power_of_2(columns) * x.itemsize <= self.slot

    def norm_one_shot(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Add the all-reduced x to residual in place; return the RMS norm of residual in new
        memory.

        The bits are those of `one_shot` and `norm.rms_norm`. x: [n, columns], contiguous; more
        than LARGEST bytes take several launches.
        """
        rows, columns = x.shape
        normed, block = torch.empty_like(residual), triton.next_power_of_2(columns)
        most = self.programs * (self.slot // (block * x.itemsize))
        rows_each = triton.next_power_of_2(triton.cdiv(min(rows, most), self.programs))
        rows_each = min(rows_each, max(1, TILE // (block * x.itemsize)))
        for at in range(0, rows, most):
            part = slice(at, at + most)
            total = x[part].numel()
            _one_shot_kernel[(min(self.programs, triton.cdiv(total, rows_each * columns)),)](
                x[part], residual[part], weight, normed[part], self.peers, self.missing_rank, eps,
                total, columns, self.patience, ADD=True, NORM=True, ROWS=rows_each, BLOCK=block,
                num_warps=max(1, min(16, block // 256)), **self._options(x.device),
            )  # fmt: skip
        return normed

    def two_shot(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """All-reduce x in two shots, each rank reducing a share; arguments as in `one_shot`."""
        block = _block(x, self.programs * self.size)
        programs = min(self.programs, triton.cdiv(x.numel(), block * self.size))
        onto = x if residual is None else residual
        _two_shot_kernel[(programs,)](
            x, onto, self.peers, self.missing_rank, x.numel(), self.patience,
            ADD=residual is not None, BLOCK=block,
            num_warps=_warps(block, x), **self._options(x.device),
        )  # fmt: skip
        return onto

    def gather(self, x: Tensor, ranks: int) -> Tensor:
        """Return the x of the first `ranks` ranks, stacked: [ranks, *x.shape].

        x: as in `one_shot`.
        """
        out, block = x.new_empty((ranks, *x.shape)), _block(x, self.programs)
        programs = min(self.programs, triton.cdiv(x.numel(), block))
        _gather_kernel[(programs,)](
            x, out, self.peers, self.missing_rank, x.numel(), self.patience,
            FROM=ranks, BLOCK=block, num_warps=_warps(block, x), **self._options(x.device),
        )  # fmt: skip
        return out


def _block(x: Tensor, among: int) -> int:
    """Return the number of elements of a tile, so that all `among` programs have work."""
    least, most = 512 // x.itemsize, TILE // x.itemsize
    return max(least, min(most, triton.next_power_of_2(triton.cdiv(x.numel(), among))))


def _warps(block: int, x: Tensor) -> int:
    """Return the number of warps with which a thread reads 16 bytes at once."""
    return max(1, min(16, block * x.itemsize // 512))
