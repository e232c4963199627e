"""Format: a format of 4- or 8-bit weights with a scale for each group of inputs. PackedWeight: a
weight of such a format in the layout of GPU kernels.

Checkpoint loaders create packed weights, and kernels are chosen by the format. CPU kernels have
another layout (`kernels.cpu.gemm.blocks`) for the same formats.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from math import gcd
from typing import Literal

import torch
from torch import Tensor

from kernels import fragments

# Inputs in a block of 4-bit codes of `Decoded`. On the CPU also: inputs of x that share a scale.
BLOCK = 32

# The e2m1 value of each code, times 2 plus 12, which makes all of them non-negative integers.
E2M1 = (12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0)

# Compute capabilities of CUDA: the lowest with an instruction that converts e4m3, the lowest for
# which Triton has matmuls of 8-bit integers, and the one for which torch has scaled e4m3 matmuls.
FLOAT8 = (8, 9)
INT8_PRODUCTS = (8, 0)
FLOAT8_PRODUCTS = 9  # the major number of the compute capability

_TILES = 512  # tiles of fragments that are reordered at a time
_SQUARE = 128  # outputs, and inputs, of a block with one scale in matmuls of e4m3

Code = Literal["int", "e4m3"]


def multiplies(code: Code, capability: tuple[int, int]) -> bool:
    """Whether a GPU of this compute capability has matmuls of two operands with 8-bit codes."""
    return capability[0] == FLOAT8_PRODUCTS if code == "e4m3" else capability >= INT8_PRODUCTS


# (codes, scales, offsets) of some rows, in the layout of `PackedWeight.fill`'s argument
Decoded = tuple[Tensor, Tensor, Tensor | None]


@dataclass(frozen=True, slots=True)
class Format:
    """A format of packed weights: scale * (code - zero) + offset.

    bits: size of a code, which is unsigned: 4 or 8.
    group: inputs that share a scale and an offset: 16, or a multiple of 32.
    scale: dtype of scales and offsets.
    zero: the zero point, an integer.
    offset: "add" as above, "shift" for scale * (code + offset), or "none". Only if zero is 0.
    table: the 16 values of 4-bit codes; the CPU's kernels support integers from 0 to 255.
    code: "int", or "e4m3" if 8-bit codes are floats of torch.float8_e4m3fn.
    rows: outputs that share a scale.
    activations: bits of x in matmuls of several tokens. 8: rows of x are quantised, too, each with
        its own scale, if the device has such matmuls. 16: x is not quantised. CPU kernels quantise
        x to 8 bits in any case.
    """

    bits: Literal[4, 8]
    group: int = 32
    scale: torch.dtype = torch.float16
    zero: int = 0
    offset: Literal["none", "add", "shift"] = "none"
    table: tuple[float, ...] = ()
    code: Code = "int"
    rows: int = 1
    activations: Literal[8, 16] = 16

    def __post_init__(self) -> None:
        assert self.group == 16 or self.group % BLOCK == 0
        assert not (self.zero and self.offset != "none")
        assert not self.table or (self.bits == 4 and len(self.table) == 16)
        assert self.code == "int" or (self.bits == 8 and not self.zero and self.offset == "none")

    def rounds(self, capability: tuple[int, int]) -> bool:
        """Whether matmuls quantise rows of x to 8 bits on a GPU of this compute capability."""
        if self.activations != 8 or self.bits != 8 or self.offset != "none":
            return False
        if self.rows != 1 and not (self.code == "e4m3" and self.rows == self.group == _SQUARE):
            return False
        return (self.code == "e4m3" or self.zero == 128) and multiplies(self.code, capability)

    @property
    def rounded_rows(self) -> int:
        """The number of rows of x from which linear layers quantise x to 8 bits, if `rounds`."""
        return 32 if self.rows == 1 else 2

    def rounds_experts(self, capability: tuple[int, int]) -> bool:
        """Whether MoE experts quantise rows of x to 8 bits on such a GPU, for any batch size.

        Otherwise the experts' codes are decoded to 16 bits.
        """
        return self.code == "e4m3" and self.rows == 1 and self.rounds(capability)

    @property
    def chunk(self) -> int:
        """The number of inputs after which the CPU's layout repeats."""
        return max(self.group, BLOCK)

    @property
    def units(self) -> int:
        """The number of groups (at least 1) in a block of 32 inputs, in the CPU's layout."""
        return 2 if self.group == 16 else 1

    @property
    def x_bytes(self) -> int:
        """The bytes of a block of a quantised row of x: 32 codes, their scale, a sum per group.

        A group's sum is the sum of its codes, times -zero as an integer, or times the scale.
        """
        return BLOCK + 4 + 4 * self.units

    def chunk_bytes(self, outputs: int) -> int:
        """Return the bytes of a chunk of a panel with `outputs` outputs: scales, offsets, codes."""
        group_bytes = self.scale.itemsize * (1 if self.offset == "none" else 2)
        return outputs * (self.units * group_bytes + self.chunk * self.bits // 8)

    @property
    def span(self) -> int:
        """The number of inputs after which the GPU's order of 4-bit codes repeats.

        It is a power of two from 16 to 128 that divides the group. Nibble i of 16-bit word j of a
        span is input i * span / 4 + j, so that the same nibble of adjacent words belongs to
        adjacent inputs.
        """
        return gcd(self.group, 128)


def unpacked(form: Format, decoded: Decoded) -> Tensor:
    """Return dequantised weights: float32 [n, in]."""
    codes, scale, offset = decoded
    rows = codes.shape[0]
    if form.rows > 1:
        scale = scale.repeat_interleave(form.rows, 0)[:rows]
    if form.code == "e4m3":
        values = codes.view(torch.float8_e4m3fn).float().view(rows, scale.shape[1], -1)
    else:
        if form.bits == 4:
            codes = _unpaired(codes)
        values = codes.float()
        if form.table:
            values = torch.tensor(form.table, dtype=torch.float32, device=codes.device)[codes.int()]
        values = (values - form.zero).view(rows, scale.shape[1], -1)
    scales = scale.float().unsqueeze(-1)
    if offset is None:
        return (values * scales).view(rows, -1)
    offsets = offset.float().unsqueeze(-1)
    if form.offset == "add":
        return (values * scales + offsets).view(rows, -1)
    return ((values + offsets) * scales).view(rows, -1)


def _unpaired(codes: Tensor) -> Tensor:
    """Unpack the 4-bit codes of `Decoded` to one byte per input: [n, in / 2] -> [n, in]."""
    both = codes.reshape(codes.shape[0], -1, 16)
    return torch.stack((both & 15, both >> 4), 2).view(codes.shape[0], -1)


class PackedWeight:
    """A quantised weight [out, in] of a Format on a GPU, whose rows `fill` writes.

    codes: 4 bits: int16 [out, in / 4], in the order of `Format.span`. 8 bits: [out, in], uint8 for
        e4m3 numbers, or int8 for integers, which are stored minus 128. After `to_fragments`, codes
        and scales have the layout of `kernels.fragments`.
    scale: [ceil(out / form.rows), in / group].
    offset: of scale's shape, or None.
    bias: [out], or None.
    """

    def __init__(
        self, form: Format, outputs: int, width: int, bias: Tensor | None, device: torch.device
    ) -> None:
        assert width % form.group == 0, (form, width)
        self.form, self.shape, self.bias = form, (outputs, width), bias
        self.in_fragments = False
        if form.bits == 4:
            self.codes = torch.empty(outputs, width // 4, dtype=torch.int16, device=device)
        else:
            kind = torch.uint8 if form.code == "e4m3" else torch.int8
            self.codes = torch.empty(outputs, width, dtype=kind, device=device)
        groups = (-(-outputs // form.rows), width // form.group)
        self.scale = torch.empty(groups, dtype=form.scale, device=device)
        self.offset = None if form.offset == "none" else torch.empty_like(self.scale)
        # [16]: the values of 4-bit codes, for a format with a table such as NF4; None for E2M1
        self.table: Tensor | None = None
        if form.table and form.table != E2M1:
            self.table = torch.tensor(form.table, dtype=torch.float32, device=device) - form.zero

    @staticmethod
    def num_bytes(form: Format, outputs: int, width: int) -> int:
        """Return the bytes of a weight [outputs, width] without its bias."""
        group_bytes = form.scale.itemsize * (1 if form.offset == "none" else 2)
        groups = -(-outputs // form.rows) * (width // form.group)
        table = 64 if form.table and form.table != E2M1 else 0
        return outputs * width * form.bits // 8 + groups * group_bytes + table

    def fill(self, first: int, decoded: Decoded) -> None:
        """Write rows from `first` on, a multiple of form.rows. decoded: (codes, scale, offset).

        codes: uint8, [n, in] for 8 bits; [n, in / 2] for 4, where 16 bytes hold 32 inputs: byte j
            has input j in its low half, and input 16 + j in its high half.
        scale, offset: [ceil(n / form.rows), in / group].
        """
        codes, scale, offset = decoded
        form, count = self.form, codes.shape[0]
        target = self.codes[first : first + count]
        if form.bits == 4:
            # [n, spans, nibble, word] -> [n, spans, word], four nibbles per word
            nibbles = _unpaired(codes).view(count, -1, 4, form.span // 4).to(torch.int16)
            words = nibbles[:, :, 0]
            for at in range(1, 4):
                words = words | (nibbles[:, :, at] << (4 * at))
            target.copy_(words.view(count, -1))
        elif form.code == "e4m3":
            target.copy_(codes)
        else:
            target.view(torch.uint8).copy_(codes ^ 128)
        at = first // form.rows
        self.scale[at : at + scale.shape[0]] = scale
        if offset is not None and self.offset is not None:
            self.offset[at : at + scale.shape[0]] = offset

    def fill_all(self, parts: Iterable[Decoded]) -> "PackedWeight":
        at = 0
        for decoded in parts:
            self.fill(at, decoded)
            at += decoded[0].shape[0]
        assert at == self.shape[0], (at, self.shape)
        return self

    def to_fragments(self) -> None:
        """Reorder e2m1 codes in groups of 32 to fragments, after which `fill` cannot be called."""
        codes, scale = self.codes, self.scale
        self.codes = torch.empty(
            self.shape[0] // fragments.ROWS,
            self.shape[1] // fragments.INPUTS,
            fragments.LANES,
            fragments.WORDS,
            dtype=torch.int32,
            device=codes.device,
        )
        for tile in range(0, len(self.codes), _TILES):
            rows = slice(tile * fragments.ROWS, (tile + _TILES) * fragments.ROWS)
            self.codes[tile : tile + _TILES] = fragments.arranged(self._nibbles(codes[rows]))
        self.scale = fragments.arranged_scales(scale)
        self.in_fragments = True

    def _nibbles(self, words: Tensor) -> Tensor:
        """Unpack words, which have the order of `Format.span`, to codes by input: uint8 [n, in]."""
        spans = words.view(len(words), -1, 1, self.form.span // 4)
        shifts = torch.arange(0, 16, 4, dtype=torch.int16, device=words.device)
        return ((spans >> shifts.view(4, 1)) & 15).to(torch.uint8).view(len(words), -1)

    def decoded(self) -> Decoded:
        """Return codes, scales and offsets of all rows in the layout of `fill`'s argument."""
        form = self.form
        if form.bits == 8:
            codes = self.codes.view(torch.uint8)
            return codes if form.code == "e4m3" else codes ^ 128, self.scale, self.offset
        if self.in_fragments:
            nibbles = fragments.restored(self.codes)
            scale = fragments.restored_scales(self.scale)
        else:
            nibbles, scale = self._nibbles(self.codes), self.scale
        both = nibbles.view(self.shape[0], -1, 2, 16)
        return (both[:, :, 0] | (both[:, :, 1] << 4)).flatten(1), scale, self.offset

    def dense(self, dtype: torch.dtype) -> Tensor:
        """Return the dequantised weights [out, in] in this dtype, rounded once."""
        return unpacked(self.form, self.decoded()).to(dtype)
