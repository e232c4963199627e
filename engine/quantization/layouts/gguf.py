"""BlockType: the block types of GGUF files, with a decoder for each.

Layouts follow llama.cpp's ggml-common.h; tests compare them with `gguf.quants`.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.packed import Decoded, Format

_IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
_TABLE = tuple(value + 128 for value in _IQ4)


@dataclass(frozen=True, slots=True)
class BlockType:
    """A type of GGUF blocks.

    width: number of weights in a block.
    num_bytes: bytes of a block.
    halves: byte offsets of the block's float16 numbers.
    decode: decodes uint8 [n, blocks, num_bytes] of n rows to the arguments of `PackedBlocks.fill`.
    """

    width: int
    num_bytes: int
    halves: tuple[int, ...]
    form: Format
    decode: Callable[[Tensor], Decoded]


def _half(raw: Tensor, at: int) -> Tensor:
    """Return the float16 numbers [n, blocks] at byte offset `at` of each block."""
    return raw[..., at : at + 2].contiguous().view(torch.float16).squeeze(-1)


def _shifted(values: Tensor, *shifts: int) -> Tensor:
    """Shift uint8 values [..., k] right by each of the shifts; return [..., shifts, k]."""
    by = torch.tensor(shifts, dtype=torch.uint8, device=values.device).unsqueeze(-1)
    return values.unsqueeze(-2) >> by


def _flat(values: Tensor) -> Tensor:
    """Flatten [n, ...] to [n, -1]."""
    return values.reshape(values.shape[0], -1)


def _paired(codes: Tensor) -> Tensor:
    """Pack 4-bit codes [n, in] two a byte, [n, in / 2], in the order of `PackedBlocks`."""
    both = codes.reshape(codes.shape[0], -1, 2, 16)
    return _flat(both[:, :, 0] | (both[:, :, 1] << 4))


def _nibbles(first: int, offset: bool) -> Callable[[Tensor], Decoded]:
    """Return a decoder for Q4_0 and similar types, whose codes already have Manta's order.

    first: byte offset of the codes in a block.
    offset: whether a block has an offset besides the scale.
    """

    def decode(raw: Tensor) -> Decoded:
        return _flat(raw[..., first:]), _half(raw, 0), _half(raw, 2) if offset else None

    return decode


def _five(first: int, offset: bool) -> Callable[[Tensor], Decoded]:
    def decode(raw: Tensor) -> Decoded:
        low = _shifted(raw[..., first + 4 :], 0, 4) & 15  # [n, blocks, 2, 16]
        high = _shifted(raw[..., first : first + 4], *range(8)) & 1  # [n, blocks, 8 bits, 4 bytes]
        codes = low.flatten(2) | (high.transpose(-1, -2).flatten(2) << 4)
        return _flat(codes), _half(raw, 0), _half(raw, 2) if offset else None

    return decode


def _q8_0(raw: Tensor) -> Decoded:
    return _flat(raw[..., 2:] ^ 128), _half(raw, 0), None


def _six_bits(raw: Tensor) -> tuple[Tensor, Tensor]:
    """Decode bytes [..., 12] of Q4_K and Q5_K to (8 scales, 8 minima), [..., 8] each."""
    low, middle, high = raw.unflatten(-1, (3, 4)).unbind(-2)
    scales = torch.cat((low & 63, (high & 15) | ((low >> 2) & 48)), -1)
    minima = torch.cat((middle & 63, (high >> 4) | ((middle >> 2) & 48)), -1)
    return scales, minima


def _scaled(d: Tensor, by: Tensor) -> Tensor:
    """Multiply float16 d [n, blocks] by integers [n, blocks, groups]; return float32 [n, blocks *
    groups]."""
    return _flat(d.float().unsqueeze(-1) * by.float())


def _q4_k(raw: Tensor) -> Decoded:
    scales, minima = _six_bits(raw[..., 4:16])
    codes = _shifted(raw[..., 16:].unflatten(-1, (4, 32)), 0, 4) & 15
    return _paired(_flat(codes)), _scaled(_half(raw, 0), scales), -_scaled(_half(raw, 2), minima)


def _q5_k(raw: Tensor) -> Decoded:
    scales, minima = _six_bits(raw[..., 4:16])
    low = (_shifted(raw[..., 48:].unflatten(-1, (4, 32)), 0, 4) & 15).flatten(-3, -2)
    high = _shifted(raw[..., 16:48], *range(8)) & 1
    codes = _flat(low | (high << 4))
    return codes, _scaled(_half(raw, 0), scales), -_scaled(_half(raw, 2), minima)


def _q6_k(raw: Tensor) -> Decoded:
    low = _shifted(raw[..., :128].unflatten(-1, (2, 64)), 0, 4) & 15  # [n, blocks, 2, 2, 64]
    high = _shifted(raw[..., 128:192].unflatten(-1, (2, 32)), 0, 2, 4, 6) & 3  # [..., 2, 4, 32]
    codes = low.flatten(2) | (high.flatten(2) << 4)
    scales = raw[..., 192:208].contiguous().view(torch.int8)
    return _flat(codes), _scaled(_half(raw, 208), scales), None


def _q2_k(raw: Tensor) -> Decoded:
    both = raw[..., :16]
    codes = _shifted(raw[..., 16:80].unflatten(-1, (2, 32)), 0, 2, 4, 6) & 3
    scales, minima = _scaled(_half(raw, 80), both & 15), _scaled(_half(raw, 82), both >> 4)
    return _paired(_flat(codes)), scales, -minima


def _q3_k(raw: Tensor) -> Decoded:
    low = _shifted(raw[..., 32:96].unflatten(-1, (2, 32)), 0, 2, 4, 6) & 3
    high = _shifted(raw[..., :32], *range(8)) & 1  # the third bit; if it is 0, four is subtracted
    codes = low.flatten(2) | (high.flatten(2) << 2)
    scales = _shifted(raw[..., 96:104], 0, 4).flatten(2) & 15
    scales = scales | ((_shifted(raw[..., 104:108], 0, 2, 4, 6).flatten(2) & 3) << 4)
    return _paired(_flat(codes)), _scaled(_half(raw, 108), scales.to(torch.int16) - 32), None


def _iq4_xs(raw: Tensor) -> Decoded:
    high = raw[..., 2:4].int()
    high = (high[..., :1] | (high[..., 1:] << 8)) >> torch.arange(0, 16, 2, device=raw.device) & 3
    low = (_shifted(raw[..., 4:8], 0, 4) & 15).transpose(-1, -2).flatten(2)
    scales = (low | (high << 4)) - 32
    return _flat(raw[..., 8:]), _scaled(_half(raw, 0), scales), None


_FLOAT = torch.float32
BLOCK_TYPES: dict[str, BlockType] = {
    "Q4_0": BlockType(32, 18, (0,), Format(4, zero=8), _nibbles(2, False)),
    "Q4_1": BlockType(32, 20, (0, 2), Format(4, offset="add"), _nibbles(4, True)),
    "Q5_0": BlockType(32, 22, (0,), Format(8, zero=16), _five(2, False)),
    "Q5_1": BlockType(32, 24, (0, 2), Format(8, offset="add"), _five(4, True)),
    "Q8_0": BlockType(32, 34, (0,), Format(8, zero=128), _q8_0),
    "Q2_K": BlockType(256, 84, (80, 82), Format(4, 16, _FLOAT, offset="add"), _q2_k),
    "Q3_K": BlockType(256, 110, (108,), Format(4, 16, _FLOAT, zero=4), _q3_k),
    "Q4_K": BlockType(256, 144, (0, 2), Format(4, 32, _FLOAT, offset="add"), _q4_k),
    "Q5_K": BlockType(256, 176, (0, 2), Format(8, 32, _FLOAT, offset="add"), _q5_k),
    "Q6_K": BlockType(256, 210, (208,), Format(8, 16, _FLOAT, zero=32), _q6_k),
    "IQ4_NL": BlockType(32, 18, (0,), Format(4, zero=128, table=_TABLE), _nibbles(2, False)),
    "IQ4_XS": BlockType(256, 136, (0,), Format(4, 32, _FLOAT, zero=128, table=_TABLE), _iq4_xs),
}
